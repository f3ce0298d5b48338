/* Traffic and workers: what they count is what was moved and where, they end when told, every failure comes back as one error
 * after which nothing is in flight, nothing is lost and the disk can be measured again. */
/* sources: csrc/profile/measure.c csrc/disk/?*.c */
/* threads */
#define _GNU_SOURCE
#include "profile/measure.h"

#include <signal.h>
#include <sys/resource.h>

#include "faulty_engine.h"

#define REQUEST_BYTES (8 * PTN_PAGE_BYTES)
#define REQUESTS 4
#define MEMORY_BYTES (REQUESTS * REQUEST_BYTES)
#define FILE_BYTES (14 * REQUEST_BYTES) /* halves of 7 requests */

static const char *folder;
static void *memory;
static ptn_store *store;
static faulty_engine engine;
static ptn_traffic *traffic;

static uint64_t reserved_bytes(void) {
  ptn_store_stats stats;
  ptn_store_get_stats(store, &stats);
  return stats.reserved_bytes;
}

static ptn_traffic_count look(void) {
  ptn_traffic_count count;
  CHECK_OK(ptn_traffic_look(traffic, &count));
  return count;
}

static void nap(void) { nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL); }

/* Waits until so much more has been moved in a direction. */
static void wait_for(uint64_t more_bytes, bool write) {
  ptn_traffic_count before = look(), now = before;
  while ((write ? now.write_bytes - before.write_bytes : now.read_bytes - before.read_bytes) < more_bytes) {
    nap();
    now = look();
  }
}

static void create(void) { CHECK_OK(ptn_traffic_create(&traffic, store, FILE_BYTES, memory, MEMORY_BYTES, REQUEST_BYTES)); }

/* ---- traffic ---- */

static void all_is_written_first(void) {
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
  create();
  faulty_entry log[64];
  uint64_t count = faulty_copy_log(&engine, log, 64), end = 0;
  for (uint64_t i = 0; i < count; i++) {
    CHECK(log[i].write && log[i].offset == end); /* in order, without a hole */
    end += log[i].bytes;
  }
  CHECK(end == FILE_BYTES && ptn_traffic_first_write_ns(traffic) > 0);
  ptn_traffic_count count_now = look();
  CHECK(count_now.read_bytes == 0 && count_now.write_bytes == 0 && count_now.processor_bytes == 0);
}

/* Reads go through the first half, writes through the second, each place in its turn; the counts are of what was asked for. */
static void runs(bool reads, bool writes) {
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
  ptn_traffic_count before = look();
  CHECK_OK(ptn_traffic_start(traffic, reads, writes, REQUEST_BYTES));
  ptn_traffic_count begun = look();
  CHECK((begun.read_bytes > before.read_bytes) == reads && (begun.write_bytes > before.write_bytes) == writes);
  CHECK(ptn_traffic_start(traffic, true, true, REQUEST_BYTES) == PTN_STEP);
  if (reads) wait_for(FILE_BYTES, false);
  if (writes) wait_for(FILE_BYTES, true);
  CHECK_OK(ptn_traffic_stop(traffic));
  ptn_traffic_count after = look();
  faulty_counts counts = faulty_look(&engine);
  CHECK(counts.in_flight == 0 && (counts.reads > 0) == reads && (counts.writes > 0) == writes);
  CHECK(after.read_bytes - before.read_bytes == counts.reads * REQUEST_BYTES);
  CHECK(after.write_bytes - before.write_bytes == counts.writes * REQUEST_BYTES);
  CHECK(after.at_ns > begun.at_ns && after.processor_ns > before.processor_ns);
  CHECK(after.processor_bytes > before.processor_bytes &&
        after.processor_bytes <= after.read_bytes + after.write_bytes); /* all but each thread's first */
  CHECK(engine.most_in_flight_count > 1 && engine.most_in_flight_count <= REQUESTS);
  faulty_entry log[FAULTY_LOG];
  uint64_t n_log = faulty_copy_log(&engine, log, FAULTY_LOG), seen[2] = {0, 0};
  for (uint64_t i = 0; i < n_log; i++) {
    CHECK(log[i].bytes == REQUEST_BYTES && log[i].offset % REQUEST_BYTES == 0 && log[i].offset < FILE_BYTES);
    CHECK(log[i].write == (log[i].offset >= FILE_BYTES / 2));
    seen[log[i].write] |= 1u << log[i].offset / REQUEST_BYTES;
  }
  CHECK(seen[false] == (reads ? 0x7Fu : 0) && seen[true] == (writes ? 0x3F80u : 0));
  nap();
  CHECK(look().read_bytes == after.read_bytes && look().write_bytes == after.write_bytes); /* it has ended */
  CHECK_OK(ptn_traffic_stop(traffic));                                                    /* and can be told so again */
}

/* The traffic fails by itself; look, stop and the next start tell it once, and then it goes on. */
static void fails_while_it_runs(faulty_direction direction, int sys_errno) {
  CHECK_OK(ptn_traffic_start(traffic, true, true, REQUEST_BYTES));
  faulty_tell_of(&engine, direction, FAULT_ERRNO, sys_errno, 3, 3);
  ptn_traffic_count count;
  while (ptn_traffic_look(traffic, &count) == PTN_OK) nap();
  CHECK(ptn_last_error()->sys_errno == sys_errno && ptn_last_error()->code == PTN_DISK);
  ptn_fail(PTN_INVALID, "another failure");
  CHECK(ptn_traffic_stop(traffic) == PTN_DISK);
  const ptn_error *error = ptn_last_error();
  CHECK(error->sys_errno == sys_errno && strcmp(error->path, folder) == 0 && error->asked_bytes == REQUEST_BYTES);
  CHECK(strstr(error->message, direction == FAULTY_WRITES ? "write" : "read"));
  CHECK(faulty_look(&engine).in_flight == 0);
  CHECK_OK(ptn_traffic_stop(traffic));
  runs(true, true);
}

static void fails_at_its_start(faulty_direction direction, bool reads, bool writes) {
  faulty_tell_of(&engine, direction, FAULT_ERRNO, EIO, 1, UINT64_MAX);
  for (int i = 0; i < 3; i++)
    CHECK(ptn_traffic_start(traffic, reads, writes, REQUEST_BYTES) == PTN_DISK && ptn_last_error()->sys_errno == EIO);
  CHECK(faulty_look(&engine).in_flight == 0);
  runs(reads, writes);
}

static void destroyed_while_it_runs(void) {
  faulty_tell(&engine, FAULT_LATE, 0, 1, UINT64_MAX);
  CHECK_OK(ptn_traffic_start(traffic, true, true, REQUEST_BYTES));
  ptn_fail(PTN_INVALID, "the caller's own");
  ptn_traffic_destroy(traffic);
  CHECK(strcmp(ptn_last_error()->message, "the caller's own") == 0);
  CHECK(faulty_look(&engine).in_flight == 0);
  ptn_store_trim(store, 0);
  CHECK(reserved_bytes() == 0);
}

/* ---- what does not begin ---- */

static void first_write_fails(void) {
  for (uint64_t n = 1; n <= 4; n++) { /* of four transfers */
    faulty_tell(&engine, FAULT_ERRNO, ENOSPC, n, n);
    CHECK(ptn_traffic_create(&traffic, store, FILE_BYTES, memory, MEMORY_BYTES, REQUEST_BYTES) == PTN_DISK && !traffic);
    CHECK(ptn_last_error()->sys_errno == ENOSPC && ptn_last_error()->asked_bytes > 0);
    CHECK(faulty_count(&engine) == n); /* and no more is written */
    ptn_store_trim(store, 0);
    CHECK(reserved_bytes() == 0);
  }
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
}

/* The disk has no room: as a limit of this process's files, which needs no full disk. */
static void no_room(void) {
  struct rlimit before, limit;
  CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
  limit = before;
  limit.rlim_cur = FILE_BYTES / 2;
  CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  CHECK(ptn_traffic_create(&traffic, store, FILE_BYTES, memory, MEMORY_BYTES, REQUEST_BYTES) == PTN_DISK && !traffic);
  CHECK(ptn_last_error()->sys_errno == EFBIG && ptn_last_error()->asked_bytes == FILE_BYTES);
  CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK(reserved_bytes() == 0 && faulty_count(&engine) == 0);
}

static void wrong_sizes(void) {
  static const uint64_t sizes[][3] = {/* file, memory, request */
                                      {FILE_BYTES, MEMORY_BYTES, 0},
                                      {FILE_BYTES, MEMORY_BYTES, PTN_PAGE_BYTES / 2},
                                      {FILE_BYTES, REQUEST_BYTES, REQUEST_BYTES},
                                      {REQUEST_BYTES, MEMORY_BYTES, REQUEST_BYTES}};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
    CHECK(ptn_traffic_create(&traffic, store, sizes[i][0], memory, sizes[i][1], sizes[i][2]) == PTN_INVALID && !traffic);
  create();
  CHECK(ptn_traffic_start(traffic, false, false, REQUEST_BYTES) == PTN_INVALID);
  CHECK(ptn_traffic_start(traffic, true, true, 0) == PTN_INVALID);
  CHECK(ptn_traffic_start(traffic, true, true, PTN_PAGE_BYTES / 2) == PTN_INVALID);
  CHECK(ptn_traffic_start(traffic, true, true, REQUEST_BYTES + PTN_PAGE_BYTES) == PTN_INVALID);
  ptn_traffic_destroy(traffic);
  ptn_traffic_destroy(NULL);
}

/* ---- a worker ---- */

typedef struct work {
  _Atomic uint64_t count;
  uint64_t sum;
} work;

static uint64_t do_work(void *context) {
  work *work = context;
  for (uint64_t i = 0; i < 1000; i++) work->sum = work->sum * 31 + i;
  atomic_fetch_add(&work->count, 1);
  return 8;
}

static void works(double rest) {
  work work = {0};
  ptn_worker *worker;
  ptn_worker_count count = {0}, last;
  CHECK_OK(ptn_worker_start(&worker, do_work, &work, rest));
  while (count.bytes < 80) {
    nap();
    ptn_worker_look(worker, &count);
  }
  ptn_worker_stop(worker, &last);
  CHECK(last.bytes == 8 * atomic_load(&work.count) && last.bytes >= count.bytes);
  CHECK(last.busy_ns > 0 && last.processor_ns > 0 && last.busy_ns >= count.busy_ns && last.processor_ns >= count.processor_ns);
}

/* It is woken from its sleep, however long that would be: this would take days. */
static void does_not_sleep_on(void) {
  work work = {0};
  ptn_worker *worker;
  CHECK_OK(ptn_worker_start(&worker, do_work, &work, 1e11));
  while (atomic_load(&work.count) == 0) nap();
  ptn_worker_stop(worker, NULL);
  CHECK(atomic_load(&work.count) == 1);
}

int main(void) {
  const char *given = getenv("TMPDIR");
  folder = given ? given : "/tmp";
  memory = aligned_alloc(PTN_PAGE_BYTES, MEMORY_BYTES);
  CHECK(memory);
  memset(memory, 0x3C, MEMORY_BYTES);
  CHECK_OK(ptn_store_create_with(&store, folder, &(ptn_store_options){.wrap = faulty_wrap, .context = &engine}));
  no_room();
  first_write_fails();
  all_is_written_first();
  runs(true, false);
  runs(false, true);
  runs(true, true);
  fails_while_it_runs(FAULTY_READS, EIO);
  fails_while_it_runs(FAULTY_WRITES, ENOSPC);
  fails_at_its_start(FAULTY_READS, true, true);
  fails_at_its_start(FAULTY_WRITES, true, true);
  fails_at_its_start(FAULTY_BOTH, true, false);
  fails_at_its_start(FAULTY_BOTH, false, true);
  destroyed_while_it_runs();
  wrong_sizes();
  ptn_store_destroy(store);
  works(0);
  works(2);
  does_not_sleep_on();
  free(memory);
  return 0;
}
