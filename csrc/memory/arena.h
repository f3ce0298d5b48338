/* The arena: where every tensor of a wrapped model lives, counted where it is handed out.
 *
 * One arena serves the process. It keeps what is freed for the next request of its kind, because giving pages back and
 * faulting them in again costs more than anything else an allocator does here. What is handed out belongs to an account;
 * a budget is the limit of an account.
 *
 *   live      bytes handed out and not yet freed, rounded as the arena rounds them
 *   cached    bytes freed, still resident, kept for reuse
 *   resident  live + cached
 *
 * Invariants: live <= limit of each account, at every moment; the arena's resident bytes never exceed the highest sum of
 * live bytes since the last ptn_arena_trim (so resident memory tells the same story as the peak); a block of
 * PTN_PAGE_BYTES or more starts on a page and has whole pages of its own, so that a disk can read and write it directly;
 * every other block starts at a multiple of PTN_TENSOR_ALIGN_BYTES.
 *
 * All functions may be called from any thread. After fork the child has a working arena of its own.
 */
#ifndef PTN_MEMORY_ARENA_H
#define PTN_MEMORY_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct ptn_account ptn_account;

/* Frees memory that can be done without (bytes are missing), returns true when it did something worth a retry. Called
 * with no lock of the arena held, on the thread that allocates; it may wait, and may free blocks. */
typedef bool (*ptn_pressure)(void *context, uint64_t missing_bytes);

typedef struct ptn_account_stats {
  uint64_t limit_bytes;
  uint64_t live_bytes;
  uint64_t peak_bytes;          /* highest live since the account was created */
  uint64_t interval_peak_bytes; /* highest live since ptn_account_mark */
  uint64_t refused_count;       /* requests that ended in PTN_BUDGET */
} ptn_account_stats;

typedef struct ptn_arena_stats {
  uint64_t live_bytes, cached_bytes, resident_bytes;
  uint64_t mapped_count;     /* times the operating system was asked for pages */
  uint64_t mapped_bytes;     /* and for how many, ever: pages that were not resident and were put to use */
  uint64_t purged_bytes;     /* given back to it, ever */
  uint64_t high_water_bytes; /* highest live bytes since the last trim */
  uint64_t slack_bytes;      /* the part of cached_bytes that no request but a small one can use */
} ptn_arena_stats;

/* limit_bytes 0: no limit. pressure may be NULL. */
ptn_status ptn_account_create(ptn_account **out, uint64_t limit_bytes, ptn_pressure pressure, void *context);
/* Blocks may outlive their account: they are then counted nowhere but in the arena. */
void ptn_account_destroy(ptn_account *account);
void ptn_account_get_stats(const ptn_account *account, ptn_account_stats *out);
/* Starts an interval: returns the highest live bytes of the last one. */
uint64_t ptn_account_mark(ptn_account *account);

/* bytes is at least 1. account NULL: counted in no budget. On PTN_BUDGET and PTN_MEMORY *out is NULL and nothing changed;
 * before PTN_BUDGET the account's pressure has been asked until it returned false. */
ptn_status ptn_arena_alloc(ptn_account *account, size_t bytes, void **out);
void ptn_arena_free(void *block); /* NULL is allowed */
size_t ptn_arena_rounded_bytes(size_t bytes); /* what a request of bytes counts */

/* The account that tensors made by torch belong to from now on, in every thread; NULL: none. Returns the one before. */
ptn_account *ptn_arena_use(ptn_account *account);
ptn_account *ptn_arena_used(void);

/* Gives cached memory back to the system until at most keep_bytes are cached; lowers the high-water mark to what is live. */
void ptn_arena_trim(uint64_t keep_bytes);
void ptn_arena_get_stats(ptn_arena_stats *out);
bool ptn_arena_owns(const void *address);

/* Aborts when an invariant is broken (debug builds and tests). */
void ptn_arena_check(void);

#endif
