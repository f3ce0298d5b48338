/* What the plan says to the stash, on cases by hand and on random steps: blocks used twice, blocks that no backward reaches,
 * blocks that hold less after than before. */
/* sources: csrc/plan/peak.c csrc/plan/swap.c */
#include <string.h>

#include "base/bytes.h"
#include "check.h"
#include "plan/parts.h"

/* A phase without keep_working_bytes is one where it is not known. */
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

#define KIB ((uint64_t)1024)
#define MOST_BLOCKS 8
#define MOST_PHASES 64

static ptn_phase phases[MOST_PHASES];
static ptn_plan_request step = {.phases = phases};

static uint64_t stash_of(const ptn_mode *modes) {
  uint32_t consumers[MOST_PHASES];
  ptn_peak_match(&step, consumers);
  return ptn_swap_stash_bytes(&step, consumers, modes);
}

static uint64_t headroom_of(const ptn_mode *modes) { return ptn_swap_headroom_bytes(&step, modes, UINT64_MAX); }
static uint64_t recompute_of(const ptn_mode *modes) { return ptn_swap_recompute_bytes(&step, modes, UINT64_MAX); }

/* Block 0 retains 100 KiB kept and 10 KiB checkpointed, block 1 (used twice) 200 and 20, 300 and 30; block 2 has no backward. */
static void by_hand(void) {
  const ptn_phase given[] = {
      {-1, false, 0, 5 * KIB, 0, 5 * KIB},
      {0, false, 0, 150 * KIB, 0, 90 * KIB},
      {1, false, 100 * KIB, 400 * KIB, 10 * KIB, 300 * KIB},
      {2, false, 300 * KIB, 700 * KIB, 30 * KIB, 430 * KIB},
      {1, false, 370 * KIB, 900 * KIB, 100 * KIB, 500 * KIB},
      {-1, false, 670 * KIB, 5000 * KIB, 130 * KIB, 5000 * KIB},
      {1, true, 670 * KIB, 700 * KIB, 130 * KIB, 431 * KIB},
      {1, true, 370 * KIB, 420 * KIB, 100 * KIB, 300 * KIB},
      {0, true, 170 * KIB, 240 * KIB, 80 * KIB, 190 * KIB},
      {-1, true, 70 * KIB, 999 * KIB, 70 * KIB, 999 * KIB},
  };
  memcpy(phases, given, sizeof given);
  step.n_blocks = 3;
  step.n_phases = 10;
  const ptn_mode swap[] = {PTN_SWAP, PTN_SWAP, PTN_SWAP};
  CHECK(stash_of(swap) == (128 + 256 + 320) * KIB);
  CHECK(headroom_of(swap) == 70 * KIB && recompute_of(swap) == 0);
  const ptn_mode both[] = {PTN_CHECKPOINT_SWAP, PTN_CHECKPOINT_SWAP, PTN_CHECKPOINT_SWAP};
  CHECK(stash_of(both) == (64 + 64 + 64) * KIB);
  CHECK(headroom_of(both) == 70 * KIB && recompute_of(both) == 301 * KIB);
  const ptn_mode neither[] = {PTN_KEEP, PTN_CHECKPOINT, PTN_KEEP};
  CHECK(stash_of(neither) == 0);
  CHECK(headroom_of(neither) == 0 && recompute_of(neither) == 0);
  const ptn_mode one[] = {PTN_CHECKPOINT, PTN_SWAP, PTN_KEEP};
  CHECK(stash_of(one) == (256 + 320) * KIB);
  CHECK(headroom_of(one) == 70 * KIB && recompute_of(one) == 110 * KIB); /* of the block that does not swap */
  const ptn_mode kept[] = {PTN_KEEP, PTN_SWAP, PTN_KEEP};
  CHECK(headroom_of(kept) == 70 * KIB && recompute_of(kept) == 0); /* the backward of the block that stays */
  CHECK(ptn_swap_rise_bytes(&step, kept) == 70 * KIB);
  phases[7].keep_working_bytes = 95 * KIB; /* going saved tensors hid 45 of them */
  CHECK(headroom_of(kept) == 95 * KIB && headroom_of(swap) == 95 * KIB && ptn_swap_rise_bytes(&step, kept) == 70 * KIB);
  CHECK(headroom_of(both) == 95 * KIB && headroom_of(neither) == 0 && ptn_swap_rise_bytes(&step, neither) == 0);
  const ptn_mode unused[] = {PTN_KEEP, PTN_KEEP, PTN_SWAP};
  CHECK(stash_of(unused) == 0);
  CHECK(ptn_swap_headroom_bytes(&step, both, 100 * KIB) == 50 * KIB && ptn_swap_headroom_bytes(&step, both, 0) == 0);
  CHECK(ptn_swap_recompute_bytes(&step, both, 100 * KIB) == 50 * KIB && ptn_swap_recompute_bytes(&step, both, 0) == 0);
  step.n_phases = 0;
  CHECK(stash_of(swap) == 0 && headroom_of(swap) == 0 && recompute_of(both) == 0);
}

static uint64_t upto(uint64_t *random, uint64_t most) { return check_random(random) % (most + 1); }

/* Uses of blocks in any order, and a backward for some of them, in the reverse order. */
static void draw_step(uint64_t *random, int32_t *use_of_phase) {
  uint32_t n_uses = (uint32_t)upto(random, 12), n = 0;
  int32_t blocks[12];
  step.n_blocks = 1 + (uint32_t)upto(random, MOST_BLOCKS - 1);
  memset(use_of_phase, -1, MOST_PHASES * sizeof *use_of_phase);
  phases[n++] = (ptn_phase){.block = -1};
  for (uint32_t i = 0; i < n_uses; i++) {
    blocks[i] = (int32_t)upto(random, step.n_blocks - 1);
    phases[n++] = (ptn_phase){.block = blocks[i]};
  }
  phases[n++] = (ptn_phase){.block = -1};
  /* A block either has a backward for each of its uses or for none. */
  uint64_t frozen = upto(random, 2) == 0 ? check_random(random) : 0;
  for (uint32_t i = n_uses; i-- > 0;) {
    if (frozen >> blocks[i] & 1) continue;
    use_of_phase[1 + i] = (int32_t)n;
    phases[n++] = (ptn_phase){.block = blocks[i], .backward = true};
  }
  phases[n++] = (ptn_phase){.block = -1, .backward = true};
  for (uint32_t i = 0; i < n; i++) {
    phases[i].keep_entry_bytes = upto(random, 1 << 22);
    phases[i].keep_peak_bytes = phases[i].keep_entry_bytes + upto(random, 1 << 22);
    phases[i].checkpoint_entry_bytes = upto(random, 1 << 20);
    phases[i].checkpoint_peak_bytes = phases[i].checkpoint_entry_bytes + upto(random, 1 << 22);
    phases[i].small_bytes = upto(random, 1) * upto(random, 1 << 20);
  }
  step.n_phases = n;
}

static uint64_t plain_stash(const ptn_mode *modes, const int32_t *use_of_phase) {
  uint64_t total = 0;
  for (uint32_t i = 0; i < step.n_phases; i++) {
    if (use_of_phase[i] < 0) continue;
    ptn_mode mode = modes[phases[i].block];
    uint64_t before = 0, after = 0;
    if (mode == PTN_SWAP) before = phases[i].keep_entry_bytes + phases[i].small_bytes, after = phases[i + 1].keep_entry_bytes;
    if (mode == PTN_CHECKPOINT_SWAP) before = phases[i].checkpoint_entry_bytes, after = phases[i + 1].checkpoint_entry_bytes;
    while (before < after) before += 65536, total += 65536;
  }
  return total;
}

static void check_step(uint64_t *random) {
  int32_t use_of_phase[MOST_PHASES];
  ptn_mode modes[MOST_BLOCKS], more[MOST_BLOCKS], alone[MOST_BLOCKS];
  draw_step(random, use_of_phase);
  for (uint32_t b = 0; b < step.n_blocks; b++) modes[b] = (ptn_mode)upto(random, 3);
  uint64_t stash = stash_of(modes), headroom = headroom_of(modes), again = recompute_of(modes), sum = 0;
  CHECK(stash == plain_stash(modes, use_of_phase));
  bool any = false;
  for (uint32_t b = 0; b < step.n_blocks; b++) {
    any |= modes[b] == PTN_SWAP || modes[b] == PTN_CHECKPOINT_SWAP;
    for (uint32_t i = 0; i < step.n_blocks; i++) alone[i] = i == b ? modes[b] : PTN_KEEP;
    sum += stash_of(alone); /* the blocks' parts do not depend on one another */
  }
  CHECK(sum == stash && stash % 65536 == 0);
  CHECK(any || (stash == 0 && headroom == 0 && again == 0));
  for (uint32_t i = 0; i < step.n_phases && any; i++) { /* every backward has its room, and one of them needs all of it */
    if (phases[i].block < 0 || !phases[i].backward) continue;
    CHECK(headroom >= phases[i].keep_peak_bytes - phases[i].keep_entry_bytes);
    bool recomputes = modes[phases[i].block] == PTN_CHECKPOINT || modes[phases[i].block] == PTN_CHECKPOINT_SWAP;
    CHECK(!recomputes || again >= phases[i].checkpoint_peak_bytes - phases[i].checkpoint_entry_bytes);
  }
  for (uint32_t b = 0; b < step.n_blocks; b++) { /* one more block that swaps: never less of either */
    if (modes[b] == PTN_SWAP || modes[b] == PTN_CHECKPOINT_SWAP) continue;
    memcpy(more, modes, sizeof more);
    more[b] = modes[b] == PTN_KEEP ? PTN_SWAP : PTN_CHECKPOINT_SWAP;
    CHECK(stash_of(more) >= stash && headroom_of(more) >= headroom && recompute_of(more) >= again);
  }
  uint64_t least = 0;
  for (uint64_t above = 0; above < (uint64_t)1 << 24; above = 2 * above + 12345) { /* more memory: never less room, within half */
    uint64_t capped = ptn_swap_headroom_bytes(&step, modes, above);
    CHECK(capped >= least && capped <= above / 2 && (capped == headroom || capped == above / 2));
    least = capped;
  }
}

int main(void) {
  by_hand();
  uint64_t random = 11;
  for (int round = 0; round < 20000; round++) check_step(&random);
  return 0;
}
