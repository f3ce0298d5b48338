/* Random lives of the arena against a list of what was handed out: accounts with limits, goals and pressure that come and go, blocks
 * with several holds, trims; nothing overlaps, every byte is counted, no limit is passed. */
/* sources: csrc/device/?*.c csrc/memory/?*.c */
#include <string.h>

#include "base/bytes.h"
#include "fuzz.h"
#include "memory/arena.h"

enum { ACCOUNTS = 3, BLOCKS = 300, STEPS = 1500 };

typedef struct held {
  unsigned char *memory;
  size_t bytes;
  int account; /* -1: none, or one that is gone */
  int holds;
  unsigned char mark;
} held;

static struct {
  uint64_t state;
  ptn_account *accounts[ACCOUNTS];
  uint64_t limits[ACCOUNTS], live_bytes[ACCOUNTS];
  held blocks[BLOCKS];
} life;

static uint64_t chance(uint64_t count) { return check_random(&life.state) % count; }

static void give_up(held *block) {
  CHECK(block->memory[0] == block->mark && block->memory[block->bytes - 1] == block->mark);
  ptn_arena_free(block->memory);
  if (--block->holds > 0) return;
  if (block->account >= 0) life.live_bytes[block->account] -= ptn_arena_rounded_bytes(block->bytes);
  block->memory = NULL;
}

/* Gives up to three blocks of the account up, as the stash does. */
static ptn_status press(void *context, uint64_t missing_bytes, bool must, bool *freed) {
  int account = (int)((ptn_account **)context - life.accounts);
  CHECK(missing_bytes > 0);
  if (!must && chance(2)) return PTN_OK;
  for (uint64_t count = chance(4), i = chance(BLOCKS); count > 0; count--, i = (i + 1) % BLOCKS) {
    held *block = &life.blocks[i];
    if (!block->memory || block->account != account) continue;
    while (block->memory) give_up(block);
    *freed = true;
  }
  return PTN_OK;
}

static void open_account(int i) {
  life.limits[i] = chance(3) ? ptn_round_up(1 + chance(24 * PTN_MIB), 64) : 0;
  CHECK_OK(ptn_account_create(&life.accounts[i], life.limits[i], chance(2) ? press : NULL, &life.accounts[i]));
  if (chance(2)) ptn_account_set_goal(life.accounts[i], chance(16 * PTN_MIB));
  life.live_bytes[i] = 0;
}

static void close_account(int i) {
  ptn_account_destroy(life.accounts[i]);
  for (int k = 0; k < BLOCKS; k++)
    if (life.blocks[k].account == i) life.blocks[k].account = -1;
}

static void take(held *block) {
  int account = (int)chance(ACCOUNTS + 1) - 1;
  size_t bytes = 1 + (size_t)chance((uint64_t)1 << (3 + chance(20)));
  void *memory;
  ptn_status status = ptn_arena_alloc(account < 0 ? NULL : life.accounts[account], bytes, &memory);
  uint64_t rounded_bytes = ptn_arena_rounded_bytes(bytes);
  bool fits = account < 0 || life.limits[account] == 0 || life.live_bytes[account] + rounded_bytes <= life.limits[account];
  CHECK(status == (fits ? PTN_OK : PTN_BUDGET)); /* what pressure gave up is counted out already */
  if (status != PTN_OK) {
    CHECK(!memory && ptn_last_error()->needed_bytes > ptn_last_error()->budget_bytes);
    return;
  }
  *block = (held){.memory = memory, .bytes = bytes, .account = account, .holds = 1, .mark = (unsigned char)chance(256)};
  block->memory[0] = block->memory[bytes - 1] = block->mark;
  if (account >= 0) life.live_bytes[account] += rounded_bytes;
}

static void look(held *block) {
  ptn_block found;
  bool large = block->bytes >= PTN_PAGE_BYTES;
  CHECK(ptn_arena_owns(block->memory));
  CHECK((uintptr_t)block->memory % (large ? PTN_PAGE_BYTES : PTN_TENSOR_ALIGN_BYTES) == 0);
  if (!ptn_arena_find(block->memory + chance(block->bytes), &found)) {
    CHECK(!large);
    return;
  }
  CHECK(found.memory == block->memory && found.bytes >= block->bytes);
  if (chance(3) == 0) ptn_arena_set_use(block->memory, PTN_BLOCK_STATIC);
  if (block->holds < 4 && chance(2)) {
    CHECK(ptn_arena_hold(&found));
    block->holds++;
  }
  found.serial += 1 + chance(5);
  CHECK(!ptn_arena_hold(&found)); /* a block that is not that one */
}

static int by_address(const void *one, const void *other) {
  const unsigned char *a = (*(held *const *)one)->memory, *b = (*(held *const *)other)->memory;
  return (a > b) - (a < b);
}

static void check_all(void) {
  held *sorted[BLOCKS];
  size_t count = 0;
  for (int i = 0; i < BLOCKS; i++)
    if (life.blocks[i].memory) sorted[count++] = &life.blocks[i];
  qsort(sorted, count, sizeof *sorted, by_address);
  for (size_t i = 1; i < count; i++) CHECK(sorted[i - 1]->memory + sorted[i - 1]->bytes <= sorted[i]->memory);
  for (int i = 0; i < ACCOUNTS; i++) {
    ptn_account_stats stats;
    ptn_account_get_stats(life.accounts[i], &stats);
    CHECK(stats.live_bytes == life.live_bytes[i] && stats.peak_bytes >= stats.live_bytes);
    CHECK(life.limits[i] == 0 || stats.peak_bytes <= life.limits[i]);
  }
  ptn_arena_check();
}

static void one_life(uint64_t seed) {
  memset(&life, 0, sizeof life);
  life.state = seed;
  ptn_arena_stats before, after;
  ptn_arena_get_stats(&before);
  for (int i = 0; i < ACCOUNTS; i++) open_account(i);
  for (int step = 0; step < STEPS; step++) {
    held *block = &life.blocks[chance(BLOCKS)];
    if (!block->memory) take(block);
    else if (chance(4) == 0) look(block);
    else give_up(block);
    if (chance(100) == 0) ptn_arena_trim(chance(8 * PTN_MIB));
    if (chance(300) == 0) {
      int i = (int)chance(ACCOUNTS);
      close_account(i);
      open_account(i);
    }
    if (step % 50 == 0) check_all();
  }
  for (int i = 0; i < BLOCKS; i++)
    while (life.blocks[i].memory) give_up(&life.blocks[i]);
  check_all();
  for (int i = 0; i < ACCOUNTS; i++) close_account(i);
  ptn_arena_get_stats(&after);
  CHECK(after.live_bytes == before.live_bytes);
}

int main(void) {
  fuzz("arena", one_life);
  return 0;
}
