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
 */
#include "base/bytes.h"
#include "plan/parts.h"

static int64_t entry_of(const ptn_phase *phase, bool away) {
  return (int64_t)(away ? phase->checkpoint_entry_bytes : phase->keep_entry_bytes);
}

static int64_t peak_of(const ptn_phase *phase, bool away) {
  return (int64_t)(away ? phase->checkpoint_peak_bytes : phase->keep_peak_bytes);
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

/* What a forward phase has saved that its mode leaves in memory, and the checkpoint run does not count. */
static int64_t left_bytes(const ptn_phase *phase, const ptn_mode *modes) {
  bool left = phase->block >= 0 && !phase->backward && modes[phase->block] == PTN_SWAP;
  return left ? (int64_t)phase->small_bytes : 0;
}

/* How much more phase i retains in its block's mode than in the keep run and in the checkpoint run, is added so many times. */
static void correct(const ptn_plan_request *request, uint32_t i, const ptn_mode *modes, int64_t times, int64_t *corrections) {
  const ptn_phase *phase = &request->phases[i];
  if (phase->block < 0 || phase->backward) return;
  int64_t kept = ptn_peak_retained_bytes(request, i, false), dropped = ptn_peak_retained_bytes(request, i, true);
  int64_t own = (ptn_mode_away(modes[phase->block]) ? dropped : kept) + left_bytes(phase, modes);
  corrections[0] += times * (own - kept);
  corrections[1] += times * (own - dropped);
}

static int64_t higher(int64_t a, int64_t b) { return a > b ? a : b; }

void ptn_peak_compose(const ptn_plan_request *request, const uint32_t *consumer_of_phase, const ptn_mode *modes,
                      int64_t *phase_bytes) {
  bool keeps = request->n_blocks == 0, mixed = false;
  for (uint32_t i = 0; i < request->n_blocks; i++) {
    keeps |= !ptn_mode_away(modes[i]);
    mixed |= ptn_mode_away(modes[i]) != ptn_mode_away(modes[0]);
  }
  uint32_t n_phases = request->n_phases;
  int64_t corrections[2] = {0, 0}; /* to the keep run, to the checkpoint run, of what is retained now */
  for (uint32_t i = 0; i < n_phases; i++) phase_bytes[i] = 0;
  for (uint32_t i = 0; i < n_phases; i++) {
    const ptn_phase *phase = &request->phases[i];
    bool away = phase->block < 0 ? !keeps : ptn_mode_away(modes[phase->block]);
    /* phase_bytes[i] != 0 here: the phase consumes a forward phase, whose number was left in it. */
    if (phase_bytes[i] != 0) {
      uint32_t consumed = (uint32_t)(phase_bytes[i] - 1);
      correct(request, consumed, modes, -1, corrections);
    }
    phase_bytes[i] = peak_of(phase, away) + corrections[away] + left_bytes(phase, modes);
    if (phase->block < 0 && mixed) phase_bytes[i] = higher(phase_bytes[i], peak_of(phase, true) + corrections[1]);
    correct(request, i, modes, 1, corrections);
    if (consumer_of_phase[i] < n_phases) phase_bytes[consumer_of_phase[i]] = (int64_t)i + 1;
  }
}

uint64_t ptn_peak_without_slots(const ptn_plan_request *request, const int64_t *phase_bytes, uint32_t n_persist,
                                int64_t *scratch) {
  uint32_t n_phases = request->n_phases;
  int64_t *complete = scratch, *pending = scratch + n_phases; /* of the phase in which they come */
  int64_t always = (int64_t)request->fixed_bytes;
  for (uint32_t i = 0; i < n_phases; i++) complete[i] = pending[i] = 0;
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    const ptn_plan_chunk *chunk = &request->chunks[c];
    int64_t grad = (int64_t)chunk->grad_bytes;
    if (c < n_persist) always += (int64_t)(chunk->param_bytes + chunk->state_bytes);
    if (grad == 0) continue;
    if (c >= n_persist) {
      if (pending[chunk->complete_phase] < grad) pending[chunk->complete_phase] = grad;
    } else if (request->grads_outlive_backward) {
      always += grad;
    } else {
      complete[chunk->complete_phase] += grad;
    }
  }
  int64_t highest = 0, complete_now = 0, pending_now = 0;
  for (uint32_t i = 0; i < n_phases; i++) {
    complete_now += complete[i];
    if (pending_now < pending[i]) pending_now = pending[i];
    int64_t now = phase_bytes[i] + complete_now + pending_now;
    if (highest < now) highest = now;
  }
  return (uint64_t)(always + highest);
}
