/* From an error record to the exception classes of protrain.errors. */
#include "python/binding.h"

PyObject *ptn_python_raise(void) {
  const ptn_error *error = ptn_last_error();
  PyObject *errors = PyImport_ImportModule("protrain.errors");
  if (!errors) return NULL;
  PyObject *exception =
      PyObject_CallMethod(errors, "from_record", "isisKKKK", (int)error->code, error->message, error->sys_errno, error->path,
                          (unsigned long long)error->asked_bytes, (unsigned long long)error->needed_bytes,
                          (unsigned long long)error->budget_bytes, (unsigned long long)error->smallest_bytes);
  Py_DECREF(errors);
  if (!exception) return NULL;
  PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
  Py_DECREF(exception);
  return NULL;
}

PyObject *ptn_python_answer(ptn_status status) {
  if (status != PTN_OK) return ptn_python_raise();
  Py_RETURN_NONE;
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
