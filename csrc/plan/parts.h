/* The planner's own parts, between its files and its tests; others include plan/plan.h.
 *
 *   slots.c  which slot each chunk on disk is loaded into
 *   peak.c   what a candidate holds at its highest moment
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

/* For each forward phase the backward phase that consumes it (n_phases: none does); for all others n_phases. */
void ptn_peak_match(const ptn_plan_request *request, uint32_t *consumer_of_phase);

/* The peak of each phase, without parameters, for these modes. */
void ptn_peak_compose(const ptn_plan_request *request, const uint32_t *consumer_of_phase, const ptn_mode *modes,
                      int64_t *phase_bytes);

/* All that counts for the candidate except slots and ring. scratch: 2 * n_phases entries. */
uint64_t ptn_peak_without_slots(const ptn_plan_request *request, const int64_t *phase_bytes, uint32_t n_persist,
                                int64_t *scratch);

static inline bool ptn_mode_recomputes(ptn_mode mode) { return mode == PTN_CHECKPOINT || mode == PTN_CHECKPOINT_SWAP; }

#endif
