/* Gradients: taken over one by one as autograd makes them, handed to the update lane chunk by chunk.
 *
 * A chunk is complete when every gradient that is expected came: those that came in the step before. A gradient that nobody
 * expected, after its chunk went to the lane, makes a second job over the first one's shadow; a gradient that does not come
 * leaves the chunk to ptn_engine_flush. So expectations decide when, never what.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/internal.h"

ptn_status ptn_engine_set_hyper(ptn_engine *engine, uint32_t group, const ptn_hyper *hyper) {
  if (group >= engine->n_groups) return ptn_fail(PTN_INVALID, "group %u of %u", group, engine->n_groups);
  if ((uint32_t)ptn_state_count(hyper) > engine->n_states)
    return ptn_fail(
        PTN_STEP,
        "group %u needs %d arrays of optimizer state, the model was wrapped with %u: set amsgrad and momentum before wrap", group,
        ptn_state_count(hyper), engine->n_states);
  engine->hypers[group] = *hyper;
  return PTN_OK;
}

static void recount(ptn_engine *engine, chunk *chunk) {
  chunk->missing = 0;
  for (uint32_t i = 0; i < chunk->n_params; i++) {
    param *param = &engine->params[engine->order_params[chunk->first_param + i]];
    param->counted = false;
    chunk->missing += param->expected;
  }
}

void ptn_engine_expect(ptn_engine *engine, uint32_t number, bool expected) {
  param *param = &engine->params[number];
  param->expected = expected && param->trained && param->count > 0;
  recount(engine, &engine->chunks[param->chunk]);
}

static ptn_status reserve_grads(ptn_engine *engine, chunk *chunk) {
  if (chunk->grads.bytes) return PTN_OK;
  return ptn_store_reserve(engine->store, chunk->param_bytes, &chunk->grads);
}

static job *new_job(ptn_engine *engine, chunk *chunk, uint32_t n_grads, bool update) {
  job *job = calloc(1, sizeof *job + n_grads * sizeof job->grads[0]);
  if (!job) {
    ptn_fail(PTN_MEMORY, "no memory for a job of %u gradients", n_grads);
    return NULL;
  }
  job->chunk = (uint32_t)(chunk - engine->chunks);
  job->update = update;
  return job;
}

/* Locked. Moves the chunk's gradients to a job on the lane. */
static ptn_status enqueue(ptn_engine *engine, chunk *chunk) {
  ptn_gradient_use use = PTN_GRADIENT_UPDATE;
  for (uint32_t i = 0; i < chunk->n_params; i++) {
    const param *param = &engine->params[engine->order_params[chunk->first_param + i]];
    if (param->grad) use = param->use;
  }
  bool update = use == PTN_GRADIENT_UPDATE;
  job *job = new_job(engine, chunk, chunk->arrived, update);
  if (!job) return PTN_MEMORY;
  for (uint32_t i = 0; i < chunk->n_params; i++) {
    uint32_t number = engine->order_params[chunk->first_param + i];
    param *param = &engine->params[number];
    if (!param->grad) continue;
    job_grad *grad = &job->grads[job->n_grads++];
    *grad = (job_grad){.param = number, .data = param->grad, .owner = param->owner};
    grad->total = param->use == PTN_GRADIENT_SPILL_TOTAL;
    if (update) {
      ptn_status status = ptn_update_prepare(&grad->update, &engine->hypers[param->group], param->steps + 1, 1.0f);
      if (status != PTN_OK) {
        free(job);
        return status;
      }
    }
  }
  for (uint32_t i = 0; i < job->n_grads; i++) engine->params[job->grads[i].param].grad = NULL;
  job->grad_bytes = chunk->arrived_bytes;
  chunk->arrived = 0;
  chunk->arrived_bytes = 0;
  ptn_lane_enqueue(engine, job);
  return PTN_OK;
}

/* The driving thread waits while the lane holds more gradients than it may, and gives back what the lane is done with. */
static void wait_for_room(ptn_engine *engine) {
  ptn_lock(&engine->mutex);
  if (engine->n_jobs && engine->job_bytes > engine->pending_bytes) {
    int64_t begin = ptn_now_ns();
    while (engine->n_jobs && engine->job_bytes > engine->pending_bytes) ptn_wait(&engine->changed, &engine->mutex);
    engine->wait_ns += ptn_trace_waited(engine->trace, PTN_TRACE_MEMORY, -1, begin);
  }
  ptn_unlock(&engine->mutex);
  ptn_engine_collect(engine);
}

ptn_status ptn_engine_gradient(ptn_engine *engine, uint32_t number, const void *data, void *owner, ptn_gradient_use use) {
  param *param = &engine->params[number];
  chunk *chunk = &engine->chunks[param->chunk];
  if (!param->trained || chunk->home != HOME_DISK) return ptn_fail(PTN_INVALID, "parameter %u takes no gradient here", number);
  if (engine->n_pieces == 0) return ptn_fail(PTN_STEP, "a gradient came before the update lane has its ring");
  if (use != PTN_GRADIENT_UPDATE && !engine->ring_has_grads)
    return ptn_fail(PTN_STEP, "a gradient is to be kept on disk and the ring was made without room for that");
  if (param->grad) return ptn_fail(PTN_STEP, "parameter %u has two gradients in one backward pass", number);
  if (use != PTN_GRADIENT_UPDATE) PTN_TRY(reserve_grads(engine, chunk));
  wait_for_room(engine);
  ptn_lock(&engine->mutex);
  param->grad = data;
  param->owner = owner;
  param->use = use;
  engine->gradients++;
  chunk->arrived++;
  chunk->arrived_bytes += param->count * engine->element_bytes;
  if (param->expected && !param->counted) chunk->missing--;
  param->counted = true;
  ptn_status status = chunk->missing == 0 ? enqueue(engine, chunk) : PTN_OK;
  if (status != PTN_OK && param->grad) { /* the caller keeps the owner of what was not taken */
    param->grad = NULL;
    param->owner = NULL;
    chunk->arrived--;
    chunk->arrived_bytes -= param->count * engine->element_bytes;
    engine->gradients--;
  }
  ptn_unlock(&engine->mutex);
  return status;
}

ptn_status ptn_engine_flush(ptn_engine *engine) {
  ptn_status status = PTN_OK;
  ptn_lock(&engine->mutex);
  for (uint32_t c = 0; c < engine->n_chunks && status == PTN_OK; c++) {
    chunk *chunk = &engine->chunks[c];
    if (chunk->arrived) status = enqueue(engine, chunk);
    if (!chunk->trained || status != PTN_OK) continue;
    for (uint32_t i = 0; i < chunk->n_params; i++) {
      param *param = &engine->params[engine->order_params[chunk->first_param + i]];
      param->expected = param->counted;
    }
    recount(engine, chunk);
  }
  ptn_unlock(&engine->mutex);
  return status;
}

/* No job is under way here, so the flags hold still. */
ptn_status ptn_engine_update_spilled(ptn_engine *engine, float grad_scale) {
  PTN_TRY(ptn_engine_wait(engine));
  for (uint32_t c = 0; c < engine->n_chunks; c++) {
    chunk *chunk = &engine->chunks[c];
    uint32_t count = 0;
    for (uint32_t i = 0; i < chunk->n_params; i++) {
      const param *param = &engine->params[engine->order_params[chunk->first_param + i]];
      count += param->spilled && !param->updated;
    }
    if (count == 0) continue;
    job *job = new_job(engine, chunk, count, true);
    if (!job) return PTN_MEMORY;
    ptn_status status = PTN_OK;
    for (uint32_t i = 0; i < chunk->n_params && status == PTN_OK; i++) {
      uint32_t number = engine->order_params[chunk->first_param + i];
      const param *param = &engine->params[number];
      if (!param->spilled || param->updated) continue;
      job_grad *grad = &job->grads[job->n_grads++];
      *grad = (job_grad){.param = number};
      status = ptn_update_prepare(&grad->update, &engine->hypers[param->group], param->steps + 1, grad_scale);
    }
    if (status != PTN_OK) {
      free(job);
      return status;
    }
    ptn_lock(&engine->mutex);
    ptn_lane_enqueue(engine, job);
    ptn_unlock(&engine->mutex);
  }
  return PTN_OK;
}

ptn_status ptn_engine_wait(ptn_engine *engine) {
  ptn_lock(&engine->mutex);
  int64_t begin = ptn_now_ns();
  ptn_lane_settle(engine);
  engine->wait_ns += ptn_trace_waited(engine->trace, PTN_TRACE_UPDATE, -1, begin);
  ptn_status status = engine->lane_status == PTN_OK ? PTN_OK : ptn_error_restore(&engine->lane_error);
  ptn_unlock(&engine->mutex);
  ptn_engine_collect(engine);
  return status;
}

ptn_status ptn_engine_update_in_memory(ptn_engine *engine, uint32_t number, const void *grad, float grad_scale) {
  param *param = &engine->params[number];
  chunk *chunk = &engine->chunks[param->chunk];
  if (!param->trained || chunk->home != HOME_MEMORY)
    return ptn_fail(PTN_INVALID, "parameter %u has no home in memory or is not trained", number);
  PTN_TRY(ptn_engine_to_memory(engine, param->chunk, true));
  ptn_update update;
  PTN_TRY(ptn_update_prepare(&update, &engine->hypers[param->group], param->steps + 1, grad_scale));
  float *states[PTN_STATE_MAX] = {0};
  uint64_t offset_bytes = engine->widening * param->offset_bytes; /* in an fp32 array */
  for (uint32_t i = 0; i < engine->n_states; i++)
    states[i] = (float *)(void *)((char *)chunk->states + i * engine->widening * chunk->param_bytes + offset_bytes);
  void *values = (char *)chunk->params->memory + param->offset_bytes;
  ptn_span all = ptn_span_whole(param->count);
  if (engine->bf16) {
    float *master = (float *)(void *)((char *)chunk->master + offset_bytes);
    ptn_update_run_bf16(engine->team, &update, values, master, states, grad, all);
  } else {
    ptn_update_run(engine->team, &update, values, states, grad, all);
  }
  param->steps++;
  return PTN_OK;
}

/* A step is over: the file gives space back, but for what the stash had at most in this step or the one before. */
static void trim_disk(ptn_engine *engine) {
  uint64_t most_bytes = ptn_stash_mark(engine->stash);
  ptn_store_trim(engine->store, ptn_max_u64(most_bytes, engine->stash_bytes));
  engine->stash_bytes = most_bytes;
}

void ptn_engine_commit(ptn_engine *engine) {
  ptn_lock(&engine->mutex);
  ptn_residency_settle(engine); /* a read under way would bring what is about to be out of date */
  for (uint32_t c = 0; c < engine->n_chunks; c++) {
    chunk *chunk = &engine->chunks[c];
    if (!chunk->has_shadow) continue;
    chunk->current = 1 - chunk->current;
    chunk->has_shadow = chunk->zero_state = chunk->zero_master = false;
    slot *slot = chunk->slot >= 0 ? &engine->slots[chunk->slot] : NULL;
    if (!slot || slot->chunk != c) continue;
    if (slot->shadow) slot->shadow = false; /* what the update made in place is the home's now */
    else if (slot->state == SLOT_LOADED) slot->state = SLOT_EMPTY; /* read before the update: out of date now */
  }
  for (uint32_t i = 0; i < engine->n_params; i++) {
    param *param = &engine->params[i];
    param->steps += param->updated;
    param->updated = param->spilled = false;
  }
  engine->gradients = 0;
  engine->any_shadow = false;
  uint32_t *order = engine->last_updates;
  engine->last_updates = engine->updates;
  engine->n_last_updates = engine->n_updates;
  engine->updates = order;
  engine->n_updates = 0;
  ptn_unlock(&engine->mutex);
  trim_disk(engine);
}

void ptn_engine_read_ahead(ptn_engine *engine, bool on) {
  ptn_lock(&engine->mutex);
  engine->read_ahead = on;
  if (on) ptn_lane_read_ahead(engine);
  else ptn_lane_cancel(engine);
  ptn_unlock(&engine->mutex);
}

void ptn_engine_drop(ptn_engine *engine) {
  ptn_lock(&engine->mutex);
  if (engine->lane_status == PTN_OK && engine->n_jobs) { /* jobs that did not start need not */
    engine->lane_status = PTN_STEP;
    memset(&engine->lane_error, 0, sizeof engine->lane_error);
    engine->lane_error.code = PTN_STEP;
  }
  ptn_lane_settle(engine);
  for (uint32_t c = 0; c < engine->n_chunks; c++) {
    chunk *chunk = &engine->chunks[c];
    if (chunk->has_shadow && chunk->slot >= 0) {
      slot *slot = &engine->slots[chunk->slot];
      if (slot->chunk == c && slot->shadow) ptn_residency_forget(engine, chunk);
    }
    chunk->has_shadow = false;
    chunk->arrived = 0;
    chunk->arrived_bytes = 0;
    recount(engine, chunk);
  }
  for (uint32_t i = 0; i < engine->n_params; i++) {
    param *param = &engine->params[i];
    if (param->grad) ptn_lane_owner(engine, param->owner);
    param->grad = NULL;
    param->owner = NULL;
    param->spilled = param->updated = false;
  }
  engine->lane_status = PTN_OK;
  engine->n_updates = 0;
  engine->gradients = 0;
  engine->any_shadow = false;
  ptn_unlock(&engine->mutex);
  ptn_engine_collect(engine);
  trim_disk(engine);
}

bool ptn_engine_has_gradients(ptn_engine *engine) { return engine->gradients > 0; }

void ptn_engine_collect(ptn_engine *engine) {
  for (;;) {
    ptn_lock(&engine->mutex);
    void *owner = engine->n_owners ? engine->owners[--engine->n_owners] : NULL;
    if (!owner) engine->owner_bytes = 0;
    ptn_unlock(&engine->mutex);
    if (!owner) return;
    if (engine->release) engine->release(owner);
  }
}

bool ptn_engine_relieve(ptn_engine *engine) {
  ptn_lock(&engine->mutex);
  bool useful = engine->n_owners > 0;
  uint64_t held = engine->job_bytes;
  if (!useful && held) {
    int64_t begin = ptn_now_ns();
    while (engine->n_jobs && engine->job_bytes >= held) ptn_wait(&engine->changed, &engine->mutex);
    engine->wait_ns += ptn_trace_waited(engine->trace, PTN_TRACE_MEMORY, -1, begin);
    useful = true;
  }
  ptn_unlock(&engine->mutex);
  ptn_engine_collect(engine);
  return useful;
}
