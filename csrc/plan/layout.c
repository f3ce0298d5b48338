/* Layout: parameters into chunks.
 *
 * Problem: a chunk is loaded and dropped as a whole, so what is used at one moment should lie in one chunk, and what is used at
 * other moments should not. Design: the parameters come in execution order and are cut into runs of one block; a run goes where
 * it fits whole, and is cut greedily only where it is larger than a chunk. Invariants: the order of parameters is the order of
 * (chunk, offset); offsets are multiples of PTN_TENSOR_ALIGN_BYTES; a chunk of several parameters never passes chunk_bytes; a
 * chunk holds whole blocks, or a piece of one block, or parameters outside of blocks, never two of these.
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
  if (chunk_bytes == 0) return ptn_fail(PTN_INVALID, "chunk_bytes is 0; give at least one page");
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
