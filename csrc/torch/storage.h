/* torch's storages over memory that is another's for a while. */
#ifndef PTN_TORCH_STORAGE_H
#define PTN_TORCH_STORAGE_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a read of a shut storage raises, as a RuntimeError. */
#define PTN_TORCH_SHUT                                                                                                       \
  "the memory of a parameter that is on disk is read where protrain cannot see it: there may lie another's numbers by now. " \
  "Give it a copy, p.detach().clone()"

/* storage: torch's c10::StorageImpl, alive. While it is not open torch refuses to say where its memory is, and so to read or write
 * it. Needs nothing of Python. Without effect where torch is older than 2.12, which cannot open again. */
void ptn_torch_open_storage(void *storage, bool open);

/* Two storages, alive and as long as each other, have each other's memory from now on. Who ends either needs the GIL, where that memory
 * is an object's of Python. */
void ptn_torch_swap_memory(void *one, void *other);

#ifdef __cplusplus
}
#endif

#endif
