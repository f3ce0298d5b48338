/* The course: what a candidate does in one pass, in order, whatever time it takes.
 *
 * Problem: the simulation of a step meets hundreds of moments, and for dozens of candidates; what is decided by the order alone
 * should not be decided anew at each. Design: one walk over the recorded accesses makes
 *
 *   stretches  Compute between two demands. A phase's compute is divided over its accesses in proportion to the parameters' bytes
 *              (in equal parts where they have none), a chunk's over its visits; what belongs to persistent chunks joins the stretch
 *              before it. The backward of a block was recorded with its recomputation: there the first visit of each chunk
 *              recomputes, and those that the request says, or the last of each chunk, are the backward's own. Only they happen in
 *              a block that is not recomputed.
 *   demands    Of chunks that are not persistent. Each slot holds its chunks one after another, so the order says which demands
 *              need a fetch, and from which demand on it may be ordered: when the chunk before was needed for the last time, and
 *              when no more distinct chunks lie in between than there are slots. A chunk that waits for gradients holds its slot
 *              against reading ahead.
 *   saved      What goes to the stash, and what of it stays: the last, at most a quarter of all bytes, as far as each phase from
 *              the one that saves them to the one that consumes them leaves room.
 *
 * Invariants: the work of all stretches is compute_ns of all phases, the recomputation of blocks that are recomputed, and what
 * the profile says of accesses and modes; each phase has one stretch that begins it and one that ends it.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/simulate_internal.h"

static bool in_backward_of_block(const ptn_phase *phase) { return phase->backward && phase->block >= 0; }

/* ---- of the request ---- */

static ptn_status check_request(const ptn_plan_request *request) {
  if (!request->profile) return ptn_fail(PTN_INVALID, "a simulation needs a profile");
  if (request->profile->n_phases != request->n_phases)
    return ptn_fail(PTN_INVALID, "the profile has %u phases, the request %u", request->profile->n_phases, request->n_phases);
  if (request->n_accesses > 0 && !request->access_phases)
    return ptn_fail(PTN_INVALID, "%u accesses and no access_phases: a simulation needs both", request->n_accesses);
  for (uint32_t i = 0, before = 0; i < request->n_accesses; i++) {
    uint32_t phase = request->access_phases[i];
    if (phase < before || phase >= request->n_phases)
      return ptn_fail(PTN_INVALID, "access %u is in phase %u, after one in phase %u of %u", i, phase, before, request->n_phases);
    before = phase;
  }
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    if (request->chunks[c].grad_bytes > 0 && request->chunks[c].complete_phase >= request->n_phases)
      return ptn_fail(PTN_INVALID, "chunk %u is complete in phase %u of %u", c, request->chunks[c].complete_phase,
                      request->n_phases);
  }
  return PTN_OK;
}

bool ptn_course_leaves(const ptn_candidate *candidate, uint32_t chunk, bool has_link) {
  return !has_link && chunk >= candidate->n_persist + candidate->n_host;
}

void ptn_course_destroy(ptn_course *course) {
  free(course->first_access);
  free(course->own_ns);
  free(course->again_ns);
  free(course->own);
  free(course->completes);
  free(course->complete_inside);
  free(course->first_complete);
  free(course->complete);
  free(course->last_trained);
  free(course->count);
  free(course->visits);
  free(course->stretches);
  free(course->demands);
  free(course->first_ready);
  free(course->last_of_slot);
  free(course->saved);
  free(course->readers);
  free(course->saved_of_phase);
  free(course->saved_for_phase);
  free(course->room_bytes);
  free(course->behind_bytes);
}

static ptn_status allocate(ptn_course *course) {
  size_t phases = (size_t)course->request->n_phases + 1, accesses = (size_t)course->request->n_accesses + 1;
  size_t chunks = (size_t)course->request->n_chunks + 1;
  course->first_access = calloc(phases, sizeof *course->first_access);
  course->own_ns = calloc(accesses, sizeof *course->own_ns);
  course->again_ns = calloc(accesses, sizeof *course->again_ns);
  course->own = calloc(accesses, sizeof *course->own);
  course->completes = calloc(accesses, sizeof *course->completes);
  course->complete_inside = calloc(chunks, sizeof *course->complete_inside);
  course->first_complete = calloc(phases, sizeof *course->first_complete);
  course->complete = calloc(chunks, sizeof *course->complete);
  course->last_trained = calloc(phases, sizeof *course->last_trained);
  course->count = calloc(chunks, sizeof *course->count);
  course->visits = calloc(chunks, sizeof *course->visits);
  course->stretches = calloc(accesses + 3 * phases, sizeof *course->stretches);
  course->demands = calloc(accesses, sizeof *course->demands);
  course->first_ready = calloc(accesses, sizeof *course->first_ready);
  course->last_of_slot = calloc(chunks, sizeof *course->last_of_slot);
  course->saved = calloc(phases, sizeof *course->saved);
  course->readers = calloc(phases, sizeof *course->readers);
  course->saved_of_phase = calloc(phases, sizeof *course->saved_of_phase);
  course->saved_for_phase = calloc(phases, sizeof *course->saved_for_phase);
  course->room_bytes = calloc(phases, sizeof *course->room_bytes);
  course->behind_bytes = calloc(chunks, sizeof *course->behind_bytes);
  if (course->first_access && course->own_ns && course->again_ns && course->own && course->completes && course->complete_inside &&
      course->first_complete && course->complete && course->last_trained && course->count && course->visits &&
      course->stretches && course->demands && course->first_ready && course->last_of_slot && course->saved && course->readers &&
      course->saved_of_phase && course->saved_for_phase && course->room_bytes && course->behind_bytes)
    return PTN_OK;
  return ptn_fail(PTN_MEMORY, "no memory to simulate %zu phases, %zu accesses, %zu chunks", phases - 1, accesses - 1, chunks - 1);
}

/* parts: 1 where an access has a part, 0 where it has none; becomes total_ns divided over them. */
static void divide(const ptn_course *course, uint32_t begin, uint32_t end, int64_t total_ns, double *parts) {
  const ptn_plan_request *request = course->request;
  uint32_t *visits = course->visits;
  double bytes = 0, n = 0;
  for (uint32_t i = begin; i < end; i++) visits[request->accesses[i]] = 0;
  for (uint32_t i = begin; i < end; i++) {
    uint32_t chunk = request->accesses[i];
    if (parts[i] > 0 && visits[chunk]++ == 0) bytes += (double)request->chunks[chunk].param_bytes;
    n += parts[i];
  }
  for (uint32_t i = begin; i < end; i++) {
    if (parts[i] == 0) continue;
    double of_chunk = (double)request->chunks[request->accesses[i]].param_bytes / visits[request->accesses[i]];
    parts[i] = (double)total_ns * (bytes > 0 ? of_chunk / bytes : 1 / n);
  }
}

static void divide_phases(ptn_course *course) {
  const ptn_plan_request *request = course->request;
  uint32_t at = 0, stamp = 0;
  for (uint32_t p = 0; p < request->n_phases; p++) {
    uint32_t begin = at;
    bool twice = in_backward_of_block(&request->phases[p]);
    course->first_access[p] = begin;
    stamp++;
    for (; at < request->n_accesses && request->access_phases[at] == p; at++) {
      uint32_t chunk = request->accesses[at];
      course->again_ns[at] = twice && course->count[chunk] != stamp;
      course->count[chunk] = stamp;
    }
    stamp++;
    for (uint32_t i = at; i-- > begin;) {
      uint32_t chunk = request->accesses[i];
      bool last = course->count[chunk] != stamp;
      uint32_t n_own = request->phases[p].own_accesses;
      course->own[i] = !twice || (n_own > 0 ? at - i <= n_own : last);
      course->own_ns[i] = course->own[i];
      course->count[chunk] = stamp;
    }
    divide(course, begin, at, request->profile->phases[p].compute_ns, course->own_ns);
    divide(course, begin, at, request->profile->phases[p].recompute_ns, course->again_ns);
  }
  course->first_access[request->n_phases] = at;
  memset(course->count, 0, request->n_chunks * sizeof *course->count);
}

static void sort_complete(ptn_course *course) {
  const ptn_plan_request *request = course->request;
  uint32_t n_phases = request->n_phases, *first = course->first_complete;
  for (uint32_t p = 0; p < n_phases; p++) course->last_trained[p] = -1;
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    if (request->chunks[c].grad_bytes == 0) continue;
    first[request->chunks[c].complete_phase]++;
    course->last_trained[request->chunks[c].complete_phase] = c;
  }
  for (uint32_t p = 0, sum = 0; p <= n_phases; p++) { /* ends of the ranges, moved down to their starts as they fill */
    sum += p < n_phases ? first[p] : 0;
    first[p] = sum;
  }
  for (uint32_t c = 0; c < request->n_chunks; c++)
    if (request->chunks[c].grad_bytes > 0) course->complete[--first[request->chunks[c].complete_phase]] = c;
  for (uint32_t i = 0; i < request->n_accesses; i++) {
    uint32_t phase = request->access_phases[i], chunk = request->accesses[i];
    bool makes = request->phases[phase].backward && request->chunks[chunk].grad_bytes > 0;
    if (makes && course->last_trained[phase] < (int64_t)chunk) course->last_trained[phase] = chunk;
  }
}

/* Which accesses are the last of their chunks in the phases in which those are complete. Where a block is recomputed its backward
 * follows, which is all that matters here: an access that is recomputation alone is no chunk's last. */
static void find_completing(ptn_course *course) {
  const ptn_plan_request *request = course->request;
  for (uint32_t i = request->n_accesses; i-- > 0;) {
    uint32_t chunk = request->accesses[i];
    bool completes = request->chunks[chunk].grad_bytes > 0 &&
                     request->chunks[chunk].complete_phase == request->access_phases[i] && course->own[i] &&
                     !course->complete_inside[chunk];
    course->completes[i] = completes;
    course->complete_inside[chunk] |= completes;
  }
}

ptn_status ptn_course_create(ptn_course *course, const ptn_plan_request *request, const uint32_t *consumer_of_phase) {
  PTN_TRY(check_request(request));
  course->request = request;
  course->consumer_of_phase = consumer_of_phase;
  course->n_passes = request->n_passes > 0 ? request->n_passes : 1;
  PTN_TRY(allocate(course));
  divide_phases(course);
  sort_complete(course);
  find_completing(course);
  return PTN_OK;
}

/* ---- stretches and demands ---- */

static ptn_stretch *add_stretch(ptn_course *course, uint32_t phase) {
  ptn_stretch *stretch = &course->stretches[course->n_stretches++];
  *stretch = (ptn_stretch){.demand = -1, .phase = phase};
  return stretch;
}

static int32_t add_demand(ptn_course *course, uint32_t chunk, uint32_t phase) {
  int32_t number = (int32_t)course->n_demands++;
  uint32_t slot = (uint32_t)course->candidate->slot_of_chunk[chunk];
  for (; course->n_slots <= slot; course->n_slots++) course->last_of_slot[course->n_slots] = -1;
  int32_t before = course->last_of_slot[slot];
  course->last_of_slot[slot] = number;
  course->demands[number] = (ptn_demand){.chunk = chunk, .slot = slot, .phase = phase, .before = before, .next_ready = -1};
  course->demands[number].fetches = before < 0 || course->demands[before].chunk != chunk;
  return number;
}

/* The middle of a phase's work becomes a begin of a stretch: what it saves goes to the stash from there on. */
static void split_half(ptn_course *course, uint32_t first) {
  double half_ns = 0, before_ns = 0;
  uint32_t at = first;
  for (uint32_t i = first; i < course->n_stretches; i++) half_ns += course->stretches[i].work_ns / 2;
  while (at + 1 < course->n_stretches && before_ns + course->stretches[at].work_ns < half_ns)
    before_ns += course->stretches[at++].work_ns;
  memmove(&course->stretches[at + 1], &course->stretches[at], (course->n_stretches - at) * sizeof *course->stretches);
  course->n_stretches++;
  ptn_stretch *head = &course->stretches[at], *rest = head + 1;
  head->work_ns = ptn_min_f64(half_ns - before_ns, rest->work_ns);
  uint32_t completes = head->completes;
  head->ends = false;
  head->completes = 0;
  *rest = (ptn_stretch){
      .demand = -1, .phase = head->phase, .work_ns = rest->work_ns - head->work_ns, .completes = completes, .puts = true};
}

/* The accesses of a phase; gradients are made from the first on that is not recomputation alone. */
static void add_accesses(ptn_course *course, uint32_t p, bool recomputes, bool checks) {
  const ptn_plan_request *request = course->request;
  double access_ns = (double)request->profile->access_ns;
  ptn_stretch *stretch = &course->stretches[course->n_stretches - 1];
  bool makes = false;
  for (uint32_t i = course->first_access[p]; i < course->first_access[p + 1]; i++) {
    uint32_t chunk = request->accesses[i];
    bool own = course->own[i], demands = chunk >= course->candidate->n_persist;
    if (!own && !recomputes) continue;
    if (demands && (stretch->demand >= 0 || stretch->completes > 0 || stretch->work_ns > 0)) stretch = add_stretch(course, p);
    ptn_stretch *asks = stretch;
    if (demands) asks->demand = add_demand(course, chunk, p);
    if (recomputes) stretch->work_ns += course->again_ns[i];
    if (own && checks) {
      if (stretch->work_ns > 0 && !makes) stretch = add_stretch(course, p);
      stretch->checks |= stretch->work_ns == 0;
      makes = true;
    }
    stretch->work_ns += course->own_ns[i];
    if (demands && course->completes[i]) stretch->completes = chunk + 1;
    if (demands) asks->work_ns += access_ns;
    if (demands) course->fixed_ns += access_ns;
  }
  if (checks && !makes) add_stretch(course, p)->checks = true;
}

/* From completion to completion, less is live in a phase. */
static void set_room(ptn_course *course, uint32_t first) {
  double room_bytes = course->room_bytes[course->stretches[first].phase];
  for (uint32_t i = first; i < course->n_stretches; i++) {
    ptn_stretch *stretch = &course->stretches[i];
    stretch->room_bytes = room_bytes;
    if (stretch->completes > 0) room_bytes = ptn_max_f64(room_bytes, course->behind_bytes[stretch->completes - 1]);
  }
}

static void add_phase(ptn_course *course, uint32_t p) {
  const ptn_plan_request *request = course->request;
  const ptn_phase *phase = &request->phases[p];
  const ptn_profile *profile = request->profile;
  ptn_mode mode = phase->block >= 0 ? course->candidate->modes[phase->block] : PTN_KEEP;
  bool recomputes = ptn_mode_recomputes(mode) && phase->backward, empty = course->first_access[p] == course->first_access[p + 1];
  bool checks = course->last_trained[p] >= (int64_t)course->candidate->n_persist;
  uint32_t first = course->n_stretches;
  ptn_stretch *stretch = add_stretch(course, p);
  stretch->begins = true;
  if (recomputes) stretch->work_ns += (double)profile->checkpoint_ns;
  if (recomputes) course->recompute_ns += (double)profile->checkpoint_ns + (double)profile->phases[p].recompute_ns;
  if (ptn_mode_swaps(mode)) stretch->work_ns += (double)profile->swap_ns / 2;
  if (ptn_mode_swaps(mode)) course->fixed_ns += (double)profile->swap_ns / 2;
  if (empty) {
    if (recomputes) stretch->work_ns += (double)profile->phases[p].recompute_ns;
    if (checks && recomputes) stretch = add_stretch(course, p);
    stretch->checks = checks;
    stretch->work_ns += (double)profile->phases[p].compute_ns;
  } else {
    add_accesses(course, p, recomputes, checks);
  }
  course->stretches[course->n_stretches - 1].ends = true;
  if (course->saved_of_phase[p] >= 0) {
    split_half(course, first);
    course->stretches[course->n_stretches - 1].ends = true;
  }
  set_room(course, first);
}

/* A chunk that has some of its gradients waits in its slot for the others; reading ahead leaves it there. */
static bool waits_for_gradients(const ptn_course *course, const ptn_demand *demand) {
  const ptn_plan_chunk *chunk = &course->request->chunks[demand->chunk];
  bool makes = course->request->phases[demand->phase].backward || chunk->complete_phase == demand->phase;
  return makes && chunk->grad_bytes > 0 && chunk->complete_phase >= demand->phase;
}

/* From which demand on each fetch may be ordered: no more distinct chunks lie in between than there are slots. */
static void find_ready(ptn_course *course, bool has_link) {
  uint32_t left = 0, distinct = 0, n = course->n_demands;
  for (uint32_t d = 0; d < n; d++) course->first_ready[d] = -1;
  for (uint32_t d = 0; d < n; d++) {
    ptn_demand *demand = &course->demands[d];
    distinct += course->count[demand->chunk]++ == 0;
    while (distinct > course->n_slots + 1) distinct -= --course->count[course->demands[left++].chunk] == 0;
    uint32_t last = (uint32_t)course->last_of_slot[demand->slot];
    demand->fetches_later = demand->before < 0 ? course->demands[last].chunk != demand->chunk : demand->fetches;
    demand->ready = demand->before >= (int32_t)left ? (uint32_t)demand->before + 1 : left;
    demand->holds = !has_link && demand->before >= 0 && waits_for_gradients(course, &course->demands[demand->before]);
  }
  while (left < n) course->count[course->demands[left++].chunk] = 0;
  for (uint32_t d = n; d-- > 0;) { /* so that each list is in order */
    ptn_demand *demand = &course->demands[d];
    if (!demand->fetches) continue;
    demand->next_ready = course->first_ready[demand->ready];
    course->first_ready[demand->ready] = (int32_t)d;
  }
}

/* ---- the stash ---- */

/* What phases leave to activations and gradients under way: beside their own, what is live always, and gradients (peak.c). Behind the
 * completion of a chunk it is what the highest moment behind that leaves. */
static void find_room(ptn_course *course) {
  const ptn_plan_request *request = course->request;
  const ptn_candidate *candidate = course->candidate;
  double all_bytes = (double)candidate->above_static_bytes - (double)request->fixed_bytes, complete_bytes = 0, pending_bytes = 0;
  bool counts_pending = ptn_peak_counts_pending(request, candidate->least);
  bool adds_up = ptn_peak_adds_passes_up(request);
  for (uint32_t c = 0; c < candidate->n_persist && adds_up; c++) all_bytes -= (double)request->chunks[c].grad_bytes;
  for (uint32_t p = 0; p < request->n_phases; p++) {
    const uint32_t *chunks = course->complete + course->first_complete[p];
    uint32_t count = course->first_complete[p + 1] - course->first_complete[p];
    double before_bytes = complete_bytes + pending_bytes + (double)candidate->live[p].peak_bytes;
    double after_bytes = (double)candidate->live[p].after_bytes, *behind = course->behind_bytes;
    for (uint32_t i = 0; i < count; i++) {
      const ptn_plan_chunk *chunk = &request->chunks[chunks[i]];
      double grad_bytes = (double)chunk->grad_bytes, less_bytes = adds_up ? 0 : (double)chunk->less_bytes;
      bool persistent = chunks[i] < candidate->n_persist;
      if (!persistent) pending_bytes = ptn_max_f64(pending_bytes, counts_pending ? grad_bytes : 0);
      else if (!adds_up) complete_bytes += grad_bytes;
      behind[chunks[i]] = all_bytes - (complete_bytes + pending_bytes + after_bytes - less_bytes);
    }
    for (uint32_t i = count; i-- > 1;) behind[chunks[i - 1]] = ptn_min_f64(behind[chunks[i - 1]], behind[chunks[i]]);
    double used_bytes = ptn_max_f64(before_bytes, complete_bytes + pending_bytes + after_bytes);
    course->room_bytes[p] = ptn_max_f64(all_bytes - used_bytes, 0);
  }
}

/* The last stay, as far as the phases between leave room for all that stay. */
static void choose_kept(ptn_course *course, double total_bytes) {
  double kept_bytes = 0, room_bytes = total_bytes / PTN_KEPT_PART;
  uint32_t low = 0, high = 0; /* phases that were looked at: low < p < high */
  for (uint32_t s = course->n_saved; s-- > 0 && kept_bytes < room_bytes;) {
    ptn_saved *saved = &course->saved[s];
    if (high == 0) low = high = saved->phase + 1;
    for (; high < saved->consumer; high++) room_bytes = ptn_min_f64(room_bytes, course->room_bytes[high]);
    for (; low > saved->phase + 1; low--) room_bytes = ptn_min_f64(room_bytes, course->room_bytes[low - 1]);
    saved->kept_bytes = ptn_min_f64(saved->away_bytes, ptn_max_f64(room_bytes - kept_bytes, 0));
    saved->away_bytes -= saved->kept_bytes;
    kept_bytes += saved->kept_bytes;
  }
}

/* What has no room while its block's backward runs is read when an operation asks for it. */
static void find_late(ptn_course *course) {
  for (uint32_t s = 0; s < course->n_saved; s++) {
    ptn_saved *saved = &course->saved[s];
    if (course->candidate->modes[course->request->phases[saved->phase].block] != PTN_SWAP) continue;
    double enough_bytes = saved->away_bytes / PTN_STREAM_PART;
    saved->late_bytes =
        saved->away_bytes * ptn_max_f64(1 - course->room_bytes[saved->consumer] / ptn_max_f64(enough_bytes, 1), 0);
  }
}

static bool fits_host(const ptn_course *course, double stash_bytes) {
  const ptn_candidate *candidate = course->candidate;
  double host_bytes = stash_bytes;
  for (uint32_t c = candidate->n_persist; c < candidate->n_persist + candidate->n_host; c++) {
    const ptn_plan_chunk *chunk = &course->request->chunks[c];
    host_bytes += (double)ptn_tiers_part(course->request, chunk->param_bytes + chunk->state_bytes);
  }
  return host_bytes <= (double)ptn_tiers_host_room(course->request, candidate->n_persist);
}

static void find_saved(ptn_course *course, bool has_link) {
  const ptn_plan_request *request = course->request;
  const ptn_mode *modes = course->candidate->modes;
  double total_bytes = 0;
  course->n_saved = 0;
  for (uint32_t p = 0; p < request->n_phases; p++) course->saved_of_phase[p] = course->saved_for_phase[p] = -1;
  for (uint32_t p = 0; p < request->n_phases; p++) {
    uint32_t consumer = course->consumer_of_phase[p];
    uint64_t bytes = ptn_swap_phase_bytes(request, course->consumer_of_phase, modes, p);
    if (bytes == 0) continue;
    course->saved_of_phase[p] = course->saved_for_phase[consumer] = (int32_t)course->n_saved;
    course->saved[course->n_saved++] = (ptn_saved){.phase = p, .consumer = consumer, .away_bytes = (double)bytes};
    total_bytes += (double)bytes;
  }
  find_room(course);
  if (course->n_saved == 0) return;
  for (uint32_t p = 0, n = 0; p < request->n_phases; p++)
    if (course->saved_for_phase[p] >= 0) course->readers[n++] = (uint32_t)course->saved_for_phase[p];
  course->stash_on_host = has_link && request->host_budget_bytes > 0 && fits_host(course, total_bytes);
  choose_kept(course, total_bytes);
  if (course->candidate->least) find_late(course);
}

void ptn_course_make(ptn_course *course, const ptn_candidate *candidate, bool has_link) {
  course->candidate = candidate;
  course->n_stretches = course->n_demands = course->n_slots = 0;
  course->recompute_ns = course->fixed_ns = 0;
  find_saved(course, has_link);
  for (uint32_t p = 0; p < course->request->n_phases; p++) add_phase(course, p);
  find_ready(course, has_link);
}
