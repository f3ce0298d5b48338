/* The trace: the ring keeps the newest, threads lose nothing, and an engine's events add up to what its figures say. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/optim/?*.c csrc/runtime/?*.c */
/* threads */
#include <stdatomic.h>
#include <string.h>

#include "base/bytes.h"
#include "base/trace.h"
#include "check.h"
#include "runtime/engine.h"

static ptn_trace_event event_at(int64_t start_ns, int64_t end_ns, int32_t number) {
  return (ptn_trace_event){
      .start_ns = start_ns, .end_ns = end_ns, .number = number, .lane = PTN_LANE_READ, .kind = PTN_TRACE_STATE};
}

static void an_event_is_40_bytes_and_comes_back_whole(void) {
  CHECK(sizeof(ptn_trace_event) == 40);
  ptn_trace *trace;
  CHECK_OK(ptn_trace_create(&trace, 3));
  ptn_trace_event in = {-5, INT64_MAX, UINT64_MAX, -1, PTN_LANE_UPDATE, PTN_TRACE_MEMORY}, out;
  ptn_trace_add(trace, in);
  CHECK(ptn_trace_copy(trace, INT64_MIN, &out, 1) == 1);
  CHECK(out.start_ns == in.start_ns && out.end_ns == in.end_ns && out.bytes == in.bytes && out.number == in.number &&
        out.lane == in.lane && out.kind == in.kind);
  ptn_trace_destroy(trace);
}

static void the_oldest_give_way(void) {
  enum { CAPACITY = 7 };
  ptn_trace *trace;
  CHECK_OK(ptn_trace_create(&trace, CAPACITY));
  CHECK(ptn_trace_copy(trace, 0, NULL, 0) == 0);
  ptn_trace_event out[3 * CAPACITY];
  for (int32_t added = 1; added <= 30; added++) {
    ptn_trace_add(trace, event_at(added, added + 1, added));
    size_t kept = (size_t)(added < CAPACITY ? added : CAPACITY);
    CHECK(ptn_trace_copy(trace, 0, NULL, 0) == kept);
    for (size_t most = 1; most <= CAPACITY + 2; most++) {
      size_t count = ptn_trace_copy(trace, 0, out, most);
      CHECK(count == (kept < most ? kept : most));
      for (size_t i = 0; i < count; i++) CHECK(out[i].number == added - (int32_t)(kept - 1 - i));
    }
  }
  ptn_trace_destroy(trace);
}

/* What a larger ring takes over, and what it then holds. */
static void a_ring_that_grows(void) {
  enum { CAPACITY = 4 };
  for (int32_t before = 0; before <= 10; before++) {
    ptn_trace *trace;
    CHECK_OK(ptn_trace_create(&trace, CAPACITY));
    for (int32_t added = 1; added <= before; added++) ptn_trace_add(trace, event_at(added, added + 1, added));
    CHECK(!ptn_trace_grow(trace, 2 * CAPACITY - 1));
    CHECK(ptn_trace_grow(trace, 2 * CAPACITY));
    CHECK(!ptn_trace_grow(trace, 2 * CAPACITY));
    int32_t oldest = before > CAPACITY ? before - CAPACITY + 1 : 1;
    for (int32_t added = before; added <= before + 20; added++) {
      if (added > before) ptn_trace_add(trace, event_at(added, added + 1, added));
      if (added - oldest >= 2 * CAPACITY) oldest = added - 2 * CAPACITY + 1;
      ptn_trace_event out[2 * CAPACITY];
      size_t count = ptn_trace_copy(trace, 0, out, 2 * CAPACITY);
      CHECK(count == (size_t)(added - oldest + 1));
      for (size_t i = 0; i < count; i++) CHECK(out[i].number == oldest + (int32_t)i);
    }
    ptn_trace_destroy(trace);
  }
}

/* Whoever ends first may be the second to add. */
static void since_looks_at_each_end(void) {
  static const int64_t ends[] = {50, 20, 60, 10, 55, 30};
  static const int32_t later[] = {0, 2, 4}; /* the numbers of those that ended at 50 or later */
  ptn_trace *trace;
  CHECK_OK(ptn_trace_create(&trace, 16));
  for (int32_t i = 0; i < 6; i++) ptn_trace_add(trace, event_at(0, ends[i], i));
  ptn_trace_event out[6];
  CHECK(ptn_trace_copy(trace, 50, NULL, 0) == 3);
  CHECK(ptn_trace_copy(trace, 50, out, 6) == 3);
  for (size_t i = 0; i < 3; i++) CHECK(out[i].number == later[i]);
  CHECK(ptn_trace_copy(trace, 50, out, 2) == 2);
  for (size_t i = 0; i < 2; i++) CHECK(out[i].number == later[i]);
  CHECK(ptn_trace_copy(trace, 61, NULL, 0) == 0);
  CHECK(ptn_trace_copy(trace, 61, out, 6) == 0);
  ptn_trace_destroy(trace);
}

static void nothing_is_left_out_and_no_trace_is_fine(void) {
  ptn_trace *trace;
  CHECK_OK(ptn_trace_create(&trace, 4));
  ptn_trace_add(trace, event_at(9, 9, 0));
  ptn_trace_add(NULL, event_at(1, 2, 0));
  CHECK(ptn_trace_copy(trace, 0, NULL, 0) == 0);
  ptn_trace_event moved = event_at(9, 9, 0);
  moved.bytes = 1;
  ptn_trace_add(trace, moved);
  CHECK(ptn_trace_copy(trace, 0, NULL, 0) == 1);
  ptn_trace_destroy(trace);
  ptn_trace_destroy(NULL);
  CHECK(ptn_trace_create(&trace, 0) == PTN_INVALID && trace == NULL);
  CHECK(ptn_trace_create(&trace, SIZE_MAX / 2) == PTN_INVALID && trace == NULL);
}

/* ---- threads ---- */

enum { WRITERS = 4, EACH = 5000 };

typedef struct writer {
  ptn_trace *trace;
  int32_t number;
  atomic_bool *go_on;
} writer;

static void *write_events(void *argument) {
  const writer *w = argument;
  for (int64_t i = 0; i < EACH; i++) {
    ptn_trace_event event = event_at(i, i + 1 + w->number, w->number);
    event.bytes = (uint64_t)(i * 10 + w->number); /* torn events would show */
    ptn_trace_add(w->trace, event);
  }
  return NULL;
}

/* Each event is whole, and those of one writer are in its order and without a gap. Returns how many there are of it. */
static size_t check_order(const ptn_trace_event *events, size_t count, int32_t number) {
  int64_t last = -1;
  size_t found = 0;
  for (size_t i = 0; i < count; i++) {
    if (events[i].number != number) continue;
    CHECK(events[i].bytes == (uint64_t)(events[i].start_ns * 10 + number));
    CHECK(events[i].end_ns == events[i].start_ns + 1 + number);
    CHECK(found == 0 || events[i].start_ns == last + 1);
    last = events[i].start_ns;
    found++;
  }
  return found;
}

static void *read_events(void *argument) {
  const writer *w = argument;
  static ptn_trace_event out[500];
  do {
    size_t count = ptn_trace_copy(w->trace, 0, out, 500);
    CHECK(count <= 500);
    for (int32_t n = 0; n < WRITERS; n++) check_order(out, count, n);
  } while (atomic_load(w->go_on));
  return NULL;
}

static void writers_and_a_reader(size_t capacity) {
  static ptn_trace_event out[WRITERS * EACH];
  ptn_trace *trace;
  CHECK_OK(ptn_trace_create(&trace, capacity));
  atomic_bool go_on = true;
  writer writers[WRITERS], reader = {trace, 0, &go_on};
  pthread_t threads[WRITERS], reading;
  CHECK_OK(ptn_thread_start(&reading, "reader", read_events, &reader));
  for (int32_t n = 0; n < WRITERS; n++) {
    writers[n] = (writer){trace, n, &go_on};
    CHECK_OK(ptn_thread_start(&threads[n], "writer", write_events, &writers[n]));
  }
  for (int32_t n = 0; n < WRITERS; n++) ptn_thread_join(threads[n]);
  atomic_store(&go_on, false);
  ptn_thread_join(reading);
  size_t kept = ptn_min_u64(capacity, WRITERS * EACH), found = 0;
  CHECK(ptn_trace_copy(trace, 0, out, WRITERS * EACH) == kept);
  for (int32_t n = 0; n < WRITERS; n++) {
    size_t of_writer = check_order(out, kept, n);
    CHECK(capacity < WRITERS * EACH || of_writer == EACH);
    found += of_writer;
  }
  CHECK(found == kept);
  ptn_trace_destroy(trace);
}

/* ---- an engine's events ---- */

enum { CHUNKS = 3, STEPS = 3, STATES = 2, COUNT = 20000, WAITS_MOST = 20 };
static const uint64_t CHUNK_BYTES = 80 * 1024; /* of COUNT floats, in whole pages */

static ptn_engine *make_engine(ptn_account *account) {
  ptn_engine_chunk chunks[CHUNKS];
  ptn_engine_param params[CHUNKS];
  for (uint32_t c = 0; c < CHUNKS; c++) {
    chunks[c] = (ptn_engine_chunk){.param_bytes = CHUNK_BYTES, .trained = true};
    params[c] = (ptn_engine_param){.chunk = c, .count = COUNT, .trained = true};
  }
  ptn_engine_config config = {.folder = getenv("PROTRAIN_DISK") ? getenv("PROTRAIN_DISK") : ".",
                              .account = account,
                              .n_chunks = CHUNKS,
                              .n_params = CHUNKS,
                              .n_groups = 1,
                              .chunks = chunks,
                              .params = params,
                              .n_states = STATES};
  ptn_engine *engine;
  CHECK_OK(ptn_engine_create(&engine, &config));
  ptn_hyper hyper = {.kind = PTN_ADAM, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
  CHECK_OK(ptn_engine_set_hyper(engine, 0, &hyper));
  for (uint32_t c = 0; c < CHUNKS; c++) CHECK_OK(ptn_engine_to_disk(engine, c));
  int32_t slots[CHUNKS] = {0, 1, 0};
  uint64_t slot_bytes[2] = {CHUNK_BYTES, CHUNK_BYTES};
  CHECK_OK(ptn_engine_set_slots(engine, slots, slot_bytes, 2));
  CHECK_OK(ptn_engine_set_ring(engine, 4 * PTN_PAGE_BYTES, 4));
  return engine;
}

static void demand(ptn_engine *engine, uint32_t number) {
  bool conflict;
  CHECK_OK(ptn_engine_demand(engine, number, &conflict));
  CHECK(!conflict);
  ptn_engine_unuse(engine, number);
}

/* Forward and backward; the gradients of the last step first go to disk. */
static void run_step(ptn_engine *engine, const float *grad, bool spill) {
  for (uint32_t c = 0; c < CHUNKS; c++) demand(engine, c);
  for (uint32_t c = CHUNKS; c-- > 0;) {
    demand(engine, c);
    CHECK_OK(ptn_engine_gradient(engine, c, grad, NULL, spill ? PTN_GRADIENT_SPILL : PTN_GRADIENT_UPDATE));
  }
  CHECK_OK(ptn_engine_flush(engine));
  if (spill) CHECK_OK(ptn_engine_update_spilled(engine, 0.5f));
  CHECK_OK(ptn_engine_wait(engine));
  ptn_engine_commit(engine);
}

typedef struct sums {
  uint64_t bytes[PTN_LANE_UPDATE + 1][PTN_TRACE_MEMORY + 1];
  int64_t ns[PTN_LANE_UPDATE + 1][PTN_TRACE_MEMORY + 1];
  uint64_t chunk_bytes[CHUNKS];
} sums;

static sums sum_events(ptn_trace *trace, int64_t since_ns) {
  static ptn_trace_event events[1 << 14];
  size_t count = ptn_trace_copy(trace, since_ns, events, 1 << 14);
  CHECK(count > 0 && count < 1 << 14);
  sums sum = {0};
  for (size_t i = 0; i < count; i++) {
    const ptn_trace_event *event = &events[i];
    CHECK(event->start_ns >= since_ns && event->end_ns >= event->start_ns && event->end_ns <= ptn_now_ns());
    CHECK(event->number < CHUNKS && event->number >= (event->lane == PTN_LANE_WAIT ? -1 : 0));
    sum.bytes[event->lane][event->kind] += event->bytes;
    sum.ns[event->lane][event->kind] += event->end_ns - event->start_ns;
    if (event->number >= 0) sum.chunk_bytes[event->number] += event->bytes;
  }
  return sum;
}

static void an_engines_events_add_up(void) {
  ptn_account *account;
  CHECK_OK(ptn_account_create(&account, 64 * PTN_MIB, NULL, NULL));
  ptn_engine *engine = make_engine(account);
  static float grad[COUNT];
  for (size_t i = 0; i < COUNT; i++) grad[i] = (float)i * 0.001f;
  for (int step = 0; step < STEPS; step++) {
    int64_t since_ns = ptn_now_ns();
    ptn_engine_stats before, after;
    ptn_store_stats disk_before, disk_after;
    ptn_engine_get_stats(engine, &before);
    ptn_store_get_stats(ptn_engine_store(engine), &disk_before);
    bool spill = step == STEPS - 1;
    run_step(engine, grad, spill);
    ptn_engine_get_stats(engine, &after);
    ptn_store_get_stats(ptn_engine_store(engine), &disk_after);
    sums sum = sum_events(ptn_engine_trace(engine), since_ns);
    const uint64_t *read = sum.bytes[PTN_LANE_READ], *written = sum.bytes[PTN_LANE_WRITE];
    CHECK(read[PTN_TRACE_PARAMETERS] == after.loaded_bytes - before.loaded_bytes && read[PTN_TRACE_PARAMETERS] > 0);
    CHECK(read[PTN_TRACE_PARAMETERS] + read[PTN_TRACE_STATE] + read[PTN_TRACE_GRADIENTS] ==
          disk_after.read_bytes - disk_before.read_bytes);
    CHECK(written[PTN_TRACE_STATE] + written[PTN_TRACE_GRADIENTS] == disk_after.write_bytes - disk_before.write_bytes);
    CHECK(written[PTN_TRACE_STATE] == CHUNKS * (1 + STATES) * CHUNK_BYTES);
    CHECK(written[PTN_TRACE_GRADIENTS] == (spill ? CHUNKS * CHUNK_BYTES : 0));
    CHECK(read[PTN_TRACE_GRADIENTS] == (spill ? CHUNKS * CHUNK_BYTES : 0));
    for (uint32_t c = 0; c < CHUNKS; c++) CHECK(sum.chunk_bytes[c] >= (1 + STATES) * CHUNK_BYTES);
    CHECK(sum.ns[PTN_LANE_UPDATE][PTN_TRACE_UPDATE] == after.update_ns - before.update_ns);
    const int64_t *wait = sum.ns[PTN_LANE_WAIT];
    int64_t waited_ns = wait[PTN_TRACE_PARAMETERS] + wait[PTN_TRACE_UPDATE] + wait[PTN_TRACE_MEMORY];
    CHECK(wait[PTN_TRACE_PARAMETERS] > 0);
    int64_t counted_ns = after.wait_ns - before.wait_ns; /* what is shorter than a microsecond is counted and not traced */
    CHECK(waited_ns <= counted_ns && counted_ns - waited_ns < WAITS_MOST * 1000);
  }
  ptn_engine_destroy(engine);
  ptn_account_destroy(account);
}

int main(void) {
  an_event_is_40_bytes_and_comes_back_whole();
  the_oldest_give_way();
  a_ring_that_grows();
  since_looks_at_each_end();
  nothing_is_left_out_and_no_trace_is_fine();
  writers_and_a_reader(64 * 1024);
  writers_and_a_reader(777);
  an_engines_events_add_up();
  return 0;
}
