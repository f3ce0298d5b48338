/* Measures what a byte that the stash writes and reads again costs in processor time: docs/decisions/0006-activations-on-disk.md
 *
 *   bench_stash FOLDER [threads|io_uring] [PIECE_KIB] [DEPTH] [PASSES] [RECORD_KIB]
 *
 * A pass is a forward and a backward: records as a transformer's block makes them (4 to 16 MiB; or all of RECORD_KIB) are filled,
 * put and let go, then asked for in reverse. Between two records the thread that does this computes as long as a training step
 * does for so many bytes, in registers, and another one computes all the time: so the disk's threads are woken as in training, on
 * cores that are busy. Everything is per GB moved, where what is written and what is read both count: processor time of each
 * thread, as the scheduler counts it, and user and system as its ticks do; its switches; and the interrupts of disks, which may
 * be other programs' too. The thread that computes is counted inside calls of the stash only. Interrupts take their time from
 * whoever runs. PIECE_KIB, DEPTH, RECORD_KIB 0: as usual. Not a test: it asserts nothing. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/runtime/stash*.c */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/threads.h"
#include "check.h"
#include "disk/engine.h"
#include "memory/arena.h"
#include "runtime/stash.h"

#define RECORDS 72
#define BYTES_PER_S 0.6e9 /* of stashed tensors, while a forward or backward computes */
#define OTHER_BYTES (19 * PTN_PAGE_BYTES)
#define THREADS 64

static int64_t thread_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- threads and interrupts, as the kernel counts them ---- */

typedef struct counted {
  char name[32];
  int id;
  double user_ms, system_ms, run_ms; /* user and system by the timer's tick, run exactly */
  double waits, preemptions;
} counted;

typedef struct moment {
  counted threads[THREADS];
  int threads_count;
  double interrupts; /* of virtual or NVMe disks */
} moment;

static double number_after(const char *text, const char *key) {
  const char *at = strstr(text, key);
  return at ? strtod(at + strlen(key), NULL) : 0;
}

static bool read_text(const char *path, char *text, size_t bytes) {
  FILE *file = fopen(path, "re");
  if (!file) return false;
  text[fread(text, 1, bytes - 1, file)] = '\0';
  fclose(file);
  return true;
}

static bool look_at_thread(const char *id, counted *out) {
  char path[128], text[4096];
  double tick_ms = 1e3 / (double)sysconf(_SC_CLK_TCK);
  unsigned long user, system;
  *out = (counted){.id = atoi(id)};
  snprintf(path, sizeof path, "/proc/self/task/%s/stat", id);
  if (!read_text(path, text, sizeof text)) return false;
  const char *name = strchr(text, '('), *end = strrchr(text, ')');
  if (!name || !end || sscanf(end + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system) != 2) return false;
  snprintf(out->name, sizeof out->name, "%.*s", (int)(end - name - 1), name + 1);
  out->user_ms = tick_ms * (double)user;
  out->system_ms = tick_ms * (double)system;
  snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", id);
  if (read_text(path, text, sizeof text)) out->run_ms = 1e-6 * strtod(text, NULL);
  snprintf(path, sizeof path, "/proc/self/task/%s/status", id);
  if (!read_text(path, text, sizeof text)) return false;
  out->waits = number_after(text, "\nvoluntary_ctxt_switches:");
  out->preemptions = number_after(text, "nonvoluntary_ctxt_switches:");
  return true;
}

static double disk_interrupts(void) {
  double sum = 0;
  char line[4096];
  FILE *file = fopen("/proc/interrupts", "re");
  while (file && fgets(line, sizeof line, file)) {
    if (!strstr(line, "-req") && !strstr(line, "nvme")) continue;
    char *at = strchr(line, ':');
    for (char *next; at; at = next == at ? NULL : next) sum += strtod(at += *at == ':', &next);
  }
  if (file) fclose(file);
  return sum;
}

static void look(moment *out) {
  *out = (moment){.interrupts = disk_interrupts()};
  DIR *listing = opendir("/proc/self/task");
  for (struct dirent *entry; listing && (entry = readdir(listing)) && out->threads_count < THREADS;)
    if (entry->d_name[0] != '.' && look_at_thread(entry->d_name, &out->threads[out->threads_count])) out->threads_count++;
  if (listing) closedir(listing);
}

static void print_thread(const char *name, counted sum, double gb) {
  printf("  %-14s %6.1f ms: user %5.1f  system %5.1f   waits %5.0f  preempted %5.0f\n", name, sum.run_ms / gb, sum.user_ms / gb,
         sum.system_ms / gb, sum.waits / gb, sum.preemptions / gb);
}

/* The store's threads; those that compute are counted otherwise. */
static void print_difference(const moment *before, const moment *after, double gb) {
  counted all = {0};
  for (int i = 0; i < after->threads_count; i++) {
    counted now = after->threads[i];
    if (strncmp(now.name, "ptn-", 4) != 0) continue;
    for (int j = 0; j < before->threads_count; j++) {
      const counted *then = &before->threads[j];
      if (then->id != now.id) continue;
      now.user_ms -= then->user_ms;
      now.system_ms -= then->system_ms;
      now.run_ms -= then->run_ms;
      now.waits -= then->waits;
      now.preemptions -= then->preemptions;
    }
    print_thread(now.name, now, gb);
    all.user_ms += now.user_ms;
    all.system_ms += now.system_ms;
    all.run_ms += now.run_ms;
    all.waits += now.waits;
    all.preemptions += now.preemptions;
  }
  print_thread("the store's", all, gb);
  printf("  disk interrupts of the machine: %.0f\n", (after->interrupts - before->interrupts) / gb);
}

/* ---- compute ---- */

static _Atomic bool stop;

static void compute_a_little(void) {
  double x = 1;
  for (int i = 0; i < 20000; i++) {
    x = x * 0.999999 + 0.000001;
    __asm__ volatile("" : "+m"(x));
  }
}

static void *compute_always(void *unused) {
  while (!atomic_load(&stop)) compute_a_little();
  return unused;
}

static void compute(double seconds) {
  for (int64_t end_ns = ptn_now_ns() + (int64_t)(seconds * 1e9); ptn_now_ns() < end_ns;) compute_a_little();
}

/* ---- a pass ---- */

static int64_t inside_ns; /* of the stash, on the computing thread */
static ptn_status press(void *context, uint64_t missing_bytes, bool must, bool *freed) {
  (void)missing_bytes;
  *freed = ptn_stash_relieve(*(ptn_stash **)context, must);
  return PTN_OK;
}

static uint64_t record_bytes(int number, uint64_t given_bytes) {
  static const uint64_t mib[] = {4, 12, 4, 4, 4, 4, 16, 16, 16}; /* a block: 8 of them are in RECORDS */
  return given_bytes ? given_bytes : mib[number % 9] * PTN_MIB;
}

static ptn_record *put(ptn_stash *stash, ptn_account *account, uint64_t bytes, int number) {
  void *memory;
  ptn_block block;
  ptn_record *record;
  bool fresh;
  CHECK_OK(ptn_arena_alloc(account, bytes, &memory));
  memset(memory, number, bytes);
  int64_t begin_ns = thread_ns();
  CHECK(ptn_arena_find(memory, &block));
  CHECK_OK(ptn_stash_put(stash, &block, NULL, 0, number, &record, &fresh));
  inside_ns += thread_ns() - begin_ns;
  ptn_arena_free(memory);
  return record;
}

static void take(ptn_record *record, int number) {
  void *memory;
  int64_t begin_ns = thread_ns();
  CHECK_OK(ptn_stash_get(record, true, &memory));
  inside_ns += thread_ns() - begin_ns;
  CHECK(((unsigned char *)memory)[ptn_record_bytes(record) - 1] == (unsigned char)number);
  begin_ns = thread_ns();
  ptn_record_drop(record, true);
  ptn_arena_free(memory);
  inside_ns += thread_ns() - begin_ns;
}

/* Other tensors lie between records, as in training: so records begin at any page. They are made once. */
static void *others[RECORDS];

static void run_pass(ptn_stash *stash, ptn_account *account, uint64_t given_bytes) {
  ptn_record *records[RECORDS];
  ptn_stash_begin(stash);
  for (int i = 0; i < RECORDS; i++) {
    if (!others[i]) CHECK_OK(ptn_arena_alloc(account, OTHER_BYTES, &others[i]));
    records[i] = put(stash, account, record_bytes(i, given_bytes), i);
    compute((double)record_bytes(i, given_bytes) / BYTES_PER_S);
  }
  ptn_stash_end(stash);
  for (int i = RECORDS; i-- > 0;) {
    compute((double)record_bytes(i, given_bytes) / BYTES_PER_S);
    take(records[i], i);
  }
}

static double moved_gb(ptn_store *store) {
  ptn_store_stats stats;
  ptn_store_get_stats(store, &stats);
  return 1e-9 * (double)(stats.read_bytes + stats.write_bytes);
}

static void measure(ptn_store *store, ptn_stash *stash, ptn_account *account, int passes, uint64_t given_bytes) {
  moment before, after;
  ptn_stash_stats stats_before, stats;
  ptn_store_stats store_before, store_after;
  ptn_arena_stats arena_before, arena;
  run_pass(stash, account, given_bytes); /* memory and space on the disk are there after it */
  ptn_stash_get_stats(stash, &stats_before);
  ptn_store_get_stats(store, &store_before);
  ptn_arena_get_stats(&arena_before);
  double gb = -moved_gb(store);
  inside_ns = 0;
  look(&before);
  for (int i = 0; i < passes; i++) run_pass(stash, account, given_bytes);
  look(&after);
  ptn_stash_get_stats(stash, &stats);
  ptn_store_get_stats(store, &store_after);
  ptn_arena_get_stats(&arena);
  gb += moved_gb(store);
  printf("%s, %.2f GB moved, waited %.1f ms; per GB:\n", ptn_store_engine_name(store), gb,
         1e-6 * (double)(stats.wait_ns - stats_before.wait_ns));
  print_difference(&before, &after, gb);
  printf("  of which checksums: %.1f ms (%s)\n", 1e-6 * (double)(store_after.checksum_ns - store_before.checksum_ns) / gb,
         ptn_checksum_name());
  printf("  inside calls of the stash, on the computing thread: %.2f ms\n", 1e-6 * (double)inside_ns / gb);
  printf("  pages that were not resident: %.0f MiB\n", 0x1p-20 * (double)(arena.mapped_bytes - arena_before.mapped_bytes) / gb);
}

int main(int argc, char **argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: bench_stash FOLDER [threads|io_uring] [PIECE_KIB] [DEPTH] [PASSES] [RECORD_KIB]\n");
    return 2;
  }
  ptn_store_options options = {.engine = argc > 2 && strcmp(argv[2], "io_uring") == 0 ? PTN_DISK_URING : PTN_DISK_AUTO,
                               .piece_bytes = argc > 3 ? (uint64_t)atoi(argv[3]) << 10 : 0,
                               .depth = argc > 4 ? (uint32_t)atoi(argv[4]) : 0};
  uint64_t given_bytes = argc > 6 ? (uint64_t)atoi(argv[6]) << 10 : 0;
  ptn_store *store;
  ptn_account *account;
  ptn_stash *stash = NULL;
  pthread_t computing;
  CHECK_OK(ptn_store_create_with(&store, argv[1], &options));
  CHECK_OK(ptn_account_create(&account, 1024 * PTN_MIB, press, &stash));
  ptn_account_set_goal(account, 512 * PTN_MIB);
  CHECK_OK(ptn_stash_create(&stash, store, account, NULL));
  ptn_stash_set_headroom(stash, 64 * PTN_MIB, 0);
  CHECK_OK(ptn_thread_start(&computing, "compute", compute_always, NULL));
  measure(store, stash, account, argc > 5 ? atoi(argv[5]) : 4, given_bytes);
  atomic_store(&stop, true);
  ptn_thread_join(computing);
  for (int i = 0; i < RECORDS; i++) ptn_arena_free(others[i]);
  ptn_stash_close(stash);
  ptn_stash_release(stash);
  ptn_account_destroy(account);
  ptn_store_destroy(store);
  return 0;
}
