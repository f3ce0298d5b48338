/* Blocks of a page or more as others see them: found from any address inside, held by several, told apart by their serials.
 * Whatever the page map still says of blocks that are gone, nobody finds one of them. */
/* sources: csrc/device/?*.c csrc/memory/?*.c */
/* threads */
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "base/bytes.h"
#include "base/threads.h"
#include "check.h"
#include "memory/arena.h"

static const size_t granule_bytes = 16 * PTN_PAGE_BYTES; /* what page_map.h marks at once; sizes around it are the hard ones */

static char *take(ptn_account *from, size_t bytes) {
  void *block;
  CHECK_OK(ptn_arena_alloc(from, bytes, &block));
  return block;
}

static uint64_t live_bytes(void) {
  ptn_arena_stats all;
  ptn_arena_get_stats(&all);
  return all.live_bytes;
}

static bool finds(const char *address, const char *memory, size_t bytes) {
  ptn_block found;
  return ptn_arena_find(address, &found) && found.memory == memory && found.bytes == ptn_arena_rounded_bytes(bytes);
}

static bool finds_nothing(const void *address) {
  ptn_block found;
  return !ptn_arena_find(address, &found);
}

/* What whoever has a hold is told of the block that begins there, without a lock, is what is found with it. */
static bool is_described(const ptn_block *block) {
  ptn_block told;
  return ptn_arena_describe(block->memory, &told) && told.memory == block->memory && told.bytes == block->bytes &&
         told.serial == block->serial && told.own == block->own;
}

static ptn_block block_at(const void *address) {
  ptn_block found;
  CHECK(ptn_arena_find(address, &found));
  return found;
}

static void a_block_is_found_from_each_of_its_pages(void) {
  static const size_t pages[] = {1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 1000, 40000};
  for (size_t i = 0; i < sizeof pages / sizeof *pages; i++) {
    size_t bytes = pages[i] * PTN_PAGE_BYTES - 5;
    char *block = take(NULL, bytes);
    for (size_t page = 0; page < pages[i]; page++) CHECK(finds(block + page * PTN_PAGE_BYTES, block, bytes));
    CHECK(finds(block + 1, block, bytes) && finds(block + bytes + 4, block, bytes));
    CHECK(!finds(block - 1, block, bytes) && !finds(block + bytes + 5, block, bytes));
    ptn_arena_free(block);
    CHECK(finds_nothing(block) && finds_nothing(block + bytes - 1) && finds_nothing(block + bytes / 2));
  }
}

static void other_memory_is_not_found(void) {
  int here = 0;
  char *small = take(NULL, 64), *almost = take(NULL, PTN_PAGE_BYTES - 64), *heap = malloc(1 << 20);
  CHECK(heap);
  const void *others[] = {
      &here, small, almost, almost + 4000, heap, heap + 70000, NULL, (void *)UINTPTR_MAX, (void *)((uintptr_t)1 << 47)};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    ptn_block told;
    CHECK(finds_nothing(others[i]) && !ptn_arena_describe(others[i], &told));
  }
  ptn_block made_up = {.memory = small, .bytes = 64, .serial = 1};
  CHECK(!ptn_arena_hold(&made_up));
  made_up.memory = &here;
  CHECK(!ptn_arena_hold(&made_up));
  ptn_arena_set_use(small, PTN_BLOCK_STATIC); /* a small block has no use */
  free(heap);
  ptn_arena_free(small);
  ptn_arena_free(almost);
}

/* The same addresses are cut up in many ways, so that the page map keeps words of each of them. */
static void words_of_the_past_are_not_believed(void) {
  enum { total_pages = 16 * 64 };
  static const size_t cuts[] = {1, 64, 3, 16, 1, 17, 1024, 5, 48, 15, 256, 2};
  static char *pieces[total_pages];
  static ptn_block olds[total_pages];
  size_t old_count = 0;
  for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
    ptn_arena_trim(0);
    char *whole = take(NULL, total_pages * PTN_PAGE_BYTES);
    ptn_arena_free(whole); /* one dirty stretch, out of which what follows is cut from the left */
    size_t bytes = cuts[i] * PTN_PAGE_BYTES, count = total_pages / cuts[i];
    for (size_t k = 0; k < count; k++) CHECK((pieces[k] = take(NULL, bytes)) >= whole && pieces[k] < whole + count * bytes);
    for (size_t page = 0; page < total_pages; page++) {
      char *address = whole + page * PTN_PAGE_BYTES + 77;
      if (page < count * cuts[i]) CHECK(finds(address, address - (size_t)(address - whole) % bytes, bytes));
      else CHECK(finds_nothing(address));
    }
    for (size_t k = 0; k < old_count; k++) CHECK(!ptn_arena_hold(&olds[k])); /* of the cut before */
    for (size_t k = 0; k < count; k++) olds[k] = block_at(pieces[k]);
    old_count = count;
    for (size_t k = 0; k < count; k += 2) ptn_arena_free(pieces[k]);
    for (size_t k = 0; k < count; k++)
      CHECK(k % 2 == 0 ? finds_nothing(pieces[k] + bytes / 2) : finds(pieces[k] + 1, pieces[k], bytes));
    ptn_arena_check();
    for (size_t k = 1; k < count; k += 2) ptn_arena_free(pieces[k]);
    for (size_t page = 0; page < total_pages; page++) CHECK(finds_nothing(whole + page * PTN_PAGE_BYTES));
  }
}

static void a_block_lives_until_its_last_hold_is_given_up(void) {
  ptn_account *limited;
  CHECK_OK(ptn_account_create(&limited, 4 * granule_bytes, NULL, NULL));
  char *memory = take(limited, 3 * granule_bytes);
  memset(memory, 7, 3 * granule_bytes);
  ptn_block block = block_at(memory + granule_bytes);
  CHECK(block.serial > 0 && block.use == PTN_BLOCK_PLAIN);
  CHECK(ptn_arena_hold(&block) && ptn_arena_hold_more(&block));
  ptn_arena_set_use(memory, PTN_BLOCK_STATIC);
  for (int i = 0; i < 2; i++) {
    ptn_arena_free(memory);
    CHECK(ptn_account_room(limited) == granule_bytes); /* counted as long as it is held */
    CHECK(finds(memory + 5000, memory, 3 * granule_bytes) && memory[5000] == 7);
    CHECK(block_at(memory).serial == block.serial && block_at(memory).use == PTN_BLOCK_STATIC);
    ptn_arena_check();
  }
  void *refused;
  CHECK(ptn_arena_alloc(limited, 2 * granule_bytes, &refused) == PTN_BUDGET);
  ptn_arena_free(memory);
  CHECK(ptn_account_room(limited) == 4 * granule_bytes && finds_nothing(memory));
  CHECK(!ptn_arena_hold(&block));
  char *again = take(limited, 3 * granule_bytes);
  CHECK(again == memory); /* the same place, another block */
  CHECK(!ptn_arena_hold(&block) && !ptn_arena_hold_more(&block));
  CHECK(block_at(again).serial != block.serial && block_at(again).use == PTN_BLOCK_PLAIN);
  block = block_at(again);
  CHECK(ptn_arena_hold(&block));
  ptn_account_destroy(limited); /* held blocks outlive their account as others do */
  ptn_arena_free(again);
  CHECK(finds(again, again, 3 * granule_bytes));
  ptn_arena_free(again);
  CHECK(finds_nothing(again));
  ptn_arena_check();
}

/* ---- random blocks against a plain list ---- */

enum { place_count = 150 };

typedef struct place {
  char *memory;
  size_t bytes;
  ptn_block block;
  int holds;
} place;

static void check_random_address(const place *places, const char *low, const char *high, uint64_t dice) {
  const char *address = low + dice % (uint64_t)(high - low);
  const place *inside = NULL;
  for (int i = 0; i < place_count; i++)
    if (places[i].holds > 0 && address >= places[i].memory && address < places[i].memory + places[i].bytes) inside = &places[i];
  ptn_block found;
  bool is_found = ptn_arena_find(address, &found);
  CHECK(is_found == (inside != NULL));
  if (inside) CHECK(found.memory == inside->memory && found.bytes == inside->bytes && found.serial == inside->block.serial);
}

static void random_addresses_against_a_model(void) {
  static place places[place_count];
  uint64_t state = 9, last_serial = 0;
  char *low = NULL, *high = NULL;
  for (int round = 0; round < 12000; round++) {
    uint64_t dice = check_random(&state);
    place *at = &places[dice % place_count];
    if (at->holds == 0) {
      CHECK(!at->memory || !ptn_arena_hold(&at->block));
      at->bytes =
          ptn_arena_rounded_bytes(PTN_PAGE_BYTES + (size_t)(check_random(&state) % ((uint64_t)1 << (12 + dice / 1000 % 10))));
      at->memory = take(NULL, at->bytes);
      at->holds = 1;
      at->block = block_at(at->memory + check_random(&state) % at->bytes);
      CHECK(at->block.memory == at->memory && at->block.bytes == at->bytes && at->block.serial > last_serial);
      last_serial = at->block.serial;
      if (!low || at->memory < low) low = at->memory;
      if (at->memory + at->bytes > high) high = at->memory + at->bytes;
    } else if (dice / 1000 % 4 == 0) {
      CHECK(ptn_arena_hold(&at->block));
      at->holds++;
    } else {
      ptn_arena_free(at->memory);
      at->holds--;
    }
    for (int i = 0; i < 8; i++) check_random_address(places, low, high, check_random(&state));
    if (round % 1000 == 0) ptn_arena_trim((uint64_t)round * 1000);
    if (round % 50 == 0) ptn_arena_check();
  }
  for (int i = 0; i < place_count; i++)
    for (; places[i].holds > 0; places[i].holds--) ptn_arena_free(places[i].memory);
  ptn_arena_check();
}

/* ---- threads ---- */

enum { thread_count = 4, shelf_count = 8, round_count = 4000 };

/* What lies on a shelf was found by its owner, and may be gone by the time another thread tries to hold it. */
static struct shelf {
  ptn_mutex mutex;
  ptn_block block;
} shelves[shelf_count];
static atomic_int held_count, gone_count;

static size_t words_of(const ptn_block *block) { return (size_t)block->bytes / sizeof(uint64_t); }

/* The block's serial stands at both ends as long as anybody holds it. */
static void check_held(const ptn_block *block) {
  const uint64_t *words = block->memory;
  CHECK(words[0] == block->serial && words[words_of(block) - 1] == block->serial);
  ptn_block found = block_at((const char *)block->memory + block->bytes / 2);
  CHECK(found.memory == block->memory && found.serial == block->serial && is_described(block));
}

static void *hold_and_free(void *argument) {
  uint64_t state = (uint64_t)(uintptr_t)argument;
  for (int round = 0; round < round_count; round++) {
    uint64_t dice = check_random(&state);
    char *memory = take(NULL, PTN_PAGE_BYTES << dice % 7);
    ptn_block mine = block_at(memory), other;
    ((uint64_t *)mine.memory)[0] = ((uint64_t *)mine.memory)[words_of(&mine) - 1] = mine.serial;
    struct shelf *shelf = &shelves[dice / 7 % shelf_count];
    ptn_lock(&shelf->mutex);
    other = shelf->block;
    shelf->block = mine;
    ptn_unlock(&shelf->mutex);
    if (ptn_arena_hold(&other)) {
      check_held(&other);
      ptn_arena_free(other.memory);
      atomic_fetch_add(&held_count, 1);
    } else {
      atomic_fetch_add(&gone_count, 1);
    }
    check_held(&mine);
    if (dice % 3 == 0) {
      char *again = take(NULL, 200); /* the others get a chance to hold it */
      ptn_arena_free(again);
    }
    ptn_arena_free(memory);
    if (round % 500 == 0) ptn_arena_check();
  }
  return NULL;
}

/* Every thread frees as often as it held, with the lock and without; the last one of all ends the block. */
static ptn_block shared;

static void *hold_many(void *argument) {
  for (int round = 0; round < round_count; round++) {
    CHECK(ptn_arena_hold(&shared) && ptn_arena_hold_more(&shared) && is_described(&shared));
    ptn_arena_set_use(shared.memory, round % 2 ? PTN_BLOCK_STATIC : PTN_BLOCK_PLAIN); /* while others are told of it */
    CHECK(block_at((char *)shared.memory + round % 1000).serial == shared.serial);
    ptn_arena_free(shared.memory);
    ptn_arena_free(shared.memory);
  }
  ptn_arena_free(shared.memory);
  return argument;
}

static void run_threads(void *(*body)(void *)) {
  pthread_t threads[thread_count];
  for (uintptr_t i = 0; i < thread_count; i++) CHECK_OK(ptn_thread_start(&threads[i], "work", body, (void *)(i + 1)));
  for (int i = 0; i < thread_count; i++) ptn_thread_join(threads[i]);
  ptn_arena_check();
}

static void threads_hold_each_others_blocks(void) {
  for (int i = 0; i < shelf_count; i++) ptn_mutex_create(&shelves[i].mutex);
  run_threads(hold_and_free);
  for (int i = 0; i < shelf_count; i++) {
    CHECK(!ptn_arena_hold(&shelves[i].block));
    ptn_mutex_destroy(&shelves[i].mutex);
  }
  CHECK(held_count + gone_count == thread_count * round_count && gone_count > 0);
}

static void the_last_of_many_threads_ends_the_block(void) {
  shared = block_at(take(NULL, 5 * granule_bytes));
  for (int i = 1; i < thread_count; i++) CHECK(ptn_arena_hold(&shared));
  run_threads(hold_many);
  CHECK(!ptn_arena_hold(&shared) && live_bytes() == 0);
}

int main(void) {
  a_block_is_found_from_each_of_its_pages();
  other_memory_is_not_found();
  words_of_the_past_are_not_believed();
  a_block_lives_until_its_last_hold_is_given_up();
  random_addresses_against_a_model();
  CHECK(live_bytes() == 0);
  threads_hold_each_others_blocks();
  the_last_of_many_threads_ends_the_block();
  return 0;
}
