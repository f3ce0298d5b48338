/* The checksum: each lane is a CRC-32C as others compute it, fast and plain give the same value, and flipped bits show. */
#include <string.h>

#include "base/checksum.h"
#include "check.h"

enum { LANES = 4, WORD = 8 };
static uint64_t seed = 3;

/* Published values: the usual check of CRC-32C, and those of RFC 3720 for 32 bytes of one kind. */
static void one_lane_is_crc32c(void) {
  static const struct {
    const char *bytes;
    size_t count;
    uint32_t crc;
  } known[] = {
      {"", 0, 0},
      {"123456789", 9, 0xE3069283u},
      {"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 32, 0x8A9136AAu},
      {"\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF"
       "\xFF\xFF",
       32, 0x62A8AB43u},
  };
  for (size_t k = 0; k < sizeof known / sizeof known[0]; k++) {
    for (size_t lane = 0; lane < LANES; lane++) {
      /* the known bytes in this lane's words; the last of them may be cut short */
      unsigned char memory[4 * LANES * WORD];
      for (size_t i = 0; i < sizeof memory; i++) memory[i] = (unsigned char)check_random(&seed);
      size_t end = lane * WORD;
      for (size_t i = 0; i < known[k].count; i++) {
        size_t at = (i / WORD * LANES + lane) * WORD + i % WORD;
        memory[at] = (unsigned char)known[k].bytes[i];
        end = at + 1;
      }
      CHECK(ptn_checksum_of(memory, end).lanes[lane] == known[k].crc);
      CHECK(ptn_checksum_plain(memory, end).lanes[lane] == known[k].crc);
    }
  }
}

static void fast_equals_plain(void) {
  enum { MOST = 1 << 20 };
  unsigned char *memory = malloc(MOST);
  CHECK(memory);
  for (size_t i = 0; i < MOST; i++) memory[i] = (unsigned char)check_random(&seed);
  for (size_t bytes = 0; bytes <= 200; bytes++) {
    for (size_t shift = 0; shift <= 16; shift++) {
      unsigned char *tight = malloc(shift + bytes + 1); /* a sanitizer sees a read behind the end */
      CHECK(tight);
      unsigned char *end = tight + shift + bytes + 1;
      memcpy(end - bytes, memory + shift, bytes);
      CHECK(ptn_checksum_equal(ptn_checksum_of(end - bytes, bytes), ptn_checksum_plain(memory + shift, bytes)));
      free(tight);
    }
  }
  for (int i = 0; i < 60; i++) {
    size_t shift = check_random(&seed) % 64, bytes = check_random(&seed) % (MOST - 64);
    CHECK(ptn_checksum_equal(ptn_checksum_of(memory + shift, bytes), ptn_checksum_plain(memory + shift, bytes)));
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
  for (int i = 0; i < 20000; i++) { /* bursts of up to 32 bits inside a word */
    size_t word = check_random(&seed) % (sizeof memory / WORD) * WORD, shift = check_random(&seed) % 33;
    uint64_t burst = ((check_random(&seed) & UINT32_MAX) | 1) << shift, before, after;
    memcpy(&before, memory + word, WORD);
    after = before ^ burst;
    memcpy(memory + word, &after, WORD);
    CHECK(!ptn_checksum_equal(ptn_checksum_of(memory, sizeof memory), good));
    memcpy(memory + word, &before, WORD);
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

static void equal_looks_at_every_lane(void) {
  for (int lane = 0; lane < LANES; lane++) {
    ptn_checksum a = {{1, 2, 3, 4}}, b = a;
    CHECK(ptn_checksum_equal(a, b));
    b.lanes[lane] ^= 0x80000000u;
    CHECK(!ptn_checksum_equal(a, b));
  }
}

/* A build whose fast path is not taken where it is there would pass everything above. */
static void the_instruction_is_used_where_it_is(void) {
#if defined(__x86_64__)
  CHECK(strcmp(ptn_checksum_name(), __builtin_cpu_supports("sse4.2") ? "sse4.2" : "plain") == 0);
#elif defined(__aarch64__)
  CHECK(strcmp(ptn_checksum_name(), "armv8 crc") == 0 || strcmp(ptn_checksum_name(), "plain") == 0);
#else
  CHECK(strcmp(ptn_checksum_name(), "plain") == 0);
#endif
}

int main(void) {
  one_lane_is_crc32c();
  fast_equals_plain();
  lengths_of_zeros_differ();
  flipped_bits_show();
  swapped_parts_show();
  equal_looks_at_every_lane();
  the_instruction_is_used_where_it_is();
  return 0;
}
