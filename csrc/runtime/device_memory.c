/* What an engine over a device takes from it: memory, streams, lanes of transfers, and copies that the caller waits for.
 *
 * Memory is taken and given back between steps only, and before it is given back nothing that is ordered uses it: transfers have
 * ended, late updates too, and the compute streams have done what they were given. Copies that somebody waits for are ordered on the
 * present compute stream, behind what the caller ordered there.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/internal.h"

#define ZEROS_BYTES ((uint64_t)1 << 20)

/* ---- streams ---- */

ptn_stream *ptn_engine_stream(const ptn_engine *engine) { return engine->over.streams[engine->over.stream]; }

ptn_status ptn_engine_set_stream(ptn_engine *engine, ptn_stream *stream) {
  engine_device *over = &engine->over;
  if (!over->device) return ptn_fail(PTN_INVALID, "a compute stream was named to an engine without a device");
  uint32_t number = 0;
  while (number < over->n_streams && over->streams[number] != stream) number++;
  if (number == MAX_STREAMS) return ptn_fail(PTN_INVALID, "more than %d compute streams: use fewer in one model", MAX_STREAMS);
  if (number == over->n_streams) over->streams[over->n_streams++] = stream;
  over->stream = number;
  return PTN_OK;
}

/* ---- memory ---- */

ptn_status ptn_over_pin(ptn_engine *engine, uint64_t bytes, ptn_pinned *out) {
  engine_device *over = &engine->over;
  PTN_TRY(over->kind->pin(over->device, bytes, out));
  if (!out->locked && !over->reason[0]) memcpy(over->reason, out->reason, sizeof over->reason);
  return PTN_OK;
}

void ptn_over_unpin(ptn_engine *engine, ptn_pinned *pinned) {
  if (pinned->memory) engine->over.kind->unpin(engine->over.device, pinned);
}

const char *ptn_engine_unlocked_reason(const ptn_engine *engine) { return engine->over.reason; }

bool ptn_engine_over_device(const ptn_engine *engine) { return engine->over.device != NULL; }

/* Slots change on the driving thread alone. */
bool ptn_engine_in_slot(const ptn_engine *engine, const void *address) {
  for (uint32_t i = 0; i < engine->n_slots; i++) {
    const ptn_region *region = engine->slots[i].region;
    if ((uintptr_t)address - (uintptr_t)region->memory < region->bytes) return true;
  }
  return false;
}

bool ptn_engine_in_chunk(const ptn_engine *engine, const void *address) {
  for (uint32_t i = 0; i < engine->n_chunks; i++) {
    const ptn_region *region = engine->chunks[i].params;
    if (region && (uintptr_t)address - (uintptr_t)region->memory < region->bytes) return true;
  }
  return false;
}

ptn_status ptn_engine_set_gradient_memory(ptn_engine *engine, uint64_t bytes) {
  engine_device *over = &engine->over;
  if (!over->device) return ptn_fail(PTN_INVALID, "gradient memory on the host was asked for without a device");
  PTN_TRY(ptn_homes_quiet(engine, "gradient memory cannot change"));
  ptn_over_finish(engine);
  ptn_over_unpin(engine, &over->pool);
  return bytes ? ptn_over_pin(engine, bytes, &over->pool) : PTN_OK;
}

static void drop_staging(ptn_engine *engine) {
  engine_device *over = &engine->over;
  ptn_over_unpin(engine, &over->staging);
  free(over->pieces);
  over->pieces = over->free_pieces = NULL;
  over->n_pieces = 0;
}

ptn_status ptn_engine_set_staging(ptn_engine *engine, uint64_t piece_bytes, uint32_t n_pieces) {
  engine_device *over = &engine->over;
  if (!over->device) return ptn_fail(PTN_INVALID, "staging for a device was asked for without one");
  if (n_pieces > 0 && (piece_bytes == 0 || piece_bytes % PTN_PAGE_BYTES != 0 || piece_bytes > UINT64_MAX / n_pieces))
    return ptn_fail(PTN_INVALID, "staging in pieces of %llu bytes: a positive multiple of %zu is wanted",
                    (unsigned long long)piece_bytes, PTN_PAGE_BYTES);
  PTN_TRY(ptn_homes_quiet(engine, "staging cannot change"));
  ptn_over_finish(engine);
  drop_staging(engine);
  if (n_pieces == 0) return PTN_OK;
  over->pieces = calloc(n_pieces, sizeof *over->pieces);
  if (!over->pieces) return ptn_fail(PTN_MEMORY, "no memory to describe %u pieces", n_pieces);
  ptn_status status = ptn_over_pin(engine, n_pieces * piece_bytes, &over->staging);
  if (status != PTN_OK) {
    drop_staging(engine);
    return status;
  }
  over->n_pieces = n_pieces;
  over->piece_bytes = piece_bytes;
  for (uint32_t i = n_pieces; i-- > 0;) {
    over->pieces[i].memory = (char *)over->staging.memory + i * piece_bytes;
    over->pieces[i].next = over->free_pieces;
    over->free_pieces = &over->pieces[i];
  }
  return PTN_OK;
}

/* ---- activations ---- */

ptn_device_stash *ptn_engine_device_stash(ptn_engine *engine) { return engine->over.stash; }

ptn_status ptn_engine_set_stash_memory(ptn_engine *engine, uint64_t bytes) {
  engine_device *over = &engine->over;
  if (!over->device) return ptn_fail(PTN_INVALID, "memory for a device's activations was asked for without a device");
  bytes = ptn_round_up(ptn_max_u64(bytes, ptn_device_stash_largest(over->stash)), PTN_PAGE_BYTES);
  if (bytes == over->stash_pool.bytes) return PTN_OK;
  PTN_TRY(ptn_homes_quiet(engine, "memory for activations cannot change"));
  PTN_TRY(ptn_device_stash_set_pool(over->stash, NULL, 0));
  ptn_over_finish(engine);
  ptn_over_unpin(engine, &over->stash_pool);
  if (bytes == 0) return PTN_OK;
  PTN_TRY(ptn_over_pin(engine, bytes, &over->stash_pool));
  return ptn_device_stash_set_pool(over->stash, over->stash_pool.memory, bytes);
}

ptn_status ptn_engine_let_go(ptn_engine *engine, ptn_device_record *record) {
  const engine_device *over = &engine->over;
  for (uint32_t i = 0; i < over->n_streams; i++) PTN_TRY(ptn_device_record_let_go(record, over->streams[i]));
  return PTN_OK;
}

/* ---- copies that are waited for ---- */

ptn_status ptn_over_copy(ptn_engine *engine, void *to, const void *from, uint64_t bytes) {
  engine_device *over = &engine->over;
  ptn_stream *stream = ptn_engine_stream(engine);
  if (bytes == 0) return PTN_OK;
  ptn_status status = over->kind->copy(over->device, stream, to, from, bytes);
  if (status == PTN_OK) return over->kind->finish(over->device, stream);
  ptn_error error;
  ptn_error_save(&error);
  over->kind->finish(over->device, stream); /* it may have begun */
  return ptn_error_restore(&error);
}

ptn_status ptn_over_zero(ptn_engine *engine, void *memory, uint64_t bytes) {
  void *zeros = calloc(1, ZEROS_BYTES);
  if (!zeros) return ptn_fail(PTN_MEMORY, "no memory for zeros");
  ptn_status status = PTN_OK;
  for (uint64_t done = 0; done < bytes && status == PTN_OK; done += ZEROS_BYTES)
    status = ptn_over_copy(engine, (char *)memory + done, zeros, ptn_min_u64(ZEROS_BYTES, bytes - done));
  free(zeros);
  return status;
}

/* ---- quiet ---- */

void ptn_over_settle(ptn_engine *engine) {
  engine_device *over = &engine->over;
  if (!over->device) return;
  while (over->offloads || over->n_jobs) ptn_wait(&engine->changed, &engine->mutex);
  ptn_residency_settle(engine); /* the end of a job may have begun a load; nothing begins another now */
  while (over->uploads) ptn_wait(&engine->changed, &engine->mutex);
}

/* A device that failed has nothing under way. */
void ptn_over_finish(ptn_engine *engine) {
  engine_device *over = &engine->over;
  if (!over->device) return;
  ptn_lock(&engine->mutex);
  ptn_over_settle(engine);
  ptn_unlock(&engine->mutex);
  for (uint32_t i = 0; i < over->n_streams; i++) over->kind->finish(over->device, over->streams[i]);
}

/* ---- the whole ---- */

ptn_status ptn_over_open(ptn_engine *engine, ptn_device *device, ptn_account *account) {
  engine_device *over = &engine->over;
  over->device = device;
  over->kind = device->kind;
  over->account = account;
  over->n_streams = 1; /* NULL */
  PTN_TRY(over->kind->create_event(device, PTN_EVENT_ORDER, &over->made));
  PTN_TRY(over->kind->create_event(device, PTN_EVENT_ORDER, &over->joined));
  PTN_TRY(ptn_transfers_create(&over->upload, device, "ptn-upload"));
  PTN_TRY(ptn_transfers_create(&over->offload, device, "ptn-offload"));
  const ptn_device_stash_config stash = {
      .device = device, .upload = over->upload, .offload = over->offload, .store = engine->store, .trace = engine->trace};
  PTN_TRY(ptn_device_stash_create(&over->stash, &stash));
  return ptn_host_start(engine);
}

/* Nothing is under way, and no chunk has a home any more. */
void ptn_over_close(ptn_engine *engine) {
  engine_device *over = &engine->over;
  if (!over->device) return;
  if (over->lane_started) ptn_host_stop(engine);
  ptn_device_stash_close(over->stash);
  ptn_device_stash_release(over->stash);
  ptn_transfers_destroy(over->upload);
  ptn_transfers_destroy(over->offload);
  over->kind->destroy_event(over->device, over->made);
  over->kind->destroy_event(over->device, over->joined);
  ptn_over_unpin(engine, &over->pool);
  ptn_over_unpin(engine, &over->stash_pool);
  drop_staging(engine);
}
