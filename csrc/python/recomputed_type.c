/* SavedOrder: the saved-tensor hooks of one forward of a block that is recomputed, and Recomputed: what they give autograd.
 *
 * Problem: a block of a large model saves some thirty tensors, each of which passes these hooks three times: when forward saves it,
 * when the recomputation brings it back, and when backward asks for it. On a GPU the thread that orders all this has less than a
 * millisecond for the block.
 *
 * Design: forward notes only the place of a tensor in the order in which tensors are saved, with its shape and type, and its
 * version counter (saved_type.c says why). The first that backward asks for makes the frame (activations.py) run the forward
 * again, inside of pack_again, which brings tensors back by their place, those that autograd still has a use for. A parameter on disk
 * is passed through, both times; but where it is the first that backward asks for, the block is recomputed before it comes: what an
 * operation makes of it (a frozen layer at the end of a block makes a gradient of nothing else) would be held beside the recomputation.
 *
 * Autograd holds Recomputed objects, each of these the frame, which holds the order; the order knows the frame and the Recomputed by weak
 * references, so a graph that is dropped leaves nothing. What else may hold a frame is Python's, such as a traceback that a module keeps:
 * its collector sees through an order, which has the session behind its hooks. All of this happens with the GIL.
 */
#include <string.h>

#include "python/saved.h"

#include <structmember.h> /* wants Python.h before it */

typedef struct order_object {
  PyObject_HEAD
  PyObject *hooks; /* SavedTensors: of now */
  PyObject *frame; /* a weak reference */
  PyObject *saved; /* a list of weak references to Recomputed */
  PyObject *stop;  /* an exception's class: ends a recomputation that has brought all back; None: it runs to its end */
  PyObject *recomputed_type;
  Py_ssize_t place; /* of what the recomputation saves next */
  char over;        /* a recomputation has brought back what there was */
  char stopped;     /* the one under way has raised `stop` */
} order_object;

typedef struct recomputed_object {
  PyObject_HEAD
  PyObject *weak; /* weak references to it */
  PyObject *frame;
  PyObject *shape, *dtype;
  ptn_counter *counter; /* of what forward saved */
  PyObject *tensor; /* NULL: it was not brought back */
  uint32_t version, brought_version;
  bool counted; /* what was brought back has a version, which a backward of others may change */
} recomputed_object;

/* ---- Recomputed ---- */

static void recomputed_dealloc(PyObject *object) {
  recomputed_object *self = (recomputed_object *)object;
  PyTypeObject *type = Py_TYPE(object);
  if (self->weak) PyObject_ClearWeakRefs(object);
  ptn_counter_drop(self->counter);
  PyObject *const held[] = {self->frame, self->shape, self->dtype, self->tensor};
  for (size_t i = 0; i < sizeof held / sizeof *held; i++) Py_XDECREF(held[i]);
  PyObject_Free(object);
  Py_DECREF(type);
}

static PyMemberDef recomputed_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(recomputed_object, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot recomputed_slots[] = {
    {Py_tp_dealloc, (void *)recomputed_dealloc},
    {Py_tp_members, recomputed_members},
    {Py_tp_doc, "A tensor that autograd saved, which the recomputation of its block brings back."},
    {0, NULL},
};

PyType_Spec ptn_recomputed_spec = {
    .name = "protrain._core.Recomputed",
    .basicsize = sizeof(recomputed_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = recomputed_slots,
};

static bool bring(const order_object *order, recomputed_object *record, PyObject *tensor) {
  PyObject *brought = ptn_saved_alias(order->hooks, tensor), *before = record->tensor;
  if (!brought) return false;
  record->counted = ptn_saved_version(order->hooks, brought, &record->brought_version);
  PyErr_Clear(); /* made in inference mode */
  record->tensor = brought;
  Py_XDECREF(before);
  return true;
}

static recomputed_object *new_recomputed(const order_object *order, PyObject *tensor) {
  PyObject *frame = PyWeakref_GetObject(order->frame); /* borrowed; None: it is gone */
  recomputed_object *self = PyObject_New(recomputed_object, (PyTypeObject *)order->recomputed_type);
  if (!self) return NULL;
  memset(&self->weak, 0, sizeof *self - offsetof(recomputed_object, weak));
  self->frame = Py_NewRef(frame);
  if (!(self->shape = PyObject_GetAttrString(tensor, "shape")) || !(self->dtype = PyObject_GetAttrString(tensor, "dtype")) ||
      !(self->counter = ptn_saved_counter(order->hooks, tensor)))
    Py_CLEAR(self);
  if (self) self->version = ptn_counter_version(self->counter);
  return self;
}

/* ---- forward ---- */

static PyObject *order_pack(PyObject *object, PyObject *tensor) {
  const order_object *self = (order_object *)object;
  PyObject *found = ptn_saved_parameter(self->hooks, tensor);
  if (found != Py_None) return found; /* also NULL */
  Py_DECREF(found);
  recomputed_object *record = new_recomputed(self, tensor);
  PyObject *weak = record ? PyWeakref_NewRef((PyObject *)record, NULL) : NULL;
  /* Where forward goes on behind a backward of its own, for which it was recomputed, the rest stays. */
  if (!weak || PyList_Append(self->saved, weak) < 0 || (self->over && !bring(self, record, tensor))) Py_CLEAR(record);
  Py_XDECREF(weak);
  return (PyObject *)record;
}

/* ---- recomputation ---- */

/* Whether the recomputation saved what forward did; false with an exception set. */
static bool check_same(const recomputed_object *record, PyObject *tensor) {
  PyObject *shape = PyObject_GetAttrString(tensor, "shape"), *dtype = shape ? PyObject_GetAttrString(tensor, "dtype") : NULL;
  int same = dtype ? PyObject_RichCompareBool(shape, record->shape, Py_EQ) : -1;
  if (same == 1) same = dtype == record->dtype;
  if (same == 0) {
    PyObject *now = PySequence_List(shape), *then = PySequence_List(record->shape);
    if (now && then)
      PyErr_Format(
          PyExc_RuntimeError,
          "a recomputed block saved a tensor of shape %R, %S where its forward saved one of %R, %S: it must do the same each "
          "time",
          now, dtype, then, record->dtype);
    Py_XDECREF(now);
    Py_XDECREF(then);
  }
  Py_XDECREF(shape);
  Py_XDECREF(dtype);
  return same == 1;
}

static PyObject *order_begin_again(PyObject *object, PyObject *arguments) {
  order_object *self = (order_object *)object;
  PyObject *hooks, *stop, *before = self->hooks, *before_stop = self->stop;
  if (!PyArg_ParseTuple(arguments, "O!O", Py_TYPE(before), &hooks, &stop)) return NULL;
  self->hooks = Py_NewRef(hooks);
  self->stop = Py_NewRef(stop);
  self->place = 0;
  self->stopped = 0;
  Py_DECREF(before);
  Py_DECREF(before_stop);
  Py_RETURN_NONE;
}

static PyObject *order_pack_again(PyObject *object, PyObject *tensor) {
  order_object *self = (order_object *)object;
  PyObject *found = ptn_saved_parameter(self->hooks, tensor);
  if (found != Py_None) { /* also NULL; what a recomputation makes is never unpacked */
    if (!found) return NULL;
    Py_DECREF(found);
    Py_RETURN_NONE;
  }
  Py_DECREF(found);
  if (self->place >= PyList_Size(self->saved)) {
    PyErr_SetString(PyExc_RuntimeError, "a recomputed block saved more tensors than its forward: it must do the same each time");
    return NULL;
  }
  PyObject *record = Py_NewRef(PyWeakref_GetObject(PyList_GetItem(self->saved, self->place++)));
  bool good =
      record == Py_None || (check_same((recomputed_object *)record, tensor) && bring(self, (recomputed_object *)record, tensor));
  Py_DECREF(record);
  if (!good) return NULL;
  if (self->place < PyList_Size(self->saved) || self->stop == Py_None) Py_RETURN_NONE;
  self->stopped = 1;
  PyErr_SetNone(self->stop);
  return NULL;
}

/* ---- backward ---- */

/* False with an exception set. */
static bool recompute(PyObject *frame) {
  PyObject *nothing = PyObject_CallMethod(frame, "recompute", NULL);
  Py_XDECREF(nothing);
  return nothing != NULL;
}

static PyObject *unpack_parameter(PyObject *object, PyObject *packed) {
  const order_object *self = (order_object *)object;
  PyObject *frame = Py_NewRef(PyWeakref_GetObject(self->frame)); /* None: there is no use for anything else any more */
  Py_INCREF(packed); /* a recomputation runs anything */
  Py_INCREF(object);
  bool good = self->over || PyList_Size(self->saved) == 0 || frame == Py_None || recompute(frame);
  PyObject *tensor = good ? ptn_saved_unpack_parameter(self->hooks, packed) : NULL;
  Py_DECREF(object);
  Py_DECREF(packed);
  Py_DECREF(frame);
  return tensor;
}

static PyObject *order_unpack(PyObject *object, PyObject *packed) {
  const order_object *self = (order_object *)object;
  if ((PyObject *)Py_TYPE(packed) != self->recomputed_type) return unpack_parameter(object, packed);
  recomputed_object *record = (recomputed_object *)packed;
  if (!ptn_saved_check_version(ptn_counter_version(record->counter), record->version, record->shape)) return NULL;
  Py_INCREF(packed); /* a recomputation runs anything */
  Py_INCREF(object);
  bool good = record->tensor || self->over || recompute(record->frame);
  PyObject *tensor = NULL;
  uint32_t now = record->brought_version;
  if (!good) {
  } else if (!record->tensor) {
    PyErr_SetString(PyExc_RuntimeError,
                    "a recomputed block did not save the tensors that its forward saved: it must do the same each time");
  } else if ((!record->counted || ptn_saved_version(self->hooks, record->tensor, &now)) &&
             ptn_saved_check_version(now, record->brought_version, record->shape)) {
    tensor = Py_NewRef(record->tensor);
  }
  Py_DECREF(packed);
  Py_DECREF(object);
  return tensor;
}

/* ---- construction ---- */

PyObject *ptn_recomputed_order(const ptn_module_state *state, PyObject *hooks, PyObject *frame) {
  order_object *self = PyObject_GC_New(order_object, (PyTypeObject *)state->saved_order_type);
  if (!self) return NULL;
  memset(&self->hooks, 0, sizeof *self - offsetof(order_object, hooks));
  self->hooks = Py_NewRef(hooks);
  self->stop = Py_NewRef(Py_None);
  self->recomputed_type = Py_NewRef(state->recomputed_type);
  PyObject_GC_Track((PyObject *)self);
  if (!(self->frame = PyWeakref_NewRef(frame, NULL)) || !(self->saved = PyList_New(0))) Py_CLEAR(self);
  return (PyObject *)self;
}

static int order_traverse(PyObject *object, visitproc visit, void *arg) {
  const order_object *self = (order_object *)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->hooks);
  Py_VISIT(self->frame);
  Py_VISIT(self->saved);
  Py_VISIT(self->stop);
  Py_VISIT(self->recomputed_type);
  return 0;
}

static void order_dealloc(PyObject *object) {
  order_object *self = (order_object *)object;
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  PyObject *const held[] = {self->hooks, self->frame, self->saved, self->stop, self->recomputed_type};
  for (size_t i = 0; i < sizeof held / sizeof *held; i++) Py_XDECREF(held[i]);
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

static PyMethodDef order_methods[] = {
    {"pack", order_pack, METH_O, "Forward's hook."},
    {"unpack", order_unpack, METH_O, "Backward's hook."},
    {"begin_again", order_begin_again, METH_VARARGS, "A recomputation begins, with the SavedTensors of now, and this to end it."},
    {"pack_again", order_pack_again, METH_O, "The recomputation's hook."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef order_members[] = {
    {"over", T_BOOL, offsetof(order_object, over), 0, "Whether a recomputation has brought back what there was."},
    {"stopped", T_BOOL, offsetof(order_object, stopped), READONLY, "Whether the one under way has raised its stop."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot order_slots[] = {
    {Py_tp_dealloc, (void *)order_dealloc},
    {Py_tp_traverse, (void *)order_traverse}, /* a cycle through one has a frame in it, which is cleared */
    {Py_tp_methods, order_methods},
    {Py_tp_members, order_members},
    {Py_tp_doc, "Saved-tensor hooks of a recomputed block: csrc/python/recomputed_type.c; types in _core.pyi."},
    {0, NULL},
};

PyType_Spec ptn_saved_order_spec = {
    .name = "protrain._core.SavedOrder",
    .basicsize = sizeof(order_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = order_slots,
};
