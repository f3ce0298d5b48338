/* Which kernel this CPU runs, and how an update is split among threads. */
#include <assert.h>

#include "base/bytes.h"
#include "base/openmp.h"
#include "optim/kernels.h"

/* Below this another thread costs more to wake than it saves. */
#define SPLIT_LEAST_COUNT ((size_t)1 << 15)
/* Threads meet at multiples of 4 KiB in every array, so that no two write one page. */
#define SPLIT_GRAIN_COUNT ((size_t)1024)

static bool cpu_runs(ptn_simd simd) {
  if (simd == PTN_SIMD_PLAIN) return true;
#if PTN_HAVE_AVX
  /* Both questions include whether the operating system saves the registers. */
  if (simd == PTN_SIMD_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (simd == PTN_SIMD_AVX512) return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("fma");
#endif
#if PTN_HAVE_NEON
  if (simd == PTN_SIMD_NEON) return true;
#endif
  return false;
}

ptn_simd ptn_simd_best(void) {
  static const ptn_simd by_speed[] = {PTN_SIMD_AVX512, PTN_SIMD_AVX2, PTN_SIMD_NEON};
  for (size_t i = 0; i < sizeof by_speed / sizeof by_speed[0]; i++)
    if (cpu_runs(by_speed[i])) return by_speed[i];
  return PTN_SIMD_PLAIN;
}

/* What there is for one instruction set; none where this build lacks it. Adam's kernels are AdamW's too. */
typedef struct kernels {
  const char *name;
  ptn_update_kernel adam, sgd;
  ptn_bf16_kernel adam_bf16, sgd_bf16;
} kernels;

static const kernels table[] = {
    [PTN_SIMD_PLAIN] = {"plain", ptn_adam_plain, ptn_sgd_plain, ptn_adam_bf16_plain, ptn_sgd_bf16_plain},
#if PTN_HAVE_AVX
    [PTN_SIMD_AVX2] = {"avx2", ptn_adam_avx2, ptn_sgd_avx2, ptn_adam_bf16_avx2, ptn_sgd_bf16_avx2},
    [PTN_SIMD_AVX512] = {"avx512", ptn_adam_avx512, ptn_sgd_avx512, ptn_adam_bf16_avx512, ptn_sgd_bf16_avx512},
#else
    [PTN_SIMD_AVX2] = {.name = "avx2"},
    [PTN_SIMD_AVX512] = {.name = "avx512"},
#endif
#if PTN_HAVE_NEON
    [PTN_SIMD_NEON] = {"neon", ptn_adam_neon, ptn_sgd_neon, ptn_adam_bf16_neon, ptn_sgd_bf16_neon},
#else
    [PTN_SIMD_NEON] = {.name = "neon"},
#endif
};

const char *ptn_simd_name(ptn_simd simd) { return (size_t)simd < sizeof table / sizeof table[0] ? table[simd].name : "unknown"; }

ptn_update_kernel ptn_update_kernel_for(ptn_optimizer_kind kind, ptn_simd simd) {
  if (!cpu_runs(simd)) return NULL;
  return kind == PTN_SGD ? table[simd].sgd : table[simd].adam;
}

ptn_bf16_kernel ptn_bf16_kernel_for(ptn_optimizer_kind kind, ptn_simd simd) {
  if (!cpu_runs(simd)) return NULL;
  return kind == PTN_SGD ? table[simd].sgd_bf16 : table[simd].adam_bf16;
}

/* bf16: the parameter that param is the master of, and the gradient; NULL where all is fp32. */
typedef struct split {
  const ptn_update *update;
  float *param;
  float *const *state;
  const float *grad;
  ptn_bf16 *bf16_param;
  const ptn_bf16 *bf16_grad;
  ptn_span span;
} split;

/* begin and end in SPLIT_GRAIN_COUNT elements. */
static void run_range(void *context, size_t begin, size_t end) {
  const split *s = context;
  begin *= SPLIT_GRAIN_COUNT;
  end = (size_t)ptn_min_u64(end * SPLIT_GRAIN_COUNT, s->span.count);
  float *state[PTN_STATE_MAX] = {NULL};
  int state_count = ptn_state_count(&s->update->hyper);
  for (int i = 0; i < state_count; i++) state[i] = s->state[i] + begin;
  ptn_span span = {s->span.first + begin, end - begin, s->span.total};
  ptn_optimizer_kind kind = s->update->hyper.kind;
  ptn_simd simd = ptn_simd_best();
  if (s->bf16_param)
    ptn_bf16_kernel_for(kind, simd)(s->update, s->bf16_param + begin, s->param + begin, state, s->bf16_grad + begin, span);
  else ptn_update_kernel_for(kind, simd)(s->update, s->param + begin, state, s->grad + begin, span);
}

static void run_all(bool shared, split *all) {
  size_t grains = (all->span.count + SPLIT_GRAIN_COUNT - 1) / SPLIT_GRAIN_COUNT;
  if (!shared || all->span.count < SPLIT_LEAST_COUNT) run_range(all, 0, grains);
  else ptn_openmp_run(grains, 1, run_range, all);
}

void ptn_update_run(bool shared, const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span) {
  assert(span.first <= span.total && span.count <= span.total - span.first);
  split all = {.update = update, .param = param, .state = state, .grad = grad, .span = span};
  run_all(shared, &all);
}

void ptn_update_run_bf16(bool shared, const ptn_update *update, ptn_bf16 *param, float *master, float *const state[],
                         const ptn_bf16 *grad, ptn_span span) {
  assert(span.first <= span.total && span.count <= span.total - span.first);
  if (span.count == 0) return;
  split all = {.update = update, .param = master, .state = state, .bf16_param = param, .bf16_grad = grad, .span = span};
  run_all(shared, &all);
}
