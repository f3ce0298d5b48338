/* The kernels for AVX2 with FMA. The instruction set is an attribute of each function, not a flag of the build: one set of
 * compile flags serves every file, and nothing here may be called before select.c has asked the CPU. */
#include "optim/kernels.h"

#if PTN_HAVE_AVX
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))
#define OPERATION static inline __attribute__((always_inline)) TARGET
#define LANES ((size_t)8)
#define ADAM_KERNEL ptn_adam_avx2
#define SGD_KERNEL ptn_sgd_avx2
#define ADAM_BF16_KERNEL ptn_adam_bf16_avx2
#define SGD_BF16_KERNEL ptn_sgd_bf16_avx2

typedef __m256 vec;
OPERATION vec vec_load(const float *from) { return _mm256_loadu_ps(from); }
OPERATION void vec_store(float *to, vec a) { _mm256_storeu_ps(to, a); }
OPERATION vec vec_all(float a) { return _mm256_set1_ps(a); }
OPERATION vec vec_add(vec a, vec b) { return _mm256_add_ps(a, b); }
OPERATION vec vec_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
OPERATION vec vec_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
OPERATION vec vec_div(vec a, vec b) { return _mm256_div_ps(a, b); }
OPERATION vec vec_sqrt(vec a) { return _mm256_sqrt_ps(a); }
OPERATION vec vec_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
/* A NaN on either side wins: all bits set is a NaN. */
OPERATION vec vec_maximum(vec a, vec b) { return _mm256_or_ps(_mm256_max_ps(a, b), _mm256_cmp_ps(a, b, _CMP_UNORD_Q)); }

OPERATION vec vec_widen(const ptn_bf16 *from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)from)), 16));
}
/* Rounded to bf16, as fp32 whose lower half is 0. */
OPERATION vec vec_round(vec a) {
  const __m256i bits = _mm256_castps_si256(a), upper = _mm256_set1_epi32((int)0xffff0000u);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_and_si256(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), upper);
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(PTN_BF16_NAN << 16));
  return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
OPERATION void vec_store_upper(ptn_bf16 *to, vec a) {
  __m256i upper = _mm256_srli_epi32(_mm256_castps_si256(a), 16), packed = _mm256_packus_epi32(upper, upper);
  _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8)));
}
/* a where the bits of b and c are the same, else c. */
OPERATION vec vec_where_same(vec a, vec b, vec c) {
  __m256i same = _mm256_cmpeq_epi32(_mm256_castps_si256(b), _mm256_castps_si256(c));
  return _mm256_blendv_ps(c, a, _mm256_castsi256_ps(same));
}

#include "optim/vector_kernels.h"
#endif
