/* Large blocks.
 *
 * A range of addresses is cut into stretches without gaps; a stretch is live, dirty (free, resident) or clean (free, not
 * resident). The page map knows the first and the last page of each, which finds a block's stretch when it is freed and its
 * neighbours when it is merged. Free neighbours of one kind are always merged; dirty and clean ones lie side by side in a run.
 *
 * A live stretch is also found from any address inside: the granules that begin in it are its own in the page map. They are
 * written when it is handed out, and only those that are not its own from an earlier time. Nothing is erased: what is found is
 * believed only where it is live and contains the address, and records are never anything but stretches.
 *
 * A request is met, in this order, by: a stretch freed a moment ago with exactly its size; the smallest dirty stretch that
 * holds it; the part of a run that holds it with the fewest clean pages; a new range. Training repeats its requests, so
 * after the first steps almost all are met without clean pages, that is, without page faults.
 *
 * Recent stretches are what makes a free and a request of the same size cheap: they are not merged, sit in no tree, and become
 * ordinary dirty stretches when they leave the small ring, or when nothing else would save fresh pages. Larger ones are merged
 * at once: against the work on them merging costs nothing, and holes would cost pages.
 *
 * Huge pages: a huge page is allowed only where it lies within pages put to use, and disallowed when a byte of it is purged.
 * So a fault never makes a clean page resident, and resident memory is what is counted. Blocks end anywhere, so a huge page may
 * be put to use in parts, by neighbours, and be faulted in as small pages; it is gathered when its last part is put to use (for
 * that moment the system has its small pages too). A direct transfer pays for each small page, a disk for each few hundred.
 *
 * Invariants (ptn_stretches_check): stretches of a range are adjacent and cover it; no two neighbours are both dirty or both
 * clean; each dirty stretch is in the tree by bytes and in the list by age, each first stretch of a run in the tree of runs;
 * the granules within marked_bytes, which are all of a live stretch, point to it; the sums equal what a walk finds.
 */
#include "memory/stretches.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "device/device.h"
#include "memory/metadata.h"
#include "memory/page_map.h"

#define RECENT_COUNT 16
#define RANGE_COUNT 8192 /* as many as the page map keeps */
#define MOST_EDGES 8     /* kept of one block; those beyond stay in small pages */

static const size_t wished_range_bytes = (size_t)64 << 30;
static const size_t largest_recent_bytes = (size_t)256 << 10;
static const size_t run_tries = 8; /* runs compared when clean pages are needed */

typedef struct range {
  uintptr_t begin;
  size_t bytes;
} range;

ptn_stretch_totals ptn_stretch_sums;

static range ranges[RANGE_COUNT];
static size_t range_count;
static ptn_fit_tree dirty_tree, run_tree;
static ptn_stretch *oldest, *newest;
static ptn_stretch *recent[RECENT_COUNT];
static size_t recent_bytes[RECENT_COUNT]; /* 0: none; beside the pointers for the search */
static size_t recent_next, recent_used;
static uint64_t last_serial;
static uintptr_t
    edges[MOST_EDGES]; /* of what was clean in the block taken last: huge pages around them are put to use in parts */
static size_t edge_count;
static ptn_metadata_pool pool = {.record_bytes = sizeof(ptn_stretch)};

#define stretch_of(node, member) ((ptn_stretch *)(void *)((char *)(node) - offsetof(ptn_stretch, member)))

static bool is_free(const ptn_stretch *stretch) {
  return stretch && (stretch->state == PTN_STRETCH_DIRTY || stretch->state == PTN_STRETCH_CLEAN);
}
static uintptr_t end_of(const ptn_stretch *stretch) { return stretch->begin + stretch->bytes; }

/* NULL where no stretch is, or where a slab is. */
static ptn_stretch *at_page(uintptr_t address) {
  uintptr_t word = ptn_map_get(address);
  return word & PTN_MAP_SLAB ? NULL : (ptn_stretch *)word;
}
static ptn_stretch *stretch_before(const ptn_stretch *stretch) { return at_page(stretch->begin - 1); }
static ptn_stretch *stretch_after(const ptn_stretch *stretch) { return at_page(end_of(stretch)); }

static void map_edges(ptn_stretch *stretch) {
  ptn_map_set(stretch->begin, (uintptr_t)stretch);
  ptn_map_set(end_of(stretch) - 1, (uintptr_t)stretch);
}

static void mark_granules(ptn_stretch *stretch) {
  uintptr_t at = (uintptr_t)ptn_round_up(stretch->begin + stretch->marked_bytes, PTN_MAP_GRANULE_BYTES);
  for (; at < end_of(stretch); at += PTN_MAP_GRANULE_BYTES) ptn_map_set_granule(at, (uintptr_t)stretch);
  stretch->marked_bytes = stretch->bytes;
}

static bool lives_at(const ptn_stretch *stretch, uintptr_t address) {
  return stretch && stretch->state == PTN_STRETCH_LIVE && address - stretch->begin < stretch->bytes;
}

/* It covers the first byte of the address' granule, or it begins in this granule at or below the address. */
ptn_stretch *ptn_stretch_find(uintptr_t address) {
  ptn_stretch *stretch = (ptn_stretch *)ptn_map_get_granule(address);
  if (lives_at(stretch, address)) return stretch;
  uintptr_t page = address / PTN_PAGE_BYTES * PTN_PAGE_BYTES;
  for (; page % PTN_MAP_GRANULE_BYTES != 0; page -= PTN_PAGE_BYTES) {
    stretch = at_page(page);
    if (lives_at(stretch, address)) return stretch;
  }
  return NULL;
}

/* ---- the two trees and the list by age ---- */

static void list_dirty(ptn_stretch *stretch, ptn_stretch *after) {
  stretch->by_bytes = (ptn_fit_node){.bytes = stretch->bytes, .address = stretch->begin};
  ptn_fit_insert(&dirty_tree, &stretch->by_bytes);
  stretch->older = after;
  stretch->newer = after ? after->newer : oldest;
  *(stretch->newer ? &stretch->newer->older : &newest) = stretch;
  *(after ? &after->newer : &oldest) = stretch;
}

static void unlist_dirty(ptn_stretch *stretch) {
  ptn_fit_remove(&dirty_tree, &stretch->by_bytes);
  *(stretch->newer ? &stretch->newer->older : &newest) = stretch->older;
  *(stretch->older ? &stretch->older->newer : &oldest) = stretch->newer;
}

static ptn_stretch *run_head(ptn_stretch *stretch) {
  for (ptn_stretch *left = stretch_before(stretch); is_free(left); left = stretch_before(stretch)) stretch = left;
  return stretch;
}

static void list_run(ptn_stretch *head) {
  size_t bytes = 0;
  for (ptn_stretch *stretch = head; is_free(stretch); stretch = stretch_after(stretch)) bytes += stretch->bytes;
  head->by_run = (ptn_fit_node){.bytes = bytes, .address = head->begin};
  ptn_fit_insert(&run_tree, &head->by_run);
}

static void unlist_run(ptn_stretch *head) { ptn_fit_remove(&run_tree, &head->by_run); }

/* Appends the right neighbour, which is in no list, to left, whose listing the caller renews. */
static void absorb(ptn_stretch *left, ptn_stretch *right) {
  left->bytes += right->bytes;
  ptn_map_set(end_of(left) - 1, (uintptr_t)left);
  right->bytes = 0; /* the map still points to it: it contains nothing */
  ptn_metadata_give(&pool, right);
}

/* Cuts a free stretch in two, both of its kind and age; the run they belong to stays as it is. Takes a record of the stock. */
static ptn_stretch *split(ptn_stretch *left, uintptr_t at) {
  ptn_stretch *right = ptn_metadata_take(&pool);
  bool dirty = left->state == PTN_STRETCH_DIRTY;
  ptn_stretch *age = left->older;
  if (dirty) unlist_dirty(left);
  right->begin = at;
  right->bytes = end_of(left) - at;
  right->state = left->state;
  left->bytes = at - left->begin;
  left->marked_bytes = (size_t)ptn_min_u64(left->marked_bytes, left->bytes);
  map_edges(left);
  map_edges(right);
  if (dirty) {
    list_dirty(left, age);
    list_dirty(right, left);
  }
  return right;
}

/* ---- giving back ---- */

/* Makes a stretch that is in no list dirty, and merges it with its neighbours. */
static void release(ptn_stretch *stretch) {
  stretch->state = PTN_STRETCH_DIRTY;
  ptn_stretch *left = stretch_before(stretch), *right = stretch_after(stretch);
  if (is_free(right)) unlist_run(right);
  ptn_stretch *head = is_free(left) ? run_head(left) : stretch;
  if (head != stretch) unlist_run(head);
  if (right && right->state == PTN_STRETCH_DIRTY) {
    unlist_dirty(right);
    absorb(stretch, right);
  }
  if (left && left->state == PTN_STRETCH_DIRTY) {
    unlist_dirty(left);
    absorb(left, stretch);
    stretch = left;
  }
  list_dirty(stretch, newest);
  list_run(head);
}

static void release_recent(size_t index) {
  ptn_stretch *stretch = recent[index];
  recent_bytes[index] = 0;
  recent_used--;
  release(stretch);
}

static void release_all_recent(void) {
  for (size_t i = 0; i < RECENT_COUNT; i++)
    if (recent_bytes[i] != 0) release_recent(i);
}

void ptn_stretch_give(ptn_stretch *stretch) {
  ptn_stretch_sums.live_bytes -= stretch->bytes;
  ptn_stretch_sums.cached_bytes += stretch->bytes;
  stretch->owner = NULL;
  if (stretch->bytes > largest_recent_bytes) {
    release(stretch);
    return;
  }
  stretch->state = PTN_STRETCH_RECENT;
  size_t index = recent_next++ % RECENT_COUNT;
  if (recent_bytes[index] != 0) release_recent(index);
  recent[index] = stretch;
  recent_bytes[index] = stretch->bytes;
  recent_used++;
}

/* ---- taking ---- */

static ptn_stretch *take_recent(size_t bytes) {
  if (recent_used == 0) return NULL;
  for (size_t back = 1; back <= RECENT_COUNT; back++) { /* the last one freed is likely in the processor's cache */
    size_t index = (recent_next - back) % RECENT_COUNT;
    if (recent_bytes[index] != bytes) continue;
    recent_bytes[index] = 0;
    recent_used--;
    recent_next = index; /* the ring's free place comes first */
    return recent[index];
  }
  return NULL;
}

/* Where a block is cut out: within the run, from begin on, starting in stretch first. */
typedef struct window {
  ptn_stretch *first;
  uintptr_t begin;
  size_t clean_bytes;
} window;

static size_t clean_in(const ptn_stretch *stretch, uintptr_t begin, uintptr_t end) {
  size_t clean_bytes = 0;
  for (; is_free(stretch) && stretch->begin < end; stretch = stretch_after(stretch)) {
    uintptr_t from = stretch->begin > begin ? stretch->begin : begin, to = end_of(stretch) < end ? end_of(stretch) : end;
    if (stretch->state == PTN_STRETCH_CLEAN && from < to) clean_bytes += to - from;
  }
  return clean_bytes;
}

static void compare_window(ptn_stretch *head, uintptr_t begin, size_t bytes, window *best) {
  size_t clean_bytes = clean_in(head, begin, begin + bytes);
  if (clean_bytes >= best->clean_bytes) return;
  ptn_stretch *first = head;
  while (end_of(first) <= begin) first = stretch_after(first);
  *best = (window){first, begin, clean_bytes};
}

/* The windows of a run that can be best start where a stretch starts or end where one ends. */
static void compare_windows(ptn_stretch *head, size_t bytes, window *best) {
  uintptr_t run_end = head->begin + head->by_run.bytes;
  for (ptn_stretch *stretch = head; is_free(stretch); stretch = stretch_after(stretch)) {
    if (run_end - stretch->begin >= bytes) compare_window(head, stretch->begin, bytes, best);
    if (end_of(stretch) - head->begin >= bytes) compare_window(head, end_of(stretch) - bytes, bytes, best);
  }
}

static bool find_dirty(size_t bytes, window *out) {
  ptn_fit_node *node = ptn_fit_find(&dirty_tree, bytes, 0);
  if (node) *out = (window){stretch_of(node, by_bytes), node->address, 0};
  return node != NULL;
}

static bool find_run(size_t bytes, window *out) {
  *out = (window){.clean_bytes = SIZE_MAX};
  ptn_fit_node *node = ptn_fit_find(&run_tree, bytes, 0);
  for (size_t tried = 0; node && tried < run_tries; tried++) {
    compare_windows(stretch_of(node, by_run), bytes, out);
    node = ptn_fit_find(&run_tree, node->bytes, node->address + 1);
  }
  return out->first != NULL;
}

static ptn_status add_range(size_t bytes) {
  if (range_count == RANGE_COUNT)
    return ptn_fail(PTN_MEMORY, "the arena has %d ranges of addresses and can keep no more", RANGE_COUNT);
  uintptr_t begin;
  size_t got_bytes;
  /* A page more, which keeps ranges apart. */
  PTN_TRY(ptn_range_reserve(bytes + PTN_PAGE_BYTES, wished_range_bytes, &begin, &got_bytes));
  ranges[range_count++] = (range){begin, got_bytes - PTN_PAGE_BYTES};
  ptn_stretch *stretch = ptn_metadata_take(&pool);
  stretch->begin = begin;
  stretch->bytes = got_bytes - PTN_PAGE_BYTES;
  stretch->state = PTN_STRETCH_CLEAN;
  map_edges(stretch);
  list_run(stretch);
  return PTN_OK;
}

/* Whether no byte of a huge page is clean; the stretch has bytes of it. */
static bool is_complete(uintptr_t huge, ptn_stretch *stretch) {
  for (ptn_stretch *right = stretch; end_of(right) < huge + PTN_HUGE_BYTES;) {
    right = stretch_after(right);
    if (!right || right->state == PTN_STRETCH_CLEAN) return false;
  }
  while (stretch->begin > huge) {
    stretch = stretch_before(stretch);
    if (!stretch || stretch->state == PTN_STRETCH_CLEAN) return false;
  }
  return true;
}

void ptn_stretch_gather(ptn_stretch *stretch) {
  for (; edge_count > 0; edge_count--) {
    uintptr_t edge = edges[edge_count - 1], huge = edge / PTN_HUGE_BYTES * PTN_HUGE_BYTES;
    if (huge != edge && is_complete(huge, stretch)) ptn_host_pages()->gather_huge((void *)huge);
  }
}

/* The whole huge pages within pages that were clean until now. */
static void use_fresh(uintptr_t begin, uintptr_t end) {
  uintptr_t first = (uintptr_t)ptn_round_up(begin, PTN_HUGE_BYTES), last = end / PTN_HUGE_BYTES * PTN_HUGE_BYTES;
  ptn_stretch_sums.fresh_count++;
  ptn_stretch_sums.fresh_bytes += end - begin;
  if (first < last) ptn_host_pages()->allow_huge((void *)first, last - first, true);
  if (edge_count + 2 > MOST_EDGES) return;
  edges[edge_count++] = begin;
  edges[edge_count++] = end;
}

/* Cuts the window out of its run as one stretch that is in no list. */
static ptn_stretch *carve(window from, size_t bytes) {
  ptn_stretch *first = from.first, *head = run_head(first);
  uintptr_t end = from.begin + bytes;
  unlist_run(head);
  if (from.begin > first->begin) {
    first = split(first, from.begin);
  } else if (head == first) {
    head = NULL; /* nothing stays to the left */
  }
  for (ptn_stretch *next = first;; next = stretch_after(first)) {
    if (end_of(next) > end) split(next, end);
    if (next->state == PTN_STRETCH_DIRTY) {
      unlist_dirty(next);
      ptn_stretch_sums.cached_bytes -= next->bytes;
    } else {
      use_fresh(next->begin, end_of(next));
    }
    if (next != first) absorb(first, next);
    if (end_of(first) == end) break;
  }
  first->state = PTN_STRETCH_LIVE;
  if (head) list_run(head);
  if (is_free(stretch_after(first))) list_run(stretch_after(first));
  return first;
}

ptn_status ptn_stretch_take(size_t bytes, ptn_account *owner, ptn_stretch **out) {
  ptn_stretch *stretch = take_recent(bytes);
  edge_count = 0;
  if (stretch) {
    ptn_stretch_sums.cached_bytes -= bytes;
  } else {
    window from;
    PTN_TRY(ptn_metadata_stock(&pool, 4));
    bool found = find_dirty(bytes, &from);
    if (!found && recent_used > 0) {
      release_all_recent();
      found = find_dirty(bytes, &from);
    }
    if (!found && !find_run(bytes, &from)) {
      PTN_TRY(add_range(bytes));
      find_run(bytes, &from);
    }
    stretch = carve(from, bytes);
  }
  mark_granules(stretch);
  stretch->state = PTN_STRETCH_LIVE;
  stretch->owner = owner;
  stretch->serial = ++last_serial;
  stretch->hold_count = 1;
  atomic_store_explicit(&stretch->use, PTN_BLOCK_PLAIN, memory_order_relaxed);
  ptn_stretch_sums.live_bytes += bytes;
  *out = stretch;
  return PTN_OK;
}

/* ---- purging ---- */

/* The part of a stretch to purge when bytes must go: its end, from a huge page's start where that is near. */
static ptn_stretch *purged_part(ptn_stretch *stretch, uint64_t bytes) {
  if (bytes >= stretch->bytes || ptn_metadata_stock(&pool, 1) != PTN_OK) return stretch;
  uintptr_t cut = end_of(stretch) - (uintptr_t)ptn_round_up(bytes, PTN_PAGE_BYTES);
  if (bytes >= PTN_HUGE_BYTES) cut = cut / PTN_HUGE_BYTES * PTN_HUGE_BYTES;
  return cut > stretch->begin ? split(stretch, cut) : stretch;
}

/* Huge pages of which a byte is clean must not come back whole at the next fault. */
static void disallow_huge(uintptr_t begin, uintptr_t end) {
  uintptr_t first = begin / PTN_HUGE_BYTES * PTN_HUGE_BYTES, last = (uintptr_t)ptn_round_up(end, PTN_HUGE_BYTES);
  ptn_host_pages()->allow_huge((void *)first, last - first, false);
}

/* Turns a dirty stretch clean; it stays in its run. */
static void make_clean(ptn_stretch *stretch) {
  disallow_huge(stretch->begin, end_of(stretch));
  unlist_dirty(stretch);
  stretch->state = PTN_STRETCH_CLEAN;
  ptn_stretch_sums.cached_bytes -= stretch->bytes;
  ptn_stretch_sums.purged_bytes += stretch->bytes;
  ptn_stretch *left = stretch_before(stretch), *right = stretch_after(stretch);
  if (right && right->state == PTN_STRETCH_CLEAN) absorb(stretch, right);
  if (left && left->state == PTN_STRETCH_CLEAN) absorb(left, stretch);
}

uint64_t ptn_stretches_purge(uint64_t bytes) {
  uint64_t purged_bytes = 0;
  release_all_recent();
  for (ptn_stretch *stretch = oldest; stretch && purged_bytes < bytes;) {
    ptn_stretch *part = purged_part(stretch, bytes - purged_bytes), *next = stretch->newer;
    if (ptn_host_pages()->purge((void *)part->begin, part->bytes)) {
      purged_bytes += part->bytes;
      make_clean(part);
    } else if (part != stretch) {
      next = part->newer;
    }
    stretch = next;
  }
  return purged_bytes;
}

/* ---- checking ---- */

static void must(bool holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "protrain: the arena is broken: %s\n", what);
  abort();
}

static size_t count_nodes(const ptn_fit_node *node) {
  if (!node) return 0;
  must(!node->left || ptn_fit_before(node->left, node->bytes, node->address), "a tree is out of order");
  must(!node->right || ptn_fit_before(node, node->right->bytes, node->right->address), "a tree is out of order");
  return 1 + count_nodes(node->left) + count_nodes(node->right);
}

typedef struct walk {
  uint64_t live_bytes, cached_bytes;
  size_t dirty_count, recent_count, run_count;
} walk;

static void check_run(const ptn_stretch *head, walk *found) {
  size_t bytes = 0;
  for (const ptn_stretch *stretch = head; is_free(stretch); stretch = stretch_after(stretch)) bytes += stretch->bytes;
  must(head->by_run.bytes == bytes && head->by_run.address == head->begin, "a run has a wrong size");
  must(ptn_fit_find(&run_tree, bytes, head->begin) == &head->by_run, "a run is not in its tree");
  found->run_count++;
}

static void check_granules(const ptn_stretch *stretch) {
  must(stretch->marked_bytes <= stretch->bytes, "a stretch is in the page map beyond its end");
  uintptr_t at = (uintptr_t)ptn_round_up(stretch->begin, PTN_MAP_GRANULE_BYTES), end = stretch->begin + stretch->marked_bytes;
  for (; at < end; at += PTN_MAP_GRANULE_BYTES)
    must(ptn_map_get_granule(at) == (uintptr_t)stretch, "a granule has a wrong stretch");
}

static void check_stretch(ptn_stretch *stretch, const ptn_stretch *before, walk *found) {
  must(stretch && stretch->bytes > 0 && stretch->bytes % PTN_PAGE_BYTES == 0, "a stretch is missing or has no whole pages");
  must(at_page(stretch->begin) == stretch && at_page(end_of(stretch) - 1) == stretch, "the page map has a wrong stretch");
  must(!is_free(stretch) || !before || before->state != stretch->state, "two free neighbours are not merged");
  check_granules(stretch);
  if (is_free(stretch) && !is_free(before)) check_run(stretch, found);
  if (stretch->state == PTN_STRETCH_LIVE) {
    must(stretch->owner != NULL, "a block has no owner");
    must(stretch->hold_count > 0 && stretch->marked_bytes == stretch->bytes, "a block has no hold, or cannot be found");
    must(stretch->serial > 0 && stretch->serial <= last_serial, "a block has a wrong serial");
    found->live_bytes += stretch->bytes;
  } else if (stretch->state != PTN_STRETCH_CLEAN) {
    found->cached_bytes += stretch->bytes;
  }
  if (stretch->state == PTN_STRETCH_RECENT) found->recent_count++;
  if (stretch->state == PTN_STRETCH_DIRTY) {
    must(ptn_fit_find(&dirty_tree, stretch->bytes, stretch->begin) == &stretch->by_bytes, "a dirty stretch is not in its tree");
    found->dirty_count++;
  }
}

void ptn_stretches_check(void) {
  walk found = {0};
  for (size_t i = 0; i < range_count; i++) {
    uintptr_t at = ranges[i].begin, end = at + ranges[i].bytes;
    for (ptn_stretch *before = NULL; at < end; at += before->bytes) {
      ptn_stretch *stretch = at_page(at);
      check_stretch(stretch, before, &found);
      before = stretch;
    }
    must(at == end, "stretches do not cover their range");
  }
  size_t aged_count = 0;
  for (const ptn_stretch *stretch = oldest; stretch; stretch = stretch->newer) aged_count++;
  must(count_nodes(dirty_tree.root) == found.dirty_count && aged_count == found.dirty_count, "dirty stretches are lost");
  must(count_nodes(run_tree.root) == found.run_count, "runs are lost");
  must(recent_used == found.recent_count, "recent stretches are lost");
  must(found.live_bytes == ptn_stretch_sums.live_bytes, "live bytes are wrong");
  must(found.cached_bytes == ptn_stretch_sums.cached_bytes, "cached bytes are wrong");
}
