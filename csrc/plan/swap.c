/* Swap: what the plan says to the stash.
 *
 * Problem: blocks of the modes swap and checkpoint_swap write what they save to disk in forward and have it read ahead in
 * backward. The disk space of one step should be known before it, and reading ahead should leave the memory in which backward
 * works. Design: both are read from the phases that also give the peak (peak.c).
 *
 *   stash      Each forward of a swap block writes what the keep run retains of it but for what is small, each of a
 *              checkpoint_swap block what the checkpoint run does. A forward that no backward consumes saves nothing. It is an
 *              estimate: what was made before the blocks and is saved by one of them is not in it, in place of which the
 *              output of the last block is. Each forward is rounded up for the alignment of its records.
 *   headroom   What the backward of a block makes beside its saved tensors, at most: what was read ahead and left so much free
 *              need not give way to the operations of any block, once its saved tensors are in memory, whatever its mode. Their
 *              going hides a part of it from the peak, and what is read ahead takes their place at once: so it is the highest
 *              rise above any moment before. The head is not in it: backward through it ends before a block asks for anything.
 *   rise       The same without what going hides: what is kept in memory to the end of forward, and not refilled, leaves that.
 *   recompute  By what a block that recomputes rises, at most: it is left free beside what is asked for behind such a block.
 *
 * Invariants: all are 0 where no block swaps, and where no phases are known; headroom and recompute are at most half of what the
 * peak leaves beside static bytes: room to read ahead into is worth more than the certainty that nothing gives way.
 */
#include "base/bytes.h"
#include "plan/parts.h"

#define STASH_UNIT_BYTES ((uint64_t)64 << 10)

uint64_t ptn_swap_phase_bytes(const ptn_plan_request *request, const uint32_t *consumer_of_phase, const ptn_mode *modes,
                              uint32_t i) {
  int32_t block = request->phases[i].block;
  if (consumer_of_phase[i] == request->n_phases || !ptn_mode_swaps(modes[block])) return 0; /* only blocks have consumers */
  bool again = ptn_mode_recomputes(modes[block]);
  int64_t bytes = ptn_peak_retained_bytes(request, i, again) - (again ? 0 : (int64_t)request->phases[i].small_bytes);
  return bytes > 0 ? ptn_round_up((uint64_t)bytes, STASH_UNIT_BYTES) : 0;
}

uint64_t ptn_swap_stash_bytes(const ptn_plan_request *request, const uint32_t *consumer_of_phase, const ptn_mode *modes) {
  uint64_t total_bytes = 0;
  for (uint32_t i = 0; i < request->n_phases; i++) total_bytes += ptn_swap_phase_bytes(request, consumer_of_phase, modes, i);
  return total_bytes;
}

uint64_t ptn_swap_stream_bytes(const ptn_plan_request *request, const uint32_t *consumer_of_phase, const ptn_mode *modes) {
  uint64_t most_bytes = 0;
  for (uint32_t i = 0; i < request->n_phases; i++) {
    bool swaps = request->phases[i].block >= 0 && modes[request->phases[i].block] == PTN_SWAP;
    if (swaps) most_bytes = ptn_max_u64(most_bytes, ptn_swap_phase_bytes(request, consumer_of_phase, modes, i));
  }
  return most_bytes / PTN_STREAM_PART;
}

static uint64_t rise_bytes(const ptn_phase *phase, ptn_mode mode) {
  (void)mode; /* the same in each, as `highest` takes it */
  return phase->keep_peak_bytes - phase->keep_entry_bytes;
}

static uint64_t working_bytes(const ptn_phase *phase, ptn_mode mode) {
  return ptn_max_u64(phase->keep_working_bytes, rise_bytes(phase, mode));
}

static uint64_t recompute_bytes(const ptn_phase *phase, ptn_mode mode) {
  return ptn_mode_recomputes(mode) ? phase->checkpoint_peak_bytes - phase->checkpoint_entry_bytes : 0;
}

static uint64_t highest(const ptn_plan_request *request, const ptn_mode *modes,
                        uint64_t (*of)(const ptn_phase *phase, ptn_mode mode)) {
  bool any = false;
  for (uint32_t i = 0; i < request->n_blocks; i++) any |= ptn_mode_swaps(modes[i]);
  uint64_t highest_bytes = 0;
  for (uint32_t i = 0; any && i < request->n_phases; i++) {
    const ptn_phase *phase = &request->phases[i];
    if (phase->block >= 0 && phase->backward) highest_bytes = ptn_max_u64(highest_bytes, of(phase, modes[phase->block]));
  }
  return highest_bytes;
}

uint64_t ptn_swap_rise_bytes(const ptn_plan_request *request, const ptn_mode *modes) {
  return highest(request, modes, rise_bytes);
}

uint64_t ptn_swap_headroom_bytes(const ptn_plan_request *request, const ptn_mode *modes, uint64_t above_static_bytes) {
  return ptn_min_u64(highest(request, modes, working_bytes), above_static_bytes / 2);
}

uint64_t ptn_swap_recompute_bytes(const ptn_plan_request *request, const ptn_mode *modes, uint64_t above_static_bytes) {
  return ptn_min_u64(highest(request, modes, recompute_bytes), above_static_bytes / 2);
}
