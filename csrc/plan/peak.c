/* Peak: what a candidate holds at its highest moment, composed from the runs of a dry run.
 *
 * Problem: a step was seen with every block kept, with every block checkpointed and with every block swapped; a candidate mixes
 * them. Design: each phase is taken from the run of its own block's mode (outside of blocks: the highest of the runs that blocks
 * are taken from), and corrected for what the other blocks have retained so far: a block that has run forward and whose backward
 * has not begun holds retained(mode) = entry(next phase) - entry(its forward phase), read from the run of its mode. The
 * correction is the sum of retained(its mode) - retained(the mode of the run that the phase is taken from), so that it is
 * nothing where all blocks are taken from one run: then the figures are those of the run.
 *
 * keep is the keep run. checkpoint, swap and checkpoint_swap are all counted as the checkpoint run, which is an upper bound of what
 * the swap modes cannot do without, but for what swap leaves in memory because it is small: that is counted from the block's
 * forward to its backward. What is above what they cannot do without lets writes and reads go on beside compute.
 *   - Between its forward and its backward a checkpointed block holds its input. A block of a swap mode has that on disk too, or
 *     is waited for until it is.
 *   - The forward of a swap block needs, beside what is being written, what the forward of a checkpointed block needs: its
 *     temporaries, and what is saved is free once it is on disk. Where the disk is slower than forward, forward waits for it
 *     rather than pass the peak.
 *   - The backward of a swap block needs at most all the activations of that block at once, which is what a checkpointed block
 *     holds when it has been recomputed. What a step holds less than its peak is room to read ahead.
 *   - A checkpoint_swap block is a checkpointed block, but for its input, which comes back when it is recomputed.
 *
 *   - The swap run is what swap cannot do without: forward waits for each write, nothing is read before it is asked for. A
 *     budget that holds nothing else is planned with it (rule.c); it takes longer, and less memory than recomputation can do with.
 *
 * Beside the phases: parameters and state of persistent chunks lie in memory always. Their gradients stay from the moment they are
 * complete to the end of the step (through all of it where several passes are added up in them): of a phase in which some are, what is
 * highest behind the first such moment is known apart, and what is before has only those beside it that were complete when it began.
 * Behind each later one it is known by how much less it is; completions are put in the order in which it falls. Where a run's own
 * order is another, what is live at a moment is counted with the last in our order of those complete then, and so with all of them.
 * Of the chunks on disk, one that is complete may still be under way to its update while the gradients of the next are made: the
 * largest completed so far is allowed for; the runtime lets more wait only within the peak. Who needs its memory waits until it has
 * gone, so that it is not among what cannot be done without; but where gradients of several passes are added up,
 * as much is held beside the one that arrives, before its chunk is complete: then what is behind the first completion in a phase stands
 * for all of them, with the gradients that come later.
 *
 * An update that runs in step() is behind all phases: nothing of them is left but what is said, and no gradient waits. It has one
 * parameter in work; where its chunk is persistent, value, gradient and state are counted already.
 *
 * A search composes thousands of candidates. So what each phase adds in which mode is read from the request once; and gradients
 * change only where a chunk is complete: from one completion to the next what is highest counts, whatever is persistent.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/parts.h"

typedef enum run { KEEP_RUN = 0, CHECKPOINT_RUN, SWAP_RUN, N_RUNS } run;

typedef struct composed_phase {
  int32_t block; /* -1: outside of blocks */
  bool backward;
  int64_t peak_bytes[N_RUNS];
  int64_t after_bytes[N_RUNS]; /* behind the first completion in it; without one it is the peak */
  /* Of a forward phase, or of the one that a backward phase consumes; 0: it consumes none. */
  int64_t retained_bytes[N_RUNS];
  int64_t small_bytes; /* what swap leaves of it in memory, and the checkpoint run does not count */
} composed_phase;

typedef struct completion { /* of a chunk's gradients */
  uint32_t chunk, phase;
  int64_t grad_bytes, less_bytes;
} completion;

struct ptn_peak {
  const ptn_plan_request *request;
  composed_phase *phases;
  completion *completions; /* in the order of their phases */
  uint32_t n_completions;
  int64_t *always_bytes; /* of so many persistent chunks, with what is fixed */
  int64_t *update_bytes; /* of so many persistent chunks, what an update in step() takes beside that */
};

static int64_t entry_of(const ptn_phase *phase, run of) {
  return (int64_t)(of == KEEP_RUN         ? phase->keep_entry_bytes
                   : of == CHECKPOINT_RUN ? phase->checkpoint_entry_bytes
                                          : phase->swap_entry_bytes);
}

static int64_t or_else(uint64_t known, uint64_t other) { return (int64_t)(known > 0 ? known : other); }

static int64_t retained_of(const ptn_plan_request *request, uint32_t i, run of) {
  if (i + 1 == request->n_phases) return 0;
  return entry_of(&request->phases[i + 1], of) - entry_of(&request->phases[i], of);
}

void ptn_peak_match(const ptn_plan_request *request, uint32_t *consumer_of_phase) {
  const ptn_phase *phases = request->phases;
  for (uint32_t i = 0; i < request->n_phases; i++) {
    consumer_of_phase[i] = request->n_phases;
    if (!phases[i].backward || phases[i].block < 0) continue;
    for (uint32_t j = i; j-- > 0;) { /* the last use in forward is the first in backward */
      if (phases[j].block == phases[i].block && !phases[j].backward && consumer_of_phase[j] == request->n_phases) {
        consumer_of_phase[j] = i;
        break;
      }
    }
  }
}

int64_t ptn_peak_retained_bytes(const ptn_plan_request *request, uint32_t i, bool away) {
  return retained_of(request, i, away ? CHECKPOINT_RUN : KEEP_RUN);
}

bool ptn_peak_adds_passes_up(const ptn_plan_request *request) { return request->n_passes > 1; }

bool ptn_peak_counts_pending(const ptn_plan_request *request, bool least) { return !least || ptn_peak_adds_passes_up(request); }

bool ptn_peak_knows_least(const ptn_plan_request *request) {
  for (uint32_t i = 0; i < request->n_phases; i++) {
    if (request->phases[i].swap_peak_bytes > 0) return true;
  }
  return false;
}

/* ---- create, destroy ---- */

static void read_phases(ptn_peak *peak, const uint32_t *consumer_of_phase) {
  const ptn_plan_request *request = peak->request;
  for (uint32_t i = 0; i < request->n_phases; i++) {
    const ptn_phase *phase = &request->phases[i];
    composed_phase *to = &peak->phases[i];
    to->block = phase->block;
    to->backward = phase->backward;
    to->peak_bytes[KEEP_RUN] = (int64_t)phase->keep_peak_bytes;
    to->peak_bytes[CHECKPOINT_RUN] = (int64_t)phase->checkpoint_peak_bytes;
    to->peak_bytes[SWAP_RUN] = (int64_t)phase->swap_peak_bytes;
    to->after_bytes[KEEP_RUN] = or_else(phase->keep_after_bytes, phase->keep_peak_bytes);
    to->after_bytes[CHECKPOINT_RUN] = or_else(phase->checkpoint_after_bytes, phase->checkpoint_peak_bytes);
    to->after_bytes[SWAP_RUN] = or_else(phase->swap_after_bytes, phase->swap_peak_bytes);
    if (phase->block < 0 || phase->backward) continue;
    for (int of = 0; of < N_RUNS; of++) to->retained_bytes[of] = retained_of(request, i, (run)of);
    to->small_bytes = (int64_t)phase->small_bytes;
    if (consumer_of_phase[i] == request->n_phases) continue;
    memcpy(peak->phases[consumer_of_phase[i]].retained_bytes, to->retained_bytes, sizeof to->retained_bytes);
    peak->phases[consumer_of_phase[i]].small_bytes = to->small_bytes;
  }
}

static int by_phase(const void *a, const void *b) {
  const completion *left = a, *right = b;
  if (left->phase != right->phase) return left->phase < right->phase ? -1 : 1;
  if (left->less_bytes != right->less_bytes) return left->less_bytes < right->less_bytes ? -1 : 1;
  return (left->chunk > right->chunk) - (left->chunk < right->chunk);
}

static void read_completions(ptn_peak *peak) {
  const ptn_plan_request *request = peak->request;
  bool adds_up = ptn_peak_adds_passes_up(request);
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    const ptn_plan_chunk *chunk = &request->chunks[c];
    if (chunk->grad_bytes == 0) continue;
    int64_t less_bytes = adds_up ? 0 : (int64_t)chunk->less_bytes;
    peak->completions[peak->n_completions++] = (completion){c, chunk->complete_phase, (int64_t)chunk->grad_bytes, less_bytes};
  }
  qsort(peak->completions, peak->n_completions, sizeof *peak->completions, by_phase);
}

static void read_chunks(ptn_peak *peak) {
  const ptn_plan_request *request = peak->request;
  peak->always_bytes[0] = (int64_t)request->fixed_bytes;
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    const ptn_plan_chunk *chunk = &request->chunks[c];
    uint64_t bytes = chunk->param_bytes + chunk->state_bytes + (ptn_peak_adds_passes_up(request) ? chunk->grad_bytes : 0);
    peak->always_bytes[c + 1] = peak->always_bytes[c] + (int64_t)bytes;
  }
}

static void read_updates(ptn_peak *peak) {
  const ptn_plan_request *request = peak->request;
  int64_t *bytes = peak->update_bytes, here = 0, grads = 0;
  for (uint32_t c = request->n_chunks; c-- > 0;) {
    bytes[c] = ptn_max_i64(bytes[c + 1], (int64_t)request->chunks[c].update_away_bytes);
  }
  for (uint32_t p = 0;; p++) {
    int64_t work = ptn_max_i64(here, bytes[p]) + (int64_t)request->update_bytes;
    bytes[p] = work > 0 ? work + grads : 0; /* 0: updates run elsewhere */
    if (p == request->n_chunks) return;
    here = ptn_max_i64(here, (int64_t)request->chunks[p].update_here_bytes);
    grads += ptn_peak_adds_passes_up(request) ? 0 : (int64_t)request->chunks[p].grad_bytes;
  }
}

void ptn_peak_destroy(ptn_peak *peak) {
  if (!peak) return;
  free(peak->phases);
  free(peak->completions);
  free(peak->always_bytes);
  free(peak->update_bytes);
  free(peak);
}

ptn_status ptn_peak_create(ptn_peak **out, const ptn_plan_request *request, const uint32_t *consumer_of_phase) {
  size_t phases = request->n_phases, chunks = request->n_chunks;
  ptn_peak *peak = *out = calloc(1, sizeof *peak);
  if (!peak) return ptn_fail(PTN_MEMORY, "no memory to plan %zu phases", phases);
  peak->request = request;
  peak->phases = calloc(phases + 1, sizeof *peak->phases);
  peak->completions = calloc(chunks + 1, sizeof *peak->completions);
  peak->always_bytes = calloc(chunks + 1, sizeof *peak->always_bytes);
  peak->update_bytes = calloc(chunks + 1, sizeof *peak->update_bytes);
  if (!peak->phases || !peak->completions || !peak->always_bytes || !peak->update_bytes) {
    ptn_peak_destroy(peak);
    *out = NULL;
    return ptn_fail(PTN_MEMORY, "no memory to plan %zu phases and %zu chunks", phases, chunks);
  }
  read_phases(peak, consumer_of_phase);
  read_completions(peak);
  read_chunks(peak);
  read_updates(peak);
  return PTN_OK;
}

/* ---- candidates ---- */

static run run_of(ptn_mode mode, bool least) {
  if (mode == PTN_KEEP) return KEEP_RUN;
  return least && mode == PTN_SWAP ? SWAP_RUN : CHECKPOINT_RUN;
}

/* What a block in this mode leaves in memory that its run does not count. */
static int64_t left_bytes(const composed_phase *phase, ptn_mode mode, run own) {
  return mode == PTN_SWAP && own == CHECKPOINT_RUN ? phase->small_bytes : 0;
}

/* What a block in this mode retains of the phase beyond each run is added so many times. */
static void correct(const composed_phase *phase, ptn_mode mode, run own, int64_t times, int64_t *corrections) {
  int64_t held_bytes = phase->retained_bytes[own] + left_bytes(phase, mode, own);
  for (int other = 0; other < N_RUNS; other++) corrections[other] += times * (held_bytes - phase->retained_bytes[other]);
}

void ptn_peak_compose(const ptn_peak *peak, const ptn_mode *modes, bool least, ptn_live *live) {
  uint32_t n_phases = peak->request->n_phases, n_blocks = peak->request->n_blocks;
  bool used[N_RUNS] = {n_blocks == 0};
  for (uint32_t i = 0; i < n_blocks; i++) used[run_of(modes[i], least)] = true;
  int64_t corrections[N_RUNS] = {0}; /* to each run, of what is retained now */
  for (uint32_t i = 0; i < n_phases; i++) {
    const composed_phase *phase = &peak->phases[i];
    if (phase->block < 0) {
      live[i] = (ptn_live){INT64_MIN, INT64_MIN};
      for (int of = 0; of < N_RUNS; of++) {
        if (!used[of]) continue;
        live[i].peak_bytes = ptn_max_i64(live[i].peak_bytes, phase->peak_bytes[of] + corrections[of]);
        live[i].after_bytes = ptn_max_i64(live[i].after_bytes, phase->after_bytes[of] + corrections[of]);
      }
      continue;
    }
    ptn_mode mode = modes[phase->block];
    run own = run_of(mode, least);
    if (phase->backward) correct(phase, mode, own, -1, corrections);
    int64_t more_bytes = corrections[own] + (phase->backward ? 0 : left_bytes(phase, mode, own));
    live[i] = (ptn_live){phase->peak_bytes[own] + more_bytes, phase->after_bytes[own] + more_bytes};
    if (!phase->backward) correct(phase, mode, own, 1, corrections);
  }
}

/* The phase in which gradients are completed has a part of two stretches: what is highest in it before they are is beside those of
 * the stretch that ends. Where that is not known apart its peak is counted with both. */
void ptn_peak_stretches(const ptn_peak *peak, const ptn_live *live, int64_t *stretch_bytes) {
  uint32_t n = peak->n_completions, phase = 0; /* the first whose peak was not looked at */
  for (uint32_t s = 0; s <= n; s++) {
    const completion *begin = s > 0 ? &peak->completions[s - 1] : NULL;
    uint32_t end = s < n ? peak->completions[s].phase + 1 : peak->request->n_phases;
    int64_t highest = begin ? live[begin->phase].after_bytes - begin->less_bytes : INT64_MIN;
    for (; phase < end; phase++) highest = ptn_max_i64(highest, live[phase].peak_bytes);
    stretch_bytes[s] = highest;
  }
}

uint64_t ptn_peak_computed_bytes(const ptn_peak *peak, const int64_t *stretch_bytes, bool least, uint32_t n_persist) {
  int64_t highest = stretch_bytes[0], complete = 0, pending = 0; /* of persistent chunks, of one on its way to its update */
  int64_t stay = ptn_peak_adds_passes_up(peak->request) ? 0 : -1; /* all bits */
  bool counts_pending = ptn_peak_counts_pending(peak->request, least);
  for (uint32_t i = 0; i < peak->n_completions; i++) {
    const completion *of = &peak->completions[i];
    bool persistent = of->chunk < n_persist;
    complete += persistent ? of->grad_bytes & stay : 0;
    pending = ptn_max_i64(pending, counts_pending && !persistent ? of->grad_bytes : 0);
    highest = ptn_max_i64(highest, stretch_bytes[i + 1] + complete + pending);
  }
  return (uint64_t)(peak->always_bytes[n_persist] + highest);
}

uint64_t ptn_peak_without_slots(const ptn_peak *peak, const int64_t *stretch_bytes, bool least, uint32_t n_persist) {
  uint64_t update_bytes = (uint64_t)(peak->always_bytes[n_persist] + peak->update_bytes[n_persist]);
  return ptn_max_u64(ptn_peak_computed_bytes(peak, stretch_bytes, least, n_persist), update_bytes);
}
