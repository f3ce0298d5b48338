/* Engine's methods about memory: its account's goal, the stash around a forward, and all figures. */
#include "python/engine_methods.h"
#include "runtime/stash.h"

/* ---- figures ---- */

typedef struct figure {
  const char *name;
  long long value;
} figure;

static bool add_figures(PyObject *dict, const figure *figures, size_t count) {
  for (size_t i = 0; i < count; i++) {
    PyObject *value = PyLong_FromLongLong(figures[i].value);
    bool added = value && PyDict_SetItemString(dict, figures[i].name, value) == 0;
    Py_XDECREF(value);
    if (!added) return false;
  }
  return true;
}

#define ADD(dict, figures) add_figures(dict, figures, sizeof(figures) / sizeof *(figures))

/* host_account: of ordinary memory beside a device, or NULL. */
static bool add_engine(PyObject *dict, ptn_engine *engine, const ptn_account *host_account) {
  ptn_engine_stats stats;
  ptn_engine_get_stats(engine, &stats);
  ptn_account_stats host = {0};
  if (host_account) ptn_account_get_stats(host_account, &host);
  const figure figures[] = {
      {"wait_ns", stats.wait_ns},
      {"update_ns", stats.update_ns},
      {"loaded_bytes", (long long)stats.loaded_bytes},
      {"loads", (long long)stats.loads},
      {"hits", (long long)stats.hits},
      {"torn_writes", (long long)stats.torn_writes},
      {"disk_bytes", (long long)stats.disk_bytes},
      {"host_bytes", (long long)(stats.host_bytes + host.live_bytes)},
      {"device_bytes", (long long)stats.device_bytes},
  };
  return ADD(dict, figures);
}

static bool add_store(PyObject *dict, ptn_store *store) {
  ptn_store_stats stats;
  ptn_store_get_stats(store, &stats);
  const figure figures[] = {
      {"disk_read_bytes", (long long)stats.read_bytes},
      {"disk_write_bytes", (long long)stats.write_bytes},
      {"disk_read_ns", (long long)stats.read_ns},
      {"disk_write_ns", (long long)stats.write_ns},
      {"disk_unwritten_bytes", (long long)stats.unwritten_bytes},
      {"disk_checksum_ns", stats.checksum_ns},
  };
  PyObject *name = PyUnicode_FromString(ptn_store_engine_name(store));
  bool added = name && PyDict_SetItemString(dict, "disk_engine", name) == 0;
  Py_XDECREF(name);
  return added && ADD(dict, figures);
}

static bool add_account(PyObject *dict, const ptn_account *account) {
  ptn_account_stats stats;
  ptn_account_get_stats(account, &stats);
  const figure figures[] = {
      {"live_bytes", (long long)stats.live_bytes},       {"peak_bytes", (long long)stats.peak_bytes},
      {"refused_bytes", (long long)stats.refused_bytes}, {"limit_bytes", (long long)stats.limit_bytes},
      {"goal_bytes", (long long)stats.goal_bytes},
  };
  return ADD(dict, figures);
}

static bool add_stash(PyObject *dict, ptn_stash *stash) {
  ptn_stash_stats stats;
  ptn_stash_get_stats(stash, &stats);
  const figure figures[] = {
      {"stash_put_count", (long long)stats.put_count},
      {"stash_record_count", (long long)stats.record_count},
      {"stash_put_bytes", (long long)stats.put_bytes},
      {"stash_written_bytes", (long long)stats.written_bytes},
      {"stash_read_bytes", (long long)stats.read_bytes},
      {"stash_forwarded_bytes", (long long)stats.forwarded_bytes},
      {"stash_memory_bytes", (long long)stats.memory_bytes},
      {"stash_disk_bytes", (long long)stats.disk_bytes},
      {"stash_most_disk_bytes", (long long)stats.most_disk_bytes},
      {"stash_wait_ns", stats.wait_ns},
  };
  return ADD(dict, figures);
}

/* Over a device: memory_bytes are the host's, and what brings tells is what came back from there. */
static bool add_device_stash(PyObject *dict, ptn_device_stash *stash) {
  ptn_device_stash_stats stats;
  ptn_device_stash_get_stats(stash, &stats);
  const figure figures[] = {
      {"stash_record_count", (long long)stats.record_count},
      {"stash_put_bytes", (long long)stats.put_bytes},
      {"stash_brought_bytes", (long long)stats.brought_bytes},
      {"stash_written_bytes", (long long)stats.written_bytes},
      {"stash_read_bytes", (long long)stats.read_bytes},
      {"stash_host_bytes", (long long)stats.host_bytes},
      {"stash_disk_bytes", (long long)stats.disk_bytes},
      {"stash_most_disk_bytes", (long long)stats.most_disk_bytes},
      {"stash_wait_ns", stats.wait_ns},
  };
  return ADD(dict, figures);
}

PyObject *ptn_python_stats(PyObject *object, PyObject *unused) {
  (void)unused;
  ptn_engine *engine = ptn_python_engine(object);
  PyObject *dict = engine ? PyDict_New() : NULL;
  if (!dict) return NULL;
  if (!add_engine(dict, engine, ptn_python_host_account(object)) || !add_store(dict, ptn_engine_store(engine)) ||
      !add_account(dict, ptn_python_account(object)) || !add_stash(dict, ptn_engine_stash(engine)) ||
      (ptn_engine_over_device(engine) && !add_device_stash(dict, ptn_engine_device_stash(engine))))
    Py_CLEAR(dict);
  return dict;
}

PyObject *ptn_python_held(PyObject *object, PyObject *unused) {
  (void)unused;
  ptn_engine *engine = ptn_python_engine(object);
  PyObject *dict = engine ? PyDict_New() : NULL;
  if (!dict) return NULL;
  ptn_engine_held held;
  ptn_engine_get_held(engine, &held);
  ptn_stash_stats stash;
  ptn_stash_get_stats(ptn_engine_stash(engine), &stash);
  ptn_account_stats account;
  ptn_account_get_stats(ptn_python_account(object), &account);
  const figure figures[] = {
      {"live_bytes", (long long)account.live_bytes},
      {"parameter_bytes", (long long)held.parameter_bytes},
      {"state_bytes", (long long)held.state_bytes},
      {"slot_bytes", (long long)held.slot_bytes},
      {"ring_bytes", (long long)held.ring_bytes},
      {"gradient_bytes", (long long)held.gradient_bytes},
      {"stash_memory_bytes", (long long)stash.memory_bytes},
      {"yielded_bytes", (long long)held.yielded_bytes},
  };
  if (!ADD(dict, figures)) Py_CLEAR(dict);
  return dict;
}

PyObject *ptn_python_mark(PyObject *object, PyObject *unused) {
  (void)unused;
  if (!ptn_python_engine(object)) return NULL;
  return PyLong_FromUnsignedLongLong(ptn_account_mark(ptn_python_account(object)));
}

PyObject *ptn_python_mark_yielded(PyObject *object, PyObject *unused) {
  (void)unused;
  ptn_engine *engine = ptn_python_engine(object);
  return engine ? PyLong_FromUnsignedLongLong(ptn_engine_yielded(engine, true)) : NULL;
}

/* ---- the goal, and the stash around a forward ---- */

static PyObject *set_of_account(PyObject *object, PyObject *number, void (*set)(ptn_account *, uint64_t)) {
  if (!ptn_python_engine(object)) return NULL;
  unsigned long long bytes = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred()) return NULL;
  set(ptn_python_account(object), bytes);
  Py_RETURN_NONE;
}

PyObject *ptn_python_set_goal(PyObject *object, PyObject *number) { return set_of_account(object, number, ptn_account_set_goal); }

PyObject *ptn_python_set_named(PyObject *object, PyObject *number) {
  return set_of_account(object, number, ptn_account_set_named);
}

PyObject *ptn_python_set_growth(PyObject *object, PyObject *number) {
  return set_of_account(object, number, ptn_account_set_growth);
}

PyObject *ptn_python_set_headroom(PyObject *object, PyObject *arguments) {
  ptn_engine *engine = ptn_python_engine(object);
  unsigned long long headroom_bytes, recompute_bytes;
  if (!engine || !PyArg_ParseTuple(arguments, "O&O&", ptn_python_u64, &headroom_bytes, ptn_python_u64, &recompute_bytes))
    return NULL;
  ptn_stash_set_headroom(ptn_engine_stash(engine), headroom_bytes, recompute_bytes);
  Py_RETURN_NONE;
}

PyObject *ptn_python_stash_begin(PyObject *object, PyObject *unused) {
  (void)unused;
  ptn_engine *engine = ptn_python_engine(object);
  if (!engine) return NULL;
  ptn_stash_begin(ptn_engine_stash(engine));
  if (ptn_engine_over_device(engine)) ptn_device_stash_begin(ptn_engine_device_stash(engine));
  Py_RETURN_NONE;
}

PyObject *ptn_python_stash_flush(PyObject *object, PyObject *unused) {
  (void)unused;
  ptn_engine *engine = ptn_python_drive(object);
  if (!engine) return NULL;
  PTN_IN_ENGINE(object, ptn_stash_flush(ptn_engine_stash(engine)));
  Py_RETURN_NONE;
}

PyObject *ptn_python_stash_end(PyObject *object, PyObject *unused) {
  (void)unused;
  ptn_engine *engine = ptn_python_engine(object);
  if (!engine) return NULL;
  ptn_stash_end(ptn_engine_stash(engine));
  if (ptn_engine_over_device(engine)) ptn_device_stash_end(ptn_engine_device_stash(engine));
  Py_RETURN_NONE;
}

PyObject *ptn_python_stash_go_on(PyObject *object, PyObject *unused) {
  (void)unused;
  ptn_engine *engine = ptn_python_engine(object);
  if (!engine) return NULL;
  ptn_stash_go_on(ptn_engine_stash(engine));
  Py_RETURN_NONE;
}

PyObject *ptn_python_stash_near(PyObject *object, PyObject *number) {
  ptn_engine *engine = ptn_python_engine(object);
  if (!engine) return NULL;
  long block = PyLong_AsLong(number);
  if (block == -1 && PyErr_Occurred()) return NULL;
  ptn_stash_near(ptn_engine_stash(engine), (int32_t)block);
  Py_RETURN_NONE;
}
