/* The checksum: congruent to the bytes as a polynomial, all functions give the same value, and flipped bits show. */
#include <string.h>

#include "base/checksum.h"
#include "check.h"

enum { LANES = 16, WORD = 16 };
static uint64_t seed = 3;
static const char *const names[] = {"vpclmulqdq-512", "vpclmulqdq-256", "pclmulqdq", "plain"};

/* ---- the definition, bit by bit ---- */

static uint64_t times_x(uint64_t value) { return value << 1 ^ (value >> 63 ? 0x42F0E1EBA9EA3693u : 0); }

static uint64_t add_bits(uint64_t value, uint64_t bits) {
  for (int bit = 63; bit >= 0; bit--) value = times_x(value) ^ (bits >> bit & 1);
  return value;
}

/* The polynomial is the published one: CRC-64 of ECMA-182 has this check value, highest bit of each byte first. */
static void the_polynomial_is_ecma_182(void) {
  uint64_t crc = 0;
  for (const char *next = "123456789"; *next; next++) {
    crc ^= (uint64_t)(unsigned char)*next << 56;
    for (int bit = 0; bit < 8; bit++) crc = times_x(crc);
  }
  CHECK(crc == 0x6C40DF5F0B497347u);
}

/* Words in the order of memory, each of two little-endian halves; what is missing of the last round is zero; and the length. */
static void it_is_congruent_to_the_bytes(void) {
  for (size_t bytes = 0; bytes < 3 * LANES * WORD + 20; bytes += 1 + check_random(&seed) % 9) {
    unsigned char memory[4 * LANES * WORD] = {0};
    for (size_t i = 0; i < bytes; i++) memory[i] = (unsigned char)check_random(&seed);
    size_t words = (bytes + LANES * WORD - 1) / (LANES * WORD) * LANES;
    uint64_t value = 0, length = bytes;
    for (size_t i = 0; i < words; i++) {
      uint64_t halves[2];
      memcpy(halves, memory + i * WORD, WORD);
      value = add_bits(add_bits(value, halves[1]), halves[0]);
    }
    for (size_t i = 0; i < 128 * (words + LANES - 1); i++) length = times_x(length);
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
      ptn_checksum_function sum_by = ptn_checksum_by(names[k]);
      if (!sum_by) continue;
      ptn_checksum sum = sum_by(memory, bytes);
      CHECK(add_bits(add_bits(0, sum.high), sum.low) == (value ^ length));
    }
  }
}

static void all_are_equal(void) {
  enum { MOST = 1 << 16 };
  unsigned char *memory = malloc(MOST);
  CHECK(memory);
  for (size_t i = 0; i < MOST; i++) memory[i] = (unsigned char)check_random(&seed);
  for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
    ptn_checksum_function sum_by = ptn_checksum_by(names[k]);
    if (!sum_by) continue;
    for (size_t bytes = 0; bytes <= 600; bytes += bytes < 40 ? 1 : 7) {
      for (size_t shift = 0; shift <= 16; shift += 1 + shift / 4) {
        unsigned char *tight = malloc(shift + bytes + 1); /* a sanitizer sees a read behind the end */
        CHECK(tight);
        unsigned char *end = tight + shift + bytes + 1;
        memcpy(end - bytes, memory + shift, bytes);
        CHECK(ptn_checksum_equal(sum_by(end - bytes, bytes), ptn_checksum_plain(memory + shift, bytes)));
        free(tight);
      }
    }
    for (int i = 0; i < 20; i++) {
      size_t shift = check_random(&seed) % 64, bytes = check_random(&seed) % (MOST - 64);
      CHECK(ptn_checksum_equal(sum_by(memory + shift, bytes), ptn_checksum_plain(memory + shift, bytes)));
      CHECK(ptn_checksum_equal(sum_by(memory + shift, bytes), ptn_checksum_of(memory + shift, bytes)));
    }
  }
  free(memory);
}

/* The values for a page of zeros and its neighbours in length differ: what is missing at the end shows too. */
static void lengths_of_zeros_differ(void) {
  static const unsigned char zeros[4200];
  for (size_t bytes = 4050; bytes < 4200; bytes++)
    CHECK(!ptn_checksum_equal(ptn_checksum_of(zeros, bytes), ptn_checksum_of(zeros, bytes - 1)));
}

static void flipped_bits_show(void) {
  unsigned char memory[4096 + 5];
  for (size_t i = 0; i < sizeof memory; i++) memory[i] = (unsigned char)check_random(&seed);
  ptn_checksum good = ptn_checksum_of(memory, sizeof memory);
  for (size_t bit = 0; bit < 8 * sizeof memory; bit++) { /* each single one */
    memory[bit / 8] ^= (unsigned char)(1u << bit % 8);
    CHECK(!ptn_checksum_equal(ptn_checksum_of(memory, sizeof memory), good));
    memory[bit / 8] ^= (unsigned char)(1u << bit % 8);
  }
  for (int i = 0; i < 20000; i++) { /* bursts of up to 64 bits, anywhere in a word */
    size_t at = check_random(&seed) % (sizeof memory / WORD) * WORD + check_random(&seed) % (WORD - sizeof(uint64_t) + 1);
    uint64_t burst = check_random(&seed) | 1, before, after;
    memcpy(&before, memory + at, sizeof before);
    after = before ^ burst;
    memcpy(memory + at, &after, sizeof after);
    CHECK(!ptn_checksum_equal(ptn_checksum_of(memory, sizeof memory), good));
    memcpy(memory + at, &before, sizeof before);
  }
  CHECK(ptn_checksum_equal(ptn_checksum_of(memory, sizeof memory), good));
}

/* Two words or two pages that changed places are not the same bytes. */
static void swapped_parts_show(void) {
  static unsigned char memory[2 * 4096], swapped[sizeof memory];
  for (size_t i = 0; i < sizeof memory; i++) memory[i] = (unsigned char)check_random(&seed);
  ptn_checksum good = ptn_checksum_of(memory, sizeof memory);
  for (size_t part = WORD; part <= 4096; part *= 2) {
    memcpy(swapped, memory, sizeof memory);
    memcpy(swapped, memory + part, part);
    memcpy(swapped + part, memory, part);
    CHECK(!ptn_checksum_equal(ptn_checksum_of(swapped, sizeof swapped), good));
  }
}

static void equal_looks_at_both_halves(void) {
  ptn_checksum a = {1, 2}, low = {3, 2}, high = {1, 0};
  CHECK(ptn_checksum_equal(a, a) && !ptn_checksum_equal(a, low) && !ptn_checksum_equal(a, high));
}

/* A build whose fast path is not taken where it is there would pass everything above. */
static void the_instruction_is_used_where_it_is(void) {
  const char *best = "plain";
#if defined(__x86_64__)
  if (__builtin_cpu_supports("pclmul")) best = "pclmulqdq";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq")) best = "vpclmulqdq-256";
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) best = "vpclmulqdq-512";
#endif
  CHECK(strcmp(ptn_checksum_name(), best) == 0 && ptn_checksum_by(best) && !ptn_checksum_by("crc32"));
}

int main(void) {
  the_polynomial_is_ecma_182();
  it_is_congruent_to_the_bytes();
  all_are_equal();
  lengths_of_zeros_differ();
  flipped_bits_show();
  swapped_parts_show();
  equal_looks_at_both_halves();
  the_instruction_is_used_where_it_is();
  return 0;
}
