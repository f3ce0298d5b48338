/* Gradients on their way from the device to the host.
 *
 * Problem: a gradient lies in memory that the compute stream will use again, and the CPU needs it; the driving thread waits for
 * neither. Design: an event is recorded behind the operation that made it, and the offload lane copies it, ordered behind that event,
 * to one of two places: the pool, pinned memory of fixed size from which ranges are taken until the job that uses them has ended, or,
 * where a chunk is updated after commit and this is its first gradient of the step, the chunk's sum itself. Jobs are queued at once
 * and wait for what has not arrived. When the copy has been made the owner is handed to the driving thread, which releases it: the
 * device no longer reads the memory, so whatever is ordered after that may write there.
 *
 * Invariants: ranges of the pool are a list by offset and never overlap; a range lives until its job has ended, or its gradient was
 * dropped or abandoned; nobody frees an offload before its copy has ended.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/internal.h"

typedef struct offload {
  ptn_transfer transfer; /* first member */
  ptn_engine *engine;
  uint32_t param;
  void *owner; /* NULL: not kept yet, or handed back */
  job *job;    /* that waits for it */
  bool ended, direct;
  bool detached; /* nobody asks for it any more: freed at its end */
  ptn_pool_range range; /* of the pool; not where it is direct */
} offload;

const void *ptn_offload_data(const offload *offload) { return offload->transfer.to; }
bool ptn_offload_is_direct(const offload *offload) { return offload->direct; }

/* ---- the pool ---- */

/* Locked. Waits for jobs to give memory back; chunks that are not complete go to their lane where nothing else would. */
static ptn_status wait_for_range(ptn_engine *engine, offload *fresh, uint64_t bytes) {
  engine_device *over = &engine->over;
  if (bytes > over->pool.bytes)
    return ptn_fail(PTN_STEP,
                    "a gradient of %llu bytes does not fit the %llu bytes of gradient memory on the host: give at least as many",
                    (unsigned long long)bytes, (unsigned long long)over->pool.bytes);
  int64_t begin = 0;
  ptn_status status = PTN_OK;
  while (status == PTN_OK && !ptn_pool_take(&over->ranges, over->pool.bytes, bytes, &fresh->range)) {
    if (begin == 0) begin = ptn_now_ns();
    bool found = engine->n_jobs > (engine->ahead ? 1u : 0u) || over->n_jobs > 0;
    if (found) {
      ptn_wait(&engine->changed, &engine->mutex);
      continue;
    }
    status = ptn_gradients_enqueue_some(engine, &found);
    if (status == PTN_OK && !found) abort(); /* every range belongs to a job or to a chunk that holds it */
  }
  if (begin) engine->wait_ns += ptn_trace_waited(engine->trace, PTN_TRACE_MEMORY, -1, begin);
  return status;
}

void ptn_offload_release(ptn_engine *engine, offload *offload) {
  if (!offload) return;
  if (!offload->direct) ptn_pool_give(&engine->over.ranges, &offload->range);
  if (offload->direct && !offload->ended) offload->detached = true;
  else free(offload);
}

/* ---- the end of a copy, on the offload lane's thread ---- */

static void note_offload(ptn_engine *engine, const offload *offload) {
  const ptn_transfer *transfer = &offload->transfer;
  if (transfer->status != PTN_OK) return;
  ptn_trace_add(engine->trace, (ptn_trace_event){.start_ns = transfer->start_ns,
                                                 .end_ns = transfer->end_ns,
                                                 .bytes = transfer->bytes,
                                                 .number = (int32_t)engine->params[offload->param].chunk,
                                                 .lane = PTN_LANE_OFFLOAD,
                                                 .kind = PTN_TRACE_GRADIENTS});
}

static void tell_job(ptn_engine *engine, offload *offload) {
  job *job = offload->job;
  if (!job) return;
  job->failed |= offload->transfer.status != PTN_OK;
  job->arriving--;
  ptn_signal(&engine->lane_work);
  ptn_signal(&engine->over.lane_work);
}

static void on_arrived(ptn_transfer *transfer) {
  offload *offload = (struct offload *)transfer;
  ptn_engine *engine = offload->engine;
  note_offload(engine, offload);
  ptn_lock(&engine->mutex);
  engine->over.offloads--;
  offload->ended = true;
  if (transfer->status != PTN_OK) ptn_lane_fail(engine, transfer->status, &transfer->error);
  else if (offload->direct) engine->params[offload->param].spilled = true;
  ptn_lane_owner(engine, offload->owner);
  offload->owner = NULL;
  tell_job(engine, offload);
  if (offload->detached) free(offload);
  ptn_broadcast(&engine->changed);
  ptn_unlock(&engine->mutex);
}

/* ---- on the driving thread ---- */

/* Locked. The update of the step before reads the sum, as long as it waits for its turn and is made; a forward has waited for it. */
static void wait_for_sum(ptn_engine *engine, const chunk *chunk) {
  if (!chunk->late) return;
  int64_t begin = ptn_now_ns();
  while (chunk->late) ptn_wait(&engine->changed, &engine->mutex);
  engine->wait_ns += ptn_trace_waited(engine->trace, PTN_TRACE_UPDATE, -1, begin);
}

static ptn_status make(ptn_engine *engine, uint32_t number, offload **out) {
  const param *param = &engine->params[number];
  chunk *chunk = &engine->chunks[param->chunk];
  uint64_t bytes = param->count * engine->element_bytes;
  bool late = is_late(chunk);
  offload *fresh = calloc(1, sizeof *fresh);
  if (!fresh) return ptn_fail(PTN_MEMORY, "no memory for a gradient's way to the host");
  fresh->engine = engine;
  fresh->param = number;
  fresh->direct = late && !param->summed;
  fresh->transfer.to = fresh->direct ? chunk->sum + param->offset_bytes : NULL;
  fresh->transfer.bytes = bytes;
  fresh->transfer.after = engine->over.made;
  fresh->transfer.done = on_arrived;
  ptn_lock(&engine->mutex);
  if (fresh->direct) wait_for_sum(engine, chunk);
  ptn_status status = fresh->direct ? PTN_OK : wait_for_range(engine, fresh, ptn_round_up(bytes, PTN_TENSOR_ALIGN_BYTES));
  if (!fresh->direct && status == PTN_OK) fresh->transfer.to = (char *)engine->over.pool.memory + fresh->range.offset;
  ptn_unlock(&engine->mutex);
  if (status != PTN_OK) free(fresh);
  else *out = fresh;
  return status;
}

ptn_status ptn_offload_take(ptn_engine *engine, uint32_t number, const void *data, offload **out) {
  engine_device *over = &engine->over;
  offload *offload = NULL;
  ptn_engine_collect(engine);
  PTN_TRY(make(engine, number, &offload));
  offload->transfer.from = data;
  ptn_status status = over->kind->record(over->device, over->made, ptn_engine_stream(engine));
  ptn_lock(&engine->mutex);
  offload->ended = status != PTN_OK;
  over->offloads += status == PTN_OK;
  ptn_unlock(&engine->mutex);
  if (status == PTN_OK) status = ptn_transfers_submit(over->offload, &offload->transfer);
  if (status != PTN_OK) {
    ptn_error error;
    ptn_error_save(&error);
    ptn_offload_abandon(engine, offload);
    return ptn_error_restore(&error);
  }
  *out = offload;
  return PTN_OK;
}

bool ptn_offload_keep(offload *offload, void *owner) {
  if (offload->ended) return false;
  offload->owner = owner;
  return true;
}

void ptn_offload_abandon(ptn_engine *engine, offload *offload) {
  ptn_lock(&engine->mutex);
  while (!offload->ended) ptn_wait(&engine->changed, &engine->mutex);
  ptn_offload_release(engine, offload);
  ptn_unlock(&engine->mutex);
}

void ptn_offload_await(offload *offload, job *job) {
  if (offload->ended) {
    job->failed |= offload->transfer.status != PTN_OK;
    return;
  }
  offload->job = job;
  job->arriving++;
}
