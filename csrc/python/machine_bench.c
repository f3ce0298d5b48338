/* MachineBench: lanes to run beside compute, for calibration.py, which runs the compute and draws the conclusions.
 *
 * The disk's lanes are the store's own traffic (profile/measure.h), the update lane is a worker with the kernel that the lane
 * calls and the checksums that it takes, over pieces as large as the lane's. Both use one stretch of memory, in no budget, and so one
 * at a time; it is filled with an ordinary number, since numbers too small for the processor's fast path would be the slowest there
 * are. Updates that compute's threads make, for the lane or in step(), are timed by themselves.
 *
 * Problem: chunks updated in step() are larger than any cache, and this memory may fit one. Design: what is measured is thrown out
 * of the caches first, and once more within the measured time: large memory would have to be written back too. Pages whose
 * checksums are timed are summed twice, out of no cache and out of one: what a training run reads from the disk came past the caches,
 * what it writes has just been computed. Where a processor has no instruction for that, the figures are a cache's.
 */
#include <stdatomic.h>
#include <string.h>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/openmp.h"
#include "disk/engine.h"
#include "memory/arena.h"
#include "profile/measure.h"
#include "python/binding.h"
#include "runtime/engine.h"

#define REQUEST_BYTES ((uint64_t)PTN_MIB) /* between a record of a small model and a piece of the store */
#define PIECE_COUNT ((size_t)PTN_MIB / sizeof(float)) /* of each array of the update lane */
#define ARRAYS 4 /* parameters, two of state, gradients */
#define UPDATED_ARRAYS 3
#define CHECKSUM_TIMES 2

typedef struct bench_object {
  PyObject_HEAD
  ptn_store *store;
  ptn_traffic *traffic;
  ptn_worker *worker;    /* NULL: none runs */
  ptn_worker_count work; /* of all workers that were stopped */
  float *memory;
  uint64_t memory_bytes;
  _Atomic uint32_t sums; /* all of them: somebody has to want them */
  size_t next; /* where the worker goes on, in elements of an array */
  ptn_update update;
  bool running; /* something was started and not stopped */
  int forks;    /* of the process that made it */
} bench_object;

static size_t array_count(const bench_object *self) { return (size_t)self->memory_bytes / ARRAYS / sizeof(float); }

static void run_update(const bench_object *self, bool shared, size_t first, size_t count) {
  size_t all = array_count(self);
  float *state[PTN_STATE_MAX] = {self->memory + all + first, self->memory + 2 * all + first};
  ptn_update_run(shared, &self->update, self->memory + first, state, self->memory + 3 * all + first,
                 (ptn_span){first, count, all});
}

/* ---- work ---- */

static void sum_pages(bench_object *self, const char *memory, size_t bytes) {
  ptn_checksum_function sum = ptn_checksum_best();
  uint32_t sums = 0;
  for (size_t page = 0; page < bytes; page += PTN_PAGE_BYTES) sums ^= sum(memory + page, PTN_PAGE_BYTES);
  atomic_fetch_xor(&self->sums, sums);
}

/* Of what an update reads from the disk, or writes there. */
static void sum_arrays(bench_object *self, size_t first, size_t count) {
  for (size_t array = 0; array < UPDATED_ARRAYS; array++)
    sum_pages(self, (const char *)(self->memory + array * array_count(self) + first), count * sizeof(float));
}

#define PART_COUNT (PTN_UPDATE_PART_BYTES / sizeof(float))

/* begin and end in parts. */
static void update_parts(void *context, size_t begin, size_t end) {
  for (size_t first = begin * PART_COUNT; first < end * PART_COUNT; first += PART_COUNT) {
    sum_arrays(context, first, PART_COUNT);
    run_update(context, false, first, PART_COUNT);
    sum_arrays(context, first, PART_COUNT);
  }
}

static uint64_t update_piece(void *context) {
  bench_object *self = context;
  if (self->next + PIECE_COUNT > array_count(self)) self->next = 0;
  update_parts(self, self->next / PART_COUNT, (self->next + PIECE_COUNT) / PART_COUNT);
  self->next += PIECE_COUNT;
  return UPDATED_ARRAYS * PIECE_COUNT * sizeof(float);
}

/* ---- out of the caches ---- */

#if defined(__x86_64__)
#include <immintrin.h>
#define LINE_BYTES ((size_t)64)

__attribute__((target("clflushopt"))) static void flush_unordered(const char *memory, size_t bytes) {
  for (size_t at = 0; at < bytes; at += LINE_BYTES) _mm_clflushopt((void *)(uintptr_t)(memory + at));
  _mm_sfence();
}

static void flush(const char *memory, size_t bytes) {
  if (__builtin_cpu_supports("clflushopt")) {
    flush_unordered(memory, bytes);
    return;
  }
  for (size_t at = 0; at < bytes; at += LINE_BYTES) _mm_clflush(memory + at);
}
#else
static void flush(const char *memory, size_t bytes) {
  (void)memory;
  (void)bytes;
}
#endif

static void flush_pages(void *context, size_t begin, size_t end) {
  flush((const char *)context + begin * PTN_PAGE_BYTES, (end - begin) * PTN_PAGE_BYTES);
}

/* ---- construction ---- */

static void close_bench(bench_object *self) {
  if (self->forks == ptn_python_forks) { /* else its threads and locks are another process's */
    if (self->worker) ptn_worker_stop(self->worker, NULL);
    ptn_traffic_destroy(self->traffic);
    ptn_store_destroy(self->store);
    ptn_arena_free(self->memory);
  }
  self->worker = NULL;
  self->traffic = NULL;
  self->store = NULL;
  self->memory = NULL;
}

static ptn_status open_bench(bench_object *self, const char *folder, uint64_t file_bytes, bool fused) {
  void *memory;
  PTN_TRY(ptn_arena_alloc(NULL, self->memory_bytes, &memory));
  self->memory = memory;
  for (size_t i = 0; i < self->memory_bytes / sizeof(float); i++) self->memory[i] = 0.01f;
  ptn_hyper hyper = {
      .kind = PTN_ADAMW, .fused = fused, .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
  PTN_TRY(ptn_update_prepare(&self->update, &hyper, 100, 1.0f));
  /* Each request by itself: what one of a size costs is what is asked. */
  PTN_TRY(ptn_store_create_with(&self->store, folder, &(ptn_store_options){.parts_count = 1}));
  return ptn_traffic_create(&self->traffic, self->store, file_bytes, memory, self->memory_bytes, REQUEST_BYTES);
}

static PyObject *bench_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"folder", "memory_bytes", "file_bytes", "fused", NULL};
  PyObject *folder;
  unsigned long long memory_bytes, file_bytes;
  int fused = 1;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O&O&O&|p", names, PyUnicode_FSConverter, &folder, ptn_python_u64,
                                   &memory_bytes, ptn_python_u64, &file_bytes, &fused))
    return NULL;
  bench_object *self = NULL;
  if (memory_bytes % (ARRAYS * PIECE_COUNT * sizeof(float)) != 0 || memory_bytes == 0)
    PyErr_Format(PyExc_ValueError, "memory_bytes is %llu; a positive multiple of %zu is wanted", memory_bytes,
                 ARRAYS * PIECE_COUNT * sizeof(float));
  else self = PyObject_New(bench_object, type);
  if (!self) {
    Py_DECREF(folder);
    return NULL;
  }
  memset(&self->store, 0, sizeof *self - offsetof(bench_object, store));
  self->forks = ptn_python_forks;
  self->memory_bytes = memory_bytes;
  ptn_status status;
  ptn_error error;
  const char *path = PyBytes_AsString(folder);
  Py_BEGIN_ALLOW_THREADS
  status = open_bench(self, path, file_bytes, fused != 0);
  if (status != PTN_OK) {
    ptn_error_save(&error);
    close_bench(self);
    (void)ptn_error_restore(&error);
  }
  Py_END_ALLOW_THREADS
  Py_DECREF(folder);
  if (status == PTN_OK) return (PyObject *)self;
  ptn_python_raise();
  Py_DECREF(self);
  return NULL;
}

static PyObject *bench_close(PyObject *object, PyObject *unused) {
  (void)unused;
  Py_BEGIN_ALLOW_THREADS
  close_bench((bench_object *)object);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static void bench_dealloc(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  Py_BEGIN_ALLOW_THREADS
  close_bench((bench_object *)object);
  Py_END_ALLOW_THREADS
  PyObject_Free(object);
  Py_DECREF(type);
}

/* NULL with an exception set where it cannot be used. */
static bench_object *open_one(PyObject *object) {
  bench_object *self = (bench_object *)object;
  if (self->traffic && self->forks == ptn_python_forks) return self;
  PyErr_SetString(PyExc_RuntimeError,
                  self->traffic ? "a MachineBench cannot be used in a forked process" : "this MachineBench is closed");
  return NULL;
}

/* The same where something already uses the memory. */
static bench_object *idle_one(PyObject *object) {
  bench_object *self = open_one(object);
  if (!self || !self->running) return self;
  PyErr_SetString(PyExc_RuntimeError, "this MachineBench runs something: call stop() first");
  return NULL;
}

/* ---- methods ---- */

static PyObject *start_disk(PyObject *object, PyObject *arguments) {
  bench_object *self = idle_one(object);
  int reads, writes;
  unsigned long long bytes = REQUEST_BYTES;
  if (!self || !PyArg_ParseTuple(arguments, "pp|O&", &reads, &writes, ptn_python_u64, &bytes)) return NULL;
  ptn_status status;
  PTN_WITHOUT_GIL(status, ptn_traffic_start(self->traffic, reads != 0, writes != 0, bytes));
  if (status != PTN_OK) return ptn_python_raise();
  self->running = true;
  Py_RETURN_NONE;
}

static PyObject *start_update(PyObject *object, PyObject *arguments) {
  bench_object *self = idle_one(object);
  double rest;
  if (!self || !PyArg_ParseTuple(arguments, "d", &rest)) return NULL;
  self->next = 0;
  if (ptn_worker_start(&self->worker, update_piece, self, rest) != PTN_OK) return ptn_python_raise();
  self->running = true;
  Py_RETURN_NONE;
}

static void add_work(ptn_worker_count *sum, const ptn_worker_count *term) {
  sum->bytes += term->bytes;
  sum->busy_ns += term->busy_ns;
  sum->processor_ns += term->processor_ns;
}

static PyObject *look(PyObject *object, PyObject *unused) {
  (void)unused;
  bench_object *self = open_one(object);
  if (!self) return NULL;
  ptn_traffic_count disk;
  ptn_worker_count work = self->work, more = {0};
  if (ptn_traffic_look(self->traffic, &disk) != PTN_OK) return ptn_python_raise();
  if (self->worker) ptn_worker_look(self->worker, &more);
  add_work(&work, &more);
  return Py_BuildValue("(LKKLKKLL)", disk.at_ns, disk.read_bytes, disk.write_bytes, disk.processor_ns, disk.processor_bytes,
                       work.bytes, work.busy_ns, work.processor_ns);
}

static PyObject *stop(PyObject *object, PyObject *unused) {
  (void)unused;
  bench_object *self = open_one(object);
  if (!self) return NULL;
  ptn_worker *worker = self->worker;
  ptn_worker_count last = {0};
  self->worker = NULL;
  self->running = false;
  ptn_status status;
  Py_BEGIN_ALLOW_THREADS
  if (worker) ptn_worker_stop(worker, &last);
  status = ptn_traffic_stop(self->traffic);
  Py_END_ALLOW_THREADS
  add_work(&self->work, &last);
  if (status != PTN_OK) return ptn_python_raise();
  Py_RETURN_NONE;
}

static PyObject *update_in_memory(PyObject *object, PyObject *unused) {
  (void)unused;
  bench_object *self = idle_one(object);
  if (!self) return NULL;
  size_t updated_bytes = UPDATED_ARRAYS * array_count(self) * sizeof(float);
  int64_t begin_ns, end_ns;
  Py_BEGIN_ALLOW_THREADS
  ptn_openmp_run((size_t)(self->memory_bytes / PTN_PAGE_BYTES), 1, flush_pages, self->memory);
  begin_ns = ptn_now_ns();
  run_update(self, true, 0, array_count(self));
  ptn_openmp_run(updated_bytes / PTN_PAGE_BYTES, 1, flush_pages, self->memory);
  end_ns = ptn_now_ns();
  Py_END_ALLOW_THREADS
  return Py_BuildValue("(KL)", (unsigned long long)updated_bytes, end_ns - begin_ns);
}

/* What was read past the caches; what is written goes to the disk out of them. */
static PyObject *update_shared(PyObject *object, PyObject *unused) {
  (void)unused;
  bench_object *self = idle_one(object);
  if (!self) return NULL;
  int64_t begin_ns, end_ns;
  Py_BEGIN_ALLOW_THREADS
  ptn_openmp_run((size_t)(self->memory_bytes / PTN_PAGE_BYTES), 1, flush_pages, self->memory);
  begin_ns = ptn_now_ns();
  ptn_openmp_run(array_count(self) / PART_COUNT, 1, update_parts, self);
  end_ns = ptn_now_ns();
  Py_END_ALLOW_THREADS
  return Py_BuildValue("(KL)", (unsigned long long)(UPDATED_ARRAYS * array_count(self) * sizeof(float)), end_ns - begin_ns);
}

/* A MiB at a time: the clock of a thread costs as much as a page. */
static PyObject *checksums(PyObject *object, PyObject *unused) {
  (void)unused;
  bench_object *self = idle_one(object);
  if (!self) return NULL;
  int64_t spent_ns = 0;
  Py_BEGIN_ALLOW_THREADS
  for (uint64_t at = 0; at < self->memory_bytes; at += PTN_MIB) {
    const char *memory = (const char *)self->memory + at;
    flush(memory, (size_t)PTN_MIB);
    int64_t begin_ns = ptn_thread_processor_ns();
    for (int time = 0; time < CHECKSUM_TIMES; time++) sum_pages(self, memory, (size_t)PTN_MIB);
    spent_ns += ptn_thread_processor_ns() - begin_ns;
  }
  Py_END_ALLOW_THREADS
  return Py_BuildValue("(KL)", CHECKSUM_TIMES * (unsigned long long)self->memory_bytes, spent_ns);
}

static PyObject *engine_name(PyObject *object, void *unused) {
  (void)unused;
  bench_object *self = open_one(object);
  return self ? PyUnicode_FromString(ptn_store_engine_name(self->store)) : NULL;
}

static PyObject *first_write_ns(PyObject *object, void *unused) {
  (void)unused;
  bench_object *self = open_one(object);
  return self ? PyLong_FromLongLong(ptn_traffic_first_write_ns(self->traffic)) : NULL;
}

static PyObject *shares_updates(PyObject *object, void *unused) {
  (void)object;
  (void)unused;
  return PyBool_FromLong(ptn_openmp_takes_all_cores());
}

static PyMethodDef methods[] = {
    {"start_disk", start_disk, METH_VARARGS, NULL},
    {"start_update", start_update, METH_VARARGS, NULL},
    {"look", look, METH_NOARGS, NULL},
    {"stop", stop, METH_NOARGS, NULL},
    {"update_in_memory", update_in_memory, METH_NOARGS, NULL},
    {"update_shared", update_shared, METH_NOARGS, NULL},
    {"checksums", checksums, METH_NOARGS, NULL},
    {"close", bench_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"engine", engine_name, NULL, "What moves bytes to the disk and back.", NULL},
    {"first_write_ns", first_write_ns, NULL, "Time of the first write of the file.", NULL},
    {"shares_updates", shares_updates, NULL, "Whether compute's threads make the update lane's updates.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)bench_new}, {Py_tp_dealloc, (void *)bench_dealloc},      {Py_tp_methods, methods},
    {Py_tp_getset, getset},         {Py_tp_doc, "Lanes to run beside compute."}, {0, NULL},
};

PyType_Spec ptn_machine_bench_spec = {
    .name = "protrain._core.MachineBench",
    .basicsize = sizeof(bench_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
