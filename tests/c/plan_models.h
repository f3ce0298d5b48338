/* Models, steps and machines for the tests of the planner: drawn at random, or alike throughout. */
#ifndef PTN_TESTS_PLAN_MODELS_H
#define PTN_TESTS_PLAN_MODELS_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "check.h"
#include "plan/plan.h"

#define MODEL_MOST 1100 /* blocks, and chunks */
#define MODEL_MOST_PHASES (2 * MODEL_MOST + 3)
#define MODEL_MOST_ACCESSES (6 * MODEL_MOST)

typedef struct model {
  ptn_plan_request request;
  ptn_profile profile;
  ptn_plan_chunk chunks[MODEL_MOST];
  ptn_phase phases[MODEL_MOST_PHASES];
  ptn_phase_times times[MODEL_MOST_PHASES];
  uint32_t accesses[MODEL_MOST_ACCESSES], access_phases[MODEL_MOST_ACCESSES];
} model;

typedef struct model_shape {
  uint32_t n_blocks, n_chunks;
  bool alike;       /* blocks, and chunks */
  bool swaps;       /* the disk is fast enough for activations, now and then */
  bool tiers;       /* hosts, ranks, passes, gradients that outlive backward */
  bool least;       /* what blocks that swap cannot do without is known */
  bool detailed;    /* so are the accesses that are a backward's own, and what is live behind completions */
} model_shape;

static inline uint64_t model_upto(uint64_t *random, uint64_t most) { return check_random(random) % (most + 1); }

/* Between low and high, of equal chance for each factor. */
static inline double model_between(uint64_t *random, double low, double high) {
  return low * exp(log(high / low) * (double)(check_random(random) >> 11) * 0x1p-53);
}

static inline void model_access(model *out, uint32_t chunk, uint32_t phase) {
  ptn_plan_request *request = &out->request;
  CHECK(request->n_accesses < MODEL_MOST_ACCESSES);
  out->accesses[request->n_accesses] = chunk;
  out->access_phases[request->n_accesses++] = phase;
}

/* Chunks of each block, in execution order: before the blocks the first one, in the head the last one. */
static inline void model_block_chunks(const model *of, uint32_t block, uint32_t *first, uint32_t *end) {
  uint32_t n_blocks = of->request.n_blocks, n_chunks = of->request.n_chunks;
  uint32_t inner = n_chunks > 2 ? n_chunks - 2 : 0, begin = n_chunks > 2 ? 1 : 0;
  *first = begin + (uint32_t)((uint64_t)inner * block / n_blocks);
  *end = begin + (uint32_t)((uint64_t)inner * (block + 1) / n_blocks);
  if (*end == *first && inner > 0 && *first < begin + inner) ++*end; /* several blocks in one chunk */
}

static inline void model_accesses(model *out) {
  uint32_t n_blocks = out->request.n_blocks, n_chunks = out->request.n_chunks, first, end;
  if (n_chunks == 0) return;
  model_access(out, 0, 0);
  for (uint32_t b = 0; b < n_blocks; b++) {
    model_block_chunks(out, b, &first, &end);
    for (uint32_t c = first; c < end; c++) model_access(out, c, 1 + b);
  }
  model_access(out, n_chunks - 1, n_blocks + 1);
  for (uint32_t b = n_blocks; b-- > 0;) {
    model_block_chunks(out, b, &first, &end);
    for (uint32_t c = first; c < end; c++) model_access(out, c, 2 * n_blocks + 1 - b);
    for (uint32_t c = end; c-- > first;) model_access(out, c, 2 * n_blocks + 1 - b);
  }
  model_access(out, 0, 2 * n_blocks + 2);
}

/* Sizes such that a block holds some hundred times what it saves checkpointed. */
static inline void model_phases(model *out, uint64_t *random, bool alike) {
  uint32_t n_blocks = out->request.n_blocks, n = 0;
  ptn_phase *phases = out->phases;
  uint64_t kept = model_upto(random, 1 << 16), dropped = kept, keep[MODEL_MOST], drop[MODEL_MOST], work = 0;
  phases[n++] = (ptn_phase){.block = -1, .keep_peak_bytes = kept + 99, .checkpoint_peak_bytes = kept + 99};
  for (uint32_t b = 0; b < n_blocks; b++) {
    bool first = !alike || b == 0;
    drop[b] = first ? model_upto(random, 1 << 16) : drop[0];
    keep[b] = first ? drop[b] + (uint64_t)model_between(random, 1 << 16, 1 << 22) : keep[0];
    work = first ? model_upto(random, 1 << 18) : work;
    phases[n++] = (ptn_phase){.block = (int32_t)b,
                              .keep_entry_bytes = kept,
                              .keep_peak_bytes = kept + keep[b] + work,
                              .checkpoint_entry_bytes = dropped,
                              .checkpoint_peak_bytes = dropped + keep[b] + work,
                              .small_bytes = keep[b] % 3 == 0 ? (keep[b] - drop[b]) / 64 : 0};
    kept += keep[b];
    dropped += drop[b];
  }
  uint64_t head = model_upto(random, 1 << 21);
  phases[n++] = (ptn_phase){.block = -1,
                            .keep_entry_bytes = kept,
                            .keep_peak_bytes = kept + head,
                            .checkpoint_entry_bytes = dropped,
                            .checkpoint_peak_bytes = dropped + head};
  for (uint32_t b = n_blocks; b-- > 0;) {
    if (!alike) work = model_upto(random, 1 << 18);
    phases[n++] = (ptn_phase){.block = (int32_t)b,
                              .backward = true,
                              .keep_entry_bytes = kept,
                              .keep_peak_bytes = kept + work,
                              .checkpoint_entry_bytes = dropped,
                              .checkpoint_peak_bytes = dropped + keep[b] - drop[b] + work};
    kept -= keep[b];
    dropped -= drop[b];
  }
  uint64_t tail = model_upto(random, 1 << 18);
  phases[n++] = (ptn_phase){.block = -1,
                            .backward = true,
                            .keep_entry_bytes = kept,
                            .keep_peak_bytes = kept + tail,
                            .checkpoint_entry_bytes = dropped,
                            .checkpoint_peak_bytes = dropped + tail};
  out->request.n_phases = n;
}

/* A swap run: blocks leave in memory what is small, an operation of backward uses from a tenth to half of what its block saved. */
static inline void model_swap_run(model *out, uint64_t *random) {
  uint32_t n_phases = out->request.n_phases, n_blocks = out->request.n_blocks;
  uint64_t held = out->phases[0].checkpoint_entry_bytes;
  for (uint32_t p = 0; p < n_phases; p++) {
    ptn_phase *phase = &out->phases[p];
    uint64_t rise = phase->checkpoint_peak_bytes - phase->checkpoint_entry_bytes;
    const ptn_phase *forward = phase->block >= 0 ? &out->phases[1 + phase->block] : phase;
    if (phase->block >= 0 && phase->backward) rise = (uint64_t)((double)rise * model_between(random, 0.1, 0.5));
    if (p == n_blocks + 1) rise = phase->keep_peak_bytes - phase->keep_entry_bytes;
    phase->swap_entry_bytes = held;
    phase->swap_peak_bytes = held + rise + 1;
    if (phase->block < 0) continue;
    if (phase->backward) held -= forward->small_bytes;
    else held += phase->small_bytes;
  }
}

static inline void model_chunks(model *out, uint64_t *random, bool alike) {
  uint32_t n_blocks = out->request.n_blocks, n_chunks = out->request.n_chunks, first, end;
  for (uint32_t c = 0; c < n_chunks; c++) {
    bool edge = c == 0 || c + 1 == n_chunks;
    uint64_t bytes = PTN_PAGE_BYTES * (uint64_t)(edge ? model_between(random, 50, 2000) : model_between(random, 50, 500));
    if (alike && !edge && c > 1) bytes = out->chunks[1].param_bytes;
    bool frozen = !alike && model_upto(random, 9) == 0;
    out->chunks[c] = (ptn_plan_chunk){.param_bytes = bytes,
                                      .grad_bytes = frozen ? 0 : bytes - model_upto(random, 4000),
                                      .state_bytes = frozen ? 0 : 2 * bytes,
                                      .complete_phase = c == 0 ? 2 * n_blocks + 2 : n_blocks + 1};
  }
  for (uint32_t b = n_blocks; b-- > 0;) {
    model_block_chunks(out, b, &first, &end);
    for (uint32_t c = first; c < end && c > 0; c++) {
      if (c + 1 < n_chunks) out->chunks[c].complete_phase = 2 * n_blocks + 1 - b;
    }
  }
}

static inline void model_lane(ptn_lane_speed *lane, double bytes_per_s, double drag, uint64_t *random) {
  *lane = (ptn_lane_speed){.bytes_per_s = bytes_per_s,
                           .idle_bytes_per_s = bytes_per_s * model_between(random, 1, 1.5),
                           .drag_ns_per_byte = drag * 1e9 / bytes_per_s};
}

/* Compute that takes from a tenth to ten times as long as the disk needs for the chunks. */
static inline void model_machine(model *out, uint64_t *random, const model_shape *shape) {
  ptn_profile *profile = &out->profile;
  ptn_plan_request *request = &out->request;
  double bytes = 1, disk = 2e9, each_ns = 0;
  for (uint32_t c = 0; c < request->n_chunks; c++) bytes += 8.0 * (double)out->chunks[c].param_bytes;
  double step_ns = bytes / disk * 1e9 * model_between(random, 0.1, 10);
  for (uint32_t p = 0; p < request->n_phases; p++) {
    const ptn_phase *phase = &request->phases[p];
    bool again = shape->alike && p > 1 && phase->block >= 0 && p != request->n_blocks + 2;
    double ns = again ? each_ns : step_ns / request->n_phases * model_between(random, 0.3, 3);
    if (phase->block >= 0 && !phase->backward) each_ns = ns;
    bool backward = phase->backward && phase->block >= 0;
    int64_t forward_ns = backward ? out->times[2 * request->n_blocks + 2 - p].compute_ns : 0;
    out->times[p] = (ptn_phase_times){.compute_ns = backward ? 2 * forward_ns : (int64_t)ns, .recompute_ns = forward_ns};
  }
  double spread = shape->swaps ? 20 : 2;
  model_lane(&profile->lanes[PTN_DISK_READ], disk * model_between(random, 0.7, spread), 0.05, random);
  model_lane(&profile->lanes[PTN_DISK_WRITE], disk * model_between(random, 0.7, spread), 0.05, random);
  model_lane(&profile->lanes[PTN_UPDATE], disk * model_between(random, 2, 20), model_upto(random, 1) ? 0.5 : 0, random);
  profile->disk_overlap = model_between(random, 1, 2);
  profile->link_overlap = model_between(random, 1, 2);
  double read_ns = profile->lanes[PTN_DISK_READ].drag_ns_per_byte, write_ns = profile->lanes[PTN_DISK_WRITE].drag_ns_per_byte;
  profile->stash_drag_ns_per_byte = shape->swaps ? -0.9 * (read_ns < write_ns ? read_ns : write_ns) : 0.05;
  profile->step_update_bytes_per_s = disk * model_between(random, 10, 100);
  profile->step_fixed_ns = (int64_t)(step_ns / 100);
  profile->access_ns = (int64_t)(step_ns / 20000);
  profile->checkpoint_ns = profile->swap_ns = (int64_t)(step_ns / 5000);
  profile->request_ns = model_upto(random, 1) ? step_ns / 10000 : 0;
  profile->n_phases = request->n_phases;
  profile->phases = out->times;
  request->profile = profile;
  if (!shape->tiers) return;
  request->n_passes = (uint32_t)model_upto(random, 3);
  request->grads_outlive_backward = model_upto(random, 2) == 0;
  if (model_upto(random, 1) == 0) return;
  request->n_ranks = (uint32_t)model_upto(random, 3);
  profile->stash_drag_ns_per_byte = 0.05; /* what is negative is of the disk's lanes */
  model_lane(&profile->lanes[PTN_UPLOAD], disk * model_between(random, 2, 20), 0, random);
  model_lane(&profile->lanes[PTN_OFFLOAD], disk * model_between(random, 2, 20), 0, random);
  model_lane(&profile->lanes[PTN_GATHER], disk * model_between(random, 5, 50), 0.1, random);
  request->host_budget_bytes = model_upto(random, 3) == 0 ? 0 : (uint64_t)(bytes * model_between(random, 0.02, 2));
  if (model_upto(random, 1) == 0) request->ring_host_bytes = request->host_budget_bytes;
  if (model_upto(random, 2) == 0) profile->lanes[PTN_DISK_READ] = profile->lanes[PTN_DISK_WRITE] = (ptn_lane_speed){0};
}

/* Of a backward the second half of its accesses is its own. Behind a completion less is live, by a part of the rise, and behind
 * later ones in a phase still less. */
static inline void model_details(model *out, uint64_t *random) {
  uint32_t n_accesses[MODEL_MOST_PHASES] = {0};
  for (uint32_t i = 0; i < out->request.n_accesses; i++) n_accesses[out->access_phases[i]]++;
  for (uint32_t p = 0; p < out->request.n_phases; p++) {
    ptn_phase *phase = &out->phases[p];
    if (phase->block >= 0 && phase->backward) phase->own_accesses = n_accesses[p] / 2;
    double part = model_between(random, 0.1, 1);
    phase->keep_after_bytes =
        phase->keep_entry_bytes + (uint64_t)(part * (double)(phase->keep_peak_bytes - phase->keep_entry_bytes));
    phase->checkpoint_after_bytes =
        phase->checkpoint_entry_bytes + (uint64_t)(part * (double)(phase->checkpoint_peak_bytes - phase->checkpoint_entry_bytes));
    if (phase->swap_peak_bytes == 0) continue;
    phase->swap_after_bytes =
        phase->swap_entry_bytes + (uint64_t)(part * (double)(phase->swap_peak_bytes - phase->swap_entry_bytes));
  }
  for (uint32_t c = 0; c < out->request.n_chunks; c++) {
    const ptn_phase *phase = &out->phases[out->chunks[c].complete_phase];
    uint64_t least = ptn_min_u64(phase->keep_after_bytes, phase->checkpoint_after_bytes);
    if (phase->swap_peak_bytes > 0) least = ptn_min_u64(least, phase->swap_after_bytes);
    out->chunks[c].less_bytes = (uint64_t)(model_between(random, 0.01, 0.5) * (double)least);
  }
}

static inline void model_draw(model *out, uint64_t *random, const model_shape *shape) {
  memset(out, 0, sizeof *out);
  ptn_plan_request *request = &out->request;
  *request = (ptn_plan_request){.n_blocks = shape->n_blocks,
                                .n_chunks = shape->n_chunks,
                                .chunks = out->chunks,
                                .phases = out->phases,
                                .accesses = out->accesses,
                                .access_phases = out->access_phases,
                                .n_together = 1 + (uint32_t)model_upto(random, 1),
                                .n_arrays = 4,
                                .n_persist = -1,
                                .fixed_bytes = model_upto(random, 1 << 16)};
  model_phases(out, random, shape->alike);
  if (shape->least) model_swap_run(out, random);
  model_chunks(out, random, shape->alike);
  model_accesses(out);
  if (shape->detailed) model_details(out, random);
  model_machine(out, random, shape);
}

typedef struct answer {
  ptn_plan plan;
  int32_t slot_of_chunk[MODEL_MOST];
  uint64_t slot_bytes[MODEL_MOST];
  ptn_mode modes[MODEL_MOST];
  ptn_status status;
  uint32_t n_keep, n_swap;
} answer;

static inline void model_ask(const ptn_plan_request *request, uint64_t budget_bytes, answer *out) {
  ptn_plan_request asked = *request;
  asked.budget_bytes = budget_bytes;
  out->plan = (ptn_plan){.slot_of_chunk = out->slot_of_chunk, .slot_bytes = out->slot_bytes, .modes = out->modes};
  out->status = ptn_plan_make(&asked, &out->plan);
  out->n_keep = out->n_swap = 0;
  for (uint32_t i = 0; out->status == PTN_OK && i < request->n_blocks; i++) {
    out->n_keep += out->modes[i] == PTN_KEEP;
    out->n_swap += out->modes[i] == PTN_SWAP;
  }
}

#endif
