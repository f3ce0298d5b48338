/* Trials: what a choice needs, the least it can take, and what it takes.
 *
 * Problem: the search asks for needs, bounds and forecasts of thousands of choices, in any order. Design: what the last one had
 * in common with the next is kept: the phases of a set of kept blocks (blocks that swap count as recomputed ones there), the slots of a
 * window. Bytes of slots are kept for all numbers of persistent chunks that were asked for. What blocks that swap leave in memory
 * is looked at last, choice by choice: few models have any of it.
 *
 * Invariants: a choice has the same answer whenever it is asked; of it only `fits` depends on the budget, and forecasts by what the
 * budget leaves: gradients may wait in it, and with the least blocks read ahead into it.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/search_internal.h"
#include "plan/simulate_internal.h"

#define UNKNOWN INT64_MIN
#define NO_SET UINT32_MAX
#define MOST_KEPT_BYTES ((size_t)1 << 20) /* of slots */
#define MOST_NEEDS_BYTES ((size_t)4 << 20)
#define MOST_SETS 1024 /* whose needs are kept */

static void compose_set(ptn_trials *trials, uint32_t set) {
  if (trials->composed_set == set) return;
  ptn_families_modes(&trials->families, &(ptn_choice){.set = set}, trials->modes);
  ptn_fit_compose(trials->fit, trials->modes);
  trials->composed_set = set;
  ptn_families_swapped(&trials->families, set, trials->recompute_ns, trials->stash_bytes, &trials->n_steps);
}

int64_t ptn_trials_need(ptn_trials *trials, uint32_t set, uint32_t n_persist) {
  size_t chunks = (size_t)trials->request->n_chunks + 1, line = set % trials->n_needs;
  int64_t *needs = trials->needs + line * chunks;
  if (trials->needs_of[line] != set + 1) {
    trials->needs_of[line] = set + 1;
    for (size_t p = 0; p < chunks; p++) needs[p] = UNKNOWN;
  }
  if (needs[n_persist] == UNKNOWN) {
    compose_set(trials, set);
    needs[n_persist] = ptn_fit_without_slots(trials->fit, n_persist);
  }
  return needs[n_persist];
}

/* Slots of all chunks, of the trials until the next call. */
static const int32_t *assign(ptn_trials *trials, uint32_t window, uint32_t n_persist) {
  size_t n_chunks = trials->request->n_chunks, cell = window * (n_chunks + 1) + n_persist, line = cell % trials->n_kept;
  int32_t *slots = trials->kept_slots + line * n_chunks;
  if (trials->kept_cells[line] == cell + 1) return slots;
  trials->slots_bytes[cell] = ptn_fit_slots(trials->fit, n_persist, trials->fit->windows[window]);
  trials->slots_work += trials->fit->windows[window] < n_chunks ? trials->fit->windows[window] + 4 : 1;
  trials->kept_cells[line] = cell + 1;
  if (n_chunks > 0) memcpy(slots, trials->fit->slot_of_chunk, n_chunks * sizeof *slots);
  return slots;
}

int64_t ptn_trials_slots_bytes(ptn_trials *trials, uint32_t window, uint32_t n_persist) {
  size_t cell = (size_t)window * (trials->request->n_chunks + 1) + n_persist;
  if (trials->slots_bytes[cell] == UNKNOWN) assign(trials, window, n_persist);
  return trials->slots_bytes[cell];
}

static bool fits(ptn_trials *trials, uint32_t window, uint32_t n_persist, int64_t without_bytes) {
  if (n_persist < trials->least_persist || n_persist > trials->most_persist) return false;
  if (!ptn_fit_fits(trials->fit, n_persist, without_bytes)) return false;
  if (n_persist == trials->request->n_chunks) return window == 0;
  return ptn_fit_fits(trials->fit, n_persist, without_bytes + ptn_trials_slots_bytes(trials, window, n_persist));
}

bool ptn_trials_fits(ptn_trials *trials, uint32_t set, uint32_t window, uint32_t n_persist) {
  return fits(trials, window, n_persist, ptn_trials_need(trials, set, n_persist));
}

/* Whether a block of trials->modes may leave something in memory that its set does not count. */
static bool leaves(const ptn_trials *trials) {
  if (!trials->left_live) return false;
  for (uint32_t i = 0; i < trials->request->n_blocks; i++) {
    if (trials->modes[i] == PTN_SWAP) return true;
  }
  return false;
}

/* What the choice needs without slots and ring, and its phases; its modes are in trials->modes. */
static int64_t compose_choice(ptn_trials *trials, const ptn_choice *choice, const ptn_live **live) {
  int64_t needed_bytes = ptn_trials_need(trials, choice->set, choice->n_persist);
  compose_set(trials, choice->set);
  ptn_families_modes(&trials->families, choice, trials->modes);
  *live = trials->fit->live;
  if (!leaves(trials)) return needed_bytes;
  *live = trials->left_live;
  ptn_peak_compose(trials->fit->peak, trials->modes, trials->fit->least, trials->left_live);
  ptn_peak_stretches(trials->fit->peak, trials->left_live, trials->left_stretch_bytes);
  const int64_t *stretch_bytes = trials->left_stretch_bytes;
  return (int64_t)ptn_peak_without_slots(trials->fit->peak, stretch_bytes, trials->fit->least, choice->n_persist);
}

static void compose_modes(ptn_trials *trials, const ptn_mode *modes) {
  if (modes != trials->modes && trials->request->n_blocks > 0) {
    memcpy(trials->modes, modes, trials->request->n_blocks * sizeof *modes);
  }
  ptn_fit_compose(trials->fit, trials->modes);
  trials->composed_set = NO_SET;
}

bool ptn_trials_has_room(ptn_trials *trials, const ptn_mode *modes, uint32_t window, uint32_t n_persist) {
  compose_modes(trials, modes);
  int64_t needed_bytes = ptn_fit_without_slots(trials->fit, n_persist);
  if (!fits(trials, window, n_persist, needed_bytes)) return false;
  return !ptn_fit_is_squeezed(trials->fit, n_persist, needed_bytes + ptn_trials_slots_bytes(trials, window, n_persist));
}

/* What the modes in trials->modes are. False: the stash has no place. */
static bool describe(ptn_trials *trials, uint32_t window, uint32_t n_persist, const ptn_live *live, int64_t needed_bytes,
                     ptn_candidate *out) {
  ptn_tiers tiers;
  uint64_t stash_bytes = ptn_swap_stash_bytes(trials->request, trials->fit->consumer_of_phase, trials->modes);
  if (!ptn_tiers_split(trials->request, n_persist, stash_bytes, &tiers)) return false;
  int64_t whole_bytes = needed_bytes + ptn_trials_slots_bytes(trials, window, n_persist);
  uint64_t stream_bytes = ptn_fit_stream_bytes(trials->fit, trials->modes, n_persist, whole_bytes);
  uint64_t above_bytes = (uint64_t)needed_bytes - ptn_fit_persistent_bytes(trials->fit, n_persist) + stream_bytes;
  *out = (ptn_candidate){.modes = trials->modes,
                         .n_persist = n_persist,
                         .n_host = tiers.n_host,
                         .slot_of_chunk = assign(trials, window, n_persist),
                         .live = live,
                         .above_static_bytes = above_bytes,
                         .squeeze_ns = ptn_fit_squeeze_ns(trials->fit, n_persist, whole_bytes),
                         .pending_bytes = trials->fit->pending_bytes,
                         .least = trials->fit->least};
  return true;
}

/* False: it has no place. */
static bool describe_choice(ptn_trials *trials, const ptn_choice *choice, ptn_candidate *out) {
  const ptn_live *live;
  int64_t needed_bytes = compose_choice(trials, choice, &live);
  if (live == trials->left_live && !fits(trials, choice->window, choice->n_persist, needed_bytes)) return false;
  return describe(trials, choice->window, choice->n_persist, live, needed_bytes, out);
}

int64_t ptn_trials_bound_ns(ptn_trials *trials, const ptn_choice *choice, uint64_t *moved_bytes) {
  ptn_candidate candidate;
  *moved_bytes = 0;
  return describe_choice(trials, choice, &candidate) ? ptn_bound_ns(trials->bounds, &candidate, moved_bytes) : PTN_NEVER_NS;
}

void ptn_trials_simulate(ptn_trials *trials, const ptn_choice *choice, ptn_forecast *out) {
  ptn_candidate candidate;
  if (describe_choice(trials, choice, &candidate)) ptn_simulate(trials->simulation, &candidate, out);
  else *out = (ptn_forecast){.step_ns = PTN_NEVER_NS};
}

void ptn_trials_simulate_modes(ptn_trials *trials, const ptn_mode *modes, uint32_t window, uint32_t n_persist,
                               uint64_t *moved_bytes, ptn_forecast *out) {
  ptn_candidate candidate;
  compose_modes(trials, modes);
  *moved_bytes = 0;
  *out = (ptn_forecast){.step_ns = PTN_NEVER_NS};
  int64_t needed_bytes = ptn_fit_without_slots(trials->fit, n_persist);
  if (!describe(trials, window, n_persist, trials->fit->live, needed_bytes, &candidate)) return;
  ptn_bound_ns(trials->bounds, &candidate, moved_bytes);
  ptn_simulate(trials->simulation, &candidate, out);
}

/* Of the set composed last. What is written of a stash at least: what has no room in the phase between forward and backward of the
 * blocks, and is not the part that may stay. */
static double written_bytes(ptn_trials *trials, uint32_t set, double stash_bytes, uint32_t n_persist) {
  if (trials->request->phases[trials->last_forward].block >= 0) return 0; /* nothing is known between them */
  if (trials->fit->least) return 0; /* room depends on the budget */
  double above_bytes = (double)ptn_trials_need(trials, set, n_persist) - (double)ptn_fit_persistent_bytes(trials->fit, n_persist);
  double fixed_bytes = (double)trials->request->fixed_bytes;
  double room_bytes = above_bytes - fixed_bytes - (double)trials->fit->live[trials->last_forward].peak_bytes;
  double written = stash_bytes - (room_bytes > 0 ? room_bytes : 0);
  written = ptn_min_f64(written, stash_bytes - stash_bytes / PTN_KEPT_PART);
  return written > 0 ? written : 0;
}

double ptn_trials_least_ns(ptn_trials *trials, uint32_t set, uint32_t least, uint32_t most, double held_bytes) {
  double lowest_ns = (double)PTN_NEVER_NS, *recompute_ns = trials->recompute_ns, *stash_bytes = trials->stash_bytes;
  compose_set(trials, set);
  uint32_t n_steps = trials->n_steps;
  ptn_many many = {.least_persist = least, .most_persist = most, .slots_bytes = held_bytes};
  for (uint32_t i = 0; i <= n_steps; i++) { /* in each step the recomputation of its end, the bytes of its begin */
    many.recompute_ns = recompute_ns[i < n_steps ? i + 1 : i];
    many.stash_bytes = written_bytes(trials, set, stash_bytes[i], most);
    double ns = ptn_sums_least_ns(trials->sums, &many);
    if (ns < lowest_ns) lowest_ns = ns;
  }
  return lowest_ns;
}

void ptn_trials_destroy(ptn_trials *trials) {
  ptn_families_destroy(&trials->families);
  ptn_sums_destroy(trials->sums);
  ptn_bounds_destroy(trials->bounds);
  ptn_simulation_destroy(trials->simulation);
  free(trials->slots_bytes);
  free(trials->kept_cells);
  free(trials->kept_slots);
  free(trials->needs);
  free(trials->needs_of);
  free(trials->modes);
  free(trials->left_live);
  free(trials->left_stretch_bytes);
}

ptn_status ptn_trials_create(ptn_trials *trials, ptn_fit *fit, const ptn_rule *rule) {
  const ptn_plan_request *request = fit->request;
  size_t chunks = (size_t)request->n_chunks + 1, cells = fit->n_windows * chunks;
  bool given = request->n_persist >= 0;
  *trials = (ptn_trials){.fit = fit, .request = request, .composed_set = NO_SET};
  trials->least_persist = given ? (uint32_t)request->n_persist : fit->least_persist;
  trials->most_persist = given ? trials->least_persist : request->n_chunks;
  while (trials->last_forward + 1 < request->n_phases && !request->phases[trials->last_forward + 1].backward) {
    trials->last_forward++;
  }
  trials->slots_bytes = calloc(cells, sizeof *trials->slots_bytes);
  trials->n_needs = (uint32_t)ptn_max_u64(1, ptn_min_u64(MOST_SETS, MOST_NEEDS_BYTES / (chunks * sizeof *trials->needs)));
  trials->needs = calloc(trials->n_needs * chunks, sizeof *trials->needs);
  trials->needs_of = calloc(trials->n_needs, sizeof *trials->needs_of);
  trials->modes = calloc((size_t)request->n_blocks + 1, sizeof *trials->modes);
  trials->n_kept = (uint32_t)ptn_max_u64(1, ptn_min_u64(cells, MOST_KEPT_BYTES / (chunks * sizeof *trials->kept_slots)));
  trials->kept_cells = calloc(trials->n_kept, sizeof *trials->kept_cells);
  trials->kept_slots = calloc(trials->n_kept * chunks, sizeof *trials->kept_slots);
  if (!trials->slots_bytes || !trials->kept_cells || !trials->kept_slots || !trials->needs || !trials->needs_of ||
      !trials->modes) {
    return ptn_fail(PTN_MEMORY, "no memory to search plans of %u chunks and %u blocks", request->n_chunks, request->n_blocks);
  }
  for (size_t i = 0; i < cells; i++) trials->slots_bytes[i] = UNKNOWN;
  bool left = false;
  for (uint32_t i = 0; i < request->n_phases; i++) left |= request->phases[i].small_bytes > 0;
  if (left) {
    trials->left_live = calloc(request->n_phases, sizeof *trials->left_live);
    trials->left_stretch_bytes = calloc(chunks, sizeof *trials->left_stretch_bytes);
    if (!trials->left_live || !trials->left_stretch_bytes)
      return ptn_fail(PTN_MEMORY, "no memory to search plans of %u phases", request->n_phases);
  }
  PTN_TRY(ptn_sums_create(&trials->sums, request));
  PTN_TRY(ptn_bounds_create(&trials->bounds, request, fit->consumer_of_phase));
  PTN_TRY(ptn_simulation_create(&trials->simulation, request, fit->consumer_of_phase));
  return ptn_families_create(&trials->families, fit, rule);
}
