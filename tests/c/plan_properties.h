/* What holds of every plan by time, for random models: what test_plan_search.c checks for a few dozen seeds and
 * test_fuzz_plan_search.c for as long as there is time. */
#ifndef PTN_TESTS_PLAN_PROPERTIES_H
#define PTN_TESTS_PLAN_PROPERTIES_H

#include "plan/search_internal.h"
#include "plan_models.h"

/* ---- measures ---- */

#define MEASURED_MOST 65536

/* How far something was from what it should be, each time: a part of it. */
typedef struct measured {
  double parts[MEASURED_MOST];
  uint32_t count;
} measured;

static inline void measured_add(measured *to, double part) {
  if (to->count < MEASURED_MOST) to->parts[to->count++] = part;
}

static inline int measured_compare(const void *left, const void *right) {
  const double *a = left, *b = right;
  return *a < *b ? -1 : *a > *b;
}

/* Of all, what so many parts are not above; 1: the worst. */
static inline double measured_quantile(measured *of, double share) {
  if (of->count == 0) return 0;
  qsort(of->parts, of->count, sizeof *of->parts, measured_compare);
  return of->parts[(uint32_t)(share * (of->count - 1) + 0.5)];
}

static inline double measured_mean(const measured *of) {
  double sum = 0;
  for (uint32_t i = 0; i < of->count; i++) sum += of->parts[i];
  return of->count > 0 ? sum / of->count : 0;
}

/* ---- plans ---- */

static inline bool same_plan(const model *of, const answer *a, const answer *b) {
  return a->status == b->status && a->plan.n_persist == b->plan.n_persist && a->plan.n_buffer == b->plan.n_buffer &&
         a->plan.n_ahead == b->plan.n_ahead && a->plan.peak_bytes == b->plan.peak_bytes &&
         a->plan.piece_bytes == b->plan.piece_bytes && a->plan.n_pieces == b->plan.n_pieces &&
         a->plan.disk_bytes == b->plan.disk_bytes && a->plan.host_bytes == b->plan.host_bytes &&
         memcmp(a->modes, b->modes, of->request.n_blocks * sizeof *a->modes) == 0 &&
         memcmp(a->slot_of_chunk, b->slot_of_chunk, of->request.n_chunks * sizeof *a->slot_of_chunk) == 0 &&
         memcmp(a->slot_bytes, b->slot_bytes, a->plan.n_buffer * sizeof *a->slot_bytes) == 0;
}

static inline bool is_ample(const model *of, const answer *given) {
  return given->plan.n_persist == of->request.n_chunks && given->n_keep == of->request.n_blocks;
}

/* What is taken whatever the forecasts: everything stays, and nothing moves. */
static inline bool is_taken_unseen(const model *of, const answer *given) {
  return is_ample(of, given) && of->request.n_ranks <= 1;
}

/* The smallest budget in which everything may stay. */
static inline uint64_t ample_bytes(const model *of) {
  static ptn_mode modes[MODEL_MOST]; /* all kept */
  ptn_plan_request request = of->request;
  answer given;
  request.modes = modes;
  request.n_persist = request.n_chunks;
  model_ask(&request, 0, &given);
  CHECK(given.status == PTN_BUDGET);
  return ptn_last_error()->needed_bytes;
}

static inline void check_forecast(const ptn_forecast *forecast) {
  int64_t sum_ns = forecast->compute_ns + forecast->recompute_ns + forecast->fixed_ns + forecast->drag_ns + forecast->update_ns;
  for (int i = 0; i < PTN_N_WAITS; i++) sum_ns += forecast->wait_ns[i];
  CHECK(forecast->step_ns == sum_ns && forecast->step_ns < PTN_NEVER_NS);
}

static inline void check_tiers(const model *of, const answer *given) {
  const ptn_plan_request *request = &of->request;
  uint64_t n_ranks = request->n_ranks > 0 ? request->n_ranks : 1, host_bytes = 0;
  bool disk = of->profile.lanes[PTN_DISK_READ].bytes_per_s > 0, link = of->profile.lanes[PTN_UPLOAD].bytes_per_s > 0;
  uint32_t end = given->plan.n_persist + given->plan.n_host;
  CHECK(end <= request->n_chunks && (disk || end == request->n_chunks) && (disk || given->plan.disk_bytes == 0));
  CHECK(given->plan.n_host == 0 || (link && request->host_budget_bytes > 0));
  uint64_t ring_bytes = request->ring_host_bytes > 0 && request->host_budget_bytes > 0 && link ? given->plan.ring_bytes : 0;
  CHECK(given->plan.host_bytes <= ptn_max_u64(request->host_budget_bytes, ring_bytes));
  for (uint32_t c = given->plan.n_persist; c < end; c++) {
    host_bytes += (of->chunks[c].param_bytes + of->chunks[c].state_bytes + n_ranks - 1) / n_ranks;
  }
  host_bytes += ring_bytes;
  CHECK(given->plan.host_bytes == host_bytes || given->plan.host_bytes == host_bytes + given->plan.stash_bytes);
}

/* The ring and holes have their part of the budget; but what is safest may fill it, next to the smallest budget, and where all blocks
 * swap, more chunks that stay may be worth what that costs. */
static inline void check_room(const model *of, const answer *given, uint64_t budget) {
  if (of->request.ring_host_bytes > 0 || given->n_swap == of->request.n_blocks) return;
  if (given->plan.safest_bytes + budget / 6 + (2 << 20) > budget) return;
  CHECK(given->plan.peak_bytes <= budget - budget / 36);
  CHECK(given->plan.piece_bytes == 0 || given->plan.piece_bytes >= 2 << 20 || given->plan.piece_bytes * 4 * 192 > budget);
}

/* A plan that was made, given again: with a profile and without one, with its slots and, where times are known, without. */
static inline void check_given_again(const model *of, const answer *given, uint64_t budget) {
  ptn_plan_request again = of->request;
  answer other;
  again.modes = given->modes;
  model_ask(&again, budget, &other);
  CHECK(other.status == PTN_OK && (double)other.plan.forecast.step_ns <= 1.03 * (double)given->plan.forecast.step_ns);
  again.n_persist = given->plan.n_persist;
  again.n_buffer = given->plan.n_buffer;
  again.n_ahead = given->plan.n_ahead;
  model_ask(&again, budget, &other);
  CHECK(same_plan(of, given, &other));
  CHECK(memcmp(&other.plan.forecast, &given->plan.forecast, sizeof other.plan.forecast) == 0);
  if (given->plan.n_host > 0 || given->plan.host_bytes > 0) return; /* without a profile all that moves goes to the disk */
  again.profile = NULL;
  model_ask(&again, budget, &other);
  CHECK(same_plan(of, given, &other) && other.plan.forecast.step_ns == 0);
}

/* What a budget leaves for candidates (room.c). */
typedef struct limits {
  int64_t with_ring, ringless, roomy;
} limits;

static inline limits limits_of(const model *of, uint64_t budget_bytes) {
  ptn_plan_request request = of->request;
  ptn_fit fit;
  ptn_rule *rule;
  request.budget_bytes = budget_bytes;
  CHECK_OK(ptn_fit_create(&fit, &request));
  CHECK_OK(ptn_rule_create(&rule, &fit));
  limits found = {fit.limit_bytes, fit.ringless_limit_bytes, fit.roomy_bytes};
  ptn_rule_destroy(rule);
  ptn_fit_destroy(&fit);
  return found;
}

/* But for slots, and the ring where that counts. */
static inline uint64_t beside_bytes(const model *of, const answer *given) {
  return given->plan.peak_bytes - given->plan.slot_bytes_total - (of->request.ring_host_bytes > 0 ? 0 : given->plan.ring_bytes);
}

/* What is left over goes to reading ahead: nothing that reads further is as fast and has room. */
static inline void check_widest(const model *of, const answer *given, uint64_t budget) {
  ptn_plan_request wider = of->request;
  answer other;
  limits room = limits_of(of, budget);
  wider.modes = given->modes;
  wider.n_persist = given->plan.n_persist;
  for (uint32_t slots = 1; slots <= of->request.n_chunks - given->plan.n_persist; slots++) {
    wider.n_buffer = slots;
    model_ask(&wider, budget, &other);
    if (other.status != PTN_OK || other.plan.n_ahead <= given->plan.n_ahead) continue;
    if (beside_bytes(of, &other) != beside_bytes(of, given)) continue; /* counted in another way */
    int64_t needed_bytes = (int64_t)(beside_bytes(of, &other) + other.plan.slot_bytes_total);
    if (needed_bytes > (other.plan.ring_bytes > 0 ? room.roomy : room.ringless)) continue;
    CHECK(other.plan.forecast.step_ns > given->plan.forecast.step_ns);
  }
}

/* A refusal names the smallest budget that works, also where modes or the number of persistent chunks are given. */
static inline void check_smallest(const ptn_plan_request *request) {
  answer given;
  model_ask(request, 0, &given);
  CHECK(given.status == PTN_BUDGET);
  uint64_t smallest = ptn_last_error()->smallest_bytes;
  CHECK(ptn_last_error()->needed_bytes == smallest);
  model_ask(request, smallest, &given);
  CHECK(given.status == PTN_OK && given.plan.smallest_bytes <= smallest);
  if (smallest == 0) return;
  model_ask(request, smallest - 1, &given);
  CHECK(given.status == PTN_BUDGET && ptn_last_error()->smallest_bytes == smallest);
}

static inline void check_smallest_given(const model *of, uint64_t *random) {
  ptn_plan_request request = of->request;
  ptn_mode modes[MODEL_MOST];
  check_smallest(&request);
  if (of->profile.lanes[PTN_UPLOAD].bytes_per_s > 0) return; /* a host may be too small for what blocks write ... */
  if (request.disk_budget_bytes > 0) return; /* ... and so may a disk */
  for (int round = 0; round < 4; round++) {
    for (uint32_t b = 0; b < request.n_blocks; b++) modes[b] = (ptn_mode)model_upto(random, 3);
    request.modes = round < 3 ? modes : NULL;
    request.n_persist = round < 2 ? -1 : (int64_t)model_upto(random, request.n_chunks);
    check_smallest(&request);
  }
}

static inline void check_ladder(const model *of, uint64_t *random, measured *rises) {
  answer given, again;
  check_smallest_given(of, random);
  model_ask(&of->request, 0, &given);
  CHECK(given.status == PTN_BUDGET);
  uint64_t smallest = ptn_last_error()->smallest_bytes;
  int64_t fastest_ns = PTN_NEVER_NS;
  uint64_t most = of->request.n_ranks > 1 ? 2 * ample_bytes(of) : UINT64_MAX;
  bool unseen = false;
  for (uint64_t budget = smallest; !unseen && budget <= most; budget += 1 + budget / 16 + model_upto(random, budget / 8)) {
    model_ask(&of->request, budget, &given);
    model_ask(&of->request, budget, &again);
    CHECK(given.status == PTN_OK && same_plan(of, &given, &again));
    CHECK(given.plan.peak_bytes <= budget && given.plan.smallest_bytes == smallest);
    check_forecast(&given.plan.forecast);
    check_tiers(of, &given);
    check_room(of, &given, budget);
    check_given_again(of, &given, budget);
    check_widest(of, &given, budget);
    unseen = is_taken_unseen(of, &given);
    /* What stays in memory is updated in step(), whatever could be hidden by moving. */
    int64_t own_ns = unseen ? given.plan.forecast.update_ns : 0;
    if (fastest_ns < PTN_NEVER_NS) {
      double rise = (double)(given.plan.forecast.step_ns - own_ns) / (double)fastest_ns - 1;
      measured_add(rises, rise > 0 ? rise : 0);
    }
    if (given.plan.forecast.step_ns < fastest_ns) fastest_ns = given.plan.forecast.step_ns;
    CHECK(budget < (uint64_t)1 << 40);
  }
  if (!unseen) return;
  CHECK(given.plan.n_buffer == 0 && given.plan.ring_bytes == 0 && given.plan.disk_bytes == 0 && given.plan.host_bytes == 0);
}

/* What blocks that swap cannot do without is taken where nothing else fits: then all of them swap. Elsewhere it makes nothing slower. */
static inline void check_least(const model *of) {
  static model without;
  answer given, other;
  without = *of;
  without.request.phases = without.phases;
  for (uint32_t p = 0; p < of->request.n_phases; p++) without.phases[p].swap_entry_bytes = without.phases[p].swap_peak_bytes = 0;
  model_ask(&of->request, 0, &given);
  uint64_t smallest = ptn_last_error()->smallest_bytes;
  model_ask(&without.request, 0, &other);
  uint64_t safest = ptn_last_error()->smallest_bytes;
  CHECK(smallest <= safest);
  for (int i = 0; i < 4 && smallest < safest; i++) {
    uint64_t budget = smallest + (safest - 1 - smallest) / 3 * (uint64_t)i;
    model_ask(&of->request, budget, &given);
    CHECK(given.status == PTN_OK && given.n_swap == of->request.n_blocks && given.plan.peak_bytes <= budget);
    model_ask(&without.request, budget, &other);
    CHECK(other.status == PTN_BUDGET);
  }
  for (uint64_t budget = safest, round = 0; round < 6; budget += budget / 7, round++) {
    model_ask(&of->request, budget, &given);
    model_ask(&without.request, budget, &other);
    CHECK(given.status == PTN_OK && other.status == PTN_OK && given.plan.safest_bytes == safest);
    bool squeezed = other.plan.peak_bytes > budget - budget / 36; /* the same modes with the least are taken before that */
    CHECK((double)given.plan.forecast.step_ns <= (squeezed ? 1.05 : 1.001) * (double)other.plan.forecast.step_ns);
  }
}

/* ---- bounds ---- */

typedef struct bench {
  ptn_fit fit;
  ptn_bounds *bounds;
  ptn_sums *sums;
  ptn_simulation *simulation;
} bench;

static inline void bench_create(bench *out, const model *of) {
  CHECK_OK(ptn_fit_create(&out->fit, &of->request));
  CHECK_OK(ptn_bounds_create(&out->bounds, &of->request, out->fit.consumer_of_phase));
  CHECK_OK(ptn_sums_create(&out->sums, &of->request));
  CHECK_OK(ptn_simulation_create(&out->simulation, &of->request, out->fit.consumer_of_phase));
}

static inline void bench_destroy(bench *of) {
  ptn_simulation_destroy(of->simulation);
  ptn_sums_destroy(of->sums);
  ptn_bounds_destroy(of->bounds);
  ptn_fit_destroy(&of->fit);
}

/* False: the tiers have no place for it. */
static inline bool describe(bench *at, const ptn_mode *modes, uint32_t n_persist, uint32_t window, ptn_candidate *out) {
  const ptn_plan_request *request = at->fit.request;
  ptn_tiers tiers;
  uint64_t stash_bytes = ptn_swap_stash_bytes(request, at->fit.consumer_of_phase, modes);
  if (!ptn_tiers_split(request, n_persist, stash_bytes, &tiers)) return false;
  ptn_fit_compose(&at->fit, modes);
  ptn_fit_slots(&at->fit, n_persist, window);
  uint64_t above_bytes = (uint64_t)ptn_fit_without_slots(&at->fit, n_persist) - ptn_fit_persistent_bytes(&at->fit, n_persist);
  *out = (ptn_candidate){.modes = modes,
                         .n_persist = n_persist,
                         .n_host = tiers.n_host,
                         .slot_of_chunk = at->fit.slot_of_chunk,
                         .live = at->fit.live,
                         .above_static_bytes = above_bytes,
                         .pending_bytes = at->fit.pending_bytes};
  return true;
}

static double tightness, tightness_count;

static inline void check_bounds(const model *of, uint64_t *random) {
  bench at;
  bench_create(&at, of);
  ptn_mode modes[MODEL_MOST];
  for (int round = 0; round < 12; round++) {
    uint32_t n_persist = (uint32_t)model_upto(random, of->request.n_chunks);
    uint32_t window = at.fit.windows[model_upto(random, at.fit.n_windows - 1)];
    uint64_t kinds = model_upto(random, 3);
    double recompute_ns = 0;
    for (uint32_t b = 0; b < of->request.n_blocks; b++) modes[b] = (ptn_mode)(kinds == 0 ? 2 : model_upto(random, kinds));
    ptn_candidate candidate;
    ptn_forecast forecast;
    uint64_t moved_bytes, simulated_bytes = 0;
    if (!describe(&at, modes, n_persist, window, &candidate)) continue;
    ptn_simulate(at.simulation, &candidate, &forecast);
    int64_t bound_ns = ptn_bound_ns(at.bounds, &candidate, &moved_bytes);
    CHECK(bound_ns <= forecast.step_ns);
    for (uint32_t p = 0; p < of->request.n_phases; p++) {
      const ptn_phase *phase = &of->phases[p];
      bool again = phase->backward && phase->block >= 0 && ptn_mode_recomputes(modes[phase->block]);
      if (again) recompute_ns += (double)(of->times[p].recompute_ns + of->profile.checkpoint_ns);
    }
    double held_bytes = 0;
    for (uint32_t s = 0; s < at.fit.n_slots; s++) held_bytes += (double)at.fit.slot_bytes[s];
    ptn_many many = {
        .least_persist = n_persist, .most_persist = n_persist, .slots_bytes = held_bytes, .recompute_ns = recompute_ns};
    CHECK(ptn_sums_least_ns(at.sums, &many) <= (double)forecast.step_ns);
    many.least_persist = (uint32_t)model_upto(random, n_persist);
    many.most_persist += (uint32_t)model_upto(random, of->request.n_chunks - n_persist);
    CHECK(ptn_sums_least_ns(at.sums, &many) <= (double)forecast.step_ns);
    if (forecast.step_ns >= PTN_NEVER_NS || forecast.step_ns < 1000000) continue; /* below that roundings show */
    CHECK(bound_ns >= of->profile.step_fixed_ns);
    tightness += (double)bound_ns / (double)forecast.step_ns;
    tightness_count++;
    for (int i = 0; i < PTN_N_LANES; i++) simulated_bytes += forecast.moved_bytes[i];
    uint64_t stash_bytes = 2 * ptn_swap_stash_bytes(&of->request, at.fit.consumer_of_phase, modes);
    CHECK(stash_bytes > 0 || moved_bytes <= simulated_bytes);
  }
  bench_destroy(&at);
}

/* Of each backward any number of its accesses, the last, is its own: chunks may come in recomputation alone. 0: not known. */
static inline void draw_own(model *of, uint64_t *random) {
  uint32_t n_accesses[MODEL_MOST_PHASES] = {0};
  for (uint32_t i = 0; i < of->request.n_accesses; i++) n_accesses[of->access_phases[i]]++;
  for (uint32_t p = 0; p < of->request.n_phases; p++) {
    bool backward = of->phases[p].backward && of->phases[p].block >= 0;
    of->phases[p].own_accesses = backward ? (uint32_t)model_upto(random, n_accesses[p]) : 0;
  }
}

/* What the search leaves out by a bound is no faster: whatever a choice takes, neither its own bound is above it, nor that of any
 * range of choices that it is among. Returns how many were looked at. */
static inline uint32_t check_pruning(const model *of, uint64_t *random) {
  answer given;
  ptn_plan_request request = of->request;
  ptn_fit fit;
  ptn_rule *rule;
  ptn_trials trials;
  uint32_t n_chunks = request.n_chunks, count = 0;
  model_ask(&request, 0, &given);
  request.budget_bytes = ptn_last_error()->smallest_bytes * (4 + model_upto(random, 8)) / 4;
  CHECK_OK(ptn_fit_create(&fit, &request));
  CHECK_OK(ptn_rule_create(&rule, &fit));
  CHECK_OK(ptn_trials_create(&trials, &fit, rule));
  for (int round = 0; round < 40; round++) {
    ptn_choice choice = {.set = (uint32_t)model_upto(random, trials.families.n_sets - 1),
                         .n_persist = (uint32_t)model_upto(random, n_chunks),
                         .window = (uint32_t)model_upto(random, fit.n_windows - 1)};
    uint32_t n_swappable = ptn_families_swappable(&trials.families, choice.set);
    bool every = ptn_families_every_swap(n_swappable);
    choice.swap = every ? PTN_SWAP_EVERY : (ptn_swap_family)model_upto(random, PTN_N_SWAP_FAMILIES - 1);
    choice.n_swap = (uint32_t)model_upto(random, every ? ((uint64_t)1 << n_swappable) - 1 : n_swappable);
    ptn_forecast forecast;
    uint64_t moved_bytes;
    if (!ptn_trials_fits(&trials, choice.set, choice.window, choice.n_persist)) continue;
    ptn_trials_simulate(&trials, &choice, &forecast);
    if (forecast.step_ns >= PTN_NEVER_NS) continue;
    count++;
    CHECK(ptn_trials_bound_ns(&trials, &choice, &moved_bytes) <= forecast.step_ns);
    double held_bytes = (double)ptn_trials_slots_bytes(&trials, choice.window, choice.n_persist);
    CHECK(ptn_trials_least_ns(&trials, choice.set, choice.n_persist, choice.n_persist, held_bytes) <= (double)forecast.step_ns);
    uint32_t least = (uint32_t)model_upto(random, choice.n_persist);
    uint32_t most = choice.n_persist + (uint32_t)model_upto(random, n_chunks - choice.n_persist);
    CHECK(ptn_trials_least_ns(&trials, choice.set, least, most, held_bytes) <= (double)forecast.step_ns);
  }
  ptn_trials_destroy(&trials);
  ptn_rule_destroy(rule);
  ptn_fit_destroy(&fit);
  return count;
}

/* ---- against all there is ---- */

#define N_BUDGETS 8

typedef struct reference {
  const model *of;
  bench at;
  answer given[N_BUDGETS];
  uint64_t budgets[N_BUDGETS];
  limits limits[N_BUDGETS];
  int64_t fastest_ns[N_BUDGETS];
} reference;

static inline void ask_all(reference *all, const model *of) {
  all->of = of;
  model_ask(&of->request, 0, &all->given[0]);
  uint64_t smallest = ptn_last_error()->smallest_bytes;
  model_ask(&of->request, (uint64_t)1 << 40, &all->given[0]);
  uint64_t ample = all->given[0].plan.peak_bytes;
  for (uint64_t i = 0; i < N_BUDGETS; i++) {
    all->budgets[i] = smallest + (ample - smallest) * i / N_BUDGETS;
    model_ask(&of->request, all->budgets[i], &all->given[i]);
    CHECK_OK(all->given[i].status);
    all->limits[i] = limits_of(of, all->budgets[i]);
    all->fastest_ns[i] = INT64_MAX;
  }
}

/* Within every budget that has room for it; not for those that could not gain by it. */
static inline void try_budgets(reference *all, ptn_candidate *candidate, int64_t needed_bytes) {
  ptn_fit *fit = &all->at.fit;
  ptn_forecast forecast = {0};
  uint64_t moved_bytes;
  bool ring = ptn_fit_has_ring(fit, candidate->n_persist);
  int64_t bound_ns = ptn_bound_ns(all->at.bounds, candidate, &moved_bytes);
  for (int i = 0; i < N_BUDGETS; i++) {
    const limits *here = &all->limits[i];
    if (needed_bytes > (ring ? here->with_ring : here->ringless) || bound_ns >= all->fastest_ns[i]) continue;
    fit->budget_bytes = (int64_t)all->budgets[i];
    fit->roomy_bytes = here->roomy;
    if (forecast.step_ns == 0) ptn_simulate(all->at.simulation, candidate, &forecast);
    int64_t step_ns = forecast.step_ns + ptn_fit_squeeze_ns(fit, candidate->n_persist, needed_bytes);
    if (step_ns < all->fastest_ns[i]) all->fastest_ns[i] = step_ns;
  }
}

static inline void try_all_chunks(reference *all, const ptn_mode *modes) {
  uint32_t n_chunks = all->of->request.n_chunks, few = all->at.fit.few;
  for (uint32_t n_persist = 0; n_persist <= n_chunks; n_persist++) {
    for (uint32_t window = few; window <= n_chunks || window == few; window++) {
      ptn_candidate candidate;
      if (!describe(&all->at, modes, n_persist, window, &candidate)) continue;
      int64_t needed_bytes = (int64_t)candidate.above_static_bytes + (int64_t)ptn_fit_persistent_bytes(&all->at.fit, n_persist);
      for (uint32_t s = 0; s < all->at.fit.n_slots; s++) needed_bytes += (int64_t)all->at.fit.slot_bytes[s];
      if (needed_bytes <= (int64_t)all->budgets[N_BUDGETS - 1]) try_budgets(all, &candidate, needed_bytes);
      if (window >= n_chunks - n_persist) break; /* wider ones are the same */
    }
  }
}

/* Every placement of modes (the first n_kinds of them), every number of persistent chunks, every window, at several budgets. */
static inline void check_exhaustive(const model *of, uint32_t n_kinds, measured *distances) {
  static reference all;
  ask_all(&all, of);
  bench_create(&all.at, of);
  ptn_mode modes[8] = {0};
  for (bool more = true; more;) {
    try_all_chunks(&all, modes);
    more = false;
    for (uint32_t b = 0; b < of->request.n_blocks && !more; b++) { /* counting, a block a digit */
      more = modes[b] + 1u < n_kinds;
      modes[b] = more ? (ptn_mode)(modes[b] + 1) : PTN_KEEP;
    }
  }
  bench_destroy(&all.at);
  for (int i = 0; i < N_BUDGETS; i++) {
    if (is_taken_unseen(of, &all.given[i])) continue;
    double distance = (double)all.given[i].plan.forecast.step_ns / (double)all.fastest_ns[i] - 1;
    CHECK(distance > -1e-9);
    measured_add(distances, distance);
  }
}

/* ---- all of it ---- */

typedef struct figures {
  measured rises, least_rises; /* of the forecast with more memory; where the least is known */
  measured few,
      families; /* distances from the best: of models of few blocks, and of those of which the search sees families alone */
} figures;

static inline void check_many_bounds(uint64_t *random, int rounds) {
  static model of;
  for (int round = 0; round < rounds; round++) {
    model_shape shape = {.n_blocks = (uint32_t)model_upto(random, 9), .n_chunks = (uint32_t)model_upto(random, 12)};
    shape.alike = round % 3 == 0, shape.swaps = round % 2, shape.tiers = round % 4 > 1;
    model_draw(&of, random, &shape);
    check_bounds(&of, random);
  }
}

/* With blocks of several chunks, some of which recomputation alone reads. */
static inline uint32_t check_much_pruning(uint64_t *random, int rounds) {
  static model of;
  uint32_t count = 0;
  for (int round = 0; round < rounds; round++) {
    model_shape shape = {.n_blocks = 1 + (uint32_t)model_upto(random, 8), .n_chunks = 1 + (uint32_t)model_upto(random, 24)};
    shape.alike = round % 3 == 0, shape.swaps = round % 2, shape.tiers = round % 4 > 1, shape.detailed = round % 5 == 0;
    model_draw(&of, random, &shape);
    draw_own(&of, random);
    check_bounds(&of, random);
    count += check_pruning(&of, random);
  }
  return count;
}

/* Models of at most 6 blocks and 8 chunks, and one of at most so many of both. */
static inline void check_many_ladders(uint64_t *random, uint32_t most, measured *rises, measured *least_rises) {
  static model of;
  uint64_t kind = model_upto(random, 11);
  for (uint64_t round = 0; round < 4; round++) {
    model_shape shape = {.n_blocks = (uint32_t)model_upto(random, round == 0 ? most : 6),
                         .n_chunks = (uint32_t)model_upto(random, round == 0 ? most : 8)};
    shape.alike = kind % 3 == 0, shape.swaps = (kind + round) % 2, shape.tiers = (kind + round) % 4 > 1;
    model_draw(&of, random, &shape);
    check_ladder(&of, random, rises);
    shape.least = true;
    model_draw(&of, random, &shape);
    check_least(&of);
    check_ladder(&of, random, least_rises);
  }
}

/* Blocks alike and unlike, disks slow and fast. Of 7 blocks the search looks at families alone, and modes are keep, swap and
 * checkpoint; of fewer it looks at every set. */
static inline void check_distances(uint64_t *random, measured *few, measured *families) {
  static model of;
  uint64_t kind = model_upto(random, 11);
  for (uint64_t round = 0; round < 4; round++) {
    bool many = round == 3;
    model_shape shape = {.n_blocks = many ? 7 : 1 + (uint32_t)model_upto(random, round == 0 ? 4 : 2)};
    shape.n_chunks = many ? 3 : 1 + (uint32_t)model_upto(random, 4);
    shape.alike = kind % 4 == 0, shape.swaps = kind % 2, shape.tiers = kind % 3 == 0;
    model_draw(&of, random, &shape);
    check_exhaustive(&of, many ? 3 : 4, many ? families : few);
  }
}

/* All of these, where the dry run knows more. */
static inline void check_detailed(uint64_t *random, figures *found) {
  static model of;
  for (uint64_t round = 0; round < 8; round++) {
    model_shape shape = {.n_blocks = (uint32_t)model_upto(random, 6), .n_chunks = (uint32_t)model_upto(random, 8)};
    shape.alike = round % 3 == 0, shape.swaps = round % 2, shape.tiers = round % 4 > 1, shape.least = round == 6;
    shape.detailed = true;
    if (round == 7) shape.n_blocks = 1 + shape.n_blocks % 4, shape.n_chunks = 1 + shape.n_chunks % 4, shape.tiers = false;
    model_draw(&of, random, &shape);
    if (round < 5) check_bounds(&of, random);
    else if (round == 7) check_exhaustive(&of, 4, &found->few);
    else check_ladder(&of, random, shape.least ? &found->least_rises : &found->rises);
  }
}

/* What holds of every seed that was tried. */
static inline void check_figures(figures *found) {
  CHECK(measured_quantile(&found->rises, 1) <= 0.15);
  CHECK(measured_quantile(&found->least_rises, 1) <= 0.15);
  CHECK(measured_quantile(&found->few, 1) <= 0.05);
  CHECK(measured_quantile(&found->families, 1) <= 0.15);
}

#endif
