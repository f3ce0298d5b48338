/* The entry points of the fake driver: see fake_cuda.h for what it does, fake_gpu.c for how work is done. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake_gpu.h"

#define POISON 0xD5

enum { /* results that the product has no need to know */
       NOT_INITIALIZED = 3,
       INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400,
       NOT_READY = 600,
       REGISTERED = 712,
       NOT_REGISTERED = 713,
};

static _Thread_local cuda_context *current[16];
static _Thread_local int current_count;

/* Every entry point begins here, and is left with the mutex held: what it is to return in place of its own result. */
static cuda_result enter(const char *entry, bool needs_context) {
  fake_lock();
  now.calls[fake_entry(entry)]++;
  if (fake_hits(&now.failing, entry)) return now.failing.error;
  if (now.broken) return now.broken;
  if (!needs_context) return CUDA_OK;
  if (current_count > 0 && current[current_count - 1] == &now.primary && now.primary.references > 0) return CUDA_OK;
  fake_complain("%s was called without the primary context", entry);
  return INVALID_CONTEXT;
}

static cuda_result leave(cuda_result result) {
  fake_unlock();
  return result;
}

static bool stream_is_good(ptn_stream *stream, const char *entry) {
  for (ptn_stream *other = now.streams; other; other = other->next)
    if (other == stream && other->alive) return true;
  fake_complain("%s of a stream that is none, or was destroyed", entry);
  return false;
}

static bool event_is_good(ptn_event *event, const char *entry) {
  for (ptn_event *other = now.events; other; other = other->next)
    if (other == event && other->alive) return true;
  fake_complain("%s of an event that is none, or was destroyed", entry);
  return false;
}

/* ---- the entry points ---- */

#pragma GCC visibility push(default)

#define FAKE_PROTOTYPE(field, name, arguments) cuda_result fake_##field arguments __asm__(name);
CUDA_CALLS(FAKE_PROTOTYPE)
#undef FAKE_PROTOTYPE

cuda_result fake_init(unsigned flags) {
  cuda_result result = enter("cuInit", false);
  if (result == CUDA_OK) result = flags ? CUDA_INVALID_VALUE : now.gpus_count == 0 ? CUDA_NO_DEVICE : CUDA_OK;
  now.ready |= result == CUDA_OK;
  return leave(result);
}

cuda_result fake_driver_version(int *version) {
  cuda_result result = enter("cuDriverGetVersion", false);
  *version = now.version;
  return leave(result);
}

static const struct {
  cuda_result error;
  const char *name, *words;
} errors[] = {{1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
              {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
              {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
              {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
              {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
              {600, "CUDA_ERROR_NOT_READY", "device not ready"},
              {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
              {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
              {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}};

cuda_result fake_error_name(cuda_result error, const char **name) {
  *name = NULL;
  for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
    if (errors[i].error == error) *name = errors[i].name;
  return *name ? CUDA_OK : CUDA_INVALID_VALUE;
}

cuda_result fake_error_string(cuda_result error, const char **string) {
  *string = NULL;
  for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
    if (errors[i].error == error) *string = errors[i].words;
  return *string ? CUDA_OK : CUDA_INVALID_VALUE;
}

static cuda_result enter_ready(const char *entry) {
  cuda_result result = enter(entry, false);
  if (result != CUDA_OK || now.ready) return result;
  fake_complain("%s was called before cuInit", entry);
  return NOT_INITIALIZED;
}

cuda_result fake_device_count(int *count) {
  cuda_result result = enter_ready("cuDeviceGetCount");
  *count = now.gpus_count;
  return leave(result);
}

cuda_result fake_device_get(cuda_number *device, int number) {
  cuda_result result = enter_ready("cuDeviceGet");
  *device = number;
  return leave(result);
}

cuda_result fake_device_name(char *name, int bytes, cuda_number device) {
  cuda_result result = enter_ready("cuDeviceGetName");
  snprintf(name, (size_t)bytes, "Fake %c", 'A' + device);
  return leave(result);
}

cuda_result fake_device_attribute(int *value, int attribute, cuda_number device) {
  (void)device;
  cuda_result result = enter_ready("cuDeviceGetAttribute");
  *value = attribute == CUDA_UNIFIED_ADDRESSING;
  return leave(result);
}

cuda_result fake_context_retain(cuda_context **context, cuda_number device) {
  (void)device;
  cuda_result result = enter_ready("cuDevicePrimaryCtxRetain");
  if (result == CUDA_OK) now.primary.references++;
  *context = result == CUDA_OK ? &now.primary : NULL;
  return leave(result);
}

cuda_result fake_context_release(cuda_number device) {
  (void)device;
  cuda_result result = enter_ready("cuDevicePrimaryCtxRelease_v2");
  if (--now.primary.references < 0) fake_complain("the primary context was released more often than retained");
  return leave(result);
}

cuda_result fake_context_push(cuda_context *context) {
  cuda_result result = enter_ready("cuCtxPushCurrent_v2");
  if (result == CUDA_OK && (context != &now.primary || now.primary.references <= 0)) {
    fake_complain("a context was pushed that is none, or was released");
    result = INVALID_CONTEXT;
  }
  if (result == CUDA_OK) current[current_count++] = context;
  return leave(result);
}

cuda_result fake_context_pop(cuda_context **context) {
  cuda_result result = enter_ready("cuCtxPopCurrent_v2");
  *context = NULL;
  if (current_count == 0) fake_complain("a context was popped where none was pushed");
  else *context = current[--current_count];
  return leave(result);
}

cuda_result fake_allocate(cuda_address *memory, size_t bytes) {
  cuda_result result = enter("cuMemAlloc_v2", true);
  *memory = 0;
  if (result == CUDA_OK && bytes == 0) result = CUDA_INVALID_VALUE;
  if (result == CUDA_OK && bytes > now.device_bytes - now.device_used) result = CUDA_OUT_OF_MEMORY;
  if (result != CUDA_OK) return leave(result);
  range *range = fake_made(sizeof *range);
  range->address = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range->address == MAP_FAILED) abort();
  range->bytes = bytes;
  range->storage = fake_made(bytes);
  memset(range->storage, POISON, bytes);
  range->next = now.memory;
  now.memory = range;
  now.device_used += bytes;
  *memory = (cuda_address)range->address;
  return leave(CUDA_OK);
}

static range *take_range(range **first, const void *address) {
  for (range **at = first; *at; at = &(*at)->next)
    if ((*at)->address == (const char *)address) {
      range *found = *at;
      *at = found->next;
      return found;
    }
  return NULL;
}

cuda_result fake_free(cuda_address memory) {
  cuda_result result = enter("cuMemFree_v2", true);
  range *range = take_range(&now.memory, (void *)memory);
  if (!range) {
    fake_complain("cuMemFree_v2 of %p, which was not allocated", (void *)memory);
    return leave(CUDA_INVALID_VALUE);
  }
  if (fake_in_use(range->address, range->bytes)) fake_complain("device memory was freed under a queued copy");
  now.device_used -= range->bytes;
  munmap(range->address, range->bytes);
  free(range->storage);
  free(range);
  return leave(result);
}

cuda_result fake_host_register(void *memory, size_t bytes, unsigned flags) {
  cuda_result result = enter("cuMemHostRegister_v2", true);
  if ((uintptr_t)memory % 4096 || bytes % 4096 || bytes == 0 || flags != CUDA_HOST_REGISTER_PORTABLE)
    fake_complain("%zu bytes at %p are registered with flags %u: whole pages and 1 are usual", bytes, memory, flags);
  if (result == CUDA_OK && fake_range_of(now.registered, memory, bytes)) {
    fake_complain("%p is registered twice", memory);
    result = REGISTERED;
  }
  if (result == CUDA_OK && bytes > now.lockable_bytes - now.locked) result = CUDA_OUT_OF_MEMORY;
  if (result != CUDA_OK) return leave(result);
  range *range = fake_made(sizeof *range);
  range->address = memory;
  range->bytes = bytes;
  range->next = now.registered;
  now.registered = range;
  now.locked += bytes;
  return leave(CUDA_OK);
}

cuda_result fake_host_unregister(void *memory) {
  cuda_result result = enter("cuMemHostUnregister", true);
  range *range = take_range(&now.registered, memory);
  if (!range) {
    fake_complain("cuMemHostUnregister of %p, which was not registered", memory);
    return leave(NOT_REGISTERED);
  }
  if (fake_in_use(range->address, range->bytes)) fake_complain("host memory was unregistered under a queued copy");
  now.locked -= range->bytes;
  free(range);
  return leave(result);
}

static bool is_direct(const void *address, size_t bytes) {
  return fake_range_of(now.memory, address, bytes) || fake_range_of(now.registered, address, bytes);
}

static void cut(work *work) {
  work->parts_count = 1 + (int)fake_random_below(FAKE_PARTS_MAX);
  if ((size_t)work->parts_count > work->bytes) work->parts_count = (int)work->bytes;
  size_t at = 0;
  for (int i = 0; i < work->parts_count; i++) {
    size_t end = i + 1 == work->parts_count ? work->bytes : work->bytes / (size_t)work->parts_count * (size_t)(i + 1);
    work->parts[i] = (part){.begin = at, .bytes = end - at};
    at = end;
  }
}

cuda_result fake_copy(cuda_address to, cuda_address from, size_t bytes, ptn_stream *stream) {
  cuda_result result = enter("cuMemcpyAsync", true);
  stream = fake_stream_or_default(stream);
  if (result == CUDA_OK && !stream_is_good(stream, "cuMemcpyAsync")) result = INVALID_HANDLE;
  if (result == CUDA_OK && bytes == 0) fake_complain("a copy of nothing");
  if (result != CUDA_OK || bytes == 0) return leave(result);
  work *work = fake_made(sizeof *work);
  work->kind = WORK_COPY;
  work->to = (char *)to;
  work->from = (const char *)from;
  work->bytes = bytes;
  cut(work);
  bool from_direct = is_direct(work->from, bytes), to_direct = is_direct(work->to, bytes);
  bool staged = !from_direct && to_direct && fake_random_below(2);
  if (staged) {
    work->staged = fake_made(bytes);
    memcpy(work->staged, work->from, bytes);
  }
  fake_append(stream, work);
  if (!to_direct || (!from_direct && !staged)) fake_wait_for(stream, NULL, true);
  return leave(now.broken);
}

cuda_result fake_stream_create(ptn_stream **stream, unsigned flags) {
  cuda_result result = enter("cuStreamCreate", true);
  *stream = NULL;
  if (flags != CUDA_STREAM_NON_BLOCKING) fake_complain("a stream that waits for the default stream");
  if (result == CUDA_OK) *stream = fake_make_stream(true);
  return leave(result);
}

cuda_result fake_stream_destroy(ptn_stream *stream) {
  cuda_result result = enter("cuStreamDestroy_v2", true);
  if (!stream_is_good(stream, "cuStreamDestroy_v2")) return leave(INVALID_HANDLE);
  stream->alive = false;
  return leave(result);
}

cuda_result fake_stream_follow(ptn_stream *stream, ptn_event *event, unsigned flags) {
  cuda_result result = enter("cuStreamWaitEvent", true);
  stream = fake_stream_or_default(stream);
  bool good = event_is_good(event, "cuStreamWaitEvent") && stream_is_good(stream, "cuStreamWaitEvent");
  if (result == CUDA_OK && (!good || flags)) result = INVALID_HANDLE;
  if (result != CUDA_OK) return leave(result);
  bool ignored = fake_hits(&now.ignoring, "cuStreamWaitEvent");
  if (ignored || event->ignored) fake_hold_back(ignored ? event->recording : event->ignored, stream);
  if (!event->recording && !event->ignored) fake_complain("a stream follows an event that was never recorded");
  if (event->recording && !ignored) fake_queue_recording(stream, WORK_FOLLOW, event->recording);
  return leave(CUDA_OK);
}

cuda_result fake_stream_finish(ptn_stream *stream) {
  cuda_result result = enter("cuStreamSynchronize", true);
  stream = fake_stream_or_default(stream);
  if (result == CUDA_OK && !stream_is_good(stream, "cuStreamSynchronize")) result = INVALID_HANDLE;
  if (result == CUDA_OK) fake_wait_for(stream, NULL, true);
  return leave(result == CUDA_OK ? now.broken : result);
}

cuda_result fake_event_create(ptn_event **event, unsigned flags) {
  cuda_result result = enter("cuEventCreate", true);
  *event = NULL;
  if (result != CUDA_OK) return leave(result);
  *event = fake_made(sizeof **event);
  (*event)->alive = true;
  (*event)->flags = flags;
  (*event)->next = now.events;
  now.events = *event;
  return leave(CUDA_OK);
}

cuda_result fake_event_destroy(ptn_event *event) {
  cuda_result result = enter("cuEventDestroy_v2", true);
  if (!event_is_good(event, "cuEventDestroy_v2")) return leave(INVALID_HANDLE);
  event->alive = false;
  return leave(result);
}

cuda_result fake_event_record(ptn_event *event, ptn_stream *stream) {
  cuda_result result = enter("cuEventRecord", true);
  stream = fake_stream_or_default(stream);
  bool good = event_is_good(event, "cuEventRecord") && stream_is_good(stream, "cuEventRecord");
  if (result == CUDA_OK && !good) result = INVALID_HANDLE;
  if (result != CUDA_OK) return leave(result);
  recording *recording = fake_made(sizeof *recording);
  recording->made_before = now.recordings;
  now.recordings = recording;
  recording->stream = stream;
  recording->number = stream->queued;
  if (fake_hits(&now.ignoring, "cuEventRecord")) {
    event->ignored = recording;
    return leave(CUDA_OK);
  }
  event->ignored = NULL;
  event->recording = recording;
  fake_queue_recording(stream, WORK_SET, recording);
  return leave(CUDA_OK);
}

cuda_result fake_event_wait(ptn_event *event) {
  cuda_result result = enter("cuEventSynchronize", true);
  if (result == CUDA_OK && !event_is_good(event, "cuEventSynchronize")) result = INVALID_HANDLE;
  if (result != CUDA_OK) return leave(result);
  if (!(event->flags & CUDA_EVENT_BLOCKING_SYNC)) fake_complain("a thread spins until an event happens");
  if (!event->recording && !event->ignored) fake_complain("a thread waits for an event that was never recorded");
  if (event->ignored) fake_hold_back(event->ignored, NULL);
  if (event->recording) fake_wait_for(event->recording->stream, event->recording, false);
  return leave(now.broken);
}

cuda_result fake_event_elapsed(float *milliseconds, ptn_event *first, ptn_event *last) {
  cuda_result result = enter("cuEventElapsedTime", true);
  *milliseconds = 0;
  if (result == CUDA_OK && (first->ignored || last->ignored)) return leave(CUDA_OK); /* ignored in silence */
  bool good = event_is_good(first, "cuEventElapsedTime") && event_is_good(last, "cuEventElapsedTime");
  if (result == CUDA_OK && (!good || !first->recording || !last->recording)) result = INVALID_HANDLE;
  if (result == CUDA_OK && ((first->flags | last->flags) & CUDA_EVENT_DISABLE_TIMING)) result = INVALID_HANDLE;
  if (result == CUDA_OK && (!first->recording->set || !last->recording->set)) result = NOT_READY;
  if (result == CUDA_OK) *milliseconds = (float)((double)(last->recording->set_ns - first->recording->set_ns) / 1e6);
  return leave(result);
}

/* ---- contexts of the calling thread ---- */

cuda_context *fake_other_context(void) { return &now.other; }
cuda_context *fake_current(void) { return current_count > 0 ? current[current_count - 1] : NULL; }

void fake_set_current(cuda_context *context) {
  current_count = 0;
  if (context) current[current_count++] = context;
}

#pragma GCC visibility pop
