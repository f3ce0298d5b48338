/* The engine over a device that goes wrong: each call of the driver fails in turn, and training goes on where that passes; the GPU
 * breaks; the disk fails for a while; memory is refused; the driver will not lock memory; what cannot be is refused in one line.
 *
 * Last, the proof that the test of equality sees what it is for: the driver ignores one of the engine's own recordings or waits, each
 * in turn, and where somebody would have waited for it what is trained must be wrong. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/optim/?*.c csrc/runtime/?*.c */
/* library: tests/c/fake_cuda.c tests/c/fake_gpu.c tests/c/fake_control.c */
/* threads */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include "engine_world.h"

#define CUDA_LAUNCH_FAILED 719

#ifdef __SANITIZE_THREAD__
enum { SPARSER = 5 }; /* it is slow */
#else
enum { SPARSER = 1 };
#endif

static const home mixed[CHUNKS] = {ON_HOST, ON_HOST_LATE, ON_DISK, ON_HOST, ON_DEVICE, ON_HOST, ON_DISK, ON_HOST_LATE};
static world memory;

static world *fresh_world(uint64_t seed, fake_mode mode) {
  world *w = &memory;
  *w = (world){.ground = OVER_CUDA, .seed = seed, .bf16 = seed % 2};
  memcpy(w->homes, mixed, sizeof mixed);
  CHECK_OK(subject_open(&w->subject, true, seed, mode));
  return w;
}

static void end_world(world *w) {
  fake_fail(NULL, 0, 0);
  fake_break(0, 0);
  close_world(w);
  subject_close(&w->subject);
}

/* Steps until they are made; how often one was not. Each failure is the driver's. */
static int train_on(world *w, int steps_count, const char *entry) {
  int failed_count = 0;
  for (int i = 0; i < steps_count;) {
    ptn_status status = one_step(w, &(plan){.passes = 1 + i % 2, .spill = i % 3 == 2, .scale = 1.0f});
    if (status == PTN_OK) {
      i++;
      continue;
    }
    CHECK(status == PTN_DEVICE && strncmp(ptn_last_error()->message, entry, strlen(entry)) == 0);
    CHECK(++failed_count <= 2);
  }
  return failed_count;
}

/* From one call that fails to the next: as usual, or as PROTRAIN_FAULT_STRIDE says, 1 for each of them. */
static uint64_t stride(uint64_t usual) {
  const char *given = getenv("PROTRAIN_FAULT_STRIDE");
  return given && atoll(given) > 0 ? (uint64_t)atoll(given) : SPARSER * usual;
}

/* ---- each call fails ---- */

/* When the call is one of making the world, that is refused, and nothing is left. */
static bool fails_in_the_making(const char *entry, uint64_t nth) {
  world *w = fresh_world(nth, (fake_mode)(nth % 3));
  fake_fail(entry, nth, CUDA_LAUNCH_FAILED);
  ptn_status status = open_world(w);
  CHECK(status == PTN_OK || (status == PTN_DEVICE && strncmp(ptn_last_error()->message, entry, strlen(entry)) == 0));
  end_world(w);
  return status != PTN_OK;
}

/* When it is one of a step, the step is not made, can be made again, and the bytes are right. */
static bool fails_in_a_step(const char *entry, uint64_t nth) {
  world *w = fresh_world(nth, (fake_mode)(nth % 3));
  CHECK_OK(open_world(w));
  uint64_t calls_count = fake_calls(entry);
  fake_fail(entry, nth, CUDA_LAUNCH_FAILED);
  train_on(w, 2, entry);
  bool reached = fake_calls(entry) - calls_count >= nth;
  fake_fail(NULL, 0, 0);
  bool equal;
  CHECK_OK(compare(w, &equal));
  if (!equal) fprintf(stderr, "%s number %d\n", entry, (int)nth);
  CHECK(equal);
  end_world(w);
  return reached;
}

static void each_call_fails_once(void) {
  static const char *const makers[] = {"cuMemAlloc_v2", "cuStreamCreate", "cuEventCreate", "cuMemHostRegister_v2",
                                       "cuMemcpyAsync"};
  static const char *const steps[] = {"cuEventRecord", "cuMemcpyAsync", "cuStreamWaitEvent", "cuEventSynchronize"};
  uint64_t failed_count = 0;
  for (size_t i = 0; i < sizeof makers / sizeof makers[0]; i++)
    for (uint64_t n = 1; fails_in_the_making(makers[i], n); n += i == 4 ? stride(9) : 1) failed_count++;
  CHECK(failed_count > 25 / SPARSER);
  for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++)
    for (uint64_t n = 1; fails_in_a_step(steps[i], n); n += stride(13)) failed_count++;
  CHECK(failed_count > 60 / SPARSER);
}

static void each_copy_breaks_the_gpu(void) {
  int broken_count = 0;
  for (uint64_t n = 1;; n += stride(19)) {
    world *w = fresh_world(n, (fake_mode)(n % 3));
    CHECK_OK(open_world(w));
    fake_break(n, CUDA_LAUNCH_FAILED);
    ptn_status status = PTN_OK;
    for (int i = 0; i < 2 && status == PTN_OK; i++) status = one_step(w, &(plan){.passes = 1, .scale = 1.0f});
    CHECK(status == PTN_OK || (status == PTN_DEVICE && strstr(ptn_last_error()->message, "CUDA_ERROR_LAUNCH_FAILED")));
    w->subject.broke = status != PTN_OK;
    end_world(w);
    if (status == PTN_OK) break;
    broken_count++;
  }
  CHECK(broken_count > 2 / SPARSER);
}

/* ---- a disk that fails ---- */

/* The number of the store's file, which has no name. */
static int find_store(void) {
  DIR *folder = opendir("/proc/self/fd");
  char here[512], path[64], target[1024];
  int found = -1;
  CHECK(folder && getcwd(here, sizeof here));
  for (struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) {
    snprintf(path, sizeof path, "/proc/self/fd/%.20s", entry->d_name);
    ssize_t length = readlink(path, target, sizeof target - 1);
    if (length < 0) continue;
    target[length] = 0;
    if (strncmp(target, here, strlen(here)) == 0 && strstr(target, "(deleted)")) found = atoi(entry->d_name);
  }
  closedir(folder);
  CHECK(found >= 0);
  return found;
}

/* Whatever is read is not there and nothing can be written, from the nth demand of a step on; then the disk is back. */
static void a_disk_that_fails_for_a_while(void) {
  int failed_count = 0;
  for (uint64_t seed = 1; seed <= 6; seed++) {
    world *w = fresh_world(seed, (fake_mode)(seed % 3));
    bool equal;
    CHECK_OK(open_world(w));
    train_on(w, 1, "");
    int store = find_store(), saved = dup(store), nothing = open("/dev/null", O_RDONLY);
    CHECK(saved >= 0 && nothing >= 0 && dup2(nothing, store) == store);
    for (int i = 0; i < 2; i++) {
      ptn_status status = one_step(w, &(plan){.passes = 1, .spill = i, .scale = 1.0f});
      CHECK(status == PTN_DISK && ptn_last_error()->path[0]);
      failed_count++;
    }
    CHECK(dup2(saved, store) == store && close(saved) == 0 && close(nothing) == 0);
    train_on(w, 2, "");
    CHECK_OK(compare(w, &equal));
    CHECK(equal);
    end_world(w);
  }
  CHECK(failed_count == 12);
}

/* ---- what is refused ---- */

static void no_memory_is_an_error(void) {
  world *w = fresh_world(3, FAKE_ANY);
  fake_limit(60000, (uint64_t)1 << 40);
  CHECK(open_world(w) == PTN_MEMORY);
  end_world(w);
}

static void memory_that_is_not_locked_is_told(void) {
  for (uint64_t seed = 1; seed <= 3; seed++) {
    world *w = fresh_world(seed, (fake_mode)(seed % 3));
    bool equal;
    fake_limit((uint64_t)1 << 40, 1);
    CHECK_OK(open_world(w));
    CHECK(strstr(ptn_engine_unlocked_reason(w->engine), "not locked"));
    CHECK(train_on(w, 2, "") == 0);
    CHECK_OK(compare(w, &equal));
    CHECK(equal);
    end_world(w);
  }
}

static void what_cannot_be_is_refused(void) {
  world *w = fresh_world(2, FAKE_ANY);
  CHECK_OK(open_world(w));
  CHECK(ptn_engine_unlocked_reason(w->engine)[0] == 0);
  ptn_engine_stats stats;
  ptn_engine_get_stats(w->engine, &stats);
  CHECK(stats.host_bytes > 0 && stats.device_bytes > 0);
  for (int i = 0; i < 2; i++) CHECK_OK(change_stream(w));
  int known_count = 0; /* beside these two, of which one is NULL */
  while (known_count < 100 && ptn_engine_set_stream(w->engine, fake_stream()) == PTN_OK) known_count++;
  CHECK(known_count == 62);
  CHECK_OK(ptn_engine_set_stream(w->engine, w->streams[0]));
  CHECK_OK(one_pass(w, PTN_GRADIENT_SPILL, true, true));
  CHECK(ptn_engine_to_host(w->engine, 2, true) == PTN_STEP);
  CHECK(ptn_engine_set_gradient_memory(w->engine, 0) == PTN_STEP && ptn_engine_set_staging(w->engine, 4096, 1) == PTN_STEP);
  give_up(w);
  CHECK(ptn_engine_set_staging(w->engine, 4097, 1) == PTN_INVALID);
  CHECK_OK(ptn_engine_set_staging(w->engine, 0, 0));
  CHECK(demand(w, 2) == PTN_STEP && strstr(ptn_last_error()->message, "staging"));
  ptn_engine_seek(w->engine, 0); /* reads nothing ahead from there */
  CHECK_OK(demand(w, 0));
  CHECK_OK(ptn_engine_set_gradient_memory(w->engine, PTN_PAGE_BYTES));
  CHECK(make_gradient(w, 3 * PER_CHUNK + 1, PTN_GRADIENT_UPDATE) == PTN_STEP);
  give_up(w);
  end_world(w);
}

/* Without a device there is nothing of all this. */
static void without_a_device_it_is_refused(void) {
  world *w = &memory;
  *w = (world){.ground = ON_NOTHING, .seed = 1};
  for (int c = 0; c < CHUNKS; c++) w->homes[c] = ON_DISK;
  CHECK_OK(open_world(w));
  CHECK(ptn_engine_to_host(w->engine, 0, true) == PTN_INVALID && ptn_engine_set_stream(w->engine, NULL) == PTN_INVALID);
  CHECK(ptn_engine_set_gradient_memory(w->engine, 1) == PTN_INVALID && ptn_engine_set_staging(w->engine, 4096, 1) == PTN_INVALID);
  CHECK(ptn_engine_state(w->engine, 0, 1) == NULL && ptn_engine_unlocked_reason(w->engine)[0] == 0);
  close_world(w);
}

/* ---- each wait is missing ---- */

/* A device around the GPU's, which lets the driver ignore one recording or one wait of those that the engine itself asks for. Those
 * of its lanes' threads are of TIME events, and are test_transfers.c's. */
static struct shim {
  ptn_device base;
  ptn_device *inner;
  ptn_mutex mutex;
  ptn_event *order_events[2 * (SLOTS + 2)];
  uint32_t events_count;
  const char *entry;
  uint64_t nth, seen_count; /* of the calls of this entry */
  ptn_condition opened;
  bool closed; /* the lane that uploads learns of no end */
} shim;

static const ptn_device_kind *inner_kind(void) { return shim.inner->kind; }

static ptn_status shim_allocate(ptn_device *device, uint64_t bytes, void **out) {
  (void)device;
  return inner_kind()->allocate(shim.inner, bytes, out);
}

static void shim_free(ptn_device *device, void *address) {
  (void)device;
  inner_kind()->free(shim.inner, address);
}

static ptn_status shim_pin(ptn_device *device, uint64_t bytes, ptn_pinned *out) {
  (void)device;
  return inner_kind()->pin(shim.inner, bytes, out);
}

static void shim_unpin(ptn_device *device, ptn_pinned *pinned) {
  (void)device;
  inner_kind()->unpin(shim.inner, pinned);
}

static ptn_status shim_create_stream(ptn_device *device, ptn_stream **out) {
  (void)device;
  return inner_kind()->create_stream(shim.inner, out);
}

static void shim_destroy_stream(ptn_device *device, ptn_stream *stream) {
  (void)device;
  inner_kind()->destroy_stream(shim.inner, stream);
}

static ptn_status shim_create_event(ptn_device *device, ptn_event_use use, ptn_event **out) {
  (void)device;
  PTN_TRY(inner_kind()->create_event(shim.inner, use, out));
  ptn_lock(&shim.mutex);
  CHECK(use != PTN_EVENT_ORDER || shim.events_count < sizeof shim.order_events / sizeof shim.order_events[0]);
  if (use == PTN_EVENT_ORDER) shim.order_events[shim.events_count++] = *out;
  ptn_unlock(&shim.mutex);
  return PTN_OK;
}

static void shim_destroy_event(ptn_device *device, ptn_event *event) {
  (void)device;
  inner_kind()->destroy_event(shim.inner, event);
}

/* Under the mutex. */
static void count(const char *entry, ptn_event *event) {
  bool ours = false;
  for (uint32_t i = 0; i < shim.events_count; i++) ours |= shim.order_events[i] == event;
  if (ours && shim.entry == entry && ++shim.seen_count == shim.nth) fake_ignore(entry, 1);
}

static const char recording[] = "cuEventRecord", waiting[] = "cuStreamWaitEvent";

static ptn_status shim_record(ptn_device *device, ptn_event *event, ptn_stream *stream) {
  (void)device;
  ptn_lock(&shim.mutex);
  count(recording, event);
  ptn_status status = inner_kind()->record(shim.inner, event, stream);
  ptn_unlock(&shim.mutex);
  return status;
}

static ptn_status shim_follow(ptn_device *device, ptn_stream *stream, ptn_event *event) {
  (void)device;
  ptn_lock(&shim.mutex);
  count(waiting, event);
  ptn_status status = inner_kind()->follow(shim.inner, stream, event);
  ptn_unlock(&shim.mutex);
  return status;
}

static ptn_status shim_wait(ptn_device *device, ptn_event *event) {
  (void)device;
  char name[16];
  bool uploads = pthread_getname_np(pthread_self(), name, sizeof name) == 0 && strcmp(name, "ptn-upload") == 0;
  ptn_lock(&shim.mutex);
  while (uploads && shim.closed) ptn_wait(&shim.opened, &shim.mutex);
  ptn_unlock(&shim.mutex);
  return inner_kind()->wait(shim.inner, event);
}

static ptn_status shim_finish(ptn_device *device, ptn_stream *stream) {
  (void)device;
  return inner_kind()->finish(shim.inner, stream);
}

static ptn_status shim_elapsed(ptn_device *device, ptn_event *first, ptn_event *last, int64_t *out_ns) {
  (void)device;
  return inner_kind()->elapsed(shim.inner, first, last, out_ns);
}

static ptn_status shim_copy(ptn_device *device, ptn_stream *stream, void *to, const void *from, uint64_t bytes) {
  (void)device;
  return inner_kind()->copy(shim.inner, stream, to, from, bytes);
}

static const ptn_device_kind shim_kind = {
    .name = "shim",
    .allocate = shim_allocate,
    .free = shim_free,
    .pin = shim_pin,
    .unpin = shim_unpin,
    .create_stream = shim_create_stream,
    .destroy_stream = shim_destroy_stream,
    .create_event = shim_create_event,
    .destroy_event = shim_destroy_event,
    .record = shim_record,
    .follow = shim_follow,
    .wait = shim_wait,
    .finish = shim_finish,
    .elapsed = shim_elapsed,
    .copy = shim_copy,
};

/* ---- what comes before the step before is over ---- */

static void set_closed(bool closed) {
  ptn_lock(&shim.mutex);
  shim.closed = closed;
  ptn_broadcast(&shim.opened);
  ptn_unlock(&shim.mutex);
}

static void *open_later(void *unused) {
  nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
  set_closed(false);
  return unused;
}

static ptn_status give_gradient(world *w, uint32_t number) {
  buffer *buffer = take_buffer(w);
  fill(w, buffer->memory, w->twins[number].count); /* over the host, where a test may */
  add_to_twin(w, &w->twins[number], buffer->memory);
  w->owners_out++;
  return ptn_engine_gradient(w->engine, number, buffer->memory, buffer, PTN_GRADIENT_UPDATE);
}

/* A gradient comes without a forward while its chunk waits for the update that is made after commit, held up by an upload that nobody
 * has seen the end of: what that update reads stays as it is. */
static void a_gradient_waits_for_the_update_before(void) {
  world *w = &memory;
  *w = (world){.ground = OVER_HOST, .seed = 1};
  for (int c = 0; c < CHUNKS; c++) w->homes[c] = ON_HOST_LATE;
  CHECK_OK(subject_open(&w->subject, false, 1, FAKE_ANY));
  shim = (struct shim){.base = {.kind = &shim_kind}, .inner = w->subject.device};
  ptn_mutex_create(&shim.mutex);
  ptn_condition_create(&shim.opened);
  w->device = &shim.base;
  CHECK_OK(open_world(w));
  CHECK_OK(ptn_engine_set_hyper(w->engine, 0, &w->hyper));
  CHECK_OK(give_gradient(w, 0));
  CHECK_OK(end_step(w, &(plan){.scale = 1.0f}));
  CHECK_OK(demand(w, SLOTS));
  unuse(w, SLOTS);
  CHECK_OK(ptn_engine_wait(w->engine));
  set_closed(true);
  CHECK_OK(demand(w, 0));
  unuse(w, 0);
  CHECK_OK(make_step(w, 1.0f));
  update_twins(w, 1.0f);
  pthread_t opener;
  CHECK_OK(ptn_thread_start(&opener, "opener", open_later, NULL));
  CHECK_OK(give_gradient(w, 0));
  ptn_thread_join(opener);
  CHECK_OK(end_step(w, &(plan){.scale = 1.0f}));
  CHECK_OK(make_step(w, 1.0f));
  update_twins(w, 1.0f);
  bool equal;
  CHECK_OK(compare(w, &equal));
  CHECK(equal);
  end_world(w);
  ptn_condition_destroy(&shim.opened);
  ptn_mutex_destroy(&shim.mutex);
}

typedef struct outcome {
  bool equal, counts;
  uint64_t calls_count;
} outcome;

/* Calls that wait for all of a stream, or may. */
static uint64_t waiting_calls(void) {
  return fake_calls("cuStreamSynchronize") + fake_calls("cuMemAlloc_v2") + fake_calls("cuMemFree_v2") +
         fake_calls("cuMemHostRegister_v2") + fake_calls("cuMemHostUnregister");
}

/* Two steps, each ordered as a whole before the device does anything, which shows that ordering waits for nothing. */
static outcome run(fake_mode mode, const char *entry, uint64_t nth) {
  world *w = fresh_world(5, mode);
  shim = (struct shim){.base = {.kind = &shim_kind}, .inner = w->subject.device};
  ptn_mutex_create(&shim.mutex);
  ptn_condition_create(&shim.opened);
  w->device = &shim.base;
  w->frozen = w->by_order = true;
  w->buffers_count = BUFFERS_MAX;
  w->staging_bytes = 16 * PTN_PAGE_BYTES;
  w->staging_pieces = 64;
  w->gradient_bytes = 4 * PTN_MIB;
  CHECK_OK(open_world(w));
  ptn_lock(&shim.mutex);
  shim.entry = entry;
  shim.nth = nth;
  ptn_unlock(&shim.mutex);
  uint64_t waiting_count = waiting_calls();
  fake_freeze();
  CHECK_OK(order_step(w, &(plan){.passes = 1}));
  CHECK(waiting_calls() == waiting_count);
  fake_thaw();
  CHECK_OK(end_step(w, &(plan){.scale = 1.0f}));
  CHECK_OK(make_step(w, 1.0f));
  finish_streams(w);
  update_twins(w, 1.0f);
  CHECK_OK(one_step(w, &(plan){.passes = 1, .scale = 1.0f}));
  outcome outcome = {.counts = fake_ignored_counts()};
  CHECK_OK(compare(w, &outcome.equal));
  end_world(w);
  outcome.calls_count = shim.seen_count;
  ptn_condition_destroy(&shim.opened);
  ptn_mutex_destroy(&shim.mutex);
  return outcome;
}

/* Threads hand over in an order of their own, so the nth call is not always the same one. */
static void each_is_missing(const char *entry, int least_count) {
  int counted = 0, caught = 0;
  for (fake_mode mode = FAKE_EARLY; mode <= FAKE_LATE; mode++) {
    outcome all = run(mode, entry, 0);
    CHECK(all.equal && all.calls_count > 20);
    for (uint64_t n = 1; n <= all.calls_count; n += stride(mode == FAKE_LATE ? 1 : 4)) { /* LATE does the worst */
      outcome missed = run(mode, entry, n);
      counted += missed.counts;
      caught += missed.counts && !missed.equal;
      if (missed.counts && missed.equal) fprintf(stderr, "%s number %d of mode %d was not caught\n", entry, (int)n, (int)mode);
      CHECK(missed.counts || missed.equal);
    }
  }
  CHECK(counted >= least_count / SPARSER && caught * 10 >= counted * 9);
}

int main(void) {
  each_call_fails_once();
  each_copy_breaks_the_gpu();
  a_disk_that_fails_for_a_while();
  no_memory_is_an_error();
  memory_that_is_not_locked_is_told();
  what_cannot_be_is_refused();
  without_a_device_it_is_refused();
  a_gradient_waits_for_the_update_before();
  each_is_missing(recording, 30);
  each_is_missing(waiting, 30);
  fake_reset(0, FAKE_ANY);
  return 0;
}
