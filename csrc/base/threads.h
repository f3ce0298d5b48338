/* Threads: pthreads with the errors that cannot happen turned into aborts, locks, a monotonic clock, and a small team that splits
 * loops over cores. Nothing here knows Python; no lock is held across I/O.
 *
 * A lock is one word, taken and given back where it is called: a tensor that autograd saves meets several, each free almost always,
 * and with a library's lock they took a third of what it costs (benchmarks/hooks.py). Who finds it taken looks again for about a
 * microsecond, as long as others have it, and then sleeps in the kernel. */
#ifndef PTN_BASE_THREADS_H
#define PTN_BASE_THREADS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#ifdef __SANITIZE_THREAD__ /* is told what a lock is, so that it sees two taken in two orders */
#include <sanitizer/tsan_interface.h>
#define PTN_TELL_LOCK(call) call
#else
#define PTN_TELL_LOCK(call) ((void)0)
#endif

/* ---- locks ---- */

typedef enum ptn_mutex_state {
  PTN_MUTEX_FREE = 0,
  PTN_MUTEX_TAKEN,
  PTN_MUTEX_AWAITED /* others may sleep for it */
} ptn_mutex_state;

typedef struct ptn_mutex { /* all zeros: free */
  _Atomic uint32_t state;
} ptn_mutex;

void ptn_mutex_create(ptn_mutex *mutex);
void ptn_mutex_destroy(ptn_mutex *mutex); /* free, or it aborts */
void ptn_mutex_await(ptn_mutex *mutex); /* the slow ways of lock and unlock */
void ptn_mutex_wake(ptn_mutex *mutex, uint32_t state);

static inline bool ptn_mutex_take(ptn_mutex *mutex) {
  uint32_t expected = PTN_MUTEX_FREE;
  return atomic_compare_exchange_strong_explicit(&mutex->state, &expected, PTN_MUTEX_TAKEN, memory_order_acquire,
                                                 memory_order_relaxed);
}

static inline void ptn_lock(ptn_mutex *mutex) {
  PTN_TELL_LOCK(__tsan_mutex_pre_lock(mutex, 0));
  if (!ptn_mutex_take(mutex)) ptn_mutex_await(mutex);
  PTN_TELL_LOCK(__tsan_mutex_post_lock(mutex, 0, 0));
}

/* False where another has it. */
static inline bool ptn_try_lock(ptn_mutex *mutex) {
  PTN_TELL_LOCK(__tsan_mutex_pre_lock(mutex, __tsan_mutex_try_lock));
  bool taken = ptn_mutex_take(mutex);
  PTN_TELL_LOCK(
      __tsan_mutex_post_lock(mutex, taken ? __tsan_mutex_try_lock : __tsan_mutex_try_lock | __tsan_mutex_try_lock_failed, 0));
  return taken;
}

static inline void ptn_unlock(ptn_mutex *mutex) {
  PTN_TELL_LOCK(__tsan_mutex_pre_unlock(mutex, 0));
  uint32_t state = atomic_exchange_explicit(&mutex->state, PTN_MUTEX_FREE, memory_order_release);
  if (state != PTN_MUTEX_TAKEN) ptn_mutex_wake(mutex, state);
  PTN_TELL_LOCK(__tsan_mutex_post_unlock(mutex, 0));
}

/* Waiting for what others change under the mutex; it may end without that. */
typedef struct ptn_condition {
  _Atomic uint32_t sequence; /* what a sleeper saw before it slept */
  _Atomic uint32_t waiting_count;
} ptn_condition;

void ptn_condition_create(ptn_condition *condition);
void ptn_condition_destroy(ptn_condition *condition); /* nobody waits, or it aborts */
void ptn_wait(ptn_condition *condition, ptn_mutex *mutex);
bool ptn_wait_ns(ptn_condition *condition, ptn_mutex *mutex, int64_t ns); /* false when the time ran out */
void ptn_signal(ptn_condition *condition);
void ptn_broadcast(ptn_condition *condition);

/* ---- threads and time ---- */

/* A thread with every signal blocked but those of its own faults, so that Python's handlers run on Python's threads. name: at most
 * 15 characters. */
ptn_status ptn_thread_start(pthread_t *thread, const char *name, void *(*body)(void *), void *argument);
void ptn_thread_join(pthread_t thread);
/* For a thread that others wait for and that works briefly, called by itself: it gets a core soon after it wakes, though all of
 * them compute. It gets no more of a core's time for that. Nothing changes where the kernel does not know how (Linux before 6.12),
 * forbids it, or schedules the thread in a way of somebody's own choice. */
void ptn_thread_be_prompt(void);

int ptn_cores_count(void); /* that the calling thread may use */

int64_t ptn_now_ns(void); /* monotonic */
int64_t ptn_thread_processor_ns(void); /* that the calling thread has had, whoever else interrupts */

/* A team of threads that split the range [0, count) among themselves; the caller takes part. Reentrant calls from a body
 * run alone in the caller. */
typedef struct ptn_team ptn_team;
typedef void (*ptn_range_body)(void *context, size_t begin, size_t end);
ptn_status ptn_team_create(ptn_team **out, int threads); /* threads includes the caller; 0: as many as this process may use */
void ptn_team_destroy(ptn_team *team);
/* Parts are multiples of `grain` but for the last; grain >= 1. Returns when every part is done. */
void ptn_team_run(ptn_team *team, size_t count, size_t grain, ptn_range_body body, void *context);

#endif
