/* Fetches, gradients and updates: what waits in a queue for its turn on the lanes (simulate.c says by which rules).
 *
 * Two queues, each served one job after another. A demand is in the one at most once in a pass; a slot that is pinned or held
 * keeps the number of the one demand that waits for it. A chunk is in the other once for each pass, so that it is never longer
 * than what the check before new gradients allows.
 */
#include "plan/simulate_internal.h"

/* ---- fetches ---- */

static bool on_host(const ptn_simulation *run, uint32_t chunk) {
  return chunk < run->course.candidate->n_persist + run->course.candidate->n_host;
}

static void fetch_bytes(const ptn_simulation *run, uint32_t chunk, double *bytes) {
  ptn_moves_fetch(run->course.request, chunk, on_host(run, chunk), run->has_link, bytes);
}

static void start_fetch(ptn_simulation *run) {
  double bytes[PTN_N_LANES];
  ptn_flow *flow = &run->flows[PTN_FLOW_FETCH];
  ptn_simulation_settle(run);
  flow->active = run->fetch_count > 0;
  if (!flow->active) return;
  fetch_bytes(run, run->course.demands[run->fetches[run->fetch_first]].chunk, bytes);
  ptn_flow_start(&run->lanes, flow, bytes, 0);
  flow->left = 1;
}

/* A pass finds in the slots what the one before left; a step not all of it. */
static bool needs_fetch(const ptn_simulation *run, const ptn_demand *demand) {
  bool left = run->pass > 0 || ptn_course_leaves(run->course.candidate, demand->chunk, run->has_link);
  return left ? demand->fetches_later : demand->fetches;
}

static void ask(ptn_simulation *run, uint32_t number) {
  ptn_demand *demand = &run->course.demands[number];
  slot *slot = &run->slots[demand->slot];
  if (demand->asked_count == run->pass + 1) return;
  slot->blocked = slot->pinned ? (int64_t)number : -1;
  if (slot->pinned) return;
  double bytes[PTN_N_LANES];
  fetch_bytes(run, demand->chunk, bytes);
  ptn_simulation_count_moved(run, bytes, PTN_WAIT_CHUNK);
  demand->asked_count = run->pass + 1;
  slot->chunk = demand->chunk;
  run->fetches[run->fetch_first + run->fetch_count++] = number;
  if (run->fetch_count == 1) start_fetch(run);
}

void ptn_fetch_ahead(ptn_simulation *run, uint32_t cursor) {
  const ptn_course *course = &run->course;
  for (int64_t d = course->first_ready[cursor]; d >= 0; d = course->demands[d].next_ready) {
    const ptn_demand *demand = &course->demands[d];
    if (!needs_fetch(run, demand) || demand->asked_count == run->pass + 1) continue;
    uint32_t held_by = demand->holds ? course->demands[demand->before].chunk : 0;
    bool held = demand->holds && run->complete_count[held_by] <= run->pass;
    if (held) run->slots[demand->slot].blocked = d;
    else ask(run, (uint32_t)d);
  }
}

void ptn_fetch_end(ptn_simulation *run) {
  run->course.demands[run->fetches[run->fetch_first]].loaded_count = run->pass + 1;
  run->fetch_first++;
  run->fetch_count--;
  start_fetch(run);
}

bool ptn_fetch_demand(ptn_simulation *run, uint32_t number) {
  const ptn_demand *demand = &run->course.demands[number];
  if (needs_fetch(run, demand) && demand->loaded_count != run->pass + 1) {
    ask(run, number);
    return false;
  }
  if (run->cursor < (int64_t)number) {
    run->cursor = number;
    if (number > 0) ptn_fetch_ahead(run, number); /* what is ready from the first on was asked for when the pass began */
  }
  return true;
}

/* ---- gradients and updates ---- */

static void job_bytes(const ptn_simulation *run, job *job) {
  const ptn_plan_request *request = run->course.request;
  bool host = on_host(run, job->chunk);
  if (job->kind == JOB_UPDATE) {
    ptn_moves_update(request, job->chunk, host, run->has_link, job->in_slot, job->unit_bytes);
  } else if (job->kind == JOB_KEEP_GRADIENTS) {
    ptn_moves_keep(request, job->chunk, host, run->has_link, run->pass > 0, job->unit_bytes);
  } else { /* each rank keeps the sum of all */
    uint64_t grad_bytes = request->chunks[job->chunk].grad_bytes;
    job->unit_bytes[PTN_GATHER] = (double)(2 * (grad_bytes - ptn_tiers_part(request, grad_bytes)));
  }
}

static void start_job(ptn_simulation *run) {
  ptn_flow *flow = &run->flows[PTN_FLOW_UPDATE];
  ptn_simulation_settle(run);
  flow->active = run->job_count > 0;
  if (!flow->active) return;
  ptn_flow_start(&run->lanes, flow, run->jobs[run->job_first].unit_bytes, 0);
  flow->left = 1;
}

void ptn_job_add(ptn_simulation *run, uint32_t chunk, job_kind kind) {
  job *added = &run->jobs[(run->job_first + run->job_count++) % run->job_most];
  *added = (job){.chunk = chunk, .kind = kind};
  if (kind != JOB_REDUCE && !run->open) added->grad_bytes = run->course.request->chunks[chunk].grad_bytes;
  if (kind == JOB_UPDATE && !run->has_link) {
    slot *slot = &run->slots[run->course.candidate->slot_of_chunk[chunk]];
    added->in_slot = slot->chunk == (int64_t)chunk;
    if (added->in_slot) slot->pinned = true;
  }
  job_bytes(run, added);
  ptn_simulation_count_moved(run, added->unit_bytes, PTN_WAIT_UPDATE);
  run->job_bytes += added->grad_bytes;
  if (run->job_count == 1) start_job(run);
}

static void ask_blocked(ptn_simulation *run, slot *slot) {
  if (slot->blocked >= 0 && !slot->pinned) ask(run, (uint32_t)slot->blocked);
}

void ptn_job_end(ptn_simulation *run) {
  job *ended = &run->jobs[run->job_first];
  run->job_first = (run->job_first + 1) % run->job_most;
  run->job_count--;
  run->job_bytes -= ended->grad_bytes;
  if (ended->in_slot) {
    slot *slot = &run->slots[run->course.candidate->slot_of_chunk[ended->chunk]];
    slot->pinned = false;
    ask_blocked(run, slot);
  }
  start_job(run);
}

void ptn_job_complete(ptn_simulation *run, uint32_t chunk) {
  const ptn_course *course = &run->course;
  bool last_pass = run->pass + 1 == course->n_passes;
  run->complete_count[chunk] = run->pass + 1;
  ptn_job_add(run, chunk, last_pass && !course->request->grads_outlive_backward ? JOB_UPDATE : JOB_KEEP_GRADIENTS);
  slot *slot = &run->slots[course->candidate->slot_of_chunk[chunk]];
  if (slot->chunk == (int64_t)chunk) ask_blocked(run, slot);
}

void ptn_job_complete_phase(ptn_simulation *run, uint32_t phase) {
  const ptn_course *course = &run->course;
  bool last_pass = run->pass + 1 == course->n_passes;
  for (uint32_t i = course->first_complete[phase]; i < course->first_complete[phase + 1]; i++) {
    uint32_t chunk = course->complete[i];
    if (chunk < course->candidate->n_persist) {
      if (last_pass && course->request->n_ranks > 1) ptn_job_add(run, chunk, JOB_REDUCE);
    } else if (!course->complete_inside[chunk]) {
      ptn_job_complete(run, chunk);
    }
  }
}

bool ptn_job_too_many(const ptn_simulation *run) {
  bool full = run->job_count > 2 * run->course.request->n_chunks; /* the runtime has two of a chunk at most */
  return run->job_count > 0 &&
         (full || (double)run->job_bytes > (double)run->course.candidate->pending_bytes + ptn_saved_free_bytes(run));
}
