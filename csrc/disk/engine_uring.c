/* The engine of io_uring, by its system calls.
 *
 * Problem: one thread shall keep many pieces in flight. But where the kernel cannot start a transfer without waiting (the
 * first write into reserved space, a file being resized), io_uring starts threads of its own inside the process, which come
 * and stay as they like. And a transfer belongs to the thread that ordered it: its completion interrupts that thread.
 *
 * Design: one thread of the engine orders and collects everything; others put pieces into its inbox and wake it through
 * an eventfd that the ring polls. Every transfer is ordered with RWF_NOWAIT: what would have to wait comes back as EAGAIN
 * and goes to a few ordinary threads (the other engine), so the number of threads never changes.
 *
 * Invariants: only the ring's thread touches the rings after create. At most entries_count - 1 pieces and one poll are
 * ordered, so the answers, of which the kernel keeps twice as many, cannot overflow. If the ring itself fails (someone has
 * closed its descriptor), what the kernel has not taken goes to the threads, and so does all that comes later.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/threads.h"
#include "disk/engine.h"
#include "disk/uring_abi.h"

typedef struct uring {
  int fd;
  void *rings; /* one mapping with both */
  size_t rings_bytes, entries_bytes;
  uring_entry *entries;
  uring_event *events;
  uint32_t *order_head, *order_tail, *answer_head, *answer_tail; /* shared with the kernel */
  uint32_t entries_count, order_mask, answer_mask;
} uring;

typedef struct uring_engine {
  ptn_io_engine base;
  ptn_io_engine *waiting; /* the threads for what would wait */
  uring ring;
  int fd, wake_fd;
  pthread_t thread;
  bool thread_started;
  ptn_mutex mutex; /* of the inbox */
  ptn_piece *first, *last;
  bool asleep, stop;
  /* The ring thread's own. */
  uint32_t ordered_count; /* pieces, taken by the kernel or not */
  bool polling, broken;
} uring_engine;

/* ---- the rings ---- */

static void close_ring(uring *ring) {
  if (ring->entries) munmap(ring->entries, ring->entries_bytes);
  if (ring->rings) munmap(ring->rings, ring->rings_bytes);
  if (ring->fd >= 0) close(ring->fd);
  *ring = (uring){.fd = -1};
}

static void *map(int fd, size_t bytes, off_t offset) {
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
  return memory == MAP_FAILED ? NULL : memory;
}

static ptn_status fail_ring(int sys_errno, const char *what) {
  ptn_fail(PTN_DISK, "io_uring cannot be used: %s: %s; the engine \"threads\" works without it", what, strerror(sys_errno));
  ptn_last_error()->sys_errno = sys_errno;
  return PTN_DISK;
}

static ptn_status open_ring(uring *ring, uint32_t entries_count) {
  uring_parameters parameters = {0};
  ring->fd = (int)syscall(URING_CALL_SETUP, entries_count, &parameters);
  if (ring->fd < 0)
    return fail_ring(errno, errno == ENOSYS ? "this kernel does not have it" : "the kernel or the container does not allow it");
  if (!(parameters.features & URING_FEATURE_SINGLE_MMAP) || !(parameters.features & URING_FEATURE_NODROP))
    return fail_ring(ENOTSUP, "this kernel's is too old");
  size_t orders_bytes = parameters.orders.array + parameters.order_entries * sizeof(uint32_t);
  size_t answers_bytes = parameters.answers.events + parameters.answer_entries * sizeof(uring_event);
  ring->rings_bytes = (size_t)ptn_max_u64(orders_bytes, answers_bytes);
  ring->rings = map(ring->fd, ring->rings_bytes, URING_OFFSET_RINGS);
  ring->entries_bytes = parameters.order_entries * sizeof(uring_entry);
  ring->entries = map(ring->fd, ring->entries_bytes, URING_OFFSET_ENTRIES);
  if (!ring->rings || !ring->entries) return fail_ring(errno, "its rings cannot be mapped");
  char *start = ring->rings;
  ring->entries_count = parameters.order_entries;
  ring->order_head = (uint32_t *)(void *)(start + parameters.orders.head);
  ring->order_tail = (uint32_t *)(void *)(start + parameters.orders.tail);
  ring->order_mask = parameters.order_entries - 1;
  ring->answer_head = (uint32_t *)(void *)(start + parameters.answers.head);
  ring->answer_tail = (uint32_t *)(void *)(start + parameters.answers.tail);
  ring->answer_mask = parameters.answer_entries - 1;
  ring->events = (uring_event *)(void *)(start + parameters.answers.events);
  uint32_t *array = (uint32_t *)(void *)(start + parameters.orders.array);
  for (uint32_t i = 0; i < parameters.order_entries; i++) array[i] = i; /* place i of the ring always means entry i */
  return PTN_OK;
}

static uint32_t untaken_count(const uring *ring) {
  return *ring->order_tail - __atomic_load_n(ring->order_head, __ATOMIC_ACQUIRE);
}

static void order(uring *ring, uring_entry entry) {
  uint32_t tail = *ring->order_tail;
  ring->entries[tail & ring->order_mask] = entry;
  __atomic_store_n(ring->order_tail, tail + 1, __ATOMIC_RELEASE);
}

static int enter(const uring *ring, uint32_t wait_count) {
  long result =
      syscall(URING_CALL_ENTER, ring->fd, untaken_count(ring), wait_count, wait_count > 0 ? URING_ENTER_GETEVENTS : 0, NULL, 0);
  return result < 0 ? errno : 0;
}

static bool take_event(uring *ring, uring_event *out) {
  uint32_t head = *ring->answer_head;
  if (head == __atomic_load_n(ring->answer_tail, __ATOMIC_ACQUIRE)) return false;
  *out = ring->events[head & ring->answer_mask];
  __atomic_store_n(ring->answer_head, head + 1, __ATOMIC_RELEASE);
  return true;
}

static uring_entry transfer_entry(int fd, bool write, const struct iovec *parts, uint32_t parts_count, uint64_t offset,
                                  uint64_t user_data) {
  return (uring_entry){.opcode = write ? URING_OP_WRITEV : URING_OP_READV,
                       .fd = fd,
                       .offset = offset,
                       .address = (uint64_t)(uintptr_t)parts,
                       .length = parts_count,
                       .operation_flags = URING_RWF_NOWAIT,
                       .user_data = user_data};
}

/* One read of the kind that will be used: a container may allow the ring but not the call, a filesystem may not know NOWAIT. */
static ptn_status try_ring(uring *ring, int fd) {
  void *page = aligned_alloc(PTN_PAGE_BYTES, PTN_PAGE_BYTES);
  if (!page) return ptn_fail(PTN_MEMORY, "no memory for a page");
  struct iovec part = {.iov_base = page, .iov_len = PTN_PAGE_BYTES};
  order(ring, transfer_entry(fd, false, &part, 1, 0, 1));
  int failure;
  uring_event event = {0};
  bool over = false; /* a signal may end the wait and leave the read under way */
  do {
    failure = enter(ring, 1);
    over = failure == 0 && take_event(ring, &event);
  } while (failure == EINTR || (failure == 0 && !over));
  if (over && event.result < 0 && event.result != -EAGAIN) failure = -event.result;
  free(page);
  return failure ? fail_ring(failure, "a read through it fails") : PTN_OK;
}

/* ---- the ring's thread ---- */

static void nap(void) { nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); }

/* The next piece of the inbox; without one, notes that the thread is about to sleep and has to be woken. */
static ptn_piece *take_piece(uring_engine *engine) {
  ptn_lock(&engine->mutex);
  ptn_piece *piece = engine->first;
  if (piece) engine->first = piece->next;
  else engine->asleep = true;
  ptn_unlock(&engine->mutex);
  return piece;
}

static void order_pieces(uring_engine *engine) {
  while (engine->ordered_count + 1 < engine->ring.entries_count) {
    ptn_piece *piece = take_piece(engine);
    if (!piece) break;
    if (engine->broken) {
      engine->waiting->kind->start(engine->waiting, piece);
      continue;
    }
    order(&engine->ring,
          transfer_entry(engine->fd, piece->write, piece->parts, piece->parts_count, piece->offset, (uint64_t)(uintptr_t)piece));
    engine->ordered_count++;
  }
  if (engine->polling || engine->broken) return;
  order(&engine->ring, (uring_entry){.opcode = URING_OP_POLL_ADD, .fd = engine->wake_fd, .operation_flags = POLLIN});
  engine->polling = true;
}

/* Takes back what the kernel has not taken. */
static void leave_ring(uring_engine *engine) {
  uring *ring = &engine->ring;
  engine->broken = true;
  for (uint32_t count = untaken_count(ring); count > 0; count--) {
    uint32_t tail = *ring->order_tail - 1;
    uint64_t user_data = ring->entries[tail & ring->order_mask].user_data;
    __atomic_store_n(ring->order_tail, tail, __ATOMIC_RELEASE);
    if (!user_data) continue; /* the poll */
    engine->ordered_count--;
    engine->waiting->kind->start(engine->waiting, (ptn_piece *)(uintptr_t)user_data);
  }
}

static void forget_wake(uring_engine *engine) {
  uint64_t count;
  if (read(engine->wake_fd, &count, sizeof count) < 0) return; /* nothing there: not woken by it */
}

/* Sleeps until an answer or a new piece is there. */
static void sleep_on_ring(uring_engine *engine) {
  int failure = 0;
  if (!engine->broken) {
    failure = enter(&engine->ring, 1);
    if (failure == EAGAIN || failure == EBUSY || failure == ENOMEM) nap(); /* the kernel is short of memory for a moment */
    else if (failure != 0 && failure != EINTR) leave_ring(engine);
    return;
  }
  /* Without the ring the eventfd is waited on itself; answers to what is still out are looked for now and then. */
  struct pollfd wake = {.fd = engine->wake_fd, .events = POLLIN};
  if (poll(&wake, 1, engine->ordered_count > 0 ? 1 : -1) > 0) forget_wake(engine);
}

static void collect(uring_engine *engine) {
  uring_event event;
  while (take_event(&engine->ring, &event)) {
    if (!event.user_data) {
      engine->polling = false;
      forget_wake(engine);
      continue;
    }
    ptn_piece *piece = (ptn_piece *)(uintptr_t)event.user_data;
    engine->ordered_count--;
    if (event.result == -EAGAIN) engine->waiting->kind->start(engine->waiting, piece);
    else piece->finish(piece, event.result);
  }
}

static bool should_stop(uring_engine *engine) {
  ptn_lock(&engine->mutex);
  bool stop = engine->stop;
  ptn_unlock(&engine->mutex);
  return stop;
}

/* Notes that the thread is awake: what is started from here on needs no wake-up. */
static void rise(uring_engine *engine) {
  ptn_lock(&engine->mutex);
  engine->asleep = false;
  ptn_unlock(&engine->mutex);
}

/* The inbox and stop are looked at after the eventfd was emptied and before it is slept on, so that no wake-up is lost. */
static void *serve(void *argument) {
  uring_engine *engine = argument;
  ptn_thread_be_prompt();
  for (order_pieces(engine); !should_stop(engine); order_pieces(engine)) {
    sleep_on_ring(engine);
    rise(engine);
    collect(engine);
  }
  return NULL;
}

/* ---- the engine ---- */

static void wake(const uring_engine *engine) {
  uint64_t one = 1;
  ssize_t written;
  do written = write(engine->wake_fd, &one, sizeof one);
  while (written < 0 && errno == EINTR);
}

static void start(ptn_io_engine *base, ptn_piece *piece) {
  uring_engine *engine = (uring_engine *)base;
  piece->next = NULL;
  ptn_lock(&engine->mutex);
  if (engine->first) engine->last->next = piece;
  else engine->first = piece;
  engine->last = piece;
  bool was_asleep = engine->asleep;
  engine->asleep = false; /* one call wakes it, whoever comes next needs none */
  ptn_unlock(&engine->mutex);
  if (was_asleep) wake(engine);
}

static void destroy(ptn_io_engine *base) {
  uring_engine *engine = (uring_engine *)base;
  if (engine->thread_started) {
    ptn_lock(&engine->mutex);
    engine->stop = true;
    ptn_unlock(&engine->mutex);
    wake(engine);
    ptn_thread_join(engine->thread);
  }
  if (engine->waiting) engine->waiting->kind->destroy(engine->waiting);
  close_ring(&engine->ring);
  if (engine->wake_fd >= 0) close(engine->wake_fd);
  ptn_mutex_destroy(&engine->mutex);
  free(engine);
}

static const ptn_io_engine_kind kind = {.name = "io_uring", .start = start, .destroy = destroy};

static ptn_status set_up(uring_engine *engine, uint32_t depth, uint32_t threads_count) {
  PTN_TRY(open_ring(&engine->ring, depth + 2));
  PTN_TRY(try_ring(&engine->ring, engine->fd));
  engine->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (engine->wake_fd < 0) return fail_ring(errno, "no eventfd");
  PTN_TRY(ptn_io_engine_create_threads(&engine->waiting, engine->fd, threads_count));
  PTN_TRY(ptn_thread_start(&engine->thread, "ptn-disk-ring", serve, engine));
  engine->thread_started = true;
  return PTN_OK;
}

ptn_status ptn_io_engine_create_uring(ptn_io_engine **out, int fd, uint32_t depth, uint32_t threads_count) {
  *out = NULL;
  uring_engine *engine = calloc(1, sizeof *engine);
  if (!engine) return ptn_fail(PTN_MEMORY, "no memory for the ring of the disk store");
  engine->base.kind = &kind;
  engine->fd = fd;
  engine->ring.fd = engine->wake_fd = -1;
  ptn_mutex_create(&engine->mutex);
  ptn_status status = set_up(engine, depth, threads_count);
  if (status != PTN_OK) destroy(&engine->base);
  else *out = &engine->base;
  return status;
}
