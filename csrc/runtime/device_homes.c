/* Homes beside a device: where a chunk's arrays are, and how they move between the device, the host and the disk, between steps.
 *
 * On the device: a region for the parameters, one block for the state and one for the master, as in ordinary memory. On the host: one
 * block of pinned memory, laid out as an extent of the disk, and a second one where the chunk has a shadow. What moves goes array by
 * array; one end is always ordinary memory, the host's home itself or a small bounce buffer.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/internal.h"

#define BOUNCE_BYTES ((uint64_t)4 << 20)

/* Arrays are numbered as in ptn_engine_transfer: the parameters, then the states, then the master. */
static uint64_t array_bytes(const ptn_engine *engine, const chunk *chunk, uint32_t array) {
  return array == 0 ? chunk->param_bytes : engine->widening * chunk->param_bytes;
}

static uint64_t array_begin(const ptn_engine *engine, const chunk *chunk, uint32_t array) {
  return array == 0 ? 0 : array_offset(engine, chunk, array - 1);
}

static bool is_master(const ptn_engine *engine, uint32_t array) { return array == 1 + engine->n_states; }

static uint32_t last_array(const ptn_engine *engine, const chunk *chunk) { return chunk->trained ? engine->n_arrays : 0; }

static bool is_zero(const ptn_engine *engine, const chunk *chunk, uint32_t array) {
  if (array == 0) return false;
  return is_master(engine, array) ? chunk->zero_master : chunk->zero_state;
}

/* ---- on the device ---- */

/* NULL: not made, which is zeros. */
static char *device_array(const ptn_engine *engine, const chunk *chunk, uint32_t array) {
  if (array == 0) return chunk->params->memory;
  if (is_master(engine, array)) return (char *)chunk->master;
  return chunk->states ? (char *)chunk->states + (array - 1) * array_bytes(engine, chunk, array) : NULL;
}

static ptn_status make_zeros(ptn_engine *engine, float **block, uint64_t bytes) {
  engine_device *over = &engine->over;
  if (*block || bytes == 0) return PTN_OK;
  void *memory;
  PTN_TRY(ptn_device_take(over->device, over->account, bytes, &memory));
  ptn_status status = ptn_over_zero(engine, memory, bytes);
  if (status == PTN_OK) *block = memory;
  else ptn_device_give(over->device, over->account, memory, bytes);
  return status;
}

/* Of the state, or of the master. */
static uint64_t block_bytes(const ptn_engine *engine, const chunk *chunk, bool master) {
  uint64_t arrays = master ? engine->bf16 : engine->n_states;
  return chunk->trained ? arrays * engine->widening * chunk->param_bytes : 0;
}

static ptn_status make_device_block(ptn_engine *engine, chunk *chunk, bool master) {
  return make_zeros(engine, master ? &chunk->master : &chunk->states, block_bytes(engine, chunk, master));
}

static ptn_status make_device_states(ptn_engine *engine, chunk *chunk) {
  PTN_TRY(make_device_block(engine, chunk, false));
  return make_device_block(engine, chunk, true);
}

static void drop_device(ptn_engine *engine, chunk *chunk) {
  engine_device *over = &engine->over;
  ptn_homes_set_params(engine, chunk, NULL);
  ptn_device_give(over->device, over->account, chunk->states, block_bytes(engine, chunk, false));
  ptn_device_give(over->device, over->account, chunk->master, block_bytes(engine, chunk, true));
  chunk->states = chunk->master = NULL;
}

void *ptn_engine_state(ptn_engine *engine, uint32_t number, uint32_t array) {
  const chunk *chunk = &engine->chunks[number];
  if (!engine->over.device || chunk->home != HOME_MEMORY || array == 0 || array > last_array(engine, chunk)) return NULL;
  return device_array(engine, chunk, array);
}

/* ---- on the host ---- */

static void drop_host(ptn_engine *engine, chunk *chunk) {
  ptn_host_drop_sum(engine, chunk);
  ptn_over_unpin(engine, &chunk->host[0]);
  ptn_over_unpin(engine, &chunk->host[1]);
  chunk->current = 0;
}

static ptn_status make_host(ptn_engine *engine, chunk *chunk, bool with_shadow) {
  chunk->current = 0;
  ptn_status status = ptn_over_pin(engine, extent_bytes(engine, chunk), &chunk->host[0]);
  if (status == PTN_OK && with_shadow && chunk->trained)
    status = ptn_over_pin(engine, extent_bytes(engine, chunk), &chunk->host[1]);
  else if (status == PTN_OK && chunk->trained) status = ptn_host_make_sum(engine, chunk, true);
  if (status != PTN_OK) drop_host(engine, chunk);
  return status;
}

/* The sum changes too: where it lies depends on the shadow. */
static ptn_status change_shadow(ptn_engine *engine, chunk *chunk, bool with_shadow) {
  ptn_pinned *other = &chunk->host[1 - chunk->current];
  if (!chunk->trained || with_shadow == (other->memory != NULL)) return PTN_OK;
  if (with_shadow) {
    PTN_TRY(ptn_over_pin(engine, extent_bytes(engine, chunk), other));
    ptn_host_drop_sum(engine, chunk);
    return PTN_OK;
  }
  ptn_host_drop_sum(engine, chunk);
  PTN_TRY(ptn_host_make_sum(engine, chunk, true));
  ptn_over_unpin(engine, other);
  return PTN_OK;
}

/* ---- moves ---- */

/* A home, and which of its extents or sets is meant. */
typedef struct place {
  home_kind home;
  int set;
} place;

/* Between ordinary memory and a stretch of an array. On the disk memory, offset and bytes are multiples of a page. */
static ptn_status transfer_home(ptn_engine *engine, const chunk *chunk, place place, uint32_t array, uint64_t offset_bytes,
                                char *memory, uint64_t bytes, bool write) {
  uint64_t at = array_begin(engine, chunk, array) + offset_bytes;
  if (place.home == HOME_DISK)
    return ptn_store_transfer(engine->store, memory, chunk->extents[place.set].offset + at, bytes, write);
  if (place.home == HOME_HOST) {
    char *there = (char *)chunk->host[place.set].memory + at;
    memcpy(write ? there : memory, write ? memory : there, bytes);
    return PTN_OK;
  }
  char *there = device_array(engine, chunk, array) + offset_bytes;
  return write ? ptn_over_copy(engine, there, memory, bytes) : ptn_over_copy(engine, memory, there, bytes);
}

static ptn_status move_array(ptn_engine *engine, const chunk *chunk, place from, place to, uint32_t array, char *bounce) {
  uint64_t bytes = array_bytes(engine, chunk, array), begin = array_begin(engine, chunk, array);
  if (to.home == HOME_HOST)
    return transfer_home(engine, chunk, from, array, 0, (char *)chunk->host[to.set].memory + begin, bytes, false);
  if (from.home == HOME_HOST)
    return transfer_home(engine, chunk, to, array, 0, (char *)chunk->host[from.set].memory + begin, bytes, true);
  ptn_status status = PTN_OK;
  for (uint64_t done = 0; done < bytes && status == PTN_OK; done += BOUNCE_BYTES) {
    uint64_t part = ptn_min_u64(BOUNCE_BYTES, bytes - done);
    status = transfer_home(engine, chunk, from, array, done, bounce, part, false);
    if (status == PTN_OK) status = transfer_home(engine, chunk, to, array, done, bounce, part, true);
  }
  return status;
}

static ptn_status make_home(ptn_engine *engine, chunk *chunk, home_kind to, bool extra) {
  if (to == HOME_DISK) return ptn_homes_reserve(engine, chunk);
  if (to == HOME_HOST) return make_host(engine, chunk, extra);
  ptn_region *region;
  PTN_TRY(ptn_region_create(engine->over.device, engine->over.account, chunk->param_bytes, &region));
  ptn_homes_set_params(engine, chunk, region);
  ptn_status status = PTN_OK;
  if (extra || !chunk->zero_state) status = make_device_block(engine, chunk, false);
  if (status == PTN_OK && (extra || !chunk->zero_master)) status = make_device_block(engine, chunk, true);
  if (status != PTN_OK) drop_device(engine, chunk);
  return status;
}

static void drop_home(ptn_engine *engine, chunk *chunk, home_kind home) {
  if (home == HOME_DISK) ptn_homes_release(engine, chunk);
  if (home == HOME_HOST) drop_host(engine, chunk);
  if (home == HOME_MEMORY) drop_device(engine, chunk);
}

void ptn_over_drop_home(ptn_engine *engine, chunk *chunk) {
  drop_home(engine, chunk, chunk->home);
  chunk->home = HOME_NOWHERE;
}

/* Both homes are there. */
static ptn_status fill_home(ptn_engine *engine, const chunk *chunk, place from, place to) {
  void *bounce = NULL;
  if (from.home == HOME_NOWHERE)
    return to.home == HOME_MEMORY ? ptn_over_zero(engine, chunk->params->memory, chunk->param_bytes) : PTN_OK;
  PTN_TRY(ptn_arena_alloc(NULL, BOUNCE_BYTES, &bounce));
  ptn_status status = PTN_OK;
  for (uint32_t array = 0; array <= last_array(engine, chunk) && status == PTN_OK; array++)
    if (!is_zero(engine, chunk, array)) status = move_array(engine, chunk, from, to, array, bounce);
  ptn_arena_free(bounce);
  return status;
}

/* Making and dropping a home say which set is in use from then on: number 0 of a fresh one. */
static ptn_status change_home(ptn_engine *engine, chunk *chunk, home_kind to, bool extra) {
  place from = {chunk->home, chunk->current};
  ptn_status status = make_home(engine, chunk, to, extra);
  if (status == PTN_OK) {
    status = fill_home(engine, chunk, from, (place){to, 0});
    if (status != PTN_OK) drop_home(engine, chunk, to);
  }
  chunk->current = status == PTN_OK ? 0 : from.set;
  if (status != PTN_OK) return status;
  drop_home(engine, chunk, from.home);
  chunk->home = to;
  return PTN_OK;
}

ptn_status ptn_over_move(ptn_engine *engine, uint32_t number, home_kind to, bool extra) {
  chunk *chunk = &engine->chunks[number];
  home_kind from = chunk->home;
  if (from == to && to == HOME_MEMORY) return extra ? make_device_states(engine, chunk) : PTN_OK;
  PTN_TRY(ptn_homes_quiet(engine, "a chunk cannot change its home"));
  if (from == to) return to == HOME_HOST ? change_shadow(engine, chunk, extra) : PTN_OK;
  if (to == HOME_MEMORY && chunk->slot >= 0)
    return ptn_fail(PTN_INVALID, "chunk %u has a slot and cannot move to memory", number);
  ptn_over_finish(engine);
  if (from == HOME_MEMORY) {
    chunk->zero_state = !chunk->states;
    chunk->zero_master = !chunk->master;
  }
  return change_home(engine, chunk, to, extra);
}

ptn_status ptn_engine_to_host(ptn_engine *engine, uint32_t number, bool with_shadow) {
  if (!engine->over.device)
    return ptn_fail(PTN_INVALID, "chunk %u cannot have its home on the host: without a device memory is the host's", number);
  return ptn_over_move(engine, number, HOME_HOST, with_shadow);
}

/* ---- single parameters, and filling ---- */

/* Nothing of the chunk is being updated or uploaded when this returns. */
static void settle_chunk(ptn_engine *engine, chunk *chunk, bool write) {
  ptn_lock(&engine->mutex);
  while (chunk->late || (write && chunk->uploads > 0)) ptn_wait(&engine->changed, &engine->mutex);
  if (write) ptn_residency_settle(engine);
  if (write) ptn_residency_forget(engine, chunk);
  ptn_unlock(&engine->mutex);
}

static ptn_status prepare_array(ptn_engine *engine, chunk *chunk, uint32_t array) {
  if (chunk->home == HOME_MEMORY) return make_device_block(engine, chunk, is_master(engine, array));
  *(is_master(engine, array) ? &chunk->zero_master : &chunk->zero_state) = false; /* the host's memory holds the zeros */
  return PTN_OK;
}

ptn_status ptn_over_transfer(ptn_engine *engine, chunk *chunk, uint32_t array, uint64_t offset_bytes, void *memory,
                             uint64_t bytes, bool write) {
  if (chunk->home == HOME_NOWHERE) return ptn_fail(PTN_STEP, "a value was asked for of a chunk that has no home yet");
  settle_chunk(engine, chunk, write && array == 0);
  if (array > 0 && write) PTN_TRY(prepare_array(engine, chunk, array));
  if (chunk->home == HOME_MEMORY && !device_array(engine, chunk, array)) {
    memset(memory, 0, bytes);
    return PTN_OK;
  }
  return transfer_home(engine, chunk, (place){chunk->home, chunk->current}, array, offset_bytes, memory, bytes, write);
}

ptn_status ptn_over_begin_fill(ptn_engine *engine, slot *slot, uint64_t bytes) {
  ptn_over_finish(engine); /* an upload to the slot may be under way */
  slot->device.followed = UINT64_MAX;
  ptn_status status = ptn_over_zero(engine, slot->region->memory, bytes);
  if (status == PTN_OK) return PTN_OK;
  ptn_lock(&engine->mutex);
  ptn_residency_set_uses(engine, slot, 0);
  slot->state = SLOT_EMPTY;
  ptn_unlock(&engine->mutex);
  return status;
}

ptn_status ptn_over_end_fill(ptn_engine *engine, slot *slot, chunk *chunk) {
  const char *memory = slot->region->memory;
  if (chunk->home == HOME_HOST) return ptn_over_copy(engine, chunk->host[chunk->current].memory, memory, chunk->param_bytes);
  void *bounce;
  PTN_TRY(ptn_arena_alloc(NULL, BOUNCE_BYTES, &bounce));
  ptn_status status = PTN_OK;
  for (uint64_t done = 0; done < chunk->param_bytes && status == PTN_OK; done += BOUNCE_BYTES) {
    uint64_t part = ptn_min_u64(BOUNCE_BYTES, chunk->param_bytes - done);
    status = ptn_over_copy(engine, bounce, memory + done, part);
    if (status == PTN_OK) status = transfer_home(engine, chunk, (place){HOME_DISK, chunk->current}, 0, done, bounce, part, true);
  }
  ptn_arena_free(bounce);
  return status;
}

/* ---- figures ---- */

void ptn_over_count(const ptn_engine *engine, ptn_engine_stats *out) {
  const engine_device *over = &engine->over;
  ptn_device_stash_stats stash;
  ptn_device_stash_get_stats(over->stash, &stash);
  out->wait_ns += stash.wait_ns;
  out->disk_bytes += stash.disk_bytes;
  out->host_bytes = over->pool.bytes + over->staging.bytes + over->stash_pool.bytes;
  out->device_bytes = 0;
  for (uint32_t i = 0; i < engine->n_chunks; i++) {
    const chunk *chunk = &engine->chunks[i];
    uint64_t array = engine->widening * chunk->param_bytes;
    out->host_bytes += chunk->host[0].bytes + chunk->host[1].bytes + chunk->sum_pinned.bytes;
    if (chunk->params) out->device_bytes += chunk->params->bytes;
    out->device_bytes += (chunk->states ? engine->n_states * array : 0) + (chunk->master ? array : 0);
  }
  for (uint32_t i = 0; i < engine->n_slots; i++) out->device_bytes += engine->slots[i].region->bytes;
}
