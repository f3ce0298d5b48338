/* Layout: parameters into chunks.
 *
 * Problem: a chunk is loaded and dropped as a whole, so what is used at one moment should lie in one chunk, and what is used at
 * other moments should not. Design: the parameters come in execution order and are cut into runs of one block; a run goes where
 * it fits whole, and is cut greedily only where it is larger than a chunk. Invariants: the order of parameters is the order of
 * (chunk, offset); offsets are multiples of PTN_TENSOR_ALIGN_BYTES; a chunk of several parameters never passes chunk_bytes; a
 * chunk holds whole blocks, or a piece of one block, or parameters outside of blocks, never two of these.
 *
 * The size of chunks: slots are as large as the largest chunk in them, so what the others lack is memory that holds nothing. How
 * well a size fits the parameters' own sizes is not smooth in it, so packing is tried with each size of a grid.
 */
#include "base/bytes.h"
#include "plan/parts.h"

/* The chunk being filled. */
typedef struct fill {
  uint32_t chunk;
  uint64_t end_bytes;
  bool open; /* there is one; between runs only if it holds whole blocks, and further whole blocks may join */
} fill;

static uint64_t aligned(uint64_t bytes) { return ptn_round_up(bytes, PTN_TENSOR_ALIGN_BYTES); }

static void close_chunk(fill *at) {
  if (at->open) at->chunk++;
  at->open = false;
  at->end_bytes = 0;
}

static void place(fill *at, ptn_layout_param *param) {
  param->chunk = at->chunk;
  param->offset_bytes = aligned(at->end_bytes);
  at->end_bytes = param->offset_bytes + param->bytes;
  at->open = true;
}

/* Where the run would end if it were placed from end_bytes on. */
static uint64_t end_of_run(const ptn_layout_param *run, size_t count, uint64_t end_bytes) {
  for (size_t i = 0; i < count; i++) end_bytes = aligned(end_bytes) + run[i].bytes;
  return end_bytes;
}

static void place_cut(fill *at, ptn_layout_param *run, size_t count, uint64_t chunk_bytes) {
  for (size_t i = 0; i < count; i++) {
    if (at->open && aligned(at->end_bytes) + run[i].bytes > chunk_bytes) close_chunk(at);
    place(at, &run[i]);
  }
}

static void place_run(fill *at, ptn_layout_param *run, size_t count, uint64_t chunk_bytes) {
  bool blocked = run[0].block >= 0;
  bool joins = at->open && blocked && end_of_run(run, count, at->end_bytes) <= chunk_bytes;
  if (!joins) close_chunk(at);
  bool whole = end_of_run(run, count, at->end_bytes) <= chunk_bytes;
  place_cut(at, run, count, chunk_bytes);
  if (!blocked || !whole) close_chunk(at);
}

ptn_status ptn_layout(ptn_layout_param *params, size_t n_params, uint64_t chunk_bytes, uint32_t *n_chunks) {
  *n_chunks = 0;
  if (chunk_bytes == 0) return ptn_fail(PTN_INVALID, "chunk_bytes is 0; give one or more");
  if (n_params > UINT32_MAX) return ptn_fail(PTN_INVALID, "%zu parameters, at most %u are possible", n_params, UINT32_MAX);
  uint64_t total_bytes = 0;
  for (size_t i = 0; i < n_params; i++) {
    if (params[i].block < -1) return ptn_fail(PTN_INVALID, "parameter %zu has block %d; -1 means none", i, (int)params[i].block);
    if (params[i].bytes > PTN_PLAN_MOST_BYTES || (total_bytes += aligned(params[i].bytes)) > PTN_PLAN_MOST_BYTES) {
      return ptn_fail(PTN_INVALID, "the parameters up to number %zu have more than %llu bytes, the most that is possible", i,
                      (unsigned long long)PTN_PLAN_MOST_BYTES);
    }
  }
  fill at = {0};
  for (size_t begin = 0, end; begin < n_params; begin = end) {
    for (end = begin + 1; end < n_params && params[end].block == params[begin].block;) end++;
    place_run(&at, params + begin, end - begin, chunk_bytes);
  }
  close_chunk(&at);
  *n_chunks = at.chunk;
  return PTN_OK;
}

#define GRID_SIZES 64
#define AS_GOOD 0.02 /* of the fill */

/* How full the chunks of blocks are, those that are not larger than chunk_bytes, measured by the largest of them: 0 to 1. */
static double fill_share(const ptn_layout_param *params, size_t n_params) {
  uint64_t total_bytes = 0, largest_bytes = 0, count = 0;
  for (size_t begin = 0, end; begin < n_params; begin = end) {
    for (end = begin + 1; end < n_params && params[end].chunk == params[begin].chunk;) end++;
    if (params[begin].block < 0) continue;
    uint64_t bytes = params[end - 1].offset_bytes + params[end - 1].bytes;
    total_bytes += bytes;
    largest_bytes = ptn_max_u64(largest_bytes, bytes);
    count++;
  }
  return largest_bytes > 0 ? (double)total_bytes / ((double)largest_bytes * (double)count) : 1.0;
}

ptn_status ptn_layout_size(ptn_layout_param *params, size_t n_params, uint64_t least_bytes, uint64_t most_bytes,
                           uint64_t *chunk_bytes) {
  if (least_bytes == 0 || least_bytes > most_bytes || most_bytes > PTN_PLAN_MOST_BYTES) {
    return ptn_fail(PTN_INVALID, "chunks of %llu to %llu bytes; give 1 to %llu, the least first", (unsigned long long)least_bytes,
                    (unsigned long long)most_bytes, (unsigned long long)PTN_PLAN_MOST_BYTES);
  }
  double best_share = -1.0;
  uint32_t n_chunks;
  for (uint64_t i = 0; i <= GRID_SIZES; i++) { /* the largest first */
    uint64_t bytes = ptn_round_up(most_bytes - (most_bytes - least_bytes) * i / GRID_SIZES, PTN_PAGE_BYTES);
    PTN_TRY(ptn_layout(params, n_params, bytes, &n_chunks));
    double share = fill_share(params, n_params);
    if (share <= best_share + AS_GOOD) continue;
    best_share = share;
    *chunk_bytes = bytes;
  }
  return PTN_OK;
}
