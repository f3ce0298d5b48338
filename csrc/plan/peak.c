/* Peak: what a candidate holds at its highest moment, composed from two runs.
 *
 * Problem: a step was seen twice, with every block kept and with every block checkpointed; a candidate mixes the two. Design:
 * each phase is taken from the run of its own block's mode (outside of blocks: from the keep run, from the checkpoint run when
 * no block keeps), and corrected for what the other blocks have retained so far: a block that has run forward and whose backward
 * has not begun holds retained(mode) = entry(next phase) - entry(its forward phase), read from the run of its mode. The
 * correction is the sum of retained(its mode) - retained(the mode of the run that the phase is taken from), so that it is
 * nothing where all blocks are kept, or all recomputed: then the figures are those of the run.
 *
 * The runs are two, the modes four. keep is the keep run; checkpoint, swap and checkpoint_swap are all counted as the checkpoint
 * run, which is an upper bound of what the swap modes cannot do without, but for what swap leaves in memory because it is small:
 * that is counted from the block's forward to its backward.
 *   - Between its forward and its backward a checkpointed block holds its input. A block of a swap mode has that on disk too, or
 *     is waited for until it is.
 *   - The forward of a swap block needs, beside what is being written, what the forward of a checkpointed block needs: its
 *     temporaries, and what is saved is free once it is on disk. Where the disk is slower than forward, forward waits for it
 *     rather than pass the peak.
 *   - The backward of a swap block needs at most all the activations of that block at once, which is what a checkpointed block
 *     holds when it has been recomputed. What a step holds less than its peak is room to read ahead.
 *   - A checkpoint_swap block is a checkpointed block, but for its input, which comes back when it is recomputed.
 *
 * Outside of blocks the two runs say nearly the same; where modes are mixed the higher counts.
 *
 * Beside the phases: parameters and state of persistent chunks lie in memory always. Their gradients stay from the phase that
 * completes them to the end of the step (from one step to the next where gradients outlive backward). Of the chunks on disk, one
 * that is complete may still be under way to its update while the gradients of the next are made: the largest completed so far
 * is allowed for; the runtime holds backward back before there would be two.
 *
 * A search composes thousands of candidates. So what each phase adds in which mode is read from the request once; and gradients
 * change only where a chunk is complete: between two such phases the highest phase is the one that counts, whatever is persistent.
 */
#include <stdlib.h>

#include "base/bytes.h"
#include "plan/parts.h"

typedef struct composed_phase {
  int32_t block; /* -1: outside of blocks */
  bool backward;
  int64_t peak_bytes[2]; /* of the keep run, of the checkpoint run */
  /* Of a forward phase, or of the one that a backward phase consumes; 0: it consumes none. */
  int64_t dropped_bytes; /* what the checkpoint run retains of it beyond the keep run, mostly less than nothing */
  int64_t small_bytes;   /* what swap leaves of it in memory, and the checkpoint run does not count */
} composed_phase;

typedef struct completion { /* a chunk's gradients */
  uint32_t chunk, stretch;
  int64_t grad_bytes;
} completion;

struct ptn_peak {
  const ptn_plan_request *request;
  composed_phase *phases;
  completion *completions; /* in the order of their phases */
  uint32_t n_completions;
  uint32_t *stretch_begins; /* the first phase of each, n_stretches + 1 entries; each but the first begins with a completion */
  uint32_t n_stretches;
  int64_t *always_bytes; /* of so many persistent chunks, with what is fixed */
};

static int64_t entry_of(const ptn_phase *phase, bool away) {
  return (int64_t)(away ? phase->checkpoint_entry_bytes : phase->keep_entry_bytes);
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
  if (i + 1 == request->n_phases) return 0;
  return entry_of(&request->phases[i + 1], away) - entry_of(&request->phases[i], away);
}

/* ---- create, destroy ---- */

static void read_phases(ptn_peak *peak, const uint32_t *consumer_of_phase) {
  const ptn_plan_request *request = peak->request;
  for (uint32_t i = 0; i < request->n_phases; i++) {
    const ptn_phase *phase = &request->phases[i];
    composed_phase *to = &peak->phases[i];
    to->block = phase->block;
    to->backward = phase->backward;
    to->peak_bytes[0] = (int64_t)phase->keep_peak_bytes;
    to->peak_bytes[1] = (int64_t)phase->checkpoint_peak_bytes;
    if (phase->block < 0 || phase->backward) continue;
    to->dropped_bytes = ptn_peak_retained_bytes(request, i, true) - ptn_peak_retained_bytes(request, i, false);
    to->small_bytes = (int64_t)phase->small_bytes;
    if (consumer_of_phase[i] == request->n_phases) continue;
    peak->phases[consumer_of_phase[i]].dropped_bytes = to->dropped_bytes;
    peak->phases[consumer_of_phase[i]].small_bytes = to->small_bytes;
  }
}

static int by_phase(const void *a, const void *b) {
  const completion *left = a, *right = b;
  if (left->stretch != right->stretch) return left->stretch < right->stretch ? -1 : 1;
  return (left->chunk > right->chunk) - (left->chunk < right->chunk);
}

static void read_completions(ptn_peak *peak) {
  const ptn_plan_request *request = peak->request;
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    const ptn_plan_chunk *chunk = &request->chunks[c];
    if (chunk->grad_bytes == 0) continue;
    peak->completions[peak->n_completions++] = (completion){c, chunk->complete_phase, (int64_t)chunk->grad_bytes};
  }
  qsort(peak->completions, peak->n_completions, sizeof *peak->completions, by_phase);
  peak->n_stretches = 1;
  for (uint32_t i = 0; i < peak->n_completions; i++) { /* from the number of its phase to that of its stretch */
    uint32_t phase = peak->completions[i].stretch;
    if (phase != peak->stretch_begins[peak->n_stretches - 1]) peak->stretch_begins[peak->n_stretches++] = phase;
    peak->completions[i].stretch = peak->n_stretches - 1;
  }
  peak->stretch_begins[peak->n_stretches] = request->n_phases;
}

static void read_chunks(ptn_peak *peak) {
  const ptn_plan_request *request = peak->request;
  peak->always_bytes[0] = (int64_t)request->fixed_bytes;
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    const ptn_plan_chunk *chunk = &request->chunks[c];
    uint64_t bytes = chunk->param_bytes + chunk->state_bytes + (request->grads_outlive_backward ? chunk->grad_bytes : 0);
    peak->always_bytes[c + 1] = peak->always_bytes[c] + (int64_t)bytes;
  }
}

void ptn_peak_destroy(ptn_peak *peak) {
  if (!peak) return;
  free(peak->phases);
  free(peak->completions);
  free(peak->stretch_begins);
  free(peak->always_bytes);
  free(peak);
}

ptn_status ptn_peak_create(ptn_peak **out, const ptn_plan_request *request, const uint32_t *consumer_of_phase) {
  size_t phases = request->n_phases, chunks = request->n_chunks;
  ptn_peak *peak = *out = calloc(1, sizeof *peak);
  if (!peak) return ptn_fail(PTN_MEMORY, "no memory to plan %zu phases", phases);
  peak->request = request;
  peak->phases = calloc(phases + 1, sizeof *peak->phases);
  peak->completions = calloc(chunks + 1, sizeof *peak->completions);
  peak->stretch_begins = calloc(ptn_min_u64(phases, chunks + 1) + 2, sizeof *peak->stretch_begins);
  peak->always_bytes = calloc(chunks + 1, sizeof *peak->always_bytes);
  if (!peak->phases || !peak->completions || !peak->stretch_begins || !peak->always_bytes) {
    ptn_peak_destroy(peak);
    *out = NULL;
    return ptn_fail(PTN_MEMORY, "no memory to plan %zu phases and %zu chunks", phases, chunks);
  }
  read_phases(peak, consumer_of_phase);
  read_completions(peak);
  read_chunks(peak);
  return PTN_OK;
}

/* ---- candidates ---- */

/* What a block in this mode retains of the phase beyond the keep run, and beyond the checkpoint run, is added so many times. */
static void correct(const composed_phase *phase, ptn_mode mode, int64_t times, int64_t *corrections) {
  int64_t left_bytes = mode == PTN_SWAP ? phase->small_bytes : 0;
  if (ptn_mode_away(mode)) {
    corrections[0] += times * (phase->dropped_bytes + left_bytes);
    corrections[1] += times * left_bytes;
  } else {
    corrections[1] -= times * phase->dropped_bytes;
  }
}

static int64_t higher(int64_t a, int64_t b) { return a > b ? a : b; }

void ptn_peak_compose(const ptn_peak *peak, const ptn_mode *modes, int64_t *phase_bytes) {
  uint32_t n_phases = peak->request->n_phases, n_blocks = peak->request->n_blocks;
  bool keeps = n_blocks == 0, mixed = false;
  for (uint32_t i = 0; i < n_blocks; i++) {
    keeps |= !ptn_mode_away(modes[i]);
    mixed |= ptn_mode_away(modes[i]) != ptn_mode_away(modes[0]);
  }
  int64_t corrections[2] = {0, 0}; /* to the keep run, to the checkpoint run, of what is retained now */
  for (uint32_t i = 0; i < n_phases; i++) {
    const composed_phase *phase = &peak->phases[i];
    if (phase->block < 0) {
      phase_bytes[i] = phase->peak_bytes[!keeps] + corrections[!keeps];
      if (mixed) phase_bytes[i] = higher(phase_bytes[i], phase->peak_bytes[1] + corrections[1]);
      continue;
    }
    ptn_mode mode = modes[phase->block];
    bool away = ptn_mode_away(mode);
    if (phase->backward) correct(phase, mode, -1, corrections);
    phase_bytes[i] = phase->peak_bytes[away] + corrections[away];
    if (phase->backward) continue;
    if (mode == PTN_SWAP) phase_bytes[i] += phase->small_bytes;
    correct(phase, mode, 1, corrections);
  }
}

void ptn_peak_stretches(const ptn_peak *peak, const int64_t *phase_bytes, int64_t *stretch_bytes) {
  for (uint32_t s = 0, i = 0; s < peak->n_stretches; s++) {
    int64_t highest = phase_bytes[i];
    for (i++; i < peak->stretch_begins[s + 1]; i++) highest = higher(highest, phase_bytes[i]);
    stretch_bytes[s] = highest;
  }
}

/* Gradients only become more from stretch to stretch, so that to look at one before all of its chunks are counted does no harm. */
uint64_t ptn_peak_without_slots(const ptn_peak *peak, const int64_t *stretch_bytes, uint32_t n_persist) {
  int64_t highest = stretch_bytes[0], complete = 0, pending = 0; /* of persistent chunks, of one on its way to its update */
  int64_t stay = peak->request->grads_outlive_backward ? 0 : -1; /* all bits */
  for (uint32_t i = 0; i < peak->n_completions; i++) {
    const completion *of = &peak->completions[i];
    bool persistent = of->chunk < n_persist;
    complete += persistent ? of->grad_bytes & stay : 0;
    pending = higher(pending, persistent ? 0 : of->grad_bytes);
    highest = higher(highest, stretch_bytes[of->stretch] + complete + pending);
  }
  return (uint64_t)(peak->always_bytes[n_persist] + highest);
}
