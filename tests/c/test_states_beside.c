/* State of a chunk in memory that gives way while another thread reads it, as a checkpoint beside a backward does: what is read is
 * what was written, whether it is still there, going, or gone. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/optim/?*.c csrc/runtime/?*.c */
/* threads */
/* plain */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "check.h"
#include "runtime/engine.h"

enum { STATES = 2, COUNT = 1 << 20, ROUNDS = 8 };

static ptn_engine *engine;
static ptn_account *account;
static float *values;
static atomic_bool over;
static atomic_int reads_count;

static void *read_state(void *unused) {
  (void)unused;
  float *copy = malloc(COUNT * sizeof(float));
  CHECK(copy);
  for (uint32_t array = 1; !atomic_load(&over); array = 3 - array) {
    CHECK_OK(ptn_engine_transfer(engine, 0, array, copy, false));
    CHECK(memcmp(copy, values, COUNT * sizeof(float)) == 0);
    atomic_fetch_add(&reads_count, 1);
  }
  free(copy);
  return NULL;
}

static uint64_t yielded_bytes(void) {
  ptn_engine_held held;
  ptn_engine_get_held(engine, &held);
  return held.yielded_bytes;
}

/* Somebody else has the memory that was given up at once. */
static void give_way_and_fill(void) {
  ptn_engine_yield(engine, true);
  CHECK(ptn_engine_relieve(engine, true) && yielded_bytes() == STATES * COUNT * sizeof(float));
  ptn_engine_yield(engine, false);
  void *others;
  CHECK_OK(ptn_arena_alloc(account, STATES * COUNT * sizeof(float), &others));
  memset(others, 0xff, STATES * COUNT * sizeof(float));
  ptn_arena_free(others);
}

int main(void) {
  values = malloc(COUNT * sizeof(float));
  CHECK(values);
  for (size_t k = 0; k < COUNT; k++) values[k] = (float)k;
  CHECK_OK(ptn_account_create(&account, 0, NULL, NULL));
  ptn_engine_chunk chunk = {.param_bytes = COUNT * sizeof(float), .trained = true};
  ptn_engine_param param = {.count = COUNT, .trained = true};
  ptn_engine_config config = {.folder = ".",
                              .account = account,
                              .n_chunks = 1,
                              .n_params = 1,
                              .n_groups = 1,
                              .chunks = &chunk,
                              .params = &param,
                              .n_states = STATES};
  CHECK_OK(ptn_engine_create(&engine, &config));
  CHECK_OK(ptn_engine_to_memory(engine, 0, true));
  for (uint32_t array = 0; array <= STATES; array++) CHECK_OK(ptn_engine_transfer(engine, 0, array, values, true));
  for (int round = 0; round < ROUNDS; round++) {
    pthread_t reader;
    atomic_store(&over, false);
    int before = atomic_load(&reads_count);
    CHECK(pthread_create(&reader, NULL, read_state, NULL) == 0);
    while (atomic_load(&reads_count) == before) sched_yield();
    give_way_and_fill();
    atomic_store(&over, true);
    pthread_join(reader, NULL);
    CHECK_OK(
        ptn_engine_to_memory(engine, 0, true)); /* nobody reads while it comes back: a step is made with the session's turn */
    CHECK(yielded_bytes() == 0);
  }
  ptn_engine_destroy(engine);
  ptn_account_destroy(account);
  free(values);
  printf("states beside: %d reads\n", atomic_load(&reads_count));
  return 0;
}
