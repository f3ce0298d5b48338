/* Measuring the link: alone in each direction, and both at once.
 *
 * Problem: a lane's speed is wanted as a step finds it, with transfers waiting behind one another, and how far the two directions
 * share the bus cannot be known from either alone. Design: a run hands all its transfers to the lanes at once; a lane's time is
 * from the start of its first to the end of its last, by the device's clock. A first run, which is not counted, touches what is
 * touched for the first time. For both at once each direction gets as many transfers as make their times alone alike, so that
 * neither runs on by itself at the end.
 *
 * Invariants: nothing is in flight when this returns, whatever failed.
 */
#include "profile/link.h"

#include <stdlib.h>

#include "base/bytes.h"
#include "base/threads.h"
#include "device/transfers.h"

enum { UPLOAD, OFFLOAD, N_WAYS };
#define MOST_RATIO 8 /* between the transfers of one direction and the other's, both at once */

typedef struct way {
  ptn_transfers *lane;
  void *to;
  const void *from;
  ptn_transfer *transfers;
  uint32_t count; /* in the run under way */
} way;

typedef struct traffic {
  ptn_mutex mutex;
  ptn_condition ended;
  uint32_t left; /* transfers under way */
  way ways[N_WAYS];
} traffic;

static void one_ended(ptn_transfer *transfer) {
  traffic *traffic = transfer->context;
  ptn_lock(&traffic->mutex);
  traffic->left--;
  ptn_signal(&traffic->ended);
  ptn_unlock(&traffic->mutex);
}

/* From the start of the first to the end of the last. */
static int64_t time_of(const way *way) {
  int64_t start_ns = INT64_MAX, end_ns = 0;
  for (uint32_t i = 0; i < way->count; i++) {
    if (way->transfers[i].start_ns < start_ns) start_ns = way->transfers[i].start_ns;
    if (way->transfers[i].end_ns > end_ns) end_ns = way->transfers[i].end_ns;
  }
  return way->count > 0 && end_ns > start_ns ? end_ns - start_ns : 1;
}

/* Transfers of both directions take turns in being handed over; taken_ns: of each direction. */
static ptn_status run(traffic *traffic, uint64_t piece_bytes, const uint32_t *counts, int64_t *taken_ns) {
  uint32_t most = counts[UPLOAD] > counts[OFFLOAD] ? counts[UPLOAD] : counts[OFFLOAD];
  traffic->left = counts[UPLOAD] + counts[OFFLOAD];
  for (uint32_t i = 0; i < most; i++) {
    for (int w = 0; w < N_WAYS; w++) {
      way *way = &traffic->ways[w];
      way->count = counts[w];
      if (i >= way->count) continue;
      way->transfers[i] =
          (ptn_transfer){.to = way->to, .from = way->from, .bytes = piece_bytes, .done = one_ended, .context = traffic};
      ptn_transfers_submit(way->lane, &way->transfers[i]); /* what it fails of, done is told */
    }
  }
  ptn_lock(&traffic->mutex);
  while (traffic->left > 0) ptn_wait(&traffic->ended, &traffic->mutex);
  ptn_unlock(&traffic->mutex);
  for (int w = 0; w < N_WAYS; w++) {
    for (uint32_t i = 0; i < counts[w]; i++)
      if (traffic->ways[w].transfers[i].status != PTN_OK) return ptn_error_restore(&traffic->ways[w].transfers[i].error);
    taken_ns[w] = time_of(&traffic->ways[w]);
  }
  return PTN_OK;
}

static uint32_t in_proportion(uint32_t count, double ratio) {
  double scaled = count * (ratio > 1 ? ratio : 1);
  return scaled < (double)count * MOST_RATIO ? (uint32_t)scaled : count * MOST_RATIO;
}

static ptn_status measure(traffic *traffic, uint64_t piece_bytes, uint32_t count, ptn_link_speed *out) {
  int64_t alone_ns[N_WAYS], both_ns[N_WAYS], taken_ns[N_WAYS];
  const uint32_t first[N_WAYS] = {1, 1}, up[N_WAYS] = {count, 0}, off[N_WAYS] = {0, count};
  PTN_TRY(run(traffic, piece_bytes, first, taken_ns));
  PTN_TRY(run(traffic, piece_bytes, up, taken_ns));
  alone_ns[UPLOAD] = taken_ns[UPLOAD];
  PTN_TRY(run(traffic, piece_bytes, off, taken_ns));
  alone_ns[OFFLOAD] = taken_ns[OFFLOAD];
  double ratio = (double)alone_ns[OFFLOAD] / (double)alone_ns[UPLOAD];
  const uint32_t both[N_WAYS] = {in_proportion(count, ratio), in_proportion(count, 1 / ratio)};
  PTN_TRY(run(traffic, piece_bytes, both, both_ns));
  double moved_bytes = (double)count * (double)piece_bytes;
  out->upload_bytes_per_s = moved_bytes / (double)alone_ns[UPLOAD] * 1e9;
  out->offload_bytes_per_s = moved_bytes / (double)alone_ns[OFFLOAD] * 1e9;
  double alone_sum = 0, longest = 1;
  for (int w = 0; w < N_WAYS; w++) {
    alone_sum += (double)alone_ns[w] / count * both[w];
    if ((double)both_ns[w] > longest) longest = (double)both_ns[w];
  }
  double overlap = alone_sum / longest;
  out->overlap = overlap < 1 ? 1 : overlap > 2 ? 2 : overlap;
  return PTN_OK;
}

ptn_status ptn_link_measure(ptn_device *device, uint64_t piece_bytes, uint32_t count, ptn_link_speed *out) {
  const ptn_device_kind *kind = device->kind;
  traffic traffic = {.left = 0};
  ptn_pinned pinned = {0};
  void *memory = NULL;
  if (piece_bytes == 0 || count == 0 || count > UINT32_MAX / MOST_RATIO / 2)
    return ptn_fail(PTN_INVALID, "%u transfers of %llu bytes measure nothing", count, (unsigned long long)piece_bytes);
  ptn_mutex_create(&traffic.mutex);
  ptn_condition_create(&traffic.ended);
  ptn_status status = kind->pin(device, 2 * piece_bytes, &pinned);
  if (status == PTN_OK) status = kind->allocate(device, 2 * piece_bytes, &memory);
  for (int w = 0; w < N_WAYS && status == PTN_OK; w++) {
    way *way = &traffic.ways[w];
    void *host = (char *)pinned.memory + (size_t)w * piece_bytes, *there = (char *)memory + (size_t)w * piece_bytes;
    way->to = w == UPLOAD ? there : host;
    way->from = w == UPLOAD ? host : there;
    way->transfers = calloc((size_t)count * MOST_RATIO, sizeof *way->transfers);
    status = way->transfers ? ptn_transfers_create(&way->lane, device, w == UPLOAD ? "ptn-upload" : "ptn-offload")
                            : ptn_fail(PTN_MEMORY, "no memory for %u transfers", count);
  }
  if (status == PTN_OK) status = measure(&traffic, piece_bytes, count, out);
  ptn_error error;
  if (status != PTN_OK) ptn_error_save(&error);
  for (int w = 0; w < N_WAYS; w++) {
    if (traffic.ways[w].lane) ptn_transfers_destroy(traffic.ways[w].lane);
    free(traffic.ways[w].transfers);
  }
  kind->free(device, memory);
  kind->unpin(device, &pinned);
  ptn_condition_destroy(&traffic.ended);
  ptn_mutex_destroy(&traffic.mutex);
  return status == PTN_OK ? PTN_OK : ptn_error_restore(&error);
}
