/* Updates on the host: a lane of its own, for chunks whose home is pinned memory beside a device.
 *
 * Problem: the state of such a chunk never crosses to the device; the CPU updates it, beside backward, and nothing may be lost before
 * the step is committed. Design: a FIFO of jobs and a thread, beside the lane that streams from the disk, so that neither waits for
 * the other. A chunk with a shadow: each part of the set in use is copied to the other set and updated there while it lies in the
 * cache. A chunk without one keeps its gradients in its sum, and the job that commit queues updates the home in place. All cores
 * take part, since a GPU computes meanwhile.
 *
 * Invariants: a job starts when its gradients have come and no upload reads the chunk's memory, which it may be about to write; what
 * late_job holds is on no lane before commit; a late job is of a step that is over, and ends well whatever became of the one under way.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/internal.h"

/* ---- sums ---- */

ptn_status ptn_host_make_sum(ptn_engine *engine, chunk *chunk, bool pinned) {
  if (chunk->sum) return PTN_OK;
  if (pinned) { /* the device writes there */
    PTN_TRY(ptn_over_pin(engine, chunk->param_bytes, &chunk->sum_pinned));
    chunk->sum = chunk->sum_pinned.memory;
    return PTN_OK;
  }
  void *memory;
  PTN_TRY(ptn_arena_alloc(engine->account, chunk->param_bytes, &memory));
  chunk->sum = memory;
  return PTN_OK;
}

void ptn_host_drop_sum(ptn_engine *engine, chunk *chunk) {
  if (chunk->sum_pinned.memory) ptn_over_unpin(engine, &chunk->sum_pinned);
  else ptn_arena_free(chunk->sum);
  chunk->sum = NULL;
}

/* ---- late updates ---- */

ptn_status ptn_host_note_late(ptn_engine *engine, chunk *chunk, uint32_t number, float grad_scale) {
  param *param = &engine->params[number];
  if (param->updated) return PTN_OK;
  if (!chunk->late_job) {
    chunk->late_job = calloc(1, sizeof *chunk->late_job + chunk->n_params * sizeof chunk->late_job->grads[0]);
    if (!chunk->late_job) return ptn_fail(PTN_MEMORY, "no memory for a job of %u gradients", chunk->n_params);
    chunk->late_job->chunk = (uint32_t)(chunk - engine->chunks);
    chunk->late_job->update = chunk->late_job->late = true;
  }
  job_grad *grad = &chunk->late_job->grads[chunk->late_job->n_grads];
  *grad = (job_grad){.param = number};
  PTN_TRY(ptn_update_prepare(&grad->update, &engine->hypers[param->group], param->steps + 1, grad_scale));
  chunk->late_job->n_grads++;
  param->updated = true;
  return PTN_OK;
}

static void queue_late(ptn_engine *engine, chunk *chunk) {
  job *job = chunk->late_job;
  if (!job) return;
  chunk->late_job = NULL;
  chunk->late = true;
  chunk->zero_state = chunk->zero_master = false;
  slot *slot = chunk->slot >= 0 ? &engine->slots[chunk->slot] : NULL;
  if (slot && slot->chunk == job->chunk && slot->state >= SLOT_ORDERED) slot->state = SLOT_EMPTY;
  ptn_host_enqueue(engine, job);
}

/* In the order in which the next step asks for the chunks. */
void ptn_host_queue_late(ptn_engine *engine) {
  for (uint32_t i = 0; i < engine->n_order; i++) queue_late(engine, &engine->chunks[engine->order[i]]);
  for (uint32_t c = 0; c < engine->n_chunks; c++) queue_late(engine, &engine->chunks[c]);
}

/* ---- a job ---- */

void ptn_host_enqueue(ptn_engine *engine, job *job) {
  engine_device *over = &engine->over;
  fegetenv(&job->arithmetic);
  engine->chunks[job->chunk].jobs++;
  over->n_jobs++;
  if (over->last_job) over->last_job->next = job;
  else over->first_job = job;
  over->last_job = job;
  ptn_signal(&over->lane_work);
}

/* Where the arrays of a part are; those of a shadow that is made by this job are brought from the set in use. */
static void place(const ptn_engine *engine, const chunk *chunk, part *part) {
  const job *job = part->job;
  part->arrays[PIECE_GRAD] = chunk->sum ? chunk->sum + part->offset_bytes : NULL;
  if (!job->update) return;
  char *from = chunk->host[chunk->current].memory, *to = chunk->host[job->late ? chunk->current : 1 - chunk->current].memory;
  for (uint32_t a = 0; a <= engine->n_arrays; a++) {
    uint64_t widening = a == 0 ? 1 : engine->widening;
    uint64_t at = (a == 0 ? 0 : array_offset(engine, chunk, a - 1)) + widening * part->offset_bytes;
    part->arrays[a == 0 ? PIECE_PARAM : PIECE_STATE + a - 1] = to + at;
    if (from != to && !job->from_shadow) memcpy(to + at, from + at, widening * part->bytes);
  }
}

typedef struct working {
  ptn_engine *engine;
  job *job;
} working;

/* One thread's share of a job, part by part. */
static void run_range(void *context, size_t begin, size_t end) {
  const working *working = context;
  ptn_engine *engine = working->engine;
  part part = {.job = working->job};
  fesetenv(&working->job->arithmetic);
  for (uint64_t offset = begin; offset < end; offset += PTN_UPDATE_PART_BYTES) {
    part.offset_bytes = offset;
    part.bytes = ptn_min_u64(PTN_UPDATE_PART_BYTES, end - offset);
    if (!ptn_part_wanted(engine, part.job, offset, part.bytes)) continue;
    place(engine, &engine->chunks[part.job->chunk], &part);
    ptn_part_compute(engine, &part);
  }
}

static void run_job(ptn_engine *engine, job *job) {
  working working = {engine, job};
  ptn_team_run(engine->team, engine->chunks[job->chunk].param_bytes, PTN_PAGE_BYTES, run_range, &working);
}

/* Locked. The job is the first. */
static void serve_job(ptn_engine *engine, job *job) {
  engine_device *over = &engine->over;
  uint32_t number = job->chunk;
  ptn_job_open(engine, job);
  job->failed |= engine->lane_status != PTN_OK && !job->late;
  if (!job->failed) {
    ptn_unlock(&engine->mutex);
    int64_t begin = ptn_now_ns();
    run_job(engine, job);
    int64_t end = ptn_now_ns();
    ptn_trace_add(
        engine->trace,
        (ptn_trace_event){
            .start_ns = begin, .end_ns = end, .number = (int32_t)number, .lane = PTN_LANE_UPDATE, .kind = PTN_TRACE_UPDATE});
    ptn_lock(&engine->mutex);
    engine->update_ns += end - begin;
  }
  over->first_job = job->next;
  if (!over->first_job) over->last_job = NULL;
  over->n_jobs--;
  ptn_gradients_end_job(engine, job);
  ptn_broadcast(&engine->changed);
  ptn_residency_advance(engine);
}

static void *lane_body(void *argument) {
  ptn_engine *engine = argument;
  engine_device *over = &engine->over;
  ptn_thread_be_prompt();
  ptn_lock(&engine->mutex);
  for (;;) {
    job *job = over->first_job;
    if (job && job->arriving == 0 && engine->chunks[job->chunk].uploads == 0) serve_job(engine, job);
    else if (!job && over->stop) break;
    else ptn_wait(&over->lane_work, &engine->mutex);
  }
  ptn_unlock(&engine->mutex);
  return NULL;
}

ptn_status ptn_host_start(ptn_engine *engine) {
  PTN_TRY(ptn_thread_start(&engine->over.lane, "ptn-host-update", lane_body, engine));
  engine->over.lane_started = true;
  return PTN_OK;
}

void ptn_host_stop(ptn_engine *engine) {
  ptn_lock(&engine->mutex);
  engine->over.stop = true;
  ptn_signal(&engine->over.lane_work);
  ptn_unlock(&engine->mutex);
  ptn_thread_join(engine->over.lane);
  engine->over.lane_started = false;
}
