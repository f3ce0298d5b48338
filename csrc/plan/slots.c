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
 * Invariants: the result depends on the request, n_persist and window alone; a slot is as large as the largest chunk in it;
 * every chunk from n_persist on has one. A chunk that no access names is taken as near its neighbours in execution order.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/parts.h"

#define MOST_PAIRED_CHUNKS 512 /* of so many every pair is marked as close or not: 256 KiB */

struct ptn_slots_scratch {
  uint32_t *sequence;    /* accesses to chunks that are not persistent, repetitions in a row left out */
  uint32_t *recent;      /* the next distinct chunks, nearest first */
  uint32_t *edge_from, *edge_to;
  uint32_t *first_edge;  /* of each chunk in `near`, n_chunks + 1 entries */
  uint32_t *near;        /* the chunks close to each chunk */
  uint32_t *order;       /* chunks in the order of colouring */
  uint32_t *stamp;       /* of each slot: the chunk for which it is forbidden, + 1 */
  uint8_t *seen;         /* chunk is in the sequence */
  bool *slot_large;
  int32_t *other_slot_of_chunk; /* of the second order */
  uint64_t *other_slot_bytes;
  uint64_t *sizes;
  uint8_t *noted; /* of each pair of chunks: there is an edge; NULL: there are too many pairs, and edges may be there twice */
  uint32_t n_edges;
  uint64_t large_bytes; /* chunks above it are much larger than most */
};

ptn_status ptn_slots_scratch_create(ptn_slots_scratch **out, const ptn_plan_request *request, uint32_t most_window) {
  *out = NULL;
  size_t chunks = (size_t)request->n_chunks + 1, accesses = (size_t)request->n_accesses + 1;
  size_t window = ptn_min_u64(most_window, request->n_chunks) + 1;
  size_t edges = (accesses + chunks) * window;
  ptn_slots_scratch *scratch = calloc(1, sizeof *scratch);
  if (!scratch) return ptn_fail(PTN_MEMORY, "no memory to plan slots");
  scratch->sequence = calloc(accesses, sizeof *scratch->sequence);
  scratch->recent = calloc(window + 1, sizeof *scratch->recent);
  scratch->edge_from = calloc(edges, sizeof *scratch->edge_from);
  scratch->edge_to = calloc(edges, sizeof *scratch->edge_to);
  scratch->first_edge = calloc(chunks + 1, sizeof *scratch->first_edge);
  scratch->near = calloc(2 * edges, sizeof *scratch->near);
  scratch->order = calloc(chunks, sizeof *scratch->order);
  scratch->stamp = calloc(chunks, sizeof *scratch->stamp);
  scratch->seen = calloc(chunks, sizeof *scratch->seen);
  scratch->slot_large = calloc(chunks, sizeof *scratch->slot_large);
  scratch->other_slot_of_chunk = calloc(chunks, sizeof *scratch->other_slot_of_chunk);
  scratch->other_slot_bytes = calloc(chunks, sizeof *scratch->other_slot_bytes);
  scratch->sizes = calloc(chunks, sizeof *scratch->sizes);
  bool pairs = request->n_chunks > 0 && request->n_chunks <= MOST_PAIRED_CHUNKS;
  if (pairs) scratch->noted = calloc(chunks, chunks);
  if (!scratch->sequence || !scratch->recent || !scratch->edge_from || !scratch->edge_to || !scratch->first_edge ||
      !scratch->near || !scratch->order || !scratch->stamp || !scratch->seen || !scratch->slot_large ||
      !scratch->other_slot_of_chunk || !scratch->other_slot_bytes || !scratch->sizes || (pairs && !scratch->noted)) {
    ptn_slots_scratch_destroy(scratch);
    return ptn_fail(PTN_MEMORY, "no memory to plan slots for %zu chunks and %zu accesses", chunks - 1, accesses - 1);
  }
  *out = scratch;
  return PTN_OK;
}

void ptn_slots_scratch_destroy(ptn_slots_scratch *scratch) {
  if (!scratch) return;
  free(scratch->sequence);
  free(scratch->recent);
  free(scratch->edge_from);
  free(scratch->edge_to);
  free(scratch->first_edge);
  free(scratch->near);
  free(scratch->order);
  free(scratch->stamp);
  free(scratch->seen);
  free(scratch->slot_large);
  free(scratch->other_slot_of_chunk);
  free(scratch->other_slot_bytes);
  free(scratch->sizes);
  free(scratch->noted);
  free(scratch);
}

static void add_edge(ptn_slots_scratch *scratch, uint32_t n_chunks, uint32_t from, uint32_t to) {
  if (scratch->noted) {
    uint8_t *noted = &scratch->noted[(size_t)from * n_chunks + to];
    if (*noted) return;
    *noted = scratch->noted[(size_t)to * n_chunks + from] = 1;
  }
  scratch->edge_from[scratch->n_edges] = from;
  scratch->edge_to[scratch->n_edges++] = to;
}

static uint32_t read_sequence(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t n_persist) {
  uint32_t length = 0;
  memset(scratch->seen, 0, request->n_chunks);
  for (uint32_t i = 0; i < request->n_accesses; i++) {
    uint32_t chunk = request->accesses[i];
    if (chunk < n_persist || (length > 0 && scratch->sequence[length - 1] == chunk)) continue;
    scratch->sequence[length++] = chunk;
    scratch->seen[chunk] = 1;
  }
  return length;
}

/* Two laps backward over the cycle with the list of the next distinct chunks; edges are noted in the second, when it is full. */
static void find_near(ptn_slots_scratch *scratch, uint32_t n_chunks, uint32_t length, uint32_t window) {
  uint32_t *recent = scratch->recent, n_recent = 0;
  for (uint32_t lap = 0; lap < 2; lap++) {
    for (uint32_t i = length; i-- > 0;) {
      uint32_t chunk = scratch->sequence[i], at = 0;
      for (uint32_t j = 0, noted = 0; lap == 1 && j < n_recent && noted + 1 < window; j++) {
        if (recent[j] == chunk) continue;
        add_edge(scratch, n_chunks, chunk, recent[j]);
        noted++;
      }
      while (at < n_recent && recent[at] != chunk) at++;
      if (at == n_recent && n_recent < window) n_recent++;
      if (at == n_recent) at--; /* the farthest is forgotten */
      memmove(recent + 1, recent, at * sizeof *recent);
      recent[0] = chunk;
    }
  }
}

static void build_graph(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t n_persist, uint32_t window) {
  uint32_t n_chunks = request->n_chunks;
  scratch->n_edges = 0;
  if (scratch->noted) memset(scratch->noted, 0, (size_t)n_chunks * n_chunks);
  find_near(scratch, n_chunks, read_sequence(request, scratch, n_persist), window);
  for (uint32_t c = n_persist; c < n_chunks; c++) {
    uint32_t from = c >= n_persist + (window - 1) ? c - (window - 1) : n_persist;
    for (uint32_t d = from; d < n_chunks && d < c + window; d++) {
      bool unknown = !scratch->seen[c] || !scratch->seen[d];
      if (d < c && unknown) add_edge(scratch, n_chunks, c, d);
    }
  }
  uint32_t *first = scratch->first_edge;
  memset(first, 0, ((size_t)n_chunks + 1) * sizeof *first);
  for (uint32_t i = 0; i < scratch->n_edges; i++) {
    first[scratch->edge_from[i]]++;
    first[scratch->edge_to[i]]++;
  }
  for (uint32_t c = 0, sum = 0; c <= n_chunks; c++) { /* ends of the ranges, moved down to their starts as they fill */
    sum += c < n_chunks ? first[c] : 0;
    first[c] = sum;
  }
  for (uint32_t i = scratch->n_edges; i-- > 0;) {
    scratch->near[--first[scratch->edge_from[i]]] = scratch->edge_to[i];
    scratch->near[--first[scratch->edge_to[i]]] = scratch->edge_from[i];
  }
}

static int by_size(const void *a, const void *b) {
  uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
  return (left > right) - (left < right);
}

/* Much larger than most: more than twice the lower median. */
static uint64_t find_large(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t n_persist) {
  uint32_t count = request->n_chunks - n_persist;
  for (uint32_t i = 0; i < count; i++) scratch->sizes[i] = request->chunks[n_persist + i].param_bytes;
  qsort(scratch->sizes, count, sizeof *scratch->sizes, by_size);
  return 2 * scratch->sizes[(count - 1) / 2];
}

/* The slot of its kind that grows least for it among those no near chunk has, or a new one. */
static void colour(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t chunk, int32_t *slot_of_chunk,
                   uint64_t *slot_bytes, uint32_t *n_slots) {
  uint64_t bytes = request->chunks[chunk].param_bytes, best_growth = UINT64_MAX;
  bool large = bytes > scratch->large_bytes;
  for (uint32_t i = scratch->first_edge[chunk]; i < scratch->first_edge[chunk + 1]; i++) {
    int32_t slot = slot_of_chunk[scratch->near[i]];
    if (slot >= 0) scratch->stamp[slot] = chunk + 1;
  }
  uint32_t best = *n_slots;
  for (uint32_t s = 0; s < *n_slots; s++) {
    if (scratch->stamp[s] == chunk + 1 || scratch->slot_large[s] != large) continue;
    uint64_t growth = bytes > slot_bytes[s] ? bytes - slot_bytes[s] : 0;
    if (growth < best_growth) best_growth = growth, best = s;
  }
  if (best == *n_slots) {
    slot_bytes[best] = 0;
    scratch->slot_large[best] = large;
    scratch->stamp[best] = 0;
    ++*n_slots;
  }
  slot_of_chunk[chunk] = (int32_t)best;
  slot_bytes[best] = ptn_max_u64(slot_bytes[best], bytes);
}

static uint64_t colour_all(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t n_persist,
                           int32_t *slot_of_chunk, uint64_t *slot_bytes, uint32_t *n_slots) {
  *n_slots = 0;
  memset(scratch->stamp, 0, request->n_chunks * sizeof *scratch->stamp);
  for (uint32_t c = 0; c < request->n_chunks; c++) slot_of_chunk[c] = -1;
  for (uint32_t i = 0; i < request->n_chunks - n_persist; i++) {
    colour(request, scratch, scratch->order[i], slot_of_chunk, slot_bytes, n_slots);
  }
  uint64_t total_bytes = 0;
  for (uint32_t s = 0; s < *n_slots; s++) total_bytes += slot_bytes[s];
  return total_bytes;
}

/* The order of falling size, stable. Already nearly sorted as models are: insertion. */
static void sort_by_size(const ptn_plan_request *request, uint32_t *order, uint32_t count) {
  for (uint32_t i = 1; i < count; i++) {
    uint32_t chunk = order[i], j = i;
    for (; j > 0 && request->chunks[order[j - 1]].param_bytes < request->chunks[chunk].param_bytes; j--) order[j] = order[j - 1];
    order[j] = chunk;
  }
}

void ptn_slots(const ptn_plan_request *request, ptn_slots_scratch *scratch, uint32_t n_persist, uint32_t window,
               int32_t *slot_of_chunk, uint64_t *slot_bytes, uint32_t *n_slots) {
  uint32_t n_chunks = request->n_chunks, count = n_chunks - n_persist;
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
  build_graph(request, scratch, n_persist, window);
  scratch->large_bytes = find_large(request, scratch, n_persist);
  for (uint32_t i = 0; i < count; i++) scratch->order[i] = n_persist + i;
  uint64_t total_bytes = colour_all(request, scratch, n_persist, slot_of_chunk, slot_bytes, n_slots);
  sort_by_size(request, scratch->order, count);
  uint32_t n_others;
  int32_t *others = scratch->other_slot_of_chunk;
  uint64_t other_bytes = colour_all(request, scratch, n_persist, others, scratch->other_slot_bytes, &n_others);
  if (other_bytes > total_bytes || (other_bytes == total_bytes && n_others >= *n_slots)) return;
  memcpy(slot_of_chunk, others, n_chunks * sizeof *others);
  memcpy(slot_bytes, scratch->other_slot_bytes, n_others * sizeof *slot_bytes);
  *n_slots = n_others;
}
