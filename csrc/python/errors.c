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
