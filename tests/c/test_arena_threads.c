/* The arena from many threads: blocks are freed by other threads than took them, a limit is never passed, processes fork. */
/* sources: csrc/device/?*.c csrc/memory/?*.c */
/* threads */
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/threads.h"
#include "check.h"
#include "memory/arena.h"

enum { thread_count = 4, place_count = 64, round_count = 20000 };

static _Atomic(unsigned char *) places[place_count]; /* the first byte of a block is its mark, the second its complement */
static ptn_account *shared;

/* Takes a block, swaps it with whatever lies in a random place, frees that. */
static void *work(void *argument) {
  uint64_t state = (uint64_t)(uintptr_t)argument;
  for (int round = 0; round < round_count; round++) {
    uint64_t dice = check_random(&state);
    size_t bytes = 2 + (size_t)(check_random(&state) % ((uint64_t)1 << (4 + dice % 14)));
    void *taken;
    ptn_status status = ptn_arena_alloc(dice & 1 ? shared : NULL, bytes, &taken);
    CHECK(status == PTN_OK || (status == PTN_BUDGET && ptn_last_error()->budget_bytes == PTN_MIB));
    unsigned char *block = taken;
    if (block) {
      block[0] = (unsigned char)dice;
      block[1] = (unsigned char)~dice;
    }
    unsigned char *other = atomic_exchange(&places[dice / 2 % place_count], block);
    CHECK(!other || (unsigned char)(other[0] ^ other[1]) == 0xff);
    ptn_arena_free(other);
    if (round % 1000 == 0) {
      ptn_account_stats stats;
      ptn_account_get_stats(shared, &stats);
      CHECK(stats.live_bytes <= stats.limit_bytes && stats.peak_bytes <= stats.limit_bytes);
      ptn_arena_check();
    }
    if (round % 5000 == 0) ptn_arena_trim(0);
  }
  return NULL;
}

static void fork_while_others_work(void) {
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    void *block;
    CHECK_OK(ptn_arena_alloc(NULL, 100000, &block));
    memset(block, 1, 100000);
    ptn_arena_free(block);
    ptn_arena_check();
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

typedef struct owner {
  ptn_account *account;
  _Atomic bool asked, gone;
} owner;

/* Slow, and the owner is there to the end of it. */
static ptn_status press(void *context, uint64_t missing_bytes, bool must, bool *freed) {
  owner *owner = context;
  owner->asked = true;
  nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
  CHECK(!owner->gone && missing_bytes > 0 && must && !*freed);
  return PTN_OK;
}

static void *ask(void *argument) {
  owner *owner = argument;
  void *block;
  CHECK(ptn_arena_alloc(owner->account, 2 * PTN_PAGE_BYTES, &block) == PTN_BUDGET && !block);
  return NULL;
}

static void whose_pressure_is_asked_is_there_until_it_was(void) {
  owner owner = {.account = NULL};
  CHECK_OK(ptn_account_create(&owner.account, PTN_PAGE_BYTES, press, &owner));
  pthread_t thread;
  CHECK_OK(ptn_thread_start(&thread, "ask", ask, &owner));
  while (!owner.asked) sched_yield();
  ptn_account_ask_no_more(owner.account);
  owner.gone = true;
  void *block;
  CHECK(ptn_arena_alloc(owner.account, 2 * PTN_PAGE_BYTES, &block) == PTN_BUDGET); /* nobody is asked */
  ptn_account_destroy(owner.account);
  ptn_thread_join(thread);
}

/* The account is closed by whom it asks. */
static ptn_status close_it(void *context, uint64_t missing_bytes, bool must, bool *freed) {
  owner *owner = context;
  (void)missing_bytes;
  (void)must;
  ptn_account_ask_no_more(owner->account);
  ptn_account_destroy(owner->account);
  ptn_account *other; /* not in the place of the one that is asking */
  CHECK_OK(ptn_account_create(&other, PTN_PAGE_BYTES, NULL, NULL));
  CHECK(other != owner->account);
  ptn_account_destroy(other);
  *freed = true;
  return PTN_OK;
}

static void an_account_that_is_closed_while_it_is_asked(void) {
  owner owner = {.account = NULL};
  CHECK_OK(ptn_account_create(&owner.account, PTN_PAGE_BYTES, close_it, &owner));
  void *block;
  CHECK_OK(ptn_arena_alloc(owner.account, 2 * PTN_PAGE_BYTES, &block)); /* it is nobody's then */
  ptn_arena_free(block);
  ptn_account *again;
  CHECK_OK(ptn_account_create(&again, 0, NULL, NULL));
  CHECK(again == owner.account);
  ptn_account_destroy(again);
}

int main(void) {
  whose_pressure_is_asked_is_there_until_it_was();
  an_account_that_is_closed_while_it_is_asked();
  CHECK_OK(ptn_account_create(&shared, PTN_MIB, NULL, NULL));
  pthread_t threads[thread_count];
  for (uintptr_t i = 0; i < thread_count; i++) CHECK_OK(ptn_thread_start(&threads[i], "work", work, (void *)(i + 1)));
  for (int i = 0; i < 5; i++) fork_while_others_work();
  for (int i = 0; i < thread_count; i++) ptn_thread_join(threads[i]);
  for (int i = 0; i < place_count; i++) ptn_arena_free(places[i]);
  ptn_account_stats stats;
  ptn_account_get_stats(shared, &stats);
  CHECK(stats.live_bytes == 0 && stats.refused_count > 0);
  ptn_account_destroy(shared);
  ptn_arena_stats all;
  ptn_arena_get_stats(&all);
  CHECK(all.live_bytes == 0);
  ptn_arena_check();
  return 0;
}
