/* Methods of Engine for updates that Python computes: staged values, and extents for state of any shape (runtime/staging.c). */
#include "python/engine_methods.h"

PyObject *ptn_python_stage(PyObject *object, PyObject *arguments) {
  ptn_engine *engine = ptn_python_engine(object);
  unsigned int param;
  unsigned long long address;
  if (!engine || !PyArg_ParseTuple(arguments, "O&O&", ptn_python_u32, &param, ptn_python_u64, &address) ||
      !ptn_python_has_param(engine, param))
    return NULL;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_engine_stage(engine, param, (const float *)(uintptr_t)address));
  return ptn_python_answer(status);
}

PyObject *ptn_python_stage_rest(PyObject *object, PyObject *unused) {
  (void)unused;
  ptn_engine *engine = ptn_python_engine(object);
  if (!engine) return NULL;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_engine_stage_rest(engine));
  return ptn_python_answer(status);
}

PyObject *ptn_python_reserve(PyObject *object, PyObject *number) {
  ptn_engine *engine = ptn_python_engine(object);
  if (!engine) return NULL;
  unsigned long long bytes = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred()) return NULL;
  ptn_extent extent;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_engine_reserve(engine, bytes, &extent));
  if (status != PTN_OK) return ptn_python_raise();
  return Py_BuildValue("KK", (unsigned long long)extent.offset, (unsigned long long)extent.bytes);
}

PyObject *ptn_python_release(PyObject *object, PyObject *arguments) {
  ptn_engine *engine = ptn_python_engine(object);
  unsigned long long offset, bytes;
  if (!engine || !PyArg_ParseTuple(arguments, "O&O&", ptn_python_u64, &offset, ptn_python_u64, &bytes)) return NULL;
  ptn_extent extent = {.offset = offset, .bytes = bytes};
  PTN_IN_ENGINE(object, ptn_engine_release(engine, &extent)); /* the file may be growing meanwhile */
  Py_RETURN_NONE;
}

PyObject *ptn_python_move(PyObject *object, PyObject *arguments) {
  ptn_engine *engine = ptn_python_engine(object);
  unsigned long long offset, address, bytes;
  int write;
  if (!engine ||
      !PyArg_ParseTuple(arguments, "O&O&O&p", ptn_python_u64, &offset, ptn_python_u64, &address, ptn_python_u64, &bytes, &write))
    return NULL;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_engine_move(engine, offset, (void *)(uintptr_t)address, bytes, write != 0));
  return ptn_python_answer(status);
}
