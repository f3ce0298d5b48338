/* The search: which candidate is taken where times are known.
 *
 * Problem: modes of blocks, persistent chunks and slots share one budget, and what is best depends on which lanes still have
 * time. Simulating all is too much. Design: best first. A candidate is first one of many that are bounded together (sums.c), then
 * bounded alone (bounds.c), then simulated (simulate.c). A heap gives what may still be best; as soon as that has been simulated
 * it is the answer.
 *
 *   ROUGH      a set of kept blocks, whatever else; opened into numbers of persistent chunks and windows
 *   COUNTED    with both, bounded by sums; opened into choices of blocks that swap
 *   PLACED     a candidate, with its bound; then it is simulated
 *
 * The order: forecasts in steps of half a percent; in one step more persistent chunks win, then more kept blocks, then fewer bytes
 * moved. It is an order of all candidates, which no budget changes: what is best among those that fit is best in every smaller
 * choice of them that has it. So a plan given again is chosen again, and more memory is never forecast slower by more than
 * a step. Where everything fits in memory that is taken whatever the forecasts: nothing moves then, and forecasts of moving are
 * worth less than a step of certainty. It costs at most its own updates in step().
 *
 * The number of persistent chunks is the most that fits beside modes and window; of few chunks any number, of many also some fewer,
 * for persistent chunks are updated in step(), others behind backward.
 *
 * Invariants: nothing over the limit of the fit is looked at; the answer is never after the rule's in the order; the work is
 * limited by the size of the request alone (MOST_WORK), deterministic.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/search_internal.h"

#define STEP 1.005             /* forecasts closer than this are alike */
#define FEW_CHUNKS 16          /* any number of them persistent */
#define N_FEWER 6              /* numbers of persistent chunks below the most that fits, of many chunks */
#define N_RANGES 6             /* of numbers of persistent chunks, in the bound of a set */
#define N_SWAP_STEPS 8
#define MOST_WORK 60000        /* phases, accesses and chunks simulated ... */
#define LEAST_SIMULATIONS 64   /* ... but so many candidates at least */
#define MOST_SIMULATIONS 4096
#define BOUNDS_PER_SIMULATION 12
#define UNKNOWN INT64_MIN

typedef enum stage { ROUGH, COUNTED, PLACED } stage;

typedef struct entry {
  int32_t step;          /* of its bound or forecast */
  uint32_t n_persist, n_keep;
  uint64_t moved_bytes;
  uint32_t serial;       /* the order in which they were made */
  uint32_t set, window;
  uint32_t n_swap;
  ptn_swap_family swap;
  stage stage;
} entry;

typedef struct heap { /* the first in the order on top */
  entry *entries;
  uint32_t count, most;
} heap;

typedef struct search {
  ptn_fit *fit;
  const ptn_plan_request *request;
  ptn_families families;
  ptn_sums *sums;
  ptn_bounds *bounds;
  ptn_simulation *simulation;
  uint32_t least_persist, most_persist;

  heap open, placed;     /* what stands for many, and candidates */
  uint32_t n_serial;

  int64_t *slots_bytes;  /* by window and number of persistent chunks; UNKNOWN */
  uint32_t *slots_count;
  uint32_t assigned_window, assigned_persist; /* in the fit now */

  uint32_t composed_set; /* in the fit's phases now, with these modes but for blocks that swap */
  int64_t *needs;        /* of the composed set without slots, by number of persistent chunks; UNKNOWN */
  uint32_t last_forward; /* the last phase before backward comes to the blocks */
  ptn_mode *modes;

  uint64_t bound_work, simulated_work, most_work;
  bool found;
  entry best;
  ptn_mode *best_modes;
  uint32_t best_window;
  ptn_forecast best_forecast;
} search;

/* ---- the order ---- */

static int32_t step_of(double ns) { return (int32_t)floor(log(ns > 1 ? ns : 1) / log(STEP)); }

/* Less than 0: a comes first. */
static int compare(const entry *a, const entry *b) {
  if (a->step != b->step) return a->step < b->step ? -1 : 1;
  if (a->n_persist != b->n_persist) return a->n_persist > b->n_persist ? -1 : 1;
  if (a->n_keep != b->n_keep) return a->n_keep > b->n_keep ? -1 : 1;
  if (a->moved_bytes != b->moved_bytes) return a->moved_bytes < b->moved_bytes ? -1 : 1;
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

/* ---- needs ---- */

/* Kept or away is all that memory depends on. */
static void compose_set(search *at, uint32_t set) {
  if (at->composed_set == set) return;
  ptn_families_modes(&at->families, set, PTN_SWAP_EARLY, 0, at->modes);
  ptn_fit_compose(at->fit, at->modes);
  at->composed_set = set;
  for (uint32_t p = 0; p <= at->request->n_chunks; p++) at->needs[p] = UNKNOWN;
}

static int64_t need(search *at, uint32_t n_persist) {
  if (at->needs[n_persist] == UNKNOWN) at->needs[n_persist] = ptn_fit_without_slots(at->fit, n_persist);
  return at->needs[n_persist];
}

static void assign(search *at, uint32_t window, uint32_t n_persist) {
  if (at->assigned_window == window && at->assigned_persist == n_persist) return;
  size_t cell = (size_t)window * (at->request->n_chunks + 1) + n_persist;
  at->slots_bytes[cell] = ptn_fit_slots(at->fit, n_persist, at->fit->windows[window]);
  at->slots_count[cell] = at->fit->n_slots;
  at->assigned_window = window;
  at->assigned_persist = n_persist;
}

static int64_t slots_bytes(search *at, uint32_t window, uint32_t n_persist) {
  size_t cell = (size_t)window * (at->request->n_chunks + 1) + n_persist;
  if (at->slots_bytes[cell] == UNKNOWN) assign(at, window, n_persist);
  return at->slots_bytes[cell];
}

static uint32_t slots_count(search *at, uint32_t window, uint32_t n_persist) {
  slots_bytes(at, window, n_persist);
  return at->slots_count[(size_t)window * (at->request->n_chunks + 1) + n_persist];
}

static bool fits(search *at, uint32_t window, uint32_t n_persist) {
  int64_t without_bytes = need(at, n_persist);
  if (!ptn_fit_fits(at->fit, n_persist, without_bytes)) return false;
  return n_persist == at->request->n_chunks || ptn_fit_fits(at->fit, n_persist, without_bytes + slots_bytes(at, window, n_persist));
}

/* A number of slots stands for the first window that has so many and fits (fit.c): the others are not looked at. */
static bool stands_for_itself(search *at, uint32_t window, uint32_t n_persist) {
  if (n_persist == at->request->n_chunks) return window == 0;
  for (uint32_t other = 0; other < window; other++) {
    bool narrow = at->fit->windows[other] > at->fit->windows[window]; /* more, before few */
    if (slots_count(at, other, n_persist) == slots_count(at, window, n_persist) && (!narrow || fits(at, other, n_persist))) {
      return false;
    }
  }
  return true;
}

/* ---- simulating ---- */

/* modes are in at->modes. False: the stash has no place. */
static bool describe(search *at, uint32_t window, uint32_t n_persist, ptn_candidate *out) {
  ptn_tiers tiers;
  uint64_t stash_bytes = ptn_swap_stash_bytes(at->request, at->fit->consumer_of_phase, at->modes);
  if (!ptn_tiers_split(at->request, n_persist, stash_bytes, &tiers)) return false;
  assign(at, window, n_persist);
  *out = (ptn_candidate){.modes = at->modes,
                         .n_persist = n_persist,
                         .n_host = tiers.n_host,
                         .slot_of_chunk = at->fit->slot_of_chunk,
                         .phase_bytes = at->fit->phase_bytes,
                         .above_static_bytes = (uint64_t)need(at, n_persist) - ptn_fit_persistent_bytes(at->fit, n_persist),
                         .pending_bytes = at->fit->pending_bytes};
  return true;
}

static uint64_t size(const search *at) {
  return (uint64_t)at->request->n_phases + at->request->n_accesses + at->request->n_chunks + 1;
}

static ptn_status bound(search *at, entry of) {
  ptn_candidate candidate;
  ptn_families_modes(&at->families, of.set, of.swap, of.n_swap, at->modes);
  if (!describe(at, of.window, of.n_persist, &candidate)) return PTN_OK;
  at->bound_work += size(at) / BOUNDS_PER_SIMULATION + 1;
  of.step = step_of((double)ptn_bound_ns(at->bounds, &candidate, &of.moved_bytes));
  of.stage = PLACED;
  return push(at, of);
}

static void simulate(search *at, entry of) {
  ptn_candidate candidate;
  ptn_forecast forecast;
  compose_set(at, of.set);
  ptn_families_modes(&at->families, of.set, of.swap, of.n_swap, at->modes);
  if (!describe(at, of.window, of.n_persist, &candidate)) return;
  at->simulated_work += size(at);
  ptn_simulate(at->simulation, &candidate, &forecast);
  of.step = step_of((double)forecast.step_ns);
  if (forecast.step_ns >= PTN_NEVER_NS || hopeless(at, &of)) return;
  at->found = true;
  at->best = of;
  at->best_window = at->fit->windows[of.window];
  at->best_forecast = forecast;
  if (at->request->n_blocks > 0) memcpy(at->best_modes, at->modes, at->request->n_blocks * sizeof *at->modes);
}

/* ---- sets of kept blocks ---- */

/* What is written of a stash at least: what has no room when backward comes to the blocks, and is not the part that may stay. */
static double written_bytes(search *at, double stash_bytes, uint32_t n_persist) {
  double above = (double)need(at, n_persist) - (double)ptn_fit_persistent_bytes(at->fit, n_persist);
  double room = above - (double)at->request->fixed_bytes - (double)at->fit->phase_bytes[at->last_forward];
  double written = stash_bytes - (room > 0 ? room : 0);
  if (written > stash_bytes * 3 / 4) written = stash_bytes * 3 / 4;
  return written > 0 ? written : 0;
}

/* The least with any choice of swapping blocks: in each step of them the recomputation of its end, the bytes of its begin. */
static double least_ns(search *at, uint32_t set, uint32_t least, uint32_t most, double held_bytes) {
  double recompute_ns[PTN_SWAP_STEPS + 1], stash_bytes[PTN_SWAP_STEPS + 1], lowest_ns = HUGE_VAL;
  uint32_t n_steps;
  ptn_families_swapped(&at->families, set, recompute_ns, stash_bytes, &n_steps);
  ptn_many many = {.least_persist = least, .most_persist = most, .slots_bytes = held_bytes};
  for (uint32_t i = 0; i <= n_steps; i++) {
    many.recompute_ns = recompute_ns[i < n_steps ? i + 1 : i];
    many.stash_bytes = written_bytes(at, stash_bytes[i], most);
    double ns = ptn_sums_least_ns(at->sums, &many);
    if (ns < lowest_ns) lowest_ns = ns;
  }
  return lowest_ns;
}

static uint32_t most_without_slots(search *at) {
  uint32_t least = at->least_persist, most = at->most_persist;
  while (least < most) {
    uint32_t middle = most - (most - least) / 2;
    if (ptn_fit_fits(at->fit, middle, need(at, middle))) least = middle;
    else most = middle - 1;
  }
  return least;
}

static ptn_status push_set(search *at, uint32_t set) {
  compose_set(at, set);
  uint32_t first = at->least_persist, last = most_without_slots(at);
  int64_t limit_bytes = at->fit->budget_bytes > at->fit->limit_bytes ? at->fit->budget_bytes : at->fit->limit_bytes;
  double lowest_ns = HUGE_VAL;
  if (!ptn_fit_fits(at->fit, last, need(at, last))) return PTN_OK;
  for (uint32_t i = 0; i < N_RANGES; i++) {
    uint32_t least = first + (uint32_t)((uint64_t)(last - first + 1) * i / N_RANGES);
    uint32_t next = first + (uint32_t)((uint64_t)(last - first + 1) * (i + 1) / N_RANGES);
    if (least == next) continue;
    double ns = least_ns(at, set, least, next - 1, (double)(limit_bytes - need(at, least)));
    if (ns < lowest_ns) lowest_ns = ns;
  }
  return push(at, (entry){.step = step_of(lowest_ns), .n_persist = last, .n_keep = at->families.sets[set].n_keep, .set = set});
}

/* The most that fits with this window; -1: none. Needs nearly always grow with the number. */
static int64_t most_persistent(search *at, uint32_t window, uint32_t last) {
  uint32_t least = at->least_persist, most = last;
  if (at->request->n_chunks <= FEW_CHUNKS) {
    while (most > least && !fits(at, window, most)) most--;
    return fits(at, window, most) ? (int64_t)most : -1;
  }
  if (!fits(at, window, least)) return most == at->request->n_chunks && fits(at, window, most) ? (int64_t)most : -1;
  while (least < most) {
    uint32_t middle = most - (most - least) / 2;
    if (fits(at, window, middle)) least = middle;
    else most = middle - 1;
  }
  while (least < last && fits(at, window, least + 1)) least++;
  return least;
}

static ptn_status push_counted(search *at, const entry *of, uint32_t window, uint32_t n_persist) {
  if (n_persist < at->least_persist || !fits(at, window, n_persist) || !stands_for_itself(at, window, n_persist)) return PTN_OK;
  double held_bytes = n_persist < at->request->n_chunks ? (double)slots_bytes(at, window, n_persist) : 0;
  entry counted = *of;
  counted.step = step_of(least_ns(at, of->set, n_persist, n_persist, held_bytes));
  counted.n_persist = n_persist;
  counted.window = window;
  counted.stage = COUNTED;
  return push(at, counted);
}

static ptn_status open_window(search *at, const entry *of, uint32_t window, uint32_t last) {
  uint32_t n_chunks = at->request->n_chunks, fewer = n_chunks <= FEW_CHUNKS ? n_chunks : N_FEWER;
  int64_t most = most_persistent(at, window, last);
  if (most < 0) return PTN_OK;
  PTN_TRY(push_counted(at, of, window, (uint32_t)most));
  for (uint32_t i = 0; i < fewer; i++) { /* the same numbers for every budget */
    uint32_t n_persist = (uint32_t)((uint64_t)n_chunks * i / fewer);
    if (n_persist < at->least_persist) n_persist = at->least_persist;
    bool again = i > 0 && n_persist == at->least_persist;
    if ((int64_t)n_persist < most && !again) PTN_TRY(push_counted(at, of, window, n_persist));
  }
  return PTN_OK;
}

static bool wants_window(const search *at, uint32_t n_persist, uint32_t window) {
  const ptn_plan_request *request = at->request;
  if (request->n_persist < 0 || request->n_buffer <= 0) return true;
  uint32_t wanted = ptn_fit_window_of(at->fit, n_persist, (uint32_t)ptn_min_u64((uint64_t)request->n_buffer, UINT32_MAX));
  return wanted == 0 || wanted == at->fit->windows[window];
}

static ptn_status open_set(search *at, const entry *of) {
  compose_set(at, of->set);
  uint32_t last = most_without_slots(at), n_windows = at->fit->n_windows;
  if (at->families.sets[of->set].edge) {
    for (uint32_t window = 0; window < n_windows && window < 2; window++) PTN_TRY(push_counted(at, of, window, at->least_persist));
    return last == at->request->n_chunks ? push_counted(at, of, 0, last) : PTN_OK;
  }
  for (uint32_t window = 0; window < n_windows; window++) {
    at->assigned_persist = UINT32_MAX; /* looking for a window assigns others */
    if (wants_window(at, last, window)) PTN_TRY(open_window(at, of, window, last));
  }
  return PTN_OK;
}

/* ---- blocks that swap ---- */

static double bound_of(search *at, const entry *of, uint32_t n_swap) {
  ptn_candidate candidate;
  uint64_t moved_bytes;
  ptn_families_modes(&at->families, of->set, PTN_SWAP_EARLY, n_swap, at->modes);
  if (!describe(at, of->window, of->n_persist, &candidate)) return HUGE_VAL;
  at->bound_work += size(at) / BOUNDS_PER_SIMULATION + 1;
  return (double)ptn_bound_ns(at->bounds, &candidate, &moved_bytes);
}

/* The number with the lowest bound: recomputation falls with it, what lanes carry grows. */
static uint32_t best_swaps(search *at, const entry *of, uint32_t n_swappable) {
  uint32_t best = 0, width = (n_swappable + N_SWAP_STEPS - 1) / N_SWAP_STEPS;
  double lowest_ns = bound_of(at, of, 0);
  for (uint32_t n_swap = width; n_swap <= n_swappable; n_swap += width) {
    double ns = bound_of(at, of, n_swap);
    if (ns < lowest_ns) lowest_ns = ns, best = n_swap;
  }
  while (width > 1) {
    width = (width + 1) / 2;
    uint32_t middle = best;
    for (int side = -1; side <= 1; side += 2) {
      int64_t n_swap = (int64_t)middle + side * (int64_t)width;
      if (n_swap < 0 || n_swap > (int64_t)n_swappable) continue;
      double ns = bound_of(at, of, (uint32_t)n_swap);
      if (ns < lowest_ns) lowest_ns = ns, best = (uint32_t)n_swap;
    }
    if (width == 1) break;
  }
  return best;
}

static ptn_status place(search *at, const entry *of, ptn_swap_family family, uint32_t n_swap) {
  entry placed = *of;
  placed.swap = family;
  placed.n_swap = n_swap;
  return bound(at, placed);
}

static ptn_status open_counted(search *at, const entry *of) {
  compose_set(at, of->set);
  uint32_t n_swappable = ptn_families_swappable(&at->families, of->set);
  PTN_TRY(place(at, of, PTN_SWAP_EARLY, 0));
  if (ptn_families_every_swap(n_swappable)) {
    for (uint32_t bits = 1; bits < (uint32_t)1 << n_swappable; bits++) PTN_TRY(place(at, of, PTN_SWAP_EVERY, bits));
    return PTN_OK;
  }
  /* Beside the number with the lowest bound some fewer: bounds are lower than what happens. */
  uint32_t best = best_swaps(at, of, n_swappable), least = best;
  for (uint32_t part = 8; part >= 2; part -= part > 6 ? 1 : 2) {
    uint32_t n_swap = best * part / 8;
    if (n_swap == 0 || (part < 8 && n_swap == least)) continue;
    least = n_swap;
    for (int family = 0; family < PTN_N_SWAP_FAMILIES; family++) PTN_TRY(place(at, of, (ptn_swap_family)family, n_swap));
  }
  return PTN_OK;
}

/* ---- the search ---- */

static ptn_status search_all(search *at) {
  for (uint32_t set = 0; set < at->families.n_sets; set++) PTN_TRY(push_set(at, set));
  while (at->bound_work + at->simulated_work < at->most_work) {
    while (at->open.count > 0 && hopeless(at, &at->open.entries[0])) at->open.count = 0;
    while (at->placed.count > 0 && hopeless(at, &at->placed.entries[0])) at->placed.count = 0;
    if (at->open.count + at->placed.count == 0) break;
    bool first = at->open.count == 0 || (at->placed.count > 0 && !before(&at->open.entries[0], &at->placed.entries[0]));
    if (at->placed.count > 0 && (first || at->simulated_work <= at->bound_work)) {
      simulate(at, pop(&at->placed));
      continue;
    }
    entry next = pop(&at->open);
    if (next.stage == COUNTED) PTN_TRY(open_counted(at, &next));
    else PTN_TRY(open_set(at, &next));
  }
  return PTN_OK;
}

/* A candidate from outside the families: the rule's. */
static void simulate_modes(search *at, const ptn_mode *modes, uint32_t n_persist, uint32_t window) {
  ptn_candidate candidate;
  ptn_forecast forecast;
  uint32_t n_blocks = at->request->n_blocks;
  entry of = {.n_persist = n_persist};
  if (modes != at->modes && n_blocks > 0) memcpy(at->modes, modes, n_blocks * sizeof *modes);
  for (uint32_t i = 0; i < n_blocks; i++) of.n_keep += modes[i] == PTN_KEEP;
  ptn_fit_compose(at->fit, modes);
  at->composed_set = UINT32_MAX;
  for (uint32_t p = 0; p <= at->request->n_chunks; p++) at->needs[p] = UNKNOWN;
  while (of.window + 1 < at->fit->n_windows && at->fit->windows[of.window] != window) of.window++;
  if (!describe(at, of.window, n_persist, &candidate)) return;
  ptn_bound_ns(at->bounds, &candidate, &of.moved_bytes);
  ptn_simulate(at->simulation, &candidate, &forecast);
  if (forecast.step_ns >= PTN_NEVER_NS) return;
  of.step = step_of((double)forecast.step_ns);
  at->found = true;
  at->best = of;
  at->best_window = window;
  at->best_forecast = forecast;
  if (n_blocks > 0) memcpy(at->best_modes, modes, n_blocks * sizeof *modes);
}

/* Everything in memory, and all of it fits: the modes given are no others. */
static bool ample(search *at) {
  const ptn_plan_request *request = at->request;
  for (uint32_t i = 0; i < request->n_blocks; i++) {
    if (request->modes && request->modes[i] != PTN_KEEP) return false;
    at->modes[i] = PTN_KEEP;
  }
  if (at->most_persist < request->n_chunks) return false;
  ptn_fit_compose(at->fit, at->modes);
  return ptn_fit_fits(at->fit, request->n_chunks, ptn_fit_without_slots(at->fit, request->n_chunks));
}

static void search_destroy(search *at) {
  ptn_families_destroy(&at->families);
  ptn_sums_destroy(at->sums);
  ptn_bounds_destroy(at->bounds);
  ptn_simulation_destroy(at->simulation);
  free(at->open.entries);
  free(at->placed.entries);
  free(at->slots_bytes);
  free(at->slots_count);
  free(at->needs);
  free(at->modes);
  free(at->best_modes);
}

static ptn_status search_create(search *at, ptn_fit *fit, const ptn_rule *rule) {
  const ptn_plan_request *request = fit->request;
  size_t cells = (size_t)fit->n_windows * ((size_t)request->n_chunks + 1), n_blocks = (size_t)request->n_blocks + 1;
  bool given = request->n_persist >= 0;
  *at = (search){.fit = fit, .request = request, .composed_set = UINT32_MAX, .assigned_persist = UINT32_MAX};
  at->least_persist = given ? (uint32_t)request->n_persist : fit->least_persist;
  at->most_persist = given ? at->least_persist : request->n_chunks;
  while (at->last_forward + 1 < request->n_phases && !request->phases[at->last_forward + 1].backward) at->last_forward++;
  uint64_t least_work = LEAST_SIMULATIONS * size(at), most_work = MOST_SIMULATIONS * size(at);
  at->most_work = ptn_min_u64(ptn_max_u64(MOST_WORK, least_work), most_work);
  at->slots_bytes = calloc(cells, sizeof *at->slots_bytes);
  at->slots_count = calloc(cells, sizeof *at->slots_count);
  at->needs = calloc((size_t)request->n_chunks + 1, sizeof *at->needs);
  at->modes = calloc(n_blocks, sizeof *at->modes);
  at->best_modes = calloc(n_blocks, sizeof *at->best_modes);
  if (!at->slots_bytes || !at->slots_count || !at->needs || !at->modes || !at->best_modes) {
    return ptn_fail(PTN_MEMORY, "no memory to search plans of %u chunks and %u blocks", request->n_chunks, request->n_blocks);
  }
  for (size_t i = 0; i < cells; i++) at->slots_bytes[i] = UNKNOWN;
  PTN_TRY(ptn_sums_create(&at->sums, request));
  PTN_TRY(ptn_bounds_create(&at->bounds, request, fit->consumer_of_phase));
  PTN_TRY(ptn_simulation_create(&at->simulation, request, fit->consumer_of_phase));
  return ptn_families_create(&at->families, fit, rule);
}

ptn_status ptn_search(ptn_fit *fit, const ptn_rule *rule, ptn_mode *modes, uint32_t *n_persist, uint32_t *window,
                      ptn_forecast *forecast) {
  search at;
  ptn_status status = search_create(&at, fit, rule);
  if (status == PTN_OK && ample(&at)) {
    simulate_modes(&at, at.modes, fit->request->n_chunks, fit->more);
  } else if (status == PTN_OK) {
    simulate_modes(&at, modes, *n_persist, *window);
    status = search_all(&at);
  }
  if (status == PTN_OK && !at.found) {
    status = ptn_fail(PTN_INVALID, "profile: every plan for this budget needs a lane that carries no bytes; give its speed, or more memory");
  }
  if (status == PTN_OK) {
    if (fit->request->n_blocks > 0) memcpy(modes, at.best_modes, fit->request->n_blocks * sizeof *modes);
    *n_persist = at.best.n_persist;
    *window = at.best_window;
    *forecast = at.best_forecast;
  }
  search_destroy(&at);
  return status;
}
