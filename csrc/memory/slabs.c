/* Small blocks.
 *
 * A slab is 64 KiB cut into slots of one size, a multiple of 64 bytes, so that a block takes no more than its bytes rounded up
 * to a line of the processor's cache. A slab belongs to one account: a slot needs no owner of its own. Which slots are free
 * is in bits beside the slab; the lowest one is taken, so that slots stay together and pages at a slab's end stay untouched.
 * The page map knows the slab of each of its pages.
 *
 * An empty slab goes to a pool, for any account and size, unless it is the only one of its size its account has. The pool and
 * the free slots are the price of small blocks: cached memory that cannot be given back, but for the pool.
 *
 * Invariants (ptn_slabs_check): a slab is in its account's list exactly if it has a free slot; free_count is the number of
 * bits; pages behind touched_bytes were never written since the slab was last purged.
 */
#include "memory/slabs.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/bytes.h"
#include "device/device.h"
#include "memory/metadata.h"
#include "memory/page_map.h"

static const size_t wished_range_bytes = (size_t)1 << 30;

ptn_slab_totals ptn_slab_sums;

static ptn_slab *empty_slabs, *all_slabs; /* the pool, the last one emptied first; every slab there is */
static uintptr_t fresh_begin, fresh_end;  /* reserved and not yet cut into slabs */
static ptn_metadata_pool pool = {.record_bytes = sizeof(ptn_slab)};

static void must(bool holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "protrain: the arena is broken: %s\n", what);
  abort();
}

/* ---- lists ---- */

static ptn_slab **open_list(ptn_slab *slab) { return &slab->owner->open_slabs[slab->slot_bytes / PTN_TENSOR_ALIGN_BYTES]; }

static void push(ptn_slab **list, ptn_slab *slab) {
  slab->previous = NULL;
  slab->next = *list;
  if (*list) (*list)->previous = slab;
  *list = slab;
}

static void drop(ptn_slab **list, ptn_slab *slab) {
  *(slab->previous ? &slab->previous->next : list) = slab->next;
  if (slab->next) slab->next->previous = slab->previous;
}

/* ---- slabs ---- */

static ptn_status new_slab(ptn_slab **out) {
  PTN_TRY(ptn_metadata_stock(&pool, 1));
  if (fresh_begin == fresh_end) {
    size_t got_bytes;
    uintptr_t begin;
    PTN_TRY(ptn_range_reserve(PTN_HUGE_BYTES, wished_range_bytes, &begin, &got_bytes));
    fresh_begin = begin;
    fresh_end = begin + got_bytes / PTN_SLAB_BYTES * PTN_SLAB_BYTES;
  }
  ptn_slab *slab = ptn_metadata_take(&pool);
  slab->begin = fresh_begin;
  fresh_begin += PTN_SLAB_BYTES;
  for (size_t at = 0; at < PTN_SLAB_BYTES; at += PTN_PAGE_BYTES) ptn_map_set(slab->begin + at, (uintptr_t)slab | PTN_MAP_SLAB);
  slab->next_of_all = all_slabs;
  all_slabs = slab;
  *out = slab;
  return PTN_OK;
}

/* Puts a slab of the pool, or a new one, at the front of the owner's list for this size. */
static ptn_status open_slab(size_t bytes, ptn_account *owner) {
  ptn_slab *slab = empty_slabs;
  if (slab) {
    drop(&empty_slabs, slab);
  } else {
    PTN_TRY(new_slab(&slab));
  }
  slab->owner = owner;
  slab->slot_bytes = (uint32_t)bytes;
  slab->slot_count = slab->free_count = (uint32_t)(PTN_SLAB_BYTES / bytes);
  slab->reciprocal = (uint32_t)((((uint64_t)1 << 32) + bytes - 1) / bytes);
  slab->free_word_bits = 0;
  for (uint32_t word = 0; word < PTN_SLAB_WORDS; word++) {
    uint32_t slots = slab->slot_count > 64 * word ? slab->slot_count - 64 * word : 0;
    slab->free_bits[word] = slots >= 64 ? UINT64_MAX : ((uint64_t)1 << slots) - 1;
    if (slots > 0) slab->free_word_bits |= (uint32_t)1 << word;
  }
  push(open_list(slab), slab);
  return PTN_OK;
}

static void close_slab(ptn_slab *slab) {
  drop(open_list(slab), slab);
  slab->owner = NULL;
  push(&empty_slabs, slab);
}

/* ---- slots ---- */

static void touch(ptn_slab *slab, uint32_t end_bytes) {
  uint32_t touched_bytes = (uint32_t)ptn_round_up(end_bytes, PTN_PAGE_BYTES);
  ptn_slab_sums.fresh_count++;
  ptn_slab_sums.fresh_bytes += touched_bytes - slab->touched_bytes;
  ptn_slab_sums.touched_bytes += touched_bytes - slab->touched_bytes;
  slab->touched_bytes = touched_bytes;
}

ptn_status ptn_slab_take(size_t bytes, ptn_account *owner, void **out) {
  ptn_slab **list = &owner->open_slabs[bytes / PTN_TENSOR_ALIGN_BYTES];
  if (!*list) PTN_TRY(open_slab(bytes, owner));
  ptn_slab *slab = *list;
  uint32_t word = (uint32_t)__builtin_ctz(slab->free_word_bits), bit = (uint32_t)__builtin_ctzll(slab->free_bits[word]);
  slab->free_bits[word] &= slab->free_bits[word] - 1;
  if (slab->free_bits[word] == 0) slab->free_word_bits &= slab->free_word_bits - 1;
  if (--slab->free_count == 0) drop(list, slab);
  uint32_t offset = (64 * word + bit) * slab->slot_bytes;
  if (offset + slab->slot_bytes > slab->touched_bytes) touch(slab, offset + slab->slot_bytes);
  ptn_slab_sums.live_bytes += bytes;
  *out = (void *)(slab->begin + offset);
  return PTN_OK;
}

void ptn_slab_give(ptn_slab *slab, uintptr_t address) {
  uint64_t offset = address - slab->begin;
  uint32_t slot = (uint32_t)((offset * slab->reciprocal) >> 32), word = slot / 64;
  uint64_t bit = (uint64_t)1 << slot % 64;
  if (!slab->owner || slot >= slab->slot_count || (uint64_t)slot * slab->slot_bytes != offset || (slab->free_bits[word] & bit))
    must(false, "a small block was freed that is not in use (freed twice?)");
  slab->free_bits[word] |= bit;
  slab->free_word_bits |= (uint32_t)1 << word;
  ptn_slab_sums.live_bytes -= slab->slot_bytes;
  ptn_slab **list = open_list(slab);
  if (slab->free_count++ == 0) push(list, slab);
  bool only_one = *list == slab && !slab->next;
  if (slab->free_count == slab->slot_count && !(only_one && slab->owner->open)) close_slab(slab);
}

/* ---- the pool ---- */

void ptn_slabs_forget(ptn_account *account) {
  for (size_t class = 1; class < PTN_SMALL_CLASSES; class ++) {
    for (ptn_slab *slab = account->open_slabs[class], *next; slab; slab = next) {
      next = slab->next;
      if (slab->free_count == slab->slot_count) close_slab(slab);
    }
  }
}

uint64_t ptn_slabs_purge(uint64_t bytes) {
  uint64_t purged_bytes = 0;
  for (ptn_slab *slab = empty_slabs; slab && purged_bytes < bytes; slab = slab->next) {
    if (slab->touched_bytes == 0 || !ptn_host_pages()->purge((void *)slab->begin, slab->touched_bytes)) continue;
    purged_bytes += slab->touched_bytes;
    slab->touched_bytes = 0;
  }
  ptn_slab_sums.touched_bytes -= purged_bytes;
  ptn_slab_sums.purged_bytes += purged_bytes;
  return purged_bytes;
}

static void check_slab(const ptn_slab *slab) {
  must(ptn_map_get(slab->begin) == ((uintptr_t)slab | PTN_MAP_SLAB), "the page map has a wrong slab");
  if (!slab->owner) return;
  uint32_t free_count = 0;
  for (uint32_t word = 0; word < PTN_SLAB_WORDS; word++) {
    free_count += (uint32_t)__builtin_popcountll(slab->free_bits[word]);
    must((slab->free_bits[word] != 0) == (slab->free_word_bits >> word & 1), "a slab's words are wrong");
  }
  must(free_count == slab->free_count && free_count <= slab->slot_count, "a slab's free slots are wrong");
  bool listed = false;
  const ptn_slab *at = slab->owner->open_slabs[slab->slot_bytes / PTN_TENSOR_ALIGN_BYTES];
  for (; at; at = at->next) listed |= at == slab;
  must(listed == (free_count > 0), "a slab is in a wrong list");
}

void ptn_slabs_check(void) {
  uint64_t live_bytes = 0, touched_bytes = 0;
  for (const ptn_slab *slab = all_slabs; slab; slab = slab->next_of_all) {
    check_slab(slab);
    touched_bytes += slab->touched_bytes;
    if (slab->owner) live_bytes += (uint64_t)(slab->slot_count - slab->free_count) * slab->slot_bytes;
  }
  must(live_bytes == ptn_slab_sums.live_bytes, "live bytes of small blocks are wrong");
  must(touched_bytes == ptn_slab_sums.touched_bytes, "resident bytes of small blocks are wrong");
}
