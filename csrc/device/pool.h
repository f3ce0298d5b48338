/* Ranges of a pool of fixed size: who takes one keeps its place in the list himself. The caller's lock. */
#ifndef PTN_DEVICE_POOL_H
#define PTN_DEVICE_POOL_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ptn_pool_range {
  uint64_t offset, bytes;
  struct ptn_pool_range *next;
} ptn_pool_range;

typedef ptn_pool_range *ptn_pool_ranges; /* those taken, by offset; NULL: none */

/* The first gap of a pool of pool_bytes that is long enough; false when there is none. */
bool ptn_pool_take(ptn_pool_ranges *taken, uint64_t pool_bytes, uint64_t bytes, ptn_pool_range *out);
void ptn_pool_give(ptn_pool_ranges *taken, ptn_pool_range *range); /* it is among those taken */

#endif
