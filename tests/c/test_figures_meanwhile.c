/* Figures that one thread asks for while another one moves homes and drops slots, over the host as a device and without one: what
 * there is of a chunk or a slot then is there as a whole. Not under ThreadSanitizer: numbers of other moments are told then. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/optim/?*.c csrc/runtime/?*.c */
#include <pthread.h>
#include <stdatomic.h>

#include "check.h"
#include "runtime/engine.h"

enum { CHUNKS = 4, ROUNDS = 40, BYTES = 64 << 10 };

static atomic_bool over;

static void *ask(void *engine) {
  while (!atomic_load(&over)) {
    ptn_engine_stats stats;
    ptn_engine_held held;
    ptn_engine_get_stats(engine, &stats);
    ptn_engine_get_held(engine, &held);
    CHECK(stats.device_bytes <= 8 * CHUNKS * BYTES && held.parameter_bytes + held.slot_bytes <= 2 * CHUNKS * BYTES);
  }
  return NULL;
}

static void move(ptn_engine *engine, bool beside) {
  int32_t slots[CHUNKS];
  uint64_t bytes[CHUNKS];
  for (uint32_t i = 0; i < CHUNKS; i++) {
    slots[i] = (int32_t)i;
    bytes[i] = BYTES;
  }
  for (int round = 0; round < ROUNDS; round++) {
    for (uint32_t i = 0; i < CHUNKS; i++)
      CHECK_OK(beside && round % 2 ? ptn_engine_to_host(engine, i, true) : ptn_engine_to_disk(engine, i));
    CHECK_OK(ptn_engine_set_slots(engine, slots, bytes, CHUNKS));
    ptn_engine_drop_slots(engine);
    for (uint32_t i = 0; i < CHUNKS; i++) CHECK_OK(ptn_engine_to_memory(engine, i, true));
  }
}

static void check(bool beside) {
  ptn_device *device = NULL;
  ptn_account *host, *there;
  if (beside) CHECK_OK(ptn_device_open_host(&device));
  CHECK_OK(ptn_account_create(&host, 0, NULL, NULL));
  CHECK_OK(ptn_account_create(&there, 0, NULL, NULL));
  ptn_engine_chunk chunks[CHUNKS];
  ptn_engine_param params[CHUNKS];
  for (uint32_t i = 0; i < CHUNKS; i++) {
    chunks[i] = (ptn_engine_chunk){.param_bytes = BYTES, .trained = true};
    params[i] = (ptn_engine_param){.chunk = i, .count = BYTES / 4, .trained = true};
  }
  ptn_engine_config config = {.folder = ".",
                              .account = host,
                              .n_chunks = CHUNKS,
                              .n_params = CHUNKS,
                              .n_groups = 1,
                              .chunks = chunks,
                              .params = params,
                              .n_states = 2,
                              .device = device,
                              .device_account = beside ? there : NULL};
  ptn_engine *engine;
  CHECK_OK(ptn_engine_create(&engine, &config));
  pthread_t asker;
  atomic_store(&over, false);
  CHECK(pthread_create(&asker, NULL, ask, engine) == 0);
  move(engine, beside);
  atomic_store(&over, true);
  CHECK(pthread_join(asker, NULL) == 0);
  ptn_engine_destroy(engine);
  ptn_account_destroy(there);
  ptn_account_destroy(host);
  if (device) device->kind->destroy(device);
}

int main(void) {
  check(true);
  check(false);
  return 0;
}
