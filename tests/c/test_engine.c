/* The engine against a model in plain memory: random chunks, homes, orders, gradients, accumulation, drops, values written from
 * outside, state that gives way; in fp32 and in bf16 with a master; equal to the bit. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/optim/?*.c csrc/runtime/?*.c */
/* threads */
/* one core */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "check.h"
#include "fake_openmp.h"
#include "runtime/internal.h"

enum {
  CHUNKS = 7,
  PER_CHUNK = 3,
  PARAMS = CHUNKS * PER_CHUNK,
  STATES = 2,
  SLOTS = 3,
  PENDING_BYTES = 40000,
  ROOM_BYTES = 100000
};

typedef struct twin {
  size_t count;
  uint64_t steps;
  void *values, *grad, *sum;       /* fp32 or bf16 */
  float *master, *states[STATES]; /* master: of bf16 */
  bool has_sum;
} twin;

static bool bf16;
static size_t element_bytes;

static uint64_t seed = 7;
static size_t owners_out;
static float random_float(void) { return (float)(check_random(&seed) % 20001) / 10000.0f - 1.0f; }

static void fill(void *array, size_t count) {
  for (size_t k = 0; k < count; k++) {
    if (bf16) ((ptn_bf16 *)array)[k] = ptn_bf16_round(random_float());
    else ((float *)array)[k] = random_float();
  }
}

static void add(void *sum, const void *term, size_t count) {
  if (bf16) ptn_accumulate_bf16(sum, term, count);
  else ptn_accumulate(sum, term, count);
}

static void release(void *owner) {
  ptn_arena_free(owner);
  owners_out--;
}

typedef struct world {
  ptn_engine *engine;
  ptn_account *account;
  ptn_engine_param params[PARAMS];
  ptn_engine_chunk chunks[CHUNKS];
  twin twins[PARAMS];
  ptn_hyper hyper;
  uint64_t goal_bytes; /* 0: none */
  bool in_use[CHUNKS]; /* as its guard was told */
  size_t n_beyond, n_more_waited; /* gradients made beyond it, and within it beside more than always may wait */
  size_t n_yielded; /* state of chunks that gave way */
} world;

static void describe(world *w) {
  for (uint32_t c = 0; c < CHUNKS; c++) {
    uint64_t offset = 0;
    for (uint32_t i = 0; i < PER_CHUNK; i++) {
      uint32_t number = c * PER_CHUNK + i;
      uint64_t count = 1 + check_random(&seed) % 9000;
      w->params[number] = (ptn_engine_param){.chunk = c, .offset_bytes = offset, .count = count, .trained = c != 5};
      offset = ptn_round_up(offset + count * element_bytes, PTN_TENSOR_ALIGN_BYTES);
      twin *t = &w->twins[number];
      *t = (twin){.count = (size_t)count};
      t->values = malloc(count * element_bytes);
      t->grad = malloc(count * element_bytes);
      t->sum = malloc(count * element_bytes);
      t->master = calloc(count, sizeof(float));
      for (int s = 0; s < STATES; s++) t->states[s] = calloc(count, sizeof(float));
      fill(t->values, t->count);
    }
    w->chunks[c] = (ptn_engine_chunk){.param_bytes = ptn_round_up(offset, PTN_PAGE_BYTES), .trained = c != 5};
  }
}

static void tell(void *place, bool in_use) { *(bool *)place = in_use; }

/* The place that a chunk is told to have next stands for all that it has had: the last who was told is told that it is over. */
static void set_guard(world *w, uint32_t c) {
  bool before = true;
  ptn_engine_set_guard(w->engine, c, (ptn_guard){tell, &before});
  CHECK(!before);
  w->in_use[c] = before = true;
  ptn_engine_set_guard(w->engine, c, (ptn_guard){tell, &w->in_use[c]});
  CHECK(!before && !w->in_use[c]);
}

static void set_slots(world *w) {
  int32_t slot_of[CHUNKS];
  uint64_t bytes[SLOTS] = {0};
  for (uint32_t c = 0; c < CHUNKS; c++) {
    slot_of[c] = ptn_engine_in_memory(w->engine, c) ? -1 : (int32_t)(c % SLOTS);
    if (slot_of[c] >= 0) bytes[slot_of[c]] = ptn_max_u64(bytes[slot_of[c]], w->chunks[c].param_bytes);
  }
  for (int i = 0; i < SLOTS; i++) bytes[i] = ptn_max_u64(bytes[i], PTN_PAGE_BYTES);
  CHECK_OK(ptn_engine_set_slots(w->engine, slot_of, bytes, SLOTS));
  CHECK_OK(ptn_engine_set_ring(w->engine, 2 * PTN_PAGE_BYTES, 3));
  uint32_t order[2 * CHUNKS];
  for (uint32_t c = 0; c < CHUNKS; c++) order[c] = order[2 * CHUNKS - 1 - c] = c;
  CHECK_OK(ptn_engine_set_order(w->engine, order, 2 * CHUNKS));
  ptn_engine_set_pending(w->engine, PENDING_BYTES);
  for (uint32_t c = 0; c < CHUNKS; c++) set_guard(w, c);
}

/* What is in the chunk's memory must be the committed values. The chunk is in use from here on. */
static void hold(world *w, uint32_t c) {
  bool conflict;
  CHECK_OK(ptn_engine_demand(w->engine, c, &conflict));
  CHECK(!conflict);
  const char *memory = ptn_engine_region(w->engine, c)->memory;
  for (uint32_t i = 0; i < PER_CHUNK; i++) {
    const twin *t = &w->twins[c * PER_CHUNK + i];
    CHECK(memcmp(memory + w->params[c * PER_CHUNK + i].offset_bytes, t->values, t->count * element_bytes) == 0);
  }
  CHECK(w->in_use[c] == !ptn_engine_in_memory(w->engine, c));
}

static void look_at(world *w, uint32_t c) {
  hold(w, c);
  ptn_engine_unuse(w->engine, c);
  CHECK(!w->in_use[c]);
}

/* Who gives a chunk's place to others is told when it holds the chunk for whoever uses it, however often, and by whatever end. */
static void look_twice(world *w) {
  for (uint32_t c = 0; c < CHUNKS; c++) {
    if (ptn_engine_in_memory(w->engine, c)) continue;
    bool conflict;
    for (int i = 0; i < 2; i++) CHECK_OK(ptn_engine_demand(w->engine, c, &conflict));
    for (uint32_t other = c % SLOTS; other < CHUNKS; other += SLOTS) {
      if (other == c || ptn_engine_in_memory(w->engine, other)) continue;
      CHECK_OK(ptn_engine_demand(w->engine, other, &conflict));
      CHECK(conflict && !w->in_use[other]);
    }
    ptn_engine_unuse(w->engine, c);
    CHECK(w->in_use[c]);
    if (c % 2) ptn_engine_unuse(w->engine, c);
    else ptn_engine_unuse_all(w->engine);
    CHECK(!w->in_use[c]);
  }
}

static ptn_status relieve(void *context, uint64_t missing_bytes, bool must, bool *freed) {
  world *w = context;
  (void)missing_bytes;
  *freed = w->engine && ptn_engine_relieve(w->engine, must);
  return PTN_OK;
}

static uint64_t live_bytes(const world *w) {
  ptn_account_stats stats;
  ptn_account_get_stats(w->account, &stats);
  return stats.live_bytes;
}

/* Memory for a gradient. Where it is beyond the goal, no more gradients wait for updates than always may. */
static void *make_gradient(world *w, size_t bytes) {
  void *made;
  CHECK_OK(ptn_arena_alloc(w->account, bytes, &made));
  owners_out++;
  ptn_lock(&w->engine->mutex);
  bool beyond = w->goal_bytes > 0 && live_bytes(w) > w->goal_bytes;
  CHECK(!beyond || w->engine->job_bytes <= PENDING_BYTES);
  w->n_beyond += beyond;
  w->n_more_waited += w->goal_bytes > 0 && w->engine->job_bytes > PENDING_BYTES;
  ptn_unlock(&w->engine->mutex);
  return made;
}

static uint64_t held_state_bytes(world *w, uint64_t *yielded_bytes) {
  ptn_engine_held held;
  ptn_engine_get_held(w->engine, &held);
  *yielded_bytes = held.yielded_bytes;
  return held.state_bytes;
}

/* As where a request finds no memory. Memory is lacked until some of the state in memory has given way, or all of it. */
static void lack_memory(world *w) {
  uint64_t before, after, most_bytes = ptn_engine_yielded(w->engine, false);
  uint64_t live = live_bytes(w), state_bytes = held_state_bytes(w, &before);
  for (bool useful = true, all = check_random(&seed) % 4 == 0; useful;) {
    useful = ptn_engine_relieve(w->engine, true);
    if (held_state_bytes(w, &after) < state_bytes && !all) break;
  }
  CHECK(held_state_bytes(w, &after) + after == state_bytes + before);
  CHECK(live_bytes(w) + after <= live + before); /* gradients went, too */
  CHECK(ptn_engine_yielded(w->engine, false) == ptn_max_u64(most_bytes, after));
  w->n_yielded += after > before;
}

static void give_gradient(world *w, uint32_t number, ptn_gradient_use use) {
  twin *t = &w->twins[number];
  fill(t->grad, t->count);
  if (t->has_sum) add(t->sum, t->grad, t->count);
  else memcpy(t->sum, t->grad, t->count * element_bytes);
  t->has_sum = true;
  if (ptn_engine_in_memory(w->engine, w->params[number].chunk)) return;
  void *copy = make_gradient(w, t->count * element_bytes);
  memcpy(copy, t->grad, t->count * element_bytes);
  CHECK_OK(ptn_engine_gradient(w->engine, number, copy, copy, use));
}

static void update_twins(world *w, float scale) {
  for (uint32_t i = 0; i < PARAMS; i++) {
    twin *t = &w->twins[i];
    if (!t->has_sum) continue;
    ptn_update update;
    CHECK_OK(ptn_update_prepare(&update, &w->hyper, ++t->steps, scale));
    if (bf16) ptn_update_run_bf16(false, &update, t->values, t->master, t->states, t->sum, ptn_span_whole(t->count));
    else ptn_update_run(false, &update, t->values, t->states, t->sum, ptn_span_whole(t->count));
    t->has_sum = false;
  }
}

/* One that cannot be updated, the last of all, keeps the others as they are. */
static void refuse_step(world *w, ptn_memory_update *updates, size_t count, float scale) {
  for (uint32_t i = 0; i < PARAMS; i++) {
    if (ptn_engine_in_memory(w->engine, w->params[i].chunk) || !w->twins[i].has_sum) continue;
    updates[count] = (ptn_memory_update){.param = i, .grad = w->twins[i].sum};
    uint64_t before = ptn_engine_commits_count(w->engine);
    CHECK(ptn_engine_make_step(w->engine, updates, count + 1, scale) == PTN_INVALID);
    CHECK(ptn_engine_commits_count(w->engine) == before);
    return;
  }
}

static void make_step(world *w, float scale) {
  ptn_memory_update updates[PARAMS + 1];
  size_t count = 0;
  for (uint32_t i = 0; i < PARAMS; i++)
    if (w->twins[i].has_sum && ptn_engine_in_memory(w->engine, w->params[i].chunk))
      updates[count++] = (ptn_memory_update){.param = i, .grad = w->twins[i].sum};
  refuse_step(w, updates, count, scale);
  uint64_t before = ptn_engine_commits_count(w->engine);
  CHECK_OK(ptn_engine_make_step(w->engine, updates, count, scale));
  CHECK(ptn_engine_commits_count(w->engine) == before + 1);
  (void)ptn_engine_yielded(w->engine, true);
}

static void one_step(world *w, int passes, bool late, float scale, bool skip) {
  for (int pass = 0; pass < passes; pass++) {
    ptn_engine_seek(w->engine, 0);
    ptn_engine_read_ahead(w->engine, check_random(&seed) % 4 > 0);
    ptn_engine_yield(w->engine, check_random(&seed) % 2);
    for (uint32_t c = 0; c < CHUNKS; c++) look_at(w, c);
    if (check_random(&seed) % 4 == 0) lack_memory(w);
    if (pass) CHECK_OK(ptn_engine_flush(w->engine));
    if (pass + 1 == passes) CHECK_OK(ptn_engine_set_hyper(w->engine, 0, &w->hyper));
    ptn_gradient_use use = pass + 1 == passes && !late ? PTN_GRADIENT_UPDATE : PTN_GRADIENT_SPILL;
    for (uint32_t c = CHUNKS; c-- > 0;) {
      look_at(w, c);
      if (check_random(&seed) % 20 == 0) lack_memory(w);
      if (c < 6 && check_random(&seed) % 5 == 0) ptn_engine_read_ahead(w->engine, check_random(&seed) % 2);
      for (uint32_t i = PER_CHUNK; i-- > 0;) {
        uint32_t number = c * PER_CHUNK + i;
        bool unused = check_random(&seed) % 8 == 0;
        bool held = check_random(&seed) % 4 == 0; /* somebody else reads the chunk while a gradient of it comes */
        if (held) hold(w, c);
        if (w->params[number].trained && !unused) give_gradient(w, number, use);
        if (held) ptn_engine_unuse(w->engine, c);
      }
    }
  }
  for (int i = 0; i < 4; i++) look_at(w, (uint32_t)(check_random(&seed) % CHUNKS)); /* still the old values */
  if (skip) {
    ptn_engine_drop(w->engine);
    for (uint32_t i = 0; i < PARAMS; i++) w->twins[i].has_sum = false;
    return;
  }
  CHECK_OK(ptn_engine_flush(w->engine));
  CHECK_OK(ptn_engine_update_spilled(w->engine, scale));
  ptn_engine_seek(w->engine, (uint32_t)(check_random(&seed) % (2 * CHUNKS))); /* reads while updates are under way */
  CHECK_OK(ptn_engine_wait(w->engine));
  make_step(w, scale);
  update_twins(w, scale);
}

static void check_all(world *w) {
  for (uint32_t i = 0; i < PARAMS; i++) {
    const twin *t = &w->twins[i];
    float *copy = malloc(t->count * sizeof(float));
    CHECK_OK(ptn_engine_transfer(w->engine, i, 0, copy, false));
    CHECK(memcmp(copy, t->values, t->count * element_bytes) == 0);
    if (bf16 && w->params[i].trained) {
      CHECK_OK(ptn_engine_transfer(w->engine, i, 1 + STATES, copy, false));
      CHECK(memcmp(copy, t->master, t->count * sizeof(float)) == 0);
    }
    for (uint32_t s = 0; w->params[i].trained && s < STATES; s++) {
      CHECK_OK(ptn_engine_transfer(w->engine, i, 1 + s, copy, false));
      CHECK(memcmp(copy, t->states[s], t->count * sizeof(float)) == 0);
    }
    CHECK(ptn_engine_steps(w->engine, i) == t->steps);
    free(copy);
  }
}

/* As a user does between steps; parts of arrays too. */
static void write_some(world *w) {
  for (uint32_t i = 0; i < PARAMS; i++) {
    twin *t = &w->twins[i];
    uint64_t first = check_random(&seed) % t->count, count = check_random(&seed) % (t->count - first + 1);
    if (check_random(&seed) % 4 == 0) {
      fill((char *)t->values + first * element_bytes, (size_t)count);
      CHECK_OK(ptn_engine_transfer_part(w->engine, i, 0, first, count, (char *)t->values + first * element_bytes, true));
    }
    if (bf16 && w->params[i].trained && check_random(&seed) % 8 == 0) {
      for (uint64_t k = first; k < first + count; k++) t->master[k] = random_float();
      CHECK_OK(ptn_engine_transfer_part(w->engine, i, 1 + STATES, first, count, t->master + first, true));
    }
    if (w->params[i].trained && check_random(&seed) % 8 == 0) {
      for (uint64_t k = first; k < first + count; k++) t->states[1][k] = (random_float() + 1.0f) / 8;
      CHECK_OK(ptn_engine_transfer_part(w->engine, i, 2, first, count, t->states[1] + first, true));
    }
  }
}

static void move_homes(world *w) {
  ptn_engine_drop_slots(w->engine);
  ptn_engine_drop_ring(w->engine);
  for (uint32_t c = 0; c < CHUNKS; c++) {
    if (check_random(&seed) % 3 == 0) CHECK_OK(ptn_engine_to_memory(w->engine, c, check_random(&seed) % 2));
    else CHECK_OK(ptn_engine_to_disk(w->engine, c));
  }
  set_slots(w);
}

/* As after as many pieces as 32 bits count, which some days of training make. */
static void count_pieces(ptn_engine *engine, uint64_t count) {
  ptn_lock(&engine->mutex);
  engine->piece_head += count;
  engine->piece_middle += count;
  engine->piece_tail += count;
  ptn_unlock(&engine->mutex);
}

static void train(bool in_bf16) {
  bf16 = in_bf16;
  element_bytes = bf16 ? sizeof(ptn_bf16) : sizeof(float);
  world w = {.hyper = {.kind = PTN_ADAMW, .lr = 1e-2, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8}};
  describe(&w);
  CHECK_OK(ptn_account_create(&w.account, 8 * PTN_MIB, relieve, &w));
  ptn_engine_config config = {.folder = ".",
                              .account = w.account,
                              .n_chunks = CHUNKS,
                              .n_params = PARAMS,
                              .n_groups = 1,
                              .chunks = w.chunks,
                              .params = w.params,
                              .n_states = STATES,
                              .bf16 = bf16,
                              .release = release};
  CHECK_OK(ptn_engine_create(&w.engine, &config));
  count_pieces(w.engine, UINT32_MAX - 20);
  for (uint32_t c = 0; c < CHUNKS; c++) CHECK_OK(ptn_engine_to_disk(w.engine, c));
  set_slots(&w);
  for (uint32_t i = 0; i < PARAMS; i++) CHECK_OK(ptn_engine_transfer(w.engine, i, 0, w.twins[i].values, true));
  CHECK(ptn_engine_transfer(w.engine, 0, 1 + STATES + bf16, w.twins[0].sum, false) == PTN_INVALID);
  CHECK(ptn_engine_transfer_part(w.engine, 0, 0, 1, w.twins[0].count, w.twins[0].sum, false) == PTN_INVALID);
  for (int round = 0; round < 40; round++) {
    w.goal_bytes = round % 2 ? live_bytes(&w) + ROOM_BYTES : 0;
    ptn_account_set_goal(w.account, w.goal_bytes);
    one_step(&w, 1 + (int)(check_random(&seed) % 3), check_random(&seed) % 3 == 0, 1.0f, check_random(&seed) % 5 == 0);
    one_step(&w, 1 + (int)(check_random(&seed) % 2), true, 0.25f, false);
    check_all(&w);
    look_twice(&w);
    CHECK(owners_out == 0);
    if (round % 5 == 1) {
      one_step(&w, 1, false, 1.0f, true); /* what gave way in a step that is not made stays away */
      check_all(&w);
    }
    if (round % 3 == 0) write_some(&w);
    if (round % 4 == 3) move_homes(&w);
  }
  one_step(&w, 1, false, 1.0f, true);
  ptn_engine_destroy(w.engine);
  CHECK(w.n_beyond > 0);
  CHECK(w.n_more_waited > 0);
  CHECK(w.n_yielded > 10);
  CHECK(owners_out == 0);
  ptn_account_stats stats;
  ptn_account_get_stats(w.account, &stats);
  CHECK(stats.live_bytes == 0);
  ptn_account_destroy(w.account);
  for (uint32_t i = 0; i < PARAMS; i++) {
    free(w.twins[i].values);
    free(w.twins[i].grad);
    free(w.twins[i].sum);
    free(w.twins[i].master);
    for (int s = 0; s < STATES; s++) free(w.twins[i].states[s]);
  }
}

int main(void) {
  train(false);
  train(true);
  puts("engine: 80 steps equal, and 80 in bf16");
  return 0;
}
