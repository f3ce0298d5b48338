/* Short records leave and come back together: how many requests it takes, what is not waited for, and that memory never waits for a
 * request to be full. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/runtime/stash*.c */
/* threads */
#include "stash_fixture.h"

#define TOGETHER (16 * PAGE)
#define BYTES (2 * PAGE) /* eight fill a request */
#define RECORDS 48

static world here;
static ptn_record *records[RECORDS];
static faulty_entry entries[4 * RECORDS];

static void open_world(uint64_t limit_bytes) {
  world_open(&here, (world_options){.limit_bytes = limit_bytes, .piece_bytes = TOGETHER, .depth = 1, .together = true});
  faulty_tell(&here.disk, FAULT_NONE, 0, 0, 0);
  ptn_stash_begin(here.stash);
}

static void put(uint64_t begin, uint64_t end, uint64_t bytes) {
  for (uint64_t i = begin; i < end; i++) records[i] = put_and_free(&here, bytes, i + 1);
}

/* Until nothing of them is in memory; count fills whole requests. */
static void put_on_disk(uint64_t count) {
  put(0, count, BYTES);
  WAIT_UNTIL(world_stats(&here).written_bytes == count * BYTES);
  WAIT_UNTIL(world_account(&here).live_bytes == 0);
}

static void take_all(uint64_t count) {
  for (uint64_t i = count; i-- > 0;) {
    get_and_free(records[i], true, i + 1);
    ptn_record_drop(records[i], true);
  }
}

static uint64_t writes(void) { return faulty_look(&here.disk).writes; }
static uint64_t reads(void) { return faulty_look(&here.disk).reads; }

static void writes_wait_for_each_other(void) {
  open_world(0);
  put(0, 7, BYTES);
  world_settle(&here);
  CHECK(writes() == 0 && world_stats(&here).memory_bytes == 7 * BYTES);
  put(7, 8, BYTES);
  WAIT_UNTIL(world_stats(&here).written_bytes == 8 * BYTES);
  CHECK(faulty_copy_log(&here.disk, entries, 2) == 1 && entries[0].parts_count == 8 && entries[0].bytes == TOGETHER);
  put(8, 12, BYTES); /* the last ones are asked for before they fill a request: they are never written */
  ptn_stash_end(here.stash);
  take_all(12);
  CHECK(writes() == 1 && world_stats(&here).forwarded_bytes >= 4 * BYTES);
  world_close(&here);
}

/* A record that leaves no room for another like it does not wait. */
static void long_ones_do_not_wait(void) {
  open_world(0);
  put(0, 1, TOGETHER / 2 + PAGE);
  WAIT_UNTIL(world_stats(&here).written_bytes == TOGETHER / 2 + PAGE);
  put(1, 2, 3 * TOGETHER);
  WAIT_UNTIL(world_stats(&here).written_bytes == 7 * TOGETHER / 2 + PAGE);
  ptn_stash_end(here.stash);
  take_all(2);
  world_close(&here);
}

/* What is left of one forward goes with the next one's. */
static void forwards_in_a_row(void) {
  open_world(0);
  put(0, 5, BYTES);
  ptn_stash_begin(here.stash);
  put(5, 7, BYTES);
  world_settle(&here);
  CHECK(writes() == 0);
  put(7, 8, BYTES);
  WAIT_UNTIL(world_stats(&here).written_bytes == 8 * BYTES);
  CHECK(writes() == 1);
  ptn_stash_end(here.stash);
  take_all(8);
  world_close(&here);
}

/* Pressure takes what there is at once; nobody is refused for what only waits for company. */
static void memory_does_not_wait(void) {
  for (int by_goal = 0; by_goal < 2; by_goal++) {
    open_world(by_goal ? 0 : 64 * BYTES);
    put(0, 6, BYTES);
    world_settle(&here);
    CHECK(writes() == 0);
    if (by_goal) ptn_account_set_goal(here.account, 64 * BYTES);
    tensor work = tensor_make(&here, 60 * BYTES, 99); /* 6 + 60 > 64 */
    CHECK(writes() == 1 && faulty_copy_log(&here.disk, entries, 1) == 1 && entries[0].parts_count == 6);
    CHECK(world_account(&here).peak_bytes <= 64 * BYTES);
    tensor_free(&work);
    ptn_stash_end(here.stash);
    take_all(6);
    world_close(&here);
  }
}

/* Where little is left no more than half of it is waited for. */
static void little_room_is_not_filled(void) {
  open_world(128 * BYTES);
  tensor others = tensor_make(&here, 120 * BYTES, 98);
  put(0, 2, BYTES);
  world_settle(&here);
  CHECK(writes() == 0); /* 2 and the next would be half of the 6 that are left */
  put(2, 3, BYTES);
  WAIT_UNTIL(world_stats(&here).written_bytes == 3 * BYTES);
  CHECK(writes() == 1);
  tensor_free(&others);
  ptn_stash_end(here.stash);
  take_all(3);
  world_close(&here);
}

static void reads_come_together(void) {
  open_world(0);
  put_on_disk(RECORDS);
  CHECK(writes() == RECORDS / 8);
  ptn_stash_end(here.stash);
  WAIT_UNTIL(world_stats(&here).read_bytes == RECORDS * BYTES);
  CHECK(reads() == RECORDS / 8);
  CHECK(faulty_copy_log(&here.disk, entries, 4 * RECORDS) == 2 * (RECORDS / 8));
  for (uint64_t i = 0; i < RECORDS / 8; i++) { /* from the last to the first */
    const faulty_entry *read = &entries[RECORDS / 8 + i], *write = &entries[RECORDS / 8 - 1 - i];
    CHECK(!read->write && read->offset == write->offset && read->bytes == write->bytes && read->parts_count == 8);
  }
  take_all(RECORDS);
  CHECK(reads() == RECORDS / 8);
  world_close(&here);
}

/* With room for a part of them reading goes on in whole requests while enough is ahead, and under the goal. */
static void reads_wait_for_room(void) {
  uint64_t goal_bytes = 3 * TOGETHER + BYTES;
  open_world(0);
  put_on_disk(RECORDS);
  ptn_account_set_goal(here.account, goal_bytes);
  ptn_account_mark(here.account);
  ptn_stash_end(here.stash);
  WAIT_UNTIL(world_stats(&here).read_bytes == 3 * TOGETHER);
  for (uint64_t i = RECORDS; i-- > 0;) {
    get_and_free(records[i], true, i + 1);
    ptn_record_drop(records[i], true);
    world_settle(&here);
    CHECK(world_account(&here).interval_peak_bytes <= goal_bytes);
    if (i >= RECORDS - 6) CHECK(reads() == 3); /* there is room for six, and for eight only after the next */
  }
  CHECK(reads() == RECORDS / 8 && world_stats(&here).read_bytes == RECORDS * BYTES);
  world_close(&here);
}

/* Where the room never holds a whole request, what fits is read; nothing stands still. */
static void reads_in_little_room(void) {
  uint64_t goal_bytes = TOGETHER / 2;
  open_world(0);
  put_on_disk(RECORDS);
  ptn_account_set_goal(here.account, goal_bytes);
  ptn_account_mark(here.account);
  ptn_stash_end(here.stash);
  WAIT_UNTIL(world_stats(&here).read_bytes == goal_bytes);
  take_all(RECORDS);
  CHECK(world_account(&here).interval_peak_bytes <= goal_bytes + BYTES); /* and one that was asked for */
  CHECK(world_stats(&here).read_bytes == RECORDS * BYTES && reads() < RECORDS);
  world_close(&here);
}

/* A failed request is told to whoever needs one of its records, and all of them can be had when the disk is well. */
static void failures_are_told(void) {
  open_world(0);
  put_on_disk(RECORDS);
  faulty_tell_of(&here.disk, FAULTY_READS, FAULT_ERRNO, EIO, 2, 2);
  ptn_stash_end(here.stash);
  WAIT_UNTIL(world_stats(&here).read_bytes == RECORDS * BYTES - TOGETHER);
  uint64_t told_count = 0;
  for (uint64_t i = RECORDS; i-- > 0;) {
    void *memory;
    ptn_status status = stash_ask(records[i], true, &memory);
    if (status == PTN_OK) {
      CHECK(words_are(memory, BYTES, i + 1));
      ptn_arena_free(memory);
    } else {
      CHECK(status == PTN_DISK && ptn_last_error()->sys_errno == EIO && i >= RECORDS - 16 && i < RECORDS - 8);
      told_count++;
      get_and_free(records[i], true, i + 1);
    }
    ptn_record_drop(records[i], true);
  }
  CHECK(told_count == 8);
  world_close(&here);
}

/* What waits for company when backward begins is written at once where backward needs its room, and not where it does not. */
static void the_turn_looks_at_the_queue(void) {
  for (int needed = 0; needed < 2; needed++) {
    open_world(0);
    put(0, 6, BYTES);
    ptn_account_set_goal(here.account, 16 * BYTES);
    ptn_stash_set_headroom(here.stash, (needed ? 12 : 4) * BYTES, 0); /* of 10 that are left */
    ptn_stash_end(here.stash);
    if (needed) WAIT_UNTIL(world_stats(&here).written_bytes == 6 * BYTES);
    world_settle(&here);
    CHECK(writes() == (needed ? 1 : 0) && atomic_load(&here.pressed_count) == 0);
    take_all(6);
    world_close(&here);
  }
}

/* What another pass has in memory is not ahead of this backward: that goes on reading in the room there is. */
static void other_passes_are_not_ahead(void) {
  static ptn_record *others[21];
  open_world(0);
  put_on_disk(32);
  ptn_stash_begin(here.stash);
  for (uint64_t i = 0; i < 21; i++) {
    others[i] = put_and_free(&here, BYTES, 100 + i);
    if (i % 7 < 6) continue;
    for (uint64_t j = i - 6; j <= i; j++) get_and_free(others[j], true, 100 + j); /* before their write: they stay */
  }
  CHECK(world_stats(&here).memory_bytes == 21 * BYTES);
  ptn_account_set_goal(here.account, world_account(&here).live_bytes + 5 * BYTES);
  ptn_stash_end(here.stash);
  for (uint64_t i = 32; i-- > 0;) {
    get_and_free(records[i], true, i + 1);
    ptn_record_drop(records[i], true);
    world_settle(&here);
  }
  CHECK(reads() <= 16); /* several at a time, not one for each */
  for (uint64_t i = 0; i < 21; i++) ptn_record_drop(others[i], true);
  world_close(&here);
}

/* Everything that was submitted ends while the thread that submitted it is still on its way back: close comes to an end. */
typedef struct slow_start {
  ptn_io_engine base;
  ptn_io_engine *inner;
} slow_start;

static void start_slowly(ptn_io_engine *base, ptn_piece *piece) {
  slow_start *engine = (slow_start *)base;
  engine->inner->kind->start(engine->inner, piece);
  nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
}

static void destroy_slow(ptn_io_engine *base) {
  slow_start *engine = (slow_start *)base;
  engine->inner->kind->destroy(engine->inner);
}

static ptn_io_engine *wrap_slow(ptn_io_engine *inner, void *context) {
  static const ptn_io_engine_kind kind = {.name = "slow", .start = start_slowly, .destroy = destroy_slow};
  slow_start *engine = context;
  *engine = (slow_start){.base.kind = &kind, .inner = inner};
  return &engine->base;
}

static void *close_it(void *argument) {
  nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
  ptn_stash_close(argument);
  return NULL;
}

static void close_meets_a_submit(void) {
  slow_start engine;
  ptn_store *store;
  ptn_stash *stash;
  ptn_account *account;
  pthread_t closer;
  CHECK_OK(ptn_store_create_with(&store, world_folder(), &(ptn_store_options){.wrap = wrap_slow, .context = &engine}));
  CHECK_OK(ptn_account_create(&account, 0, NULL, NULL));
  for (int by_read = 0; by_read < 2; by_read++) {
    CHECK_OK(ptn_stash_create(&stash, store, account, NULL));
    here.stash = stash;
    here.account = account;
    ptn_stash_begin(stash);
    tensor saved = tensor_make(&here, 8 * PTN_MIB, 1);
    if (!by_read) CHECK_OK(ptn_thread_start(&closer, "closer", close_it, stash));
    ptn_record *record = tensor_put(&here, &saved, true);
    tensor_free(&saved);
    if (by_read) {
      WAIT_UNTIL(world_account(&here).live_bytes == 0);
      CHECK_OK(ptn_thread_start(&closer, "closer", close_it, stash));
      ptn_stash_end(stash);
    }
    ptn_thread_join(closer);
    ptn_record_drop(record, false);
    ptn_stash_release(stash);
  }
  ptn_store_destroy(store);
  ptn_account_destroy(account);
}

/* Left before its end: what waits for company is neither written nor kept. */
static void a_graph_that_is_dropped(void) {
  open_world(0);
  put(0, 5, BYTES);
  for (uint64_t i = 0; i < 5; i++) ptn_record_drop(records[i], false);
  CHECK(world_stats(&here).memory_bytes == 0 && world_stats(&here).disk_bytes == 0);
  put(0, 6, BYTES);
  world_settle(&here);
  CHECK(writes() == 0); /* the five are not counted any more */
  ptn_stash_close(here.stash);
  for (uint64_t i = 0; i < 6; i++) ptn_record_drop(records[i], false);
  CHECK(writes() == 0);
  world_close(&here);
}

int main(int count, char **words) {
  static const test_case cases[] = {{"writes_wait_for_each_other", writes_wait_for_each_other},
                                    {"long_ones_do_not_wait", long_ones_do_not_wait},
                                    {"forwards_in_a_row", forwards_in_a_row},
                                    {"memory_does_not_wait", memory_does_not_wait},
                                    {"little_room_is_not_filled", little_room_is_not_filled},
                                    {"reads_come_together", reads_come_together},
                                    {"reads_wait_for_room", reads_wait_for_room},
                                    {"reads_in_little_room", reads_in_little_room},
                                    {"failures_are_told", failures_are_told},
                                    {"the_turn_looks_at_the_queue", the_turn_looks_at_the_queue},
                                    {"other_passes_are_not_ahead", other_passes_are_not_ahead},
                                    {"close_meets_a_submit", close_meets_a_submit},
                                    {"a_graph_that_is_dropped", a_graph_that_is_dropped}};
  return run_cases(cases, sizeof cases / sizeof *cases, count, words);
}
