/* See space.h. First fit: the earliest hole that is large enough, so that the end of the file empties first and can be given
 * back to the disk. Stores hold tens to thousands of extents of mostly equal sizes; a sorted array beats any tree at that. */
#include "disk/space.h"

#include <stdlib.h>
#include <string.h>

void ptn_space_create(ptn_space *space) { memset(space, 0, sizeof *space); }

void ptn_space_destroy(ptn_space *space) {
  free(space->holes);
  memset(space, 0, sizeof *space);
}

/* The holes there can ever be while `used` extents are in use: one between each two and at both ends. */
static ptn_status make_room(ptn_space *space, size_t used_count) {
  if (space->holes_capacity >= used_count + 1) return PTN_OK;
  size_t capacity = 2 * used_count + 16;
  ptn_extent *holes = realloc(space->holes, capacity * sizeof *holes);
  if (!holes) return ptn_fail(PTN_MEMORY, "no memory for the map of %zu disk extents", used_count);
  space->holes = holes;
  space->holes_capacity = capacity;
  return PTN_OK;
}

static void remove_hole(ptn_space *space, size_t index) {
  space->holes_count--;
  memmove(&space->holes[index], &space->holes[index + 1], (space->holes_count - index) * sizeof *space->holes);
}

ptn_status ptn_space_take(ptn_space *space, uint64_t bytes, ptn_extent *out) {
  *out = (ptn_extent){0};
  PTN_TRY(make_room(space, space->used_count + 1));
  for (size_t i = 0; i < space->holes_count; i++) {
    ptn_extent *hole = &space->holes[i];
    if (hole->bytes < bytes) continue;
    *out = (ptn_extent){.offset = hole->offset, .bytes = bytes};
    hole->offset += bytes;
    hole->bytes -= bytes;
    if (hole->bytes == 0) remove_hole(space, i);
    space->used_count++;
    break;
  }
  return PTN_OK;
}

/* The number of holes that begin before offset. */
static size_t holes_before(const ptn_space *space, uint64_t offset) {
  size_t low = 0, high = space->holes_count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (space->holes[middle].offset < offset) low = middle + 1;
    else high = middle;
  }
  return low;
}

static uint64_t end_of(ptn_extent extent) { return extent.offset + extent.bytes; }

/* Puts a hole in its place and joins it with its neighbours. */
static void add_hole(ptn_space *space, ptn_extent hole) {
  size_t index = holes_before(space, hole.offset);
  ptn_extent *before = index > 0 ? &space->holes[index - 1] : NULL;
  ptn_extent *after = index < space->holes_count ? &space->holes[index] : NULL;
  if ((before && end_of(*before) > hole.offset) || (after && end_of(hole) > after->offset)) abort(); /* free already */
  bool joins_before = before && end_of(*before) == hole.offset;
  bool joins_after = after && end_of(hole) == after->offset;
  if (joins_before) {
    before->bytes += hole.bytes;
    if (!joins_after) return;
    before->bytes += after->bytes;
    remove_hole(space, index);
  } else if (joins_after) {
    after->offset = hole.offset;
    after->bytes += hole.bytes;
  } else {
    if (space->holes_count == space->holes_capacity) abort(); /* there can be no more than takes have made room for */
    memmove(&space->holes[index + 1], &space->holes[index], (space->holes_count - index) * sizeof hole);
    space->holes[index] = hole;
    space->holes_count++;
  }
}

void ptn_space_give(ptn_space *space, ptn_extent extent) {
  if (extent.bytes == 0 || end_of(extent) > space->end_bytes || space->used_count == 0) abort();
  add_hole(space, extent);
  space->used_count--;
}

uint64_t ptn_space_used_end(const ptn_space *space) {
  if (space->holes_count == 0) return space->end_bytes;
  ptn_extent last = space->holes[space->holes_count - 1];
  return end_of(last) == space->end_bytes ? last.offset : space->end_bytes;
}

void ptn_space_set_end(ptn_space *space, uint64_t end_bytes) {
  uint64_t used_end = ptn_space_used_end(space);
  if (end_bytes < used_end) abort(); /* somebody's bytes */
  if (used_end < space->end_bytes) space->holes_count--;
  space->end_bytes = end_bytes;
  if (used_end < end_bytes) add_hole(space, (ptn_extent){.offset = used_end, .bytes = end_bytes - used_end});
}

bool ptn_space_check(const ptn_space *space) {
  uint64_t at = 0;
  for (size_t i = 0; i < space->holes_count; i++) {
    ptn_extent hole = space->holes[i];
    if (hole.bytes == 0 || hole.offset < at || (i > 0 && hole.offset == at)) return false;
    at = end_of(hole);
  }
  return at <= space->end_bytes && space->holes_count <= space->used_count + 1 && space->holes_count <= space->holes_capacity;
}
