/* The rule that keeps in memory what could not be on disk and back in time: small cases by hand, a plain simulation on random
 * passes, and what must hold for every pass: nothing is kept when there is time, all when there is none, and a faster disk never
 * keeps more. */
/* sources: csrc/runtime/stash_rule.c */
#include <string.h>

#include "check.h"
#include "runtime/stash.h"

enum { most = 64 };

#define SECOND ((int64_t)1000000000)

static void rule(const ptn_stash_moment *moments, size_t count, double write_speed, double read_speed, bool *keep) {
  memset(keep, 0xff, most * sizeof *keep); /* each answer is written, also the one that is no */
  ptn_stash_too_late(moments, count, write_speed, read_speed, keep);
  for (size_t i = 0; i < count; i++) {
    unsigned char byte;
    memcpy(&byte, &keep[i], 1);
    CHECK(byte <= 1);
  }
  if (count < most) {
    unsigned char byte;
    memcpy(&byte, &keep[count], 1);
    CHECK(byte == 0xff); /* and none more */
  }
}

/* With ample time only memory to spare keeps: the last records that fit it, a quarter of all bytes at most. */
static void what_fits_is_kept(void) {
  bool keep[most];
  ptn_stash_moment moments[8];
  for (int i = 0; i < 8; i++) moments[i] = (ptn_stash_moment){100 + (uint64_t)i, i * SECOND, 1000 * SECOND};
  for (uint64_t spare = 0; spare < 500; spare++) {
    ptn_stash_rule(moments, 8, 1e6, 1e6, spare, keep);
    uint64_t most_bytes = spare < 828 / 4 ? spare : 828 / 4; /* 828 bytes in all: 107 + 106 are too many */
    for (int i = 0; i < 7; i++) CHECK(!keep[i]);
    CHECK(keep[7] == (most_bytes >= 107));
  }
  for (int i = 0; i < 4; i++) moments[i].bytes = 1000;
  ptn_stash_rule(moments, 8, 1e6, 1e6, 320, keep);
  CHECK(!keep[4] && keep[5] && keep[6] && keep[7]); /* 107 + 106 + 105 fit, 104 more do not */
}

/* Bytes and seconds that can be checked with a pencil: 100 bytes a second out, 200 bytes a second in. */
static void by_hand(void) {
  bool keep[most];
  ptn_stash_moment moments[] = {
      {200, 0 * SECOND, 20 * SECOND}, /* written 0-2, back at 3 */
      {400, 1 * SECOND, 18 * SECOND}, /* written 2-6, back at 8 */
      {200, 5 * SECOND, 8 * SECOND}, /* would be written 6-8, back at 9: kept, and takes no time of the disk */
      {100, 6 * SECOND, 8 * SECOND}, /* written 6-7, back at 7.5 */
      {100, 7 * SECOND, 8 * SECOND}, /* would be written 7-8, back at 8.5: kept */
  };
  rule(moments, 5, 100, 200, keep);
  CHECK(!keep[0] && !keep[1] && keep[2] && !keep[3] && keep[4]);
  rule(moments, 3, 100, 200, keep);
  CHECK(!keep[0] && !keep[1] && keep[2]);
  rule(moments, 1, 10, 10, keep); /* 20 seconds out and 20 in */
  CHECK(keep[0]);
  rule(moments, 1, 20, 20.1, keep);
  CHECK(!keep[0]);
  rule(moments, 1, 19.9, 20, keep);
  CHECK(keep[0]);
  rule(moments, 0, 100, 200, keep);
}

/* Nanoseconds of a clock that has run for weeks, and times that are not known because nobody asked. */
static void large_numbers(void) {
  bool keep[most];
  int64_t start_ns = (int64_t)9000000 * SECOND;
  ptn_stash_moment moments[] = {
      {(uint64_t)1 << 30, start_ns, start_ns + SECOND},
      {(uint64_t)1 << 30, start_ns + 1000, start_ns + SECOND / 2},
      {(uint64_t)1 << 40, start_ns + 2000, INT64_MAX},
      {4096, start_ns + 3000, start_ns + 3100},
      {4096, start_ns + 4000, INT64_MAX},
  };
  rule(moments, 5, 2e9, 4e9, keep); /* 0.54 and 0.27 s for a GiB */
  CHECK(!keep[0] && keep[1] && !keep[2] && keep[3] && !keep[4]);
}

/* A pass as a model makes it: what is saved later is asked for earlier. */
static size_t nested_pass(uint64_t *seed, ptn_stash_moment *moments, uint64_t equal_bytes) {
  size_t count = 1 + (size_t)(check_random(seed) % most);
  int64_t now_ns = (int64_t)(check_random(seed) % (uint64_t)SECOND);
  for (size_t i = 0; i < count; i++) {
    uint64_t bytes = equal_bytes ? equal_bytes : (1 + check_random(seed) % 4096) * 4096;
    now_ns += (int64_t)(check_random(seed) % 10000000);
    moments[i] = (ptn_stash_moment){.bytes = bytes, .put_ns = now_ns};
  }
  for (size_t i = count; i-- > 0;) {
    now_ns += (int64_t)(check_random(seed) % 20000000);
    moments[i].get_ns = now_ns;
  }
  return count;
}

static double random_speed(uint64_t *seed) { return 1e7 * (double)(1 + check_random(seed) % 1000); }

/* The slow and plain twin: a clock that goes on in steps of the disk's, with a list of what waits. A record is tried only when
 * the disk is idle and no earlier one waits; whoever would come too late gives up its turn. */
static void simulate(const ptn_stash_moment *moments, size_t count, double write_speed, double read_speed, bool *keep,
                     double *margin_ns) {
  long double disk_busy_until = 0;
  bool disk_used = false;
  *margin_ns = 1e18;
  for (size_t i = 0; i < count; i++) {
    long double start = (long double)moments[i].put_ns;
    if (disk_used && disk_busy_until > start) start = disk_busy_until;
    long double out = start + (long double)moments[i].bytes * 1000000000.0L / (long double)write_speed;
    long double back = out + (long double)moments[i].bytes * 1000000000.0L / (long double)read_speed;
    double late = (double)(back - (long double)moments[i].get_ns);
    keep[i] = late > 0;
    if (late < 0) late = -late;
    if (late < *margin_ns) *margin_ns = late;
    if (keep[i]) continue;
    disk_used = true;
    disk_busy_until = out;
  }
}

static void equals_a_simulation(void) {
  uint64_t seed = 7, compared_count = 0, kept_count = 0, written_count = 0;
  for (int round = 0; round < 20000; round++) {
    ptn_stash_moment moments[most];
    bool keep[most], expected[most];
    size_t count = nested_pass(&seed, moments, 0);
    if (round % 3 == 0) /* asked for in any order */
      for (size_t i = 0; i < count; i++) moments[i].get_ns = moments[i].put_ns + (int64_t)(check_random(&seed) % 200000000);
    double write_speed = random_speed(&seed), read_speed = random_speed(&seed), margin_ns;
    simulate(moments, count, write_speed, read_speed, expected, &margin_ns);
    if (margin_ns < 8) continue; /* a tie may fall either way in floating point */
    rule(moments, count, write_speed, read_speed, keep);
    for (size_t i = 0; i < count; i++) {
      CHECK(keep[i] == expected[i]);
      kept_count += keep[i];
      written_count += !keep[i];
    }
    compared_count++;
  }
  CHECK(compared_count > 19000 && kept_count > 10000 && written_count > 10000);
}

/* Records of one size, asked for in reverse: the kept ones are the last ones, and more speed either way keeps no more of them.
 * (With other sizes a large record that just fits may take the place of smaller ones.) */
static void the_last_ones_and_fewer_with_speed(void) {
  uint64_t seed = 11, some_count = 0;
  for (int round = 0; round < 5000; round++) {
    ptn_stash_moment moments[most];
    bool keep[most];
    size_t count = nested_pass(&seed, moments, (1 + check_random(&seed) % 4096) * 4096), before_count = count;
    double write_speed = random_speed(&seed) / 4, read_speed = random_speed(&seed) / 4;
    for (int step = 0; step < 8; step++) {
      rule(moments, count, write_speed, read_speed, keep);
      size_t kept_count = 0;
      for (size_t i = 0; i < count; i++) {
        CHECK(i == 0 || keep[i] >= keep[i - 1]);
        kept_count += keep[i];
      }
      CHECK(kept_count <= before_count);
      some_count += kept_count > 0 && kept_count < count;
      before_count = kept_count;
      *(step % 2 ? &write_speed : &read_speed) *= 1.7;
    }
  }
  CHECK(some_count > 1000);
}

/* A single record depends on nothing but itself: more speed never keeps it, a later question neither. */
static void one_record_is_monotonic(void) {
  uint64_t seed = 13;
  for (int round = 0; round < 20000; round++) {
    bool keep[most];
    ptn_stash_moment moment = {.bytes = 1 + check_random(&seed) % ((uint64_t)1 << 28), .put_ns = 5};
    moment.get_ns = 5 + (int64_t)(check_random(&seed) % (uint64_t)SECOND);
    double write_speed = random_speed(&seed), read_speed = random_speed(&seed);
    rule(&moment, 1, write_speed, read_speed, keep);
    bool before = keep[0];
    if (round % 3 == 0) write_speed *= 2;
    if (round % 3 == 1) read_speed *= 2;
    if (round % 3 == 2) moment.get_ns *= 2;
    rule(&moment, 1, write_speed, read_speed, keep);
    CHECK(before || !keep[0]);
  }
}

static void ample_time_and_none(void) {
  uint64_t seed = 17;
  for (int round = 0; round < 2000; round++) {
    ptn_stash_moment moments[most];
    bool keep[most];
    size_t count = nested_pass(&seed, moments, 0);
    double write_speed = random_speed(&seed), read_speed = random_speed(&seed), busy_ns = 0;
    for (size_t i = 0; i < count; i++)
      busy_ns += (double)moments[i].bytes * 1e9 / write_speed + (double)moments[i].bytes * 1e9 / read_speed;
    int64_t end_ns = moments[count - 1].put_ns + (int64_t)busy_ns + 1000;
    for (size_t i = 0; i < count; i++) moments[i].get_ns = end_ns;
    rule(moments, count, write_speed, read_speed, keep);
    for (size_t i = 0; i < count; i++) CHECK(!keep[i]);
    for (size_t i = 0; i < count; i++) moments[i].get_ns = moments[i].put_ns;
    rule(moments, count, write_speed, read_speed, keep);
    for (size_t i = 0; i < count; i++) CHECK(keep[i]);
  }
}

int main(void) {
  by_hand();
  what_fits_is_kept();
  large_numbers();
  equals_a_simulation();
  the_last_ones_and_fewer_with_speed();
  one_record_is_monotonic();
  ample_time_and_none();
  return 0;
}
