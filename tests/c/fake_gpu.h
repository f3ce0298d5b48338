/* What the files of the fake driver share: the machine, and the GPU in it. fake_cuda.h is what tests see.
 *
 * All state is under one mutex, with one condition for every change. Streams are queues of work; one thread, the GPU, takes the
 * stream whose turn it is and does one step of its first work: a part of a copy read or written, a part of a kernel, a recording
 * set. An event refers to a recording, which lives until the next reset; following one puts it into the other queue.
 *
 * Moving work (copies and kernels) of a stream is numbered. What a fault holds back, and until when, is said in these numbers.
 */
#ifndef PTN_TESTS_FAKE_GPU_H
#define PTN_TESTS_FAKE_GPU_H

#include <pthread.h>

#include "fake_cuda.h"

#define FAKE_PARTS_MAX 4

enum {
#define FAKE_COUNT(field, name, arguments) FAKE_ENTRY_##field,
  CUDA_CALLS(FAKE_COUNT)
#undef FAKE_COUNT
      FAKE_ENTRIES
};

typedef struct recording {
  struct recording *made_before;
  ptn_stream *stream;
  uint64_t number; /* of the last moving work before it */
  bool set;
  int64_t set_ns;
} recording;

typedef struct part {
  size_t begin, bytes;
  void *read; /* NULL: not yet */
  bool written;
} part;

typedef enum work_kind { WORK_COPY, WORK_KERNEL, WORK_SET, WORK_FOLLOW } work_kind;

typedef struct work {
  struct work *next;
  work_kind kind;
  uint64_t number;
  char *to; /* as the caller named them */
  const char *from;
  size_t bytes;
  void *staged; /* what from held when the copy was ordered; NULL: read it when it is made */
  part parts[FAKE_PARTS_MAX];
  int parts_count, done_count;
  void (*kernel)(void *argument, int part);
  void *argument;
  recording *recording;
} work;

struct ptn_stream {
  ptn_stream *next;
  bool alive, counted, needed;
  unsigned weight;
  work *first, *last;
  uint64_t queued, finished; /* numbers of moving work */
};

struct ptn_event {
  ptn_event *next;
  bool alive;
  unsigned flags;
  recording *recording; /* NULL: never recorded */
  recording *ignored;   /* what it would have been recorded as, had that not been ignored */
};

struct cuda_context {
  int references;
};

typedef struct range { /* of device memory, or registered */
  struct range *next;
  char *address;
  size_t bytes;
  char *storage; /* of device memory */
} range;

typedef struct waiter {
  struct waiter *next;
  ptn_stream *stream; /* whose work the thread waits for */
  bool urgent;
} waiter;

typedef struct fault {
  const char *entry;
  bool armed;
  uint64_t left;
  cuda_result error;
} fault;

typedef struct fake_machine {
  bool running, stop, ready;
  pthread_t gpu;
  uint64_t seed;
  fake_mode mode;
  int version, gpus_count, frozen;
  int urgent_count; /* calls that wait although the GPU is frozen */
  size_t device_bytes, device_used, lockable_bytes, locked;
  cuda_context primary, other;
  ptn_stream *streams;
  ptn_event *events;
  recording *recordings;
  range *memory, *registered;
  waiter *waiters;
  fault failing, breaking, ignoring;
  cuda_result broken;
  uint64_t calls[FAKE_ENTRIES];
  char complaint[256];
  struct {
    bool active, counts;
    ptn_stream *stream, *until_stream; /* until_stream NULL: until `thread` went on */
    uint64_t number, until_number;
    pthread_t thread;
  } hold;
} fake_machine;

extern fake_machine now;

size_t fake_entry(const char *name); /* the number of an entry point */
void fake_lock(void);
void fake_unlock(void); /* wakes whoever waits for a change */
uint64_t fake_random_below(uint64_t count);
void *fake_made(size_t bytes); /* zeros */
__attribute__((format(printf, 1, 2))) void fake_complain(const char *format, ...);

range *fake_range_of(range *first, const void *address, size_t bytes);
bool fake_in_use(const char *address, size_t bytes); /* queued work copies from or to these bytes */
ptn_stream *fake_make_stream(bool counted);
ptn_stream *fake_stream_or_default(ptn_stream *stream);
void fake_append(ptn_stream *stream, work *work); /* takes the work */
void fake_queue_recording(ptn_stream *stream, work_kind kind, recording *recording);
/* A thread waits until the recording is set, or with NULL until the stream has done its moving work, or the GPU broke. urgent:
 * although it is frozen. */
void fake_wait_for(ptn_stream *stream, const recording *recording, bool urgent);
/* Somebody does not wait for a recording: a stream, from its next moving work on, or a thread (NULL). */
void fake_hold_back(const recording *recording, ptn_stream *until);
bool fake_hits(fault *fault, const char *entry);
void fake_break_down(cuda_result error); /* drops all work */
void *fake_run(void *argument); /* the GPU's thread */

#endif
