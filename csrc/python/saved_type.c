/* SavedTensors: the saved-tensor hooks of a block's forward, and Saved: what they give autograd to keep.
 *
 * Autograd calls pack for each tensor that it saves and unpack when backward asks for it. By where the tensor's memory lies it is
 *
 *   a parameter   in memory that lives on (PTN_BLOCK_STATIC): `saved_parameter` may know it as one whose chunk is on disk, and
 *                 what that returns goes to autograd; its unpacking is `unpack_parameter`'s, the demand for the chunk;
 *   stashed       in a block of least_bytes or more: a use of a record of the stash (runtime/stash.h). Nothing of ours keeps the
 *                 tensor alive, so its memory is the stash's alone once the program has dropped it;
 *   kept          anything else: itself where it is a leaf, as autograd keeps it without hooks; else an alias, so that no output of
 *                 a node keeps its own graph alive.
 *
 * Over a device there is no arena: `stash_tensor` (protrain/runtime/device_stash.py) may take a tensor that lies in no chunk, and what it
 * returns goes to autograd and comes to `unpack_parameter` again.
 *
 * Autograd does not look at versions where hooks are set, so unpack does. A record of the stash has an owner for that: a hold on
 * the tensor's version counter (torch/tensor.h). The last use of the record gives it up.
 *
 * A tensor comes back with the type, sizes, strides and place in its block that it had, over memory that it gives back to the
 * arena itself, whenever and on whatever thread it dies. It counts by the owner: whoever changes it in place, in a
 * backward of their own, changes what other uses of the record get, and those raise.
 *
 * Invariants: a Saved is kept (kept set, record NULL) or stashed (record set, kept NULL). All Python objects are touched with
 * the GIL; it is released where a record that is brought may wait for the disk, is compared, or has others read ahead, and kept
 * while one is put: that reserves space and sums bytes, and does not wait for what is written. In a forked process the stash's
 * threads are gone: records are left alone.
 */
#include <string.h>

#include "python/saved.h"
#include "runtime/stash.h"

#include <structmember.h> /* wants Python.h before it */

typedef struct saved_tensors_object {
  PyObject_HEAD
  PyObject *engine;
  PyObject *saved_parameter; /* None: no parameter's chunk is on disk */
  PyObject *unpack_parameter;
  PyObject *stash_tensor; /* over a device; None: nothing is stashed */
  PyObject *saved_type;
  PyObject *tensor_type, *detach; /* torch.Tensor and a method of it */
  PyObject *parameter_type;       /* torch.nn.Parameter, which detach makes a torch.Tensor of */
  PyObject *version_name, *base_name;
  size_t tensor_offset; /* of torch's own tensor in an object of Python's */
  unsigned long long least_bytes; /* 0: nothing is stashed */
  int block;                      /* number of the model's block, for the trace */
  bool compiled;                  /* it, or a part of it, is: counts_alone has what follows */
  bool over_device;               /* the engine's slots are a device's */
} saved_tensors_object;

typedef struct saved_object {
  PyObject_VAR_HEAD /* of geometry */
      PyObject *kept;
  ptn_record *record;
  uint64_t offset_bytes; /* of the tensor's first element in its block */
  uint32_t version;
  int forks;    /* of the process that made it */
  int32_t ndim; /* where stashed */
  int32_t type;
  bool asked;
  int64_t geometry[]; /* sizes, then strides, in elements */
} saved_object;

/* ---- Saved ---- */

static saved_object *new_saved(const saved_tensors_object *self, Py_ssize_t n_geometry, uint32_t version) {
  saved_object *saved = PyObject_NewVar(saved_object, (PyTypeObject *)self->saved_type, n_geometry);
  if (!saved) return NULL;
  saved->kept = NULL;
  saved->record = NULL;
  saved->version = version;
  saved->forks = ptn_python_forks;
  saved->asked = false;
  return saved;
}

static void saved_dealloc(PyObject *object) {
  saved_object *saved = (saved_object *)object;
  PyTypeObject *type = Py_TYPE(object);
  Py_XDECREF(saved->kept);
  if (saved->record && saved->forks == ptn_python_forks) ptn_counter_drop(ptn_record_drop(saved->record, saved->asked));
  PyObject_Free(object);
  Py_DECREF(type);
}

static PyObject *saved_stashed(PyObject *object, void *unused) {
  (void)unused;
  return PyBool_FromLong(((saved_object *)object)->record != NULL);
}

static PyGetSetDef saved_getset[] = {
    {"stashed", saved_stashed, NULL, "Whether the stash has it; else it stays in memory.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot saved_slots[] = {
    {Py_tp_dealloc, (void *)saved_dealloc},
    {Py_tp_getset, saved_getset},
    {Py_tp_doc, "A tensor that autograd saved: kept in memory, or a use of a record of the stash."},
    {0, NULL},
};

PyType_Spec ptn_saved_spec = {
    .name = "protrain._core.Saved",
    .basicsize = sizeof(saved_object),
    .itemsize = sizeof(int64_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = saved_slots,
};

/* ---- versions ---- */

static void *tensor_of(const saved_tensors_object *self, PyObject *tensor) {
  void *found;
  memcpy(&found, (char *)tensor + self->tensor_offset, sizeof found);
  return found;
}

static bool read_version(const saved_tensors_object *self, PyObject *tensor, uint32_t *version) {
  if (ptn_torch_version(tensor_of(self, tensor), version)) return true;
  PyObject *number = PyObject_GetAttr(tensor, self->version_name); /* raises, in torch's words */
  if (number) PyErr_SetString(PyExc_RuntimeError, "a tensor that autograd saves has no version counter");
  Py_XDECREF(number);
  return false;
}

static PyObject *shape_of(const saved_object *saved) {
  if (saved->kept) return PyObject_GetAttrString(saved->kept, "shape");
  PyObject *shape = PyList_New(saved->ndim);
  for (int32_t i = 0; shape && i < saved->ndim; i++) PyList_SetItem(shape, i, PyLong_FromLongLong(saved->geometry[i]));
  return shape;
}

/* Raises that it was changed in place. The words are Python's. */
static void tell_changed(uint32_t now, uint32_t version, PyObject *shape) {
  PyObject *module = PyImport_ImportModule("protrain.runtime.activations");
  PyObject *nothing =
      module ? PyObject_CallMethod(module, "check_version", "IIO", (unsigned int)now, (unsigned int)version, shape) : NULL;
  Py_XDECREF(nothing);
  Py_XDECREF(module);
}

static bool check_version(const saved_object *saved, uint32_t now) {
  if (now == saved->version) return true;
  PyObject *shape = shape_of(saved);
  if (shape) tell_changed(now, saved->version, shape);
  Py_XDECREF(shape);
  return false;
}

/* ---- pack ---- */

static bool is_plain(const saved_tensors_object *self, PyObject *tensor) {
  PyObject *type = (PyObject *)Py_TYPE(tensor);
  return type == self->tensor_type || type == self->parameter_type;
}

/* Classes of others' may see to it that theirs is kept. */
static PyObject *alias(const saved_tensors_object *self, PyObject *tensor) {
  PyObject *made = is_plain(self, tensor) ? ptn_torch_alias(tensor_of(self, tensor)) : NULL;
  return made || PyErr_Occurred() ? made : PyObject_CallFunctionObjArgs(self->detach, tensor, NULL);
}

static PyObject *keep(const saved_tensors_object *self, PyObject *tensor) {
  uint32_t version;
  if (!read_version(self, tensor, &version)) return NULL;
  PyObject *kept = ptn_torch_is_leaf(tensor_of(self, tensor)) ? Py_NewRef(tensor) : alias(self, tensor);
  saved_object *saved = kept ? new_saved(self, 0, version) : NULL;
  if (saved) saved->kept = kept;
  else Py_XDECREF(kept);
  return (PyObject *)saved;
}

static PyObject *pack_static(const saved_tensors_object *self, PyObject *tensor) {
  if (self->saved_parameter != Py_None) {
    PyObject *found = PyObject_CallFunctionObjArgs(self->saved_parameter, tensor, NULL);
    if (found != Py_None) return found; /* also NULL */
    Py_DECREF(found);
  }
  return keep(self, tensor);
}

/* Whether it is a part of what torch's compiler made, beside others with counters of their own, none of which is changed once it is
 * saved: one counter does for all. */
static bool lies_with_others(const saved_tensors_object *self, const void *tensor, const ptn_tensor_facts *facts) {
  return !facts->whole && self->compiled && ptn_torch_is_leaf(tensor);
}

static PyObject *stash(const saved_tensors_object *self, ptn_stash *stash, PyObject *tensor, const ptn_tensor_facts *facts,
                       const ptn_block *block) {
  uint32_t version;
  if (!read_version(self, tensor, &version)) return NULL;
  size_t ndim = (size_t)facts->ndim;
  saved_object *saved = new_saved(self, 2 * (Py_ssize_t)ndim, version);
  if (!saved) return NULL;
  saved->offset_bytes = (uint64_t)((const char *)facts->data - (const char *)block->memory);
  saved->type = facts->type;
  saved->ndim = facts->ndim;
  memcpy(saved->geometry, facts->sizes, ndim * sizeof(int64_t));
  memcpy(saved->geometry + ndim, facts->strides, ndim * sizeof(int64_t));
  void *tensor_itself = tensor_of(self, tensor);
  bool joint = lies_with_others(self, tensor_itself, facts), fresh = false;
  const void *counter = joint ? NULL : ptn_torch_counter_of(tensor_itself);
  if (ptn_stash_put(stash, block, counter, joint ? 0 : version, self->block, &saved->record, &fresh) != PTN_OK) {
    saved->record = NULL;
    ptn_python_raise();
    Py_DECREF(saved);
    return NULL;
  }
  if (fresh) ptn_record_set_owner(saved->record, ptn_torch_counter(tensor_itself));
  else if (joint) saved->version = ptn_counter_version(ptn_record_owner(saved->record));
  return (PyObject *)saved;
}

/* False where they do not tell: what torch does not keep in memory of the usual kind; whose storage is shut, as of a parameter on disk;
 * or what is of a subclass, an instance of which would come back without what makes it one, or again a parameter on disk. */
static bool read_facts(const saved_tensors_object *self, PyObject *tensor, ptn_tensor_facts *facts) {
  return is_plain(self, tensor) && ptn_torch_facts(tensor_of(self, tensor), facts);
}

/* Whether changes of all that lies in its memory are counted by its counter, so that it can be told later whether that has what it had.
 * They are not where a tensor has only a part and is no view of another, as those that torch.unsafe_chunk makes: the other parts have
 * counters of their own, and torch's GRU changes one while another is saved. What torch's compiler makes lies so too, but is not
 * changed once it is saved; it has no graph, which tells it from what a part of the block does that is not compiled. -1: a Python
 * exception is set. */
static int counts_alone(const saved_tensors_object *self, PyObject *tensor, const ptn_tensor_facts *facts) {
  if (facts->whole || lies_with_others(self, tensor_of(self, tensor), facts)) return 1;
  PyObject *base = PyObject_GetAttr(tensor, self->base_name);
  if (!base) return -1;
  ptn_tensor_facts of_base;
  bool counts = base != Py_None && ptn_torch_facts(tensor_of(self, base), &of_base) && of_base.whole;
  Py_DECREF(base);
  return counts;
}

static PyObject *pack_over_device(const saved_tensors_object *self, PyObject *tensor, const ptn_tensor_facts *facts) {
  const ptn_engine *engine = ptn_python_engine(self->engine);
  if (!engine) return NULL;
  if (ptn_engine_in_slot(engine, facts->data)) return pack_static(self, tensor);
  int own_type = ptn_python_device_number(self->engine) < 0 ? PTN_TORCH_CPU : PTN_TORCH_CUDA;
  if (self->stash_tensor == Py_None || (PyObject *)Py_TYPE(tensor) != self->tensor_type || facts->device_type != own_type ||
      ptn_engine_in_chunk(engine, facts->data))
    return keep(self, tensor);
  int counts = facts->lazy ? 0 : counts_alone(self, tensor, facts);
  if (counts <= 0) return counts < 0 ? NULL : keep(self, tensor);
  void *tensor_itself = tensor_of(self, tensor);
  bool joint = lies_with_others(self, tensor_itself, facts);
  PyObject *counter = PyLong_FromVoidPtr(joint ? NULL : (void *)ptn_torch_counter_of(tensor_itself));
  if (!counter) return NULL;
  PyObject *found = PyObject_CallFunctionObjArgs(self->stash_tensor, tensor, counter, NULL);
  Py_DECREF(counter);
  if (found != Py_None) return found; /* also NULL */
  Py_DECREF(found);
  return keep(self, tensor);
}

/* Of a page or more, of the arena. */
static bool find_block(const ptn_tensor_facts *facts, ptn_block *block) {
  if (facts->device_type != PTN_TORCH_CPU) return false;
  return facts->block ? ptn_arena_describe(facts->block, block) : ptn_arena_find(facts->data, block);
}

static PyObject *saved_tensors_pack(PyObject *object, PyObject *tensor) {
  const saved_tensors_object *self = (saved_tensors_object *)object;
  PyTypeObject *wanted = (PyTypeObject *)self->tensor_type;
  if (Py_TYPE(tensor) != wanted && !PyType_IsSubtype(Py_TYPE(tensor), wanted))
    return PyErr_Format(PyExc_TypeError, "pack takes a tensor, %R is none", tensor);
  ptn_tensor_facts facts;
  ptn_block block;
  if (!read_facts(self, tensor, &facts)) return pack_static(self, tensor);
  if (self->over_device) return pack_over_device(self, tensor, &facts);
  if (!find_block(&facts, &block)) return keep(self, tensor);
  if (block.use == PTN_BLOCK_STATIC) return pack_static(self, tensor);
  if (self->least_bytes == 0 || block.bytes < self->least_bytes || Py_TYPE(tensor) != wanted) return keep(self, tensor);
  ptn_engine *engine = ptn_python_engine(self->engine);
  if (!engine) return NULL;
  ptn_stash *to = ptn_engine_stash(engine);
  if (!ptn_stash_gains(to, &block)) return keep(self, tensor);
  int counts = facts.lazy ? 0 : counts_alone(self, tensor, &facts);
  if (counts <= 0) return counts < 0 ? NULL : keep(self, tensor);
  return stash(self, to, tensor, &facts, &block);
}

/* ---- for recomputed blocks ---- */

PyObject *ptn_saved_parameter(PyObject *hooks, PyObject *tensor) {
  const saved_tensors_object *self = (saved_tensors_object *)hooks;
  ptn_tensor_facts facts;
  ptn_block block;
  if (self->saved_parameter == Py_None) return Py_NewRef(Py_None);
  bool may_be;
  if (!read_facts(self, tensor, &facts)) {
    may_be = true;
  } else if (self->over_device) {
    const ptn_engine *engine = ptn_python_engine(self->engine);
    if (!engine) return NULL;
    may_be = ptn_engine_in_slot(engine, facts.data);
  } else {
    may_be = find_block(&facts, &block) && block.use == PTN_BLOCK_STATIC;
  }
  return may_be ? PyObject_CallFunctionObjArgs(self->saved_parameter, tensor, NULL) : Py_NewRef(Py_None);
}

PyObject *ptn_saved_unpack_parameter(PyObject *hooks, PyObject *packed) {
  return PyObject_CallFunctionObjArgs(((saved_tensors_object *)hooks)->unpack_parameter, packed, NULL);
}

PyObject *ptn_saved_alias(PyObject *hooks, PyObject *tensor) { return alias((saved_tensors_object *)hooks, tensor); }

bool ptn_saved_version(PyObject *hooks, PyObject *tensor, uint32_t *version) {
  return read_version((saved_tensors_object *)hooks, tensor, version);
}

ptn_counter *ptn_saved_counter(PyObject *hooks, PyObject *tensor) {
  const saved_tensors_object *self = (saved_tensors_object *)hooks;
  uint32_t version;
  return read_version(self, tensor, &version) ? ptn_torch_counter(tensor_of(self, tensor)) : NULL;
}

bool ptn_saved_check_version(uint32_t now, uint32_t version, PyObject *shape) {
  if (now != version) tell_changed(now, version, shape);
  return now == version;
}

/* ---- unpack ---- */

static PyObject *bring(const saved_tensors_object *self, saved_object *saved) {
  ptn_python_share(self->engine); /* first: meanwhile the GIL is others' */
  const ptn_counter *owner = ptn_record_owner(saved->record);
  if (!check_version(saved, ptn_counter_version(owner))) return NULL;
  bool first = !saved->asked;
  saved->asked = true;
  void *memory = NULL;
  ptn_status status = PTN_OK;
  if (!ptn_stash_get_at_once(saved->record, first, &memory))
    PTN_IN_ENGINE(self->engine, status = ptn_stash_get(saved->record, first, &memory));
  if (status != PTN_OK) {
    if (first) saved->asked = false; /* it waits still */
    return ptn_python_raise();
  }
  const ptn_torch_memory block = {
      .data = (char *)memory + saved->offset_bytes, .context = memory, .release = ptn_arena_free, .device_type = PTN_TORCH_CPU};
  PyObject *tensor = ptn_torch_make(&block, saved->type, saved->ndim, saved->geometry, owner);
  return tensor || PyErr_Occurred() ? tensor : PyErr_NoMemory();
}

static PyObject *saved_tensors_unpack(PyObject *object, PyObject *packed) {
  const saved_tensors_object *self = (saved_tensors_object *)object;
  if ((PyObject *)Py_TYPE(packed) != self->saved_type) return PyObject_CallFunctionObjArgs(self->unpack_parameter, packed, NULL);
  saved_object *saved = (saved_object *)packed;
  if (saved->kept) {
    uint32_t now;
    return read_version(self, saved->kept, &now) && check_version(saved, now) ? Py_NewRef(saved->kept) : NULL;
  }
  if (saved->forks != ptn_python_forks) {
    PyErr_SetString(PyExc_RuntimeError, "a wrapped model cannot be used in a forked process");
    return NULL;
  }
  Py_INCREF(packed); /* while it waits, another thread may drop the graph */
  PyObject *tensor = bring(self, saved);
  Py_DECREF(packed);
  return tensor;
}

/* ---- construction ---- */

#define LEAST_SIZE 40 /* of such an object: its head, and three pointers at least */

/* Where an object of Python's has torch's own tensor: torch says which one a given object has. */
static bool find_offset(saved_tensors_object *self) {
  PyObject *probe = PyObject_CallFunctionObjArgs(self->tensor_type, NULL);
  PyObject *number = probe ? PyObject_GetAttrString(probe, "_cdata") : NULL;
  void *wanted = number ? PyLong_AsVoidPtr(number) : NULL;
  Py_XDECREF(number);
  for (size_t offset = sizeof(PyObject); wanted && offset < LEAST_SIZE && self->tensor_offset == 0; offset += sizeof wanted) {
    if (memcmp((char *)probe + offset, &wanted, sizeof wanted) == 0) self->tensor_offset = offset;
  }
  Py_XDECREF(probe);
  if (self->tensor_offset == 0 && !PyErr_Occurred())
    PyErr_SetString(PyExc_RuntimeError, "this version of torch keeps its tensors in another place than any that protrain knows");
  return self->tensor_offset != 0;
}

static bool find_torch(saved_tensors_object *self) {
  PyObject *torch = PyImport_ImportModule("torch"), *core = torch ? PyObject_GetAttrString(torch, "_C") : NULL;
  PyObject *base = core ? PyObject_GetAttrString(core, "TensorBase") : NULL; /* its methods are C's, with nothing around them */
  PyObject *nn = base ? PyObject_GetAttrString(torch, "nn") : NULL;
  bool found = nn && (self->tensor_type = PyObject_GetAttrString(torch, "Tensor")) &&
               (self->parameter_type = PyObject_GetAttrString(nn, "Parameter")) &&
               (self->detach = PyObject_GetAttrString(base, "detach")) &&
               (self->version_name = PyUnicode_InternFromString("_version")) &&
               (self->base_name = PyUnicode_InternFromString("_base")) && find_offset(self);
  Py_XDECREF(nn);
  Py_XDECREF(base);
  Py_XDECREF(core);
  Py_XDECREF(torch);
  return found;
}

static PyObject *saved_tensors_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"engine", "saved_parameter", "unpack_parameter", "least_bytes", "stash_tensor", NULL};
  PyObject *engine, *saved_parameter, *unpack_parameter, *stash_tensor = Py_None;
  unsigned long long least_bytes;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOO&|O", names, &engine, &saved_parameter, &unpack_parameter,
                                   ptn_python_u64, &least_bytes, &stash_tensor) ||
      !ptn_python_engine(engine))
    return NULL;
  saved_tensors_object *self = PyObject_GC_New(saved_tensors_object, type);
  if (!self) return NULL;
  memset(&self->engine, 0, sizeof *self - offsetof(saved_tensors_object, engine));
  self->engine = Py_NewRef(engine);
  self->saved_parameter = Py_NewRef(saved_parameter);
  self->unpack_parameter = Py_NewRef(unpack_parameter);
  self->stash_tensor = Py_NewRef(stash_tensor);
  self->saved_type = Py_NewRef(((ptn_module_state *)PyType_GetModuleState(type))->saved_type);
  self->least_bytes = least_bytes;
  self->block = -1;
  self->over_device = ptn_engine_over_device(ptn_python_engine(engine));
  PyObject_GC_Track((PyObject *)self);
  if (!find_torch(self)) Py_CLEAR(self);
  return (PyObject *)self;
}

static int saved_tensors_traverse(PyObject *object, visitproc visit, void *arg) {
  const saved_tensors_object *self = (saved_tensors_object *)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->engine);
  Py_VISIT(self->saved_parameter);
  Py_VISIT(self->unpack_parameter);
  Py_VISIT(self->stash_tensor);
  Py_VISIT(self->saved_type);
  return 0;
}

/* Breaks the cycle through the session; what is called after that fails. */
static int saved_tensors_clear(PyObject *object) {
  saved_tensors_object *self = (saved_tensors_object *)object;
  Py_CLEAR(self->saved_parameter);
  Py_CLEAR(self->unpack_parameter);
  Py_CLEAR(self->stash_tensor);
  return 0;
}

static void saved_tensors_dealloc(PyObject *object) {
  saved_tensors_object *self = (saved_tensors_object *)object;
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  saved_tensors_clear(object);
  PyObject *const held[] = {self->engine, self->saved_type,   self->tensor_type, self->parameter_type,
                            self->detach, self->version_name, self->base_name};
  for (size_t i = 0; i < sizeof held / sizeof *held; i++) Py_XDECREF(held[i]);
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

static PyObject *saved_tensors_order(PyObject *object, PyObject *frame) {
  const ptn_module_state *state = PyType_GetModuleState(Py_TYPE(object));
  return state ? ptn_recomputed_order(state, object, frame) : NULL;
}

static PyMethodDef saved_tensors_methods[] = {
    {"pack", saved_tensors_pack, METH_O, "What autograd keeps of a tensor that it saves."},
    {"unpack", saved_tensors_unpack, METH_O, "The tensor again."},
    {"order", saved_tensors_order, METH_O, "A SavedOrder for one forward of a block that is recomputed."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef saved_tensors_members[] = {
    {"block", T_INT, offsetof(saved_tensors_object, block), 0,
     "Number of the block whose forward runs, for the trace; -1: none."},
    {"compiled", T_BOOL, offsetof(saved_tensors_object, compiled), 0, "Whether that block, or a part of it, is compiled."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot saved_tensors_slots[] = {
    {Py_tp_new, (void *)saved_tensors_new},
    {Py_tp_dealloc, (void *)saved_tensors_dealloc},
    {Py_tp_traverse, (void *)saved_tensors_traverse},
    {Py_tp_clear, (void *)saved_tensors_clear},
    {Py_tp_methods, saved_tensors_methods},
    {Py_tp_members, saved_tensors_members},
    {Py_tp_doc, "Saved-tensor hooks: csrc/python/saved_type.c; types in _core.pyi."},
    {0, NULL},
};

PyType_Spec ptn_saved_tensors_spec = {
    .name = "protrain._core.SavedTensors",
    .basicsize = sizeof(saved_tensors_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = saved_tensors_slots,
};
