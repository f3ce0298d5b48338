/* See threads.h. The team keeps its helpers asleep on a condition between calls: training leaves long gaps between updates,
 * and a spinning helper would take a core from the GEMMs. */
#define _GNU_SOURCE
#include "base/threads.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/bytes.h"

#define LOOKS 16 /* at a lock that another has, before sleeping: each takes tens of nanoseconds */
#define PROMPT_SLICE_NS 100000 /* the shortest that the kernel grants */
#define MOST_PROCESSORS ((size_t)1 << 20)

static void must(int result) {
  if (result != 0) abort();
}

/* ---- locks ---- */

static void pause_briefly(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

/* Until woken, or word is no longer expected, or the time has come (NULL: none); false where that came. */
static bool sleep_while(_Atomic uint32_t *word, uint32_t expected, const struct timespec *until) {
  int before = errno;
  long result = syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, expected, until, NULL, FUTEX_BITSET_MATCH_ANY);
  int failed = result == 0 ? 0 : errno;
  if (failed != 0 && failed != EAGAIN && failed != EINTR && failed != ETIMEDOUT) abort();
  errno = before;
  return failed != ETIMEDOUT;
}

/* The word may be gone by now: whoever was woken may have ended what it is in. */
static void wake(_Atomic uint32_t *word, int count) {
  int before = errno;
  (void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count);
  errno = before;
}

void ptn_mutex_create(ptn_mutex *mutex) {
  atomic_init(&mutex->state, PTN_MUTEX_FREE);
  PTN_TELL_LOCK(__tsan_mutex_create(mutex, __tsan_mutex_not_static));
}

void ptn_mutex_destroy(ptn_mutex *mutex) {
  if (atomic_load_explicit(&mutex->state, memory_order_relaxed) != PTN_MUTEX_FREE) abort();
  PTN_TELL_LOCK(__tsan_mutex_destroy(mutex, 0));
}

void ptn_mutex_await(ptn_mutex *mutex) {
  for (int i = 0; i < LOOKS; i++) {
    pause_briefly();
    uint32_t state = atomic_load_explicit(&mutex->state, memory_order_relaxed);
    if (state == PTN_MUTEX_AWAITED) break; /* others wait longer */
    if (state == PTN_MUTEX_FREE && ptn_mutex_take(mutex)) return;
  }
  while (atomic_exchange_explicit(&mutex->state, PTN_MUTEX_AWAITED, memory_order_acquire) != PTN_MUTEX_FREE)
    sleep_while(&mutex->state, PTN_MUTEX_AWAITED, NULL);
}

void ptn_mutex_wake(ptn_mutex *mutex, uint32_t state) {
  if (state != PTN_MUTEX_AWAITED) abort(); /* nobody had it */
  wake(&mutex->state, 1);
}

void ptn_condition_create(ptn_condition *condition) {
  atomic_init(&condition->sequence, 0);
  atomic_init(&condition->waiting_count, 0);
}

void ptn_condition_destroy(ptn_condition *condition) {
  if (atomic_load_explicit(&condition->waiting_count, memory_order_relaxed) > 0) abort();
}

/* Whoever changes something under the mutex after this saw that it has to wait sees it counted, and moves the sequence. */
static bool wait_until(ptn_condition *condition, ptn_mutex *mutex, const struct timespec *until) {
  atomic_fetch_add_explicit(&condition->waiting_count, 1, memory_order_relaxed);
  uint32_t sequence = atomic_load_explicit(&condition->sequence, memory_order_relaxed);
  ptn_unlock(mutex);
  bool woken = sleep_while(&condition->sequence, sequence, until);
  ptn_lock(mutex);
  atomic_fetch_sub_explicit(&condition->waiting_count, 1, memory_order_relaxed);
  return woken;
}

void ptn_wait(ptn_condition *condition, ptn_mutex *mutex) { wait_until(condition, mutex, NULL); }

bool ptn_wait_ns(ptn_condition *condition, ptn_mutex *mutex, int64_t ns) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  int64_t total = ptn_min_i64(ptn_max_i64(ns, 0), INT64_MAX - until.tv_nsec) + until.tv_nsec;
  until.tv_sec += (time_t)(total / 1000000000);
  until.tv_nsec = (long)(total % 1000000000);
  return wait_until(condition, mutex, &until);
}

static void move_on(ptn_condition *condition, int count) {
  if (atomic_load_explicit(&condition->waiting_count, memory_order_relaxed) == 0) return;
  atomic_fetch_add_explicit(&condition->sequence, 1, memory_order_relaxed);
  wake(&condition->sequence, count);
}

void ptn_signal(ptn_condition *condition) { move_on(condition, 1); }
void ptn_broadcast(ptn_condition *condition) { move_on(condition, INT_MAX); }

/* ---- threads and time ---- */

ptn_status ptn_thread_start(pthread_t *thread, const char *name, void *(*body)(void *), void *argument) {
  static const int own_faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}; /* whose handlers tell where it was */
  sigset_t all, before;
  sigfillset(&all);
  for (size_t i = 0; i < sizeof own_faults / sizeof *own_faults; i++) sigdelset(&all, own_faults[i]);
  must(pthread_sigmask(SIG_SETMASK, &all, &before));
  int result = pthread_create(thread, NULL, body, argument);
  must(pthread_sigmask(SIG_SETMASK, &before, NULL));
  if (result != 0) {
    ptn_fail(PTN_MEMORY,
             "cannot start the thread %s: %s; raise the limit that stands in the way (ulimit -u, ulimit -v, pids.max of the "
             "control group), or end other programs",
             name, strerror(result));
    ptn_last_error()->sys_errno = result;
    return PTN_MEMORY;
  }
  pthread_setname_np(*thread, name); /* a name too long is only missing */
  return PTN_OK;
}

void ptn_thread_join(pthread_t thread) { must(pthread_join(thread, NULL)); }

/* As sched_setattr(2) has it in its first version; what newer C libraries call sched_attr. */
typedef struct schedule {
  uint32_t size, policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t slice_ns, deadline_ns, period_ns; /* of an ordinary thread the slice alone, a wish */
} schedule;

/* A thread that computes keeps its core to the end of its slice, 2 to 3 ms, against any that wakes, but for those whose slice is
 * shorter. */
void ptn_thread_be_prompt(void) {
  schedule mine = {.size = sizeof mine};
  if (syscall(SYS_sched_getattr, 0, &mine, sizeof mine, 0) != 0 || mine.policy != SCHED_OTHER) return;
  mine.slice_ns = PROMPT_SLICE_NS;
  (void)syscall(SYS_sched_setattr, 0, &mine, 0);
}

int64_t ptn_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t ptn_thread_processor_ns(void) {
  struct timespec now;
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) != 0) abort();
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- the team ---- */

struct ptn_team {
  ptn_mutex mutex;
  ptn_condition work, done;
  pthread_t *helpers;
  int n_helpers;
  uint64_t generation; /* number of the current call */
  int busy;            /* helpers that have not finished it */
  bool running, stop;
  ptn_range_body body;
  void *context;
  size_t count, part; /* part: elements per thread */
  int started;        /* helpers number themselves as they start */
};

static void run_part(const ptn_team *team, size_t number) {
  size_t begin = number * team->part;
  if (begin < team->count) team->body(team->context, begin, (size_t)ptn_min_u64(begin + team->part, team->count));
}

static void *help(void *argument) {
  ptn_team *team = argument;
  uint64_t seen = 0;
  ptn_lock(&team->mutex);
  size_t number = (size_t)++team->started;
  for (;;) {
    while (!team->stop && team->generation == seen) ptn_wait(&team->work, &team->mutex);
    if (team->stop) break;
    seen = team->generation;
    ptn_unlock(&team->mutex);
    run_part(team, number);
    ptn_lock(&team->mutex);
    if (--team->busy == 0) ptn_signal(&team->done);
  }
  ptn_unlock(&team->mutex);
  return NULL;
}

/* The kernel refuses a set that has no place for each processor that there could be, of which a cpu_set_t has 1024. */
int ptn_cores_count(void) {
  int cores = 0, failed = EINVAL;
  for (size_t possible = CPU_SETSIZE; failed == EINVAL && possible <= MOST_PROCESSORS; possible *= 2) {
    size_t bytes = CPU_ALLOC_SIZE(possible);
    cpu_set_t *set = CPU_ALLOC(possible);
    failed = !set ? ENOMEM : sched_getaffinity(0, bytes, set) != 0 ? errno : 0;
    if (failed == 0) cores = CPU_COUNT_S(bytes, set);
    CPU_FREE(set);
  }
  return cores > 0 ? cores : 1;
}

ptn_status ptn_team_create(ptn_team **out, int threads) {
  *out = NULL;
  if (threads <= 0) threads = ptn_cores_count();
  ptn_team *team = calloc(1, sizeof *team);
  if (!team) return ptn_fail(PTN_MEMORY, "no memory for a team of threads");
  ptn_mutex_create(&team->mutex);
  ptn_condition_create(&team->work);
  ptn_condition_create(&team->done);
  team->helpers = calloc((size_t)threads, sizeof *team->helpers);
  ptn_status status = team->helpers ? PTN_OK : ptn_fail(PTN_MEMORY, "no memory for a team of threads");
  for (int i = 1; status == PTN_OK && i < threads; i++) {
    status = ptn_thread_start(&team->helpers[team->n_helpers], "ptn-team", help, team);
    if (status == PTN_OK) team->n_helpers++;
  }
  if (status != PTN_OK) {
    ptn_team_destroy(team);
    return status;
  }
  *out = team;
  return PTN_OK;
}

void ptn_team_destroy(ptn_team *team) {
  if (!team) return;
  ptn_lock(&team->mutex);
  team->stop = true;
  ptn_broadcast(&team->work);
  ptn_unlock(&team->mutex);
  for (int i = 0; i < team->n_helpers; i++) ptn_thread_join(team->helpers[i]);
  free(team->helpers);
  ptn_condition_destroy(&team->done);
  ptn_condition_destroy(&team->work);
  ptn_mutex_destroy(&team->mutex);
  free(team);
}

void ptn_team_run(ptn_team *team, size_t count, size_t grain, ptn_range_body body, void *context) {
  if (count == 0) return;
  size_t threads = (size_t)team->n_helpers + 1;
  ptn_lock(&team->mutex);
  bool alone = team->running || threads == 1 || count <= grain;
  if (!alone) {
    team->running = true;
    team->body = body;
    team->context = context;
    team->count = count;
    team->part = (size_t)ptn_round_up((count + threads - 1) / threads, grain);
    team->busy = team->n_helpers;
    team->generation++;
    ptn_broadcast(&team->work);
  }
  ptn_unlock(&team->mutex);
  if (alone) {
    body(context, 0, count);
    return;
  }
  run_part(team, 0);
  ptn_lock(&team->mutex);
  while (team->busy > 0) ptn_wait(&team->done, &team->mutex);
  team->running = false;
  ptn_unlock(&team->mutex);
}
