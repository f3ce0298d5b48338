/* An engine around another one that does to chosen attempts what a disk does on a bad day: an errno, a short transfer, nothing at
 * all, wrong bytes, a delay. Attempts are numbered from 1 in the order they are started. It can also hold every attempt back
 * until told otherwise, and it remembers the order of starts. */
#ifndef PTN_TESTS_FAULTY_ENGINE_H
#define PTN_TESTS_FAULTY_ENGINE_H

#include <errno.h>
#include <string.h>
#include <time.h>

#include "base/bytes.h"
#include "base/threads.h"
#include "check.h"
#include "disk/engine.h"

#define FAULTY_LOG 4096

typedef enum fault {
  FAULT_NONE = 0,
  FAULT_ERRNO,
  FAULT_SHORT, /* half, to a whole page */
  FAULT_SHORT_ODD, /* half and 512 bytes more */
  FAULT_TINY, /* 512 bytes: no whole page */
  FAULT_ZERO, /* nothing, without an errno */
  FAULT_EXCESS, /* more than was asked */
  FAULT_WRONG_BYTE, /* a read brings one wrong bit */
  FAULT_LATE,
} fault;

typedef struct faulty_engine {
  ptn_engine base;
  ptn_engine *inner;
  ptn_mutex mutex;
  fault fault;
  int sys_errno;
  uint64_t first, last; /* attempts that go wrong: from first to last */
  uint64_t count; /* attempts started */
  uint64_t in_flight_count, most_in_flight_count;
  bool closed; /* holds attempts back */
  struct faulty_attempt *held;
  uint64_t log_offsets[FAULTY_LOG];
} faulty_engine;

typedef struct faulty_attempt {
  ptn_piece inner; /* first member */
  ptn_piece *outer;
  faulty_engine *engine;
  fault fault;
  int sys_errno;
  struct faulty_attempt *next;
} faulty_attempt;

static inline int64_t faulty_result(const faulty_attempt *attempt, int64_t result) {
  int64_t bytes = (int64_t)attempt->outer->bytes, page = (int64_t)PTN_PAGE_BYTES;
  switch (attempt->fault) {
    case FAULT_ERRNO: return -attempt->sys_errno;
    case FAULT_SHORT: return bytes > page ? bytes / 2 / page * page : result;
    case FAULT_SHORT_ODD: return bytes > page ? bytes / 2 / page * page + 512 : 512;
    case FAULT_TINY: return 512;
    case FAULT_ZERO: return 0;
    case FAULT_EXCESS: return bytes + page;
    case FAULT_WRONG_BYTE:
      if (!attempt->outer->write) ((unsigned char *)attempt->outer->memory)[bytes / 3] ^= 4;
      return result;
    case FAULT_LATE: nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL); return result;
    case FAULT_NONE: break;
  }
  return result;
}

static inline void faulty_finish(ptn_piece *inner, int64_t result) {
  faulty_attempt *attempt = (faulty_attempt *)inner;
  ptn_piece *outer = attempt->outer;
  result = faulty_result(attempt, result);
  ptn_lock(&attempt->engine->mutex);
  attempt->engine->in_flight_count--;
  ptn_unlock(&attempt->engine->mutex);
  free(attempt);
  outer->finish(outer, result);
}

static inline void faulty_start(ptn_engine *base, ptn_piece *piece) {
  faulty_engine *engine = (faulty_engine *)base;
  faulty_attempt *attempt = calloc(1, sizeof *attempt);
  CHECK(attempt);
  attempt->inner = *piece;
  attempt->inner.finish = faulty_finish;
  attempt->outer = piece;
  attempt->engine = engine;
  ptn_lock(&engine->mutex);
  uint64_t number = ++engine->count;
  if (number <= FAULTY_LOG) engine->log_offsets[number - 1] = piece->offset;
  attempt->fault = number >= engine->first && number <= engine->last ? engine->fault : FAULT_NONE;
  attempt->sys_errno = engine->sys_errno;
  if (++engine->in_flight_count > engine->most_in_flight_count) engine->most_in_flight_count = engine->in_flight_count;
  bool held = engine->closed;
  if (held) {
    attempt->next = engine->held;
    engine->held = attempt;
  }
  ptn_unlock(&engine->mutex);
  if (!held) engine->inner->kind->start(engine->inner, &attempt->inner);
}

static inline void faulty_open(faulty_engine *engine) {
  ptn_lock(&engine->mutex);
  engine->closed = false;
  faulty_attempt *held = engine->held;
  engine->held = NULL;
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

/* Attempts number first to last of those started from here on go wrong; the count starts anew. */
static inline void faulty_tell(faulty_engine *engine, fault fault, int sys_errno, uint64_t first, uint64_t last) {
  ptn_lock(&engine->mutex);
  engine->fault = fault;
  engine->sys_errno = sys_errno;
  engine->first = first;
  engine->last = last;
  engine->count = engine->most_in_flight_count = 0;
  ptn_unlock(&engine->mutex);
}

static inline uint64_t faulty_count(faulty_engine *engine) {
  ptn_lock(&engine->mutex);
  uint64_t count = engine->count;
  ptn_unlock(&engine->mutex);
  return count;
}

static inline void faulty_destroy(ptn_engine *base) {
  faulty_engine *engine = (faulty_engine *)base;
  CHECK(engine->in_flight_count == 0);
  engine->inner->kind->destroy(engine->inner);
  ptn_mutex_destroy(&engine->mutex);
}

static const ptn_engine_kind faulty_kind = {.name = "faulty", .start = faulty_start, .destroy = faulty_destroy};

/* A ptn_store_options.wrap; context is a faulty_engine of the caller, which outlives the store. */
static inline ptn_engine *faulty_wrap(ptn_engine *inner, void *context) {
  faulty_engine *engine = context;
  memset(engine, 0, sizeof *engine);
  engine->base.kind = &faulty_kind;
  engine->inner = inner;
  ptn_mutex_create(&engine->mutex);
  return &engine->base;
}

#endif
