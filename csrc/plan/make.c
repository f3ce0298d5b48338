/* Making a plan: check the request, choose a candidate, write down what it means.
 *
 * Problem: the same request may be decided by a rule, by a search, or by the caller, and what comes out must say the same things
 * of it. Design: the rule always comes first: it knows the smallest budget and whether anything fits. Where times are known the
 * search goes on from its choice. A candidate is modes, a number of persistent chunks and a window of slots; all else follows.
 *
 * Invariants: peak_bytes is at most the budget; the forecast is filled if and only if times and the phases of accesses are known.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/parts.h"

static ptn_status refuse(const ptn_fit *fit, const ptn_rule *rule) {
  const ptn_plan_request *request = fit->request;
  unsigned long long needed = ptn_rule_least_bytes(rule); /* that works: the smallest budget for what was asked */
  const char *what = request->modes || request->n_persist >= 0 ? "with the block modes and n_persist given " : "";
  if (fit->least_persist > 0) {
    return ptn_fail_budget(
        needed, request->budget_bytes, needed,
        "one step %sneeds %llu bytes of memory, the budget is %llu: at least %u of %u chunks must stay in it, as "
        "the disk has %llu bytes and the host budget is %llu; give more host memory, a larger disk, or a device budget of %llu",
        what, needed, (unsigned long long)request->budget_bytes, fit->least_persist, request->n_chunks,
        (unsigned long long)ptn_tiers_disk_bytes(request), (unsigned long long)request->host_budget_bytes, needed);
  }
  return ptn_fail_budget(needed, request->budget_bytes, needed,
                         "one step %sneeds %llu bytes of memory, the budget is %llu; the smallest budget that works is %llu: "
                         "give more memory, or a smaller batch or shorter sequences",
                         what, needed, (unsigned long long)request->budget_bytes, needed);
}

/* Everything that follows from out->modes, n_persist and window. */
static ptn_status write_plan(ptn_fit *fit, uint32_t n_persist, uint32_t window, ptn_plan *out) {
  const ptn_plan_request *request = fit->request;
  ptn_tiers tiers;
  ptn_fit_compose(fit, out->modes);
  int64_t without_slots_bytes = ptn_fit_without_slots(fit, n_persist);
  int64_t slots_bytes = ptn_fit_slots(fit, n_persist, window);
  out->n_persist = n_persist;
  out->n_buffer = fit->n_slots;
  out->n_ahead = ptn_fit_ahead(fit, n_persist, window);
  out->slot_bytes_total = (uint64_t)slots_bytes;
  if (fit->n_slots > 0) memcpy(out->slot_bytes, fit->slot_bytes, fit->n_slots * sizeof *out->slot_bytes);
  if (request->n_chunks > 0) memcpy(out->slot_of_chunk, fit->slot_of_chunk, request->n_chunks * sizeof *out->slot_of_chunk);
  ptn_fit_ring(fit, n_persist, without_slots_bytes + slots_bytes, out);
  uint64_t ring_bytes = ptn_fit_counted_ring_bytes(fit, out);
  uint64_t stream_bytes = ptn_fit_stream_bytes(fit, out->modes, n_persist, without_slots_bytes + slots_bytes);
  out->static_bytes = ptn_fit_persistent_bytes(fit, n_persist) + out->slot_bytes_total + ring_bytes;
  out->peak_bytes = (uint64_t)(without_slots_bytes + slots_bytes) + stream_bytes + ring_bytes;
  out->computed_bytes = (uint64_t)(ptn_fit_computed_bytes(fit, n_persist) + slots_bytes) + stream_bytes + ring_bytes;
  out->stash_bytes = ptn_swap_stash_bytes(request, fit->consumer_of_phase, out->modes);
  out->rise_bytes = ptn_swap_rise_bytes(request, out->modes);
  out->headroom_bytes = ptn_swap_headroom_bytes(request, out->modes, out->peak_bytes - out->static_bytes);
  out->recompute_bytes = ptn_swap_recompute_bytes(request, out->modes, out->peak_bytes - out->static_bytes);
  out->pending_bytes = fit->pending_bytes;
  if (!ptn_tiers_split(request, n_persist, out->stash_bytes, &tiers)) {
    return ptn_fail_budget(
        out->smallest_bytes, request->budget_bytes, out->smallest_bytes,
        "the host budget of %llu bytes and the disk's %llu have no room for %u chunks and %llu bytes of activations: give "
        "more host memory or a larger disk",
        (unsigned long long)request->host_budget_bytes, (unsigned long long)ptn_tiers_disk_bytes(request),
        request->n_chunks - n_persist, (unsigned long long)out->stash_bytes);
  }
  out->n_host = tiers.n_host;
  out->host_bytes = tiers.host_bytes + (ptn_tiers_has_host(request) ? out->ring_bytes - ring_bytes : 0);
  out->disk_bytes = tiers.disk_bytes;
  return PTN_OK;
}

/* A choice that is given; n_buffer 0: free. */
typedef struct given {
  const ptn_mode *modes;
  uint32_t n_persist, n_buffer, n_ahead;
} given;

/* What follows from this choice alone, in place of *out where that is faster by more than forecasts tell apart, or in any case;
 * else *out is as it was, but for what write_plan writes. */
static ptn_status take_given(const ptn_fit *fit, const given *choice, bool in_any_case, ptn_plan *out, bool *taken) {
  size_t bytes = fit->request->n_blocks * sizeof *choice->modes;
  ptn_plan_request request = *fit->request;
  ptn_plan before = *out;
  ptn_mode *modes_before = calloc(bytes + 1, 1);
  if (!modes_before) return ptn_fail(PTN_MEMORY, "no memory to plan %u blocks", fit->request->n_blocks);
  if (bytes > 0) memcpy(modes_before, out->modes, bytes);
  request.modes = choice->modes == out->modes ? modes_before : choice->modes;
  request.n_persist = choice->n_persist;
  request.n_buffer = choice->n_buffer;
  request.n_ahead = choice->n_ahead;
  ptn_status status = ptn_plan_make(&request, out);
  bool faster = (double)out->forecast.step_ns * PTN_PLAN_ALIKE < (double)before.forecast.step_ns;
  *taken = status == PTN_OK && (in_any_case || faster);
  if (*taken) {
    out->smallest_bytes = before.smallest_bytes;
    out->safest_bytes = before.safest_bytes;
  } else {
    *out = before;
    if (bytes > 0) memcpy(out->modes, modes_before, bytes);
  }
  free(modes_before);
  return status == PTN_MEMORY ? status : PTN_OK;
}

/* What a plan that counts with the least takes, where another fits as well: chunks that stay may be worth more than reading ahead.
 * It must be faster by more than forecasts tell apart. Given again it may be a plan without the least, where its slots fit so too:
 * then it is what it would be. *written: *out is whole. */
static ptn_status try_least(ptn_fit *fit, ptn_rule *rule, uint32_t *n_persist, uint32_t *window, ptn_plan *out, bool *written) {
  ptn_mode *modes = calloc((size_t)fit->request->n_blocks + 1, sizeof *modes);
  ptn_forecast forecast;
  uint32_t least_persist, least_window;
  ptn_status status = modes ? PTN_OK : ptn_fail(PTN_MEMORY, "no memory to plan %u blocks", fit->request->n_blocks);
  if (status == PTN_OK && ptn_rule_choose_least(rule, modes, &least_persist, &least_window)) {
    status = ptn_search(fit, rule, modes, &least_persist, &least_window, &forecast);
    fit->least = false;
    ptn_fit_compose(fit, modes);
    int64_t needed_bytes = ptn_fit_without_slots(fit, least_persist) + ptn_fit_slots(fit, least_persist, fit->few);
    bool fits = ptn_fit_budget_bytes(fit, least_persist, needed_bytes) <= fit->budget_bytes;
    bool faster = status == PTN_OK && (double)forecast.step_ns * PTN_PLAN_ALIKE < (double)out->forecast.step_ns;
    if (status == PTN_INVALID) status = PTN_OK; /* it needs a lane that is not there */
    if (faster && fits && fit->request->n_persist < 0) {
      ptn_fit_slots(fit, least_persist, least_window);
      uint32_t n_ahead = ptn_fit_ahead(fit, least_persist, least_window);
      given choice = {.modes = modes, .n_persist = least_persist, .n_buffer = fit->n_slots, .n_ahead = n_ahead};
      status = take_given(fit, &choice, false, out, written);
    } else if (faster && !fits) {
      if (fit->request->n_blocks > 0) memcpy(out->modes, modes, fit->request->n_blocks * sizeof *modes);
      out->forecast = forecast;
      *n_persist = least_persist;
      *window = least_window;
      fit->least = true;
    }
  }
  free(modes);
  return status;
}

/* A plan that is squeezed and counts without the least may be one with it when it is given again (rule.c): then it is that. */
static ptn_status settle(ptn_fit *fit, uint32_t n_persist, uint32_t window, ptn_plan *out, bool *written) {
  ptn_fit_compose(fit, out->modes);
  int64_t needed_bytes = ptn_fit_without_slots(fit, n_persist) + ptn_fit_slots(fit, n_persist, window);
  if (!ptn_fit_is_squeezed(fit, n_persist, needed_bytes)) return PTN_OK;
  return take_given(fit, &(given){.modes = out->modes, .n_persist = n_persist}, true, out, written);
}

static bool all_kept(const ptn_plan_request *request, const ptn_mode *modes) {
  for (uint32_t i = 0; i < request->n_blocks; i++)
    if (modes[i] != PTN_KEEP) return false;
  return true;
}

static ptn_status make(ptn_fit *fit, ptn_rule *rule, ptn_plan *out) {
  uint32_t n_persist, window;
  bool written = false;
  out->smallest_bytes = ptn_rule_smallest_bytes(rule);
  out->safest_bytes = ptn_rule_safest_bytes(rule);
  out->forecast = (ptn_forecast){0};
  if (!ptn_rule_choose(rule, out->modes, &n_persist, &window)) return refuse(fit, rule);
  if (fit->request->profile && fit->request->access_phases) {
    PTN_TRY(ptn_search(fit, rule, out->modes, &n_persist, &window, &out->forecast));
    bool ample = n_persist == fit->request->n_chunks && all_kept(fit->request, out->modes);
    if (!fit->least && !ample) PTN_TRY(try_least(fit, rule, &n_persist, &window, out, &written));
  }
  if (!written && !fit->least && fit->request->n_persist < 0) PTN_TRY(settle(fit, n_persist, window, out, &written));
  return written ? PTN_OK : write_plan(fit, n_persist, window, out);
}

ptn_status ptn_plan_make(const ptn_plan_request *request, ptn_plan *out) {
  static const ptn_phase nothing = {.block = -1, .backward = true};
  ptn_plan_request given = *request;
  if (given.n_phases == 0) { /* nothing is known of the activations, then nothing of times */
    given.n_phases = 1;
    given.phases = &nothing;
    given.access_phases = NULL;
    given.profile = NULL;
  }
  PTN_TRY(ptn_request_check(&given));
  ptn_fit fit = {0};
  ptn_rule *rule = NULL;
  ptn_status status = ptn_fit_create(&fit, &given);
  if (status == PTN_OK) status = ptn_rule_create(&rule, &fit);
  if (status == PTN_OK) status = make(&fit, rule, out);
  ptn_rule_destroy(rule);
  ptn_fit_destroy(&fit);
  return status;
}
