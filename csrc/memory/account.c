/* See account.h and, for the functions others call, arena.h.
 *
 * Invariants: totals.live_bytes is the sum of live_bytes of all accounts, open, closed and nobody, without what they were charged
 * for; limit_bytes and limited_count cover the open accounts with a limit; unlimited_live_bytes is the live memory of all others.
 */
#include "memory/account.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "memory/slabs.h"

ptn_mutex ptn_arena_mutex;
ptn_account_totals ptn_totals;

static ptn_account nobody = {.open = true};
static ptn_account *idle_accounts;  /* closed, without blocks */
static ptn_account **all_accounts;  /* every struct there is */
static size_t all_count, all_capacity;
static _Atomic(ptn_account *) used_account;
static _Thread_local bool apart; /* this thread's tensors belong to no account */
static _Thread_local ptn_asking *innermost;
static ptn_condition asked; /* a call of a pressure is over that somebody may wait for */

static bool limited(const ptn_account *account) { return account->open && account->limit_bytes > 0; }

/* A struct that may be used again, else a new one. */
static ptn_account *new_account(void) {
  ptn_account *account = idle_accounts;
  if (account) {
    idle_accounts = account->next;
    memset(account, 0, sizeof *account);
    return account;
  }
  if (all_count == all_capacity) {
    size_t capacity = all_capacity ? 2 * all_capacity : 16;
    ptn_account **grown = realloc(all_accounts, capacity * sizeof(ptn_account *));
    if (!grown) return NULL;
    all_accounts = grown;
    all_capacity = capacity;
  }
  account = calloc(1, sizeof *account);
  if (account) all_accounts[all_count++] = account;
  return account;
}

ptn_status ptn_account_create(ptn_account **out, uint64_t limit_bytes, ptn_pressure pressure, void *context) {
  ptn_lock(&ptn_arena_mutex);
  ptn_account *account = new_account();
  if (account) {
    account->open = true;
    account->limit_bytes = limit_bytes;
    account->pressure = pressure;
    account->context = context;
    if (limit_bytes > 0) {
      ptn_totals.limit_bytes += limit_bytes;
      ptn_totals.limited_count++;
      ptn_arena_settle();
    }
  }
  ptn_unlock(&ptn_arena_mutex);
  *out = account;
  return account ? PTN_OK : ptn_fail(PTN_MEMORY, "no memory for an account of the arena");
}

/* Where it is closed and nothing has it any more. */
static void retire(ptn_account *account) {
  if (account->open || account->block_count > 0 || account->asking_count > 0) return;
  account->next = idle_accounts;
  idle_accounts = account;
}

void ptn_account_destroy(ptn_account *account) {
  if (!account) return;
  ptn_arena_use_no_more(account);
  ptn_lock(&ptn_arena_mutex);
  ptn_slabs_forget(account);
  if (limited(account)) {
    ptn_totals.limit_bytes -= account->limit_bytes;
    ptn_totals.limited_count--;
    ptn_totals.unlimited_live_bytes += account->live_bytes - account->charged_bytes;
  }
  account->open = false;
  account->pressure = NULL;
  ptn_arena_settle();
  retire(account);
  ptn_unlock(&ptn_arena_mutex);
}

void ptn_asking_begin(ptn_asking *asking, ptn_account *account) {
  *asking = (ptn_asking){account, innermost};
  innermost = asking;
  account->asking_count++;
}

void ptn_asking_end(ptn_asking *asking) {
  innermost = asking->outer;
  asking->account->asking_count--;
  ptn_broadcast(&asked);
  retire(asking->account);
}

void ptn_account_ask_no_more(ptn_account *account) {
  if (!account) return;
  uint64_t own_count = 0; /* calls that this thread is in itself */
  for (const ptn_asking *asking = innermost; asking; asking = asking->outer) own_count += asking->account == account;
  ptn_lock(&ptn_arena_mutex);
  account->pressure = NULL;
  while (account->asking_count > own_count) ptn_wait(&asked, &ptn_arena_mutex);
  ptn_unlock(&ptn_arena_mutex);
}

ptn_account *ptn_account_resolve(ptn_account *account) { return account && account->open ? account : &nobody; }

uint64_t ptn_account_missing(const ptn_account *account, uint64_t bytes) {
  if (!limited(account)) return 0;
  uint64_t free_bytes = account->limit_bytes - account->live_bytes;
  return bytes > free_bytes ? bytes - free_bytes : 0;
}

uint64_t ptn_account_beyond_goal(const ptn_account *account, uint64_t bytes) {
  uint64_t goal_bytes = account->goal_bytes, live_bytes = account->live_bytes;
  if (goal_bytes == 0) return 0;
  uint64_t wanted_bytes = bytes > UINT64_MAX - live_bytes ? UINT64_MAX : live_bytes + bytes;
  return wanted_bytes > goal_bytes ? wanted_bytes - goal_bytes : 0;
}

void ptn_account_set_goal(ptn_account *account, uint64_t goal_bytes) { account->goal_bytes = goal_bytes; }
void ptn_account_set_named(ptn_account *account, uint64_t named_bytes) { account->named_bytes = named_bytes; }
void ptn_account_set_growth(ptn_account *account, uint64_t from_bytes) { account->grown_from_bytes = from_bytes; }

uint64_t ptn_account_named(const ptn_account *account, uint64_t needed_bytes) {
  uint64_t from_bytes = account->grown_from_bytes, named_bytes = ptn_max_u64(needed_bytes, account->named_bytes);
  if (from_bytes == 0 || needed_bytes <= from_bytes) return named_bytes;
  uint64_t more_bytes = (needed_bytes - from_bytes) / PTN_GROWTH_PART;
  return needed_bytes > UINT64_MAX - more_bytes ? named_bytes : ptn_max_u64(named_bytes, needed_bytes + more_bytes);
}

bool ptn_account_has_goal(const ptn_account *account) { return account && account->goal_bytes > 0; }

uint64_t ptn_account_room(const ptn_account *account) {
  uint64_t goal_bytes = account->goal_bytes, live_bytes = account->live_bytes;
  uint64_t most_bytes = goal_bytes > 0 ? goal_bytes : UINT64_MAX;
  if (limited(account)) most_bytes = ptn_min_u64(most_bytes, account->limit_bytes);
  if (most_bytes == UINT64_MAX) return UINT64_MAX;
  return most_bytes > live_bytes ? most_bytes - live_bytes : 0;
}

static void add_live(ptn_account *account, uint64_t bytes) {
  uint64_t live_bytes = account->live_bytes + bytes;
  account->block_count++;
  atomic_store_explicit(&account->live_bytes, live_bytes, memory_order_relaxed);
  account->peak_bytes = ptn_max_u64(account->peak_bytes, live_bytes);
  account->interval_peak_bytes = ptn_max_u64(account->interval_peak_bytes, live_bytes);
}

static void drop_live(ptn_account *account, uint64_t bytes) {
  account->block_count--;
  atomic_store_explicit(&account->live_bytes, account->live_bytes - bytes, memory_order_relaxed);
  retire(account);
}

void ptn_account_count(ptn_account *account, uint64_t bytes) {
  add_live(account, bytes);
  if (!limited(account)) ptn_totals.unlimited_live_bytes += bytes;
  ptn_totals.live_bytes += bytes;
  ptn_totals.high_water_bytes = ptn_max_u64(ptn_totals.high_water_bytes, ptn_totals.live_bytes);
}

void ptn_account_uncount(ptn_account *account, uint64_t bytes) {
  if (!limited(account)) ptn_totals.unlimited_live_bytes -= bytes;
  ptn_totals.live_bytes -= bytes;
  drop_live(account, bytes);
}

void ptn_account_add_charge(ptn_account *account, uint64_t bytes) {
  add_live(account, bytes);
  account->charged_bytes += bytes;
}

void ptn_account_discharge(ptn_account *account, uint64_t bytes) {
  if (!account) return;
  ptn_lock(&ptn_arena_mutex);
  account->charged_bytes -= bytes;
  drop_live(account, bytes);
  ptn_unlock(&ptn_arena_mutex);
}

uint64_t ptn_resident_ceiling(void) {
  uint64_t high_bytes = ptn_totals.high_water_bytes + ptn_totals.high_water_bytes / PTN_RESIDENT_PART;
  if (ptn_totals.limited_count == 0) return high_bytes;
  uint64_t unlimited = ptn_totals.unlimited_live_bytes;
  uint64_t limits = ptn_totals.limit_bytes > UINT64_MAX - unlimited ? UINT64_MAX : ptn_totals.limit_bytes + unlimited;
  return ptn_min_u64(high_bytes, limits);
}

void ptn_account_get_stats(const ptn_account *account, ptn_account_stats *out) {
  ptn_lock(&ptn_arena_mutex);
  *out = (ptn_account_stats){.limit_bytes = account->limit_bytes,
                             .goal_bytes = account->goal_bytes,
                             .live_bytes = account->live_bytes,
                             .peak_bytes = account->peak_bytes,
                             .interval_peak_bytes = account->interval_peak_bytes,
                             .refused_count = account->refused_count,
                             .refused_bytes = account->refused_bytes};
  ptn_unlock(&ptn_arena_mutex);
}

uint64_t ptn_account_mark(ptn_account *account) {
  ptn_lock(&ptn_arena_mutex);
  uint64_t peak_bytes = account->interval_peak_bytes;
  account->interval_peak_bytes = account->live_bytes;
  account->refused_bytes = 0;
  ptn_unlock(&ptn_arena_mutex);
  return peak_bytes;
}

ptn_account *ptn_arena_use(ptn_account *account) { return atomic_exchange(&used_account, account); }
void ptn_arena_use_no_more(ptn_account *account) { atomic_compare_exchange_strong(&used_account, &account, NULL); }
ptn_account *ptn_arena_used(void) { return apart ? NULL : atomic_load_explicit(&used_account, memory_order_acquire); }

bool ptn_arena_set_apart(bool on) {
  bool before = apart;
  apart = on;
  return before;
}

void ptn_accounts_after_fork(void) {
  atomic_store(&used_account, NULL);
  for (size_t i = 0; i < all_count; i++) {
    all_accounts[i]->pressure = NULL;
    all_accounts[i]->asking_count = 0;
  }
}

bool ptn_accounts_hold(void) {
  uint64_t live_bytes = nobody.live_bytes, unlimited_bytes = nobody.live_bytes, limit_bytes = 0, limited_count = 0;
  for (size_t i = 0; i < all_count; i++) {
    const ptn_account *account = all_accounts[i];
    live_bytes += account->live_bytes - account->charged_bytes;
    if (!limited(account)) {
      unlimited_bytes += account->live_bytes - account->charged_bytes;
      continue;
    }
    if (account->live_bytes > account->limit_bytes) return false;
    limit_bytes += account->limit_bytes;
    limited_count++;
  }
  return live_bytes == ptn_totals.live_bytes && unlimited_bytes == ptn_totals.unlimited_live_bytes &&
         limit_bytes == ptn_totals.limit_bytes && limited_count == ptn_totals.limited_count &&
         live_bytes <= ptn_totals.high_water_bytes;
}
