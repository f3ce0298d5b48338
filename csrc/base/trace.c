/* The trace's ring: see trace.h for what is kept.
 *
 * Problem: threads of every lane report many thousand events a step, and only now and then somebody asks for them.
 * Design: one array, written round and round under one lock that nobody holds for more than a copy. The pages are touched when
 * they are first written, so a run that is short costs no more memory than it has events.
 * Invariants: `added` only grows; events[i % capacity] is the i-th event added, from `first` on and for the last `capacity` of
 * them. The lock is a leaf: whoever holds it takes no other, so an event may be added under any lock.
 */
#include "base/trace.h"

#include <stdlib.h>

#include "base/threads.h"

#define SHORTEST_WAIT_NS 1000

struct ptn_trace {
  ptn_mutex mutex;
  uint64_t added, first; /* first: of those that are kept, unless younger ones took its place */
  size_t capacity;
  ptn_trace_event *events;
};

ptn_status ptn_trace_create(ptn_trace **out, size_t capacity_count) {
  *out = NULL;
  if (capacity_count == 0 || capacity_count > SIZE_MAX / sizeof(ptn_trace_event))
    return ptn_fail(PTN_INVALID, "a trace of %zu events: at least 1 and no more than memory holds are wanted", capacity_count);
  ptn_trace *trace = calloc(1, sizeof *trace);
  if (trace) trace->events = calloc(capacity_count, sizeof *trace->events);
  if (!trace || !trace->events) {
    free(trace);
    return ptn_fail(PTN_MEMORY, "no memory for a trace of %zu events", capacity_count);
  }
  ptn_mutex_create(&trace->mutex);
  trace->capacity = capacity_count;
  *out = trace;
  return PTN_OK;
}

void ptn_trace_destroy(ptn_trace *trace) {
  if (!trace) return;
  ptn_mutex_destroy(&trace->mutex);
  free(trace->events);
  free(trace);
}

/* Of those that are kept. */
static uint64_t oldest(const ptn_trace *trace) {
  uint64_t in_place = trace->added > trace->capacity ? trace->added - trace->capacity : 0;
  return in_place > trace->first ? in_place : trace->first;
}

bool ptn_trace_grow(ptn_trace *trace, size_t most_count) {
  ptn_lock(&trace->mutex);
  size_t count = 2 * trace->capacity;
  ptn_trace_event *events = count <= most_count ? calloc(count, sizeof *events) : NULL;
  if (events) {
    trace->first = oldest(trace);
    for (uint64_t i = trace->first; i < trace->added; i++) events[i % count] = trace->events[i % trace->capacity];
    free(trace->events);
    trace->events = events;
    trace->capacity = count;
  }
  ptn_unlock(&trace->mutex);
  return events != NULL;
}

void ptn_trace_add(ptn_trace *trace, ptn_trace_event event) {
  if (!trace || (event.end_ns <= event.start_ns && event.bytes == 0)) return;
  ptn_lock(&trace->mutex);
  trace->events[trace->added++ % trace->capacity] = event;
  ptn_unlock(&trace->mutex);
}

int64_t ptn_trace_waited(ptn_trace *trace, ptn_trace_kind kind, int32_t number, int64_t begin_ns) {
  int64_t end_ns = ptn_now_ns();
  if (end_ns - begin_ns >= SHORTEST_WAIT_NS)
    ptn_trace_add(
        trace, (ptn_trace_event){.start_ns = begin_ns, .end_ns = end_ns, .number = number, .lane = PTN_LANE_WAIT, .kind = kind});
  return end_ns - begin_ns;
}

/* Ends are not in the order of the events, since who was first to end may be second to add: all are looked at. */
size_t ptn_trace_copy(ptn_trace *trace, int64_t since_ns, ptn_trace_event *out, size_t most_count) {
  ptn_lock(&trace->mutex);
  uint64_t first = oldest(trace);
  size_t count = 0;
  for (uint64_t i = first; i < trace->added; i++) count += trace->events[i % trace->capacity].end_ns >= since_ns;
  if (most_count == 0) {
    ptn_unlock(&trace->mutex);
    return count;
  }
  size_t copied = 0;
  for (uint64_t i = first; i < trace->added && copied < most_count; i++) {
    const ptn_trace_event *event = &trace->events[i % trace->capacity];
    if (event->end_ns >= since_ns) out[copied++] = *event;
  }
  ptn_unlock(&trace->mutex);
  return copied;
}
