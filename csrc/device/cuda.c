/* A GPU as a device: device.h's promises are the CUDA driver's own, so each function is one call of it.
 *
 * Problem: the driver is there on some machines, and torch uses it in the same process. A call needs a context that is current to
 * its thread; torch's threads have theirs, the core's workers have none, and none of torch's may be changed.
 *
 * Design: the library is opened and its entry points are looked up when a device is opened, by the names under which every driver
 * since 11.0 exports them. The context is the GPU's primary one, which torch uses too: handles of its streams are good here, and
 * memory of one is good for the other. It is pushed before a call and popped after it, so whatever a thread had current it has
 * again. Streams do not block on the default stream, and events of use TIME put who waits for them to sleep. The library is never
 * closed: drivers have threads of their own.
 *
 * Invariants: no function but free, unpin and the making and unmaking of things waits for more than one stream; handles are the
 * driver's, so this file holds no state and needs no lock. Why, and what was known when this was written:
 * docs/decisions/0010-cuda-device.md.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/bytes.h"
#include "device/cuda_abi.h"
#include "device/device.h"
#include "device/pinned.h"

typedef struct cuda_device {
  ptn_device base;
  cuda_driver driver;
  cuda_number number;
  cuda_context *context; /* NULL: not retained */
  pid_t process;
  char name[80]; /* for messages: "NVIDIA H100 (GPU 0)" */
} cuda_device;

typedef struct entry_names {
#define CUDA_NAME(field, name, arguments) const char *field;
  CUDA_CALLS(CUDA_NAME)
#undef CUDA_NAME
} entry_names;

static const entry_names name_of = {
#define CUDA_NAME(field, name, arguments) .field = name,
    CUDA_CALLS(CUDA_NAME)
#undef CUDA_NAME
};

static cuda_device *cuda_of(ptn_device *device) { return (cuda_device *)device; }

/* ---- one way to fail ---- */

static void describe(const cuda_device *cuda, cuda_result result, char *out, size_t out_bytes) {
  const char *name = NULL, *words = NULL;
  cuda->driver.error_name(result, &name);
  cuda->driver.error_string(result, &words);
  if (name) snprintf(out, out_bytes, "%s, %s", name, words ? words : "no more is known");
  else snprintf(out, out_bytes, "error %d", result);
}

static ptn_status judge(const cuda_device *cuda, cuda_result result, const char *call, uint64_t bytes) {
  if (result == CUDA_OK) return PTN_OK;
  char words[192], amount[40] = "";
  describe(cuda, result, words, sizeof words);
  if (bytes > 0) snprintf(amount, sizeof amount, " of %" PRIu64 " bytes", bytes);
  ptn_status code = result == CUDA_OUT_OF_MEMORY ? PTN_MEMORY : PTN_DEVICE;
  const char *advice = code == PTN_MEMORY ? ": give less device memory, or end what else uses it" : "";
  ptn_fail(code, "%s%s failed on %s: %s%s", call, amount, cuda->name, words, advice);
  ptn_last_error()->asked_bytes = bytes;
  return code;
}

/* A call of the driver that bytes bytes are asked of. */
#define DRIVER(cuda, field, bytes, ...) judge(cuda, (cuda)->driver.field(__VA_ARGS__), name_of.field, bytes)

static ptn_status enter(cuda_device *cuda) { return DRIVER(cuda, context_push, 0, cuda->context); }

/* Popping what was pushed cannot fail: an error it returns is one of earlier work, which every later call returns too. */
static ptn_status leave(cuda_device *cuda, ptn_status status) {
  cuda_context *popped;
  cuda->driver.context_pop(&popped);
  return status;
}

/* A call in the context; for functions that do nothing else. */
#define WITHIN(cuda, field, bytes, ...)                            \
  do {                                                             \
    cuda_device *cuda_ = (cuda);                                   \
    PTN_TRY(enter(cuda_));                                         \
    return leave(cuda_, DRIVER(cuda_, field, bytes, __VA_ARGS__)); \
  } while (0)

/* ---- memory ---- */

static ptn_status cuda_allocate(ptn_device *device, uint64_t bytes, void **out) {
  cuda_device *cuda = cuda_of(device);
  *out = NULL;
  if (bytes == 0) return ptn_fail(PTN_INVALID, "0 bytes of device memory were asked for: at least 1 is wanted");
  cuda_address memory = 0;
  PTN_TRY(enter(cuda));
  PTN_TRY(leave(cuda, DRIVER(cuda, allocate, bytes, &memory, (size_t)bytes)));
  *out = (void *)memory;
  return PTN_OK;
}

/* Giving back fails only where the device has failed, which the next call that can fail tells. */
static void cuda_free(ptn_device *device, void *memory) {
  cuda_device *cuda = cuda_of(device);
  if (!memory || enter(cuda) != PTN_OK) return;
  cuda->driver.free((cuda_address)memory);
  leave(cuda, PTN_OK);
}

/* The system's limits, or the driver's: the memory is good, only not locked. Other errors are the device's. */
static bool refuses_lock(cuda_result result) {
  return result == CUDA_OUT_OF_MEMORY || result == CUDA_OPERATING_SYSTEM || result == CUDA_NOT_PERMITTED ||
         result == CUDA_NOT_SUPPORTED;
}

static ptn_status lock_pages(cuda_device *cuda, ptn_pinned *pinned) {
  PTN_TRY(enter(cuda));
  cuda_result result = cuda->driver.host_register(pinned->memory, (size_t)pinned->bytes, CUDA_HOST_REGISTER_PORTABLE);
  leave(cuda, PTN_OK);
  pinned->locked = result == CUDA_OK;
  if (pinned->locked) return PTN_OK;
  if (!refuses_lock(result)) return judge(cuda, result, name_of.host_register, pinned->bytes);
  char words[160];
  describe(cuda, result, words, sizeof words);
  snprintf(pinned->reason, sizeof pinned->reason, "%" PRIu64 " bytes of host memory are not locked (%s): copies are slower",
           pinned->bytes, words);
  return PTN_OK;
}

static ptn_status cuda_pin(ptn_device *device, uint64_t bytes, ptn_pinned *out) {
  PTN_TRY(ptn_pinned_map(bytes, out));
  ptn_status status = lock_pages(cuda_of(device), out);
  if (status != PTN_OK) ptn_pinned_unmap(out);
  return status;
}

/* Pages that the driver still holds as locked stay mapped: what is mapped there next would not be what the device copies. */
static void cuda_unpin(ptn_device *device, ptn_pinned *pinned) {
  cuda_device *cuda = cuda_of(device);
  bool held = pinned->locked;
  if (held && enter(cuda) == PTN_OK) {
    held = cuda->driver.host_unregister(pinned->memory) != CUDA_OK;
    leave(cuda, PTN_OK);
  }
  if (!held) ptn_pinned_unmap(pinned);
  *pinned = (ptn_pinned){0};
}

/* ---- streams and events ---- */

static ptn_status cuda_create_stream(ptn_device *device, ptn_stream **out) {
  *out = NULL;
  WITHIN(cuda_of(device), stream_create, 0, out, CUDA_STREAM_NON_BLOCKING);
}

static void cuda_destroy_stream(ptn_device *device, ptn_stream *stream) {
  cuda_device *cuda = cuda_of(device);
  if (!stream || enter(cuda) != PTN_OK) return;
  cuda->driver.stream_destroy(stream);
  leave(cuda, PTN_OK);
}

static ptn_status cuda_create_event(ptn_device *device, ptn_event_use use, ptn_event **out) {
  *out = NULL;
  unsigned flags = use == PTN_EVENT_TIME ? CUDA_EVENT_BLOCKING_SYNC : CUDA_EVENT_DISABLE_TIMING;
  WITHIN(cuda_of(device), event_create, 0, out, flags);
}

static void cuda_destroy_event(ptn_device *device, ptn_event *event) {
  cuda_device *cuda = cuda_of(device);
  if (!event || enter(cuda) != PTN_OK) return;
  cuda->driver.event_destroy(event);
  leave(cuda, PTN_OK);
}

static ptn_status cuda_record(ptn_device *device, ptn_event *event, ptn_stream *stream) {
  WITHIN(cuda_of(device), event_record, 0, event, stream);
}

static ptn_status cuda_follow(ptn_device *device, ptn_stream *stream, ptn_event *event) {
  WITHIN(cuda_of(device), stream_follow, 0, stream, event, 0);
}

static ptn_status cuda_wait(ptn_device *device, ptn_event *event) { WITHIN(cuda_of(device), event_wait, 0, event); }

static ptn_status cuda_finish(ptn_device *device, ptn_stream *stream) { WITHIN(cuda_of(device), stream_finish, 0, stream); }

static ptn_status cuda_elapsed(ptn_device *device, ptn_event *first, ptn_event *last, int64_t *out_ns) {
  cuda_device *cuda = cuda_of(device);
  float milliseconds = 0;
  *out_ns = 0;
  PTN_TRY(enter(cuda));
  PTN_TRY(leave(cuda, DRIVER(cuda, event_elapsed, 0, &milliseconds, first, last)));
  *out_ns = (int64_t)((double)milliseconds * 1e6);
  return PTN_OK;
}

/* The driver knows by the addresses which memory is whose. */
static ptn_status cuda_copy(ptn_device *device, ptn_stream *stream, void *to, const void *from, uint64_t bytes) {
  WITHIN(cuda_of(device), copy, bytes, (cuda_address)to, (cuda_address)from, (size_t)bytes, stream);
}

/* ---- opening ---- */

_Static_assert(sizeof(cuda_driver) == sizeof(entry_names), "an entry point is as large as the pointer that dlsym returns");

static ptn_status load_driver(cuda_driver *driver, const char *library) {
  static const struct {
    const char *name;
    size_t offset;
  } entries[] = {
#define CUDA_ENTRY(field, name, arguments) {name, offsetof(cuda_driver, field)},
      CUDA_CALLS(CUDA_ENTRY)
#undef CUDA_ENTRY
  };
  const char *path = library ? library : "libcuda.so.1";
  void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle)
    return ptn_fail(PTN_DEVICE, "no CUDA driver: %s; install NVIDIA's driver for this GPU, or compute on the CPU", dlerror());
  for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
    void *found = dlsym(handle, entries[i].name);
    if (!found)
      return ptn_fail(PTN_DEVICE, "%s has no %s: it is no CUDA driver, or one that is too old; %d.%d or later is needed", path,
                      entries[i].name, CUDA_OLDEST_DRIVER / 1000, CUDA_OLDEST_DRIVER % 1000 / 10);
    memcpy((char *)driver + entries[i].offset, &found, sizeof found);
  }
  return PTN_OK;
}

static ptn_status check_version(cuda_device *cuda) {
  int version = 0;
  PTN_TRY(DRIVER(cuda, driver_version, 0, &version));
  if (version >= CUDA_OLDEST_DRIVER) return PTN_OK;
  return ptn_fail(PTN_DEVICE,
                  "the CUDA driver is too old: it serves CUDA %d.%d, and %d.%d or later is needed; install a newer one",
                  version / 1000, version % 1000 / 10, CUDA_OLDEST_DRIVER / 1000, CUDA_OLDEST_DRIVER % 1000 / 10);
}

static ptn_status find_gpu(cuda_device *cuda, int number) {
  cuda_result result = cuda->driver.init(0);
  int count = 0;
  if (result == CUDA_OK) PTN_TRY(DRIVER(cuda, device_count, 0, &count));
  else if (result != CUDA_NO_DEVICE) return judge(cuda, result, name_of.init, 0);
  if (count == 0) return ptn_fail(PTN_DEVICE, "the CUDA driver shows no GPU: look at nvidia-smi, and at CUDA_VISIBLE_DEVICES");
  if (number < 0 || number >= count)
    return ptn_fail(PTN_INVALID, "GPU %d was asked for, and the CUDA driver shows %d: 0 to %d", number, count, count - 1);
  char model[48] = "";
  PTN_TRY(DRIVER(cuda, device_get, 0, &cuda->number, number));
  PTN_TRY(DRIVER(cuda, device_name, 0, model, (int)sizeof model, cuda->number));
  snprintf(cuda->name, sizeof cuda->name, "%s (GPU %d)", model, number);
  return PTN_OK;
}

static ptn_status open_gpu(cuda_device *cuda, int number, const char *library) {
  snprintf(cuda->name, sizeof cuda->name, "the CUDA driver");
  PTN_TRY(load_driver(&cuda->driver, library));
  PTN_TRY(check_version(cuda));
  PTN_TRY(find_gpu(cuda, number));
  int unified = 0;
  PTN_TRY(DRIVER(cuda, device_attribute, 0, &unified, CUDA_UNIFIED_ADDRESSING, cuda->number));
  if (!unified)
    return ptn_fail(PTN_DEVICE, "%s has addresses of its own, which the host's are not part of: it is too old", cuda->name);
  return DRIVER(cuda, context_retain, 0, &cuda->context, cuda->number);
}

static void cuda_destroy(ptn_device *device) {
  cuda_device *cuda = cuda_of(device);
  if (cuda->context && cuda->process == getpid()) cuda->driver.context_release(cuda->number);
  free(cuda);
}

ptn_status ptn_device_open_cuda(ptn_device **out, int number, const char *library) {
  static const ptn_device_kind kind = {
      .name = "cuda",
      .destroy = cuda_destroy,
      .allocate = cuda_allocate,
      .free = cuda_free,
      .pin = cuda_pin,
      .unpin = cuda_unpin,
      .create_stream = cuda_create_stream,
      .destroy_stream = cuda_destroy_stream,
      .create_event = cuda_create_event,
      .destroy_event = cuda_destroy_event,
      .record = cuda_record,
      .follow = cuda_follow,
      .wait = cuda_wait,
      .finish = cuda_finish,
      .elapsed = cuda_elapsed,
      .copy = cuda_copy,
  };
  *out = NULL;
  cuda_device *cuda = calloc(1, sizeof *cuda);
  if (!cuda) return ptn_fail(PTN_MEMORY, "no memory for a device");
  cuda->base.kind = &kind;
  cuda->process = getpid();
  ptn_status status = open_gpu(cuda, number, library);
  if (status != PTN_OK) cuda_destroy(&cuda->base);
  else *out = &cuda->base;
  return status;
}
