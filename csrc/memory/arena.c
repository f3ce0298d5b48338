/* The arena: one lock, two ways to hand out a block, and the rule about what may be resident.
 *
 * A request is first held against the goal of its account, then against its limit; where it does not fit, the account's
 * pressure is asked, without the lock, as long as it can do something: once it could do nothing about the goal, this request
 * asks for the limit's sake alone. Then slabs (small blocks) or stretches (whole pages) find room, and what is
 * resident beyond the ceiling is purged before the block is handed out: it is not touched yet, so memory that is resident in
 * truth does not pass the ceiling in between.
 *
 * The ceiling is the high-water mark of live bytes, and the sum of the limits where that is lower. The free slots of slabs
 * are all that can stay above it (slack_bytes): they are pages that other small blocks keep alive.
 *
 * A block of whole pages is given back with its last hold. Who holds one is not recorded: a hold given up too often is seen
 * only when the block is gone. Who has a hold takes another, or gives up one of several, without the lock: as long as there is
 * one the stretch stays what it is, and so does the word of its first page. The last is given up with the lock, under which
 * others may have taken one by the block's serial.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/bytes.h"
#include "memory/account.h"
#include "memory/arena.h"
#include "memory/page_map.h"
#include "memory/slabs.h"
#include "memory/stretches.h"

static const size_t largest_bytes = (size_t)1 << 47; /* more than there are addresses */

size_t ptn_arena_rounded_bytes(size_t bytes) {
  if (bytes > largest_bytes) return bytes; /* never handed out; rounding could overflow */
  size_t lines = (size_t)ptn_round_up(bytes, PTN_TENSOR_ALIGN_BYTES);
  return lines < PTN_PAGE_BYTES ? lines : (size_t)ptn_round_up(bytes, PTN_PAGE_BYTES);
}

static uint64_t resident_bytes(void) {
  return ptn_stretch_sums.live_bytes + ptn_stretch_sums.cached_bytes + ptn_slab_sums.touched_bytes;
}

void ptn_arena_settle(void) {
  uint64_t ceiling = ptn_resident_ceiling(), resident = resident_bytes();
  if (resident <= ceiling) return;
  uint64_t excess_bytes = resident - ceiling;
  if (ptn_stretch_sums.cached_bytes > 0) {
    uint64_t purged_bytes = ptn_stretches_purge(excess_bytes);
    excess_bytes = excess_bytes > purged_bytes ? excess_bytes - purged_bytes : 0;
  }
  if (excess_bytes > 0) ptn_slabs_purge(excess_bytes);
}

/* With the lock; the account has room. */
static ptn_status hand_out(ptn_account *account, size_t bytes, void **out) {
  if (bytes > largest_bytes) return ptn_fail(PTN_MEMORY, "a request of %zu bytes is larger than the address space", bytes);
  ptn_stretch *stretch = NULL;
  if (bytes < PTN_PAGE_BYTES) {
    PTN_TRY(ptn_slab_take(bytes, account, out));
  } else {
    PTN_TRY(ptn_stretch_take(bytes, account, &stretch));
    *out = (void *)stretch->begin;
  }
  ptn_account_count(account, bytes);
  ptn_arena_settle();
  if (stretch) ptn_stretch_gather(stretch);
  return PTN_OK;
}

/* With the lock. */
static ptn_status refuse(ptn_account *account, size_t bytes) {
  unsigned long long limit = account->limit_bytes, live = account->live_bytes;
  unsigned long long needed = live > UINT64_MAX - bytes ? UINT64_MAX : live + bytes;
  account->refused_count++;
  account->refused_bytes = ptn_max_u64(account->refused_bytes, needed);
  unsigned long long smallest = ptn_account_named(account, needed);
  char wanted[128];
  if (smallest == needed) snprintf(wanted, sizeof wanted, "give a budget of at least %llu bytes", smallest);
  else snprintf(wanted, sizeof wanted, "this takes %llu, and more may follow: try a budget of %llu bytes", needed, smallest);
  ptn_fail_budget(
      needed, limit, smallest,
      "a request of %zu bytes does not fit the memory budget: %llu of %llu bytes are in use; %s, or a smaller batch; a "
      "training step that is run again after optimizer.zero_grad() is planned with room for this",
      bytes, live, limit, wanted);
  ptn_last_error()->asked_bytes = bytes;
  return PTN_BUDGET;
}

static ptn_status charge(ptn_account *account, size_t bytes, void **unused) {
  (void)unused;
  ptn_account_add_charge(account, bytes);
  return PTN_OK;
}

/* With the lock, which nobody holds while pressure is asked. */
static ptn_status ask(ptn_account *account, uint64_t missing_bytes, bool must, bool *freed) {
  ptn_pressure pressure = account->pressure;
  void *context = account->context;
  if (!pressure) return PTN_OK;
  ptn_asking asking;
  ptn_asking_begin(&asking, account);
  ptn_unlock(&ptn_arena_mutex);
  ptn_status status = pressure(context, missing_bytes, must, freed);
  ptn_lock(&ptn_arena_mutex);
  ptn_asking_end(&asking);
  return status;
}

/* Gives the account bytes more, by `give`, once there is room. With the lock. */
static ptn_status give_when_room(ptn_account *account, size_t bytes, ptn_status (*give)(ptn_account *, size_t, void **),
                                 void **out) {
  for (bool must = false, refused = false;;) {
    ptn_account *owner = ptn_account_resolve(account);
    uint64_t missing_bytes = owner->pressure && !must ? ptn_account_beyond_goal(owner, bytes) : 0;
    if (missing_bytes == 0) {
      must = true;
      missing_bytes = ptn_account_missing(owner, bytes);
    }
    if (missing_bytes == 0) return give(owner, bytes, out);
    if (refused) return refuse(owner, bytes);
    bool freed = false;
    PTN_TRY(ask(owner, missing_bytes, must, &freed));
    if (freed) continue;
    refused = must; /* other threads may have freed memory meanwhile: one more look */
    must = true;
  }
}

ptn_status ptn_arena_alloc(ptn_account *account, size_t bytes, void **out) {
  *out = NULL;
  ptn_lock(&ptn_arena_mutex);
  ptn_status status = give_when_room(account, ptn_arena_rounded_bytes(bytes), hand_out, out);
  ptn_unlock(&ptn_arena_mutex);
  return status;
}

ptn_status ptn_account_charge(ptn_account *account, uint64_t bytes) {
  if (!account) return PTN_OK;
  ptn_lock(&ptn_arena_mutex);
  ptn_status status = give_when_room(account, (size_t)bytes, charge, NULL);
  ptn_unlock(&ptn_arena_mutex);
  return status;
}

/* The live stretch that begins at address, or NULL. */
static ptn_stretch *stretch_at(uintptr_t word, uintptr_t address) {
  ptn_stretch *stretch = word & PTN_MAP_SLAB ? NULL : (ptn_stretch *)word;
  return stretch && stretch->begin == address && stretch->state == PTN_STRETCH_LIVE ? stretch : NULL;
}

static void must_live(const ptn_stretch *stretch, uintptr_t address, const char *what) {
  if (stretch) return;
  fprintf(stderr, "protrain: %s %p, which is no block in use of the arena (freed twice?)\n", what, (void *)address);
  abort();
}

/* False where it may be the last. */
static bool give_up_one_of_several(uintptr_t address) {
  ptn_stretch *stretch = stretch_at(ptn_map_get(address), address);
  uint32_t count = stretch ? atomic_load_explicit(&stretch->hold_count, memory_order_relaxed) : 0;
  while (count > 1) {
    if (atomic_compare_exchange_weak_explicit(&stretch->hold_count, &count, count - 1, memory_order_release,
                                              memory_order_relaxed))
      return true;
  }
  return false;
}

void ptn_arena_free(void *block) {
  uintptr_t address = (uintptr_t)block;
  if (!block || give_up_one_of_several(address)) return;
  ptn_lock(&ptn_arena_mutex);
  uintptr_t word = ptn_map_get(address);
  if (word & PTN_MAP_SLAB) {
    ptn_slab *slab = (ptn_slab *)(word & ~PTN_MAP_SLAB);
    ptn_account *owner = slab->owner; /* an emptied slab has none */
    uint32_t bytes = slab->slot_bytes;
    ptn_slab_give(slab, address);
    ptn_account_uncount(owner, bytes);
  } else {
    ptn_stretch *stretch = stretch_at(word, address);
    must_live(stretch, address, "freed");
    if (atomic_fetch_sub_explicit(&stretch->hold_count, 1, memory_order_acq_rel) == 1) {
      ptn_account_uncount(stretch->owner, stretch->bytes);
      ptn_stretch_give(stretch);
    }
  }
  if (ptn_totals.limited_count > 0) ptn_arena_settle(); /* what nobody had counted is cached now, and under the limits */
  ptn_unlock(&ptn_arena_mutex);
}

static bool describe(const ptn_stretch *stretch, ptn_block *out) {
  if (!stretch) return false;
  ptn_block_use use = atomic_load_explicit(&stretch->use, memory_order_relaxed);
  *out = (ptn_block){(void *)stretch->begin, stretch->bytes, stretch->serial, use, stretch->owner, stretch};
  return true;
}

bool ptn_arena_find(const void *address, ptn_block *out) {
  ptn_lock(&ptn_arena_mutex);
  bool found = describe(ptn_stretch_find((uintptr_t)address), out);
  ptn_unlock(&ptn_arena_mutex);
  return found;
}

bool ptn_arena_describe(const void *memory, ptn_block *out) {
  uintptr_t address = (uintptr_t)memory;
  return describe(stretch_at(ptn_map_get(address), address), out);
}

bool ptn_arena_hold(const ptn_block *block) {
  uintptr_t address = (uintptr_t)block->memory;
  ptn_lock(&ptn_arena_mutex);
  ptn_stretch *stretch = stretch_at(ptn_map_get(address), address);
  bool lives = stretch && stretch->serial == block->serial;
  if (lives) atomic_fetch_add_explicit(&stretch->hold_count, 1, memory_order_relaxed);
  ptn_unlock(&ptn_arena_mutex);
  return lives;
}

bool ptn_arena_hold_more(const ptn_block *block) {
  uintptr_t address = (uintptr_t)block->memory;
  ptn_stretch *stretch = stretch_at(ptn_map_get(address), address);
  bool lives = stretch && stretch->serial == block->serial;
  if (lives) atomic_fetch_add_explicit(&stretch->hold_count, 1, memory_order_relaxed);
  return lives;
}

void ptn_arena_fetch_soon(const ptn_block *block) {
  ptn_map_fetch_soon((uintptr_t)block->memory);
  ptn_fetch_soon(block->own, sizeof(ptn_stretch));
}

void ptn_arena_set_use(void *memory, ptn_block_use use) {
  uintptr_t address = (uintptr_t)memory;
  ptn_lock(&ptn_arena_mutex);
  uintptr_t word = ptn_map_get(address);
  ptn_stretch *stretch = stretch_at(word, address);
  if (stretch) atomic_store_explicit(&stretch->use, use, memory_order_relaxed);
  else if (!(word & PTN_MAP_SLAB)) must_live(NULL, address, "set the use of");
  ptn_unlock(&ptn_arena_mutex);
}

void ptn_arena_trim(uint64_t keep_bytes) {
  ptn_lock(&ptn_arena_mutex);
  uint64_t cached_bytes = resident_bytes() - ptn_totals.live_bytes;
  if (cached_bytes > keep_bytes) {
    uint64_t purged_bytes = ptn_stretches_purge(cached_bytes - keep_bytes);
    uint64_t left_bytes = cached_bytes - purged_bytes;
    if (left_bytes > keep_bytes) ptn_slabs_purge(left_bytes - keep_bytes);
  }
  /* What was kept on purpose may stay: the mark lies at what is live and kept. */
  ptn_totals.high_water_bytes = ptn_totals.live_bytes + ptn_min_u64(keep_bytes, resident_bytes() - ptn_totals.live_bytes);
  ptn_unlock(&ptn_arena_mutex);
}

void ptn_arena_get_stats(ptn_arena_stats *out) {
  ptn_lock(&ptn_arena_mutex);
  uint64_t resident = resident_bytes(), live = ptn_totals.live_bytes;
  *out = (ptn_arena_stats){
      .live_bytes = live,
      .cached_bytes = resident - live,
      .resident_bytes = resident,
      .mapped_count = ptn_stretch_sums.fresh_count + ptn_slab_sums.fresh_count,
      .mapped_bytes = ptn_stretch_sums.fresh_bytes + ptn_slab_sums.fresh_bytes,
      .purged_bytes = ptn_stretch_sums.purged_bytes + ptn_slab_sums.purged_bytes,
      .high_water_bytes = ptn_totals.high_water_bytes,
      .slack_bytes = ptn_slab_sums.touched_bytes - ptn_slab_sums.live_bytes,
  };
  ptn_unlock(&ptn_arena_mutex);
}

bool ptn_arena_owns(const void *address) { return ptn_range_owns((uintptr_t)address); }

void ptn_arena_check(void) {
  ptn_lock(&ptn_arena_mutex);
  ptn_slabs_check();
  ptn_stretches_check();
  bool counted = ptn_totals.live_bytes == ptn_stretch_sums.live_bytes + ptn_slab_sums.live_bytes;
  uint64_t slack_bytes = ptn_slab_sums.touched_bytes - ptn_slab_sums.live_bytes;
  bool bounded = resident_bytes() <= ptn_resident_ceiling() + slack_bytes;
  if (!counted || !bounded || !ptn_accounts_hold()) {
    fprintf(stderr, "protrain: the arena is broken: its accounts do not add up, or too much is resident\n");
    abort();
  }
  ptn_unlock(&ptn_arena_mutex);
}

/* ---- fork ---- */

/* The child gets the arena as it is, in a copy of its own; other threads are gone, and with them what pressure could do. */
static void before_fork(void) { ptn_lock(&ptn_arena_mutex); }
static void after_fork_in_parent(void) { ptn_unlock(&ptn_arena_mutex); }
static void after_fork_in_child(void) {
  ptn_accounts_after_fork();
  ptn_unlock(&ptn_arena_mutex);
}

__attribute__((constructor)) static void watch_forks(void) {
  if (pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) != 0) abort();
}
