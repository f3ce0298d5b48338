/* Engine's methods of a step: chunks that are demanded, gradients that arrive, updates, and the step itself. */
#include "python/engine_methods.h"

/* ---- residency ---- */

PyObject *ptn_python_set_order(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  PyObject *list;
  if (!PyArg_ParseTuple(arguments, "O!", &PyList_Type, &list)) return NULL;
  Py_ssize_t count;
  uint64_t *values = ptn_python_integers(list, &count);
  if (!values) return NULL;
  uint32_t *accesses = PyMem_Malloc((size_t)(count + 1) * sizeof *accesses);
  for (Py_ssize_t i = 0; accesses && i < count; i++) accesses[i] = values[i] < UINT32_MAX ? (uint32_t)values[i] : UINT32_MAX;
  PyObject *result = accesses ? ptn_python_answer(ptn_engine_set_order(engine, accesses, (uint32_t)count)) : PyErr_NoMemory();
  PyMem_Free(accesses);
  PyMem_Free(values);
  return result;
}

PyObject *ptn_python_seek(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  unsigned int moment;
  if (!PyArg_ParseTuple(arguments, "O&", ptn_python_u32, &moment)) return NULL;
  PTN_IN_ENGINE(object, ptn_engine_seek(engine, moment));
  Py_RETURN_NONE;
}

PyObject *ptn_python_demand(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  unsigned int chunk;
  if (!PyArg_ParseTuple(arguments, "O&", ptn_python_u32, &chunk) || !ptn_python_has_chunk(engine, chunk)) return NULL;
  ptn_status status;
  bool conflict;
  PTN_IN_ENGINE(object, status = ptn_engine_demand(engine, chunk, &conflict));
  if (status != PTN_OK) return ptn_python_raise();
  return PyBool_FromLong(!conflict);
}

PyObject *ptn_python_unuse(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  unsigned int chunk;
  if (!PyArg_ParseTuple(arguments, "O&", ptn_python_u32, &chunk) || !ptn_python_has_chunk(engine, chunk)) return NULL;
  ptn_engine_unuse(engine, chunk);
  Py_RETURN_NONE;
}

PyObject *ptn_python_unuse_all(PyObject *object, PyObject *unused) {
  PTN_ENGINE_TO_DRIVE;
  (void)unused;
  ptn_engine_unuse_all(engine);
  Py_RETURN_NONE;
}

/* ---- gradients and updates ---- */

PyObject *ptn_python_set_hyper(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  unsigned int group;
  PyObject *tuple;
  ptn_hyper hyper;
  if (!PyArg_ParseTuple(arguments, "O&O!", ptn_python_u32, &group, &PyTuple_Type, &tuple) || !ptn_python_hyper(tuple, &hyper))
    return NULL;
  return ptn_python_answer(ptn_engine_set_hyper(engine, group, &hyper));
}

PyObject *ptn_python_gradient(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  unsigned int param;
  unsigned long long address;
  PyObject *owner;
  int use;
  if (!PyArg_ParseTuple(arguments, "O&O&Oi", ptn_python_u32, &param, ptn_python_u64, &address, &owner, &use) ||
      !ptn_python_has_param(engine, param))
    return NULL;
  if (use < PTN_GRADIENT_UPDATE || use > PTN_GRADIENT_SPILL_TOTAL)
    return PyErr_Format(PyExc_ValueError, "use %d: that of a gradient is %d to %d", use, PTN_GRADIENT_UPDATE,
                        PTN_GRADIENT_SPILL_TOTAL);
  Py_INCREF(owner);
  ptn_status status;
  PTN_IN_ENGINE(object,
                status = ptn_engine_gradient(engine, param, (const void *)(uintptr_t)address, owner, (ptn_gradient_use)use));
  if (status != PTN_OK) Py_DECREF(owner);
  return ptn_python_answer(status);
}

PyObject *ptn_python_spilled(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  unsigned int param;
  unsigned long long address;
  if (!PyArg_ParseTuple(arguments, "O&O&", ptn_python_u32, &param, ptn_python_u64, &address) ||
      !ptn_python_has_param(engine, param))
    return NULL;
  ptn_status status;
  bool found;
  PTN_IN_ENGINE(object, status = ptn_engine_spilled(engine, param, (void *)(uintptr_t)address, &found));
  if (status != PTN_OK) return ptn_python_raise();
  return PyBool_FromLong(found);
}

PyObject *ptn_python_read_ahead(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  int on;
  if (!PyArg_ParseTuple(arguments, "p", &on)) return NULL;
  ptn_engine_read_ahead(engine, on != 0);
  Py_RETURN_NONE;
}

PyObject *ptn_python_yield_states(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  int on;
  if (!PyArg_ParseTuple(arguments, "p", &on)) return NULL;
  ptn_engine_yield(engine, on != 0);
  Py_RETURN_NONE;
}

PyObject *ptn_python_flush(PyObject *object, PyObject *unused) {
  PTN_ENGINE_TO_DRIVE;
  (void)unused;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_engine_flush(engine));
  return ptn_python_answer(status);
}

PyObject *ptn_python_update_spilled(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  double grad_scale;
  if (!PyArg_ParseTuple(arguments, "d", &grad_scale)) return NULL;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_engine_update_spilled(engine, (float)grad_scale));
  return ptn_python_answer(status);
}

PyObject *ptn_python_wait(PyObject *object, PyObject *unused) {
  PTN_ENGINE_TO_DRIVE;
  (void)unused;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_engine_wait(engine));
  return ptn_python_answer(status);
}

/* A list of (parameter, address of its gradient); false with an exception set where it is another thing. */
static bool read_updates(const ptn_engine *engine, PyObject *list, ptn_memory_update *updates, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; i++) {
    unsigned long long address;
    PyObject *pair = PyList_GetItem(list, i); /* borrowed */
    if (!pair || !PyArg_ParseTuple(pair, "O&O&", ptn_python_u32, &updates[i].param, ptn_python_u64, &address)) return false;
    if (!ptn_python_has_param(engine, updates[i].param)) return false;
    updates[i].grad = (const void *)(uintptr_t)address;
  }
  return true;
}

/* A list of (function, its arguments, a dict of those by name). The functions are C's, so no handler of a signal, which Python runs
 * between two of its own instructions, comes between two of them. */
static bool run_calls(PyObject *list) {
  Py_ssize_t count = list ? PyList_Size(list) : 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *function, *arguments, *named, *call = PyList_GetItem(list, i); /* borrowed */
    if (!call || !PyArg_ParseTuple(call, "OO!O!", &function, &PyTuple_Type, &arguments, &PyDict_Type, &named)) return false;
    PyObject *made = PyObject_Call(function, arguments, named);
    if (!made) return false;
    Py_DECREF(made);
  }
  return true;
}

PyObject *ptn_python_make_step(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  PyObject *list, *calls = NULL;
  double grad_scale;
  if (!PyArg_ParseTuple(arguments, "O!d|O!", &PyList_Type, &list, &grad_scale, &PyList_Type, &calls)) return NULL;
  Py_ssize_t count = PyList_Size(list);
  ptn_memory_update *updates = PyMem_Malloc((size_t)(count + 1) * sizeof *updates);
  if (!updates) return PyErr_NoMemory();
  PyObject *result = NULL;
  /* A call may close the engine. */
  if (read_updates(engine, list, updates, count) && run_calls(calls) && (engine = ptn_python_engine(object))) {
    ptn_status status;
    PTN_IN_ENGINE(object, status = ptn_engine_make_step(engine, updates, (size_t)count, (float)grad_scale));
    result = ptn_python_answer(status);
  }
  PyMem_Free(updates);
  return result;
}

PyObject *ptn_python_commits(PyObject *object, PyObject *unused) {
  PTN_ENGINE_TO_ASK;
  (void)unused;
  return PyLong_FromUnsignedLongLong(ptn_engine_commits_count(engine));
}

PyObject *ptn_python_drop(PyObject *object, PyObject *unused) {
  PTN_ENGINE_TO_DRIVE;
  (void)unused;
  PTN_IN_ENGINE(object, ptn_engine_drop(engine));
  Py_RETURN_NONE;
}

PyObject *ptn_python_has_gradients(PyObject *object, PyObject *unused) {
  PTN_ENGINE_TO_ASK;
  (void)unused;
  return PyBool_FromLong(ptn_engine_has_gradients(engine));
}
