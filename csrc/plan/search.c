/* The search: which candidate is taken where times are known.
 *
 * Problem: modes of blocks, persistent chunks and slots share one budget, and what is best depends on which lanes still have
 * time. Simulating all is too much. Design: best first. A candidate is first one of many that are bounded together (sums.c), then
 * bounded alone (bounds.c), then simulated (simulate.c). Heaps give what may still be best; when nothing may, what is best is
 * the answer. Whenever something better was found, what is near it is tried before (climb.c): the better the best, the less is
 * left to look at.
 *
 *   ROUGH      a set of kept blocks, whatever else; opened into numbers of persistent chunks and windows
 *   COUNTED    with both, bounded by sums; opened into choices of blocks that swap
 *   PLACED     a candidate, with its bound; then it is simulated
 *
 * The order: forecasts in steps of half a percent; in one step more persistent chunks win, then more kept blocks, then fewer
 * bytes moved, then the later blocks kept. It is an order of all candidates, which no budget changes: what is best among those
 * that fit is best in every smaller choice of them that has it. So a plan given again is chosen again, and more memory is not
 * forecast slower by more than a step, as long as the search comes to its end within its limit of work; where it does not (many
 * blocks, each of its own kind, on lanes that are always busy), what it has found by climbing from several sides; by how much
 * more memory may be slower then is measured (docs/decisions/0007-plans-by-time.md). Where
 * everything fits in memory that is taken whatever the forecasts: nothing moves then, and forecasts of moving are not as certain
 * as that; beside modes that are given no chunk moves. It costs at most its own updates in step(). Among several ranks gradients
 * move in any case, and each rank updates all that stays: there it is one candidate of many.
 *
 * The number of persistent chunks is the most that fits beside modes and window; of few chunks any number, of many also some
 * fewer, for persistent chunks are updated in step(), others behind backward.
 *
 * Invariants: nothing over the limit of the fit is looked at; the answer is never after the rule's in the order; the work is
 * limited by the size of the request alone, deterministic.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/search_internal.h"

#define FEW_CHUNKS_GIVEN 128 /* of which any number is tried where modes are given, and nothing else is to be found */
#define N_FEWER 6            /* numbers of persistent chunks below the most that fits, of many chunks */
#define N_RANGES 3           /* of numbers of persistent chunks, in the bound of a set */
#define N_SWAP_STEPS 8
#define N_STARTS 6           /* numbers of kept blocks from which to climb */
#define MOST_IN_VAIN 4       /* tried near something after the last that was better */
#define CLIMB_PART 4          /* of the work, one in so many for one climb */
#define LEAST_PART 8          /* of the work, one in so many where all blocks swap: only chunks and windows are to be found */
#define MOST_WORK 136000     /* phases, accesses and chunks simulated ... */
#define LEAST_SIMULATIONS 160/* ... but so many candidates at least */
#define MOST_SIMULATIONS 4096
#define BOUNDS_PER_SIMULATION 4   /* as long as one takes ... */
#define WINDOWS_PER_SIMULATION 20 /* ... and the slots of windows of so many chunks in all */
#define MOST_PASSES 3        /* that are simulated: others are as those before them */
#define N_TRIED 16384        /* a power of two, above what is ever simulated */

typedef enum stage { ROUGH, COUNTED, PLACED } stage;

typedef struct entry {
  int32_t step; /* of its bound or forecast */
  uint32_t n_keep;
  uint64_t moved_bytes, lateness; /* lateness: of the kept blocks, the sum of their numbers */
  uint32_t serial; /* the order in which they were made */
  stage stage;
  ptn_choice choice; /* of its n_persist the most that is possible */
} entry;

typedef struct heap { /* the first in the order on top */
  entry *entries;
  uint32_t count, most;
} heap;

typedef struct search {
  ptn_trials trials;
  const ptn_plan_request *request;
  heap open, placed; /* what stands for many, and candidates */
  uint32_t n_serial;
  uint64_t *tried;   /* keys of choices that were simulated, by hash */
  uint32_t n_tried;
  uint64_t size, bound_work, simulated_work, most_work;
  bool found;
  entry best;
  ptn_mode *best_modes;
  uint32_t best_window;
  ptn_forecast best_forecast;
} search;

/* ---- the order ---- */

static int32_t step_of(double ns) { return (int32_t)floor(log(ns > 1 ? ns : 1) / log(PTN_PLAN_ALIKE)); }

/* Less than 0: a comes first. */
static int compare(const entry *a, const entry *b) {
  if (a->step != b->step) return a->step < b->step ? -1 : 1;
  if (a->choice.n_persist != b->choice.n_persist) return a->choice.n_persist > b->choice.n_persist ? -1 : 1;
  if (a->n_keep != b->n_keep) return a->n_keep > b->n_keep ? -1 : 1;
  if (a->moved_bytes != b->moved_bytes) return a->moved_bytes < b->moved_bytes ? -1 : 1;
  if (a->lateness != b->lateness) return a->lateness > b->lateness ? -1 : 1;
  return 0;
}

static bool before(const entry *a, const entry *b) {
  int order = compare(a, b);
  return order != 0 ? order < 0 : a->serial < b->serial;
}

static bool hopeless(const search *at, const entry *of) { return at->found && compare(of, &at->best) >= 0; }

static ptn_status push(search *at, entry of) {
  heap *to = of.stage == PLACED ? &at->placed : &at->open;
  of.serial = at->n_serial++;
  if (hopeless(at, &of)) return PTN_OK;
  if (to->count == to->most) {
    uint32_t most = 2 * to->most + 256;
    entry *entries = realloc(to->entries, most * sizeof *entries);
    if (!entries) return ptn_fail(PTN_MEMORY, "no memory to search among %u candidates", most);
    to->entries = entries;
    to->most = most;
  }
  uint32_t i = to->count++;
  for (; i > 0 && before(&of, &to->entries[(i - 1) / 2]); i = (i - 1) / 2) to->entries[i] = to->entries[(i - 1) / 2];
  to->entries[i] = of;
  return PTN_OK;
}

static entry pop(heap *from) {
  entry first = from->entries[0], last = from->entries[--from->count];
  uint32_t i = 0;
  for (uint32_t child; (child = 2 * i + 1) < from->count; i = child) {
    if (child + 1 < from->count && before(&from->entries[child + 1], &from->entries[child])) child++;
    if (!before(&from->entries[child], &last)) break;
    from->entries[i] = from->entries[child];
  }
  from->entries[i] = last;
  return first;
}

/* ---- candidates ---- */

static uint64_t work(const search *at) {
  return at->bound_work + at->simulated_work + at->trials.slots_work * at->size / WINDOWS_PER_SIMULATION;
}

static bool may_go_on(const search *at) { return work(at) < at->most_work; }

/* The first time: true, and from then on known. */
static bool is_new(search *at, const ptn_choice *choice) {
  uint64_t where = choice->window + ((uint64_t)choice->n_persist << 5) + ((uint64_t)choice->set << 22);
  uint64_t key = (where * 0xC2B2AE3D27D4EB4Fu ^ choice->n_swap) * 8 + (uint64_t)choice->swap + 1; /* as good as unique */
  uint64_t slot = key * 0x9E3779B97F4A7C15u >> 40;
  while (at->tried[slot % N_TRIED] != 0 && at->tried[slot % N_TRIED] != key) slot++;
  bool fresh = at->tried[slot % N_TRIED] != key;
  if (fresh && at->n_tried + 1 < N_TRIED) at->tried[slot % N_TRIED] = key, at->n_tried++;
  return fresh;
}

static int64_t bound_ns(search *at, const ptn_choice *choice, uint64_t *moved_bytes) {
  at->bound_work += at->size / BOUNDS_PER_SIMULATION + 1;
  at->trials.fit->n_bounded++;
  return ptn_trials_bound_ns(&at->trials, choice, moved_bytes);
}

static entry entry_of(search *at, const ptn_choice *choice) {
  const ptn_keep_set *set = &at->trials.families.sets[choice->set];
  entry of = {.stage = PLACED, .choice = *choice, .n_keep = set->n_keep, .lateness = set->lateness};
  of.step = step_of((double)bound_ns(at, choice, &of.moved_bytes));
  return of;
}

/* Its forecast takes the place of its bound; of one that was simulated before nothing is known. */
static entry simulate(search *at, entry of) {
  ptn_forecast forecast = {.step_ns = PTN_NEVER_NS};
  if (is_new(at, &of.choice)) {
    at->simulated_work += at->size;
    at->trials.fit->n_simulated++;
    ptn_trials_simulate(&at->trials, &of.choice, &forecast);
  }
  of.step = step_of((double)forecast.step_ns);
  if (forecast.step_ns >= PTN_NEVER_NS || hopeless(at, &of)) return of;
  at->found = true;
  at->best = of;
  at->best_window = at->trials.fit->windows[of.choice.window];
  at->best_forecast = forecast;
  if (at->request->n_blocks > 0) memcpy(at->best_modes, at->trials.modes, at->request->n_blocks * sizeof *at->best_modes);
  return of;
}

/* A candidate from outside the families: the rule's. */
static void simulate_modes(search *at, const ptn_mode *modes, uint32_t n_persist, uint32_t window) {
  ptn_trials *trials = &at->trials;
  entry of = {.stage = PLACED, .choice = {.n_persist = n_persist}};
  uint32_t n_blocks = at->request->n_blocks;
  while (of.choice.window + 1 < trials->fit->n_windows && trials->fit->windows[of.choice.window] != window) of.choice.window++;
  ptn_trials_simulate_modes(trials, modes, of.choice.window, n_persist, &of.moved_bytes, &at->best_forecast);
  if (at->best_forecast.step_ns >= PTN_NEVER_NS) return;
  for (uint32_t i = 0; i < n_blocks; i++) {
    of.n_keep += modes[i] == PTN_KEEP;
    of.lateness += modes[i] == PTN_KEEP ? i : 0;
  }
  of.step = step_of((double)at->best_forecast.step_ns);
  at->found = true;
  at->best = of;
  at->best_window = window;
  if (modes != at->best_modes && n_blocks > 0) memcpy(at->best_modes, modes, n_blocks * sizeof *modes);
}

/* ---- climbing ---- */

static bool allowed(search *at, const ptn_choice *choice) {
  ptn_trials *trials = &at->trials;
  if (at->request->n_persist >= 0 && at->request->n_buffer > 0) return false;
  return ptn_trials_fits(trials, choice->set, choice->window, choice->n_persist);
}

/* What may be better than this one near it, the most promising first. */
static uint32_t list_hopes(search *at, const entry *from, entry *hopes) {
  ptn_choice near[PTN_CLIMB_MOST_CHOICES];
  uint32_t count = ptn_climb_near(&at->trials, &from->choice, near), n_hopes = 0;
  for (uint32_t i = 0; i < count; i++) {
    if (!allowed(at, &near[i])) continue;
    entry of = entry_of(at, &near[i]);
    uint32_t j = n_hopes++;
    of.serial = i;
    for (; j > 0 && before(&of, &hopes[j - 1]); j--) hopes[j] = hopes[j - 1];
    hopes[j] = of;
  }
  while (n_hopes > 0 && compare(&hopes[n_hopes - 1], from) >= 0) n_hopes--;
  return n_hopes;
}

/* To what is better near it, until nothing is. Of what is near all is tried while it gets better: to list it cost time. */
static void climb(search *at, entry here) {
  entry hopes[PTN_CLIMB_MOST_CHOICES];
  uint64_t most_work = work(at) + at->most_work / CLIMB_PART;
  for (bool better = true; better;) {
    uint32_t n_hopes = list_hopes(at, &here, hopes), in_vain = 0;
    better = false;
    for (uint32_t i = 0; i < n_hopes && (!better || in_vain < MOST_IN_VAIN); i++) {
      if (!may_go_on(at) || work(at) > most_work) return;
      if (compare(&hopes[i], &here) >= 0) break;
      entry there = simulate(at, hopes[i]);
      bool steps_up = compare(&there, &here) < 0;
      if (steps_up) here = there;
      better |= steps_up;
      in_vain = steps_up ? 0 : in_vain + 1;
    }
  }
}

/* ---- opening ---- */

static ptn_status push_set(search *at, uint32_t set) {
  ptn_trials *trials = &at->trials;
  uint32_t first = trials->least_persist, last = ptn_climb_most_without_slots(&at->trials, set);
  int64_t limit_bytes =
      trials->fit->budget_bytes > trials->fit->limit_bytes ? trials->fit->budget_bytes : trials->fit->limit_bytes;
  double lowest_ns = HUGE_VAL;
  if (!ptn_fit_fits(trials->fit, last, ptn_trials_need(trials, set, last))) return PTN_OK;
  for (uint32_t i = 0; i < N_RANGES; i++) {
    uint32_t least = first + (uint32_t)((uint64_t)(last - first + 1) * i / N_RANGES);
    uint32_t next = first + (uint32_t)((uint64_t)(last - first + 1) * (i + 1) / N_RANGES);
    if (least == next) continue;
    double held_bytes = (double)(limit_bytes - ptn_trials_need(trials, set, least));
    lowest_ns = fmin(lowest_ns, ptn_trials_least_ns(trials, set, least, next - 1, held_bytes));
  }
  const ptn_keep_set *of = &trials->families.sets[set];
  ptn_choice choice = {.set = set, .n_persist = last};
  return push(at, (entry){.step = step_of(lowest_ns), .n_keep = of->n_keep, .lateness = of->lateness, .choice = choice});
}

static ptn_status push_counted(search *at, const entry *of, uint32_t window, uint32_t n_persist) {
  ptn_trials *trials = &at->trials;
  uint32_t set = of->choice.set;
  if (!ptn_trials_fits(trials, set, window, n_persist)) return PTN_OK;
  double held_bytes = n_persist < at->request->n_chunks ? (double)ptn_trials_slots_bytes(trials, window, n_persist) : 0;
  entry counted = *of;
  counted.step = step_of(ptn_trials_least_ns(trials, set, n_persist, n_persist, held_bytes));
  counted.choice.n_persist = n_persist;
  counted.choice.window = window;
  counted.stage = COUNTED;
  return push(at, counted);
}

static ptn_status open_window(search *at, const entry *of, uint32_t window, uint32_t last) {
  uint32_t n_chunks = at->request->n_chunks, few = at->request->modes ? FEW_CHUNKS_GIVEN : PTN_FEW_CHUNKS;
  uint32_t fewer = n_chunks <= few ? n_chunks : N_FEWER;
  int64_t most = ptn_climb_most_persistent(&at->trials, of->choice.set, window, last);
  if (most < 0) return PTN_OK;
  PTN_TRY(push_counted(at, of, window, (uint32_t)most));
  for (uint32_t i = 0; i < fewer; i++) { /* the same numbers for every budget */
    uint32_t n_persist = (uint32_t)((uint64_t)n_chunks * i / fewer), least = at->trials.least_persist;
    if (n_persist < least && (i + 1 == fewer || (uint64_t)n_chunks * (i + 1) / fewer > least)) n_persist = least;
    if (n_persist >= least && (int64_t)n_persist < most) PTN_TRY(push_counted(at, of, window, n_persist));
  }
  return PTN_OK;
}

/* The window that a given number of slots stands for; all where it stands for none. */
static uint32_t given_window(search *at, uint32_t set, uint32_t n_persist) {
  const ptn_plan_request *request = at->request;
  ptn_trials *trials = &at->trials;
  if (request->n_persist < 0 || request->n_buffer <= 0) return 0;
  ptn_trials_need(trials, set, n_persist); /* composes the set */
  return ptn_fit_given_window(trials->fit, n_persist);
}

static ptn_status open_set(search *at, const entry *of) {
  ptn_trials *trials = &at->trials;
  uint32_t set = of->choice.set, last = ptn_climb_most_without_slots(&at->trials, set), given = given_window(at, set, last);
  if (trials->families.sets[set].edge) {
    for (uint32_t window = 0; window < 2 && window < trials->fit->n_windows; window++) {
      PTN_TRY(push_counted(at, of, window, trials->least_persist));
    }
    return last == at->request->n_chunks ? push_counted(at, of, 0, last) : PTN_OK;
  }
  for (uint32_t window = 0; window < trials->fit->n_windows; window++) {
    if (given == 0 || given == trials->fit->windows[window]) PTN_TRY(open_window(at, of, window, last));
  }
  return PTN_OK;
}

static double bound_of_swaps(search *at, const entry *of, uint32_t n_swap) {
  ptn_choice choice = of->choice;
  uint64_t moved_bytes;
  choice.n_swap = n_swap;
  return (double)bound_ns(at, &choice, &moved_bytes);
}

/* The number with the lowest bound: recomputation falls with it, what lanes carry grows. */
static uint32_t best_swaps(search *at, const entry *of, uint32_t n_swappable) {
  uint32_t best = 0, width = (n_swappable + N_SWAP_STEPS - 1) / N_SWAP_STEPS;
  double lowest_ns = bound_of_swaps(at, of, 0);
  for (uint32_t n_swap = width; n_swap <= n_swappable; n_swap += width) {
    double ns = bound_of_swaps(at, of, n_swap);
    if (ns < lowest_ns) lowest_ns = ns, best = n_swap;
  }
  while (width > 1) {
    width = (width + 1) / 2;
    uint32_t middle = best;
    for (int side = -1; side <= 1; side += 2) {
      int64_t n_swap = (int64_t)middle + side * (int64_t)width;
      if (n_swap < 0 || n_swap > (int64_t)n_swappable) continue;
      double ns = bound_of_swaps(at, of, (uint32_t)n_swap);
      if (ns < lowest_ns) lowest_ns = ns, best = (uint32_t)n_swap;
    }
    if (width == 2) width = 1; /* both sides of 1 were not yet seen from the last middle */
  }
  return best;
}

static ptn_status place(search *at, const entry *of, ptn_swap_family family, uint32_t n_swap) {
  ptn_choice choice = of->choice;
  choice.swap = family;
  choice.n_swap = n_swap;
  return push(at, entry_of(at, &choice));
}

static ptn_status open_counted(search *at, const entry *of) {
  uint32_t n_swappable = ptn_families_swappable(&at->trials.families, of->choice.set);
  PTN_TRY(place(at, of, PTN_SWAP_EARLY, 0));
  if (ptn_families_every_swap(n_swappable)) {
    for (uint32_t bits = 1; bits < (uint32_t)1 << n_swappable; bits++) PTN_TRY(place(at, of, PTN_SWAP_EVERY, bits));
    return PTN_OK;
  }
  /* Beside the number with the lowest bound some fewer: bounds are lower than what happens. */
  uint32_t best = best_swaps(at, of, n_swappable), least = best + 1;
  for (uint32_t part = 4; part >= 2; part--) {
    uint32_t n_swap = best * part / 4;
    if (n_swap == 0 || n_swap >= least) continue;
    least = n_swap;
    for (int family = 0; family < PTN_N_SWAP_FAMILIES; family++) PTN_TRY(place(at, of, (ptn_swap_family)family, n_swap));
  }
  return PTN_OK;
}

/* ---- the search ---- */

static ptn_choice all_swap(ptn_choice choice, uint32_t n_swappable) {
  bool every = ptn_families_every_swap(n_swappable);
  choice.swap = every ? PTN_SWAP_EVERY : PTN_SWAP_EARLY;
  choice.n_swap = every ? ((uint32_t)1 << n_swappable) - 1 : n_swappable;
  return choice;
}

/* A few sets from none kept to all, with a window, all others recomputed or all swapped: the best of them is where climbing
 * begins. */
static void start(search *at, uint32_t window) {
  ptn_trials *trials = &at->trials;
  entry best = {.step = INT32_MAX};
  for (uint32_t i = 0; i < N_STARTS; i++) {
    uint32_t set = (uint32_t)((uint64_t)(trials->families.n_sets - 1) * i / (N_STARTS - 1));
    ptn_choice choice = {.set = set, .window = window};
    int64_t most = ptn_climb_most_persistent(trials, set, window, trials->most_persist);
    if (most < 0) continue;
    choice.n_persist = (uint32_t)most;
    if (!allowed(at, &choice)) continue;
    uint32_t n_swappable = ptn_families_swappable(&trials->families, set);
    for (int swaps = 0; swaps < (n_swappable > 0 ? 2 : 1); swaps++) {
      if (swaps == 1) choice = all_swap(choice, n_swappable);
      entry hope = entry_of(at, &choice);
      if (swaps == 1 && compare(&hope, &best) >= 0) continue;
      entry there = simulate(at, hope);
      if (compare(&there, &best) < 0) best = there;
    }
  }
  if (best.step < INT32_MAX) climb(at, best);
}

static ptn_status search_all(search *at) {
  uint32_t n_windows = at->trials.fit->n_windows;
  start(at, 0);
  if (n_windows > 2) start(at, n_windows / 2);
  if (n_windows > 1) start(at, n_windows - 1);
  for (uint32_t set = 0; set < at->trials.families.n_sets; set++) PTN_TRY(push_set(at, set));
  while (may_go_on(at)) {
    if (at->open.count > 0 && hopeless(at, &at->open.entries[0])) at->open.count = 0;
    if (at->placed.count > 0 && hopeless(at, &at->placed.entries[0])) at->placed.count = 0;
    if (at->open.count + at->placed.count == 0) break;
    bool first = at->open.count == 0 || (at->placed.count > 0 && before(&at->placed.entries[0], &at->open.entries[0]));
    if (at->placed.count > 0 && (first || 2 * at->simulated_work <= work(at))) {
      entry there = simulate(at, pop(&at->placed));
      if (compare(&there, &at->best) <= 0) climb(at, there);
      continue;
    }
    entry next = pop(&at->open);
    PTN_TRY(next.stage == COUNTED ? open_counted(at, &next) : open_set(at, &next));
  }
  return PTN_OK;
}

/* What is left over goes to reading further ahead: the widest window with which the best is forecast as fast, in the steps of
 * the order. */
static void widen(search *at) {
  ptn_fit *fit = at->trials.fit;
  uint32_t n_persist = at->best.choice.n_persist;
  uint64_t moved_bytes;
  ptn_forecast forecast;
  if (at->request->n_persist >= 0 && at->request->n_buffer > 0) return; /* slots are given */
  for (uint32_t window = fit->n_windows; window-- > 0;) {
    if (fit->windows[window] <= at->best_window) continue;
    if (!ptn_trials_has_room(&at->trials, at->best_modes, window, n_persist)) continue;
    ptn_trials_simulate_modes(&at->trials, at->best_modes, window, n_persist, &moved_bytes, &forecast);
    fit->n_simulated++;
    if (step_of((double)forecast.step_ns) > at->best.step) continue;
    at->best_window = fit->windows[window];
    at->best_forecast = forecast;
  }
}

/* Everything in memory that may be, and all of it fits: no chunk moves then, and nothing at all where modes are not given. */
static bool is_ample(search *at, ptn_mode *modes) {
  const ptn_plan_request *request = at->request;
  ptn_fit *fit = at->trials.fit;
  if (request->n_ranks > 1) return false;
  for (uint32_t i = 0; i < request->n_blocks; i++) {
    modes[i] = request->modes ? request->modes[i] : PTN_KEEP;
  }
  if (at->trials.most_persist < request->n_chunks) return false;
  ptn_fit_compose(fit, modes);
  return ptn_fit_fits(fit, request->n_chunks, ptn_fit_without_slots(fit, request->n_chunks));
}

static void search_destroy(search *at) {
  ptn_trials_destroy(&at->trials);
  free(at->open.entries);
  free(at->placed.entries);
  free(at->tried);
  free(at->best_modes);
}

static ptn_status search_create(search *at, ptn_fit *fit, const ptn_rule *rule) {
  const ptn_plan_request *request = fit->request;
  *at = (search){.request = request};
  uint64_t passes = ptn_min_u64(ptn_max_u64(request->n_passes, 1), MOST_PASSES);
  at->size = passes * ((uint64_t)request->n_phases + request->n_accesses + request->n_chunks + 1);
  at->most_work = ptn_min_u64(ptn_max_u64(MOST_WORK, LEAST_SIMULATIONS * at->size), MOST_SIMULATIONS * at->size);
  if (fit->least) at->most_work /= LEAST_PART;
  at->tried = calloc(N_TRIED, sizeof *at->tried);
  at->best_modes = calloc((size_t)request->n_blocks + 1, sizeof *at->best_modes);
  if (!at->tried || !at->best_modes) return ptn_fail(PTN_MEMORY, "no memory to search plans of %u blocks", request->n_blocks);
  return ptn_trials_create(&at->trials, fit, rule);
}

ptn_status ptn_search(ptn_fit *fit, const ptn_rule *rule, ptn_mode *modes, uint32_t *n_persist, uint32_t *window,
                      ptn_forecast *forecast) {
  search at;
  ptn_status status = search_create(&at, fit, rule);
  if (status == PTN_OK && is_ample(&at, at.best_modes)) {
    simulate_modes(&at, at.best_modes, fit->request->n_chunks, fit->more);
  } else if (status == PTN_OK) {
    simulate_modes(&at, modes, *n_persist, *window);
    status = search_all(&at);
    if (status == PTN_OK && at.found) widen(&at);
  }
  if (status == PTN_OK && !at.found) {
    status = ptn_fail(PTN_INVALID,
                      "profile: every plan for this budget needs a lane of speed 0 bytes/s; give its speed, or more memory");
  }
  if (status == PTN_OK) {
    if (fit->request->n_blocks > 0) memcpy(modes, at.best_modes, fit->request->n_blocks * sizeof *modes);
    *n_persist = at.best.choice.n_persist;
    *window = at.best_window;
    *forecast = at.best_forecast;
  }
  search_destroy(&at);
  return status;
}
