/* The map of the store's file against a model that knows the owner of every page. */
/* sources: csrc/disk/space.c */
#include "disk/space.h"

#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/bytes.h"
#include "fuzz.h"

#define PAGES 4096
#define EXTENTS 256

static uint16_t owner[PAGES]; /* 0: free */
static ptn_extent held[EXTENTS];

/* The first place of the model where `pages` free pages lie, or PAGES. */
static uint64_t first_fit(uint64_t pages, uint64_t end) {
  for (uint64_t begin = 0, run = 0; begin + run < end;) {
    if (owner[begin + run] != 0) {
      begin += run + 1;
      run = 0;
    } else if (++run == pages) {
      return begin;
    }
  }
  return PAGES;
}

static void mark(ptn_extent extent, uint16_t from, uint16_t to) {
  for (uint64_t page = extent.offset / PTN_PAGE_BYTES; page < (extent.offset + extent.bytes) / PTN_PAGE_BYTES; page++) {
    CHECK(owner[page] == from);
    owner[page] = to;
  }
}

static uint64_t model_used_end(uint64_t end) {
  while (end > 0 && owner[end - 1] == 0) end--;
  return end;
}

static size_t model_holes(uint64_t end) {
  size_t holes = 0;
  for (uint64_t page = 0; page < end; page++) holes += owner[page] == 0 && (page == 0 || owner[page - 1] != 0);
  return holes;
}

static void random_extents(uint64_t seed) {
  ptn_space space;
  ptn_space_create(&space);
  memset(owner, 0, sizeof owner);
  memset(held, 0, sizeof held);
  uint64_t end = 0; /* pages */
  for (int step = 0; step < 4000; step++) {
    uint16_t which = (uint16_t)(check_random(&seed) % EXTENTS);
    if (held[which].bytes > 0) {
      mark(held[which], (uint16_t)(which + 1), 0);
      ptn_space_give(&space, held[which]);
      held[which] = (ptn_extent){0};
      if (check_random(&seed) % 4 == 0) {
        end = model_used_end(end);
        ptn_space_set_end(&space, end * PTN_PAGE_BYTES);
      }
    } else {
      uint64_t pages = 1 + check_random(&seed) % (check_random(&seed) % 8 ? 12 : 60);
      uint64_t place = first_fit(pages, end);
      CHECK_OK(ptn_space_take(&space, pages * PTN_PAGE_BYTES, &held[which]));
      if (place == PAGES) {
        CHECK(held[which].bytes == 0);
        uint64_t longer = ptn_min_u64(PAGES, model_used_end(end) + pages + check_random(&seed) % 40);
        if (longer < model_used_end(end) + pages) continue;
        end = longer;
        ptn_space_set_end(&space, end * PTN_PAGE_BYTES);
        place = first_fit(pages, end);
        CHECK_OK(ptn_space_take(&space, pages * PTN_PAGE_BYTES, &held[which]));
      }
      CHECK(held[which].offset == place * PTN_PAGE_BYTES && held[which].bytes == pages * PTN_PAGE_BYTES);
      mark(held[which], 0, (uint16_t)(which + 1));
    }
    CHECK(ptn_space_check(&space));
    CHECK(space.holes_count == model_holes(end));
    CHECK(ptn_space_used_end(&space) == model_used_end(end) * PTN_PAGE_BYTES);
  }
  for (size_t i = 0; i < EXTENTS; i++)
    if (held[i].bytes > 0) ptn_space_give(&space, held[i]);
  CHECK(space.holes_count <= 1 && ptn_space_used_end(&space) == 0);
  ptn_space_destroy(&space);
}

typedef void (*misuse)(ptn_space *space, ptn_extent extent);
static void give_twice(ptn_space *space, ptn_extent extent) {
  ptn_space_give(space, extent);
  ptn_space_give(space, extent);
}
static void give_past_end(ptn_space *space, ptn_extent extent) {
  extent.offset += space->end_bytes;
  ptn_space_give(space, extent);
}
static void give_too_much(ptn_space *space, ptn_extent extent) {
  extent.bytes += PTN_PAGE_BYTES; /* the page behind is free */
  ptn_space_give(space, extent);
}
static void cut_used(ptn_space *space, ptn_extent extent) { ptn_space_set_end(space, extent.offset); }

/* Going on after any of these would put two owners on one page. */
static void misuse_aborts(misuse misuse) {
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    ptn_space space;
    ptn_space_create(&space);
    ptn_extent first, second;
    if (ptn_space_take(&space, PTN_PAGE_BYTES, &first) != PTN_OK || first.bytes != 0) _exit(3);
    ptn_space_set_end(&space, 16 * PTN_PAGE_BYTES);
    if (ptn_space_take(&space, 2 * PTN_PAGE_BYTES, &first) != PTN_OK) _exit(3);
    if (ptn_space_take(&space, 2 * PTN_PAGE_BYTES, &second) != PTN_OK) _exit(3);
    misuse(&space, second);
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == 6);
}

int main(void) {
  fuzz("space", random_extents);
  misuse_aborts(give_twice);
  misuse_aborts(give_past_end);
  misuse_aborts(give_too_much);
  misuse_aborts(cut_used);
  return 0;
}
