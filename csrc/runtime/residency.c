/* Residency: which chunk each slot holds, and what is read next.
 *
 * A slot is empty, loading or loaded; over a device it may be ordered, which is as good. A demand waits for its chunk and starts the load
 * itself where nobody did. What came from the disk to be computed with here is checked at its first demand, by the threads that are about
 * to use it. After each demand the recorded order is followed from that moment on: a chunk needed soon is read into its slot as soon as
 * the chunk there is not needed before it, not in use, and not under an update. Reading ahead stops at the end of a step: what follows
 * are parameters that the step is about to change.
 *
 * Invariant: a slot that is loaded, not unchecked, not broken and not a shadow holds exactly what the home of its chunk holds.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/internal.h"

#define READ_AHEAD_MAX 16

static slot *slot_of(ptn_engine *engine, uint32_t number) {
  int32_t slot = engine->chunks[number].slot;
  return slot < 0 ? NULL : &engine->slots[slot];
}

static void note_load(ptn_engine *engine, uint32_t number, const ptn_io *io) {
  if (io->status != PTN_OK) return;
  ptn_trace_add(engine->trace, (ptn_trace_event){.start_ns = io->start_ns,
                                                 .end_ns = io->end_ns,
                                                 .bytes = io->bytes,
                                                 .number = (int32_t)number,
                                                 .lane = PTN_LANE_READ,
                                                 .kind = PTN_TRACE_PARAMETERS});
}

static void on_loaded(ptn_io *io) {
  slot *slot = io->context;
  ptn_engine *engine = slot->engine;
  note_load(engine, slot->chunk, io); /* while it loads, a slot keeps its chunk */
  ptn_lock(&engine->mutex);
  slot->status = io->status;
  if (io->status != PTN_OK) {
    slot->error = io->error;
    ptn_error_of(&slot->error, "parameters of chunk %u", slot->chunk);
  }
  slot->state = io->status == PTN_OK ? SLOT_LOADED : SLOT_EMPTY;
  slot->unchecked = true;
  ptn_broadcast(&engine->changed);
  ptn_unlock(&engine->mutex);
}

/* Locked. The slot changes hands; the caller submits slot->io after unlocking. */
static void prepare_load(ptn_engine *engine, slot *slot, uint32_t number) {
  if (engine->over.device) {
    ptn_upload_prepare(engine, slot, number);
    return;
  }
  const chunk *chunk = &engine->chunks[number];
  slot->chunk = number;
  slot->state = SLOT_LOADING;
  slot->shadow = slot->broken = false;
  slot->status = PTN_OK;
  memset(&slot->io, 0, sizeof slot->io);
  slot->io.memory = slot->region->memory;
  slot->io.offset = chunk->extents[chunk->current].offset;
  slot->io.bytes = chunk->param_bytes;
  slot->io.urgent = true;
  slot->io.caller_sums = true;
  slot->io.done = on_loaded;
  slot->io.context = slot;
  engine->loads++;
  engine->loaded_bytes += chunk->param_bytes;
}

static void submit_all(ptn_engine *engine, slot *const *slots, uint32_t count) {
  for (uint32_t i = 0; engine->over.device && i < count; i++) ptn_upload_start(engine, slots[i]);
  if (count == 0 || engine->over.device) return;
  ptn_unlock(&engine->mutex);
  for (uint32_t i = 0; i < count; i++) ptn_store_submit(engine->store, &slots[i]->io);
  ptn_lock(&engine->mutex);
}

static bool holds(const slot *slot, uint32_t number) {
  return slot->chunk == number && !slot->shadow && !slot->broken && slot->state != SLOT_EMPTY;
}

/* May the chunk in this slot go for a read ahead? Not when the scan met it: it is needed before. Where its gradients come, the lane
 * will soon update it in the slot; not in a device's. */
static bool replaceable(const ptn_engine *engine, const slot *slot) {
  if (slot->in_use > 0 || slot->pins > 0 || slot->device.unmarked) return false;
  if (slot->state == SLOT_EMPTY) return true;
  const chunk *there = &engine->chunks[slot->chunk];
  return slot->state >= SLOT_ORDERED && (there->arrived == 0 || engine->over.device) && engine->seen[slot->chunk] != engine->scan;
}

/* To a device nothing comes from the disk without staging. */
static bool has_way(const ptn_engine *engine, const chunk *chunk) {
  return has_slot_home(chunk) && (!engine->over.device || chunk->home != HOME_DISK || engine->over.n_pieces > 0);
}

/* What is read ahead now would be out of date at once. */
static bool changing(const chunk *chunk) { return chunk->has_shadow || chunk->jobs > 0; }

void ptn_residency_advance(ptn_engine *engine) {
  slot *starting[READ_AHEAD_MAX];
  uint32_t n_starting = 0, distinct = 0;
  engine->scan++;
  for (uint32_t i = engine->cursor; i < engine->n_order && distinct <= engine->n_slots && n_starting < READ_AHEAD_MAX; i++) {
    uint32_t number = engine->order[i];
    if (engine->seen[number] == engine->scan) continue;
    const chunk *chunk = &engine->chunks[number];
    slot *slot = has_way(engine, chunk) && !changing(chunk) ? slot_of(engine, number) : NULL;
    if (slot && !holds(slot, number) && replaceable(engine, slot)) {
      prepare_load(engine, slot, number);
      starting[n_starting++] = slot;
    }
    engine->seen[number] = engine->scan;
    distinct++;
  }
  submit_all(engine, starting, n_starting);
}

ptn_status ptn_engine_set_order(ptn_engine *engine, const uint32_t *accesses, uint32_t n_accesses) {
  for (uint32_t i = 0; i < n_accesses; i++)
    if (accesses[i] >= engine->n_chunks)
      return ptn_fail(PTN_INVALID, "access %u is to chunk %u of %u", i, accesses[i], engine->n_chunks);
  uint32_t *order = malloc((n_accesses + 1) * sizeof *order);
  if (!order) return ptn_fail(PTN_MEMORY, "no memory for %u moments", n_accesses);
  if (n_accesses) memcpy(order, accesses, n_accesses * sizeof *order);
  ptn_lock(&engine->mutex);
  uint32_t *old = engine->order;
  engine->order = order;
  engine->n_order = n_accesses;
  engine->cursor = 0;
  ptn_unlock(&engine->mutex);
  free(old);
  return PTN_OK;
}

void ptn_engine_seek(ptn_engine *engine, uint32_t moment) {
  ptn_lock(&engine->mutex);
  engine->cursor = moment;
  ptn_residency_advance(engine);
  ptn_unlock(&engine->mutex);
}

/* Moves to the next moment at which this chunk is accessed; stays where it is when there is none. */
static void follow(ptn_engine *engine, uint32_t number) {
  for (uint32_t i = 0; i < engine->n_order; i++) {
    uint32_t moment = (engine->cursor + i) % engine->n_order;
    if (engine->order[moment] == number) {
      engine->cursor = moment;
      return;
    }
  }
}

static bool there(const slot *slot, uint32_t number) { return holds(slot, number) && slot->state >= SLOT_ORDERED; }

/* Its load failed after it was given out. */
static bool lost(const slot *slot, uint32_t number) {
  return slot->chunk == number && slot->state == SLOT_EMPTY && slot->in_use > 0 && slot->status != PTN_OK;
}

/* Locked. Returns when the chunk is in its slot, or the slot is taken. */
static ptn_status await_chunk(ptn_engine *engine, slot *slot, uint32_t number, bool *conflict) {
  bool loaded = false;
  while (!there(slot, number)) {
    bool ours = holds(slot, number);
    if (lost(slot, number) || (loaded && !ours && slot->chunk == number && slot->status != PTN_OK))
      return ptn_error_restore(&slot->error);
    if (slot->state == SLOT_LOADING || slot->pins > 0 || engine->chunks[number].late) {
      loaded |= ours;
      ptn_lane_wait(engine);
      continue;
    }
    if (slot->in_use > 0) {
      *conflict = true;
      return PTN_OK;
    }
    if (slot->device.unmarked) PTN_TRY(ptn_upload_mark(engine, slot));
    prepare_load(engine, slot, number);
    loaded = true;
    submit_all(engine, &slot, 1);
  }
  return PTN_OK;
}

/* Locked. Why a chunk cannot come to its slot. */
static ptn_status check_demand(const ptn_engine *engine, uint32_t number) {
  const chunk *chunk = &engine->chunks[number];
  if (!has_slot_home(chunk) || chunk->slot < 0) return ptn_fail(PTN_STEP, "chunk %u was asked for and has no slot", number);
  if (!has_way(engine, chunk))
    return ptn_fail(PTN_STEP, "chunk %u is on disk and there is no staging for the device: set it first", number);
  return PTN_OK;
}

void ptn_residency_set_uses(ptn_engine *engine, slot *slot, uint32_t count) {
  bool before = slot->in_use > 0, now = count > 0;
  slot->in_use = count;
  if (before == now) return;
  const ptn_guard *guard = &engine->chunks[slot->chunk].guard;
  if (guard->tell) guard->tell(guard->place, now);
}

void ptn_engine_set_guard(ptn_engine *engine, uint32_t number, ptn_guard guard) {
  ptn_lock(&engine->mutex);
  const slot *slot = slot_of(engine, number);
  const ptn_guard *before = &engine->chunks[number].guard;
  if (before->tell) before->tell(before->place, false);
  engine->chunks[number].guard = guard;
  if (guard.tell) guard.tell(guard.place, slot && slot->chunk == number && slot->in_use > 0);
  ptn_unlock(&engine->mutex);
}

/* Locked; unlocks while it compares, and the caller's use keeps the slot. What differs is nobody's, and may be read again. */
static ptn_status check_slot(ptn_engine *engine, slot *slot) {
  if (!slot->unchecked) return PTN_OK;
  ptn_unlock(&engine->mutex);
  ptn_status status = ptn_store_check(engine->store, true, slot->io.memory, slot->io.offset, slot->io.bytes);
  ptn_lock(&engine->mutex);
  if (status == PTN_OK) {
    slot->unchecked = false;
    return PTN_OK;
  }
  slot->status = status;
  ptn_error_save(&slot->error);
  ptn_error_of(&slot->error, "parameters of chunk %u", slot->chunk);
  slot->state = SLOT_EMPTY;
  return ptn_error_restore(&slot->error);
}

ptn_status ptn_engine_demand(ptn_engine *engine, uint32_t number, bool *conflict) {
  *conflict = false;
  if (engine->chunks[number].home == HOME_MEMORY) return PTN_OK;
  PTN_TRY(check_demand(engine, number));
  ptn_lock(&engine->mutex);
  slot *slot = slot_of(engine, number);
  int64_t begin = there(slot, number) ? 0 : ptn_now_ns();
  ptn_status status = await_chunk(engine, slot, number, conflict);
  if (begin) engine->wait_ns += ptn_trace_waited(engine->trace, PTN_TRACE_PARAMETERS, (int32_t)number, begin);
  else engine->hits++;
  if (status == PTN_OK && !*conflict) {
    ptn_residency_set_uses(engine, slot, slot->in_use + 1);
    status = engine->over.device ? ptn_upload_follow(engine, slot) : check_slot(engine, slot);
    if (status != PTN_OK) ptn_residency_set_uses(engine, slot, slot->in_use - 1);
    follow(engine, number);
    ptn_residency_advance(engine);
  }
  ptn_unlock(&engine->mutex);
  if (status == PTN_OK) ptn_engine_share(engine);
  return status;
}

/* A mark that fails is the step's failure, and is made good before the slot changes hands. */
void ptn_engine_unuse(ptn_engine *engine, uint32_t number) {
  ptn_lock(&engine->mutex);
  slot *slot = slot_of(engine, number);
  if (slot && slot->in_use == 1 && engine->over.device) ptn_upload_mark(engine, slot);
  if (slot && slot->in_use > 0) ptn_residency_set_uses(engine, slot, slot->in_use - 1);
  ptn_unlock(&engine->mutex);
}

void ptn_residency_unuse_all(ptn_engine *engine) {
  for (uint32_t i = 0; i < engine->n_slots; i++) {
    slot *slot = &engine->slots[i];
    if (slot->in_use > 0 && engine->over.device) ptn_upload_mark(engine, slot);
    ptn_residency_set_uses(engine, slot, 0);
  }
}

void ptn_engine_unuse_all(ptn_engine *engine) {
  ptn_lock(&engine->mutex);
  ptn_residency_unuse_all(engine);
  ptn_unlock(&engine->mutex);
}

void ptn_residency_forget(ptn_engine *engine, chunk *chunk) {
  uint32_t number = (uint32_t)(chunk - engine->chunks);
  slot *slot = slot_of(engine, number);
  if (slot && slot->chunk == number && slot->state >= SLOT_ORDERED) {
    slot->state = SLOT_EMPTY;
    slot->shadow = slot->broken = false;
  }
}

void ptn_residency_settle(ptn_engine *engine) {
  for (uint32_t i = 0; i < engine->n_slots; i++)
    while (engine->slots[i].state == SLOT_LOADING) ptn_wait(&engine->changed, &engine->mutex);
}
