/* A device and a compute stream to test, the host or the fake GPU, so that one body of tests runs over both. */
#ifndef PTN_TESTS_DEVICE_SUBJECT_H
#define PTN_TESTS_DEVICE_SUBJECT_H

#include <string.h>

#include "base/threads.h"
#include "check.h"
#include "device/device.h"
#include "fake_cuda.h"

typedef struct subject {
  bool cuda, broke; /* broke: the GPU did, and takes nothing back */
  ptn_device *device;
  const ptn_device_kind *kind;
  ptn_stream *compute;
} subject;

/* Of the fake GPU, by this seed and mode; the compute stream is the default one or another. */
static inline ptn_status subject_open(subject *subject, bool cuda, uint64_t seed, fake_mode mode) {
  *subject = (struct subject){.cuda = cuda};
  fake_reset(seed, mode);
  if (!cuda) PTN_TRY(ptn_device_open_host(&subject->device));
  else PTN_TRY(ptn_device_open_cuda(&subject->device, 0, fake_library()));
  subject->kind = subject->device->kind;
  subject->compute = cuda && seed % 2 ? fake_stream() : NULL;
  return PTN_OK;
}

/* Everything that was made is gone, and the driver was used as it may be. */
static inline void subject_close(subject *subject) {
  if (subject->device) subject->kind->destroy(subject->device);
  subject->device = NULL;
  const char *complaint = fake_complaint();
  if (complaint[0]) fprintf(stderr, "the driver complains: %s\n", complaint);
  CHECK(complaint[0] == 0);
  CHECK(subject->broke || fake_alive() == 0);
}

/* Computes on the compute stream: a kernel in parts. */
static inline void subject_compute(subject *subject, void (*kernel)(void *argument, int part), void *argument, int parts_count) {
  if (subject->cuda) fake_launch(subject->compute, kernel, argument, parts_count);
  else
    for (int part = 0; part < parts_count; part++) kernel(argument, part);
}

/* In a kernel: where the bytes at a device address are. */
static inline void *subject_at(const subject *subject, void *address) { return subject->cuda ? fake_memory(address) : address; }

#endif
