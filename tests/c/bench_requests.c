/* What requests to the disk cost those who compute beside them, by how many carry the same bytes: what
 * docs/decisions/0001-disk-engine.md reports.
 *
 *   bench_requests FOLDER THREADS [ROUNDS]
 *
 * THREADS compute in small pieces, each of which ends when all have done their share, as the threads of a matrix product do, and
 * spin meanwhile. Every 4 ms of it 4 MiB go to the disk, or come from it: in one request, in several of a size that are submitted one
 * by one in these 4 ms, or in the same ones submitted together. For each way: by how much computing takes longer than with no
 * request, in turns, for shares that need nothing but the processor and for shares that go through 64 MiB of memory. Each transfer is of
 * another place in memory, of 256 MiB. Checksums are not taken. Not a test: it asserts nothing. */
/* sources: csrc/disk/?*.c */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "base/bytes.h"
#include "base/threads.h"
#include "bench_left.h"
#include "check.h"
#include "disk/engine.h"

enum { MOST_THREADS = 64, TRANSFERS = 64, STEPS = 16, MOST_PARTS = 16 };
#define TRANSFER_BYTES (4 * PTN_MIB)
#define MEMORY_BYTES (TRANSFERS * TRANSFER_BYTES)
#define WALKED_COUNT (16 * (size_t)PTN_MIB) /* floats */
#define STEP_NS 250000

typedef struct way {
  const char *name;
  int parts_count; /* 0: no request */
  bool together;
} way;

static const way ways[] = {{"none", 0, false},
                           {"1 x 4 MiB", 1, true},
                           {"4 x 1 MiB, one by one", 4, false},
                           {"4 x 1 MiB, together", 4, true},
                           {"16 x 256 KiB, one by one", 16, false},
                           {"16 x 256 KiB, together", 16, true}};
enum { WAYS = sizeof ways / sizeof *ways };

/* ---- the team ---- */

static int threads_count;
static _Atomic uint64_t round_number; /* of the share that is to be done; 0: none yet */
static _Atomic int undone_count;
static _Atomic bool over;
static bool walks; /* shares go through memory */
static size_t share_count, walked; /* passes of the loop; where the next share begins */
static float *numbers;
static _Atomic float result;

static void compute(int me) {
  float sums[16] = {0};
  if (walks) {
    const float *at = numbers + walked + (size_t)me * share_count;
    for (size_t i = 0; i + 16 <= share_count; i += 16)
      for (size_t j = 0; j < 16; j++) sums[j] = sums[j] * 0.999f + at[i + j];
  } else {
    for (size_t i = 0; i + 16 <= share_count; i += 16)
      for (size_t j = 0; j < 16; j++) sums[j] = sums[j] * 0.999f + 0.5f;
  }
  for (size_t j = 1; j < 16; j++) sums[0] += sums[j];
  atomic_store(&result, sums[0]);
}

static void *follow(void *argument) {
  int me = (int)(uintptr_t)argument;
  for (uint64_t done = 0; !atomic_load(&over);) {
    if (atomic_load(&round_number) == done) continue;
    done++;
    compute(me);
    atomic_fetch_sub(&undone_count, 1);
  }
  return NULL;
}

static void one_share(void) {
  walked = walked + 2 * (size_t)threads_count * share_count <= WALKED_COUNT ? walked + (size_t)threads_count * share_count : 0;
  atomic_store(&undone_count, threads_count - 1);
  atomic_fetch_add(&round_number, 1);
  compute(0);
  while (atomic_load(&undone_count) > 0) {
  }
}

/* As much as takes STEP_NS. */
static void fit_share(void) {
  share_count = 1 << 14;
  for (int i = 0; i < 100; i++) one_share();
  int64_t begin_ns = ptn_now_ns();
  for (int i = 0; i < 200; i++) one_share();
  int64_t took_ns = (ptn_now_ns() - begin_ns) / 200;
  share_count = ptn_min_u64(share_count * STEP_NS / (size_t)took_ns, WALKED_COUNT / 2 / (size_t)threads_count) / 16 * 16;
}

/* ---- the disk ---- */

static ptn_store *store;
static ptn_extent extent;
static char *memory;
static ptn_io requests[TRANSFERS][MOST_PARTS];
static ptn_io *prepare(int transfer, int part, int parts_count, bool write) {
  uint64_t bytes = TRANSFER_BYTES / (uint64_t)parts_count;
  uint64_t at = (uint64_t)transfer * TRANSFER_BYTES + (uint64_t)part * bytes;
  ptn_io *io = &requests[transfer][part];
  *io = (ptn_io){.memory = memory + at,
                 .offset = extent.offset + at,
                 .bytes = bytes,
                 .write = write,
                 .caller_sums = true, /* which nobody takes */
                 .done = done};
  return io;
}

/* Seconds of TRANSFERS times 4 ms of computing. */
static double run(const way *way, bool write) {
  left_count = (size_t)(TRANSFERS * way->parts_count);
  int64_t begin_ns = ptn_now_ns();
  for (int transfer = 0; transfer < TRANSFERS; transfer++) {
    int between = way->parts_count ? STEPS / way->parts_count : 0;
    for (int step = 1; step <= STEPS; step++) {
      one_share();
      if (way->parts_count && !way->together && step % between == 0)
        ptn_store_submit(store, prepare(transfer, step / between - 1, way->parts_count, write));
    }
    ptn_io *ios[MOST_PARTS];
    for (int i = 0; way->together && i < way->parts_count; i++) ios[i] = prepare(transfer, i, way->parts_count, write);
    if (way->together) ptn_store_submit_all(store, ios, (size_t)way->parts_count);
  }
  double seconds = (double)(ptn_now_ns() - begin_ns) * 1e-9;
  ptn_lock(&mutex);
  while (left_count > 0) ptn_wait(&condition, &mutex);
  ptn_unlock(&mutex);
  return seconds;
}

int main(int count, char **words) {
  threads_count = count > 2 ? atoi(words[2]) : 0;
  int rounds = count > 3 ? atoi(words[3]) : 10;
  if (threads_count < 1 || threads_count > MOST_THREADS || rounds < 1) {
    fprintf(stderr, "bench_requests FOLDER THREADS [ROUNDS]\n");
    return 2;
  }
  ptn_mutex_create(&mutex);
  ptn_condition_create(&condition);
  memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  numbers = mmap(NULL, WALKED_COUNT * sizeof *numbers, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED && (void *)numbers != MAP_FAILED);
  madvise(memory, MEMORY_BYTES, MADV_HUGEPAGE);
  memset(memory, 1, MEMORY_BYTES);
  for (size_t i = 0; i < WALKED_COUNT; i++) numbers[i] = 1;
  CHECK_OK(ptn_store_create(&store, words[1], PTN_DISK_AUTO));
  CHECK_OK(ptn_store_reserve(store, MEMORY_BYTES, &extent));
  CHECK_OK(ptn_store_transfer(store, memory, extent.offset, MEMORY_BYTES, true));
  pthread_t threads[MOST_THREADS];
  for (int i = 1; i < threads_count; i++) CHECK_OK(ptn_thread_start(&threads[i], "team", follow, (void *)(uintptr_t)i));
  for (int kind = 0; kind < 4; kind++) {
    double sums[WAYS] = {0};
    bool write = kind % 2;
    walks = kind / 2;
    fit_share();
    for (int i = 0; i < WAYS; i++) run(&ways[i], write); /* does not count */
    for (int round = 0; round < rounds; round++)
      for (int i = 0; i < WAYS; i++) sums[(i + round) % WAYS] += run(&ways[(i + round) % WAYS], write);
    printf("%s beside computing %s\n", write ? "writes" : "reads", walks ? "that walks through memory" : "in registers");
    for (int i = 1; i < WAYS; i++)
      printf("  %-26s %.3f of the time, %.0f us for 4 MiB\n", ways[i].name, sums[i] / sums[0],
             (sums[i] - sums[0]) / rounds / TRANSFERS * 1e6);
  }
  atomic_store(&over, true);
  for (int i = 1; i < threads_count; i++) ptn_thread_join(threads[i]);
  ptn_store_destroy(store);
  return 0;
}
