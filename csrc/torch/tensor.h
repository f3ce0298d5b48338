/* Of torch's tensors what hooks ask for each time autograd saves one, without torch's bindings, which take and give up the
 * interpreter's lock for it.
 *
 * tensor: torch's c10::TensorImpl, alive. Nothing here needs Python.
 */
#ifndef PTN_TORCH_TENSOR_H
#define PTN_TORCH_TENSOR_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ptn_counter ptn_counter; /* a hold on a version counter, which may outlive its tensors */

/* tensor._version; false: it was made in inference mode, and has none. */
bool ptn_torch_version(const void *tensor, uint32_t *version);
/* tensor.is_neg() or tensor.is_conj(): its values are not those of its memory. */
bool ptn_torch_is_lazy(const void *tensor);
/* The tensor's counter, to be given up once; NULL: no memory, or it has none. */
ptn_counter *ptn_torch_counter(const void *tensor);
/* From now on the tensor, which nobody else has yet, counts by this one; one that was made in inference mode never counts. */
void ptn_torch_count_by(void *tensor, const ptn_counter *counter);

uint32_t ptn_counter_version(const ptn_counter *counter);
void ptn_counter_drop(ptn_counter *counter); /* NULL is allowed; on any thread */

#ifdef __cplusplus
}
#endif

#endif
