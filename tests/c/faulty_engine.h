/* An engine around another one that does to chosen attempts what a disk does on a bad day: an errno, a short transfer, nothing at
 * all, wrong bytes, a write that is lost or torn, bytes of elsewhere, a delay. Attempts are numbered from 1 in the order they
 * are started, all of them or those of one direction. It can also hold every attempt back until told otherwise, let the held ones
 * go one by one in random order, and it remembers the order of starts. */
#ifndef PTN_TESTS_FAULTY_ENGINE_H
#define PTN_TESTS_FAULTY_ENGINE_H

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "base/bytes.h"
#include "base/threads.h"
#include "check.h"
#include "disk/engine.h"
#include "parts.h"

#define FAULTY_LOG 4096

typedef enum fault {
  FAULT_NONE = 0,
  FAULT_ERRNO,
  FAULT_SHORT, /* half, to a whole page */
  FAULT_HALF, /* the first of them as short, those behind it with an errno */
  FAULT_SHORT_ODD, /* half and 512 bytes more */
  FAULT_TINY, /* 512 bytes: no whole page */
  FAULT_ZERO, /* nothing, without an errno */
  FAULT_EXCESS, /* more than was asked */
  FAULT_WRONG_BYTE, /* a read brings one wrong bit */
  FAULT_LATE,
  FAULT_LOST, /* a write that ends well and was never made */
  FAULT_TORN, /* a write that ends well and was made for the first half of its pages */
  FAULT_ELSEWHERE, /* a transfer of the bytes beside those that were asked for */
} fault;

typedef enum faulty_direction { FAULTY_BOTH = 0, FAULTY_READS, FAULTY_WRITES } faulty_direction;

typedef struct faulty_entry {
  uint64_t offset, bytes;
  const void *memory; /* of the first part */
  uint32_t parts_count;
  bool write;
} faulty_entry;

typedef struct faulty_engine {
  ptn_io_engine base;
  ptn_io_engine *inner;
  ptn_mutex mutex;
  fault fault;
  int sys_errno;
  faulty_direction direction;
  uint64_t first, last; /* attempts that go wrong: from first to last */
  uint64_t count; /* attempts started */
  uint64_t read_count, write_count; /* of them */
  uint64_t in_flight_count, most_in_flight_count;
  bool closed; /* holds attempts back */
  struct faulty_attempt *held;
  uint64_t held_count;
  uint64_t log_offsets[FAULTY_LOG];
  faulty_entry log[FAULTY_LOG];
} faulty_engine;

typedef struct faulty_attempt {
  ptn_piece inner; /* first member */
  struct iovec parts[PTN_PIECE_PARTS];
  ptn_piece *outer;
  faulty_engine *engine;
  fault fault;
  int sys_errno;
  void *scratch;
  struct faulty_attempt *next;
} faulty_attempt;

static inline void faulty_cut(ptn_piece *piece, uint64_t bytes) {
  piece->bytes = bytes;
  for (piece->parts_count = 0; bytes > 0; piece->parts_count++) {
    struct iovec *part = &piece->parts[piece->parts_count];
    part->iov_len = (size_t)ptn_min_u64(part->iov_len, bytes);
    bytes -= part->iov_len;
  }
}

static inline int64_t faulty_result(const faulty_attempt *attempt, int64_t result) {
  int64_t bytes = (int64_t)attempt->outer->bytes, page = (int64_t)PTN_PAGE_BYTES;
  switch (attempt->fault) {
    case FAULT_ERRNO: return -attempt->sys_errno;
    case FAULT_HALF:
    case FAULT_SHORT: return bytes > page ? bytes / 2 / page * page : result;
    case FAULT_SHORT_ODD: return bytes > page ? bytes / 2 / page * page + 512 : 512;
    case FAULT_TINY: return 512;
    case FAULT_ZERO: return 0;
    case FAULT_EXCESS: return bytes + page;
    case FAULT_WRONG_BYTE:
      if (!attempt->outer->write) *parts_byte(attempt->outer->parts, (size_t)bytes / 3) ^= 4;
      return result;
    case FAULT_LATE: nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL); return result;
    case FAULT_LOST:
    case FAULT_TORN: return attempt->outer->write && result > 0 ? bytes : result;
    case FAULT_ELSEWHERE:
    case FAULT_NONE: break;
  }
  return result;
}

/* What the engine below is asked for in place of what was asked. */
static inline void faulty_divert(faulty_attempt *attempt) {
  ptn_piece *piece = &attempt->inner;
  uint64_t half_bytes = piece->bytes / 2 / PTN_PAGE_BYTES * PTN_PAGE_BYTES;
  bool torn = attempt->fault == FAULT_TORN && piece->write;
  if (torn && half_bytes > 0) faulty_cut(piece, half_bytes);
  else if (torn || (attempt->fault == FAULT_LOST && piece->write)) {
    piece->write = false; /* the memory that was to be written may be in use: it is not touched */
    attempt->scratch = aligned_alloc(PTN_PAGE_BYTES, (size_t)piece->bytes);
    CHECK(attempt->scratch);
    piece->parts[0] = (struct iovec){.iov_base = attempt->scratch, .iov_len = (size_t)piece->bytes};
    piece->parts_count = 1;
  } else if (attempt->fault == FAULT_ELSEWHERE) {
    piece->offset = piece->offset >= piece->bytes ? piece->offset - piece->bytes : piece->offset + piece->bytes;
  }
}

static inline void faulty_finish(ptn_piece *inner, int64_t result) {
  faulty_attempt *attempt = (faulty_attempt *)inner;
  ptn_piece *outer = attempt->outer;
  result = faulty_result(attempt, result);
  ptn_lock(&attempt->engine->mutex);
  attempt->engine->in_flight_count--;
  ptn_unlock(&attempt->engine->mutex);
  free(attempt->scratch);
  free(attempt);
  outer->finish(outer, result);
}

static inline void faulty_start(ptn_io_engine *base, ptn_piece *piece) {
  faulty_engine *engine = (faulty_engine *)base;
  faulty_attempt *attempt = calloc(1, sizeof *attempt);
  CHECK(attempt);
  attempt->inner = *piece;
  memcpy(attempt->parts, piece->parts, piece->parts_count * sizeof *piece->parts);
  attempt->inner.parts = attempt->parts;
  attempt->inner.finish = faulty_finish;
  attempt->outer = piece;
  attempt->engine = engine;
  ptn_lock(&engine->mutex);
  uint64_t number = ++engine->count;
  uint64_t same_count = piece->write ? ++engine->write_count : ++engine->read_count;
  if (number <= FAULTY_LOG) {
    engine->log_offsets[number - 1] = piece->offset;
    engine->log[number - 1] =
        (faulty_entry){piece->offset, piece->bytes, piece->parts[0].iov_base, piece->parts_count, piece->write};
  }
  if (engine->direction != FAULTY_BOTH) number = (engine->direction == FAULTY_WRITES) == piece->write ? same_count : 0;
  attempt->fault = number > 0 && number >= engine->first && number <= engine->last ? engine->fault : FAULT_NONE;
  if (attempt->fault == FAULT_HALF) attempt->fault = number == engine->first ? FAULT_SHORT : FAULT_ERRNO;
  attempt->sys_errno = engine->sys_errno;
  faulty_divert(attempt);
  if (++engine->in_flight_count > engine->most_in_flight_count) engine->most_in_flight_count = engine->in_flight_count;
  bool held = engine->closed;
  if (held) {
    attempt->next = engine->held;
    engine->held = attempt;
    engine->held_count++;
  }
  ptn_unlock(&engine->mutex);
  if (!held) engine->inner->kind->start(engine->inner, &attempt->inner);
}

static inline void faulty_open(faulty_engine *engine) {
  ptn_lock(&engine->mutex);
  engine->closed = false;
  faulty_attempt *held = engine->held;
  engine->held = NULL;
  engine->held_count = 0;
  ptn_unlock(&engine->mutex);
  while (held) {
    faulty_attempt *attempt = held;
    held = attempt->next;
    engine->inner->kind->start(engine->inner, &attempt->inner);
  }
}

static inline void faulty_close(faulty_engine *engine) {
  ptn_lock(&engine->mutex);
  engine->closed = true;
  ptn_unlock(&engine->mutex);
}

/* Lets one of the held attempts go, any of them; false where none is held. */
static inline bool faulty_let_one(faulty_engine *engine, uint64_t *seed) {
  ptn_lock(&engine->mutex);
  faulty_attempt **at = &engine->held, *attempt = NULL;
  if (engine->held_count > 0) {
    for (uint64_t i = check_random(seed) % engine->held_count; i > 0; i--) at = &(*at)->next;
    attempt = *at;
    *at = attempt->next;
    engine->held_count--;
  }
  ptn_unlock(&engine->mutex);
  if (attempt) engine->inner->kind->start(engine->inner, &attempt->inner);
  return attempt != NULL;
}

/* Attempts number first to last of those started from here on go wrong, counted in one direction; the counts start anew. */
static inline void faulty_tell_of(faulty_engine *engine, faulty_direction direction, fault fault, int sys_errno, uint64_t first,
                                  uint64_t last) {
  ptn_lock(&engine->mutex);
  engine->direction = direction;
  engine->fault = fault;
  engine->sys_errno = sys_errno;
  engine->first = first;
  engine->last = last;
  engine->count = engine->read_count = engine->write_count = engine->most_in_flight_count = 0;
  ptn_unlock(&engine->mutex);
}

static inline void faulty_tell(faulty_engine *engine, fault fault, int sys_errno, uint64_t first, uint64_t last) {
  faulty_tell_of(engine, FAULTY_BOTH, fault, sys_errno, first, last);
}

typedef struct faulty_counts {
  uint64_t reads, writes, in_flight, held;
} faulty_counts;

static inline faulty_counts faulty_look(faulty_engine *engine) {
  ptn_lock(&engine->mutex);
  faulty_counts counts = {engine->read_count, engine->write_count, engine->in_flight_count, engine->held_count};
  ptn_unlock(&engine->mutex);
  return counts;
}

/* Copies what was started since faulty_tell, in order; returns how many. */
static inline uint64_t faulty_copy_log(faulty_engine *engine, faulty_entry *out, uint64_t most_count) {
  ptn_lock(&engine->mutex);
  uint64_t count = ptn_min_u64(ptn_min_u64(engine->count, FAULTY_LOG), most_count);
  memcpy(out, engine->log, (size_t)count * sizeof *out);
  ptn_unlock(&engine->mutex);
  return count;
}

static inline uint64_t faulty_count(faulty_engine *engine) {
  ptn_lock(&engine->mutex);
  uint64_t count = engine->count;
  ptn_unlock(&engine->mutex);
  return count;
}

static inline void faulty_destroy(ptn_io_engine *base) {
  faulty_engine *engine = (faulty_engine *)base;
  CHECK(engine->in_flight_count == 0);
  engine->inner->kind->destroy(engine->inner);
  ptn_mutex_destroy(&engine->mutex);
}

static const ptn_io_engine_kind faulty_kind = {.name = "faulty", .start = faulty_start, .destroy = faulty_destroy};

/* A ptn_store_options.wrap; context is a faulty_engine of the caller, which outlives the store. */
static inline ptn_io_engine *faulty_wrap(ptn_io_engine *inner, void *context) {
  faulty_engine *engine = context;
  memset(engine, 0, sizeof *engine);
  engine->base.kind = &faulty_kind;
  engine->inner = inner;
  ptn_mutex_create(&engine->mutex);
  return &engine->base;
}

/* ---- a disk that takes its time and keeps no order ---- */

typedef struct faulty_shaker {
  faulty_engine *engine;
  uint64_t seed;
  long most_pause_ns;
  _Atomic bool stop;
  pthread_t thread;
} faulty_shaker;

static inline void *faulty_shake(void *argument) {
  faulty_shaker *shaker = argument;
  while (!atomic_load(&shaker->stop)) {
    long pause_ns = (long)(check_random(&shaker->seed) % (uint64_t)shaker->most_pause_ns);
    nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
    for (uint64_t count = 1 + check_random(&shaker->seed) % 3; count > 0; count--) faulty_let_one(shaker->engine, &shaker->seed);
  }
  return NULL;
}

/* Every attempt is held, and let go after a while, in any order, until faulty_calm. */
static inline void faulty_start_shaking(faulty_shaker *shaker, faulty_engine *engine, uint64_t seed, long most_pause_ns) {
  shaker->engine = engine;
  shaker->seed = seed;
  shaker->most_pause_ns = most_pause_ns;
  atomic_store(&shaker->stop, false);
  faulty_close(engine);
  CHECK_OK(ptn_thread_start(&shaker->thread, "shaker", faulty_shake, shaker));
}

static inline void faulty_calm(faulty_shaker *shaker) {
  atomic_store(&shaker->stop, true);
  ptn_thread_join(shaker->thread);
  faulty_open(shaker->engine);
}

#endif
