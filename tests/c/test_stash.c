/* The stash as its callers see it, in order and one state at a time: what is written when and how often, what is handed back
 * from memory, what is read ahead in which order, and that nothing stays behind. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/runtime/stash*.c */
/* threads */
#include "stash_fixture.h"

#define BYTES (8 * PAGE)

static world here;
static crew people;

/* ---- there and back ---- */

/* Bytes come back after others have used their memory; a block goes back to the arena when it has been written, not later. */
static void there_and_back(void) {
  enum { count = 12 };
  ptn_record *records[count];
  int owners[count];
  world_open(&here, (world_options){0});
  ptn_stash_begin(here.stash);
  for (uint64_t i = 0; i < count; i++) {
    records[i] = put_and_free(&here, (i + 1) * 3 * PAGE - i, i + 1);
    CHECK(ptn_record_owner(records[i]) == NULL);
    ptn_record_set_owner(records[i], &owners[i]);
    CHECK(ptn_record_owner(records[i]) == &owners[i]);
  }
  WAIT_UNTIL(world_account(&here).live_bytes == 0);
  for (uint64_t i = 0; i < count; i++) overwrite_free_memory(&here, (i + 1) * 3 * PAGE, 3);
  ptn_stash_stats stats = world_stats(&here);
  CHECK(stats.put_count == count && stats.record_count == count && stats.forwarded_bytes == 0 && stats.read_bytes == 0);
  CHECK(stats.put_bytes == stats.written_bytes && stats.disk_bytes == stats.put_bytes && stats.memory_bytes == 0);
  CHECK(stats.most_disk_bytes == stats.disk_bytes);
  ptn_stash_end(here.stash);
  for (uint64_t i = count; i-- > 0;) {
    get_and_free(records[i], true, i + 1);
    CHECK(ptn_record_drop(records[i], true) == &owners[i]);
  }
  stats = world_stats(&here);
  CHECK(stats.read_bytes == stats.put_bytes && stats.written_bytes == stats.put_bytes && stats.forwarded_bytes == 0);
  world_is_empty(&here);
  CHECK(ptn_stash_mark(here.stash) == stats.put_bytes && ptn_stash_mark(here.stash) == 0);
  CHECK(world_stats(&here).most_disk_bytes == 0);
  world_close(&here);
}

/* Backward in the order of forward, and at random: what was read ahead for nothing costs time, never bytes. */
static void asked_in_any_order(void) {
  for (uint64_t seed = 1; seed <= 4; seed++) {
    uint64_t state = seed;
    world_open(&here, (world_options){.limit_bytes = seed == 4 ? 40 * BYTES : 0});
    crew_bring(&here, &people, RECORD_WRITTEN);
    ptn_stash_end(here.stash);
    for (uint64_t left = CREW; left > 0; left--) {
      uint64_t i = seed == 1 ? CREW - left : check_random(&state) % CREW;
      while (!people.records[i]) i = (i + 1) % CREW;
      get_and_free(people.records[i], true, i + 1);
      CHECK(ptn_record_drop(people.records[i], true) == NULL);
      people.records[i] = NULL;
    }
    world_close(&here);
  }
}

/* ---- one record ---- */

static void written_once_however_many_uses(void) {
  enum { count = 9 };
  int owner;
  world_open(&here, (world_options){0});
  ptn_stash_begin(here.stash);
  tensor saved = tensor_make(&here, BYTES, 5);
  ptn_record *record = tensor_put(&here, &saved, true);
  ptn_record_set_owner(record, &owner);
  for (int i = 1; i < count; i++) {
    CHECK(tensor_put(&here, &saved, false) == record);
    if (i == 4) WAIT_UNTIL(world_stats(&here).written_bytes == BYTES);
  }
  tensor_free(&saved);
  ptn_stash_end(here.stash);
  ptn_stash_stats stats = world_stats(&here);
  CHECK(stats.put_count == count && stats.record_count == 1 && stats.put_bytes == BYTES);
  for (int i = 1; i < count; i++) {
    if (i % 2) get_and_free(record, true, 5);
    CHECK(ptn_record_drop(record, i % 2) == NULL && ptn_record_owner(record) == &owner);
  }
  get_and_free(record, true, 5);
  CHECK(ptn_record_drop(record, true) == &owner);
  CHECK(world_stats(&here).written_bytes == BYTES && world_stats(&here).read_bytes == BYTES); /* and read once: others waited */
  world_close(&here);
}

/* When the last use is gone the record is: the same block put once more is a new one, of the same bytes. */
static void a_record_ends_with_its_last_use(void) {
  world_open(&here, (world_options){0});
  tensor saved = tensor_make(&here, BYTES, 6);
  for (int round = 0; round < 3; round++) {
    ptn_stash_begin(here.stash);
    ptn_record *record = tensor_put(&here, &saved, true);
    if (round == 1) WAIT_UNTIL(world_stats(&here).written_bytes > 0);
    ptn_stash_end(here.stash);
    get_and_free(record, true, 6);
    CHECK(ptn_record_drop(record, true) == NULL);
  }
  CHECK(world_stats(&here).record_count == 3);
  tensor_free(&saved);
  world_close(&here);
}

/* What was changed in place is another record, and the first one's bytes on disk are those that were saved. */
static void a_new_version_is_a_new_record(void) {
  world_open(&here, (world_options){0});
  ptn_stash_begin(here.stash);
  tensor saved = tensor_make(&here, BYTES, 1);
  ptn_record *first = tensor_put(&here, &saved, true);
  WAIT_UNTIL(world_stats(&here).written_bytes == BYTES);
  tensor_change(&saved, 2);
  ptn_record *second = tensor_put(&here, &saved, true);
  CHECK(second != first && tensor_put(&here, &saved, false) == second);
  WAIT_UNTIL(world_stats(&here).written_bytes == 2 * BYTES);
  tensor_free(&saved);
  WAIT_UNTIL(world_account(&here).live_bytes == 0);
  ptn_stash_end(here.stash);
  get_and_free(second, true, 2);
  get_and_free(first, true, 1);
  get_and_free(second, true, 2);
  ptn_record_drop(second, true);
  ptn_record_drop(second, true);
  ptn_record_drop(first, true);
  world_close(&here);
}

/* The next block at the address of an earlier one is not mistaken for it, neither at put nor when that one is asked for. */
static void a_new_block_at_an_old_address(void) {
  world_open(&here, (world_options){0});
  ptn_stash_begin(here.stash);
  tensor old = tensor_make(&here, BYTES, 1);
  void *address = old.memory;
  ptn_record *first = tensor_put(&here, &old, true);
  tensor_free(&old);
  WAIT_UNTIL(world_account(&here).live_bytes == 0);
  tensor fresh = tensor_make(&here, BYTES, 2);
  CHECK(fresh.memory == address && fresh.block.serial != old.block.serial); /* a cache that forgets would make this no test */
  ptn_record *second = tensor_put(&here, &fresh, true);
  CHECK(second != first);
  ptn_stash_end(here.stash);
  get_and_free(first, true, 1);
  get_and_free(second, true, 2);
  tensor_free(&fresh);
  get_and_free(second, true, 2);
  get_and_free(first, false, 1);
  ptn_record_drop(first, true);
  ptn_record_drop(second, true);
  world_close(&here);
}

/* Far more blocks than any table has rows: none is taken for another. */
static void many_blocks(void) {
  enum { count = 3000 };
  static ptn_record *records[count];
  static tensor saved[count];
  world_open(&here, (world_options){0});
  ptn_stash_begin(here.stash);
  for (uint64_t i = 0; i < count; i++) {
    saved[i] = tensor_make(&here, PAGE, i + 1);
    records[i] = tensor_put(&here, &saved[i], true);
  }
  for (uint64_t i = 0; i < count; i++) CHECK(tensor_put(&here, &saved[i], false) == records[i]);
  for (uint64_t i = 0; i < count; i++) tensor_free(&saved[i]);
  ptn_stash_end(here.stash);
  for (uint64_t i = count; i-- > 0;) {
    get_and_free(records[i], true, i + 1);
    ptn_record_drop(records[i], true);
    ptn_record_drop(records[i], false);
  }
  world_close(&here);
}

/* ---- order ---- */

/* Writes begin in the order of the puts, at the block's own address; reads ahead go the other way, each record once. */
static void order_of_the_disk(uint64_t bytes) {
  const void *addresses[CREW];
  static faulty_entry log[4 * CREW];
  world_open(&here, (world_options){.depth = 1});
  faulty_tell(&here.disk, FAULT_NONE, 0, 0, 0);
  ptn_stash_begin(here.stash);
  tensor saved[CREW];
  for (uint64_t i = 0; i < CREW; i++) {
    saved[i] = tensor_make(&here, bytes, i + 1);
    addresses[i] = saved[i].memory;
    people.records[i] = tensor_put(&here, &saved[i], true);
  }
  WAIT_UNTIL(world_stats(&here).written_bytes == CREW * bytes);
  for (uint64_t i = 0; i < CREW; i++) tensor_free(&saved[i]);
  WAIT_UNTIL(world_account(&here).live_bytes == 0);
  CHECK(faulty_copy_log(&here.disk, log, 4 * CREW) == CREW);
  for (uint64_t i = 0; i < CREW; i++) CHECK(log[i].write && log[i].memory == addresses[i] && log[i].bytes == bytes);
  ptn_stash_end(here.stash);
  get_and_free(people.records[CREW - 1], true, CREW);
  WAIT_UNTIL(world_stats(&here).read_bytes == CREW * bytes);
  CHECK(faulty_copy_log(&here.disk, log, 4 * CREW) == 2 * CREW);
  for (uint64_t i = 0; i < CREW; i++) CHECK(!log[CREW + i].write && log[CREW + i].offset == log[CREW - 1 - i].offset);
  for (uint64_t i = CREW; i-- > 0;) {
    if (i < CREW - 1) get_and_free(people.records[i], true, i + 1);
    ptn_record_drop(people.records[i], true);
  }
  CHECK(faulty_count(&here.disk) == 2 * CREW);
  world_close(&here);
}

static void order_of_small_and_large(void) {
  order_of_the_disk(PAGE); /* all of them under way at a time */
  order_of_the_disk(128 * PAGE); /* some wait for their turn */
}

/* Reading ahead stays under the goal by the headroom, and goes on as memory is given back. */
static void reading_ahead_leaves_room(void) {
  uint64_t goal_bytes = 30 * BYTES, headroom_bytes = 11 * BYTES;
  world_open(&here, (world_options){.limit_bytes = 64 * BYTES});
  crew_bring(&here, &people, RECORD_WRITTEN);
  ptn_account_set_goal(here.account, goal_bytes);
  ptn_stash_set_headroom(here.stash, headroom_bytes, 0);
  ptn_account_mark(here.account);
  ptn_stash_end(here.stash);
  WAIT_UNTIL(world_stats(&here).read_bytes > 0);
  world_settle(&here);
  uint64_t ahead_bytes = world_account(&here).interval_peak_bytes;
  CHECK(ahead_bytes > 0 && ahead_bytes <= goal_bytes - headroom_bytes);
  CHECK(world_stats(&here).memory_bytes == ahead_bytes && world_stats(&here).read_bytes == ahead_bytes);
  crew_take_back(&people);
  CHECK(world_account(&here).interval_peak_bytes <= goal_bytes - headroom_bytes + BYTES); /* and one that was asked for */
  CHECK(world_stats(&here).read_bytes == CREW * BYTES && atomic_load(&here.must_count) == 0);
  world_close(&here);
}

#define FULL_BYTES ((CREW + 20) * BYTES) /* the goal and the limit where others have all but what is to be left free */

/* Backward begins, with all records on the disk and no room to read ahead. */
static tensor begin_without_room(uint64_t headroom_bytes, uint64_t recompute_bytes) {
  world_open(&here, (world_options){.limit_bytes = FULL_BYTES});
  crew_bring(&here, &people, RECORD_WRITTEN);
  tensor others = tensor_make(&here, FULL_BYTES - ptn_max_u64(headroom_bytes, recompute_bytes), 1);
  ptn_account_set_goal(here.account, FULL_BYTES);
  ptn_stash_set_headroom(here.stash, headroom_bytes, recompute_bytes);
  ptn_stash_end(here.stash);
  return others;
}

/* It also goes on in memory that others give back, once they say so; as when it was told to hold back. */
static void reading_ahead_goes_on(void) {
  for (int held_back = 0; held_back < 2; held_back++) {
    tensor others = begin_without_room(11 * BYTES, 0);
    ptn_stash_go_on(here.stash);
    if (held_back) CHECK(!ptn_stash_relieve(here.stash, true));
    tensor_free(&others);
    world_settle(&here);
    CHECK(world_stats(&here).read_bytes == 0);
    ptn_stash_go_on(here.stash);
    WAIT_UNTIL(world_stats(&here).read_bytes == CREW * BYTES);
    crew_take_back(&people);
    CHECK(world_stats(&here).read_bytes == CREW * BYTES);
    world_close(&here);
  }
}

/* Room for a recomputation is left beside what is asked for behind it, and not beside what is near. */
static void what_is_near_is_read_into_the_room_of_recomputation(void) {
  uint64_t recompute_bytes = 11 * BYTES;
  tensor others = begin_without_room(0, recompute_bytes);
  ptn_stash_near(here.stash, NUMBER + 1);
  world_settle(&here);
  CHECK(world_stats(&here).read_bytes == 0);
  ptn_stash_near(here.stash, NUMBER);
  WAIT_UNTIL(world_stats(&here).read_bytes >= recompute_bytes / 2);
  world_settle(&here);
  CHECK(world_account(&here).live_bytes <= FULL_BYTES && atomic_load(&here.must_count) == 0);
  tensor_free(&others);
  crew_take_back(&people);
  CHECK(world_stats(&here).read_bytes == CREW * BYTES);
  world_close(&here);
}

/* ---- handed back from memory ---- */

/* Asked for before its turn came: no write is made, and nobody waits for a disk that stands still. */
static void forwarded_while_queued_or_written(void) {
  for (record_state state = RECORD_QUEUED; state <= RECORD_WRITING; state++) {
    world_open(&here, (world_options){0});
    crew_bring(&here, &people, state);
    crew_take_back(&people);
    ptn_stash_stats stats = world_stats(&here);
    CHECK(stats.forwarded_bytes == CREW * people.bytes && stats.read_bytes == 0 && stats.wait_ns == 0);
    uint64_t begun_bytes = world_account(&here).live_bytes; /* the queued ones went at once */
    CHECK(begun_bytes > 0 && stats.disk_bytes == begun_bytes && stats.memory_bytes == begun_bytes);
    CHECK(state == RECORD_WRITING || begun_bytes < CREW * people.bytes);
    faulty_open(&here.disk);
    world_is_empty(&here);
    CHECK(world_stats(&here).written_bytes == begun_bytes && faulty_look(&here.disk).reads == 0);
    CHECK(faulty_look(&here.disk).writes * people.bytes == begun_bytes);
    world_close(&here);
  }
}

/* A block that somebody else has kept is handed back as it lies, though the bytes are on disk too. */
static void forwarded_from_a_holder(void) {
  enum { count = 8 };
  for (int ended = 0; ended < 2; ended++) {
    tensor saved[count];
    ptn_record *records[count];
    world_open(&here, (world_options){0});
    ptn_stash_begin(here.stash);
    for (uint64_t i = 0; i < count; i++) {
      saved[i] = tensor_make(&here, BYTES, i + 1);
      records[i] = tensor_put(&here, &saved[i], true);
    }
    WAIT_UNTIL(world_stats(&here).written_bytes == count * BYTES);
    CHECK(world_account(&here).live_bytes == count * BYTES);
    if (ended) ptn_stash_end(here.stash);
    world_settle(&here);
    CHECK(world_stats(&here).read_bytes == 0 && world_account(&here).live_bytes == count * BYTES);
    for (uint64_t i = count; i-- > 0;) {
      void *memory = get_checked(records[i], true, i + 1);
      CHECK(memory == saved[i].memory);
      tensor_free(&saved[i]);
      CHECK(words_are(memory, BYTES, i + 1));
      ptn_arena_free(memory);
      ptn_record_drop(records[i], true);
    }
    CHECK(world_stats(&here).forwarded_bytes == count * BYTES && faulty_look(&here.disk).reads == 0);
    world_close(&here);
  }
}

/* ---- every state ---- */

static void open_if_held(void) { faulty_open(&here.disk); }

static void dropped_in_every_state(void) {
  for (record_state state = 0; state < RECORD_STATES; state++)
    for (int asked = 0; asked < 2; asked++) {
      world_open(&here, (world_options){0});
      crew_bring(&here, &people, state);
      for (uint64_t i = 0; i < CREW; i++) CHECK(ptn_record_drop(people.records[asked ? CREW - 1 - i : i], asked) == NULL);
      uint64_t begun_bytes = world_account(&here).live_bytes;
      CHECK(state != RECORD_QUEUED || begun_bytes < CREW * people.bytes);
      open_if_held();
      world_is_empty(&here);
      if (state <= RECORD_WRITING) CHECK(world_stats(&here).written_bytes == begun_bytes);
      CHECK(world_stats(&here).forwarded_bytes == 0);
      world_close(&here);
    }
}

/* A graph that is kept is asked twice, and others have used the memory between: the bytes must be somewhere. */
static void asked_twice_in_every_state(void) {
  for (record_state state = 0; state < RECORD_STATES; state++) {
    world_open(&here, (world_options){0});
    crew_bring(&here, &people, state);
    if (state == RECORD_READING || state == RECORD_WRITTEN) open_if_held();
    if (state == RECORD_WRITTEN) ptn_stash_end(here.stash);
    for (int round = 0; round < 3; round++) {
      for (uint64_t i = CREW; i-- > 0;) get_and_free(people.records[i], round == 0, i + 1);
      overwrite_free_memory(&here, people.bytes, 64);
      if (round == 0) open_if_held();
      if (state >= RECORD_WRITTEN) WAIT_UNTIL(world_account(&here).live_bytes == 0); /* nobody is expected to ask again */
    }
    for (uint64_t i = 0; i < CREW; i++) ptn_record_drop(people.records[i], true);
    world_close(&here);
  }
}

/* Three uses: two are asked for and over, the third comes later; and one that is never asked for does no harm. */
static void asked_after_all_uses_but_one(void) {
  for (int held = 0; held < 2; held++) {
    world_open(&here, (world_options){0});
    if (held) faulty_close(&here.disk);
    ptn_stash_begin(here.stash);
    for (uint64_t i = 0; i < CREW; i++) {
      tensor saved = tensor_make(&here, BYTES, i + 1);
      people.records[i] = tensor_put(&here, &saved, true);
      CHECK(tensor_put(&here, &saved, false) == people.records[i] && tensor_put(&here, &saved, false) == people.records[i]);
      tensor_free(&saved);
    }
    ptn_stash_end(here.stash);
    for (uint64_t i = CREW; i-- > 0;) {
      get_and_free(people.records[i], true, i + 1);
      CHECK(ptn_record_drop(people.records[i], true) == NULL);
      if (i % 2) get_and_free(people.records[i], true, i + 1);
      CHECK(ptn_record_drop(people.records[i], i % 2) == NULL);
    }
    overwrite_free_memory(&here, BYTES, 64);
    if (held) faulty_open(&here.disk);
    for (uint64_t i = CREW; i-- > 0;) get_and_free(people.records[i], true, i + 1);
    overwrite_free_memory(&here, BYTES, 64);
    for (uint64_t i = CREW; i-- > 0;) {
      get_and_free(people.records[i], false, i + 1);
      ptn_record_drop(people.records[i], true);
    }
    world_close(&here);
  }
}

/* What is on disk stays in memory for those uses only that are still to ask; one that is dropped will not. */
static void memory_goes_with_the_last_who_waits(void) {
  for (int unasked = 0; unasked < 2; unasked++) {
    world_open(&here, (world_options){0});
    ptn_stash_begin(here.stash);
    tensor saved = tensor_make(&here, BYTES, 1);
    ptn_record *record = tensor_put(&here, &saved, true);
    for (int i = 0; i < 2; i++) tensor_put(&here, &saved, false);
    WAIT_UNTIL(world_stats(&here).written_bytes == BYTES);
    tensor_free(&saved);
    ptn_stash_end(here.stash);
    get_and_free(record, true, 1);
    get_and_free(record, true, 1);
    if (unasked) ptn_record_drop(record, false);
    else get_and_free(record, true, 1);
    WAIT_UNTIL(world_account(&here).live_bytes == 0);
    CHECK(world_stats(&here).memory_bytes == 0 && world_stats(&here).disk_bytes == BYTES);
    for (int i = unasked; i < 3; i++) ptn_record_drop(record, true);
    world_close(&here);
  }
}

/* At once comes what there is nothing to wait for, to read, to compare or to tell of: further uses of what backward has. */
static void further_uses_come_at_once(void) {
  void *memory = NULL;
  world_open(&here, (world_options){0});
  ptn_stash_begin(here.stash);
  tensor saved = tensor_make(&here, BYTES, 1);
  ptn_record *record = tensor_put(&here, &saved, true);
  for (int i = 0; i < 2; i++) tensor_put(&here, &saved, false);
  CHECK(!ptn_stash_get_at_once(record, true, &memory)); /* the first of them is noted */
  WAIT_UNTIL(world_stats(&here).written_bytes == BYTES);
  tensor_free(&saved);
  ptn_stash_end(here.stash);
  CHECK(!ptn_stash_get_at_once(record, true, &memory) && memory == NULL);
  get_and_free(record, true, 1);
  for (int i = 0; i < 2; i++) {
    CHECK(ptn_stash_get_at_once(record, true, &memory) && words_are(memory, BYTES, 1));
    ptn_arena_free(memory);
  }
  memory = NULL;
  WAIT_UNTIL(world_account(&here).live_bytes == 0); /* the last who waited took it */
  CHECK(!ptn_stash_get_at_once(record, false, &memory) && memory == NULL);
  get_and_free(record, false, 1);
  for (int i = 0; i < 3; i++) ptn_record_drop(record, true);
  CHECK(world_stats(&here).put_count == 3 && world_stats(&here).record_count == 1);
  world_close(&here);
}

/* What is handed out belongs to its holder: neither the record's end nor the stash's takes it away. */
static void memory_outlives_record_and_stash(void) {
  for (record_state state = 0; state < RECORD_STATES; state++) {
    void *memory[CREW];
    world_open(&here, (world_options){0});
    crew_bring(&here, &people, state);
    if (state == RECORD_READING) open_if_held();
    for (uint64_t i = 0; i < CREW; i++) {
      memory[i] = get_checked(people.records[i], true, i + 1);
      ptn_record_drop(people.records[i], true);
    }
    open_if_held();
    ptn_stash_close(here.stash);
    ptn_stash_release(here.stash);
    here.stash = NULL;
    CHECK(world_reserved_bytes(&here) == 0);
    overwrite_free_memory(&here, people.bytes, 64);
    for (uint64_t i = 0; i < CREW; i++) CHECK(words_are(memory[i], people.bytes, i + 1));
    for (uint64_t i = 0; i < CREW; i++) ptn_arena_free(memory[i]);
    CHECK(world_account(&here).live_bytes == 0);
    ptn_store_destroy(here.store);
    ptn_account_destroy(here.account);
  }
}

/* ---- the end of the stash ---- */

static void *open_soon(void *argument) {
  for (int i = 0; i < 20; i++) nap_briefly();
  faulty_open(argument);
  return NULL;
}

/* Records outlive it: asking is PTN_STEP, dropping works, and nothing of it is left in memory or on disk. */
static void closed_in_every_state(void) {
  for (record_state state = 0; state < RECORD_STATES; state++) {
    int owner;
    void *memory;
    world_open(&here, (world_options){0});
    crew_bring(&here, &people, state);
    ptn_record_set_owner(people.records[3], &owner);
    CHECK(ptn_record_drop(people.records[0], false) == NULL);
    pthread_t opener;
    CHECK_OK(ptn_thread_start(&opener, "opener", open_soon, &here.disk));
    ptn_stash_close(here.stash);
    ptn_thread_join(opener);
    CHECK(world_account(&here).live_bytes == 0 && world_reserved_bytes(&here) == 0);
    CHECK(world_stats(&here).memory_bytes == 0 && world_stats(&here).disk_bytes == 0);
    memory = &owner;
    CHECK(stash_ask(people.records[1], true, &memory) == PTN_STEP && ptn_last_error()->message[0]);
    CHECK(memory != (void *)&people);
    ptn_record_drop(people.records[1], false);
    if (state % 2) ptn_stash_release(here.stash);
    ptn_store_destroy(here.store);
    ptn_account_destroy(here.account);
    CHECK(stash_ask(people.records[2], true, &memory) == PTN_STEP);
    for (uint64_t i = 2; i < CREW; i++) CHECK(ptn_record_drop(people.records[i], false) == (i == 3 ? &owner : NULL));
    if (state % 2 == 0) ptn_stash_release(here.stash);
    here.stash = NULL;
  }
}

int main(int count, char **words) {
  static const test_case cases[] = {
      {"there_and_back", there_and_back},
      {"asked_in_any_order", asked_in_any_order},
      {"written_once_however_many_uses", written_once_however_many_uses},
      {"a_record_ends_with_its_last_use", a_record_ends_with_its_last_use},
      {"a_new_version_is_a_new_record", a_new_version_is_a_new_record},
      {"a_new_block_at_an_old_address", a_new_block_at_an_old_address},
      {"many_blocks", many_blocks},
      {"order_of_small_and_large", order_of_small_and_large},
      {"reading_ahead_leaves_room", reading_ahead_leaves_room},
      {"reading_ahead_goes_on", reading_ahead_goes_on},
      {"what_is_near_is_read_into_the_room_of_recomputation", what_is_near_is_read_into_the_room_of_recomputation},
      {"forwarded_while_queued_or_written", forwarded_while_queued_or_written},
      {"forwarded_from_a_holder", forwarded_from_a_holder},
      {"dropped_in_every_state", dropped_in_every_state},
      {"asked_twice_in_every_state", asked_twice_in_every_state},
      {"asked_after_all_uses_but_one", asked_after_all_uses_but_one},
      {"memory_goes_with_the_last_who_waits", memory_goes_with_the_last_who_waits},
      {"further_uses_come_at_once", further_uses_come_at_once},
      {"memory_outlives_record_and_stash", memory_outlives_record_and_stash},
      {"closed_in_every_state", closed_in_every_state},
  };
  return run_cases(cases, sizeof cases / sizeof *cases, count, words);
}
