/* DLPack's C exchange, as torch offers it: facts of a tensor without a copy, and tensors over memory of the arena.
 *
 * The structs are those of DLPack 1.x's ABI, with our names; a table of another major version is refused. torch publishes the
 * table as the capsule torch.Tensor.__dlpack_c_exchange_api__.
 */
#ifndef PTN_TORCH_DLPACK_H
#define PTN_TORCH_DLPACK_H

#include <stdbool.h>
#include <stdint.h>

#define PTN_DLPACK_MAJOR 1
#define PTN_DLPACK_CPU 1 /* device_type */
#define PTN_DLPACK_CUDA 2
#define PTN_DLPACK_FLOAT 2 /* code of a ptn_dlpack_type */
#define PTN_DLPACK_BFLOAT 4
#define PTN_DLPACK_COMPLEX 5

typedef struct ptn_dlpack_version {
  uint32_t major, minor;
} ptn_dlpack_version;

typedef struct ptn_dlpack_type {
  uint8_t code, bits;
  uint16_t lanes;
} ptn_dlpack_type;

typedef struct ptn_dlpack_tensor {
  void *data;
  int32_t device_type, device_number;
  int32_t ndim;
  ptn_dlpack_type type;
  int64_t *shape, *strides; /* elements */
  uint64_t byte_offset;
} ptn_dlpack_tensor;

typedef struct ptn_dlpack_managed ptn_dlpack_managed;
struct ptn_dlpack_managed {
  ptn_dlpack_version version;
  void *context;
  void (*deleter)(ptn_dlpack_managed *managed); /* on any thread, with the GIL or without */
  uint64_t flags;
  ptn_dlpack_tensor tensor;
};

/* Functions return 0, or -1 with a Python exception set; objects are PyObject. */
typedef struct ptn_dlpack_exchange {
  ptn_dlpack_version version;
  void *previous;
  void *managed_tensor_allocator; /* not used */
  int (*managed_from_object)(void *object, ptn_dlpack_managed **out);
  int (*managed_to_object)(ptn_dlpack_managed *managed, void **out); /* takes managed over */
  int (*tensor_from_object)(void *object, ptn_dlpack_tensor *out);   /* out is valid as long as the object is unchanged */
  void *current_work_stream; /* not used */
} ptn_dlpack_exchange;

/* torch's table, for the life of the process; NULL with a Python exception set. tensor_class: torch.Tensor, a PyObject. */
const ptn_dlpack_exchange *ptn_dlpack_find(void *tensor_class);

/* Memory that a tensor is made over: release(context) is called once, by whichever thread drops the tensor last. */
typedef struct ptn_dlpack_memory {
  void *data; /* of the tensor's first element */
  int32_t device_type, device_number;
  void *context;
  void (*release)(void *context);
} ptn_dlpack_memory;

/* A torch tensor over such memory; on failure the memory is released at once, NULL is returned and a Python exception set. geometry:
 * ndim sizes, then ndim strides. */
void *ptn_dlpack_over(const ptn_dlpack_exchange *exchange, const ptn_dlpack_memory *memory, ptn_dlpack_type type, int32_t ndim,
                      const int64_t *geometry);
/* A torch tensor over a block of the arena, which it gives back (one hold) when it dies. As above. */
void *ptn_dlpack_wrap(const ptn_dlpack_exchange *exchange, void *block, uint64_t offset_bytes, ptn_dlpack_type type, int32_t ndim,
                      const int64_t *geometry);

#endif
