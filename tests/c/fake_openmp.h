/* An OpenMP runtime of GCC's interface, for programs that have none: a team of two where the process may use one core, which takes all
 * there are, so that the driving thread makes the lane's updates with it (runtime/lane.c); else the caller alone. Its second thread is a
 * new one each time. */
#ifndef PTN_TESTS_FAKE_OPENMP_H
#define PTN_TESTS_FAKE_OPENMP_H

#include <stdlib.h>

#include "base/threads.h"

#define FAKE_OPENMP __attribute__((visibility("default")))

typedef struct fake_helper {
  void (*body)(void *);
  void *context;
} fake_helper;

static _Thread_local int fake_number, fake_count = 1;

FAKE_OPENMP int omp_get_thread_num(void);
FAKE_OPENMP int omp_get_num_threads(void);
FAKE_OPENMP int omp_get_max_threads(void);
FAKE_OPENMP int omp_in_parallel(void);
FAKE_OPENMP void GOMP_parallel(void (*body)(void *), void *context, unsigned threads, unsigned flags);

int omp_get_thread_num(void) { return fake_number; }
int omp_get_num_threads(void) { return fake_count; }
int omp_get_max_threads(void) { return ptn_cores_count() == 1 ? 2 : 1; }
int omp_in_parallel(void) { return fake_count > 1; }

static void *fake_help(void *argument) {
  const fake_helper *helper = argument;
  fake_number = 1;
  fake_count = 2;
  helper->body(helper->context);
  return NULL;
}

void GOMP_parallel(void (*body)(void *), void *context, unsigned threads, unsigned flags) {
  (void)flags;
  fake_helper helper = {body, context};
  pthread_t second;
  if (threads != 2 || fake_count > 1 || pthread_create(&second, NULL, fake_help, &helper) != 0) abort();
  fake_count = 2;
  body(context);
  fake_count = 1;
  pthread_join(second, NULL);
}

#endif
