/* The stash on a bad disk: each attempt of a workload goes wrong once, in every way. What can be made good is; what cannot is the
 * error of whoever needs it, with path and reason; wrong bytes are never handed out; nothing is left; the next pass works. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/runtime/stash*.c */
/* threads */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/syscall.h>

#include "stash_fixture.h"

#define RECORDS 4
#define BYTES (6 * PAGE)
#define PIECE (4 * PAGE)
#define ATTEMPTS (RECORDS * 2) /* in each direction */

static world here;

/* In place of the C library's: a disk that is full when told so. */
static _Atomic bool disk_is_full;
int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  if (!atomic_load(&disk_is_full)) return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
  errno = ENOSPC;
  return -1;
}

/* ---- a workload, and what it came to ---- */

typedef struct outcome {
  int failed_puts, failed_gets, wrong_gets; /* wrong: the checksum said so */
  uint64_t attempts; /* at the disk, while it was told to misbehave */
  ptn_error error; /* the last one */
} outcome;

static void note_error(outcome *outcome) {
  ptn_error_save(&outcome->error);
  CHECK(outcome->error.code == PTN_DISK && outcome->error.sys_errno != 0 && outcome->error.asked_bytes > 0);
  CHECK(strcmp(outcome->error.path, world_folder()) == 0 && strstr(outcome->error.message, world_folder()));
}

static bool put(outcome *outcome, const tensor *tensor, ptn_record **record) {
  bool fresh = false;
  ptn_status status = ptn_stash_put(here.stash, &tensor->block, NULL, tensor->version, 3, record, &fresh);
  if (status == PTN_OK) {
    CHECK(fresh && *record);
    return true;
  }
  CHECK(status == PTN_DISK && *record == NULL);
  outcome->failed_puts++;
  note_error(outcome);
  return false;
}

static bool get(outcome *outcome, ptn_record *record, bool first, uint64_t seed) {
  void *memory = NULL;
  ptn_status status = stash_ask(record, first, &memory);
  if (status == PTN_OK) {
    CHECK(words_are(memory, ptn_record_bytes(record), seed)); /* whatever the disk did */
    ptn_arena_free(memory);
    return true;
  }
  CHECK(status == PTN_DISK && memory == NULL);
  outcome->failed_gets++;
  note_error(outcome);
  if (strstr(outcome->error.message, "checksum")) outcome->wrong_gets++;
  return false;
}

/* One pass: put, written as far as the disk lets it, read, asked for in reverse or from the first on, dropped. What failed is
 * asked for once more when the disk is well. */
static outcome one_pass(faulty_direction direction, fault fault, int sys_errno, uint64_t first, uint64_t last, bool reversed) {
  outcome outcome = {0};
  ptn_record *records[RECORDS];
  bool asked[RECORDS] = {false};
  faulty_tell_of(&here.disk, direction, fault, sys_errno, first, last);
  ptn_stash_begin(here.stash);
  for (uint64_t i = 0; i < RECORDS; i++) {
    tensor saved = tensor_make(&here, BYTES, i + 1);
    uint64_t told = 0; /* each write that fails once; of those in flight, one may fail after another */
    while (!put(&outcome, &saved, &records[i])) CHECK(++told <= i);
    tensor_free(&saved);
  }
  world_settle(&here);
  ptn_stash_end(here.stash);
  for (uint64_t n = 0; n < RECORDS; n++) {
    uint64_t i = reversed ? RECORDS - 1 - n : n;
    asked[i] = get(&outcome, records[i], true, i + 1);
  }
  world_settle(&here);
  outcome.attempts = faulty_count(&here.disk);
  faulty_tell(&here.disk, FAULT_NONE, 0, 0, 0);
  for (uint64_t i = 0; i < RECORDS; i++) {
    int failed_gets = outcome.failed_gets;
    for (int k = 0; k < 2; k++) asked[i] |= get(&outcome, records[i], !asked[i], i + 1);
    if (fault != FAULT_LOST && fault != FAULT_TORN) CHECK(asked[i]); /* the bytes are there: another attempt finds them */
    else outcome.failed_gets = failed_gets; /* lost is lost, as often as it is asked for */
    CHECK(ptn_record_drop(records[i], asked[i]) == NULL);
  }
  world_is_empty(&here);
  return outcome;
}

static void open_here(void) { world_open(&here, (world_options){.piece_bytes = PIECE, .depth = 2}); }

/* A clean pass after everything: neither an error nor a record of before is left. */
static void close_here(void) {
  outcome outcome = one_pass(FAULTY_BOTH, FAULT_NONE, 0, 0, 0, true);
  CHECK(outcome.failed_puts == 0 && outcome.failed_gets == 0);
  world_close(&here);
}

/* ---- each attempt ---- */

static void what_can_be_made_good_is(void) {
  static const struct {
    fault fault;
    int sys_errno;
  } harmless[] = {{FAULT_ERRNO, EINTR}, {FAULT_ERRNO, EAGAIN}, {FAULT_SHORT, 0},
                  {FAULT_SHORT_ODD, 0}, {FAULT_TINY, 0},       {FAULT_LATE, 0}};
  open_here();
  for (size_t k = 0; k < sizeof harmless / sizeof *harmless; k++)
    for (uint64_t n = 1; n <= 2 * ATTEMPTS; n++) {
      outcome outcome = one_pass(FAULTY_BOTH, harmless[k].fault, harmless[k].sys_errno, n, n, n % 2);
      CHECK(outcome.failed_puts == 0 && outcome.failed_gets == 0 && outcome.attempts >= 2 * ATTEMPTS);
    }
  close_here();
}

/* A write that failed takes no bytes along: they are still in memory. Somebody is told, once. */
static void each_write_fails(void) {
  static const int numbers[] = {EIO, ENOSPC, EDQUOT};
  for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++)
    for (uint64_t n = 1; n <= ATTEMPTS; n++) {
      open_here();
      outcome outcome = one_pass(FAULTY_WRITES, FAULT_ERRNO, numbers[k], n, n, n % 2);
      CHECK(outcome.failed_puts + outcome.failed_gets == 1 && outcome.wrong_gets == 0);
      CHECK(outcome.error.sys_errno == numbers[k] && strstr(outcome.error.message, "write"));
      close_here();
    }
}

static void each_read_fails(void) {
  for (uint64_t n = 1; n <= ATTEMPTS; n++) {
    open_here();
    outcome outcome = one_pass(FAULTY_READS, FAULT_ERRNO, EIO, n, n, n % 2);
    CHECK(outcome.failed_puts == 0 && outcome.failed_gets == 1 && outcome.wrong_gets == 0);
    CHECK(outcome.error.sys_errno == EIO && strstr(outcome.error.message, "read"));
    close_here();
  }
}

/* A bit flipped, bytes of elsewhere, a write that ended well and was not made, or only half: the checksum says so. */
static void wrong_bytes_are_never_handed_out(void) {
  static const struct {
    faulty_direction direction;
    fault fault;
  } lies[] = {{FAULTY_READS, FAULT_WRONG_BYTE},
              {FAULTY_READS, FAULT_ELSEWHERE},
              {FAULTY_WRITES, FAULT_LOST},
              {FAULTY_WRITES, FAULT_TORN}};
  for (size_t k = 0; k < sizeof lies / sizeof *lies; k++)
    for (uint64_t n = 1; n <= ATTEMPTS; n++) {
      open_here();
      outcome outcome = one_pass(lies[k].direction, lies[k].fault, 0, n, n, n % 2);
      CHECK(outcome.failed_puts == 0 && outcome.failed_gets == 1 && outcome.wrong_gets >= 1);
      close_here();
    }
}

/* Everything fails: each of the records is asked for in vain or has stayed in memory, and all of it can be dropped. */
static void a_dead_disk(void) {
  static const faulty_direction directions[] = {FAULTY_READS, FAULTY_WRITES, FAULTY_BOTH};
  for (size_t k = 0; k < 3; k++) {
    open_here();
    outcome outcome = one_pass(directions[k], FAULT_ERRNO, EIO, 1, UINT64_MAX, k % 2);
    CHECK(outcome.failed_puts + outcome.failed_gets >= 1);
    if (directions[k] == FAULTY_READS) CHECK(outcome.failed_gets == RECORDS);
    close_here();
  }
}

/* A dead disk under a budget: who needs memory gets an error in the end, and what was saved is still right. */
static void a_dead_disk_under_pressure(void) {
  ptn_record *records[16];
  outcome outcome = {0};
  uint64_t count = 0;
  int told = 0; /* to who asked for memory */
  tensor extra;
  world_open(&here, (world_options){.limit_bytes = 12 * BYTES});
  faulty_tell_of(&here.disk, FAULTY_WRITES, FAULT_ERRNO, EIO, 1, UINT64_MAX);
  ptn_stash_begin(here.stash);
  for (uint64_t i = 0; i < 16; i++) {
    tensor saved;
    ptn_status status = tensor_try(&here, BYTES, count + 1, &saved);
    CHECK(status == PTN_OK || status == PTN_BUDGET || status == PTN_DISK);
    told += status == PTN_DISK;
    if (status != PTN_OK) break;
    if (put(&outcome, &saved, &records[count])) count++;
    tensor_free(&saved);
  }
  ptn_status last = tensor_try(&here, 12 * BYTES, 1, &extra);
  CHECK(count > 0 && (last == PTN_BUDGET || last == PTN_DISK));
  told += last == PTN_DISK;
  CHECK(world_account(&here).peak_bytes <= 12 * BYTES);
  ptn_stash_end(here.stash);
  for (uint64_t i = count; i-- > 0;) {
    bool asked = get(&outcome, records[i], true, i + 1);
    if (!asked) asked = get(&outcome, records[i], true, i + 1);
    CHECK(ptn_record_drop(records[i], asked) == NULL);
  }
  CHECK(outcome.failed_puts + outcome.failed_gets + told >= 1);
  faulty_tell(&here.disk, FAULT_NONE, 0, 0, 0);
  close_here();
}

/* A request that is refused because nothing could be written is refused with that, which then is told; the next with the budget. */
static void a_dead_disk_is_why_a_request_is_refused(void) {
  world_open(&here, (world_options){.limit_bytes = 4 * BYTES});
  faulty_tell_of(&here.disk, FAULTY_WRITES, FAULT_ERRNO, EIO, 1, 2);
  ptn_stash_begin(here.stash);
  ptn_record *records[2];
  faulty_close(&here.disk);
  for (uint64_t i = 0; i < 2; i++) records[i] = put_and_free(&here, BYTES, i + 1);
  faulty_open(&here.disk);
  world_settle(&here);
  tensor extra;
  CHECK(tensor_try(&here, 3 * BYTES, 3, &extra) == PTN_DISK && ptn_last_error()->sys_errno == EIO);
  CHECK(tensor_try(&here, 3 * BYTES, 3, &extra) == PTN_BUDGET);
  CHECK_OK(tensor_try(&here, 2 * BYTES, 3, &extra));
  tensor_free(&extra);
  ptn_stash_end(here.stash);
  for (uint64_t i = 2; i-- > 0;) {
    void *memory;
    CHECK_OK(stash_ask(records[i], true, &memory));
    ptn_arena_free(memory);
    CHECK(ptn_record_drop(records[i], true) == NULL);
  }
  close_here();
}

/* What could not be written is gone, nobody was told, and a request has no room beside others: that is no fault of the disk's. */
static void what_is_gone_refuses_no_request(void) {
  world_open(&here, (world_options){.limit_bytes = 4 * BYTES});
  faulty_tell_of(&here.disk, FAULTY_WRITES, FAULT_ERRNO, EIO, 1, 1);
  ptn_stash_begin(here.stash);
  ptn_record *record = put_and_free(&here, BYTES, 1);
  world_settle(&here);
  CHECK(ptn_record_drop(record, false) == NULL);
  tensor others = tensor_make(&here, 2 * BYTES, 2), extra;
  CHECK(tensor_try(&here, 3 * BYTES, 3, &extra) == PTN_BUDGET);
  tensor_free(&others);
  close_here();
}

/* Nobody asks for what failed: dropped, or closed, with the failure untold. */
static void a_failure_that_nobody_hears_of(void) {
  for (int way = 0; way < 4; way++) {
    ptn_record *records[RECORDS];
    open_here();
    faulty_tell_of(&here.disk, way < 2 ? FAULTY_WRITES : FAULTY_READS, FAULT_ERRNO, EIO, 2, UINT64_MAX);
    faulty_close(&here.disk);
    ptn_stash_begin(here.stash);
    for (uint64_t i = 0; i < RECORDS; i++) records[i] = put_and_free(&here, BYTES, i + 1);
    faulty_open(&here.disk);
    world_settle(&here);
    ptn_stash_end(here.stash);
    world_settle(&here);
    if (way % 2) {
      ptn_stash_close(here.stash);
      CHECK(world_account(&here).live_bytes == 0 && world_reserved_bytes(&here) == 0);
      void *memory;
      for (uint64_t i = 0; i < RECORDS; i++) CHECK(stash_ask(records[i], true, &memory) == PTN_STEP); /* no old failure */
    }
    for (uint64_t i = 0; i < RECORDS; i++) CHECK(ptn_record_drop(records[i], false) == NULL);
    world_close(&here);
  }
}

/* A failure that came when nobody called any more is not the next pass's. */
static void a_failure_is_not_told_a_pass_later(void) {
  open_here();
  faulty_tell_of(&here.disk, FAULTY_WRITES, FAULT_ERRNO, EIO, 1, 1);
  ptn_stash_begin(here.stash);
  ptn_record *record = put_and_free(&here, BYTES, 1);
  world_settle(&here);
  CHECK(ptn_record_drop(record, false) == NULL);
  faulty_tell(&here.disk, FAULT_NONE, 0, 0, 0);
  ptn_stash_begin(here.stash);
  record = put_and_free(&here, BYTES, 2);
  ptn_stash_end(here.stash);
  get_and_free(record, true, 2);
  CHECK(ptn_record_drop(record, true) == NULL);
  close_here();
}

/* Another forward begins before the backward of what could not be written: the next save tells, once. */
static void a_failure_is_told_while_its_record_waits(void) {
  open_here();
  faulty_tell_of(&here.disk, FAULTY_WRITES, FAULT_ERRNO, EIO, 1, 1);
  ptn_stash_begin(here.stash);
  ptn_record *waiting = put_and_free(&here, BYTES, 1), *record;
  world_settle(&here);
  ptn_stash_end(here.stash);
  ptn_stash_begin(here.stash);
  outcome outcome = {0};
  tensor saved = tensor_make(&here, BYTES, 2);
  CHECK(!put(&outcome, &saved, &record) && outcome.failed_puts == 1);
  CHECK(put(&outcome, &saved, &record));
  tensor_free(&saved);
  ptn_stash_end(here.stash);
  get_and_free(record, true, 2);
  get_and_free(waiting, true, 1);
  CHECK(ptn_record_drop(record, true) == NULL && ptn_record_drop(waiting, true) == NULL);
  close_here();
}

/* Changed after it was saved, before it was written, and nobody said so: an error, where it has left memory. */
static void what_changed_unseen_is_noticed(void) {
  open_here();
  faulty_close(&here.disk);
  ptn_stash_begin(here.stash);
  tensor saved = tensor_make(&here, BYTES, 1);
  ptn_record *record = tensor_put(&here, &saved, true);
  ((uint64_t *)saved.memory)[BYTES / sizeof(uint64_t) - 1]++;
  tensor_free(&saved);
  faulty_open(&here.disk);
  world_settle(&here);
  overwrite_free_memory(&here, BYTES, 1);
  ptn_stash_end(here.stash);
  for (int round = 0; round < 2; round++) {
    void *memory = &memory;
    CHECK(stash_ask(record, true, &memory) == PTN_DISK && memory == NULL);
    CHECK(strstr(ptn_last_error()->message, "block 7") && strstr(ptn_last_error()->message, "changed after it was saved"));
  }
  CHECK(ptn_record_drop(record, false) == NULL);
  close_here();
}

/* ---- no space ---- */

/* The disk is full: the tensor stays its owner's, the error says what was asked of whom, and all goes on when there is room. */
static void a_full_disk(void) {
  uint64_t bytes = 16 * PTN_MIB; /* four of them fill what the store reserves at a time */
  for (uint64_t before_count = 0; before_count <= 4; before_count += 4) {
    ptn_record *records[5];
    outcome outcome = {0};
    world_open(&here, (world_options){0});
    ptn_stash_begin(here.stash);
    for (uint64_t i = 0; i < before_count; i++) records[i] = put_and_free(&here, bytes, i + 1);
    atomic_store(&disk_is_full, true);
    tensor saved = tensor_make(&here, bytes, 5);
    for (int round = 0; round < 2; round++) {
      CHECK(!put(&outcome, &saved, &records[before_count]));
      CHECK(outcome.error.sys_errno == ENOSPC && words_are(saved.memory, bytes, 5));
    }
    WAIT_UNTIL(world_account(&here).live_bytes == bytes);
    atomic_store(&disk_is_full, false);
    CHECK(world_stats(&here).put_count == before_count && world_stats(&here).disk_bytes == before_count * bytes);
    records[before_count] = tensor_put(&here, &saved, true);
    tensor_free(&saved);
    ptn_stash_end(here.stash);
    for (uint64_t i = before_count + 1; i-- > 0;) {
      get_and_free(records[i], true, i == before_count ? 5 : i + 1);
      CHECK(ptn_record_drop(records[i], true) == NULL);
    }
    world_close(&here);
  }
}

int main(int count, char **words) {
  static const test_case cases[] = {
      {"what_can_be_made_good_is", what_can_be_made_good_is},
      {"each_write_fails", each_write_fails},
      {"each_read_fails", each_read_fails},
      {"wrong_bytes_are_never_handed_out", wrong_bytes_are_never_handed_out},
      {"a_dead_disk", a_dead_disk},
      {"a_dead_disk_under_pressure", a_dead_disk_under_pressure},
      {"a_dead_disk_is_why_a_request_is_refused", a_dead_disk_is_why_a_request_is_refused},
      {"what_is_gone_refuses_no_request", what_is_gone_refuses_no_request},
      {"a_failure_that_nobody_hears_of", a_failure_that_nobody_hears_of},
      {"a_failure_is_not_told_a_pass_later", a_failure_is_not_told_a_pass_later},
      {"a_failure_is_told_while_its_record_waits", a_failure_is_told_while_its_record_waits},
      {"what_changed_unseen_is_noticed", what_changed_unseen_is_noticed},
      {"a_full_disk", a_full_disk},
  };
  return run_cases(cases, sizeof cases / sizeof *cases, count, words);
}
