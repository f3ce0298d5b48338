/* Checksums of what leaves memory, to tell whether the same bytes come back.
 *
 * 128 bits: four CRC-32C, each over every fourth 8-byte word, so that the processor's own CRC instruction runs at the speed of
 * memory instead of waiting for its own result. Any burst of up to 32 flipped bits in one lane is found, anything else is missed
 * once in 2^32 at worst. The value does not depend on the processor; it is not meant to outlive the process.
 */
#ifndef PTN_BASE_CHECKSUM_H
#define PTN_BASE_CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ptn_checksum {
  uint32_t lanes[4];
} ptn_checksum;

ptn_checksum ptn_checksum_of(const void *memory, size_t bytes);
/* The same, byte by byte from a table: what the fast one is held to, and what runs where there is no instruction. */
ptn_checksum ptn_checksum_plain(const void *memory, size_t bytes);
bool ptn_checksum_equal(ptn_checksum a, ptn_checksum b);
const char *ptn_checksum_name(void); /* what ptn_checksum_of is here: "sse4.2", "armv8 crc" or "plain" */

#endif
