/* Threads: pthreads with the errors that cannot happen turned into aborts, a monotonic clock, and a small team that splits
 * loops over cores. Nothing here knows Python; no lock is held across I/O. */
#ifndef PTN_BASE_THREADS_H
#define PTN_BASE_THREADS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef pthread_mutex_t ptn_mutex;
typedef pthread_cond_t ptn_condition;

void ptn_mutex_create(ptn_mutex *mutex);
void ptn_mutex_destroy(ptn_mutex *mutex);
void ptn_lock(ptn_mutex *mutex);
bool ptn_try_lock(ptn_mutex *mutex); /* false where another has it */
void ptn_unlock(ptn_mutex *mutex);
void ptn_condition_create(ptn_condition *condition); /* on the monotonic clock */
void ptn_condition_destroy(ptn_condition *condition);
void ptn_wait(ptn_condition *condition, ptn_mutex *mutex);
bool ptn_wait_ns(ptn_condition *condition, ptn_mutex *mutex, int64_t ns); /* false when the time ran out */
void ptn_signal(ptn_condition *condition);
void ptn_broadcast(ptn_condition *condition);

/* A thread with every signal blocked, so that Python's handlers run on Python's threads. name: at most 15 characters. */
ptn_status ptn_thread_start(pthread_t *thread, const char *name, void *(*body)(void *), void *argument);
void ptn_thread_join(pthread_t thread);
/* For a thread that others wait for and that works briefly, called by itself: it gets a core soon after it wakes, though all of
 * them compute. It gets no more of a core's time for that. Nothing changes where the kernel does not know how (Linux before 6.12),
 * forbids it, or schedules the thread in a way of somebody's own choice. */
void ptn_thread_be_prompt(void);

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
