/* The planner's own parts, between its files and its tests; others include plan/plan.h.
 *
 *   layout.c    which parameters share a chunk
 *   request.c   whether what was asked can be planned at all
 *   slots.c     which slot each chunk that comes and goes is loaded into
 *   peak.c      what a candidate holds at its highest moment
 *   swap.c      what a plan writes of activations, and the memory it works in while they are read ahead
 *   tiers.c     what is at home on the host and what on disk
 *   fit.c       what a budget holds beside the modes of a candidate: persistent chunks, slots
 *   room.c      what it leaves for that beside the ring and holes, and the ring itself
 *   rule.c      which candidate is taken where nothing was timed
 *   simulate.c  what a candidate takes in time, event by event; simulate_course.c: what it does in which order,
 *               simulate_lanes.c: how jobs share lanes, simulate_jobs.c, simulate_moves.c, simulate_stash.c: what waits for
 *               its turn
 *   bounds.c    the least it can take, in closed form; sums.c: of many at once
 *   search.c    which candidate is taken where a profile has times; families.c: among which, trials.c: what each takes,
 *               climb.c: what is near one
 *   make.c      all of it: from a request to a plan
 */
#ifndef PTN_PLAN_PARTS_H
#define PTN_PLAN_PARTS_H

#include "plan/plan.h"

/* Limits that keep every sum in 63 bits: no figure and no total of parameters above the one, no count above the other. */
#define PTN_PLAN_MOST_BYTES ((uint64_t)1 << 45)
#define PTN_PLAN_MOST_COUNT ((uint32_t)1 << 16)
#define PTN_PLAN_ALIKE 1.005 /* forecasts closer than this are alike */

/* ---- slots.c ---- */

/* Scratch for ptn_slots, made once for a request. */
typedef struct ptn_slots_scratch ptn_slots_scratch;
ptn_status ptn_slots_scratch_create(ptn_slots_scratch **out, const ptn_plan_request *request);
void ptn_slots_scratch_destroy(ptn_slots_scratch *scratch);

/* Slots for the chunks from n_persist on: chunks within any `window` distinct chunks in the cyclic order of the accesses never
 * share one. window is at least 1; of n_chunks and more each has its own. slot_of_chunk and slot_bytes have n_chunks
 * entries, of the latter *n_slots are set. */
void ptn_slots(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t n_persist, uint32_t window,
               int32_t *slot_of_chunk, uint64_t *slot_bytes, uint32_t *n_slots);

/* ---- peak.c ---- */

/* With the least, where no modes are given all blocks swap. */
static inline ptn_mode ptn_mode_least(const ptn_mode *given, uint32_t block) { return given ? given[block] : PTN_SWAP; }
static inline bool ptn_mode_swaps(ptn_mode mode) { return mode == PTN_SWAP || mode == PTN_CHECKPOINT_SWAP; }
static inline bool ptn_mode_recomputes(ptn_mode mode) { return mode == PTN_CHECKPOINT || mode == PTN_CHECKPOINT_SWAP; }

/* For each forward phase the backward phase that consumes it (n_phases: none does); for all others n_phases. */
void ptn_peak_match(const ptn_plan_request *request, uint32_t *consumer_of_phase);

/* What is held more after phase i than before it, in the checkpoint run (away) or the keep run; 0 for the last phase. */
int64_t ptn_peak_retained_bytes(const ptn_plan_request *request, uint32_t i, bool away);

/* What peaks are composed from, made once for a request; the request is borrowed until destroy. */
typedef struct ptn_peak ptn_peak;
ptn_status ptn_peak_create(ptn_peak **out, const ptn_plan_request *request, const uint32_t *consumer_of_phase);
void ptn_peak_destroy(ptn_peak *peak); /* NULL is allowed */

/* What is live at most in a phase, without parameters and gradients of chunks that are complete: in all of it, and behind the first
 * completion in it, where there is one. */
typedef struct ptn_live {
  int64_t peak_bytes, after_bytes;
} ptn_live;

/* Of each phase for these modes. least: blocks that swap count with what they cannot do without, for requests that know it. */
void ptn_peak_compose(const ptn_peak *peak, const ptn_mode *modes, bool least, ptn_live *live);
bool ptn_peak_knows_least(const ptn_plan_request *request);
/* Whether gradients of several passes are added up in memory that stays theirs throughout. */
bool ptn_peak_adds_passes_up(const ptn_plan_request *request);
/* Whether memory also counts gradients that wait for their update. */
bool ptn_peak_counts_pending(const ptn_plan_request *request, bool least);

/* The highest from each completion of gradients to the next, and before the first; n_chunks + 1 entries have room for all. */
void ptn_peak_stretches(const ptn_peak *peak, const ptn_live *live, int64_t *stretch_bytes);

/* All that counts for the candidate except slots and ring; and of that, without an update that runs in step(). */
uint64_t ptn_peak_computed_bytes(const ptn_peak *peak, const int64_t *stretch_bytes, bool least, uint32_t n_persist);
uint64_t ptn_peak_without_slots(const ptn_peak *peak, const int64_t *stretch_bytes, bool least, uint32_t n_persist);

/* ---- swap.c ---- */

/* What the blocks of swap modes write in one step. */
uint64_t ptn_swap_stash_bytes(const ptn_plan_request *request, const uint32_t *consumer_of_phase, const ptn_mode *modes);
/* Of that, what phase i writes. */
uint64_t ptn_swap_phase_bytes(const ptn_plan_request *request, const uint32_t *consumer_of_phase, const ptn_mode *modes,
                              uint32_t i);

/* Of what a block saved, with room for one in so many its backward reads ahead as fast as it computes: with a quarter a GPT-2 of
 * blocks of 84 MiB took no longer than with all of it, with less it waited in proportion. */
#define PTN_STREAM_PART 4
/* That room, for the largest block of the mode swap. */
uint64_t ptn_swap_stream_bytes(const ptn_plan_request *request, const uint32_t *consumer_of_phase, const ptn_mode *modes);

/* How far the backward of a block rises, by what it does with its saved tensors in memory and by what it recomputes;
 * above_static_bytes: of the peak. */
uint64_t ptn_swap_rise_bytes(const ptn_plan_request *request, const ptn_mode *modes);
uint64_t ptn_swap_headroom_bytes(const ptn_plan_request *request, const ptn_mode *modes, uint64_t above_static_bytes);
uint64_t ptn_swap_recompute_bytes(const ptn_plan_request *request, const ptn_mode *modes, uint64_t above_static_bytes);

/* ---- request.c ---- */

/* PTN_PLAN where modes or n_persist are wrong in themselves, PTN_INVALID where anything else is. */
ptn_status ptn_request_check(const ptn_plan_request *request);

/* ---- tiers.c ---- */

typedef struct ptn_tiers {
  uint32_t n_host;
  bool stash_on_host;
  uint64_t host_bytes, disk_bytes;
} ptn_tiers;

/* Of bytes that all ranks share, what one has. */
uint64_t ptn_tiers_part(const ptn_plan_request *request, uint64_t bytes);
bool ptn_tiers_has_host(const ptn_plan_request *request);
bool ptn_tiers_has_disk(const ptn_plan_request *request);
uint64_t ptn_tiers_disk_bytes(const ptn_plan_request *request); /* that it has; UINT64_MAX: without a limit */
/* What the host has for homes and for activations, beside the ring where that is there. */
uint64_t ptn_tiers_host_room(const ptn_plan_request *request, uint32_t n_persist);
/* False where something would have to go to a disk that is not there, or has no room for it. */
bool ptn_tiers_split(const ptn_plan_request *request, uint32_t n_persist, uint64_t stash_bytes, ptn_tiers *out);
/* The fewest persistent chunks for which the others and the stash have a place. PTN_BUDGET: none, for the stash. */
ptn_status ptn_tiers_least_persist(const ptn_plan_request *request, uint64_t stash_bytes, uint32_t *least_persist);

/* ---- fit.c ---- */

#define PTN_FIT_MOST_WINDOWS 16
#define PTN_FIT_RING_LEVELS 6 /* pieces of 64 KiB, 128 KiB ... 2 MiB */

typedef struct ptn_fit {
  const ptn_plan_request *request;
  int64_t budget_bytes;
  int64_t limit_bytes; /* for candidates that have a ring, without it */
  int64_t ringless_limit_bytes; /* for the others */
  int64_t roomy_bytes; /* up to here a candidate that has a ring is not squeezed */
  uint32_t n_trained_end; /* chunks from here on are all frozen */
  uint32_t least_persist; /* fewer have no place in the tiers behind memory */
  bool least; /* blocks that swap are composed with what they cannot do without */
  uint64_t pending_bytes; /* gradients that may always wait for their updates: the largest of a chunk */
  uint32_t few, more; /* distinct chunks with slots of their own: the least, and what is preferred */
  uint32_t windows[PTN_FIT_MOST_WINDOWS], n_windows; /* all that are tried, in their order */
  uint32_t *consumer_of_phase;
  ptn_peak *peak;
  /* Of the modes composed last. */
  ptn_live *live;
  int64_t *stretch_bytes;
  int32_t *slot_of_chunk; /* assigned last */
  uint64_t *slot_bytes;
  uint64_t *requests_from; /* for each size of the ring's pieces and chunk: to update the trained chunks from there on */
  double compute_ns; /* of a step; 0: not known */
  uint32_t n_slots;
  ptn_slots_scratch *slots;
  uint32_t n_simulated, n_bounded; /* candidates, by the search so far: what a test can limit where it cannot time */
} ptn_fit;

/* fit is to be destroyed also where create fails. */
ptn_status ptn_fit_create(ptn_fit *fit, const ptn_plan_request *request);
void ptn_fit_destroy(ptn_fit *fit);

void ptn_fit_compose(ptn_fit *fit, const ptn_mode *modes);
/* Of the modes composed last. */
int64_t ptn_fit_computed_bytes(const ptn_fit *fit, uint32_t n_persist);
int64_t ptn_fit_without_slots(const ptn_fit *fit, uint32_t n_persist);
int64_t ptn_fit_slots(ptn_fit *fit, uint32_t n_persist, uint32_t window); /* assigns; their bytes */
uint64_t ptn_fit_persistent_bytes(const ptn_fit *fit, uint32_t n_persist);

/* How far a window reads ahead beside so many chunks that stay. */
uint32_t ptn_fit_ahead(const ptn_fit *fit, uint32_t n_persist, uint32_t window);
/* The window that has the slots given and fits with the modes composed last; 0: none. */
uint32_t ptn_fit_given_window(ptn_fit *fit, uint32_t n_persist);

/* ---- room.c ---- */

void ptn_fit_count_requests(ptn_fit *fit);
/* Sets the limits: what the safest candidates with a ring and without one need is spared from all but the smallest ring. */
void ptn_fit_spare(ptn_fit *fit, int64_t safest_bytes, int64_t ringless_bytes);
bool ptn_fit_has_ring(const ptn_fit *fit, uint32_t n_persist);
/* needed_bytes: of modes, persistent chunks and slots, without a ring. */
bool ptn_fit_fits(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes);
/* Whether it has less room for holes between blocks, or for the ring, than others leave; and the time that it loses by that. */
bool ptn_fit_is_squeezed(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes);
int64_t ptn_fit_squeeze_ns(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes);
int64_t ptn_fit_budget_bytes(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes); /* with the least ring */
void ptn_fit_ring(const ptn_fit *fit, uint32_t n_persist, int64_t needed_bytes, ptn_plan *out);
uint64_t ptn_fit_counted_ring_bytes(const ptn_fit *fit, const ptn_plan *plan); /* of the budget; plan: with a ring */
/* What a ring of the host's takes of its memory at most; 0: the ring is not the host's. */
uint64_t ptn_fit_host_ring_bytes(const ptn_plan_request *request);
/* With the least: what the budget leaves to read ahead into and to gradients that wait, as far as it is of use; 0 else. */
uint64_t ptn_fit_stream_bytes(const ptn_fit *fit, const ptn_mode *modes, uint32_t n_persist, int64_t needed_bytes);

/* ---- rule.c ---- */

typedef struct ptn_rule ptn_rule;
/* Measures the request's own choices, and sets the limit of the fit. */
ptn_status ptn_rule_create(ptn_rule **out, ptn_fit *fit);
void ptn_rule_destroy(ptn_rule *rule); /* NULL is allowed */
uint64_t ptn_rule_least_bytes(const ptn_rule *rule); /* the smallest budget for modes and n_persist as given */
uint64_t ptn_rule_smallest_bytes(const ptn_rule *rule); /* and where they are free */
uint64_t ptn_rule_safest_bytes(const ptn_rule *rule); /* there, of plans that do not count with the least */
void ptn_rule_modes(const ptn_rule *rule, uint32_t n_keep, ptn_mode *modes);
/* False: nothing fits. modes: n_blocks entries. What fits only with the least sets it in the fit. */
bool ptn_rule_choose(ptn_rule *rule, ptn_mode *modes, uint32_t *n_persist, uint32_t *window);
/* Of the last choice alone, which counts with the least. */
bool ptn_rule_choose_least(ptn_rule *rule, ptn_mode *modes, uint32_t *n_persist, uint32_t *window);

/* ---- simulate.c ---- */

/* One way to carry out a request: everything that decides about its time. */
typedef struct ptn_candidate {
  const ptn_mode *modes; /* n_blocks */
  uint32_t n_persist, n_host; /* chunks at home on the device, and behind them on the host */
  const int32_t *slot_of_chunk; /* n_chunks; -1: persistent */
  const ptn_live *live; /* as ptn_peak_compose gives it for these modes */
  uint64_t above_static_bytes; /* what the plan's peak leaves for phases, gradients and activations under way */
  int64_t squeeze_ns; /* lost since it leaves little of the budget free */
  uint64_t pending_bytes; /* gradients that may always wait for their updates; more of them in the room of a phase */
  bool least; /* live leaves no room to read ahead within the backward of a block that swaps */
} ptn_candidate;

/* The step_ns of a candidate that cannot be carried out: a lane that the machine lacks would have to carry bytes. No forecast is
 * longer. */
#define PTN_NEVER_NS (INT64_MAX / 4)

/* Scratch, made once for a request with a profile and access_phases; both arguments are borrowed until destroy. PTN_INVALID where
 * one of them is missing or does not fit the phases. */
typedef struct ptn_simulation ptn_simulation;
ptn_status ptn_simulation_create(ptn_simulation **out, const ptn_plan_request *request, const uint32_t *consumer_of_phase);
void ptn_simulation_destroy(ptn_simulation *simulation); /* NULL is allowed */
/* Deterministic; allocates nothing. */
void ptn_simulate(ptn_simulation *simulation, const ptn_candidate *candidate, ptn_forecast *out);

/* ---- bounds.c ---- */

/* Scratch, made once for a request with a profile and access_phases; both arguments are borrowed until destroy. */
typedef struct ptn_bounds ptn_bounds;
ptn_status ptn_bounds_create(ptn_bounds **out, const ptn_plan_request *request, const uint32_t *consumer_of_phase);
void ptn_bounds_destroy(ptn_bounds *bounds); /* NULL is allowed */
/* Never more than what ptn_simulate says of the candidate: the closed form of the equations (2) to (7) of arXiv 2406.08334, with
 * slots, the disk and the drag. moved_bytes: beside compute, of parameters, state, gradients and activations, at least. */
int64_t ptn_bound_ns(ptn_bounds *bounds, const ptn_candidate *candidate, uint64_t *moved_bytes);

/* ---- search.c ---- */

/* From the rule's choice, in modes, n_persist and window, to the one with the least forecast. PTN_INVALID where every candidate
 * that fits needs a lane which the machine lacks. */
ptn_status ptn_search(ptn_fit *fit, const ptn_rule *rule, ptn_mode *modes, uint32_t *n_persist, uint32_t *window,
                      ptn_forecast *forecast);

#endif
