/* The device's table, one body of tests over the host and over a CUDA driver without a GPU that does its worst; then what only
 * CUDA has: opening, its messages, contexts, memory that will not be locked, a failure at every call. */
/* sources: csrc/device/host.c csrc/device/host_device.c csrc/device/pinned.c csrc/device/cuda.c */
/* library: tests/c/fake_cuda.c tests/c/fake_gpu.c tests/c/fake_control.c */
/* threads */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/bytes.h"
#include "device_subject.h"

#define BYTES 20000 /* no multiple of a page */
#define CUDA_ILLEGAL_ADDRESS 700

static void fill(void *to, size_t bytes, uint64_t salt) {
  for (size_t i = 0; i < bytes; i++) ((unsigned char *)to)[i] = (unsigned char)(check_random(&salt) >> 13);
}

static bool holds(const void *memory, size_t bytes, uint64_t salt) {
  for (size_t i = 0; i < bytes; i++)
    if (((const unsigned char *)memory)[i] != (unsigned char)(check_random(&salt) >> 13)) return false;
  return true;
}

/* Host memory in two halves, and two buffers on the device. */
typedef struct buffers {
  ptn_pinned pinned;
  char *source, *result;
  void *first, *second;
} buffers;

static ptn_status make_buffers(subject *subject, buffers *buffers) {
  PTN_TRY(subject->kind->pin(subject->device, 2 * BYTES, &buffers->pinned));
  buffers->source = buffers->pinned.memory;
  buffers->result = buffers->source + BYTES;
  PTN_TRY(subject->kind->allocate(subject->device, BYTES, &buffers->first));
  return subject->kind->allocate(subject->device, BYTES, &buffers->second);
}

static void drop_buffers(subject *subject, buffers *buffers) {
  subject->kind->free(subject->device, buffers->first);
  subject->kind->free(subject->device, buffers->second);
  subject->kind->unpin(subject->device, &buffers->pinned);
}

/* ---- over both ---- */

static void memory_is_what_was_asked_for(subject *subject) {
  const ptn_device_kind *kind = subject->kind;
  void *memory = &memory;
  CHECK(kind->allocate(subject->device, 0, &memory) == PTN_INVALID && memory == NULL);
  for (uint64_t bytes = 1; bytes < 1000000; bytes = bytes * 3 + 1) {
    CHECK_OK(kind->allocate(subject->device, bytes, &memory));
    CHECK((uintptr_t)memory % PTN_TENSOR_ALIGN_BYTES == 0);
    kind->free(subject->device, memory);
  }
  kind->free(subject->device, NULL);

  ptn_pinned pinned;
  static unsigned char resident[10000000 / 4096 + 1];
  CHECK(kind->pin(subject->device, 0, &pinned) == PTN_INVALID && pinned.memory == NULL);
  CHECK(kind->pin(subject->device, (uint64_t)1 << 62, &pinned) == PTN_MEMORY && pinned.memory == NULL);
  for (uint64_t bytes = 1; bytes < 10000000; bytes = bytes * 5 + 3) {
    CHECK_OK(kind->pin(subject->device, bytes, &pinned));
    CHECK(pinned.bytes == ptn_round_up(bytes, PTN_PAGE_BYTES)); /* no power of two */
    CHECK((uintptr_t)pinned.memory % PTN_HUGE_BYTES == 0 && pinned.locked && pinned.reason[0] == 0);
    CHECK(mincore(pinned.memory, (size_t)pinned.bytes, resident) == 0);
    for (uint64_t i = 0; i < pinned.bytes / PTN_PAGE_BYTES; i++) CHECK(resident[i] & 1);
    for (uint64_t i = 0; i < pinned.bytes; i += 511) CHECK(((char *)pinned.memory)[i] == 0);
    memset(pinned.memory, 1, (size_t)pinned.bytes);
    kind->unpin(subject->device, &pinned);
    CHECK(pinned.memory == NULL && pinned.bytes == 0);
  }
  kind->unpin(subject->device, &pinned);
}

static void a_stream_keeps_its_order(subject *subject) {
  buffers buffers = {0};
  ptn_stream *stream;
  CHECK_OK(make_buffers(subject, &buffers));
  CHECK_OK(subject->kind->create_stream(subject->device, &stream));
  ptn_stream *streams[] = {stream, subject->compute};
  for (uint64_t salt = 0; salt < 8; salt++) {
    ptn_stream *on = streams[salt % 2];
    fill(buffers.source, BYTES, salt);
    CHECK_OK(subject->kind->copy(subject->device, on, buffers.first, buffers.source, BYTES));
    CHECK_OK(subject->kind->copy(subject->device, on, buffers.second, buffers.first, BYTES));
    CHECK_OK(subject->kind->copy(subject->device, on, buffers.result, buffers.second, BYTES));
    CHECK_OK(subject->kind->finish(subject->device, on));
    CHECK(holds(buffers.result, BYTES, salt));
  }
  subject->kind->destroy_stream(subject->device, stream);
  drop_buffers(subject, &buffers);
}

/* Three streams in a chain, each link an event: through host, device, device and host, over and over. */
static void streams_follow_events(subject *subject) {
  buffers buffers = {0};
  ptn_stream *streams[3];
  ptn_event *events[3], *end;
  CHECK_OK(make_buffers(subject, &buffers));
  CHECK_OK(subject->kind->create_event(subject->device, PTN_EVENT_TIME, &end));
  for (int i = 0; i < 3; i++) {
    CHECK_OK(subject->kind->create_stream(subject->device, &streams[i]));
    CHECK_OK(subject->kind->create_event(subject->device, PTN_EVENT_ORDER, &events[i]));
    CHECK_OK(subject->kind->record(subject->device, events[i], streams[i]));
  }
  struct {
    void *to, *from;
  } hops[3] = {{buffers.first, buffers.source}, {buffers.second, buffers.first}, {buffers.result, buffers.second}};
  for (uint64_t salt = 0; salt < 30; salt++) {
    fill(buffers.source, BYTES, salt);
    for (int i = 0; i < 3; i++) {
      CHECK_OK(subject->kind->follow(subject->device, streams[i], events[(i + 2) % 3]));
      CHECK_OK(subject->kind->copy(subject->device, streams[i], hops[i].to, hops[i].from, BYTES));
      CHECK_OK(subject->kind->record(subject->device, events[i], streams[i])); /* the one before is followed already */
    }
    CHECK_OK(subject->kind->record(subject->device, end, streams[2]));
    CHECK_OK(subject->kind->wait(subject->device, end));
    CHECK(holds(buffers.result, BYTES, salt));
  }
  for (int i = 0; i < 3; i++) {
    subject->kind->destroy_event(subject->device, events[i]);
    subject->kind->destroy_stream(subject->device, streams[i]);
  }
  subject->kind->destroy_event(subject->device, end);
  drop_buffers(subject, &buffers);
}

/* Recorded anew elsewhere, or destroyed: whoever followed before waits for what was recorded before. */
static void following_is_of_the_moment(subject *subject) {
  buffers buffers = {0};
  ptn_stream *one, *other;
  CHECK_OK(make_buffers(subject, &buffers));
  CHECK_OK(subject->kind->create_stream(subject->device, &one));
  CHECK_OK(subject->kind->create_stream(subject->device, &other));
  for (uint64_t salt = 0; salt < 20; salt++) {
    ptn_event *event;
    CHECK_OK(subject->kind->create_event(subject->device, PTN_EVENT_ORDER, &event));
    fill(buffers.source, BYTES, salt);
    CHECK_OK(subject->kind->copy(subject->device, one, buffers.first, buffers.source, BYTES));
    CHECK_OK(subject->kind->record(subject->device, event, one));
    CHECK_OK(subject->kind->follow(subject->device, other, event));
    if (salt % 2) CHECK_OK(subject->kind->record(subject->device, event, subject->compute));
    subject->kind->destroy_event(subject->device, event);
    CHECK_OK(subject->kind->copy(subject->device, other, buffers.result, buffers.first, BYTES));
    CHECK_OK(subject->kind->finish(subject->device, other));
    CHECK(holds(buffers.result, BYTES, salt));
  }
  subject->kind->destroy_stream(subject->device, one);
  subject->kind->destroy_stream(subject->device, other);
  subject->kind->destroy_event(subject->device, NULL);
  subject->kind->destroy_stream(subject->device, NULL);
  drop_buffers(subject, &buffers);
}

static void events_tell_time(subject *subject) {
  buffers buffers = {0};
  ptn_stream *stream;
  ptn_event *events[3];
  int64_t ns = 7, half_ns, rest_ns;
  CHECK_OK(make_buffers(subject, &buffers));
  CHECK_OK(subject->kind->create_stream(subject->device, &stream));
  for (int i = 0; i < 3; i++) CHECK_OK(subject->kind->create_event(subject->device, PTN_EVENT_TIME, &events[i]));
  CHECK(subject->kind->elapsed(subject->device, events[0], events[1], &ns) != PTN_OK && ns == 0); /* never recorded */
  for (int i = 0; i < 3; i++) {
    CHECK_OK(subject->kind->copy(subject->device, stream, buffers.first, buffers.source, BYTES));
    CHECK_OK(subject->kind->record(subject->device, events[i], stream));
  }
  CHECK_OK(subject->kind->wait(subject->device, events[2]));
  CHECK_OK(subject->kind->elapsed(subject->device, events[0], events[2], &ns));
  CHECK_OK(subject->kind->elapsed(subject->device, events[0], events[1], &half_ns));
  CHECK_OK(subject->kind->elapsed(subject->device, events[1], events[2], &rest_ns));
  int64_t sum_ns = half_ns + rest_ns;
  CHECK(half_ns >= 0 && rest_ns >= 0 && sum_ns - ns < 1000 && ns - sum_ns < 1000); /* a driver tells milliseconds as a float */
  for (int i = 0; i < 3; i++) subject->kind->destroy_event(subject->device, events[i]);
  subject->kind->destroy_stream(subject->device, stream);
  drop_buffers(subject, &buffers);
}

static void what_was_never_recorded_has_happened(subject *subject) {
  ptn_event *event;
  ptn_stream *stream;
  CHECK_OK(subject->kind->create_stream(subject->device, &stream));
  CHECK_OK(subject->kind->create_event(subject->device, PTN_EVENT_TIME, &event));
  CHECK_OK(subject->kind->follow(subject->device, stream, event));
  CHECK_OK(subject->kind->wait(subject->device, event));
  CHECK_OK(subject->kind->finish(subject->device, stream));
  if (subject->cuda) CHECK(strstr(fake_complaint(), "never recorded")); /* in a step it would be a mistake */
  subject->kind->destroy_event(subject->device, event);
  subject->kind->destroy_stream(subject->device, stream);
}

typedef struct worker {
  subject *subject;
  uint64_t number;
  pthread_t thread;
} worker;

static void *work(void *argument) {
  worker *worker = argument;
  buffers buffers = {0};
  ptn_event *end;
  ptn_stream *stream;
  subject *subject = worker->subject;
  CHECK_OK(make_buffers(subject, &buffers));
  CHECK_OK(subject->kind->create_stream(subject->device, &stream));
  CHECK_OK(subject->kind->create_event(subject->device, PTN_EVENT_TIME, &end));
  for (uint64_t round = 0; round < 10; round++) {
    fill(buffers.source, BYTES, worker->number * 100 + round);
    CHECK_OK(subject->kind->copy(subject->device, stream, buffers.first, buffers.source, BYTES));
    CHECK_OK(subject->kind->copy(subject->device, stream, buffers.result, buffers.first, BYTES));
    CHECK_OK(subject->kind->record(subject->device, end, stream));
    CHECK_OK(subject->kind->wait(subject->device, end));
    CHECK(holds(buffers.result, BYTES, worker->number * 100 + round));
  }
  subject->kind->destroy_event(subject->device, end);
  subject->kind->destroy_stream(subject->device, stream);
  drop_buffers(subject, &buffers);
  return NULL;
}

static void any_thread_may_call(subject *subject) {
  worker workers[4];
  for (uint64_t i = 0; i < 4; i++) {
    workers[i] = (worker){.subject = subject, .number = i};
    CHECK_OK(ptn_thread_start(&workers[i].thread, "worker", work, &workers[i]));
  }
  for (int i = 0; i < 4; i++) ptn_thread_join(workers[i].thread);
}

static void both(bool cuda, uint64_t seed, fake_mode mode) {
  static void (*const tests[])(subject *) = {
      memory_is_what_was_asked_for, a_stream_keeps_its_order, streams_follow_events,
      following_is_of_the_moment,   events_tell_time,         what_was_never_recorded_has_happened,
      any_thread_may_call};
  for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++) {
    subject subject;
    CHECK_OK(subject_open(&subject, cuda, seed, mode));
    CHECK(strcmp(subject.kind->name, cuda ? "cuda" : "host") == 0);
    tests[i](&subject);
    subject_close(&subject);
  }
}

static void a_forked_child_only_forgets(void) {
  ptn_device *device;
  ptn_pinned pinned;
  ptn_stream *stream;
  CHECK_OK(ptn_device_open_host(&device));
  CHECK_OK(device->kind->create_stream(device, &stream));
  CHECK_OK(device->kind->pin(device, 4096, &pinned));
  pid_t child = fork();
  if (child == 0) {
    unsigned char resident;
    bool there = mincore(pinned.memory, 4096, &resident) == 0; /* shared pages would leave the device behind */
    device->kind->destroy_stream(device, stream); /* its thread is not here: it would be waited for in vain */
    device->kind->destroy(device);
    _exit(there);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  device->kind->unpin(device, &pinned);
  device->kind->destroy_stream(device, stream);
  device->kind->destroy(device);
}

/* ---- CUDA alone ---- */

static void refused(int number, const char *library, ptn_status code, const char *words) {
  ptn_device *device = (ptn_device *)1;
  CHECK(ptn_device_open_cuda(&device, number, library) == code && device == NULL);
  CHECK(ptn_last_error()->code == code && strstr(ptn_last_error()->message, words) && !strchr(ptn_last_error()->message, '\n'));
  CHECK(fake_alive() == 0);
}

static void what_is_missing_is_said_in_a_line(void) {
  fake_reset(1, FAKE_ANY);
  refused(0, "/nowhere/libcuda.so.1", PTN_DEVICE, "no CUDA driver: /nowhere/libcuda.so.1");
  refused(0, "libm.so.6", PTN_DEVICE, "libm.so.6 has no cuInit: it is no CUDA driver");
  fake_describe(10020, 1);
  refused(0, fake_library(), PTN_DEVICE, "it serves CUDA 10.2, and 11.0 or later is needed");
  fake_describe(13000, 0);
  refused(0, fake_library(), PTN_DEVICE, "shows no GPU");
  fake_describe(13000, 2);
  refused(2, fake_library(), PTN_INVALID, "GPU 2 was asked for, and the CUDA driver shows 2: 0 to 1");
  refused(-1, fake_library(), PTN_INVALID, "GPU -1");
  fake_fail("cuInit", 1, 803);
  refused(0, fake_library(), PTN_DEVICE, "cuInit failed on the CUDA driver: error 803");
  fake_fail("cuDevicePrimaryCtxRetain", 1, CUDA_OUT_OF_MEMORY);
  refused(1, fake_library(), PTN_MEMORY, "cuDevicePrimaryCtxRetain failed on Fake B (GPU 1): CUDA_ERROR_OUT_OF_MEMORY");
  CHECK(fake_complaint()[0] == 0);
}

static void no_device_memory_left(void) {
  subject subject;
  void *memory;
  CHECK_OK(subject_open(&subject, true, 1, FAKE_ANY));
  fake_limit(1000000, 0);
  CHECK(subject.kind->allocate(subject.device, 1000001, &memory) == PTN_MEMORY && memory == NULL);
  CHECK(ptn_last_error()->asked_bytes == 1000001);
  CHECK(strstr(ptn_last_error()->message,
               "cuMemAlloc_v2 of 1000001 bytes failed on Fake A (GPU 0): CUDA_ERROR_OUT_OF_MEMORY, out of"));
  CHECK_OK(subject.kind->allocate(subject.device, 1000000, &memory));
  subject.kind->free(subject.device, memory);
  subject_close(&subject);
}

static void memory_that_is_not_locked(uint64_t seed) {
  subject subject;
  buffers buffers = {0};
  ptn_stream *stream;
  CHECK_OK(subject_open(&subject, true, seed, FAKE_ANY));
  fake_limit((uint64_t)1 << 40, 4096);
  CHECK_OK(make_buffers(&subject, &buffers));
  CHECK(!buffers.pinned.locked && strstr(buffers.pinned.reason, "40960 bytes of host memory are not locked"));
  CHECK(strstr(buffers.pinned.reason, "CUDA_ERROR_OUT_OF_MEMORY"));
  CHECK_OK(subject.kind->create_stream(subject.device, &stream));
  for (uint64_t salt = 0; salt < 10; salt++) {
    fill(buffers.source, BYTES, salt);
    CHECK_OK(subject.kind->copy(subject.device, stream, buffers.first, buffers.source, BYTES));
    CHECK_OK(subject.kind->copy(subject.device, stream, buffers.result, buffers.first, BYTES));
    CHECK_OK(subject.kind->finish(subject.device, stream));
    CHECK(holds(buffers.result, BYTES, salt));
  }
  subject.kind->destroy_stream(subject.device, stream);
  drop_buffers(&subject, &buffers);
  fake_limit((uint64_t)1 << 40, (uint64_t)1 << 40);
  ptn_pinned pinned;
  fake_fail("cuMemHostRegister_v2", 1, CUDA_ILLEGAL_ADDRESS); /* no refusal to lock: the device has failed */
  CHECK(subject.kind->pin(subject.device, 4096, &pinned) == PTN_DEVICE && pinned.memory == NULL);
  subject_close(&subject);
}

/* One of everything; what fails is returned, and everything is given back. */
static ptn_status one_of_each(subject *subject) {
  buffers buffers = {0};
  ptn_stream *stream = NULL;
  ptn_event *events[2] = {0};
  int64_t ns;
  const ptn_device_kind *kind = subject->kind;
  ptn_status status = make_buffers(subject, &buffers);
  if (status == PTN_OK) status = kind->create_stream(subject->device, &stream);
  for (int i = 0; i < 2 && status == PTN_OK; i++) status = kind->create_event(subject->device, PTN_EVENT_TIME, &events[i]);
  if (status == PTN_OK) status = kind->record(subject->device, events[0], subject->compute);
  if (status == PTN_OK) status = kind->follow(subject->device, stream, events[0]);
  if (status == PTN_OK) status = kind->copy(subject->device, stream, buffers.first, buffers.source, BYTES);
  if (status == PTN_OK) status = kind->record(subject->device, events[1], stream);
  if (status == PTN_OK) status = kind->wait(subject->device, events[1]);
  if (status == PTN_OK) status = kind->elapsed(subject->device, events[0], events[1], &ns);
  if (status == PTN_OK) status = kind->finish(subject->device, stream);
  ptn_error error;
  ptn_error_save(&error);
  fake_fail(NULL, 0, 0); /* what fails while things are given back is not looked at here */
  if (stream) kind->finish(subject->device, stream);
  kind->destroy_event(subject->device, events[0]);
  kind->destroy_event(subject->device, events[1]);
  kind->destroy_stream(subject->device, stream);
  drop_buffers(subject, &buffers);
  return status == PTN_OK ? PTN_OK : ptn_error_restore(&error);
}

static void each_call_fails_once(void) {
  static const char *const calls[] = {"cuCtxPushCurrent_v2", "cuMemAlloc_v2",      "cuStreamCreate",    "cuEventCreate",
                                      "cuEventRecord",       "cuMemcpyAsync",      "cuStreamWaitEvent", "cuEventSynchronize",
                                      "cuEventElapsedTime",  "cuStreamSynchronize"};
  uint64_t failures_count = 0;
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
    for (uint64_t n = 1;; n++) {
      subject subject;
      CHECK_OK(subject_open(&subject, true, n, FAKE_ANY));
      fake_fail(calls[i], n, CUDA_ILLEGAL_ADDRESS);
      fake_set_current(fake_other_context());
      ptn_status status = one_of_each(&subject);
      CHECK(fake_current() == fake_other_context()); /* whatever fails, a thread has the context it had */
      fake_set_current(NULL);
      if (status != PTN_OK) {
        CHECK(status == PTN_DEVICE && strncmp(ptn_last_error()->message, calls[i], strlen(calls[i])) == 0);
        CHECK(
            strstr(ptn_last_error()->message, "failed on Fake A (GPU 0): CUDA_ERROR_ILLEGAL_ADDRESS, an illegal memory access"));
        failures_count++;
      }
      subject_close(&subject);
      if (status != PTN_OK) continue;
      CHECK(n > 1);
      break;
    }
  CHECK(failures_count >= 20);
}

/* An error that stays: everything tells it, nothing hangs. */
static void a_gpu_that_broke(void) {
  subject subject;
  buffers buffers = {0};
  ptn_stream *stream;
  ptn_event *event;
  CHECK_OK(subject_open(&subject, true, 3, FAKE_ANY));
  CHECK_OK(make_buffers(&subject, &buffers));
  CHECK_OK(subject.kind->create_stream(subject.device, &stream));
  CHECK_OK(subject.kind->create_event(subject.device, PTN_EVENT_TIME, &event));
  fake_break(2, CUDA_ILLEGAL_ADDRESS);
  ptn_status ordered = PTN_OK;
  for (int i = 0; i < 4 && ordered == PTN_OK; i++)
    ordered = subject.kind->copy(subject.device, stream, buffers.first, buffers.source, BYTES);
  if (ordered == PTN_OK) ordered = subject.kind->record(subject.device, event, stream);
  CHECK((ordered == PTN_OK ? subject.kind->wait(subject.device, event) : ordered) == PTN_DEVICE);
  CHECK(subject.kind->finish(subject.device, stream) == PTN_DEVICE);
  CHECK(subject.kind->record(subject.device, event, stream) == PTN_DEVICE);
  CHECK(strstr(ptn_last_error()->message, "CUDA_ERROR_ILLEGAL_ADDRESS"));
  subject.kind->destroy(subject.device);
  fake_reset(1, FAKE_ANY);
  buffers.pinned.locked = false;
  ptn_device *host;
  CHECK_OK(ptn_device_open_host(&host));
  host->kind->unpin(host, &buffers.pinned); /* what the broken driver would not let go */
  host->kind->destroy(host);
}

/* The driver's eyes are open: what the tests above would be told of. */
static void misuse_is_seen(void) {
  subject subject;
  buffers buffers = {0};
  ptn_stream *stream;
  ptn_event *event;
  CHECK_OK(subject_open(&subject, true, 1, FAKE_ANY));
  CHECK_OK(make_buffers(&subject, &buffers));
  CHECK_OK(subject.kind->create_stream(subject.device, &stream));
  CHECK_OK(subject.kind->create_event(subject.device, PTN_EVENT_ORDER, &event));
  CHECK_OK(subject.kind->record(subject.device, event, stream));
  CHECK(fake_complaint()[0] == 0);
  CHECK_OK(subject.kind->wait(subject.device, event));
  CHECK(strstr(fake_complaint(), "a thread spins"));
  subject.kind->destroy_event(subject.device, event);
  CHECK(subject.kind->record(subject.device, event, stream) == PTN_DEVICE);
  CHECK(strstr(fake_complaint(), "cuEventRecord of an event that is none, or was destroyed"));
  fake_freeze();
  CHECK_OK(subject.kind->copy(subject.device, stream, buffers.first, buffers.source, BYTES));
  subject.kind->free(subject.device, buffers.first);
  CHECK(strstr(fake_complaint(), "device memory was freed under a queued copy"));
  subject.kind->unpin(subject.device, &buffers.pinned);
  CHECK(strstr(fake_complaint(), "host memory was unregistered under a queued copy"));
  subject.kind->destroy_stream(subject.device, stream);
  CHECK(subject.kind->copy(subject.device, stream, buffers.second, buffers.first, 1) == PTN_DEVICE);
  CHECK(strstr(fake_complaint(), "cuMemcpyAsync of a stream that is none, or was destroyed"));
  CHECK(fake_alive() == 2); /* the context, and the second buffer */
  subject.kind->free(subject.device, buffers.second);
  subject_close(&subject);
}

int main(void) {
  misuse_is_seen();
  both(false, 0, FAKE_ANY);
  for (uint64_t seed = 0; seed < 4; seed++)
    for (fake_mode mode = FAKE_ANY; mode <= FAKE_LATE; mode++) both(true, seed, mode);
  a_forked_child_only_forgets();
  what_is_missing_is_said_in_a_line();
  no_device_memory_left();
  for (uint64_t seed = 0; seed < 4; seed++) memory_that_is_not_locked(seed);
  each_call_fails_once();
  a_gpu_that_broke();
  fake_reset(0, FAKE_ANY);
  return 0;
}
