/* CRC-32C (Castagnoli) over four lanes: see checksum.h for what it is for.
 *
 * Problem: the processor's CRC instruction takes a word in every cycle, but gives its result three cycles later.
 * Design: words of 8 bytes are dealt to four lanes in turn, word w to lane w % 4, so that no instruction waits for the one
 * before it. What is left behind the last whole word, 1 to 7 bytes, goes to the lane whose turn it is. Words are taken as they
 * lie in memory, by bytes from the lowest address, so neither alignment nor the processor matters.
 * Invariant: both functions give the same value for all bytes; each lane is the CRC-32C of its own bytes, as others compute it.
 */
#include "base/checksum.h"

#include <pthread.h>
#include <string.h>

/* The instruction, by the word and by the byte, and whether this processor has it. */
#if defined(__x86_64__)
#include <nmmintrin.h>
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
#define INSTRUCTION_NAME "sse4.2"
#define crc_word(crc, word) ((uint32_t)_mm_crc32_u64(crc, word))
#define crc_byte(crc, byte) _mm_crc32_u8(crc, byte)
static bool has_instruction(void) { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__) && defined(__linux__) && defined(__AARCH64EL__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define WITH_INSTRUCTION __attribute__((target("+crc")))
#define INSTRUCTION_NAME "armv8 crc"
#define crc_word(crc, word) __crc32cd(crc, word)
#define crc_byte(crc, byte) __crc32cb(crc, byte)
static bool has_instruction(void) { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

#define WORD_BYTES sizeof(uint64_t)
#define LANES 4
#define POLYNOMIAL 0x82F63B78u /* of CRC-32C, lowest bit first */

static ptn_checksum begin(void) { return (ptn_checksum){{UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX}}; }

static ptn_checksum finish(ptn_checksum sum) {
  for (int i = 0; i < LANES; i++) sum.lanes[i] = ~sum.lanes[i];
  return sum;
}

/* ---- plain ---- */

static uint32_t table[256]; /* what one byte makes of a CRC of zero */
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void make_table(void) {
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? POLYNOMIAL : 0);
    table[byte] = crc;
  }
}

ptn_checksum ptn_checksum_plain(const void *memory, size_t bytes) {
  pthread_once(&table_once, make_table);
  const unsigned char *next = memory;
  ptn_checksum sum = begin();
  for (size_t i = 0; i < bytes; i++) {
    uint32_t *lane = &sum.lanes[i / WORD_BYTES % LANES];
    *lane = (*lane >> 8) ^ table[(*lane ^ next[i]) & 0xFF];
  }
  return finish(sum);
}

/* ---- with the processor's instruction ---- */

#ifdef WITH_INSTRUCTION

WITH_INSTRUCTION static uint32_t with_word(uint32_t crc, const unsigned char *at) {
  uint64_t word;
  memcpy(&word, at, WORD_BYTES);
  return crc_word(crc, word);
}

WITH_INSTRUCTION static ptn_checksum by_instruction(const void *memory, size_t bytes) {
  const unsigned char *next = memory;
  ptn_checksum sum = begin();
  uint32_t a = sum.lanes[0], b = sum.lanes[1], c = sum.lanes[2], d = sum.lanes[3];
  for (; bytes >= LANES * WORD_BYTES; bytes -= LANES * WORD_BYTES, next += LANES * WORD_BYTES) {
    a = with_word(a, next);
    b = with_word(b, next + WORD_BYTES);
    c = with_word(c, next + 2 * WORD_BYTES);
    d = with_word(d, next + 3 * WORD_BYTES);
  }
  sum = (ptn_checksum){{a, b, c, d}};
  uint32_t *lane = sum.lanes;
  for (; bytes >= WORD_BYTES; bytes -= WORD_BYTES, next += WORD_BYTES, lane++) *lane = with_word(*lane, next);
  for (; bytes > 0; bytes--, next++) *lane = crc_byte(*lane, *next);
  return finish(sum);
}

ptn_checksum ptn_checksum_of(const void *memory, size_t bytes) {
  return has_instruction() ? by_instruction(memory, bytes) : ptn_checksum_plain(memory, bytes);
}

const char *ptn_checksum_name(void) { return has_instruction() ? INSTRUCTION_NAME : "plain"; }

#else

ptn_checksum ptn_checksum_of(const void *memory, size_t bytes) { return ptn_checksum_plain(memory, bytes); }
const char *ptn_checksum_name(void) { return "plain"; }

#endif

bool ptn_checksum_equal(ptn_checksum a, ptn_checksum b) { return memcmp(a.lanes, b.lanes, sizeof a.lanes) == 0; }
