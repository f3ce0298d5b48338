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
 * live bytes since the last ptn_arena_trim by more than a 16th, nor the limits at all (so resident memory tells the same story as
 * the peak, and a holey arena need not give pages back only to fault them in again); a block of
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

#define PTN_RESIDENT_PART 16

typedef struct ptn_account ptn_account;

/* Frees memory that can be done without (bytes are missing); *freed: whether it did something worth a retry. Called with
 * no lock of the arena held, on the thread that allocates; it may wait, and may free blocks. must: the request is refused
 * unless something is freed; without it the request only passes the account's goal. What it fails with is what the request is
 * refused with: something else than the budget stands in the way, as a disk to which nothing can be written. */
typedef ptn_status (*ptn_pressure)(void *context, uint64_t missing_bytes, bool must, bool *freed);

typedef struct ptn_account_stats {
  uint64_t limit_bytes;
  uint64_t goal_bytes;
  uint64_t live_bytes;
  uint64_t peak_bytes;          /* highest live since the account was created */
  uint64_t interval_peak_bytes; /* highest live since ptn_account_mark */
  uint64_t refused_count;       /* requests that ended in PTN_BUDGET */
  uint64_t refused_bytes;       /* since ptn_account_mark: live with the largest of those; 0: there was none */
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
/* Pressure is asked no more, and no other thread is in a call of it. */
void ptn_account_ask_no_more(ptn_account *account);
void ptn_account_get_stats(const ptn_account *account, ptn_account_stats *out);
/* The goal: what is meant to be live at most; 0: none. A request beyond it asks pressure (must = false) until that frees nothing,
 * and is then met up to the limit. */
void ptn_account_set_goal(ptn_account *account, uint64_t goal_bytes);
/* What a refusal names at least as the budget that works; 0: no more than the request. */
void ptn_account_set_named(ptn_account *account, uint64_t named_bytes);
/* Since so many bytes were live something has been under way whose end nobody foresees: a refusal names what is needed with half of what
 * was taken since, or more. 0: nothing has. */
void ptn_account_set_growth(ptn_account *account, uint64_t from_bytes);
/* NULL is allowed: false. */
bool ptn_account_has_goal(const ptn_account *account);
/* Bytes until the goal, or until the limit where there is no goal or it is beyond; 0 when it is passed. UINT64_MAX where there is
 * neither. */
uint64_t ptn_account_room(const ptn_account *account);
/* Starts an interval: returns the highest live bytes of the last one. */
uint64_t ptn_account_mark(ptn_account *account);

/* Memory that is not the arena's, a device's, counted in an account beside blocks: against its limit and in its peak. Until it is
 * discharged, which may come after the account's end. It fails as ptn_arena_alloc does, and nothing changed then. account NULL: nothing
 * is counted. */
ptn_status ptn_account_charge(ptn_account *account, uint64_t bytes);
void ptn_account_discharge(ptn_account *account, uint64_t bytes);

/* bytes is at least 1. account NULL: counted in no budget. Where it fails *out is NULL and nothing changed. PTN_BUDGET: the account's
 * pressure has been asked until it freed nothing; PTN_MEMORY: the system gives none; else it is what pressure failed with. */
ptn_status ptn_arena_alloc(ptn_account *account, size_t bytes, void **out);
/* Gives up one hold, and the block with its last. NULL is allowed. */
void ptn_arena_free(void *block);
size_t ptn_arena_rounded_bytes(size_t bytes); /* what a request of bytes counts */

/* ---- blocks of a page or more, seen from outside ---- */

/* What a block is for. Nobody writes STATIC ones to disk to save memory: they live on. */
typedef enum ptn_block_use { PTN_BLOCK_PLAIN = 0, PTN_BLOCK_STATIC } ptn_block_use;

typedef struct ptn_block {
  void *memory;    /* where it begins */
  uint64_t bytes;  /* whole pages */
  uint64_t serial; /* no other block, earlier or later, has this one */
  ptn_block_use use;
  const ptn_account *account; /* that it counts against; NULL: nobody's */
  const void *own; /* the arena's */
} ptn_block;

/* The block in use in which address lies, anywhere; false for small blocks and for memory that is not the arena's. The block may
 * be gone right after unless the caller knows that somebody has it. */
bool ptn_arena_find(const void *address, ptn_block *out);
/* The same of the block that begins there, where somebody has a hold all the while: takes no lock. */
bool ptn_arena_describe(const void *memory, ptn_block *out);
/* A block handed out has one hold. One more keeps it in use, and counted, until as many calls of ptn_arena_free. False, and
 * nothing changes, where the block that had this serial is gone. */
bool ptn_arena_hold(const ptn_block *block);
/* The same where somebody has a hold all the while: takes no lock. */
bool ptn_arena_hold_more(const ptn_block *block);
/* Of the block that begins there, which is in use; ends with the block. Small blocks have no use: nothing changes. */
void ptn_arena_set_use(void *memory, ptn_block_use use);

/* Of a block that was found, and may be gone: what the arena knows of it is looked at soon (base/bytes.h). */
void ptn_arena_fetch_soon(const ptn_block *block);

/* The account that tensors made by torch belong to from now on, in every thread that is not set apart; NULL: none. Returns the
 * one before. */
ptn_account *ptn_arena_use(ptn_account *account);
/* None from now on, where they belong to this one. */
void ptn_arena_use_no_more(ptn_account *account);
/* What this thread's tensors belong to. */
ptn_account *ptn_arena_used(void);
/* Whether what the calling thread makes belongs to no account from now on, whatever others use. Returns what was. */
bool ptn_arena_set_apart(bool on);

/* Gives cached memory back to the system until at most keep_bytes are cached; lowers the high-water mark to what is live. */
void ptn_arena_trim(uint64_t keep_bytes);
void ptn_arena_get_stats(ptn_arena_stats *out);
bool ptn_arena_owns(const void *address);

/* Aborts when an invariant is broken (debug builds and tests). */
void ptn_arena_check(void);

#endif
