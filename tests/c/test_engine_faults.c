/* Training on a disk that lies: each read once brings a wrong bit, every third write once is lost, goes elsewhere or puts down a wrong bit.
 * Whatever comes of it, the figures are right or there is an error that names the place; and of every kind of bytes that lies on the
 * disk some were hit. Passing faults are over with the step that is made again. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/optim/?*.c csrc/runtime/?*.c */
/* threads */
/* one core */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "fake_openmp.h"
#include "parts.h"
#include "runtime/internal.h"

enum { CHUNKS = 2, PER_CHUNK = 2, PARAMS = CHUNKS * PER_CHUNK, STATES = 2, STEPS = 2, OWN_PAGES = 3 };

/* ---- a disk that lies, in place of the C library's ---- */

typedef enum lie { HONEST, READ_FLIPPED, WRITE_FLIPPED, WRITE_LOST, WRITE_ELSEWHERE } lie;

static _Atomic int lie_now;
static _Atomic long lie_number, reads, writes; /* the transfer of its direction that goes wrong, from 1 on */
static _Atomic uint64_t lie_begin, lie_end; /* of the file, that it touched */
static long read_ahead_count; /* chunks that were updated where nobody had demanded them */
static long joined_count; /* of them those whose state was being read already */

static void lie_in(lie kind, long number) {
  atomic_store(&lie_now, HONEST);
  atomic_store(&lie_number, number);
  atomic_store(&reads, 0);
  atomic_store(&writes, 0);
  atomic_store(&lie_begin, 0);
  atomic_store(&lie_end, 0);
  atomic_store(&lie_now, (int)kind);
}

static bool lies(bool write, size_t bytes, off_t offset) {
  lie kind = (lie)atomic_load(&lie_now);
  long number = atomic_fetch_add(write ? &writes : &reads, 1) + 1;
  if (kind == HONEST || write != (kind != READ_FLIPPED) || number != atomic_load(&lie_number)) return false;
  atomic_store(&lie_begin, (uint64_t)offset);
  atomic_store(&lie_end, (uint64_t)offset + bytes);
  return true;
}

ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) {
  size_t bytes = parts_bytes(parts, count);
  ssize_t moved = syscall(SYS_preadv, fd, parts, (long)count, offset, 0L);
  /* The begin of the last page: behind it may be what fills the page up, and is nobody's. */
  if (lies(false, bytes, offset)) *parts_byte(parts, bytes - PTN_PAGE_BYTES) ^= 16;
  return moved;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
  size_t bytes = parts_bytes(parts, count);
  if (!lies(true, bytes, offset)) return syscall(SYS_pwritev, fd, parts, (long)count, offset, 0L);
  lie kind = (lie)atomic_load(&lie_now);
  if (kind == WRITE_LOST) return (ssize_t)bytes;
  if (kind == WRITE_ELSEWHERE) {
    off_t other = offset >= (off_t)bytes ? offset - (off_t)bytes : offset + (off_t)bytes;
    atomic_store(&lie_begin, (uint64_t)(other < offset ? other : offset));
    atomic_store(&lie_end, (uint64_t)(other < offset ? offset : other) + bytes);
    return syscall(SYS_pwritev, fd, parts, (long)count, other, 0L);
  }
  unsigned char *copy = parts_gathered(parts, count);
  copy[bytes / 2] ^= 1;
  ssize_t moved = syscall(SYS_pwrite64, fd, copy, bytes, offset);
  free(copy);
  return moved;
}

/* ---- a model ---- */

typedef struct world {
  ptn_engine *engine;
  ptn_account *account;
  ptn_engine_param params[PARAMS];
  ptn_engine_chunk chunks[CHUNKS];
  ptn_extent own; /* of an optimizer that the core does not know */
  bool foreign;
  bool large; /* pieces of the ring are updated part by part, chunks with what was read ahead of their gradients */
  uint64_t seed;
} world;

static uint64_t most_bytes;
static char *outcome, *expected;
static uint64_t outcome_bytes;

static void fill(world *w, void *memory, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes / sizeof(ptn_bf16); i++)
    ((ptn_bf16 *)memory)[i] = ptn_bf16_round((float)(check_random(&w->seed) % 20001) / 10000.0f - 1.0f);
}

static void release(void *owner) { free(owner); }

static void describe(world *w) {
  for (uint32_t c = 0; c < CHUNKS; c++) {
    uint64_t offset = 0;
    for (uint32_t i = 0; i < PER_CHUNK; i++) {
      uint64_t count = (1500 + 1000 * i + 700 * c) * (w->large ? 10 : 1);
      w->params[c * PER_CHUNK + i] = (ptn_engine_param){.chunk = c, .offset_bytes = offset, .count = count, .trained = true};
      uint64_t bytes = count * (w->foreign ? sizeof(float) : sizeof(ptn_bf16));
      offset = ptn_round_up(offset + bytes, PTN_TENSOR_ALIGN_BYTES);
    }
    w->chunks[c] = (ptn_engine_chunk){.param_bytes = ptn_round_up(offset, PTN_PAGE_BYTES), .trained = true};
    most_bytes = ptn_max_u64(most_bytes, w->chunks[c].param_bytes);
  }
}

/* bf16 with masters and two arrays of state, or an optimizer that the core does not know. */
static void open_world(world *w, bool foreign, bool large) {
  *w = (world){.foreign = foreign, .large = large, .seed = 3};
  describe(w);
  CHECK_OK(ptn_account_create(&w->account, 8 * PTN_MIB, NULL, NULL));
  ptn_engine_config config = {.folder = ".",
                              .account = w->account,
                              .n_chunks = CHUNKS,
                              .n_params = PARAMS,
                              .n_groups = 1,
                              .chunks = w->chunks,
                              .params = w->params,
                              .n_states = foreign ? 0 : STATES,
                              .bf16 = !foreign,
                              .release = release};
  CHECK_OK(ptn_engine_create(&w->engine, &config));
  for (uint32_t c = 0; c < CHUNKS; c++) CHECK_OK(ptn_engine_to_disk(w->engine, c));
  if (foreign) CHECK_OK(ptn_engine_reserve(w->engine, OWN_PAGES * PTN_PAGE_BYTES, &w->own));
  int32_t slot_of[CHUNKS] = {0, 0};
  CHECK_OK(ptn_engine_set_slots(w->engine, slot_of, &most_bytes, 1));
  if (!foreign) CHECK_OK(ptn_engine_set_ring(w->engine, large ? PTN_UPDATE_PART_BYTES + PTN_PAGE_BYTES : PTN_PAGE_BYTES, 3));
  uint32_t order[2 * CHUNKS] = {0, 1, 1, 0};
  CHECK_OK(ptn_engine_set_order(w->engine, order, 2 * CHUNKS));
  ptn_engine_set_pending(w->engine, PTN_MIB);
  ptn_hyper hyper = {.kind = PTN_ADAMW, .lr = 1e-2, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};
  if (!foreign) CHECK_OK(ptn_engine_set_hyper(w->engine, 0, &hyper));
}

static void close_world(world *w) {
  if (w->foreign) ptn_engine_release(w->engine, &w->own);
  ptn_engine_destroy(w->engine);
  ptn_account_destroy(w->account);
}

static uint64_t bytes_of(const world *w, uint32_t i) {
  return w->params[i].count * (w->foreign ? sizeof(float) : sizeof(ptn_bf16));
}

static ptn_status set_values(world *w) {
  float *values = malloc(most_bytes);
  ptn_status status = PTN_OK;
  for (uint32_t i = 0; i < PARAMS && status == PTN_OK; i++) {
    fill(w, values, bytes_of(w, i));
    status = ptn_engine_transfer(w->engine, i, 0, values, true);
  }
  free(values);
  return status;
}

/* What the chunk's memory holds goes to the outcome. */
static ptn_status look_at(world *w, uint32_t c) {
  bool conflict;
  PTN_TRY(ptn_engine_demand(w->engine, c, &conflict));
  CHECK(!conflict);
  for (uint32_t i = c * PER_CHUNK; i < (c + 1) * PER_CHUNK; i++) {
    memcpy(outcome + outcome_bytes, (char *)ptn_engine_region(w->engine, c)->memory + w->params[i].offset_bytes, bytes_of(w, i));
    outcome_bytes += bytes_of(w, i);
  }
  ptn_engine_unuse(w->engine, c);
  return PTN_OK;
}

static ptn_status give_gradients(world *w, uint32_t c, ptn_gradient_use use) {
  for (uint32_t i = (c + 1) * PER_CHUNK; i-- > c * PER_CHUNK;) {
    void *gradient = malloc(bytes_of(w, i));
    fill(w, gradient, bytes_of(w, i));
    ptn_status status = ptn_engine_gradient(w->engine, i, gradient, gradient, use);
    if (status != PTN_OK) {
      free(gradient);
      return status;
    }
  }
  return PTN_OK;
}

/* The chunk lies in its slot, and nobody has demanded it there. */
static ptn_status only_read_ahead(world *w, uint32_t c) {
  PTN_TRY(ptn_engine_wait(w->engine));
  ptn_engine_seek(w->engine, 2 * CHUNKS - 1 - c);
  ptn_lock(&w->engine->mutex);
  ptn_residency_settle(w->engine);
  const slot *slot = &w->engine->slots[w->engine->chunks[c].slot];
  read_ahead_count += slot->chunk == c && slot->state == SLOT_LOADED && slot->unchecked;
  ptn_unlock(&w->engine->mutex);
  ptn_engine_read_ahead(w->engine, true); /* waiting has cancelled it */
  ptn_lock(&w->engine->mutex);
  const job *ahead = w->engine->ahead;
  joined_count += ahead && ahead->chunk == c;
  while (ahead && !ahead->all_started) { /* its parameters are left until its gradients are there */
    ptn_unlock(&w->engine->mutex);
    usleep(100);
    ptn_lock(&w->engine->mutex);
    ahead = w->engine->ahead;
  }
  ptn_unlock(&w->engine->mutex);
  return PTN_OK;
}

/* Two passes of gradients, the first of which waits on the disk; of large chunks the second alone. In it the last chunk is updated where
 * it was read ahead. */
static ptn_status kernel_step(world *w) {
  for (int pass = w->large; pass < 2; pass++) {
    ptn_engine_seek(w->engine, 0);
    ptn_engine_read_ahead(w->engine, pass == 1);
    for (uint32_t c = 0; c < CHUNKS; c++) PTN_TRY(look_at(w, c));
    if (pass && !w->large) PTN_TRY(ptn_engine_flush(w->engine));
    for (uint32_t c = CHUNKS; c-- > 0;) {
      PTN_TRY(pass && c == 0 ? only_read_ahead(w, c) : look_at(w, c));
      PTN_TRY(give_gradients(w, c, pass ? PTN_GRADIENT_UPDATE : PTN_GRADIENT_SPILL));
    }
  }
  PTN_TRY(ptn_engine_flush(w->engine));
  return ptn_engine_wait(w->engine);
}

/* All parameters but the last of each chunk get new values; state of the caller's own goes there and back. */
static ptn_status foreign_step(world *w) {
  float *values = malloc(most_bytes);
  ptn_status status = PTN_OK;
  for (uint32_t c = 0; c < CHUNKS && status == PTN_OK; c++) {
    status = look_at(w, c);
    fill(w, values, bytes_of(w, c * PER_CHUNK));
    if (status == PTN_OK) status = ptn_engine_stage(w->engine, c * PER_CHUNK, values);
  }
  if (status == PTN_OK) status = ptn_engine_stage_rest(w->engine);
  free(values);
  void *state;
  CHECK_OK(ptn_arena_alloc(w->account, OWN_PAGES * PTN_PAGE_BYTES, &state));
  uint64_t bytes = OWN_PAGES * PTN_PAGE_BYTES - 100;
  fill(w, state, bytes);
  if (status == PTN_OK) status = ptn_engine_move(w->engine, w->own.offset, state, bytes, true);
  memset(state, 0, bytes);
  if (status == PTN_OK) status = ptn_engine_move(w->engine, w->own.offset, state, bytes, false);
  memcpy(outcome + outcome_bytes, state, bytes);
  outcome_bytes += bytes;
  ptn_arena_free(state);
  return status;
}

static ptn_status one_step(world *w) { return w->foreign ? foreign_step(w) : kernel_step(w); }

/* Every array of every parameter; the first chunk as it comes back to memory. */
static ptn_status collect(world *w) {
  ptn_engine_drop_slots(w->engine);
  PTN_TRY(ptn_engine_to_memory(w->engine, 0, true));
  for (uint32_t i = 0; i < PARAMS; i++) {
    for (uint32_t array = 0; array <= (w->foreign ? 0 : STATES + 1); array++) {
      PTN_TRY(ptn_engine_transfer(w->engine, i, array, outcome + outcome_bytes, false));
      outcome_bytes += array ? w->params[i].count * sizeof(float) : bytes_of(w, i);
    }
  }
  return PTN_OK;
}

/* ---- what came of it ---- */

typedef enum kind { PARAMETERS, STATE_1, STATE_2, MASTER, GRADIENTS, OWN, KINDS } kind;
static const char *const words[KINDS] = {"parameters", "state 1", "state 2", "masters", "gradients", "own extents"};
static long noticed[KINDS];

static bool lies_in(uint64_t offset, ptn_extent extent) {
  return offset >= extent.offset && offset < extent.offset + extent.bytes;
}

/* What lies at this place of the file; KINDS: nothing. */
static kind kind_at(const world *w, uint64_t offset) {
  if (lies_in(offset, w->own)) return OWN;
  for (uint32_t c = 0; c < CHUNKS; c++) {
    const chunk *chunk = &w->engine->chunks[c];
    if (lies_in(offset, chunk->grads)) return GRADIENTS;
    for (int i = 0; i < 2; i++) {
      if (!lies_in(offset, chunk->extents[i])) continue;
      uint64_t inside = offset - chunk->extents[i].offset;
      if (inside < chunk->param_bytes) return PARAMETERS;
      for (uint32_t array = w->engine->n_arrays; array-- > 0;)
        if (inside >= array_offset(w->engine, chunk, array)) return array == STATES ? MASTER : (kind)(STATE_1 + array);
    }
  }
  return KINDS;
}

/* The error names a page that the lie has touched. */
static void check_error(const world *w) {
  const ptn_error *error = ptn_last_error();
  CHECK(error->code == PTN_DISK && error->sys_errno == EBADMSG && strstr(error->message, "checksum"));
  CHECK(strcmp(error->path, ".") == 0 && error->asked_bytes == PTN_PAGE_BYTES);
  const char *place = strstr(error->message, "bytes at ");
  CHECK(place);
  uint64_t offset = strtoull(place + strlen("bytes at "), NULL, 10);
  CHECK(offset >= atomic_load(&lie_begin) && offset < atomic_load(&lie_end));
  if (atomic_load(&lie_now) == READ_FLIPPED) CHECK(offset == atomic_load(&lie_end) - PTN_PAGE_BYTES);
  kind kind = kind_at(w, offset);
  CHECK(kind < KINDS);
  noticed[kind]++;
}

static uint64_t unwritten_bytes(const world *w) {
  ptn_store_stats stats;
  ptn_store_get_stats(ptn_engine_store(w->engine), &stats);
  return stats.unwritten_bytes;
}

/* Trains under one lie; returns how many transfers there were that could have been it. */
static long train(bool foreign, bool large, lie kind, long number) {
  world w;
  outcome_bytes = 0;
  lie_in(HONEST, 0);
  open_world(&w, foreign, large);
  lie_in(kind, number);
  ptn_status status = set_values(&w);
  uint64_t before_unwritten_bytes = unwritten_bytes(&w);
  for (int step = 0; step < STEPS && status == PTN_OK; step++) {
    uint64_t seed = w.seed, before_bytes = outcome_bytes;
    status = one_step(&w);
    if (status != PTN_OK && kind == READ_FLIPPED) { /* it was a passing one: the step is made again */
      check_error(&w);
      ptn_engine_drop(w.engine);
      w.seed = seed;
      outcome_bytes = before_bytes;
      status = one_step(&w);
      CHECK(status == PTN_OK);
    }
    if (status == PTN_OK) ptn_engine_commit(w.engine);
  }
  if (status == PTN_OK) status = collect(&w);
  if (status != PTN_OK) check_error(&w);
  /* All that is read was written; but for whole pages around values that go to a shadow one by one. */
  if (!foreign) CHECK(unwritten_bytes(&w) == before_unwritten_bytes);
  long transfers = atomic_load(kind == READ_FLIPPED ? &reads : &writes);
  close_world(&w);
  lie_in(HONEST, 0);
  if (kind == HONEST) {
    CHECK_OK(status);
    memcpy(expected, outcome, outcome_bytes);
  } else if (status == PTN_OK) {
    CHECK(memcmp(expected, outcome, outcome_bytes) == 0); /* never wrong figures */
  }
  return transfers;
}

int main(void) {
  outcome = calloc(1, 8 * PTN_MIB);
  expected = calloc(1, 8 * PTN_MIB);
  CHECK(outcome && expected);
  for (int world = 0; world < 3; world++) {
    bool foreign = world == 1, large = world == 2;
    train(foreign, large, HONEST, 0);
    for (lie kind = READ_FLIPPED; kind <= (large ? READ_FLIPPED : WRITE_ELSEWHERE); kind++)
      for (long number = 1; train(foreign, large, kind, number) >= number;) number += kind == READ_FLIPPED ? 1 : 3;
  }
  for (int kind = 0; kind < KINDS; kind++) {
    printf("%s: %ld\n", words[kind], noticed[kind]);
    CHECK(noticed[kind] > 0);
  }
  CHECK(read_ahead_count > 0 && joined_count > 0);
  free(outcome);
  free(expected);
  return 0;
}
