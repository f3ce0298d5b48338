/* Gradients: taken over one by one as autograd makes them, handed to the update lane chunk by chunk.
 *
 * A chunk is complete when every gradient that is expected came: those that came in the step before. A gradient that nobody
 * expected, after its chunk went to the lane, makes a second job over the first one's shadow; a gradient that does not come
 * leaves the chunk to ptn_engine_flush, or to the lane before that where memory is short. So expectations decide when, never
 * what.
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

/* Where a gradient that is not the last of its step is kept. */
static ptn_status reserve_grads(ptn_engine *engine, chunk *chunk) {
  if (chunk->home == HOME_HOST) return ptn_host_make_sum(engine, chunk, false);
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

/* Locked, on the driving thread, whose arithmetic the lane's is from here on: an update is the same wherever it is computed. */
static void queue(ptn_engine *engine, job *job) {
  fegetenv(&engine->arithmetic);
  ptn_lane_driven(engine);
  if (engine->chunks[job->chunk].home == HOME_HOST) ptn_host_enqueue(engine, job);
  else ptn_lane_enqueue(engine, job);
}

/* One gradient that the chunk holds joins the job that is made for them, or, where it goes to the host's sum without one, is only
 * noted as an update that is made after commit. */
static ptn_status add_gradient(ptn_engine *engine, chunk *chunk, uint32_t number, job *job, ptn_gradient_use use) {
  param *param = &engine->params[number];
  if (use == PTN_GRADIENT_UPDATE && is_late(chunk)) PTN_TRY(ptn_host_note_late(engine, chunk, number, 1.0f));
  if (param->offload && ptn_offload_is_direct(param->offload)) return PTN_OK;
  job_grad *grad = &job->grads[job->n_grads++];
  *grad = (job_grad){.param = number, .data = param->grad, .owner = param->owner, .offload = param->offload};
  grad->total = param->use == PTN_GRADIENT_SPILL_TOTAL;
  if (!job->update) return PTN_OK;
  return ptn_update_prepare(&grad->update, &engine->hypers[param->group], param->steps + 1, 1.0f);
}

/* The chunk no longer holds its gradients: the job does. */
static void hand_over(ptn_engine *engine, chunk *chunk, job *job) {
  for (uint32_t i = 0; i < job->n_grads; i++)
    if (job->grads[i].offload) ptn_offload_await(job->grads[i].offload, job);
  for (uint32_t i = 0; i < chunk->n_params; i++) {
    param *param = &engine->params[engine->order_params[chunk->first_param + i]];
    if (param->offload && ptn_offload_is_direct(param->offload)) ptn_offload_release(engine, param->offload);
    param->grad = NULL;
    param->offload = NULL;
  }
  chunk->arrived = 0;
  chunk->arrived_bytes = 0;
}

/* Locked. Moves the chunk's gradients to a job on a lane. */
static ptn_status enqueue(ptn_engine *engine, chunk *chunk) {
  ptn_gradient_use use = PTN_GRADIENT_UPDATE;
  for (uint32_t i = 0; i < chunk->n_params; i++) {
    const param *param = &engine->params[engine->order_params[chunk->first_param + i]];
    if (param->grad) use = param->use;
  }
  job *job = new_job(engine, chunk, chunk->arrived, use == PTN_GRADIENT_UPDATE && !is_late(chunk));
  if (!job) return PTN_MEMORY;
  ptn_status status = PTN_OK;
  for (uint32_t i = 0; i < chunk->n_params && status == PTN_OK; i++) {
    uint32_t number = engine->order_params[chunk->first_param + i];
    if (engine->params[number].grad) status = add_gradient(engine, chunk, number, job, use);
  }
  if (status != PTN_OK) {
    free(job);
    return status;
  }
  job->grad_bytes = chunk->arrived_bytes;
  hand_over(engine, chunk, job);
  if (job->n_grads > 0) queue(engine, job);
  else free(job);
  return PTN_OK;
}

ptn_status ptn_gradients_enqueue_some(ptn_engine *engine, bool *found) {
  *found = false;
  for (uint32_t c = engine->n_chunks; c-- > 0 && !*found;) { /* backward has left the last ones, and may not come back to them */
    if (engine->chunks[c].arrived == 0) continue;
    PTN_TRY(enqueue(engine, &engine->chunks[c]));
    *found = true;
  }
  return PTN_OK;
}

void ptn_gradients_end_job(ptn_engine *engine, job *job) {
  chunk *chunk = &engine->chunks[job->chunk];
  for (uint32_t i = 0; i < job->n_grads; i++) {
    param *param = &engine->params[job->grads[i].param];
    if (!job->failed && job->update && !job->late) param->updated = true;
    if (!job->failed && !job->update) param->spilled = true;
    ptn_lane_owner(engine, job->grads[i].owner);
    ptn_offload_release(engine, job->grads[i].offload);
  }
  if (job->late) chunk->late = false;
  else if (!job->failed && !job->cancelled && job->update) chunk->has_shadow = engine->any_shadow = true;
  if (!job->cancelled) chunk->jobs--;
  free(job);
}

/* The driving thread gives back what the lane is done with. It waits while the lane holds more gradients than it may, where no goal
 * says how much that is. */
static void wait_for_room(ptn_engine *engine) {
  bool waits = !ptn_account_has_goal(engine->account);
  ptn_lock(&engine->mutex);
  if (waits && engine->n_jobs && engine->job_bytes > engine->pending_bytes) {
    int64_t begin = ptn_now_ns();
    while (engine->n_jobs && engine->job_bytes > engine->pending_bytes) ptn_lane_wait(engine);
    engine->wait_ns += ptn_trace_waited(engine->trace, PTN_TRACE_MEMORY, -1, begin);
  }
  ptn_unlock(&engine->mutex);
  ptn_engine_collect(engine);
}

static ptn_status check_gradient(const ptn_engine *engine, uint32_t number) {
  const param *param = &engine->params[number];
  const chunk *chunk = &engine->chunks[param->chunk];
  bool on_disk = chunk->home == HOME_DISK;
  if (!param->trained || !has_slot_home(chunk)) return ptn_fail(PTN_INVALID, "parameter %u takes no gradient here", number);
  if (on_disk && engine->n_pieces == 0) return ptn_fail(PTN_STEP, "a gradient came before the update lane has its ring");
  if (param->grad) return ptn_fail(PTN_STEP, "parameter %u has two gradients in one backward pass", number);
  return PTN_OK;
}

/* Nobody can be told of a failure when an owner comes back: room among those to be released is made when it is taken over. The lane
 * may hold gradients of many passes, as long as memory allows it. */
static ptn_status make_room_for_owner(ptn_engine *engine) {
  ptn_lock(&engine->mutex);
  bool enough = engine->owned_count < engine->max_owners;
  if (!enough) {
    size_t more = 2 * engine->max_owners;
    void **grown = realloc(engine->owners, more * sizeof *grown);
    enough = grown != NULL;
    if (grown) {
      engine->owners = grown;
      engine->max_owners = more;
    }
  }
  ptn_unlock(&engine->mutex);
  return enough ? PTN_OK : ptn_fail(PTN_MEMORY, "no memory to note a gradient");
}

/* Locked. The gradient counts from here on, and may complete its chunk. Where that fails it does not count. */
static ptn_status hold(ptn_engine *engine, uint32_t number, const void *data, void *owner, ptn_gradient_use use) {
  param *param = &engine->params[number];
  chunk *chunk = &engine->chunks[param->chunk];
  param->grad = data;
  param->owner = owner;
  param->use = use;
  engine->gradients++;
  chunk->arrived++;
  chunk->arrived_bytes += ptn_arena_rounded_bytes(param->count * engine->element_bytes);
  if (param->expected && !param->counted) chunk->missing--;
  param->counted = true;
  ptn_status status = chunk->missing == 0 ? enqueue(engine, chunk) : PTN_OK;
  if (status != PTN_OK && param->grad) { /* the caller keeps the owner of what was not taken */
    param->grad = NULL;
    param->owner = NULL;
    param->offload = NULL;
    chunk->arrived--;
    chunk->arrived_bytes -= ptn_arena_rounded_bytes(param->count * engine->element_bytes);
    engine->gradients--;
  }
  return status;
}

/* The device brings it to the host, and the owner is released when it has. */
static ptn_status take_from_device(ptn_engine *engine, uint32_t number, const void *data, void *owner, ptn_gradient_use use) {
  param *param = &engine->params[number];
  struct offload *offload;
  PTN_TRY(ptn_offload_take(engine, number, data, &offload));
  ptn_lock(&engine->mutex);
  param->offload = offload;
  bool kept = ptn_offload_keep(offload, owner);
  ptn_status status = hold(engine, number, ptn_offload_data(offload), NULL, use);
  if (status == PTN_OK) param->summed |= use != PTN_GRADIENT_UPDATE || is_late(&engine->chunks[param->chunk]);
  if (status == PTN_OK && !kept) ptn_lane_owner(engine, owner);
  if (status != PTN_OK && kept) ptn_offload_keep(offload, NULL);
  if (status == PTN_OK) engine->owned_count++;
  ptn_unlock(&engine->mutex);
  if (status != PTN_OK) ptn_offload_abandon(engine, offload);
  return status;
}

ptn_status ptn_engine_gradient(ptn_engine *engine, uint32_t number, const void *data, void *owner, ptn_gradient_use use) {
  PTN_TRY(check_gradient(engine, number));
  chunk *chunk = &engine->chunks[engine->params[number].chunk];
  if (use != PTN_GRADIENT_UPDATE) PTN_TRY(reserve_grads(engine, chunk));
  PTN_TRY(make_room_for_owner(engine));
  if (engine->over.device) return take_from_device(engine, number, data, owner, use);
  wait_for_room(engine);
  ptn_lock(&engine->mutex);
  ptn_status status = hold(engine, number, data, owner, use);
  if (status == PTN_OK) engine->owned_count++;
  ptn_unlock(&engine->mutex);
  if (status == PTN_OK) ptn_engine_share(engine);
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

static bool waits_in_sum(const param *param) { return param->spilled && !param->updated; }

static ptn_status update_chunk_spilled(ptn_engine *engine, chunk *chunk, uint32_t count, float grad_scale) {
  job *job = new_job(engine, chunk, count, true);
  if (!job) return PTN_MEMORY;
  ptn_status status = PTN_OK;
  for (uint32_t i = 0; i < chunk->n_params && status == PTN_OK; i++) {
    uint32_t number = engine->order_params[chunk->first_param + i];
    const param *param = &engine->params[number];
    if (!waits_in_sum(param)) continue;
    job_grad *grad = &job->grads[job->n_grads++];
    *grad = (job_grad){.param = number};
    status = ptn_update_prepare(&grad->update, &engine->hypers[param->group], param->steps + 1, grad_scale);
  }
  if (status != PTN_OK) {
    free(job);
    return status;
  }
  queue(engine, job);
  return PTN_OK;
}

static ptn_status note_chunk_late(ptn_engine *engine, chunk *chunk, float grad_scale) {
  for (uint32_t i = 0; i < chunk->n_params; i++) {
    uint32_t number = engine->order_params[chunk->first_param + i];
    if (waits_in_sum(&engine->params[number])) PTN_TRY(ptn_host_note_late(engine, chunk, number, grad_scale));
  }
  return PTN_OK;
}

/* No job is under way when it begins, so the flags hold still. */
ptn_status ptn_engine_update_spilled(ptn_engine *engine, float grad_scale) {
  PTN_TRY(ptn_engine_wait(engine));
  ptn_status status = PTN_OK;
  ptn_lock(&engine->mutex);
  for (uint32_t c = 0; c < engine->n_chunks && status == PTN_OK; c++) {
    chunk *chunk = &engine->chunks[c];
    uint32_t count = 0;
    for (uint32_t i = 0; i < chunk->n_params; i++)
      count += waits_in_sum(&engine->params[engine->order_params[chunk->first_param + i]]);
    if (count == 0) continue;
    if (is_late(chunk)) status = note_chunk_late(engine, chunk, grad_scale);
    else status = update_chunk_spilled(engine, chunk, count, grad_scale);
  }
  ptn_unlock(&engine->mutex);
  return status;
}

ptn_status ptn_engine_wait(ptn_engine *engine) {
  ptn_lock(&engine->mutex);
  int64_t begin = ptn_now_ns();
  if (engine->n_jobs > 0) ptn_lane_driven(engine);
  ptn_lane_settle(engine);
  ptn_over_settle(engine);
  engine->wait_ns += ptn_trace_waited(engine->trace, PTN_TRACE_UPDATE, -1, begin);
  ptn_status status = engine->lane_status == PTN_OK ? PTN_OK : ptn_error_restore(&engine->lane_error);
  ptn_unlock(&engine->mutex);
  ptn_engine_collect(engine);
  return status;
}

/* All that can fail of an update in memory. */
static ptn_status prepare_in_memory(ptn_engine *engine, uint32_t number, float grad_scale, ptn_update *update) {
  const param *param = &engine->params[number];
  const chunk *chunk = &engine->chunks[param->chunk];
  if (!param->trained || chunk->home != HOME_MEMORY)
    return ptn_fail(PTN_INVALID, "parameter %u has no home in memory or is not trained", number);
  if (engine->over.device)
    return ptn_fail(PTN_INVALID, "parameter %u lies on the device, where the CPU updates nothing: update it there", number);
  PTN_TRY(ptn_engine_to_memory(engine, param->chunk, true));
  return ptn_update_prepare(update, &engine->hypers[param->group], param->steps + 1, grad_scale);
}

/* Whether an update of the parameter with its group's values is counted. */
static bool counts(const ptn_engine *engine, uint32_t number) {
  return ptn_update_counts(&engine->hypers[engine->params[number].group]);
}

static void run_in_memory(ptn_engine *engine, uint32_t number, const void *grad, const ptn_update *update) {
  param *param = &engine->params[number];
  chunk *chunk = &engine->chunks[param->chunk];
  chunk->zero_state = chunk->zero_master = false;
  float *states[PTN_STATE_MAX] = {0};
  uint64_t offset_bytes = engine->widening * param->offset_bytes; /* in an fp32 array */
  for (uint32_t i = 0; i < engine->n_states; i++)
    states[i] = (float *)(void *)((char *)chunk->states + i * engine->widening * chunk->param_bytes + offset_bytes);
  void *values = (char *)chunk->params->memory + param->offset_bytes;
  ptn_span all = ptn_span_whole(param->count);
  if (engine->bf16) {
    float *master = (float *)(void *)((char *)chunk->master + offset_bytes);
    ptn_update_run_bf16(true, update, values, master, states, grad, all);
  } else {
    ptn_update_run(true, update, values, states, grad, all);
  }
  param->steps += counts(engine, number);
}

/* Not the caller's, and not of no elements. */
static bool is_ours(const ptn_engine *engine, const ptn_memory_update *update) {
  return update->grad && engine->params[update->param].count > 0;
}

ptn_status ptn_engine_make_step(ptn_engine *engine, const ptn_memory_update *updates, size_t count, float grad_scale) {
  size_t n_ours = 0;
  ptn_engine_yield(engine, false);
  for (size_t i = 0; i < count; i++) n_ours += is_ours(engine, &updates[i]);
  ptn_update *prepared = n_ours > 0 ? malloc(count * sizeof *prepared) : NULL;
  ptn_status status = prepared || n_ours == 0 ? PTN_OK : ptn_fail(PTN_MEMORY, "no memory for the list of %zu updates", count);
  for (size_t i = 0; i < count && status == PTN_OK; i++)
    if (is_ours(engine, &updates[i])) status = prepare_in_memory(engine, updates[i].param, grad_scale, &prepared[i]);
  if (status == PTN_OK) {
    for (size_t i = 0; i < count; i++) {
      if (is_ours(engine, &updates[i])) run_in_memory(engine, updates[i].param, updates[i].grad, &prepared[i]);
      else engine->params[updates[i].param].steps += counts(engine, updates[i].param);
    }
    ptn_engine_commit(engine);
  }
  free(prepared);
  return status;
}

uint64_t ptn_engine_commits_count(const ptn_engine *engine) { return engine->commits_count; }

/* A step is over: the file gives space back, but for what the stash had at most in this step or the one before. */
static void trim_disk(ptn_engine *engine) {
  uint64_t most_bytes = ptn_stash_mark(engine->stash);
  if (engine->over.stash) most_bytes += ptn_device_stash_mark(engine->over.stash);
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
    else if (slot->state >= SLOT_ORDERED) slot->state = SLOT_EMPTY; /* read before the update: out of date now */
  }
  if (engine->over.device) ptn_host_queue_late(engine);
  for (uint32_t i = 0; i < engine->n_params; i++) {
    param *param = &engine->params[i];
    param->steps += param->updated && counts(engine, i);
    param->updated = param->spilled = param->summed = false;
  }
  engine->gradients = 0;
  engine->any_shadow = false;
  engine->commits_count++;
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
  ptn_engine_yield(engine, false);
  ptn_lock(&engine->mutex);
  if (engine->lane_status == PTN_OK && (engine->n_jobs || engine->over.n_jobs)) { /* jobs that did not start need not */
    engine->lane_status = PTN_STEP;
    memset(&engine->lane_error, 0, sizeof engine->lane_error);
    engine->lane_error.code = PTN_STEP;
  }
  ptn_lane_settle(engine);
  ptn_over_settle(engine);
  ptn_residency_unuse_all(engine);
  for (uint32_t c = 0; c < engine->n_chunks; c++) {
    chunk *chunk = &engine->chunks[c];
    free(chunk->late_job);
    chunk->late_job = NULL;
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
    ptn_offload_release(engine, param->offload);
    param->offload = NULL;
    param->grad = NULL;
    param->owner = NULL;
    param->spilled = param->updated = param->summed = false;
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
  ptn_error error; /* the caller's: what runs when an owner goes may write another */
  bool saved = false;
  for (;;) {
    ptn_lock(&engine->mutex);
    void *owner = engine->n_owners ? engine->owners[--engine->n_owners] : NULL;
    if (owner) engine->owned_count--;
    else engine->owner_bytes = 0;
    ptn_unlock(&engine->mutex);
    if (!owner) break;
    if (!saved) ptn_error_save(&error);
    saved = true;
    if (engine->release) engine->release(owner);
  }
  if (saved) (void)ptn_error_restore(&error);
}

bool ptn_engine_relieve(ptn_engine *engine, bool must) {
  ptn_lock(&engine->mutex);
  bool useful = engine->n_owners > 0;
  uint64_t held = engine->job_bytes;
  uint32_t moving = engine->over.offloads;
  if (!useful && must && engine->over.device && moving) { /* what a device is done with goes */
    int64_t begin = ptn_now_ns();
    while (engine->over.offloads >= moving) ptn_wait(&engine->changed, &engine->mutex);
    engine->wait_ns += ptn_trace_waited(engine->trace, PTN_TRACE_MEMORY, -1, begin);
    useful = true;
  } else if (!useful && held && (must || held > engine->pending_bytes)) {
    int64_t begin = ptn_now_ns();
    while (engine->n_jobs && engine->job_bytes >= held) ptn_lane_wait(engine);
    engine->wait_ns += ptn_trace_waited(engine->trace, PTN_TRACE_MEMORY, -1, begin);
    useful = true;
  } else if (!useful && must && !engine->over.device) { /* gradients that are expected and do not come keep no others waiting */
    if (ptn_gradients_enqueue_some(engine, &useful) != PTN_OK) useful = false;
  }
  ptn_unlock(&engine->mutex);
  ptn_engine_collect(engine);
  return useful || (must && ptn_states_yield_some(engine));
}
