/* The planner's own parts, between its files and its tests; others include plan/plan.h.
 *
 *   slots.c  which slot each chunk on disk is loaded into
 *   peak.c   what a candidate holds at its highest moment
 *   swap.c   what a plan writes to disk of activations, and the memory it works in while they are read ahead
 *   rule.c   which candidate is taken
 */
#ifndef PTN_PLAN_PARTS_H
#define PTN_PLAN_PARTS_H

#include "plan/plan.h"

/* Limits that keep every sum in 63 bits: no figure and no total of parameters above the one, no count above the other. */
#define PTN_PLAN_MOST_BYTES ((uint64_t)1 << 45)
#define PTN_PLAN_MOST_COUNT ((uint32_t)1 << 16)

/* ---- slots.c ---- */

/* Scratch for ptn_slots, made once for a request. */
typedef struct ptn_slots_scratch ptn_slots_scratch;
ptn_status ptn_slots_scratch_create(ptn_slots_scratch **out, const ptn_plan_request *request, uint32_t most_window);
void ptn_slots_scratch_destroy(ptn_slots_scratch *scratch);

/* Slots for the chunks from n_persist on: chunks within any `window` distinct chunks in the cyclic order of the accesses never
 * share one. window is 1..most_window. slot_of_chunk and slot_bytes have n_chunks entries, of the latter *n_slots are set. */
void ptn_slots(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t n_persist, uint32_t window,
               int32_t *slot_of_chunk, uint64_t *slot_bytes, uint32_t *n_slots);

/* ---- peak.c ---- */

/* What the block saves is away from memory between its forward and its backward, dropped or on disk: the checkpoint run stands
 * for it, else the keep run. */
static inline bool ptn_mode_away(ptn_mode mode) { return mode != PTN_KEEP; }

/* For each forward phase the backward phase that consumes it (n_phases: none does); for all others n_phases. */
void ptn_peak_match(const ptn_plan_request *request, uint32_t *consumer_of_phase);

/* What is held more after phase i than before it, in the checkpoint run (away) or the keep run; 0 for the last phase. */
int64_t ptn_peak_retained_bytes(const ptn_plan_request *request, uint32_t i, bool away);

/* The peak of each phase, without parameters, for these modes. */
void ptn_peak_compose(const ptn_plan_request *request, const uint32_t *consumer_of_phase, const ptn_mode *modes,
                      int64_t *phase_bytes);

/* All that counts for the candidate except slots and ring. scratch: 2 * n_phases entries. */
uint64_t ptn_peak_without_slots(const ptn_plan_request *request, const int64_t *phase_bytes, uint32_t n_persist,
                                int64_t *scratch);

/* ---- swap.c ---- */

/* What the blocks of swap modes write in one step. */
uint64_t ptn_swap_stash_bytes(const ptn_plan_request *request, const uint32_t *consumer_of_phase, const ptn_mode *modes);

/* How far the backward of a block rises above where it began; above_static_bytes: of the peak. */
uint64_t ptn_swap_rise_bytes(const ptn_plan_request *request, const ptn_mode *modes);
uint64_t ptn_swap_headroom_bytes(const ptn_plan_request *request, const ptn_mode *modes, uint64_t above_static_bytes);

#endif
