/* Fit: what a budget holds beside the modes of a candidate.
 *
 * Problem: chunks that stay, slots for those that come and go, and the ring through which updates pass share what activations
 * leave; the rule and the search must mean the same by "it fits", and a plan that was made must come out again when it is given.
 * Design: modes are composed into phases once (peak.c); with them any number of persistent chunks and any window of slots has a
 * need in bytes that does not depend on the budget. The ring is what is left over, cut to sizes; its least size counts in full.
 * Beside a device it is the host's, sized by what the host has, and counts in no need; what it takes there at most grows with
 * the host's memory without jumps, so that homes there never lose room by more of it.
 *
 * Windows: few distinct chunks have slots of their own, else two of one operation could meet in a slot; more lets reading run
 * ahead; wider ones, up to all, let it run further and hold what was read in forward for backward. They have an order: more,
 * few, and the wider ones as they grow. A number of slots names the first of them that has so many and fits.
 *
 * Invariants, for two requests that differ in their budgets alone: what fits the smaller fits the larger; every need up to what
 * the safest candidate has fits as soon as it fits beside the smallest ring. The ring would break this, as it grows with the
 * budget in jumps: see spendable.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/parts.h"

#define LEAST_PIECE_BYTES ((int64_t)64 << 10)
#define N_LEVELS 6           /* pieces of 64 KiB, 128 KiB ... 2 MiB */
#define BUDGET_PER_PIECE 192 /* a piece is allowed from a budget of so many of it */
#define LEAST_PIECES 4
#define MOST_PIECES 6
#define WIDEST_WINDOW 64           /* but for "all" */
#define MOST_LOOKS ((size_t)1 << 22) /* at what is close to each access and chunk: bounds how long slots take */

/* ---- the ring ---- */

bool ptn_fit_has_ring(const ptn_fit *fit, uint32_t n_persist) { return n_persist < fit->n_trained_end; }

static bool ring_counts(const ptn_fit *fit) { return fit->request->ring_host_bytes == 0; }

static int64_t ring_bytes(const ptn_fit *fit, int level, int64_t n_pieces) {
  return n_pieces * (int64_t)fit->request->n_arrays * (LEAST_PIECE_BYTES << level);
}

int64_t ptn_fit_budget_bytes(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes) {
  return needed_bytes + (ptn_fit_has_ring(fit, n_persist) && ring_counts(fit) ? ring_bytes(fit, 0, LEAST_PIECES) : 0);
}

static int64_t level_budget_bytes(int level) { return BUDGET_PER_PIECE * (LEAST_PIECE_BYTES << level); }

/* What a budget leaves beside the ring, never less for a larger budget. Where a larger piece becomes possible, further budget
 * goes into the ring alone until it is paid for; and what the safest candidate needs is spared from all but the smallest ring. */
static int64_t spendable(const ptn_fit *fit, int64_t safest_bytes) {
  int64_t budget = fit->budget_bytes, least = budget - ring_bytes(fit, 0, LEAST_PIECES), left = least;
  for (int level = 1; level < N_LEVELS; level++) {
    int64_t before = level_budget_bytes(level) - ring_bytes(fit, level - 1, LEAST_PIECES);
    int64_t after = budget - ring_bytes(fit, level, LEAST_PIECES);
    int64_t here = before > after ? before : after;
    if (here < left) left = here;
  }
  int64_t spared = least < safest_bytes ? least : safest_bytes;
  return left > spared ? left : spared;
}

void ptn_fit_spare(ptn_fit *fit, int64_t safest_bytes) {
  fit->limit_bytes = ring_counts(fit) ? spendable(fit, safest_bytes) : fit->budget_bytes;
}

bool ptn_fit_fits(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes) {
  return needed_bytes <= (ptn_fit_has_ring(fit, n_persist) ? fit->limit_bytes : fit->budget_bytes);
}

void ptn_fit_ring(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes, ptn_plan *out) {
  out->piece_bytes = out->ring_bytes = out->n_pieces = 0;
  if (!ptn_fit_has_ring(fit, n_persist)) return;
  int level = N_LEVELS - 1;
  int64_t n_pieces = LEAST_PIECES, budget = fit->budget_bytes, beside_bytes = needed_bytes;
  if (!ring_counts(fit)) {
    budget = (int64_t)ptn_min_u64(fit->request->ring_host_bytes, (uint64_t)1 << 62);
    beside_bytes = 0;
  }
  while (level > 0 && (level_budget_bytes(level) > budget || beside_bytes + ring_bytes(fit, level, n_pieces) > budget)) level--;
  while (n_pieces < MOST_PIECES && beside_bytes + ring_bytes(fit, level, n_pieces + 1) <= budget) n_pieces++;
  out->piece_bytes = (uint64_t)(LEAST_PIECE_BYTES << level);
  out->n_pieces = (uint32_t)n_pieces;
  out->ring_bytes = (uint64_t)ring_bytes(fit, level, n_pieces);
}

uint64_t ptn_fit_counted_ring_bytes(const ptn_fit *fit, const ptn_plan *plan) { return ring_counts(fit) ? plan->ring_bytes : 0; }

uint64_t ptn_fit_host_ring_bytes(const ptn_plan_request *request) {
  if (request->ring_host_bytes == 0) return 0;
  uint64_t arrays = (uint64_t)MOST_PIECES * request->n_arrays;
  uint64_t least = arrays * (uint64_t)LEAST_PIECE_BYTES, most = least << (N_LEVELS - 1);
  uint64_t share = request->ring_host_bytes / BUDGET_PER_PIECE;
  return share >= most / arrays ? most : ptn_max_u64(share * arrays, least);
}

static uint64_t spare_bytes(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes) {
  ptn_plan ring;
  ptn_fit_ring(fit, n_persist, needed_bytes, &ring);
  int64_t bytes = fit->budget_bytes - needed_bytes - (int64_t)ptn_fit_counted_ring_bytes(fit, &ring);
  return bytes > 0 ? (uint64_t)bytes : 0;
}

uint64_t ptn_fit_stream_bytes(const ptn_fit *fit, const ptn_mode *modes, uint32_t n_persist, int64_t needed_bytes) {
  if (!fit->least) return 0;
  uint64_t enough_bytes = ptn_swap_stream_bytes(fit->request, fit->consumer_of_phase, modes);
  return ptn_min_u64(spare_bytes(fit, n_persist, needed_bytes), enough_bytes);
}

uint64_t ptn_fit_pending_bytes(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes) {
  return ptn_max_u64(fit->pending_bytes, spare_bytes(fit, n_persist, needed_bytes));
}

/* ---- needs ---- */

void ptn_fit_compose(ptn_fit *fit, const ptn_mode *modes) {
  ptn_peak_compose(fit->peak, modes, fit->least, fit->phase_bytes);
  ptn_peak_stretches(fit->peak, fit->phase_bytes, fit->stretch_bytes);
}

int64_t ptn_fit_without_slots(const ptn_fit *fit, uint32_t n_persist) {
  return (int64_t)ptn_peak_without_slots(fit->peak, fit->stretch_bytes, fit->least, n_persist);
}

int64_t ptn_fit_slots(ptn_fit *fit, uint32_t n_persist, uint32_t window) {
  int64_t total_bytes = 0;
  ptn_slots(fit->request, fit->slots, n_persist, window, fit->slot_of_chunk, fit->slot_bytes, &fit->n_slots);
  for (uint32_t i = 0; i < fit->n_slots; i++) total_bytes += (int64_t)fit->slot_bytes[i];
  return total_bytes;
}

uint64_t ptn_fit_persistent_bytes(const ptn_fit *fit, uint32_t n_persist) {
  uint64_t total_bytes = 0;
  for (uint32_t i = 0; i < n_persist; i++) {
    total_bytes += fit->request->chunks[i].param_bytes + fit->request->chunks[i].state_bytes;
  }
  return total_bytes;
}

/* ---- windows ---- */

static void list_windows(ptn_fit *fit, uint32_t widest) {
  uint32_t n_chunks = fit->request->n_chunks, count = 0;
  fit->windows[count++] = fit->more;
  if (fit->few != fit->more) fit->windows[count++] = fit->few;
  for (uint32_t window = fit->more;;) {
    window += (window + 1) / 2;
    if (window > widest || window >= n_chunks || count + 1 == PTN_FIT_MOST_WINDOWS) break;
    fit->windows[count++] = window;
  }
  if (n_chunks > fit->more) fit->windows[count++] = n_chunks;
  fit->n_windows = count;
}

uint32_t ptn_fit_window_of(ptn_fit *fit, uint32_t n_persist, uint32_t n_slots) {
  for (int sparing = 1; sparing >= 0; sparing--) {
    for (uint32_t i = 0; i < fit->n_windows; i++) {
      int64_t needed_bytes = ptn_fit_without_slots(fit, n_persist) + ptn_fit_slots(fit, n_persist, fit->windows[i]);
      bool here = sparing ? ptn_fit_fits(fit, n_persist, needed_bytes)
                          : ptn_fit_budget_bytes(fit, n_persist, needed_bytes) <= fit->budget_bytes;
      if (fit->n_slots == n_slots && here) return fit->windows[i];
    }
  }
  return 0;
}

/* ---- create, destroy ---- */

void ptn_fit_destroy(ptn_fit *fit) {
  ptn_slots_scratch_destroy(fit->slots);
  ptn_peak_destroy(fit->peak);
  free(fit->consumer_of_phase);
  free(fit->phase_bytes);
  free(fit->stretch_bytes);
  free(fit->slot_of_chunk);
  free(fit->slot_bytes);
}

ptn_status ptn_fit_create(ptn_fit *fit, const ptn_plan_request *request) {
  *fit = (ptn_fit){.request = request};
  fit->budget_bytes = (int64_t)ptn_min_u64(request->budget_bytes, (uint64_t)1 << 62);
  fit->few = request->n_together > 2 ? request->n_together : 2;
  fit->more = fit->few > 3 ? fit->few : 3;
  for (uint32_t i = 0; i < request->n_chunks; i++) {
    if (request->chunks[i].grad_bytes > 0) fit->n_trained_end = i + 1;
    fit->pending_bytes = ptn_max_u64(fit->pending_bytes, request->chunks[i].grad_bytes);
  }
  size_t phases = request->n_phases, chunks = (size_t)request->n_chunks + 1;
  fit->consumer_of_phase = calloc(phases, sizeof *fit->consumer_of_phase);
  fit->phase_bytes = calloc(phases, sizeof *fit->phase_bytes);
  fit->stretch_bytes = calloc(phases, sizeof *fit->stretch_bytes);
  fit->slot_of_chunk = calloc(chunks, sizeof *fit->slot_of_chunk);
  fit->slot_bytes = calloc(chunks, sizeof *fit->slot_bytes);
  if (!fit->consumer_of_phase || !fit->phase_bytes || !fit->stretch_bytes || !fit->slot_of_chunk || !fit->slot_bytes) {
    return ptn_fail(PTN_MEMORY, "no memory to plan %u chunks, %u blocks", request->n_chunks, request->n_blocks);
  }
  size_t most = MOST_LOOKS / ((size_t)request->n_accesses + chunks);
  uint32_t widest = (uint32_t)ptn_max_u64(fit->more, ptn_min_u64(most, WIDEST_WINDOW));
  list_windows(fit, widest);
  PTN_TRY(ptn_slots_scratch_create(&fit->slots, request));
  ptn_peak_match(request, fit->consumer_of_phase);
  PTN_TRY(ptn_peak_create(&fit->peak, request, fit->consumer_of_phase));
  return ptn_tiers_least_persist(request, 0, &fit->least_persist);
}
