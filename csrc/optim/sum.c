/* Sums of gradients: fp32 additions element by element, so that every variant gives the same bits by itself. A sum of bf16 is one
 * of fp32, rounded. */
#include "optim/kernels.h"

#if PTN_HAVE_AVX
#include <immintrin.h>

__attribute__((target("avx2"))) static size_t accumulate_avx2(float *restrict sum, const float *restrict term, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), _mm256_loadu_ps(term + i)));
  return i;
}

__attribute__((target("avx2"))) static __m256i widened(const ptn_bf16 *from) {
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)from)), 16);
}

__attribute__((target("avx2"))) static size_t accumulate_bf16_avx2(ptn_bf16 *restrict sum, const ptn_bf16 *restrict term,
                                                                   size_t count) {
  const __m256i one = _mm256_set1_epi32(1), half = _mm256_set1_epi32(0x7fff), nan = _mm256_set1_epi32(PTN_BF16_NAN);
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m256 total = _mm256_add_ps(_mm256_castsi256_ps(widened(sum + i)), _mm256_castsi256_ps(widened(term + i)));
    __m256i bits = _mm256_castps_si256(total), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, half)), 16);
    rounded = _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(total, total, _CMP_UNORD_Q)));
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xd8);
    _mm_storeu_si128((__m128i *)(void *)(sum + i), _mm256_castsi256_si128(packed));
  }
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

void ptn_accumulate_bf16(ptn_bf16 *sum, const ptn_bf16 *term, size_t count) {
  size_t done = 0;
#if PTN_HAVE_AVX
  if (__builtin_cpu_supports("avx2")) done = accumulate_bf16_avx2(sum, term, count);
#endif
  for (size_t i = done; i < count; i++) sum[i] = ptn_bf16_round(ptn_bf16_widen(sum[i]) + ptn_bf16_widen(term[i]));
}
