/* The stash under a budget: what it holds gives way to whoever needs memory, in every state, without a byte lost and without ever
 * passing the limit; a goal slows forward down; what the rule kept back goes to disk after all; several passes are in flight. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/runtime/stash*.c */
/* threads */
#include "stash_fixture.h"

#define BYTES (8 * PAGE)

static world here;
static crew people;

static void *open_soon(void *argument) {
  for (int i = 0; i < 20; i++) nap_briefly();
  faulty_open(argument);
  return NULL;
}

static void take_back_but_last(void) {
  ptn_record_drop(people.records[CREW - 1], true);
  for (uint64_t i = CREW - 1; i-- > 0;) {
    get_and_free(people.records[i], true, i + 1);
    ptn_record_drop(people.records[i], true);
  }
}

/* The driver holds nothing, so it may have the whole budget in one piece, whatever the stash was about to do with it. */
static void the_whole_budget_in_every_state(void) {
  for (record_state state = 0; state < RECORD_STATES; state++)
    for (int goal = 0; goal < 2; goal++) {
      uint64_t limit_bytes = CREW * (state == RECORD_QUEUED ? 128 * PAGE : 8 * PAGE);
      world_open(&here, (world_options){.limit_bytes = limit_bytes});
      crew_bring(&here, &people, state);
      if (goal) ptn_account_set_goal(here.account, limit_bytes / 2);
      pthread_t opener;
      CHECK_OK(ptn_thread_start(&opener, "opener", open_soon, &here.disk));
      tensor all = tensor_make(&here, limit_bytes, 77);
      ptn_thread_join(opener);
      if (state == RECORD_WRITTEN) ptn_stash_end(here.stash);
      void *memory = &all;
      CHECK(stash_ask(people.records[0], true, &memory) == PTN_BUDGET && memory == NULL);
      CHECK(words_are(all.memory, limit_bytes, 77));
      tensor_free(&all);
      if (state >= RECORD_WRITTEN) {
        for (uint64_t i = CREW; i-- > 0;) get_and_free(people.records[i], true, i + 1);
        WAIT_UNTIL(world_account(&here).live_bytes == 0); /* the question that failed counts for nothing */
        for (uint64_t i = CREW; i-- > 0;) ptn_record_drop(people.records[i], true);
      } else {
        crew_take_back(&people);
      }
      CHECK(world_account(&here).peak_bytes <= limit_bytes);
      world_close(&here);
    }
}

/* Whatever is queued or on its way, on a disk that is slow and reorders: behind a flush all is written, and no memory is held. */
static void a_flush_waits_for_all_writes(void) {
  world_open(&here, (world_options){0});
  for (int shaken = 0; shaken < 2; shaken++) {
    faulty_tell(&here.disk, FAULT_NONE, 0, 0, 0);
    faulty_shaker shaker;
    if (shaken) faulty_start_shaking(&shaker, &here.disk, 5, 200000);
    else faulty_close(&here.disk);
    ptn_stash_begin(here.stash);
    for (uint64_t i = 0; i < CREW; i++) people.records[i] = put_and_free(&here, BYTES, i + 1);
    pthread_t opener;
    if (!shaken) CHECK_OK(ptn_thread_start(&opener, "opener", open_soon, &here.disk));
    uint64_t before_bytes = shaken ? world_stats(&here).put_bytes : CREW * BYTES;
    ptn_stash_flush(here.stash);
    CHECK(world_stats(&here).written_bytes == before_bytes);
    CHECK(world_stats(&here).memory_bytes == 0 && world_account(&here).live_bytes == 0);
    ptn_stash_flush(here.stash); /* of nothing */
    if (shaken) faulty_calm(&shaker);
    else ptn_thread_join(opener);
    crew_take_back(&people);
  }
  world_close(&here);
}

/* Piece by piece, with reads ahead that want the same memory. */
static void half_the_budget_while_reading(void) {
  uint64_t limit_bytes = 24 * BYTES;
  world_open(&here, (world_options){.limit_bytes = limit_bytes});
  crew_bring(&here, &people, RECORD_WRITTEN);
  faulty_shaker shaker;
  faulty_start_shaking(&shaker, &here.disk, 3, 200000);
  ptn_stash_end(here.stash);
  for (uint64_t i = CREW; i-- > 0;) {
    tensor work[4];
    for (int k = 0; k < 4; k++) work[k] = tensor_make(&here, 3 * BYTES, 1000 * i + (uint64_t)k);
    void *memory = get_checked(people.records[i], true, i + 1);
    for (int k = 0; k < 4; k++) {
      CHECK(words_are(work[k].memory, 3 * BYTES, work[k].seed));
      tensor_free(&work[k]);
    }
    CHECK(words_are(memory, BYTES, i + 1));
    ptn_arena_free(memory);
    ptn_record_drop(people.records[i], true);
  }
  faulty_calm(&shaker);
  CHECK(world_account(&here).peak_bytes <= limit_bytes);
  world_close(&here);
}

/* Forward makes more than the goal holds, on a slow disk: it waits instead of passing the goal, and the wait is counted. */
static void a_goal_slows_forward(void) {
  for (int goal = 0; goal < 2; goal++) {
    uint64_t most_bytes = 10 * BYTES;
    world_open(&here, (world_options){.limit_bytes = goal ? 0 : most_bytes});
    if (goal) ptn_account_set_goal(here.account, most_bytes);
    faulty_shaker shaker;
    faulty_start_shaking(&shaker, &here.disk, 5, 3000000);
    ptn_stash_begin(here.stash);
    for (uint64_t i = 0; i < CREW; i++) {
      people.records[i] = put_and_free(&here, BYTES, i + 1);
      CHECK(world_account(&here).live_bytes <= most_bytes);
    }
    CHECK(world_account(&here).peak_bytes <= most_bytes && world_stats(&here).wait_ns > 0);
    CHECK(atomic_load(&here.must_count) == 0 || !goal);
    ptn_stash_end(here.stash);
    crew_take_back(&people);
    CHECK(world_account(&here).peak_bytes <= most_bytes + (goal ? BYTES : 0)); /* what is asked for now may pass the goal */
    faulty_calm(&shaker);
    world_close(&here);
  }
}

/* What was read ahead stays where only the goal is passed, gives way where it must, and is read again as backward goes on. */
static void read_ahead_gives_way_and_comes_again(void) {
  uint64_t all_bytes = CREW * BYTES;
  world_open(&here, (world_options){.limit_bytes = all_bytes});
  crew_bring(&here, &people, RECORD_READ);
  CHECK(!ptn_stash_relieve(here.stash, false) && world_account(&here).live_bytes == all_bytes);
  CHECK(ptn_stash_relieve(here.stash, true) && world_account(&here).live_bytes < all_bytes);
  tensor all = tensor_make(&here, all_bytes, 3);
  CHECK(world_stats(&here).memory_bytes == 0);
  tensor_free(&all);
  void *memory = get_checked(people.records[CREW - 1], true, CREW);
  WAIT_UNTIL(world_account(&here).live_bytes == all_bytes);
  ptn_arena_free(memory);
  take_back_but_last();
  world_close(&here);
}

/* What others hold cannot be had: the stash says no in the end, as often as it is asked, and goes on afterwards. */
static void it_says_no_in_the_end(void) {
  world_open(&here, (world_options){.limit_bytes = 40 * BYTES});
  for (int must = 0; must < 2; must++) CHECK(!ptn_stash_relieve(here.stash, must));
  tensor saved[16], extra;
  ptn_stash_begin(here.stash);
  for (uint64_t i = 0; i < 16; i++) {
    saved[i] = tensor_make(&here, 2 * BYTES, i + 1);
    people.records[i] = tensor_put(&here, &saved[i], true);
  }
  for (int round = 0; round < 3; round++) CHECK(tensor_try(&here, 9 * BYTES, 1, &extra) == PTN_BUDGET);
  CHECK(atomic_load(&here.refused_count) >= 3);
  ptn_stash_end(here.stash);
  for (int round = 0; round < 3; round++) CHECK(tensor_try(&here, 9 * BYTES, 1, &extra) == PTN_BUDGET);
  for (uint64_t i = 0; i < 16; i++) {
    CHECK(words_are(saved[i].memory, 2 * BYTES, i + 1));
    tensor_free(&saved[i]);
  }
  extra = tensor_make(&here, 40 * BYTES, 5);
  tensor_free(&extra);
  for (uint64_t i = 0; i < 16; i++) {
    get_and_free(people.records[i], true, i + 1);
    ptn_record_drop(people.records[i], true);
  }
  world_close(&here);
}

/* ---- what the rule keeps ---- */

#define KEPT_COUNT 12
#define KEPT_BYTES (256 * PAGE)

static uint64_t put_pass(void) {
  WAIT_UNTIL(world_account(&here).live_bytes == 0); /* writes of the pass before that nobody needed any more */
  uint64_t before_bytes = world_stats(&here).written_bytes;
  ptn_stash_begin(here.stash);
  for (uint64_t i = 0; i < KEPT_COUNT; i++) people.records[i] = put_and_free(&here, KEPT_BYTES, i + 1);
  return before_bytes;
}

static void take_back_pass(void) {
  for (uint64_t i = KEPT_COUNT; i-- > 0;) {
    get_and_free(people.records[i], true, i + 1);
    ptn_record_drop(people.records[i], true);
  }
}

/* A pass with all the time in the world: the bandwidths are known after it. */
static void slow_pass(void) {
  uint64_t before_bytes = put_pass();
  WAIT_UNTIL(world_stats(&here).written_bytes - before_bytes + world_stats(&here).memory_bytes == KEPT_COUNT * KEPT_BYTES);
  world_settle(&here);
  for (int i = 0; i < 1500; i++) nap_briefly();
  ptn_stash_end(here.stash);
  world_settle(&here);
  take_back_pass();
}

static void fast_pass(void) {
  put_pass();
  ptn_stash_end(here.stash);
  take_back_pass();
}

/* Backward that came at once keeps the last records of the next pass in memory; they still give way where memory presses. When
 * there was time again, everything is written again. How fast a shared machine is in a pass is not known: passes are tried until
 * one does what all should, and every byte of each is looked at. */
static void kept_by_the_rule(void) {
  world_open(&here, (world_options){.limit_bytes = KEPT_COUNT * KEPT_BYTES});
  faulty_tell(&here.disk, FAULT_LATE, 0, 1, UINT64_MAX); /* 5 ms for each MiB: putting and asking takes less */
  uint64_t kept_bytes = 0;
  for (int attempt = 0; attempt < 20 && kept_bytes == 0; attempt++) {
    slow_pass();
    fast_pass();
    uint64_t before_bytes = put_pass();
    WAIT_UNTIL(world_account(&here).live_bytes + world_stats(&here).written_bytes - before_bytes == KEPT_COUNT * KEPT_BYTES);
    world_settle(&here);
    kept_bytes = world_account(&here).live_bytes;
    CHECK(kept_bytes == world_stats(&here).memory_bytes);
    CHECK(kept_bytes + world_stats(&here).written_bytes - before_bytes == KEPT_COUNT * KEPT_BYTES);
    if (attempt % 2 == 0) {
      tensor all = tensor_make(&here, KEPT_COUNT * KEPT_BYTES, 9);
      CHECK(world_stats(&here).written_bytes - before_bytes == KEPT_COUNT * KEPT_BYTES);
      tensor_free(&all);
    }
    ptn_stash_end(here.stash);
    take_back_pass();
  }
  CHECK(kept_bytes > 0);
  uint64_t written_bytes = 0;
  uint64_t least_bytes = KEPT_COUNT * KEPT_BYTES / 4 * 3; /* with ample time a quarter stays at most */
  for (int attempt = 0; attempt < 20 && written_bytes < least_bytes; attempt++) {
    slow_pass();
    written_bytes = world_stats(&here).written_bytes;
    slow_pass();
    written_bytes = world_stats(&here).written_bytes - written_bytes;
  }
  CHECK(written_bytes >= least_bytes);
  faulty_tell(&here.disk, FAULT_NONE, 0, 0, 0);
  world_close(&here);
}

/* ---- several passes ---- */

/* Micro-batches: the forwards come one after another, the backwards in any order, or mixed; the last is dropped unasked. */
static void several_passes_in_flight(void) {
  enum { passes = 4, count = 12 };
  static const int orders[][passes] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 0, 3, 1}};
  for (int order = 0; order < 4; order++) {
    ptn_record *records[passes][count];
    world_open(&here, (world_options){.limit_bytes = 20 * BYTES});
    if (order % 2) ptn_account_set_goal(here.account, 12 * BYTES);
    tensor shared = tensor_make(&here, BYTES, 1);
    for (int pass = 0; pass < passes; pass++) {
      ptn_stash_begin(here.stash);
      for (uint64_t i = 0; i < count; i++) records[pass][i] = put_and_free(&here, BYTES, 100 * (uint64_t)pass + i);
      bool fresh;
      ptn_record *record;
      CHECK_OK(
          ptn_stash_put(here.stash, &shared.block, NULL, 0, 1, &record, &fresh)); /* lives on: alone, or with its earlier one */
      void *memory = get_checked(record, true, 1);
      ptn_arena_free(memory);
      ptn_record_drop(record, true);
      ptn_stash_end(here.stash);
    }
    tensor_free(&shared);
    for (uint64_t n = 0; n < passes * count; n++) {
      int pass = order < 3 ? orders[order][n / count] : (int)(n % passes);
      uint64_t i = order < 3 ? count - 1 - n % count : count - 1 - n / passes;
      if (n / count < passes - 1) get_and_free(records[pass][i], true, 100 * (uint64_t)pass + i);
      CHECK(ptn_record_drop(records[pass][i], n / count < passes - 1) == NULL);
    }
    CHECK(world_account(&here).peak_bytes <= 20 * BYTES);
    world_close(&here);
  }
}

/* The pass that backward has begun with is read ahead, though it is not the last one. */
static void an_earlier_pass_is_read_ahead(void) {
  enum { count = 12 };
  ptn_record *records[3][count];
  world_open(&here, (world_options){0});
  for (uint64_t pass = 0; pass < 3; pass++) {
    ptn_stash_begin(here.stash);
    for (uint64_t i = 0; i < count; i++) records[pass][i] = put_and_free(&here, BYTES, 100 * pass + i);
    WAIT_UNTIL(world_account(&here).live_bytes == 0);
  }
  ptn_stash_end(here.stash);
  WAIT_UNTIL(world_stats(&here).read_bytes == count * BYTES);
  for (uint64_t pass = 0; pass < 2; pass++) {
    get_and_free(records[pass][count - 1], true, 100 * pass + count - 1);
    WAIT_UNTIL(world_stats(&here).read_bytes == (pass + 2) * count * BYTES);
  }
  for (uint64_t pass = 3; pass-- > 0;)
    for (uint64_t i = count; i-- > 0;) {
      if (pass == 2 || i < count - 1) get_and_free(records[pass][i], true, 100 * pass + i);
      ptn_record_drop(records[pass][i], true);
    }
  CHECK(world_stats(&here).read_bytes == 3 * count * BYTES);
  world_close(&here);
}

/* A forward whose graph nobody used, in the middle of others; begins and ends that come twice or not at all. */
static void passes_in_disorder(void) {
  ptn_record *records[6];
  world_open(&here, (world_options){0});
  ptn_stash_end(here.stash);
  records[0] = put_and_free(&here, BYTES, 1); /* before any begin */
  ptn_stash_begin(here.stash);
  ptn_stash_begin(here.stash);
  records[1] = put_and_free(&here, BYTES, 2);
  ptn_stash_end(here.stash);
  ptn_stash_end(here.stash);
  records[2] = put_and_free(&here, BYTES, 3); /* after its end: a recomputation saves tensors too */
  get_and_free(records[1], true, 2);
  records[3] = put_and_free(&here, BYTES, 4);
  ptn_stash_begin(here.stash);
  records[4] = put_and_free(&here, BYTES, 5);
  get_and_free(records[2], true, 3);
  ptn_record_drop(records[1], true);
  ptn_stash_begin(here.stash);
  records[5] = put_and_free(&here, BYTES, 6);
  get_and_free(records[4], true, 5);
  get_and_free(records[0], true, 1);
  ptn_stash_end(here.stash);
  get_and_free(records[3], true, 4);
  get_and_free(records[5], true, 6);
  ptn_record_drop(records[0], true);
  for (int i = 2; i < 6; i++) ptn_record_drop(records[i], true);
  for (int round = 0; round < 50; round++) {
    ptn_stash_begin(here.stash);
    if (round % 3) ptn_record_drop(put_and_free(&here, BYTES, 1), false);
    if (round % 2) ptn_stash_end(here.stash);
  }
  world_close(&here);
}

/* ---- figures ---- */

/* The timeline has each write and read with its block's number and bytes, and the waits that were counted. */
static void the_trace_shows_it(void) {
  ptn_trace *trace;
  static ptn_trace_event events[4096];
  CHECK_OK(ptn_trace_create(&trace, 4096));
  world_open(&here, (world_options){.trace = trace});
  faulty_tell(&here.disk, FAULT_LATE, 0, 1, UINT64_MAX);
  int64_t start_ns = ptn_now_ns();
  crew_bring(&here, &people, RECORD_WRITTEN);
  get_and_free(people.records[0], true, 1); /* the last in turn: somebody waits */
  ptn_stash_end(here.stash);
  for (uint64_t i = CREW; i-- > 1;) get_and_free(people.records[i], true, i + 1);
  ptn_stash_stats stats = world_stats(&here);
  for (uint64_t i = 0; i < CREW; i++) ptn_record_drop(people.records[i], true);
  world_close(&here);
  size_t count = ptn_trace_copy(trace, start_ns, events, 4096);
  uint64_t bytes[2] = {0};
  int64_t waited_ns = 0;
  for (size_t i = 0; i < count; i++) {
    CHECK(events[i].start_ns >= start_ns && events[i].end_ns >= events[i].start_ns && events[i].end_ns <= ptn_now_ns());
    if (events[i].lane == PTN_LANE_WAIT) waited_ns += events[i].end_ns - events[i].start_ns;
    if (events[i].lane != PTN_LANE_READ && events[i].lane != PTN_LANE_WRITE) continue;
    CHECK(events[i].kind == PTN_TRACE_ACTIVATIONS && events[i].number == 7 && events[i].bytes == people.bytes);
    bytes[events[i].lane == PTN_LANE_WRITE] += events[i].bytes;
  }
  CHECK(bytes[0] == stats.read_bytes && bytes[1] == stats.written_bytes && bytes[1] == CREW * people.bytes);
  CHECK(stats.wait_ns > 0 && waited_ns > 0 && waited_ns <= stats.wait_ns);
  ptn_trace_destroy(trace);
}

int main(int count, char **words) {
  static const test_case cases[] = {
      {"the_whole_budget_in_every_state", the_whole_budget_in_every_state},
      {"a_flush_waits_for_all_writes", a_flush_waits_for_all_writes},
      {"half_the_budget_while_reading", half_the_budget_while_reading},
      {"a_goal_slows_forward", a_goal_slows_forward},
      {"read_ahead_gives_way_and_comes_again", read_ahead_gives_way_and_comes_again},
      {"it_says_no_in_the_end", it_says_no_in_the_end},
      {"kept_by_the_rule", kept_by_the_rule},
      {"several_passes_in_flight", several_passes_in_flight},
      {"an_earlier_pass_is_read_ahead", an_earlier_pass_is_read_ahead},
      {"passes_in_disorder", passes_in_disorder},
      {"the_trace_shows_it", the_trace_shows_it},
  };
  return run_cases(cases, sizeof cases / sizeof *cases, count, words);
}
