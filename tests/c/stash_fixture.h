/* What the tests of the stash share: a world (a store on a disk that can misbehave, an account that asks the stash under
 * pressure, the stash), tensors with bytes that no other tensor has, and ways to wait for a state without trusting a clock. */
#ifndef PTN_TESTS_STASH_FIXTURE_H
#define PTN_TESTS_STASH_FIXTURE_H

#include <dirent.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "faulty_engine.h"
#include "memory/arena.h"
#include "runtime/stash.h"

#define PAGE ((uint64_t)PTN_PAGE_BYTES)

typedef struct world {
  ptn_store *store;
  faulty_engine disk;
  ptn_account *account;
  ptn_stash *stash;
  _Atomic uint64_t pressed_count, must_count; /* times the account's pressure was asked */
  _Atomic uint64_t refused_count; /* and had nothing more to give */
} world;

typedef struct world_options {
  uint64_t limit_bytes;
  uint64_t piece_bytes; /* 0: one attempt for each record of up to 2 MiB */
  uint32_t depth;
  bool together; /* short records may be one request; else each is one, which is what most tests count */
  ptn_trace *trace;
} world_options;

static inline const char *world_folder(void) {
  const char *given = getenv("TMPDIR");
  return given ? given : "/tmp";
}

static inline void nap_briefly(void) { nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL); }

/* Longer is a hang. */
#define WAIT_UNTIL(condition)                                                             \
  do {                                                                                    \
    for (int64_t until_ns_ = ptn_now_ns() + 40000000000; !(condition); nap_briefly()) {   \
      if (ptn_now_ns() > until_ns_) fprintf(stderr, "waited in vain for what follows\n"); \
      CHECK(ptn_now_ns() <= until_ns_);                                                   \
    }                                                                                     \
  } while (0)

/* As unpacking asks. */
static inline ptn_status stash_ask(ptn_record *record, bool first, void **memory) {
  return ptn_stash_get_at_once(record, first, memory) ? PTN_OK : ptn_stash_get(record, first, memory);
}

/* ---- the world ---- */

static inline ptn_status world_press(void *context, uint64_t missing_bytes, bool must, bool *freed) {
  world *world = context;
  CHECK(missing_bytes > 0);
  atomic_fetch_add(&world->pressed_count, 1);
  if (must) atomic_fetch_add(&world->must_count, 1);
  *freed = world->stash && ptn_stash_relieve(world->stash, must);
  if (!*freed) atomic_fetch_add(&world->refused_count, 1);
  return world->stash && must && !*freed ? ptn_stash_tell_failure(world->stash) : PTN_OK;
}

static inline void world_open(world *world, world_options options) {
  world->stash = NULL;
  atomic_store(&world->pressed_count, 0);
  atomic_store(&world->must_count, 0);
  atomic_store(&world->refused_count, 0);
  ptn_store_options store_options = {.piece_bytes = options.piece_bytes,
                                     .depth = options.depth,
                                     .parts_count = options.together ? 0 : 1,
                                     .wrap = faulty_wrap,
                                     .context = &world->disk};
  CHECK_OK(ptn_store_create_with(&world->store, world_folder(), &store_options));
  CHECK_OK(ptn_account_create(&world->account, options.limit_bytes, world_press, world));
  CHECK_OK(ptn_stash_create(&world->stash, world->store, world->account, options.trace));
}

static inline ptn_stash_stats world_stats(world *world) {
  ptn_stash_stats stats;
  ptn_stash_get_stats(world->stash, &stats);
  return stats;
}

static inline ptn_account_stats world_account(world *world) {
  ptn_account_stats stats;
  ptn_account_get_stats(world->account, &stats);
  return stats;
}

/* Bytes of the file once what is free at its end went back: 0 when every extent has been released. */
static inline uint64_t world_reserved_bytes(world *world) {
  ptn_store_trim(world->store, 0);
  ptn_store_stats stats;
  ptn_store_get_stats(world->store, &stats);
  return stats.reserved_bytes;
}

/* Nothing is left in memory or on disk, now or when what is in flight has ended. */
static inline void world_is_empty(world *world) {
  WAIT_UNTIL(world_account(world).live_bytes == 0);
  WAIT_UNTIL(world_stats(world).disk_bytes == 0);
  WAIT_UNTIL(world_reserved_bytes(world) == 0);
  CHECK(world_stats(world).memory_bytes == 0);
  ptn_arena_check();
}

static inline void world_close(world *world) {
  world_is_empty(world);
  ptn_stash_close(world->stash);
  ptn_stash_release(world->stash);
  world->stash = NULL;
  ptn_store_destroy(world->store);
  ptn_account_destroy(world->account);
}

/* No thread of the process but this one runs, or could run and waits for a processor: on a busy machine that takes longer than any
 * pause. */
static inline bool others_sleep(void) {
  DIR *listing = opendir("/proc/self/task");
  CHECK(listing);
  int runnable_count = 0; /* with this one */
  for (struct dirent *entry = readdir(listing); entry; entry = readdir(listing)) {
    char path[64], line[256] = "";
    if (entry->d_name[0] == '.') continue;
    snprintf(path, sizeof path, "/proc/self/task/%.20s/stat", entry->d_name);
    FILE *stat = fopen(path, "re");
    if (!stat) continue; /* it has ended */
    const char *name_end = fgets(line, sizeof line, stat) ? strrchr(line, ')') : NULL;
    fclose(stat);
    runnable_count += name_end && name_end[2] == 'R';
  }
  closedir(listing);
  return runnable_count <= 1;
}

/* Nothing is at the disk, nobody is at work and nothing has come for a while; brings a state about, proves nothing. */
static inline void world_settle(world *world) {
  int quiet_count = 0;
  uint64_t before = UINT64_MAX;
  while (quiet_count < 20) {
    faulty_counts counts = faulty_look(&world->disk);
    bool quiet = counts.in_flight == counts.held && counts.reads + counts.writes == before && others_sleep();
    before = counts.reads + counts.writes;
    quiet_count = quiet ? quiet_count + 1 : 0;
    nap_briefly();
  }
}

/* ---- tensors ---- */

typedef struct tensor {
  uint64_t *memory;
  ptn_block block;
  uint32_t version;
  uint64_t seed; /* of its bytes */
} tensor;

static inline void fill_words(uint64_t *words, uint64_t bytes, uint64_t seed) {
  for (uint64_t i = 0; i < bytes / sizeof *words; i++) words[i] = (seed << 24 | i) * 0x9E3779B97F4A7C15u;
}

static inline bool words_are(const void *memory, uint64_t bytes, uint64_t seed) {
  const uint64_t *words = memory;
  for (uint64_t i = 0; i < bytes / sizeof *words; i++)
    if (words[i] != (seed << 24 | i) * 0x9E3779B97F4A7C15u) return false;
  return true;
}

static inline ptn_status tensor_try(world *world, uint64_t bytes, uint64_t seed, tensor *out) {
  void *memory;
  ptn_status status = ptn_arena_alloc(world->account, (size_t)bytes, &memory);
  if (status != PTN_OK) return status;
  *out = (tensor){.memory = memory, .seed = seed};
  CHECK(ptn_arena_find((char *)memory + bytes / 2, &out->block));
  CHECK(out->block.memory == memory && out->block.bytes >= bytes);
  fill_words(out->memory, out->block.bytes, seed);
  return PTN_OK;
}

static inline tensor tensor_make(world *world, uint64_t bytes, uint64_t seed) {
  tensor tensor;
  CHECK_OK(tensor_try(world, bytes, seed, &tensor));
  return tensor;
}

static inline void tensor_free(tensor *tensor) {
  ptn_arena_free(tensor->memory);
  tensor->memory = NULL;
}

/* A change in place. */
static inline void tensor_change(tensor *tensor, uint64_t seed) {
  tensor->version++;
  tensor->seed = seed;
  fill_words(tensor->memory, tensor->block.bytes, seed);
}

#define NUMBER 7 /* of the block whose records they are */

static inline ptn_record *tensor_put(world *world, const tensor *tensor, bool fresh_expected) {
  ptn_record *record = NULL;
  bool fresh = !fresh_expected;
  CHECK_OK(ptn_stash_put(world->stash, &tensor->block, NULL, tensor->version, NUMBER, &record, &fresh));
  CHECK(record && fresh == fresh_expected && ptn_record_bytes(record) == tensor->block.bytes);
  return record;
}

/* A tensor that is saved and let go, as torch does with most of them. */
static inline ptn_record *put_and_free(world *world, uint64_t bytes, uint64_t seed) {
  tensor tensor = tensor_make(world, bytes, seed);
  ptn_record *record = tensor_put(world, &tensor, true);
  tensor_free(&tensor);
  return record;
}

/* Asks, compares, and returns the memory, one hold of which is the caller's. */
static inline void *get_checked(ptn_record *record, bool first, uint64_t seed) {
  void *memory = NULL;
  CHECK_OK(ptn_stash_get(record, first, &memory));
  CHECK(memory && words_are(memory, ptn_record_bytes(record), seed));
  return memory;
}

static inline void get_and_free(ptn_record *record, bool first, uint64_t seed) {
  ptn_arena_free(get_checked(record, first, seed));
}

/* Others use the memory that is free: `count` blocks of the size come and go with bytes of their own. */
static inline void overwrite_free_memory(world *world, uint64_t bytes, size_t count) {
  tensor others[64];
  CHECK(count <= 64);
  for (size_t i = 0; i < count; i++) others[i] = tensor_make(world, bytes, 0xDEAD00 + i);
  for (size_t i = 0; i < count; i++) tensor_free(&others[i]);
}

/* ---- records in a state ---- */

typedef enum record_state {
  RECORD_QUEUED, /* the disk stands still and has not begun with it */
  RECORD_WRITING, /* begun, held back */
  RECORD_WRITTEN,
  RECORD_READING, /* ahead, held back */
  RECORD_READ, /* ahead */
  RECORD_STATES
} record_state;

#define CREW 64 /* records */

typedef struct crew {
  uint64_t bytes; /* of each: many more in all than are written at a time where some shall wait for their turn */
  ptn_record *records[CREW]; /* in the order they were put; the bytes of record i have the seed i + 1 */
} crew;

/* Puts CREW records and brings them to the state: in WRITING the first of them at least, in QUEUED the last at least, in READING
 * as many as are read at a time. The disk stands still in QUEUED, WRITING and READING until faulty_open. */
static inline void crew_bring(world *world, crew *crew, record_state state) {
  uint64_t bytes = crew->bytes = (state == RECORD_QUEUED ? 128 : 8) * PAGE;
  faulty_tell(&world->disk, FAULT_NONE, 0, 0, 0);
  if (state == RECORD_QUEUED || state == RECORD_WRITING) faulty_close(&world->disk);
  ptn_stash_begin(world->stash);
  for (uint64_t i = 0; i < CREW; i++) crew->records[i] = put_and_free(world, bytes, i + 1);
  if (state == RECORD_QUEUED || state == RECORD_WRITING) {
    WAIT_UNTIL(faulty_look(&world->disk).held > 0);
    ptn_stash_end(world->stash);
    return;
  }
  WAIT_UNTIL(world_stats(world).written_bytes == CREW * bytes);
  WAIT_UNTIL(world_account(world).live_bytes == 0);
  if (state == RECORD_READING) faulty_close(&world->disk);
  if (state == RECORD_WRITTEN) return; /* within the pass nothing is read ahead */
  ptn_stash_end(world->stash);
  WAIT_UNTIL(faulty_look(&world->disk).reads > 0);
  if (state == RECORD_READING) world_settle(world);
  else WAIT_UNTIL(world_stats(world).read_bytes == CREW * bytes);
}

/* Backward in order; each record is asked for once, and dropped. */
static inline void crew_take_back(const crew *crew) {
  for (uint64_t i = CREW; i-- > 0;) {
    get_and_free(crew->records[i], true, i + 1);
    ptn_record_drop(crew->records[i], true);
  }
}

/* ---- a program of named cases ---- */

typedef struct test_case {
  const char *name;
  void (*run)(void);
} test_case;

static inline void nothing_is_left(void) {
  ptn_arena_stats all;
  ptn_arena_get_stats(&all);
  CHECK(all.live_bytes == 0);
}

/* What main returns. With an argument: only the case of that name. */
static inline int run_cases(const test_case *cases, size_t n_cases, int count, char **words) {
  alarm(HUNG_SECONDS); /* a hang ends here */
  for (size_t i = 0; i < n_cases; i++)
    if (count < 2 || strcmp(words[1], cases[i].name) == 0) cases[i].run();
  nothing_is_left();
  return 0;
}

#endif
