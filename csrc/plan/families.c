/* Families: which placements of modes the search looks at.
 *
 * Problem: n blocks have 4^n placements. Design: a placement is a set of kept blocks, which decides the memory, and among the
 * others a set that swaps, which decides the time, and of the memory only what is too small to leave it (trials.c). Sets come in
 * families that grow block by block:
 *
 *   kept      as the rule keeps them (by the lowest peak: the last ones where blocks are alike); the last; by recomputation
 *             saved for each byte held; by recomputation saved; the smallest; spread evenly; the first. Of models with few
 *             blocks every set. One that another of as many blocks beats in each phase and in recomputation is left out.
 *   swapping  the first ones: their writes have the longest to hide, and they are read back last; spread evenly, so that
 *             writes hide behind the blocks between; by recomputation saved for each byte written. In each, those that leave
 *             something in memory come last: where memory is short they cannot swap. Of few, every set.
 *
 * checkpoint_swap is never chosen: memory counts it as checkpoint (peak.c), so that it could only cost time.
 *
 * Invariant: what is looked at depends on the request without its budget.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/search_internal.h"

#define EVERY_SET_BLOCKS 6 /* of so many blocks every set is looked at */
#define ALL_COUNTS_BLOCKS 64
#define N_COUNTS 32 /* of families of more blocks, numbers of kept blocks */

typedef struct by_value {
  double value;
  uint32_t block;
} by_value;

/* Highest value first, of equal ones the last block. */
static int compare(const void *left, const void *right) {
  const by_value *a = left, *b = right;
  if (a->value != b->value) return a->value < b->value ? 1 : -1;
  return a->block < b->block ? 1 : a->block > b->block ? -1 : 0;
}

static double rate(double value, double bytes) { return bytes > 0 ? value / bytes : value > 0 ? 1e30 : 0; }

static void measure_blocks(ptn_families *families) {
  const ptn_plan_request *request = families->request;
  for (uint32_t p = 0; p < request->n_phases; p++) {
    const ptn_phase *phase = &request->phases[p];
    if (phase->block < 0) continue;
    ptn_block_figures *of = &families->blocks[phase->block];
    if (phase->backward) {
      of->recompute_ns += (double)request->profile->phases[p].recompute_ns + (double)request->profile->checkpoint_ns;
      of->swap_ns += (double)request->profile->swap_ns / 2;
      continue;
    }
    int64_t kept = ptn_peak_retained_bytes(request, p, false), dropped = ptn_peak_retained_bytes(request, p, true);
    of->extra_bytes += kept > dropped ? (double)(kept - dropped) : 0;
    of->swap_ns += (double)request->profile->swap_ns / 2;
    int64_t stash_bytes = kept - (int64_t)phase->small_bytes;
    if (families->consumer_of_phase[p] < request->n_phases && stash_bytes > 0) of->stash_bytes += (double)stash_bytes;
    of->leaves |= phase->small_bytes > 0;
  }
}

/* ---- kept blocks ---- */

static double value_of(const ptn_families *families, ptn_keep_family family, uint32_t block) {
  const ptn_block_figures *of = &families->blocks[block];
  switch (family) {
    case PTN_KEEP_RATE: return rate(of->recompute_ns, of->extra_bytes);
    case PTN_KEEP_TIME: return of->recompute_ns;
    case PTN_KEEP_SMALL: return -of->extra_bytes;
    case PTN_KEEP_FIRST: return -(double)block;
    default: return (double)block; /* the last */
  }
}

static void write_keep(const ptn_families *families, ptn_keep_family family, uint32_t n_keep, uint8_t *keep) {
  uint64_t n_blocks = families->request->n_blocks;
  memset(keep, 0, n_blocks);
  if (family == PTN_KEEP_RULE) {
    ptn_rule_modes(families->rule, n_keep, families->modes);
    for (uint64_t i = 0; i < n_blocks; i++) keep[i] = families->modes[i] == PTN_KEEP;
  } else if (family == PTN_KEEP_SPREAD) {
    for (uint64_t i = 0; i < n_blocks; i++) keep[i] = (i + 1) * n_keep / n_blocks > i * n_keep / n_blocks;
  } else {
    for (uint64_t i = 0; i < n_keep; i++) keep[families->orders[family][i]] = 1;
  }
}

static double recompute_of(const ptn_families *families, const uint8_t *keep) {
  double total_ns = 0;
  for (uint32_t i = 0; i < families->request->n_blocks; i++) total_ns += keep[i] ? 0 : families->blocks[i].recompute_ns;
  return total_ns;
}

static void compose(const ptn_families *families, const uint8_t *keep, ptn_live *live) {
  const ptn_plan_request *request = families->request;
  for (uint32_t i = 0; i < request->n_blocks; i++) families->modes[i] = keep[i] ? PTN_KEEP : PTN_CHECKPOINT;
  ptn_peak_compose(families->peak, families->modes, false, live);
}

/* One of `begin` and on is at least as good in everything. Their phases are kept: they are few. */
static bool beaten(const ptn_families *families, uint32_t begin, const uint8_t *keep) {
  const ptn_plan_request *request = families->request;
  double recompute_ns = recompute_of(families, keep);
  ptn_live *mine = families->live + (size_t)(families->n_sets - begin) * request->n_phases;
  for (uint32_t s = begin; s < families->n_sets; s++) {
    if (memcmp(ptn_families_keep(families, s), keep, request->n_blocks) == 0) return true;
  }
  compose(families, keep, mine);
  for (uint32_t s = begin; s < families->n_sets; s++) {
    const ptn_live *theirs = families->live + (size_t)(s - begin) * request->n_phases;
    if (recompute_of(families, ptn_families_keep(families, s)) > recompute_ns) continue;
    uint32_t p = 0;
    while (p < request->n_phases && theirs[p].peak_bytes <= mine[p].peak_bytes && theirs[p].after_bytes <= mine[p].after_bytes)
      p++;
    if (p == request->n_phases) return true;
  }
  return false;
}

static void add_set(ptn_families *families, const uint8_t *keep, uint32_t family, bool edge) {
  uint32_t n_blocks = families->request->n_blocks, n_keep = 0;
  uint64_t lateness = 0;
  uint8_t *to = families->keep + (size_t)families->n_sets * n_blocks;
  if (to != keep && n_blocks > 0) memmove(to, keep, n_blocks);
  for (uint32_t i = 0; i < n_blocks; i++) n_keep += keep[i], lateness += keep[i] ? i : 0;
  families->sets[families->n_sets++] = (ptn_keep_set){.n_keep = n_keep, .family = family, .lateness = lateness, .edge = edge};
}

/* Numbers of kept blocks that all families have; the rule's has the others too, for the ends of what a budget can be. */
static bool counted(uint32_t n_blocks, uint32_t n_keep) {
  if (n_blocks <= ALL_COUNTS_BLOCKS) return true;
  return (uint64_t)(n_keep + 1) * N_COUNTS / (n_blocks + 1) > (uint64_t)n_keep * N_COUNTS / (n_blocks + 1) || n_keep == 0;
}

static void add_counts(ptn_families *families) {
  uint32_t n_blocks = families->request->n_blocks;
  for (uint32_t k = 0; k <= n_blocks; k++) {
    uint32_t begin = families->n_sets;
    for (int family = PTN_KEEP_RULE; family < PTN_N_KEEP_FAMILIES; family++) {
      uint8_t *keep = families->keep + (size_t)families->n_sets * n_blocks;
      bool edge = !counted(n_blocks, k);
      if (family != PTN_KEEP_RULE && (edge || k == 0 || k == n_blocks)) break;
      write_keep(families, (ptn_keep_family)family, k, keep);
      if (!beaten(families, begin, keep)) add_set(families, keep, (uint32_t)family, edge);
    }
  }
}

static ptn_mode given_mode(const ptn_families *families, uint32_t block) {
  return ptn_mode_least(families->request->modes, block);
}

static void add_given(ptn_families *families) {
  ptn_keep_set *set = &families->sets[families->n_sets++];
  *set = (ptn_keep_set){.given = true};
  for (uint32_t i = 0; i < families->request->n_blocks; i++) {
    bool keep = given_mode(families, i) == PTN_KEEP;
    set->n_keep += keep;
    set->lateness += keep ? i : 0;
  }
}

static void add_every_set(ptn_families *families) {
  families->every = true;
  uint32_t n_blocks = families->request->n_blocks;
  for (uint32_t bits = 0; bits < (uint32_t)1 << n_blocks; bits++) {
    uint8_t *keep = families->keep + (size_t)families->n_sets * n_blocks;
    for (uint32_t i = 0; i < n_blocks; i++) keep[i] = bits >> i & 1;
    add_set(families, keep, 0, false);
  }
}

/* ---- create ---- */

static void make_orders(ptn_families *families, by_value *scratch) {
  uint32_t n_blocks = families->request->n_blocks;
  for (int family = 0; family <= PTN_N_KEEP_FAMILIES; family++) { /* the last: of swapping blocks */
    for (uint32_t i = 0; i < n_blocks; i++) {
      const ptn_block_figures *of = &families->blocks[i];
      bool swap = family == PTN_N_KEEP_FAMILIES;
      double value = swap ? rate(of->recompute_ns, of->stash_bytes) : value_of(families, (ptn_keep_family)family, i);
      scratch[i] = (by_value){.value = value, .block = i};
    }
    qsort(scratch, n_blocks, sizeof *scratch, compare);
    for (uint32_t i = 0; i < n_blocks; i++) families->orders[family][i] = scratch[i].block;
  }
}

void ptn_families_destroy(ptn_families *families) {
  free(families->blocks);
  free(families->modes);
  free(families->live);
  free(families->keep);
  free(families->sets);
  for (int i = 0; i <= PTN_N_KEEP_FAMILIES; i++) free(families->orders[i]);
}

ptn_status ptn_families_create(ptn_families *families, const ptn_fit *fit, const ptn_rule *rule) {
  const ptn_plan_request *request = fit->request;
  size_t n_blocks = request->n_blocks, most = n_blocks <= EVERY_SET_BLOCKS ? (size_t)1 << n_blocks : n_blocks + 1;
  if (n_blocks > EVERY_SET_BLOCKS) {
    for (uint32_t k = 0; k <= n_blocks; k++) most += counted(request->n_blocks, k) ? PTN_N_KEEP_FAMILIES : 0;
  }
  *families = (ptn_families){.request = request, .rule = rule, .peak = fit->peak, .consumer_of_phase = fit->consumer_of_phase};
  by_value *scratch = calloc(n_blocks + 1, sizeof *scratch);
  bool made = scratch != NULL;
  made &= (families->blocks = calloc(n_blocks + 1, sizeof *families->blocks)) != NULL;
  made &= (families->modes = calloc(n_blocks + 1, sizeof *families->modes)) != NULL;
  made &= (families->live = calloc(PTN_N_KEEP_FAMILIES * (size_t)request->n_phases, sizeof *families->live)) != NULL;
  made &= (families->keep = calloc(most + 1, n_blocks + 1)) != NULL;
  made &= (families->sets = calloc(most + 1, sizeof *families->sets)) != NULL;
  for (int i = 0; i <= PTN_N_KEEP_FAMILIES; i++) {
    made &= (families->orders[i] = calloc(n_blocks + 1, sizeof *families->orders[i])) != NULL;
  }
  if (made) {
    measure_blocks(families);
    make_orders(families, scratch);
    if (request->modes || fit->least) add_given(families);
    else if (n_blocks <= EVERY_SET_BLOCKS) add_every_set(families);
    else add_counts(families);
  }
  free(scratch);
  return made ? PTN_OK : ptn_fail(PTN_MEMORY, "no memory to plan %zu blocks", n_blocks);
}

/* ---- swapping blocks ---- */

static bool worth(const ptn_families *families, const uint8_t *keep, uint32_t block) {
  const ptn_block_figures *of = &families->blocks[block];
  return !keep[block] && of->stash_bytes > 0 && of->recompute_ns > of->swap_ns;
}

uint32_t ptn_families_swappable(const ptn_families *families, uint32_t set) {
  uint32_t count = 0;
  const uint8_t *keep = ptn_families_keep(families, set);
  if (families->sets[set].given) return 0;
  for (uint32_t i = 0; i < families->request->n_blocks; i++) count += worth(families, keep, i);
  return count;
}

bool ptn_families_every_swap(uint32_t n_swappable) { return n_swappable <= EVERY_SET_BLOCKS - 1; }

/* Of the blocks that leave something in memory, or of those that leave nothing, n_swap swap. */
static void swap_some(const ptn_families *families, const uint8_t *keep, bool leaves, ptn_swap_family family, uint64_t n_swap,
                      uint64_t n_all, ptn_mode *modes) {
  const uint32_t *by_rate = families->orders[PTN_N_KEEP_FAMILIES];
  uint64_t at = 0;
  for (uint32_t i = 0; i < families->request->n_blocks && n_swap > 0; i++) {
    uint32_t block = family == PTN_SWAP_RATE ? by_rate[i] : i;
    if (!worth(families, keep, block) || families->blocks[block].leaves != leaves) continue;
    bool swap = family == PTN_SWAP_SPREAD ? (at + 1) * n_swap / n_all > at * n_swap / n_all : at < n_swap;
    if (swap) modes[block] = PTN_SWAP;
    at++;
  }
}

void ptn_families_modes(const ptn_families *families, const ptn_choice *choice, ptn_mode *modes) {
  const uint8_t *keep = ptn_families_keep(families, choice->set);
  uint32_t n_blocks = families->request->n_blocks, at = 0, count[2] = {0, 0};
  if (families->sets[choice->set].given) {
    for (uint32_t i = 0; i < n_blocks; i++) modes[i] = given_mode(families, i);
    return;
  }
  for (uint32_t i = 0; i < n_blocks; i++) {
    modes[i] = keep[i] ? PTN_KEEP : PTN_CHECKPOINT;
    if (choice->n_swap == 0 || !worth(families, keep, i)) continue;
    count[families->blocks[i].leaves]++;
    if (choice->swap == PTN_SWAP_EVERY && (choice->n_swap >> at++ & 1) == 1) modes[i] = PTN_SWAP;
  }
  if (choice->swap == PTN_SWAP_EVERY || choice->n_swap == 0) return;
  uint32_t clean = choice->n_swap < count[0] ? choice->n_swap : count[0];
  swap_some(families, keep, false, choice->swap, clean, count[0], modes);
  swap_some(families, keep, true, choice->swap, choice->n_swap - clean, count[1], modes);
}

uint32_t ptn_families_bits(const ptn_families *families, const ptn_choice *choice) {
  const uint8_t *keep = ptn_families_keep(families, choice->set);
  uint32_t bits = 0, at = 0;
  if (choice->swap == PTN_SWAP_EVERY || choice->n_swap == 0) return choice->n_swap;
  ptn_families_modes(families, choice, families->modes);
  for (uint32_t i = 0; i < families->request->n_blocks; i++) {
    if (worth(families, keep, i)) bits |= (uint32_t)(families->modes[i] == PTN_SWAP) << at++;
  }
  return bits;
}

uint32_t ptn_families_move_bits(const ptn_families *families, uint32_t from, uint32_t to, uint32_t bits) {
  const uint8_t *here = ptn_families_keep(families, from), *there = ptn_families_keep(families, to);
  uint32_t moved = 0, at_here = 0, at_there = 0;
  for (uint32_t i = 0; i < families->request->n_blocks; i++) {
    bool swaps = worth(families, here, i) && at_here < 32 && (bits >> at_here++ & 1) == 1;
    if (worth(families, there, i) && at_there < 32) moved |= (uint32_t)swaps << at_there++;
  }
  return moved;
}

void ptn_families_swapped(const ptn_families *families, uint32_t set, double *recompute_ns, double *stash_bytes,
                          uint32_t *n_steps) {
  const uint8_t *keep = ptn_families_keep(families, set);
  const uint32_t *by_rate = families->orders[PTN_N_KEEP_FAMILIES];
  uint32_t n_swappable = ptn_families_swappable(families, set), at = 0, step = 0;
  bool given = families->sets[set].given;
  double left_ns = 0, stash = 0;
  for (uint32_t i = 0; i < families->request->n_blocks; i++) {
    bool recomputes = given ? ptn_mode_recomputes(given_mode(families, i)) : !keep[i];
    left_ns += recomputes ? families->blocks[i].recompute_ns : 0;
    if (given && given_mode(families, i) == PTN_SWAP) stash += families->blocks[i].stash_bytes;
  }
  recompute_ns[0] = left_ns;
  stash_bytes[0] = stash;
  for (uint32_t i = 0; i < families->request->n_blocks && at < n_swappable; i++) {
    if (!worth(families, keep, by_rate[i])) continue;
    left_ns -= families->blocks[by_rate[i]].recompute_ns;
    stash += families->blocks[by_rate[i]].stash_bytes;
    at++;
    if ((uint64_t)at * PTN_SWAP_STEPS / n_swappable <= step) continue;
    step++;
    recompute_ns[step] = left_ns;
    stash_bytes[step] = stash;
  }
  *n_steps = step;
}
