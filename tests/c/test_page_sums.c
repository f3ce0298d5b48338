/* The checksums of a file's pages: across the seams of segments, as the file grows and shrinks, forgotten, and exact to the page. */
/* sources: csrc/disk/page_sums.c */
#include <stdbool.h>
#include <string.h>

#include "base/bytes.h"
#include "check.h"
#include "disk/page_sums.h"

#define PAGE ((uint64_t)PTN_PAGE_BYTES)
#define FIRST (64 * PTN_MIB) /* where the second segment begins; the third one does at three times as much */

static uint64_t seed = 5;

static void fill(char *memory, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i++) memory[i] = (char)check_random(&seed);
}

/* Every page differs from all others, so that a sum in the wrong place shows. */
static void each_place_has_its_own(void) {
  enum { PAGES = 9 };
  const uint64_t places[] = {
      0, FIRST - 4 * PAGE, FIRST + 5 * PAGE, 3 * FIRST - PAGE, 3 * FIRST + 8 * PAGE, 31 * FIRST - 3 * PAGE};
  char memory[6][PAGES * PTN_PAGE_BYTES];
  ptn_page_sums sums;
  ptn_page_sums_create(&sums);
  for (size_t i = 0; i < 6; i++) { /* the file grows as they are written */
    CHECK_OK(ptn_page_sums_reach(&sums, places[i] + PAGES * PAGE));
    fill(memory[i], PAGES * PAGE);
    ptn_page_sums_note(&sums, memory[i], places[i], PAGES * PAGE);
  }
  uint64_t unwritten_bytes = 0;
  for (size_t i = 0; i < 6; i++) {
    CHECK(ptn_page_sums_check(&sums, memory[i], places[i], PAGES * PAGE, &unwritten_bytes) == PTN_PAGE_SUMS_ALL_GOOD);
    for (uint64_t page = 0; page < PAGES; page++) {
      char *bad = memory[i] + page * PAGE + check_random(&seed) % PAGE;
      *bad = (char)(*bad ^ 32);
      CHECK(ptn_page_sums_check(&sums, memory[i], places[i], PAGES * PAGE, &unwritten_bytes) == places[i] + page * PAGE);
      *bad = (char)(*bad ^ 32);
    }
  }
  CHECK(unwritten_bytes == 0);
  ptn_page_sums_destroy(&sums);
}

static bool zeros(const char *memory, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i++)
    if (memory[i]) return false;
  return true;
}

/* What was never written, or is forgotten, is zeros, whatever the disk holds; its neighbours stay. */
static void forgotten_pages_are_zeros(void) {
  enum { PAGES = 6 };
  char memory[PAGES * PTN_PAGE_BYTES], other[PAGES * PTN_PAGE_BYTES];
  const uint64_t at = FIRST - 3 * PAGE;
  ptn_page_sums sums;
  ptn_page_sums_create(&sums);
  CHECK_OK(ptn_page_sums_reach(&sums, 2 * FIRST));
  fill(memory, sizeof memory);
  uint64_t unwritten_bytes = 0;
  memcpy(other, memory, sizeof other);
  CHECK(ptn_page_sums_check(&sums, other, at, sizeof other, &unwritten_bytes) == PTN_PAGE_SUMS_ALL_GOOD);
  CHECK(unwritten_bytes == sizeof other && zeros(other, sizeof other));
  ptn_page_sums_note(&sums, memory, at, sizeof memory);
  ptn_page_sums_forget(&sums, at + 2 * PAGE, 3 * PAGE); /* across a seam */
  memcpy(other, memory, sizeof other);
  unwritten_bytes = 0;
  CHECK(ptn_page_sums_check(&sums, other, at, sizeof other, &unwritten_bytes) == PTN_PAGE_SUMS_ALL_GOOD);
  CHECK(unwritten_bytes == 3 * PAGE && zeros(other + 2 * PAGE, 3 * PAGE));
  CHECK(memcmp(other, memory, 2 * PAGE) == 0 && memcmp(other + 5 * PAGE, memory + 5 * PAGE, PAGE) == 0);
  other[5 * PAGE] ^= 1; /* a page that is forgotten hides no other */
  CHECK(ptn_page_sums_check(&sums, other, at, sizeof other, &unwritten_bytes) == at + 5 * PAGE);
  ptn_page_sums_destroy(&sums);
}

/* What the file gave back is new when it grows again; what it kept is known still. */
static void a_file_shrinks(void) {
  char memory[PTN_PAGE_BYTES];
  ptn_page_sums sums;
  ptn_page_sums_create(&sums);
  for (int round = 0; round < 3; round++) {
    CHECK_OK(ptn_page_sums_reach(&sums, 4 * FIRST));
    uint64_t unwritten_bytes = 0;
    fill(memory, PAGE);
    CHECK(ptn_page_sums_check(&sums, memory, 3 * FIRST, PAGE, &unwritten_bytes) == PTN_PAGE_SUMS_ALL_GOOD);
    CHECK(unwritten_bytes == PAGE);
    fill(memory, PAGE);
    ptn_page_sums_note(&sums, memory, 3 * FIRST, PAGE);
    ptn_page_sums_note(&sums, memory, 3 * FIRST - PAGE, PAGE);
    ptn_page_sums_shrink(&sums, 3 * FIRST);
    CHECK(ptn_page_sums_check(&sums, memory, 3 * FIRST - PAGE, PAGE, &unwritten_bytes) == PTN_PAGE_SUMS_ALL_GOOD);
    CHECK(unwritten_bytes == PAGE);
  }
  ptn_page_sums_destroy(&sums);
}

/* A page whose checksum is 0, the value that means "never written". The last four bytes are tried from the end: each flip of a bit of
 * theirs changes the sum by a fixed difference, so they are solved for. */
static void a_sum_of_zero(void) {
  unsigned char page[PTN_PAGE_BYTES];
  fill((char *)page, PAGE);
  ptn_checksum_function sum = ptn_checksum_best();
  uint32_t rest = sum(page, PAGE), columns[32], bits[32];
  for (uint32_t bit = 0; bit < 32; bit++) {
    page[PAGE - 4 + bit / 8] ^= (unsigned char)(1u << bit % 8);
    columns[bit] = sum(page, PAGE) ^ rest;
    bits[bit] = 1u << bit;
    page[PAGE - 4 + bit / 8] ^= (unsigned char)(1u << bit % 8);
  }
  uint32_t flips = 0;
  for (uint32_t at = 0; at < 32; at++) { /* elimination: column `at` becomes the one with bit `at`, the only one */
    uint32_t pivot = at;
    while (!(columns[pivot] >> at & 1)) pivot++;
    CHECK(pivot < 32);
    uint32_t column = columns[pivot], bit = bits[pivot];
    columns[pivot] = columns[at];
    bits[pivot] = bits[at];
    columns[at] = column;
    bits[at] = bit;
    for (uint32_t i = 0; i < 32; i++) {
      if (i == at || !(columns[i] >> at & 1)) continue;
      columns[i] ^= column;
      bits[i] ^= bit;
    }
  }
  for (uint32_t at = 0; at < 32; at++)
    if (rest >> at & 1) flips ^= bits[at];
  for (uint32_t bit = 0; bit < 32; bit++)
    if (flips >> bit & 1) page[PAGE - 4 + bit / 8] ^= (unsigned char)(1u << bit % 8);
  CHECK(sum(page, PAGE) == 0);
  ptn_page_sums sums;
  ptn_page_sums_create(&sums);
  CHECK_OK(ptn_page_sums_reach(&sums, FIRST));
  ptn_page_sums_note(&sums, page, PAGE, PAGE);
  uint64_t unwritten_bytes = 0;
  CHECK(ptn_page_sums_check(&sums, page, PAGE, PAGE, &unwritten_bytes) == PTN_PAGE_SUMS_ALL_GOOD && unwritten_bytes == 0);
  page[17] ^= 8;
  CHECK(ptn_page_sums_check(&sums, page, PAGE, PAGE, &unwritten_bytes) == PAGE && unwritten_bytes == 0);
  ptn_page_sums_destroy(&sums);
}

int main(void) {
  each_place_has_its_own();
  forgotten_pages_are_zeros();
  a_file_shrinks();
  a_sum_of_zero();
  return 0;
}
