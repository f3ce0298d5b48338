/* From an address to what lies there, in O(1): blocks carry no header, so that they can be pages a disk writes directly.
 *
 * Two levels over 48 bits of address, the most that systems give unasked: a root with one entry for each GiB, a leaf with one
 * word for each page and, behind them, one for each granule of 64 KiB. Leaves are mapped with the ranges the arena reserves and
 * touched where pages are in use: 8.5 bytes for a page at worst. A page's word is a pointer, its lowest bit set where it points
 * to a slab, 0 where nothing is known. A granule's word tells of its first byte only, so that a large block is written into the
 * map in a moment; it points to a stretch, and may be of a time that is past. Read and written under the arena's lock, but for
 * the word of a block's first page, which whoever holds the block may read at any time.
 */
#ifndef PTN_MEMORY_PAGE_MAP_H
#define PTN_MEMORY_PAGE_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"

#define PTN_MAP_LEAF_BITS 30
#define PTN_MAP_ROOT_COUNT ((size_t)1 << (48 - PTN_MAP_LEAF_BITS))
#define PTN_MAP_SLAB ((uintptr_t)1)
#define PTN_MAP_LEAF_PAGES (((size_t)1 << PTN_MAP_LEAF_BITS) / PTN_PAGE_BYTES)
#define PTN_MAP_GRANULE_BYTES ((uintptr_t)64 << 10)
#define PTN_MAP_LEAF_GRANULES (((size_t)1 << PTN_MAP_LEAF_BITS) / PTN_MAP_GRANULE_BYTES)

extern uintptr_t *ptn_map_root[PTN_MAP_ROOT_COUNT];

/* Reserves a range of the device's pages (sizes as there), its words 0 and writable. Fails with PTN_MEMORY. */
ptn_status ptn_range_reserve(size_t least_bytes, size_t wished_bytes, uintptr_t *begin, size_t *got_bytes);
/* Whether an address lies in a range. May be called without the lock. */
bool ptn_range_owns(uintptr_t address);

static inline uintptr_t ptn_map_get(uintptr_t address) {
  uintptr_t number = address >> PTN_MAP_LEAF_BITS;
  if (number >= PTN_MAP_ROOT_COUNT || !ptn_map_root[number]) return 0;
  return ptn_map_root[number][(address & (((uintptr_t)1 << PTN_MAP_LEAF_BITS) - 1)) / PTN_PAGE_BYTES];
}

static inline void ptn_map_fetch_soon(uintptr_t address) {
  uintptr_t number = address >> PTN_MAP_LEAF_BITS;
  if (number >= PTN_MAP_ROOT_COUNT || !ptn_map_root[number]) return;
  ptn_fetch_soon(&ptn_map_root[number][(address & (((uintptr_t)1 << PTN_MAP_LEAF_BITS) - 1)) / PTN_PAGE_BYTES], 1);
}

static inline uintptr_t ptn_map_get_granule(uintptr_t address) {
  uintptr_t number = address >> PTN_MAP_LEAF_BITS;
  if (number >= PTN_MAP_ROOT_COUNT || !ptn_map_root[number]) return 0;
  uintptr_t granule = (address & (((uintptr_t)1 << PTN_MAP_LEAF_BITS) - 1)) / PTN_MAP_GRANULE_BYTES;
  return ptn_map_root[number][PTN_MAP_LEAF_PAGES + granule];
}

/* Only for covered addresses. */
static inline void ptn_map_set(uintptr_t address, uintptr_t word) {
  uintptr_t *leaf = ptn_map_root[address >> PTN_MAP_LEAF_BITS];
  leaf[(address & (((uintptr_t)1 << PTN_MAP_LEAF_BITS) - 1)) / PTN_PAGE_BYTES] = word;
}

static inline void ptn_map_set_granule(uintptr_t address, uintptr_t word) {
  uintptr_t *leaf = ptn_map_root[address >> PTN_MAP_LEAF_BITS] + PTN_MAP_LEAF_PAGES;
  leaf[(address & (((uintptr_t)1 << PTN_MAP_LEAF_BITS) - 1)) / PTN_MAP_GRANULE_BYTES] = word;
}

#endif
