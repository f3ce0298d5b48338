/* A training step over the engine and its stash in which one call to the disk goes wrong: each call of each kind, in every way. What
 * can be made good is, and what cannot is an error with errno, path and bytes, after which the step under way can be dropped, the
 * parameters are those of the last step, and the same step made again gives what it gives on a disk that is well. What a disk loses
 * without a word is told by whoever reads it. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/optim/?*.c csrc/runtime/?*.c */
/* library: tests/c/fake_disk.c */
/* threads */
/* one core */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "check.h"
#include "disk/engine.h"
#include "fake_openmp.h"
#include "runtime/engine.h"

enum { CHUNKS = 4, PER_CHUNK = 2, PARAMS = CHUNKS * PER_CHUNK, STATES = 2, SLOTS = 2 };
enum { RECORD_BYTES = 16 * PTN_PAGE_BYTES };

/* Of fake_disk.c. */
enum { PREAD, PWRITE, FALLOCATE, FTRUNCATE };
enum { NONE, FAIL, SHORT, NOTHING, LATE, WRONG, LOST };
void disk_tell(int kind, int fault, int sys_errno, long first, long last);
long disk_count(int kind);

typedef struct twin {
  size_t count;
  uint64_t steps;
  float *values, *grad, *states[STATES];
} twin;

static ptn_engine *engine;
static ptn_account *account;
static ptn_engine_param params[PARAMS];
static ptn_engine_chunk chunks[CHUNKS];
static twin twins[PARAMS];
static ptn_record *records[CHUNKS];
static bool asked[CHUNKS];
static size_t owners_out;
static uint64_t step_number;
static const ptn_hyper hyper = {.kind = PTN_ADAMW, .lr = 1e-2, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};

static void fill(float *array, size_t count, uint64_t seed) {
  for (size_t k = 0; k < count; k++) array[k] = (float)(check_random(&seed) % 20001) / 10000.0f - 1.0f;
}

static void release(void *owner) {
  free(owner);
  owners_out--;
}

/* ---- a step, as far as it comes ---- */

static ptn_status look_at(uint32_t c) {
  bool conflict;
  PTN_TRY(ptn_engine_demand(engine, c, &conflict));
  CHECK(!conflict);
  const char *memory = ptn_engine_region(engine, c)->memory;
  for (uint32_t i = c * PER_CHUNK; i < (c + 1) * PER_CHUNK; i++)
    CHECK(memcmp(memory + params[i].offset_bytes, twins[i].values, twins[i].count * sizeof(float)) == 0);
  ptn_engine_unuse(engine, c);
  return PTN_OK;
}

static ptn_status save_tensor(uint32_t c) {
  void *memory;
  PTN_TRY(ptn_arena_alloc(account, RECORD_BYTES, &memory));
  fill(memory, RECORD_BYTES / sizeof(float), 1000 * step_number + c);
  ptn_block block;
  CHECK(ptn_arena_find(memory, &block));
  bool fresh;
  ptn_status status = ptn_stash_put(ptn_engine_stash(engine), &block, NULL, 0, (int32_t)c, &records[c], &fresh);
  ptn_arena_free(memory);
  if (status != PTN_OK) records[c] = NULL;
  return status;
}

static ptn_status saved_tensor(uint32_t c) {
  void *memory;
  static float expected[RECORD_BYTES / sizeof(float)];
  PTN_TRY(ptn_stash_get(records[c], true, &memory));
  asked[c] = true;
  fill(expected, RECORD_BYTES / sizeof(float), 1000 * step_number + c);
  CHECK(memcmp(memory, expected, RECORD_BYTES) == 0);
  ptn_arena_free(memory);
  return PTN_OK;
}

static ptn_status give_gradients(uint32_t c, ptn_gradient_use use) {
  for (uint32_t i = c * PER_CHUNK; i < (c + 1) * PER_CHUNK; i++) {
    float *copy = malloc(twins[i].count * sizeof(float));
    CHECK(copy);
    fill(copy, twins[i].count, 100 * step_number + i);
    owners_out++;
    ptn_status status = ptn_engine_gradient(engine, i, copy, copy, use);
    if (status == PTN_OK) continue;
    release(copy);
    return status;
  }
  return PTN_OK;
}

static ptn_status try_step(ptn_gradient_use use) {
  ptn_stash *stash = ptn_engine_stash(engine);
  ptn_engine_seek(engine, 0);
  ptn_engine_read_ahead(engine, use == PTN_GRADIENT_UPDATE);
  ptn_stash_begin(stash);
  PTN_TRY(ptn_engine_set_hyper(engine, 0, &hyper));
  for (uint32_t c = 0; c < CHUNKS; c++) {
    PTN_TRY(look_at(c));
    PTN_TRY(save_tensor(c));
  }
  ptn_stash_end(stash);
  for (uint32_t c = CHUNKS; c-- > 0;) {
    PTN_TRY(saved_tensor(c));
    PTN_TRY(look_at(c));
    PTN_TRY(give_gradients(c, use));
  }
  PTN_TRY(ptn_engine_flush(engine));
  PTN_TRY(ptn_engine_update_spilled(engine, 0.5f));
  return ptn_engine_wait(engine);
}

static void forget_records(void) {
  for (uint32_t c = 0; c < CHUNKS; c++) {
    if (records[c]) CHECK(ptn_record_drop(records[c], asked[c]) == NULL);
    records[c] = NULL;
    asked[c] = false;
  }
}

/* ---- what must hold ---- */

static void update_twins(ptn_gradient_use use) {
  for (uint32_t i = 0; i < PARAMS; i++) {
    twin *t = &twins[i];
    ptn_update update;
    fill(t->grad, t->count, 100 * step_number + i);
    CHECK_OK(ptn_update_prepare(&update, &hyper, ++t->steps, use == PTN_GRADIENT_UPDATE ? 1.0f : 0.5f));
    ptn_update_run(false, &update, t->values, t->states, t->grad, ptn_span_whole(t->count));
  }
}

static void check_all(void) {
  for (uint32_t i = 0; i < PARAMS; i++) {
    const twin *t = &twins[i];
    float *copy = malloc(t->count * sizeof(float));
    CHECK_OK(ptn_engine_transfer(engine, i, 0, copy, false));
    CHECK(memcmp(copy, t->values, t->count * sizeof(float)) == 0);
    for (uint32_t s = 0; s < STATES; s++) {
      CHECK_OK(ptn_engine_transfer(engine, i, 1 + s, copy, false));
      CHECK(memcmp(copy, t->states[s], t->count * sizeof(float)) == 0);
    }
    CHECK(ptn_engine_steps(engine, i) == t->steps);
    free(copy);
  }
}

static void check_error(int sys_errno) {
  const ptn_error *error = ptn_last_error();
  CHECK(error->code == PTN_DISK && error->path[0] && error->message[0] && error->asked_bytes > 0);
  CHECK(sys_errno ? error->sys_errno == sys_errno : error->sys_errno == ENODATA || error->sys_errno == ENOSPC);
}

typedef struct way {
  int kind, fault, sys_errno;
  bool harmless;
} way;

/* One step with these calls going wrong; returns how often an error came of it. */
static int one_step(const way *way, long first, long last, ptn_gradient_use use) {
  step_number++;
  disk_tell(way->kind, way->fault, way->sys_errno, first, last);
  ptn_status status = try_step(use);
  disk_tell(-1, NONE, 0, 0, 0);
  if (status != PTN_OK) {
    CHECK(status == PTN_DISK && !way->harmless);
    check_error(way->sys_errno);
    forget_records();
    if (ptn_engine_has_gradients(engine)) ptn_engine_drop(engine); /* as zero_grad does: else there is nothing to drop */
    CHECK(owners_out == 0 && !ptn_engine_has_gradients(engine));
    check_all();
    CHECK_OK(try_step(use));
  }
  ptn_engine_commit(engine);
  forget_records();
  update_twins(use);
  check_all();
  return status != PTN_OK;
}

/* ---- the world ---- */

static void open_world(void) {
  uint64_t seed = 3;
  for (uint32_t c = 0; c < CHUNKS; c++) {
    uint64_t offset = 0;
    for (uint32_t i = c * PER_CHUNK; i < (c + 1) * PER_CHUNK; i++) {
      twin *t = &twins[i];
      t->count = 1 + check_random(&seed) % 2500;
      t->steps = 0;
      t->values = malloc(t->count * sizeof(float));
      t->grad = malloc(t->count * sizeof(float));
      for (int s = 0; s < STATES; s++) t->states[s] = calloc(t->count, sizeof(float));
      fill(t->values, t->count, i);
      params[i] = (ptn_engine_param){.chunk = c, .offset_bytes = offset, .count = t->count, .trained = true};
      offset = ptn_round_up(offset + t->count * sizeof(float), PTN_TENSOR_ALIGN_BYTES);
    }
    chunks[c] = (ptn_engine_chunk){.param_bytes = ptn_round_up(offset, PTN_PAGE_BYTES), .trained = true};
  }
  CHECK_OK(ptn_account_create(&account, 4 * PTN_MIB, NULL, NULL));
  ptn_engine_config config = {.folder = ".",
                              .account = account,
                              .n_chunks = CHUNKS,
                              .n_params = PARAMS,
                              .n_groups = 1,
                              .chunks = chunks,
                              .params = params,
                              .n_states = STATES,
                              .release = release};
  CHECK_OK(ptn_engine_create(&engine, &config));
  uint64_t bytes[SLOTS] = {0};
  int32_t slots[CHUNKS];
  uint32_t order[2 * CHUNKS];
  for (uint32_t c = 0; c < CHUNKS; c++) {
    CHECK_OK(ptn_engine_to_disk(engine, c));
    slots[c] = (int32_t)(c % SLOTS);
    bytes[c % SLOTS] = ptn_max_u64(bytes[c % SLOTS], chunks[c].param_bytes);
    order[c] = order[2 * CHUNKS - 1 - c] = c;
  }
  CHECK_OK(ptn_engine_set_slots(engine, slots, bytes, SLOTS));
  CHECK_OK(ptn_engine_set_ring(engine, 2 * PTN_PAGE_BYTES, 3));
  CHECK_OK(ptn_engine_set_order(engine, order, 2 * CHUNKS));
  ptn_engine_set_pending(engine, 40000);
  for (uint32_t i = 0; i < PARAMS; i++) CHECK_OK(ptn_engine_transfer(engine, i, 0, twins[i].values, true));
}

static void close_world(void) {
  ptn_engine_destroy(engine);
  ptn_account_stats stats;
  ptn_account_get_stats(account, &stats);
  CHECK(owners_out == 0 && stats.live_bytes == 0);
  ptn_account_destroy(account);
  for (uint32_t i = 0; i < PARAMS; i++) {
    free(twins[i].values);
    free(twins[i].grad);
    for (int s = 0; s < STATES; s++) free(twins[i].states[s]);
  }
}

/* ---- what a disk loses without a word ---- */

static bool told(ptn_status status) {
  if (status == PTN_OK) return false;
  CHECK(status == PTN_DISK);
  check_error(EBADMSG);
  return true;
}

/* The bytes of each tensor are right, or it is told that they are not; returns how often it was. */
static int check_what_can_be_read(void) {
  int told_count = 0;
  for (uint32_t i = 0; i < PARAMS; i++) {
    const twin *t = &twins[i];
    float *copy = malloc(t->count * sizeof(float));
    for (uint32_t a = 0; a <= STATES; a++) {
      bool lost = told(ptn_engine_transfer(engine, i, a, copy, false));
      told_count += lost;
      CHECK(lost || memcmp(copy, a == 0 ? t->values : t->states[a - 1], t->count * sizeof(float)) == 0);
    }
    free(copy);
  }
  return told_count;
}

/* One step with one write going wrong, in a world of its own; returns whether that was told. */
static bool one_lie(int fault, long number, ptn_gradient_use use, bool *out_came) {
  const way none = {PREAD, NONE, 0, true};
  open_world();
  one_step(&none, 0, 0, use);
  step_number++;
  disk_tell(PWRITE, fault, 0, number, number);
  bool was_told = told(try_step(use));
  *out_came = disk_count(PWRITE) >= number;
  disk_tell(-1, NONE, 0, 0, 0);
  if (was_told) {
    forget_records();
    if (ptn_engine_has_gradients(engine)) ptn_engine_drop(engine);
  } else {
    ptn_engine_commit(engine);
    forget_records();
    update_twins(use);
  }
  CHECK(owners_out == 0 && (*out_came || !was_told));
  was_told |= check_what_can_be_read() > 0;
  close_world();
  return was_told;
}

static void each_write_is_lost(void) {
  static const int faults[] = {WRONG, LOST};
  ptn_store_set_parts(1); /* each array of a chunk is a write */
  for (int i = 0; i < 4; i++) {
    ptn_gradient_use use = i % 2 ? PTN_GRADIENT_UPDATE : PTN_GRADIENT_SPILL;
    int told_count = 0;
    long number = 1;
    for (bool came = true;; number++) {
      bool was_told = one_lie(faults[i / 2], number, use, &came);
      if (!came) break;
      told_count += was_told;
    }
    printf("engine faults: of %ld writes %s %d were told, the others not needed\n", number - 1, i / 2 ? "lost" : "made wrong",
           told_count);
    CHECK(number > 10 && told_count > number / 2);
  }
  ptn_store_set_parts(0);
}

/* ---- all of it ---- */

int main(void) {
  static const way ways[] = {
      {PREAD, FAIL, EIO, false},      {PREAD, NOTHING, 0, false},    {PREAD, FAIL, EINTR, true},  {PREAD, SHORT, 0, true},
      {PWRITE, FAIL, EIO, false},     {PWRITE, FAIL, ENOSPC, false}, {PWRITE, NOTHING, 0, false}, {PWRITE, FAIL, EINTR, true},
      {PWRITE, SHORT, 0, true},       {FTRUNCATE, FAIL, EIO, true},  {PREAD, LATE, 0, true},      {PWRITE, LATE, 0, true},
      {PREAD, WRONG, EBADMSG, false},
  };
  static const ptn_gradient_use uses[] = {PTN_GRADIENT_UPDATE, PTN_GRADIENT_SPILL};
  const way none = {PREAD, NONE, 0, true};
  int injected_count = 0, raised_count = 0;
  open_world();
  for (int k = 0; k < 2; k++) {
    for (int round = 0; round < 3; round++) one_step(&none, 0, 0, uses[k]);
    for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
      disk_tell(ways[w].kind, NONE, 0, 0, 0);
      step_number++;
      CHECK_OK(try_step(uses[k]));
      ptn_engine_commit(engine);
      long count = disk_count(ways[w].kind);
      forget_records();
      update_twins(uses[k]);
      for (long n = 1; n <= count; n++, injected_count++) raised_count += one_step(&ways[w], n, n, uses[k]);
    }
    one_step(&ways[0], 1, 1L << 40, uses[k]); /* gone for a whole step */
    one_step(&ways[4], 1, 1L << 40, uses[k]);
  }
  close_world();
  each_write_is_lost();
  printf("engine faults: %d injected, %d raised, the others made good\n", injected_count, raised_count);
  CHECK(injected_count > 200 && raised_count > 50 && raised_count < injected_count);
  return 0;
}
