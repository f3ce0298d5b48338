/* The trace: what each lane did when, kept for the last moments of a run.
 *
 * A ring that is always written, so that a question about a step that is over can be answered; the oldest events give way. Who
 * finds that a step has more of them than it holds makes it larger. An event is written when it has ended. Any thread may add; one
 * lock, held for a copy of 40 bytes.
 */
#ifndef PTN_BASE_TRACE_H
#define PTN_BASE_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Words of the timeline; protrain/profiling/timeline.py has their names, in this order. */
typedef enum ptn_trace_lane {
  PTN_LANE_STEP = 0, /* whole steps */
  PTN_LANE_COMPUTE,  /* blocks, on the thread that drives the step */
  PTN_LANE_WAIT,     /* the driving thread stands still */
  PTN_LANE_READ,
  PTN_LANE_WRITE,
  PTN_LANE_UPDATE,
  PTN_LANE_UPLOAD,   /* to the device */
  PTN_LANE_OFFLOAD,  /* from it */
} ptn_trace_lane;

typedef enum ptn_trace_kind {
  PTN_TRACE_STEP = 0,
  PTN_TRACE_FORWARD,     /* compute: of a block */
  PTN_TRACE_BACKWARD,
  PTN_TRACE_RECOMPUTE,
  PTN_TRACE_PARAMETERS,  /* read, write, upload, wait: of a chunk */
  PTN_TRACE_STATE,       /* optimizer state and updated parameters of a chunk */
  PTN_TRACE_GRADIENTS,   /* read, write, offload: of a chunk */
  PTN_TRACE_ACTIVATIONS, /* read, write, wait: of a block */
  PTN_TRACE_UPDATE,      /* update: of a chunk; wait: for updates under way */
  PTN_TRACE_MEMORY,      /* wait: until memory is free */
} ptn_trace_kind;

typedef struct ptn_trace_event {
  int64_t start_ns, end_ns; /* by ptn_now_ns */
  uint64_t bytes;           /* moved; 0 where nothing was */
  int32_t number;           /* of the block or chunk; -1: none */
  ptn_trace_lane lane;
  ptn_trace_kind kind;
} ptn_trace_event;

typedef struct ptn_trace ptn_trace;
ptn_status ptn_trace_create(ptn_trace **out, size_t capacity_count);
void ptn_trace_destroy(ptn_trace *trace);
/* Twice as many events, those that are there among them; false where there is no memory for so many, or they are most_count. */
bool ptn_trace_grow(ptn_trace *trace, size_t most_count);
/* trace NULL: nothing. An event of no length and no bytes is left out. */
void ptn_trace_add(ptn_trace *trace, ptn_trace_event event);
/* The thread that drives the step stood still from begin_ns until now: the event on the wait lane, and how long it was in ns. Shorter
 * waits than a microsecond are a lock or a wakeup: they would only fill the trace. */
int64_t ptn_trace_waited(ptn_trace *trace, ptn_trace_kind kind, int32_t number, int64_t begin_ns);
/* Copies the events that ended at since_ns or later, at most most_count of them, the oldest, in the order they were added;
 * returns how many. With most_count 0: how many there are. So who asks first and copies as many has all that were there. */
size_t ptn_trace_copy(ptn_trace *trace, int64_t since_ns, ptn_trace_event *out, size_t most_count);

#endif
