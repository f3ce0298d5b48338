/* The engine over a device: the same training over nothing, the host and the fake GPU, with homes on the device, on the host with and
 * without a shadow, and on disk; equal to the bit to a model in plain memory, in fp32 and bf16, with accumulation, clipping, steps
 * that are not made, values written and homes moved in between. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/optim/?*.c csrc/runtime/?*.c */
/* library: tests/c/fake_cuda.c tests/c/fake_gpu.c tests/c/fake_control.c */
/* threads */
#include "engine_world.h"

static const home mixed[CHUNKS] = {ON_HOST, ON_HOST_LATE, ON_DISK, ON_HOST, ON_DEVICE, ON_HOST, ON_DISK, ON_HOST_LATE};

/* Without a device there is no host. */
static void draw_homes(world *w) {
  for (uint32_t c = 0; c < CHUNKS; c++) w->homes[c] = (home)draw(w, 4);
  for (uint32_t c = 0; c < CHUNKS && w->ground == ON_NOTHING; c++)
    if (w->homes[c] == ON_HOST || w->homes[c] == ON_HOST_LATE) w->homes[c] = ON_DISK;
}

/* As a user does between steps; parts of arrays too. */
static void write_some(world *w) {
  for (uint32_t i = 0; i < PARAMS; i++) {
    twin *t = &w->twins[i];
    uint64_t first = draw(w, t->count), count = draw(w, t->count - first + 1);
    if (draw(w, 4) == 0) {
      char *values = (char *)t->values + first * w->element_bytes;
      fill(w, values, (size_t)count);
      CHECK_OK(ptn_engine_transfer_part(w->engine, i, 0, first, count, values, true));
    }
    if (!w->params[i].trained || draw(w, 8) > 0) continue;
    for (uint64_t k = first; k < first + count; k++) t->states[1][k] = (float)draw(w, 1000) / 1000.0f;
    CHECK_OK(ptn_engine_transfer_part(w->engine, i, 2, first, count, t->states[1] + first, true));
  }
}

static void move_homes(world *w) {
  ptn_engine_drop_slots(w->engine);
  ptn_engine_drop_ring(w->engine);
  draw_homes(w);
  CHECK_OK(place_all(w));
}

/* A chunk gets values where it is used, as a module's own initialisation gives them. */
static void fill_kernel(void *argument, int part) {
  const kernel *kernel = argument;
  const world *w = kernel->world;
  char *params = at(w, kernel->params);
  if (part > 0) return;
  for (int i = 0; i < PER_CHUNK; i++)
    for (size_t k = 0; k < kernel->counts[i]; k++)
      set_value(w, params + kernel->offsets[i], k, (uint32_t)k * 77 + kernel->noise + (uint32_t)i);
}

static void fill_one(world *w) {
  uint32_t c = (uint32_t)draw(w, CHUNKS);
  CHECK_OK(ptn_engine_begin_fill(w->engine, c));
  kernel *kernel = new_kernel(w, c);
  kernel->noise = (uint32_t)draw(w, 1000000);
  for (uint32_t i = 0; i < PER_CHUNK; i++) {
    const twin *t = &w->twins[c * PER_CHUNK + i];
    kernel->counts[i] = t->count;
    kernel->offsets[i] = w->params[c * PER_CHUNK + i].offset_bytes;
    for (size_t k = 0; k < t->count; k++) set_value(w, t->values, k, (uint32_t)k * 77 + kernel->noise + i);
  }
  launch(w, w->stream, fill_kernel, kernel);
  CHECK_OK(ptn_engine_end_fill(w->engine, c));
  finish_streams(w);
}

static void check_all(world *w) {
  bool equal;
  CHECK_OK(compare(w, &equal));
  CHECK(equal);
  CHECK(w->owners_out == 0);
}

static void train(ground ground, bool bf16, uint64_t seed, fake_mode mode, int rounds) {
  static world memory;
  world *w = &memory;
  *w = (world){.ground = ground, .bf16 = bf16, .seed = seed};
  if (ground != ON_NOTHING) CHECK_OK(subject_open(&w->subject, ground == OVER_CUDA, seed, mode));
  if (seed % 3 == 0 || ground == ON_NOTHING) draw_homes(w);
  else memcpy(w->homes, mixed, sizeof mixed);
  if (seed % 2) w->gradient_bytes = 1 << 18;
  CHECK_OK(open_world(w));
  for (int i = 0; ground == OVER_CUDA && seed % 4 == 1 && i < 40; i++) /* the second in use is one of many */
    CHECK_OK(ptn_engine_set_stream(w->engine, fake_stream()));
  if (ground != ON_NOTHING) CHECK_OK(ptn_engine_set_stream(w->engine, w->streams[0]));
  check_all(w);
  for (int round = 0; round < rounds; round++) {
    plan plan = {.passes = 1 + (int)draw(w, 3), .spill = draw(w, 3) == 0, .scale = 1.0f, .skip = draw(w, 5) == 0};
    CHECK_OK(one_step(w, &plan));
    plan = (struct plan){.passes = 1 + (int)draw(w, 2), .spill = true, .scale = 0.25f};
    CHECK_OK(one_step(w, &plan));
    if (draw(w, 2)) check_all(w);
    if (draw(w, 3) == 0) write_some(w);
    if (draw(w, 3) == 0) fill_one(w);
    if (draw(w, 3) == 0) move_homes(w);
  }
  CHECK_OK(one_step(w, &(plan){.passes = 1, .scale = 1.0f}));
  check_all(w);
  CHECK_OK(one_step(w, &(plan){.passes = 2, .scale = 1.0f, .skip = true}));
  check_all(w);
  close_world(w);
  if (ground != ON_NOTHING) subject_close(&w->subject);
}

static void look(world *w, int stream, uint32_t c) {
  const twin *t = &w->twins[c * PER_CHUNK];
  CHECK_OK(ptn_engine_set_stream(w->engine, w->streams[stream]));
  CHECK_OK(demand(w, c));
  kernel *kernel = new_kernel(w, c);
  kernel->peek = &w->peeks[w->peeks_count];
  kernel->counts[0] = t->count;
  w->expected_peeks[w->peeks_count++] = peek_at(w, t->values, t->count);
  launch(w, stream, peek_kernel, kernel);
  unuse(w, c);
}

/* Two streams that nobody orders use a chunk one after the other: what comes to its slot next is behind both. */
static void use_in_turn(uint64_t seed, fake_mode mode) {
  static world memory;
  world *w = &memory;
  *w = (world){.ground = OVER_CUDA, .seed = seed};
  CHECK_OK(subject_open(&w->subject, true, seed, mode));
  for (int c = 0; c < CHUNKS; c++) w->homes[c] = ON_HOST;
  CHECK_OK(open_world(w));
  for (uint32_t c = 0; c + SLOTS < CHUNKS; c++) {
    look(w, 0, c);
    look(w, 1, c);
    look(w, 1, c + SLOTS);
    w->subject.kind->finish(w->subject.device, w->streams[1]);
  }
  finish_streams(w);
  check_all(w);
  close_world(w);
  subject_close(&w->subject);
}

int main(void) {
  for (uint64_t seed = 1; seed <= 4; seed++) train(ON_NOTHING, seed % 2, seed, FAKE_ANY, 4);
  for (uint64_t seed = 1; seed <= 8; seed++) train(OVER_HOST, seed % 2, seed, FAKE_ANY, 4);
  for (uint64_t seed = 1; seed <= 12; seed++) train(OVER_CUDA, seed % 2, seed, (fake_mode)(seed % 3), 3);
  for (uint64_t seed = 1; seed <= 6; seed++) use_in_turn(seed, (fake_mode)(seed % 3));
  fake_reset(0, FAKE_ANY);
  return 0;
}
