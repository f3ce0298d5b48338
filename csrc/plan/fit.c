/* Fit: what a budget holds beside the modes of a candidate.
 *
 * Problem: chunks that stay, slots for those that come and go, and the ring through which updates pass share what activations
 * leave; the rule and the search must mean the same by "it fits", and a plan that was made must come out again when it is given.
 * Design: modes are composed into phases once (peak.c); with them any number of persistent chunks and any window of slots has a
 * need in bytes that does not depend on the budget. What the budget has for needs, and the ring from what is left over: room.c.
 *
 * Windows: few distinct chunks have slots of their own, else two of one operation could meet in a slot; more lets reading run
 * ahead; wider ones, up to all, let it run further and hold what was read in forward for backward. They have an order: more,
 * few, and the wider ones as they grow. Several may have as many slots: of a plan that is given it is said how far it reads ahead; a
 * number of slots alone names the first that fits.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/parts.h"

#define WIDEST_WINDOW 64           /* but for "all" */
#define MOST_LOOKS ((size_t)1 << 22) /* at what is close to each access and chunk: bounds how long slots take */

/* ---- needs ---- */

void ptn_fit_compose(ptn_fit *fit, const ptn_mode *modes) {
  ptn_peak_compose(fit->peak, modes, fit->least, fit->live);
  ptn_peak_stretches(fit->peak, fit->live, fit->stretch_bytes);
}

int64_t ptn_fit_computed_bytes(const ptn_fit *fit, uint32_t n_persist) {
  return (int64_t)ptn_peak_computed_bytes(fit->peak, fit->stretch_bytes, fit->least, n_persist);
}

int64_t ptn_fit_without_slots(const ptn_fit *fit, uint32_t n_persist) {
  return (int64_t)ptn_peak_without_slots(fit->peak, fit->stretch_bytes, fit->least, n_persist);
}

int64_t ptn_fit_slots(ptn_fit *fit, uint32_t n_persist, uint32_t window) {
  int64_t total_bytes = 0;
  ptn_slots(fit->request, fit->slots, n_persist, window, fit->slot_of_chunk, fit->slot_bytes, &fit->n_slots);
  for (uint32_t i = 0; i < fit->n_slots; i++) total_bytes += (int64_t)fit->slot_bytes[i];
  return total_bytes;
}

uint64_t ptn_fit_persistent_bytes(const ptn_fit *fit, uint32_t n_persist) {
  uint64_t total_bytes = 0;
  for (uint32_t i = 0; i < n_persist; i++) {
    total_bytes += fit->request->chunks[i].param_bytes + fit->request->chunks[i].state_bytes;
  }
  return total_bytes;
}

/* ---- windows ---- */

static void list_windows(ptn_fit *fit, uint32_t widest) {
  uint32_t n_chunks = fit->request->n_chunks, count = 0;
  fit->windows[count++] = fit->more;
  if (fit->few != fit->more) fit->windows[count++] = fit->few;
  for (uint32_t window = fit->more;;) {
    window += window / 2;
    if (window > widest || window >= n_chunks || count + 1 == PTN_FIT_MOST_WINDOWS) break;
    fit->windows[count++] = window;
  }
  if (n_chunks > fit->more) fit->windows[count++] = n_chunks;
  fit->n_windows = count;
}

uint32_t ptn_fit_ahead(const ptn_fit *fit, uint32_t n_persist, uint32_t window) {
  uint32_t n_away = fit->request->n_chunks - n_persist;
  return n_away == 0 ? 0 : (uint32_t)ptn_min_u64(window, n_away) - 1;
}

uint32_t ptn_fit_given_window(ptn_fit *fit, uint32_t n_persist) {
  const ptn_plan_request *request = fit->request;
  int64_t without_slots_bytes = ptn_fit_without_slots(fit, n_persist);
  uint32_t fitting = 0, squeezed = 0; /* the first of each */
  for (uint32_t i = fit->n_windows; i-- > 0;) {
    uint32_t window = fit->windows[i];
    int64_t needed_bytes = without_slots_bytes + ptn_fit_slots(fit, n_persist, window);
    if (fit->n_slots != request->n_buffer) continue;
    if (ptn_fit_budget_bytes(fit, n_persist, needed_bytes) > fit->budget_bytes) continue;
    if (request->n_ahead > 0 && ptn_fit_ahead(fit, n_persist, window) == request->n_ahead) return window;
    squeezed = window;
    if (ptn_fit_fits(fit, n_persist, needed_bytes)) fitting = window;
  }
  return fitting > 0 ? fitting : squeezed;
}

/* ---- create, destroy ---- */

void ptn_fit_destroy(ptn_fit *fit) {
  ptn_slots_scratch_destroy(fit->slots);
  ptn_peak_destroy(fit->peak);
  free(fit->consumer_of_phase);
  free(fit->live);
  free(fit->stretch_bytes);
  free(fit->slot_of_chunk);
  free(fit->slot_bytes);
  free(fit->requests_from);
}

ptn_status ptn_fit_create(ptn_fit *fit, const ptn_plan_request *request) {
  *fit = (ptn_fit){.request = request};
  fit->budget_bytes = (int64_t)ptn_min_u64(request->budget_bytes, (uint64_t)1 << 62);
  fit->few = request->n_together > 2 ? request->n_together : 2;
  fit->more = fit->few > 3 ? fit->few : 3;
  for (uint32_t i = 0; i < request->n_chunks; i++) {
    if (request->chunks[i].grad_bytes > 0) fit->n_trained_end = i + 1;
    fit->pending_bytes = ptn_max_u64(fit->pending_bytes, request->chunks[i].grad_bytes);
  }
  size_t phases = request->n_phases, chunks = (size_t)request->n_chunks + 1;
  fit->consumer_of_phase = calloc(phases, sizeof *fit->consumer_of_phase);
  fit->live = calloc(phases, sizeof *fit->live);
  fit->stretch_bytes = calloc(chunks, sizeof *fit->stretch_bytes);
  fit->slot_of_chunk = calloc(chunks, sizeof *fit->slot_of_chunk);
  fit->slot_bytes = calloc(chunks, sizeof *fit->slot_bytes);
  fit->requests_from = calloc(PTN_FIT_RING_LEVELS * chunks, sizeof *fit->requests_from);
  if (!fit->consumer_of_phase || !fit->live || !fit->stretch_bytes || !fit->slot_of_chunk || !fit->slot_bytes ||
      !fit->requests_from) {
    return ptn_fail(PTN_MEMORY, "no memory to plan %u chunks, %u blocks", request->n_chunks, request->n_blocks);
  }
  ptn_fit_count_requests(fit);
  if (request->profile) {
    double passes = request->n_passes > 1 ? request->n_passes : 1;
    for (uint32_t p = 0; p < request->profile->n_phases; p++)
      fit->compute_ns += passes * (double)request->profile->phases[p].compute_ns;
  }
  size_t most = MOST_LOOKS / ((size_t)request->n_accesses + chunks);
  uint32_t widest = (uint32_t)ptn_max_u64(fit->more, ptn_min_u64(most, WIDEST_WINDOW));
  list_windows(fit, widest);
  PTN_TRY(ptn_slots_scratch_create(&fit->slots, request));
  ptn_peak_match(request, fit->consumer_of_phase);
  PTN_TRY(ptn_peak_create(&fit->peak, request, fit->consumer_of_phase));
  return ptn_tiers_least_persist(request, 0, &fit->least_persist);
}
