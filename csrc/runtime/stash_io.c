/* What the stash moves, and when.
 *
 * Writes go out in the order of the forward pass, a few at a time, so that a record that is asked for before its turn need not be
 * written. Once forward is over only what memory needs is written: the rest is asked for soonest, and the disk is for reading.
 * Reading ahead walks the records from the last back to the first and stops where the account has no room under its goal beside
 * what operations may need, and a recomputation where one comes before; each record that backward asks for moves it on, and each
 * operation of which it is told that it has ended. Backward that asks for records in another order is served as well, only later.
 *
 * Each request interrupts those who compute, twice, however short it is. So short records go together, as many as the store moves
 * at once: a write waits for those that come next, a read until there is room for several, as long as memory and what was read ahead
 * allow it.
 */
#include <string.h>

#include "base/bytes.h"
#include "runtime/stash_internal.h"

/* In flight at the store: enough to keep its threads busy while one request ends, little enough to change one's mind. */
#define WRITES_IN_FLIGHT_BYTES (24 * PTN_MIB)
#define READS_IN_FLIGHT_BYTES (24 * PTN_MIB)
/* So much is read ahead, as time of the disk: what an operation asks for at once is there, and the rest of the memory is left to
 * others. Until the disk is known there is no such bound. */
#define AHEAD_SECONDS (1.0 / 16)
#define LEAST_AHEAD_BYTES (32 * PTN_MIB)
/* A window that moved less says nothing about the disk. */
#define TELLING_BYTES (8 * PTN_MIB)

/* Records that are looked at to know how much is ahead. */
#define MOST_LOOKED_AT 256

static void write_done(ptn_io *io);

/* On a thread of the store, inside a callback, or with requests that are still to be submitted: it must not wait for what only
 * it can end. */
static _Thread_local bool must_not_wait;

/* ---- traffic ---- */

static void traffic_in(traffic *traffic, uint64_t bytes) {
  if (traffic->in_flight_count++ == 0) traffic->since_ns = ptn_now_ns();
  traffic->in_flight_bytes += bytes;
}

static void traffic_out(traffic *traffic, uint64_t bytes) {
  traffic->in_flight_bytes -= bytes;
  traffic->window_bytes += bytes;
  int64_t now_ns = ptn_now_ns();
  if (--traffic->in_flight_count == 0) traffic->window_ns += now_ns - traffic->since_ns;
}

static void new_window(traffic *traffic) {
  if (traffic->window_bytes >= TELLING_BYTES && traffic->window_ns > 0)
    traffic->bytes_per_s = (double)traffic->window_bytes / (double)traffic->window_ns * 1e9;
  traffic->window_bytes = 0;
  traffic->window_ns = 0;
}

void ptn_stash_new_window(ptn_stash *stash) {
  new_window(&stash->writes);
  new_window(&stash->reads);
}

static void trace_io(ptn_stash *stash, const ptn_record *record, ptn_trace_lane lane) {
  ptn_trace_add(stash->trace, (ptn_trace_event){.start_ns = record->io.start_ns,
                                                .end_ns = record->io.end_ns,
                                                .bytes = record->io.bytes,
                                                .number = record->number,
                                                .lane = lane,
                                                .kind = PTN_TRACE_ACTIVATIONS});
}

void ptn_stash_wait(ptn_stash *stash, ptn_trace_kind kind, int32_t number) {
  int64_t begin_ns = ptn_now_ns();
  ptn_wait(&stash->changed, &stash->mutex);
  stash->stats.wait_ns += ptn_trace_waited(stash->trace, kind, number, begin_ns);
}

/* Of all that the record's block has. */
static void begin_io(ptn_record *record, void (*done)(ptn_io *io)) {
  memset(&record->io, 0, offsetof(ptn_io, error));
  record->io.memory = record->block.memory;
  record->io.offset = record->extent.offset;
  record->io.bytes = record->block.bytes;
  record->io.done = done;
  record->io.context = record;
}

/* ---- the queue of writes ---- */

void ptn_stash_enqueue(ptn_stash *stash, ptn_record *record) {
  record->state = RECORD_QUEUED;
  record->queue_before = stash->queue_last;
  record->queue_after = NULL;
  *(stash->queue_last ? &stash->queue_last->queue_after : &stash->queue_first) = record;
  stash->queue_last = record;
  stash->queued_bytes += record->block.bytes;
}

void ptn_stash_unqueue(ptn_stash *stash, ptn_record *record) {
  *(record->queue_before ? &record->queue_before->queue_after : &stash->queue_first) = record->queue_after;
  *(record->queue_after ? &record->queue_after->queue_before : &stash->queue_last) = record->queue_before;
  stash->queued_bytes -= record->block.bytes;
  record->queue_before = record->queue_after = NULL;
  record->state = RECORD_IN_MEMORY;
}

/* Whether the queue is better left until more has come: short records, with memory to spare. Half of the room may be waited for. */
static bool wait_for_more(const ptn_stash *stash) {
  uint64_t room_bytes = ptn_account_room(stash->account);
  uint64_t next_bytes = stash->queue_last->block.bytes; /* the next is taken to be as long as the last */
  uint64_t enough_bytes = ptn_min_u64(ptn_store_gathered_bytes(stash->store), PTN_PIECE_PARTS * next_bytes);
  return stash->queued_bytes + next_bytes <= ptn_min_u64(enough_bytes, room_bytes / 2);
}

/* Whether a write is started now; begun_bytes: of those that it would be submitted with. */
static bool may_write(const ptn_stash *stash, uint64_t begun_bytes) {
  const ptn_record *record = stash->queue_first;
  if (!record || stash->closed) return false;
  uint64_t bytes = record->block.bytes;
  if (begun_bytes > 0) return begun_bytes + bytes <= ptn_store_gathered_bytes(stash->store);
  if (stash->writes.in_flight_count > 0 && stash->writes.in_flight_bytes + bytes > WRITES_IN_FLIGHT_BYTES) return false;
  if (stash->pressed) return true;
  return stash->turned ? ptn_account_room(stash->account) < stash->headroom_bytes : !wait_for_more(stash);
}

static void begin_write(ptn_stash *stash, ptn_record *record) {
  ptn_record_fetch_soon(record->queue_after);
  ptn_stash_unqueue(stash, record);
  record->state = RECORD_WRITING;
  begin_io(record, write_done);
  record->io.write = true;
  record->io.caller_sums = record->summed;
  traffic_in(&stash->writes, record->block.bytes);
}

void ptn_stash_write(ptn_stash *stash, bool pressed) {
  stash->pressed |= pressed;
  stash->start_again = true;
  if (stash->starting) return; /* one thread at a time, so that writes go out in order */
  stash->starting = true;
  while (stash->start_again) {
    stash->start_again = false;
    ptn_io *ios[PTN_PIECE_PARTS];
    uint64_t bytes = 0;
    size_t count = 0;
    while (count < PTN_PIECE_PARTS && may_write(stash, bytes)) {
      ptn_record *record = stash->queue_first;
      begin_write(stash, record);
      bytes += record->block.bytes;
      ios[count++] = &record->io;
    }
    if (count == 0) break;
    stash->start_again = true;
    ptn_unlock(&stash->mutex);
    ptn_store_submit_all(stash->store, ios, count);
    ptn_lock(&stash->mutex);
  }
  stash->starting = stash->pressed = false;
  if (stash->closed) ptn_broadcast(&stash->changed); /* all that was submitted may have ended meanwhile */
}

/* ---- what has ended, on a thread of the store ---- */

static void end_of_io(ptn_stash *stash, traffic *traffic, uint64_t bytes) {
  traffic_out(traffic, bytes);
  stash->finishing_count++; /* close waits: the lock is given up in between */
  bool inside = must_not_wait;
  must_not_wait = true;
  ptn_stash_write(stash, false);
  ptn_stash_advance(stash);
  must_not_wait = inside;
  stash->finishing_count--;
  ptn_broadcast(&stash->changed);
}

/* A record was written. Those that reading ahead has passed stay, as long as there is room: they are needed soon. */
static void settle_written(ptn_stash *stash, ptn_record *record) {
  record->state = RECORD_IN_BOTH;
  if (record->waiting > 0 && record->asked) return; /* the rest of its uses will ask at once */
  bool soon = stash->turned && record->passed && record->pass == stash->backward && record->waiting > 0;
  if (soon && ptn_account_room(stash->account) >= stash->headroom_bytes) return;
  ptn_record_let_go(record);
  record->state = RECORD_ON_DISK;
  if (soon) record->pass->ahead = record;
}

static void write_done(ptn_io *io) {
  ptn_record *record = io->context;
  ptn_stash *stash = record->stash;
  uint64_t bytes = io->bytes;
  trace_io(stash, record, PTN_LANE_WRITE);
  ptn_lock(&stash->mutex);
  stash->ended_count++;
  if (io->status == PTN_OK) {
    stash->stats.written_bytes += bytes;
    settle_written(stash, record);
  } else {
    record->state = RECORD_IN_MEMORY; /* nothing is lost; the next who calls is told */
    if (stash->failure == PTN_OK) {
      stash->failure = io->status;
      stash->failure_error = io->error;
    }
  }
  if (record->dropped) ptn_record_destroy(record);
  else if (record->state == RECORD_IN_MEMORY) ptn_record_release_space(record);
  end_of_io(stash, &stash->writes, bytes);
  ptn_unlock(&stash->mutex);
}

static void read_done(ptn_io *io) {
  ptn_record *record = io->context;
  ptn_stash *stash = record->stash;
  uint64_t bytes = io->bytes;
  trace_io(stash, record, PTN_LANE_READ);
  ptn_lock(&stash->mutex);
  stash->reads_moving_count--;
  stash->ended_count++;
  record->state = RECORD_IN_BOTH;
  if (io->status == PTN_OK) {
    stash->stats.read_bytes += bytes;
  } else {
    ptn_record_let_go(record);
    record->state = RECORD_ON_DISK; /* may be tried again */
    record->status = io->status;
    ptn_error_of(&io->error, "activations of block %d", (int)record->number);
  }
  if (record->dropped) ptn_record_destroy(record);
  end_of_io(stash, &stash->reads, bytes);
  ptn_unlock(&stash->mutex);
}

/* ---- reads ---- */

/* From ON_DISK to READING, with memory for it and its request made, but not submitted. Unlocks meanwhile. */
static ptn_status begin_read(ptn_stash *stash, ptn_record *record, bool urgent) {
  uint64_t bytes = record->block.bytes;
  void *memory = NULL;
  ptn_block block;
  record->state = RECORD_READING;
  traffic_in(&stash->reads, bytes); /* from here on close waits */
  bool waits = !must_not_wait;      /* where memory is short */
  if (!waits) stash->reads_moving_count++;
  ptn_unlock(&stash->mutex);
  ptn_status status = ptn_arena_alloc(stash->account, bytes, &memory);
  if (status == PTN_OK && !ptn_arena_find(memory, &block)) {
    ptn_arena_free(memory);
    status = ptn_fail(PTN_INVALID, "a record of %llu bytes is too small for the stash", (unsigned long long)bytes);
  }
  ptn_lock(&stash->mutex);
  if (status != PTN_OK) {
    record->state = RECORD_ON_DISK;
    if (!waits) stash->reads_moving_count--;
    stash->ended_count++;
    if (!urgent) record->pass->ahead = record;
    if (record->dropped) ptn_record_destroy(record);
    stash->reads.window_bytes -= bytes; /* traffic_out counts them */
    traffic_out(&stash->reads, bytes);
    ptn_broadcast(&stash->changed);
    return status;
  }
  record->block = block;
  stash->stats.memory_bytes += bytes;
  record->unchecked = true;
  begin_io(record, read_done);
  record->io.urgent = urgent;
  record->io.caller_sums = true;
  if (waits) stash->reads_moving_count++;
  return PTN_OK;
}

ptn_status ptn_stash_read(ptn_stash *stash, ptn_record *record) {
  PTN_TRY(begin_read(stash, record, true));
  ptn_unlock(&stash->mutex);
  ptn_store_submit(stash->store, &record->io); /* the record may be gone after this */
  ptn_lock(&stash->mutex);
  return PTN_OK;
}

/* Bytes in memory that backward has not asked for, beyond which nothing is read ahead. */
static uint64_t most_ahead_bytes(const ptn_stash *stash) {
  double bytes = stash->reads.bytes_per_s * AHEAD_SECONDS;
  if (bytes == 0) return UINT64_MAX;
  return bytes > (double)LEAST_AHEAD_BYTES ? (uint64_t)bytes : LEAST_AHEAD_BYTES;
}

/* Whether there are so many bytes in memory, or on their way, of what will be asked for before this record. */
static bool is_ahead(const ptn_record *record, uint64_t bytes) {
  uint64_t found_bytes = 0;
  uint32_t looked_count = 0;
  for (record = record->after; record && found_bytes < bytes && looked_count < MOST_LOOKED_AT; record = record->after) {
    looked_count++;
    if (!record->asked && (record_is_held(record) || record->state == RECORD_READING)) found_bytes += record->block.bytes;
  }
  return found_bytes >= bytes;
}

/* Whether a record is read ahead now; begun_bytes: of those that it would be submitted with. As long as there is more ahead than
 * room, it is only begun where there is room for as much as is moved at once. */
static bool may_read(const ptn_stash *stash, const ptn_record *record, uint64_t begun_bytes) {
  uint64_t gathered_bytes = ptn_store_gathered_bytes(stash->store), bytes = record->block.bytes;
  uint64_t held_bytes = stash->stats.memory_bytes, room_bytes = ptn_account_room(stash->account);
  bool near = record->number >= stash->near_number;
  room_bytes -= ptn_min_u64(room_bytes, near ? stash->near_headroom_bytes : stash->headroom_bytes);
  if (begun_bytes > 0) {
    if (begun_bytes + bytes > gathered_bytes) return false;
  } else if (is_ahead(record, ptn_min_u64(2 * gathered_bytes, room_bytes))) {
    bytes = ptn_max_u64(bytes, gathered_bytes);
  }
  if (stash->reads.in_flight_count > 0 && stash->reads.in_flight_bytes + bytes > READS_IN_FLIGHT_BYTES) return false;
  if (held_bytes > 0 && held_bytes + bytes > most_ahead_bytes(stash)) return false;
  return bytes <= room_bytes;
}

/* The next record to read ahead, or NULL where there is none, no room or enough under way. */
static ptn_record *next_ahead(ptn_stash *stash, uint64_t begun_bytes) {
  pass *pass = stash->backward;
  if (!stash->turned || stash->closed || stash->hold_back || !pass) return NULL;
  for (ptn_record *record; (record = pass->ahead); pass->ahead = record->before) {
    record->passed = true;
    if (record->state != RECORD_ON_DISK || record->waiting == 0 || record->status != PTN_OK) continue;
    if (ptn_arena_hold(&record->block)) { /* somebody has it still: no need to read, if it stays */
      record->state = RECORD_IN_BOTH;
      stash->stats.memory_bytes += record->block.bytes;
      stash->stats.forwarded_bytes += record->block.bytes;
      continue;
    }
    if (!may_read(stash, record, begun_bytes)) return NULL;
    pass->ahead = record->before;
    return record;
  }
  return NULL;
}

/* Begins and submits what is read together; false where that was all. Others that took the room meanwhile end it: what is not read
 * is read when it is asked for. */
static bool read_some(ptn_stash *stash) {
  ptn_io *ios[PTN_PIECE_PARTS];
  ptn_record *record = next_ahead(stash, 0);
  if (!record) return false;
  uint64_t bytes = 0;
  size_t count = 0;
  bool inside = must_not_wait, begun = true;
  must_not_wait = true;
  for (; record; record = count < PTN_PIECE_PARTS ? next_ahead(stash, bytes) : NULL) {
    bytes += record->block.bytes;
    begun = begin_read(stash, record, false) == PTN_OK; /* else it may be gone */
    if (!begun) break;
    ios[count++] = &record->io;
  }
  must_not_wait = inside;
  if (count == 0) return false;
  ptn_unlock(&stash->mutex);
  ptn_store_submit_all(stash->store, ios, count); /* the records may be gone after this */
  ptn_lock(&stash->mutex);
  return begun;
}

void ptn_stash_advance(ptn_stash *stash) {
  stash->advance_again = true;
  if (stash->advancing) return;
  stash->advancing = true;
  while (stash->advance_again) {
    stash->advance_again = false;
    while (read_some(stash)) {
    }
  }
  stash->advancing = false;
  if (stash->closed) ptn_broadcast(&stash->changed);
}

/* ---- pressure ---- */

/* What was read ahead and is needed last goes first; it is read again in its turn. */
static bool give_up_ahead(ptn_stash *stash, bool must) {
  for (pass *pass = stash->passes; pass; pass = pass->next) {
    for (ptn_record *record = pass->first; record; record = record->after) {
      if (record->state != RECORD_IN_BOTH || (record->asked && !must)) continue;
      ptn_record_let_go(record);
      record->state = RECORD_ON_DISK;
      pass->ahead = record;
      return true;
    }
  }
  return false;
}

/* What the rule kept back goes after all, the first that was put first. */
static bool send_kept(ptn_stash *stash) {
  for (pass *pass = stash->passes; pass; pass = pass->next) {
    for (ptn_record *record = pass->first; record; record = record->after) {
      if (record->state != RECORD_IN_MEMORY || record->asked || record->extent.bytes == 0) continue;
      ptn_stash_enqueue(stash, record);
      pass->forced_bytes += record->block.bytes;
      return true;
    }
  }
  return false;
}

/* Waits until something that was under way has ended. */
static void wait_for_one(ptn_stash *stash) {
  uint64_t ended_count = stash->ended_count;
  while (stash->ended_count == ended_count && stash->writes.in_flight_count + stash->reads_moving_count > 0)
    ptn_stash_wait(stash, PTN_TRACE_MEMORY, -1);
}

static bool writes_left(const ptn_stash *stash) { return stash->queue_first || stash->writes.in_flight_count > 0; }

void ptn_stash_flush(ptn_stash *stash) {
  ptn_lock(&stash->mutex);
  while (!stash->closed && writes_left(stash)) {
    ptn_stash_write(stash, true);
    wait_for_one(stash);
    ptn_unlock(&stash->mutex); /* who else begins writes goes on */
    ptn_lock(&stash->mutex);
  }
  ptn_unlock(&stash->mutex);
}

ptn_status ptn_stash_tell_failure(ptn_stash *stash) {
  if (must_not_wait) return PTN_OK; /* who asks is not who made the request */
  ptn_lock(&stash->mutex);
  bool in_the_way = !stash->closed && stash->stats.memory_bytes > 0; /* else what failed is gone, and nobody is short of it */
  ptn_status status = in_the_way ? ptn_stash_report_failure(stash) : PTN_OK;
  ptn_unlock(&stash->mutex);
  return status;
}

bool ptn_stash_relieve(ptn_stash *stash, bool must) {
  if (must_not_wait) return false;
  bool something = true;
  ptn_lock(&stash->mutex);
  stash->hold_back |= must && stash->turned;
  if (stash->closed) {
    something = false;
  } else if (writes_left(stash)) {
    ptn_stash_write(stash, true);
    wait_for_one(stash);
  } else if ((!must && stash->turned) || (!give_up_ahead(stash, must) && !send_kept(stash))) {
    something = must && stash->reads_moving_count > 0;
    if (something) wait_for_one(stash); /* then it can be given up */
  }
  ptn_unlock(&stash->mutex);
  return something;
}
