/* A CRC of 64 bits, folded over sixteen lanes: see checksum.h for what it is for.
 *
 * Problem: bytes must be checked at the speed at which memory gives them, by threads that take their time from compute. The
 * processor's CRC-32C instruction takes 8 bytes in a cycle; carry-less multiplication takes 64 in two.
 *
 * Design: words of 128 bits are dealt to sixteen lanes in turn. A lane is a polynomial of degree below 128, of which only the value
 * modulo P counts; before the next word is added it moves up by a round of 16 words, x^2048: its low and its high half are each
 * multiplied by what x^2048 and x^2112 are modulo P, which gives 127 bits again, with no reduction. At the end lanes are joined
 * in the same way, a word apart. What is left behind the last whole round is filled up with zeros, and the length is where
 * lane 0 begins, so that zeros count.
 *
 * Invariant: all functions give the same 128 bits for all bytes, on a little-endian processor of any kind.
 */
#include "base/checksum.h"

#include <string.h>

#define LANES 16
#define WORD_BYTES 16
#define ROUND_BYTES ((size_t)LANES * WORD_BYTES)
/* P = x^64 + POLYNOMIAL, of ECMA-182, highest power first as the number is written; and powers of x modulo P (tests/c/test_checksum.c). */
#define POLYNOMIAL 0x42F0E1EBA9EA3693u
#define X_128 0x05F5C3C7EB52FAB6u
#define X_192 0x4EB938A7D257740Eu
#define X_2048 0x7F52691A60DDC70Du
#define X_2112 0x7036B0389F6A0C82u

typedef ptn_checksum lane;

/* Whole rounds of the lanes. */
typedef void (*fold_rounds)(lane *lanes, const unsigned char *next, size_t rounds);

/* ---- plain ---- */

static lane multiply(uint64_t a, uint64_t b) {
  lane product = {0, 0};
  for (int bit = 0; bit < 64; bit++) {
    uint64_t mask = 0 - (b >> bit & 1);
    product.low ^= (a << bit) & mask;
    if (bit > 0) product.high ^= (a >> (64 - bit)) & mask;
  }
  return product;
}

/* a moved up by as many powers of x as low and high (64 more) stand for, and b added. */
static lane fold(lane a, uint64_t low, uint64_t high, lane b) {
  lane by_low = multiply(a.low, low), by_high = multiply(a.high, high);
  return (lane){by_low.low ^ by_high.low ^ b.low, by_low.high ^ by_high.high ^ b.high};
}

static void fold_plain(lane *lanes, const unsigned char *next, size_t rounds) {
  for (; rounds > 0; rounds--) {
    for (int i = 0; i < LANES; i++, next += WORD_BYTES) {
      lane word;
      memcpy(&word, next, WORD_BYTES);
      lanes[i] = fold(lanes[i], X_2048, X_2112, word);
    }
  }
}

/* ---- with the processor's instruction ---- */

#if defined(__x86_64__)
#include <immintrin.h>

#define HALF (LANES / 2)
#define BLOCK_ROUNDS 64 /* 16 KiB: the second half of the lanes finds them in the nearest cache */

/* Half of the lanes, which fit the registers. */
__attribute__((target("pclmul"))) static void fold_half(lane *lanes, const unsigned char *next, size_t rounds) {
  __m128i powers = _mm_set_epi64x((int64_t)X_2112, (int64_t)X_2048), sums[HALF];
  memcpy(sums, lanes, sizeof sums);
  for (; rounds > 0; rounds--, next += ROUND_BYTES) {
#pragma GCC unroll 8
    for (int i = 0; i < HALF; i++) {
      __m128i word = _mm_loadu_si128((const __m128i *)(const void *)(next + i * WORD_BYTES));
      __m128i by_low = _mm_clmulepi64_si128(sums[i], powers, 0x00), by_high = _mm_clmulepi64_si128(sums[i], powers, 0x11);
      sums[i] = _mm_xor_si128(_mm_xor_si128(by_low, by_high), word);
    }
  }
  memcpy(lanes, sums, sizeof sums);
}

static void fold_pclmulqdq(lane *lanes, const unsigned char *next, size_t rounds) {
  while (rounds > 0) {
    size_t here = rounds < BLOCK_ROUNDS ? rounds : BLOCK_ROUNDS;
    fold_half(lanes, next, here);
    fold_half(lanes + HALF, next + HALF * WORD_BYTES, here);
    next += here * ROUND_BYTES;
    rounds -= here;
  }
}

#define AHEAD_BYTES \
  1024 /* fetched before they are folded, past the nearer caches, which are compute's: a fifth faster from memory */

/* ymm registers hold two words: half of the instructions for the same bytes, where 512 bits are not to be had. */
__attribute__((target("avx2,pclmul,vpclmulqdq"))) static void fold_vpclmulqdq_256(lane *lanes, const unsigned char *next,
                                                                                  size_t rounds) {
  __m256i powers = _mm256_broadcastsi128_si256(_mm_set_epi64x((int64_t)X_2112, (int64_t)X_2048)), sums[HALF];
  memcpy(sums, lanes, sizeof sums);
  for (; rounds > 0; rounds--, next += ROUND_BYTES) {
    for (size_t line = 0; line < ROUND_BYTES; line += 64)
      _mm_prefetch((const char *)(uintptr_t)((uintptr_t)next + AHEAD_BYTES + line), _MM_HINT_NTA);
#pragma GCC unroll 8
    for (int i = 0; i < HALF; i++) {
      __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)(next + (size_t)i * 2 * WORD_BYTES));
      __m256i by_low = _mm256_clmulepi64_epi128(sums[i], powers, 0x00), by_high = _mm256_clmulepi64_epi128(sums[i], powers, 0x11);
      sums[i] = _mm256_xor_si256(_mm256_xor_si256(by_low, by_high), words);
    }
  }
  memcpy(lanes, sums, sizeof sums);
}

#define FOLD(sum, at)                                                                                                 \
  _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, powers, 0x00), _mm512_clmulepi64_epi128(sum, powers, 0x11), \
                            _mm512_loadu_si512(at), 0x96)

__attribute__((target("avx512f,vpclmulqdq"))) static void fold_vpclmulqdq_512(lane *lanes, const unsigned char *next,
                                                                              size_t rounds) {
  __m512i powers = _mm512_broadcast_i32x4(_mm_set_epi64x((int64_t)X_2112, (int64_t)X_2048));
  __m512i a = _mm512_loadu_si512(lanes), b = _mm512_loadu_si512(lanes + 4), c = _mm512_loadu_si512(lanes + 8),
          d = _mm512_loadu_si512(lanes + 12);
  for (; rounds > 0; rounds--, next += ROUND_BYTES) {
    a = FOLD(a, next);
    b = FOLD(b, next + 64);
    c = FOLD(c, next + 128);
    d = FOLD(d, next + 192);
  }
  _mm512_storeu_si512(lanes, a);
  _mm512_storeu_si512(lanes + 4, b);
  _mm512_storeu_si512(lanes + 8, c);
  _mm512_storeu_si512(lanes + 12, d);
}
#endif

/* ---- the whole ---- */

static ptn_checksum sum_with(fold_rounds fold_all, const void *memory, size_t bytes) {
  const unsigned char *next = memory;
  lane lanes[LANES] = {{bytes, 0}};
  fold_all(lanes, next, bytes / ROUND_BYTES);
  size_t left_bytes = bytes % ROUND_BYTES;
  if (left_bytes > 0) {
    unsigned char last[LANES * WORD_BYTES] = {0};
    memcpy(last, next + (bytes - left_bytes), left_bytes);
    fold_all(lanes, last, 1);
  }
  lane sum = lanes[0];
  for (int i = 1; i < LANES; i++) sum = fold(sum, X_128, X_192, lanes[i]);
  return sum;
}

ptn_checksum ptn_checksum_plain(const void *memory, size_t bytes) { return sum_with(fold_plain, memory, bytes); }

#if defined(__x86_64__)
static ptn_checksum by_pclmulqdq(const void *memory, size_t bytes) { return sum_with(fold_pclmulqdq, memory, bytes); }
static ptn_checksum by_vpclmulqdq_256(const void *memory, size_t bytes) { return sum_with(fold_vpclmulqdq_256, memory, bytes); }
static ptn_checksum by_vpclmulqdq_512(const void *memory, size_t bytes) { return sum_with(fold_vpclmulqdq_512, memory, bytes); }
#endif

static const char *const names[] = {"vpclmulqdq-512", "vpclmulqdq-256", "pclmulqdq", "plain"};

ptn_checksum_function ptn_checksum_by(const char *name) {
#if defined(__x86_64__)
  if (strcmp(name, "vpclmulqdq-512") == 0)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") ? by_vpclmulqdq_512 : NULL;
  if (strcmp(name, "vpclmulqdq-256") == 0)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq") ? by_vpclmulqdq_256 : NULL;
  if (strcmp(name, "pclmulqdq") == 0) return __builtin_cpu_supports("pclmul") ? by_pclmulqdq : NULL;
#endif
  return strcmp(name, "plain") == 0 ? ptn_checksum_plain : NULL;
}

const char *ptn_checksum_name(void) {
  size_t i = 0;
  while (!ptn_checksum_by(names[i])) i++;
  return names[i];
}

ptn_checksum ptn_checksum_of(const void *memory, size_t bytes) { return ptn_checksum_by(ptn_checksum_name())(memory, bytes); }

bool ptn_checksum_equal(ptn_checksum a, ptn_checksum b) { return a.low == b.low && a.high == b.high; }
