/* What each page of the store's file should hold: its checksum, as it was when it was last written, in memory.
 *
 * Requests are whole pages, so a sum for each page checks whatever is read, however it was written: there is no part of a block
 * that would have to be read for its neighbours' sake, and no byte that goes unchecked. It costs four bytes for each page: 1 MiB
 * for each GiB of the file that was ever reserved. The sums lie in memory and not beside the bytes, so they tell too that a write
 * was lost or went elsewhere.
 */
#ifndef PTN_DISK_PAGE_SUMS_H
#define PTN_DISK_PAGE_SUMS_H

#include <stdint.h>

#include "base/checksum.h"
#include "base/status.h"

#define PTN_PAGE_SUMS_SEGMENTS 48
#define PTN_PAGE_SUMS_ALL_GOOD UINT64_MAX

typedef struct ptn_page_sums {
  ptn_checksum_function sum;
  uint32_t *segments[PTN_PAGE_SUMS_SEGMENTS]; /* each for twice as many pages as the one before; NULL: not reached yet */
} ptn_page_sums;

void ptn_page_sums_create(ptn_page_sums *sums);
void ptn_page_sums_destroy(ptn_page_sums *sums);
/* Room for the sums of a file of so many bytes; what is there does not move. PTN_MEMORY where there is none. */
ptn_status ptn_page_sums_reach(ptn_page_sums *sums, uint64_t file_bytes);
/* Gives room back that a file of so many bytes does not need. */
void ptn_page_sums_shrink(ptn_page_sums *sums, uint64_t file_bytes);

/* Of whole pages inside the file. Calls for different pages may run side by side; those for one page may not. */
void ptn_page_sums_forget(ptn_page_sums *sums, uint64_t offset, uint64_t bytes); /* never written, from here on */
void ptn_page_sums_note(ptn_page_sums *sums, const void *memory, uint64_t offset, uint64_t bytes); /* memory was written there */
/* memory was read from there: the offset of the first page that is not what was written, or PTN_PAGE_SUMS_ALL_GOOD. Pages that were
 * never written become zeros, whatever was read, and are counted in *unwritten_bytes. */
uint64_t ptn_page_sums_check(const ptn_page_sums *sums, void *memory, uint64_t offset, uint64_t bytes, uint64_t *unwritten_bytes);

#endif
