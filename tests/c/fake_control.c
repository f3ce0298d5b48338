/* What tests do to the fake driver: see fake_cuda.h. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake_gpu.h"

static const char *const entry_names[] = {
#define FAKE_NAME(field, name, arguments) name,
    CUDA_CALLS(FAKE_NAME)
#undef FAKE_NAME
};

size_t fake_entry(const char *name) {
  for (size_t i = 0; i < FAKE_ENTRIES; i++)
    if (strcmp(entry_names[i], name) == 0) return i;
  abort(); /* the test names no entry point */
}

#pragma GCC visibility push(default)

const char *fake_library(void) {
  Dl_info info;
  if (!dladdr((void *)(uintptr_t)fake_library, &info)) abort();
  return info.dli_fname;
}

static void end_machine(void) {
  fake_lock();
  now.stop = true;
  fake_unlock();
  if (now.running) pthread_join(now.gpu, NULL);
  fake_break_down(1);
  while (now.streams) {
    ptn_stream *stream = now.streams;
    now.streams = stream->next;
    free(stream);
  }
  while (now.events) {
    ptn_event *event = now.events;
    now.events = event->next;
    free(event);
  }
  while (now.recordings) {
    recording *recording = now.recordings;
    now.recordings = recording->made_before;
    free(recording);
  }
  while (now.memory || now.registered) {
    range **first = now.memory ? &now.memory : &now.registered, *range = *first;
    *first = range->next;
    if (range->storage) munmap(range->address, range->bytes);
    free(range->storage);
    free(range);
  }
}

void fake_reset(uint64_t seed, fake_mode mode) {
  end_machine();
  now = (fake_machine){.seed = seed,
                       .mode = mode,
                       .version = 13000,
                       .gpus_count = 1,
                       .device_bytes = (size_t)1 << 40,
                       .lockable_bytes = (size_t)1 << 40,
                       .running = true};
  fake_make_stream(false); /* the default stream */
  if (pthread_create(&now.gpu, NULL, fake_run, NULL) != 0) abort();
}

void fake_describe(int version, int gpus_count) {
  fake_lock();
  now.version = version;
  now.gpus_count = gpus_count;
  fake_unlock();
}

void fake_limit(uint64_t device_bytes, uint64_t lockable_bytes) {
  fake_lock();
  now.device_bytes = device_bytes;
  now.lockable_bytes = lockable_bytes;
  fake_unlock();
}

void fake_freeze(void) {
  fake_lock();
  now.frozen = 1;
  fake_unlock();
}

void fake_thaw(void) {
  fake_lock();
  now.frozen = 0;
  fake_unlock();
}

static void arm(fault *fault, const char *entry, uint64_t nth, cuda_result error) {
  if (entry) fake_entry(entry);
  fake_lock();
  fault->entry = entry;
  fault->armed = nth > 0;
  fault->left = nth;
  fault->error = error;
  fake_unlock();
}

void fake_fail(const char *entry, uint64_t nth, cuda_result error) { arm(&now.failing, entry, nth, error); }
void fake_break(uint64_t nth, cuda_result error) { arm(&now.breaking, NULL, nth, error); }
void fake_ignore(const char *entry, uint64_t nth) { arm(&now.ignoring, entry, nth, CUDA_OK); }

bool fake_ignored_counts(void) {
  fake_lock();
  bool counts = now.hold.counts;
  fake_unlock();
  return counts;
}

bool fake_went_on(void) {
  fake_lock();
  bool early = now.hold.active && !now.hold.until_stream && pthread_equal(now.hold.thread, pthread_self());
  if (early) now.hold.active = false;
  fake_unlock();
  return early;
}

uint64_t fake_calls(const char *entry) {
  uint64_t count = 0;
  fake_lock();
  size_t only = entry ? fake_entry(entry) : 0;
  for (size_t i = 0; i < FAKE_ENTRIES; i++) count += entry && i != only ? 0 : now.calls[i];
  fake_unlock();
  return count;
}

uint64_t fake_alive(void) {
  fake_lock();
  uint64_t count = (uint64_t)now.primary.references;
  for (ptn_stream *stream = now.streams; stream; stream = stream->next) count += stream->alive && stream->counted;
  for (ptn_event *event = now.events; event; event = event->next) count += event->alive;
  for (range *range = now.memory; range; range = range->next) count++;
  for (range *range = now.registered; range; range = range->next) count++;
  fake_unlock();
  return count;
}

const char *fake_complaint(void) {
  static _Thread_local char found[256];
  fake_lock();
  memcpy(found, now.complaint, sizeof found);
  now.complaint[0] = 0;
  fake_unlock();
  return found;
}

bool fake_busy(const void *address, size_t bytes) {
  fake_lock();
  bool busy = fake_in_use(address, bytes);
  fake_unlock();
  return busy;
}

ptn_stream *fake_stream(void) {
  fake_lock();
  ptn_stream *stream = fake_make_stream(false);
  fake_unlock();
  return stream;
}

void fake_launch(ptn_stream *stream, void (*kernel)(void *argument, int part), void *argument, int parts_count) {
  fake_lock();
  work *work = fake_made(sizeof *work);
  work->kind = WORK_KERNEL;
  work->kernel = kernel;
  work->argument = argument;
  work->parts_count = parts_count;
  if (!now.broken) fake_append(fake_stream_or_default(stream), work);
  else free(work);
  fake_unlock();
}

#pragma GCC visibility pop
