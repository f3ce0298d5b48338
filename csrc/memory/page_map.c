/* See page_map.h. Ranges are only ever added, and counted after they are written, so that owns needs no lock. */
#include "memory/page_map.h"

#include <stdatomic.h>

#include "device/device.h"
#include "memory/metadata.h"

#define RANGE_COUNT 8192 /* only where addresses are limited are there more than a few */

typedef struct range {
  uintptr_t begin;
  size_t bytes;
} range;

uintptr_t *ptn_map_root[PTN_MAP_ROOT_COUNT];

static range ranges[RANGE_COUNT];
static _Atomic size_t range_count;

static ptn_status cover(uintptr_t begin, size_t bytes) {
  uintptr_t last = (begin + bytes - 1) >> PTN_MAP_LEAF_BITS;
  if (last >= PTN_MAP_ROOT_COUNT) return ptn_fail(PTN_MEMORY, "the system maps addresses above 2^48, which the page map lacks");
  for (uintptr_t number = begin >> PTN_MAP_LEAF_BITS; number <= last; number++) {
    if (ptn_map_root[number]) continue;
    void *leaf;
    PTN_TRY(ptn_metadata_map((PTN_MAP_LEAF_PAGES + PTN_MAP_LEAF_GRANULES) * sizeof(uintptr_t), &leaf));
    ptn_map_root[number] = leaf;
  }
  return PTN_OK;
}

ptn_status ptn_range_reserve(size_t least_bytes, size_t wished_bytes, uintptr_t *begin, size_t *got_bytes) {
  size_t count = atomic_load(&range_count);
  if (count == RANGE_COUNT) return ptn_fail(PTN_MEMORY, "the arena has %d ranges of addresses and can keep no more", RANGE_COUNT);
  void *pages;
  PTN_TRY(ptn_host_pages()->reserve(least_bytes, wished_bytes, got_bytes, &pages));
  *begin = (uintptr_t)pages;
  ptn_status status = cover(*begin, *got_bytes);
  if (status != PTN_OK) {
    ptn_host_pages()->unreserve(pages, *got_bytes);
    return status;
  }
  ranges[count] = (range){*begin, *got_bytes};
  atomic_store_explicit(&range_count, count + 1, memory_order_release);
  return PTN_OK;
}

bool ptn_range_owns(uintptr_t address) {
  size_t count = atomic_load_explicit(&range_count, memory_order_acquire);
  for (size_t i = 0; i < count; i++)
    if (address - ranges[i].begin < ranges[i].bytes) return true;
  return false;
}
