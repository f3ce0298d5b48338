/* The threads that the operations of this process compute with: the OpenMP team of whoever calls, which is torch's.
 *
 * They are awake and on their cores when an operation has just ended or is about to begin, and have its bytes in their caches. Work
 * of the core that belongs to such a moment is shared with them, so that it takes no core away from one of them alone while the others
 * wait for it, and nobody starts another team beside theirs.
 */
#ifndef PTN_BASE_OPENMP_H
#define PTN_BASE_OPENMP_H

#include "base/threads.h"

/* Splits [0, count) among the caller and its team, and returns when every part is done; parts are at least grain long, grain >= 1. In
 * a process without an OpenMP runtime (of GCC's interface, which others have too), and within a body, the caller does all of it. */
void ptn_openmp_run(size_t count, size_t grain, ptn_range_body body, void *context);

/* Of the caller and its team; 1 in a process without such a runtime. */
size_t ptn_openmp_threads_count(void);
/* Whether they are as many as the cores that the caller may use: nobody else has one for long then. */
bool ptn_openmp_takes_all_cores(void);

#endif
