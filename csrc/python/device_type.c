/* Device: what computes, as a Python object. Tensors over a device's memory may outlive every object and every engine, and giving that
 * memory back needs the device: so a device, once opened, is there as long as the process, and opening it again gives the same one. */
#include <string.h>

#include "profile/link.h"
#include "python/binding.h"

#define DEVICES_MAX 64

typedef struct opened {
  ptn_device *device;
  int number; /* of the GPU; -1: the host */
  char *library;
} opened;

static opened all[DEVICES_MAX]; /* guarded by the GIL */
static int all_count;

typedef struct device_object {
  PyObject_HEAD
  ptn_device *device;
  int number, forks;
} device_object;

static char *copy_of(const char *text) {
  char *copy = PyMem_Malloc(strlen(text) + 1);
  return copy ? strcpy(copy, text) : NULL;
}

static ptn_device *find(int number, const char *library) {
  for (int i = 0; i < all_count; i++)
    if (all[i].number == number && strcmp(all[i].library, library) == 0) return all[i].device;
  return NULL;
}

/* NULL with an exception set. */
static ptn_device *open_device(int number, const char *library) {
  ptn_device *device = find(number, library);
  if (device) return device;
  if (all_count == DEVICES_MAX) {
    PyErr_Format(PyExc_ValueError, "%d devices were opened, the most that are possible", DEVICES_MAX);
    return NULL;
  }
  char *kept = copy_of(library);
  if (!kept) return (ptn_device *)PyErr_NoMemory();
  /* With the GIL: who asks meanwhile waits, and gets this one. */
  ptn_status status =
      number < 0 ? ptn_device_open_host(&device) : ptn_device_open_cuda(&device, number, library[0] ? library : NULL);
  if (status != PTN_OK) {
    PyMem_Free(kept);
    return (ptn_device *)ptn_python_raise();
  }
  all[all_count++] = (opened){device, number, kept};
  return device;
}

static PyObject *device_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"number", "library", NULL};
  int number;
  const char *library = "";
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "i|s", names, &number, &library)) return NULL;
  ptn_device *device = open_device(number, library);
  device_object *self = device ? PyObject_New(device_object, type) : NULL;
  if (!self) return NULL;
  self->device = device;
  self->number = number;
  self->forks = ptn_python_forks;
  return (PyObject *)self;
}

static void device_dealloc(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
}

ptn_device *ptn_python_device(PyObject *object, int *number) {
  if (PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) != (void *)device_dealloc) { /* the type cannot be subclassed */
    PyErr_SetString(PyExc_TypeError, "a Device is wanted");
    return NULL;
  }
  const device_object *self = (device_object *)object;
  if (self->forks != ptn_python_forks) {
    PyErr_SetString(PyExc_RuntimeError, "a device cannot be used in a forked process");
    return NULL;
  }
  if (number) *number = self->number;
  return self->device;
}

static PyObject *device_name(PyObject *object, void *unused) {
  (void)unused;
  return PyUnicode_FromString(((device_object *)object)->device->kind->name);
}

static PyObject *device_measure_link(PyObject *object, PyObject *arguments) {
  unsigned long long piece_bytes;
  unsigned int count;
  ptn_device *device = ptn_python_device(object, NULL);
  if (!device || !PyArg_ParseTuple(arguments, "O&O&", ptn_python_u64, &piece_bytes, ptn_python_u32, &count)) return NULL;
  ptn_link_speed speed;
  ptn_status status;
  PTN_WITHOUT_GIL(status, ptn_link_measure(device, piece_bytes, count, &speed));
  if (status != PTN_OK) return ptn_python_raise();
  return Py_BuildValue("(ddd)", speed.upload_bytes_per_s, speed.offload_bytes_per_s, speed.overlap);
}

static PyMethodDef device_methods[] = {
    {"measure_link", device_measure_link, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef device_getset[] = {
    {"name", device_name, NULL, "\"host\" or \"cuda\".", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_new, (void *)device_new},
    {Py_tp_dealloc, (void *)device_dealloc},
    {Py_tp_methods, device_methods},
    {Py_tp_getset, device_getset},
    {Py_tp_doc, "What computes: csrc/device/device.h; types in _core.pyi."},
    {0, NULL},
};

PyType_Spec ptn_device_spec = {
    .name = "protrain._core.Device",
    .basicsize = sizeof(device_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = device_slots,
};
