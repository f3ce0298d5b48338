/* The kernels for AVX-512 (foundation instructions alone): see avx2.c. torch has no such kernels; the bits are the same since
 * every element is computed by the same operations, whatever the width of the vector it lies in. */
#include "optim/kernels.h"

#if PTN_HAVE_AVX
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,fma")))
#define OPERATION static inline __attribute__((always_inline)) TARGET
#define LANES ((size_t)16)
#define ADAM_KERNEL ptn_adam_avx512
#define SGD_KERNEL ptn_sgd_avx512
#define ADAM_BF16_KERNEL ptn_adam_bf16_avx512
#define SGD_BF16_KERNEL ptn_sgd_bf16_avx512

typedef __m512 vec;
OPERATION vec vec_load(const float *from) { return _mm512_loadu_ps(from); }
OPERATION void vec_store(float *to, vec a) { _mm512_storeu_ps(to, a); }
OPERATION vec vec_all(float a) { return _mm512_set1_ps(a); }
OPERATION vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
OPERATION vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
OPERATION vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
OPERATION vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
OPERATION vec vec_sqrt(vec a) { return _mm512_sqrt_ps(a); }
OPERATION vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
/* A NaN on either side wins: a + b is then one. */
OPERATION vec vec_maximum(vec a, vec b) {
  return _mm512_mask_add_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q), a, b);
}

OPERATION vec vec_widen(const ptn_bf16 *from) {
  __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
/* Rounded to bf16, as fp32 whose lower half is 0. */
OPERATION vec vec_round(vec a) {
  const __m512i bits = _mm512_castps_si512(a), upper = _mm512_set1_epi32((int)0xffff0000u);
  __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_and_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), upper);
  const __m512i nan = _mm512_set1_epi32(PTN_BF16_NAN << 16);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), nan));
}
OPERATION void vec_store_upper(ptn_bf16 *to, vec a) {
  __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
  _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtepi32_epi16(upper));
}
/* a where the bits of b and c are the same, else c. */
OPERATION vec vec_where_same(vec a, vec b, vec c) {
  __mmask16 same = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(b), _mm512_castps_si512(c));
  return _mm512_mask_mov_ps(c, same, a);
}

#include "optim/vector_kernels.h"
#endif
