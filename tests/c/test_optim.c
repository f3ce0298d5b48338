/* The update kernels among themselves: every variant, every split and every number of threads gives the same bits, nothing
 * outside the arrays is touched, and no product is fused that the contract does not fuse. (Equality with torch itself is
 * tests/test_optim.py.) */
/* sources: csrc/optim/prepare.c csrc/optim/plain.c csrc/optim/avx2.c csrc/optim/avx512.c csrc/optim/neon.c csrc/optim/select.c csrc/optim/sum.c csrc/base/openmp.c */
/* threads */
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "check.h"
#include "fake_openmp.h"
#include "optim/optim.h"

enum { ARRAYS = 2 + PTN_STATE_MAX }; /* param, grad, state */

/* Arrays of a parameter, each its own allocation, begun `shift` floats late so that vectors are not aligned. */
typedef struct arrays {
  float *memory[ARRAYS], *param, *grad, *state[PTN_STATE_MAX];
  size_t count;
} arrays;

static arrays arrays_create(size_t count, size_t shift) {
  arrays a = {.count = count};
  for (int i = 0; i < ARRAYS; i++) CHECK((a.memory[i] = calloc(count + shift + 1, sizeof(float))) != NULL);
  a.param = a.memory[0] + shift;
  a.grad = a.memory[1] + shift;
  for (int i = 0; i < PTN_STATE_MAX; i++) a.state[i] = a.memory[2 + i] + shift;
  return a;
}

static void arrays_destroy(arrays *a) {
  for (int i = 0; i < ARRAYS; i++) free(a->memory[i]);
}

static bool runs(ptn_simd simd) { return ptn_update_kernel_for(PTN_SGD, simd) && ptn_bf16_kernel_for(PTN_SGD, simd); }

static float random_float(uint64_t *seed) {
  int exponent = (int)(check_random(seed) % 24) - 16;
  return ldexpf((float)((int64_t)(check_random(seed) % (1 << 25)) - (1 << 24)), exponent - 24);
}

static void fill(arrays *a, uint64_t seed) {
  for (size_t i = 0; i < a->count; i++) {
    a->param[i] = random_float(&seed);
    a->grad[i] = random_float(&seed);
    a->state[0][i] = random_float(&seed);
    for (int k = 1; k < PTN_STATE_MAX; k++) a->state[k][i] = fabsf(random_float(&seed));
  }
}

static bool same(const arrays *a, const arrays *b) {
  size_t bytes = a->count * sizeof(float);
  bool equal = memcmp(a->param, b->param, bytes) == 0 && memcmp(a->grad, b->grad, bytes) == 0;
  for (int i = 0; i < PTN_STATE_MAX; i++) equal = equal && memcmp(a->state[i], b->state[i], bytes) == 0;
  return equal;
}

static ptn_hyper random_hyper(uint64_t *seed) {
  ptn_hyper hyper = {.kind = (ptn_optimizer_kind)(check_random(seed) % 3), .lr = 0.0123, .eps = 1e-8};
  uint64_t bits = check_random(seed);
  hyper.weight_decay = bits & 1 ? 0.0321 : 0;
  hyper.maximize = bits & 2;
  hyper.amsgrad = bits & 4;
  hyper.beta1 = bits & 8 ? 0.9 : 0.25;
  hyper.beta2 = bits & 16 ? 0.999 : 0;
  hyper.momentum = bits & 96 ? 0.87 : 0;
  hyper.dampening = bits & 128 ? 0.1 : 0;
  hyper.nesterov = bits & 256;
  hyper.fused = bits & 512;
  hyper.lr_is_float = bits & 1024;
  return hyper;
}

/* Of a library that does not round them correctly. */
static void other_roots(size_t count, const float *in, float *out) {
  for (size_t i = 0; i < count; i++) out[i] = nextafterf(sqrtf(in[i]), 0);
}

static ptn_update random_update(uint64_t *seed) {
  ptn_hyper hyper = random_hyper(seed);
  ptn_update update;
  CHECK_OK(ptn_update_prepare(&update, &hyper, 1 + check_random(seed) % 3, check_random(seed) % 2 ? 1 : 0.37f));
  return update;
}

/* Runs the kernel over consecutive spans of random lengths. */
static void run_in_pieces(ptn_update_kernel kernel, const ptn_update *update, arrays *a, uint64_t *seed) {
  for (size_t first = 0; first < a->count;) {
    size_t left = a->count - first, count = 1 + check_random(seed) % (check_random(seed) % 2 ? left : left < 20 ? left : 20);
    float *state[PTN_STATE_MAX];
    for (int i = 0; i < PTN_STATE_MAX; i++) state[i] = a->state[i] + first;
    kernel(update, a->param + first, state, a->grad + first, (ptn_span){first, count, a->count});
    first += count;
  }
}

static void variants_and_splits_agree(void) {
  uint64_t seed = 1;
  for (int round = 0; round < 600; round++) {
    ptn_update update = random_update(&seed);
    size_t count = 1 + check_random(&seed) % 200, shift = check_random(&seed) % 16;
    arrays reference = arrays_create(count, 0);
    fill(&reference, (uint64_t)round);
    ptn_update_kernel_for(update.hyper.kind, PTN_SIMD_PLAIN)(&update, reference.param, reference.state, reference.grad,
                                                             ptn_span_whole(count));
    for (int simd = PTN_SIMD_PLAIN; simd < PTN_SIMD_COUNT; simd++) {
      ptn_update_kernel kernel = ptn_update_kernel_for(update.hyper.kind, (ptn_simd)simd);
      CHECK(kernel != NULL || simd != (int)ptn_simd_best());
      if (!kernel) continue;
      for (int split = 0; split < 2; split++) {
        arrays a = arrays_create(count, shift);
        fill(&a, (uint64_t)round);
        if (split) run_in_pieces(kernel, &update, &a, &seed);
        else kernel(&update, a.param, a.state, a.grad, ptn_span_whole(count));
        CHECK(same(&a, &reference));
        arrays_destroy(&a);
      }
    }
    arrays_destroy(&reference);
  }
}

/* Elements before and after the span keep their values, and an empty span changes nothing. */
static void nothing_outside_is_written(void) {
  uint64_t seed = 2;
  for (int round = 0; round < 100; round++) {
    ptn_update update = random_update(&seed);
    ptn_update_kernel kernel = ptn_update_kernel_for(update.hyper.kind, ptn_simd_best());
    arrays a = arrays_create(120, 0), before = arrays_create(120, 0);
    fill(&a, (uint64_t)round);
    fill(&before, (uint64_t)round);
    size_t first = check_random(&seed) % 40, count = check_random(&seed) % 80;
    float *state[PTN_STATE_MAX];
    for (int i = 0; i < PTN_STATE_MAX; i++) state[i] = a.state[i] + first;
    kernel(&update, a.param + first, state, a.grad + first, (ptn_span){first, count, 120});
    for (size_t i = 0; i < 120; i++) {
      if (i >= first && i < first + count) continue;
      CHECK(a.param[i] == before.param[i]);
      for (int k = 0; k < PTN_STATE_MAX; k++) CHECK(a.state[k][i] == before.state[k][i]);
    }
    CHECK(memcmp(a.grad, before.grad, 120 * sizeof(float)) == 0);
    arrays_destroy(&a);
    arrays_destroy(&before);
  }
}

/* The contract's formulas once more, each intermediate result forced into a float by volatile. */
static void only_the_named_products_are_fused(bool fused) {
  ptn_hyper hyper = {
      .kind = PTN_ADAMW, .fused = fused, .lr = 0.0123, .weight_decay = 0.0321, .beta1 = 0.9, .beta2 = 0.987, .eps = 1e-7};
  ptn_update update;
  CHECK_OK(ptn_update_prepare(&update, &hyper, 3, 0.37f));
  const size_t count = 16 * 40 + 7;
  const float w1 = (float)(1 - hyper.beta1), w2 = (float)(1 - hyper.beta2), b2 = (float)hyper.beta2, eps = (float)hyper.eps;
  const float step_size = (float)(hyper.lr / (1 - pow(hyper.beta1, 3))), root = (float)sqrt(1 - pow(hyper.beta2, 3));
  volatile double decay = hyper.lr * hyper.weight_decay;
  const float factor = (float)(fused ? fma(-hyper.lr, hyper.weight_decay, 1) : 1 - decay);
  for (int simd = PTN_SIMD_PLAIN; simd < PTN_SIMD_COUNT; simd++) {
    if (!runs((ptn_simd)simd)) continue;
    arrays a = arrays_create(count, 0), before = arrays_create(count, 0);
    fill(&a, 9);
    fill(&before, 9);
    ptn_update_kernel_for(PTN_ADAMW, (ptn_simd)simd)(&update, a.param, a.state, a.grad, ptn_span_whole(count));
    for (size_t i = 0; i < count; i++) {
      volatile float g = before.grad[i] * 0.37f, p = before.param[i] * factor;
      volatile float difference = g - before.state[0][i], weighted = w2 * g;
      volatile float decayed = before.state[1][i] * b2, square = weighted * g;
      float m = fmaf(w1, difference, before.state[0][i]);
      float v = i < count - 7 || !fused ? fmaf(weighted, g, decayed) : fmaf(before.state[1][i], b2, square);
      float square_root = fused ? sqrtf(v) : nextafterf(sqrtf(v), 0);
      volatile float scaled = square_root / root, move = step_size * m, denominator = scaled + eps;
      volatile float change = move / denominator;
      CHECK(a.state[0][i] == m && a.state[1][i] == v && a.param[i] == p - change);
    }
    arrays_destroy(&a);
    arrays_destroy(&before);
  }
}

/* Numbers that can be followed by hand. */
static void sgd_by_hand(void) {
  ptn_hyper hyper = {.kind = PTN_SGD, .lr = 0.5, .momentum = 0.5, .weight_decay = 0.25};
  float param[3] = {4, 8, -4}, buffer[3] = {99, 99, 99}, *state[1] = {buffer};
  const float grad[3] = {1, 2, 3};
  ptn_update update;
  CHECK_OK(ptn_update_prepare(&update, &hyper, 1, 2));
  ptn_update_run(false, &update, param, state, grad, ptn_span_whole(3));
  CHECK(buffer[0] == 3 && buffer[1] == 6 && buffer[2] == 5); /* the first step ignores what the buffer held */
  CHECK(param[0] == 2.5f && param[1] == 5 && param[2] == -6.5f);
  hyper.maximize = true;
  CHECK_OK(ptn_update_prepare(&update, &hyper, 2, 1));
  ptn_update_run(false, &update, param, state, grad, ptn_span_whole(3));
  CHECK(buffer[0] == 1.125f && buffer[1] == 2.25f && buffer[2] == -2.125f);
  CHECK(param[0] == 1.9375f && param[1] == 3.875f && param[2] == -5.4375f);
}

/* ---- a team, as an OpenMP runtime gives it ---- */

static void a_team_gives_the_same_bits(void) {
  uint64_t seed = 3;
  for (fake_threads_given = 1; fake_threads_given <= FAKE_MOST_THREADS; fake_threads_given++) {
    fake_regions_count = 0;
    for (int round = 0; round < 8; round++) {
      ptn_update update = random_update(&seed);
      size_t count = round == 0 ? 5 : 100000 + check_random(&seed) % 5000;
      arrays a = arrays_create(count, 1), b = arrays_create(count, 1);
      fill(&a, (uint64_t)round);
      fill(&b, (uint64_t)round);
      ptn_update_run(true, &update, a.param, a.state, a.grad, ptn_span_whole(count));
      ptn_update_run(false, &update, b.param, b.state, b.grad, ptn_span_whole(count));
      CHECK(same(&a, &b));
      arrays_destroy(&a);
      arrays_destroy(&b);
    }
    CHECK(fake_regions_count == (fake_threads_given > 1 ? 7 : 0)); /* the small one is not shared */
  }
}

static void settings_are_checked(void) {
  ptn_update update;
  ptn_hyper hyper = {.kind = PTN_SGD, .lr = 0.1};
  CHECK(ptn_state_count(&hyper) == 0);
  CHECK(ptn_update_prepare(&update, &hyper, 0, 1) == PTN_INVALID);
  hyper.kind = (ptn_optimizer_kind)7;
  CHECK(ptn_update_prepare(&update, &hyper, 1, 1) == PTN_INVALID);
  hyper = (ptn_hyper){.kind = PTN_ADAM, .beta1 = 0.9, .beta2 = 0.99};
  CHECK(ptn_state_count(&hyper) == 2);
  hyper.amsgrad = true;
  CHECK(ptn_state_count(&hyper) == 3);
  CHECK_OK(ptn_update_prepare(&update, &hyper, ((uint64_t)1 << 24) + 5, 1));
  CHECK(update.step == 16777216.0);
  CHECK(strcmp(ptn_simd_name(PTN_SIMD_PLAIN), "plain") == 0 && strcmp(ptn_simd_name(PTN_SIMD_AVX512), "avx512") == 0);
  CHECK(strcmp(ptn_simd_name(PTN_SIMD_NEON), "neon") == 0 && strcmp(ptn_simd_name(PTN_SIMD_COUNT), "unknown") == 0);
#if defined(__aarch64__)
  CHECK(ptn_simd_best() == PTN_SIMD_NEON);
#else
  CHECK(!runs(PTN_SIMD_NEON));
#endif
}

static void accumulation_is_addition(void) {
  uint64_t seed = 4;
  for (size_t count = 0; count < 70; count++) {
    arrays a = arrays_create(count, count % 5), before = arrays_create(count, 0);
    fill(&a, seed);
    fill(&before, seed++);
    ptn_accumulate(a.param, a.grad, count);
    for (size_t i = 0; i < count; i++) CHECK(a.param[i] == before.param[i] + before.grad[i]);
    arrays_destroy(&a);
    arrays_destroy(&before);
  }
}

/* A bf16 parameter with its master, and what the fp32 kernel makes of the same numbers. */
typedef struct bf16_twin {
  arrays wide; /* param is the master, grad the gradient widened */
  ptn_bf16 *memory, *param, *grad;
} bf16_twin;

static ptn_bf16 random_bf16(uint64_t *seed) {
  static const ptn_bf16 special[] = {0, 0x8000, 1, 0x8001, 0x7f, 0x80, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0xffc1, 0x7f81};
  uint64_t draw = check_random(seed);
  if (draw % 8 == 0) return special[draw / 8 % (sizeof special / sizeof *special)];
  return ptn_bf16_round(random_float(seed));
}

static bf16_twin bf16_twin_create(size_t count, size_t shift, uint64_t seed) {
  bf16_twin t = {.wide = arrays_create(count, shift)};
  CHECK((t.memory = calloc(2 * (count + shift) + 2, sizeof *t.memory)) != NULL);
  t.param = t.memory + shift;
  t.grad = t.param + count + 1;
  fill(&t.wide, seed);
  for (size_t i = 0; i < count; i++) {
    bool written = check_random(&seed) % 4 == 0; /* the parameter is not its master rounded */
    t.param[i] = written ? random_bf16(&seed) : ptn_bf16_round(t.wide.param[i]);
    t.grad[i] = random_bf16(&seed);
    t.wide.grad[i] = ptn_bf16_widen(t.grad[i]);
  }
  return t;
}

static void bf16_twin_destroy(bf16_twin *t) {
  arrays_destroy(&t->wide);
  free(t->memory);
}

static bool same_float(float a, float b) { return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b)); }

static void run_bf16_in_pieces(ptn_bf16_kernel kernel, const ptn_update *update, bf16_twin *t, uint64_t *seed) {
  for (size_t first = 0; first < t->wide.count;) {
    size_t left = t->wide.count - first, count = 1 + check_random(seed) % (check_random(seed) % 2 ? left : left < 20 ? left : 20);
    float *state[PTN_STATE_MAX];
    for (int i = 0; i < PTN_STATE_MAX; i++) state[i] = t->wide.state[i] + first;
    kernel(update, t->param + first, t->wide.param + first, state, t->grad + first, (ptn_span){first, count, t->wide.count});
    first += count;
  }
}

static void bf16_is_fp32_between_widening_and_rounding(void) {
  uint64_t seed = 5;
  for (int round = 0; round < 400; round++) {
    ptn_update update = random_update(&seed);
    size_t count = 1 + check_random(&seed) % 200;
    bf16_twin plain = bf16_twin_create(count, 0, (uint64_t)round);
    for (size_t i = 0; i < count; i++)
      if (ptn_bf16_round(plain.wide.param[i]) != plain.param[i]) plain.wide.param[i] = ptn_bf16_widen(plain.param[i]);
    ptn_update_kernel_for(update.hyper.kind, PTN_SIMD_PLAIN)(&update, plain.wide.param, plain.wide.state, plain.wide.grad,
                                                             ptn_span_whole(count));
    for (int simd = PTN_SIMD_PLAIN; simd < PTN_SIMD_COUNT; simd++) {
      if (!runs((ptn_simd)simd)) continue;
      bf16_twin t = bf16_twin_create(count, check_random(&seed) % 16, (uint64_t)round);
      run_bf16_in_pieces(ptn_bf16_kernel_for(update.hyper.kind, (ptn_simd)simd), &update, &t, &seed);
      for (size_t i = 0; i < count; i++) {
        CHECK(same_float(t.wide.param[i], plain.wide.param[i]));
        CHECK(t.param[i] == ptn_bf16_round(plain.wide.param[i]));
        CHECK(t.grad[i] == plain.grad[i]);
        for (int k = 0; k < PTN_STATE_MAX; k++) CHECK(same_float(t.wide.state[k][i], plain.wide.state[k][i]));
      }
      CHECK(t.param[count] == 0); /* between the arrays */
      bf16_twin_destroy(&t);
    }
    bf16_twin_destroy(&plain);
  }
}

/* Of every upper half, the lower halves about which rounding decides. The update is none (SGD with a rate of 0), so the parameter
 * is the master rounded. */
static void every_rounding_is_right(void) {
  static const uint32_t lower[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
  enum { LOWER = sizeof lower / sizeof *lower, COUNT = 1 << 16 };
  ptn_hyper hyper = {.kind = PTN_SGD};
  ptn_update update;
  CHECK_OK(ptn_update_prepare(&update, &hyper, 1, 1));
  ptn_bf16 *param = malloc(COUNT * sizeof *param), *grad = calloc(COUNT, sizeof *grad);
  float *master = malloc(COUNT * sizeof *master);
  for (int simd = PTN_SIMD_PLAIN; simd < PTN_SIMD_COUNT; simd++)
    for (int k = 0; k < LOWER && runs((ptn_simd)simd); k++) {
      for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t bits = i << 16 | lower[k];
        memcpy(&master[i], &bits, sizeof bits);
        param[i] = ptn_bf16_round(master[i]);
      }
      ptn_bf16_kernel_for(PTN_SGD, (ptn_simd)simd)(&update, param, master, NULL, grad, ptn_span_whole(COUNT));
      for (uint32_t i = 0; i < COUNT; i++) {
        bool nan = (i & 0x7fff) > 0x7f80 || ((i & 0x7fff) == 0x7f80 && lower[k] > 0);
        bool up = lower[k] > 0x8000 || (lower[k] == 0x8000 && i % 2 == 1);
        if (nan) CHECK(isnan(ptn_bf16_widen(param[i])) && isnan(master[i]));
        else if (i != 0x8000) CHECK(param[i] == i + up); /* -0 + 0 may be 0 */
      }
    }
  free(param);
  free(grad);
  free(master);
}

static void bf16_sums_are_rounded(void) {
  uint64_t seed = 6;
  for (size_t count = 0; count < 70; count++) {
    ptn_bf16 sum[70], before[70], term[70] = {0};
    for (size_t i = 0; i < count; i++) {
      before[i] = sum[i] = random_bf16(&seed);
      term[i] = random_bf16(&seed);
    }
    ptn_accumulate_bf16(sum, term, count);
    for (size_t i = 0; i < count; i++) CHECK(sum[i] == ptn_bf16_round(ptn_bf16_widen(before[i]) + ptn_bf16_widen(term[i])));
  }
}

static void a_team_gives_the_same_bf16(void) {
  uint64_t seed = 8;
  fake_threads_given = 2;
  for (int round = 0; round < 4; round++) {
    ptn_update update = random_update(&seed);
    size_t count = 100000 + check_random(&seed) % 5000;
    bf16_twin a = bf16_twin_create(count, 1, (uint64_t)round), b = bf16_twin_create(count, 1, (uint64_t)round);
    ptn_update_run_bf16(true, &update, a.param, a.wide.param, a.wide.state, a.grad, ptn_span_whole(count));
    ptn_update_run_bf16(false, &update, b.param, b.wide.param, b.wide.state, b.grad, ptn_span_whole(count));
    CHECK(memcmp(a.param, b.param, count * sizeof *a.param) == 0 && same(&a.wide, &b.wide));
    ptn_update_run_bf16(false, &update, NULL, NULL, NULL, NULL, ptn_span_whole(0));
    bf16_twin_destroy(&a);
    bf16_twin_destroy(&b);
  }
}

int main(void) {
  ptn_update_use_square_roots(other_roots);
  settings_are_checked();
  sgd_by_hand();
  only_the_named_products_are_fused(true);
  only_the_named_products_are_fused(false);
  variants_and_splits_agree();
  nothing_outside_is_written();
  a_team_gives_the_same_bits();
  accumulation_is_addition();
  bf16_is_fp32_between_widening_and_rounding();
  every_rounding_is_right();
  bf16_sums_are_rounded();
  a_team_gives_the_same_bf16();
  return 0;
}
