/* Staging: updates that are computed outside of the core, parameter by parameter, with state that the core does not know.
 *
 * Problem: an optimizer without a kernel brings a parameter, its gradient and its state into memory, runs its own code and gives the
 * new values back. A step of it must be whole or not made at all, as one of the kernels is. Design: new values go to the shadow of
 * the chunk, page by page as they come; what was not staged in a chunk that has a shadow, since it is frozen or had no gradient, is
 * copied there at the end; commit and drop then do what they do for kernels. State of any shape lies in extents that the caller
 * reserves in the same file, so that nothing of it outlives the engine.
 *
 * Invariants: a shadow is read by nobody before ptn_engine_stage_rest has completed it; a parameter is staged once in a step.
 */
#include <string.h>

#include "runtime/internal.h"

#define COPY_BYTES ((uint64_t)1 << 20)

ptn_status ptn_engine_stage(ptn_engine *engine, uint32_t number, const float *values) {
  if (number >= engine->n_params) return ptn_fail(PTN_INVALID, "parameter %u of %u", number, engine->n_params);
  param *param = &engine->params[number];
  chunk *chunk = &engine->chunks[param->chunk];
  if (!param->trained || !has_slot_home(chunk) || engine->n_arrays > 0)
    return ptn_fail(PTN_INVALID, "parameter %u cannot be staged: its home is memory, or a kernel updates it", number);
  if (is_late(chunk))
    return ptn_fail(PTN_INVALID, "parameter %u cannot be staged: its chunk lies on the host without a shadow", number);
  if (engine->n_jobs) return ptn_fail(PTN_STEP, "a parameter is staged while updates are under way: wait first");
  if (param->updated) return ptn_fail(PTN_STEP, "parameter %u is staged twice in one step", number);
  bool first = !chunk->has_shadow;
  ptn_lock(&engine->mutex);
  chunk->has_shadow = engine->any_shadow = true;
  while (chunk->uploads > 0) ptn_wait(&engine->changed, &engine->mutex); /* out of what is the shadow now, it may be */
  ptn_unlock(&engine->mutex);
  /* What an earlier step left there, half written where the disk failed it, is not to be read beside what is staged. */
  if (first && chunk->home == HOME_DISK) ptn_store_forget(engine->store, chunk->extents[1 - chunk->current]);
  uint64_t bytes = param->count * engine->element_bytes;
  uint64_t offset = chunk->extents[1 - chunk->current].offset + param->offset_bytes;
  if (chunk->home == HOME_HOST) memcpy((char *)chunk->host[1 - chunk->current].memory + param->offset_bytes, values, bytes);
  else PTN_TRY(ptn_homes_transfer(engine, offset, (char *)(uintptr_t)values, bytes, true));
  param->updated = true;
  return PTN_OK;
}

static ptn_status copy_to_shadow(ptn_engine *engine, const chunk *chunk, const param *param, char *memory) {
  if (chunk->home == HOME_HOST) {
    const char *set = chunk->host[chunk->current].memory;
    char *shadow = chunk->host[1 - chunk->current].memory;
    memcpy(shadow + param->offset_bytes, set + param->offset_bytes, param->count * engine->element_bytes);
    return PTN_OK;
  }
  uint64_t from = chunk->extents[chunk->current].offset + param->offset_bytes;
  uint64_t to = chunk->extents[1 - chunk->current].offset + param->offset_bytes;
  for (uint64_t done = 0, left = param->count * engine->element_bytes; left;) {
    uint64_t part = ptn_min_u64(left, COPY_BYTES);
    PTN_TRY(ptn_homes_transfer(engine, from + done, memory, part, false));
    PTN_TRY(ptn_homes_transfer(engine, to + done, memory, part, true));
    done += part;
    left -= part;
  }
  return PTN_OK;
}

ptn_status ptn_engine_stage_rest(ptn_engine *engine) {
  void *memory;
  PTN_TRY(ptn_arena_alloc(NULL, COPY_BYTES, &memory));
  ptn_status status = PTN_OK;
  for (uint32_t c = 0; c < engine->n_chunks; c++) {
    const chunk *chunk = &engine->chunks[c];
    if (!chunk->has_shadow) continue;
    for (uint32_t i = 0; i < chunk->n_params && status == PTN_OK; i++) {
      const param *param = &engine->params[engine->order_params[chunk->first_param + i]];
      if (!param->updated) status = copy_to_shadow(engine, chunk, param, memory);
    }
  }
  ptn_arena_free(memory);
  return status;
}

ptn_status ptn_engine_reserve(ptn_engine *engine, uint64_t bytes, ptn_extent *out) {
  PTN_TRY(ptn_store_reserve(engine->store, bytes, out));
  engine->own_bytes += out->bytes;
  return PTN_OK;
}

void ptn_engine_release(ptn_engine *engine, ptn_extent *extent) {
  engine->own_bytes -= extent->bytes;
  ptn_store_release(engine->store, extent);
}

/* The last page of an extent that begins at `offset`, of which `bytes` count. What was there is not read: nobody has the rest. */
static ptn_status write_last(ptn_engine *engine, uint64_t offset, const char *memory, uint64_t bytes) {
  void *page;
  PTN_TRY(ptn_arena_alloc(NULL, PTN_PAGE_BYTES, &page));
  memset(page, 0, PTN_PAGE_BYTES);
  memcpy(page, memory, bytes);
  ptn_status status = ptn_store_transfer(engine->store, page, offset, PTN_PAGE_BYTES, true);
  ptn_arena_free(page);
  return status;
}

ptn_status ptn_engine_move(ptn_engine *engine, uint64_t offset, void *memory, uint64_t bytes, bool write) {
  if (offset % PTN_PAGE_BYTES != 0)
    return ptn_fail(PTN_INVALID, "bytes are moved to %llu, no multiple of a page", (unsigned long long)offset);
  uint64_t whole = bytes / PTN_PAGE_BYTES * PTN_PAGE_BYTES;
  bool direct = (uintptr_t)memory % PTN_PAGE_BYTES == 0;
  if (whole && direct) PTN_TRY(ptn_store_transfer(engine->store, memory, offset, whole, write));
  else if (whole) PTN_TRY(ptn_homes_transfer(engine, offset, memory, whole, write));
  if (whole == bytes) return PTN_OK;
  char *last = (char *)memory + whole;
  return write ? write_last(engine, offset + whole, last, bytes - whole)
               : ptn_homes_transfer(engine, offset + whole, last, bytes - whole, false);
}
