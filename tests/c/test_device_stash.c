/* The stash of a device under a miniature of training: kernels fill memory that is put into the stash and used again at once, and read
 * what comes back, in reverse order. Whatever the pool holds, whatever is dropped or asked for twice, the bytes must be those that were
 * put: over the host, and over a GPU that does its worst within what CUDA allows. Where a call of the driver or of the disk fails there
 * must be an error, no leak and no hang. Last, the driver ignores each wait for an event of the stash and each recording of one in
 * turn: where somebody would have waited for it, the bytes must be wrong. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/runtime/device_stash.c */
/* library: tests/c/fake_cuda.c tests/c/fake_gpu.c tests/c/fake_control.c */
/* threads */
#include "runtime/device_stash.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "device_subject.h"
#include "faulty_engine.h"

#define RECORDS 8
#define PASSES 3
#define MOST_PAGES 3
#define PAGE ((uint64_t)PTN_PAGE_BYTES)
#define WORDS (PAGE / sizeof(uint32_t))
#define PARTS 2 /* of a kernel */
#define BUFFERS 2
#define KERNELS (PASSES * RECORDS * 4)
#define ORDER_EVENTS (1 + PASSES * RECORDS * 2)
#define CUDA_LAUNCH_FAILED 719

typedef struct world world;

typedef struct kernel {
  world *world;
  void *memory;
  uint32_t value;
  uint64_t words;
} kernel;

struct world {
  subject subject;
  ptn_transfers *upload, *offload;
  faulty_engine disk;
  ptn_store *store;
  ptn_device_stash *stash;
  ptn_pinned pool;
  void *made[BUFFERS], *came[BUFFERS];
  ptn_device_record *last_of[BUFFERS]; /* record whose copy down reads made[i] */
  ptn_device_record *records[RECORDS];
  kernel kernels[KERNELS];
  uint32_t kernels_count;
  _Atomic uint32_t wrong_count;
  uint64_t seed;
  bool ordered_only; /* a pass is ordered as a whole before the device does anything, and every record is asked for once */
};

static const char *folder(void) {
  const char *given = getenv("TMPDIR");
  return given ? given : "/tmp";
}

/* Not whole pages: what is behind them is nobody's. */
static uint64_t words_of(uint32_t i) { return (1 + i % MOST_PAGES) * WORDS - 5; }
static uint32_t value_of(uint32_t pass, uint32_t i) { return 1 + pass * 1000 + i * 17; }

static void fill(void *argument, int part) {
  const kernel *kernel = argument;
  uint32_t *at = subject_at(&kernel->world->subject, kernel->memory);
  for (uint64_t i = (uint64_t)part; i < kernel->words; i += PARTS) at[i] = kernel->value + (uint32_t)i;
}

static void look(void *argument, int part) {
  const kernel *kernel = argument;
  const uint32_t *at = subject_at(&kernel->world->subject, kernel->memory);
  uint32_t wrong = 0;
  for (uint64_t i = (uint64_t)part; i < kernel->words; i += PARTS) wrong += at[i] != kernel->value + (uint32_t)i;
  atomic_fetch_add(&kernel->world->wrong_count, wrong);
}

static void launch(world *world, void (*body)(void *argument, int part), void *memory, uint32_t pass, uint32_t i) {
  CHECK(world->kernels_count < KERNELS);
  kernel *kernel = &world->kernels[world->kernels_count++];
  *kernel = (struct kernel){.world = world, .memory = memory, .value = value_of(pass, i), .words = words_of(i)};
  subject_compute(&world->subject, body, kernel, PARTS);
}

/* ---- what the driver ignores ----
 *
 * Calls that concern an event of use ORDER are the stash's own, whoever makes them: the others are those by which a lane tells that a
 * copy has ended, which are test_transfers.c's. Only the thread that orders makes them.
 */

static struct {
  const ptn_device_kind *inner;
  ptn_device_kind kind;
  ptn_event *events[ORDER_EVENTS];
  uint32_t events_count;
  const char *entry;
  uint64_t nth, seen_count;
} counting;

static ptn_status counting_create_event(ptn_device *device, ptn_event_use use, ptn_event **out) {
  PTN_TRY(counting.inner->create_event(device, use, out));
  CHECK(use != PTN_EVENT_ORDER || counting.events_count < ORDER_EVENTS);
  if (use == PTN_EVENT_ORDER) counting.events[counting.events_count++] = *out;
  return PTN_OK;
}

static void count(const char *entry, const ptn_event *event) {
  bool ours = false;
  for (uint32_t i = 0; i < counting.events_count; i++) ours |= counting.events[i] == event;
  if (ours && strcmp(counting.entry, entry) == 0 && ++counting.seen_count == counting.nth) fake_ignore(entry, 1);
}

static ptn_status counting_record(ptn_device *device, ptn_event *event, ptn_stream *stream) {
  count("cuEventRecord", event);
  return counting.inner->record(device, event, stream);
}

static ptn_status counting_follow(ptn_device *device, ptn_stream *stream, ptn_event *event) {
  count("cuStreamWaitEvent", event);
  return counting.inner->follow(device, stream, event);
}

static void ignore(ptn_device *device, const char *entry, uint64_t nth) {
  memset(&counting, 0, sizeof counting);
  counting.inner = device->kind;
  counting.kind = *device->kind;
  counting.kind.create_event = counting_create_event;
  counting.kind.record = counting_record;
  counting.kind.follow = counting_follow;
  counting.entry = entry;
  counting.nth = nth;
  device->kind = &counting.kind;
}

/* ---- a pass ---- */

static void forget(world *world, uint32_t i) {
  ptn_device_record *record = world->records[i];
  world->records[i] = NULL;
  if (record) ptn_device_record_drop(record);
}

static ptn_status forward(world *world, uint32_t pass) {
  ptn_device_stash_begin(world->stash);
  for (uint32_t i = 0; i < RECORDS; i++) {
    uint32_t at = i % BUFFERS;
    if (i >= BUFFERS) PTN_TRY(ptn_device_record_let_go(world->records[i - BUFFERS], world->subject.compute));
    launch(world, fill, world->made[at], pass, i);
    PTN_TRY(ptn_device_stash_put(world->stash, world->subject.compute, world->made[at], words_of(i) * sizeof(uint32_t),
                                 (int32_t)i, &world->records[i]));
  }
  for (uint32_t i = RECORDS - BUFFERS; i < RECORDS; i++)
    PTN_TRY(ptn_device_record_let_go(world->records[i], world->subject.compute));
  return PTN_OK;
}

static ptn_status backward(world *world, uint32_t pass) {
  bool brought[RECORDS] = {0};
  ptn_device_stash_end(world->stash);
  for (uint32_t i = RECORDS; i-- > 0;) {
    ptn_device_record *record = world->records[i];
    if (!world->ordered_only && !brought[i] && check_random(&world->seed) % 8 == 0) { /* nobody asks for it */
      forget(world, i);
      continue;
    }
    uint32_t times = !world->ordered_only && check_random(&world->seed) % 6 == 0 ? 2 : 1; /* a graph that is kept */
    for (uint32_t time = 0; time < times; time++) {
      if (!brought[i] || time > 0) PTN_TRY(ptn_device_record_bring(record, world->subject.compute, world->came[i % BUFFERS]));
      bool early = world->ordered_only || check_random(&world->seed) % 2; /* then over what the last kernel reads */
      if (i > 0 && time == 0 && early && ptn_device_record_is_near(world->records[i - 1])) {
        PTN_TRY(ptn_device_record_bring(world->records[i - 1], world->subject.compute, world->came[(i - 1) % BUFFERS]));
        brought[i - 1] = true;
      }
      PTN_TRY(ptn_device_record_follow(record, world->subject.compute));
      launch(world, look, world->came[i % BUFFERS], pass, i);
    }
    forget(world, i);
  }
  return ptn_device_stash_check(world->stash);
}

/* ---- the world ---- */

typedef struct trouble {
  const char *entry;
  uint64_t nth;
  bool ignored; /* else it fails */
  uint64_t break_at;
} trouble;

static ptn_status open_all(world *world, uint64_t pool_pages) {
  const subject *subject = &world->subject;
  ptn_store_options options = {.wrap = faulty_wrap, .context = &world->disk};
  CHECK_OK(ptn_store_create_with(&world->store, folder(), &options));
  PTN_TRY(ptn_transfers_create(&world->upload, subject->device, "upload"));
  PTN_TRY(ptn_transfers_create(&world->offload, subject->device, "offload"));
  const ptn_device_stash_config config = {
      .device = subject->device, .upload = world->upload, .offload = world->offload, .store = world->store};
  PTN_TRY(ptn_device_stash_create(&world->stash, &config));
  PTN_TRY(subject->kind->pin(subject->device, pool_pages * PAGE, &world->pool));
  PTN_TRY(ptn_device_stash_set_pool(world->stash, world->pool.memory, pool_pages * PAGE));
  for (int i = 0; i < BUFFERS; i++) {
    PTN_TRY(subject->kind->allocate(subject->device, MOST_PAGES * PAGE, &world->made[i]));
    PTN_TRY(subject->kind->allocate(subject->device, MOST_PAGES * PAGE, &world->came[i]));
  }
  return PTN_OK;
}

static void close_all(world *world) {
  const subject *subject = &world->subject;
  subject->kind->finish(subject->device, subject->compute);
  ptn_device_stash_close(world->stash);
  for (uint32_t i = 0; i < RECORDS; i++) forget(world, i); /* they may live on */
  ptn_device_stash_release(world->stash);
  ptn_transfers_destroy(world->upload);
  ptn_transfers_destroy(world->offload);
  for (int i = 0; i < BUFFERS; i++) {
    subject->kind->free(subject->device, world->made[i]);
    subject->kind->free(subject->device, world->came[i]);
  }
  subject->kind->unpin(subject->device, &world->pool);
  ptn_store_destroy(world->store);
  subject_close(&world->subject);
}

typedef struct outcome {
  ptn_status status;
  bool equal, counts;
  ptn_device_stash_stats stats;
} outcome;

static outcome run(bool cuda, uint64_t seed, fake_mode mode, uint64_t pool_pages, trouble trouble) {
  static world memory;
  world *world = &memory;
  *world = (struct world){.seed = seed, .ordered_only = trouble.ignored};
  CHECK_OK(subject_open(&world->subject, cuda, seed, mode));
  if (trouble.ignored) ignore(world->subject.device, trouble.entry, trouble.nth);
  ptn_status status = open_all(world, pool_pages);
  CHECK_OK(status);
  if (trouble.break_at) fake_break(trouble.break_at, CUDA_LAUNCH_FAILED);
  if (trouble.entry && !trouble.ignored) fake_fail(trouble.entry, trouble.nth, CUDA_LAUNCH_FAILED);
  for (uint32_t pass = 0; pass < PASSES && status == PTN_OK; pass++) {
    if (world->ordered_only) fake_freeze();
    status = forward(world, pass);
    if (status == PTN_OK) status = backward(world, pass);
    fake_thaw();
    if (status == PTN_OK) status = world->subject.kind->finish(world->subject.device, world->subject.compute);
    if (status == PTN_OK) status = ptn_device_stash_check(world->stash);
    world->kernels_count = status == PTN_OK ? 0 : world->kernels_count;
  }
  outcome outcome = {.status = status, .equal = atomic_load(&world->wrong_count) == 0, .counts = fake_ignored_counts()};
  if (trouble.entry && !trouble.ignored) fake_fail(NULL, 0, 0);
  if (trouble.break_at) fake_break(0, 0);
  world->subject.broke = trouble.break_at > 0 && status != PTN_OK;
  do ptn_device_stash_get_stats(world->stash, &outcome.stats); /* the last to be dropped may still be on their way */
  while (status == PTN_OK && outcome.stats.host_bytes > 0 && sched_yield() == 0);
  close_all(world);
  return outcome;
}

/* ---- what holds ---- */

#define ALL_PAGES ((uint64_t)(1 + 2 + 3 + 1 + 2 + 3 + 1 + 2))
#define ENOUGH_PAGES (2 * ALL_PAGES) /* also where a range of the pass before goes late, and leaves a gap */

static void the_bytes_come_back(void) {
  for (uint64_t seed = 0; seed < 60; seed++) {
    uint64_t pool_pages = seed % 3 == 0 ? ENOUGH_PAGES : seed % 3 == 1 ? 7 : MOST_PAGES;
    outcome outcome = run(seed % 4 > 0, seed, (fake_mode)(seed / 4 % 3), pool_pages, (trouble){0});
    CHECK(outcome.status == PTN_OK && outcome.equal);
    CHECK(outcome.stats.put_bytes == PASSES * ALL_PAGES * PAGE);
    CHECK(outcome.stats.disk_bytes == 0 && outcome.stats.host_bytes == 0);
    CHECK((outcome.stats.written_bytes > 0) == (pool_pages < ALL_PAGES)); /* the disk where the host is short, and only there */
    CHECK(outcome.stats.written_bytes <= outcome.stats.put_bytes);
  }
}

static void a_driver_that_fails(void) {
  static const char *const entries[] = {"cuEventCreate", "cuEventRecord", "cuMemcpyAsync", "cuStreamWaitEvent",
                                        "cuEventSynchronize"};
  uint64_t failed_count = 0;
  for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++)
    for (uint64_t nth = 1; nth < 200; nth += 7) {
      outcome outcome = run(true, nth, FAKE_ANY, nth % 2 ? 7 : ENOUGH_PAGES, (trouble){.entry = entries[i], .nth = nth});
      CHECK(outcome.status == PTN_OK || outcome.status == PTN_DEVICE || outcome.status == PTN_MEMORY);
      if (outcome.status == PTN_OK) CHECK(outcome.equal);
      failed_count += outcome.status != PTN_OK;
    }
  CHECK(failed_count > 50);
  for (uint64_t at = 1; at < 2 * PASSES * RECORDS; at += 3) {
    outcome outcome = run(true, at, FAKE_ANY, 7, (trouble){.break_at = at});
    CHECK(outcome.status == PTN_OK || outcome.status == PTN_DEVICE);
  }
}

/* The driver does not count a recording that is missing where it stands behind what its stream follows itself: the bytes may be wrong
 * there too. */
static void a_wait_that_is_missing(void) {
  static const char *const entries[] = {"cuStreamWaitEvent", "cuEventRecord"};
  for (size_t i = 0; i < 2; i++) {
    uint64_t counted = 0, seen = 0, calls_count = 1;
    for (uint64_t nth = 0; nth <= calls_count; nth++) { /* 0: none */
      outcome outcome = run(true, nth, FAKE_ANY, ENOUGH_PAGES, (trouble){.entry = entries[i], .nth = nth, .ignored = true});
      CHECK(outcome.status == PTN_OK && (nth > 0 || (outcome.equal && !outcome.counts)));
      calls_count = counting.seen_count;
      counted += outcome.counts;
      seen += outcome.counts && !outcome.equal;
      if (outcome.counts && outcome.equal) fprintf(stderr, "%s number %d was not seen\n", entries[i], (int)nth);
    }
    CHECK(counted >= PASSES * RECORDS && seen == counted);
  }
}

/* ---- the disk, and the pool ---- */

static void put_all(world *world) {
  CHECK_OK(subject_open(&world->subject, false, 0, FAKE_ANY));
  CHECK_OK(open_all(world, ALL_PAGES));
  CHECK_OK(forward(world, 0));
}

static void look_at_all(world *world) {
  for (uint32_t i = RECORDS; i-- > 0;) {
    CHECK_OK(ptn_device_record_bring(world->records[i], NULL, world->came[0]));
    CHECK_OK(ptn_device_record_follow(world->records[i], NULL));
    launch(world, look, world->came[0], 0, i);
    forget(world, i);
  }
  CHECK(atomic_load(&world->wrong_count) == 0);
}

static void another_pool(void) {
  static world world;
  world = (struct world){0};
  put_all(&world);
  CHECK(ptn_device_stash_largest(world.stash) == MOST_PAGES * PAGE);
  ptn_pinned smaller;
  CHECK_OK(world.subject.kind->pin(world.subject.device, MOST_PAGES * PAGE, &smaller));
  CHECK_OK(ptn_device_stash_set_pool(world.stash, smaller.memory, smaller.bytes));
  memset(world.pool.memory, 0xEE, world.pool.bytes);
  world.subject.kind->unpin(world.subject.device, &world.pool);
  world.pool = smaller;
  ptn_device_stash_stats stats;
  ptn_device_stash_get_stats(world.stash, &stats);
  CHECK(stats.written_bytes == ALL_PAGES * PAGE);
  look_at_all(&world);
  ptn_device_record *large = NULL;
  CHECK(ptn_device_stash_put(world.stash, NULL, world.made[0], MOST_PAGES * PAGE + 1, 0, &large) == PTN_INVALID && !large);
  close_all(&world);
}

static void a_disk_that_fails(void) {
  static world world;
  for (int writes = 0; writes < 2; writes++) {
    world = (struct world){0};
    put_all(&world);
    if (writes) { /* nothing is lost: what could not be written is where it was */
      faulty_tell_of(&world.disk, FAULTY_WRITES, FAULT_ERRNO, EIO, 1, 1);
      CHECK(ptn_device_stash_set_pool(world.stash, NULL, 0) == PTN_DISK);
      look_at_all(&world);
    } else {
      ptn_pinned same = world.pool;
      CHECK_OK(ptn_device_stash_set_pool(world.stash, NULL, 0));
      CHECK_OK(ptn_device_stash_set_pool(world.stash, same.memory, same.bytes));
      faulty_tell_of(&world.disk, FAULTY_READS, FAULT_ERRNO, EIO, 1, 1);
      CHECK(ptn_device_record_bring(world.records[4], NULL, world.came[0]) == PTN_DISK);
      CHECK(strstr(ptn_last_error()->message, "activations of block 4"));
      look_at_all(&world);
    }
    close_all(&world);
  }
}

static void what_lives_on(void) {
  static world world;
  world = (struct world){0};
  put_all(&world);
  ptn_device_stash_close(world.stash);
  CHECK(ptn_device_record_is_closed(world.records[0]));
  CHECK(ptn_device_record_bring(world.records[0], NULL, world.came[0]) == PTN_STEP);
  ptn_device_record *more = NULL;
  CHECK(ptn_device_stash_put(world.stash, NULL, world.made[0], PAGE, 0, &more) == PTN_STEP && !more);
  close_all(&world);
}

int main(void) {
  the_bytes_come_back();
  another_pool();
  a_disk_that_fails();
  what_lives_on();
  a_driver_that_fails();
  a_wait_that_is_missing();
  return 0;
}
