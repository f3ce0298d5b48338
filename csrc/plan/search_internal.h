/* What the files of the search share: families.c gives the placements of modes, sums.c the least of many candidates at once,
 * trials.c what one takes, search.c decides, climb.c goes on from what is good. */
#ifndef PTN_PLAN_SEARCH_INTERNAL_H
#define PTN_PLAN_SEARCH_INTERNAL_H

#include "plan/parts.h"

#define PTN_FEW_CHUNKS 16 /* of which any number is tried as persistent */

/* ---- families.c ---- */

typedef enum ptn_keep_family {
  PTN_KEEP_RULE = 0, /* as the rule keeps so many */
  PTN_KEEP_LAST,
  PTN_KEEP_RATE,
  PTN_KEEP_TIME,
  PTN_KEEP_SMALL,
  PTN_KEEP_SPREAD,
  PTN_KEEP_FIRST,
  PTN_N_KEEP_FAMILIES,
} ptn_keep_family;

/* EVERY: n_swap is read as bits, one for each block that could swap. */
typedef enum ptn_swap_family {
  PTN_SWAP_EARLY = 0,
  PTN_SWAP_SPREAD,
  PTN_SWAP_RATE,
  PTN_N_SWAP_FAMILIES,
  PTN_SWAP_EVERY
} ptn_swap_family;

/* A candidate, by number. */
typedef struct ptn_choice {
  uint32_t set, n_persist, window; /* window: of the fit's */
  ptn_swap_family swap;
  uint32_t n_swap;
} ptn_choice;

typedef struct ptn_block_figures {
  double recompute_ns, swap_ns; /* of one pass */
  double extra_bytes;           /* that keeping holds more than recomputing */
  double stash_bytes;
  bool leaves; /* something in memory when it swaps */
} ptn_block_figures;

typedef struct ptn_keep_set {
  uint32_t n_keep;
  uint32_t family;
  uint64_t lateness; /* the sum of the kept blocks' numbers */
  bool edge;  /* only with the fewest and with all chunks persistent */
  bool given; /* the request's own modes; where a fit is to be the least and there are none, all swap */
} ptn_keep_set;

typedef struct ptn_families {
  bool every; /* set: sets are numbered by bits, one for each kept block */
  const ptn_plan_request *request;
  const ptn_rule *rule;
  const ptn_peak *peak;
  const uint32_t *consumer_of_phase;
  ptn_block_figures *blocks;
  uint32_t *orders[PTN_N_KEEP_FAMILIES + 1]; /* of blocks; the last: for swapping */
  ptn_keep_set *sets;
  uint8_t *keep; /* n_blocks for each set */
  uint32_t n_sets;
  ptn_mode *modes; /* scratch */
  ptn_live *live; /* scratch: of the sets of one number of blocks */
} ptn_families;

/* families is to be destroyed also where create fails. */
ptn_status ptn_families_create(ptn_families *families, const ptn_fit *fit, const ptn_rule *rule);
void ptn_families_destroy(ptn_families *families);
static inline const uint8_t *ptn_families_keep(const ptn_families *families, uint32_t set) {
  return families->keep + (size_t)set * families->request->n_blocks;
}
/* How many of the set's blocks could swap with gain; whether few enough that every choice of them is looked at. */
uint32_t ptn_families_swappable(const ptn_families *families, uint32_t set);
bool ptn_families_every_swap(uint32_t n_swappable);
/* Of at most 32 blocks that could swap: those that do, as bits; and bits of one set as those of another. */
uint32_t ptn_families_bits(const ptn_families *families, const ptn_choice *choice);
uint32_t ptn_families_move_bits(const ptn_families *families, uint32_t from, uint32_t to, uint32_t bits);
void ptn_families_modes(const ptn_families *families, const ptn_choice *choice, ptn_mode *modes);

#define PTN_SWAP_STEPS 4
/* As blocks of the set begin to swap, the best first: what is left of recomputation in a pass, and what is stashed, after each
 * of at most PTN_SWAP_STEPS equal steps; entry 0 with none. */
void ptn_families_swapped(const ptn_families *families, uint32_t set, double *recompute_ns, double *stash_bytes,
                          uint32_t *n_steps);

/* ---- bounds.c ---- */

/* Of what lanes could cost compute at most, the part that they certainly cost it, whatever waits they move their bytes in. */
double ptn_bounds_drag_part(const ptn_profile *profile);

/* ---- sums.c ---- */

typedef struct ptn_sums ptn_sums;
ptn_status ptn_sums_create(ptn_sums **out, const ptn_plan_request *request);
void ptn_sums_destroy(ptn_sums *sums); /* NULL is allowed */

/* Many candidates: n_persist from least to most, slots of at most slots_bytes, in a pass at least so much recomputation and so
 * much written of activations. */
typedef struct ptn_many {
  uint32_t least_persist, most_persist;
  double slots_bytes, recompute_ns, stash_bytes;
} ptn_many;
/* Never more than ptn_simulate says of any of them. */
double ptn_sums_least_ns(const ptn_sums *sums, const ptn_many *many);

/* ---- trials.c ---- */

typedef struct ptn_trials {
  ptn_fit *fit;
  const ptn_plan_request *request;
  ptn_families families;
  ptn_sums *sums;
  ptn_bounds *bounds;
  ptn_simulation *simulation;
  uint32_t least_persist, most_persist;
  uint32_t last_forward; /* the last phase before backward */
  uint32_t composed_set; /* in the fit's phases now */
  double recompute_ns[PTN_SWAP_STEPS + 1], stash_bytes[PTN_SWAP_STEPS + 1]; /* of it, as its blocks begin to swap */
  uint32_t n_steps;
  uint32_t n_needs; /* needs of so many sets are kept, */
  uint32_t *needs_of; /* of which, + 1 */
  int64_t *needs; /* by number of persistent chunks */
  int64_t *slots_bytes; /* by window and number of persistent chunks */
  int64_t guess_bytes[PTN_FIT_MOST_WINDOWS]; /* of the slots of each window, where it was looked at last */
  uint64_t slots_work; /* the windows of all slots that were assigned */
  uint32_t n_kept; /* slots of so many windows and numbers of persistent chunks are kept */
  uint64_t *kept_cells; /* which, + 1 */
  int32_t *kept_slots; /* n_chunks for each */
  ptn_mode *modes; /* of the choice tried last */
  /* Of the same, with what its swapped blocks leave; NULL: no block of the request leaves anything. */
  ptn_live *left_live;
  int64_t *left_stretch_bytes;
} ptn_trials;

/* trials is to be destroyed also where create fails. */
ptn_status ptn_trials_create(ptn_trials *trials, ptn_fit *fit, const ptn_rule *rule);
void ptn_trials_destroy(ptn_trials *trials);

int64_t ptn_trials_need(ptn_trials *trials, uint32_t set, uint32_t n_persist); /* without slots and ring */
int64_t ptn_trials_slots_bytes(ptn_trials *trials, uint32_t window, uint32_t n_persist);
bool ptn_trials_fits(ptn_trials *trials, uint32_t set, uint32_t window, uint32_t n_persist);
/* The least with n_persist from least to most, slots of so many bytes at most, and any blocks that swap. */
double ptn_trials_least_ns(ptn_trials *trials, uint32_t set, uint32_t least, uint32_t most, double held_bytes);
int64_t ptn_trials_bound_ns(ptn_trials *trials, const ptn_choice *choice, uint64_t *moved_bytes);
void ptn_trials_simulate(ptn_trials *trials, const ptn_choice *choice, ptn_forecast *out);
/* Modes from outside the families: whether they fit with this window and are not squeezed (room.c), and what they take. */
bool ptn_trials_has_room(ptn_trials *trials, const ptn_mode *modes, uint32_t window, uint32_t n_persist);
void ptn_trials_simulate_modes(ptn_trials *trials, const ptn_mode *modes, uint32_t window, uint32_t n_persist,
                               uint64_t *moved_bytes, ptn_forecast *out);

/* ---- climb.c ---- */

#define PTN_CLIMB_MOST_CHOICES 160
/* Choices near one: a block more or less kept, a chunk, a window, a block that swaps. Some may not fit. Their number. */
uint32_t ptn_climb_near(ptn_trials *trials, const ptn_choice *choice, ptn_choice *out);
/* The most persistent chunks that fit, without slots (the fewest that are possible where none do), and with a window; -1: none
 * do. */
uint32_t ptn_climb_most_without_slots(ptn_trials *trials, uint32_t set);
int64_t ptn_climb_most_persistent(ptn_trials *trials, uint32_t set, uint32_t window, uint32_t last);

#endif
