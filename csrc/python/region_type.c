/* Region: memory of the engine as a Python buffer, so that torch.frombuffer makes tensors over it without a copy. That of a
 * device is none: Python would touch it. */
#include "python/binding.h"

typedef struct region_object {
  PyObject_HEAD
  ptn_region *region;
} region_object;

PyObject *ptn_python_region(PyObject *region_type, ptn_region *region) {
  if (!region) Py_RETURN_NONE;
  region_object *self = PyObject_New(region_object, (PyTypeObject *)region_type);
  if (!self) return NULL;
  self->region = ptn_region_acquire(region);
  return (PyObject *)self;
}

static void region_dealloc(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  ptn_region_release(((region_object *)object)->region);
  PyObject_Free(object);
  Py_DECREF(type);
}

static int region_getbuffer(PyObject *object, Py_buffer *view, int flags) {
  const ptn_region *region = ((region_object *)object)->region;
  if (region->device) {
    PyErr_SetString(PyExc_BufferError, "this memory is a device's, which is no buffer: Engine.base makes a tensor over it");
    return -1;
  }
  return PyBuffer_FillInfo(view, object, region->memory, (Py_ssize_t)region->bytes, 0, flags);
}

static PyObject *region_address(PyObject *object, void *unused) {
  (void)unused;
  return PyLong_FromVoidPtr(((region_object *)object)->region->memory);
}

static PyObject *region_bytes(PyObject *object, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(((region_object *)object)->region->bytes);
}

static PyGetSetDef region_getset[] = {
    {"address", region_address, NULL, "First byte of the memory.", NULL},
    {"bytes", region_bytes, NULL, "Size of the memory.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot region_slots[] = {
    {Py_tp_dealloc, (void *)region_dealloc},
    {Py_bf_getbuffer, (void *)region_getbuffer},
    {Py_tp_getset, region_getset},
    {Py_tp_doc, "Memory of a chunk or a slot; a writable buffer."},
    {0, NULL},
};

PyType_Spec ptn_region_spec = {
    .name = "protrain._core.Region",
    .basicsize = sizeof(region_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = region_slots,
};
