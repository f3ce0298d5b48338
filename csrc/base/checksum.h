/* Checksums of what leaves memory, to tell whether the same bytes come back: CRC-32C, folded with the processor's carry-less
 * multiplication, so that what it costs is the memory's time and little else.
 *
 * Among the bytes of a page (PTN_PAGE_BYTES) every one, two or three flipped bits change it, and every burst of up to 32 bits;
 * anything else is missed once in 2^32. The value does not depend on the processor.
 */
#ifndef PTN_BASE_CHECKSUM_H
#define PTN_BASE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

typedef uint32_t (*ptn_checksum_function)(const void *memory, size_t bytes);

/* The fastest here; made for whole pages, right for any bytes. */
ptn_checksum_function ptn_checksum_best(void);
const char *ptn_checksum_name(void); /* its name: "vpclmulqdq-512", "vpclmulqdq-256", "pclmulqdq", "crc32c" (ARM) or "plain" */
/* By tables: what the fast ones are held to, and what runs where the instructions are missing. */
uint32_t ptn_checksum_plain(const void *memory, size_t bytes);
ptn_checksum_function ptn_checksum_by(const char *name); /* NULL where this processor lacks it */
/* Of bytes and those behind them, of which each has its own sum: for what is written and read in pieces. */
uint32_t ptn_checksum_joined(uint32_t first, uint32_t second, uint64_t second_bytes);

#endif
