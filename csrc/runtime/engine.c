/* Create and destroy: see engine.h for what an engine is, internal.h for its parts. */
#include <stdlib.h>
#include <string.h>

#include "runtime/internal.h"

/* Some ten steps of a large model. */
#define TRACE_EVENTS_COUNT ((size_t)1 << 16)
#define LARGEST_CHUNK_BYTES (1ull << 56) /* with what lies beside it no sum of its sizes overflows */

static ptn_status out_of_memory(void) { return ptn_fail(PTN_MEMORY, "no memory for the engine's own tables"); }

static uint64_t element_bytes(const ptn_engine_config *config) { return config->bf16 ? sizeof(ptn_bf16) : sizeof(float); }

static bool lies_inside(const ptn_engine_config *config, const ptn_engine_param *param) {
  if (param->chunk >= config->n_chunks || param->offset_bytes % PTN_TENSOR_ALIGN_BYTES != 0) return false;
  uint64_t chunk_bytes = config->chunks[param->chunk].param_bytes;
  return param->offset_bytes <= chunk_bytes && param->count <= (chunk_bytes - param->offset_bytes) / element_bytes(config);
}

static ptn_status check_config(const ptn_engine_config *config) {
  if (config->n_states > PTN_STATE_MAX)
    return ptn_fail(PTN_INVALID, "%u arrays of optimizer state, at most %d are supported", config->n_states, PTN_STATE_MAX);
  for (uint32_t i = 0; i < config->n_chunks; i++)
    if (config->chunks[i].param_bytes == 0 || config->chunks[i].param_bytes % PTN_PAGE_BYTES != 0 ||
        config->chunks[i].param_bytes > LARGEST_CHUNK_BYTES)
      return ptn_fail(PTN_INVALID, "chunk %u has %llu bytes, a multiple of %zu up to %llu is wanted", i,
                      (unsigned long long)config->chunks[i].param_bytes, PTN_PAGE_BYTES, LARGEST_CHUNK_BYTES);
  for (uint32_t i = 0; i < config->n_params; i++) {
    const ptn_engine_param *param = &config->params[i];
    if (!lies_inside(config, param)) return ptn_fail(PTN_INVALID, "parameter %u does not lie inside its chunk", i);
    if (param->trained && (param->group >= config->n_groups || !config->chunks[param->chunk].trained))
      return ptn_fail(PTN_INVALID, "parameter %u is trained, and its group is not there or its chunk is not trained", i);
  }
  return PTN_OK;
}

/* Counting sort of the parameters by chunk; inside a chunk they keep the caller's order, which is that of their offsets. */
static void group_params(ptn_engine *engine) {
  for (uint32_t i = 0; i < engine->n_params; i++) engine->chunks[engine->params[i].chunk].n_params++;
  uint32_t first = 0;
  for (uint32_t c = 0; c < engine->n_chunks; c++) {
    engine->chunks[c].first_param = first;
    first += engine->chunks[c].n_params;
    engine->chunks[c].n_params = 0;
  }
  for (uint32_t i = 0; i < engine->n_params; i++) {
    chunk *chunk = &engine->chunks[engine->params[i].chunk];
    engine->order_params[chunk->first_param + chunk->n_params++] = i;
    chunk->missing += engine->params[i].expected;
  }
}

static ptn_status copy_config(ptn_engine *engine, const ptn_engine_config *config) {
  engine->account = config->account;
  engine->release = config->release;
  engine->n_chunks = config->n_chunks;
  engine->n_params = config->n_params;
  engine->n_groups = config->n_groups;
  engine->n_states = config->n_states;
  engine->bf16 = config->bf16;
  engine->element_bytes = element_bytes(config);
  engine->widening = sizeof(float) / engine->element_bytes;
  engine->n_arrays = config->n_states + config->bf16;
  engine->max_slots = 2 * config->n_chunks + 1; /* each chunk may need one of its own beside the shared ones */
  engine->chunks = calloc(config->n_chunks + 1, sizeof *engine->chunks);
  engine->params = calloc((size_t)config->n_params + 1, sizeof *engine->params);
  engine->order_params = calloc(config->n_params + 1, sizeof *engine->order_params);
  engine->hypers = calloc((size_t)config->n_groups + 1, sizeof *engine->hypers);
  engine->slots = calloc(engine->max_slots, sizeof *engine->slots);
  engine->seen = calloc(config->n_chunks + 1, sizeof *engine->seen);
  engine->updates = calloc(config->n_chunks + 1, sizeof *engine->updates);
  engine->last_updates = calloc(config->n_chunks + 1, sizeof *engine->last_updates);
  fegetenv(&engine->arithmetic);
  engine->max_owners = (size_t)config->n_params + 64; /* at first */
  engine->owners = calloc(engine->max_owners, sizeof *engine->owners);
  if (!engine->chunks || !engine->params || !engine->order_params || !engine->hypers || !engine->slots || !engine->seen ||
      !engine->updates || !engine->last_updates || !engine->owners)
    return out_of_memory();
  for (uint32_t i = 0; i < config->n_chunks; i++) {
    engine->chunks[i].param_bytes = config->chunks[i].param_bytes;
    engine->chunks[i].trained = config->chunks[i].trained;
    engine->chunks[i].zero_state = engine->chunks[i].zero_master = true;
    engine->chunks[i].slot = -1;
  }
  for (uint32_t i = 0; i < config->n_params; i++) {
    const ptn_engine_param *from = &config->params[i];
    engine->params[i] = (param){.chunk = from->chunk,
                                .offset_bytes = from->offset_bytes,
                                .count = from->count,
                                .group = from->group,
                                .trained = from->trained,
                                .expected = from->trained && from->count > 0};
  }
  group_params(engine);
  return PTN_OK;
}

ptn_status ptn_engine_create(ptn_engine **out, const ptn_engine_config *config) {
  *out = NULL;
  PTN_TRY(check_config(config));
  ptn_engine *engine = calloc(1, sizeof *engine);
  if (!engine) return out_of_memory();
  ptn_mutex_create(&engine->mutex);
  ptn_condition_create(&engine->changed);
  ptn_condition_create(&engine->lane_work);
  ptn_condition_create(&engine->over.lane_work);
  ptn_status status = copy_config(engine, config);
  if (status == PTN_OK) status = ptn_trace_create(&engine->trace, TRACE_EVENTS_COUNT);
  if (status == PTN_OK) status = ptn_store_create(&engine->store, config->folder, config->disk_engine);
  if (status == PTN_OK) status = ptn_stash_create(&engine->stash, engine->store, engine->account, engine->trace);
  if (status == PTN_OK && config->device) status = ptn_team_create(&engine->team, 0);
  if (status == PTN_OK) status = ptn_lane_start(engine);
  if (status == PTN_OK && config->device) status = ptn_over_open(engine, config->device, config->device_account);
  if (status != PTN_OK) {
    ptn_error error;
    ptn_error_save(&error);
    ptn_engine_destroy(engine);
    return ptn_error_restore(&error);
  }
  *out = engine;
  return PTN_OK;
}

void ptn_engine_destroy(ptn_engine *engine) {
  if (!engine) return;
  if (engine->lane_started) {
    ptn_engine_drop(engine);
    ptn_engine_drop_slots(engine);
    ptn_lane_stop(engine);
    ptn_engine_drop_ring(engine);
  }
  if (engine->owners) ptn_engine_collect(engine);
  for (uint32_t i = 0; engine->chunks && i < engine->n_chunks; i++) {
    if (engine->over.device) ptn_over_drop_home(engine, &engine->chunks[i]);
    ptn_region_release(engine->chunks[i].params);
    ptn_arena_free(engine->chunks[i].states);
    ptn_arena_free(engine->chunks[i].master);
  }
  ptn_over_close(engine);
  ptn_stash_close(engine->stash);
  ptn_store_destroy(engine->store);
  ptn_stash_release(engine->stash);
  ptn_team_destroy(engine->team);
  ptn_trace_destroy(engine->trace); /* no thread is left that adds to it */
  ptn_condition_destroy(&engine->over.lane_work);
  ptn_condition_destroy(&engine->lane_work);
  ptn_condition_destroy(&engine->changed);
  ptn_mutex_destroy(&engine->mutex);
  free(engine->chunks);
  free(engine->params);
  free(engine->order_params);
  free(engine->hypers);
  free(engine->slots);
  free(engine->order);
  free(engine->seen);
  free(engine->updates);
  free(engine->last_updates);
  free(engine->owners);
  free(engine);
}

uint32_t ptn_engine_chunks_count(const ptn_engine *engine) { return engine->n_chunks; }
uint32_t ptn_engine_params_count(const ptn_engine *engine) { return engine->n_params; }
ptn_store *ptn_engine_store(ptn_engine *engine) { return engine->store; }
ptn_stash *ptn_engine_stash(ptn_engine *engine) { return engine->stash; }
ptn_trace *ptn_engine_trace(ptn_engine *engine) { return engine->trace; }

void ptn_engine_get_stats(ptn_engine *engine, ptn_engine_stats *out) {
  ptn_stash_stats stash;
  ptn_stash_get_stats(engine->stash, &stash);
  ptn_lock(&engine->mutex);
  *out = (ptn_engine_stats){.wait_ns = engine->wait_ns + stash.wait_ns,
                            .disk_bytes = stash.disk_bytes + engine->own_bytes,
                            .update_ns = engine->update_ns,
                            .loaded_bytes = engine->loaded_bytes,
                            .loads = engine->loads,
                            .hits = engine->hits,
                            .torn_writes = engine->torn_writes};
  for (uint32_t i = 0; i < engine->n_chunks; i++) {
    const chunk *chunk = &engine->chunks[i];
    out->disk_bytes += chunk->extents[0].bytes + chunk->extents[1].bytes + chunk->grads.bytes;
  }
  if (engine->over.device) ptn_over_count(engine, out);
  ptn_unlock(&engine->mutex);
}
