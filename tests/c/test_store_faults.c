/* Each attempt of a workload goes wrong once, in every way, on both engines: what can be made good is made good, what cannot
 * is the error of the one request it belongs to, every done is called once, and the store goes on. */
/* sources: csrc/disk/?*.c */
/* threads */
#include "disk/store.h"
#include "faulty_engine.h"

#define REQUESTS 4
#define PIECE_BYTES (16 * PTN_PAGE_BYTES)
#define REQUEST_BYTES (3 * PIECE_BYTES + 2 * PTN_PAGE_BYTES) /* 4 pieces, the last one short */
#define DEPTH 3 /* fewer than a request has pieces */
#define ATTEMPTS (REQUESTS * 4)

static const char *folder;
static ptn_store *store;
static faulty_engine engine;
static ptn_extent extent;
static unsigned char *memory, *expected;
static ptn_io requests[REQUESTS];
static int done_counts[REQUESTS];
static ptn_mutex mutex;
static ptn_condition condition;
static int left_count;

static void done(ptn_io *io) {
  ptn_lock(&mutex);
  done_counts[io - requests]++;
  if (--left_count == 0) ptn_signal(&condition);
  ptn_unlock(&mutex);
}

/* Every eight bytes differ from all others of the extent and from those of every other salt. */
static void fill(unsigned char *to, uint64_t offset, uint64_t bytes, uint64_t salt) {
  for (uint64_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    uint64_t word = (offset + i) << 8 | salt;
    memcpy(to + i, &word, sizeof word);
  }
}

/* Even requests are reads of bytes with salt 1, odd ones are writes with salt. */
static void submit_all(unsigned char salt) {
  left_count = REQUESTS;
  memset(done_counts, 0, sizeof done_counts);
  for (uint64_t i = 0; i < REQUESTS; i++) {
    uint64_t at = i * REQUEST_BYTES;
    bool write = i % 2;
    if (write) fill(memory + at, at, REQUEST_BYTES, salt);
    else memset(memory + at, 0, REQUEST_BYTES);
    requests[i] = (ptn_io){.memory = memory + at,
                           .offset = extent.offset + at,
                           .bytes = REQUEST_BYTES,
                           .write = write,
                           .urgent = i % 3 == 0,
                           .done = done};
    ptn_store_submit(store, &requests[i]);
  }
}

static int wait_all(void) {
  ptn_lock(&mutex);
  while (left_count > 0) CHECK(ptn_wait_ns(&condition, &mutex, HUNG_NS)); /* longer is a hang */
  ptn_unlock(&mutex);
  int failed_count = 0;
  for (int i = 0; i < REQUESTS; i++) {
    CHECK(done_counts[i] == 1);
    CHECK(requests[i].own.in_flight_count == 0);
    CHECK(requests[i].end_ns >= requests[i].start_ns && requests[i].start_ns > 0);
    failed_count += requests[i].status != PTN_OK;
  }
  return failed_count;
}

static void check_data(unsigned char salt) {
  for (uint64_t i = 0; i < REQUESTS; i++) {
    uint64_t at = i * REQUEST_BYTES;
    if (requests[i].status != PTN_OK) continue;
    fill(expected, at, REQUEST_BYTES, i % 2 ? salt : 1);
    unsigned char *found = memory + at;
    if (i % 2) {
      found = memory + REQUESTS * REQUEST_BYTES;
      CHECK_OK(ptn_store_transfer(store, found, extent.offset + at, REQUEST_BYTES, false));
    }
    CHECK(memcmp(found, expected, REQUEST_BYTES) == 0);
  }
}

static void check_error(int sys_errno) {
  for (int i = 0; i < REQUESTS; i++) {
    if (requests[i].status == PTN_OK) continue;
    const ptn_error *error = &requests[i].error;
    CHECK(requests[i].status == PTN_DISK && error->code == PTN_DISK && error->sys_errno == sys_errno);
    CHECK(strcmp(error->path, folder) == 0 && strstr(error->message, i % 2 ? "write" : "read") && error->asked_bytes > 0);
  }
}

static void each_attempt(fault fault, int told_errno, int failed_count, int sys_errno) {
  for (uint64_t n = 1; n <= ATTEMPTS; n++) {
    unsigned char salt = (unsigned char)(n + 1);
    faulty_tell(&engine, fault, told_errno, n, n);
    submit_all(salt);
    CHECK(wait_all() == failed_count);
    check_error(sys_errno);
    faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
    check_data(salt);
  }
}

static void create(ptn_disk_engine which) {
  CHECK_OK(ptn_store_create_with(
      &store, folder,
      &(ptn_store_options){
          .engine = which, .piece_bytes = PIECE_BYTES, .depth = DEPTH, .wrap = faulty_wrap, .context = &engine}));
  CHECK_OK(ptn_store_reserve(store, REQUESTS * REQUEST_BYTES, &extent));
  fill(memory, 0, REQUESTS * REQUEST_BYTES, 1);
  CHECK_OK(ptn_store_transfer(store, memory, extent.offset, REQUESTS * REQUEST_BYTES, true));
}

static void single_faults(void) {
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
  submit_all(1);
  CHECK(wait_all() == 0 && faulty_count(&engine) == ATTEMPTS);
  CHECK(engine.most_in_flight_count > 1 && engine.most_in_flight_count <= DEPTH);
  check_data(1);
  each_attempt(FAULT_ERRNO, EIO, 1, EIO);
  each_attempt(FAULT_ERRNO, ENOSPC, 1, ENOSPC);
  each_attempt(FAULT_ERRNO, EINTR, 0, 0);
  each_attempt(FAULT_ERRNO, EAGAIN, 0, 0);
  each_attempt(FAULT_SHORT, 0, 0, 0);
  each_attempt(FAULT_SHORT_ODD, 0, 0, 0);
  each_attempt(FAULT_TINY, 0, 0, 0);
  each_attempt(FAULT_LATE, 0, 0, 0);
  each_attempt(FAULT_EXCESS, 0, 1, EIO);
}

/* A transfer of nothing: a read finds the end of the file, a write no space. */
static void nothing_moved(void) {
  for (uint64_t n = 1; n <= ATTEMPTS; n++) {
    faulty_tell(&engine, FAULT_ZERO, 0, n, n);
    submit_all(7);
    CHECK(wait_all() == 1);
    for (int i = 0; i < REQUESTS; i++)
      if (requests[i].status != PTN_OK) CHECK(requests[i].error.sys_errno == (i % 2 ? ENOSPC : ENODATA));
    faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
    check_data(7);
  }
}

static void everything_fails(fault fault, int told_errno, int sys_errno) {
  faulty_tell(&engine, fault, told_errno, 1, UINT64_MAX);
  submit_all(9);
  CHECK(wait_all() == REQUESTS);
  check_error(sys_errno);
  uint64_t count = faulty_count(&engine);
  if (told_errno == EIO) CHECK(count < ATTEMPTS); /* the rest of a failed request is not attempted */
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
  submit_all(10);
  CHECK(wait_all() == 0);
  check_data(10);
}

/* ---- bytes that are not those that were written ---- */

static uint64_t page_of(uint64_t offset) { return offset / PTN_PAGE_BYTES * PTN_PAGE_BYTES; }

/* The error names the place to the page. */
static void check_place(const ptn_error *error, uint64_t offset) {
  char words[64];
  snprintf(words, sizeof words, "%zu bytes at %llu of the file", PTN_PAGE_BYTES, (unsigned long long)page_of(offset));
  CHECK(error->code == PTN_DISK && error->sys_errno == EBADMSG && error->asked_bytes == PTN_PAGE_BYTES);
  CHECK(strcmp(error->path, folder) == 0 && strstr(error->message, words) && strstr(error->message, "checksum"));
}

static faulty_entry started(bool write, uint64_t number) {
  faulty_entry log[4 * ATTEMPTS];
  uint64_t count = faulty_copy_log(&engine, log, 4 * ATTEMPTS);
  for (uint64_t i = 0; i < count; i++)
    if (log[i].write == write && --number == 0) return log[i];
  CHECK(!"an attempt of this number");
  return log[0];
}

/* In every read once: the one request that it belongs to fails. */
static void wrong_reads_are_noticed(fault fault) {
  for (uint64_t n = 1; n <= ATTEMPTS / 2; n++) {
    faulty_tell_of(&engine, FAULTY_READS, fault, 0, n, n);
    submit_all((unsigned char)(n + 20));
    CHECK(wait_all() == 1);
    faulty_entry entry = started(false, n);
    faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
    for (int i = 0; i < REQUESTS; i++)
      if (requests[i].status != PTN_OK)
        check_place(&requests[i].error, entry.offset + (fault == FAULT_WRONG_BYTE ? entry.bytes / 3 : 0));
    check_data((unsigned char)(n + 20));
  }
}

/* In every write once: it ends well, and whoever reads is told as often as he does. A new write makes it good. */
static void writes_that_were_not_made_are_noticed(fault fault) {
  for (uint64_t n = 1; n <= ATTEMPTS / 2; n++) {
    faulty_tell_of(&engine, FAULTY_WRITES, fault, 0, n, n);
    submit_all((unsigned char)(n + 60));
    CHECK(wait_all() == 0);
    faulty_entry entry = started(true, n);
    faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
    uint64_t lost = entry.offset + (fault == FAULT_TORN ? page_of(entry.bytes / 2) : 0);
    unsigned char *found = memory + REQUESTS * REQUEST_BYTES;
    for (uint64_t i = 1; i < REQUESTS; i += 2) {
      uint64_t at = extent.offset + i * REQUEST_BYTES;
      bool here = entry.offset >= at && entry.offset < at + REQUEST_BYTES;
      for (int k = 0; k < 2; k++) {
        CHECK((ptn_store_transfer(store, found, at, REQUEST_BYTES, false) == PTN_DISK) == here);
        if (here) check_place(ptn_last_error(), lost);
      }
    }
    submit_all(5);
    CHECK(wait_all() == 0);
    check_data(5);
  }
}

/* It is missing where it should be, and destroys what was beside it: both are noticed. */
static void a_write_elsewhere_is_noticed_twice(void) {
  uint64_t at = extent.offset + REQUEST_BYTES;
  fill(memory, 77, PIECE_BYTES, 99);
  CHECK_OK(ptn_store_transfer(store, memory, at, PIECE_BYTES, true));
  CHECK_OK(ptn_store_transfer(store, memory, at + PIECE_BYTES, PIECE_BYTES, true));
  fill(memory, 77, PIECE_BYTES, 100);
  faulty_tell_of(&engine, FAULTY_WRITES, FAULT_ELSEWHERE, 0, 1, 1);
  CHECK_OK(ptn_store_transfer(store, memory, at + PIECE_BYTES, PIECE_BYTES, true));
  for (int beside = 0; beside < 2; beside++) {
    uint64_t offset = at + (beside ? 0 : PIECE_BYTES);
    CHECK(ptn_store_transfer(store, memory, offset, PIECE_BYTES, false) == PTN_DISK);
    check_place(ptn_last_error(), offset);
  }
  submit_all(5);
  CHECK(wait_all() == 0);
}

/* A write that failed may have been made all the same: what it left is neither the old bytes nor known to be the new ones. */
static void after_a_failed_write(void) {
  fill(memory, 0, PIECE_BYTES, 7);
  faulty_tell(&engine, FAULT_ERRNO, EIO, 1, 1);
  CHECK(ptn_store_transfer(store, memory, extent.offset, PIECE_BYTES, true) == PTN_DISK && ptn_last_error()->sys_errno == EIO);
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
  CHECK(ptn_store_transfer(store, memory, extent.offset, PIECE_BYTES, false) == PTN_DISK);
  check_place(ptn_last_error(), extent.offset);
  fill(memory, 0, PIECE_BYTES, 1);
  CHECK_OK(ptn_store_transfer(store, memory, extent.offset, PIECE_BYTES, true));
  CHECK_OK(ptn_store_transfer(store, memory, extent.offset, PIECE_BYTES, false));
}

/* The same in its middle: what the disk had taken before is known to be there. */
static void after_a_write_that_failed_in_its_middle(void) {
  enum { HALF = PIECE_BYTES / 2 };
  fill(memory, 0, PIECE_BYTES, 9);
  faulty_tell(&engine, FAULT_HALF, EIO, 1, 2);
  CHECK(ptn_store_transfer(store, memory, extent.offset, PIECE_BYTES, true) == PTN_DISK && ptn_last_error()->sys_errno == EIO);
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
  memset(memory, 0, HALF);
  CHECK_OK(ptn_store_transfer(store, memory, extent.offset, HALF, false));
  fill(expected, 0, HALF, 9);
  CHECK(memcmp(memory, expected, HALF) == 0);
  CHECK(ptn_store_transfer(store, memory, extent.offset + HALF, HALF, false) == PTN_DISK);
  check_place(ptn_last_error(), extent.offset + HALF);
  fill(memory, 0, PIECE_BYTES, 1);
  CHECK_OK(ptn_store_transfer(store, memory, extent.offset, PIECE_BYTES, true));
}

/* The checks above see a single wrong bit. */
static void a_wrong_bit_is_seen(void) {
  faulty_tell(&engine, FAULT_WRONG_BYTE, 0, 1, UINT64_MAX);
  CHECK(ptn_store_transfer(store, memory, extent.offset, PIECE_BYTES, false) == PTN_DISK);
  CHECK(ptn_last_error()->sys_errno == EBADMSG);
  fill(expected, 0, PIECE_BYTES, 1);
  CHECK(memcmp(memory, expected, PIECE_BYTES) != 0);
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
  CHECK_OK(ptn_store_transfer(store, memory, extent.offset, PIECE_BYTES, false));
  CHECK(memcmp(memory, expected, PIECE_BYTES) == 0);
}

static void transfer_reports_the_error(void) {
  faulty_tell(&engine, FAULT_ERRNO, EIO, 1, 1);
  CHECK(ptn_store_transfer(store, memory, extent.offset, PIECE_BYTES, false) == PTN_DISK);
  CHECK(ptn_last_error()->sys_errno == EIO && ptn_last_error()->asked_bytes == PIECE_BYTES);
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
}

/* Destroy waits for what is in flight and for what is queued. */
static void destroy_waits(ptn_disk_engine which) {
  create(which);
  faulty_tell(&engine, FAULT_LATE, 0, 1, UINT64_MAX);
  submit_all(3);
  ptn_store_destroy(store);
  CHECK(left_count == 0);
  CHECK(wait_all() == 0);
}

static void run(ptn_disk_engine which) {
  create(which);
  single_faults();
  nothing_moved();
  everything_fails(FAULT_ERRNO, EIO, EIO);
  everything_fails(FAULT_ERRNO, EAGAIN, EAGAIN);
  everything_fails(FAULT_TINY, 0, EIO);
  wrong_reads_are_noticed(FAULT_WRONG_BYTE);
  wrong_reads_are_noticed(FAULT_ELSEWHERE);
  writes_that_were_not_made_are_noticed(FAULT_LOST);
  writes_that_were_not_made_are_noticed(FAULT_TORN);
  a_write_elsewhere_is_noticed_twice();
  after_a_failed_write();
  after_a_write_that_failed_in_its_middle();
  a_wrong_bit_is_seen();
  transfer_reports_the_error();
  ptn_store_destroy(store);
  destroy_waits(which);
}

int main(void) {
  const char *given = getenv("TMPDIR");
  folder = given ? given : "/tmp";
  size_t bytes = (REQUESTS + 1) * REQUEST_BYTES;
  memory = aligned_alloc(PTN_PAGE_BYTES, bytes);
  expected = malloc(REQUEST_BYTES * REQUESTS);
  CHECK(memory && expected);
  ptn_mutex_create(&mutex);
  ptn_condition_create(&condition);
  run(PTN_DISK_THREADS);
  ptn_store *probe;
  if (ptn_store_create(&probe, folder, PTN_DISK_URING) == PTN_OK) {
    ptn_store_destroy(probe);
    run(PTN_DISK_URING);
  } else {
    CHECK(strstr(ptn_last_error()->message, "io_uring cannot be used"));
    printf("without io_uring: %s\n", ptn_last_error()->message);
  }
  ptn_condition_destroy(&condition);
  ptn_mutex_destroy(&mutex);
  free(memory);
  free(expected);
  return 0;
}
