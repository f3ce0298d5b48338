/* See measure.h for what this is for.
 *
 * Problem: the disk has to be as busy as lanes keep it, for as long as somebody measures, without a thread that takes a share of the
 * processor of its own: then the measurement would measure itself.
 * Design: a request that has ended is submitted again, elsewhere in the file, by the thread of the store that ended it. There it
 * also reads that thread's clock: what the clock went on by since the thread ended its last request is what this one cost,
 * system calls and all. (What an interrupt takes is nobody's.)
 *
 * Invariants: running_count requests are submitted or about to be; nothing starts while it is not 0, and once stopping is set it
 * only falls. A thread that has found stopping set touches the traffic no more after it has given up the lock. The lock is held
 * across nothing but counting.
 */
#define _GNU_SOURCE
#include "profile/measure.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "base/bytes.h"
#include "base/threads.h"

typedef struct request {
  ptn_io io;
  ptn_traffic *traffic;
  bool running;
} request;

/* One direction: its half of the file, and where its next request goes. */
typedef struct way {
  uint64_t begin, end, next;
  uint64_t bytes; /* that have ended */
} way;

struct ptn_traffic {
  ptn_store *store;
  ptn_extent extent;
  uint64_t serial; /* no other has the same, not even one that lies where this one lay */
  uint64_t request_bytes;
  int64_t first_write_ns;
  ptn_mutex mutex; /* of the following */
  ptn_condition ended;
  way ways[2]; /* reads, writes */
  bool stopping;
  uint32_t running_count;
  int64_t processor_ns;
  uint64_t processor_bytes;
  ptn_status status;
  ptn_error error;
  uint32_t n_requests;
  request requests[];
};

/* ---- traffic ---- */

/* Locked. What the thread that calls this, which serves this store alone, has spent since it last did. */
static void count_processor(ptn_traffic *traffic, uint64_t bytes) {
  static _Thread_local uint64_t serial;
  static _Thread_local int64_t before_ns;
  int64_t now_ns = ptn_thread_processor_ns();
  if (serial == traffic->serial) {
    traffic->processor_ns += now_ns - before_ns;
    traffic->processor_bytes += bytes;
  }
  serial = traffic->serial;
  before_ns = now_ns;
}

static uint64_t places(const way *way, uint64_t request_bytes) { return (way->end - way->begin) / request_bytes; }

static bool being_written(const ptn_traffic *traffic, uint64_t offset) {
  for (uint32_t i = 0; i < traffic->n_requests; i++) {
    const request *other = &traffic->requests[i];
    if (other->running && other->io.write && other->io.offset == offset) return true;
  }
  return false;
}

/* Locked. The next place in turn; of writes one that no other is under way to, since the store takes one of a page at a time. */
static void aim(ptn_traffic *traffic, request *request) {
  ptn_io *io = &request->io;
  way *way = &traffic->ways[io->write];
  request->running = false;
  do {
    if (way->next + io->bytes > way->end) way->next = way->begin;
    io->offset = way->next;
    way->next += io->bytes;
  } while (io->write && being_written(traffic, io->offset));
  request->running = true;
}

static void on_done(ptn_io *io) {
  ptn_traffic *traffic = ((request *)io->context)->traffic;
  ptn_lock(&traffic->mutex);
  if (io->status == PTN_OK) {
    traffic->ways[io->write].bytes += io->bytes;
    count_processor(traffic, io->bytes);
  } else if (traffic->status == PTN_OK) {
    traffic->status = io->status;
    traffic->error = io->error;
    traffic->stopping = true;
  }
  bool again = !traffic->stopping;
  if (again) aim(traffic, io->context);
  else traffic->running_count--;
  ((request *)io->context)->running = again;
  ptn_broadcast(&traffic->ended);
  ptn_unlock(&traffic->mutex);
  if (again) ptn_store_submit(traffic->store, io);
}

/* Locked. Whether each direction that was asked for has moved something. */
static bool under_way(const ptn_traffic *traffic, const uint64_t *before_bytes, const bool *wanted) {
  for (int i = 0; i < 2; i++)
    if (wanted[i] && traffic->ways[i].bytes == before_bytes[i]) return false;
  return true;
}

/* Locked. Who reads and who writes: as many writers at most as there are places for them; the others rest. */
static void choose(ptn_traffic *traffic, bool reads, bool writes, uint64_t bytes) {
  uint64_t most = places(&traffic->ways[1], bytes);
  uint32_t wish = !writes ? 0 : reads ? traffic->n_requests / 2 : traffic->n_requests;
  uint32_t writers = (uint32_t)ptn_min_u64(wish, most), readers = reads ? traffic->n_requests - wish : 0;
  traffic->running_count = readers + writers;
  for (int i = 0; i < 2; i++) /* places are multiples of the size: two of them are the same, or apart */
    if ((traffic->ways[i].next - traffic->ways[i].begin) % bytes != 0) traffic->ways[i].next = traffic->ways[i].begin;
  for (uint32_t i = 0; i < traffic->running_count; i++) { /* in turns, as long as there are both */
    request *request = &traffic->requests[i];
    request->io.bytes = bytes;
    request->io.write = readers == 0 || (writers > 0 && i % 2 == 1);
    if (request->io.write) writers--;
    else readers--;
    aim(traffic, request);
  }
}

ptn_status ptn_traffic_start(ptn_traffic *traffic, bool reads, bool writes, uint64_t bytes) {
  const bool wanted[2] = {reads, writes};
  if (bytes == 0 || bytes % PTN_PAGE_BYTES != 0 || bytes > traffic->request_bytes)
    return ptn_fail(PTN_INVALID, "traffic of requests of %" PRIu64 " bytes: whole pages up to %" PRIu64 " are wanted", bytes,
                    traffic->request_bytes);
  if (!reads && !writes) return ptn_fail(PTN_INVALID, "traffic of neither reads nor writes: at least one is wanted");
  ptn_lock(&traffic->mutex);
  bool running = traffic->running_count > 0;
  const uint64_t before_bytes[2] = {traffic->ways[0].bytes, traffic->ways[1].bytes};
  if (!running) {
    traffic->stopping = false;
    traffic->status = PTN_OK;
    choose(traffic, reads, writes, bytes);
  }
  uint32_t starting = traffic->running_count;
  ptn_unlock(&traffic->mutex);
  if (running) return ptn_fail(PTN_STEP, "disk traffic was started twice: stop it first");
  for (uint32_t i = 0; i < starting; i++) ptn_store_submit(traffic->store, &traffic->requests[i].io);
  ptn_lock(&traffic->mutex);
  while (!traffic->stopping && !under_way(traffic, before_bytes, wanted)) ptn_wait(&traffic->ended, &traffic->mutex);
  bool failed = traffic->stopping;
  ptn_unlock(&traffic->mutex);
  return failed ? ptn_traffic_stop(traffic) : PTN_OK;
}

/* Locked. */
static ptn_status failure_of(const ptn_traffic *traffic) {
  return traffic->status == PTN_OK ? PTN_OK : ptn_error_restore(&traffic->error);
}

ptn_status ptn_traffic_look(ptn_traffic *traffic, ptn_traffic_count *out) {
  ptn_lock(&traffic->mutex);
  *out = (ptn_traffic_count){.at_ns = ptn_now_ns(),
                             .read_bytes = traffic->ways[0].bytes,
                             .write_bytes = traffic->ways[1].bytes,
                             .processor_ns = traffic->processor_ns,
                             .processor_bytes = traffic->processor_bytes};
  ptn_status status = failure_of(traffic);
  ptn_unlock(&traffic->mutex);
  return status;
}

ptn_status ptn_traffic_stop(ptn_traffic *traffic) {
  ptn_lock(&traffic->mutex);
  traffic->stopping = true;
  while (traffic->running_count > 0) ptn_wait(&traffic->ended, &traffic->mutex);
  ptn_status status = failure_of(traffic);
  traffic->status = PTN_OK; /* told once */
  ptn_unlock(&traffic->mutex);
  return status;
}

static ptn_status write_all(ptn_traffic *traffic, void *memory, uint64_t memory_bytes) {
  int64_t begin_ns = ptn_now_ns();
  for (uint64_t at = 0; at < traffic->extent.bytes; at += memory_bytes)
    PTN_TRY(ptn_store_transfer(traffic->store, memory, traffic->extent.offset + at,
                               ptn_min_u64(memory_bytes, traffic->extent.bytes - at), true));
  traffic->first_write_ns = ptn_now_ns() - begin_ns;
  return PTN_OK;
}

static void prepare(ptn_traffic *traffic, char *memory) {
  uint64_t begin = traffic->extent.offset, half = begin + traffic->extent.bytes / 2 / PTN_PAGE_BYTES * PTN_PAGE_BYTES;
  traffic->ways[0] = (way){.begin = begin, .end = half, .next = begin};
  traffic->ways[1] = (way){.begin = half, .end = begin + traffic->extent.bytes, .next = half};
  for (uint32_t i = 0; i < traffic->n_requests; i++) {
    request *request = &traffic->requests[i];
    request->traffic = traffic;
    request->io = (ptn_io){.memory = memory + i * traffic->request_bytes,
                           .bytes = traffic->request_bytes,
                           .caller_sums = true,
                           .done = on_done,
                           .context = request};
  }
}

ptn_status ptn_traffic_create(ptn_traffic **out, ptn_store *store, uint64_t file_bytes, void *memory, uint64_t memory_bytes,
                              uint64_t request_bytes) {
  *out = NULL;
  if (request_bytes == 0 || request_bytes % PTN_PAGE_BYTES != 0 || memory_bytes / request_bytes < 2 ||
      file_bytes / request_bytes < 2 || memory_bytes / request_bytes > UINT32_MAX)
    return ptn_fail(PTN_INVALID,
                    "disk traffic of requests of %" PRIu64 " bytes, in memory of %" PRIu64 " and a file of %" PRIu64
                    ": requests of whole pages are wanted, and room for two of them",
                    request_bytes, memory_bytes, file_bytes);
  uint32_t n_requests = (uint32_t)(memory_bytes / request_bytes);
  ptn_traffic *traffic = calloc(1, sizeof *traffic + n_requests * sizeof traffic->requests[0]);
  if (!traffic) return ptn_fail(PTN_MEMORY, "no memory to describe %u requests", n_requests);
  static _Atomic uint64_t serials;
  traffic->serial = atomic_fetch_add(&serials, 1) + 1;
  traffic->store = store;
  traffic->request_bytes = request_bytes;
  traffic->n_requests = n_requests;
  ptn_mutex_create(&traffic->mutex);
  ptn_condition_create(&traffic->ended);
  ptn_status status = ptn_store_reserve(store, file_bytes, &traffic->extent);
  if (status == PTN_OK) status = write_all(traffic, memory, n_requests * request_bytes);
  if (status != PTN_OK) {
    ptn_traffic_destroy(traffic);
    return status;
  }
  prepare(traffic, memory);
  *out = traffic;
  return PTN_OK;
}

void ptn_traffic_destroy(ptn_traffic *traffic) {
  if (!traffic) return;
  ptn_error error;
  ptn_error_save(&error); /* of the caller's own failure, if that is why it ends this */
  (void)ptn_traffic_stop(traffic);
  ptn_store_release(traffic->store, &traffic->extent);
  ptn_condition_destroy(&traffic->ended);
  ptn_mutex_destroy(&traffic->mutex);
  free(traffic);
  (void)ptn_error_restore(&error);
}

int64_t ptn_traffic_first_write_ns(const ptn_traffic *traffic) { return traffic->first_write_ns; }

/* ---- a worker ---- */

struct ptn_worker {
  uint64_t (*work)(void *context);
  void *context;
  double rest;
  pthread_t thread;
  ptn_mutex mutex; /* of the following */
  ptn_condition wake;
  bool stop;
  ptn_worker_count count;
};

static void *repeat(void *argument) {
  ptn_worker *worker = argument;
  ptn_thread_be_prompt(); /* as the lanes that it stands for */
  ptn_lock(&worker->mutex);
  while (!worker->stop) {
    ptn_unlock(&worker->mutex);
    int64_t begin_ns = ptn_now_ns(), begin_processor_ns = ptn_thread_processor_ns();
    uint64_t bytes = worker->work(worker->context);
    int64_t processor_ns = ptn_thread_processor_ns() - begin_processor_ns, busy_ns = ptn_now_ns() - begin_ns;
    ptn_lock(&worker->mutex);
    worker->count.bytes += bytes;
    worker->count.busy_ns += busy_ns;
    worker->count.processor_ns += processor_ns;
    if (worker->rest > 0 && !worker->stop)
      (void)ptn_wait_ns(&worker->wake, &worker->mutex, (int64_t)(worker->rest * (double)processor_ns));
  }
  ptn_unlock(&worker->mutex);
  return NULL;
}

ptn_status ptn_worker_start(ptn_worker **out, uint64_t (*work)(void *context), void *context, double rest) {
  *out = NULL;
  ptn_worker *worker = calloc(1, sizeof *worker);
  if (!worker) return ptn_fail(PTN_MEMORY, "no memory for a worker");
  worker->work = work;
  worker->context = context;
  worker->rest = rest;
  ptn_mutex_create(&worker->mutex);
  ptn_condition_create(&worker->wake);
  ptn_status status = ptn_thread_start(&worker->thread, "ptn-measure", repeat, worker);
  if (status != PTN_OK) {
    ptn_condition_destroy(&worker->wake);
    ptn_mutex_destroy(&worker->mutex);
    free(worker);
    return status;
  }
  *out = worker;
  return PTN_OK;
}

void ptn_worker_look(ptn_worker *worker, ptn_worker_count *out) {
  ptn_lock(&worker->mutex);
  *out = worker->count;
  ptn_unlock(&worker->mutex);
}

void ptn_worker_stop(ptn_worker *worker, ptn_worker_count *last) {
  ptn_lock(&worker->mutex);
  worker->stop = true;
  ptn_signal(&worker->wake);
  ptn_unlock(&worker->mutex);
  ptn_thread_join(worker->thread);
  if (last) *last = worker->count;
  ptn_condition_destroy(&worker->wake);
  ptn_mutex_destroy(&worker->mutex);
  free(worker);
}
