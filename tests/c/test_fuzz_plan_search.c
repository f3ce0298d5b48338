/* What test_plan_search.c checks for a few dozen seeds, for as many as there is time for. */
/* sources: csrc/plan/?*.c */
#include "fuzz.h"
#include "plan_properties.h"

static void one_seed(uint64_t seed) {
  static figures found;
  uint64_t random = seed;
  found.rises.count = found.least_rises.count = found.few.count = found.families.count = 0;
  check_many_bounds(&random, 30);
  check_many_ladders(&random, 24, &found.rises, &found.least_rises);
  check_distances(&random, &found.few, &found.families);
  check_detailed(&random, &found);
  check_figures(&found);
}

int main(void) {
  fuzz("plan search", one_seed);
  return 0;
}
