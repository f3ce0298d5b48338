/* The store: see store.h for what it promises.
 *
 * Problem: hundreds of transfers are ordered ahead of the computation that needs them; the one that it needs next must not
 * wait behind gigabytes of others, the disk must always have enough to do, and a failure of any one of thousands of system
 * calls, or a byte that is not what it was, has to become one clear error of the requests it belongs to.
 *
 * Design: two FIFO queues, urgent and rest. A request is cut into pieces only when there is room in flight, so an urgent one
 * waits for a few pieces at most, never for whole requests, and what waited together can go together: a piece is a part of one
 * request, or several whole ones. The engine below makes single attempts; what a short transfer, EINTR or EAGAIN means is decided
 * here, in advance(). After the first failed piece of a request no more of it is started, and done is called when the last of its
 * pieces is back. A piece that has moved as a whole is summed or checked on the thread that brought its end, with others still in
 * flight.
 *
 * Invariants: a request is in a queue exactly while own.next_bytes < bytes; done is called by whoever brings
 * own.in_flight_count to 0 once it is in no queue; a piece is either in flight or in the list of free pieces. The queue lock
 * is never held across I/O, a start of the engine or a call of done. The space lock is held while the file is resized, and
 * only those who reserve, release or trim take it.
 */
#define _GNU_SOURCE
#include "disk/store.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/openmp.h"
#include "base/threads.h"
#include "disk/engine.h"
#include "disk/file.h"
#include "disk/page_sums.h"
#include "disk/space.h"

/* Measured: docs/decisions/0001-disk-engine.md. */
#define PIECE_BYTES (4 * PTN_MIB)
#define DEPTH 4u
#define WAITING_THREADS 4u /* beside a ring, for the pieces that it cannot start without waiting */
#define GROWTH_BYTES (64 * PTN_MIB)
#define IDLE_ATTEMPTS_LIMIT 50u /* a millisecond apart */
#define LARGEST_BYTES ((uint64_t)1 << 62)

typedef struct io_queue {
  ptn_io *first, *last;
} io_queue;

/* Reads, or writes: their bytes, and the time with at least one in flight. */
typedef struct flow {
  uint64_t bytes, busy_ns;
  uint32_t in_flight_count;
  int64_t since_ns;
} flow;

struct ptn_store {
  ptn_file file;
  ptn_io_engine *engine;
  pid_t process;
  uint64_t piece_bytes;
  uint32_t parts_count; /* of a piece at most */

  ptn_mutex mutex; /* of the following */
  ptn_condition idle;
  io_queue urgent, rest;
  ptn_piece *free_pieces;
  uint64_t outstanding_count; /* requests submitted whose done has not returned */
  flow reads, writes;

  _Atomic uint64_t unwritten_bytes;
  _Atomic int64_t checksum_ns;
  _Atomic uint32_t short_sums_count;
  ptn_page_sums sums; /* a page's belongs to the piece in flight there; grows under the space mutex */
  ptn_mutex space_mutex; /* of the space and the file's size */
  ptn_space space;
  _Atomic uint64_t file_bytes; /* as submit sees it */

  ptn_piece pieces[];
};

/* ---- queues (under the lock) ---- */

static void append(io_queue *queue, ptn_io *io) {
  io->own.next = NULL;
  if (queue->first) queue->last->own.next = io;
  else queue->first = io;
  queue->last = io;
}

static void remove_from(io_queue *queue, ptn_io *io) {
  ptn_io *before = NULL;
  for (ptn_io *at = queue->first; at != io; at = at->own.next) before = at;
  if (before) before->own.next = io->own.next;
  else queue->first = io->own.next;
  if (queue->last == io) queue->last = before;
}

static io_queue *queue_of(ptn_store *store, const ptn_io *io) { return io->urgent ? &store->urgent : &store->rest; }
static flow *flow_of(ptn_store *store, const ptn_io *io) { return io->write ? &store->writes : &store->reads; }

static void flow_in(flow *flow, int64_t now_ns) {
  if (flow->in_flight_count++ == 0) flow->since_ns = now_ns;
}

static void flow_out(flow *flow, int64_t now_ns) {
  if (--flow->in_flight_count == 0) flow->busy_ns += (uint64_t)(now_ns - flow->since_ns);
}

static uint64_t flow_busy_ns(const flow *flow, int64_t now_ns) {
  return flow->busy_ns + (flow->in_flight_count > 0 ? (uint64_t)(now_ns - flow->since_ns) : 0);
}

/* Whether io lies beside a piece, at its end or, where it is taken backwards, at its begin. */
static bool lies_beside(const ptn_piece *piece, const ptn_io *io, bool *backwards) {
  bool behind = io->offset == piece->offset + piece->bytes, before = io->offset + io->bytes == piece->offset;
  if (piece->parts_count == 1) *backwards = before;
  return *backwards ? before : behind;
}

static void take(io_queue *queue, ptn_piece *piece, ptn_io *io, uint64_t bytes, int64_t now_ns) {
  uint64_t at = io->own.next_bytes;
  piece->own.parts[piece->parts_count++] = (struct iovec){.iov_base = (char *)io->memory + at, .iov_len = (size_t)bytes};
  piece->offset = piece->bytes > 0 ? ptn_min_u64(piece->offset, io->offset) : io->offset + at;
  piece->bytes += bytes;
  if (at == 0) io->start_ns = now_ns;
  io->own.next_bytes += bytes;
  io->own.in_flight_count++;
  if (io->own.next_bytes == io->bytes) remove_from(queue, io);
}

static void turn_round(struct iovec *parts, uint32_t count) {
  for (uint32_t i = 0; i < count / 2; i++) {
    struct iovec part = parts[i];
    parts[i] = parts[count - 1 - i];
    parts[count - 1 - i] = part;
  }
}

/* Cuts the next piece: of the first request as much as fits, and where that was all of it, those behind it that lie beside it. */
static void cut(ptn_store *store, io_queue *queue, ptn_piece *piece, int64_t now_ns) {
  ptn_io *io = queue->first, *last = io;
  bool whole = io->own.next_bytes == 0, backwards = false;
  piece->parts = piece->own.parts;
  piece->parts_count = 0;
  piece->bytes = 0;
  piece->write = io->write;
  piece->own.io = io;
  piece->own.idle_attempts_count = 0;
  take(queue, piece, io, ptn_min_u64(store->piece_bytes, io->bytes - io->own.next_bytes), now_ns);
  while (whole && queue->first && queue->first != last && piece->parts_count < store->parts_count) {
    ptn_io *next = queue->first;
    if (next->write != io->write || next->done != io->done) break; /* whose fail together are of one kind */
    if (next->bytes > store->piece_bytes - piece->bytes) break;
    if (!lies_beside(piece, next, &backwards)) break;
    last->own.beside = next;
    last = next;
    take(queue, piece, next, next->bytes, now_ns);
  }
  if (backwards) turn_round(piece->own.parts, piece->parts_count);
  piece->own.offset = piece->offset;
  piece->own.bytes = piece->bytes;
  flow_in(flow_of(store, io), now_ns);
}

/* As many pieces as there is room for in flight, in the order of their start. */
static ptn_piece *cut_all(ptn_store *store) {
  ptn_piece *first = NULL, **end = &first;
  int64_t now_ns = ptn_now_ns();
  while (store->free_pieces && (store->urgent.first || store->rest.first)) {
    ptn_piece *piece = store->free_pieces;
    store->free_pieces = piece->next;
    cut(store, store->urgent.first ? &store->urgent : &store->rest, piece, now_ns);
    piece->next = NULL;
    *end = piece;
    end = &piece->next;
  }
  return first;
}

static void start_all(ptn_store *store, ptn_piece *first) {
  while (first) {
    ptn_piece *piece = first;
    first = piece->next; /* the engine's from here on */
    store->engine->kind->start(store->engine, piece);
  }
}

/* ---- the end of a piece, on a thread of the engine ---- */

static void end_io(ptn_store *store, ptn_io *io) {
  io->done(io); /* the caller's again: it may be gone after this */
  ptn_lock(&store->mutex);
  if (--store->outstanding_count == 0) ptn_broadcast(&store->idle);
  ptn_unlock(&store->mutex);
}

static ptn_status fail_page(const ptn_store *store, uint64_t bad_offset) {
  const char *folder = store->file.folder;
  ptn_status status = ptn_fail_disk(EBADMSG, folder, PTN_PAGE_BYTES, "read");
  ptn_error *error = ptn_last_error();
  snprintf(error->message, sizeof error->message,
           "what was read from the disk is not what was written: %zu bytes at %" PRIu64
           " of the file in %s have another checksum; the disk or its memory is faulty",
           PTN_PAGE_BYTES, bad_offset, folder);
  return status;
}

/* Under the lock. A request has its first failure; no more of it is started. sys_errno 0: a page is not what was written. */
static void fail_io(ptn_store *store, ptn_io *io, const ptn_piece *piece, int sys_errno) {
  if (io->status != PTN_OK) return;
  if (sys_errno == 0) io->status = fail_page(store, io->own.bad_offset);
  else io->status = ptn_fail_disk(sys_errno, store->file.folder, piece->bytes, io->write ? "write" : "read");
  ptn_error_save(&io->error);
  if (io->own.next_bytes < io->bytes) remove_from(queue_of(store, io), io);
  io->own.next_bytes = io->bytes;
}

/* sys_errno: of the system, for all that have bytes in it; a request whose page is not what was written fails of itself. */
static void piece_ended(ptn_piece *piece, int sys_errno) {
  ptn_store *store = piece->own.store;
  ptn_io *ended = NULL, **end = &ended;
  ptn_lock(&store->mutex);
  int64_t now_ns = ptn_now_ns();
  flow_out(flow_of(store, piece->own.io), now_ns);
  for (ptn_io *io = piece->own.io; io; io = io->own.beside) {
    if (sys_errno != 0 || io->own.bad_offset != PTN_PAGE_SUMS_ALL_GOOD) fail_io(store, io, piece, sys_errno);
    if (--io->own.in_flight_count > 0 || io->own.next_bytes < io->bytes) continue;
    io->end_ns = now_ns;
    *end = io;
    end = &io->own.beside;
  }
  piece->next = store->free_pieces;
  store->free_pieces = piece;
  ptn_piece *more = cut_all(store);
  ptn_unlock(&store->mutex);
  start_all(store, more);
  while (ended) {
    ptn_io *io = ended;
    ended = io->own.beside;
    end_io(store, io);
  }
}

static void count_bytes(ptn_store *store, const ptn_piece *piece, int64_t bytes) {
  ptn_lock(&store->mutex);
  flow_of(store, piece->own.io)->bytes += (uint64_t)bytes;
  ptn_unlock(&store->mutex);
}

static void nap(void) { nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); }

/* Notes the sums of what is written, or compares those of what was read: the first page that differs, as ptn_page_sums_check. */
static uint64_t sum_here(ptn_store *store, char *memory, uint64_t offset, uint64_t bytes, bool note) {
  uint64_t unwritten_bytes = 0, bad_offset = PTN_PAGE_SUMS_ALL_GOOD;
  if (note) ptn_page_sums_note(&store->sums, memory, offset, bytes);
  else bad_offset = ptn_page_sums_check(&store->sums, memory, offset, bytes, &unwritten_bytes);
  if (unwritten_bytes > 0) atomic_fetch_add(&store->unwritten_bytes, unwritten_bytes);
  return bad_offset;
}

/* Of one request, what it has in a piece that was moved up to `end` of the file: its sums are kept, or compared. */
static void sum(ptn_store *store, const ptn_piece *piece, ptn_io *io, uint64_t end) {
  uint64_t begin = ptn_max_u64(io->offset, piece->own.offset);
  end = ptn_min_u64(io->offset + io->bytes, end);
  if (begin >= end) return;
  uint64_t bytes = end - begin;
  int64_t begin_ns = ptn_thread_processor_ns();
  uint64_t bad_offset = sum_here(store, (char *)io->memory + (begin - io->offset), begin, bytes, piece->write);
  atomic_fetch_add(&store->checksum_ns, ptn_thread_processor_ns() - begin_ns);
  if (bad_offset == PTN_PAGE_SUMS_ALL_GOOD) return;
  ptn_lock(&store->mutex);
  io->own.bad_offset = ptn_min_u64(io->own.bad_offset, bad_offset);
  ptn_unlock(&store->mutex);
}

static void sum_until(ptn_piece *piece, uint64_t end) {
  for (ptn_io *io = piece->own.io; io; io = io->own.beside)
    if (!io->caller_sums) sum(piece->own.store, piece, io, end);
}

static void piece_moved(ptn_piece *piece) {
  sum_until(piece, piece->own.offset + piece->own.bytes);
  piece_ended(piece, 0);
}

/* What was written of it before it failed is there, and has its sums: read, it is no page that the disk has changed. */
static void piece_failed(ptn_piece *piece, int sys_errno) {
  if (piece->write) sum_until(piece, piece->offset);
  piece_ended(piece, sys_errno);
}

static void drop_front(ptn_piece *piece, uint64_t bytes) {
  piece->offset += bytes;
  piece->bytes -= bytes;
  while (bytes > 0) {
    struct iovec *part = piece->parts;
    size_t gone = (size_t)ptn_min_u64(part->iov_len, bytes);
    part->iov_base = (char *)part->iov_base + gone;
    part->iov_len -= gone;
    bytes -= gone;
    if (part->iov_len > 0) return;
    piece->parts++;
    piece->parts_count--;
  }
}

/* What an attempt has come to: the rest is attempted again, or the piece ends. Direct I/O goes on at a page boundary, so a
 * part of a page is moved again. */
static void advance(ptn_piece *piece, int64_t result) {
  ptn_store *store = piece->own.store;
  uint64_t moved_bytes = 0;
  int sys_errno = 0;
  if (result > 0) {
    count_bytes(store, piece, result);
    moved_bytes = (uint64_t)result / PTN_PAGE_BYTES * PTN_PAGE_BYTES;
    if ((uint64_t)result > piece->bytes) sys_errno = EIO; /* more than was asked: no engine may */
  } else if (result == 0) {
    sys_errno = piece->write ? ENOSPC : ENODATA; /* the file ends here, though its space is reserved */
  } else if (result != -EINTR && result != -EAGAIN) {
    sys_errno = (int)-result;
  }
  if (sys_errno != 0) {
    piece_failed(piece, sys_errno);
    return;
  }
  if (moved_bytes == piece->bytes) {
    piece_moved(piece);
    return;
  }
  drop_front(piece, moved_bytes);
  piece->own.idle_attempts_count = moved_bytes > 0 ? 0 : piece->own.idle_attempts_count + 1;
  if (piece->own.idle_attempts_count > IDLE_ATTEMPTS_LIMIT) {
    piece_failed(piece, result < 0 ? (int)-result : EIO);
    return;
  }
  if (piece->own.idle_attempts_count > 2) nap();
  store->engine->kind->start(store->engine, piece);
}

/* ---- requests ---- */

static ptn_status check_io(const ptn_store *store, bool forked, const ptn_io *io) {
  if (forked)
    return ptn_fail(PTN_INVALID,
                    "a disk store was used in a forked child; it belongs to the process that made it, make another one there");
  uint64_t file_bytes = atomic_load_explicit(&store->file_bytes, memory_order_acquire);
  if ((uintptr_t)io->memory % PTN_PAGE_BYTES || io->offset % PTN_PAGE_BYTES || io->bytes % PTN_PAGE_BYTES)
    return ptn_fail(PTN_INVALID,
                    "a disk request of %" PRIu64 " bytes at %" PRIu64 " with memory at %p: all three must be multiples of %zu",
                    io->bytes, io->offset, io->memory, PTN_PAGE_BYTES);
  if (io->offset > file_bytes || io->bytes > file_bytes - io->offset)
    return ptn_fail(PTN_INVALID,
                    "a disk request of %" PRIu64 " bytes at %" PRIu64 " lies outside of the %" PRIu64
                    " bytes reserved; reserve first",
                    io->bytes, io->offset, file_bytes);
  return PTN_OK;
}

/* A request that is wrong, or has nothing to move, has ended. */
static bool begin_io(const ptn_store *store, bool forked, ptn_io *io) {
  memset(&io->own, 0, sizeof io->own);
  io->own.bad_offset = PTN_PAGE_SUMS_ALL_GOOD;
  io->status = check_io(store, forked, io);
  if (io->status != PTN_OK) ptn_error_save(&io->error);
  if (io->status == PTN_OK && io->bytes > 0) return true;
  io->start_ns = io->end_ns = ptn_now_ns();
  io->done(io);
  return false;
}

void ptn_store_submit_all(ptn_store *store, ptn_io *const *ios, size_t count) {
  io_queue waiting = {0};
  bool forked = getpid() != store->process;
  for (size_t i = 0; i < count; i++)
    if (begin_io(store, forked, ios[i])) append(&waiting, ios[i]);
  if (!waiting.first) return;
  ptn_lock(&store->mutex);
  for (ptn_io *io = waiting.first, *next; io; io = next) {
    next = io->own.next;
    store->outstanding_count++;
    append(queue_of(store, io), io);
  }
  ptn_piece *pieces = cut_all(store);
  ptn_unlock(&store->mutex);
  start_all(store, pieces);
}

void ptn_store_submit(ptn_store *store, ptn_io *io) { ptn_store_submit_all(store, &io, 1); }

typedef struct waiter {
  ptn_mutex mutex;
  ptn_condition condition;
  bool done;
} waiter;

static void wake_waiter(ptn_io *io) {
  waiter *waiter = io->context;
  ptn_lock(&waiter->mutex);
  waiter->done = true;
  ptn_signal(&waiter->condition);
  ptn_unlock(&waiter->mutex);
}

ptn_status ptn_store_transfer(ptn_store *store, void *memory, uint64_t offset, uint64_t bytes, bool write) {
  waiter waiter = {0};
  ptn_io io = {.memory = memory,
               .offset = offset,
               .bytes = bytes,
               .write = write,
               .urgent = true,
               .done = wake_waiter,
               .context = &waiter};
  ptn_mutex_create(&waiter.mutex);
  ptn_condition_create(&waiter.condition);
  ptn_store_submit(store, &io);
  ptn_lock(&waiter.mutex);
  while (!waiter.done) ptn_wait(&waiter.condition, &waiter.mutex);
  ptn_unlock(&waiter.mutex);
  ptn_condition_destroy(&waiter.condition);
  ptn_mutex_destroy(&waiter.mutex);
  return io.status == PTN_OK ? PTN_OK : ptn_error_restore(&io.error);
}

/* ---- sums of the caller ---- */

#define CALLER_PAGES 32 /* for one thread at least */
#define TIMED_PART 8    /* a sum of fewer pages than two threads take up is timed once in so many, for all of them */

typedef struct caller_sums {
  ptn_store *store;
  char *memory;
  uint64_t offset;
  bool note;
  _Atomic uint64_t bad_offset; /* the least of those that differ */
} caller_sums;

static void sum_range(void *context, size_t begin, size_t end) {
  caller_sums *sums = context;
  uint64_t skipped = begin * PTN_PAGE_BYTES;
  int64_t begin_ns = ptn_now_ns();
  uint64_t bad_offset =
      sum_here(sums->store, sums->memory + skipped, sums->offset + skipped, (end - begin) * PTN_PAGE_BYTES, sums->note);
  atomic_fetch_add(&sums->store->checksum_ns, ptn_now_ns() - begin_ns);
  uint64_t least = atomic_load(&sums->bad_offset);
  while (bad_offset < least && !atomic_compare_exchange_weak(&sums->bad_offset, &least, bad_offset)) {
  }
}

/* By the caller alone: too little for two. */
static uint64_t sum_short(ptn_store *store, void *memory, uint64_t offset, uint64_t bytes, bool note) {
  if (atomic_fetch_add_explicit(&store->short_sums_count, 1, memory_order_relaxed) % TIMED_PART)
    return sum_here(store, memory, offset, bytes, note);
  int64_t begin_ns = ptn_now_ns();
  uint64_t bad_offset = sum_here(store, memory, offset, bytes, note);
  atomic_fetch_add(&store->checksum_ns, TIMED_PART * (ptn_now_ns() - begin_ns));
  return bad_offset;
}

static uint64_t sum_all(ptn_store *store, bool shared, void *memory, uint64_t offset, uint64_t bytes, bool note) {
  if (!shared) return sum_here(store, memory, offset, bytes, note);
  if (bytes < 2 * CALLER_PAGES * PTN_PAGE_BYTES) return sum_short(store, memory, offset, bytes, note);
  caller_sums sums = {.store = store, .memory = memory, .offset = offset, .note = note};
  atomic_store(&sums.bad_offset, PTN_PAGE_SUMS_ALL_GOOD);
  ptn_openmp_run((size_t)(bytes / PTN_PAGE_BYTES), CALLER_PAGES, sum_range, &sums);
  return atomic_load(&sums.bad_offset);
}

void ptn_store_note(ptn_store *store, bool shared, const void *memory, uint64_t offset, uint64_t bytes) {
  sum_all(store, shared, (void *)(uintptr_t)memory, offset, bytes, true);
}

ptn_status ptn_store_check(ptn_store *store, bool shared, void *memory, uint64_t offset, uint64_t bytes) {
  uint64_t bad_offset = sum_all(store, shared, memory, offset, bytes, false);
  return bad_offset == PTN_PAGE_SUMS_ALL_GOOD ? PTN_OK : fail_page(store, bad_offset);
}

/* ---- space ---- */

/* Follows a change of the file's size in everyone who has to know. The sums reach as far already. */
static void set_end(ptn_store *store) {
  ptn_space_set_end(&store->space, store->file.bytes);
  atomic_store_explicit(&store->file_bytes, store->file.bytes, memory_order_release);
  ptn_page_sums_shrink(&store->sums, store->file.bytes);
}

/* Makes the file long enough for bytes at its end: in a large step, or with what there is. */
static ptn_status grow(ptn_store *store, uint64_t bytes) {
  uint64_t need_bytes = ptn_space_used_end(&store->space) + bytes;
  ptn_status status = ptn_file_resize(&store->file, ptn_round_up(need_bytes, GROWTH_BYTES));
  if (status != PTN_OK) status = ptn_file_resize(&store->file, need_bytes);
  if (status != PTN_OK) return status;
  status = ptn_page_sums_reach(&store->sums, store->file.bytes);
  if (status == PTN_OK) {
    set_end(store);
    return PTN_OK;
  }
  ptn_error error;
  ptn_error_save(&error);
  ptn_file_resize(&store->file, store->space.end_bytes); /* or as long as the disk leaves it: the next growth begins there */
  return ptn_error_restore(&error);
}

ptn_status ptn_store_reserve(ptn_store *store, uint64_t bytes, ptn_extent *out) {
  *out = (ptn_extent){0};
  if (bytes == 0) return PTN_OK;
  if (bytes > LARGEST_BYTES) {
    ptn_fail_disk(EFBIG, store->file.folder, bytes, "reserve");
    return PTN_DISK;
  }
  bytes = ptn_round_up(bytes, PTN_PAGE_BYTES);
  ptn_lock(&store->space_mutex);
  ptn_status status = ptn_space_take(&store->space, bytes, out);
  if (status == PTN_OK && out->bytes == 0) {
    status = grow(store, bytes);
    if (status == PTN_OK) status = ptn_space_take(&store->space, bytes, out);
  }
  ptn_unlock(&store->space_mutex);
  if (status == PTN_OK) ptn_page_sums_forget(&store->sums, out->offset, out->bytes); /* nobody else's by now */
  return status;
}

/* Unlocks. */
static void give(ptn_store *store, ptn_extent *extent) {
  ptn_space_give(&store->space, *extent);
  ptn_unlock(&store->space_mutex);
  *extent = (ptn_extent){0};
}

void ptn_store_release(ptn_store *store, ptn_extent *extent) {
  if (extent->bytes == 0) return;
  ptn_lock(&store->space_mutex);
  give(store, extent);
}

bool ptn_store_release_at_once(ptn_store *store, ptn_extent *extent) {
  if (extent->bytes == 0) return true;
  bool mine = ptn_try_lock(&store->space_mutex);
  if (mine) give(store, extent);
  return mine;
}

void ptn_store_forget(ptn_store *store, ptn_extent extent) { ptn_page_sums_forget(&store->sums, extent.offset, extent.bytes); }

void ptn_store_trim(ptn_store *store, uint64_t spare_bytes) {
  ptn_lock(&store->space_mutex);
  uint64_t used_bytes = ptn_space_used_end(&store->space);
  if (spare_bytes < store->file.bytes - used_bytes) {
    uint64_t end_bytes = ptn_round_up(used_bytes + spare_bytes, GROWTH_BYTES);
    /* A file that grew where there was no memory for its sums, and could not be made short again, is longer than they reach. */
    end_bytes = ptn_min_u64(end_bytes, store->space.end_bytes);
    /* Space that cannot be given back to the disk stays the store's, to be used again. */
    if (end_bytes < store->file.bytes && ptn_file_resize(&store->file, end_bytes) == PTN_OK) set_end(store);
  }
  ptn_unlock(&store->space_mutex);
}

/* ---- the whole ---- */

/* PTN_DISK_AUTO is the threads: as fast and as light as the ring at the sizes of training, on every kernel and in every
 * container (docs/decisions/0001-disk-engine.md). So there is nothing to fall back to, and who asks for the ring and cannot
 * have it gets the reason as an error. */
static ptn_status create_engine(ptn_store *store, ptn_disk_engine which, uint32_t depth) {
  if (which == PTN_DISK_URING) return ptn_io_engine_create_uring(&store->engine, store->file.fd, depth, WAITING_THREADS);
  return ptn_io_engine_create_threads(&store->engine, store->file.fd, depth);
}

static ptn_status fill(ptn_store *store, const char *folder, const ptn_store_options *options, uint32_t depth) {
  PTN_TRY(ptn_file_open(&store->file, folder, false));
  PTN_TRY(create_engine(store, options->engine, depth));
  if (options->wrap) store->engine = options->wrap(store->engine, options->context);
  return PTN_OK;
}

static _Atomic uint32_t usual_parts_count = PTN_PIECE_PARTS;

void ptn_store_set_parts(uint32_t parts_count) { atomic_store(&usual_parts_count, parts_count ? parts_count : PTN_PIECE_PARTS); }

ptn_status ptn_store_create_with(ptn_store **out, const char *folder, const ptn_store_options *options) {
  *out = NULL;
  uint32_t depth = options->depth ? options->depth : DEPTH;
  ptn_store *store = calloc(1, sizeof *store + depth * sizeof store->pieces[0]);
  if (!store) return ptn_fail(PTN_MEMORY, "no memory for a disk store");
  store->file.fd = -1;
  store->process = getpid();
  store->piece_bytes = options->piece_bytes ? options->piece_bytes : PIECE_BYTES;
  uint32_t parts_count = options->parts_count ? options->parts_count : atomic_load(&usual_parts_count);
  store->parts_count = parts_count < PTN_PIECE_PARTS ? parts_count : PTN_PIECE_PARTS;
  ptn_mutex_create(&store->mutex);
  ptn_condition_create(&store->idle);
  ptn_mutex_create(&store->space_mutex);
  ptn_space_create(&store->space);
  ptn_page_sums_create(&store->sums);
  for (uint32_t i = depth; i-- > 0;) {
    store->pieces[i] = (ptn_piece){.finish = advance, .next = store->free_pieces, .own = {.store = store}};
    store->free_pieces = &store->pieces[i];
  }
  ptn_status status = fill(store, folder, options, depth);
  if (status != PTN_OK) ptn_store_destroy(store);
  else *out = store;
  return status;
}

ptn_status ptn_store_create(ptn_store **out, const char *folder, ptn_disk_engine engine) {
  return ptn_store_create_with(out, folder, &(ptn_store_options){.engine = engine});
}

void ptn_store_destroy(ptn_store *store) {
  if (!store) return;
  if (store->process != getpid()) return; /* its threads are the parent's, and its locks may be held for ever */
  ptn_lock(&store->mutex);
  while (store->outstanding_count > 0) ptn_wait(&store->idle, &store->mutex);
  ptn_unlock(&store->mutex);
  if (store->engine) store->engine->kind->destroy(store->engine);
  ptn_file_close(&store->file);
  ptn_space_destroy(&store->space);
  ptn_page_sums_destroy(&store->sums);
  ptn_mutex_destroy(&store->space_mutex);
  ptn_condition_destroy(&store->idle);
  ptn_mutex_destroy(&store->mutex);
  free(store);
}

const char *ptn_store_folder(const ptn_store *store) { return store->file.folder; }
uint64_t ptn_store_gathered_bytes(const ptn_store *store) { return store->parts_count > 1 ? store->piece_bytes : 0; }
const char *ptn_store_engine_name(const ptn_store *store) { return store->engine->kind->name; }

void ptn_store_get_stats(ptn_store *store, ptn_store_stats *out) {
  ptn_lock(&store->mutex);
  int64_t now_ns = ptn_now_ns();
  *out = (ptn_store_stats){.read_bytes = store->reads.bytes,
                           .write_bytes = store->writes.bytes,
                           .read_ns = flow_busy_ns(&store->reads, now_ns),
                           .write_ns = flow_busy_ns(&store->writes, now_ns),
                           .unwritten_bytes = store->unwritten_bytes,
                           .checksum_ns = store->checksum_ns};
  ptn_unlock(&store->mutex);
  out->reserved_bytes = atomic_load_explicit(&store->file_bytes, memory_order_acquire);
}
