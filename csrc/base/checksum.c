/* CRC-32C: see checksum.h for what it is for.
 *
 * Problem: bytes must be checked at the speed at which memory gives them, by threads that take their time from compute. The
 * processor's own CRC-32C instruction takes 8 bytes in a cycle; carry-less multiplication, where it is wide, as many or more, and
 * with fewer loads.
 *
 * Design: the bytes are a polynomial over GF(2), the lowest bit of the first byte its highest power. They are dealt in words of
 * 128 bits to accumulators of one, two or four words, several of them side by side. An accumulator counts only by what it is modulo P; before
 * the next word is added it moves up by a round, x^D: its two halves are each multiplied by what x^(D+64) and x^D are modulo P,
 * which gives 128 bits again, with no reduction. At the end accumulators, then words, are joined in the same way, and the
 * processor's instruction reduces the last word. A product in this order of bits is one power too high, so the factors are one
 * lower.
 *
 * Invariant: all functions give CRC-32C (tests/c/test_checksum.c) on a little-endian processor.
 */
#include "base/checksum.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#define POLYNOMIAL 0x82F63B78u /* of Castagnoli, the highest power in the lowest bit */

/* ---- plain: eight tables, eight bytes at a time ---- */

static uint32_t tables[8][256];

static void make_tables(void) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t sum = i;
    for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? POLYNOMIAL : 0);
    tables[0][i] = sum;
  }
  for (int k = 1; k < 8; k++)
    for (uint32_t i = 0; i < 256; i++) tables[k][i] = tables[k - 1][i] >> 8 ^ tables[0][tables[k - 1][i] & 255];
}

uint32_t ptn_checksum_plain(const void *memory, size_t bytes) {
  static pthread_once_t made = PTHREAD_ONCE_INIT;
  pthread_once(&made, make_tables);
  const unsigned char *next = memory;
  uint32_t sum = ~0u;
  for (; bytes >= 8; bytes -= 8, next += 8) {
    uint64_t word;
    memcpy(&word, next, 8);
    word ^= sum;
    sum = 0;
    for (int k = 0; k < 8; k++) sum ^= tables[7 - k][word >> 8 * k & 255];
  }
  for (; bytes > 0; bytes--) sum = sum >> 8 ^ tables[0][(sum ^ *next++) & 255];
  return ~sum;
}

/* ---- with the processor's instructions ---- */

#if defined(__x86_64__)
#include <immintrin.h>

/* x^(D+63) and x^(D-1) modulo P: what the low and the high half of a word are multiplied by to move it up by D bits. */
#define LOW_128 0x3743F7BD00000000u
#define HIGH_128 0x3171D43000000000u
#define LOW_256 0x33CCBBBC00000000u
#define HIGH_256 0xA2158B3400000000u
#define LOW_512 0x1C19243B00000000u
#define HIGH_512 0x75BBA45B00000000u
#define LOW_1024 0x6577B24500000000u
#define HIGH_1024 0x7417153F00000000u
#define LOW_2048 0xE9A5D8BE00000000u
#define HIGH_2048 0x1426A81500000000u

#define WORD(high, low) _mm_set_epi64x((int64_t)(high), (int64_t)(low))
#define FOLD_1(sum, by, next) \
  _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(sum, by, 0x00), _mm_clmulepi64_si128(sum, by, 0x11)), next)
#define FOLD_2(sum, by, next) \
  _mm256_xor_si256(_mm256_xor_si256(_mm256_clmulepi64_epi128(sum, by, 0x00), _mm256_clmulepi64_epi128(sum, by, 0x11)), next)
#define FOLD_4(sum, by, next) \
  _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, by, 0x00), _mm512_clmulepi64_epi128(sum, by, 0x11), next, 0x96)

/* Fetched before they are folded: a fifth to a third faster from memory, and the same from caches. Past the nearer caches, which
 * are compute's, where that costs nothing: processors that fold 512 bits take half as long again with it (16 and 10 GB/s). Behind
 * the last page it fetches what is likely to be next. */
#define AHEAD_BYTES 1024
#define FETCH_ROUND(next, bytes, hint)              \
  for (size_t line = 0; line < (bytes); line += 64) \
  _mm_prefetch((const char *)(uintptr_t)((uintptr_t)(next) + AHEAD_BYTES + line), hint)

/* What is left of less than a round, and all of what is shorter than one. */
__attribute__((target("sse4.2"))) static uint32_t finish(uint64_t sum, const unsigned char *next, size_t bytes) {
  for (; bytes >= 8; bytes -= 8, next += 8) {
    uint64_t word;
    memcpy(&word, next, 8);
    sum = _mm_crc32_u64(sum, word);
  }
  for (; bytes > 0; bytes--) sum = _mm_crc32_u8((uint32_t)sum, *next++);
  return ~(uint32_t)sum;
}

__attribute__((target("sse4.2"))) static uint64_t reduce(__m128i sum) {
  return _mm_crc32_u64(_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(sum)), (uint64_t)_mm_extract_epi64(sum, 1));
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t by_pclmulqdq(const void *memory, size_t bytes) {
  enum { LANES = 8, ROUND = LANES * sizeof(__m128i) };
  const unsigned char *next = memory;
  if (bytes < ROUND) return finish(~0u, next, bytes);
  const __m128i by = WORD(HIGH_1024, LOW_1024), by_lane = WORD(HIGH_128, LOW_128);
  __m128i sums[LANES];
  memcpy(sums, next, ROUND);
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(-1));
  for (next += ROUND, bytes -= ROUND; bytes >= ROUND; next += ROUND, bytes -= ROUND) {
#pragma GCC unroll 8
    for (size_t i = 0; i < LANES; i++) {
      __m128i word = _mm_loadu_si128((const __m128i *)(const void *)(next + i * sizeof word));
      sums[i] = FOLD_1(sums[i], by, word);
    }
  }
  __m128i sum = sums[0];
  for (int i = 1; i < LANES; i++) sum = FOLD_1(sum, by_lane, sums[i]);
  return finish(reduce(sum), next, bytes);
}

__attribute__((target("sse4.2,avx2,pclmul,vpclmulqdq"))) static uint32_t by_vpclmulqdq_256(const void *memory, size_t bytes) {
  enum { LANES = 8, ROUND = LANES * sizeof(__m256i) };
  const unsigned char *next = memory;
  if (bytes < ROUND) return finish(~0u, next, bytes);
  const __m256i by = _mm256_broadcastsi128_si256(WORD(HIGH_2048, LOW_2048));
  const __m256i by_lane = _mm256_broadcastsi128_si256(WORD(HIGH_256, LOW_256));
  __m256i sums[LANES];
  memcpy(sums, next, ROUND);
  sums[0] = _mm256_xor_si256(sums[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(-1)));
  for (next += ROUND, bytes -= ROUND; bytes >= ROUND; next += ROUND, bytes -= ROUND) {
    FETCH_ROUND(next, ROUND, _MM_HINT_NTA);
#pragma GCC unroll 8
    for (size_t i = 0; i < LANES; i++) {
      __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)(next + i * sizeof words));
      sums[i] = FOLD_2(sums[i], by, words);
    }
  }
  __m256i sum = sums[0];
  for (int i = 1; i < LANES; i++) sum = FOLD_2(sum, by_lane, sums[i]);
  __m128i last = FOLD_1(_mm256_castsi256_si128(sum), WORD(HIGH_128, LOW_128), _mm256_extracti128_si256(sum, 1));
  return finish(reduce(last), next, bytes);
}

__attribute__((target("sse4.2,avx512f,pclmul,vpclmulqdq"))) static uint32_t by_vpclmulqdq_512(const void *memory, size_t bytes) {
  enum { LANES = 4, ROUND = LANES * sizeof(__m512i) };
  const unsigned char *next = memory;
  if (bytes < ROUND) return finish(~0u, next, bytes);
  const __m512i by = _mm512_broadcast_i32x4(WORD(HIGH_2048, LOW_2048));
  const __m512i by_lane = _mm512_broadcast_i32x4(WORD(HIGH_512, LOW_512));
  const __m128i by_word = WORD(HIGH_128, LOW_128);
  __m512i sums[LANES];
  memcpy(sums, next, ROUND);
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(-1)));
  for (next += ROUND, bytes -= ROUND; bytes >= ROUND; next += ROUND, bytes -= ROUND) {
    FETCH_ROUND(next, ROUND, _MM_HINT_T0);
#pragma GCC unroll 4
    for (size_t i = 0; i < LANES; i++) sums[i] = FOLD_4(sums[i], by, _mm512_loadu_si512(next + i * sizeof sums[i]));
  }
  __m512i sum = sums[0];
  for (int i = 1; i < LANES; i++) sum = FOLD_4(sum, by_lane, sums[i]);
  __m128i last = FOLD_1(_mm512_castsi512_si128(sum), by_word, _mm512_extracti32x4_epi32(sum, 1));
  last = FOLD_1(last, by_word, _mm512_extracti32x4_epi32(sum, 2));
  last = FOLD_1(last, by_word, _mm512_extracti32x4_epi32(sum, 3));
  return finish(reduce(last), next, bytes);
}

static bool has_pclmulqdq(void) { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }
static bool has_vpclmulqdq_256(void) {
  return has_pclmulqdq() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
}
static bool has_vpclmulqdq_512(void) { return has_vpclmulqdq_256() && __builtin_cpu_supports("avx512f"); }
#endif

#if defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>

/* HWCAP_CRC32 of Linux. */
#define HAS_CRC32 (1ul << 7)

/* One chain: eight bytes in the two cycles that the instruction takes to give its result. */
__attribute__((target("+crc"))) static uint32_t by_crc32c(const void *memory, size_t bytes) {
  const unsigned char *next = memory;
  uint32_t sum = ~0u;
  for (; bytes >= 8; bytes -= 8, next += 8) {
    uint64_t word;
    memcpy(&word, next, 8);
    sum = __crc32cd(sum, word);
  }
  for (; bytes > 0; bytes--) sum = __crc32cb(sum, *next++);
  return ~sum;
}

static bool has_crc32c(void) { return getauxval(AT_HWCAP) & HAS_CRC32; }
#endif

/* ---- which ---- */

static bool always(void) { return true; }

typedef struct implementation {
  const char *name;
  bool (*there)(void);
  ptn_checksum_function function;
} implementation;

static const implementation implementations[] = {
#if defined(__x86_64__)
    {"vpclmulqdq-512", has_vpclmulqdq_512, by_vpclmulqdq_512},
    {"vpclmulqdq-256", has_vpclmulqdq_256, by_vpclmulqdq_256},
    {"pclmulqdq", has_pclmulqdq, by_pclmulqdq},
#elif defined(__aarch64__)
    {"crc32c", has_crc32c, by_crc32c},
#endif
    {"plain", always, ptn_checksum_plain},
};

static const implementation *best(void) {
  const implementation *found = implementations;
  while (!found->there()) found++;
  return found;
}

ptn_checksum_function ptn_checksum_best(void) { return best()->function; }

const char *ptn_checksum_name(void) { return best()->name; }

ptn_checksum_function ptn_checksum_by(const char *name) {
  for (size_t i = 0; i < sizeof implementations / sizeof *implementations; i++)
    if (strcmp(name, implementations[i].name) == 0 && implementations[i].there()) return implementations[i].function;
  return NULL;
}

/* ---- of pieces ---- */

/* The product of two polynomials modulo P. */
static uint32_t product(uint32_t one, uint32_t other) {
  uint32_t sum = 0;
  for (uint32_t power = 1u << 31; power; power >>= 1) {
    if (one & power) sum ^= other;
    other = other >> 1 ^ (other & 1 ? POLYNOMIAL : 0);
  }
  return sum;
}

uint32_t ptn_checksum_joined(uint32_t first, uint32_t second, uint64_t second_bytes) {
  uint32_t power = 1u << (31 - 8); /* x^8, one byte further; then of two bytes, four, ... */
  for (; second_bytes; second_bytes >>= 1, power = product(power, power))
    if (second_bytes & 1) first = product(first, power);
  return first ^ second;
}
