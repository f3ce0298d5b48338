/* Slots: chunks needed close together never share one, whatever the accesses are; and the slots of usual models are few. */
/* sources: csrc/plan/slots.c */
#include <string.h>

#include "base/bytes.h"
#include "check.h"
#include "plan/parts.h"

#define MOST_CHUNKS 64
#define MOST_ACCESSES 256

static ptn_plan_chunk chunks[MOST_CHUNKS];
static uint32_t accesses[MOST_ACCESSES];
static int32_t slot_of_chunk[MOST_CHUNKS];
static uint64_t slot_bytes[MOST_CHUNKS];
static uint32_t n_slots;

static uint64_t assign(uint32_t n_chunks, uint32_t n_accesses, uint32_t n_persist, uint32_t window) {
  ptn_plan_request request = {.n_chunks = n_chunks, .chunks = chunks, .n_accesses = n_accesses, .accesses = accesses};
  ptn_slots_scratch *scratch;
  CHECK_OK(ptn_slots_scratch_create(&scratch, &request));
  ptn_slots(&request, scratch, n_persist, window, slot_of_chunk, slot_bytes, &n_slots);
  int32_t again[MOST_CHUNKS];
  memcpy(again, slot_of_chunk, sizeof again);
  ptn_slots(&request, scratch, n_persist, window, slot_of_chunk, slot_bytes, &n_slots);
  CHECK(memcmp(again, slot_of_chunk, n_chunks * sizeof *again) == 0);
  ptn_slots_scratch_destroy(scratch);
  uint64_t total_bytes = 0;
  for (uint32_t s = 0; s < n_slots; s++) total_bytes += slot_bytes[s];
  return total_bytes;
}

/* Forward through the chunks, and back. */
static uint32_t there_and_back(uint32_t n_chunks) {
  for (uint32_t i = 0; i < n_chunks; i++) accesses[i] = accesses[2 * n_chunks - 1 - i] = i;
  return 2 * n_chunks;
}

static void usual_models(void) {
  for (uint32_t i = 0; i < 24; i++) chunks[i].param_bytes = 7 * PTN_PAGE_BYTES;
  uint32_t n_accesses = there_and_back(24);
  CHECK(assign(24, n_accesses, 0, 2) == 14 * PTN_PAGE_BYTES);
  CHECK(assign(24, n_accesses, 0, 3) == 21 * PTN_PAGE_BYTES);
  CHECK(assign(24, n_accesses, 20, 3) == 21 * PTN_PAGE_BYTES);
  CHECK(assign(24, n_accesses, 23, 3) == 7 * PTN_PAGE_BYTES);
  CHECK(assign(24, n_accesses, 24, 3) == 0);
  CHECK(n_slots == 0);
  /* An input embedding and an output head, far apart, share a slot of their own kind. */
  chunks[0].param_bytes = chunks[23].param_bytes = 100 * PTN_PAGE_BYTES;
  CHECK(assign(24, n_accesses, 0, 2) == 114 * PTN_PAGE_BYTES);
  CHECK(slot_of_chunk[0] == slot_of_chunk[23]);
  for (uint32_t i = 1; i < 23; i++) CHECK(slot_of_chunk[i] != slot_of_chunk[0]);
  /* A tied embedding, read at both ends. */
  chunks[23].param_bytes = 7 * PTN_PAGE_BYTES;
  accesses[23] = accesses[24] = 0;
  CHECK(assign(24, n_accesses, 0, 2) == 114 * PTN_PAGE_BYTES);
}

/* By brute force: the distinct chunks from each access on, around the cycle. */
static void check_windows(uint32_t n_accesses, uint32_t n_persist, uint32_t window) {
  for (uint32_t i = 0; i < n_accesses; i++) {
    uint32_t seen[MOST_CHUNKS], n_seen = 0;
    for (uint32_t j = 0; j < n_accesses && n_seen < window; j++) {
      uint32_t chunk = accesses[(i + j) % n_accesses];
      bool known = chunk < n_persist;
      for (uint32_t k = 0; k < n_seen; k++) known |= seen[k] == chunk;
      if (known) continue;
      for (uint32_t k = 0; k < n_seen; k++) CHECK(slot_of_chunk[seen[k]] != slot_of_chunk[chunk]);
      seen[n_seen++] = chunk;
    }
  }
}

int main(void) {
  usual_models();
  uint64_t random = 2;
  for (int round = 0; round < 5000; round++) {
    uint32_t n_chunks = 1 + (uint32_t)(check_random(&random) % 12), n_accesses = (uint32_t)(check_random(&random) % 60);
    uint32_t n_persist = (uint32_t)(check_random(&random) % (n_chunks + 1));
    uint32_t window = 1 + (uint32_t)(check_random(&random) % 5);
    for (uint32_t i = 0; i < n_chunks; i++) chunks[i].param_bytes = PTN_PAGE_BYTES * (check_random(&random) % 40);
    for (uint32_t i = 0; i < n_accesses; i++) accesses[i] = (uint32_t)(check_random(&random) % n_chunks);
    assign(n_chunks, n_accesses, n_persist, window);
    CHECK(n_slots <= n_chunks - n_persist);
    check_windows(n_accesses, n_persist, window);
    uint64_t highest[MOST_CHUNKS] = {0};
    for (uint32_t i = 0; i < n_chunks; i++) {
      CHECK(i < n_persist ? slot_of_chunk[i] == -1 : slot_of_chunk[i] >= 0 && slot_of_chunk[i] < (int32_t)n_slots);
      if (i >= n_persist) highest[slot_of_chunk[i]] = ptn_max_u64(highest[slot_of_chunk[i]], chunks[i].param_bytes);
    }
    for (uint32_t s = 0; s < n_slots; s++) CHECK(slot_bytes[s] == highest[s]);
  }
  return 0;
}
