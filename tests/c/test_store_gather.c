/* Short requests that lie side by side are one attempt: which ones are, that each gets its own bytes and its own end, and what
 * becomes of them where the attempt goes wrong; on both engines. */
/* sources: csrc/disk/?*.c */
/* threads */
#include "disk/store.h"
#include "faulty_engine.h"

#define PIECE_PAGES 16
#define MOST 128 /* requests */
#define PAGES (MOST * 4)

static const char *folder;
static ptn_store *store;
static faulty_engine engine;
static ptn_extent extent;
static unsigned char *memory, *expected;
static ptn_io requests[MOST];
static ptn_io *order[MOST];
static ptn_mutex mutex;
static ptn_condition condition;
static size_t left_count, failed_count;

static void done(ptn_io *io) {
  ptn_lock(&mutex);
  CHECK(io->end_ns >= io->start_ns && io->start_ns > 0);
  failed_count += io->status != PTN_OK;
  if (--left_count == 0) ptn_signal(&condition);
  ptn_unlock(&mutex);
}

static void done_by_another(ptn_io *io) { done(io); }

static void submit_all(size_t count) {
  left_count = count;
  failed_count = 0;
  ptn_store_submit_all(store, order, count);
}

static void wait_all(void) {
  ptn_lock(&mutex);
  while (left_count > 0) CHECK(ptn_wait_ns(&condition, &mutex, HUNG_NS)); /* longer is a hang */
  ptn_unlock(&mutex);
}

/* Every eight bytes of the extent differ, and from those of every other salt. */
static void fill(unsigned char *to, uint64_t offset, uint64_t bytes, uint64_t salt) {
  for (uint64_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    uint64_t word = (offset + i) << 8 | salt;
    memcpy(to + i, &word, sizeof word);
  }
}

/* Request i is of pages of the extent; its memory lies somewhere else than its neighbours' would. */
static ptn_io make(size_t i, uint64_t page, uint64_t pages_count, bool write, uint64_t salt) {
  ptn_io io = {.memory = memory + (MOST - 1 - i) * PIECE_PAGES * PTN_PAGE_BYTES,
               .offset = extent.offset + page * PTN_PAGE_BYTES,
               .bytes = pages_count * PTN_PAGE_BYTES,
               .write = write,
               .done = done};
  if (write) fill(io.memory, io.offset, io.bytes, salt);
  else memset(io.memory, 0, io.bytes);
  return io;
}

static bool is_good(const ptn_io *io, uint64_t salt) {
  fill(expected, io->offset, io->bytes, salt);
  return memcmp(io->memory, expected, io->bytes) == 0;
}

static void open_store(ptn_disk_engine which, uint32_t depth, uint32_t parts_count) {
  CHECK_OK(ptn_store_create_with(&store, folder,
                                 &(ptn_store_options){.engine = which,
                                                      .piece_bytes = PIECE_PAGES * PTN_PAGE_BYTES,
                                                      .depth = depth,
                                                      .parts_count = parts_count,
                                                      .wrap = faulty_wrap,
                                                      .context = &engine}));
  CHECK_OK(ptn_store_reserve(store, PAGES * PTN_PAGE_BYTES, &extent));
  fill(expected, extent.offset, extent.bytes, 1);
  CHECK_OK(ptn_store_transfer(store, expected, extent.offset, extent.bytes, true));
  for (size_t i = 0; i < MOST; i++) order[i] = &requests[i];
}

/* ---- what is one attempt ---- */

static void expect_attempts(size_t requests_count, size_t attempts_count, uint64_t salt) {
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
  submit_all(requests_count);
  wait_all();
  CHECK(failed_count == 0);
  CHECK(faulty_count(&engine) == attempts_count);
  for (size_t i = 0; i < requests_count; i++) CHECK(is_good(order[i], order[i]->write ? salt : 1));
}

static void neighbours_are_one_attempt(ptn_disk_engine which) {
  faulty_entry log[4];
  open_store(which, 1, 0);
  CHECK(ptn_store_gathered_bytes(store) == PIECE_PAGES * PTN_PAGE_BYTES);
  for (size_t i = 0; i < 6; i++) requests[i] = make(i, 3 * i, 3, false, 0); /* forwards: 5 fill 15 of 16 pages */
  expect_attempts(6, 2, 0);
  CHECK(faulty_copy_log(&engine, log, 4) == 2);
  CHECK(log[0].offset == extent.offset && log[0].bytes == 15 * PTN_PAGE_BYTES && log[0].parts_count == 5);
  CHECK(log[0].memory == requests[0].memory && log[1].parts_count == 1);
  CHECK(requests[0].start_ns == requests[4].start_ns && requests[0].end_ns == requests[4].end_ns);
  for (size_t i = 0; i < 6; i++) requests[i] = make(i, 60 - 2 * i, 2, false, 0); /* backwards */
  expect_attempts(6, 1, 0);
  CHECK(faulty_copy_log(&engine, log, 4) == 1);
  CHECK(log[0].offset == requests[5].offset && log[0].bytes == 12 * PTN_PAGE_BYTES && log[0].memory == requests[5].memory);
  requests[0] = make(0, 4, 2, false, 0); /* what turns round is another attempt */
  requests[1] = make(1, 6, 2, false, 0);
  requests[2] = make(2, 2, 2, false, 0);
  expect_attempts(3, 2, 0);
  requests[0] = make(0, 4, 2, false, 0); /* a gap */
  requests[1] = make(1, 7, 2, false, 0);
  expect_attempts(2, 2, 0);
  requests[0] = make(0, 100, 2, false, 0); /* the other direction */
  requests[1] = make(1, 102, 2, true, 2);
  expect_attempts(2, 2, 2);
  requests[0] = make(0, 4, 2, false, 0); /* of somebody else, who need not fail with it */
  requests[1] = make(1, 6, 2, false, 0);
  requests[1].done = done_by_another;
  expect_attempts(2, 2, 0);
  requests[0] = make(0, 4, 2, false, 0); /* a more urgent one goes first, by itself */
  requests[1] = make(1, 6, 2, false, 0);
  requests[2] = make(2, 8, 2, false, 0);
  requests[1].urgent = true;
  expect_attempts(3, 3, 0);
  CHECK(faulty_copy_log(&engine, log, 4) == 3 && log[0].offset == requests[1].offset);
  requests[0] = make(0, 4, 3 * PIECE_PAGES / 4, false, 0); /* two that do not fit together */
  requests[1] = make(1, 4 + 3 * PIECE_PAGES / 4, 3 * PIECE_PAGES / 4, false, 0);
  expect_attempts(2, 2, 0);
  ptn_store_destroy(store);
}

/* What came while there was no room in flight goes together, however it was submitted; not more parts than an attempt may have. */
static void waiting_ones_go_together(ptn_disk_engine which) {
  open_store(which, 1, 4);
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
  faulty_close(&engine);
  left_count = 7;
  failed_count = 0;
  for (size_t i = 0; i < 7; i++) {
    requests[i] = make(i, i, 1, true, 3);
    ptn_store_submit(store, &requests[i]);
  }
  CHECK(faulty_count(&engine) == 1);
  faulty_open(&engine);
  wait_all();
  CHECK(failed_count == 0 && faulty_count(&engine) == 3); /* 1, 4, 2 */
  for (size_t i = 0; i < 7; i++) requests[i] = make(i, i, 1, false, 0);
  submit_all(7);
  wait_all();
  for (size_t i = 0; i < 7; i++) CHECK(is_good(&requests[i], 3));
  ptn_store_destroy(store);
  open_store(which, 2, 1); /* one by one */
  CHECK(ptn_store_gathered_bytes(store) == 0);
  for (size_t i = 0; i < 7; i++) requests[i] = make(i, i, 1, false, 0);
  expect_attempts(7, 7, 0);
  ptn_store_destroy(store);
}

/* ---- what goes wrong ---- */

enum { RUNS = 8, IN_RUN = 4 }; /* attempts, and requests in each */

static void prepare(bool write, uint64_t salt) {
  for (size_t i = 0; i < RUNS * IN_RUN; i++) {
    size_t run = i / IN_RUN, at = run % 2 ? IN_RUN - 1 - i % IN_RUN : i % IN_RUN; /* every second one backwards */
    requests[i] = make(i, run * (PIECE_PAGES + 1) + 4 * at, 4, write, salt);
  }
}

/* The requests of one attempt fail together, all others are as they should be. */
static void one_attempt_fails(bool write, fault fault, int told_errno, int sys_errno) {
  for (uint64_t n = 1; n <= RUNS; n++) {
    prepare(write, 10 + n);
    faulty_tell(&engine, fault, told_errno, n, n);
    submit_all(RUNS * IN_RUN);
    wait_all();
    CHECK(failed_count == (sys_errno ? IN_RUN : 0));
    size_t failed_run = 0;
    for (size_t i = 0; i < RUNS * IN_RUN; i++) {
      const ptn_io *io = &requests[i];
      if (io->status == PTN_OK) {
        CHECK(is_good(io, write ? 10 + n : 1));
        continue;
      }
      CHECK(io->error.code == PTN_DISK && io->error.sys_errno == sys_errno &&
            strstr(io->error.message, write ? "write" : "read"));
      CHECK(failed_run == 0 || failed_run == 1 + i / IN_RUN);
      failed_run = 1 + i / IN_RUN;
    }
    faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
    if (!write) continue;
    for (size_t i = 0; i < RUNS * IN_RUN; i++) {
      if (requests[i].status != PTN_OK) continue;
      CHECK_OK(ptn_store_transfer(store, requests[i].memory, requests[i].offset, requests[i].bytes, false));
      CHECK(is_good(&requests[i], 10 + n));
    }
    prepare(true, 1); /* as it was */
    submit_all(RUNS * IN_RUN);
    wait_all();
    CHECK(failed_count == 0);
  }
}

/* One wrong byte is the failure of the request that it belongs to, and names its page. */
static void wrong_bytes_belong_to_one(void) {
  for (uint64_t n = 1; n <= RUNS; n++) {
    prepare(false, 0);
    faulty_tell(&engine, FAULT_WRONG_BYTE, 0, n, n);
    submit_all(RUNS * IN_RUN);
    wait_all();
    CHECK(failed_count == 1);
    faulty_entry log[RUNS];
    CHECK(faulty_copy_log(&engine, log, RUNS) == RUNS);
    uint64_t bad_offset = log[n - 1].offset + log[n - 1].bytes / 3;
    for (size_t i = 0; i < RUNS * IN_RUN; i++) {
      const ptn_io *io = &requests[i];
      bool bad = bad_offset >= io->offset && bad_offset < io->offset + io->bytes;
      CHECK(bad == (io->status != PTN_OK));
      if (bad) CHECK(io->error.sys_errno == EBADMSG && strstr(io->error.message, "checksum"));
      else CHECK(is_good(io, 1));
    }
  }
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
}

/* A write that was not made, or for a part only, is noticed by whoever reads what it did not reach. */
static void lost_writes_are_noticed(fault fault) {
  prepare(true, 30);
  faulty_tell(&engine, fault, 0, 2, 2);
  submit_all(RUNS * IN_RUN);
  wait_all();
  CHECK(failed_count == 0);
  faulty_entry log[RUNS];
  CHECK(faulty_copy_log(&engine, log, RUNS) == RUNS);
  uint64_t begin = log[1].offset + (fault == FAULT_TORN ? PIECE_PAGES / 2 * PTN_PAGE_BYTES : 0);
  uint64_t end = log[1].offset + PIECE_PAGES * PTN_PAGE_BYTES;
  prepare(false, 0);
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
  submit_all(RUNS * IN_RUN);
  wait_all();
  for (size_t i = 0; i < RUNS * IN_RUN; i++) {
    bool lost = requests[i].offset >= begin && requests[i].offset < end;
    CHECK(lost == (requests[i].status != PTN_OK));
    if (!lost) CHECK(is_good(&requests[i], 30));
  }
  prepare(true, 1); /* as it was */
  submit_all(RUNS * IN_RUN);
  wait_all();
  CHECK(failed_count == 0);
}

static void failures(ptn_disk_engine which) {
  open_store(which, 3, 0);
  prepare(false, 0);
  expect_attempts(RUNS * IN_RUN, RUNS, 0);
  for (int write = 0; write < 2; write++) {
    one_attempt_fails(write, FAULT_ERRNO, EIO, EIO);
    one_attempt_fails(write, FAULT_ERRNO, EINTR, 0);
    one_attempt_fails(write, FAULT_SHORT, 0, 0);
    one_attempt_fails(write, FAULT_SHORT_ODD, 0, 0);
    one_attempt_fails(write, FAULT_TINY, 0, 0);
    one_attempt_fails(write, FAULT_EXCESS, 0, EIO);
    one_attempt_fails(write, FAULT_ZERO, 0, write ? ENOSPC : ENODATA);
  }
  wrong_bytes_belong_to_one();
  lost_writes_are_noticed(FAULT_LOST);
  lost_writes_are_noticed(FAULT_TORN);
  ptn_store_destroy(store);
}

/* ---- by chance ---- */

/* Runs of random lengths and directions, from one to MOST requests at once, some urgent, some wrong, on a disk that keeps no order. */
static void random_runs(ptn_disk_engine which, uint64_t seed) {
  static unsigned char salts[PAGES];
  faulty_shaker shaker;
  open_store(which, 3, seed % 2 ? 0 : 5);
  memset(salts, 1, sizeof salts);
  faulty_start_shaking(&shaker, &engine, seed, 20000);
  for (uint64_t round = 2; round < 60; round++) {
    size_t count = 1 + check_random(&seed) % MOST, made = 0, refused = 0;
    uint64_t page = 0;
    bool write = false;
    for (size_t i = 0; i < count && page < PAGES - 4; i++) {
      if (check_random(&seed) % 4 == 0) write = check_random(&seed) % 2;
      if (check_random(&seed) % 8 == 0) page++;
      uint64_t pages_count = 1 + check_random(&seed) % 3;
      requests[made] = make(made, page, pages_count, write, round);
      requests[made].urgent = check_random(&seed) % 16 == 0;
      if (write) memset(salts + page, (int)round, pages_count);
      page += pages_count;
      made++;
    }
    if (check_random(&seed) % 2)
      for (size_t i = 0; i < made; i++) order[i] = &requests[made - 1 - i];
    else
      for (size_t i = 0; i < made; i++) order[i] = &requests[i];
    if (made < MOST && check_random(&seed) % 4 == 0) {
      requests[made] = (ptn_io){.memory = memory, .offset = 100, .bytes = PTN_PAGE_BYTES, .done = done};
      order[made] = order[0];
      order[0] = &requests[made];
      refused = 1;
    }
    submit_all(made + refused);
    wait_all();
    CHECK(failed_count == refused);
    for (size_t i = 0; i < made; i++) {
      uint64_t first = (requests[i].offset - extent.offset) / PTN_PAGE_BYTES;
      for (uint64_t p = 0; p < requests[i].bytes / PTN_PAGE_BYTES; p++) {
        fill(expected, requests[i].offset + p * PTN_PAGE_BYTES, PTN_PAGE_BYTES, salts[first + p]);
        CHECK(memcmp((char *)requests[i].memory + p * PTN_PAGE_BYTES, expected, PTN_PAGE_BYTES) == 0);
      }
    }
  }
  faulty_calm(&shaker);
  ptn_store_destroy(store);
}

static void run(ptn_disk_engine which) {
  neighbours_are_one_attempt(which);
  waiting_ones_go_together(which);
  failures(which);
  random_runs(which, 5);
  random_runs(which, 6);
}

int main(void) {
  const char *given = getenv("TMPDIR");
  folder = given ? given : "/tmp";
  ptn_mutex_create(&mutex);
  ptn_condition_create(&condition);
  memory = aligned_alloc(PTN_PAGE_BYTES, MOST * PIECE_PAGES * PTN_PAGE_BYTES);
  expected = aligned_alloc(PTN_PAGE_BYTES, PAGES * PTN_PAGE_BYTES);
  CHECK(memory && expected);
  run(PTN_DISK_THREADS);
  if (ptn_store_create(&store, folder, PTN_DISK_URING) == PTN_OK) {
    ptn_store_destroy(store);
    run(PTN_DISK_URING);
  }
  free(memory);
  free(expected);
  return 0;
}
