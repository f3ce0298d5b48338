/* State and masters of chunks in memory, on the CPU: made as zeros when the first update needs them, read where the chunk comes from
 * the disk, and given to it for a while.
 *
 * They give way where a step asks for memory that its plan has no room for, as one with several forwards before a backward does, or
 * with a backward through a backward: nothing looks at them before the update, which has them brought back first. The chunk's
 * parameters stay. What was never written goes without a write. All of it is the driving thread's, which alone waits for memory; others
 * may read meanwhile, as a checkpoint beside a backward does, through a hold of the block (ptn_states_hold). It comes back only with
 * the turn of whoever else reads.
 *
 * Invariants: a chunk that gave way has neither block; where one of them was ever written, extents[0] has it, laid out as a home on
 * disk, and is the chunk's until the blocks are back. It gives way only between ptn_engine_yield(on) and what ends the step.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/internal.h"

uint64_t ptn_states_bytes(const ptn_engine *engine, const chunk *chunk) {
  return chunk->trained ? engine->n_states * engine->widening * chunk->param_bytes : 0;
}

uint64_t ptn_master_bytes(const ptn_engine *engine, const chunk *chunk) {
  return chunk->trained && engine->bf16 ? engine->widening * chunk->param_bytes : 0;
}

static ptn_status make_zeros(ptn_engine *engine, float **array, uint64_t bytes) {
  if (*array || bytes == 0) return PTN_OK;
  void *memory;
  PTN_TRY(ptn_arena_alloc(engine->account, bytes, &memory));
  memset(memory, 0, bytes);
  *array = memory;
  return PTN_OK;
}

static ptn_status read_array(ptn_engine *engine, float **array, uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return PTN_OK;
  PTN_TRY(make_zeros(engine, array, bytes));
  return ptn_store_transfer(engine->store, *array, offset, bytes, false);
}

ptn_status ptn_states_read(ptn_engine *engine, chunk *chunk) {
  uint64_t offset = chunk->extents[chunk->current].offset, master_offset = offset + array_offset(engine, chunk, engine->n_states);
  if (!chunk->zero_state)
    PTN_TRY(read_array(engine, &chunk->states, offset + array_offset(engine, chunk, 0), ptn_states_bytes(engine, chunk)));
  if (!chunk->zero_master) PTN_TRY(read_array(engine, &chunk->master, master_offset, ptn_master_bytes(engine, chunk)));
  return PTN_OK;
}

ptn_status ptn_states_write(ptn_engine *engine, const chunk *chunk) {
  uint64_t offset = chunk->extents[0].offset, master_offset = offset + array_offset(engine, chunk, engine->n_states);
  if (chunk->states && !chunk->zero_state)
    PTN_TRY(ptn_store_transfer(engine->store, chunk->states, offset + array_offset(engine, chunk, 0),
                               ptn_states_bytes(engine, chunk), true));
  if (chunk->master && !chunk->zero_master)
    PTN_TRY(ptn_store_transfer(engine->store, chunk->master, master_offset, ptn_master_bytes(engine, chunk), true));
  return PTN_OK;
}

void ptn_states_free(chunk *chunk) {
  ptn_arena_free(chunk->states);
  ptn_arena_free(chunk->master);
  chunk->states = chunk->master = NULL;
}

static ptn_status make(ptn_engine *engine, chunk *chunk) {
  ptn_status status = chunk->yielded ? ptn_states_read(engine, chunk) : PTN_OK;
  if (status == PTN_OK) status = make_zeros(engine, &chunk->states, ptn_states_bytes(engine, chunk));
  if (status == PTN_OK) status = make_zeros(engine, &chunk->master, ptn_master_bytes(engine, chunk));
  if (!chunk->yielded) return status;
  if (status != PTN_OK) {
    ptn_states_free(chunk); /* the disk has them still */
    return status;
  }
  ptn_homes_release(engine, chunk);
  ptn_states_arrived(engine, chunk);
  return PTN_OK;
}

static ptn_status make_one(ptn_engine *engine, chunk *chunk, bool master) {
  if (chunk->yielded) return make(engine, chunk);
  return master ? make_zeros(engine, &chunk->master, ptn_master_bytes(engine, chunk))
                : make_zeros(engine, &chunk->states, ptn_states_bytes(engine, chunk));
}

/* While one of the blocks is made the other must not go. */
static bool stop_yielding(ptn_engine *engine) {
  bool yields = engine->yields;
  engine->yields = false;
  return yields;
}

ptn_status ptn_states_make(ptn_engine *engine, chunk *chunk) {
  bool yields = stop_yielding(engine);
  ptn_status status = make(engine, chunk);
  engine->yields = yields;
  return status;
}

ptn_status ptn_states_make_one(ptn_engine *engine, chunk *chunk, bool master) {
  bool yields = stop_yielding(engine);
  ptn_status status = make_one(engine, chunk, master);
  engine->yields = yields;
  return status;
}

void *ptn_states_hold(ptn_engine *engine, float *const *array) {
  ptn_block block;
  ptn_lock(&engine->mutex);
  void *memory = *array;
  bool held = memory && ptn_arena_describe(memory, &block) && ptn_arena_hold_more(&block);
  ptn_unlock(&engine->mutex);
  if (memory && !held) abort(); /* whole pages, which the chunk has a hold of */
  return memory;
}

/* ---- giving way ---- */

static uint64_t live_bytes_of(const ptn_engine *engine, const chunk *chunk) {
  uint64_t bytes = chunk->states ? ptn_arena_rounded_bytes(ptn_states_bytes(engine, chunk)) : 0;
  return bytes + (chunk->master ? ptn_arena_rounded_bytes(ptn_master_bytes(engine, chunk)) : 0);
}

void ptn_states_arrived(ptn_engine *engine, chunk *chunk) {
  ptn_lock(&engine->mutex);
  engine->yielded_bytes -= chunk->yielded;
  chunk->yielded = 0;
  ptn_unlock(&engine->mutex);
}

static ptn_status give_way(ptn_engine *engine, chunk *chunk) {
  bool written = (chunk->states && !chunk->zero_state) || (chunk->master && !chunk->zero_master);
  if (written) {
    chunk->current = 0;
    PTN_TRY(ptn_store_reserve(engine->store, extent_bytes(engine, chunk), &chunk->extents[0]));
    ptn_status status = ptn_states_write(engine, chunk);
    if (status != PTN_OK) {
      ptn_store_release(engine->store, &chunk->extents[0]);
      return status;
    }
  }
  float *blocks[2] = {chunk->states, chunk->master};
  ptn_lock(&engine->mutex);
  chunk->yielded = live_bytes_of(engine, chunk);
  engine->yielded_bytes += chunk->yielded;
  engine->most_yielded_bytes = ptn_max_u64(engine->most_yielded_bytes, engine->yielded_bytes);
  chunk->states = chunk->master = NULL;
  ptn_unlock(&engine->mutex);
  ptn_arena_free(blocks[0]);
  ptn_arena_free(blocks[1]);
  return PTN_OK;
}

bool ptn_states_yield_some(ptn_engine *engine) {
  bool found = false;
  int64_t begin = ptn_now_ns();
  for (uint32_t c = engine->n_chunks; engine->yields && c-- > 0 && !found;) {
    chunk *chunk = &engine->chunks[c];
    if (chunk->home != HOME_MEMORY || chunk->yielded || !(chunk->states || chunk->master)) continue;
    found = give_way(engine, chunk) == PTN_OK; /* else others may; what is refused in the end tells of the budget alone */
  }
  if (!found) return false;
  ptn_lock(&engine->mutex);
  engine->wait_ns += ptn_trace_waited(engine->trace, PTN_TRACE_MEMORY, -1, begin);
  ptn_unlock(&engine->mutex);
  return true;
}

void ptn_engine_yield(ptn_engine *engine, bool on) { engine->yields = on && !engine->over.device; }

uint64_t ptn_engine_yielded(ptn_engine *engine, bool mark) {
  ptn_lock(&engine->mutex);
  uint64_t most_bytes = engine->most_yielded_bytes;
  if (mark) engine->most_yielded_bytes = engine->yielded_bytes;
  ptn_unlock(&engine->mutex);
  return most_bytes;
}
