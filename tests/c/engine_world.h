/* A model that an engine trains over nothing, the host as a device or the fake GPU, beside the same model in plain memory.
 *
 * Every access reads all parameters of a chunk on the device and mixes them into what later accesses read, and every gradient is made
 * of parameters and that mixture: one byte that is not what it should be at the moment it is used makes all that follows wrong.
 * Memory of gradients is used again as soon as the engine gives it back. */
#ifndef PTN_TESTS_ENGINE_WORLD_H
#define PTN_TESTS_ENGINE_WORLD_H

#include <string.h>

#include "base/bytes.h"
#include "device_subject.h"
#include "runtime/engine.h"

enum { CHUNKS = 8, PER_CHUNK = 3, PARAMS = CHUNKS * PER_CHUNK, STATES = 2, SLOTS = 3, FROZEN_CHUNK = 5 };
enum { MIX = 24, PARTS = 3, KERNELS = 400, BUFFERS_MAX = 4 * PARAMS, PEEKS = 64 };

/* Where a chunk is at home. */
typedef enum home { ON_DEVICE, ON_HOST, ON_HOST_LATE, ON_DISK } home;

typedef enum ground { ON_NOTHING, OVER_HOST, OVER_CUDA } ground;

typedef struct twin {
  size_t count;
  uint64_t steps;
  void *values, *sum; /* fp32 or bf16 */
  float *master, *states[STATES];
  bool has_sum;
} twin;

typedef struct world world;

/* Memory of one gradient where it is computed. */
typedef struct buffer {
  world *world;
  void *memory;
} buffer;

typedef struct kernel {
  world *world;
  const char *params; /* of the chunk, or of the parameter */
  void *gradient;
  size_t counts[PER_CHUNK]; /* of parameters to read; with a gradient the first alone */
  uint64_t offsets[PER_CHUNK];
  uint32_t noise;
  uint32_t *peek; /* in the test's memory */
  /* of an update */
  ptn_update update;
  void *values, *sum;
  float *master, *states[STATES];
} kernel;

struct world {
  ground ground;
  bool bf16;
  size_t element_bytes;
  uint64_t seed;
  subject subject;
  ptn_device *device; /* the engine's, which may be one around the subject's */
  ptn_stream *streams[2];
  int stream;
  ptn_event *switched;
  ptn_engine *engine;
  ptn_account *account;
  ptn_engine_param params[PARAMS];
  ptn_engine_chunk chunks[CHUNKS];
  home homes[CHUNKS];
  twin twins[PARAMS];
  ptn_hyper hyper;
  uint32_t plain_mix[MIX], *mix; /* mix: on the device */
  buffer buffers[BUFFERS_MAX], *free_buffers[BUFFERS_MAX];
  int buffers_count, free_count;
  kernel kernels[KERNELS];
  int kernels_count;
  uint32_t peeks[PEEKS], expected_peeks[PEEKS];
  int peeks_count;
  size_t owners_out;
  bool frozen;    /* the device does nothing while a step is ordered */
  bool by_order;  /* gradients and uses as every model has them: nothing left to chance */
  uint32_t in_use[CHUNKS];
  uint64_t staging_bytes, gradient_bytes;
  uint32_t staging_pieces;
};

static uint64_t draw(world *w, uint64_t below) { return check_random(&w->seed) % below; }

/* ---- what is computed: the same on the device and in plain memory ---- */

static uint32_t bits_at(const world *w, const char *array, size_t k) {
  uint32_t bits = 0;
  memcpy(&bits, array + k * w->element_bytes, w->element_bytes);
  return bits;
}

static void set_value(const world *w, void *array, size_t k, uint32_t hash) {
  hash = (hash ^ hash >> 15) * 0x85ebca6bu;
  float value = (float)((hash ^ hash >> 13) & 0xffff) / 32768.0f - 1.0f;
  if (w->bf16) ((ptn_bf16 *)array)[k] = ptn_bf16_round(value);
  else ((float *)array)[k] = value;
}

/* Elements whose number leaves `part` when divided by PARTS; MIX is a multiple of PARTS. */
static void mix_part(const world *w, uint32_t *mix, const char *params, size_t count, int part) {
  for (size_t k = (size_t)part; k < count; k += PARTS) mix[k % MIX] = mix[k % MIX] * 31 + bits_at(w, params, k) + 1;
}

static void gradient_part(const world *w, uint32_t *mix, const char *params, void *gradient, size_t count, uint32_t noise,
                          int part) {
  for (size_t k = (size_t)part; k < count; k += PARTS) {
    uint32_t bits = bits_at(w, params, k), *at = &mix[k % MIX];
    set_value(w, gradient, k, bits * 2654435761u ^ *at ^ noise);
    *at = *at * 17 + bits;
  }
}

static uint32_t peek_at(const world *w, const char *params, size_t count) {
  uint32_t sum = 1;
  for (size_t k = 0; k < count; k++) sum = sum * 31 + bits_at(w, params, k);
  return sum;
}

static void *at(const world *w, const void *address) {
  return w->ground == OVER_CUDA ? fake_memory(address) : (void *)(uintptr_t)address;
}

static void reset_kernel(void *argument, int part) {
  const kernel *kernel = argument;
  uint32_t *mix = at(kernel->world, kernel->world->mix);
  for (int i = part; i < MIX; i += PARTS) mix[i] = 7;
}

static void mix_kernel(void *argument, int part) {
  const kernel *kernel = argument;
  const world *w = kernel->world;
  const char *params = at(w, kernel->params);
  for (int i = 0; i < PER_CHUNK; i++) mix_part(w, at(w, w->mix), params + kernel->offsets[i], kernel->counts[i], part);
}

static void gradient_kernel(void *argument, int part) {
  const kernel *kernel = argument;
  const world *w = kernel->world;
  const char *params = (const char *)at(w, kernel->params) + kernel->offsets[0];
  gradient_part(w, at(w, w->mix), params, at(w, kernel->gradient), kernel->counts[0], kernel->noise, part);
}

static void peek_kernel(void *argument, int part) {
  const kernel *kernel = argument;
  const char *params = (const char *)at(kernel->world, kernel->params) + kernel->offsets[0];
  if (part == PARTS - 1) *kernel->peek = peek_at(kernel->world, params, kernel->counts[0]);
}

/* What torch's fused kernel does with a persistent chunk. */
static void update_kernel(void *argument, int part) {
  const kernel *kernel = argument;
  const world *w = kernel->world;
  if (part != 0) return;
  float *states[STATES];
  for (int s = 0; s < STATES; s++) states[s] = at(w, kernel->states[s]);
  ptn_span all = ptn_span_whole(kernel->counts[0]);
  if (w->bf16)
    ptn_update_run_bf16(false, &kernel->update, at(w, kernel->values), at(w, kernel->master), states, kernel->sum, all);
  else ptn_update_run(false, &kernel->update, at(w, kernel->values), states, kernel->sum, all);
}

static kernel *new_kernel(world *w, uint32_t chunk) {
  CHECK(w->kernels_count < KERNELS);
  kernel *kernel = &w->kernels[w->kernels_count++];
  *kernel = (struct kernel){.world = w};
  ptn_region *region = chunk < CHUNKS ? ptn_engine_region(w->engine, chunk) : NULL;
  if (region) kernel->params = region->memory;
  return kernel;
}

static void launch(world *w, int stream, void (*function)(void *argument, int part), kernel *kernel) {
  if (w->ground == OVER_CUDA) fake_launch(w->streams[stream], function, kernel, PARTS);
  else
    for (int part = 0; part < PARTS; part++) function(kernel, part);
}

/* ---- memory of gradients ---- */

static void release(void *owner) {
  buffer *buffer = owner;
  world *w = buffer->world;
  w->free_buffers[w->free_count++] = buffer;
  w->owners_out--;
}

/* The one that was given back last. */
static buffer *take_buffer(world *w) {
  while (w->free_count == 0) ptn_engine_relieve(w->engine, true);
  return w->free_buffers[--w->free_count];
}

/* ---- the world ---- */

static void fill(world *w, void *array, size_t count) {
  for (size_t k = 0; k < count; k++) set_value(w, array, k, (uint32_t)check_random(&w->seed));
}

static void describe(world *w) {
  for (uint32_t c = 0; c < CHUNKS; c++) {
    uint64_t offset = 0;
    for (uint32_t i = 0; i < PER_CHUNK; i++) {
      uint32_t number = c * PER_CHUNK + i;
      uint64_t count = 1 + draw(w, c == 3 ? 6000 : 700);
      w->params[number] = (ptn_engine_param){.chunk = c, .offset_bytes = offset, .count = count, .trained = c != FROZEN_CHUNK};
      offset = ptn_round_up(offset + count * w->element_bytes, PTN_TENSOR_ALIGN_BYTES);
      twin *t = &w->twins[number];
      *t = (twin){.count = (size_t)count, .values = malloc(count * w->element_bytes), .sum = malloc(count * w->element_bytes)};
      t->master = calloc(count, sizeof(float));
      for (int s = 0; s < STATES; s++) t->states[s] = calloc(count, sizeof(float));
      fill(w, t->values, t->count);
    }
    w->chunks[c] = (ptn_engine_chunk){.param_bytes = ptn_round_up(offset, PTN_PAGE_BYTES), .trained = c != FROZEN_CHUNK};
  }
}

static uint64_t largest_gradient(const world *w) {
  uint64_t most = 0;
  for (int i = 0; i < PARAMS; i++) most = ptn_max_u64(most, w->params[i].count * w->element_bytes);
  return most;
}

static ptn_status place_chunk(world *w, uint32_t c) {
  switch (w->homes[c]) {
    case ON_DEVICE: return ptn_engine_to_memory(w->engine, c, true);
    case ON_DISK: return ptn_engine_to_disk(w->engine, c);
    default: return ptn_engine_to_host(w->engine, c, w->homes[c] == ON_HOST);
  }
}

static ptn_status set_slots(world *w) {
  int32_t slot_of[CHUNKS];
  uint64_t bytes[SLOTS];
  for (int i = 0; i < SLOTS; i++) bytes[i] = PTN_PAGE_BYTES;
  for (uint32_t c = 0; c < CHUNKS; c++) {
    slot_of[c] = w->homes[c] == ON_DEVICE ? -1 : (int32_t)(c % SLOTS);
    if (slot_of[c] >= 0) bytes[slot_of[c]] = ptn_max_u64(bytes[slot_of[c]], w->chunks[c].param_bytes);
  }
  PTN_TRY(ptn_engine_set_slots(w->engine, slot_of, bytes, SLOTS));
  PTN_TRY(ptn_engine_set_ring(w->engine, 2 * PTN_PAGE_BYTES, 3));
  uint32_t order[2 * CHUNKS];
  for (uint32_t c = 0; c < CHUNKS; c++) order[c] = order[2 * CHUNKS - 1 - c] = c;
  PTN_TRY(ptn_engine_set_order(w->engine, order, 2 * CHUNKS));
  if (w->ground == ON_NOTHING) {
    ptn_engine_set_pending(w->engine, 40000);
    return PTN_OK;
  }
  PTN_TRY(ptn_engine_set_gradient_memory(w->engine, ptn_max_u64(largest_gradient(w) + 64, w->gradient_bytes)));
  return ptn_engine_set_staging(w->engine, w->staging_bytes, w->staging_pieces);
}

static ptn_status place_all(world *w) {
  for (uint32_t c = 0; c < CHUNKS; c++) PTN_TRY(place_chunk(w, c));
  return set_slots(w);
}

static ptn_status allocate(world *w, uint64_t bytes, void **out) {
  if (w->ground != ON_NOTHING) return w->subject.kind->allocate(w->subject.device, bytes, out);
  *out = malloc(bytes);
  return PTN_OK;
}

static ptn_status make_memory(world *w) {
  void *mix;
  PTN_TRY(allocate(w, sizeof w->plain_mix, &mix));
  w->mix = mix;
  for (; w->free_count < w->buffers_count; w->free_count++) {
    buffer *buffer = &w->buffers[w->free_count];
    buffer->world = w;
    PTN_TRY(allocate(w, largest_gradient(w), &buffer->memory));
    w->free_buffers[w->free_count] = buffer;
  }
  if (w->ground == ON_NOTHING) return PTN_OK;
  return w->subject.kind->create_event(w->subject.device, PTN_EVENT_ORDER, &w->switched);
}

/* What the caller has set in the world stays: ground, bf16, seed, homes, sizes; the subject is open. */
static ptn_status open_world(world *w) {
  w->element_bytes = w->bf16 ? sizeof(ptn_bf16) : sizeof(float);
  w->hyper = (ptn_hyper){.kind = PTN_ADAMW, .lr = 1e-2, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};
  w->streams[0] = w->subject.compute;
  w->streams[1] = w->ground == OVER_CUDA ? fake_stream() : NULL;
  if (w->staging_pieces == 0) {
    w->staging_bytes = PTN_PAGE_BYTES;
    w->staging_pieces = 2;
  }
  if (w->buffers_count == 0) w->buffers_count = w->ground == ON_NOTHING ? BUFFERS_MAX : 3;
  describe(w);
  PTN_TRY(ptn_account_create(&w->account, 8 * PTN_MIB, NULL, NULL));
  PTN_TRY(make_memory(w));
  ptn_engine_config config = {.folder = ".",
                              .account = w->account,
                              .n_chunks = CHUNKS,
                              .n_params = PARAMS,
                              .n_groups = 1,
                              .chunks = w->chunks,
                              .params = w->params,
                              .n_states = STATES,
                              .bf16 = w->bf16,
                              .release = release,
                              .device = w->ground == ON_NOTHING ? NULL
                                        : w->device             ? w->device
                                                                : w->subject.device};
  PTN_TRY(ptn_engine_create(&w->engine, &config));
  if (w->ground != ON_NOTHING) PTN_TRY(ptn_engine_set_stream(w->engine, w->streams[0]));
  PTN_TRY(place_all(w));
  for (uint32_t i = 0; i < PARAMS; i++) PTN_TRY(ptn_engine_transfer(w->engine, i, 0, w->twins[i].values, true));
  return PTN_OK;
}

static void close_world(world *w) {
  ptn_engine_destroy(w->engine);
  CHECK(w->owners_out == 0);
  const subject *subject = &w->subject;
  if (w->ground != ON_NOTHING) subject->kind->finish(subject->device, w->streams[0]);
  for (int i = 0; i <= w->buffers_count; i++) {
    void *memory = i < w->buffers_count ? w->buffers[i].memory : (void *)w->mix;
    if (w->ground == ON_NOTHING) free(memory);
    else subject->kind->free(subject->device, memory);
  }
  if (w->ground != ON_NOTHING) subject->kind->destroy_event(subject->device, w->switched);
  if (w->account) {
    ptn_account_stats stats;
    ptn_account_get_stats(w->account, &stats);
    CHECK(stats.live_bytes == 0);
    ptn_account_destroy(w->account);
  }
  for (uint32_t i = 0; i < PARAMS; i++) {
    free(w->twins[i].values);
    free(w->twins[i].sum);
    free(w->twins[i].master);
    for (int s = 0; s < STATES; s++) free(w->twins[i].states[s]);
  }
}

/* ---- a step ---- */

/* As torch's wait_stream does: what is ordered on the other stream comes after what is on this one. */
static ptn_status change_stream(world *w) {
  if (w->ground != OVER_CUDA) return PTN_OK;
  const subject *subject = &w->subject;
  PTN_TRY(subject->kind->record(subject->device, w->switched, w->streams[w->stream]));
  PTN_TRY(subject->kind->follow(subject->device, w->streams[1 - w->stream], w->switched));
  w->stream = 1 - w->stream;
  return ptn_engine_set_stream(w->engine, w->streams[w->stream]);
}

/* A chunk whose slot is in use gets one of its own. */
static ptn_status demand(world *w, uint32_t c) {
  bool conflict;
  PTN_TRY(ptn_engine_demand(w->engine, c, &conflict));
  if (conflict) {
    PTN_TRY(ptn_engine_own_slot(w->engine, c));
    PTN_TRY(ptn_engine_demand(w->engine, c, &conflict));
  }
  CHECK(!conflict);
  w->in_use[c]++;
  return PTN_OK;
}

static void unuse(world *w, uint32_t c) {
  w->in_use[c]--;
  ptn_engine_unuse(w->engine, c);
}

/* Another stream than the one that gives the chunk back reads it, and nobody orders the two but the engine. */
static ptn_status peek(world *w, uint32_t c) {
  int other = w->stream;
  const twin *t = &w->twins[c * PER_CHUNK];
  PTN_TRY(change_stream(w));
  PTN_TRY(demand(w, c));
  kernel *kernel = new_kernel(w, c);
  kernel->peek = &w->peeks[w->peeks_count];
  kernel->counts[0] = t->count;
  w->expected_peeks[w->peeks_count++] = peek_at(w, t->values, t->count);
  launch(w, other, peek_kernel, kernel);
  unuse(w, c);
  return PTN_OK;
}

static void mix(world *w, uint32_t c) {
  kernel *kernel = new_kernel(w, c);
  for (uint32_t i = 0; i < PER_CHUNK; i++) {
    const twin *t = &w->twins[c * PER_CHUNK + i];
    kernel->counts[i] = t->count;
    kernel->offsets[i] = w->params[c * PER_CHUNK + i].offset_bytes;
    for (int part = 0; part < PARTS; part++) mix_part(w, w->plain_mix, t->values, t->count, part);
  }
  launch(w, w->stream, mix_kernel, kernel);
}

static ptn_status forward(world *w, uint32_t c) {
  PTN_TRY(demand(w, c));
  mix(w, c);
  bool peeked = !w->by_order && w->peeks_count < PEEKS && w->homes[c] != ON_DEVICE; /* there it is the caller's to order */
  if (peeked && draw(w, 6) == 0) PTN_TRY(peek(w, c));
  uint32_t other = !w->by_order && draw(w, 12) == 0 ? (c + SLOTS) % CHUNKS : c; /* at the same moment */
  if (other != c) PTN_TRY(demand(w, other));
  if (other != c) mix(w, other);
  if (other != c) unuse(w, other);
  unuse(w, c);
  return PTN_OK;
}

static void add_to_twin(world *w, twin *t, const void *gradient) {
  if (!t->has_sum) memcpy(t->sum, gradient, t->count * w->element_bytes);
  else if (w->bf16) ptn_accumulate_bf16(t->sum, gradient, t->count);
  else ptn_accumulate(t->sum, gradient, t->count);
  t->has_sum = true;
}

static ptn_status make_gradient(world *w, uint32_t number, ptn_gradient_use use) {
  twin *t = &w->twins[number];
  if (use == PTN_GRADIENT_SPILL_TOTAL) t->has_sum = false;
  uint32_t c = w->params[number].chunk;
  kernel *kernel = new_kernel(w, c);
  kernel->noise = (uint32_t)check_random(&w->seed);
  kernel->counts[0] = t->count;
  kernel->offsets[0] = w->params[number].offset_bytes;
  void *plain = malloc(t->count * w->element_bytes);
  for (int part = 0; part < PARTS; part++) gradient_part(w, w->plain_mix, t->values, plain, t->count, kernel->noise, part);
  add_to_twin(w, t, plain);
  free(plain);
  buffer *buffer = take_buffer(w);
  kernel->gradient = buffer->memory;
  w->owners_out++;
  launch(w, w->stream, gradient_kernel, kernel);
  ptn_status status = PTN_OK;
  if (w->homes[c] != ON_DEVICE) status = ptn_engine_gradient(w->engine, number, buffer->memory, buffer, use);
  if (w->homes[c] == ON_DEVICE || status != PTN_OK) release(buffer);
  return status;
}

/* The gradients of a chunk, in any order, some of them not at all. */
static ptn_status backward(world *w, uint32_t c, ptn_gradient_use use) {
  PTN_TRY(demand(w, c));
  mix(w, c);
  uint32_t first = (uint32_t)draw(w, PER_CHUNK);
  bool total = w->homes[c] != ON_DEVICE && !w->by_order && draw(w, 6) == 0;
  if (use == PTN_GRADIENT_SPILL && total) use = PTN_GRADIENT_SPILL_TOTAL;
  for (uint32_t i = 0; i < PER_CHUNK; i++) {
    uint32_t number = c * PER_CHUNK + (w->by_order ? PER_CHUNK - 1 - i : (first + i) % PER_CHUNK);
    bool unused = !w->by_order && draw(w, 8) == 0;
    if (w->params[number].trained && !unused) PTN_TRY(make_gradient(w, number, use));
    if (!w->by_order && draw(w, 20) == 0) PTN_TRY(change_stream(w));
  }
  unuse(w, c);
  return PTN_OK;
}

static ptn_status one_pass(world *w, ptn_gradient_use use, bool first, bool last) {
  ptn_engine_seek(w->engine, 0);
  ptn_engine_read_ahead(w->engine, w->by_order || draw(w, 4) > 0);
  launch(w, w->stream, reset_kernel, new_kernel(w, CHUNKS));
  for (int i = 0; i < MIX; i++) w->plain_mix[i] = 7;
  for (uint32_t c = 0; c < CHUNKS; c++) PTN_TRY(forward(w, c));
  if (!first) PTN_TRY(ptn_engine_flush(w->engine));
  if (last) PTN_TRY(ptn_engine_set_hyper(w->engine, 0, &w->hyper));
  for (uint32_t c = CHUNKS; c-- > 0;) PTN_TRY(backward(w, c, use));
  return PTN_OK;
}

/* The caller's own updates of persistent chunks, and the commit. */
static ptn_status make_step(world *w, float scale) {
  ptn_memory_update updated[PARAMS];
  size_t n_updated = 0;
  for (uint32_t i = 0; i < PARAMS; i++) {
    twin *t = &w->twins[i];
    uint32_t c = w->params[i].chunk;
    if (!t->has_sum || w->homes[c] != ON_DEVICE) continue;
    ptn_memory_update ours = {.param = i, .grad = t->sum};
    if (w->ground == ON_NOTHING) {
      updated[n_updated++] = ours;
      continue;
    }
    CHECK(ptn_engine_make_step(w->engine, &ours, 1, scale) == PTN_INVALID);
    kernel *kernel = new_kernel(w, c);
    PTN_TRY(ptn_update_prepare(&kernel->update, &w->hyper, t->steps + 1, scale));
    kernel->counts[0] = t->count;
    kernel->values = (char *)(uintptr_t)kernel->params + w->params[i].offset_bytes;
    kernel->sum = t->sum;
    uint64_t offset = w->params[i].offset_bytes * sizeof(float) / w->element_bytes;
    for (uint32_t s = 0; s < STATES; s++)
      kernel->states[s] = (float *)(void *)((char *)ptn_engine_state(w->engine, c, 1 + s) + offset);
    if (w->bf16) kernel->master = (float *)(void *)((char *)ptn_engine_state(w->engine, c, 1 + STATES) + offset);
    launch(w, w->stream, update_kernel, kernel);
    updated[n_updated++] = (ptn_memory_update){.param = i};
  }
  return ptn_engine_make_step(w->engine, updated, n_updated, scale);
}

static void update_twins(world *w, float scale) {
  for (uint32_t i = 0; i < PARAMS; i++) {
    twin *t = &w->twins[i];
    if (!t->has_sum) continue;
    ptn_update update;
    CHECK_OK(ptn_update_prepare(&update, &w->hyper, ++t->steps, scale));
    if (w->bf16) ptn_update_run_bf16(false, &update, t->values, t->master, t->states, t->sum, ptn_span_whole(t->count));
    else ptn_update_run(false, &update, t->values, t->states, t->sum, ptn_span_whole(t->count));
    t->has_sum = false;
  }
}

typedef struct plan {
  int passes;
  bool spill; /* all gradients wait for the end of the step, as clipping has it */
  float scale;
  bool skip; /* the step is not made */
} plan;

/* Gradients of every pass but the last, or of all, are summed up before the update. */
static ptn_status order_step(world *w, const plan *plan) {
  for (int pass = 0; pass < plan->passes; pass++) {
    bool last = pass + 1 == plan->passes;
    PTN_TRY(one_pass(w, last && !plan->spill ? PTN_GRADIENT_UPDATE : PTN_GRADIENT_SPILL, pass == 0, last));
  }
  return PTN_OK;
}

/* Everything the step ordered on the compute streams has been done; kernels are no longer used. */
static void finish_streams(world *w) {
  if (w->ground == OVER_CUDA)
    for (int i = 0; i < 2; i++) w->subject.kind->finish(w->subject.device, w->streams[i]);
  w->kernels_count = 0;
}

static void give_up(world *w) {
  for (uint32_t c = 0; c < CHUNKS; c++)
    while (w->in_use[c]) unuse(w, c);
  ptn_engine_drop(w->engine);
  for (uint32_t i = 0; i < PARAMS; i++) w->twins[i].has_sum = false;
  finish_streams(w);
  w->peeks_count = 0;
}

/* The sums that a norm is taken of. */
static ptn_status check_sums(world *w) {
  for (uint32_t i = 0; i < PARAMS; i += 1 + (uint32_t)draw(w, 5)) {
    const twin *t = &w->twins[i];
    bool found;
    void *sum = malloc(t->count * w->element_bytes);
    ptn_status status = ptn_engine_spilled(w->engine, i, sum, &found);
    bool expected = t->has_sum && w->homes[w->params[i].chunk] != ON_DEVICE;
    bool right = status != PTN_OK || (found == expected && (!found || memcmp(sum, t->sum, t->count * w->element_bytes) == 0));
    free(sum);
    CHECK(right);
    PTN_TRY(status);
  }
  return PTN_OK;
}

static ptn_status end_step(world *w, const plan *plan) {
  PTN_TRY(ptn_engine_flush(w->engine));
  if (plan->spill) PTN_TRY(check_sums(w));
  PTN_TRY(ptn_engine_update_spilled(w->engine, plan->scale));
  ptn_engine_seek(w->engine, (uint32_t)draw(w, 2 * CHUNKS)); /* loads while updates are under way */
  return ptn_engine_wait(w->engine);
}

/* The twins make the step too. With an error it is not made, and can be made again. */
static ptn_status one_step(world *w, const plan *plan) {
  if (w->frozen) fake_freeze();
  ptn_status status = order_step(w, plan);
  if (w->frozen) fake_thaw();
  if (status == PTN_OK && !plan->skip) status = end_step(w, plan);
  if (status == PTN_OK && !plan->skip) status = make_step(w, plan->scale);
  if (status != PTN_OK || plan->skip) {
    ptn_error error;
    ptn_error_save(&error);
    give_up(w);
    return status == PTN_OK ? PTN_OK : ptn_error_restore(&error);
  }
  finish_streams(w);
  update_twins(w, plan->scale);
  return PTN_OK;
}

/* ---- whether all is right ---- */

static bool peeks_are_right(world *w) {
  bool right = memcmp(w->peeks, w->expected_peeks, (size_t)w->peeks_count * sizeof w->peeks[0]) == 0;
  w->peeks_count = 0;
  return right;
}

/* *equal: every array of every parameter is the twin's. */
static ptn_status compare(world *w, bool *equal) {
  *equal = peeks_are_right(w);
  for (uint32_t i = 0; i < PARAMS; i++) {
    const twin *t = &w->twins[i];
    float *copy = malloc(t->count * sizeof(float));
    ptn_status status = PTN_OK;
    uint32_t arrays = w->params[i].trained ? 1 + STATES + w->bf16 : 1;
    for (uint32_t a = 0; a < arrays && status == PTN_OK; a++) {
      status = ptn_engine_transfer(w->engine, i, a, copy, false);
      const void *wanted = a == 0 ? t->values : a <= STATES ? t->states[a - 1] : t->master;
      *equal &= status == PTN_OK && memcmp(copy, wanted, t->count * (a ? sizeof(float) : w->element_bytes)) == 0;
    }
    free(copy);
    *equal &= ptn_engine_steps(w->engine, i) == t->steps;
    PTN_TRY(status);
  }
  return PTN_OK;
}

#endif
