/* A short measurement of a folder's disk through the store itself: what `protrain doctor` shows. */
#include <stdio.h>
#include <string.h>

#include "base/bytes.h"
#include "python/binding.h"

#define REQUEST_BYTES ((uint64_t)4 << 20)

typedef struct figures {
  double write_seconds, read_seconds;
  uint64_t bytes;
  char engine[16];
} figures;

static ptn_status move_all(ptn_store *store, void *memory, const ptn_extent *extent, bool write, double *seconds) {
  int64_t begin = ptn_now_ns();
  for (uint64_t done = 0; done < extent->bytes; done += REQUEST_BYTES * 4)
    PTN_TRY(
        ptn_store_transfer(store, memory, extent->offset + done, ptn_min_u64(REQUEST_BYTES * 4, extent->bytes - done), write));
  *seconds = (double)(ptn_now_ns() - begin) / 1e9;
  return PTN_OK;
}

/* Written once before it is timed: what a training run does over and over is to rewrite. */
static ptn_status measure(ptn_store *store, uint64_t bytes, figures *out) {
  ptn_extent extent = {0};
  void *memory = NULL;
  double first;
  PTN_TRY(ptn_arena_alloc(NULL, REQUEST_BYTES * 4, &memory));
  memset(memory, 1, REQUEST_BYTES * 4);
  ptn_status status = ptn_store_reserve(store, bytes, &extent);
  if (status == PTN_OK) status = move_all(store, memory, &extent, true, &first);
  if (status == PTN_OK) status = move_all(store, memory, &extent, true, &out->write_seconds);
  if (status == PTN_OK) status = move_all(store, memory, &extent, false, &out->read_seconds);
  out->bytes = extent.bytes;
  ptn_store_release(store, &extent);
  ptn_arena_free(memory);
  return status;
}

static ptn_status run(const char *folder, uint64_t bytes, figures *out) {
  ptn_store *store;
  PTN_TRY(ptn_store_create(&store, folder, PTN_DISK_AUTO));
  snprintf(out->engine, sizeof out->engine, "%s", ptn_store_engine_name(store));
  ptn_status status = measure(store, bytes, out);
  ptn_error error;
  ptn_error_save(&error);
  ptn_store_destroy(store);
  return status == PTN_OK ? PTN_OK : ptn_error_restore(&error);
}

PyObject *ptn_python_disk_bench(PyObject *module, PyObject *arguments) {
  (void)module;
  PyObject *folder;
  unsigned long long bytes = 256 * PTN_MIB;
  if (!PyArg_ParseTuple(arguments, "O&|O&", PyUnicode_FSConverter, &folder, ptn_python_u64, &bytes)) return NULL;
  figures out = {0};
  ptn_status status;
  const char *path = PyBytes_AsString(folder);
  PTN_WITHOUT_GIL(status, run(path, bytes, &out));
  Py_DECREF(folder);
  if (status != PTN_OK) return ptn_python_raise();
  return Py_BuildValue("{s:d,s:d,s:K,s:s}", "write_seconds", out.write_seconds, "read_seconds", out.read_seconds, "bytes",
                       out.bytes, "engine", out.engine);
}
