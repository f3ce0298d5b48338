/* From an error record to the exception classes of protrain.errors. */
#include <string.h>

#include "python/binding.h"

/* It is cut where the record ends, and names folders, whose names may be no text. */
static PyObject *readable(const char *text) { return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace"); }

PyObject *ptn_python_raise(void) {
  const ptn_error *error = ptn_last_error();
  PyObject *errors = PyImport_ImportModule("protrain.errors");
  if (!errors) return NULL;
  /* "N" takes the reference; where it is NULL its exception is raised. */
  PyObject *exception = PyObject_CallMethod(errors, "from_record", "iNiNKKKK", (int)error->code, readable(error->message),
                                            error->sys_errno, PyUnicode_DecodeFSDefault(error->path),
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
