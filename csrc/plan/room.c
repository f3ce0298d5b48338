/* Room: what a budget leaves to candidates beside the ring and holes, and what it costs where that is little.
 *
 * Problem: the ring through which updates pass takes what is left over, cut to sizes; free memory lies in holes between blocks in
 * use, and a plan that fills its budget makes the arena purge some and fault in others at every step, and lose huge pages. Design:
 * candidates leave room for four pieces of the size that the budget allows, and a part of the budget for holes. What is given, and
 * the safest candidate, may fill the budget and have a ring of smaller pieces, down to the smallest: that is squeezed, and its
 * forecast is charged for it. The ring's pieces are those with which that costs least.
 *
 * Beside a device the ring is the host's, sized by what the host has, and counts in no need; what it takes there at most grows
 * with the host's memory without jumps, so that homes there never lose room by more of it. Holes are the arena's: a device's memory is
 * filled.
 *
 * Invariants, for two requests that differ in their budgets alone: what fits the smaller fits the larger; every need up to what
 * the safest candidate has fits as soon as it fits beside the smallest ring. The ring would break this, as it grows with the
 * budget in jumps: see spendable.
 */
#include <math.h>

#include "base/bytes.h"
#include "plan/parts.h"

#define LEAST_PIECE_BYTES ((int64_t)64 << 10)
#define BUDGET_PER_PIECE 192 /* a piece is allowed from a budget of so many of it */
#define LEAST_PIECES 4
#define MOST_PIECES 6
#define REQUEST_BYTES ((uint64_t)4 << 20) /* shorter ones side by side are moved as one of so many at most (disk/store.c) */
#define HOLES_PART 36  /* of the budget, one in so many is left to holes between blocks */
#define FULL_DRAG 0.05 /* of computing, lost where nothing is left to them ... */
#define QUARTER_DRAG 0.02 /* ... and to the requests of pieces a quarter as large; an eighth: three times as much; half: little */

bool ptn_fit_has_ring(const ptn_fit *fit, uint32_t n_persist) { return n_persist < fit->n_trained_end; }

static bool ring_counts(const ptn_fit *fit) { return fit->request->ring_host_bytes == 0; }

static int64_t ring_bytes(const ptn_fit *fit, int level, int64_t n_pieces) {
  return n_pieces * (int64_t)fit->request->n_arrays * (LEAST_PIECE_BYTES << level);
}

int64_t ptn_fit_budget_bytes(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes) {
  return needed_bytes + (ptn_fit_has_ring(fit, n_persist) && ring_counts(fit) ? ring_bytes(fit, 0, LEAST_PIECES) : 0);
}

static int64_t level_budget_bytes(int level) { return BUDGET_PER_PIECE * (LEAST_PIECE_BYTES << level); }

static int64_t holes_bytes(const ptn_fit *fit, int64_t budget_bytes) { return ring_counts(fit) ? budget_bytes / HOLES_PART : 0; }
static int64_t fillable_bytes(const ptn_fit *fit, int64_t budget_bytes) { return budget_bytes - holes_bytes(fit, budget_bytes); }

/* What a budget leaves beside the ring and holes, never less for a larger budget. Where a larger piece becomes possible, further
 * budget goes into the ring alone until it is paid for. */
static int64_t spendable(const ptn_fit *fit) {
  int64_t fillable = fillable_bytes(fit, fit->budget_bytes), left = fillable - ring_bytes(fit, 0, LEAST_PIECES);
  for (int level = 1; level < PTN_FIT_RING_LEVELS; level++) {
    int64_t before = fillable_bytes(fit, level_budget_bytes(level)) - ring_bytes(fit, level - 1, LEAST_PIECES);
    left = ptn_min_i64(left, ptn_max_i64(before, fillable - ring_bytes(fit, level, LEAST_PIECES)));
  }
  return left;
}

void ptn_fit_spare(ptn_fit *fit, int64_t safest_bytes, int64_t ringless_bytes) {
  int64_t budget = fit->budget_bytes;
  fit->roomy_bytes = fit->limit_bytes = budget;
  fit->ringless_limit_bytes = ptn_max_i64(fillable_bytes(fit, budget), ptn_min_i64(budget, ringless_bytes));
  if (!ring_counts(fit)) return;
  fit->roomy_bytes = spendable(fit);
  fit->limit_bytes = ptn_max_i64(fit->roomy_bytes, ptn_min_i64(budget - ring_bytes(fit, 0, LEAST_PIECES), safest_bytes));
}

bool ptn_fit_fits(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes) {
  return needed_bytes <= (ptn_fit_has_ring(fit, n_persist) ? fit->limit_bytes : fit->ringless_limit_bytes);
}

bool ptn_fit_is_squeezed(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes) {
  return needed_bytes > (ptn_fit_has_ring(fit, n_persist) ? fit->roomy_bytes : fillable_bytes(fit, fit->budget_bytes));
}

/* The largest pieces that a budget allows. */
static int most_level(int64_t budget_bytes) {
  int level = PTN_FIT_RING_LEVELS - 1;
  while (level > 0 && level_budget_bytes(level) > budget_bytes) level--;
  return level;
}

/* The part of computing that is lost where so much of the budget is left to holes. */
static double full_part(const ptn_fit *fit, int64_t left_bytes) {
  double holes = (double)holes_bytes(fit, fit->budget_bytes), left = left_bytes > 0 ? (double)left_bytes : 0;
  return left < holes ? FULL_DRAG * (holes - left) / holes : 0;
}

/* Of those that fit the level that costs least, of as good ones the largest. It does not hang on times: a plan has the same ring
 * without them. */
static int ring_level(const ptn_fit *fit, int64_t needed_bytes) {
  int best = 0, most = most_level(fit->budget_bytes);
  double least = HUGE_VAL;
  for (int level = 0; level <= most; level++) {
    int64_t left_bytes = fit->budget_bytes - needed_bytes - ring_bytes(fit, level, LEAST_PIECES);
    double part = full_part(fit, left_bytes) + QUARTER_DRAG * (double)((1 << (most - level)) / 2 - (most > level));
    if (level > 0 && (left_bytes < 0 || part > least)) continue;
    best = level;
    least = part;
  }
  return best;
}

static double requests_of(const ptn_fit *fit, uint32_t n_persist, int level) {
  return (double)fit->requests_from[(size_t)level * ((size_t)fit->request->n_chunks + 1) + n_persist];
}

int64_t ptn_fit_squeeze_ns(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes) {
  if (!fit->request->profile || !ptn_fit_is_squeezed(fit, n_persist, needed_bytes)) return 0;
  int64_t left_bytes = fit->budget_bytes - needed_bytes;
  if (!ptn_fit_has_ring(fit, n_persist)) return (int64_t)(full_part(fit, left_bytes) * fit->compute_ns);
  int level = ring_level(fit, needed_bytes), most = most_level(fit->budget_bytes);
  double more = requests_of(fit, n_persist, level) - requests_of(fit, n_persist, most);
  double part = full_part(fit, left_bytes - ring_bytes(fit, level, LEAST_PIECES));
  return (int64_t)(part * fit->compute_ns + more * fit->request->profile->request_ns);
}

void ptn_fit_ring(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes, ptn_plan *out) {
  out->piece_bytes = out->ring_bytes = out->n_pieces = 0;
  if (!ptn_fit_has_ring(fit, n_persist)) return;
  int level;
  int64_t n_pieces = LEAST_PIECES, fillable, beside_bytes = needed_bytes;
  if (ring_counts(fit)) {
    level = ring_level(fit, needed_bytes);
    fillable = fillable_bytes(fit, fit->budget_bytes);
  } else {
    fillable = (int64_t)ptn_min_u64(fit->request->ring_host_bytes, (uint64_t)1 << 62);
    beside_bytes = 0;
    level = most_level(fillable);
    while (level > 0 && ring_bytes(fit, level, n_pieces) > fillable) level--;
  }
  while (n_pieces < MOST_PIECES && beside_bytes + ring_bytes(fit, level, n_pieces + 1) <= fillable) n_pieces++;
  out->piece_bytes = (uint64_t)(LEAST_PIECE_BYTES << level);
  out->n_pieces = (uint32_t)n_pieces;
  out->ring_bytes = (uint64_t)ring_bytes(fit, level, n_pieces);
}

uint64_t ptn_fit_counted_ring_bytes(const ptn_fit *fit, const ptn_plan *plan) { return ring_counts(fit) ? plan->ring_bytes : 0; }

uint64_t ptn_fit_host_ring_bytes(const ptn_plan_request *request) {
  if (request->ring_host_bytes == 0) return 0;
  uint64_t arrays = (uint64_t)MOST_PIECES * request->n_arrays;
  uint64_t least = arrays * (uint64_t)LEAST_PIECE_BYTES, most = least << (PTN_FIT_RING_LEVELS - 1);
  uint64_t share = request->ring_host_bytes / BUDGET_PER_PIECE;
  return share >= most / arrays ? most : ptn_max_u64(share * arrays, least);
}

/* Beside the ring and holes. */
static uint64_t spare_bytes(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes) {
  ptn_plan ring;
  ptn_fit_ring(fit, n_persist, needed_bytes, &ring);
  int64_t bytes = fillable_bytes(fit, fit->budget_bytes) - needed_bytes - (int64_t)ptn_fit_counted_ring_bytes(fit, &ring);
  return bytes > 0 ? (uint64_t)bytes : 0;
}

uint64_t ptn_fit_stream_bytes(const ptn_fit *fit, const ptn_mode *modes, uint32_t n_persist, int64_t needed_bytes) {
  if (!fit->least) return 0;
  uint64_t enough_bytes = ptn_swap_stream_bytes(fit->request, fit->consumer_of_phase, modes);
  if (!ptn_peak_counts_pending(fit->request, true)) enough_bytes += fit->pending_bytes;
  return ptn_min_u64(spare_bytes(fit, n_persist, needed_bytes), enough_bytes);
}

/* ---- what is known beforehand ---- */

/* Requests for parameters, where they are with them, and state of a chunk, as the store makes them. Arrays of one piece lie side by
 * side, and each goes with those before it, where all of it fits. */
static uint64_t requests_for(const ptn_plan_request *request, uint64_t bytes, uint64_t piece_bytes, bool with_params) {
  uint64_t widening = request->widening > 0 ? request->widening : 1, n_pieces = (bytes + piece_bytes - 1) / piece_bytes;
  uint64_t n_states = request->n_arrays > 2 ? (request->n_arrays - 2) / widening : 0, count = 0, left_bytes = 0;
  if (n_pieces > 1) return (n_states + with_params) * n_pieces;
  for (uint64_t i = with_params ? 0 : 1; i <= n_states; i++) {
    uint64_t array_bytes = i == 0 ? bytes : widening * bytes;
    bool fits = array_bytes <= left_bytes;
    count += !fits;
    left_bytes = (fits ? left_bytes : ptn_max_u64(REQUEST_BYTES, array_bytes)) - array_bytes;
  }
  return count;
}

/* State is read, parameters and state are written. Gradients that outlive backward come from the disk, too, and parameters with them,
 * which lie in no slot any more; of several passes their sums do. */
static uint64_t update_requests(const ptn_plan_request *request, uint32_t chunk, uint64_t piece_bytes) {
  uint64_t bytes = request->chunks[chunk].param_bytes;
  uint64_t gradients = request->grads_outlive_backward || request->n_passes > 1 ? (bytes + piece_bytes - 1) / piece_bytes : 0;
  return requests_for(request, bytes, piece_bytes, request->grads_outlive_backward) + gradients +
         requests_for(request, bytes, piece_bytes, true);
}

void ptn_fit_count_requests(ptn_fit *fit) {
  const ptn_plan_request *request = fit->request;
  uint64_t *from = fit->requests_from;
  for (int level = 0; level < PTN_FIT_RING_LEVELS; level++, from += (size_t)request->n_chunks + 1) {
    uint64_t piece_bytes = (uint64_t)LEAST_PIECE_BYTES << level;
    for (uint32_t c = request->n_chunks; c-- > 0;) {
      bool trained = request->chunks[c].grad_bytes > 0;
      from[c] = from[c + 1] + (trained ? update_requests(request, c, piece_bytes) : 0);
    }
  }
}
