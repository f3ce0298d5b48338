/* Homes, slots and the ring: what is arranged between steps, and the transfer of single parameters.
 *
 * Over a device homes in memory and on the host are device_homes.c's. A home on disk is an extent of parameters followed by the state
 * arrays and the master of bf16 parameters; a trained chunk has two of them, the one in use and its shadow, reserved together so that no
 * step fails for lack of space. A home in memory is a region for the parameters, one block for the state and one for the master
 * (states.c).
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/internal.h"

#define BOUNCE_BYTES ((uint64_t)1 << 20)
#define RING_MOST_BYTES ((uint64_t)1 << 47) /* of parameters */

bool ptn_engine_in_memory(const ptn_engine *engine, uint32_t chunk) { return engine->chunks[chunk].home == HOME_MEMORY; }

/* Locked. Jobs that are open, or were cancelled and not ended yet, are of no step. */
static bool only_read_ahead(const ptn_engine *engine) {
  for (const job *job = engine->first_job; job; job = job->next)
    if (!job->open && !job->cancelled) return false;
  return true;
}

ptn_status ptn_homes_quiet(ptn_engine *engine, const char *what) {
  ptn_lock(&engine->mutex);
  if (only_read_ahead(engine)) ptn_lane_settle(engine);
  if (!engine->gradients) ptn_over_settle(engine); /* updates of the step before */
  bool quiet = !engine->n_jobs && !engine->any_shadow && !engine->gradients;
  ptn_unlock(&engine->mutex);
  if (!quiet) return ptn_fail(PTN_STEP, "%s in the middle of a step: call step() or zero_grad() first", what);
  return PTN_OK;
}

void ptn_homes_set_params(ptn_engine *engine, chunk *chunk, ptn_region *region) {
  ptn_lock(&engine->mutex);
  ptn_region *before = chunk->params;
  chunk->params = region;
  ptn_unlock(&engine->mutex);
  ptn_region_release(before);
}

void ptn_homes_release(ptn_engine *engine, chunk *chunk) {
  ptn_store_release(engine->store, &chunk->extents[0]);
  ptn_store_release(engine->store, &chunk->extents[1]);
  ptn_store_release(engine->store, &chunk->grads);
}

/* What was reserved behind `before` goes again. */
static void release_new(ptn_engine *engine, chunk *chunk, ptn_extent before) {
  if (before.bytes) chunk->extents[0] = (ptn_extent){0};
  ptn_homes_release(engine, chunk);
  chunk->extents[0] = before;
}

ptn_status ptn_homes_reserve(ptn_engine *engine, chunk *chunk) {
  uint64_t bytes = extent_bytes(engine, chunk);
  ptn_extent before = chunk->extents[0];
  chunk->current = 0;
  ptn_status status = before.bytes ? PTN_OK : ptn_store_reserve(engine->store, bytes, &chunk->extents[0]);
  if (status == PTN_OK && chunk->trained) status = ptn_store_reserve(engine->store, bytes, &chunk->extents[1]);
  if (status != PTN_OK) release_new(engine, chunk, before);
  return status;
}

static ptn_status read_home(ptn_engine *engine, chunk *chunk, ptn_region *region, bool with_state) {
  uint64_t offset = chunk->extents[chunk->current].offset;
  PTN_TRY(ptn_store_transfer(engine->store, region->memory, offset, chunk->param_bytes, false));
  PTN_TRY(ptn_states_read(engine, chunk));
  return with_state ? ptn_states_make(engine, chunk) : PTN_OK;
}

ptn_status ptn_engine_to_memory(ptn_engine *engine, uint32_t number, bool with_state) {
  chunk *chunk = &engine->chunks[number];
  if (engine->over.device) return ptn_over_move(engine, number, HOME_MEMORY, with_state);
  if (chunk->home == HOME_MEMORY) return with_state ? ptn_states_make(engine, chunk) : PTN_OK;
  PTN_TRY(ptn_homes_quiet(engine, "a chunk cannot change its home"));
  if (chunk->slot >= 0) return ptn_fail(PTN_INVALID, "chunk %u has a slot and cannot move to memory", number);
  ptn_region *region;
  PTN_TRY(ptn_region_create(NULL, engine->account, chunk->param_bytes, &region));
  ptn_status status;
  if (chunk->home == HOME_NOWHERE) {
    memset(region->memory, 0, chunk->param_bytes);
    status = with_state ? ptn_states_make(engine, chunk) : PTN_OK;
  } else {
    status = read_home(engine, chunk, region, with_state);
  }
  if (status != PTN_OK) {
    ptn_region_release(region);
    ptn_states_free(chunk);
    return status;
  }
  ptn_homes_release(engine, chunk);
  ptn_homes_set_params(engine, chunk, region);
  chunk->home = HOME_MEMORY;
  return PTN_OK;
}

/* Of a chunk in memory. State that gave way is there already, in the first of its extents. */
static ptn_status write_home(ptn_engine *engine, chunk *chunk) {
  PTN_TRY(ptn_store_transfer(engine->store, chunk->params->memory, chunk->extents[0].offset, chunk->param_bytes, true));
  return ptn_states_write(engine, chunk);
}

ptn_status ptn_engine_to_disk(ptn_engine *engine, uint32_t number) {
  if (engine->over.device) return ptn_over_move(engine, number, HOME_DISK, false);
  PTN_TRY(ptn_homes_quiet(engine, "a chunk cannot change its home"));
  chunk *chunk = &engine->chunks[number];
  if (chunk->home == HOME_DISK) return PTN_OK;
  ptn_extent before = chunk->extents[0];
  PTN_TRY(ptn_homes_reserve(engine, chunk));
  if (chunk->home == HOME_MEMORY) {
    ptn_status status = write_home(engine, chunk);
    if (status != PTN_OK) {
      release_new(engine, chunk, before);
      return status;
    }
    ptn_homes_set_params(engine, chunk, NULL);
    ptn_states_free(chunk);
    ptn_states_arrived(engine, chunk);
  }
  chunk->home = HOME_DISK;
  return PTN_OK;
}

/* ---- slots ---- */

static ptn_status new_slot(ptn_engine *engine, slot *slot, uint64_t bytes) {
  memset(slot, 0, sizeof *slot);
  slot->chunk = NO_CHUNK;
  slot->engine = engine;
  if (engine->over.device) return ptn_upload_make_slot(engine, slot, bytes);
  return ptn_region_create(NULL, engine->account, bytes, &slot->region);
}

static ptn_status make_slot(ptn_engine *engine, uint64_t bytes) {
  slot *slot = &engine->slots[engine->n_slots];
  PTN_TRY(new_slot(engine, slot, bytes));
  ptn_lock(&engine->mutex);
  engine->n_slots++;
  ptn_unlock(&engine->mutex);
  return PTN_OK;
}

ptn_status ptn_engine_set_slots(ptn_engine *engine, const int32_t *slot_of_chunk, const uint64_t *slot_bytes, uint32_t n_slots) {
  PTN_TRY(ptn_homes_quiet(engine, "slots cannot change"));
  if (engine->n_slots) return ptn_fail(PTN_INVALID, "slots are there already");
  if (n_slots > engine->n_chunks) return ptn_fail(PTN_INVALID, "%u slots for %u chunks", n_slots, engine->n_chunks);
  for (uint32_t i = 0; i < engine->n_chunks; i++) {
    int32_t number = slot_of_chunk[i];
    if (number < 0) continue;
    if ((uint32_t)number >= n_slots || slot_bytes[number] < engine->chunks[i].param_bytes)
      return ptn_fail(PTN_INVALID, "slot %d is not there or too small for chunk %u", number, i);
  }
  for (uint32_t i = 0; i < n_slots; i++) {
    ptn_status status = make_slot(engine, slot_bytes[i]);
    if (status != PTN_OK) {
      ptn_engine_drop_slots(engine);
      return status;
    }
  }
  for (uint32_t i = 0; i < engine->n_chunks; i++) engine->chunks[i].slot = slot_of_chunk[i];
  return PTN_OK;
}

void ptn_engine_drop_slots(ptn_engine *engine) {
  ptn_lock(&engine->mutex);
  ptn_residency_settle(engine);
  ptn_unlock(&engine->mutex);
  ptn_over_finish(engine);
  ptn_lock(&engine->mutex); /* who asks for figures finds them whole, or not at all */
  uint32_t n_slots = engine->n_slots;
  engine->n_slots = 0;
  for (uint32_t i = 0; i < engine->n_chunks; i++) engine->chunks[i].slot = -1;
  ptn_unlock(&engine->mutex);
  for (uint32_t i = 0; i < n_slots; i++) {
    if (engine->over.device) ptn_upload_drop_slot(engine, &engine->slots[i]);
    else ptn_region_release(engine->slots[i].region);
  }
}

ptn_status ptn_engine_own_slot(ptn_engine *engine, uint32_t number) {
  if (engine->n_slots == engine->max_slots) return ptn_fail(PTN_INVALID, "no more than %u slots", engine->max_slots);
  slot fresh;
  PTN_TRY(new_slot(engine, &fresh, engine->chunks[number].param_bytes));
  ptn_lock(&engine->mutex);
  engine->slots[engine->n_slots] = fresh;
  engine->chunks[number].slot = (int32_t)engine->n_slots++;
  ptn_unlock(&engine->mutex);
  return PTN_OK;
}

/* ---- the ring ---- */

static uint64_t ring_bytes(const ptn_engine *engine, uint64_t piece_bytes, uint32_t n_pieces) {
  uint64_t arrays = 2 + engine->widening * engine->n_arrays; /* in the size of one of parameters, as one of gradients is */
  return arrays * n_pieces * piece_bytes;
}

ptn_status ptn_engine_set_ring(ptn_engine *engine, uint64_t piece_bytes, uint32_t n_pieces) {
  PTN_TRY(ptn_homes_quiet(engine, "the ring cannot change"));
  if (piece_bytes == 0 || piece_bytes % PTN_PAGE_BYTES != 0 || n_pieces == 0)
    return ptn_fail(PTN_INVALID, "%u pieces of %llu bytes, a positive count of whole pages is wanted", n_pieces,
                    (unsigned long long)piece_bytes);
  if (piece_bytes > RING_MOST_BYTES / n_pieces)
    return ptn_fail(PTN_INVALID, "%u pieces of %llu bytes are more than there are addresses", n_pieces,
                    (unsigned long long)piece_bytes);
  ptn_engine_drop_ring(engine);
  uint64_t bytes = ring_bytes(engine, piece_bytes, n_pieces);
  piece *pieces = calloc(n_pieces, sizeof *pieces);
  if (!pieces) return ptn_fail(PTN_MEMORY, "no memory to describe %u pieces", n_pieces);
  void *memory;
  ptn_status status = ptn_arena_alloc(engine->account, bytes, &memory);
  if (status != PTN_OK) {
    free(pieces);
    return status;
  }
  char *next = memory;
  for (uint32_t i = 0; i < n_pieces; i++) {
    pieces[i].engine = engine;
    for (uint32_t a = 0; a < PIECE_ARRAYS; a++) {
      bool wide = a >= PIECE_STATE && a < PIECE_GRAD;
      if (wide && a - PIECE_STATE >= engine->n_arrays) continue;
      pieces[i].arrays[a] = next;
      next += wide ? engine->widening * piece_bytes : piece_bytes;
    }
  }
  ptn_lock(&engine->mutex);
  engine->ring_memory = memory;
  engine->pieces = pieces;
  engine->n_pieces = n_pieces;
  engine->piece_bytes = piece_bytes;
  ptn_unlock(&engine->mutex);
  return PTN_OK;
}

void ptn_engine_drop_ring(ptn_engine *engine) {
  ptn_lock(&engine->mutex);
  ptn_lane_settle(engine);
  void *memory = engine->ring_memory;
  piece *pieces = engine->pieces;
  engine->ring_memory = NULL;
  engine->pieces = NULL;
  engine->n_pieces = 0;
  ptn_unlock(&engine->mutex);
  ptn_arena_free(memory);
  free(pieces);
}

static uint64_t counted_bytes(const void *memory, uint64_t bytes) { return memory ? ptn_arena_rounded_bytes(bytes) : 0; }

void ptn_engine_get_held(ptn_engine *engine, ptn_engine_held *out) {
  ptn_lock(&engine->mutex);
  *out = (ptn_engine_held){.gradient_bytes = engine->job_bytes + (engine->n_owners ? engine->owner_bytes : 0),
                           .yielded_bytes = engine->yielded_bytes};
  for (uint32_t i = 0; i < engine->n_chunks; i++) {
    const chunk *chunk = &engine->chunks[i];
    if (chunk->params) out->parameter_bytes += chunk->params->bytes;
    out->state_bytes += counted_bytes(chunk->states, ptn_states_bytes(engine, chunk));
    out->state_bytes += counted_bytes(chunk->master, ptn_master_bytes(engine, chunk));
    out->gradient_bytes += chunk->arrived_bytes;
  }
  for (uint32_t i = 0; i < engine->n_slots; i++)
    if (engine->slots[i].region) out->slot_bytes += engine->slots[i].region->bytes;
  if (engine->n_pieces && !engine->over.device) /* there it is the host's */
    out->ring_bytes = counted_bytes(engine->ring_memory, ring_bytes(engine, engine->piece_bytes, engine->n_pieces));
  ptn_unlock(&engine->mutex);
}

void ptn_engine_set_pending(ptn_engine *engine, uint64_t pending_bytes) {
  ptn_lock(&engine->mutex);
  engine->pending_bytes = pending_bytes;
  ptn_unlock(&engine->mutex);
}

ptn_region *ptn_engine_region(ptn_engine *engine, uint32_t number) {
  const chunk *chunk = &engine->chunks[number];
  if (chunk->home == HOME_MEMORY) return chunk->params;
  return chunk->slot >= 0 ? engine->slots[chunk->slot].region : NULL;
}

/* ---- filling ---- */

ptn_status ptn_engine_begin_fill(ptn_engine *engine, uint32_t number) {
  PTN_TRY(ptn_homes_quiet(engine, "parameters cannot be filled"));
  chunk *chunk = &engine->chunks[number];
  if (chunk->home == HOME_MEMORY) return PTN_OK;
  if (chunk->slot < 0) return ptn_fail(PTN_INVALID, "chunk %u has no slot to fill", number);
  slot *slot = &engine->slots[chunk->slot];
  ptn_lock(&engine->mutex);
  ptn_residency_settle(engine);
  bool taken = slot->in_use > 0;
  if (!taken) {
    slot->chunk = number;
    slot->state = SLOT_LOADED;
    slot->shadow = slot->broken = slot->unchecked = false;
    ptn_residency_set_uses(engine, slot, 1);
  }
  ptn_unlock(&engine->mutex);
  if (taken) return ptn_fail(PTN_STEP, "the slot of chunk %u is in use", number);
  if (engine->over.device) return ptn_over_begin_fill(engine, slot, chunk->param_bytes);
  memset(slot->region->memory, 0, chunk->param_bytes);
  return PTN_OK;
}

static ptn_status write_slot(ptn_engine *engine, slot *slot, chunk *chunk) {
  if (engine->over.device) return ptn_over_end_fill(engine, slot, chunk);
  uint64_t offset = chunk->extents[chunk->current].offset;
  return ptn_store_transfer(engine->store, slot->region->memory, offset, chunk->param_bytes, true);
}

ptn_status ptn_engine_end_fill(ptn_engine *engine, uint32_t number) {
  chunk *chunk = &engine->chunks[number];
  if (chunk->home == HOME_MEMORY) return PTN_OK;
  slot *slot = &engine->slots[chunk->slot];
  ptn_status status = write_slot(engine, slot, chunk);
  ptn_lock(&engine->mutex);
  ptn_residency_set_uses(engine, slot, 0);
  if (status != PTN_OK) ptn_residency_forget(engine, chunk);
  ptn_unlock(&engine->mutex);
  return status;
}

/* ---- single parameters ---- */

/* Copies between memory and a stretch of the disk that need not lie on pages, through a bounce buffer. *begun: some of it may have
 * been written, whether or not the rest was. */
static ptn_status copy(ptn_engine *engine, uint64_t offset, char *memory, uint64_t bytes, bool write, bool *begun) {
  void *bounce;
  PTN_TRY(ptn_arena_alloc(NULL, BOUNCE_BYTES, &bounce));
  ptn_status status = PTN_OK;
  while (bytes && status == PTN_OK) {
    uint64_t page = offset / PTN_PAGE_BYTES * PTN_PAGE_BYTES;
    uint64_t part = ptn_min_u64(bytes, BOUNCE_BYTES - (offset - page));
    uint64_t whole = ptn_round_up(offset - page + part, PTN_PAGE_BYTES);
    char *inside = (char *)bounce + (offset - page);
    bool covered = write && part == whole; /* nothing of the pages survives: no need to read them */
    if (!covered) status = ptn_store_transfer(engine->store, bounce, page, whole, false);
    if (status == PTN_OK && write) {
      memcpy(inside, memory, part);
      *begun = true;
      status = ptn_store_transfer(engine->store, bounce, page, whole, true);
    } else if (status == PTN_OK) {
      memcpy(memory, inside, part);
    }
    offset += part;
    memory += part;
    bytes -= part;
  }
  ptn_arena_free(bounce);
  return status;
}

ptn_status ptn_homes_transfer(ptn_engine *engine, uint64_t offset, char *memory, uint64_t bytes, bool write) {
  bool begun = false;
  return copy(engine, offset, memory, bytes, write, &begun);
}

/* A stretch of one array of a parameter. */
typedef struct stretch {
  uint32_t array;        /* 0: the parameter, then states, then the master */
  uint64_t offset_bytes; /* of the stretch in the chunk's array */
  uint64_t bytes;
} stretch;

static bool is_master(const ptn_engine *engine, const stretch *part) { return part->array == 1 + engine->n_states; }

/* What was never written is zeros by a flag; the first parameter that gets some makes the others' zeros real. */
static ptn_status write_zeros(ptn_engine *engine, chunk *chunk, bool master) {
  void *zeros;
  PTN_TRY(ptn_arena_alloc(NULL, BOUNCE_BYTES, &zeros));
  memset(zeros, 0, BOUNCE_BYTES);
  uint64_t offset = chunk->extents[chunk->current].offset + array_offset(engine, chunk, master ? engine->n_states : 0);
  uint64_t left = master ? ptn_master_bytes(engine, chunk) : ptn_states_bytes(engine, chunk);
  ptn_status status = PTN_OK;
  while (left && status == PTN_OK) {
    uint64_t part = ptn_min_u64(left, BOUNCE_BYTES);
    status = ptn_store_transfer(engine->store, zeros, offset, part, true);
    offset += part;
    left -= part;
  }
  ptn_arena_free(zeros);
  if (status == PTN_OK) *(master ? &chunk->zero_master : &chunk->zero_state) = false;
  return status;
}

static ptn_status transfer_on_disk(ptn_engine *engine, chunk *chunk, const stretch *part, void *memory, bool write) {
  bool master = is_master(engine, part);
  if (part->array > 0 && (master ? chunk->zero_master : chunk->zero_state)) {
    if (!write) {
      memset(memory, 0, part->bytes);
      return PTN_OK;
    }
    PTN_TRY(write_zeros(engine, chunk, master));
  }
  uint64_t begin = part->array == 0 ? 0 : array_offset(engine, chunk, part->array - 1);
  uint64_t offset = chunk->extents[chunk->current].offset + begin + part->offset_bytes;
  bool begun = false;
  ptn_status status = copy(engine, offset, memory, part->bytes, write, &begun);
  if (!write) return status;
  ptn_lock(&engine->mutex);
  if (status != PTN_OK && begun) engine->torn_writes++;
  if (part->array == 0) {
    ptn_residency_settle(engine);
    ptn_residency_forget(engine, chunk);
  }
  ptn_unlock(&engine->mutex);
  return status;
}

/* Of a chunk in memory. Whoever reads need not be who drives the step, in which state may give way meanwhile. */
static ptn_status read_in_memory(ptn_engine *engine, chunk *chunk, const stretch *part, uint64_t begin, void *memory) {
  bool master = is_master(engine, part);
  if (part->array == 0) {
    memcpy(memory, (const char *)chunk->params->memory + begin, part->bytes);
    return PTN_OK;
  }
  char *block = ptn_states_hold(engine, master ? &chunk->master : &chunk->states);
  if (block) {
    memcpy(memory, block + begin, part->bytes);
    ptn_arena_free(block);
    return PTN_OK;
  }
  if (chunk->yielded && !(master ? chunk->zero_master : chunk->zero_state))
    return transfer_on_disk(engine, chunk, part, memory, false);
  memset(memory, 0, part->bytes);
  return PTN_OK;
}

static ptn_status transfer_in_memory(ptn_engine *engine, chunk *chunk, const stretch *part, void *memory, bool write) {
  bool master = is_master(engine, part);
  float **block = master ? &chunk->master : &chunk->states;
  uint64_t begin = part->offset_bytes; /* in the block */
  if (part->array > 0 && !master) begin += (part->array - 1) * engine->widening * chunk->param_bytes;
  if (!write) return read_in_memory(engine, chunk, part, begin, memory);
  if (part->array > 0 && !*block) PTN_TRY(ptn_states_make_one(engine, chunk, master));
  char *home = part->array == 0 ? chunk->params->memory : *block;
  if (part->array > 0) *(master ? &chunk->zero_master : &chunk->zero_state) = false;
  memcpy(home + begin, memory, part->bytes);
  return PTN_OK;
}

/* Whether memory, of a parameter, lies in the chunk's slot, and that holds what its home on disk does, by the checksums. */
static bool is_as_home(ptn_engine *engine, const chunk *chunk, const void *memory) {
  if (engine->over.device || chunk->home != HOME_DISK || chunk->slot < 0) return false;
  slot *slot = &engine->slots[chunk->slot];
  ptn_lock(&engine->mutex);
  char *begin = slot->region->memory;
  bool there = slot->chunk == (uint32_t)(chunk - engine->chunks) && slot->state == SLOT_LOADED && !slot->unchecked &&
               !slot->broken && !slot->shadow;
  there = there && (const char *)memory >= begin && (const char *)memory < begin + chunk->param_bytes;
  slot->in_use += there; /* it stays meanwhile */
  ptn_unlock(&engine->mutex);
  if (!there) return false;
  bool same = ptn_store_check(engine->store, true, begin, chunk->extents[chunk->current].offset, chunk->param_bytes) == PTN_OK;
  ptn_lock(&engine->mutex);
  slot->in_use--;
  ptn_unlock(&engine->mutex);
  return same;
}

/* What writes to a parameter changes it in its slot first: where that is refused the slot is not as its home is. A write that has
 * changed no bit, as of a model that clamps its weights in each forward, is none: *same. A parameter that lies in memory may be written
 * to like any tensor: no lane touches it there. */
static ptn_status check_write(ptn_engine *engine, chunk *chunk, uint32_t array, const void *memory, bool *same) {
  *same = false;
  if (array == 0 && chunk->home == HOME_MEMORY && !engine->over.device) return PTN_OK;
  ptn_status status = ptn_homes_quiet(engine, "values cannot be written");
  if (status == PTN_OK || array > 0) return status;
  ptn_error error;
  ptn_error_save(&error);
  *same = is_as_home(engine, chunk, memory);
  if (*same) return PTN_OK;
  ptn_lock(&engine->mutex);
  ptn_residency_forget(engine, chunk);
  ptn_unlock(&engine->mutex);
  return ptn_error_restore(&error);
}

ptn_status ptn_engine_transfer_part(ptn_engine *engine, uint32_t number, uint32_t array, uint64_t first, uint64_t count,
                                    void *memory, bool write) {
  const param *param = &engine->params[number];
  chunk *chunk = &engine->chunks[param->chunk];
  if (array > (chunk->trained ? engine->n_arrays : 0))
    return ptn_fail(PTN_INVALID, "parameter %u has no array %u", number, array);
  if (first > param->count || count > param->count - first)
    return ptn_fail(PTN_INVALID, "parameter %u has %llu elements, %llu from number %llu on are asked for", number,
                    (unsigned long long)param->count, (unsigned long long)count, (unsigned long long)first);
  bool same = false;
  if (write) PTN_TRY(check_write(engine, chunk, array, memory, &same));
  if (count == 0 || same) return PTN_OK;
  uint64_t widening = array > 0 ? engine->widening : 1, size = widening * engine->element_bytes;
  stretch part = {.array = array, .offset_bytes = widening * param->offset_bytes + first * size, .bytes = count * size};
  if (engine->over.device && chunk->home != HOME_DISK)
    return ptn_over_transfer(engine, chunk, array, part.offset_bytes, memory, part.bytes, write);
  if (chunk->home == HOME_MEMORY) return transfer_in_memory(engine, chunk, &part, memory, write);
  return transfer_on_disk(engine, chunk, &part, memory, write);
}

ptn_status ptn_engine_transfer(ptn_engine *engine, uint32_t number, uint32_t array, void *memory, bool write) {
  return ptn_engine_transfer_part(engine, number, array, 0, engine->params[number].count, memory, write);
}

/* Returns when no job of the chunk is left; what others wait for goes on. */
static ptn_status wait_for_chunk(ptn_engine *engine, const chunk *chunk) {
  if (engine->over.device) return ptn_engine_wait(engine);
  ptn_lock(&engine->mutex);
  if (chunk->jobs) {
    int64_t begin = ptn_now_ns();
    while (chunk->jobs) ptn_lane_wait(engine);
    engine->wait_ns += ptn_trace_waited(engine->trace, PTN_TRACE_UPDATE, -1, begin);
  }
  ptn_status status = engine->lane_status == PTN_OK ? PTN_OK : ptn_error_restore(&engine->lane_error);
  ptn_unlock(&engine->mutex);
  ptn_engine_collect(engine);
  return status;
}

ptn_status ptn_engine_spilled(ptn_engine *engine, uint32_t number, void *memory, bool *found) {
  const param *param = &engine->params[number];
  const chunk *chunk = &engine->chunks[param->chunk];
  *found = false;
  PTN_TRY(wait_for_chunk(engine, chunk));
  if (!param->spilled) return PTN_OK;
  *found = true;
  if (chunk->home == HOME_HOST) {
    memcpy(memory, chunk->sum + param->offset_bytes, param->count * engine->element_bytes);
    return PTN_OK;
  }
  return ptn_homes_transfer(engine, chunk->grads.offset + param->offset_bytes, memory, param->count * engine->element_bytes,
                            false);
}

uint64_t ptn_engine_steps(const ptn_engine *engine, uint32_t param) { return engine->params[param].steps; }
void ptn_engine_set_steps(ptn_engine *engine, uint32_t param, uint64_t steps) { engine->params[param].steps = steps; }
