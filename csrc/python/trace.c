/* The trace from Python: events of an engine out, events that only Python knows (steps, blocks) in. */
#include <stdlib.h>

#include "base/trace.h"
#include "python/binding.h"

static PyObject *list_of(const ptn_trace_event *events, size_t count) {
  PyObject *list = PyList_New((Py_ssize_t)count);
  for (size_t i = 0; list && i < count; i++) {
    const ptn_trace_event *event = &events[i];
    PyObject *tuple = Py_BuildValue("LLKiii", (long long)event->start_ns, (long long)event->end_ns,
                                    (unsigned long long)event->bytes, (int)event->number, (int)event->lane, (int)event->kind);
    if (!tuple) Py_CLEAR(list);
    else PyList_SetItem(list, (Py_ssize_t)i, tuple);
  }
  return list;
}

PyObject *ptn_python_trace_events(PyObject *module, PyObject *arguments) {
  (void)module;
  PyObject *object;
  long long since_ns;
  if (!PyArg_ParseTuple(arguments, "OL:trace_events", &object, &since_ns)) return NULL;
  ptn_engine *engine = ptn_python_engine(object);
  if (!engine) return NULL;
  ptn_trace *trace = ptn_engine_trace(engine);
  size_t count = ptn_trace_copy(trace, since_ns, NULL, 0);
  if (count == 0) return PyList_New(0);
  ptn_trace_event *events = malloc(count * sizeof *events);
  if (!events) return PyErr_NoMemory();
  count = ptn_trace_copy(trace, since_ns, events, count); /* without what came meanwhile */
  PyObject *list = list_of(events, count);
  free(events);
  return list;
}

#define MOST_EVENTS_COUNT ((size_t)1 << 20) /* 40 MiB: a step that moves some 100 GB */

PyObject *ptn_python_trace_grow(PyObject *module, PyObject *object) {
  (void)module;
  ptn_engine *engine = ptn_python_engine(object);
  return engine ? PyBool_FromLong(ptn_trace_grow(ptn_engine_trace(engine), MOST_EVENTS_COUNT)) : NULL;
}

PyObject *ptn_python_trace_add(PyObject *module, PyObject *arguments) {
  (void)module;
  PyObject *object;
  int lane, kind, number;
  long long start_ns, end_ns;
  if (!PyArg_ParseTuple(arguments, "OiiiLL:trace_add", &object, &lane, &kind, &number, &start_ns, &end_ns)) return NULL;
  ptn_engine *engine = ptn_python_engine(object);
  if (!engine) return NULL;
  if (lane < PTN_LANE_STEP || lane > PTN_LANE_OFFLOAD)
    return PyErr_Format(PyExc_ValueError, "lane %d: a lane of the trace is %d to %d", lane, PTN_LANE_STEP, PTN_LANE_OFFLOAD);
  if (kind < PTN_TRACE_STEP || kind > PTN_TRACE_MEMORY)
    return PyErr_Format(PyExc_ValueError, "kind %d: a kind of the trace is %d to %d", kind, PTN_TRACE_STEP, PTN_TRACE_MEMORY);
  ptn_trace_add(
      ptn_engine_trace(engine),
      (ptn_trace_event){
          .start_ns = start_ns, .end_ns = end_ns, .number = number, .lane = (ptn_trace_lane)lane, .kind = (ptn_trace_kind)kind});
  Py_RETURN_NONE;
}

PyObject *ptn_python_now_ns(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  return PyLong_FromLongLong((long long)ptn_now_ns());
}
