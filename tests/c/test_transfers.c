/* Lanes of transfers under a miniature of training: chunks come up into slots, activations go away and come back, gradients go
 * down and update the chunks, all of it ordered by events alone. The bytes must be those of a plain loop: over the host, over a
 * GPU that does its worst within what CUDA allows, and, where any one call fails, there must be an error, no leak and no hang.
 *
 * Last, the proof that these tests see what they are for: the driver ignores one wait, or one recording, of those that a step
 * makes, each in turn, and wherever somebody would have waited for it the bytes must be wrong. */
/* sources: csrc/device/host.c csrc/device/host_device.c csrc/device/pinned.c csrc/device/cuda.c csrc/device/transfers.c */
/* library: tests/c/fake_cuda.c tests/c/fake_gpu.c tests/c/fake_control.c */
/* threads */
#include "device/transfers.h"

#include <sys/wait.h>
#include <unistd.h>

#include "device_subject.h"

#define CHUNKS 5
#define BUFFERS 2 /* on the device, of each kind; chunk c uses number c % BUFFERS */
#define ACCESSES (2 * CHUNKS)
#define WORDS 96
#define WORDS_BYTES (WORDS * sizeof(uint32_t))
#define PARTS 3 /* of a kernel */
#define TRANSFERS_MAX (8 * CHUNKS)
#define CUDA_LAUNCH_FAILED 719

typedef struct words {
  uint32_t at[WORDS];
} words;

typedef struct loop loop;

/* What a transfer is for, and what its done does. */
typedef enum job { JOB_CHUNK, JOB_GRADIENT, JOB_SAVE, JOB_FETCH, JOB_BARRIER } job;

typedef struct move {
  ptn_transfer transfer; /* first member */
  loop *loop;
  job job;
  uint32_t chunk;
  words *host;
  int done_count;
} move;

/* A buffer on the device: `filled` when its bytes are made, `free` when the last that reads them has. */
typedef struct buffer {
  void *memory;
  ptn_event *filled, *free;
  bool used; /* free was recorded */
  uint32_t chunk; /* of a slot; CHUNKS: none */
  bool followed; /* of a slot: the compute stream is ordered behind its filling */
} buffer;

/* What a kernel works on. */
typedef struct kernel {
  subject *subject;
  void *params, *state, *save, *gradient;
} kernel;

struct loop {
  subject subject;
  ptn_transfers *upload, *offload;
  words homes[CHUNKS];
  ptn_pinned pinned; /* of the following */
  words *staging, *gradients_host, *saves_host;
  void *state; /* on the device: activations, and in backward what comes back through the layers */
  buffer slots[BUFFERS], gradients[BUFFERS], saves[BUFFERS], fetched[BUFFERS];
  move moves[TRANSFERS_MAX];
  kernel kernels[ACCESSES + 1];
  uint32_t moves_count, staged_count;
  uint64_t seed;
  ptn_mutex mutex;
  ptn_condition changed;
  uint32_t outstanding_count;
  ptn_status status; /* the first failure */
  ptn_error error;
  bool unordered; /* the driver ignores an order: a done may come too early */
  bool early;     /* one did */
  job early_job;
};

/* ---- the plain loop ---- */

static void forward_word(uint32_t *state, uint32_t param) { *state = *state * 3 + param; }

static void backward_word(uint32_t *state, uint32_t param, uint32_t save, uint32_t *gradient) {
  *gradient = *state * 5 + save * 7 + param;
  *state = *state * 9 + param + save;
}

static void plain_step(words homes[CHUNKS]) {
  words state[1], saves[CHUNKS];
  for (int i = 0; i < WORDS; i++) state->at[i] = 1;
  for (uint32_t c = 0; c < CHUNKS; c++) {
    saves[c] = *state;
    for (int i = 0; i < WORDS; i++) forward_word(&state->at[i], homes[c].at[i]);
  }
  for (uint32_t c = CHUNKS; c-- > 0;)
    for (int i = 0; i < WORDS; i++) {
      uint32_t gradient;
      backward_word(&state->at[i], homes[c].at[i], saves[c].at[i], &gradient);
      homes[c].at[i] -= gradient;
    }
}

/* ---- kernels: a third of the words at a time ---- */

/* A step begins with the same values. */
static void first_kernel(void *argument, int part) {
  const kernel *kernel = argument;
  words *state = subject_at(kernel->subject, kernel->state);
  for (int i = part; i < WORDS; i += PARTS) state->at[i] = 1;
}

static void forward_kernel(void *argument, int part) {
  const kernel *kernel = argument;
  const words *params = subject_at(kernel->subject, kernel->params);
  words *state = subject_at(kernel->subject, kernel->state), *save = subject_at(kernel->subject, kernel->save);
  for (int i = part; i < WORDS; i += PARTS) {
    save->at[i] = state->at[i];
    forward_word(&state->at[i], params->at[i]);
  }
}

static void backward_kernel(void *argument, int part) {
  const kernel *kernel = argument;
  const words *params = subject_at(kernel->subject, kernel->params), *save = subject_at(kernel->subject, kernel->save);
  words *state = subject_at(kernel->subject, kernel->state), *gradient = subject_at(kernel->subject, kernel->gradient);
  for (int i = part; i < WORDS; i += PARTS) backward_word(&state->at[i], params->at[i], save->at[i], &gradient->at[i]);
}

/* ---- transfers of the loop ---- */

static void note(loop *loop, ptn_status status, const ptn_error *error) {
  if (status == PTN_OK || loop->status != PTN_OK) return;
  loop->status = status;
  loop->error = *error;
}

/* What the CPU may do when the bytes are there, it does at once: a gradient updates its chunk, memory that was read is
 * overwritten. */
static void on_done(ptn_transfer *transfer) {
  move *move = (struct move *)transfer;
  loop *loop = move->loop;
  ptn_lock(&loop->mutex);
  CHECK(move->done_count++ == 0);
  CHECK(transfer->end_ns >= transfer->start_ns && transfer->end_ns > 0);
  if (!loop->unordered && move->host && move->job != JOB_SAVE) CHECK(!fake_busy(move->host, WORDS_BYTES)); /* failed or not */
  note(loop, transfer->status, &transfer->error);
  if (move->job == JOB_GRADIENT && transfer->status == PTN_OK)
    for (int i = 0; i < WORDS; i++) loop->homes[move->chunk].at[i] -= move->host->at[i];
  if (move->job == JOB_GRADIENT || move->job == JOB_CHUNK) memset(move->host, 0xEE, WORDS_BYTES);
  if (fake_went_on()) {
    loop->early = true;
    loop->early_job = move->job;
  }
  if (--loop->outstanding_count == 0) ptn_broadcast(&loop->changed);
  ptn_unlock(&loop->mutex);
}

static ptn_status submit(loop *loop, job job, uint32_t chunk, words *host, void *device, ptn_event *after, ptn_event *end) {
  CHECK(loop->moves_count < TRANSFERS_MAX);
  move *move = &loop->moves[loop->moves_count++];
  bool down = job == JOB_GRADIENT || job == JOB_SAVE;
  *move = (struct move){.loop = loop, .job = job, .chunk = chunk, .host = host};
  move->transfer = (ptn_transfer){.to = down ? (void *)host : device,
                                  .from = down ? device : (void *)host,
                                  .bytes = job == JOB_BARRIER ? 0 : WORDS_BYTES,
                                  .after = after,
                                  .end = end,
                                  .done = on_done};
  ptn_lock(&loop->mutex);
  loop->outstanding_count++;
  ptn_unlock(&loop->mutex);
  return ptn_transfers_submit(down ? loop->offload : loop->upload, &move->transfer);
}

/* ---- a step ---- */

static ptn_status record(loop *loop, ptn_event *event) {
  return loop->subject.kind->record(loop->subject.device, event, loop->subject.compute);
}

static ptn_status follow(loop *loop, ptn_event *event) {
  return event ? loop->subject.kind->follow(loop->subject.device, loop->subject.compute, event) : PTN_OK;
}

static ptn_event *free_of(const buffer *buffer) { return buffer->used ? buffer->free : NULL; }

static uint32_t chunk_of(uint32_t access) { return access < CHUNKS ? access : ACCESSES - 1 - access; }

/* Brings the chunk of an access into its slot, unless an access before it needs the slot. */
static ptn_status load(loop *loop, uint32_t access, uint32_t now) {
  uint32_t chunk = chunk_of(access);
  buffer *slot = &loop->slots[chunk % BUFFERS];
  if (slot->chunk == chunk) return PTN_OK;
  for (uint32_t earlier = now; earlier < access; earlier++)
    if (chunk_of(earlier) % BUFFERS == chunk % BUFFERS) return PTN_OK;
  words *staging = &loop->staging[loop->staged_count++];
  ptn_lock(&loop->mutex);
  *staging = loop->homes[chunk];
  ptn_unlock(&loop->mutex);
  slot->chunk = chunk;
  slot->followed = false;
  return submit(loop, JOB_CHUNK, chunk, staging, slot->memory, free_of(slot), slot->filled);
}

/* The block's input is saved, and leaves the device. */
static ptn_status forward(loop *loop, uint32_t chunk, kernel *kernel) {
  buffer *save = &loop->saves[chunk % BUFFERS];
  PTN_TRY(follow(loop, free_of(save)));
  kernel->save = save->memory;
  subject_compute(&loop->subject, forward_kernel, kernel, PARTS);
  PTN_TRY(record(loop, save->filled));
  save->used = true;
  return submit(loop, JOB_SAVE, chunk, &loop->saves_host[chunk], save->memory, save->filled, save->free);
}

/* The block's input comes back, behind the lane that took it away, and behind the last use of the buffer. */
static ptn_status fetch(loop *loop, uint32_t chunk) {
  buffer *fetched = &loop->fetched[chunk % BUFFERS];
  if (chunk + BUFFERS >= CHUNKS) /* saves before them have left before the compute stream went on */
    PTN_TRY(submit(loop, JOB_BARRIER, chunk, NULL, NULL, loop->saves[chunk % BUFFERS].free, NULL));
  return submit(loop, JOB_FETCH, chunk, &loop->saves_host[chunk], fetched->memory, free_of(fetched), fetched->filled);
}

static ptn_status backward(loop *loop, uint32_t chunk, kernel *kernel) {
  buffer *fetched = &loop->fetched[chunk % BUFFERS], *gradient = &loop->gradients[chunk % BUFFERS];
  PTN_TRY(follow(loop, fetched->filled));
  PTN_TRY(follow(loop, free_of(gradient)));
  kernel->save = fetched->memory;
  kernel->gradient = gradient->memory;
  subject_compute(&loop->subject, backward_kernel, kernel, PARTS);
  PTN_TRY(record(loop, fetched->free));
  PTN_TRY(record(loop, gradient->filled));
  fetched->used = gradient->used = true;
  return submit(loop, JOB_GRADIENT, chunk, &loop->gradients_host[chunk], gradient->memory, gradient->filled, gradient->free);
}

static ptn_status order_access(loop *loop, uint32_t access, int *next_fetch) {
  uint32_t chunk = chunk_of(access), ahead = (uint32_t)(check_random(&loop->seed) % 3);
  buffer *slot = &loop->slots[chunk % BUFFERS];
  kernel *kernel = &loop->kernels[access];
  *kernel = (struct kernel){.subject = &loop->subject, .params = slot->memory, .state = loop->state};
  for (uint32_t other = access; other <= access + ahead && other < ACCESSES; other++) PTN_TRY(load(loop, other, access));
  int least = (int)chunk - (check_random(&loop->seed) % 2 && access + 1 < ACCESSES);
  for (; access >= CHUNKS && *next_fetch >= least; --*next_fetch) PTN_TRY(fetch(loop, (uint32_t)*next_fetch));
  if (!slot->followed) PTN_TRY(follow(loop, slot->filled));
  slot->followed = true;
  PTN_TRY(access < CHUNKS ? forward(loop, chunk, kernel) : backward(loop, chunk, kernel));
  slot->used = true;
  return record(loop, slot->free);
}

static ptn_status order_step(loop *loop) {
  int next_fetch = CHUNKS - 1;
  loop->moves_count = loop->staged_count = 0;
  for (int i = 0; i < BUFFERS; i++) loop->slots[i].chunk = CHUNKS; /* what is there is as it was before the updates */
  kernel *first = &loop->kernels[ACCESSES];
  *first = (kernel){.subject = &loop->subject, .state = loop->state};
  subject_compute(&loop->subject, first_kernel, first, PARTS);
  for (uint32_t access = 0; access < ACCESSES; access++) PTN_TRY(order_access(loop, access, &next_fetch));
  return PTN_OK;
}

/* frozen: the device does nothing until the whole step is ordered, which shows that ordering waits for nothing. */
static ptn_status step(loop *loop, bool frozen) {
  if (frozen) fake_freeze();
  ptn_status status = order_step(loop);
  ptn_lock(&loop->mutex);
  note(loop, status, ptn_last_error());
  if (frozen) fake_thaw();
  while (loop->outstanding_count > 0) CHECK(ptn_wait_ns(&loop->changed, &loop->mutex, HUNG_NS));
  ptn_unlock(&loop->mutex);
  return loop->status;
}

/* ---- the loop ---- */

static ptn_status make_buffer(loop *loop, buffer *buffer) {
  const subject *subject = &loop->subject;
  PTN_TRY(subject->kind->allocate(subject->device, WORDS_BYTES, &buffer->memory));
  PTN_TRY(subject->kind->create_event(subject->device, PTN_EVENT_ORDER, &buffer->filled));
  return subject->kind->create_event(subject->device, PTN_EVENT_ORDER, &buffer->free);
}

static void drop_buffer(loop *loop, buffer *buffer) {
  const subject *subject = &loop->subject;
  subject->kind->destroy_event(subject->device, buffer->filled);
  subject->kind->destroy_event(subject->device, buffer->free);
  subject->kind->free(subject->device, buffer->memory);
}

static ptn_status make(loop *loop) {
  const subject *subject = &loop->subject;
  PTN_TRY(ptn_transfers_create(&loop->upload, subject->device, "upload"));
  PTN_TRY(ptn_transfers_create(&loop->offload, subject->device, "offload"));
  PTN_TRY(subject->kind->pin(subject->device, (ACCESSES + 2 * CHUNKS) * WORDS_BYTES, &loop->pinned));
  loop->staging = loop->pinned.memory;
  loop->gradients_host = loop->staging + ACCESSES;
  loop->saves_host = loop->gradients_host + CHUNKS;
  PTN_TRY(subject->kind->allocate(subject->device, WORDS_BYTES, &loop->state));
  for (int i = 0; i < BUFFERS; i++) {
    PTN_TRY(make_buffer(loop, &loop->slots[i]));
    PTN_TRY(make_buffer(loop, &loop->gradients[i]));
    PTN_TRY(make_buffer(loop, &loop->saves[i]));
    PTN_TRY(make_buffer(loop, &loop->fetched[i]));
  }
  return PTN_OK;
}

static void drop(loop *loop) {
  subject *subject = &loop->subject;
  subject->kind->finish(subject->device, subject->compute);
  ptn_transfers_destroy(loop->upload);
  ptn_transfers_destroy(loop->offload);
  for (int i = 0; i < BUFFERS; i++) {
    drop_buffer(loop, &loop->slots[i]);
    drop_buffer(loop, &loop->gradients[i]);
    drop_buffer(loop, &loop->saves[i]);
    drop_buffer(loop, &loop->fetched[i]);
  }
  subject->kind->free(subject->device, loop->state);
  subject->kind->unpin(subject->device, &loop->pinned);
  ptn_condition_destroy(&loop->changed);
  ptn_mutex_destroy(&loop->mutex);
}

/* Which of the driver's calls goes wrong, and how; entry NULL and break_at 0: none. */
typedef struct trouble {
  const char *entry;
  uint64_t nth;
  bool ignored; /* else it fails */
  uint64_t break_at;
  uint64_t lockable_bytes; /* 0: all */
} trouble;

typedef struct outcome {
  ptn_status status;
  ptn_error error;
  bool equal; /* to the plain loop */
  bool early, counts;
  job early_job;
} outcome;

static void cause(const trouble *trouble) {
  if (trouble->lockable_bytes) fake_limit((uint64_t)1 << 40, trouble->lockable_bytes);
  if (trouble->break_at) fake_break(trouble->break_at, CUDA_LAUNCH_FAILED);
  if (trouble->entry && trouble->ignored) fake_ignore(trouble->entry, trouble->nth);
  if (trouble->entry && !trouble->ignored) fake_fail(trouble->entry, trouble->nth, CUDA_LAUNCH_FAILED);
}

static bool equals_plain(loop *loop, uint64_t seed, uint32_t steps_count) {
  words homes[CHUNKS];
  for (int c = 0; c < CHUNKS; c++)
    for (int i = 0; i < WORDS; i++) homes[c].at[i] = (uint32_t)check_random(&seed);
  for (uint32_t i = 0; i < steps_count; i++) plain_step(homes);
  return memcmp(homes, loop->homes, sizeof homes) == 0;
}

/* Calls that wait for the device, or may. */
static uint64_t waiting_calls(void) {
  return fake_calls("cuStreamSynchronize") + fake_calls("cuMemAlloc_v2") + fake_calls("cuMemFree_v2") +
         fake_calls("cuMemHostRegister_v2") + fake_calls("cuMemHostUnregister");
}

static outcome run(bool cuda, uint64_t seed, fake_mode mode, uint32_t steps_count, bool frozen, trouble trouble) {
  static loop memory;
  loop *loop = &memory;
  *loop = (struct loop){.seed = seed, .unordered = trouble.ignored};
  ptn_mutex_create(&loop->mutex);
  ptn_condition_create(&loop->changed);
  uint64_t values = seed;
  for (int c = 0; c < CHUNKS; c++)
    for (int i = 0; i < WORDS; i++) loop->homes[c].at[i] = (uint32_t)check_random(&values);
  CHECK_OK(subject_open(&loop->subject, cuda, seed, mode));
  cause(&trouble);
  loop->status = make(loop);
  ptn_error_save(&loop->error);
  uint64_t waiting_count = waiting_calls();
  for (uint32_t i = 0; i < steps_count && loop->status == PTN_OK; i++) step(loop, frozen);
  if (loop->status == PTN_OK) CHECK(waiting_calls() == waiting_count);
  outcome outcome = {.status = loop->status,
                     .error = loop->error,
                     .equal = equals_plain(loop, seed, steps_count),
                     .early = loop->early,
                     .counts = fake_ignored_counts(),
                     .early_job = loop->early_job};
  fake_fail(NULL, 0, 0);
  fake_break(0, 0);
  loop->subject.broke = trouble.break_at > 0 && outcome.status != PTN_OK;
  drop(loop);
  subject_close(&loop->subject);
  return outcome;
}

static void equal_to_the_plain_loop(void) {
  for (uint64_t seed = 0; seed < 60; seed++) {
    outcome host = run(false, seed, FAKE_ANY, 4, false, (trouble){0});
    CHECK(host.status == PTN_OK && host.equal);
  }
  for (uint64_t seed = 0; seed < 90; seed++) {
    outcome cuda = run(true, seed, (fake_mode)(seed % 3), 4, seed % 2, (trouble){0});
    CHECK(cuda.status == PTN_OK && cuda.equal);
  }
  for (uint64_t seed = 0; seed < 12; seed++) { /* memory that is not locked: slower, not other */
    outcome pageable = run(true, seed, (fake_mode)(seed % 3), 2, false, (trouble){.lockable_bytes = 1});
    CHECK(pageable.status == PTN_OK && pageable.equal);
  }
}

/* ---- each call fails ---- */

static void each_call_fails_once(void) {
  static const char *const entries[] = {"cuMemAlloc_v2",      "cuStreamCreate",       "cuEventCreate",     "cuEventRecord",
                                        "cuMemcpyAsync",      "cuMemHostRegister_v2", "cuStreamWaitEvent", "cuEventSynchronize",
                                        "cuEventElapsedTime", "cuCtxPushCurrent_v2"};
  uint64_t failed_count = 0;
  for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
    uint64_t stride = strcmp(entries[i], "cuCtxPushCurrent_v2") == 0 ? 7 : 1; /* it is in every call */
    for (uint64_t n = 1;; n += stride) {
      outcome failed = run(true, n, (fake_mode)(n % 3), 1, false, (trouble){.entry = entries[i], .nth = n});
      if (failed.status == PTN_OK) {
        CHECK(failed.equal && n > 1);
        break;
      }
      CHECK(failed.status == PTN_DEVICE && failed.error.code == PTN_DEVICE);
      CHECK(strncmp(failed.error.message, entries[i], strlen(entries[i])) == 0);
      failed_count++;
    }
  }
  CHECK(failed_count > 250);
}

static void each_copy_breaks_the_gpu(void) {
  uint64_t n = 1;
  for (;; n++) {
    outcome broke = run(true, n, (fake_mode)(n % 3), 1, n % 2, (trouble){.break_at = n});
    if (broke.status == PTN_OK) break;
    CHECK(broke.status == PTN_DEVICE && strstr(broke.error.message, "CUDA_ERROR_LAUNCH_FAILED"));
  }
  CHECK(n > 20);
}

/* ---- each wait is missing ---- */

/* Where the missing of the nth call counts, the bytes are wrong; where it does not, they are right. A done that comes too early
 * does harm where it is for a chunk or a gradient, which is all that the CPU touches in this loop. */
static void each_is_missing(const char *entry, uint64_t least_count) {
  uint64_t counted = 0;
  for (fake_mode mode = FAKE_EARLY; mode <= FAKE_LATE; mode++) {
    CHECK(run(true, 5, mode, 1, true, (trouble){0}).equal);
    uint64_t calls_count = fake_calls(entry);
    for (uint64_t n = 1; n <= calls_count; n++) {
      outcome missed = run(true, 5, mode, 1, true, (trouble){.entry = entry, .nth = n, .ignored = true});
      CHECK(missed.status == PTN_OK);
      bool harmless = missed.early && missed.early_job != JOB_CHUNK && missed.early_job != JOB_GRADIENT;
      bool wrong = missed.counts && !harmless;
      if (missed.equal == wrong) fprintf(stderr, "%s number %llu, mode %d\n", entry, (unsigned long long)n, (int)mode);
      CHECK(missed.equal == !wrong);
      counted += wrong;
    }
  }
  CHECK(counted >= least_count);
}

/* ---- a lane by itself ---- */

typedef struct counter {
  ptn_transfer transfer; /* first member */
  ptn_transfers *lane;
  uint32_t number, *next, again;
  ptn_mutex *mutex;
  ptn_condition *changed;
} counter;

static void count(ptn_transfer *transfer) {
  counter *counter = (struct counter *)transfer;
  ptn_lock(counter->mutex);
  CHECK(transfer->status == PTN_OK && (counter->again > 0 || *counter->next == counter->number));
  bool again = counter->again > 0 && --counter->again > 0;
  if (!again) ++*counter->next;
  ptn_broadcast(counter->changed);
  ptn_unlock(counter->mutex);
  if (again) CHECK_OK(ptn_transfers_submit(counter->lane, transfer)); /* the lane has let go of it */
}

static void await(counter *counter, uint32_t number) {
  ptn_lock(counter->mutex);
  while (*counter->next < number) CHECK(ptn_wait_ns(counter->changed, counter->mutex, HUNG_NS));
  ptn_unlock(counter->mutex);
}

/* done comes in the order of submit, moved or not, and may submit; how long a move took is known. */
static void in_order_and_again(bool cuda, uint64_t seed) {
  subject subject;
  ptn_transfers *lane;
  ptn_pinned pinned;
  ptn_mutex mutex;
  ptn_condition changed;
  counter counters[20];
  uint32_t next = 0;
  CHECK_OK(subject_open(&subject, cuda, seed, FAKE_ANY));
  CHECK_OK(ptn_transfers_create(&lane, subject.device, "lane"));
  CHECK_OK(subject.kind->pin(subject.device, 40 * 4096, &pinned));
  ptn_mutex_create(&mutex);
  ptn_condition_create(&changed);
  char *memory = pinned.memory;
  for (uint32_t i = 0; i < 20; i++) {
    counters[i] = (counter){.lane = lane, .number = i, .next = &next, .mutex = &mutex, .changed = &changed};
    counters[i].transfer =
        (ptn_transfer){.to = memory + i * 4096, .from = memory + (20 + i) * 4096, .bytes = i % 3 ? 4096 : 0, .done = count};
    memset(memory + (20 + i) * 4096, (int)i, 4096);
    CHECK_OK(ptn_transfers_submit(lane, &counters[i].transfer));
  }
  await(counters, 20);
  for (uint32_t i = 0; i < 20; i++) CHECK(memory[i * 4096 + 77] == (i % 3 ? (char)i : 0));
  counters[0].again = 10;
  CHECK_OK(ptn_transfers_submit(lane, &counters[0].transfer));
  await(counters, 21);
  int64_t taken_ns = 0;
  for (uint32_t i = 0; i < 20; i++) {
    const ptn_transfer *ended = &counters[i].transfer;
    CHECK(ended->status == PTN_OK && ended->end_ns >= ended->start_ns);
    taken_ns += ended->bytes > 0 ? ended->end_ns - ended->start_ns : 0;
  }
  CHECK(taken_ns > 0);
  ptn_transfers_destroy(lane);
  ptn_transfers_destroy(NULL);
  subject.kind->unpin(subject.device, &pinned);
  ptn_condition_destroy(&changed);
  ptn_mutex_destroy(&mutex);
  subject_close(&subject);
}

static void ignore_done(ptn_transfer *transfer) { (void)transfer; }

static void a_forked_child_is_refused(void) {
  subject subject;
  ptn_transfers *lane;
  CHECK_OK(subject_open(&subject, false, 0, FAKE_ANY));
  CHECK_OK(ptn_transfers_create(&lane, subject.device, "lane"));
  pid_t child = fork();
  if (child == 0) {
    ptn_transfer transfer = {.done = ignore_done};
    bool right = ptn_transfers_submit(lane, &transfer) == PTN_INVALID && transfer.status == PTN_INVALID;
    ptn_transfers_destroy(lane); /* its thread is not here: it would be waited for in vain */
    _exit(right ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  ptn_transfers_destroy(lane);
  subject_close(&subject);
}

int main(void) {
  equal_to_the_plain_loop();
  each_call_fails_once();
  each_copy_breaks_the_gpu();
  each_is_missing("cuStreamWaitEvent", 60);
  each_is_missing("cuEventRecord", 60);
  for (uint64_t seed = 0; seed < 10; seed++) in_order_and_again(seed % 2, seed);
  a_forked_child_is_refused();
  fake_reset(0, FAKE_ANY);
  return 0;
}
