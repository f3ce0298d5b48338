/* Engine: one wrapped model's engine and account as a Python object.
 *
 * The GIL is released on every call that may wait for I/O. Calls that only ask may come from any thread; whoever makes another one
 * drives the step from then on. A gradient's owner is a Python object: the engine hands it back through `give_back`, which takes
 * the GIL where it is not held. What is closed while calls are inside, on other threads or around `give_back`, is destroyed by the
 * last of them; an allocation of another thread that asks it for memory is waited for. A process that was forked off must not touch
 * the engine's threads, so there an Engine only forgets.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "python/engine_methods.h"
#include "torch/cuda_allocator.h"
#include "torch/storage.h"

typedef struct engine_object {
  PyObject_HEAD
  _Atomic(ptn_engine *) engine;  /* NULL: closed */
  _Atomic(ptn_engine *) retired; /* closed while calls were inside: the last of them destroys it */
  atomic_int calls;              /* inside of the engine */
  ptn_account *account;        /* of ordinary memory */
  ptn_account *device_account; /* of the device's; NULL: there is none */
  uint64_t charged_bytes;      /* to the first, for what is in no arena */
  PyObject *guarded;           /* by chunk, what engine_guard was given; NULL: nothing yet */
  PyObject *current_stream;    /* gives the handle of the compute stream; NULL: the calling thread is it */
  ptn_device *device;
  int device_number; /* of the GPU; -1: it computes in ordinary memory */
  bool bf16;
  int forks; /* of the process that made it */
  _Atomic(pthread_t) driver; /* the thread that drives the step: the only one that may wait for memory */
} engine_object;

static void give_back(void *owner) {
  PyGILState_STATE state = PyGILState_Ensure();
  Py_DECREF((PyObject *)owner);
  PyGILState_Release(state);
}

static void free_accounts(engine_object *self) {
  if (self->charged_bytes) ptn_account_discharge(self->account, self->charged_bytes);
  self->charged_bytes = 0;
  ptn_account **const accounts[] = {&self->account, &self->device_account};
  for (int i = 0; i < 2; i++) {
    if (*accounts[i] && self->forks == ptn_python_forks)
      ptn_torch_cuda_forget(*accounts[i]); /* its lock may be another thread's */
    ptn_account_destroy(*accounts[i]);
    *accounts[i] = NULL;
  }
}

/* The last call is over; with the GIL or without it. */
static void end(engine_object *self) {
  ptn_engine *engine = atomic_exchange(&self->retired, NULL);
  if (!engine) return;
  ptn_error error; /* of the call */
  ptn_error_save(&error);
  ptn_engine_destroy(engine);
  free_accounts(self);
  (void)ptn_error_restore(&error);
}

static bool is_driver(const engine_object *self) {
  return pthread_equal(atomic_load_explicit(&self->driver, memory_order_relaxed), pthread_self()) != 0;
}

/* Called by the arena, wherever torch allocates: other threads than the driver might be waited for by one that holds the GIL. */
static ptn_status relieve(void *context, uint64_t missing_bytes, bool must, bool *freed) {
  engine_object *self = context;
  (void)missing_bytes;
  if (!is_driver(self)) return PTN_OK;
  self->calls++;
  ptn_engine *engine = self->engine;
  ptn_status status = PTN_OK;
  if (engine) {
    ptn_stash *stash = ptn_engine_stash(engine);
    *freed = ptn_stash_relieve(stash, must) || ptn_engine_relieve(engine, must);
    if (must && !*freed) status = ptn_stash_tell_failure(stash);
  }
  if (--self->calls == 0) end(self);
  return status;
}

void ptn_python_enter(PyObject *object) { ((engine_object *)object)->calls++; }

void ptn_python_leave(PyObject *object) {
  engine_object *self = (engine_object *)object;
  if (--self->calls > 0 || !self->retired) return;
  Py_BEGIN_ALLOW_THREADS
  end(self);
  Py_END_ALLOW_THREADS
}

static void close_engine(engine_object *self) {
  ptn_engine *engine = atomic_exchange(&self->engine, NULL);
  if (self->forks != ptn_python_forks) { /* calls that were inside are the parent's */
    free_accounts(self);
    return;
  }
  Py_BEGIN_ALLOW_THREADS
  ptn_account_ask_no_more(self->account);
  ptn_account_ask_no_more(self->device_account);
  Py_END_ALLOW_THREADS
  ptn_python_enter((PyObject *)self);
  if (engine) self->retired = engine;
  ptn_python_leave((PyObject *)self);
}

static void engine_dealloc(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  engine_object *self = (engine_object *)object;
  close_engine(self);
  free_accounts(self); /* of an engine that could not be made */
  Py_XDECREF(self->guarded);
  Py_XDECREF(self->current_stream);
  PyObject_Free(object);
  Py_DECREF(type);
}

ptn_engine *ptn_python_engine(PyObject *object) {
  engine_object *self = (engine_object *)object;
  if (PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) != (void *)engine_dealloc) { /* the type cannot be subclassed */
    PyErr_SetString(PyExc_TypeError, "an Engine is wanted");
    return NULL;
  }
  if (!self->engine || self->forks != ptn_python_forks) {
    PyErr_SetString(PyExc_RuntimeError,
                    self->engine ? "a wrapped model cannot be used in a forked process" : "this model's engine is closed");
    return NULL;
  }
  return self->engine;
}

void ptn_python_share(PyObject *object) {
  const engine_object *self = (const engine_object *)object;
  ptn_engine *engine = self->forks == ptn_python_forks ? self->engine : NULL;
  if (engine && ptn_engine_may_share(engine)) PTN_IN_ENGINE(object, ptn_engine_share(engine));
}

ptn_account *ptn_python_account(PyObject *object) {
  const engine_object *self = (engine_object *)object;
  return self->device_account ? self->device_account : self->account;
}

ptn_account *ptn_python_host_account(PyObject *object) {
  const engine_object *self = (engine_object *)object;
  return self->device_account ? self->account : NULL;
}

int ptn_python_device_number(PyObject *object) { return ((engine_object *)object)->device_number; }

bool ptn_python_is_bf16(PyObject *object) { return ((engine_object *)object)->bf16; }

PyObject *ptn_python_device_record_type(PyObject *object) {
  const ptn_module_state *state = PyType_GetModuleState(Py_TYPE(object));
  return state ? state->device_record_type : NULL;
}

/* What the engine orders from now on belongs to the stream on which torch now orders its own. */
static bool hand_stream_over(const engine_object *self) {
  PyObject *handle = PyObject_CallNoArgs(self->current_stream);
  void *stream = handle ? PyLong_AsVoidPtr(handle) : NULL;
  Py_XDECREF(handle);
  if (PyErr_Occurred()) return false;
  if (ptn_engine_set_stream(self->engine, stream) == PTN_OK) return true;
  ptn_python_raise();
  return false;
}

ptn_engine *ptn_python_behind_stream(PyObject *object) {
  const engine_object *self = (engine_object *)object;
  ptn_engine *engine = ptn_python_engine(object);
  if (!engine || !self->current_stream) return engine;
  return hand_stream_over(self) ? ptn_python_engine(object) : NULL; /* what told of the stream may have closed it */
}

ptn_engine *ptn_python_drive(PyObject *object) {
  ptn_engine *engine = ptn_python_behind_stream(object);
  if (engine) atomic_store_explicit(&((engine_object *)object)->driver, pthread_self(), memory_order_relaxed);
  return engine;
}

bool ptn_python_drives(PyObject *object) { return is_driver((const engine_object *)object); }

/* ---- construction ---- */

static int read_chunks(PyObject *list, Py_ssize_t count, ptn_engine_chunk *chunks) {
  for (Py_ssize_t i = 0; i < count; i++) {
    unsigned long long bytes;
    int trained;
    if (!PyArg_ParseTuple(PyList_GetItem(list, i), "O&p", ptn_python_u64, &bytes, &trained)) return 0;
    chunks[i] = (ptn_engine_chunk){.param_bytes = bytes, .trained = trained != 0};
  }
  return 1;
}

static int read_params(PyObject *list, Py_ssize_t count, ptn_engine_param *params) {
  for (Py_ssize_t i = 0; i < count; i++) {
    unsigned int chunk, group;
    unsigned long long offset, count;
    int trained;
    if (!PyArg_ParseTuple(PyList_GetItem(list, i), "O&O&O&pO&", ptn_python_u32, &chunk, ptn_python_u64, &offset, ptn_python_u64,
                          &count, &trained, ptn_python_u32, &group))
      return 0;
    params[i] =
        (ptn_engine_param){.chunk = chunk, .offset_bytes = offset, .count = count, .trained = trained != 0, .group = group};
  }
  return 1;
}

/* Only memory that the CPU allocates can ask for relief: a GPU's allocator holds locks while it asks for more. */
static ptn_status make_engine(engine_object *self, unsigned long long limit, unsigned long long device_limit,
                              const ptn_engine_config *config) {
  bool over = config->device != NULL;
  PTN_TRY(ptn_account_create(&self->account, limit, over ? NULL : relieve, self));
  if (over) PTN_TRY(ptn_account_create(&self->device_account, device_limit, self->device_number < 0 ? relieve : NULL, self));
  ptn_engine_config ours = *config;
  ours.account = self->account;
  ours.device_account = self->device_account;
  ours.release = give_back;
  ptn_engine *engine;
  ptn_status status = ptn_engine_create(&engine, &ours);
  self->engine = engine;
  return status;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"folder",   "limit_bytes",        "chunks",         "params",
                          "n_groups", "n_states",           "disk_engine",    "bf16",
                          "device",   "device_limit_bytes", "current_stream", NULL};
  PyObject *folder;
  unsigned long long limit, device_limit = 0;
  PyObject *chunk_list, *param_list, *device_object = Py_None, *current_stream = Py_None;
  unsigned int n_groups, n_states;
  int disk_engine = PTN_DISK_AUTO, bf16 = 0;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O&O&O!O!O&O&|ipOO&O", names, PyUnicode_FSConverter, &folder,
                                   ptn_python_u64, &limit, &PyList_Type, &chunk_list, &PyList_Type, &param_list, ptn_python_u32,
                                   &n_groups, ptn_python_u32, &n_states, &disk_engine, &bf16, &device_object, ptn_python_u64,
                                   &device_limit, &current_stream))
    return NULL;
  int device_number = -1;
  ptn_device *device = NULL;
  if (device_object != Py_None && !(device = ptn_python_device(device_object, &device_number))) {
    Py_DECREF(folder);
    return NULL;
  }
  size_t n_chunks = (size_t)PyList_Size(chunk_list), n_params = (size_t)PyList_Size(param_list);
  ptn_engine_chunk *chunks = PyMem_Malloc((n_chunks + 1) * sizeof *chunks);
  ptn_engine_param *params = PyMem_Malloc((n_params + 1) * sizeof *params);
  engine_object *self = NULL;
  if (!chunks || !params) {
    PyErr_NoMemory();
  } else if (read_chunks(chunk_list, (Py_ssize_t)n_chunks, chunks) && read_params(param_list, (Py_ssize_t)n_params, params)) {
    self = PyObject_New(engine_object, type);
    if (self) {
      memset(&self->engine, 0, sizeof *self - offsetof(engine_object, engine));
      self->forks = ptn_python_forks;
      atomic_store_explicit(&self->driver, pthread_self(), memory_order_relaxed);
      self->device = device;
      self->device_number = device_number;
      self->bf16 = bf16 != 0;
      if (device && current_stream != Py_None) self->current_stream = Py_NewRef(current_stream);
      ptn_engine_config config = {.folder = PyBytes_AsString(folder),
                                  .disk_engine = (ptn_disk_engine)disk_engine,
                                  .n_chunks = (uint32_t)n_chunks,
                                  .n_params = (uint32_t)n_params,
                                  .n_groups = n_groups,
                                  .chunks = chunks,
                                  .params = params,
                                  .n_states = n_states,
                                  .bf16 = bf16 != 0,
                                  .device = device};
      if (make_engine(self, limit, device_limit, &config) != PTN_OK) {
        ptn_python_raise();
        Py_DECREF(self);
        self = NULL;
      }
    }
  }
  PyMem_Free(chunks);
  PyMem_Free(params);
  Py_DECREF(folder);
  return (PyObject *)self;
}

static PyObject *engine_close(PyObject *object, PyObject *unused) {
  (void)unused;
  close_engine((engine_object *)object);
  Py_RETURN_NONE;
}

/* ---- what the object itself has ---- */

/* The parameters of a chunk lie in this storage of torch, or in none. */
static PyObject *engine_guard(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_ASK;
  unsigned int chunk;
  PyObject *storage;
  if (!PyArg_ParseTuple(arguments, "O&O", ptn_python_u32, &chunk, &storage) || !ptn_python_has_chunk(engine, chunk)) return NULL;
  engine_object *self = (engine_object *)object;
  PyObject *key = PyLong_FromUnsignedLong(chunk);
  PyObject *number = storage == Py_None ? PyLong_FromLong(0) : PyObject_GetAttrString(storage, "_cdata");
  void *address = number ? PyLong_AsVoidPtr(number) : NULL;
  PyObject *before = key && self->guarded ? Py_XNewRef(PyDict_GetItemWithError(self->guarded, key)) : NULL;
  if (!PyErr_Occurred() && (self->guarded || (self->guarded = PyDict_New())) && PyDict_SetItem(self->guarded, key, storage) == 0)
    ptn_engine_set_guard(engine, chunk, (ptn_guard){address ? ptn_torch_open_storage : NULL, address});
  Py_XDECREF(before); /* until here the engine knew it */
  Py_XDECREF(number);
  Py_XDECREF(key);
  return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *engine_use_account(PyObject *object, PyObject *arguments) {
  PTN_ENGINE_TO_DRIVE;
  (void)engine;
  int on;
  if (!PyArg_ParseTuple(arguments, "p", &on)) return NULL;
  const engine_object *self = (engine_object *)object;
  if (on) (void)ptn_arena_set_apart(false); /* an interrupt may have come before the thread that was apart was not any more */
  if (self->device_number < 0) ptn_arena_use(on ? ptn_python_account(object) : NULL);
  else if (!ptn_torch_cuda_use(self->device_number, self->device, on ? self->device_account : NULL))
    return PyErr_Format(PyExc_ValueError, "memory of GPU %d cannot be counted; its number is too large", self->device_number);
  Py_RETURN_NONE;
}

/* Over a device it has no effect: there tensors count where torch's own allocator is asked for them. */
static PyObject *engine_leave_account(PyObject *object, PyObject *unused) {
  PTN_ENGINE_TO_DRIVE;
  (void)engine;
  (void)unused;
  ptn_arena_use_no_more(ptn_python_account(object));
  Py_RETURN_NONE;
}

static PyObject *engine_charge(PyObject *object, PyObject *number) {
  PTN_ENGINE_TO_DRIVE;
  (void)engine;
  engine_object *self = (engine_object *)object;
  unsigned long long bytes = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred()) return NULL;
  if (self->charged_bytes) {
    PyErr_SetString(PyExc_ValueError, "the engine was charged already");
    return NULL;
  }
  if (bytes == 0) Py_RETURN_NONE;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_account_charge(self->account, bytes));
  if (status == PTN_OK) self->charged_bytes = bytes;
  return ptn_python_answer(status);
}

static PyMethodDef engine_methods[] = {
    {"close", engine_close, METH_NOARGS, NULL},
    {"in_memory", ptn_python_in_memory, METH_VARARGS, NULL},
    {"to_host", ptn_python_to_host, METH_VARARGS, NULL},
    {"set_gradient_memory", ptn_python_set_gradient_memory, METH_O, NULL},
    {"set_staging", ptn_python_set_staging, METH_VARARGS, NULL},
    {"set_stash_memory", ptn_python_set_stash_memory, METH_O, NULL},
    {"put", ptn_python_put, METH_VARARGS, NULL},
    {"stash_check", ptn_python_stash_check, METH_NOARGS, NULL},
    {"unlocked_reason", ptn_python_unlocked_reason, METH_NOARGS, NULL},
    {"base", ptn_python_base, METH_VARARGS, NULL},
    {"state", ptn_python_state, METH_VARARGS, NULL},
    {"to_memory", ptn_python_to_memory, METH_VARARGS, NULL},
    {"to_disk", ptn_python_to_disk, METH_VARARGS, NULL},
    {"set_slots", ptn_python_set_slots, METH_VARARGS, NULL},
    {"drop_slots", ptn_python_drop_slots, METH_NOARGS, NULL},
    {"own_slot", ptn_python_own_slot, METH_VARARGS, NULL},
    {"set_ring", ptn_python_set_ring, METH_VARARGS, NULL},
    {"drop_ring", ptn_python_drop_ring, METH_NOARGS, NULL},
    {"set_pending", ptn_python_set_pending, METH_VARARGS, NULL},
    {"region", ptn_python_region_of, METH_VARARGS, NULL},
    {"guard", engine_guard, METH_VARARGS, NULL},
    {"transfer", ptn_python_transfer, METH_VARARGS, NULL},
    {"transfer_part", ptn_python_transfer_part, METH_VARARGS, NULL},
    {"begin_fill", ptn_python_begin_fill, METH_VARARGS, NULL},
    {"end_fill", ptn_python_end_fill, METH_VARARGS, NULL},
    {"steps", ptn_python_steps, METH_VARARGS, NULL},
    {"set_steps", ptn_python_set_steps, METH_VARARGS, NULL},
    {"set_order", ptn_python_set_order, METH_VARARGS, NULL},
    {"seek", ptn_python_seek, METH_VARARGS, NULL},
    {"demand", ptn_python_demand, METH_VARARGS, NULL},
    {"unuse", ptn_python_unuse, METH_VARARGS, NULL},
    {"unuse_all", ptn_python_unuse_all, METH_NOARGS, NULL},
    {"set_hyper", ptn_python_set_hyper, METH_VARARGS, NULL},
    {"gradient", ptn_python_gradient, METH_VARARGS, NULL},
    {"spilled", ptn_python_spilled, METH_VARARGS, NULL},
    {"read_ahead", ptn_python_read_ahead, METH_VARARGS, NULL},
    {"yield_states", ptn_python_yield_states, METH_VARARGS, NULL},
    {"flush", ptn_python_flush, METH_NOARGS, NULL},
    {"update_spilled", ptn_python_update_spilled, METH_VARARGS, NULL},
    {"wait", ptn_python_wait, METH_NOARGS, NULL},
    {"make_step", ptn_python_make_step, METH_VARARGS, NULL},
    {"commits", ptn_python_commits, METH_NOARGS, NULL},
    {"stage", ptn_python_stage, METH_VARARGS, NULL},
    {"stage_rest", ptn_python_stage_rest, METH_NOARGS, NULL},
    {"reserve", ptn_python_reserve, METH_O, NULL},
    {"release", ptn_python_release, METH_VARARGS, NULL},
    {"move", ptn_python_move, METH_VARARGS, NULL},
    {"drop", ptn_python_drop, METH_NOARGS, NULL},
    {"has_gradients", ptn_python_has_gradients, METH_NOARGS, NULL},
    {"charge", engine_charge, METH_O, NULL},
    {"use_account", engine_use_account, METH_VARARGS, NULL},
    {"leave_account", engine_leave_account, METH_NOARGS, NULL},
    {"stats", ptn_python_stats, METH_NOARGS, NULL},
    {"held", ptn_python_held, METH_NOARGS, NULL},
    {"mark", ptn_python_mark, METH_NOARGS, NULL},
    {"mark_yielded", ptn_python_mark_yielded, METH_NOARGS, NULL},
    {"set_goal", ptn_python_set_goal, METH_O, NULL},
    {"set_named", ptn_python_set_named, METH_O, NULL},
    {"set_growth", ptn_python_set_growth, METH_O, NULL},
    {"set_headroom", ptn_python_set_headroom, METH_VARARGS, NULL},
    {"stash_begin", ptn_python_stash_begin, METH_NOARGS, NULL},
    {"stash_flush", ptn_python_stash_flush, METH_NOARGS, NULL},
    {"stash_end", ptn_python_stash_end, METH_NOARGS, NULL},
    {"stash_go_on", ptn_python_stash_go_on, METH_NOARGS, NULL},
    {"stash_near", ptn_python_stash_near, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, (void *)engine_new},
    {Py_tp_dealloc, (void *)engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_doc, "The engine of one wrapped model: csrc/runtime/engine.h; types in _core.pyi."},
    {0, NULL},
};

PyType_Spec ptn_engine_spec = {
    .name = "protrain._core.Engine",
    .basicsize = sizeof(engine_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = engine_slots,
};
