/* An OpenMP runtime of GCC's interface, for programs that have none, found by the core with dlsym, as torch's is. Threads of a region are
 * new ones each time.
 *
 * As many as the program says; where it says nothing, a team of two where the process may use one core, which takes all there are, so
 * that the driving thread makes the lane's updates with it (runtime/lane.c), and else the caller alone. */
#ifndef PTN_TESTS_FAKE_OPENMP_H
#define PTN_TESTS_FAKE_OPENMP_H

#include "base/threads.h"
#include "check.h"

enum { FAKE_MOST_THREADS = 3 };

static int fake_threads_given; /* 0: see above */
static _Atomic int fake_regions_count;
static _Thread_local int fake_thread_number;
static _Thread_local bool fake_inside;

typedef struct fake_member {
  void (*body)(void *);
  void *context;
  int number;
} fake_member;

static void *fake_be_member(void *argument) {
  const fake_member *self = argument;
  fake_thread_number = self->number;
  fake_inside = true;
  self->body(self->context);
  fake_inside = false;
  return NULL;
}

#define FAKE_SEEN __attribute__((visibility("default")))
FAKE_SEEN int omp_get_thread_num(void);
FAKE_SEEN int omp_get_num_threads(void);
FAKE_SEEN int omp_get_max_threads(void);
FAKE_SEEN int omp_in_parallel(void);
FAKE_SEEN void GOMP_parallel(void (*body)(void *), void *context, unsigned threads, unsigned flags);
int omp_get_max_threads(void) { return fake_threads_given > 0 ? fake_threads_given : ptn_cores_count() == 1 ? 2 : 1; }
int omp_get_thread_num(void) { return fake_thread_number; }
int omp_get_num_threads(void) { return omp_get_max_threads(); }
int omp_in_parallel(void) { return fake_inside; }
void GOMP_parallel(void (*body)(void *), void *context, unsigned threads, unsigned flags) {
  int count = omp_get_max_threads();
  CHECK(threads == (unsigned)count && flags == 0);
  fake_regions_count++;
  fake_member members[FAKE_MOST_THREADS];
  pthread_t started[FAKE_MOST_THREADS];
  for (int i = 0; i < count; i++) members[i] = (fake_member){body, context, i};
  for (int i = 1; i < count; i++) CHECK(pthread_create(&started[i], NULL, fake_be_member, &members[i]) == 0);
  fake_be_member(&members[0]);
  for (int i = 1; i < count; i++) CHECK(pthread_join(started[i], NULL) == 0);
}

#endif
