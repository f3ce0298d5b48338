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

#include "optim/vector_kernels.h"
#endif
