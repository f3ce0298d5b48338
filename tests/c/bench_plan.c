/* Measures the planner's search: milliseconds of one thread for models of so many blocks and chunks.
 *
 *   bench_plan [ROUNDS]
 *
 * Each figure is of ROUNDS random models of that size, for six budgets each from the smallest to what everything in memory needs:
 * the mean and the longest, in time of this thread's processor. Not a test: it asserts nothing. */
/* sources: csrc/plan/bounds.c csrc/plan/climb.c csrc/plan/families.c csrc/plan/fit.c csrc/plan/make.c csrc/plan/peak.c
 * csrc/plan/request.c csrc/plan/room.c csrc/plan/rule.c csrc/plan/search.c csrc/plan/simulate.c csrc/plan/simulate_course.c
 * csrc/plan/simulate_jobs.c csrc/plan/simulate_lanes.c csrc/plan/simulate_moves.c csrc/plan/simulate_stash.c csrc/plan/slots.c
 * csrc/plan/sums.c csrc/plan/swap.c csrc/plan/tiers.c csrc/plan/trials.c */
#define _GNU_SOURCE
#include <time.h>

#include "plan_models.h"

static double thread_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

static void measure(uint32_t n_blocks, uint32_t n_chunks, bool alike, bool swaps, int rounds) {
  static model of;
  static answer given;
  uint64_t random = 7;
  double total_ms = 0, longest_ms = 0;
  int count = 0;
  for (int round = 0; round < rounds; round++) {
    model_draw(&of, &random,
               &(model_shape){.n_blocks = n_blocks, .n_chunks = n_chunks, .alike = alike, .swaps = swaps, .least = true});
    model_ask(&of.request, 0, &given);
    uint64_t smallest = ptn_last_error()->smallest_bytes;
    model_ask(&of.request, UINT64_MAX, &given);
    CHECK_OK(given.status);
    uint64_t ample = given.plan.peak_bytes;
    for (uint64_t i = 0; i < 6; i++, count++) {
      double begin_ms = thread_ms();
      model_ask(&of.request, smallest + (ample - smallest) / 6 * i, &given);
      double ms = thread_ms() - begin_ms;
      CHECK_OK(given.status);
      total_ms += ms;
      if (ms > longest_ms) longest_ms = ms;
    }
  }
  printf("%4u blocks %4u chunks %-6s %-9s: %8.2f ms mean, %8.2f ms longest\n", n_blocks, n_chunks, alike ? "alike" : "unlike",
         swaps ? "fast disk" : "slow disk", total_ms / count, longest_ms);
}

int main(int n_words, char **words) {
  int rounds = n_words > 1 ? atoi(words[1]) : 5;
  const uint32_t sizes[][2] = {{12, 14}, {32, 34}, {100, 100}, {1000, 100}, {100, 1000}, {1000, 1000}};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    for (int kind = 0; kind < 4; kind++) measure(sizes[i][0], sizes[i][1], kind & 1, kind & 2, rounds);
  }
  return 0;
}
