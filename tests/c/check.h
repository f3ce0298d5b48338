/* CHECK for the C test programs: prints where and what, and ends the program. Each program's main returns 0 when all holds. */
#ifndef PTN_TESTS_CHECK_H
#define PTN_TESTS_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/status.h"

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      fprintf(stderr, "  last error: %s\n", ptn_last_error()->message);         \
      exit(1);                                                                  \
    }                                                                           \
  } while (0)
#define CHECK_OK(call) CHECK((call) == PTN_OK)

/* What takes this long hangs; a machine that is busy, or stopped for minutes, is no failure. */
#define HUNG_SECONDS 600
#define HUNG_NS (HUNG_SECONDS * INT64_C(1000000000))

/* A small deterministic generator for random sequences. */
static inline uint64_t check_random(uint64_t *state) {
  uint64_t x = *state += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

#endif
