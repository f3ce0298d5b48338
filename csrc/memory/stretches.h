/* Large blocks: whole pages out of big reserved ranges. See stretches.c. Everything is called under ptn_arena_mutex. */
#ifndef PTN_MEMORY_STRETCHES_H
#define PTN_MEMORY_STRETCHES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "memory/account.h"
#include "memory/fit_tree.h"

typedef enum ptn_stretch_state {
  PTN_STRETCH_LIVE,  /* handed out */
  PTN_STRETCH_DIRTY, /* free and resident */
  PTN_STRETCH_RECENT, /* as dirty, but apart: freed a moment ago, kept whole for a request of the same size */
  PTN_STRETCH_CLEAN, /* free and not resident */
} ptn_stretch_state;

typedef struct ptn_stretch {
  uintptr_t begin;
  size_t bytes;
  ptn_stretch_state state;
  ptn_account *owner;                /* live, as the next three */
  uint64_t serial;                   /* never 0 */
  _Atomic uint32_t hold_count;       /* changed without the lock too, but only from and to more than 0 */
  _Atomic ptn_block_use use;         /* changed with the lock, read without it too */
  size_t marked_bytes;               /* from begin: the granules that begin there are its own in the page map */
  ptn_fit_node by_bytes;             /* dirty: in the tree of dirty stretches */
  ptn_fit_node by_run;               /* first of a run of free stretches: in the tree of runs */
  struct ptn_stretch *older, *newer;  /* dirty: in the order they were freed */
} ptn_stretch;

typedef struct ptn_stretch_totals {
  uint64_t live_bytes;   /* handed out */
  uint64_t cached_bytes; /* dirty and recent */
  uint64_t fresh_count;  /* times clean pages were put to use, and */
  uint64_t fresh_bytes;  /* how many */
  uint64_t purged_bytes; /* given back to the system, ever */
} ptn_stretch_totals;

extern ptn_stretch_totals ptn_stretch_sums;

/* bytes: a multiple of PTN_PAGE_BYTES. The caller counts it, purges what is resident above the ceiling, and then calls gather. */
ptn_status ptn_stretch_take(size_t bytes, ptn_account *owner, ptn_stretch **out);
/* Of the stretch taken last: the huge pages that it completed become such at once. */
void ptn_stretch_gather(ptn_stretch *stretch);
void ptn_stretch_give(ptn_stretch *stretch);
ptn_stretch *ptn_stretch_find(uintptr_t address); /* the live one in which address lies, or NULL */
/* Gives up to bytes of dirty memory back, rarely a little more; returns how much it was. */
uint64_t ptn_stretches_purge(uint64_t bytes);
void ptn_stretches_check(void); /* aborts */

#endif
