/* The request: whether what the caller described can be planned at all.
 *
 * Problem: sizes, orders and times come from outside, from a trace or from a file, and every later part adds and multiplies them
 * without looking. Design: all of it is looked at once, before anything is allocated.
 *
 * Invariants after PTN_OK: indices name what exists; every sum of bytes stays in 63 bits, every sum of times too; no time is
 * negative and no speed is negative, infinite or not a number; access_phases never fall.
 */
#include <math.h>

#include "base/bytes.h"
#include "plan/parts.h"

#define MOST_TOGETHER 1024
#define MOST_ARRAYS 16
#define MOST_PASSES 65536
#define MOST_RANKS 65536
#define MOST_NS ((int64_t)1 << 58)         /* nine years, of all of a step and of each part of it */
#define MOST_DRAG_NS_PER_BYTE 1000.0       /* a core that looks at each byte for a microsecond */
#define MOST_BYTES_PER_S 1e18

static ptn_status check_phases(const ptn_plan_request *request) {
  for (uint32_t i = 0; i < request->n_phases; i++) {
    const ptn_phase *phase = &request->phases[i];
    if (phase->block < -1 || phase->block >= (int64_t)request->n_blocks) {
      return ptn_fail(PTN_INVALID, "phase %u names block %d of %u", i, (int)phase->block, request->n_blocks);
    }
    uint64_t highest = ptn_max_u64(phase->small_bytes, ptn_max_u64(phase->keep_peak_bytes, phase->checkpoint_peak_bytes));
    highest = ptn_max_u64(highest, phase->swap_peak_bytes);
    if (phase->keep_entry_bytes > phase->keep_peak_bytes || phase->checkpoint_entry_bytes > phase->checkpoint_peak_bytes ||
        phase->swap_entry_bytes > phase->swap_peak_bytes || phase->keep_after_bytes > phase->keep_peak_bytes ||
        phase->checkpoint_after_bytes > phase->checkpoint_peak_bytes || phase->swap_after_bytes > phase->swap_peak_bytes ||
        highest > PTN_PLAN_MOST_BYTES) {
      return ptn_fail(PTN_INVALID, "phase %u enters or ends with more bytes than its peak, or peaks above %llu bytes", i,
                      (unsigned long long)PTN_PLAN_MOST_BYTES);
    }
  }
  return PTN_OK;
}

/* The least that any run has behind the first completion in a phase. */
static uint64_t least_after_bytes(const ptn_phase *phase) {
  uint64_t keep = phase->keep_after_bytes > 0 ? phase->keep_after_bytes : phase->keep_peak_bytes;
  uint64_t checkpoint = phase->checkpoint_after_bytes > 0 ? phase->checkpoint_after_bytes : phase->checkpoint_peak_bytes;
  uint64_t swap = phase->swap_after_bytes > 0 ? phase->swap_after_bytes : phase->swap_peak_bytes;
  return ptn_min_u64(ptn_min_u64(keep, checkpoint), swap > 0 ? swap : keep);
}

static ptn_status check_chunks(const ptn_plan_request *request) {
  for (uint32_t i = 0; i < request->n_chunks; i++) {
    const ptn_plan_chunk *chunk = &request->chunks[i];
    uint64_t update_bytes = ptn_max_u64(chunk->update_here_bytes, chunk->update_away_bytes);
    uint64_t highest = ptn_max_u64(chunk->param_bytes, ptn_max_u64(chunk->grad_bytes, chunk->state_bytes));
    highest = ptn_max_u64(highest, update_bytes);
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
    if (chunk->grad_bytes > 0 && chunk->less_bytes > least_after_bytes(&request->phases[chunk->complete_phase])) {
      return ptn_fail(PTN_INVALID, "behind the completion of chunk %u %llu bytes less are to be live than there were", i,
                      (unsigned long long)chunk->less_bytes);
    }
  }
  return PTN_OK;
}

static ptn_status check_own_accesses(const ptn_plan_request *request) {
  for (uint32_t p = 0, i = 0; p < request->n_phases; p++) {
    uint32_t first = i;
    while (i < request->n_accesses && request->access_phases[i] == p) i++;
    if (request->phases[p].own_accesses > i - first) {
      return ptn_fail(PTN_INVALID, "phase %u has %u accesses, of which %u are to be its own", p, i - first,
                      request->phases[p].own_accesses);
    }
  }
  return PTN_OK;
}

static ptn_status check_accesses(const ptn_plan_request *request) {
  for (uint32_t i = 0; i < request->n_accesses; i++) {
    if (request->accesses[i] >= request->n_chunks) {
      return ptn_fail(PTN_INVALID, "access %u names chunk %u of %u", i, request->accesses[i], request->n_chunks);
    }
    if (!request->access_phases) continue;
    uint32_t phase = request->access_phases[i], before = i > 0 ? request->access_phases[i - 1] : 0;
    if (phase >= request->n_phases || phase < before) {
      return ptn_fail(PTN_INVALID, "access %u is in phase %u of %u, the one before it in phase %u; phases must not fall", i,
                      phase, request->n_phases, before);
    }
  }
  return request->access_phases ? check_own_accesses(request) : PTN_OK;
}

/* A number that a sum may hold: false also for what is not a number. */
static bool sound(double value, double most) { return isfinite(value) && value >= 0 && value <= most; }

static ptn_status check_lanes(const ptn_profile *profile) {
  static const char *const names[PTN_N_LANES] = {"upload", "offload", "gather", "disk_read", "disk_write", "update"};
  for (int i = 0; i < PTN_N_LANES; i++) {
    const ptn_lane_speed *lane = &profile->lanes[i];
    if (!sound(lane->bytes_per_s, MOST_BYTES_PER_S) || !sound(lane->idle_bytes_per_s, MOST_BYTES_PER_S) ||
        !sound(lane->drag_ns_per_byte, MOST_DRAG_NS_PER_BYTE)) {
      return ptn_fail(PTN_INVALID,
                      "profile: lane %s carries %g bytes/s (idle %g) with a drag of %g ns/byte; speeds of 0 to %g and a drag of "
                      "0 to %g are possible",
                      names[i], lane->bytes_per_s, lane->idle_bytes_per_s, lane->drag_ns_per_byte, MOST_BYTES_PER_S,
                      MOST_DRAG_NS_PER_BYTE);
    }
  }
  return PTN_OK;
}

/* The least drag of the lanes that may carry activations. */
static double least_stash_lane_drag_ns(const ptn_profile *profile) {
  static const int lanes[] = {PTN_UPLOAD, PTN_OFFLOAD, PTN_DISK_READ, PTN_DISK_WRITE};
  double least = MOST_DRAG_NS_PER_BYTE;
  for (size_t i = 0; i < sizeof lanes / sizeof *lanes; i++) {
    const ptn_lane_speed *lane = &profile->lanes[lanes[i]];
    if (lane->bytes_per_s > 0 && lane->drag_ns_per_byte < least) least = lane->drag_ns_per_byte;
  }
  return least;
}

/* Each time by itself, then all that a step could add up. */
static ptn_status check_times(const ptn_plan_request *request) {
  const ptn_profile *profile = request->profile;
  double total_ns = (double)request->n_phases * ((double)profile->checkpoint_ns + (double)profile->swap_ns) +
                    (double)request->n_accesses * (double)profile->access_ns;
  for (uint32_t i = 0; i < profile->n_phases; i++) {
    const ptn_phase_times *times = &profile->phases[i];
    if (times->compute_ns < 0 || times->recompute_ns < 0 || times->compute_ns > MOST_NS || times->recompute_ns > MOST_NS) {
      return ptn_fail(PTN_INVALID, "profile: phase %u computes for %lld ns and recomputes for %lld ns; 0 to %lld are possible", i,
                      (long long)times->compute_ns, (long long)times->recompute_ns, (long long)MOST_NS);
    }
    total_ns += (double)times->compute_ns + (double)times->recompute_ns;
  }
  if (!sound(profile->request_ns, (double)MOST_NS))
    return ptn_fail(PTN_INVALID, "profile: a request costs %g ns; 0 to %lld are possible", profile->request_ns,
                    (long long)MOST_NS);
  const int64_t costs_ns[] = {profile->step_fixed_ns, profile->access_ns, profile->checkpoint_ns, profile->swap_ns};
  for (size_t i = 0; i < sizeof costs_ns / sizeof *costs_ns; i++) {
    if (costs_ns[i] < 0 || costs_ns[i] > MOST_NS) {
      return ptn_fail(PTN_INVALID, "profile: a cost of %lld ns; 0 to %lld are possible", (long long)costs_ns[i],
                      (long long)MOST_NS);
    }
  }
  total_ns = total_ns * (request->n_passes > 0 ? request->n_passes : 1) + (double)profile->step_fixed_ns;
  if (total_ns > (double)MOST_NS) {
    return ptn_fail(PTN_INVALID, "profile: a step of %g ns in all its passes; at most %lld are possible", total_ns,
                    (long long)MOST_NS);
  }
  return PTN_OK;
}

static ptn_status check_profile(const ptn_plan_request *request) {
  const ptn_profile *profile = request->profile;
  if (profile->n_phases != request->n_phases) {
    return ptn_fail(PTN_INVALID, "profile: it has times of %u phases, the step has %u", profile->n_phases, request->n_phases);
  }
  PTN_TRY(check_times(request));
  PTN_TRY(check_lanes(profile));
  if (!(profile->disk_overlap >= 1 && profile->disk_overlap <= 2) ||
      !(profile->link_overlap >= 1 && profile->link_overlap <= 2)) {
    return ptn_fail(PTN_INVALID, "profile: overlaps of %g (disk) and %g (link); 1 to 2 are possible", profile->disk_overlap,
                    profile->link_overlap);
  }
  double least_ns = -least_stash_lane_drag_ns(profile), stash_ns = profile->stash_drag_ns_per_byte;
  if (!(stash_ns >= least_ns && stash_ns <= MOST_DRAG_NS_PER_BYTE) ||
      !sound(profile->step_update_bytes_per_s, MOST_BYTES_PER_S)) {
    return ptn_fail(PTN_INVALID,
                    "profile: a drag of %g ns/byte of activations beside the lanes', an update of %g bytes/s in step(); %g to %g "
                    "and 0 to %g are possible",
                    stash_ns, profile->step_update_bytes_per_s, least_ns, MOST_DRAG_NS_PER_BYTE, MOST_BYTES_PER_S);
  }
  return PTN_OK;
}

static ptn_status check_counts(const ptn_plan_request *request) {
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
  if (request->widening > MOST_ARRAYS) {
    return ptn_fail(PTN_INVALID, "widening is %u; 1 to %d are possible", request->widening, MOST_ARRAYS);
  }
  if (request->n_passes > MOST_PASSES || request->n_ranks > MOST_RANKS) {
    return ptn_fail(PTN_INVALID, "%u passes in a step, %u ranks; at most %d and %d are possible", request->n_passes,
                    request->n_ranks, MOST_PASSES, MOST_RANKS);
  }
  uint64_t fixed_bytes = ptn_max_u64(request->fixed_bytes, request->update_bytes);
  if (fixed_bytes > PTN_PLAN_MOST_BYTES) {
    return ptn_fail(PTN_INVALID, "fixed_bytes or update_bytes is %llu, at most %llu are possible",
                    (unsigned long long)fixed_bytes, (unsigned long long)PTN_PLAN_MOST_BYTES);
  }
  return PTN_OK;
}

static ptn_status check_given(const ptn_plan_request *request) {
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

ptn_status ptn_request_check(const ptn_plan_request *request) {
  PTN_TRY(check_counts(request));
  PTN_TRY(check_phases(request));
  PTN_TRY(check_chunks(request));
  PTN_TRY(check_accesses(request));
  if (request->profile) PTN_TRY(check_profile(request));
  return check_given(request);
}
