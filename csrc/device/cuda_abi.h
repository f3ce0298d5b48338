/* What NVIDIA documents of its driver's interface, as far as the device uses it: so that the core builds without CUDA and one
 * build serves machines with and without a GPU. Handles are opaque, numbers and signatures are the driver's; those below are the
 * same in every driver since 11.0. A name with _v2 is the second form of its entry point, the only one with 64-bit sizes; the
 * library exports it under this name.
 */
#ifndef PTN_DEVICE_CUDA_ABI_H
#define PTN_DEVICE_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

#include "device/device.h"

typedef int cuda_result;
typedef int cuda_number; /* of a GPU */
typedef struct cuda_context cuda_context;
typedef uintptr_t cuda_address; /* of device memory, or of host memory: one space of addresses */
/* Streams and events: ptn_stream, ptn_event. */

enum {
  CUDA_OK = 0,
  CUDA_INVALID_VALUE = 1,
  CUDA_OUT_OF_MEMORY = 2,
  CUDA_NO_DEVICE = 100,
  CUDA_OPERATING_SYSTEM = 304,
  CUDA_NOT_PERMITTED = 800,
  CUDA_NOT_SUPPORTED = 801,
};

enum { CUDA_OLDEST_DRIVER = 11000 }; /* 1000 * major + 10 * minor */
enum { CUDA_UNIFIED_ADDRESSING = 41 }; /* an attribute of a device */
enum { CUDA_STREAM_NON_BLOCKING = 1 }; /* runs beside the default stream */
enum { CUDA_EVENT_BLOCKING_SYNC = 1, CUDA_EVENT_DISABLE_TIMING = 2 };
enum { CUDA_HOST_REGISTER_PORTABLE = 1 }; /* locked for every context */

/* Each entry point: its field in the table, its name in the library, its arguments. */
#define CUDA_CALLS(entry)                                                                                                        \
  entry(init, "cuInit", (unsigned flags)) entry(driver_version, "cuDriverGetVersion", (int *version)) entry(                     \
      error_name, "cuGetErrorName", (cuda_result error, const char **name))                                                      \
      entry(error_string, "cuGetErrorString", (cuda_result error, const char **string)) entry(                                   \
          device_count, "cuDeviceGetCount", (int *count)) entry(device_get, "cuDeviceGet", (cuda_number * device, int number))   \
          entry(device_name, "cuDeviceGetName", (char *name, int bytes, cuda_number device)) entry(                              \
              device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, cuda_number device))                         \
              entry(context_retain, "cuDevicePrimaryCtxRetain", (cuda_context * *context, cuda_number device)) entry(            \
                  context_release, "cuDevicePrimaryCtxRelease_v2", (cuda_number device))                                         \
                  entry(context_push, "cuCtxPushCurrent_v2", (cuda_context * context)) entry(                                    \
                      context_pop, "cuCtxPopCurrent_v2",                                                                         \
                      (cuda_context * *context)) entry(allocate, "cuMemAlloc_v2", (cuda_address * memory, size_t bytes))         \
                      entry(free, "cuMemFree_v2", (cuda_address memory))                                                         \
                          entry(host_register, "cuMemHostRegister_v2", (void *memory, size_t bytes, unsigned flags))             \
                              entry(host_unregister, "cuMemHostUnregister", (void *memory)) entry(                               \
                                  copy, "cuMemcpyAsync", (cuda_address to, cuda_address from, size_t bytes, ptn_stream *stream)) \
                                  entry(stream_create, "cuStreamCreate", (ptn_stream * *stream, unsigned flags))                 \
                                      entry(stream_destroy, "cuStreamDestroy_v2", (ptn_stream * stream))                         \
                                          entry(stream_follow, "cuStreamWaitEvent",                                              \
                                                (ptn_stream * stream, ptn_event * event, unsigned flags))                        \
                                              entry(stream_finish, "cuStreamSynchronize", (ptn_stream * stream)) entry(          \
                                                  event_create, "cuEventCreate", (ptn_event * *event, unsigned flags))           \
                                                  entry(event_destroy, "cuEventDestroy_v2", (ptn_event * event)) entry(          \
                                                      event_record, "cuEventRecord", (ptn_event * event, ptn_stream * stream))   \
                                                      entry(event_wait, "cuEventSynchronize", (ptn_event * event))               \
                                                          entry(event_elapsed, "cuEventElapsedTime",                             \
                                                                (float *milliseconds, ptn_event *first, ptn_event *last))

typedef struct cuda_driver {
#define CUDA_FIELD(field, name, arguments) cuda_result(*field) arguments;
  CUDA_CALLS(CUDA_FIELD)
#undef CUDA_FIELD
} cuda_driver;

#endif
