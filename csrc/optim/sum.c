/* Sums of gradients: fp32 additions element by element, so that every variant gives the same bits by itself. */
#include "optim/kernels.h"

#if PTN_HAVE_AVX
#include <immintrin.h>

__attribute__((target("avx2"))) static size_t accumulate_avx2(float *restrict sum, const float *restrict term, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), _mm256_loadu_ps(term + i)));
  return i;
}
#endif

void ptn_accumulate(float *sum, const float *term, size_t count) {
  size_t done = 0;
#if PTN_HAVE_AVX
  if (__builtin_cpu_supports("avx2")) done = accumulate_avx2(sum, term, count);
#endif
  for (size_t i = done; i < count; i++) sum[i] += term[i];
}
