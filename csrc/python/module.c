/* protrain._core: the module. Multi-phase init, state per module, the main interpreter alone. */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/checksum.h"
#include "device/direct_storage.h"
#include "disk/engine.h"
#include "memory/arena.h"
#include "python/binding.h"
#include "torch/allocator.h"
#include "torch/square_roots.h"
#include "torch/storage.h"

int ptn_python_forks;
static pthread_once_t watch_once = PTHREAD_ONCE_INIT;
static void count_fork(void) { ptn_python_forks++; }
static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

/* torch asks for memory with or without the GIL and gets an exception with it. */
static void raise_from_allocator(ptn_status status) {
  (void)status; /* the thread's record has it */
  PyGILState_STATE state = PyGILState_Ensure();
  ptn_python_raise();
  PyGILState_Release(state);
}

static PyObject *install_allocator(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  ptn_torch_install_allocator();
  Py_RETURN_NONE;
}

static PyObject *rounded_bytes(PyObject *module, PyObject *number) {
  (void)module;
  unsigned long long bytes = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred()) return NULL;
  return PyLong_FromUnsignedLongLong(bytes ? ptn_arena_rounded_bytes(bytes) : 0);
}

static PyObject *memory_stats(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  ptn_arena_stats stats;
  ptn_arena_get_stats(&stats);
  return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K}", "live_bytes", stats.live_bytes, "cached_bytes", stats.cached_bytes,
                       "resident_bytes", stats.resident_bytes, "high_water_bytes", stats.high_water_bytes, "mapped_count",
                       stats.mapped_count);
}

static PyObject *trim(PyObject *module, PyObject *number) {
  (void)module;
  unsigned long long keep = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred()) return NULL;
  Py_BEGIN_ALLOW_THREADS
  ptn_arena_trim(keep);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static PyObject *move_apart(PyObject *module, PyObject *apart) {
  (void)module;
  int wanted = PyObject_IsTrue(apart);
  if (wanted < 0) return NULL;
  ptn_store_set_parts(wanted ? 1 : 0);
  Py_RETURN_NONE;
}

/* What follows belongs to no budget (None), or to the account again that it gave. */
static PyObject *swap_account(PyObject *module, PyObject *capsule) {
  (void)module;
  ptn_account *account = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, "protrain.account");
  if (PyErr_Occurred()) return NULL;
  ptn_account *before = ptn_arena_use(account);
  if (!before) Py_RETURN_NONE;
  return PyCapsule_New(before, "protrain.account", NULL);
}

/* What this thread makes belongs to no budget from now on (True), or to that of whoever counts. Returns what was. */
static PyObject *set_apart(PyObject *module, PyObject *on) {
  (void)module;
  int wanted = PyObject_IsTrue(on);
  return wanted < 0 ? NULL : PyBool_FromLong(ptn_arena_set_apart(wanted));
}

/* The block in which this address lies is written to no disk to save memory: it lives on (arena.h). */
static PyObject *mark_static(PyObject *module, PyObject *number) {
  (void)module;
  const void *address = PyLong_AsVoidPtr(number);
  if (PyErr_Occurred()) return NULL;
  ptn_block block;
  if (ptn_arena_find(address, &block)) ptn_arena_set_use(block.memory, PTN_BLOCK_STATIC);
  Py_RETURN_NONE;
}

/* swap_memory(_cdata of a storage of torch's, of another one of as many bytes) */
static PyObject *swap_memory(PyObject *module, PyObject *arguments) {
  (void)module;
  PyObject *one, *other;
  if (!PyArg_ParseTuple(arguments, "OO:swap_memory", &one, &other)) return NULL;
  void *first = PyLong_AsVoidPtr(one), *second = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(other);
  if (PyErr_Occurred()) return NULL;
  ptn_torch_swap_memory(first, second);
  Py_RETURN_NONE;
}

/* checksum(buffer, sum of what comes before it) */
static PyObject *checksum(PyObject *module, PyObject *arguments) {
  (void)module;
  Py_buffer buffer;
  unsigned int before = 0;
  if (!PyArg_ParseTuple(arguments, "y*|O&:checksum", &buffer, ptn_python_u32, &before)) return NULL;
  uint32_t sum;
  Py_BEGIN_ALLOW_THREADS;
  sum = ptn_checksum_best()(buffer.buf, (size_t)buffer.len);
  sum = ptn_checksum_joined(before, sum, (uint64_t)buffer.len);
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&buffer);
  return PyLong_FromUnsignedLong(sum);
}

static PyObject *runs(ptn_simd simd) { return ptn_update_kernel_for(PTN_ADAM, simd) ? Py_True : Py_False; }

static PyObject *cpu_features(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  return Py_BuildValue("{s:s,s:O,s:O,s:O}", "best", ptn_simd_name(ptn_simd_best()), "avx2", runs(PTN_SIMD_AVX2), "avx512",
                       runs(PTN_SIMD_AVX512), "neon", runs(PTN_SIMD_NEON));
}

/* direct_storage(library or none, folder of the kernel's module or none) */
static PyObject *direct_storage(PyObject *module, PyObject *arguments) {
  (void)module;
  const char *library = NULL, *folder = NULL;
  if (!PyArg_ParseTuple(arguments, "|ss", &library, &folder)) return NULL;
  ptn_direct_storage found;
  Py_BEGIN_ALLOW_THREADS;
  ptn_direct_storage_find(&found, library, folder);
  Py_END_ALLOW_THREADS;
  return Py_BuildValue("{s:O,s:i,s:O,s:s,s:s}", "library", found.library ? Py_True : Py_False, "version", found.version, "module",
                       found.module ? Py_True : Py_False, "module_version", found.module_version, "reason", found.reason);
}

static PyMethodDef module_methods[] = {
    {"install_allocator", install_allocator, METH_NOARGS, NULL},
    {"rounded_bytes", rounded_bytes, METH_O, NULL},
    {"memory_stats", memory_stats, METH_NOARGS, NULL},
    {"trim", trim, METH_O, NULL},
    {"swap_account", swap_account, METH_O, NULL},
    {"set_apart", set_apart, METH_O, NULL},
    {"move_apart", move_apart, METH_O, NULL},
    {"mark_static", mark_static, METH_O, NULL},
    {"swap_memory", swap_memory, METH_VARARGS, NULL},
    {"checksum", checksum, METH_VARARGS, NULL},
    {"cpu_features", cpu_features, METH_NOARGS, NULL},
    {"direct_storage", direct_storage, METH_VARARGS, NULL},
    {"update", (PyCFunction)(void (*)(void))ptn_python_update, METH_VARARGS | METH_KEYWORDS, NULL},
    {"layout", ptn_python_layout, METH_VARARGS, NULL},
    {"layout_size", ptn_python_layout_size, METH_VARARGS, NULL},
    {"make_plan", ptn_python_make_plan, METH_VARARGS, NULL},
    {"disk_bench", ptn_python_disk_bench, METH_VARARGS, NULL},
    {"trace_events", ptn_python_trace_events, METH_VARARGS, NULL},
    {"trace_grow", ptn_python_trace_grow, METH_O, NULL},
    {"trace_add", ptn_python_trace_add, METH_VARARGS, NULL},
    {"now_ns", ptn_python_now_ns, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, PyType_Spec *spec, const char *name, PyObject **out) {
  *out = PyType_FromModuleAndSpec(module, spec, NULL);
  if (!*out) return -1;
  return PyModule_AddObjectRef(module, name, *out);
}

/* The allocator is torch's, of the whole process, and what it raises goes to the main interpreter: no other one can use it. */
static int check_interpreter(void) {
  int64_t number = PyInterpreterState_GetID(PyInterpreterState_Get());
  if (number == 0) return 0;
  if (number > 0)
    PyErr_Format(PyExc_ImportError,
                 "protrain can be used in the main interpreter of a process only, and this is its subinterpreter %lld: import it "
                 "in the main one, or in a process of its own",
                 (long long)number);
  return -1;
}

/* What the arena gives back to the kernel, in its own pages, would be rounded up to larger ones, over what others have. */
static int check_pages(void) {
  long page_bytes = sysconf(_SC_PAGESIZE);
  if (page_bytes == (long)PTN_PAGE_BYTES) return 0;
  PyErr_Format(PyExc_ImportError,
               "protrain needs a kernel with pages of %zu bytes, and this one has pages of %ld: boot one with those",
               PTN_PAGE_BYTES, page_bytes);
  return -1;
}

static int exec_module(PyObject *module) {
  ptn_module_state *state = PyModule_GetState(module);
  if (check_interpreter() < 0 || check_pages() < 0) return -1;
  ptn_torch_raise = raise_from_allocator;
  ptn_torch_use_square_roots();
  pthread_once(&watch_once, watch_forks);
  if (add_type(module, &ptn_region_spec, "Region", &state->region_type) < 0) return -1;
  if (add_type(module, &ptn_device_spec, "Device", &state->device_type) < 0) return -1;
  if (add_type(module, &ptn_engine_spec, "Engine", &state->engine_type) < 0) return -1;
  if (add_type(module, &ptn_saved_spec, "Saved", &state->saved_type) < 0) return -1;
  if (add_type(module, &ptn_saved_tensors_spec, "SavedTensors", &state->saved_tensors_type) < 0) return -1;
  if (add_type(module, &ptn_recomputed_spec, "Recomputed", &state->recomputed_type) < 0) return -1;
  if (add_type(module, &ptn_saved_order_spec, "SavedOrder", &state->saved_order_type) < 0) return -1;
  if (add_type(module, &ptn_device_record_spec, "DeviceRecord", &state->device_record_type) < 0) return -1;
  return add_type(module, &ptn_machine_bench_spec, "MachineBench", &state->machine_bench_type);
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
  ptn_module_state *state = PyModule_GetState(module);
  Py_VISIT(state->region_type);
  Py_VISIT(state->device_type);
  Py_VISIT(state->engine_type);
  Py_VISIT(state->saved_type);
  Py_VISIT(state->saved_tensors_type);
  Py_VISIT(state->recomputed_type);
  Py_VISIT(state->saved_order_type);
  Py_VISIT(state->device_record_type);
  Py_VISIT(state->machine_bench_type);
  return 0;
}

static int clear(PyObject *module) {
  ptn_module_state *state = PyModule_GetState(module);
  Py_CLEAR(state->region_type);
  Py_CLEAR(state->device_type);
  Py_CLEAR(state->engine_type);
  Py_CLEAR(state->saved_type);
  Py_CLEAR(state->saved_tensors_type);
  Py_CLEAR(state->recomputed_type);
  Py_CLEAR(state->saved_order_type);
  Py_CLEAR(state->device_record_type);
  Py_CLEAR(state->machine_bench_type);
  return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)exec_module}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "protrain._core",
    .m_doc = "The C core of protrain.",
    .m_size = sizeof(ptn_module_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = traverse,
    .m_clear = clear,
};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
