/* The checksum: the published CRC-32C, the same from every function, and what it promises of flipped bits. */
#include <stdbool.h>
#include <string.h>
#include <sys/auxv.h>

#include "base/bytes.h"
#include "base/checksum.h"

#include "check.h"

#define PAGE ((size_t)PTN_PAGE_BYTES)
static uint64_t seed = 3;
static const char *const names[] = {"vpclmulqdq-512", "vpclmulqdq-256", "pclmulqdq", "crc32c", "plain"};
#define NAMES (sizeof names / sizeof *names)

static void fill(unsigned char *memory, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) memory[i] = (unsigned char)check_random(&seed);
}

/* Of RFC 3720, B.4, and the check value of the catalogues. */
static void published_values(void) {
  unsigned char zeros[32] = {0}, ones[32], up[32], down[32];
  memset(ones, 0xFF, sizeof ones);
  for (size_t i = 0; i < 32; i++) {
    up[i] = (unsigned char)i;
    down[i] = (unsigned char)(31 - i);
  }
  for (size_t k = 0; k < NAMES; k++) {
    ptn_checksum_function sum = ptn_checksum_by(names[k]);
    if (!sum) continue;
    CHECK(sum("123456789", 9) == 0xE3069283u && sum(zeros, 0) == 0);
    CHECK(sum(zeros, 32) == 0x8A9136AAu && sum(ones, 32) == 0x62A8AB43u);
    CHECK(sum(up, 32) == 0x46DD794Eu && sum(down, 32) == 0x113FDB5Cu);
  }
}

/* Bit by bit, as the standard describes it. */
static uint32_t by_definition(const unsigned char *memory, size_t bytes) {
  uint32_t sum = ~0u;
  for (size_t i = 0; i < bytes; i++) {
    sum ^= memory[i];
    for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0x82F63B78u : 0);
  }
  return ~sum;
}

static void all_are_equal(void) {
  enum { MOST = 1 << 14 };
  unsigned char *memory = malloc(MOST);
  CHECK(memory);
  fill(memory, MOST);
  for (size_t k = 0; k < NAMES; k++) {
    ptn_checksum_function sum = ptn_checksum_by(names[k]);
    if (!sum) continue;
    for (size_t bytes = 0; bytes <= 1100; bytes += bytes < 40 ? 1 : 7) {
      unsigned char *tight = malloc(bytes + 1); /* a sanitizer sees a read behind the end */
      CHECK(tight);
      memcpy(tight + 1, memory, bytes);
      CHECK(sum(tight + 1, bytes) == by_definition(memory, bytes));
      free(tight);
    }
    for (int i = 0; i < 40; i++) {
      size_t shift = check_random(&seed) % 64, bytes = check_random(&seed) % (MOST - 64);
      CHECK(sum(memory + shift, bytes) == by_definition(memory + shift, bytes));
      CHECK(ptn_checksum_best()(memory + shift, bytes) == sum(memory + shift, bytes));
    }
  }
  free(memory);
}

/* Of pieces, also empty ones, and of so many zeros that no memory holds them: those in two ways. */
static void sums_join(void) {
  enum { MOST = 1 << 14 };
  unsigned char *memory = malloc(MOST);
  CHECK(memory);
  fill(memory, MOST);
  for (int i = 0; i < 400; i++) {
    size_t bytes = check_random(&seed) % MOST, first = i % 8 ? check_random(&seed) % (bytes + 1) : i % 16 ? bytes : 0;
    uint32_t joined =
        ptn_checksum_joined(ptn_checksum_plain(memory, first), ptn_checksum_plain(memory + first, bytes - first), bytes - first);
    CHECK(joined == by_definition(memory, bytes));
  }
  CHECK(ptn_checksum_joined(0, ptn_checksum_plain(memory, 9), 9) == ptn_checksum_plain(memory, 9));
  memset(memory, 0, PAGE);
  uint32_t doubled = ptn_checksum_plain(memory, PAGE), added = 0, twelfth = 0;
  for (int doublings = 0; doublings < 31; doublings++) {
    if (doublings == 12) twelfth = doubled;
    doubled = ptn_checksum_joined(doubled, doubled, PAGE << doublings);
  }
  for (int i = 0; i < 1 << 19; i++) added = ptn_checksum_joined(added, twelfth, PAGE << 12);
  CHECK(added == doubled); /* 8 TiB */
  free(memory);
}

static void flip(unsigned char *memory, size_t bit) { memory[bit / 8] ^= (unsigned char)(1u << bit % 8); }

/* One bit: each. Two and three: at random. Bursts of up to 32 bits: everywhere. */
static void flipped_bits_show(void) {
  unsigned char memory[PTN_PAGE_BYTES];
  fill(memory, PAGE);
  ptn_checksum_function sum = ptn_checksum_best();
  const uint32_t good = sum(memory, PAGE);
  for (size_t bit = 0; bit < 8 * PAGE; bit++) {
    flip(memory, bit);
    CHECK(sum(memory, PAGE) != good);
    flip(memory, bit);
  }
  for (int i = 0; i < 40000; i++) {
    size_t bits[3], count = 2 + check_random(&seed) % 2;
    for (size_t n = 0; n < count; n++) flip(memory, bits[n] = check_random(&seed) % (8 * PAGE));
    bool same = bits[0] == bits[1] && count == 2; /* flipped back */
    CHECK(same || sum(memory, PAGE) != good);
    for (size_t n = 0; n < count; n++) flip(memory, bits[n]);
  }
  for (size_t begin = 0; begin + 32 <= 8 * PAGE; begin++) {
    uint32_t burst = (uint32_t)check_random(&seed) | 1u;
    for (size_t bit = 0; bit < 32; bit++)
      if (burst >> bit & 1) flip(memory, begin + bit);
    CHECK(sum(memory, PAGE) != good);
    for (size_t bit = 0; bit < 32; bit++)
      if (burst >> bit & 1) flip(memory, begin + bit);
  }
  CHECK(sum(memory, PAGE) == good);
}

/* Two parts that changed places are not the same bytes. */
static void swapped_parts_show(void) {
  unsigned char memory[PTN_PAGE_BYTES], swapped[sizeof memory];
  fill(memory, PAGE);
  for (size_t part = 8; part <= PAGE / 2; part *= 2) {
    memcpy(swapped, memory, PAGE);
    memcpy(swapped, memory + part, part);
    memcpy(swapped + part, memory, part);
    CHECK(ptn_checksum_best()(swapped, PAGE) != ptn_checksum_best()(memory, PAGE));
  }
}

/* A build whose fast path is not taken where it is there would pass everything above. */
static void the_instruction_is_used_where_it_is(void) {
  const char *best = "plain";
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) best = "pclmulqdq";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq")) best = "vpclmulqdq-256";
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) best = "vpclmulqdq-512";
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & 1ul << 7) best = "crc32c";
#endif
  CHECK(strcmp(ptn_checksum_name(), best) == 0 && ptn_checksum_by(best) == ptn_checksum_best() && !ptn_checksum_by("crc32"));
}

int main(void) {
  published_values();
  all_are_equal();
  sums_join();
  flipped_bits_show();
  swapped_parts_show();
  the_instruction_is_used_where_it_is();
  return 0;
}
