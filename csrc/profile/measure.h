/* What runs beside compute, made to run for its own sake: traffic of the disk, and a worker that repeats a piece of work.
 *
 * Both go on until they are stopped, so that whoever measures runs what it wants beside them and looks at the counts before and
 * after. Counts only grow, and they are of what has ended; a rate is what two looks differ by. What is lost by compute beside them
 * is for the caller to find out; how much of a processor they take is counted here, by the clocks of their own threads, which
 * tell the same on a machine that others use as well.
 */
#ifndef PTN_PROFILE_MEASURE_H
#define PTN_PROFILE_MEASURE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "disk/store.h"

/* ---- traffic ---- */

typedef struct ptn_traffic ptn_traffic;

typedef struct ptn_traffic_count {
  int64_t at_ns; /* when this was counted, by ptn_now_ns */
  uint64_t read_bytes, write_bytes;
  /* Processor time of the store's threads, and the bytes that it was spent on: all but those of each thread's first request. */
  int64_t processor_ns;
  uint64_t processor_bytes;
} ptn_traffic_count;

/* Requests of request_bytes, so many at a time as memory has room for: as lanes do, several are in flight. Nobody takes their
 * checksums, which is left to those who compute with the bytes. They go through file_bytes of the store round and round, reads through
 * the first half and writes through the second; all of it is written once here, as a training run rewrites what was written before.
 * memory and the store are the caller's, and longer there than this; memory and all sizes are multiples of PTN_PAGE_BYTES, with room
 * for two requests and a file of two at least. */
ptn_status ptn_traffic_create(ptn_traffic **out, ptn_store *store, uint64_t file_bytes, void *memory, uint64_t memory_bytes,
                              uint64_t request_bytes);
/* Stops first; gives the space back to the store. */
void ptn_traffic_destroy(ptn_traffic *traffic);
/* How long the first write of all took. */
int64_t ptn_traffic_first_write_ns(const ptn_traffic *traffic);
/* Returns when a request of each direction that is wanted has ended: from then on the disk is busy. Requests of both directions
 * take turns. bytes: of each, whole pages, at most the request_bytes of create. On failure nothing is in flight, and it may be
 * started again. */
ptn_status ptn_traffic_start(ptn_traffic *traffic, bool reads, bool writes, uint64_t bytes);
/* The failure of the first request that failed since start, if any: from then on there is no traffic, and no more will come. */
ptn_status ptn_traffic_look(ptn_traffic *traffic, ptn_traffic_count *out);
/* Waits for what is in flight; the same failure. Where nothing is to be stopped it does nothing. */
ptn_status ptn_traffic_stop(ptn_traffic *traffic);

/* ---- a worker ---- */

typedef struct ptn_worker ptn_worker;

typedef struct ptn_worker_count {
  uint64_t bytes; /* what the pieces of work said */
  int64_t busy_ns, processor_ns; /* in pieces of work: by the clock, and by that of the thread */
} ptn_worker_count;

/* A thread that calls work again and again, and sleeps after each piece for rest times as long as the piece took: a lane waits for
 * its input most of the time. work returns the bytes it has dealt with. */
ptn_status ptn_worker_start(ptn_worker **out, uint64_t (*work)(void *context), void *context, double rest);
void ptn_worker_look(ptn_worker *worker, ptn_worker_count *out);
/* Waits for the piece under way; last (may be NULL) is what a look would then see. */
void ptn_worker_stop(ptn_worker *worker, ptn_worker_count *last);

#endif
