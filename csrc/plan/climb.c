/* Climbing: what lies near a choice.
 *
 * Problem: where lanes wait for each other bounds are loose, and going by them alone takes long to come to what is best. Design:
 * forecasts change little from a choice to one near it, so what is good is near what is good: a few blocks more or fewer kept,
 * in the same family or another; the window wider or narrower; some chunks fewer; some blocks more or fewer that swap. Each
 * keeps as many chunks as then fit, and as many as before.
 *
 * Invariant: what is near a choice is so whatever the budget, but for the most chunks that fit. It is in the families that the
 * search looks through, but for blocks that swap: of up to 32 each alone is looked at, which no family has.
 */
#include "plan/search_internal.h"

#define MOST_BITS 32 /* of so many blocks that could swap each alone is looked at */

/* The last from `least` to `most` that fits beside slots of so many bytes; least where none does. Without slots needs never fall
 * with the number of persistent chunks, but from where none is trained behind them no ring is needed. */
static uint32_t last_fitting(ptn_trials *trials, uint32_t set, uint32_t least, uint32_t most, int64_t slots_bytes) {
  uint32_t ringless = trials->fit->n_trained_end;
  if (ringless > least && ringless <= most) {
    if (ptn_fit_fits(trials->fit, ringless, ptn_trials_need(trials, set, ringless) + slots_bytes)) least = ringless;
    else most = ringless - 1;
  }
  while (least < most) {
    uint32_t middle = most - (most - least) / 2;
    if (ptn_fit_fits(trials->fit, middle, ptn_trials_need(trials, set, middle) + slots_bytes)) least = middle;
    else most = middle - 1;
  }
  return least;
}

uint32_t ptn_climb_most_without_slots(ptn_trials *trials, uint32_t set) {
  uint32_t most = trials->most_persist;
  if (ptn_fit_fits(trials->fit, most, ptn_trials_need(trials, set, most))) return most;
  return last_fitting(trials, set, trials->least_persist, most, 0);
}

/* Slots of a window need about the same for most numbers: from what they need for one follows which others to look at. */
int64_t ptn_climb_most_persistent(ptn_trials *trials, uint32_t set, uint32_t window, uint32_t last) {
  uint32_t least = trials->least_persist, at = last;
  if (ptn_trials_fits(trials, set, window, last)) return last;
  if (trials->request->n_chunks <= PTN_FEW_CHUNKS) {
    while (at > least && !ptn_trials_fits(trials, set, window, at)) at--;
    return ptn_trials_fits(trials, set, window, at) ? (int64_t)at : -1;
  }
  for (int64_t slots_bytes = trials->guess_bytes[window]; at > least;) {
    uint32_t next = last_fitting(trials, set, least, at - 1, slots_bytes);
    if (next == at) break;
    at = next;
    if (ptn_trials_fits(trials, set, window, at)) break;
    trials->guess_bytes[window] = slots_bytes = ptn_trials_slots_bytes(trials, window, at);
  }
  if (!ptn_trials_fits(trials, set, window, at)) return -1;
  while (at + 1 < last && ptn_trials_fits(trials, set, window, at + 1)) at++;
  return at;
}

typedef struct list {
  ptn_choice *choices;
  uint32_t count;
} list;

static void add(list *to, ptn_choice choice) {
  if (to->count < PTN_CLIMB_MOST_CHOICES) to->choices[to->count++] = choice;
}

/* Blocks that swap are fewer where more are kept. Bits are of the blocks of one set. */
static void fit_swaps(const ptn_families *families, ptn_choice *choice, uint32_t from) {
  uint32_t n_swappable = ptn_families_swappable(families, choice->set);
  if (choice->swap == PTN_SWAP_EVERY) {
    choice->n_swap = ptn_families_move_bits(families, from, choice->set, choice->n_swap);
    if (n_swappable <= MOST_BITS) return;
    choice->swap = PTN_SWAP_EARLY; /* more than there are bits for: as many as before */
    choice->n_swap = (uint32_t)__builtin_popcount(choice->n_swap);
  } else if (choice->n_swap > n_swappable) {
    choice->n_swap = n_swappable;
  }
  if (choice->swap != PTN_SWAP_EVERY && choice->n_swap > 0 && ptn_families_every_swap(n_swappable)) {
    choice->n_swap = ptn_families_bits(families, choice);
    choice->swap = PTN_SWAP_EVERY;
  }
}

static void add_fitting(ptn_trials *trials, list *to, ptn_choice choice, const ptn_choice *from) {
  uint32_t n_persist = from->n_persist;
  if (choice.set != from->set) fit_swaps(&trials->families, &choice, from->set);
  int64_t most = ptn_climb_most_persistent(trials, choice.set, choice.window, trials->most_persist);
  if (most < 0) return;
  choice.n_persist = (uint32_t)most;
  add(to, choice);
  if (n_persist >= choice.n_persist) return;
  choice.n_persist = n_persist;
  add(to, choice);
}

static void add_sets(ptn_trials *trials, list *to, const ptn_choice *from) {
  const ptn_families *families = &trials->families;
  ptn_choice choice = *from;
  if (families->every) {
    for (uint32_t i = 0; i < trials->request->n_blocks; i++) {
      choice.set = from->set ^ (uint32_t)1 << i;
      add_fitting(trials, to, choice, from);
    }
    return;
  }
  const ptn_keep_set *here = &families->sets[from->set];
  for (uint32_t set = 0; set < families->n_sets; set++) {
    const ptn_keep_set *there = &families->sets[set];
    uint32_t apart = here->n_keep > there->n_keep ? here->n_keep - there->n_keep : there->n_keep - here->n_keep;
    bool step = apart == 1 || apart == 4 || apart == 16;
    bool same = there->family == here->family || there->n_keep == 0 || there->n_keep == trials->request->n_blocks;
    if (set == from->set || there->edge || (apart == 0 ? same : !step || !same)) continue;
    choice.set = set;
    add_fitting(trials, to, choice, from);
  }
}

static void add_windows(ptn_trials *trials, list *to, const ptn_choice *from) {
  const uint32_t *windows = trials->fit->windows;
  ptn_choice choice = *from;
  int64_t wider = -1, narrower = -1;
  if (from->n_persist == trials->request->n_chunks) return;
  for (uint32_t i = 0; i < trials->fit->n_windows; i++) {
    if (windows[i] > windows[from->window] && (wider < 0 || windows[i] < windows[wider])) wider = i;
    if (windows[i] < windows[from->window] && (narrower < 0 || windows[i] > windows[narrower])) narrower = i;
  }
  if (wider >= 0) choice.window = (uint32_t)wider, add_fitting(trials, to, choice, from);
  if (narrower >= 0) choice.window = (uint32_t)narrower, add_fitting(trials, to, choice, from);
}

static void add_persistent(ptn_trials *trials, list *to, const ptn_choice *from) {
  ptn_choice choice = *from;
  if (from->n_persist == trials->request->n_chunks) choice.window = 0;
  for (uint32_t fewer = 1; fewer <= from->n_persist && fewer <= 64; fewer *= 4) {
    choice.n_persist = from->n_persist - fewer;
    add(to, choice);
  }
  choice.n_persist = from->n_persist + 1;
  if (choice.n_persist <= trials->most_persist) add(to, choice);
}

static void add_swaps(ptn_trials *trials, list *to, const ptn_choice *from) {
  uint32_t n_swappable = ptn_families_swappable(&trials->families, from->set);
  ptn_choice choice = *from;
  if (n_swappable == 0) return;
  if (n_swappable <= MOST_BITS) {
    uint32_t bits = ptn_families_bits(&trials->families, from);
    choice.swap = PTN_SWAP_EVERY;
    for (uint32_t i = 0; i < n_swappable; i++) {
      choice.n_swap = bits ^ (uint32_t)1 << i;
      add(to, choice);
    }
  }
  if (from->swap == PTN_SWAP_EVERY) return;
  for (int family = 0; family < PTN_N_SWAP_FAMILIES; family++) {
    choice.swap = (ptn_swap_family)family;
    if (choice.swap != from->swap && from->n_swap > 0) add(to, choice);
  }
  choice.swap = from->swap;
  for (uint32_t apart = 1; apart <= n_swappable; apart *= 4) {
    choice.n_swap = from->n_swap + apart;
    if (choice.n_swap <= n_swappable) add(to, choice);
    choice.n_swap = from->n_swap - apart;
    if (apart <= from->n_swap) add(to, choice);
  }
}

uint32_t ptn_climb_near(ptn_trials *trials, const ptn_choice *choice, ptn_choice *out) {
  list near = {.choices = out};
  add_swaps(trials, &near, choice);
  add_persistent(trials, &near, choice);
  add_windows(trials, &near, choice);
  if (!trials->families.sets[choice->set].given) add_sets(trials, &near, choice);
  return near.count;
}
