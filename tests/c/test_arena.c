/* The arena's contract, one property at a time: rounding, alignment, limits, goals, pressure, what may be resident, fork. */
/* sources: csrc/device/?*.c csrc/memory/?*.c */
#define _GNU_SOURCE
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/bytes.h"
#include "check.h"
#include "memory/arena.h"

static ptn_account *account(uint64_t limit_bytes) {
  ptn_account *made;
  CHECK_OK(ptn_account_create(&made, limit_bytes, NULL, NULL));
  return made;
}

static void *take(ptn_account *from, size_t bytes) {
  void *block;
  CHECK_OK(ptn_arena_alloc(from, bytes, &block));
  CHECK(ptn_arena_owns(block) && ptn_arena_owns((char *)block + bytes - 1));
  return block;
}

static ptn_account_stats stats_of(const ptn_account *of) {
  ptn_account_stats stats;
  ptn_account_get_stats(of, &stats);
  return stats;
}

static ptn_arena_stats stats(void) {
  ptn_arena_stats all;
  ptn_arena_get_stats(&all);
  return all;
}

static void sizes_are_rounded_and_aligned(void) {
  CHECK(ptn_arena_rounded_bytes(1) == 64 && ptn_arena_rounded_bytes(64) == 64 && ptn_arena_rounded_bytes(65) == 128);
  CHECK(ptn_arena_rounded_bytes(4032) == 4032 && ptn_arena_rounded_bytes(4033) == 4096 && ptn_arena_rounded_bytes(4097) == 8192);
  ptn_account *counted = account(0);
  void *blocks[200];
  uint64_t live_bytes = 0;
  for (size_t i = 0; i < 200; i++) {
    size_t bytes = 1 + i * i;
    blocks[i] = take(counted, bytes);
    memset(blocks[i], (int)i, bytes);
    CHECK((uintptr_t)blocks[i] % (bytes > 4032 ? PTN_PAGE_BYTES : PTN_TENSOR_ALIGN_BYTES) == 0);
    live_bytes += ptn_arena_rounded_bytes(bytes);
    CHECK(stats_of(counted).live_bytes == live_bytes);
  }
  for (size_t i = 0; i < 200; i++) { /* nobody wrote into another's block */
    const unsigned char *bytes = blocks[i];
    CHECK(bytes[0] == i && bytes[i * i] == i);
    ptn_arena_free(blocks[i]);
  }
  CHECK(stats_of(counted).live_bytes == 0 && stats_of(counted).peak_bytes == live_bytes);
  CHECK(!ptn_arena_owns(&live_bytes));
  ptn_arena_free(NULL);
  ptn_account_destroy(counted);
  ptn_arena_check();
}

static void a_limit_holds_to_the_byte(void) {
  ptn_account *limited = account(3 * PTN_PAGE_BYTES);
  void *page = take(limited, PTN_PAGE_BYTES), *small = take(limited, 100), *refused = page;
  CHECK(ptn_arena_alloc(limited, 2 * PTN_PAGE_BYTES, &refused) == PTN_BUDGET && refused == NULL);
  const ptn_error *error = ptn_last_error();
  CHECK(error->needed_bytes == 3 * PTN_PAGE_BYTES + 128 && error->budget_bytes == 3 * PTN_PAGE_BYTES);
  CHECK(strstr(error->message, "8192") && strstr(error->message, "4224 of 12288"));
  CHECK(error->smallest_bytes == error->needed_bytes && strstr(error->message, "at least 12416 bytes"));
  ptn_account_set_named(limited, 100);
  CHECK(ptn_arena_alloc(limited, 2 * PTN_PAGE_BYTES, &refused) == PTN_BUDGET && error->smallest_bytes == error->needed_bytes);
  ptn_account_set_named(limited, 5 * PTN_PAGE_BYTES);
  CHECK(ptn_arena_alloc(limited, 2 * PTN_PAGE_BYTES, &refused) == PTN_BUDGET && error->smallest_bytes == 5 * PTN_PAGE_BYTES);
  CHECK(error->needed_bytes == 3 * PTN_PAGE_BYTES + 128 && strstr(error->message, "try a budget of 20480 bytes"));
  ptn_account_set_growth(limited, PTN_PAGE_BYTES + 128); /* a page and 128 bytes are live: two pages are asked for since */
  CHECK(ptn_arena_alloc(limited, 2 * PTN_PAGE_BYTES, &refused) == PTN_BUDGET && error->smallest_bytes == 5 * PTN_PAGE_BYTES);
  ptn_account_set_named(limited, 0);
  CHECK(ptn_arena_alloc(limited, 2 * PTN_PAGE_BYTES, &refused) == PTN_BUDGET);
  CHECK(error->smallest_bytes == error->needed_bytes + PTN_PAGE_BYTES && strstr(error->message, "this takes 12416,"));
  ptn_account_set_growth(limited, 4 * PTN_PAGE_BYTES);
  CHECK(ptn_arena_alloc(limited, 2 * PTN_PAGE_BYTES, &refused) == PTN_BUDGET && error->smallest_bytes == error->needed_bytes);
  ptn_account_set_growth(limited, 0);
  CHECK(ptn_arena_alloc(limited, SIZE_MAX, &refused) == PTN_BUDGET);
  CHECK(stats_of(limited).live_bytes == PTN_PAGE_BYTES + 128 && stats_of(limited).refused_count == 7);
  ptn_arena_free(small);
  void *exact = take(limited, 2 * PTN_PAGE_BYTES);
  CHECK(ptn_arena_alloc(limited, 1, &refused) == PTN_BUDGET);
  ptn_arena_check();
  ptn_arena_free(exact);
  ptn_arena_free(page);
  ptn_account_destroy(limited);
}

static void intervals_have_their_own_peak(void) {
  ptn_account *counted = account(0);
  void *page = take(counted, PTN_PAGE_BYTES);
  ptn_arena_free(take(counted, 4 * PTN_PAGE_BYTES));
  CHECK(ptn_account_mark(counted) == 5 * PTN_PAGE_BYTES);
  ptn_arena_free(take(counted, PTN_PAGE_BYTES));
  CHECK(stats_of(counted).interval_peak_bytes == 2 * PTN_PAGE_BYTES && stats_of(counted).peak_bytes == 5 * PTN_PAGE_BYTES);
  ptn_arena_free(page);
  ptn_account_destroy(counted);
}

typedef struct hoard {
  void *blocks[4];
  int held, asked, asked_for_goal;
  bool fails; /* once nothing is left */
  uint64_t missing_bytes;
} hoard;

static ptn_status give_one(void *context, uint64_t missing_bytes, bool must, bool *freed) {
  hoard *mine = context;
  mine->asked++;
  mine->asked_for_goal += !must;
  mine->missing_bytes = missing_bytes;
  if (mine->held == 0) return mine->fails ? ptn_fail(PTN_DISK, "nothing can be written") : PTN_OK;
  ptn_arena_free(mine->blocks[--mine->held]);
  ptn_arena_free(take(NULL, 3 * PTN_PAGE_BYTES)); /* the arena's lock is free */
  *freed = true;
  return PTN_OK;
}

static void pressure_is_asked_until_it_can_do_no_more(void) {
  hoard mine = {.held = 4};
  ptn_account *limited;
  CHECK_OK(ptn_account_create(&limited, 5 * PTN_PAGE_BYTES, give_one, &mine));
  for (int i = 0; i < 4; i++) mine.blocks[i] = take(limited, PTN_PAGE_BYTES);
  void *block = take(limited, 3 * PTN_PAGE_BYTES), *refused;
  CHECK(mine.asked == 2 && mine.held == 2 && mine.missing_bytes == PTN_PAGE_BYTES);
  CHECK(ptn_arena_alloc(limited, 9 * PTN_PAGE_BYTES, &refused) == PTN_BUDGET);
  CHECK(mine.held == 0 && mine.asked == 5 && stats_of(limited).refused_count == 1);
  CHECK(mine.asked_for_goal == 0);
  ptn_arena_free(block);
  ptn_account_destroy(limited);
}

static void what_pressure_fails_with_refuses_the_request(void) {
  hoard mine = {.held = 1, .fails = true};
  ptn_account *limited;
  CHECK_OK(ptn_account_create(&limited, 2 * PTN_PAGE_BYTES, give_one, &mine));
  mine.blocks[0] = take(limited, PTN_PAGE_BYTES);
  void *block = take(limited, 2 * PTN_PAGE_BYTES), *refused;
  CHECK(mine.asked == 1 && mine.held == 0);
  CHECK(ptn_arena_alloc(limited, 1, &refused) == PTN_DISK && !refused && strstr(ptn_last_error()->message, "written"));
  CHECK(ptn_account_charge(limited, 1) == PTN_DISK && mine.asked == 3);
  CHECK(stats_of(limited).refused_count == 0 && stats_of(limited).live_bytes == 2 * PTN_PAGE_BYTES);
  ptn_arena_free(block);
  ptn_account_destroy(limited);
}

static void a_goal_asks_first_and_never_refuses(void) {
  hoard mine = {.held = 2};
  ptn_account *limited;
  CHECK_OK(ptn_account_create(&limited, 8 * PTN_PAGE_BYTES, give_one, &mine));
  ptn_account_set_goal(limited, 4 * PTN_PAGE_BYTES);
  CHECK(stats_of(limited).goal_bytes == 4 * PTN_PAGE_BYTES);
  for (int i = 0; i < 2; i++) mine.blocks[i] = take(limited, PTN_PAGE_BYTES);
  void *within = take(limited, 2 * PTN_PAGE_BYTES), *refused;
  CHECK(mine.asked == 0); /* the goal is reached, not passed */
  void *freed_for = take(limited, 100);
  CHECK(mine.asked == 1 && mine.asked_for_goal == 1 && mine.held == 1 && mine.missing_bytes == 128);
  void *beyond = take(limited, 4 * PTN_PAGE_BYTES); /* one is given, then nothing; it fits the limit */
  CHECK(mine.asked == 3 && mine.asked_for_goal == 3 && mine.held == 0);
  CHECK(mine.missing_bytes == 2 * PTN_PAGE_BYTES + 128 && stats_of(limited).live_bytes == 6 * PTN_PAGE_BYTES + 128);
  CHECK(ptn_arena_alloc(limited, 2 * PTN_PAGE_BYTES, &refused) == PTN_BUDGET && refused == NULL);
  CHECK(mine.asked == 5 && mine.asked_for_goal == 4 && mine.missing_bytes == 128); /* the last one for the limit */
  CHECK(ptn_arena_alloc(limited, SIZE_MAX, &refused) == PTN_BUDGET && mine.asked_for_goal == 5);
  CHECK(stats_of(limited).refused_count == 2);
  ptn_account_set_goal(limited, 0);
  void *last = take(limited, PTN_PAGE_BYTES);
  CHECK(mine.asked == 7);
  ptn_arena_free(last);
  ptn_arena_free(beyond);
  ptn_arena_free(freed_for);
  ptn_arena_free(within);
  ptn_account_destroy(limited);
  ptn_arena_check();
}

/* What the limit is asked to give is not asked again for the goal's sake. */
static void a_goal_and_a_limit_are_asked_in_turn(void) {
  hoard mine = {.held = 3};
  ptn_account *limited;
  CHECK_OK(ptn_account_create(&limited, 4 * PTN_PAGE_BYTES, give_one, &mine));
  for (int i = 0; i < 3; i++) mine.blocks[i] = take(limited, PTN_PAGE_BYTES);
  ptn_account_set_goal(limited, 8 * PTN_PAGE_BYTES); /* beyond the limit: never asked */
  void *block = take(limited, 2 * PTN_PAGE_BYTES);
  CHECK(mine.asked == 1 && mine.asked_for_goal == 0 && mine.held == 2);
  ptn_arena_free(block);
  ptn_account_set_goal(limited, 3 * PTN_PAGE_BYTES);
  void *refused;
  hoard all = mine;
  mine.held = 0;
  CHECK(ptn_arena_alloc(limited, SIZE_MAX, &refused) == PTN_BUDGET && mine.asked_for_goal == 1); /* no sum overflows */
  mine = all;
  ptn_account_set_goal(limited, 1);
  block = take(limited, 4 * PTN_PAGE_BYTES);
  CHECK(mine.held == 0 && mine.asked == 4 && mine.asked_for_goal == 3); /* two gave, the third ended the asking; then it fits */
  ptn_arena_free(block);
  ptn_account_destroy(limited);

  ptn_account *silent = account(2 * PTN_PAGE_BYTES); /* nobody to ask */
  ptn_account_set_goal(silent, 1);
  ptn_arena_free(take(silent, 2 * PTN_PAGE_BYTES));
  ptn_account_destroy(silent);
  ptn_account *again = account(2 * PTN_PAGE_BYTES); /* a struct used again has no goal of before */
  CHECK(stats_of(again).goal_bytes == 0);
  ptn_account_destroy(again);
}

static void room_is_what_is_left_until_goal_or_limit(void) {
  ptn_account *limited = account(8 * PTN_PAGE_BYTES), *free_one = account(0);
  void *block = take(limited, 2 * PTN_PAGE_BYTES), *other = take(free_one, PTN_PAGE_BYTES);
  CHECK(ptn_account_room(limited) == 6 * PTN_PAGE_BYTES && ptn_account_room(free_one) == UINT64_MAX);
  ptn_account_set_goal(limited, 5 * PTN_PAGE_BYTES);
  CHECK(ptn_account_room(limited) == 3 * PTN_PAGE_BYTES);
  ptn_account_set_goal(limited, PTN_PAGE_BYTES);
  CHECK(ptn_account_room(limited) == 0);
  ptn_account_set_goal(limited, 9 * PTN_PAGE_BYTES);
  CHECK(ptn_account_room(limited) == 6 * PTN_PAGE_BYTES);
  ptn_account_set_goal(free_one, 3 * PTN_PAGE_BYTES);
  CHECK(ptn_account_room(free_one) == 2 * PTN_PAGE_BYTES);
  ptn_arena_free(block);
  ptn_arena_free(other);
  ptn_account_destroy(limited);
  ptn_account_destroy(free_one);
}

static void blocks_outlive_their_account(void) {
  uint64_t before_bytes = stats().live_bytes;
  ptn_account *gone = account(1 << 20);
  void *page = take(gone, 2 * PTN_PAGE_BYTES), *small = take(gone, 64), *other = take(gone, 64);
  ptn_arena_use(gone);
  ptn_arena_free(other);
  ptn_account_destroy(gone);
  CHECK(ptn_arena_used() == NULL);
  CHECK(stats().live_bytes == before_bytes + 2 * PTN_PAGE_BYTES + 64);
  ptn_arena_check();
  void *late = take(gone, 4 << 20); /* a thread that still had the account: it is counted, under no limit */
  ptn_account *fresh = account(1 << 20);
  CHECK(stats_of(fresh).live_bytes == 0);
  memset(small, 1, 64);
  ptn_arena_free(small);
  ptn_arena_free(page);
  ptn_arena_free(late);
  CHECK(stats().live_bytes == before_bytes && stats_of(fresh).live_bytes == 0);
  ptn_account_destroy(fresh);
  ptn_arena_check();
}

static uint64_t resident_bytes(void) {
  long size, pages;
  FILE *file = fopen("/proc/self/statm", "r");
  CHECK(file && fscanf(file, "%ld %ld", &size, &pages) == 2);
  fclose(file);
  return (uint64_t)pages * PTN_PAGE_BYTES;
}

/* Sizes that never fit what was freed before: only purging keeps the high-water mark. */
static void resident_memory_stays_at_the_high_water_mark(void) {
  ptn_arena_trim(0);
  uint64_t outside_bytes = resident_bytes() - stats().resident_bytes, state = 1;
  for (int round = 0; round < 30; round++) {
    void *blocks[16];
    size_t bytes = (size_t)(64 + check_random(&state) % 1000) * PTN_PAGE_BYTES;
    for (int i = 0; i < 16; i++) memset(blocks[i] = take(NULL, bytes), 1, bytes);
    ptn_arena_stats now = stats();
    CHECK(now.resident_bytes <= now.high_water_bytes + now.high_water_bytes / PTN_RESIDENT_PART + now.slack_bytes);
    CHECK(now.resident_bytes == now.live_bytes + now.cached_bytes);
    CHECK(resident_bytes() - outside_bytes < now.resident_bytes + 6 * PTN_MIB);
    for (int i = 0; i < 16; i++) ptn_arena_free(blocks[(5 * i) % 16]);
    ptn_arena_check();
  }
  CHECK(stats().cached_bytes > 16 * PTN_MIB && stats().purged_bytes > 0);
  ptn_arena_trim(8 * PTN_MIB);
  CHECK(stats().cached_bytes <= 8 * PTN_MIB && stats().cached_bytes > 0);
  ptn_arena_trim(0);
  CHECK(stats().cached_bytes == stats().slack_bytes && resident_bytes() - outside_bytes < 6 * PTN_MIB);
  ptn_arena_check();
}

/* Pages that lay on huge pages once must not come back as such when only some of them are put to use again. */
static void huge_pages_bring_nothing_that_is_not_counted(void) {
  enum { pair_count = 30 };
  char *pages[pair_count], *rests[pair_count], *whole = take(NULL, pair_count * PTN_HUGE_BYTES);
  memset(whole, 1, pair_count * PTN_HUGE_BYTES);
  ptn_arena_free(whole);
  ptn_arena_trim(0);
  uint64_t outside_bytes = resident_bytes() - stats().resident_bytes;
  for (int i = 0; i < pair_count; i++) {
    pages[i] = take(NULL, PTN_PAGE_BYTES);
    rests[i] = take(NULL, PTN_HUGE_BYTES - PTN_PAGE_BYTES);
  }
  for (int i = 0; i < pair_count; i++) ptn_arena_free(rests[i]);
  ptn_arena_trim(0);
  for (int i = 0; i < pair_count; i++) memset(pages[i], 1, PTN_PAGE_BYTES);
  CHECK(resident_bytes() - outside_bytes < stats().resident_bytes + 6 * PTN_MIB);
  for (int i = 0; i < pair_count; i++) ptn_arena_free(pages[i]);
}

/* Bytes of the arena that the system has in huge pages. */
static uint64_t huge_bytes(void) {
  FILE *file = fopen("/proc/self/smaps", "r");
  CHECK(file);
  char line[512];
  uint64_t sum = 0;
  bool ours = false;
  while (fgets(line, sizeof line, file)) {
    unsigned long long begin, end, kib;
    if (sscanf(line, "%llx-%llx ", &begin, &end) == 2) ours = ptn_arena_owns((const void *)(uintptr_t)begin);
    else if (ours && sscanf(line, "AnonHugePages: %llu kB", &kib) == 1) sum += kib << 10;
  }
  fclose(file);
  return sum;
}

/* Whether this system gathers pages (MADV_COLLAPSE, 25), tried on memory that is not the arena's. */
static bool system_gathers_pages(void) {
  enum { bytes = 2 * PTN_HUGE_BYTES };
  char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  char *huge = memory + (ptn_round_up((uintptr_t)memory, PTN_HUGE_BYTES) - (uintptr_t)memory);
  memset(huge, 1, PTN_HUGE_BYTES);
  bool gathers = madvise(huge, PTN_HUGE_BYTES, MADV_HUGEPAGE) == 0 && madvise(huge, PTN_HUGE_BYTES, 25) == 0;
  munmap(memory, bytes);
  return gathers;
}

/* Neighbours smaller than a huge page, each written before the next is made: they keep their bytes, come to lie in huge pages,
 * and nothing is resident that is not counted; also where holes among them were purged and are put to use again. */
static void huge_pages_are_gathered_from_neighbours(void) {
  enum { count = 64, odd_bytes = PTN_HUGE_BYTES / 2 + 5 * PTN_PAGE_BYTES };
  char *blocks[count];
  ptn_arena_trim(0);
  uint64_t outside_bytes = resident_bytes() - stats().resident_bytes;
  for (int round = 0; round < 3; round++) {
    for (int i = round > 0; i < count; i += 1 + (round > 0)) {
      blocks[i] = take(NULL, odd_bytes);
      memset(blocks[i], 1 + i, odd_bytes);
      CHECK(resident_bytes() - outside_bytes < stats().resident_bytes + 6 * PTN_MIB);
    }
    for (int i = 0; i < count; i++)
      for (size_t at = 0; at < odd_bytes; at += PTN_PAGE_BYTES / 2) CHECK(blocks[i][at] == 1 + i);
    if (system_gathers_pages()) CHECK(huge_bytes() > count * (uint64_t)odd_bytes / 2);
    ptn_arena_check();
    for (int i = 1; i < count; i += 2) ptn_arena_free(blocks[i]);
    ptn_arena_trim(0);
    CHECK(resident_bytes() - outside_bytes < stats().resident_bytes + 6 * PTN_MIB);
  }
  for (int i = 0; i < count; i += 2) ptn_arena_free(blocks[i]);
  ptn_arena_check();
}

static void cached_memory_counts_against_the_limits(void) {
  ptn_arena_free(take(NULL, 64 * PTN_MIB));
  CHECK(stats().resident_bytes >= 64 * PTN_MIB);
  ptn_account *limited = account(8 * PTN_MIB);
  CHECK(stats().resident_bytes - stats().slack_bytes <= 8 * PTN_MIB);
  ptn_arena_free(take(NULL, 64 * PTN_MIB));
  CHECK(stats().resident_bytes - stats().slack_bytes <= 8 * PTN_MIB);
  void *block = take(limited, 6 * PTN_MIB);
  CHECK(stats().resident_bytes - stats().slack_bytes <= 8 * PTN_MIB);
  ptn_arena_free(block);
  ptn_account_destroy(limited);
  ptn_arena_check();
}

static void a_size_freed_is_reused_without_the_system(void) {
  static const size_t sizes[] = {64, 4032, 4096, 1 << 20, 40 << 20};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    ptn_arena_free(take(NULL, sizes[i]));
    uint64_t mapped_count = stats().mapped_count;
    for (int again = 0; again < 100; again++) ptn_arena_free(take(NULL, sizes[i]));
    CHECK(stats().mapped_count == mapped_count);
  }
}

static void the_child_of_a_fork_has_an_arena(void) {
  ptn_account *limited = account(1 << 20);
  char *block = take(limited, 10000);
  memset(block, 7, 10000);
  ptn_arena_use(limited);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    CHECK(ptn_arena_used() == NULL && block[9999] == 7);
    void *own = take(ptn_arena_used(), 5 << 20);
    memset(own, 1, 5 << 20);
    ptn_arena_free(block);
    ptn_arena_free(own);
    ptn_arena_check();
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(ptn_arena_used() == limited && block[0] == 7);
  ptn_arena_free(block);
  ptn_account_destroy(limited);
}

/* In a child of its own: the limit cannot be raised again. */
static void a_system_that_refuses_is_an_error(void) {
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    void *block;
    CHECK(ptn_arena_alloc(NULL, (size_t)1 << 50, &block) == PTN_MEMORY && block == NULL);
    struct rlimit none = {0, 0};
    CHECK(setrlimit(RLIMIT_AS, &none) == 0);
    CHECK(ptn_arena_alloc(NULL, (size_t)1 << 40, &block) == PTN_MEMORY && block == NULL);
    CHECK(ptn_last_error()->sys_errno != 0 && ptn_last_error()->asked_bytes >= (size_t)1 << 40);
    CHECK_OK(ptn_arena_alloc(NULL, 1 << 20, &block)); /* what is reserved still works */
    ptn_arena_check();
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Random requests of all sizes and owners, held against a plain list of what was asked; contents are checked when freed. */
static void random_requests_hold_every_invariant(void) {
  enum { count = 400 };
  static struct {
    unsigned char *block, mark;
    size_t bytes;
    int owner;
  } held[count];
  ptn_account *owners[3] = {NULL, account(20 * PTN_MIB), account(0)};
  uint64_t state = 42, live_bytes[3] = {0};
  for (int round = 0; round < 20000; round++) {
    uint64_t dice = check_random(&state);
    size_t i = dice % count;
    if (held[i].block) {
      CHECK(held[i].block[0] == held[i].mark && held[i].block[held[i].bytes - 1] == held[i].mark);
      ptn_arena_free(held[i].block);
      live_bytes[held[i].owner] -= ptn_arena_rounded_bytes(held[i].bytes);
      held[i].block = NULL;
    } else {
      size_t bytes = 1 + (size_t)(check_random(&state) % ((uint64_t)1 << (6 + dice / count % 15)));
      int owner = (int)(dice / 8000 % 3);
      void *block;
      ptn_status status = ptn_arena_alloc(owners[owner], bytes, &block);
      bool fits = owner != 1 || live_bytes[1] + ptn_arena_rounded_bytes(bytes) <= 20 * PTN_MIB;
      CHECK(status == (fits ? PTN_OK : PTN_BUDGET));
      if (!fits) continue;
      held[i].block = block;
      held[i].bytes = bytes;
      held[i].owner = owner;
      held[i].mark = (unsigned char)dice;
      held[i].block[0] = held[i].block[bytes - 1] = held[i].mark;
      live_bytes[owner] += ptn_arena_rounded_bytes(bytes);
    }
    if (round % 5000 == 0) ptn_arena_trim((uint64_t)round * 100);
    if (round % 50 == 0) ptn_arena_check();
    CHECK(stats_of(owners[1]).live_bytes == live_bytes[1] && stats_of(owners[2]).live_bytes == live_bytes[2]);
  }
  for (size_t i = 0; i < count; i++) ptn_arena_free(held[i].block);
  ptn_account_destroy(owners[1]);
  ptn_account_destroy(owners[2]);
  ptn_arena_check();
}

static void charges_count_beside_blocks(void) {
  ptn_account *owner = account(16 * PTN_MIB), *other = account(0);
  uint64_t before = stats().live_bytes, ceiling = stats().resident_bytes;
  CHECK_OK(ptn_account_charge(owner, 12 * PTN_MIB));
  CHECK(stats_of(owner).live_bytes == 12 * PTN_MIB && stats().live_bytes == before && stats().resident_bytes == ceiling);
  void *block = take(owner, 4 * PTN_MIB), *none;
  CHECK(ptn_account_charge(owner, 1) == PTN_BUDGET && ptn_last_error()->asked_bytes == 1);
  CHECK(ptn_arena_alloc(owner, 1, &none) == PTN_BUDGET);
  CHECK(stats_of(owner).peak_bytes == 16 * PTN_MIB && stats_of(owner).refused_count == 2);
  CHECK_OK(ptn_account_charge(other, PTN_MIB));
  CHECK_OK(ptn_account_charge(NULL, PTN_MIB)); /* nobody counts it */
  ptn_account_discharge(NULL, PTN_MIB);
  ptn_arena_check();
  ptn_account_discharge(owner, 4 * PTN_MIB);
  CHECK_OK(ptn_account_charge(owner, 4 * PTN_MIB));
  ptn_account_destroy(owner); /* its block and its charges outlive it, and nobody gets its struct meanwhile */
  ptn_arena_free(block);
  ptn_account *fresh = account(0);
  CHECK(fresh != owner && stats_of(fresh).live_bytes == 0);
  ptn_account_discharge(owner, 12 * PTN_MIB);
  ptn_arena_check();
  ptn_account_discharge(other, PTN_MIB);
  ptn_account_destroy(other);
  ptn_account_destroy(fresh);
}

int main(void) {
  sizes_are_rounded_and_aligned();
  a_limit_holds_to_the_byte();
  intervals_have_their_own_peak();
  pressure_is_asked_until_it_can_do_no_more();
  what_pressure_fails_with_refuses_the_request();
  a_goal_asks_first_and_never_refuses();
  a_goal_and_a_limit_are_asked_in_turn();
  room_is_what_is_left_until_goal_or_limit();
  blocks_outlive_their_account();
  charges_count_beside_blocks();
  resident_memory_stays_at_the_high_water_mark();
  huge_pages_bring_nothing_that_is_not_counted();
  huge_pages_are_gathered_from_neighbours();
  cached_memory_counts_against_the_limits();
  a_size_freed_is_reused_without_the_system();
  the_child_of_a_fork_has_an_arena();
  a_system_that_refuses_is_an_error();
  random_requests_hold_every_invariant();
  CHECK(stats().live_bytes == 0);
  return 0;
}
