/* Small blocks: slots of slabs. See slabs.c. Everything is called under ptn_arena_mutex. */
#ifndef PTN_MEMORY_SLABS_H
#define PTN_MEMORY_SLABS_H

#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "memory/account.h"

#define PTN_SLAB_BYTES ((size_t)64 << 10)
#define PTN_SLAB_WORDS (PTN_SLAB_BYTES / PTN_TENSOR_ALIGN_BYTES / 64)

typedef struct ptn_slab {
  uintptr_t begin;
  struct ptn_slab *next, *previous; /* among the slabs of its account and class that have free slots, or in the pool */
  struct ptn_slab *next_of_all;
  ptn_account *owner;               /* NULL: in the pool */
  uint32_t slot_bytes, slot_count, free_count;
  uint32_t reciprocal;              /* 2^32 / slot_bytes, rounded up */
  uint32_t touched_bytes;           /* resident: whole pages from the beginning */
  uint32_t free_word_bits;          /* bit w: free_bits[w] is not 0 */
  uint64_t free_bits[PTN_SLAB_WORDS];
} ptn_slab;

typedef struct ptn_slab_totals {
  uint64_t live_bytes;    /* of slots handed out */
  uint64_t touched_bytes; /* resident pages of all slabs */
  uint64_t fresh_count, fresh_bytes, purged_bytes; /* as in ptn_stretch_totals */
} ptn_slab_totals;

extern ptn_slab_totals ptn_slab_sums;

/* bytes: a multiple of PTN_TENSOR_ALIGN_BYTES below PTN_PAGE_BYTES. */
ptn_status ptn_slab_take(size_t bytes, ptn_account *owner, void **out);
/* Aborts when address is no slot of this slab that was handed out. */
void ptn_slab_give(ptn_slab *slab, uintptr_t address);
uint64_t ptn_slabs_purge(uint64_t bytes);    /* of empty slabs; returns how much it was */
void ptn_slabs_forget(ptn_account *account); /* the account takes no more: its empty slabs go to the pool */
void ptn_slabs_check(void);                  /* aborts */

#endif
