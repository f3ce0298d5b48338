/* The planner's search on random models and machines: within every budget, deterministic, never slower with more memory, the same
 * again when its own plan is given; its bounds never above the simulation; and against all there is, where that is little. */
/* sources: csrc/plan/bounds.c csrc/plan/climb.c csrc/plan/families.c csrc/plan/fit.c csrc/plan/make.c csrc/plan/peak.c
 * csrc/plan/request.c csrc/plan/rule.c csrc/plan/search.c csrc/plan/simulate.c csrc/plan/simulate_course.c
 * csrc/plan/simulate_jobs.c csrc/plan/simulate_lanes.c csrc/plan/simulate_stash.c csrc/plan/slots.c csrc/plan/sums.c
 * csrc/plan/swap.c csrc/plan/tiers.c csrc/plan/trials.c */
#include "plan/search_internal.h"
#include "plan_models.h"

#define ROUNDS_BOUNDS 1500
#define ROUNDS_LADDER 80
#define ROUNDS_ALL 16

/* ---- plans ---- */

static bool same_plan(const model *of, const answer *a, const answer *b) {
  return a->status == b->status && a->plan.n_persist == b->plan.n_persist && a->plan.n_buffer == b->plan.n_buffer &&
         a->plan.n_ahead == b->plan.n_ahead && a->plan.peak_bytes == b->plan.peak_bytes &&
         a->plan.piece_bytes == b->plan.piece_bytes && a->plan.n_pieces == b->plan.n_pieces &&
         a->plan.disk_bytes == b->plan.disk_bytes && a->plan.host_bytes == b->plan.host_bytes &&
         memcmp(a->modes, b->modes, of->request.n_blocks * sizeof *a->modes) == 0 &&
         memcmp(a->slot_of_chunk, b->slot_of_chunk, of->request.n_chunks * sizeof *a->slot_of_chunk) == 0 &&
         memcmp(a->slot_bytes, b->slot_bytes, a->plan.n_buffer * sizeof *a->slot_bytes) == 0;
}

static bool is_ample(const model *of, const answer *given) {
  return given->plan.n_persist == of->request.n_chunks && given->n_keep == of->request.n_blocks;
}

static void check_forecast(const ptn_forecast *forecast) {
  int64_t sum_ns = forecast->compute_ns + forecast->recompute_ns + forecast->fixed_ns + forecast->drag_ns + forecast->update_ns;
  for (int i = 0; i < PTN_N_WAITS; i++) sum_ns += forecast->wait_ns[i];
  CHECK(forecast->step_ns == sum_ns && forecast->step_ns < PTN_NEVER_NS);
}

static void check_tiers(const model *of, const answer *given) {
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

/* A plan that was made, given again: with a profile and without one, with its slots and, where times are known, without. */
static void check_given_again(const model *of, const answer *given, uint64_t budget) {
  ptn_plan_request again = of->request;
  answer other;
  again.modes = given->modes;
  model_ask(&again, budget, &other);
  CHECK(other.status == PTN_OK && (double)other.plan.forecast.step_ns <= 1.01 * (double)given->plan.forecast.step_ns);
  again.n_persist = given->plan.n_persist;
  again.n_buffer = given->plan.n_buffer;
  model_ask(&again, budget, &other);
  CHECK(same_plan(of, given, &other));
  CHECK(memcmp(&other.plan.forecast, &given->plan.forecast, sizeof other.plan.forecast) == 0);
  if (given->plan.n_host > 0 || given->plan.host_bytes > 0) return; /* without a profile all that moves goes to the disk */
  again.profile = NULL;
  model_ask(&again, budget, &other);
  CHECK(same_plan(of, given, &other) && other.plan.forecast.step_ns == 0);
}

static void check_ladder(const model *of, uint64_t *random) {
  answer given, again;
  model_ask(&of->request, 0, &given);
  CHECK(given.status == PTN_BUDGET);
  uint64_t smallest = ptn_last_error()->smallest_bytes;
  CHECK(ptn_last_error()->needed_bytes == smallest);
  if (smallest > 0) {
    model_ask(&of->request, smallest - 1, &given);
    CHECK(given.status == PTN_BUDGET);
  }
  int64_t fastest_ns = PTN_NEVER_NS;
  bool ample = false;
  for (uint64_t budget = smallest; !ample; budget += 1 + budget / 16 + model_upto(random, budget / 8)) {
    model_ask(&of->request, budget, &given);
    model_ask(&of->request, budget, &again);
    CHECK(given.status == PTN_OK && same_plan(of, &given, &again));
    CHECK(given.plan.peak_bytes <= budget && given.plan.smallest_bytes == smallest);
    check_forecast(&given.plan.forecast);
    check_tiers(of, &given);
    check_given_again(of, &given, budget);
    ample = is_ample(of, &given);
    /* What stays in memory is updated in step(), whatever could be hidden by moving. */
    int64_t own_ns = ample ? given.plan.forecast.update_ns + given.plan.forecast.busy_ns[PTN_GATHER] : 0;
    CHECK((double)(given.plan.forecast.step_ns - own_ns) <= 1.01 * (double)fastest_ns);
    if (given.plan.forecast.step_ns < fastest_ns) fastest_ns = given.plan.forecast.step_ns;
    CHECK(budget < (uint64_t)1 << 40);
  }
  CHECK(given.plan.n_buffer == 0 && given.plan.ring_bytes == 0 && given.plan.disk_bytes == 0 && given.plan.host_bytes == 0);
}

/* ---- bounds ---- */

typedef struct bench {
  ptn_fit fit;
  ptn_bounds *bounds;
  ptn_sums *sums;
  ptn_simulation *simulation;
} bench;

static void bench_create(bench *out, const model *of) {
  CHECK_OK(ptn_fit_create(&out->fit, &of->request));
  CHECK_OK(ptn_bounds_create(&out->bounds, &of->request, out->fit.consumer_of_phase));
  CHECK_OK(ptn_sums_create(&out->sums, &of->request));
  CHECK_OK(ptn_simulation_create(&out->simulation, &of->request, out->fit.consumer_of_phase));
}

static void bench_destroy(bench *of) {
  ptn_simulation_destroy(of->simulation);
  ptn_sums_destroy(of->sums);
  ptn_bounds_destroy(of->bounds);
  ptn_fit_destroy(&of->fit);
}

/* False: the tiers have no place for it. */
static bool describe(bench *at, const ptn_mode *modes, uint32_t n_persist, uint32_t window, ptn_candidate *out) {
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
                         .phase_bytes = at->fit.phase_bytes,
                         .above_static_bytes = above_bytes,
                         .pending_bytes = at->fit.pending_bytes};
  return true;
}

static double tightness, tightness_count;

static void check_bounds(const model *of, uint64_t *random) {
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
    CHECK(ptn_sums_least_ns(at.sums, &many) <= (double)forecast.step_ns + 16);
    many.least_persist = (uint32_t)model_upto(random, n_persist);
    many.most_persist += (uint32_t)model_upto(random, of->request.n_chunks - n_persist);
    CHECK(ptn_sums_least_ns(at.sums, &many) <= (double)forecast.step_ns + 16);
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

/* ---- against all there is ---- */

typedef struct gaps {
  double sum, worst;
  int count;
} gaps;

/* What a budget leaves for a candidate with a ring (fit.c). */
static int64_t limit_of(const model *of, uint64_t budget_bytes) {
  ptn_plan_request request = of->request;
  ptn_fit fit;
  ptn_rule *rule;
  request.budget_bytes = budget_bytes;
  CHECK_OK(ptn_fit_create(&fit, &request));
  CHECK_OK(ptn_rule_create(&rule, &fit));
  int64_t limit_bytes = fit.limit_bytes;
  ptn_rule_destroy(rule);
  ptn_fit_destroy(&fit);
  return limit_bytes;
}

#define N_BUDGETS 8

typedef struct reference {
  const model *of;
  bench at;
  answer given[N_BUDGETS];
  uint64_t budgets[N_BUDGETS];
  int64_t limits[N_BUDGETS], fastest_ns[N_BUDGETS];
} reference;

static void ask_all(reference *all, const model *of) {
  all->of = of;
  model_ask(&of->request, 0, &all->given[0]);
  uint64_t smallest = ptn_last_error()->smallest_bytes;
  model_ask(&of->request, (uint64_t)1 << 40, &all->given[0]);
  uint64_t ample = all->given[0].plan.peak_bytes;
  for (uint64_t i = 0; i < N_BUDGETS; i++) {
    all->budgets[i] = smallest + (ample - smallest) * i / N_BUDGETS;
    model_ask(&of->request, all->budgets[i], &all->given[i]);
    CHECK_OK(all->given[i].status);
    all->limits[i] = limit_of(of, all->budgets[i]);
    all->fastest_ns[i] = INT64_MAX;
  }
}

static void try_all_chunks(reference *all, const ptn_mode *modes) {
  uint32_t n_chunks = all->of->request.n_chunks, few = all->at.fit.few;
  for (uint32_t n_persist = 0; n_persist <= n_chunks; n_persist++) {
    for (uint32_t window = few; window <= n_chunks || window == few; window++) {
      ptn_candidate candidate;
      ptn_forecast forecast;
      if (!describe(&all->at, modes, n_persist, window, &candidate)) continue;
      int64_t needed_bytes = (int64_t)candidate.above_static_bytes + (int64_t)ptn_fit_persistent_bytes(&all->at.fit, n_persist);
      for (uint32_t s = 0; s < all->at.fit.n_slots; s++) needed_bytes += (int64_t)all->at.fit.slot_bytes[s];
      if (needed_bytes > (int64_t)all->budgets[N_BUDGETS - 1]) continue;
      ptn_simulate(all->at.simulation, &candidate, &forecast);
      for (int i = 0; i < N_BUDGETS; i++) {
        int64_t room_bytes = ptn_fit_has_ring(&all->at.fit, n_persist) ? all->limits[i] : (int64_t)all->budgets[i];
        if (needed_bytes <= room_bytes && forecast.step_ns < all->fastest_ns[i]) all->fastest_ns[i] = forecast.step_ns;
      }
      if (window >= n_chunks - n_persist) break; /* wider ones are the same */
    }
  }
}

/* Every placement of modes (the first n_kinds of them), every number of persistent chunks, every window, at several budgets. */
static void check_exhaustive(const model *of, uint32_t n_kinds, gaps *out) {
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
    if (is_ample(of, &all.given[i])) continue;
    double gap = (double)all.given[i].plan.forecast.step_ns / (double)all.fastest_ns[i] - 1;
    CHECK(gap > -1e-9);
    out->sum += gap;
    if (gap > out->worst) out->worst = gap;
    out->count++;
  }
}

/* ---- cases ---- */

static void check_refusals(uint64_t *random) {
  static model of, bad;
  answer given;
  model_draw(&of, random, &(model_shape){.n_blocks = 4, .n_chunks = 4});
  const double wrong[] = {-1, NAN, INFINITY};
  for (int i = 0; i < 3; i++) {
    bad = of;
    bad.request.profile = &bad.profile;
    bad.profile.lanes[PTN_DISK_READ].bytes_per_s = wrong[i];
    model_ask(&bad.request, UINT64_MAX, &given);
    CHECK(given.status == PTN_INVALID);
    bad.profile = of.profile;
    bad.profile.lanes[PTN_UPDATE].drag_ns_per_byte = wrong[i];
    model_ask(&bad.request, UINT64_MAX, &given);
    CHECK(given.status == PTN_INVALID);
    bad.profile = of.profile;
    bad.profile.disk_overlap = wrong[i];
    model_ask(&bad.request, UINT64_MAX, &given);
    CHECK(given.status == PTN_INVALID);
  }
  bad = of;
  bad.request.profile = &bad.profile;
  bad.profile.n_phases--;
  model_ask(&bad.request, UINT64_MAX, &given);
  CHECK(given.status == PTN_INVALID);
  bad.profile = of.profile;
  bad.profile.access_ns = -1;
  model_ask(&bad.request, UINT64_MAX, &given);
  CHECK(given.status == PTN_INVALID);
  bad = of;
  bad.request.profile = &bad.profile;
  bad.profile.phases = bad.times;
  bad.times[1].compute_ns = INT64_MAX;
  model_ask(&bad.request, UINT64_MAX, &given);
  CHECK(given.status == PTN_INVALID);
  bad = of;
  bad.request.access_phases = bad.access_phases;
  bad.access_phases[1] = bad.request.n_phases;
  model_ask(&bad.request, UINT64_MAX, &given);
  CHECK(given.status == PTN_INVALID);
  bad.access_phases[1] = 1;
  bad.access_phases[2] = 0;
  model_ask(&bad.request, UINT64_MAX, &given);
  CHECK(given.status == PTN_INVALID);
  bad = of;
  bad.request.profile = &bad.profile;
  bad.profile.lanes[PTN_UPDATE] = (ptn_lane_speed){0};
  model_ask(&bad.request, 0, &given);
  model_ask(&bad.request, ptn_last_error()->smallest_bytes, &given);
  CHECK(given.status == PTN_INVALID && strstr(ptn_last_error()->message, "lane")); /* nothing could be updated */
  model_ask(&bad.request, UINT64_MAX, &given);
  CHECK(given.status == PTN_OK && is_ample(&bad, &given));
}

/* A host that has no room, and no disk behind it: what must stay on the device is said. */
static void check_no_room(uint64_t *random) {
  static model of;
  answer given;
  do model_draw(&of, random, &(model_shape){.n_blocks = 3, .n_chunks = 6, .alike = true});
  while (of.request.n_ranks > 1);
  model_lane(&of.profile.lanes[PTN_UPLOAD], 1e10, 0, random);
  model_lane(&of.profile.lanes[PTN_OFFLOAD], 1e10, 0, random);
  of.profile.lanes[PTN_DISK_READ] = of.profile.lanes[PTN_DISK_WRITE] = (ptn_lane_speed){0};
  of.profile.stash_drag_ns_per_byte = 0.05;
  for (uint32_t fits = 0; fits <= 6; fits++) { /* the last of the chunks have room on the host */
    of.request.host_budget_bytes = 1;
    for (uint32_t c = 6 - fits; c < 6; c++) of.request.host_budget_bytes += of.chunks[c].param_bytes + of.chunks[c].state_bytes;
    model_ask(&of.request, 0, &given);
    CHECK(given.status == PTN_BUDGET && (fits == 6 || strstr(ptn_last_error()->message, "host")));
    uint64_t smallest = ptn_last_error()->smallest_bytes;
    CHECK(ptn_last_error()->needed_bytes == smallest);
    model_ask(&of.request, smallest, &given);
    CHECK(given.status == PTN_OK && given.plan.n_persist >= 6 - fits && given.plan.disk_bytes == 0);
    check_tiers(&of, &given);
    if (fits == 6) continue;
    ptn_plan_request less = of.request;
    less.n_persist = 5 - fits;
    model_ask(&less, UINT64_MAX, &given);
    CHECK(given.status == PTN_BUDGET && strstr(ptn_last_error()->message, "host"));
  }
}

/* All memory that could be wanted: everything stays, nothing moves, whatever the machine and the step. */
static void check_ample(uint64_t *random) {
  static model of;
  answer given;
  for (int round = 0; round < 50; round++) {
    model_draw(&of, random, &(model_shape){.n_blocks = 8, .n_chunks = 10, .alike = round % 2 == 0, .swaps = true, .tiers = true});
    model_ask(&of.request, (uint64_t)1 << 40, &given);
    CHECK(given.status == PTN_OK && is_ample(&of, &given) && given.plan.disk_bytes == 0 && given.plan.host_bytes == 0);
    const ptn_forecast *forecast = &given.plan.forecast;
    CHECK(forecast->recompute_ns == 0 && forecast->moved_bytes[PTN_DISK_READ] + forecast->moved_bytes[PTN_DISK_WRITE] == 0);
  }
}

static void check_many_bounds(uint64_t *random) {
  static model of;
  for (int round = 0; round < ROUNDS_BOUNDS; round++) {
    model_shape shape = {.n_blocks = (uint32_t)model_upto(random, 9), .n_chunks = (uint32_t)model_upto(random, 12)};
    shape.alike = round % 3 == 0, shape.swaps = round % 2, shape.tiers = round % 4 > 1;
    model_draw(&of, random, &shape);
    check_bounds(&of, random);
  }
  CHECK(tightness / tightness_count > 0.9); /* bounds that said nothing would hold, too */
}

static void check_many_ladders(uint64_t *random) {
  static model of;
  for (int round = 0; round < ROUNDS_LADDER; round++) {
    model_shape shape = {.n_blocks = (uint32_t)model_upto(random, 6), .n_chunks = (uint32_t)model_upto(random, 8)};
    if (round % 8 == 0) shape.n_blocks = (uint32_t)model_upto(random, 24), shape.n_chunks = (uint32_t)model_upto(random, 30);
    shape.alike = round % 3 == 0, shape.swaps = round % 2, shape.tiers = round % 4 > 1;
    model_draw(&of, random, &shape);
    check_ladder(&of, random);
  }
}

/* Blocks alike and unlike, disks slow and fast. Of 7 blocks the search looks at families alone, and modes are keep, swap and
 * checkpoint; of fewer it looks at every set. */
static void check_gaps(uint64_t *random) {
  static model of;
  for (int kind = 0; kind < 4; kind++) {
    gaps few = {0}, families = {0};
    for (int round = 0; round < ROUNDS_ALL; round++) {
      bool many = round % 8 == 7;
      model_shape shape = {.n_blocks = many ? 7 : 1 + (uint32_t)model_upto(random, round % 8 == 0 ? 4 : 2)};
      shape.n_chunks = many ? 3 : 1 + (uint32_t)model_upto(random, 4);
      shape.alike = kind % 2 == 0, shape.swaps = kind > 1, shape.tiers = round % 3 == 0;
      model_draw(&of, random, &shape);
      check_exhaustive(&of, many ? 3 : 4, many ? &families : &few);
    }
    CHECK(few.sum / few.count <= 0.001 && few.worst <= 0.01);
    CHECK(families.sum / families.count <= 0.005 && families.worst <= 0.05);
  }
}

int main(void) {
  uint64_t random = 5;
  check_many_bounds(&random);
  check_many_ladders(&random);
  check_gaps(&random);
  check_refusals(&random);
  check_no_room(&random);
  check_ample(&random);
  return 0;
}
