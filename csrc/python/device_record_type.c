/* DeviceRecord: memory of a device that the stash has a copy of (runtime/device_stash.h), as a Python object. The memory itself is its
 * maker's, protrain/runtime/device_stash.py. It holds its Engine; in a forked process the stash's threads are gone, and it is left alone. */
#include "python/engine_methods.h"
#include "runtime/device_stash.h"

typedef struct device_record_object {
  PyObject_HEAD
  PyObject *engine;
  ptn_device_record *record;
  int forks;
} device_record_object;

/* Engine.put(address, bytes, block) */
PyObject *ptn_python_put(PyObject *object, PyObject *arguments) {
  ptn_engine *engine = ptn_python_drive(object);
  unsigned long long address, bytes;
  int block;
  if (!engine || !PyArg_ParseTuple(arguments, "O&O&i", ptn_python_u64, &address, ptn_python_u64, &bytes, &block)) return NULL;
  ptn_device_stash *stash = ptn_engine_device_stash(engine);
  if (!stash) return PyErr_Format(PyExc_ValueError, "this engine computes in ordinary memory: SavedTensors stashes there");
  PyTypeObject *type = (PyTypeObject *)ptn_python_device_record_type(object);
  device_record_object *self = type ? PyObject_New(device_record_object, type) : NULL;
  if (!self) return NULL;
  self->engine = Py_NewRef(object);
  self->record = NULL;
  self->forks = ptn_python_forks;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_device_stash_put(stash, ptn_engine_stream(engine), (const void *)(uintptr_t)address, bytes,
                                                      block, &self->record));
  if (status == PTN_OK) return (PyObject *)self;
  ptn_python_raise();
  Py_DECREF(self);
  return NULL;
}

static void device_record_dealloc(PyObject *object) {
  device_record_object *self = (device_record_object *)object;
  PyTypeObject *type = Py_TYPE(object);
  if (self->record && self->forks == ptn_python_forks) ptn_device_record_drop(self->record);
  Py_DECREF(self->engine);
  PyObject_Free(object);
  Py_DECREF(type);
}

/* NULL with an exception set: its model is not wrapped any more, or this is a forked process. */
static ptn_engine *drive(const device_record_object *self) {
  if (self->forks == ptn_python_forks && ptn_device_record_is_closed(self->record)) {
    ptn_fail(PTN_STEP, "backward needs activations of a model that is not wrapped any more");
    return (ptn_engine *)ptn_python_raise();
  }
  return ptn_python_drive(self->engine);
}

static PyObject *device_record_bring(PyObject *object, PyObject *number) {
  const device_record_object *self = (device_record_object *)object;
  void *address = PyLong_AsVoidPtr(number);
  ptn_engine *engine = PyErr_Occurred() ? NULL : drive(self);
  if (!engine) return NULL;
  ptn_status status;
  PTN_IN_ENGINE(self->engine, status = ptn_device_record_bring(self->record, ptn_engine_stream(engine), address));
  return ptn_python_answer(status);
}

static PyObject *device_record_follow(PyObject *object, PyObject *unused) {
  (void)unused;
  const device_record_object *self = (device_record_object *)object;
  ptn_engine *engine = drive(self);
  if (!engine) return NULL;
  ptn_status status;
  PTN_IN_ENGINE(self->engine, status = ptn_device_record_follow(self->record, ptn_engine_stream(engine)));
  return ptn_python_answer(status);
}

static PyObject *device_record_let_go(PyObject *object, PyObject *unused) {
  (void)unused;
  const device_record_object *self = (device_record_object *)object;
  ptn_engine *engine = drive(self);
  if (!engine) return NULL;
  ptn_status status;
  PTN_IN_ENGINE(self->engine, status = ptn_engine_let_go(engine, self->record));
  return ptn_python_answer(status);
}

static PyObject *device_record_want(PyObject *object, PyObject *wanted) {
  const device_record_object *self = (device_record_object *)object;
  if (self->forks == ptn_python_forks) ptn_device_record_want(self->record, wanted == Py_True);
  Py_RETURN_NONE;
}

static PyObject *device_record_near(PyObject *object, void *unused) {
  (void)unused;
  const device_record_object *self = (device_record_object *)object;
  return PyBool_FromLong(self->forks == ptn_python_forks && ptn_device_record_is_near(self->record));
}

static PyObject *device_record_ended(PyObject *object, void *unused) {
  (void)unused;
  const device_record_object *self = (device_record_object *)object;
  return PyBool_FromLong(self->forks == ptn_python_forks && ptn_device_record_ended(self->record));
}

static PyMethodDef device_record_methods[] = {
    {"bring", device_record_bring, METH_O, "Copies it to this address of the device, behind what the compute stream has so far."},
    {"follow", device_record_follow, METH_NOARGS, "The compute stream comes behind the last bring."},
    {"let_go", device_record_let_go, METH_NOARGS, "Every compute stream comes behind the copies that are under way."},
    {"want", device_record_want, METH_O, "Whether it is going to be asked for."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef device_record_getset[] = {
    {"near", device_record_near, NULL, "Whether bring would not wait.", NULL},
    {"ended", device_record_ended, NULL, "Whether no copy from or to the device's memory is under way.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot device_record_slots[] = {
    {Py_tp_dealloc, (void *)device_record_dealloc},
    {Py_tp_methods, device_record_methods},
    {Py_tp_getset, device_record_getset},
    {Py_tp_doc, "Memory of a device that the stash has a copy of: csrc/runtime/device_stash.h; types in _core.pyi."},
    {0, NULL},
};

PyType_Spec ptn_device_record_spec = {
    .name = "protrain._core.DeviceRecord",
    .basicsize = sizeof(device_record_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = device_record_slots,
};
