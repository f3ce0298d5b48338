/* A training step replayed: the requests of a transformer's forward, backward and update, the same each step. After the first
 * steps almost nothing may be asked of the system or given back, while resident memory stays at the peak of live memory. */
/* sources: csrc/device/?*.c csrc/memory/?*.c */
#include <stdbool.h>
#include <string.h>

#include "base/bytes.h"
#include "check.h"
#include "memory/arena.h"

enum { layer_count = 8, step_count = 8, warm_count = 3, saved_count = 9 };

static const size_t tokens = 512, width = 256, heads = 4, words = 6000;

typedef struct layer {
  float *weights[4], *states[8], *gradients[4];
  float *saved[saved_count];
} layer;

static layer layers[layer_count];

static void *take(size_t count) {
  void *block;
  CHECK_OK(ptn_arena_alloc(ptn_arena_used(), count * sizeof(float), &block));
  memset(block, 1, count * sizeof(float)); /* resident in truth */
  return block;
}

static size_t weight_count(int i) { return (i == 0 ? 3 : i == 1 ? 1 : 4) * width * width; }

static size_t saved_floats(int i) {
  const size_t sizes[saved_count] = {tokens,
                                     tokens * width,
                                     3 * tokens * width,
                                     heads * tokens * tokens,
                                     heads * tokens * tokens,
                                     tokens * width,
                                     4 * tokens * width,
                                     4 * tokens * width,
                                     tokens};
  return sizes[i];
}

static void forward(layer *at) {
  for (int i = 0; i < saved_count; i++) {
    float *passing = take(saved_floats(i)), *scalars = take(7 + (size_t)i);
    at->saved[i] = take(saved_floats(i));
    ptn_arena_free(passing);
    ptn_arena_free(scalars);
  }
}

static void backward(layer *at) {
  float *incoming = take(tokens * width);
  for (int i = saved_count - 1; i >= 0; i--) {
    float *outgoing = take(saved_floats(i));
    if (i % 2 == 1) at->gradients[i / 2] = take(weight_count(i / 2));
    ptn_arena_free(incoming);
    ptn_arena_free(at->saved[i]);
    incoming = outgoing;
  }
  ptn_arena_free(incoming);
}

static void step(bool first) {
  for (int i = 0; i < layer_count; i++) forward(&layers[i]);
  float *logits = take(tokens * words), *softmax = take(tokens * words), *loss = take(1);
  float *slope = take(tokens * words);
  ptn_arena_free(softmax);
  ptn_arena_free(logits);
  for (int i = layer_count - 1; i >= 0; i--) {
    backward(&layers[i]);
    if (i == layer_count - 1) ptn_arena_free(slope);
  }
  ptn_arena_free(loss);
  for (int i = 0; i < layer_count; i++) {
    for (int k = 0; k < 4; k++) {
      if (first) layers[i].states[2 * k] = take(weight_count(k));
      if (first) layers[i].states[2 * k + 1] = take(weight_count(k));
      ptn_arena_free(layers[i].gradients[k]);
    }
  }
}

int main(void) {
  for (int i = 0; i < layer_count; i++)
    for (int k = 0; k < 4; k++) layers[i].weights[k] = take(weight_count(k));
  ptn_arena_stats before, after;
  ptn_arena_get_stats(&before);
  uint64_t warm_live_bytes = 0;
  for (int number = 0; number < step_count; number++) {
    step(number == 0);
    ptn_arena_get_stats(&after);
    ptn_arena_check();
    uint64_t mapped_bytes = after.mapped_bytes - before.mapped_bytes, purged_bytes = after.purged_bytes - before.purged_bytes;
    printf("step %d: %llu KiB mapped in %llu times, %llu KiB purged, %llu KiB resident\n", number,
           (unsigned long long)mapped_bytes >> 10, (unsigned long long)(after.mapped_count - before.mapped_count),
           (unsigned long long)purged_bytes >> 10, (unsigned long long)after.resident_bytes >> 10);
    CHECK(after.resident_bytes <= after.high_water_bytes + after.high_water_bytes / PTN_RESIDENT_PART + after.slack_bytes);
    CHECK(after.slack_bytes < PTN_MIB);
    if (number == 0) warm_live_bytes = after.live_bytes;
    CHECK(after.live_bytes == warm_live_bytes); /* the sequence leaks nothing */
    if (number >= warm_count) {
      CHECK(mapped_bytes <= after.high_water_bytes / 20 && purged_bytes <= after.high_water_bytes / 20);
      CHECK(after.mapped_count - before.mapped_count <= 10);
    }
    before = after;
  }
  return 0;
}
