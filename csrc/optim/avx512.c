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

#include "optim/vector_kernels.h"
#endif
