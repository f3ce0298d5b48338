/* The stash from several threads at a time: backward on one, forward on another, records dropped wherever the last reference
 * goes, memory that runs short for all of them, and an end that comes while others are not done. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/runtime/stash*.c */
/* threads */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/syscall.h>

#include "stash_fixture.h"

#define BYTES (8 * PAGE)
#define THREADS 4
#define SHARED 48 /* records */

static world here;
static faulty_shaker shaker;

/* In place of the C library's: a disk that is full, or takes its time to make room, when told so. */
static _Atomic bool disk_is_full, room_is_slow;
static _Atomic int slow_count;
int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  if (atomic_load(&room_is_slow)) {
    atomic_fetch_add(&slow_count, 1);
    for (int i = 0; i < 30; i++) nap_briefly();
  }
  if (!atomic_load(&disk_is_full)) return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
  errno = ENOSPC;
  return -1;
}

static void together(void *(*body)(void *)) {
  pthread_t threads[THREADS];
  for (uintptr_t i = 0; i < THREADS; i++) CHECK_OK(ptn_thread_start(&threads[i], "worker", body, (void *)i));
  for (int i = 0; i < THREADS; i++) ptn_thread_join(threads[i]);
}

/* ---- the same records ---- */

static tensor shared_tensors[SHARED];
static ptn_record *guards[SHARED]; /* a use that lives on, so that no record ends early and is made again */
static ptn_record *raced[THREADS][SHARED];
static _Atomic int fresh_count, owner_count, refused_count;
static int owner;

static void *save_once_more(void *argument) {
  uintptr_t me = (uintptr_t)argument;
  for (uint64_t n = 0; n < SHARED; n++) {
    uint64_t i = (n * 5 + 7 * me) % SHARED;
    bool fresh;
    CHECK_OK(ptn_stash_put(here.stash, &shared_tensors[i].block, NULL, 0, (int32_t)i, &raced[me][i], &fresh));
    CHECK(!fresh && raced[me][i] == guards[i]);
  }
  return NULL;
}

/* Each thread in an order of its own; now and then twice, now and then not at all. */
static void *ask_and_drop(void *argument) {
  uintptr_t me = (uintptr_t)argument;
  uint64_t state = 100 + me;
  for (uint64_t n = SHARED; n-- > 0;) {
    uint64_t i = me < 2 ? n : (n * 7 + me) % SHARED;
    bool asks = check_random(&state) % 4 != 0;
    if (asks) get_and_free(raced[me][i], true, i + 1);
    if (asks && check_random(&state) % 2 == 0) get_and_free(raced[me][i], false, i + 1);
    if (ptn_record_drop(raced[me][i], asks)) atomic_fetch_add(&owner_count, 1);
  }
  return NULL;
}

/* One record for a block however many threads save it; its owner comes back once, with the last use. In odd rounds all records
 * are on disk before the threads ask, in the last two there is memory for few of them. */
static void the_same_blocks(void) {
  for (uint64_t round = 0; round < 4; round++) {
    world_open(
        &here,
        (world_options){.limit_bytes = round >= 2 ? SHARED * BYTES : 0, .depth = round == 3 ? 1 : 0, .together = round % 2 == 0});
    faulty_start_shaking(&shaker, &here.disk, round, 60000);
    ptn_stash_begin(here.stash);
    atomic_store(&owner_count, 0);
    for (uint64_t i = 0; i < SHARED; i++) {
      shared_tensors[i] = tensor_make(&here, BYTES, i + 1);
      guards[i] = tensor_put(&here, &shared_tensors[i], true);
      ptn_record_set_owner(guards[i], &owner);
    }
    together(save_once_more);
    for (uint64_t i = 0; i < SHARED; i++) tensor_free(&shared_tensors[i]);
    WAIT_UNTIL(round % 2 == 0 || world_account(&here).live_bytes == 0);
    if (round >= 2) ptn_account_set_goal(here.account, SHARED / 4 * BYTES);
    ptn_stash_end(here.stash);
    together(ask_and_drop);
    CHECK(atomic_load(&owner_count) == 0);
    CHECK(world_stats(&here).record_count == SHARED && world_stats(&here).put_count == SHARED * (THREADS + 1));
    for (uint64_t i = SHARED; i-- > 0;) {
      get_and_free(guards[i], true, i + 1);
      CHECK(ptn_record_drop(guards[i], true) == &owner);
    }
    CHECK(world_stats(&here).written_bytes <= SHARED * BYTES);
    faulty_calm(&shaker);
    world_close(&here);
  }
}

static _Atomic bool looked;

static void *look_ahead(void *argument) {
  ptn_record *behind = put_and_free(&here, BYTES, 2);
  void *memory;
  bool asked = ptn_stash_get_at_once(behind, true, &memory);
  if (asked) ptn_arena_free(memory);
  atomic_store_explicit(&looked, true, memory_order_relaxed); /* nothing of it orders the two threads */
  ptn_record_drop(behind, asked);
  return argument;
}

/* Who asks for a record looks ahead to the one before, whose owner may be set just then. */
static void an_owner_is_set_late(void) {
  world_open(&here, (world_options){0});
  ptn_stash_begin(here.stash);
  ptn_record *record = put_and_free(&here, BYTES, 1);
  pthread_t thread;
  atomic_store(&looked, false);
  CHECK_OK(ptn_thread_start(&thread, "worker", look_ahead, NULL));
  ptn_record_set_owner(record, &owner);
  while (!atomic_load_explicit(&looked, memory_order_relaxed)) nap_briefly();
  ptn_thread_join(thread);
  CHECK(ptn_record_owner(record) == &owner && ptn_record_drop(record, false) == &owner);
  world_close(&here);
}

/* First to put makes the record; all keep their use until everybody has put. */
static void *put_all(void *argument) {
  uintptr_t me = (uintptr_t)argument;
  for (uint64_t i = 0; i < SHARED; i++) {
    bool fresh = false;
    ptn_status status = ptn_stash_put(here.stash, &shared_tensors[i].block, NULL, 0, 0, &raced[me][i], &fresh);
    CHECK(status == PTN_OK || (status == PTN_DISK && ptn_last_error()->sys_errno == ENOSPC && !raced[me][i]));
    if (status != PTN_OK) atomic_fetch_add(&refused_count, 1);
    if (fresh) atomic_fetch_add(&fresh_count, 1);
    if (me == 0 && i % 8 == 7) atomic_store(&disk_is_full, i % 16 == 7);
  }
  return NULL;
}

static void *take_all(void *argument) {
  uintptr_t me = (uintptr_t)argument;
  for (uint64_t i = SHARED; i-- > 0;) {
    if (!raced[me][i]) continue;
    get_and_free(raced[me][i], true, i + 1);
    ptn_record_drop(raced[me][i], true);
  }
  return NULL;
}

static void who_puts_first(void) {
  uint64_t bytes = 2 * PTN_MIB; /* what the store reserves at a time is soon used up */
  for (int full = 0; full < 2; full++) {
    world_open(&here, (world_options){0});
    ptn_stash_begin(here.stash);
    for (uint64_t i = 0; i < SHARED; i++) {
      shared_tensors[i] = tensor_make(&here, full ? bytes : BYTES, i + 1);
    }
    atomic_store(&fresh_count, 0);
    atomic_store(&refused_count, 0);
    atomic_store(&disk_is_full, full);
    together(put_all);
    atomic_store(&disk_is_full, false);
    if (full) CHECK(atomic_load(&refused_count) > 0);
    else CHECK(atomic_load(&fresh_count) == SHARED);
    for (uint64_t i = 0; i < SHARED; i++) {
      ptn_record *same = NULL;
      for (int k = 0; k < THREADS; k++) {
        if (!raced[k][i]) continue;
        CHECK(!same || same == raced[k][i]);
        same = raced[k][i];
      }
      tensor_free(&shared_tensors[i]);
    }
    ptn_stash_end(here.stash);
    together(take_all);
    world_close(&here);
  }
}

/* ---- each its own, memory short for all ---- */

#define OWN 10

static uint64_t share_bytes; /* of the budget, what a thread may hold at a time */

/* Holds at most three blocks of a third of its share, so memory is there for it as soon as the stash gives way. */
static void *train(void *argument) {
  uint64_t me = (uint64_t)(uintptr_t)argument, state = me + 1;
  uint64_t bytes = share_bytes / 3 / PAGE * PAGE;
  for (uint64_t round = 0; round < 6; round++) {
    ptn_record *records[OWN];
    uint64_t seed = (me << 16 | round << 8) + 1;
    if (me == 0) ptn_stash_begin(here.stash);
    for (uint64_t i = 0; i < OWN; i++) {
      tensor work = tensor_make(&here, bytes, 7);
      records[i] = put_and_free(&here, bytes, seed + i);
      CHECK(words_are(work.memory, bytes, 7));
      tensor_free(&work);
    }
    if (me == 0 && round % 4 != 3) ptn_stash_end(here.stash);
    for (uint64_t i = OWN; i-- > 0;) {
      bool asks = check_random(&state) % 8 != 0;
      if (asks) {
        void *memory = get_checked(records[i], true, seed + i);
        tensor work = tensor_make(&here, bytes, seed);
        CHECK(words_are(memory, bytes, seed + i));
        ptn_arena_free(memory);
        tensor_free(&work);
      }
      CHECK(ptn_record_drop(records[i], asks) == NULL);
    }
  }
  return NULL;
}

static void memory_short_for_all(void) {
  static const uint32_t depths[] = {0, 1, 3};
  for (int round = 0; round < 3; round++) {
    uint64_t limit_bytes = 96 * BYTES;
    share_bytes = limit_bytes / THREADS;
    world_open(&here, (world_options){.limit_bytes = limit_bytes, .depth = depths[round], .together = round % 2 == 0});
    if (round == 2) ptn_account_set_goal(here.account, limit_bytes * 3 / 4);
    faulty_start_shaking(&shaker, &here.disk, (uint64_t)round, 50000);
    together(train);
    faulty_calm(&shaker);
    CHECK(world_account(&here).peak_bytes <= limit_bytes);
    world_close(&here);
  }
}

/* ---- everything at once ---- */

static _Atomic bool over;

/* Turns all the knobs while others work. */
static void *meddle(void *argument) {
  uint64_t state = (uint64_t)(uintptr_t)argument;
  while (!atomic_load(&over)) {
    switch (check_random(&state) % 9) {
      case 0: ptn_stash_begin(here.stash); break;
      case 1:
      case 2: ptn_stash_end(here.stash); break;
      case 3: ptn_stash_relieve(here.stash, check_random(&state) % 2); break;
      case 4: ptn_stash_set_headroom(here.stash, check_random(&state) % (30 * BYTES), check_random(&state) % (40 * BYTES)); break;
      case 5: ptn_account_set_goal(here.account, check_random(&state) % (100 * BYTES)); break;
      case 6: ptn_stash_go_on(here.stash); break;
      case 7: ptn_stash_near(here.stash, NUMBER - 1 + (int32_t)(check_random(&state) % 3)); break;
      default: CHECK(ptn_stash_mark(here.stash) <= THREADS * OWN * share_bytes);
    }
    nap_briefly();
  }
  return NULL;
}

static void somebody_meddles(void) {
  uint64_t limit_bytes = 96 * BYTES;
  share_bytes = limit_bytes / THREADS;
  world_open(&here, (world_options){.limit_bytes = limit_bytes});
  faulty_start_shaking(&shaker, &here.disk, 9, 50000);
  atomic_store(&over, false);
  pthread_t meddler;
  CHECK_OK(ptn_thread_start(&meddler, "meddler", meddle, (void *)5));
  together(train);
  atomic_store(&over, true);
  ptn_thread_join(meddler);
  faulty_calm(&shaker);
  CHECK(world_account(&here).peak_bytes <= limit_bytes);
  world_close(&here);
}

/* ---- the end ---- */

static ptn_record *left[THREADS][SHARED];

/* Backward that the end overtakes: what is asked for comes with its bytes or is PTN_STEP, and is dropped either way. */
static void *ask_and_drop_what_is_left(void *argument) {
  uintptr_t me = (uintptr_t)argument;
  for (uint64_t i = SHARED; i-- > 0;) {
    bool asked = false;
    if (i % 3 == me % 3) {
      void *memory = NULL;
      ptn_status status = stash_ask(left[me][i], true, &memory);
      CHECK(status == PTN_OK || status == PTN_STEP);
      asked = status == PTN_OK;
      if (asked) CHECK(words_are(memory, BYTES, me * SHARED + i + 1));
      ptn_arena_free(memory);
    }
    CHECK(ptn_record_drop(left[me][i], asked) == NULL);
  }
  return NULL;
}

/* Close comes while others ask and drop; store and account are gone right after it, as its caller may do. */
static void closed_while_others_drop(void) {
  for (uint64_t round = 0; round < 24; round++) {
    world_open(&here, (world_options){0});
    faulty_start_shaking(&shaker, &here.disk, round, 20000);
    ptn_stash_begin(here.stash);
    for (uint64_t i = 0; i < SHARED; i++)
      for (uint64_t k = 0; k < THREADS; k++) left[k][i] = put_and_free(&here, BYTES, k * SHARED + i + 1);
    if (round % 2) ptn_stash_end(here.stash);
    pthread_t threads[THREADS];
    for (uintptr_t k = 0; k < THREADS; k++)
      CHECK_OK(ptn_thread_start(&threads[k], "worker", ask_and_drop_what_is_left, (void *)k));
    for (uint64_t i = 0; i < round % 8; i++) nap_briefly();
    ptn_stash_close(here.stash);
    CHECK(world_stats(&here).memory_bytes == 0 && world_stats(&here).disk_bytes == 0);
    ptn_stash_release(here.stash);
    here.stash = NULL;
    faulty_calm(&shaker);
    ptn_store_destroy(here.store);
    for (int k = 0; k < THREADS; k++) ptn_thread_join(threads[k]);
    CHECK(world_account(&here).live_bytes == 0);
    ptn_account_destroy(here.account);
  }
}

static void *put_too_late(void *argument) {
  tensor *tensor = argument;
  ptn_record *record = NULL;
  bool fresh;
  ptn_status status = ptn_stash_put(here.stash, &tensor->block, NULL, 0, 0, &record, &fresh);
  CHECK(status == PTN_OK || (status == PTN_STEP && !record));
  if (record) CHECK(ptn_record_drop(record, false) == NULL);
  return NULL;
}

/* Close comes while a put waits for room on the disk: it has to wait, since the disk may be gone after it. */
static void closed_while_others_put(void) {
  for (int round = 0; round < 8; round++) {
    world_open(&here, (world_options){0});
    ptn_stash_begin(here.stash);
    tensor saved = tensor_make(&here, BYTES, 1);
    atomic_store(&slow_count, 0);
    atomic_store(&room_is_slow, true);
    pthread_t thread;
    CHECK_OK(ptn_thread_start(&thread, "worker", put_too_late, &saved));
    WAIT_UNTIL(atomic_load(&slow_count) > 0);
    ptn_stash_close(here.stash);
    CHECK(world_stats(&here).disk_bytes == 0 && world_stats(&here).memory_bytes == 0 && world_reserved_bytes(&here) == 0);
    atomic_store(&room_is_slow, false);
    ptn_store_destroy(here.store);
    ptn_thread_join(thread);
    tensor_free(&saved);
    CHECK(world_account(&here).live_bytes == 0);
    ptn_stash_release(here.stash);
    here.stash = NULL;
    ptn_account_destroy(here.account);
  }
}

int main(int count, char **words) {
  static const test_case cases[] = {
      {"the_same_blocks", the_same_blocks},
      {"an_owner_is_set_late", an_owner_is_set_late},
      {"who_puts_first", who_puts_first},
      {"memory_short_for_all", memory_short_for_all},
      {"somebody_meddles", somebody_meddles},
      {"closed_while_others_drop", closed_while_others_drop},
      {"closed_while_others_put", closed_while_others_put},
  };
  return run_cases(cases, sizeof cases / sizeof *cases, count, words);
}
