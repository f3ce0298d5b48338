/* See page_sums.h.
 *
 * Problem: a table that grows with the file, and is used by threads that read and write other pages meanwhile. Design: segments that
 * never move, each twice as long as the one before, so that a few dozen pointers are enough for any file and whoever knows a page
 * finds its sum without a lock. Segments are anonymous mappings: of a long one only the part is memory that sums were written to.
 *
 * Invariant: 0 stands for a page that was never written; a sum that comes to 0 is kept as 1. (One or two flipped bits are noticed
 * all the same: the difference between the two is that of three bits or more.)
 */
#define _GNU_SOURCE
#include "disk/page_sums.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>

#include "base/bytes.h"

#define FIRST_PAGES ((uint64_t)1 << 14) /* of the first segment: 64 MiB of file */

static uint64_t pages_in(int segment) { return FIRST_PAGES << segment; }
static uint64_t pages_before(int segment) { return pages_in(segment) - FIRST_PAGES; }
static int segment_of(uint64_t page) { return 63 - __builtin_clzll(page / FIRST_PAGES + 1); }

static uint32_t *place_of(const ptn_page_sums *sums, uint64_t page) {
  int segment = segment_of(page);
  return sums->segments[segment] + (page - pages_before(segment));
}

void ptn_page_sums_create(ptn_page_sums *sums) { *sums = (ptn_page_sums){.sum = ptn_checksum_best()}; }

void ptn_page_sums_destroy(ptn_page_sums *sums) { ptn_page_sums_shrink(sums, 0); }

ptn_status ptn_page_sums_reach(ptn_page_sums *sums, uint64_t file_bytes) {
  for (int i = 0; pages_before(i) < file_bytes / PTN_PAGE_BYTES; i++) {
    if (sums->segments[i]) continue;
    size_t bytes = (size_t)pages_in(i) * sizeof(uint32_t);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
      return ptn_fail(PTN_MEMORY, "no memory for the checksums of %" PRIu64 " bytes on disk: %s", file_bytes, strerror(errno));
    sums->segments[i] = memory;
  }
  return PTN_OK;
}

void ptn_page_sums_shrink(ptn_page_sums *sums, uint64_t file_bytes) {
  for (int i = 0; i < PTN_PAGE_SUMS_SEGMENTS; i++) {
    if (!sums->segments[i] || pages_before(i) < file_bytes / PTN_PAGE_BYTES) continue;
    munmap(sums->segments[i], (size_t)pages_in(i) * sizeof(uint32_t));
    sums->segments[i] = NULL;
  }
}

static uint32_t sum_of(const ptn_page_sums *sums, const void *page) {
  uint32_t sum = sums->sum(page, PTN_PAGE_BYTES);
  return sum ? sum : 1;
}

/* Of the pages from here on, those whose sums lie side by side; *places: theirs. */
static uint64_t run_of(const ptn_page_sums *sums, uint64_t page, uint64_t end, uint32_t **places) {
  *places = place_of(sums, page);
  return ptn_min_u64(end, pages_before(segment_of(page) + 1)) - page;
}

void ptn_page_sums_forget(ptn_page_sums *sums, uint64_t offset, uint64_t bytes) {
  uint64_t page = offset / PTN_PAGE_BYTES, end = page + bytes / PTN_PAGE_BYTES;
  uint32_t *places;
  while (page < end) {
    uint64_t count = run_of(sums, page, end, &places);
    memset(places, 0, (size_t)count * sizeof *places);
    page += count;
  }
}

void ptn_page_sums_note(ptn_page_sums *sums, const void *memory, uint64_t offset, uint64_t bytes) {
  uint64_t page = offset / PTN_PAGE_BYTES, end = page + bytes / PTN_PAGE_BYTES;
  const char *next = memory;
  uint32_t *places;
  while (page < end) {
    uint64_t count = run_of(sums, page, end, &places);
    for (uint64_t i = 0; i < count; i++, next += PTN_PAGE_BYTES) places[i] = sum_of(sums, next);
    page += count;
  }
}

uint64_t ptn_page_sums_check(const ptn_page_sums *sums, void *memory, uint64_t offset, uint64_t bytes,
                             uint64_t *unwritten_bytes) {
  uint64_t page = offset / PTN_PAGE_BYTES, end = page + bytes / PTN_PAGE_BYTES, bad_offset = PTN_PAGE_SUMS_ALL_GOOD;
  char *next = memory;
  uint32_t *places;
  while (page < end) {
    uint64_t count = run_of(sums, page, end, &places);
    for (uint64_t i = 0; i < count; i++, next += PTN_PAGE_BYTES) {
      if (places[i] == 0) {
        memset(next, 0, PTN_PAGE_BYTES);
        *unwritten_bytes += PTN_PAGE_BYTES;
      } else if (bad_offset == PTN_PAGE_SUMS_ALL_GOOD && sum_of(sums, next) != places[i]) {
        bad_offset = (page + i) * PTN_PAGE_BYTES;
      }
    }
    page += count;
  }
  return bad_offset;
}
