/* Integers from Python, which has them of any size and sign: what the core's would not hold is an exception, not another number. */
#include "python/binding.h"

static int read_number(PyObject *object, unsigned long long most, unsigned long long *out) {
  PyObject *index = PyNumber_Index(object);
  if (!index) return 0;
  unsigned long long number = PyLong_AsUnsignedLongLong(index);
  bool failed = PyErr_Occurred() != NULL;
  if (failed || number > most) PyErr_Format(PyExc_OverflowError, "%R is out of range: give 0 to %llu", object, most);
  Py_DECREF(index);
  *out = number;
  return !failed && number <= most;
}

int ptn_python_u32(PyObject *object, void *out) {
  unsigned long long number;
  if (!read_number(object, UINT32_MAX, &number)) return 0;
  *(unsigned int *)out = (unsigned int)number;
  return 1;
}

int ptn_python_u64(PyObject *object, void *out) {
  unsigned long long number;
  if (!read_number(object, UINT64_MAX, &number)) return 0;
  *(unsigned long long *)out = number;
  return 1;
}

static bool has(const char *what, uint32_t number, uint32_t count) {
  if (number < count) return true;
  PyErr_Format(PyExc_ValueError, "%s %u: this engine has %u of them, from 0 on", what, number, count);
  return false;
}

bool ptn_python_has_chunk(const ptn_engine *engine, uint32_t chunk) {
  return has("chunk", chunk, ptn_engine_chunks_count(engine));
}

bool ptn_python_has_param(const ptn_engine *engine, uint32_t param) {
  return has("parameter", param, ptn_engine_params_count(engine));
}

uint64_t *ptn_python_integers(PyObject *list, Py_ssize_t *count) {
  Py_ssize_t n = PySequence_Size(list);
  if (n < 0) return NULL;
  uint64_t *values = PyMem_Malloc((size_t)(n + 1) * sizeof *values);
  if (!values) return (uint64_t *)(void *)PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *item = PySequence_GetItem(list, i);
    values[i] = item ? PyLong_AsUnsignedLongLong(item) : 0;
    Py_XDECREF(item);
    if (PyErr_Occurred()) {
      PyMem_Free(values);
      return NULL;
    }
  }
  *count = n;
  return values;
}
