#include "device/pool.h"

#include <stddef.h>

bool ptn_pool_take(ptn_pool_ranges *taken, uint64_t pool_bytes, uint64_t bytes, ptn_pool_range *out) {
  ptn_pool_range **at = taken;
  uint64_t begin = 0;
  while (*at && (*at)->offset - begin < bytes) {
    begin = (*at)->offset + (*at)->bytes;
    at = &(*at)->next;
  }
  if (!*at && pool_bytes - begin < bytes) return false;
  *out = (ptn_pool_range){.offset = begin, .bytes = bytes, .next = *at};
  *at = out;
  return true;
}

void ptn_pool_give(ptn_pool_ranges *taken, ptn_pool_range *range) {
  ptn_pool_range **at = taken;
  while (*at != range) at = &(*at)->next;
  *at = range->next;
}
