/* The rule: which candidate is taken, in a fixed order of preference, where no timings are known yet.
 *
 * Problem: memory buys three things: activations that need not be recomputed, chunks that need not be moved, and slots and a
 * ring that let movement run ahead. Design: recomputation costs most, so blocks are kept first; then come a third slot,
 * persistent chunks, and a larger ring. Everything kept and persistent needs neither slots nor ring and is taken whenever it
 * fits.
 *
 * Which k blocks are kept: the last k, the first k, or k spread evenly, whichever has the lowest peak. The last k wins for
 * blocks that are alike: their activations are gone before the first block is recomputed.
 *
 * Invariants, for two requests that differ in their budgets alone: the one with more keeps at least as many blocks, and with the
 * same modes at least as many chunks; every budget from smallest_bytes on has a plan; no plan passes its budget. They hold
 * because each choice is "the largest that fits" among needs that do not depend on the budget, against a limit that never falls
 * when the budget grows. The ring would break this, as it grows with the budget in jumps: see spendable.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/parts.h"

#define LEAST_PIECE_BYTES ((int64_t)64 << 10)
#define N_LEVELS 6               /* pieces of 64 KiB, 128 KiB ... 2 MiB */
#define BUDGET_PER_PIECE 192     /* a piece is allowed from a budget of so many of it */
#define LEAST_PIECES 4
#define MOST_PIECES 6
#define MOST_TOGETHER 1024
#define MOST_ARRAYS 16

enum { KEEP_LAST, KEEP_FIRST, KEEP_SPREAD, N_PATTERNS };

typedef struct choice { /* of modes: k blocks kept by a pattern, or the caller's */
  uint32_t pattern;
  int64_t none_persist_bytes, all_persist_bytes; /* what it needs, without a ring, with no and with every chunk persistent */
  int64_t given_persist_bytes;                   /* with as many persistent as the caller wants */
} choice;

typedef struct search {
  const ptn_plan_request *request;
  uint32_t n_chunks, n_blocks, n_trained_end; /* chunks from n_trained_end on are all frozen */
  int64_t budget_bytes;
  int64_t limit_bytes;       /* for candidates that have a ring, without it */
  int64_t least_slots_bytes; /* with no chunk persistent and the fewest slots */
  uint32_t few, more;        /* distinct chunks with slots of their own: the least, and what is preferred */
  choice *choices;           /* by number of kept blocks */
  uint32_t *consumer_of_phase;
  int64_t *phase_bytes, *peak_scratch;
  ptn_mode *modes;
  int32_t *slot_of_chunk;
  uint64_t *slot_bytes;
  uint32_t n_slots;
  ptn_slots_scratch *slots;
} search;

/* ---- the ring ---- */

static bool has_ring(const search *at, uint32_t n_persist) { return n_persist < at->n_trained_end; }

static int64_t ring_bytes(const search *at, int level, int64_t n_pieces) {
  return n_pieces * (int64_t)at->request->n_arrays * (LEAST_PIECE_BYTES << level);
}

static int64_t least_ring_bytes(const search *at, uint32_t n_persist) {
  return has_ring(at, n_persist) ? ring_bytes(at, 0, LEAST_PIECES) : 0;
}

static int64_t level_budget_bytes(int level) { return BUDGET_PER_PIECE * (LEAST_PIECE_BYTES << level); }

/* What a budget leaves beside the ring, never less for a larger budget. Where a larger piece becomes possible, further budget
 * goes into the ring alone until it is paid for; and what the safest candidate needs is spared from all but the smallest ring. */
static int64_t spendable(const search *at, int64_t safest_bytes) {
  int64_t budget = at->budget_bytes, least = budget - ring_bytes(at, 0, LEAST_PIECES), left = least;
  for (int level = 1; level < N_LEVELS; level++) {
    int64_t before = level_budget_bytes(level) - ring_bytes(at, level - 1, LEAST_PIECES);
    int64_t after = budget - ring_bytes(at, level, LEAST_PIECES);
    int64_t here = before > after ? before : after;
    if (here < left) left = here;
  }
  int64_t spared = least < safest_bytes ? least : safest_bytes;
  return left > spared ? left : spared;
}

static void choose_ring(const search *at, int64_t needed_bytes, ptn_plan *out) {
  int level = N_LEVELS - 1;
  int64_t n_pieces = LEAST_PIECES;
  while (level > 0 &&
         (level_budget_bytes(level) > at->budget_bytes || needed_bytes + ring_bytes(at, level, n_pieces) > at->budget_bytes)) {
    level--;
  }
  while (n_pieces < MOST_PIECES && needed_bytes + ring_bytes(at, level, n_pieces + 1) <= at->budget_bytes) n_pieces++;
  out->piece_bytes = (uint64_t)(LEAST_PIECE_BYTES << level);
  out->n_pieces = (uint32_t)n_pieces;
  out->ring_bytes = (uint64_t)ring_bytes(at, level, n_pieces);
}

/* ---- modes ---- */

static void write_modes(const search *at, uint32_t n_keep, uint32_t pattern) {
  uint64_t n_blocks = at->n_blocks;
  if (at->request->modes) {
    if (n_blocks > 0) memcpy(at->modes, at->request->modes, n_blocks * sizeof *at->modes);
    return;
  }
  for (uint64_t i = 0; i < n_blocks; i++) {
    bool keep = pattern == KEEP_LAST    ? i >= n_blocks - n_keep
                : pattern == KEEP_FIRST ? i < n_keep
                                        : (i + 1) * n_keep / n_blocks > i * n_keep / n_blocks;
    at->modes[i] = keep ? PTN_KEEP : PTN_CHECKPOINT;
  }
}

static void compose(const search *at, uint32_t n_keep, uint32_t pattern) {
  write_modes(at, n_keep, pattern);
  ptn_peak_compose(at->request, at->consumer_of_phase, at->modes, at->phase_bytes);
}

static int64_t without_slots(const search *at, uint32_t n_persist) {
  return (int64_t)ptn_peak_without_slots(at->request, at->phase_bytes, n_persist, at->peak_scratch);
}

static int64_t assign_slots(search *at, uint32_t n_persist, uint32_t window) {
  int64_t total_bytes = 0;
  ptn_slots(at->request, at->slots, n_persist, window, at->slot_of_chunk, at->slot_bytes, &at->n_slots);
  for (uint32_t i = 0; i < at->n_slots; i++) total_bytes += (int64_t)at->slot_bytes[i];
  return total_bytes;
}

/* The needs of keeping n_keep blocks, by the pattern that needs least with no chunk persistent. */
static choice measure_choice(search *at, uint32_t n_keep) {
  choice best = {.none_persist_bytes = INT64_MAX};
  bool one_way = at->request->modes || n_keep == 0 || n_keep == at->n_blocks;
  for (uint32_t pattern = 0; pattern < (one_way ? 1 : N_PATTERNS); pattern++) {
    compose(at, n_keep, pattern);
    int64_t needed_bytes = without_slots(at, 0) + at->least_slots_bytes;
    if (needed_bytes >= best.none_persist_bytes) continue;
    best = (choice){.pattern = pattern, .none_persist_bytes = needed_bytes, .all_persist_bytes = without_slots(at, at->n_chunks)};
    if (at->request->n_persist >= 0) best.given_persist_bytes = without_slots(at, (uint32_t)at->request->n_persist);
  }
  return best;
}

/* ---- fitting ---- */

static bool fits(const search *at, uint32_t n_persist, int64_t needed_bytes) {
  return needed_bytes <= (has_ring(at, n_persist) ? at->limit_bytes : at->budget_bytes);
}

static int64_t with_least_ring(const search *at, uint32_t n_persist, int64_t needed_bytes) {
  return needed_bytes + least_ring_bytes(at, n_persist);
}

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* The least budget of a choice with n_persist free. */
static int64_t free_budget_bytes(const search *at, const choice *of) {
  return lesser(with_least_ring(at, 0, of->none_persist_bytes), with_least_ring(at, at->n_chunks, of->all_persist_bytes));
}

static bool choice_fits(const search *at, const choice *of) {
  if (at->request->n_persist >= 0) return fits(at, (uint32_t)at->request->n_persist, of->given_persist_bytes);
  return fits(at, 0, of->none_persist_bytes) || fits(at, at->n_chunks, of->all_persist_bytes);
}

/* How many chunks are persistent, and the slots of the others. What is needed, without the ring, is returned. */
static int64_t choose_persist(search *at, const choice *of, uint32_t *n_persist, uint32_t *window) {
  bool given = at->request->n_persist >= 0;
  uint32_t least = given ? (uint32_t)at->request->n_persist : fits(at, 0, of->none_persist_bytes) ? 0 : at->n_chunks;
  uint32_t most = given ? least : at->n_chunks;
  for (uint32_t p = most;; p--) {
    int64_t needed_bytes = without_slots(at, p);
    if (fits(at, p, needed_bytes)) {
      needed_bytes += assign_slots(at, p, at->more);
      *n_persist = p;
      *window = at->more;
      if (fits(at, p, needed_bytes)) return needed_bytes;
    }
    if (p == least) break;
  }
  *n_persist = least;
  *window = at->few;
  return without_slots(at, least) + assign_slots(at, least, at->few);
}

/* ---- the request ---- */

static ptn_status check_phases(const ptn_plan_request *request) {
  for (uint32_t i = 0; i < request->n_phases; i++) {
    const ptn_phase *phase = &request->phases[i];
    if (phase->block < -1 || phase->block >= (int64_t)request->n_blocks) {
      return ptn_fail(PTN_INVALID, "phase %u names block %d of %u", i, (int)phase->block, request->n_blocks);
    }
    uint64_t highest = ptn_max_u64(phase->keep_peak_bytes, phase->checkpoint_peak_bytes);
    if (phase->keep_entry_bytes > phase->keep_peak_bytes || phase->checkpoint_entry_bytes > phase->checkpoint_peak_bytes ||
        highest > PTN_PLAN_MOST_BYTES) {
      return ptn_fail(PTN_INVALID, "phase %u enters with more bytes than its peak, or peaks above %llu bytes", i,
                      (unsigned long long)PTN_PLAN_MOST_BYTES);
    }
  }
  return PTN_OK;
}

static ptn_status check_chunks(const ptn_plan_request *request) {
  for (uint32_t i = 0; i < request->n_chunks; i++) {
    const ptn_plan_chunk *chunk = &request->chunks[i];
    uint64_t highest = ptn_max_u64(chunk->param_bytes, ptn_max_u64(chunk->grad_bytes, chunk->state_bytes));
    if (highest > PTN_PLAN_MOST_BYTES) {
      return ptn_fail(PTN_INVALID, "chunk %u has more than %llu bytes, the most that is possible", i,
                      (unsigned long long)PTN_PLAN_MOST_BYTES);
    }
    if (chunk->param_bytes % PTN_PAGE_BYTES != 0) {
      return ptn_fail(PTN_INVALID, "chunk %u has %llu bytes of parameters, which is not a multiple of a page", i,
                      (unsigned long long)chunk->param_bytes);
    }
    if (chunk->grad_bytes > 0 && chunk->complete_phase >= request->n_phases) {
      return ptn_fail(PTN_INVALID, "chunk %u is complete in phase %u of %u", i, chunk->complete_phase, request->n_phases);
    }
  }
  for (uint32_t i = 0; i < request->n_accesses; i++) {
    if (request->accesses[i] >= request->n_chunks) {
      return ptn_fail(PTN_INVALID, "access %u names chunk %u of %u", i, request->accesses[i], request->n_chunks);
    }
  }
  return PTN_OK;
}

static ptn_status check_request(const ptn_plan_request *request) {
  uint32_t most = request->n_chunks > request->n_blocks ? request->n_chunks : request->n_blocks;
  if (request->n_phases > most) most = request->n_phases;
  if (most > PTN_PLAN_MOST_COUNT || request->n_accesses > 64 * PTN_PLAN_MOST_COUNT || request->n_together > MOST_TOGETHER) {
    return ptn_fail(PTN_INVALID,
                    "%u chunks, %u blocks, %u phases, %u accesses, %u chunks read together: at most %u "
                    "(accesses %u, together %d) are possible",
                    request->n_chunks, request->n_blocks, request->n_phases, request->n_accesses, request->n_together,
                    PTN_PLAN_MOST_COUNT, 64 * PTN_PLAN_MOST_COUNT, MOST_TOGETHER);
  }
  if (request->n_arrays == 0 || request->n_arrays > MOST_ARRAYS) {
    return ptn_fail(PTN_INVALID, "n_arrays is %u; 1 to %d are possible", request->n_arrays, MOST_ARRAYS);
  }
  if (request->fixed_bytes > PTN_PLAN_MOST_BYTES) {
    return ptn_fail(PTN_INVALID, "fixed_bytes is %llu, at most %llu are possible", (unsigned long long)request->fixed_bytes,
                    (unsigned long long)PTN_PLAN_MOST_BYTES);
  }
  PTN_TRY(check_phases(request));
  PTN_TRY(check_chunks(request));
  if (request->n_persist < -1 || request->n_persist > (int64_t)request->n_chunks) {
    return ptn_fail(PTN_PLAN, "n_persist is %lld, but the model has %u chunks; give 0 to %u", (long long)request->n_persist,
                    request->n_chunks, request->n_chunks);
  }
  for (uint32_t i = 0; request->modes && i < request->n_blocks; i++) {
    if (request->modes[i] < PTN_KEEP || request->modes[i] > PTN_CHECKPOINT_SWAP) {
      return ptn_fail(PTN_PLAN, "block %u has mode %d, which is none of the four", i, (int)request->modes[i]);
    }
  }
  return PTN_OK;
}

/* ---- the search ---- */

static void search_destroy(search *at) {
  ptn_slots_scratch_destroy(at->slots);
  free(at->choices);
  free(at->consumer_of_phase);
  free(at->phase_bytes);
  free(at->peak_scratch);
  free(at->modes);
  free(at->slot_of_chunk);
  free(at->slot_bytes);
}

static ptn_status search_create(search *at, const ptn_plan_request *request) {
  *at = (search){.request = request, .n_chunks = request->n_chunks, .n_blocks = request->n_blocks};
  at->budget_bytes = (int64_t)ptn_min_u64(request->budget_bytes, (uint64_t)1 << 62);
  at->few = request->n_together > 2 ? request->n_together : 2;
  at->more = at->few > 3 ? at->few : 3;
  for (uint32_t i = 0; i < request->n_chunks; i++) {
    if (request->chunks[i].grad_bytes > 0) at->n_trained_end = i + 1;
  }
  at->choices = calloc((size_t)at->n_blocks + 1, sizeof *at->choices);
  at->consumer_of_phase = calloc(request->n_phases, sizeof *at->consumer_of_phase);
  at->phase_bytes = calloc(request->n_phases, sizeof *at->phase_bytes);
  at->peak_scratch = calloc(2 * (size_t)request->n_phases, sizeof *at->peak_scratch);
  at->modes = calloc((size_t)at->n_blocks + 1, sizeof *at->modes);
  at->slot_of_chunk = calloc((size_t)at->n_chunks + 1, sizeof *at->slot_of_chunk);
  at->slot_bytes = calloc((size_t)at->n_chunks + 1, sizeof *at->slot_bytes);
  if (!at->choices || !at->consumer_of_phase || !at->phase_bytes || !at->peak_scratch || !at->modes || !at->slot_of_chunk ||
      !at->slot_bytes) {
    return ptn_fail(PTN_MEMORY, "no memory to plan %u chunks, %u blocks", at->n_chunks, at->n_blocks);
  }
  PTN_TRY(ptn_slots_scratch_create(&at->slots, request, at->more));
  ptn_peak_match(request, at->consumer_of_phase);
  at->least_slots_bytes = assign_slots(at, 0, at->few);
  return PTN_OK;
}

static uint64_t smallest_of_free(search *at) {
  ptn_plan_request free_request = *at->request;
  const ptn_plan_request *given = at->request;
  free_request.modes = NULL;
  free_request.n_persist = -1;
  at->request = &free_request;
  int64_t smallest_bytes = INT64_MAX;
  for (uint32_t k = 0; k <= at->n_blocks; k++) {
    at->choices[k] = measure_choice(at, k);
    smallest_bytes = lesser(smallest_bytes, free_budget_bytes(at, &at->choices[k]));
  }
  at->request = given;
  return (uint64_t)smallest_bytes;
}

/* Writes the needs of the request's own choices; returns the least budget that any of them needs, and sets the limit. */
static int64_t measure_choices(search *at, uint32_t n_choices) {
  const ptn_plan_request *request = at->request;
  bool given = request->n_persist >= 0;
  uint32_t n_persist = given ? (uint32_t)request->n_persist : 0;
  int64_t slots_bytes = given ? assign_slots(at, n_persist, at->few) : 0;
  int64_t least_bytes = INT64_MAX, safest_bytes = INT64_MAX;
  for (uint32_t k = 0; k < n_choices; k++) {
    choice *of = &at->choices[k];
    if (request->modes || given) *of = measure_choice(at, k);
    of->given_persist_bytes += slots_bytes;
    safest_bytes = lesser(safest_bytes, given ? of->given_persist_bytes : of->none_persist_bytes);
    int64_t least_of = given ? with_least_ring(at, n_persist, of->given_persist_bytes) : free_budget_bytes(at, of);
    least_bytes = lesser(least_bytes, least_of);
  }
  at->limit_bytes = spendable(at, safest_bytes);
  return least_bytes;
}

static uint64_t persistent_bytes(const ptn_plan_request *request, uint32_t n_persist) {
  uint64_t total_bytes = 0;
  for (uint32_t i = 0; i < n_persist; i++) total_bytes += request->chunks[i].param_bytes + request->chunks[i].state_bytes;
  return total_bytes;
}

static uint64_t homes_bytes(const ptn_plan_request *request, uint32_t n_persist) {
  uint64_t total_bytes = 0;
  for (uint32_t i = n_persist; i < request->n_chunks; i++) {
    const ptn_plan_chunk *chunk = &request->chunks[i];
    uint64_t home_bytes = ptn_round_up(chunk->param_bytes, PTN_PAGE_BYTES) + ptn_round_up(chunk->state_bytes, PTN_PAGE_BYTES);
    total_bytes += chunk->grad_bytes > 0 ? 2 * home_bytes : home_bytes; /* trained: the home and its shadow */
    if (request->grads_outlive_backward) total_bytes += ptn_round_up(chunk->grad_bytes, PTN_PAGE_BYTES);
  }
  return total_bytes;
}

static void write_plan(search *at, const choice *of, uint32_t n_keep, ptn_plan *out) {
  uint32_t window;
  compose(at, n_keep, of->pattern);
  int64_t needed_bytes = choose_persist(at, of, &out->n_persist, &window);
  uint32_t n_on_disk = at->n_chunks - out->n_persist;
  out->n_buffer = at->n_slots;
  out->n_ahead = n_on_disk == 0 ? 0 : (uint32_t)ptn_min_u64(window, n_on_disk) - 1;
  out->slot_bytes_total = 0;
  for (uint32_t i = 0; i < at->n_slots; i++) out->slot_bytes_total += out->slot_bytes[i] = at->slot_bytes[i];
  for (uint32_t i = 0; i < at->n_chunks; i++) out->slot_of_chunk[i] = at->slot_of_chunk[i];
  for (uint32_t i = 0; i < at->n_blocks; i++) out->modes[i] = at->modes[i];
  out->piece_bytes = out->ring_bytes = out->n_pieces = 0;
  if (has_ring(at, out->n_persist)) choose_ring(at, needed_bytes, out);
  out->static_bytes = persistent_bytes(at->request, out->n_persist) + out->slot_bytes_total + out->ring_bytes;
  out->peak_bytes = (uint64_t)needed_bytes + out->ring_bytes;
  out->stash_bytes = ptn_swap_stash_bytes(at->request, at->consumer_of_phase, at->modes);
  out->rise_bytes = ptn_swap_rise_bytes(at->request, at->modes);
  out->headroom_bytes = ptn_swap_headroom_bytes(at->request, at->modes, out->peak_bytes - out->static_bytes);
  out->disk_bytes = homes_bytes(at->request, out->n_persist) + out->stash_bytes;
}

static ptn_status make(search *at, ptn_plan *out) {
  const ptn_plan_request *request = at->request;
  out->smallest_bytes = smallest_of_free(at);
  uint32_t n_choices = request->modes ? 1 : at->n_blocks + 1;
  int64_t least_bytes = measure_choices(at, n_choices);
  out->smallest_bytes = ptn_min_u64(out->smallest_bytes, (uint64_t)least_bytes); /* modes given may be better than any pattern */
  for (uint32_t k = n_choices; k-- > 0;) {
    if (!choice_fits(at, &at->choices[k])) continue;
    write_plan(at, &at->choices[k], k, out);
    return PTN_OK;
  }
  const char *what = request->modes || request->n_persist >= 0 ? "with the block modes and n_persist given " : "";
  return ptn_fail_budget((uint64_t)least_bytes, request->budget_bytes, out->smallest_bytes,
                         "one step %sneeds %lld bytes of memory, the budget is %llu; the smallest budget that works is %llu: "
                         "give more memory, or a smaller batch or shorter sequences",
                         what, (long long)least_bytes, (unsigned long long)request->budget_bytes,
                         (unsigned long long)out->smallest_bytes);
}

ptn_status ptn_plan_make(const ptn_plan_request *request, ptn_plan *out) {
  static const ptn_phase nothing = {.block = -1, .backward = true};
  ptn_plan_request given = *request;
  if (given.n_phases == 0) {
    given.n_phases = 1;
    given.phases = &nothing;
  }
  PTN_TRY(check_request(&given));
  search at;
  ptn_status status = search_create(&at, &given);
  if (status == PTN_OK) status = make(&at, out);
  search_destroy(&at);
  return status;
}
