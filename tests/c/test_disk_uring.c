/* The ring when the kernel does not play along: it is refused, it says EAGAIN to transfers, its call fails for a moment or for
 * good. The calls are replaced here by ones of the same name, which also know where the rings lie. */
/* sources: csrc/disk/?*.c */
/* threads */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/threads.h"
#include "check.h"
#include "disk/engine.h"
#include "disk/uring_abi.h"

static long (*real_syscall)(long number, ...);
static void *(*real_mmap)(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);

static struct {
  int setup_errno;
  int enter_errno;
  _Atomic uint64_t enter_from, enter_to; /* calls that fail */
  _Atomic uint64_t enter_count;
  _Atomic bool refuse; /* every other transfer would have to wait */
} tell;
static int ring_fd = -1;
static char *rings;
static uring_parameters parameters;
static uint32_t seen; /* answers looked at */
static _Atomic uint64_t refused_count;

/* Turns every other answer to a piece into EAGAIN: the transfer was made, and will be made again. */
static void refuse_some(void) {
  uint32_t *tail = (uint32_t *)(void *)(rings + parameters.answers.tail);
  uring_event *events = (uring_event *)(void *)(rings + parameters.answers.events);
  for (; seen != __atomic_load_n(tail, __ATOMIC_ACQUIRE); seen++) {
    uring_event *event = &events[seen & (parameters.answer_entries - 1)];
    if (!tell.refuse || event->user_data <= 1 || seen % 2) continue;
    event->result = -EAGAIN;
    refused_count++;
  }
}

long syscall(long number, ...) {
  long words[6];
  va_list arguments;
  va_start(arguments, number);
  for (int i = 0; i < 6; i++) words[i] = va_arg(arguments, long);
  va_end(arguments);
  if (number == URING_CALL_SETUP && tell.setup_errno) return errno = tell.setup_errno, -1;
  if (number == URING_CALL_ENTER) {
    uint64_t count = ++tell.enter_count;
    if (count >= tell.enter_from && count < tell.enter_to) return errno = tell.enter_errno, -1;
  }
  long result = real_syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]);
  int after = errno;
  if (number == URING_CALL_SETUP && result >= 0) {
    ring_fd = (int)result;
    memcpy(&parameters, (const void *)words[1], sizeof parameters);
    seen = 0;
  }
  if (number == URING_CALL_ENTER && result >= 0) refuse_some();
  errno = after;
  return result;
}

void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (!real_mmap) *(void **)&real_mmap = dlsym(RTLD_NEXT, "mmap");
  void *memory = real_mmap(address, bytes, protection, flags, fd, offset);
  if (fd >= 0 && fd == ring_fd && offset == URING_OFFSET_RINGS) rings = memory;
  return memory;
}

/* ---- a workload that knows its bytes ---- */

#define REQUESTS 40
#define REQUEST_BYTES (10 * PTN_PAGE_BYTES)

static const char *folder;
static ptn_mutex mutex;
static ptn_condition condition;
static int left_count;

static void done(ptn_io *io) {
  CHECK(io->status == PTN_OK);
  ptn_lock(&mutex);
  if (--left_count == 0) ptn_signal(&condition);
  ptn_unlock(&mutex);
}

static void move_all(ptn_store *store, ptn_extent extent, unsigned char *memory, bool write) {
  ptn_io requests[REQUESTS];
  left_count = REQUESTS;
  for (uint64_t i = 0; i < REQUESTS; i++) {
    uint64_t at = i * REQUEST_BYTES;
    requests[i] =
        (ptn_io){.memory = memory + at, .offset = extent.offset + at, .bytes = REQUEST_BYTES, .write = write, .done = done};
    ptn_store_submit(store, &requests[i]);
  }
  ptn_lock(&mutex);
  while (left_count > 0) CHECK(ptn_wait_ns(&condition, &mutex, HUNG_NS)); /* longer is a hang */
  ptn_unlock(&mutex);
}

/* Four rounds of writing and reading while calls `from` to `to` of enter fail with sys_errno. */
static void works_while(int sys_errno, uint64_t from, uint64_t to, bool refuse) {
  tell.enter_from = tell.enter_to = 0;
  ptn_store *store;
  ptn_extent extent;
  CHECK_OK(ptn_store_create_with(&store, folder,
                                 &(ptn_store_options){.engine = PTN_DISK_URING, .piece_bytes = 3 * PTN_PAGE_BYTES, .depth = 6}));
  CHECK_OK(ptn_store_reserve(store, REQUESTS * REQUEST_BYTES, &extent));
  size_t bytes = REQUESTS * REQUEST_BYTES;
  unsigned char *memory = aligned_alloc(PTN_PAGE_BYTES, bytes), *expected = malloc(bytes);
  CHECK(memory && expected);
  tell.enter_errno = sys_errno;
  tell.enter_count = 0;
  tell.enter_from = from;
  tell.enter_to = to;
  tell.refuse = refuse;
  for (uint64_t round = 0; round < 4; round++) {
    uint64_t seed = round + 1;
    for (size_t i = 0; i < bytes; i += 8) memcpy(expected + i, &(uint64_t){check_random(&seed)}, 8);
    memcpy(memory, expected, bytes);
    move_all(store, extent, memory, true);
    memset(memory, 0, bytes);
    move_all(store, extent, memory, false);
    CHECK(memcmp(memory, expected, bytes) == 0);
  }
  tell.refuse = false;
  ptn_store_destroy(store);
  free(memory);
  free(expected);
}

static void refused_with_the_reason(int sys_errno) {
  ptn_store *store;
  tell.setup_errno = sys_errno;
  CHECK(ptn_store_create(&store, folder, PTN_DISK_URING) == PTN_DISK && !store);
  CHECK(ptn_last_error()->sys_errno == sys_errno);
  CHECK(strstr(ptn_last_error()->message, "io_uring cannot be used") && strstr(ptn_last_error()->message, "threads"));
  CHECK_OK(ptn_store_create(&store, folder, PTN_DISK_AUTO)); /* needs no ring */
  CHECK(strcmp(ptn_store_engine_name(store), "threads") == 0);
  ptn_store_destroy(store);
  tell.setup_errno = 0;
}

int main(void) {
  const char *given = getenv("TMPDIR");
  folder = given ? given : "/tmp";
  *(void **)&real_syscall = dlsym(RTLD_NEXT, "syscall");
  CHECK(real_syscall);
  ptn_mutex_create(&mutex);
  ptn_condition_create(&condition);
  refused_with_the_reason(ENOSYS);
  refused_with_the_reason(EPERM);
  refused_with_the_reason(ENOMEM);
  ptn_store *store;
  if (ptn_store_create(&store, folder, PTN_DISK_URING) == PTN_OK) {
    ptn_store_destroy(store);
    works_while(0, 0, 0, true);
    CHECK(refused_count > 0);
    works_while(EAGAIN, 3, 20, true);
    works_while(EINTR, 2, 40, false);
    works_while(EBUSY, 2, 4, true);
    for (uint64_t from = 1; from <= 12; from++) works_while(EBADF, from, UINT64_MAX, from % 2); /* for good */
  } else {
    printf("without io_uring: %s\n", ptn_last_error()->message);
  }
  ptn_condition_destroy(&condition);
  ptn_mutex_destroy(&mutex);
  return 0;
}
