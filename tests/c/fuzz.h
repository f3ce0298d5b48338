/* Random inputs for as long as there is time: PROTRAIN_FUZZ_SECONDS for each case (default 1), from PROTRAIN_FUZZ_SEED on (default
 * 1). Each input has a seed of its own, which is told where something does not hold and reproduces it. */
#ifndef PTN_TESTS_FUZZ_H
#define PTN_TESTS_FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/threads.h"
#include "check.h"

static uint64_t fuzz_seed;
static const char *fuzz_name;

static inline void fuzz_tell(void) {
  if (fuzz_name) fprintf(stderr, "%s: PROTRAIN_FUZZ_SEED=%llu reproduces it\n", fuzz_name, (unsigned long long)fuzz_seed);
}

static inline double fuzz_number(const char *name, double otherwise) {
  const char *given = getenv(name);
  return given ? atof(given) : otherwise;
}

/* A sanitizer that finds something ends the process with exit too, so the seed is told then as well. */
static inline void fuzz(const char *name, void (*one)(uint64_t seed)) {
  static int told;
  if (told++ == 0) atexit(fuzz_tell);
  int64_t until_ns = ptn_now_ns() + (int64_t)(1e9 * fuzz_number("PROTRAIN_FUZZ_SECONDS", 1));
  uint64_t first = (uint64_t)fuzz_number("PROTRAIN_FUZZ_SEED", 1);
  fuzz_name = name;
  fuzz_seed = first - 1;
  do one(++fuzz_seed);
  while (ptn_now_ns() < until_ns);
  fuzz_name = NULL;
  printf("%s: %llu inputs\n", name, (unsigned long long)(fuzz_seed - first + 1));
}

/* One in so many. */
static inline int fuzz_one_in(uint64_t *state, uint64_t count) { return check_random(state) % count == 0; }

/* A number as an attacker chooses it. */
static inline uint64_t fuzz_hostile(uint64_t *state) {
  static const uint64_t favourites[] = {0,
                                        1,
                                        4095,
                                        4096,
                                        4097,
                                        INT32_MAX,
                                        UINT32_MAX,
                                        (uint64_t)UINT32_MAX + 1,
                                        (uint64_t)1 << 52,
                                        INT64_MAX,
                                        (uint64_t)INT64_MAX + 1,
                                        UINT64_MAX - 4095,
                                        UINT64_MAX};
  if (fuzz_one_in(state, 2)) return favourites[check_random(state) % (sizeof favourites / sizeof *favourites)];
  return check_random(state) >> check_random(state) % 64;
}

#endif
