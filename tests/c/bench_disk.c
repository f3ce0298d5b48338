/* Measures the engines of the disk store on one folder: what docs/decisions/0001-disk-engine.md reports.
 *
 *   bench_disk FOLDER threads|io_uring DEPTH PIECE_KIB REQUEST_KIB FILE_MIB [ROUNDS]
 *
 * A file of FILE_MIB is written once, then read, then ROUNDS times half of its requests are read and half are rewritten, mixed,
 * all ordered at once. For each phase: GB/s, CPU time of this process as a share of one core, how much of it went to checksums and
 * what that is for each GiB/s, and the largest number of threads seen in it (counted by a look at /proc/self/task in between). Not a test: it asserts nothing. */
/* sources: csrc/disk/?*.c */
#define _GNU_SOURCE
#include <dirent.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/threads.h"
#include "bench_left.h"
#include "check.h"
#include "disk/engine.h"

static int threads_now(void) {
  DIR *listing = opendir("/proc/self/task");
  int count = -2;
  while (listing && readdir(listing)) count++;
  if (listing) closedir(listing);
  return count;
}

static double cpu_seconds(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

typedef enum phase { WRITE, READ, MIXED } phase;

static void run(ptn_store *store, ptn_io *requests, size_t count, phase phase, const char *name) {
  uint64_t seed = 7, bytes = 0;
  int64_t begin_ns = ptn_now_ns();
  double begin_cpu = cpu_seconds();
  ptn_store_stats before, after;
  ptn_store_get_stats(store, &before);
  left_count = count;
  for (size_t i = 0; i < count; i++) {
    requests[i].write = phase == WRITE || (phase == MIXED && check_random(&seed) % 2);
    bytes += requests[i].bytes;
    ptn_store_submit(store, &requests[i]);
  }
  int most = threads_now();
  ptn_lock(&mutex);
  while (left_count > 0) {
    ptn_wait_ns(&condition, &mutex, 20000000);
    int now = threads_now();
    if (now > most) most = now;
  }
  ptn_unlock(&mutex);
  double seconds = 1e-9 * (double)(ptn_now_ns() - begin_ns);
  ptn_store_get_stats(store, &after);
  double sums_seconds = 1e-9 * (double)(after.checksum_ns - before.checksum_ns);
  printf("  %-12s %5.2f GB/s  cpu %4.0f %%  checksums %4.1f %% (%s), %4.1f %% for each GiB/s  threads %d\n", name,
         1e-9 * (double)bytes / seconds, 100 * (cpu_seconds() - begin_cpu) / seconds, 100 * sums_seconds / seconds,
         ptn_checksum_name(), 100 * sums_seconds * 0x1p30 / (double)bytes, most);
  fflush(stdout);
}

int main(int argc, char **argv) {
  if (argc < 7) {
    fprintf(stderr, "usage: bench_disk FOLDER threads|io_uring DEPTH PIECE_KIB REQUEST_KIB FILE_MIB [ROUNDS]\n");
    return 2;
  }
  ptn_store_options options = {.engine = strcmp(argv[2], "threads") == 0 ? PTN_DISK_THREADS : PTN_DISK_URING,
                               .depth = (uint32_t)atoi(argv[3]),
                               .piece_bytes = (uint64_t)atoi(argv[4]) << 10,
                               .parts_count = 1};
  uint64_t request_bytes = (uint64_t)atoi(argv[5]) << 10;
  size_t count = (size_t)(((uint64_t)atoi(argv[6]) << 20) / request_bytes);
  int rounds = argc > 7 ? atoi(argv[7]) : 1;
  ptn_mutex_create(&mutex);
  ptn_condition_create(&condition);
  ptn_store *store;
  CHECK_OK(ptn_store_create_with(&store, argv[1], &options));
  ptn_extent extent;
  CHECK_OK(ptn_store_reserve(store, count * request_bytes, &extent));
  size_t window = (size_t)(64 * PTN_MIB / request_bytes); /* memory is shared by the requests in turn: its bytes mean nothing */
  if (window == 0) window = 1;
  char *memory = aligned_alloc(PTN_HUGE_BYTES, (size_t)ptn_round_up(window * request_bytes, PTN_HUGE_BYTES));
  ptn_io *requests = calloc(count, sizeof *requests);
  CHECK(memory && requests);
  memset(memory, 0x5A, window * request_bytes);
  for (size_t i = 0; i < count; i++)
    requests[i] = (ptn_io){
        .memory = memory + i % window * request_bytes, .offset = i * request_bytes, .bytes = request_bytes, .done = done};
  printf("%s depth %s piece %s KiB request %s KiB\n", argv[2], argv[3], argv[4], argv[5]);
  run(store, requests, count, WRITE, "first write");
  run(store, requests, count, READ, "read");
  for (int i = 0; i < rounds; i++) run(store, requests, count, MIXED, "mixed");
  ptn_store_destroy(store);
  free(requests);
  free(memory);
  return 0;
}
