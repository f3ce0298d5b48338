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
 * Where none of that fits there is one more choice: all blocks swap (or have the modes given), counted with what swapping cannot do
 * without (peak.c). It is the last as it waits for the disk; but where modes and chunks are given, it is taken before the same that
 * is squeezed (room.c), and where slots are given too, before the same that has no room for them.
 *
 * Invariants, for two requests that differ in their budgets alone: the one with more keeps at least as many blocks, and with the
 * same modes at least as many chunks; every budget from smallest_bytes on has a plan; no plan passes its budget. They hold
 * because each choice is "the largest that fits" among needs that do not depend on the budget (fit.c, room.c).
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/parts.h"

#define UNKNOWN INT64_MIN

enum { KEEP_LAST, KEEP_FIRST, KEEP_SPREAD, N_PATTERNS };

/* The least that is needed with the fewest slots, without the ring itself; INT64_MAX: there is no such number of chunks. */
typedef struct least {
  int64_t bytes;
  uint32_t n_persist;
} least;

typedef struct choice { /* of modes: k blocks kept by a pattern, or the caller's */
  uint32_t pattern;
  least ring, ringless; /* over the numbers of persistent chunks that want a ring, and over those that want none */
} choice;

struct ptn_rule {
  ptn_fit *fit;
  const ptn_plan_request *request;
  uint32_t n_chunks, n_blocks, n_choices;
  uint32_t least_persist, most_persist; /* numbers of chunks that the request allows */
  int64_t *slots_bytes; /* of the fewest slots, by number of persistent chunks; UNKNOWN: not asked for yet */
  int64_t least_bytes;       /* the smallest budget of the request's own choices */
  int64_t smallest_bytes;    /* the same with modes and n_persist free */
  int64_t safest_bytes;      /* and without the last choice, which counts with the least */
  ptn_mode *modes;           /* composed last */
  choice *choices;           /* by number of kept blocks */
  choice swapped;            /* what is taken where none of them fits */
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

static int64_t slots_bytes(ptn_rule *rule, uint32_t n_persist) {
  int64_t *known = &rule->slots_bytes[n_persist];
  if (*known == UNKNOWN) *known = ptn_fit_slots(rule->fit, n_persist, rule->fit->few);
  return *known;
}

/* The least budget of a choice. */
static int64_t choice_budget_bytes(const ptn_rule *rule, const choice *of) {
  int64_t ring_bytes = of->ring.bytes < INT64_MAX ? ptn_fit_budget_bytes(rule->fit, 0, of->ring.bytes) : INT64_MAX;
  return ptn_min_i64(ring_bytes, of->ringless.bytes);
}

/* Of the modes composed last. Slots may take less with more chunks persistent, so that all numbers are looked at; but what is
 * needed without slots, an update in step() left aside, grows with each chunk by what that holds, at least, and soon is more than
 * the least found. */
static choice measure_modes(ptn_rule *rule, uint32_t pattern) {
  ptn_fit *fit = rule->fit;
  choice found = {.pattern = pattern, .ring = {.bytes = INT64_MAX}, .ringless = {.bytes = INT64_MAX}};
  int64_t computed_bytes = ptn_fit_computed_bytes(fit, rule->least_persist);
  for (uint32_t p = rule->least_persist;; p++) {
    least *of = ptn_fit_has_ring(fit, p) ? &found.ring : &found.ringless;
    if (computed_bytes < of->bytes && computed_bytes + slots_bytes(rule, p) < of->bytes) {
      computed_bytes = ptn_fit_computed_bytes(fit, p);
      int64_t needed_bytes = ptn_fit_without_slots(fit, p) + slots_bytes(rule, p);
      if (needed_bytes < of->bytes) *of = (least){.bytes = needed_bytes, .n_persist = p};
    }
    if (p == rule->most_persist) return found;
    computed_bytes += (int64_t)(rule->request->chunks[p].param_bytes + rule->request->chunks[p].state_bytes);
  }
}

/* The needs of keeping n_keep blocks, by the pattern that needs least. */
static choice measure_choice(ptn_rule *rule, uint32_t n_keep, const ptn_mode *given) {
  choice best = {.pattern = 0};
  bool one_way = given || n_keep == 0 || n_keep == rule->n_blocks;
  for (uint32_t pattern = 0; pattern < (one_way ? 1 : N_PATTERNS); pattern++) {
    if (!given) write_pattern(rule, n_keep, pattern, rule->modes);
    ptn_fit_compose(rule->fit, given ? given : rule->modes);
    choice found = measure_modes(rule, pattern);
    if (pattern == 0 || choice_budget_bytes(rule, &found) < choice_budget_bytes(rule, &best)) best = found;
  }
  return best;
}

static bool least_fits(const ptn_rule *rule, const least *of) {
  return of->bytes < INT64_MAX && ptn_fit_fits(rule->fit, of->n_persist, of->bytes);
}

static bool choice_fits(const ptn_rule *rule, const choice *of) {
  return least_fits(rule, &of->ring) || least_fits(rule, &of->ringless);
}

/* ---- what the request's own choices need ---- */

/* Returns whether any swaps. */
static bool write_swapped(const ptn_rule *rule, const ptn_mode *given, ptn_mode *modes) {
  bool any = false;
  for (uint32_t i = 0; i < rule->n_blocks; i++) {
    modes[i] = ptn_mode_least(given, i);
    any |= modes[i] == PTN_SWAP;
  }
  return any;
}

/* Of the modes given, else of all blocks swapped, as far as the stash has a place. */
static choice measure_swapped(ptn_rule *rule, const ptn_mode *given) {
  choice none = {.ring = {.bytes = INT64_MAX}, .ringless = {.bytes = INT64_MAX}}, found;
  uint32_t least_persist = rule->least_persist, with_stash;
  if (!ptn_peak_knows_least(rule->request) || !write_swapped(rule, given, rule->modes)) return none;
  uint64_t stash_bytes = ptn_swap_stash_bytes(rule->request, rule->fit->consumer_of_phase, rule->modes);
  if (ptn_tiers_least_persist(rule->request, stash_bytes, &with_stash) != PTN_OK || with_stash > rule->most_persist) return none;
  rule->fit->least = true;
  ptn_fit_compose(rule->fit, rule->modes);
  if (rule->least_persist < with_stash) rule->least_persist = with_stash;
  found = measure_modes(rule, 0);
  rule->least_persist = least_persist;
  rule->fit->least = false;
  return found;
}

/* What choices need at least: with a ring, or without one where that is less; the other, or both where there is none, is 0. */
typedef struct needs {
  int64_t ring_bytes, ringless_bytes;
} needs;

/* Adds those of one choice where it needs less than what there is already. Returns the least budget of both. */
static int64_t add_needs(const ptn_rule *rule, const choice *of, int64_t already_bytes, needs *to) {
  int64_t least_bytes = choice_budget_bytes(rule, of);
  if (least_bytes >= already_bytes) return already_bytes;
  bool ringless = of->ringless.bytes == least_bytes;
  to->ring_bytes = ptn_max_i64(to->ring_bytes, ringless ? 0 : of->ring.bytes);
  to->ringless_bytes = ptn_max_i64(to->ringless_bytes, ringless ? least_bytes : 0);
  return least_bytes;
}

/* Adds those of the one that needs least, by either. Returns its least budget. */
static int64_t measure_choices(ptn_rule *rule, const ptn_mode *given, uint32_t n_choices, needs *to) {
  choice least = {.ring = {.bytes = INT64_MAX}, .ringless = {.bytes = INT64_MAX}};
  for (uint32_t k = 0; k < n_choices; k++) {
    rule->choices[k] = measure_choice(rule, k, given);
    least.ring.bytes = ptn_min_i64(least.ring.bytes, rule->choices[k].ring.bytes);
    least.ringless.bytes = ptn_min_i64(least.ringless.bytes, rule->choices[k].ringless.bytes);
  }
  return add_needs(rule, &least, INT64_MAX, to);
}

static ptn_status measure(ptn_rule *rule) {
  const ptn_plan_request *request = rule->request;
  uint32_t least_persist = rule->least_persist = rule->fit->least_persist;
  rule->most_persist = rule->n_chunks;
  needs safest = {0};
  rule->safest_bytes = measure_choices(rule, NULL, rule->n_blocks + 1, &safest);
  rule->swapped = measure_swapped(rule, NULL);
  rule->least_bytes = rule->smallest_bytes = add_needs(rule, &rule->swapped, rule->safest_bytes, &safest);
  if (request->modes) {
    uint64_t stash_bytes = ptn_swap_stash_bytes(request, rule->fit->consumer_of_phase, request->modes);
    PTN_TRY(ptn_tiers_least_persist(request, stash_bytes, &least_persist));
    rule->least_persist = least_persist;
  }
  if (request->n_persist >= 0) rule->least_persist = rule->most_persist = (uint32_t)request->n_persist;
  if (rule->least_persist < least_persist) {
    return ptn_fail_budget(
        (uint64_t)rule->smallest_bytes, request->budget_bytes, (uint64_t)rule->smallest_bytes,
        "%u of %u chunks are to stay in the device's memory, and there are %llu bytes of disk and %llu of host memory "
        "for the others: give a larger disk or more host memory, or let at least %u chunks stay",
        rule->least_persist, rule->n_chunks, (unsigned long long)ptn_tiers_disk_bytes(request),
        (unsigned long long)request->host_budget_bytes, least_persist);
  }
  if (request->modes || request->n_persist >= 0) {
    rule->least_bytes = measure_choices(rule, request->modes, rule->n_choices, &safest);
    rule->swapped = measure_swapped(rule, request->modes);
    rule->least_bytes = add_needs(rule, &rule->swapped, rule->least_bytes, &safest);
  }
  /* Modes given may be better than any pattern. */
  rule->smallest_bytes = ptn_min_i64(rule->smallest_bytes, rule->least_bytes);
  /* What fits where all is free, fits where it is given. */
  ptn_fit_spare(rule->fit, safest.ring_bytes, safest.ringless_bytes);
  return PTN_OK;
}

void ptn_rule_destroy(ptn_rule *rule) {
  if (!rule) return;
  free(rule->choices);
  free(rule->slots_bytes);
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
  rule->slots_bytes = calloc((size_t)rule->n_chunks + 1, sizeof *rule->slots_bytes);
  for (uint32_t p = 0; rule->slots_bytes && p <= rule->n_chunks; p++) rule->slots_bytes[p] = UNKNOWN;
  ptn_status status = !rule->choices || !rule->slots_bytes || !rule->modes
                          ? ptn_fail(PTN_MEMORY, "no memory to plan %u chunks, %u blocks", rule->n_chunks, rule->n_blocks)
                          : measure(rule);
  if (status != PTN_OK) ptn_rule_destroy(rule);
  else *out = rule;
  return status;
}

uint64_t ptn_rule_least_bytes(const ptn_rule *rule) { return (uint64_t)rule->least_bytes; }
uint64_t ptn_rule_smallest_bytes(const ptn_rule *rule) { return (uint64_t)rule->smallest_bytes; }
uint64_t ptn_rule_safest_bytes(const ptn_rule *rule) { return (uint64_t)rule->safest_bytes; }

/* ---- choosing ---- */

/* How many chunks are persistent, and the window of the others, for the modes composed last. */
static void choose_persist(const ptn_rule *rule, const choice *of, uint32_t *n_persist, uint32_t *window) {
  ptn_fit *fit = rule->fit;
  const ptn_plan_request *request = rule->request;
  /* Without a ring there are more of them than with one. */
  uint32_t least = least_fits(rule, &of->ringless) ? of->ringless.n_persist : of->ring.n_persist;
  if (request->n_persist >= 0 && request->n_buffer > 0) {
    *n_persist = least;
    *window = ptn_fit_given_window(fit, least);
    if (*window > 0) return;
  }
  for (uint32_t p = rule->most_persist;; p--) {
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

static bool is_squeezed(const ptn_rule *rule, const choice *of) {
  const least *with = least_fits(rule, &of->ringless) ? &of->ringless : &of->ring;
  return ptn_fit_is_squeezed(rule->fit, with->n_persist, with->bytes);
}

/* Whether so many slots as are given, beside modes and chunks, fit. */
static bool slots_fit(const ptn_rule *rule, bool least) {
  ptn_fit *fit = rule->fit;
  const ptn_plan_request *request = rule->request;
  fit->least = least;
  ptn_fit_compose(fit, request->modes);
  bool found = ptn_fit_given_window(fit, (uint32_t)request->n_persist) > 0;
  fit->least = false;
  return found;
}

/* Of modes and chunks given, which then are those of swapped as well. */
static bool prefers_least(const ptn_rule *rule) {
  if (!choice_fits(rule, &rule->swapped)) return false;
  if (!is_squeezed(rule, &rule->swapped) && is_squeezed(rule, &rule->choices[0])) return true;
  return rule->request->n_buffer > 0 && !slots_fit(rule, false) && slots_fit(rule, true);
}

bool ptn_rule_choose(ptn_rule *rule, ptn_mode *modes, uint32_t *n_persist, uint32_t *window) {
  bool given = rule->request->modes && rule->request->n_persist >= 0;
  if (given && prefers_least(rule)) return ptn_rule_choose_least(rule, modes, n_persist, window);
  for (uint32_t k = rule->n_choices; k-- > 0;) {
    if (!choice_fits(rule, &rule->choices[k])) continue;
    ptn_rule_modes(rule, k, modes);
    ptn_fit_compose(rule->fit, modes);
    choose_persist(rule, &rule->choices[k], n_persist, window);
    return true;
  }
  return ptn_rule_choose_least(rule, modes, n_persist, window);
}

bool ptn_rule_choose_least(ptn_rule *rule, ptn_mode *modes, uint32_t *n_persist, uint32_t *window) {
  if (!choice_fits(rule, &rule->swapped)) return false;
  rule->fit->least = true;
  write_swapped(rule, rule->request->modes, modes);
  ptn_fit_compose(rule->fit, modes);
  choose_persist(rule, &rule->swapped, n_persist, window);
  return true;
}
