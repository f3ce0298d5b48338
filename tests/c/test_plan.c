/* The planner on random requests: never over budget, monotonic, deterministic, the smallest budget works and one byte less does
 * not; and what it states against second, plainer computations. Blocks that swap need the memory of recomputed ones. */
/* sources: csrc/plan/bounds.c csrc/plan/climb.c csrc/plan/families.c csrc/plan/fit.c csrc/plan/make.c csrc/plan/peak.c
 * csrc/plan/request.c csrc/plan/room.c csrc/plan/rule.c csrc/plan/search.c csrc/plan/simulate.c csrc/plan/simulate_course.c
 * csrc/plan/simulate_jobs.c csrc/plan/simulate_lanes.c csrc/plan/simulate_moves.c csrc/plan/simulate_stash.c csrc/plan/slots.c
 * csrc/plan/sums.c csrc/plan/swap.c csrc/plan/tiers.c csrc/plan/trials.c */
#include <string.h>

#include "base/bytes.h"
#include "base/threads.h"
#include "check.h"
#include "plan/parts.h"

/* A phase without keep_working_bytes is one where it is not known. */
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

#define MOST_CHUNKS 100
#define MOST_BLOCKS 100
#define MOST_PHASES (2 * MOST_BLOCKS + 3)
#define MOST_ACCESSES 512

typedef struct model {
  ptn_plan_request request;
  ptn_plan_chunk chunks[MOST_CHUNKS];
  ptn_phase phases[MOST_PHASES];
  uint32_t accesses[MOST_ACCESSES];
} model;

typedef struct answer {
  ptn_plan plan;
  int32_t slot_of_chunk[MOST_CHUNKS];
  uint64_t slot_bytes[MOST_CHUNKS];
  ptn_mode modes[MOST_BLOCKS];
  ptn_status status;
  uint32_t n_keep;
} answer;

static void ask(const model *of, uint64_t budget_bytes, answer *out) {
  ptn_plan_request request = of->request;
  request.budget_bytes = budget_bytes;
  memset(out, 0, sizeof *out);
  out->plan.slot_of_chunk = out->slot_of_chunk;
  out->plan.slot_bytes = out->slot_bytes;
  out->plan.modes = out->modes;
  out->status = ptn_plan_make(&request, &out->plan);
  for (uint32_t i = 0; out->status == PTN_OK && i < request.n_blocks; i++) out->n_keep += out->modes[i] == PTN_KEEP;
}

static uint64_t upto(uint64_t *random, uint64_t most) { return check_random(random) % (most + 1); }

/* Behind the first completion in a phase less is live, by as much in both runs. */
static void draw_after(model *out, uint64_t *random, bool alike) {
  uint64_t less = upto(random, 1 << 18);
  for (uint32_t p = 0; p < out->request.n_phases; p++) {
    ptn_phase *phase = &out->phases[p];
    if (!alike) less = upto(random, 1 << 18);
    if (phase->keep_peak_bytes <= less || phase->checkpoint_peak_bytes <= less) continue; /* not known */
    phase->keep_after_bytes = phase->keep_peak_bytes - less;
    phase->checkpoint_after_bytes = phase->checkpoint_peak_bytes - less;
  }
}

/* An update in step() of one parameter after another. */
static void draw_update(model *out, uint64_t *random) {
  out->request.update_bytes = upto(random, 1 << 18);
  for (uint32_t i = 0; i < out->request.n_chunks; i++) {
    ptn_plan_chunk *chunk = &out->chunks[i];
    chunk->update_here_bytes = upto(random, chunk->grad_bytes);
    chunk->update_away_bytes = chunk->update_here_bytes + upto(random, 4 * chunk->grad_bytes);
  }
}

/* Of chunks that are complete in one phase: behind some less is live than behind the first. */
static void draw_less(model *out, uint64_t *random) {
  for (uint32_t c = 0; c < out->request.n_chunks; c++) {
    const ptn_phase *phase = &out->phases[out->chunks[c].complete_phase];
    uint64_t keep = phase->keep_after_bytes > 0 ? phase->keep_after_bytes : phase->keep_peak_bytes;
    uint64_t checkpoint = phase->checkpoint_after_bytes > 0 ? phase->checkpoint_after_bytes : phase->checkpoint_peak_bytes;
    out->chunks[c].less_bytes = upto(random, 2) * upto(random, ptn_min_u64(keep, checkpoint) / 2);
  }
}

/* A model whose retained bytes and temporaries are drawn; both runs are played from them. */
static void draw_model(model *out, uint64_t *random, uint32_t most_blocks, uint32_t most_chunks, bool alike) {
  memset(out, 0, sizeof *out);
  ptn_plan_request *request = &out->request;
  uint32_t n_blocks = (uint32_t)upto(random, most_blocks), n_phases = 0;
  int64_t base = (int64_t)upto(random, 1 << 16), keep[MOST_BLOCKS], drop[MOST_BLOCKS], kept = base, dropped = base;
  ptn_phase *phases = out->phases;
  phases[n_phases++] = (ptn_phase){-1, false, 0, (uint64_t)base + 99, 0, (uint64_t)base + 99};
  for (uint32_t i = 0; i < n_blocks; i++) {
    drop[i] = alike && i > 0 ? drop[0] : (int64_t)upto(random, 1 << 16);
    keep[i] = alike && i > 0 ? keep[0] : drop[i] + (int64_t)upto(random, 1 << 20);
    uint64_t work = upto(random, 1 << 18);
    phases[n_phases++] = (ptn_phase){(int32_t)i,        false,
                                     (uint64_t)kept,    (uint64_t)(kept + keep[i]) + work,
                                     (uint64_t)dropped, (uint64_t)(dropped + keep[i]) + work};
    kept += keep[i];
    dropped += drop[i];
  }
  uint64_t head = upto(random, 1 << 21);
  phases[n_phases++] = (ptn_phase){
      -1, false, (uint64_t)kept, (uint64_t)kept + head, (uint64_t)dropped, (uint64_t)dropped + head + upto(random, 2048)};
  for (uint32_t i = n_blocks; i-- > 0;) {
    uint64_t work = upto(random, 1 << 18);
    phases[n_phases++] = (ptn_phase){(int32_t)i,        true,
                                     (uint64_t)kept,    (uint64_t)kept + work,
                                     (uint64_t)dropped, (uint64_t)(dropped + keep[i] - drop[i]) + work};
    kept -= keep[i];
    dropped -= drop[i];
  }
  uint64_t tail = upto(random, 1 << 20);
  phases[n_phases++] = (ptn_phase){-1, true, (uint64_t)kept, (uint64_t)kept + tail, (uint64_t)dropped, (uint64_t)dropped + tail};
  request->n_chunks = (uint32_t)upto(random, most_chunks);
  for (uint32_t i = 0; i < request->n_chunks; i++) {
    uint64_t bytes = PTN_PAGE_BYTES * (1 + upto(random, upto(random, 5) == 0 ? 2000 : 100));
    bool frozen = upto(random, 9) == 0;
    out->chunks[i] = (ptn_plan_chunk){bytes,
                                      frozen ? 0 : bytes - upto(random, 4000),
                                      frozen ? 0 : 2 * bytes,
                                      n_blocks + 1 + (uint32_t)upto(random, n_phases - n_blocks - 2),
                                      0,
                                      0,
                                      0};
    for (uint32_t j = 0; j < 2; j++) out->accesses[j ? 2 * request->n_chunks - 1 - i : i] = i;
  }
  request->n_accesses = 2 * request->n_chunks;
  for (uint32_t i = 0; request->n_chunks > 0 && i < upto(random, 8); i++) {
    out->accesses[request->n_accesses++] = (uint32_t)upto(random, request->n_chunks - 1);
  }
  request->fixed_bytes = upto(random, 1 << 16);
  request->chunks = out->chunks;
  request->n_blocks = n_blocks;
  request->n_phases = n_phases;
  request->phases = out->phases;
  request->accesses = out->accesses;
  request->n_together = (uint32_t)upto(random, 4);
  request->n_arrays = 1 + (uint32_t)upto(random, 3);
  request->n_persist = -1;
  request->grads_outlive_backward = upto(random, 3) == 0;
  if (upto(random, 1) == 0) draw_after(out, random, alike);
  if (upto(random, 1) == 0) draw_less(out, random);
  if (upto(random, 2) == 0) draw_update(out, random);
}

/* What is highest in a phase, in all of it or behind the first completion. */
static int64_t plain_highest(const ptn_phase *phase, bool away, bool after) {
  uint64_t known = away ? phase->checkpoint_after_bytes : phase->keep_after_bytes;
  if (after && known > 0) return (int64_t)known;
  return (int64_t)(away ? phase->checkpoint_peak_bytes : phase->keep_peak_bytes);
}

/* The live bytes of a phase said plainly: its own run, and every other block that is between its forward and its backward. */
static int64_t plain_phase(const model *of, const ptn_mode *modes, uint32_t at, bool after) {
  const ptn_phase *phases = of->phases, *phase = &phases[at];
  uint32_t n_blocks = of->request.n_blocks, n_phases = of->request.n_phases;
  bool any_keep = n_blocks == 0, any_away = false;
  for (uint32_t i = 0; i < n_blocks; i++) {
    any_keep |= modes[i] == PTN_KEEP;
    any_away |= modes[i] != PTN_KEEP;
  }
  bool away = phase->block < 0 ? !any_keep : modes[phase->block] != PTN_KEEP;
  int64_t now = plain_highest(phase, away, after);
  if (phase->block >= 0 && !phase->backward && modes[phase->block] == PTN_SWAP) now += (int64_t)phase->small_bytes;
  int64_t other = any_away && any_keep && phase->block < 0 ? plain_highest(phase, true, after) : 0;
  for (uint32_t b = 0; b < n_blocks; b++) {
    uint32_t forward = 1 + b, backward = n_phases - 2 - b;
    if (forward >= at || backward <= at) continue;
    int64_t kept = (int64_t)(phases[forward + 1].keep_entry_bytes - phases[forward].keep_entry_bytes);
    int64_t dropped = (int64_t)(phases[forward + 1].checkpoint_entry_bytes - phases[forward].checkpoint_entry_bytes);
    int64_t held = modes[b] == PTN_KEEP ? kept : dropped;
    if (modes[b] == PTN_SWAP) held += (int64_t)phases[forward].small_bytes;
    now += held - (away ? dropped : kept);
    other += held - dropped;
  }
  return now > other || !(any_away && any_keep && phase->block < 0) ? now : other;
}

/* Whether the chunk's gradients are complete before the phase, or in it, and last so late that as much less is live. */
static bool plain_complete(const ptn_plan_chunk *chunk, uint32_t at, const ptn_plan_chunk *last) {
  return chunk->complete_phase < at || (last && chunk->complete_phase == at && chunk->less_bytes <= last->less_bytes);
}

/* In the phase, behind a completion in it, or with none of them. */
static uint64_t plain_moment(const model *of, const answer *given, uint32_t at, const ptn_plan_chunk *last) {
  const ptn_plan_request *request = &of->request;
  uint64_t now = (uint64_t)(plain_phase(of, given->modes, at, last) - (last ? (int64_t)last->less_bytes : 0)), pending = 0;
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    const ptn_plan_chunk *chunk = &of->chunks[c];
    bool complete = plain_complete(chunk, at, last);
    if (c < given->plan.n_persist) {
      now += chunk->param_bytes + chunk->state_bytes;
      if (complete || (request->grads_outlive_backward && request->n_passes > 1)) now += chunk->grad_bytes;
    } else if (complete) {
      pending = ptn_max_u64(pending, chunk->grad_bytes);
    }
  }
  return now + pending;
}

/* While an update runs in step(). */
static uint64_t plain_update(const model *of, const answer *given) {
  const ptn_plan_request *request = &of->request;
  uint64_t now = request->update_bytes, work = 0, updates = request->update_bytes;
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    const ptn_plan_chunk *chunk = &of->chunks[c];
    bool here = c < given->plan.n_persist;
    if (here) now += chunk->param_bytes + chunk->state_bytes + chunk->grad_bytes;
    work = ptn_max_u64(work, here ? chunk->update_here_bytes : chunk->update_away_bytes);
    updates += chunk->update_away_bytes;
  }
  return updates > 0 ? now + work : 0;
}

static uint64_t plain_peak(const model *of, const answer *given) {
  const ptn_plan_request *request = &of->request;
  uint64_t highest = 0, always = request->fixed_bytes + (request->ring_host_bytes > 0 ? 0 : given->plan.ring_bytes);
  for (uint32_t i = 0; i < given->plan.n_buffer; i++) always += given->slot_bytes[i];
  for (uint32_t at = 0; at < request->n_phases; at++) highest = ptn_max_u64(highest, plain_moment(of, given, at, NULL));
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    const ptn_plan_chunk *chunk = &of->chunks[c];
    if (chunk->grad_bytes > 0) highest = ptn_max_u64(highest, plain_moment(of, given, chunk->complete_phase, chunk));
  }
  CHECK(given->plan.computed_bytes == always + highest);
  return always + ptn_max_u64(highest, plain_update(of, given));
}

/* What swap blocks write, and how far backward rises, from what the model was drawn with. */
static void check_swap(const model *of, const answer *given) {
  const ptn_plan_request *request = &of->request;
  const ptn_plan *plan = &given->plan;
  uint64_t stash = 0, rise = 0, recompute = 0, room = (plan->peak_bytes - plan->static_bytes) / 2;
  bool any = false;
  for (uint32_t b = 0; b < request->n_blocks; b++) {
    const ptn_phase *forward = &of->phases[1 + b], *backward = &of->phases[request->n_phases - 2 - b];
    bool again = given->modes[b] == PTN_CHECKPOINT || given->modes[b] == PTN_CHECKPOINT_SWAP;
    bool swaps = given->modes[b] == PTN_SWAP || given->modes[b] == PTN_CHECKPOINT_SWAP;
    uint64_t retained = again ? forward[1].checkpoint_entry_bytes - forward[0].checkpoint_entry_bytes
                              : forward[1].keep_entry_bytes - forward[0].keep_entry_bytes - forward[0].small_bytes;
    if (swaps) stash += (retained + 65535) / 65536 * 65536;
    any |= swaps;
    rise = ptn_max_u64(rise, backward->keep_peak_bytes - backward->keep_entry_bytes);
    if (again) recompute = ptn_max_u64(recompute, backward->checkpoint_peak_bytes - backward->checkpoint_entry_bytes);
  }
  CHECK(plan->stash_bytes == stash);
  CHECK(plan->headroom_bytes == (any ? ptn_min_u64(rise, room) : 0));
  CHECK(plan->recompute_bytes == (any ? ptn_min_u64(recompute, room) : 0));
}

static void check_answer(const model *of, const answer *given, uint64_t budget_bytes) {
  const ptn_plan *plan = &given->plan;
  uint64_t slots = 0, disk = plan->stash_bytes, still = of->request.ring_host_bytes > 0 ? 0 : plan->ring_bytes;
  bool trained = false;
  CHECK(plan->peak_bytes <= budget_bytes && plan->smallest_bytes <= budget_bytes);
  CHECK(plan->peak_bytes == plain_peak(of, given));
  CHECK(plan->n_persist <= of->request.n_chunks);
  for (uint32_t i = 0; i < of->request.n_chunks; i++) {
    CHECK((given->slot_of_chunk[i] == -1) == (i < plan->n_persist));
    if (i < plan->n_persist) continue;
    CHECK(slots == 0 || given->slot_of_chunk[i] < (int32_t)plan->n_buffer);
    trained |= of->chunks[i].grad_bytes > 0;
    disk += (of->chunks[i].param_bytes + of->chunks[i].state_bytes) * (of->chunks[i].grad_bytes > 0 ? 2 : 1);
    if (of->request.grads_outlive_backward) disk += ptn_round_up(of->chunks[i].grad_bytes, PTN_PAGE_BYTES);
  }
  for (uint32_t i = 0; i < plan->n_buffer; i++) slots += given->slot_bytes[i];
  for (uint32_t i = 0; i < plan->n_persist; i++) still += of->chunks[i].param_bytes + of->chunks[i].state_bytes;
  CHECK(slots == plan->slot_bytes_total && disk == plan->disk_bytes);
  CHECK(plan->static_bytes == still + slots && plan->static_bytes <= plan->peak_bytes);
  check_swap(of, given);
  CHECK(trained == (plan->ring_bytes > 0));
  CHECK(plan->ring_bytes == plan->n_pieces * of->request.n_arrays * plan->piece_bytes);
  if (trained) {
    CHECK(plan->n_pieces >= 4 && plan->n_pieces <= 6);
    CHECK(plan->piece_bytes >= 65536 && plan->piece_bytes <= 2 * PTN_MIB && (plan->piece_bytes & (plan->piece_bytes - 1)) == 0);
  }
}

/* All budgets of a ladder from below the smallest to above what everything in memory needs. */
static void check_ladder(const model *of, uint64_t *random) {
  answer given, before = {.status = PTN_BUDGET}, again;
  ask(of, 0, &given);
  CHECK(given.status == PTN_BUDGET);
  uint64_t smallest = ptn_last_error()->smallest_bytes;
  CHECK(ptn_last_error()->needed_bytes == smallest && ptn_last_error()->budget_bytes == 0);
  if (smallest > 0) {
    ask(of, smallest - 1, &given);
    CHECK(given.status == PTN_BUDGET);
  }
  for (uint64_t budget = smallest; budget < smallest + ((uint64_t)1 << 33);) {
    ask(of, budget, &given);
    CHECK(given.status == PTN_OK && given.plan.smallest_bytes == smallest);
    check_answer(of, &given, budget);
    ask(of, budget, &again);
    CHECK(memcmp(&again.modes, &given.modes, sizeof given.modes) == 0 && again.plan.peak_bytes == given.plan.peak_bytes);
    CHECK(memcmp(&again.slot_of_chunk, &given.slot_of_chunk, sizeof given.slot_of_chunk) == 0);
    CHECK(given.n_keep >= before.n_keep);
    if (before.status == PTN_OK && memcmp(before.modes, given.modes, sizeof given.modes) == 0) {
      CHECK(given.plan.n_persist >= before.plan.n_persist);
    }
    before = given;
    if (given.n_keep == of->request.n_blocks && given.plan.n_persist == of->request.n_chunks) break;
    budget += 1 + upto(random, upto(random, 3) == 0 ? 1 << 22 : 1 << 18) + budget / 32;
  }
  CHECK(before.n_keep == of->request.n_blocks && before.plan.n_persist == of->request.n_chunks);
  CHECK(before.plan.n_buffer == 0 && before.plan.ring_bytes == 0 && before.plan.disk_bytes == 0);
}

/* Where the choice is small: among all modes of the planner's patterns, none with more kept blocks fits. */
static void check_given(const model *of, uint64_t *random) {
  model fixed = *of;
  ptn_mode modes[MOST_BLOCKS];
  for (uint32_t i = 0; i < of->request.n_blocks; i++) modes[i] = (ptn_mode)upto(random, 3);
  fixed.request.modes = upto(random, 1) ? modes : NULL;
  fixed.request.n_persist = upto(random, 1) ? -1 : (int64_t)upto(random, of->request.n_chunks);
  answer given;
  ask(&fixed, 0, &given);
  CHECK(given.status == PTN_BUDGET);
  uint64_t needed = ptn_last_error()->needed_bytes;
  CHECK(ptn_last_error()->smallest_bytes <= needed);
  for (int i = 0; i < 3; i++) {
    uint64_t budget = needed + (i == 0 ? 0 : upto(random, (uint64_t)1 << 28));
    ask(&fixed, budget, &given);
    CHECK(given.status == PTN_OK);
    check_answer(&fixed, &given, budget);
    if (fixed.request.modes) CHECK(memcmp(modes, given.modes, of->request.n_blocks * sizeof *modes) == 0);
    if (fixed.request.n_persist >= 0) CHECK(given.plan.n_persist == fixed.request.n_persist);
  }
  if (needed > 0) {
    ask(&fixed, needed - 1, &given);
    CHECK(given.status == PTN_BUDGET);
  }
}

/* A block that swaps counts as one that is recomputed: the same plan for every budget, and beside it the stash on the disk. */
static void check_swapped(const model *of, uint64_t *random) {
  model with = *of, without = *of;
  ptn_mode modes[MOST_BLOCKS], plain[MOST_BLOCKS];
  uint32_t n_blocks = of->request.n_blocks;
  for (uint32_t i = 0; i < n_blocks; i++) {
    modes[i] = (ptn_mode)upto(random, 3);
    plain[i] = modes[i] == PTN_KEEP ? PTN_KEEP : PTN_CHECKPOINT;
  }
  with.request.modes = modes;
  without.request.modes = plain;
  with.request.n_persist = without.request.n_persist = upto(random, 1) ? -1 : (int64_t)upto(random, of->request.n_chunks);
  answer a, b, before = {.status = PTN_BUDGET};
  ask(&with, 0, &a);
  uint64_t needed = ptn_last_error()->needed_bytes, smallest = ptn_last_error()->smallest_bytes;
  ask(&without, 0, &b);
  CHECK(a.status == PTN_BUDGET && b.status == PTN_BUDGET);
  CHECK(ptn_last_error()->needed_bytes == needed && ptn_last_error()->smallest_bytes == smallest);
  for (uint64_t budget = needed; budget < needed + 64 * PTN_MIB; budget += 1 + budget / 8 + upto(random, 1 << 20)) {
    ask(&with, budget, &a);
    ask(&without, budget, &b);
    CHECK(a.status == PTN_OK && b.status == PTN_OK);
    check_answer(&with, &a, budget);
    CHECK(memcmp(a.modes, modes, n_blocks * sizeof *modes) == 0);
    CHECK(a.plan.peak_bytes == b.plan.peak_bytes && a.plan.n_persist == b.plan.n_persist);
    CHECK(a.plan.static_bytes == b.plan.static_bytes && a.plan.piece_bytes == b.plan.piece_bytes);
    CHECK(memcmp(a.slot_of_chunk, b.slot_of_chunk, sizeof a.slot_of_chunk) == 0);
    CHECK(b.plan.stash_bytes == 0 && b.plan.headroom_bytes == 0 && b.plan.recompute_bytes == 0);
    CHECK(a.plan.disk_bytes == b.plan.disk_bytes + a.plan.stash_bytes);
    if (before.status == PTN_OK) {
      CHECK(a.plan.n_persist >= before.plan.n_persist && a.plan.stash_bytes == before.plan.stash_bytes);
      CHECK(a.plan.disk_bytes <= before.plan.disk_bytes);
    }
    before = a;
  }
}

/* With n blocks that are alike there are 2^n mode vectors: none that keeps as many blocks as the plan has a lower peak, and none
 * that keeps more fits what the plan had to spend. */
static void check_brute_force(const model *of) {
  uint32_t n_blocks = of->request.n_blocks;
  answer lowest;
  ask(of, 0, &lowest);
  uint64_t smallest = ptn_last_error()->smallest_bytes;
  uint32_t consumers[MOST_PHASES];
  ptn_live live[MOST_PHASES];
  int64_t stretch_bytes[MOST_CHUNKS + 1];
  ptn_peak *peak;
  ptn_peak_match(&of->request, consumers);
  CHECK_OK(ptn_peak_create(&peak, &of->request, consumers));
  for (uint64_t budget = smallest; budget < smallest + (uint64_t)12 * PTN_MIB; budget += PTN_MIB / 2 + 12345) {
    answer given;
    ask(of, budget, &given);
    CHECK(given.status == PTN_OK);
    uint64_t ours = UINT64_MAX;
    for (uint32_t bits = 0; bits < (uint32_t)1 << n_blocks; bits++) {
      ptn_mode modes[MOST_BLOCKS];
      uint32_t n_keep = 0;
      bool same = true;
      for (uint32_t i = 0; i < n_blocks; i++) {
        modes[i] = bits >> i & 1 ? PTN_KEEP : PTN_CHECKPOINT;
        n_keep += bits >> i & 1;
        same &= modes[i] == given.modes[i];
      }
      ptn_peak_compose(peak, modes, false, live);
      for (uint32_t at = 0; at < of->request.n_phases; at++) CHECK(live[at].peak_bytes == plain_phase(of, modes, at, false));
      ptn_peak_stretches(peak, live, stretch_bytes);
      uint64_t peak_bytes = ptn_peak_without_slots(peak, stretch_bytes, false, 0);
      if (n_keep == given.n_keep) ours = ptn_min_u64(ours, peak_bytes);
      if (same) lowest.plan.peak_bytes = peak_bytes;
    }
    CHECK(lowest.plan.peak_bytes == ours);
  }
  ptn_peak_destroy(peak);
}

/* With one mode for all the composition is the run itself, but for what swap leaves in memory. */
static void check_uniform(const model *of) {
  uint32_t consumers[MOST_PHASES];
  ptn_live live[MOST_PHASES];
  ptn_mode modes[MOST_BLOCKS];
  ptn_peak *peak;
  ptn_peak_match(&of->request, consumers);
  CHECK_OK(ptn_peak_create(&peak, &of->request, consumers));
  for (int mode = PTN_KEEP; mode <= PTN_CHECKPOINT_SWAP; mode++) {
    for (uint32_t i = 0; i < of->request.n_blocks; i++) modes[i] = (ptn_mode)mode;
    ptn_peak_compose(peak, modes, false, live);
    bool away = mode != PTN_KEEP && of->request.n_blocks > 0;
    int64_t left = 0;
    for (uint32_t i = 0; i < of->request.n_phases; i++) {
      const ptn_phase *phase = &of->phases[i];
      bool swaps = mode == PTN_SWAP && phase->block >= 0;
      if (swaps && !phase->backward) left += (int64_t)phase->small_bytes;
      if (swaps && phase->backward) left -= (int64_t)of->phases[1 + phase->block].small_bytes;
      CHECK(live[i].peak_bytes == left + (int64_t)(away ? phase->checkpoint_peak_bytes : phase->keep_peak_bytes));
    }
  }
  ptn_peak_destroy(peak);
}

typedef struct entry_peak {
  int64_t entry, peak;
} entry_peak;

static entry_peak of_run(const ptn_phase *phase, int run) {
  if (run == 0) return (entry_peak){(int64_t)phase->keep_entry_bytes, (int64_t)phase->keep_peak_bytes};
  if (run == 1) return (entry_peak){(int64_t)phase->checkpoint_entry_bytes, (int64_t)phase->checkpoint_peak_bytes};
  return (entry_peak){(int64_t)phase->swap_entry_bytes, (int64_t)phase->swap_peak_bytes};
}

/* With the least, what the swap run says of a phase and of what its block retains stands for blocks of the mode swap. */
static void check_least(model *of, uint64_t *random) {
  static const int run_of_mode[] = {[PTN_KEEP] = 0, [PTN_SWAP] = 2, [PTN_CHECKPOINT] = 1, [PTN_CHECKPOINT_SWAP] = 1};
  uint32_t consumers[MOST_PHASES], n_blocks = of->request.n_blocks, n_phases = of->request.n_phases;
  ptn_live live[MOST_PHASES];
  ptn_mode modes[MOST_BLOCKS];
  ptn_peak *peak;
  for (uint32_t at = 0; at < n_phases; at++) {
    of->phases[at].swap_entry_bytes = upto(random, 1 << 20);
    of->phases[at].swap_peak_bytes = of->phases[at].swap_entry_bytes + 1 + upto(random, 1 << 20);
  }
  CHECK(ptn_peak_knows_least(&of->request));
  ptn_peak_match(&of->request, consumers);
  CHECK_OK(ptn_peak_create(&peak, &of->request, consumers));
  for (int round = 0; round < 8; round++) {
    bool used[3] = {n_blocks == 0};
    for (uint32_t b = 0; b < n_blocks; b++) {
      modes[b] = (ptn_mode)(round == 0 ? PTN_SWAP : upto(random, 3));
      used[run_of_mode[modes[b]]] = true;
    }
    ptn_peak_compose(peak, modes, true, live);
    for (uint32_t at = 0; at < n_phases; at++) {
      int32_t block = of->phases[at].block;
      int64_t highest = INT64_MIN;
      for (int run = 0; run < 3; run++) {
        if (block >= 0 ? run_of_mode[modes[block]] != run : !used[run]) continue;
        int64_t live = of_run(&of->phases[at], run).peak;
        for (uint32_t b = 0; b < n_blocks; b++) {
          if (1 + b >= at || n_phases - 2 - b <= at) continue;
          int own = run_of_mode[modes[b]];
          live += of_run(&of->phases[2 + b], own).entry - of_run(&of->phases[1 + b], own).entry;
          live -= of_run(&of->phases[2 + b], run).entry - of_run(&of->phases[1 + b], run).entry;
        }
        if (live > highest) highest = live;
      }
      CHECK(live[at].peak_bytes == highest);
      CHECK(round > 0 || n_blocks == 0 || live[at].peak_bytes == (int64_t)of->phases[at].swap_peak_bytes);
    }
  }
  ptn_peak_destroy(peak);
}

static void check_refusals(uint64_t *random) {
  model of;
  answer given;
  do draw_model(&of, random, 4, 4, false);
  while (of.request.n_blocks == 0 || of.request.n_chunks == 0);
  ptn_mode modes[MOST_BLOCKS] = {(ptn_mode)7};
  model bad = of;
  bad.request.modes = modes;
  ask(&bad, UINT64_MAX, &given);
  CHECK(given.status == PTN_PLAN);
  bad = of;
  bad.request.n_persist = bad.request.n_chunks + 1;
  ask(&bad, UINT64_MAX, &given);
  CHECK(given.status == PTN_PLAN);
  bad = of;
  bad.request.n_arrays = 0;
  ask(&bad, UINT64_MAX, &given);
  CHECK(given.status == PTN_INVALID);
  bad = of;
  bad.chunks[0].grad_bytes = 1;
  bad.chunks[0].less_bytes = (uint64_t)1 << 40; /* than there is */
  bad.request.chunks = bad.chunks;
  ask(&bad, UINT64_MAX, &given);
  CHECK(given.status == PTN_INVALID);
  bad = of;
  bad.accesses[0] = bad.request.n_chunks;
  bad.request.accesses = bad.accesses;
  ask(&bad, UINT64_MAX, &given);
  CHECK(given.status == PTN_INVALID);
  ask(&of, UINT64_MAX, &given);
  CHECK(given.status == PTN_OK && given.plan.n_persist == of.request.n_chunks);
  of.request.n_phases = 0; /* states alone */
  of.request.update_bytes = 0;
  uint64_t states = of.request.fixed_bytes;
  for (uint32_t i = 0; i < of.request.n_chunks; i++) {
    of.chunks[i].complete_phase = 0;
    of.chunks[i].less_bytes = of.chunks[i].update_here_bytes = 0;
    states += of.chunks[i].param_bytes + of.chunks[i].grad_bytes + of.chunks[i].state_bytes;
  }
  ask(&of, UINT64_MAX, &given);
  CHECK(given.status == PTN_OK && given.plan.peak_bytes == states);
}

int main(void) {
  uint64_t random = 3;
  static model of;
  for (int round = 0; round < 400; round++) {
    draw_model(&of, &random, round % 4 == 0 ? 30 : 6, round % 4 == 1 ? 30 : 8, round % 2 == 0);
    of.request.ring_host_bytes = round % 3 == 0 ? (uint64_t)1 << (20 + round % 12) : 0;
    check_ladder(&of, &random);
    check_given(&of, &random);
    check_swapped(&of, &random);
    check_uniform(&of);
    check_least(&of, &random);
  }
  for (int round = 0; round < 60; round++) {
    draw_model(&of, &random, 6, 5, true);
    for (uint32_t i = 0; i < of.request.n_phases; i++) { /* alike in their temporaries as well */
      ptn_phase *phase = &of.phases[i];
      if (phase->block >= 0 && phase->backward) {
        int64_t kept = (int64_t)(of.phases[2].keep_entry_bytes - of.phases[1].keep_entry_bytes);
        phase->keep_peak_bytes = phase->keep_entry_bytes + 5000;
        phase->checkpoint_peak_bytes = phase->checkpoint_entry_bytes + (uint64_t)kept + 5000;
        phase->keep_after_bytes = phase->keep_after_bytes > 0 ? phase->keep_peak_bytes - 3000 : 0;
        phase->checkpoint_after_bytes = phase->checkpoint_after_bytes > 0 ? phase->checkpoint_peak_bytes - 3000 : 0;
      }
    }
    for (uint32_t i = 0; i < of.request.n_chunks; i++) of.chunks[i].complete_phase = of.request.n_phases - 1;
    draw_less(&of, &random);
    check_brute_force(&of);
  }
  check_refusals(&random);
  return 0;
}
