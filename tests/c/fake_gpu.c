/* The GPU of the fake driver: see fake_gpu.h for its parts, fake_cuda.h for what it does. */
#define _GNU_SOURCE
#include "fake_gpu.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"

/* Nothing but what is held back could go on, for so many looks in a row, a millisecond apart: it is waited for in another way.
 * Looks, not time: the process may stand still. A thread that nobody reports is forgotten later. */
#define STUCK_LOOKS 25
#define THREAD_STUCK_LOOKS 3000

fake_machine now;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

void fake_lock(void) { pthread_mutex_lock(&mutex); }

void fake_unlock(void) {
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

static int64_t clock_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void wait_a_millisecond(void) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += 1000000;
  until.tv_sec += until.tv_nsec / 1000000000;
  until.tv_nsec %= 1000000000;
  pthread_cond_timedwait(&changed, &mutex, &until);
}

uint64_t fake_random_below(uint64_t count) { return check_random(&now.seed) % count; }

void *fake_made(size_t bytes) {
  void *memory = calloc(1, bytes);
  if (!memory) abort();
  return memory;
}

void fake_complain(const char *format, ...) {
  if (now.complaint[0]) return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(now.complaint, sizeof now.complaint, format, arguments);
  va_end(arguments);
}

range *fake_range_of(range *first, const void *address, size_t bytes) {
  const char *begin = address;
  for (range *range = first; range; range = range->next)
    if (begin < range->address + range->bytes && begin + bytes > range->address) {
      if (begin < range->address || begin + bytes > range->address + range->bytes)
        fake_complain("%zu bytes at %p reach beyond the %zu that were made at %p", bytes, address, range->bytes,
                      (void *)range->address);
      return range;
    }
  return NULL;
}

void *fake_memory(const void *address) {
  range *range = fake_range_of(now.memory, address, 1);
  return range ? range->storage + ((const char *)address - range->address) : (char *)(uintptr_t)address;
}

/* ---- the GPU ---- */

static bool held_back(const ptn_stream *stream) {
  const work *work = stream->first;
  return now.hold.active && stream == now.hold.stream && work->number > 0 && work->number >= now.hold.number;
}

static bool runnable(const ptn_stream *stream) {
  if (!stream->first || held_back(stream)) return false;
  return stream->first->kind != WORK_FOLLOW || stream->first->recording->set;
}

/* Marks the streams that must go on for whoever waits, through the recordings at which they stand. */
static void mark_needed(void) {
  for (ptn_stream *stream = now.streams; stream; stream = stream->next) stream->needed = false;
  for (waiter *waiter = now.waiters; waiter; waiter = waiter->next)
    if (waiter->urgent || !now.frozen) waiter->stream->needed = true;
  if (now.hold.active && now.hold.until_stream) now.hold.until_stream->needed = true; /* whoever does not wait hurries */
  for (bool more = true; more;) {
    more = false;
    for (ptn_stream *stream = now.streams; stream; stream = stream->next) {
      const work *work = stream->first;
      if (!stream->needed || !work || work->kind != WORK_FOLLOW || work->recording->set) continue;
      more |= !work->recording->stream->needed;
      work->recording->stream->needed = true;
    }
  }
}

static bool moving(void) { return (!now.frozen || now.urgent_count > 0) && !now.broken; }

static ptn_stream *choose(void) {
  if (!moving()) return NULL;
  bool only_needed = now.mode == FAKE_LATE || now.frozen;
  if (only_needed) mark_needed();
  uint64_t sum = 0;
  for (ptn_stream *stream = now.streams; stream; stream = stream->next) {
    if (fake_random_below(16) == 0) stream->weight = 1u << fake_random_below(7);
    if (runnable(stream) && (!only_needed || stream->needed)) sum += stream->weight;
  }
  if (sum == 0) return NULL;
  uint64_t at = fake_random_below(sum);
  for (ptn_stream *stream = now.streams; stream; stream = stream->next) {
    if (!runnable(stream) || (only_needed && !stream->needed)) continue;
    if (at < stream->weight) return stream;
    at -= stream->weight;
  }
  return NULL;
}

void fake_break_down(cuda_result error) {
  now.broken = error;
  for (ptn_stream *stream = now.streams; stream; stream = stream->next)
    while (stream->first) {
      work *work = stream->first;
      stream->first = work->next;
      for (int i = 0; i < work->parts_count && work->kind == WORK_COPY; i++) free(work->parts[i].read);
      free(work->staged);
      free(work);
    }
}

static void copy_a_part(work *work) {
  int left = work->parts_count - work->done_count, chosen = (int)fake_random_below((uint64_t)left);
  part *part = work->parts;
  while (part->written || chosen-- > 0) part++;
  if (!part->read) {
    part->read = fake_made(part->bytes);
    const char *from = work->staged ? work->staged : fake_memory(work->from);
    memcpy(part->read, from + part->begin, part->bytes);
    return;
  }
  memcpy((char *)fake_memory(work->to) + part->begin, part->read, part->bytes);
  free(part->read);
  part->read = NULL;
  part->written = true;
  work->done_count++;
}

/* One step of a stream's first work. */
static void step(ptn_stream *stream) {
  work *work = stream->first;
  if (work->kind == WORK_COPY) copy_a_part(work);
  if (work->kind == WORK_KERNEL) work->kernel(work->argument, work->done_count++);
  if (work->kind == WORK_SET) {
    work->recording->set = true;
    work->recording->set_ns = clock_ns();
  }
  if (work->done_count < work->parts_count) return;
  if (work->kind == WORK_COPY) {
    if (now.breaking.armed && --now.breaking.left == 0) {
      now.breaking.armed = false;
      fake_break_down(now.breaking.error);
      return;
    }
  }
  if (work->number > 0) stream->finished = work->number;
  stream->first = work->next;
  free(work->staged);
  free(work);
}

/* True when it let go: there may be something to do again. */
static bool let_go(int *idle_looks, bool idle) {
  *idle_looks = idle && now.hold.active && moving() ? *idle_looks + 1 : 0;
  if (!now.hold.active || !moving()) return false;
  bool over = now.hold.until_stream && now.hold.until_stream->finished >= now.hold.until_number;
  bool stuck = *idle_looks >= (now.hold.until_stream ? STUCK_LOOKS : THREAD_STUCK_LOOKS);
  if (stuck && !over) now.hold.counts = false;
  if (stuck || over) now.hold.active = false;
  return !now.hold.active;
}

void *fake_run(void *argument) {
  (void)argument;
  int idle_looks = 0;
  fake_lock();
  while (!now.stop) {
    ptn_stream *stream = choose();
    if (stream) {
      step(stream);
      pthread_cond_broadcast(&changed);
    }
    bool again = let_go(&idle_looks, stream == NULL);
    if (!stream && !again && now.hold.active) wait_a_millisecond();
    else if (!stream && !again) pthread_cond_wait(&changed, &mutex);
    if (stream && now.mode == FAKE_ANY && fake_random_below(32) == 0) {
      long ns = (long)fake_random_below(100000);
      fake_unlock();
      nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
      fake_lock();
    }
  }
  fake_unlock();
  return NULL;
}

void fake_wait_for(ptn_stream *stream, const recording *recording, bool urgent) {
  waiter waiter = {.next = now.waiters, .stream = stream, .urgent = urgent};
  uint64_t number = stream->queued;
  now.waiters = &waiter;
  now.urgent_count += urgent;
  pthread_cond_broadcast(&changed);
  while (!now.broken && !(recording ? recording->set : stream->finished >= number)) pthread_cond_wait(&changed, &mutex);
  struct waiter **at = &now.waiters;
  while (*at != &waiter) at = &(*at)->next;
  *at = waiter.next;
  now.urgent_count -= urgent;
}

static bool anything_runnable(void) {
  for (ptn_stream *stream = now.streams; stream; stream = stream->next)
    if (runnable(stream)) return true;
  return false;
}

void fake_append(ptn_stream *stream, work *work) {
  if (work->kind == WORK_COPY || work->kind == WORK_KERNEL) work->number = ++stream->queued;
  if (stream->first) stream->last->next = work;
  else stream->first = work;
  stream->last = work;
  pthread_cond_broadcast(&changed);
  while (now.mode == FAKE_EARLY && !now.frozen && !now.broken && anything_runnable()) pthread_cond_wait(&changed, &mutex);
}

void fake_queue_recording(ptn_stream *stream, work_kind kind, recording *recording) {
  work *work = fake_made(sizeof *work);
  work->kind = kind;
  work->recording = recording;
  fake_append(stream, work);
}

/* ---- faults, and what is queued ---- */

bool fake_hits(fault *fault, const char *entry) {
  if (!fault->armed || (fault->entry && strcmp(fault->entry, entry) != 0) || --fault->left > 0) return false;
  fault->armed = false;
  return true;
}

void fake_hold_back(const recording *recording, ptn_stream *until) {
  if (!recording || recording->set || now.hold.active || recording->number <= recording->stream->finished) return;
  now.hold.active = now.hold.counts = true;
  now.hold.stream = recording->stream;
  now.hold.number = recording->number;
  now.hold.until_stream = until;
  now.hold.until_number = until ? until->queued + 1 : 0;
  now.hold.thread = pthread_self();
}

bool fake_in_use(const char *address, size_t bytes) {
  for (ptn_stream *stream = now.streams; stream; stream = stream->next)
    for (const work *work = stream->first; work; work = work->next) {
      if (work->kind != WORK_COPY) continue;
      if (work->to < address + bytes && work->to + work->bytes > address) return true;
      if (!work->staged && work->from < address + bytes && work->from + work->bytes > address) return true;
    }
  return false;
}

ptn_stream *fake_make_stream(bool counted) {
  ptn_stream *stream = fake_made(sizeof *stream);
  stream->alive = true;
  stream->counted = counted;
  stream->weight = 1;
  stream->next = now.streams;
  now.streams = stream;
  return stream;
}

ptn_stream *fake_stream_or_default(ptn_stream *stream) {
  if (stream) return stream;
  ptn_stream *last = now.streams;
  while (last->next) last = last->next; /* the first that was made */
  return last;
}
