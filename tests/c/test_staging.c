/* Staged updates: whole or not made, what was not staged stays; extents of the caller's own; equal to the bit. Without a device, and
 * over the host as one, where the CPU reads a slot as it reads its memory. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/optim/?*.c csrc/runtime/?*.c */
/* library: tests/c/fake_disk.c */
/* threads */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "check.h"
#include "runtime/engine.h"

enum { CHUNKS = 4, PER_CHUNK = 3, PARAMS = CHUNKS * PER_CHUNK, LAST = CHUNKS - 1, ROUNDS = 30 };

/* Of fake_disk.c. */
enum { PWRITE = 1, TORN = 7, NOTHING_ASKED = -1 };
void disk_tell(int kind, int fault, int sys_errno, long first, long last);
long disk_count(int kind);

typedef struct world {
  ptn_device *device; /* NULL: none */
  ptn_engine *engine;
  ptn_account *account;
  ptn_engine_param params[PARAMS];
  ptn_engine_chunk chunks[CHUNKS];
  float *values[PARAMS], *staged[PARAMS];
  bool is_staged[PARAMS];
  uint64_t steps[PARAMS];
} world;

static uint64_t seed = 11;

static void draw(float *memory, uint64_t count) {
  for (uint64_t k = 0; k < count; k++) memory[k] = (float)(check_random(&seed) % 20001) / 10000.0f - 1.0f;
}

/* Chunk 1 has a parameter larger than what is copied at once; the last parameter of chunk 2 is frozen. */
static void describe(world *w) {
  for (uint32_t c = 0; c < CHUNKS; c++) {
    uint64_t offset = 0;
    for (uint32_t i = 0; i < PER_CHUNK; i++) {
      uint32_t number = c * PER_CHUNK + i;
      uint64_t count = c == 1 && i == 1 ? 600001 : 1 + check_random(&seed) % 9000;
      w->params[number] =
          (ptn_engine_param){.chunk = c, .offset_bytes = offset, .count = count, .trained = !(c == 2 && i == PER_CHUNK - 1)};
      offset = ptn_round_up(offset + count * sizeof(float), PTN_TENSOR_ALIGN_BYTES);
      w->values[number] = malloc(count * sizeof(float));
      w->staged[number] = malloc(count * sizeof(float));
      draw(w->values[number], count);
    }
    w->chunks[c] = (ptn_engine_chunk){.param_bytes = ptn_round_up(offset, PTN_PAGE_BYTES), .trained = true};
  }
}

static void make_slots(world *w) {
  int32_t slot_of[CHUNKS] = {0, 1, 0, -1};
  uint64_t bytes[2] = {ptn_max_u64(w->chunks[0].param_bytes, w->chunks[2].param_bytes), w->chunks[1].param_bytes};
  CHECK_OK(ptn_engine_set_slots(w->engine, slot_of, bytes, 2));
}

static void check_values(world *w) {
  for (uint32_t c = 0; c < CHUNKS; c++) {
    bool conflict;
    CHECK_OK(ptn_engine_demand(w->engine, c, &conflict));
    CHECK(!conflict);
    const char *memory = ptn_engine_region(w->engine, c)->memory;
    for (uint32_t i = c * PER_CHUNK; i < (c + 1) * PER_CHUNK; i++) {
      size_t bytes = (size_t)w->params[i].count * sizeof(float);
      CHECK(memcmp(memory + w->params[i].offset_bytes, w->values[i], bytes) == 0);
      CHECK(ptn_engine_steps(w->engine, i) == w->steps[i]);
      float *copy = malloc(bytes);
      CHECK_OK(ptn_engine_transfer(w->engine, i, 0, copy, false));
      CHECK(memcmp(copy, w->values[i], bytes) == 0);
      free(copy);
    }
    ptn_engine_unuse(w->engine, c);
  }
}

static void one_step(world *w, bool made) {
  memset(w->is_staged, 0, sizeof w->is_staged);
  for (uint32_t i = 0; i < LAST * PER_CHUNK; i++) {
    if (!w->params[i].trained || check_random(&seed) % 3 == 0) continue;
    draw(w->staged[i], w->params[i].count);
    CHECK_OK(ptn_engine_stage(w->engine, i, w->staged[i]));
    CHECK(ptn_engine_stage(w->engine, i, w->staged[i]) == PTN_STEP);
    w->is_staged[i] = true;
  }
  check_values(w); /* still the old ones */
  if (!made) {
    ptn_engine_drop(w->engine);
    return;
  }
  CHECK_OK(ptn_engine_stage_rest(w->engine));
  ptn_engine_commit(w->engine);
  for (uint32_t i = 0; i < PARAMS; i++) {
    if (!w->is_staged[i]) continue;
    memcpy(w->values[i], w->staged[i], (size_t)w->params[i].count * sizeof(float));
    w->steps[i]++;
  }
}

static void check_refusals(world *w) {
  CHECK(ptn_engine_stage(w->engine, PARAMS, w->staged[0]) == PTN_INVALID);
  CHECK(ptn_engine_stage(w->engine, LAST * PER_CHUNK, w->staged[0]) == PTN_INVALID); /* its home is memory */
  CHECK(ptn_engine_stage(w->engine, 3 * PER_CHUNK - 1, w->staged[0]) == PTN_INVALID); /* it is frozen */
}

/* Memory on and off pages, sizes on and off pages. */
static void check_moves(world *w) {
  size_t sizes[] = {1, PTN_PAGE_BYTES - 1, PTN_PAGE_BYTES, 3 * PTN_PAGE_BYTES + 77, (2u << 20) + 5};
  ptn_engine_stats before, with, after;
  ptn_engine_get_stats(w->engine, &before);
  for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
    for (size_t shift = 0; shift < 2; shift++) {
      ptn_extent extent;
      CHECK_OK(ptn_engine_reserve(w->engine, sizes[s], &extent));
      ptn_engine_get_stats(w->engine, &with);
      CHECK(with.disk_bytes == before.disk_bytes + ptn_round_up(sizes[s], PTN_PAGE_BYTES));
      void *raw[2];
      for (int i = 0; i < 2; i++) CHECK_OK(ptn_arena_alloc(w->account, sizes[s] + PTN_PAGE_BYTES, &raw[i]));
      unsigned char *from = (unsigned char *)raw[0] + 64 * shift, *to = (unsigned char *)raw[1] + 64 * shift;
      for (size_t k = 0; k < sizes[s]; k++) from[k] = (unsigned char)check_random(&seed);
      CHECK_OK(ptn_engine_move(w->engine, extent.offset, from, sizes[s], true));
      CHECK_OK(ptn_engine_move(w->engine, extent.offset, to, sizes[s], false));
      CHECK(memcmp(from, to, sizes[s]) == 0);
      CHECK(ptn_engine_move(w->engine, extent.offset + 1, to, sizes[s], false) == PTN_INVALID);
      for (int i = 0; i < 2; i++) ptn_arena_free(raw[i]);
      ptn_engine_release(w->engine, &extent);
    }
  }
  ptn_engine_get_stats(w->engine, &after);
  CHECK(after.disk_bytes == before.disk_bytes);
}

/* A step and a move of which one write is made by half and then fails: made again they are whole. */
static void check_torn(world *w) {
  enum { OWN_BYTES = 2 * PTN_PAGE_BYTES + 700 };
  ptn_extent own;
  CHECK_OK(ptn_engine_reserve(w->engine, OWN_BYTES, &own));
  void *from, *to;
  CHECK_OK(ptn_arena_alloc(w->account, OWN_BYTES, &from));
  CHECK_OK(ptn_arena_alloc(w->account, OWN_BYTES, &to));
  bool torn = true;
  for (long first = 1; torn; first++) {
    memset(from, (int)first, OWN_BYTES);
    disk_tell(PWRITE, TORN, EIO, first, first + 1);
    ptn_status status = ptn_engine_move(w->engine, own.offset, from, OWN_BYTES, true);
    for (uint32_t i = 0; i < LAST * PER_CHUNK && status == PTN_OK; i++) {
      draw(w->staged[i], w->params[i].count);
      if (w->params[i].trained) status = ptn_engine_stage(w->engine, i, w->staged[i]);
    }
    torn = disk_count(PWRITE) >= first;
    disk_tell(NOTHING_ASKED, 0, 0, 0, 0);
    CHECK(status == (torn ? PTN_DISK : PTN_OK));
    CHECK(!torn || ptn_last_error()->sys_errno == EIO);
    ptn_engine_drop(w->engine);
    CHECK_OK(ptn_engine_move(w->engine, own.offset, from, OWN_BYTES, true));
    CHECK_OK(ptn_engine_move(w->engine, own.offset, to, OWN_BYTES, false));
    CHECK(memcmp(from, to, OWN_BYTES) == 0);
    one_step(w, true);
    check_values(w);
  }
  ptn_arena_free(from);
  ptn_arena_free(to);
  ptn_engine_release(w->engine, &own);
}

/* Over a device chunk 0 lies on the host, with a shadow. */
static void place(world *w) {
  for (uint32_t c = 0; c < LAST; c++) {
    if (c == 0 && w->device) CHECK_OK(ptn_engine_to_host(w->engine, c, true));
    else CHECK_OK(ptn_engine_to_disk(w->engine, c));
  }
  CHECK_OK(ptn_engine_to_memory(w->engine, LAST, true));
  make_slots(w);
  if (w->device) CHECK_OK(ptn_engine_set_staging(w->engine, PTN_PAGE_BYTES * 16, 2));
}

/* Without a shadow values have no place before the step is made. */
static void check_no_shadow(world *w) {
  CHECK_OK(ptn_engine_to_host(w->engine, 0, false));
  CHECK(ptn_engine_stage(w->engine, 0, w->staged[0]) == PTN_INVALID);
  CHECK_OK(ptn_engine_to_host(w->engine, 0, true));
  check_values(w);
}

static void run(ptn_device *device) {
  world w = {.device = device};
  describe(&w);
  CHECK_OK(ptn_account_create(&w.account, 64 * PTN_MIB, NULL, NULL));
  ptn_engine_config config = {.folder = ".",
                              .account = w.account,
                              .n_chunks = CHUNKS,
                              .n_params = PARAMS,
                              .n_groups = 1,
                              .chunks = w.chunks,
                              .params = w.params,
                              .device = device};
  CHECK_OK(ptn_engine_create(&w.engine, &config));
  place(&w);
  for (uint32_t i = 0; i < PARAMS; i++) CHECK_OK(ptn_engine_transfer(w.engine, i, 0, w.values[i], true));
  for (int round = 0; round < ROUNDS; round++) {
    one_step(&w, check_random(&seed) % 3 > 0);
    check_values(&w);
  }
  check_refusals(&w);
  if (device) check_no_shadow(&w);
  check_moves(&w);
  check_torn(&w);
  ptn_engine_destroy(w.engine);
  ptn_account_destroy(w.account);
  for (uint32_t i = 0; i < PARAMS; i++) {
    free(w.values[i]);
    free(w.staged[i]);
  }
}

int main(void) {
  ptn_device *host;
  run(NULL);
  CHECK_OK(ptn_device_open_host(&host));
  run(host);
  host->kind->destroy(host);
  printf("staging: %d steps equal, and over a device\n", ROUNDS);
  return 0;
}
