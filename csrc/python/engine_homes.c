/* Engine's methods about homes: where chunks lie, slots and the ring, and the values of single parameters. */
#include "python/engine_methods.h"

/* What the engine does with a chunk, whose number is the one argument. */
static PyObject *with_chunk(PyObject *object, PyObject *arguments, ptn_status (*call)(ptn_engine *, uint32_t)) {
  PTN_ENGINE_TO_DRIVE;
  unsigned int chunk;
  if (!PyArg_ParseTuple(arguments, "O&", ptn_python_u32, &chunk) || !ptn_python_has_chunk(engine, chunk)) return NULL;
  ptn_status status;
  PTN_IN_ENGINE(object, status = call(engine, chunk));
  return ptn_python_answer(status);
}

PyObject *ptn_python_in_memory(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_ASK;
  unsigned int chunk;
  if (!PyArg_ParseTuple(arguments, "O&", ptn_python_u32, &chunk) || !ptn_python_has_chunk(engine, chunk)) return NULL;
  return PyBool_FromLong(ptn_engine_in_memory(engine, chunk));
}

PyObject *ptn_python_to_memory(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  unsigned int chunk;
  int with_state;
  if (!PyArg_ParseTuple(arguments, "O&p", ptn_python_u32, &chunk, &with_state) || !ptn_python_has_chunk(engine, chunk))
    return NULL;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_engine_to_memory(engine, chunk, with_state != 0));
  return ptn_python_answer(status);
}

PyObject *ptn_python_to_disk(PyObject *object, PyObject *arguments) { return with_chunk(object, arguments, ptn_engine_to_disk); }

PyObject *ptn_python_set_slots(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  PyObject *of_chunk, *bytes;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &of_chunk, &PyList_Type, &bytes)) return NULL;
  Py_ssize_t n_slots, n_chunks = PyList_Size(of_chunk);
  uint64_t *slot_bytes = ptn_python_integers(bytes, &n_slots);
  if (!slot_bytes) return NULL;
  int32_t *slots = PyMem_Malloc((size_t)(n_chunks + 1) * sizeof *slots);
  if (!slots) {
    PyMem_Free(slot_bytes);
    return PyErr_NoMemory();
  }
  for (Py_ssize_t i = 0; i < n_chunks; i++) {
    long slot = PyLong_AsLong(PyList_GetItem(of_chunk, i));
    slots[i] = slot > INT32_MAX ? INT32_MAX : slot < 0 ? -1 : (int32_t)slot; /* the largest is no slot either */
  }
  PyObject *result = NULL;
  if (PyErr_Occurred()) {
  } else if ((size_t)n_chunks != ptn_engine_chunks_count(engine)) {
    PyErr_Format(PyExc_ValueError, "slots of %zd chunks: give one for each of %u, -1 where there is none", n_chunks,
                 ptn_engine_chunks_count(engine));
  } else {
    ptn_status status;
    PTN_IN_ENGINE(object, status = ptn_engine_set_slots(engine, slots, slot_bytes, (uint32_t)n_slots));
    result = ptn_python_answer(status);
  }
  PyMem_Free(slots);
  PyMem_Free(slot_bytes);
  return result;
}

PyObject *ptn_python_drop_slots(PyObject *object, PyObject *unused) {
  PTN_ENGINE_TO_DRIVE;
  (void)unused;
  PTN_IN_ENGINE(object, ptn_engine_drop_slots(engine));
  Py_RETURN_NONE;
}

PyObject *ptn_python_own_slot(PyObject *object, PyObject *arguments) {
  return with_chunk(object, arguments, ptn_engine_own_slot);
}

PyObject *ptn_python_set_ring(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  unsigned long long piece_bytes;
  unsigned int n_pieces;
  if (!PyArg_ParseTuple(arguments, "O&O&", ptn_python_u64, &piece_bytes, ptn_python_u32, &n_pieces)) return NULL;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_engine_set_ring(engine, piece_bytes, n_pieces));
  return ptn_python_answer(status);
}

PyObject *ptn_python_drop_ring(PyObject *object, PyObject *unused) {
  PTN_ENGINE_TO_DRIVE;
  (void)unused;
  PTN_IN_ENGINE(object, ptn_engine_drop_ring(engine));
  Py_RETURN_NONE;
}

PyObject *ptn_python_set_pending(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  unsigned long long bytes;
  if (!PyArg_ParseTuple(arguments, "O&", ptn_python_u64, &bytes)) return NULL;
  ptn_engine_set_pending(engine, bytes);
  Py_RETURN_NONE;
}

PyObject *ptn_python_region_of(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_ASK;
  unsigned int chunk;
  if (!PyArg_ParseTuple(arguments, "O&", ptn_python_u32, &chunk) || !ptn_python_has_chunk(engine, chunk)) return NULL;
  ptn_module_state *state = PyType_GetModuleState(Py_TYPE(object));
  return ptn_python_region(state->region_type, ptn_engine_region(engine, chunk));
}

/* Of values that are read or written: who reads them, for a checkpoint beside a step, does not drive that, and its stream is none
 * of the step's. */
static ptn_engine *engine_of_values(PyObject *object, int write) {
  if (write) return ptn_python_drive(object);
  return ptn_python_drives(object) ? ptn_python_behind_stream(object) : ptn_python_engine(object);
}

PyObject *ptn_python_transfer(PyObject *object, PyObject *arguments) {
  unsigned int param, array;
  unsigned long long address;
  int write;
  if (!PyArg_ParseTuple(arguments, "O&O&O&p", ptn_python_u32, &param, ptn_python_u32, &array, ptn_python_u64, &address, &write))
    return NULL;
  ptn_engine *engine = engine_of_values(object, write);
  if (!engine || !ptn_python_has_param(engine, param)) return NULL;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_engine_transfer(engine, param, array, (void *)(uintptr_t)address, write != 0));
  return ptn_python_answer(status);
}

PyObject *ptn_python_transfer_part(PyObject *object, PyObject *arguments) {
  unsigned int param, array;
  unsigned long long first, count, address;
  int write;
  if (!PyArg_ParseTuple(arguments, "O&O&O&O&O&p", ptn_python_u32, &param, ptn_python_u32, &array, ptn_python_u64, &first,
                        ptn_python_u64, &count, ptn_python_u64, &address, &write))
    return NULL;
  ptn_engine *engine = engine_of_values(object, write);
  if (!engine || !ptn_python_has_param(engine, param)) return NULL;
  ptn_status status;
  PTN_IN_ENGINE(object,
                status = ptn_engine_transfer_part(engine, param, array, first, count, (void *)(uintptr_t)address, write != 0));
  return ptn_python_answer(status);
}

PyObject *ptn_python_begin_fill(PyObject *object, PyObject *arguments) {
  return with_chunk(object, arguments, ptn_engine_begin_fill);
}

PyObject *ptn_python_end_fill(PyObject *object, PyObject *arguments) {
  return with_chunk(object, arguments, ptn_engine_end_fill);
}

PyObject *ptn_python_steps(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_ASK;
  unsigned int param;
  if (!PyArg_ParseTuple(arguments, "O&", ptn_python_u32, &param) || !ptn_python_has_param(engine, param)) return NULL;
  return PyLong_FromUnsignedLongLong(ptn_engine_steps(engine, param));
}

PyObject *ptn_python_set_steps(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  unsigned int param;
  unsigned long long steps;
  if (!PyArg_ParseTuple(arguments, "O&O&", ptn_python_u32, &param, ptn_python_u64, &steps) ||
      !ptn_python_has_param(engine, param))
    return NULL;
  ptn_engine_set_steps(engine, param, steps);
  Py_RETURN_NONE;
}
