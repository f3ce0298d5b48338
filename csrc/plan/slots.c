/* Slots: which of the shared places in memory each chunk on disk is loaded into, always the same one.
 *
 * Problem: chunks that are needed close together must not share a slot, and the slots together should be small. Design: the
 * recorded accesses of a step, taken as a cycle, say which chunks are close: those among any `window` distinct ones in a row.
 * That is a graph to be coloured. Two orders of colouring are tried, since each is best for some models: the order of execution
 * (best where sizes are alike: the graph is then nearly one of intervals) and that of falling size (best where they differ: what
 * comes later costs nothing in a slot that is there); the one with fewer bytes is taken. Chunks much larger than most, such as
 * an embedding, share slots only with each other: a block in their slot would drive out what is the most expensive to bring
 * back.
 *
 * The graph is not built: what is close to an access is a range of the sequence around it, whose ends only move on from one access
 * to the next. Where ranges of a chunk's accesses overlap each part is looked at once, so that all chunks together look at
 * about 2 * window for each access, however often they occur.
 *
 * Invariants: the result depends on the request, n_persist and window alone; a slot is as large as the largest chunk in it;
 * every chunk from n_persist on has one. A chunk that no access names is taken as near its neighbours in execution order.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/parts.h"

struct ptn_slots_scratch {
  uint32_t *sequence; /* accesses to chunks that are not persistent, repetitions in a row left out; three laps of the cycle */
  uint32_t *begin, *end; /* of the range that each position is close to: in the second lap, in the first two */
  uint32_t *count; /* of each chunk in the range from the position to its end */
  uint32_t *first_place; /* of each chunk in `places`, n_chunks + 1 entries */
  uint32_t *places; /* the positions of each chunk in the second lap, in order */
  uint32_t length; /* of a lap */
  bool all_seen; /* every chunk that is not persistent is in the sequence */
  uint32_t *by_size; /* all chunks by falling size, those alike in their order */
  uint32_t *order; /* chunks in the order of colouring */
  uint32_t *stamp; /* of each slot, from 1 on: the chunk for which it is forbidden, + 1; the first is of chunks without one */
  bool *slot_large;
  uint64_t large_bytes; /* chunks above it are much larger than most */
  int32_t *other_slot_of_chunk; /* of the second order */
  uint64_t *other_slot_bytes;
};

typedef struct sized {
  uint64_t bytes;
  uint32_t chunk;
} sized;

static int falling(const void *a, const void *b) {
  const sized *left = a, *right = b;
  if (left->bytes != right->bytes) return left->bytes < right->bytes ? 1 : -1;
  return (left->chunk > right->chunk) - (left->chunk < right->chunk);
}

static bool sort_by_size(const ptn_plan_request *request, uint32_t *by_size) {
  sized *chunks = calloc((size_t)request->n_chunks + 1, sizeof *chunks);
  if (!chunks) return false;
  for (uint32_t c = 0; c < request->n_chunks; c++) chunks[c] = (sized){request->chunks[c].param_bytes, c};
  qsort(chunks, request->n_chunks, sizeof *chunks, falling);
  for (uint32_t i = 0; i < request->n_chunks; i++) by_size[i] = chunks[i].chunk;
  free(chunks);
  return true;
}

ptn_status ptn_slots_scratch_create(ptn_slots_scratch **out, const ptn_plan_request *request) {
  *out = NULL;
  size_t chunks = (size_t)request->n_chunks + 1, accesses = (size_t)request->n_accesses + 1;
  ptn_slots_scratch *scratch = calloc(1, sizeof *scratch);
  if (!scratch) return ptn_fail(PTN_MEMORY, "no memory to plan slots");
  scratch->sequence = calloc(3 * accesses, sizeof *scratch->sequence);
  scratch->begin = calloc(2 * accesses, sizeof *scratch->begin);
  scratch->end = calloc(2 * accesses, sizeof *scratch->end);
  scratch->count = calloc(chunks, sizeof *scratch->count);
  scratch->first_place = calloc(chunks + 1, sizeof *scratch->first_place);
  scratch->places = calloc(accesses, sizeof *scratch->places);
  scratch->by_size = calloc(chunks, sizeof *scratch->by_size);
  scratch->order = calloc(chunks, sizeof *scratch->order);
  scratch->stamp = calloc(chunks + 1, sizeof *scratch->stamp);
  scratch->slot_large = calloc(chunks, sizeof *scratch->slot_large);
  scratch->other_slot_of_chunk = calloc(chunks, sizeof *scratch->other_slot_of_chunk);
  scratch->other_slot_bytes = calloc(chunks, sizeof *scratch->other_slot_bytes);
  if (!scratch->sequence || !scratch->begin || !scratch->end || !scratch->count || !scratch->first_place || !scratch->places ||
      !scratch->by_size || !scratch->order || !scratch->stamp || !scratch->slot_large || !scratch->other_slot_of_chunk ||
      !scratch->other_slot_bytes || !sort_by_size(request, scratch->by_size)) {
    ptn_slots_scratch_destroy(scratch);
    return ptn_fail(PTN_MEMORY, "no memory to plan slots for %zu chunks and %zu accesses", chunks - 1, accesses - 1);
  }
  *out = scratch;
  return PTN_OK;
}

void ptn_slots_scratch_destroy(ptn_slots_scratch *scratch) {
  if (!scratch) return;
  free(scratch->sequence);
  free(scratch->begin);
  free(scratch->end);
  free(scratch->count);
  free(scratch->first_place);
  free(scratch->places);
  free(scratch->by_size);
  free(scratch->order);
  free(scratch->stamp);
  free(scratch->slot_large);
  free(scratch->other_slot_of_chunk);
  free(scratch->other_slot_bytes);
  free(scratch);
}

/* ---- what is close ---- */

static void read_sequence(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t n_persist) {
  uint32_t *sequence = scratch->sequence, length = 0;
  for (uint32_t i = 0; i < request->n_accesses; i++) {
    uint32_t chunk = request->accesses[i];
    if (chunk >= n_persist && (length == 0 || sequence[length - 1] != chunk)) sequence[length++] = chunk;
  }
  memcpy(sequence + length, sequence, length * sizeof *sequence);
  memcpy(sequence + 2 * (size_t)length, sequence, length * sizeof *sequence);
  scratch->length = length;
}

/* To both sides as far as there are `window` distinct chunks, a lap at most. */
static void find_ranges(ptn_slots_scratch *scratch, uint32_t n_chunks, uint32_t window) {
  const uint32_t *sequence = scratch->sequence;
  uint32_t *count = scratch->count, length = scratch->length, n_distinct = 0, end = 0, begin = 0;
  memset(count, 0, n_chunks * sizeof *count);
  for (uint32_t i = 0; i < 2 * length; i++) {
    for (; end < i + length && (count[sequence[end]] > 0 || n_distinct < window); end++) {
      n_distinct += count[sequence[end]]++ == 0;
    }
    scratch->end[i] = end;
    n_distinct -= --count[sequence[i]] == 0;
  }
  for (uint32_t i = length; i < 2 * length; i++) {
    while (scratch->end[begin] <= i) begin++;
    scratch->begin[i] = begin;
  }
}

static void find_places(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t n_persist) {
  uint32_t *first = scratch->first_place, n_chunks = request->n_chunks, length = scratch->length;
  memset(first, 0, ((size_t)n_chunks + 1) * sizeof *first);
  for (uint32_t i = 0; i < length; i++) first[scratch->sequence[i]]++;
  scratch->all_seen = true;
  for (uint32_t c = 0, sum = 0; c <= n_chunks; c++) { /* ends of the ranges, moved down to their starts as they fill */
    scratch->all_seen &= c < n_persist || c == n_chunks || first[c] > 0;
    sum += c < n_chunks ? first[c] : 0;
    first[c] = sum;
  }
  for (uint32_t i = length; i-- > 0;) scratch->places[--first[scratch->sequence[i]]] = length + i;
}

/* ---- colouring ---- */

/* No slot is stamped for those that have none yet: which these are is as good as random, and a branch would cost more. */
static void forbid_near(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t n_persist, uint32_t window,
                        uint32_t chunk, const int32_t *slot_of_chunk) {
  const uint32_t *sequence = scratch->sequence, *first = scratch->first_place;
  uint32_t *stamp = scratch->stamp + 1, done = 0;
  for (uint32_t j = first[chunk]; j < first[chunk + 1]; j++) {
    uint32_t place = scratch->places[j], begin = scratch->begin[place], end = scratch->end[place];
    for (uint32_t i = begin > done ? begin : done; i < end; i++) stamp[slot_of_chunk[sequence[i]]] = chunk + 1;
    done = end;
  }
  if (scratch->all_seen) return;
  bool seen = first[chunk] < first[chunk + 1];
  uint32_t from = chunk >= n_persist + (window - 1) ? chunk - (window - 1) : n_persist;
  for (uint32_t d = from; d < request->n_chunks && d < chunk + window; d++) {
    if (!seen || first[d] == first[d + 1]) stamp[slot_of_chunk[d]] = chunk + 1;
  }
}

/* The slot of its kind that grows least for it among those no near chunk has, or a new one. */
static void colour(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t chunk, int32_t *slot_of_chunk,
                   uint64_t *slot_bytes, uint32_t *n_slots) {
  uint64_t bytes = request->chunks[chunk].param_bytes, best_growth = UINT64_MAX;
  bool large = bytes > scratch->large_bytes;
  uint32_t best = *n_slots;
  for (uint32_t s = 0; s < *n_slots; s++) {
    bool possible = (scratch->stamp[s + 1] != chunk + 1) & (scratch->slot_large[s] == large);
    uint64_t growth = (bytes > slot_bytes[s] ? bytes - slot_bytes[s] : 0) | ((uint64_t)possible - 1);
    if (growth < best_growth) best_growth = growth, best = s;
  }
  if (best == *n_slots) {
    slot_bytes[best] = 0;
    scratch->slot_large[best] = large;
    ++*n_slots;
  }
  slot_of_chunk[chunk] = (int32_t)best;
  slot_bytes[best] = ptn_max_u64(slot_bytes[best], bytes);
}

static uint64_t colour_all(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t n_persist, uint32_t window,
                           int32_t *slot_of_chunk, uint64_t *slot_bytes, uint32_t *n_slots) {
  *n_slots = 0;
  memset(scratch->stamp, 0, ((size_t)request->n_chunks + 1) * sizeof *scratch->stamp);
  for (uint32_t c = 0; c < request->n_chunks; c++) slot_of_chunk[c] = -1;
  for (uint32_t i = 0; i < request->n_chunks - n_persist; i++) {
    forbid_near(request, scratch, n_persist, window, scratch->order[i], slot_of_chunk);
    colour(request, scratch, scratch->order[i], slot_of_chunk, slot_bytes, n_slots);
  }
  uint64_t total_bytes = 0;
  for (uint32_t s = 0; s < *n_slots; s++) total_bytes += slot_bytes[s];
  return total_bytes;
}

static void order_by_size(ptn_slots_scratch *scratch, uint32_t n_chunks, uint32_t n_persist) {
  for (uint32_t i = 0, count = 0; i < n_chunks; i++) {
    if (scratch->by_size[i] >= n_persist) scratch->order[count++] = scratch->by_size[i];
  }
}

void ptn_slots(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t n_persist, uint32_t window,
               int32_t *slot_of_chunk, uint64_t *slot_bytes, uint32_t *n_slots) {
  uint32_t n_chunks = request->n_chunks, count = n_chunks - n_persist, *order = scratch->order;
  *n_slots = 0;
  for (uint32_t c = 0; c < n_chunks; c++) slot_of_chunk[c] = -1;
  if (count == 0) return;
  if (window >= count) { /* each its own */
    for (; *n_slots < count; ++*n_slots) {
      slot_of_chunk[n_persist + *n_slots] = (int32_t)*n_slots;
      slot_bytes[*n_slots] = request->chunks[n_persist + *n_slots].param_bytes;
    }
    return;
  }
  read_sequence(request, scratch, n_persist);
  find_ranges(scratch, n_chunks, window);
  find_places(request, scratch, n_persist);
  order_by_size(scratch, n_chunks, n_persist);
  scratch->large_bytes = 2 * request->chunks[order[count / 2]].param_bytes; /* more than twice the lower median */
  int32_t *others = scratch->other_slot_of_chunk;
  uint32_t n_others;
  uint64_t other_bytes = colour_all(request, scratch, n_persist, window, others, scratch->other_slot_bytes, &n_others);
  for (uint32_t i = 0; i < count; i++) order[i] = n_persist + i;
  uint64_t total_bytes = colour_all(request, scratch, n_persist, window, slot_of_chunk, slot_bytes, n_slots);
  if (other_bytes > total_bytes || (other_bytes == total_bytes && n_others >= *n_slots)) return;
  memcpy(slot_of_chunk, others, n_chunks * sizeof *others);
  memcpy(slot_bytes, scratch->other_slot_bytes, n_others * sizeof *slot_bytes);
  *n_slots = n_others;
}
