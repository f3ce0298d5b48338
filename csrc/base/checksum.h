/* Checksums of what leaves memory, to tell whether the same bytes come back.
 *
 * The bytes are a polynomial over GF(2), and the checksum is congruent to it modulo that of ECMA-182 (CRC-64): a cyclic
 * redundancy check, but for the last reduction, which would only take bits away. Sixteen lanes are folded side by side with the
 * processor's carry-less multiplication, so that it runs at the speed of memory, and beyond it where the bytes still lie in a cache.
 * Any burst of up to 64 flipped bits is found, anything else is missed once in 2^64. The value does not depend on the processor; it
 * is not meant to outlive the process.
 */
#ifndef PTN_BASE_CHECKSUM_H
#define PTN_BASE_CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ptn_checksum {
  uint64_t low, high;
} ptn_checksum;

ptn_checksum ptn_checksum_of(const void *memory, size_t bytes);
/* The same by shifts and additions: what the fast ones are held to, and what runs where there is no instruction. */
ptn_checksum ptn_checksum_plain(const void *memory, size_t bytes);
bool ptn_checksum_equal(ptn_checksum a, ptn_checksum b);
const char *ptn_checksum_name(void); /* which one ptn_checksum_of is here: see ptn_checksum_by */

/* For tests: the one named, "vpclmulqdq-512", "vpclmulqdq-256", "pclmulqdq" or "plain"; NULL where this processor lacks it. */
typedef ptn_checksum (*ptn_checksum_function)(const void *memory, size_t bytes);
ptn_checksum_function ptn_checksum_by(const char *name);

#endif
