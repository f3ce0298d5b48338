/* From a refusal of the arena to the exception that Python sees.
 *
 * torch raises what a C++ exception names as a class called with one string, while protrain's exceptions carry figures. So
 * each refusal gets a class of its own, which holds the error record and whose only use is to be called: what comes out is not
 * an instance of it but the very exception that ptn_torch_raise makes of the record. Python takes the type of a raised
 * exception from the instance. A refusal is rare, a class cheap, and a class may be called any number of times, on any thread.
 */
#include <Python.h>

#include <stdbool.h>
#include <string.h>

#include "torch/allocator.h"

void (*ptn_torch_raise)(ptn_status status);

/* tp_new of the class: the exception instead of an instance. */
static PyObject *make_exception(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  (void)arguments;
  (void)keywords;
  PyObject *bytes = PyObject_GetAttrString((PyObject *)type, "record");
  if (!bytes) return NULL;
  char *data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(bytes, &data, &size) == 0 && size == (Py_ssize_t)sizeof(ptn_error)) {
    memcpy(ptn_last_error(), data, sizeof(ptn_error));
    ptn_torch_raise(ptn_last_error()->code);
  }
  Py_DECREF(bytes);
  PyObject *class, *exception, *traceback;
  PyErr_Fetch(&class, &exception, &traceback);
  PyErr_NormalizeException(&class, &exception, &traceback);
  Py_XDECREF(class);
  Py_XDECREF(traceback);
  if (!exception) PyErr_SetString(PyExc_SystemError, "the allocator's error could not be raised");
  return exception;
}

/* The classes of the last refusals. Nobody else has one before torch has set the error, nor while it is called in that, where another
 * exception is being handled; Python code may run meanwhile, and refusals of other threads come. */
enum { N_CLASSES = 64 };
static PyObject *classes[N_CLASSES];
static unsigned n_made;

static void keep(PyObject *class) {
  PyObject **place = &classes[n_made++ % N_CLASSES], *before = *place;
  *place = class;
  Py_XDECREF(before);
}

void *ptn_torch_exception_class(const ptn_error *error) {
  PyType_Slot slots[] = {{Py_tp_new, (void *)make_exception}, {0, NULL}};
  PyType_Spec spec = {.name = "protrain.refusal", .flags = Py_TPFLAGS_DEFAULT, .slots = slots};
  PyObject *bases = PyTuple_Pack(1, PyExc_BaseException);
  PyObject *class = bases ? PyType_FromSpecWithBases(&spec, bases) : NULL;
  PyObject *record = PyBytes_FromStringAndSize((const char *)error, (Py_ssize_t)sizeof *error);
  bool made = class && record && PyObject_SetAttrString(class, "record", record) == 0;
  Py_XDECREF(bases);
  Py_XDECREF(record);
  if (!made) {
    Py_XDECREF(class);
    PyErr_Clear();
    return PyExc_MemoryError; /* no memory even for a class; torch adds the message */
  }
  keep(class);
  return class;
}
