/* What torch's caching allocator of a GPU calls for segments of a pool (torch.cuda.MemPool with a pluggable allocator). */
#ifndef PTN_TORCH_CUDA_ALLOCATOR_H
#define PTN_TORCH_CUDA_ALLOCATOR_H

#include <stddef.h>

#include "device/device.h"
#include "memory/arena.h"

/* Segments of GPU `number` come from this device, which is there as long as the process, and are counted in this account, until
 * another is named; NULL: in none. False: no such number. */
bool ptn_torch_cuda_use(int number, ptn_device *device, ptn_account *account);
/* No segment is counted in this account any more from now on; those that are there stay counted. */
void ptn_torch_cuda_forget(const ptn_account *account);

/* The two functions that torch looks up by name. NULL: the budget, or the GPU, has no room; ptn_last_error says which. torch then raises
 * torch.OutOfMemoryError. On any thread, with locks of torch held: nothing here calls Python or waits for anybody who might. */
__attribute__((visibility("default"))) void *ptn_cuda_malloc(size_t bytes, int number, void *stream);
__attribute__((visibility("default"))) void ptn_cuda_free(void *memory, size_t bytes, int number, void *stream);

#endif
