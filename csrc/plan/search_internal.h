/* What the files of the search share: families.c gives the placements of modes, sums.c the least of many candidates at once,
 * search.c decides. */
#ifndef PTN_PLAN_SEARCH_INTERNAL_H
#define PTN_PLAN_SEARCH_INTERNAL_H

#include "plan/parts.h"

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
typedef enum ptn_swap_family { PTN_SWAP_EARLY = 0, PTN_SWAP_SPREAD, PTN_SWAP_RATE, PTN_N_SWAP_FAMILIES, PTN_SWAP_EVERY } ptn_swap_family;

typedef struct ptn_block_figures {
  double recompute_ns, swap_ns; /* of one pass */
  double extra_bytes;           /* that keeping holds more than recomputing */
  double stash_bytes;
} ptn_block_figures;

typedef struct ptn_keep_set {
  uint32_t n_keep;
  bool edge;  /* only with the fewest and with all chunks persistent */
  bool given; /* the request's own modes */
} ptn_keep_set;

typedef struct ptn_families {
  const ptn_plan_request *request;
  const ptn_rule *rule;
  const uint32_t *consumer_of_phase;
  ptn_block_figures *blocks;
  uint32_t *orders[PTN_N_KEEP_FAMILIES + 1]; /* of blocks; the last: for swapping */
  ptn_keep_set *sets;
  uint8_t *keep; /* n_blocks for each set */
  uint32_t n_sets;
  ptn_mode *modes; /* scratch */
  int64_t *phase_bytes;
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
void ptn_families_modes(const ptn_families *families, uint32_t set, ptn_swap_family family, uint32_t n_swap, ptn_mode *modes);

#define PTN_SWAP_STEPS 8
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

/* Many candidates: n_persist from least to most, slots of at most slots_bytes, in a pass at least so much recomputation and at least so
 * much written of activations. */
typedef struct ptn_many {
  uint32_t least_persist, most_persist;
  double slots_bytes, recompute_ns, stash_bytes;
} ptn_many;
/* Never more than ptn_simulate says of any of them. */
double ptn_sums_least_ns(const ptn_sums *sums, const ptn_many *many);

#endif
