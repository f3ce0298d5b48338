/* Simulate: what a candidate takes in time, event by event.
 *
 * Problem: the closed form of a step's time says what is the least; whether reads, activations and updates really hide behind
 * compute depends on when each may begin. Design: compute is one sequence of stretches (simulate_course.c), beside which at most
 * one fetch, one read and one write of the stash and one update are under way; all of them are fluid, at rates that stay until
 * one of them, or the stretch, ends or begins (simulate_lanes.c). Time goes from one such event to the next. What each waits for
 * is what the runtime waits for:
 *
 *   fetch   Fetches are made one after another in the order they were asked for: by reading ahead from the demand on from which
 *           the slot is free, at the latest by the demand itself. A chunk that has some of its gradients keeps its slot against
 *           reading ahead; one that is being updated in its slot keeps it against all. Reading ahead ends with each pass, and the
 *           next one finds in the slots what the one before left. So does the next step, but for what is updated on a host; what
 *           else may run between two steps, such as a forward without a backward, is not known here.
 *   stash   A phase that swaps gives its bytes from the middle of its work on; they are written in order. A phase begins when
 *           what is unwritten, and what stays, fits beside it. When backward has come to the first block nothing more is written
 *           but for that; what is unwritten then is handed back from memory. Reads go in the order of the consumers, ahead as far
 *           as there is room, and not more than a sixteenth of a second of the lane's work, but the next block in any case.
 *   update  A chunk joins the queue when it is complete: behind the last access to it in the phase in which it is, or at the end of
 *           that phase if it has none. Its parameters are not read where its slot still has them. Where the next gradients would
 *           be made compute waits while those in the queue are more than one chunk's and what the phase leaves room for.
 *           Gradients that outlive backward go to the disk (or to the host) in each pass, and their updates are made in the open,
 *           after backward; where only passes are several, those of the last are updated behind it.
 *
 * Where there is a link to a host: fetches from the disk go through it in one pipeline, gradients leave by it, and updates are
 * made on the host, so that they hold no slot. Several ranks have one part each of the bytes of a chunk that is not persistent:
 * the other parts are gathered, and gradients are reduced on the same lane (those of persistent chunks to all ranks: twice).
 *
 * Many passes: those that begin with as much under way as the one before are alike, and one stands for all but the last.
 *
 * Invariants: parts of the forecast sum to its step_ns; no time goes by without an event ahead; a job's bytes count as moved when
 * it joins its queue, those of the stash when they move.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plan/simulate_internal.h"

#define ALIKE_BYTES 16.0 /* so near, on each lane, are the begins of passes that are alike */

/* ---- create ---- */

ptn_status ptn_simulation_create(ptn_simulation **out, const ptn_plan_request *request, const uint32_t *consumer_of_phase) {
  ptn_simulation *run = *out = calloc(1, sizeof *run);
  if (!run) return ptn_fail(PTN_MEMORY, "no memory for a simulation");
  ptn_status status = ptn_course_create(&run->course, request, consumer_of_phase);
  if (status == PTN_OK) {
    run->job_most = 4 * request->n_chunks + 1;
    run->slots = calloc((size_t)request->n_chunks + 1, sizeof *run->slots);
    run->complete_count = calloc((size_t)request->n_chunks + 1, sizeof *run->complete_count);
    run->fetches = calloc((size_t)request->n_accesses + 1, sizeof *run->fetches);
    run->jobs = calloc(run->job_most, sizeof *run->jobs);
    if (!run->slots || !run->complete_count || !run->fetches || !run->jobs)
      status = ptn_fail(PTN_MEMORY, "no memory to simulate %u chunks and %u accesses", request->n_chunks, request->n_accesses);
  }
  if (status != PTN_OK) {
    ptn_simulation_destroy(run);
    *out = NULL;
    return status;
  }
  ptn_lanes_read(&run->lanes, request->profile);
  run->has_link = run->lanes.present[PTN_UPLOAD];
  return PTN_OK;
}

void ptn_simulation_destroy(ptn_simulation *run) {
  if (!run) return;
  ptn_course_destroy(&run->course);
  free(run->slots);
  free(run->complete_count);
  free(run->fetches);
  free(run->jobs);
  free(run);
}

/* ---- time ---- */

static void move(ptn_simulation *run, int f, double bytes) {
  run->flows[f].left -= bytes;
  if (f == PTN_FLOW_STASH_WRITE) run->written_bytes += bytes, run->tally.written_bytes += bytes;
  if (f == PTN_FLOW_STASH_READ) {
    run->course.saved[run->reading].read_bytes += bytes;
    run->ahead_bytes += bytes;
    run->tally.read_bytes += bytes;
  }
}

void ptn_simulation_settle(ptn_simulation *run) {
  if (run->dirty) return;
  run->dirty = true;
  double elapsed_ns = run->now_ns - run->since_ns;
  run->since_ns = run->now_ns;
  if (run->runs && run->in_stretch) run->work_ns = ptn_max_f64((run->end_ns - run->now_ns) * run->lanes.compute_speed, 0);
  if (elapsed_ns <= 0) return;
  for (int f = 0; f < PTN_N_FLOWS; f++) {
    ptn_flow *flow = &run->flows[f];
    if (!flow->active) continue;
    move(run, f, ptn_min_f64(flow->rate * elapsed_ns, flow->left));
  }
  for (int i = 0; i < PTN_N_LANES; i++) run->tally.busy_ns[i] += run->lanes.busy[i] * elapsed_ns;
  if (run->runs) run->tally.drag_ns += elapsed_ns * (1 - run->lanes.compute_speed);
  else run->tally.wait_ns[run->wait] += elapsed_ns;
}

void ptn_simulation_stop(ptn_simulation *run, uint32_t wait) {
  if (!run->never) run->never_wait = wait;
  run->never = true;
}

void ptn_simulation_count_moved(ptn_simulation *run, const double *unit_bytes, uint32_t wait) {
  for (int i = 0; i < PTN_N_LANES; i++) {
    if (unit_bytes[i] > 0 && !run->lanes.present[i]) ptn_simulation_stop(run, wait);
    run->tally.moved_bytes[i] += (uint64_t)unit_bytes[i];
  }
}

bool ptn_simulation_stall(ptn_simulation *run, uint32_t wait) {
  if (!run->runs && run->wait == wait) return false;
  ptn_simulation_settle(run);
  run->runs = false;
  run->wait = wait;
  return false;
}

/* ---- passes ---- */

static void repeat(double *total, double before, double times) { *total += (*total - before) * times; }

/* All passes but the last are as the one that has just ended. */
static void repeat_pass(ptn_simulation *run, uint32_t times) {
  tally *now = &run->tally, *before = &run->before;
  for (int i = 0; i <= PTN_N_WAITS; i++) repeat(&now->wait_ns[i], before->wait_ns[i], times);
  for (int i = 0; i < PTN_N_LANES; i++) {
    repeat(&now->busy_ns[i], before->busy_ns[i], times);
    now->moved_bytes[i] += (now->moved_bytes[i] - before->moved_bytes[i]) * times;
  }
  repeat(&now->drag_ns, before->drag_ns, times);
  repeat(&now->read_bytes, before->read_bytes, times);
  repeat(&now->written_bytes, before->written_bytes, times);
  run->pass += times;
}

/* What the updates under way are still going to move. */
static void find_backlog(const ptn_simulation *run, double *backlog_bytes) {
  memset(backlog_bytes, 0, PTN_N_LANES * sizeof *backlog_bytes);
  for (uint32_t i = 0; i < run->job_count; i++) {
    const job *job = &run->jobs[(run->job_first + i) % run->job_most];
    double left = i == 0 ? run->flows[PTN_FLOW_UPDATE].left : 1;
    for (int lane = 0; lane < PTN_N_LANES; lane++) backlog_bytes[lane] += left * job->unit_bytes[lane];
  }
}

/* The pass before began, as this one does, with what passes leave that add gradients on disk up. */
static bool is_alike(const ptn_simulation *run, const double *backlog_bytes) {
  bool alike = run->pass >= 2;
  for (int i = 0; i < PTN_N_LANES; i++) alike &= fabs(backlog_bytes[i] - run->backlog_bytes[i]) < ALIKE_BYTES;
  return alike;
}

static void begin_pass(ptn_simulation *run) {
  ptn_course *course = &run->course;
  ptn_simulation_settle(run);
  double backlog_bytes[PTN_N_LANES];
  find_backlog(run, backlog_bytes);
  if (run->pass + 1 < course->n_passes && is_alike(run, backlog_bytes)) repeat_pass(run, course->n_passes - 1 - run->pass);
  run->before = run->tally;
  memcpy(run->backlog_bytes, backlog_bytes, sizeof backlog_bytes);
  run->at = 0;
  run->cursor = -1;
  run->fetch_first = 0;
  ptn_saved_begin_pass(run);
  if (course->n_demands > 0) ptn_fetch_ahead(run, 0);
}

static void end_pass(ptn_simulation *run) {
  if (++run->pass < run->course.n_passes) {
    begin_pass(run);
    return;
  }
  run->pass--; /* step() belongs to the last */
  run->draining = true;
  ptn_simulation_stall(run, PTN_WAIT_UPDATE);
}

/* In step(): what was under way is waited for, then what could not begin before. */
static void drain(ptn_simulation *run) {
  const ptn_course *course = &run->course;
  if (run->job_count > 0) return;
  run->finished = run->open || !course->request->grads_outlive_backward;
  if (run->finished) return;
  run->open = true;
  ptn_simulation_stall(run, PTN_WAIT_OPEN);
  for (uint32_t c = course->candidate->n_persist; c < course->request->n_chunks; c++)
    if (course->request->chunks[c].grad_bytes > 0) ptn_job_add(run, c, JOB_UPDATE);
  run->finished = run->job_count == 0;
}

/* ---- events ---- */

/* Compute is in no stretch: it goes into the next one, or waits. */
static void proceed(ptn_simulation *run) {
  const ptn_course *course = &run->course;
  while (!run->draining && run->at == course->n_stretches) end_pass(run);
  if (run->draining) {
    drain(run);
    return;
  }
  const ptn_stretch *stretch = &course->stretches[run->at];
  if (stretch->begins && course->n_saved > 0 && !ptn_saved_may_begin(run, stretch->phase)) return;
  if (stretch->demand >= 0 && !ptn_fetch_demand(run, (uint32_t)stretch->demand)) {
    ptn_simulation_stall(run, PTN_WAIT_CHUNK);
    return;
  }
  if (stretch->checks && ptn_job_too_many(run)) {
    ptn_simulation_stall(run, PTN_WAIT_GRADIENTS);
    return;
  }
  if (stretch->puts) ptn_saved_put(run, &run->course.saved[course->saved_of_phase[stretch->phase]]);
  if (!run->runs) ptn_simulation_settle(run);
  run->runs = run->in_stretch = true;
  run->begun = false;
  run->work_ns = stretch->work_ns;
  if (!run->dirty) run->end_ns = run->now_ns + run->work_ns / run->lanes.compute_speed;
}

static void share(ptn_simulation *run) {
  if (run->course.n_saved > 0) ptn_saved_move(run);
  ptn_lanes_share(&run->lanes, run->flows, run->runs);
  for (int f = 0; f < PTN_N_FLOWS; f++) {
    ptn_flow *flow = &run->flows[f];
    flow->end_ns = flow->active && flow->rate > 0 ? run->now_ns + flow->left / flow->rate : INFINITY;
  }
  if (run->in_stretch) run->end_ns = run->now_ns + run->work_ns / run->lanes.compute_speed;
  run->dirty = false;
}

static void end_stretch(ptn_simulation *run) {
  const ptn_stretch *stretch = &run->course.stretches[run->at];
  run->in_stretch = false;
  if (stretch->completes > 0) ptn_job_complete(run, stretch->completes - 1);
  if (stretch->ends) ptn_job_complete_phase(run, stretch->phase);
  run->at++;
}

/* Time goes on to the next event. */
static void pass_time(ptn_simulation *run) {
  double next_ns = run->in_stretch ? run->end_ns : INFINITY;
  for (int f = 0; f < PTN_N_FLOWS; f++) next_ns = ptn_min_f64(next_ns, run->flows[f].end_ns);
  if (!(next_ns < (double)PTN_NEVER_NS)) {
    ptn_simulation_stop(run, run->runs ? PTN_WAIT_UPDATE : run->wait);
    return;
  }
  run->now_ns = ptn_max_f64(next_ns, run->now_ns);
  bool stretch_ends = run->in_stretch && run->end_ns <= next_ns;
  for (int f = 0; f < PTN_N_FLOWS; f++) {
    ptn_flow *flow = &run->flows[f];
    if (!(flow->end_ns <= next_ns)) continue;
    ptn_simulation_settle(run);
    move(run, f, flow->left); /* which rounding left: all of it, where the clock's last digit is longer than the flow */
    if (f == PTN_FLOW_FETCH) ptn_fetch_end(run);
    if (f == PTN_FLOW_UPDATE) ptn_job_end(run);
  }
  if (stretch_ends) end_stretch(run);
}

/* By the step before. */
static int64_t left_in(const ptn_course *course, uint32_t slot, bool has_link) {
  int32_t last = course->last_of_slot[slot];
  uint32_t chunk = last >= 0 ? course->demands[last].chunk : 0;
  return last >= 0 && ptn_course_leaves(course->candidate, chunk, has_link) ? (int64_t)chunk : -1;
}

static void reset(ptn_simulation *run) {
  memset(run->flows, 0, sizeof run->flows);
  memset(&run->tally, 0, sizeof run->tally);
  for (uint32_t i = 0; i < run->course.request->n_chunks; i++) run->slots[i] = (slot){.chunk = -1, .blocked = -1};
  for (uint32_t i = 0; i < run->course.n_slots; i++) run->slots[i].chunk = left_in(&run->course, i, run->has_link);
  memset(run->complete_count, 0, run->course.request->n_chunks * sizeof *run->complete_count);
  run->now_ns = run->since_ns = 0;
  run->dirty = true;
  run->in_stretch = run->begun = run->runs = run->draining = run->open = run->finished = run->never = false;
  run->pass = run->wait = run->job_first = run->job_count = run->fetch_count = 0;
  run->job_bytes = 0;
  begin_pass(run);
}

/* ---- the forecast ---- */

/* A part of the step, in whole ns; never more than what is left of the longest forecast. */
static int64_t part(ptn_forecast *out, double ns) {
  int64_t left_ns = PTN_NEVER_NS - out->step_ns;
  int64_t whole_ns = ns < (double)left_ns ? (int64_t)llround(ptn_max_f64(ns, 0)) : left_ns;
  out->step_ns += whole_ns;
  return whole_ns;
}

static double update_of_persistent_ns(ptn_simulation *run) {
  const ptn_plan_request *request = run->course.request;
  double bytes = 0, speed = request->profile->step_update_bytes_per_s;
  for (uint32_t c = 0; c < run->course.candidate->n_persist; c++) {
    const ptn_plan_chunk *chunk = &request->chunks[c];
    if (chunk->grad_bytes > 0) bytes += (double)(chunk->param_bytes + chunk->state_bytes);
  }
  if (bytes > 0 && !(speed > 0)) ptn_simulation_stop(run, PTN_WAIT_UPDATE);
  return bytes > 0 && speed > 0 ? bytes / speed * 1e9 : 0;
}

static void write_forecast(ptn_simulation *run, ptn_forecast *out) {
  const ptn_course *course = &run->course;
  const ptn_profile *profile = course->request->profile;
  double passes = course->n_passes, compute_ns = 0, persistent_ns = update_of_persistent_ns(run);
  tally *tally = &run->tally;
  memset(out, 0, sizeof *out);
  for (uint32_t p = 0; p < profile->n_phases; p++) compute_ns += (double)profile->phases[p].compute_ns;
  out->compute_ns = part(out, passes * compute_ns);
  out->recompute_ns = part(out, passes * course->recompute_ns);
  out->fixed_ns = part(out, passes * course->fixed_ns + (double)profile->step_fixed_ns);
  if (run->never) {
    out->wait_ns[run->never_wait] = part(out, INFINITY);
    return;
  }
  out->drag_ns = part(out, tally->drag_ns + (double)course->candidate->squeeze_ns);
  out->update_ns = part(out, tally->wait_ns[PTN_WAIT_OPEN] + persistent_ns);
  for (int i = 0; i < PTN_N_WAITS; i++) out->wait_ns[i] = part(out, tally->wait_ns[i]);
  for (int i = 0; i < PTN_N_LANES; i++) {
    out->busy_ns[i] = (int64_t)llround(tally->busy_ns[i]);
    out->moved_bytes[i] = tally->moved_bytes[i];
  }
  if (run->has_link) out->moved_bytes[PTN_UPLOAD] += (uint64_t)llround(tally->read_bytes);
  if (run->has_link) out->moved_bytes[PTN_OFFLOAD] += (uint64_t)llround(tally->written_bytes);
  if (!course->stash_on_host) out->moved_bytes[PTN_DISK_READ] += (uint64_t)llround(tally->read_bytes);
  if (!course->stash_on_host) out->moved_bytes[PTN_DISK_WRITE] += (uint64_t)llround(tally->written_bytes);
}

void ptn_simulate(ptn_simulation *run, const ptn_candidate *candidate, ptn_forecast *out) {
  ptn_course_make(&run->course, candidate, run->has_link);
  reset(run);
  while (!run->never) {
    if (!run->in_stretch) proceed(run);
    if (run->finished) break;
    if (run->dirty) share(run);
    if (!run->never) pass_time(run);
  }
  write_forecast(run, out);
}
