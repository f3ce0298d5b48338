/* See openmp.h. The runtime is looked up, not linked: torch brings its own, and a second one would have a second team. */
#define _GNU_SOURCE
#include "base/openmp.h"

#include <dlfcn.h>

typedef struct runtime {
  void (*parallel)(void (*body)(void *), void *context, unsigned threads, unsigned flags); /* what GCC makes of `omp parallel` */
  int (*thread_number)(void);
  int (*threads_count)(void);
  int (*most_threads)(void);
  int (*in_parallel)(void);
} runtime;

static runtime found;
static pthread_once_t looked_up = PTHREAD_ONCE_INIT;

/* Symbols of one library, or none at all. */
static void look_up(void) {
  *(void **)&found.thread_number = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
  *(void **)&found.threads_count = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
  *(void **)&found.most_threads = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
  *(void **)&found.in_parallel = dlsym(RTLD_DEFAULT, "omp_in_parallel");
  if (found.thread_number && found.threads_count && found.most_threads && found.in_parallel)
    *(void **)&found.parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
}

typedef struct split {
  size_t count, threads; /* threads: that have a part, at most */
  ptn_range_body body;
  void *context;
} split;

/* All of the team are called, as torch's own loops call them: of those that a smaller one leaves out, GCC's runtime makes an end. */
static void run_part(void *argument) {
  const split *split = argument;
  size_t threads = (size_t)found.threads_count(), number = (size_t)found.thread_number();
  if (threads > split->threads) threads = split->threads;
  if (number >= threads) return;
  size_t part = split->count / threads, rest = split->count % threads;
  size_t begin = part * number + (number < rest ? number : rest), end = begin + part + (number < rest);
  if (begin < end) split->body(split->context, begin, end);
}

size_t ptn_openmp_threads_count(void) {
  pthread_once(&looked_up, look_up);
  return found.parallel ? (size_t)found.most_threads() : 1;
}

void ptn_openmp_run(size_t count, size_t grain, ptn_range_body body, void *context) {
  size_t threads = ptn_openmp_threads_count();
  if (threads > 1 && found.in_parallel()) threads = 1;
  if (threads > count / grain) threads = count / grain;
  if (threads <= 1) {
    if (count > 0) body(context, 0, count);
    return;
  }
  split split = {count, threads, body, context};
  found.parallel(run_part, &split, (unsigned)ptn_openmp_threads_count(), 0);
}

bool ptn_openmp_takes_all_cores(void) { return ptn_openmp_threads_count() >= (size_t)ptn_cores_count(); }
