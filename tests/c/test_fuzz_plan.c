/* Requests that nobody should make: sizes, orders, times and speeds as an attacker chooses them, and plausible ones with a few of
 * them. The planner answers or refuses, the same way twice; what it answers is inside of the budget and of the arrays. */
/* sources: csrc/plan/?*.c */
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "fuzz.h"
#include "plan/plan.h"

enum { MOST = 24, MOST_ACCESSES = 80 };

static uint64_t state;
static bool wild; /* this request has hostile numbers */

static uint64_t below(uint64_t count) { return count ? check_random(&state) % count : 0; }

/* A number of a plausible request, or now and then any number at all. */
static uint64_t number(uint64_t plausible) { return wild && fuzz_one_in(&state, 20) ? fuzz_hostile(&state) : plausible; }

static double speed(double plausible) {
  if (!wild || !fuzz_one_in(&state, 20)) return plausible;
  const double favourites[] = {0, -1, NAN, INFINITY, -INFINITY, 1e300, 1e-300, 5e-324, 1e18, 1e19};
  return favourites[below(sizeof favourites / sizeof *favourites)];
}

typedef struct made {
  ptn_plan_request request;
  ptn_profile profile;
  ptn_plan_chunk *chunks;
  ptn_phase *phases;
  ptn_phase_times *times;
  uint32_t *accesses, *access_phases;
  ptn_mode *modes;
} made;

static void *array(size_t count, size_t bytes) { /* no larger than it must be: what lies behind it is nobody's */
  void *found = calloc(count ? count : 1, bytes);
  CHECK(found);
  return found;
}

static void make_phases(made *made, uint32_t n_blocks) {
  uint32_t n_phases = made->request.n_phases;
  made->phases = array(n_phases, sizeof *made->phases);
  made->times = array(n_phases, sizeof *made->times);
  for (uint32_t i = 0; i < n_phases; i++) {
    uint32_t half = n_phases / 2, place = i < half ? i : n_phases - 1 - i;
    uint64_t keep = below(64 * PTN_MIB), checkpoint = below(keep + 1);
    made->phases[i] = (ptn_phase){.block = (int32_t)number(place == 0 || place > n_blocks ? UINT64_MAX : place - 1),
                                  .backward = i >= half,
                                  .keep_entry_bytes = number(below(keep + 1)),
                                  .keep_peak_bytes = number(keep),
                                  .checkpoint_entry_bytes = number(below(checkpoint + 1)),
                                  .checkpoint_peak_bytes = number(checkpoint),
                                  .keep_working_bytes = number(below(keep + 1)),
                                  .small_bytes = number(below(2) * below(keep + 1)),
                                  .own_accesses = (uint32_t)number(below(8) == 0)};
    made->times[i] =
        (ptn_phase_times){.compute_ns = (int64_t)number(below(1 << 24)), .recompute_ns = (int64_t)number(below(1 << 23))};
  }
}

static void make_profile(made *made) {
  ptn_profile *profile = &made->profile;
  profile->n_phases = (uint32_t)number(made->request.n_phases);
  if (profile->n_phases != made->request.n_phases) profile->n_phases = made->request.n_phases + 1; /* refused before it is read */
  profile->phases = made->times;
  for (int i = 0; i < PTN_N_LANES; i++) {
    double rate = fuzz_one_in(&state, 4) ? 0 : (double)(1 + below((uint64_t)1 << 34));
    profile->lanes[i] =
        (ptn_lane_speed){.bytes_per_s = speed(rate), .idle_bytes_per_s = speed(rate), .drag_ns_per_byte = speed(0.01)};
  }
  profile->disk_overlap = speed(1.0 + (double)below(100) / 100);
  profile->link_overlap = speed(2.0);
  profile->stash_drag_ns_per_byte = (fuzz_one_in(&state, 2) ? 1 : -0.1) * speed(0.05);
  profile->step_update_bytes_per_s = speed(1e10);
  profile->step_fixed_ns = (int64_t)number(below(1 << 20));
  profile->access_ns = (int64_t)number(below(1 << 12));
  profile->checkpoint_ns = (int64_t)number(below(1 << 16));
  profile->swap_ns = (int64_t)number(below(1 << 16));
  if (fuzz_one_in(&state, 4)) made->request.profile = NULL;
  else made->request.profile = profile;
}

static void make_accesses(made *made) {
  ptn_plan_request *request = &made->request;
  made->accesses = array(request->n_accesses, sizeof *made->accesses);
  made->access_phases = array(request->n_accesses, sizeof *made->access_phases);
  for (uint32_t i = 0; i < request->n_accesses; i++) {
    made->accesses[i] = (uint32_t)number(below(request->n_chunks));
    made->access_phases[i] = (uint32_t)number((uint64_t)i * request->n_phases / request->n_accesses);
  }
  request->accesses = made->accesses;
  request->access_phases = fuzz_one_in(&state, 5) ? NULL : made->access_phases;
}

static void make_request(made *made) {
  ptn_plan_request *request = &made->request;
  memset(made, 0, sizeof *made);
  request->n_chunks = (uint32_t)below(MOST);
  request->n_blocks = (uint32_t)below(MOST / 2);
  request->n_phases = fuzz_one_in(&state, 6) ? 0 : 2 * request->n_blocks + 2;
  request->n_accesses = (uint32_t)below(MOST_ACCESSES);
  made->chunks = array(request->n_chunks, sizeof *made->chunks);
  for (uint32_t i = 0; i < request->n_chunks; i++) {
    uint64_t bytes = (1 + below(1024)) * PTN_PAGE_BYTES;
    bool trained = below(4) > 0;
    made->chunks[i] = (ptn_plan_chunk){.param_bytes = number(bytes),
                                       .grad_bytes = number(trained ? bytes : 0),
                                       .state_bytes = number(trained ? 2 * bytes : 0),
                                       .complete_phase = (uint32_t)number(below(request->n_phases)),
                                       .less_bytes = number(below(8) == 0 ? below(PTN_MIB) : 0),
                                       .update_here_bytes = number(below(8) == 0 ? below(bytes) : 0),
                                       .update_away_bytes = number(below(8) == 0 ? below(4 * bytes) : 0)};
  }
  request->chunks = made->chunks;
  make_phases(made, request->n_blocks);
  request->phases = made->phases;
  make_accesses(made);
  make_profile(made);
  request->budget_bytes = number(below((uint64_t)1 << (20 + below(12))));
  request->fixed_bytes = number(below(PTN_MIB));
  request->update_bytes = number(below(8) == 0 ? below(PTN_MIB) : 0);
  request->n_together = (uint32_t)number(below(4));
  request->n_arrays = (uint32_t)number(1 + below(4));
  made->modes = array(request->n_blocks, sizeof *made->modes);
  for (uint32_t i = 0; i < request->n_blocks; i++) made->modes[i] = (ptn_mode)(uint32_t)number(below(4));
  request->modes = fuzz_one_in(&state, 3) ? made->modes : NULL;
  request->n_persist = fuzz_one_in(&state, 3) ? (int64_t)number(below(request->n_chunks + 2)) : -1;
  request->n_buffer = (int64_t)number(below(6));
  request->grads_outlive_backward = below(2);
  request->n_passes = (uint32_t)number(below(4));
  request->host_budget_bytes = fuzz_one_in(&state, 3) ? number(below(256 * PTN_MIB)) : 0;
  request->n_ranks = fuzz_one_in(&state, 4) ? (uint32_t)number(below(8)) : 0;
  request->ring_host_bytes = fuzz_one_in(&state, 3) ? number(request->host_budget_bytes + below(2)) : 0;
  request->widening = (uint32_t)number(below(3));
  request->disk_budget_bytes = fuzz_one_in(&state, 3) ? number(below(64 * PTN_MIB)) : 0;
}

static ptn_status ask(const made *made, ptn_plan *plan) {
  memset(plan, 0, sizeof *plan);
  plan->slot_of_chunk = array(made->request.n_chunks, sizeof *plan->slot_of_chunk);
  plan->slot_bytes = array(made->request.n_chunks, sizeof *plan->slot_bytes);
  plan->modes = array(made->request.n_blocks, sizeof *plan->modes);
  return ptn_plan_make(&made->request, plan);
}

static void forget(ptn_plan *plan) {
  free(plan->slot_of_chunk);
  free(plan->slot_bytes);
  free(plan->modes);
}

static void check_plan(const ptn_plan_request *request, const ptn_plan *plan) {
  CHECK(plan->peak_bytes <= request->budget_bytes && plan->static_bytes <= plan->peak_bytes);
  CHECK(plan->disk_bytes <= request->disk_budget_bytes || request->disk_budget_bytes == 0);
  CHECK(plan->n_persist <= request->n_chunks && plan->n_buffer <= request->n_chunks);
  CHECK(plan->smallest_bytes <= request->budget_bytes || request->modes || request->n_persist >= 0);
  CHECK(plan->host_bytes <= ptn_max_u64(request->host_budget_bytes, request->ring_host_bytes > 0 ? plan->ring_bytes : 0) ||
        request->host_budget_bytes == 0);
  for (uint32_t i = 0; i < request->n_chunks; i++) {
    int32_t slot = plan->slot_of_chunk[i];
    CHECK(slot >= -1 && slot < (int64_t)plan->n_buffer && (slot == -1) == (i < plan->n_persist));
    CHECK(slot < 0 || plan->slot_bytes[slot] >= request->chunks[i].param_bytes);
  }
  for (uint32_t i = 0; i < request->n_blocks; i++) {
    CHECK((unsigned)plan->modes[i] <= PTN_CHECKPOINT_SWAP);
    CHECK(!request->modes || plan->modes[i] == request->modes[i]);
  }
  CHECK(plan->forecast.step_ns >= 0 && (request->profile || plan->forecast.step_ns == 0));
  for (int i = 0; i < PTN_N_WAITS; i++) CHECK(plan->forecast.wait_ns[i] >= 0);
}

static void one_request(uint64_t seed) {
  state = seed;
  wild = seed % 3 != 0;
  made made;
  ptn_plan plan, again;
  make_request(&made);
  ptn_status status = ask(&made, &plan);
  CHECK(status == PTN_OK || status == PTN_BUDGET || status == PTN_PLAN || status == PTN_INVALID);
  ptn_error error = *ptn_last_error();
  CHECK(status == PTN_OK || (error.code == status && error.message[0]));
  if (status == PTN_OK) check_plan(&made.request, &plan);
  bool given = made.request.modes || made.request.n_persist >= 0; /* then the smallest budget is that of other plans */
  if (status == PTN_BUDGET) CHECK(given || error.smallest_bytes > made.request.budget_bytes);
  CHECK(ask(&made, &again) == status);
  if (status == PTN_OK) {
    CHECK(plan.peak_bytes == again.peak_bytes && plan.forecast.step_ns == again.forecast.step_ns);
    CHECK(memcmp(plan.modes, again.modes, made.request.n_blocks * sizeof *plan.modes) == 0);
  }
  forget(&plan);
  forget(&again);
  free(made.chunks);
  free(made.phases);
  free(made.times);
  free(made.accesses);
  free(made.access_phases);
  free(made.modes);
}

int main(void) {
  fuzz("plan", one_request);
  return 0;
}
