/* See device_stash.h for what it promises.
 *
 * One mutex guards all of it. It is never held across a call of the device, of a lane or of the store, which may call back at once.
 *
 * Invariants: a range of the pool belongs to one record, and ranges are a list by address; a record with a copy or a request in flight
 * (is_busy) keeps its range and is not freed; its bytes are in its range (memory, not reading, and arrived or being copied down), on
 * the disk (on_disk), in both, or lost (status stays); a record that was dropped is gone, or busy.
 */
#include "runtime/device_stash.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/threads.h"
#include "device/pool.h"

/* In flight at the store, as for the stash of ordinary memory (stash_io.c). */
#define IN_FLIGHT_BYTES (24 * PTN_MIB)

struct ptn_device_record {
  ptn_transfer down, up;
  ptn_device_stash *stash;
  int32_t number;
  uint64_t bytes; /* in whole pages */
  char *memory;   /* its range; NULL: none */
  bool lowering, lifting, reading, writing; /* in flight */
  bool arrived, on_disk;
  bool wanted, dropped;
  bool lifted; /* up_end was recorded; the driving thread's */
  ptn_event *down_end, *up_end;
  ptn_extent extent;
  ptn_io io;
  ptn_status status; /* of the last read until somebody was told; of the copy down for ever */
  ptn_error error;
  ptn_device_record *before, *after; /* by put */
  ptn_pool_range range;
};

struct ptn_device_stash {
  ptn_mutex mutex;
  ptn_condition changed;
  uint64_t references; /* the creator's, and one for each record */
  ptn_device_stash_config config;
  ptn_event *made; /* behind what a copy comes after; the driving thread's */
  bool closed, turned, closing_pool;
  char *pool;
  uint64_t pool_bytes;
  ptn_pool_ranges ranges;
  ptn_device_record *first, *last;
  ptn_device_record *ahead; /* the next to be read ahead */
  bool advancing, advance_again, writing_some, write_again;
  uint64_t writing_bytes, reading_bytes; /* in flight */
  uint32_t busy_count;                   /* copies and requests in flight */
  uint32_t outside_count;                /* threads in a call of the store on behalf of a record */
  uint64_t pass_bytes, expected_bytes;   /* put since begin; in the pass before */
  ptn_status failure;
  ptn_error failure_error;
  ptn_device_stash_stats stats;
};

static void write_some(ptn_device_stash *stash);
static void advance(ptn_device_stash *stash);

static bool is_busy(const ptn_device_record *record) {
  return record->lowering || record->lifting || record->reading || record->writing;
}

static const ptn_device_kind *kind_of(const ptn_device_stash *stash) { return stash->config.device->kind; }

/* ---- failures and waits ---- */

static void note_failure(ptn_device_stash *stash, ptn_status status, const ptn_error *error) {
  if (stash->failure != PTN_OK) return;
  stash->failure = status;
  stash->failure_error = *error;
}

static ptn_status report_failure(ptn_device_stash *stash) {
  if (stash->closed) return ptn_fail(PTN_STEP, "activations are asked for of a model that is not wrapped any more");
  if (stash->failure == PTN_OK) return PTN_OK;
  stash->failure = PTN_OK;
  return ptn_error_restore(&stash->failure_error);
}

static void wait_for_change(ptn_device_stash *stash, ptn_trace_kind kind, int32_t number) {
  int64_t begin_ns = ptn_now_ns();
  ptn_wait(&stash->changed, &stash->mutex);
  stash->stats.wait_ns += ptn_trace_waited(stash->config.trace, kind, number, begin_ns);
}

static void go_outside(ptn_device_stash *stash) {
  stash->outside_count++;
  ptn_unlock(&stash->mutex);
}

static void come_back(ptn_device_stash *stash) {
  ptn_lock(&stash->mutex);
  stash->outside_count--;
  ptn_broadcast(&stash->changed);
}

/* ---- ranges of the pool ---- */

static bool take_range(ptn_device_stash *stash, ptn_device_record *record) {
  if (!ptn_pool_take(&stash->ranges, stash->pool_bytes, record->bytes, &record->range)) return false;
  record->memory = stash->pool + record->range.offset;
  stash->stats.host_bytes += record->bytes;
  return true;
}

static void give_range(ptn_device_stash *stash, ptn_device_record *record) {
  if (!record->memory) return;
  ptn_pool_give(&stash->ranges, &record->range);
  record->memory = NULL;
  record->arrived = false;
  stash->stats.host_bytes -= record->bytes;
}

/* The first record before `end` that is on the disk too gives its range up: it is needed last. */
static bool give_up_clean(ptn_device_stash *stash, const ptn_device_record *end) {
  for (ptn_device_record *record = stash->first; record && record != end; record = record->after) {
    if (!record->memory || !record->on_disk || is_busy(record)) continue;
    give_range(stash, record);
    return true;
  }
  return false;
}

/* ---- records ---- */

static void append(ptn_device_stash *stash, ptn_device_record *record) {
  record->before = stash->last;
  *(stash->last ? &stash->last->after : &stash->first) = record;
  stash->last = record;
  stash->references++;
}

/* Unlocks for a moment. */
static void release_space(ptn_device_stash *stash, ptn_device_record *record) {
  ptn_extent extent = record->extent;
  record->extent = (ptn_extent){0};
  record->on_disk = false;
  if (extent.bytes == 0) return;
  stash->stats.disk_bytes -= extent.bytes;
  go_outside(stash);
  ptn_store_release(stash->config.store, &extent);
  come_back(stash);
}

static void free_record(ptn_device_record *record) {
  ptn_device *device = record->stash->config.device;
  if (record->down_end) device->kind->destroy_event(device, record->down_end);
  if (record->up_end) device->kind->destroy_event(device, record->up_end);
  free(record);
}

/* Dropped, and nothing of it is in flight. The reference stays the caller's to give back. */
static void destroy(ptn_device_stash *stash, ptn_device_record *record) {
  if (stash->ahead == record) stash->ahead = record->before;
  *(record->before ? &record->before->after : &stash->first) = record->after;
  *(record->after ? &record->after->before : &stash->last) = record->before;
  give_range(stash, record);
  release_space(stash, record);
  free_record(record);
}

/* Unlocks. */
static void unreference(ptn_device_stash *stash) {
  bool last = --stash->references == 0;
  ptn_unlock(&stash->mutex);
  if (!last) return;
  ptn_condition_destroy(&stash->changed);
  ptn_mutex_destroy(&stash->mutex);
  free(stash);
}

/* Something of a record has ended, on a thread of a lane or of the store. The creator's reference is there: close waits. */
static void after_end(ptn_device_stash *stash, ptn_device_record *record) {
  if (record->dropped && !is_busy(record)) {
    destroy(stash, record);
    stash->references--;
  }
  write_some(stash);
  advance(stash);
  stash->busy_count--;
  ptn_broadcast(&stash->changed);
}

static void trace(ptn_device_stash *stash, const ptn_device_record *record, ptn_trace_lane lane, int64_t start_ns, int64_t end_ns,
                  uint64_t bytes) {
  ptn_trace_add(stash->config.trace, (ptn_trace_event){.start_ns = start_ns,
                                                       .end_ns = end_ns,
                                                       .bytes = bytes,
                                                       .number = record->number,
                                                       .lane = lane,
                                                       .kind = PTN_TRACE_ACTIVATIONS});
}

/* ---- the disk ---- */

static void on_written(ptn_io *io) {
  ptn_device_record *record = io->context;
  ptn_device_stash *stash = record->stash;
  trace(stash, record, PTN_LANE_WRITE, io->start_ns, io->end_ns, io->bytes);
  ptn_lock(&stash->mutex);
  stash->writing_bytes -= record->bytes;
  if (io->status == PTN_OK) {
    stash->stats.written_bytes += record->bytes;
    record->on_disk = true;
  } else {
    note_failure(stash, io->status, &io->error); /* nothing is lost */
    release_space(stash, record);
  }
  record->writing = false;
  after_end(stash, record);
  ptn_unlock(&stash->mutex);
}

static void on_read(ptn_io *io) {
  ptn_device_record *record = io->context;
  ptn_device_stash *stash = record->stash;
  trace(stash, record, PTN_LANE_READ, io->start_ns, io->end_ns, io->bytes);
  ptn_lock(&stash->mutex);
  stash->reading_bytes -= record->bytes;
  record->reading = false;
  if (io->status == PTN_OK) {
    stash->stats.read_bytes += record->bytes;
    record->arrived = true;
  } else {
    give_range(stash, record); /* may be tried again */
    record->status = io->status;
    record->error = io->error;
    ptn_error_of(&record->error, "activations of block %d", (int)record->number);
  }
  after_end(stash, record);
  ptn_unlock(&stash->mutex);
}

static void submit(ptn_device_stash *stash, ptn_device_record *record, bool write, bool urgent) {
  record->io = (ptn_io){.memory = record->memory,
                        .offset = record->extent.offset,
                        .bytes = record->bytes,
                        .write = write,
                        .urgent = urgent,
                        .done = write ? on_written : on_read,
                        .context = record};
  go_outside(stash);
  ptn_store_submit(stash->config.store, &record->io);
  come_back(stash);
}

/* Its bytes go to the disk; unlocks meanwhile. */
static ptn_status start_write(ptn_device_stash *stash, ptn_device_record *record) {
  ptn_extent extent;
  record->writing = true;
  stash->busy_count++;
  stash->writing_bytes += record->bytes;
  go_outside(stash);
  ptn_status status = ptn_store_reserve(stash->config.store, record->bytes, &extent);
  come_back(stash);
  if (status == PTN_OK) {
    record->extent = extent;
    stash->stats.disk_bytes += extent.bytes;
    stash->stats.most_disk_bytes = ptn_max_u64(stash->stats.most_disk_bytes, stash->stats.disk_bytes);
    submit(stash, record, true, false);
    return PTN_OK;
  }
  ptn_error error;
  ptn_error_save(&error);
  record->writing = false;
  stash->writing_bytes -= record->bytes;
  stash->busy_count--;
  if (record->dropped && !is_busy(record)) {
    destroy(stash, record);
    stash->references--;
  }
  ptn_broadcast(&stash->changed);
  return ptn_error_restore(&error);
}

static bool may_write(const ptn_device_stash *stash, const ptn_device_record *record) {
  return stash->writing_bytes == 0 || stash->writing_bytes + record->bytes <= IN_FLIGHT_BYTES;
}

/* The first record whose bytes are in its range alone. */
static ptn_device_record *first_to_write(const ptn_device_stash *stash, const ptn_device_record *except) {
  for (ptn_device_record *record = stash->first; record; record = record->after)
    if (record != except && record->memory && record->arrived && !record->on_disk && !is_busy(record)) return record;
  return NULL;
}

/* Whether this pass is about to put more than the pool will have room for. */
static bool will_be_short(const ptn_device_stash *stash) {
  uint64_t to_come_bytes = stash->expected_bytes > stash->pass_bytes ? stash->expected_bytes - stash->pass_bytes : 0;
  uint64_t room_bytes = stash->pool_bytes - stash->stats.host_bytes;
  for (const ptn_device_record *record = stash->first; record && room_bytes < to_come_bytes; record = record->after)
    if (record->memory && (record->on_disk || record->writing || record->dropped)) room_bytes += record->bytes;
  return room_bytes < to_come_bytes;
}

/* Writes what the pool will not hold; unlocks meanwhile. A disk that is full is told of by who must have memory. */
static void write_some(ptn_device_stash *stash) {
  stash->write_again = true;
  if (stash->writing_some) return;
  stash->writing_some = true;
  while (stash->write_again) {
    stash->write_again = false;
    if (stash->turned || stash->closed || !will_be_short(stash)) break;
    ptn_device_record *record = first_to_write(stash, NULL);
    if (!record || !may_write(stash, record)) break;
    stash->write_again = start_write(stash, record) == PTN_OK;
  }
  stash->writing_some = false;
}

/* Whether a range is about to be free by itself. */
static bool will_give(const ptn_device_stash *stash) {
  for (const ptn_device_record *record = stash->first; record; record = record->after)
    if (record->memory && record->dropped) return true;
  return false;
}

/* A range for the record, whatever must go to the disk for it; waits. */
static ptn_status find_range(ptn_device_stash *stash, ptn_device_record *record) {
  if (record->bytes > stash->pool_bytes)
    return ptn_fail(PTN_INVALID, "activations of %llu bytes do not fit the %llu bytes of host memory for them",
                    (unsigned long long)record->bytes, (unsigned long long)stash->pool_bytes);
  while (!record->memory && !take_range(stash, record)) { /* reading ahead may find one meanwhile */
    if (stash->closed) return report_failure(stash);
    if (give_up_clean(stash, NULL)) continue;
    ptn_device_record *dirty = will_give(stash) ? NULL : first_to_write(stash, record);
    if (dirty && may_write(stash, dirty)) {
      PTN_TRY(start_write(stash, dirty));
      continue;
    }
    if (stash->busy_count == 0) abort(); /* every range is somebody's that can be written, or given up */
    PTN_TRY(report_failure(stash));
    wait_for_change(stash, PTN_TRACE_MEMORY, record->number);
  }
  return PTN_OK;
}

/* It has a range; unlocks meanwhile. */
static void start_read(ptn_device_stash *stash, ptn_device_record *record, bool urgent) {
  record->reading = true;
  stash->busy_count++;
  stash->reading_bytes += record->bytes;
  submit(stash, record, false, urgent);
}

static ptn_device_record *next_ahead(ptn_device_stash *stash) {
  if (!stash->turned || stash->closed || stash->closing_pool) return NULL;
  for (ptn_device_record *record; (record = stash->ahead); stash->ahead = record->before) {
    if (!record->wanted || record->memory || record->status != PTN_OK || is_busy(record) || !record->on_disk) continue;
    if (stash->reading_bytes > 0 && stash->reading_bytes + record->bytes > IN_FLIGHT_BYTES) return NULL;
    bool found = take_range(stash, record);
    while (!found && give_up_clean(stash, record)) found = take_range(stash, record);
    if (!found) return NULL;
    stash->ahead = record->before;
    return record;
  }
  return NULL;
}

static void advance(ptn_device_stash *stash) {
  stash->advance_again = true;
  if (stash->advancing) return;
  stash->advancing = true;
  while (stash->advance_again) {
    stash->advance_again = false;
    ptn_device_record *record;
    while ((record = next_ahead(stash))) start_read(stash, record, false);
  }
  stash->advancing = false;
}

/* ---- copies ---- */

static void on_lowered(ptn_transfer *transfer) {
  ptn_device_record *record = transfer->context;
  ptn_device_stash *stash = record->stash;
  if (transfer->status == PTN_OK) trace(stash, record, PTN_LANE_OFFLOAD, transfer->start_ns, transfer->end_ns, transfer->bytes);
  ptn_lock(&stash->mutex);
  record->lowering = false;
  record->arrived = transfer->status == PTN_OK;
  if (!record->arrived) {
    record->status = transfer->status;
    record->error = transfer->error;
    if (!record->lifting) give_range(stash, record);
    note_failure(stash, transfer->status, &transfer->error);
  }
  after_end(stash, record);
  ptn_unlock(&stash->mutex);
}

static void on_lifted(ptn_transfer *transfer) {
  ptn_device_record *record = transfer->context;
  ptn_device_stash *stash = record->stash;
  if (transfer->status == PTN_OK) trace(stash, record, PTN_LANE_UPLOAD, transfer->start_ns, transfer->end_ns, transfer->bytes);
  ptn_lock(&stash->mutex);
  record->lifting = false;
  if (!record->arrived && !record->lowering) give_range(stash, record); /* its copy down failed meanwhile */
  if (transfer->status == PTN_OK) stash->stats.brought_bytes += transfer->bytes;
  else note_failure(stash, transfer->status, &transfer->error);
  after_end(stash, record);
  ptn_unlock(&stash->mutex);
}

/* Hands a copy to its lane, behind what stream has so far. One that fails is over when this returns. */
static ptn_status order(ptn_device_stash *stash, ptn_stream *stream, ptn_transfers *lane, ptn_transfer *transfer, bool *moving) {
  ptn_device *device = stash->config.device;
  transfer->after = stash->made;
  ptn_status status = device->kind->record(device, stash->made, stream);
  if (status == PTN_OK) {
    if ((status = ptn_transfers_submit(lane, transfer)) == PTN_OK) return PTN_OK;
  } else {
    ptn_lock(&stash->mutex);
    *moving = false;
    stash->busy_count--;
    ptn_broadcast(&stash->changed);
    ptn_unlock(&stash->mutex);
  }
  ptn_error error;
  ptn_error_save(&error);
  ptn_lock(&stash->mutex);
  while (*moving) ptn_wait(&stash->changed, &stash->mutex);
  stash->failure = PTN_OK; /* this call tells */
  ptn_unlock(&stash->mutex);
  return ptn_error_restore(&error);
}

static ptn_status make_record(ptn_device_stash *stash, const void *from, uint64_t bytes, int32_t number,
                              ptn_device_record **out) {
  ptn_device *device = stash->config.device;
  ptn_device_record *record = *out = calloc(1, sizeof *record);
  if (!record) return ptn_fail(PTN_MEMORY, "no memory to note a saved tensor");
  record->stash = stash;
  record->number = number;
  record->bytes = ptn_round_up(bytes, PTN_PAGE_BYTES);
  record->wanted = true;
  ptn_status status = device->kind->create_event(device, PTN_EVENT_ORDER, &record->down_end);
  if (status == PTN_OK) status = device->kind->create_event(device, PTN_EVENT_ORDER, &record->up_end);
  record->down = (ptn_transfer){.from = from, .bytes = bytes, .end = record->down_end, .done = on_lowered, .context = record};
  record->up = (ptn_transfer){.bytes = bytes, .end = record->up_end, .done = on_lifted, .context = record};
  if (status != PTN_OK) free_record(record);
  return status;
}

ptn_status ptn_device_stash_put(ptn_device_stash *stash, ptn_stream *stream, const void *from, uint64_t bytes, int32_t number,
                                ptn_device_record **out) {
  ptn_device_record *record;
  *out = NULL;
  PTN_TRY(make_record(stash, from, bytes, number, &record));
  ptn_lock(&stash->mutex);
  ptn_status status = report_failure(stash);
  if (status == PTN_OK) status = find_range(stash, record);
  if (status != PTN_OK) {
    ptn_unlock(&stash->mutex);
    free_record(record);
    return status;
  }
  record->lowering = true;
  record->down.to = record->memory;
  stash->busy_count++;
  append(stash, record);
  ptn_unlock(&stash->mutex);
  status = order(stash, stream, stash->config.offload, &record->down, &record->lowering);
  ptn_lock(&stash->mutex);
  if (status == PTN_OK) {
    stash->pass_bytes += record->bytes;
    stash->stats.record_count++;
    stash->stats.put_bytes += record->bytes;
    write_some(stash);
    *out = record;
  } else {
    ptn_error error;
    ptn_error_save(&error);
    destroy(stash, record);
    stash->references--;
    status = ptn_error_restore(&error);
  }
  ptn_unlock(&stash->mutex);
  return status;
}

static bool in_range(const ptn_device_record *record) {
  return record->memory && !record->reading && (record->arrived || record->lowering);
}

static ptn_status find_bytes(ptn_device_stash *stash, ptn_device_record *record) {
  for (;;) {
    PTN_TRY(report_failure(stash));
    if (record->status != PTN_OK) {
      if (record->on_disk) record->status = PTN_OK; /* it can be read again */
      return ptn_error_restore(&record->error);
    }
    if (record->lifting || record->reading) {
      wait_for_change(stash, PTN_TRACE_ACTIVATIONS, record->number);
    } else if (in_range(record)) {
      return PTN_OK;
    } else {
      PTN_TRY(find_range(stash, record));
      if (!record->reading && !record->arrived) start_read(stash, record, true);
    }
  }
}

ptn_status ptn_device_record_bring(ptn_device_record *record, ptn_stream *stream, void *to) {
  ptn_device_stash *stash = record->stash;
  ptn_lock(&stash->mutex);
  ptn_status status = find_bytes(stash, record);
  if (status != PTN_OK) {
    ptn_unlock(&stash->mutex);
    return status;
  }
  bool lowering = record->lowering;
  record->lifting = true;
  stash->busy_count++;
  ptn_unlock(&stash->mutex);
  record->up.to = to;
  record->up.from = record->memory;
  if (lowering) status = ptn_device_record_let_go(record, stream); /* the copy up comes behind the one down */
  if (status == PTN_OK) {
    PTN_TRY(order(stash, stream, stash->config.upload, &record->up, &record->lifting));
    record->lifted = true;
  } else {
    ptn_lock(&stash->mutex);
    record->lifting = false;
    stash->busy_count--;
    ptn_broadcast(&stash->changed);
    ptn_unlock(&stash->mutex);
    return status;
  }
  ptn_lock(&stash->mutex);
  stash->turned = true;
  stash->ahead = record->before;
  advance(stash);
  ptn_unlock(&stash->mutex);
  return PTN_OK;
}

ptn_status ptn_device_record_follow(ptn_device_record *record, ptn_stream *stream) {
  return kind_of(record->stash)->follow(record->stash->config.device, stream, record->up_end);
}

ptn_status ptn_device_record_let_go(ptn_device_record *record, ptn_stream *stream) {
  const ptn_device_kind *kind = kind_of(record->stash);
  PTN_TRY(kind->follow(record->stash->config.device, stream, record->down_end));
  return record->lifted ? kind->follow(record->stash->config.device, stream, record->up_end) : PTN_OK;
}

/* ---- what is asked of a record ---- */

bool ptn_device_record_is_near(ptn_device_record *record) {
  ptn_lock(&record->stash->mutex);
  bool near = in_range(record) && !record->lifting && record->status == PTN_OK;
  ptn_unlock(&record->stash->mutex);
  return near;
}

bool ptn_device_record_ended(ptn_device_record *record) {
  ptn_lock(&record->stash->mutex);
  bool ended = !record->lowering && !record->lifting;
  ptn_unlock(&record->stash->mutex);
  return ended;
}

bool ptn_device_record_is_closed(ptn_device_record *record) {
  ptn_lock(&record->stash->mutex);
  bool closed = record->stash->closed;
  ptn_unlock(&record->stash->mutex);
  return closed;
}

void ptn_device_record_want(ptn_device_record *record, bool wanted) {
  ptn_lock(&record->stash->mutex);
  record->wanted = wanted;
  ptn_unlock(&record->stash->mutex);
}

void ptn_device_record_drop(ptn_device_record *record) {
  ptn_device_stash *stash = record->stash;
  ptn_lock(&stash->mutex);
  record->wanted = false;
  record->dropped = true;
  if (is_busy(record)) {
    ptn_unlock(&stash->mutex);
    return;
  }
  destroy(stash, record);
  advance(stash);
  ptn_broadcast(&stash->changed);
  unreference(stash);
}

/* ---- passes and figures ---- */

void ptn_device_stash_begin(ptn_device_stash *stash) {
  ptn_lock(&stash->mutex);
  if (stash->pass_bytes > 0) stash->expected_bytes = stash->pass_bytes;
  stash->pass_bytes = 0;
  stash->turned = false;
  ptn_unlock(&stash->mutex);
}

void ptn_device_stash_end(ptn_device_stash *stash) {
  ptn_lock(&stash->mutex);
  if (!stash->turned) stash->ahead = stash->last;
  stash->turned = true;
  advance(stash);
  ptn_unlock(&stash->mutex);
}

ptn_status ptn_device_stash_check(ptn_device_stash *stash) {
  ptn_lock(&stash->mutex);
  ptn_status status = report_failure(stash);
  ptn_unlock(&stash->mutex);
  return status;
}

void ptn_device_stash_get_stats(ptn_device_stash *stash, ptn_device_stash_stats *out) {
  ptn_lock(&stash->mutex);
  *out = stash->stats;
  ptn_unlock(&stash->mutex);
}

uint64_t ptn_device_stash_mark(ptn_device_stash *stash) {
  ptn_lock(&stash->mutex);
  uint64_t most_bytes = stash->stats.most_disk_bytes;
  stash->stats.most_disk_bytes = stash->stats.disk_bytes;
  ptn_unlock(&stash->mutex);
  return most_bytes;
}

/* ---- the whole ---- */

uint64_t ptn_device_stash_largest(ptn_device_stash *stash) {
  uint64_t bytes = 0;
  ptn_lock(&stash->mutex);
  for (const ptn_device_record *record = stash->first; record; record = record->after) bytes = ptn_max_u64(bytes, record->bytes);
  ptn_unlock(&stash->mutex);
  return bytes;
}

/* Every range is given up, its bytes on the disk; nothing is in flight. */
static ptn_status empty_pool(ptn_device_stash *stash) {
  while (stash->ranges || stash->busy_count > 0) {
    if (give_up_clean(stash, NULL)) continue;
    ptn_device_record *dirty = first_to_write(stash, NULL);
    if (dirty && may_write(stash, dirty)) PTN_TRY(start_write(stash, dirty));
    else if (stash->busy_count > 0) ptn_wait(&stash->changed, &stash->mutex);
    else abort(); /* as in find_range */
    PTN_TRY(report_failure(stash));
  }
  return PTN_OK;
}

ptn_status ptn_device_stash_set_pool(ptn_device_stash *stash, void *memory, uint64_t bytes) {
  ptn_lock(&stash->mutex);
  stash->closing_pool = true;
  ptn_status status = empty_pool(stash);
  stash->closing_pool = false;
  if (status == PTN_OK) {
    stash->pool = memory;
    stash->pool_bytes = memory ? bytes : 0;
  }
  ptn_unlock(&stash->mutex);
  return status;
}

ptn_status ptn_device_stash_create(ptn_device_stash **out, const ptn_device_stash_config *config) {
  ptn_device_stash *stash = *out = calloc(1, sizeof *stash);
  if (!stash) return ptn_fail(PTN_MEMORY, "no memory for a stash");
  ptn_mutex_create(&stash->mutex);
  ptn_condition_create(&stash->changed);
  stash->references = 1;
  stash->config = *config;
  return config->device->kind->create_event(config->device, PTN_EVENT_ORDER, &stash->made);
}

static ptn_device_record *first_with_something(const ptn_device_stash *stash) {
  ptn_device_record *record = stash->first;
  while (record && !record->down_end) record = record->after;
  return record;
}

void ptn_device_stash_close(ptn_device_stash *stash) {
  if (!stash) return;
  ptn_device *device = stash->config.device;
  ptn_lock(&stash->mutex);
  stash->closed = true;
  while (stash->busy_count > 0 || stash->outside_count > 0 || stash->advancing || stash->writing_some)
    ptn_wait(&stash->changed, &stash->mutex);
  ptn_device_record *record;
  while ((record = first_with_something(stash))) {
    give_range(stash, record);
    device->kind->destroy_event(device, record->down_end);
    device->kind->destroy_event(device, record->up_end);
    record->down_end = record->up_end = NULL;
    release_space(stash, record); /* unlocks */
  }
  if (stash->made) device->kind->destroy_event(device, stash->made);
  stash->made = NULL;
  ptn_broadcast(&stash->changed);
  ptn_unlock(&stash->mutex);
}

void ptn_device_stash_release(ptn_device_stash *stash) {
  if (!stash) return;
  ptn_lock(&stash->mutex);
  unreference(stash);
}
