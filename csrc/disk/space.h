/* The map of the store's file: which bytes are free. Pure bookkeeping, no I/O; file.c makes the space that it speaks of.
 *
 * Free extents lie in an array, sorted by offset, none empty, no two touching. Extents in use are not listed: whoever has one
 * holds it. There is at most one hole more than there are extents in use, so room for the holes is made when space is taken,
 * and giving back never needs memory, and never fails.
 */
#ifndef PTN_DISK_SPACE_H
#define PTN_DISK_SPACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "disk/store.h"

typedef struct ptn_space {
  ptn_extent *holes;
  size_t holes_count, holes_capacity;
  size_t used_count;  /* extents in use */
  uint64_t end_bytes; /* of the file */
} ptn_space;

void ptn_space_create(ptn_space *space); /* of an empty file */
void ptn_space_destroy(ptn_space *space);
/* The first hole that holds bytes (not 0). Where there is none, *out is none (bytes 0) and the file has to grow. */
ptn_status ptn_space_take(ptn_space *space, uint64_t bytes, ptn_extent *out);
/* Gives an extent back. Aborts where it is not one in use: going on would put two owners on the same bytes. */
void ptn_space_give(ptn_space *space, ptn_extent extent);
uint64_t ptn_space_used_end(const ptn_space *space); /* where the hole at the end of the file begins */
/* At or past the used end; longer only after a take, which has made room for the hole. */
void ptn_space_set_end(ptn_space *space, uint64_t end_bytes);
bool ptn_space_check(const ptn_space *space);

#endif
