/* A thread that is made prompt asks for short turns and keeps all else; one that somebody schedules otherwise is left alone. A team
 * has as many threads as the process may use processors, also of more than a cpu_set_t has places for. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/threads.h"

#include "check.h"

typedef struct attributes {
  uint32_t size, policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime_ns, deadline_ns, period_ns;
} attributes;

static attributes mine(void) {
  attributes found = {.size = sizeof found};
  CHECK(syscall(SYS_sched_getattr, 0, &found, sizeof found, 0) == 0);
  return found;
}

/* Whether an ordinary thread may choose its slice here. */
static bool may_choose(attributes wanted) {
  wanted.runtime_ns = 5000000;
  return syscall(SYS_sched_setattr, 0, &wanted, 0) == 0 && mine().runtime_ns == wanted.runtime_ns;
}

static void *ordinary(void *argument) {
  (void)argument;
  CHECK(setpriority(PRIO_PROCESS, 0, 7) == 0);
  bool may = may_choose(mine());
  attributes before = mine();
  ptn_thread_be_prompt();
  attributes after = mine();
  CHECK(after.policy == SCHED_OTHER && after.nice == 7);
  CHECK(after.runtime_ns == (may ? 100000 : before.runtime_ns));
  after.runtime_ns = before.runtime_ns;
  CHECK(memcmp(&before, &after, sizeof before) == 0);
  return NULL;
}

static void *chosen(void *argument) {
  const struct sched_param none = {0};
  (void)argument;
  CHECK(sched_setscheduler(0, SCHED_BATCH, &none) == 0);
  attributes before = mine();
  ptn_thread_be_prompt();
  attributes after = mine();
  CHECK(after.policy == SCHED_BATCH && memcmp(&before, &after, sizeof before) == 0);
  return NULL;
}

/* In the place of the C library's: a machine of 2048 possible processors, three of which the process may use. */
int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set) {
  CHECK(pid == 0);
  if (bytes < 2048 / 8) {
    errno = EINVAL;
    return -1;
  }
  CPU_ZERO_S(bytes, set);
  CPU_SET_S(0, bytes, set);
  CPU_SET_S(1500, bytes, set);
  CPU_SET_S(2047, bytes, set);
  return 0;
}

static void count_part(void *context, size_t begin, size_t end) {
  CHECK(begin < end);
  atomic_fetch_add((atomic_int *)context, 1);
}

static void a_team_counts_all_processors(void) {
  ptn_team *team;
  atomic_int parts = 0;
  CHECK_OK(ptn_team_create(&team, 0));
  ptn_team_run(team, 300, 1, count_part, &parts);
  CHECK(parts == 3);
  ptn_team_destroy(team);
}

int main(void) {
  a_team_counts_all_processors();
  void *(*const bodies[])(void *) = {ordinary, chosen};
  for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
    pthread_t thread;
    CHECK_OK(ptn_thread_start(&thread, "test", bodies[i], NULL));
    ptn_thread_join(thread);
  }
  return 0;
}
