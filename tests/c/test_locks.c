/* Locks: one thread at a time has one, whoever sleeps for it is woken, nobody sleeps through what was told, and errno stays. */
/* threads */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/threads.h"

#include "check.h"

enum { THREADS = 6, TURNS = 20000, ITEMS = 5000 };

static ptn_mutex statically_free;

typedef struct counted {
  ptn_mutex mutex;
  uint64_t first, second; /* always the same where nobody has the mutex */
  _Atomic uint64_t tries_count;
  uint64_t long_turns; /* some keep it for so long that others sleep */
} counted;

static void stay(int64_t ns) { nanosleep(&(struct timespec){.tv_nsec = ns}, NULL); }

static void *count_on(void *argument) {
  counted *at = argument;
  for (int i = 0; i < TURNS; i++) {
    errno = ERANGE;
    if (i % 3 == 0) {
      if (!ptn_try_lock(&at->mutex)) continue;
      atomic_fetch_add(&at->tries_count, 1);
    } else {
      ptn_lock(&at->mutex);
    }
    CHECK(errno == ERANGE && at->first == at->second);
    at->first++;
    if (i % 512 == 1) {
      at->long_turns++;
      stay(20000);
      errno = ERANGE;
    }
    at->second++;
    ptn_unlock(&at->mutex);
    CHECK(errno == ERANGE);
  }
  return NULL;
}

static void one_has_it_at_a_time(void) {
  counted at = {0};
  pthread_t threads[THREADS];
  ptn_mutex_create(&at.mutex);
  for (int i = 0; i < THREADS; i++) CHECK_OK(ptn_thread_start(&threads[i], "test", count_on, &at));
  for (int i = 0; i < THREADS; i++) ptn_thread_join(threads[i]);
  uint64_t by_lock = 0;
  for (int i = 0; i < TURNS; i++) by_lock += i % 3 != 0;
  CHECK(at.first == THREADS * by_lock + at.tries_count && at.first == at.second && at.long_turns > 0);
  ptn_mutex_destroy(&at.mutex);
}

/* A queue of one place: each end tells the other alone. */
typedef struct handed {
  ptn_mutex mutex;
  ptn_condition filled, emptied;
  int item; /* 0: none */
  uint64_t sum;
  int left; /* items that nobody has taken */
} handed;

static void *give_items(void *argument) {
  handed *to = argument;
  for (int i = 1; i <= ITEMS; i++) {
    ptn_lock(&to->mutex);
    while (to->item) ptn_wait(&to->emptied, &to->mutex);
    to->item = i;
    if (i % 2) ptn_signal(&to->filled);
    ptn_unlock(&to->mutex);
    if (i % 2 == 0) ptn_signal(&to->filled); /* as good */
  }
  return NULL;
}

static void *take_items(void *argument) {
  handed *from = argument;
  ptn_lock(&from->mutex);
  for (;;) {
    while (!from->item && from->left > 0) ptn_wait(&from->filled, &from->mutex);
    if (from->left == 0) break;
    from->sum += (uint64_t)from->item;
    from->item = 0;
    ptn_signal(&from->emptied);
    if (--from->left == 0) ptn_broadcast(&from->filled);
  }
  ptn_unlock(&from->mutex);
  return NULL;
}

static void whoever_waits_is_told(void) {
  handed at = {.left = 2 * ITEMS};
  pthread_t threads[4];
  ptn_mutex_create(&at.mutex);
  ptn_condition_create(&at.filled);
  ptn_condition_create(&at.emptied);
  for (int i = 0; i < 4; i++) CHECK_OK(ptn_thread_start(&threads[i], "test", i % 2 ? give_items : take_items, &at));
  for (int i = 0; i < 4; i++) ptn_thread_join(threads[i]);
  CHECK(at.sum == 2 * (uint64_t)ITEMS * (ITEMS + 1) / 2);
  ptn_condition_destroy(&at.filled);
  ptn_condition_destroy(&at.emptied);
  ptn_mutex_destroy(&at.mutex);
}

typedef struct gate {
  ptn_mutex mutex;
  ptn_condition opened;
  int waiting;
  bool open;
} gate;

static void *pass_through(void *argument) {
  gate *at = argument;
  ptn_lock(&at->mutex);
  at->waiting++;
  while (!at->open) ptn_wait(&at->opened, &at->mutex);
  ptn_unlock(&at->mutex);
  return NULL;
}

static void all_are_told(void) {
  gate at = {0};
  pthread_t threads[THREADS];
  ptn_mutex_create(&at.mutex);
  ptn_condition_create(&at.opened);
  for (int i = 0; i < THREADS; i++) CHECK_OK(ptn_thread_start(&threads[i], "test", pass_through, &at));
  for (bool all = false; !all; stay(100000)) {
    ptn_lock(&at.mutex);
    all = at.waiting == THREADS;
    ptn_unlock(&at.mutex);
  }
  ptn_lock(&at.mutex);
  at.open = true;
  ptn_broadcast(&at.opened);
  ptn_unlock(&at.mutex);
  for (int i = 0; i < THREADS; i++) ptn_thread_join(threads[i]);
  ptn_condition_destroy(&at.opened);
  ptn_mutex_destroy(&at.mutex);
}

static void *open_later(void *argument) {
  gate *at = argument;
  stay(20000000);
  ptn_lock(&at->mutex);
  at->open = true;
  ptn_signal(&at->opened);
  ptn_unlock(&at->mutex);
  return NULL;
}

/* The largest number of nanoseconds there is ends at no moment that a clock could show. */
static void time_never_runs_out(void) {
  static const int64_t long_ns[] = {INT64_MAX, INT64_MAX - 999999999, INT64_MAX / 2};
  for (size_t i = 0; i < sizeof long_ns / sizeof *long_ns; i++) {
    gate at = {0};
    pthread_t thread;
    ptn_mutex_create(&at.mutex);
    ptn_condition_create(&at.opened);
    CHECK_OK(ptn_thread_start(&thread, "test", open_later, &at));
    ptn_lock(&at.mutex);
    while (!at.open) CHECK(ptn_wait_ns(&at.opened, &at.mutex, long_ns[i]));
    ptn_unlock(&at.mutex);
    ptn_thread_join(thread);
    ptn_condition_destroy(&at.opened);
    ptn_mutex_destroy(&at.mutex);
  }
}

static void time_runs_out(void) {
  ptn_condition never;
  ptn_condition_create(&never);
  ptn_lock(&statically_free);
  int64_t begin_ns = ptn_now_ns();
  errno = ERANGE;
  while (ptn_wait_ns(&never, &statically_free, 2000000)) {
  }
  CHECK(errno == ERANGE && ptn_now_ns() - begin_ns >= 2000000);
  while (ptn_wait_ns(&never, &statically_free, -1)) {
  }
  CHECK(!ptn_try_lock(&statically_free)); /* it is mine again */
  ptn_unlock(&statically_free);
  CHECK(ptn_try_lock(&statically_free));
  ptn_unlock(&statically_free);
  ptn_condition_destroy(&never);
}

#ifndef __SANITIZE_THREAD__ /* which tells of these itself */
static void give_back_what_is_free(ptn_mutex *mutex) { ptn_unlock(mutex); }
static void destroy_what_is_taken(ptn_mutex *mutex) {
  ptn_lock(mutex);
  ptn_mutex_destroy(mutex);
}

static void must_abort(void (*wrong)(ptn_mutex *)) {
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    ptn_mutex mutex;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0});
    ptn_mutex_create(&mutex);
    wrong(&mutex);
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}
#endif

int main(void) {
#ifndef __SANITIZE_THREAD__
  must_abort(give_back_what_is_free);
  must_abort(destroy_what_is_taken);
#endif
  time_runs_out();
  time_never_runs_out();
  one_has_it_at_a_time();
  whoever_waits_is_told();
  all_are_told();
  return 0;
}
