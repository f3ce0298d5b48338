/* See dlpack.h. A tensor made here is one malloc: the managed struct with its geometry behind it; its deleter needs neither
 * Python nor an engine, so a tensor may outlive both. */
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "memory/arena.h"
#include "torch/dlpack.h"

const ptn_dlpack_exchange *ptn_dlpack_find(void *tensor_class) {
  PyObject *capsule = PyObject_GetAttrString((PyObject *)tensor_class, "__dlpack_c_exchange_api__");
  if (!capsule) return NULL;
  const ptn_dlpack_exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule); /* the table is torch's own and lives as long as torch */
  if (!exchange) return NULL;
  if (exchange->version.major != PTN_DLPACK_MAJOR || !exchange->tensor_from_object || !exchange->managed_to_object) {
    PyErr_Format(PyExc_ImportError, "this torch exchanges tensors by DLPack %u.%u, version %d is wanted: use torch 2.11 to 2.13",
                 exchange->version.major, exchange->version.minor, PTN_DLPACK_MAJOR);
    return NULL;
  }
  return exchange;
}

typedef struct wrapped {
  ptn_dlpack_managed managed;
  void (*release)(void *context);
  bool *gone; /* set when this is given back while it is being made: a torch that fails may have taken over or not */
  int64_t geometry[];
} wrapped;

static void give_back(ptn_dlpack_managed *managed) {
  wrapped *made = (wrapped *)managed; /* its first member */
  if (made->gone) *made->gone = true;
  made->release(managed->context);
  free(made);
}

void *ptn_dlpack_over(const ptn_dlpack_exchange *exchange, const ptn_dlpack_memory *memory, ptn_dlpack_type type, int32_t ndim,
                      const int64_t *geometry) {
  size_t geometry_bytes = 2 * (size_t)ndim * sizeof *geometry;
  wrapped *made = malloc(sizeof *made + geometry_bytes);
  if (!made) {
    memory->release(memory->context);
    return PyErr_NoMemory();
  }
  memset(made, 0, sizeof *made);
  memcpy(made->geometry, geometry, geometry_bytes);
  made->release = memory->release;
  made->managed.version = exchange->version;
  made->managed.context = memory->context;
  made->managed.deleter = give_back;
  made->managed.tensor = (ptn_dlpack_tensor){.data = memory->data, /* torch does not look at byte_offset */
                                             .device_type = memory->device_type,
                                             .device_number = memory->device_number,
                                             .ndim = ndim,
                                             .type = type,
                                             .shape = made->geometry,
                                             .strides = made->geometry + ndim};
  bool gone = false;
  made->gone = &gone;
  void *tensor = NULL;
  if (exchange->managed_to_object(&made->managed, &tensor) == 0) {
    made->gone = NULL;
    return tensor;
  }
  if (!gone) give_back(&made->managed);
  return NULL;
}

void *ptn_dlpack_wrap(const ptn_dlpack_exchange *exchange, void *block, uint64_t offset_bytes, ptn_dlpack_type type, int32_t ndim,
                      const int64_t *geometry) {
  ptn_dlpack_memory memory = {
      .data = (char *)block + offset_bytes, .device_type = PTN_DLPACK_CPU, .context = block, .release = ptn_arena_free};
  return ptn_dlpack_over(exchange, &memory, type, ndim, geometry);
}
