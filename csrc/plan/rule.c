/* The rule: which candidate is taken, in a fixed order of preference, where no timings are known.
 *
 * Problem: memory buys three things: activations that need not be recomputed, chunks that need not be moved, and slots and a
 * ring that let movement run ahead. Design: recomputation costs most, so blocks are kept first; then come a third slot,
 * persistent chunks, and a larger ring. Everything kept and persistent needs neither slots nor ring and is taken whenever it
 * fits. What the rule measures on the way, the smallest budget and the safest candidate, is right for the search as well.
 *
 * Which k blocks are kept: the last k, the first k, or k spread evenly, whichever has the lowest peak. The last k wins for
 * blocks that are alike: their activations are gone before the first block is recomputed.
 *
 * Invariants, for two requests that differ in their budgets alone: the one with more keeps at least as many blocks, and with the
 * same modes at least as many chunks; every budget from smallest_bytes on has a plan; no plan passes its budget. They hold
 * because each choice is "the largest that fits" among needs that do not depend on the budget (fit.c).
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/parts.h"

enum { KEEP_LAST, KEEP_FIRST, KEEP_SPREAD, N_PATTERNS };

typedef struct choice { /* of modes: k blocks kept by a pattern, or the caller's */
  uint32_t pattern;
  int64_t least_persist_bytes,
      all_persist_bytes; /* what it needs, without a ring, with the fewest and with every chunk persistent */
  int64_t given_persist_bytes;                    /* with as many persistent as the caller wants */
} choice;

struct ptn_rule {
  ptn_fit *fit;
  const ptn_plan_request *request;
  uint32_t n_chunks, n_blocks, n_choices, least_persist;
  int64_t least_slots_bytes; /* with the fewest chunks persistent and the fewest slots */
  int64_t least_bytes;       /* the smallest budget of the request's own choices */
  int64_t smallest_bytes;    /* the same with modes and n_persist free */
  ptn_mode *modes;           /* composed last */
  choice *choices;           /* by number of kept blocks */
};

/* ---- modes ---- */

static void write_pattern(const ptn_rule *rule, uint32_t n_keep, uint32_t pattern, ptn_mode *modes) {
  uint64_t n_blocks = rule->n_blocks;
  for (uint64_t i = 0; i < n_blocks; i++) {
    bool keep = pattern == KEEP_LAST    ? i >= n_blocks - n_keep
                : pattern == KEEP_FIRST ? i < n_keep
                                        : (i + 1) * n_keep / n_blocks > i * n_keep / n_blocks;
    modes[i] = keep ? PTN_KEEP : PTN_CHECKPOINT;
  }
}

void ptn_rule_modes(const ptn_rule *rule, uint32_t n_keep, ptn_mode *modes) {
  if (!rule->request->modes) {
    write_pattern(rule, n_keep, rule->choices[n_keep].pattern, modes);
  } else if (rule->n_blocks > 0) {
    memcpy(modes, rule->request->modes, rule->n_blocks * sizeof *modes);
  }
}

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* The needs of keeping n_keep blocks, by the pattern that needs least with the fewest chunks persistent. */
static choice measure_choice(ptn_rule *rule, uint32_t n_keep, const ptn_mode *given, int64_t n_persist) {
  ptn_fit *fit = rule->fit;
  choice best = {.least_persist_bytes = INT64_MAX};
  bool one_way = given || n_keep == 0 || n_keep == rule->n_blocks;
  for (uint32_t pattern = 0; pattern < (one_way ? 1 : N_PATTERNS); pattern++) {
    if (!given) write_pattern(rule, n_keep, pattern, rule->modes);
    ptn_fit_compose(fit, given ? given : rule->modes);
    int64_t needed_bytes = ptn_fit_without_slots(fit, rule->least_persist) + rule->least_slots_bytes;
    if (needed_bytes >= best.least_persist_bytes) continue;
    best = (choice){
        .pattern = pattern, .least_persist_bytes = needed_bytes, .all_persist_bytes = ptn_fit_without_slots(fit, rule->n_chunks)};
    if (n_persist >= 0) best.given_persist_bytes = ptn_fit_without_slots(fit, (uint32_t)n_persist);
  }
  return best;
}

/* The least budget of a choice with n_persist free. */
static int64_t free_budget_bytes(const ptn_rule *rule, const choice *of) {
  return lesser(ptn_fit_budget_bytes(rule->fit, rule->least_persist, of->least_persist_bytes),
                ptn_fit_budget_bytes(rule->fit, rule->n_chunks, of->all_persist_bytes));
}

static bool choice_fits(const ptn_rule *rule, const choice *of) {
  int64_t given = rule->request->n_persist;
  if (given >= 0) return ptn_fit_fits(rule->fit, (uint32_t)given, of->given_persist_bytes);
  return ptn_fit_fits(rule->fit, rule->least_persist, of->least_persist_bytes) ||
         ptn_fit_fits(rule->fit, rule->n_chunks, of->all_persist_bytes);
}

/* ---- what the request's own choices need ---- */

/* Fewer chunks than this cannot be persistent, by the tiers behind memory. */
static void measure_least_slots(ptn_rule *rule, uint32_t least_persist) {
  rule->least_persist = least_persist;
  rule->least_slots_bytes = ptn_fit_slots(rule->fit, least_persist, rule->fit->few);
}

/* With modes and n_persist free. The least that the safest candidate needs is returned. */
static int64_t measure_free(ptn_rule *rule) {
  int64_t safest_bytes = INT64_MAX;
  rule->smallest_bytes = INT64_MAX;
  for (uint32_t k = 0; k <= rule->n_blocks; k++) {
    rule->choices[k] = measure_choice(rule, k, NULL, -1);
    rule->smallest_bytes = lesser(rule->smallest_bytes, free_budget_bytes(rule, &rule->choices[k]));
    safest_bytes = lesser(safest_bytes, rule->choices[k].least_persist_bytes);
  }
  return safest_bytes;
}

static ptn_status measure(ptn_rule *rule) {
  const ptn_plan_request *request = rule->request;
  bool given = request->n_persist >= 0;
  uint32_t n_persist = given ? (uint32_t)request->n_persist : 0, least_persist = rule->fit->least_persist;
  measure_least_slots(rule, least_persist);
  int64_t free_bytes = measure_free(rule), safest_bytes = INT64_MAX;
  if (request->modes) {
    uint64_t stash_bytes = ptn_swap_stash_bytes(request, rule->fit->consumer_of_phase, request->modes);
    PTN_TRY(ptn_tiers_least_persist(request, stash_bytes, &least_persist));
    measure_least_slots(rule, least_persist);
  }
  if (given && n_persist < least_persist) {
    return ptn_fail_budget(
        (uint64_t)rule->smallest_bytes, request->budget_bytes, (uint64_t)rule->smallest_bytes,
        "%u of %u chunks are to stay in the device's memory, and there is no disk and %llu bytes of host memory "
        "for the others: give a disk or more host memory, or let at least %u chunks stay",
        n_persist, rule->n_chunks, (unsigned long long)request->host_budget_bytes, least_persist);
  }
  int64_t slots_bytes = given ? ptn_fit_slots(rule->fit, n_persist, rule->fit->few) : 0;
  rule->least_bytes = INT64_MAX;
  for (uint32_t k = 0; k < rule->n_choices; k++) {
    choice *of = &rule->choices[k];
    if (request->modes || given) *of = measure_choice(rule, k, request->modes, request->n_persist);
    of->given_persist_bytes += slots_bytes;
    safest_bytes = lesser(safest_bytes, given ? of->given_persist_bytes : of->least_persist_bytes);
    int64_t least_of = given ? ptn_fit_budget_bytes(rule->fit, n_persist, of->given_persist_bytes) : free_budget_bytes(rule, of);
    rule->least_bytes = lesser(rule->least_bytes, least_of);
  }
  /* Modes given may be better than any pattern. */
  rule->smallest_bytes = lesser(rule->smallest_bytes, rule->least_bytes);
  /* What fits where all is free, fits where it is given. */
  ptn_fit_spare(rule->fit, safest_bytes > free_bytes ? safest_bytes : free_bytes);
  return PTN_OK;
}

void ptn_rule_destroy(ptn_rule *rule) {
  if (!rule) return;
  free(rule->choices);
  free(rule->modes);
  free(rule);
}

ptn_status ptn_rule_create(ptn_rule **out, ptn_fit *fit) {
  *out = NULL;
  ptn_rule *rule = calloc(1, sizeof *rule);
  if (!rule) return ptn_fail(PTN_MEMORY, "no memory to plan");
  rule->fit = fit;
  rule->request = fit->request;
  rule->n_chunks = fit->request->n_chunks;
  rule->n_blocks = fit->request->n_blocks;
  rule->n_choices = fit->request->modes ? 1 : rule->n_blocks + 1;
  rule->choices = calloc((size_t)rule->n_blocks + 1, sizeof *rule->choices);
  rule->modes = calloc((size_t)rule->n_blocks + 1, sizeof *rule->modes);
  ptn_status status = !rule->choices || !rule->modes
                          ? ptn_fail(PTN_MEMORY, "no memory to plan %u chunks, %u blocks", rule->n_chunks, rule->n_blocks)
                          : measure(rule);
  if (status != PTN_OK) ptn_rule_destroy(rule);
  else *out = rule;
  return status;
}

uint64_t ptn_rule_least_bytes(const ptn_rule *rule) { return (uint64_t)rule->least_bytes; }
uint64_t ptn_rule_smallest_bytes(const ptn_rule *rule) { return (uint64_t)rule->smallest_bytes; }

/* ---- choosing ---- */

/* How many chunks are persistent, and the window of the others, for the modes composed last. */
static void choose_persist(const ptn_rule *rule, const choice *of, uint32_t *n_persist, uint32_t *window) {
  ptn_fit *fit = rule->fit;
  const ptn_plan_request *request = rule->request;
  bool given = request->n_persist >= 0;
  uint32_t fewest = ptn_fit_fits(fit, rule->least_persist, of->least_persist_bytes) ? rule->least_persist : rule->n_chunks;
  uint32_t least = given ? (uint32_t)request->n_persist : fewest;
  if (given && request->n_buffer > 0) {
    *n_persist = least;
    *window = ptn_fit_window_of(fit, least, (uint32_t)ptn_min_u64((uint64_t)request->n_buffer, UINT32_MAX));
    if (*window > 0) return;
  }
  for (uint32_t p = given ? least : rule->n_chunks;; p--) {
    int64_t needed_bytes = ptn_fit_without_slots(fit, p);
    if (ptn_fit_fits(fit, p, needed_bytes) && ptn_fit_fits(fit, p, needed_bytes + ptn_fit_slots(fit, p, fit->more))) {
      *n_persist = p;
      *window = fit->more;
      return;
    }
    if (p == least) break;
  }
  *n_persist = least;
  *window = fit->few;
}

bool ptn_rule_choose(ptn_rule *rule, ptn_mode *modes, uint32_t *n_persist, uint32_t *window) {
  for (uint32_t k = rule->n_choices; k-- > 0;) {
    if (!choice_fits(rule, &rule->choices[k])) continue;
    ptn_rule_modes(rule, k, modes);
    ptn_fit_compose(rule->fit, modes);
    choose_persist(rule, &rule->choices[k], n_persist, window);
    return true;
  }
  return false;
}
