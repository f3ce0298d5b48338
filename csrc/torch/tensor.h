/* torch's tensors, as hooks see them each time autograd saves one: what is known of a tensor, and tensors over memory of ours, without
 * torch's bindings, its dispatcher or DLPack, which all take many times as long.
 *
 * tensor: torch's c10::TensorImpl, alive. What makes a tensor returns Python's object of it, and wants the GIL; nothing else here needs
 * Python.
 */
#ifndef PTN_TORCH_TENSOR_H
#define PTN_TORCH_TENSOR_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ptn_counter ptn_counter; /* a hold on a version counter, which may outlive its tensors */

/* ---- what is known ---- */

#define PTN_TORCH_CPU 0 /* device_type, as torch counts them */
#define PTN_TORCH_CUDA 1
#define PTN_TORCH_FLOAT 6 /* type, as torch counts them */
#define PTN_TORCH_BFLOAT16 15

typedef struct ptn_tensor_facts {
  void *data; /* the first element; where there is none, the begin of its memory */
  void *block; /* of the arena, that its memory has a hold on; NULL: it is not known to have one */
  const int64_t *sizes, *strides; /* elements; valid as long as the tensor is unchanged */
  int32_t ndim;
  int32_t device_type;
  int32_t type;
  bool whole; /* its elements are all that its memory has */
  bool lazy; /* tensor.is_neg() or tensor.is_conj(): its values are not those of its memory */
} ptn_tensor_facts;

/* False: it has no memory that could be told, as a sparse or wrapped one, or one whose storage is shut (storage.h). */
bool ptn_torch_facts(const void *tensor, ptn_tensor_facts *facts);
bool ptn_torch_is_leaf(const void *tensor);
/* tensor._version; false: it was made in inference mode, and has none. */
bool ptn_torch_version(const void *tensor, uint32_t *version);

/* ---- what is made ---- */

/* Memory that a tensor is made over: release(context) is called once, by whichever thread drops the tensor last, unless context is
 * NULL. */
typedef struct ptn_torch_memory {
  void *data; /* of the tensor's first element */
  void *context;
  void (*release)(void *context);
  int32_t device_type, device_number;
} ptn_torch_memory;

/* A tensor over such memory; on failure the memory is released at once, and NULL returned, where a Python exception may be set.
 * geometry: ndim sizes, then ndim strides. counter: what it counts changes by, or NULL; in inference mode it never counts. */
void *ptn_torch_make(const ptn_torch_memory *memory, int32_t type, int32_t ndim, const int64_t *geometry,
                     const ptn_counter *counter);
/* tensor.detach(), but that no view is noted: what autograd keeps of a node's own output. NULL as above, and where the tensor is of
 * another class of torch's than the usual. */
void *ptn_torch_alias(const void *tensor);

/* ---- version counters ---- */

/* The tensor's counter, to be given up once; NULL: it has none. */
ptn_counter *ptn_torch_counter(const void *tensor);
/* The same without a hold on it: as long as one of its tensors or a hold lives. */
const ptn_counter *ptn_torch_counter_of(const void *tensor);
uint32_t ptn_counter_version(const ptn_counter *counter);
void ptn_counter_drop(ptn_counter *counter); /* NULL is allowed; on any thread */

#ifdef __cplusplus
}
#endif

#endif
