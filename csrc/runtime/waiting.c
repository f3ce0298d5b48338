/* The driving thread stood still: one place counts it and tells the trace, so that the two cannot differ in what they mean. */
#include "runtime/internal.h"

/* Shorter waits are a lock or a wakeup: they count, and would only fill the trace. */
#define SHORTEST_TRACED_NS 1000

void ptn_waited(ptn_engine *engine, ptn_trace_kind kind, int32_t number, int64_t begin_ns) {
  int64_t end_ns = ptn_now_ns();
  engine->wait_ns += end_ns - begin_ns;
  if (end_ns - begin_ns < SHORTEST_TRACED_NS) return;
  ptn_trace_add(engine->trace,
                (ptn_trace_event){.start_ns = begin_ns, .end_ns = end_ns, .number = number, .lane = PTN_LANE_WAIT, .kind = kind});
}
