/* The kernels for NEON, which every 64-bit ARM CPU has: see avx2.c. A vector is two registers, so that it has the 8 elements
 * that vector_kernels.h wants. */
#include "optim/kernels.h"

#if PTN_HAVE_NEON
#include <arm_neon.h>

#define TARGET
#define OPERATION static inline __attribute__((always_inline)) TARGET
#define LANES ((size_t)8)
#define ADAM_KERNEL ptn_adam_neon
#define SGD_KERNEL ptn_sgd_neon
#define ADAM_BF16_KERNEL ptn_adam_bf16_neon
#define SGD_BF16_KERNEL ptn_sgd_bf16_neon

typedef float32x4x2_t vec;

OPERATION vec vec_load(const float *from) { return (vec){{vld1q_f32(from), vld1q_f32(from + 4)}}; }
OPERATION void vec_store(float *to, vec a) { vst1q_f32(to, a.val[0]), vst1q_f32(to + 4, a.val[1]); }
OPERATION vec vec_all(float a) { return (vec){{vdupq_n_f32(a), vdupq_n_f32(a)}}; }
OPERATION vec vec_add(vec a, vec b) { return (vec){{vaddq_f32(a.val[0], b.val[0]), vaddq_f32(a.val[1], b.val[1])}}; }
OPERATION vec vec_sub(vec a, vec b) { return (vec){{vsubq_f32(a.val[0], b.val[0]), vsubq_f32(a.val[1], b.val[1])}}; }
OPERATION vec vec_mul(vec a, vec b) { return (vec){{vmulq_f32(a.val[0], b.val[0]), vmulq_f32(a.val[1], b.val[1])}}; }
OPERATION vec vec_div(vec a, vec b) { return (vec){{vdivq_f32(a.val[0], b.val[0]), vdivq_f32(a.val[1], b.val[1])}}; }
OPERATION vec vec_sqrt(vec a) { return (vec){{vsqrtq_f32(a.val[0]), vsqrtq_f32(a.val[1])}}; }
OPERATION vec vec_fma(vec a, vec b, vec c) {
  return (vec){{vfmaq_f32(c.val[0], a.val[0], b.val[0]), vfmaq_f32(c.val[1], a.val[1], b.val[1])}};
}
/* Of equal ones the second, as on x86; a NaN on either side wins: all bits set is a NaN. */
OPERATION float32x4_t larger(float32x4_t a, float32x4_t b) {
  uint32x4_t ordered = vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b));
  return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(vbslq_f32(vcgtq_f32(a, b), a, b)), vmvnq_u32(ordered)));
}
OPERATION vec vec_maximum(vec a, vec b) { return (vec){{larger(a.val[0], b.val[0]), larger(a.val[1], b.val[1])}}; }

OPERATION vec vec_widen(const ptn_bf16 *from) {
  uint16x8_t halves = vld1q_u16(from);
  return (vec){
      {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16))}};
}
/* Rounded to bf16, as fp32 whose lower half is 0. */
OPERATION float32x4_t rounded(float32x4_t a) {
  uint32x4_t bits = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint32x4_t upper = vandq_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), vdupq_n_u32(0xffff0000u));
  return vreinterpretq_f32_u32(vbslq_u32(vceqq_f32(a, a), upper, vdupq_n_u32((uint32_t)PTN_BF16_NAN << 16)));
}
OPERATION vec vec_round(vec a) { return (vec){{rounded(a.val[0]), rounded(a.val[1])}}; }
OPERATION void vec_store_upper(ptn_bf16 *to, vec a) {
  uint16x4_t low = vshrn_n_u32(vreinterpretq_u32_f32(a.val[0]), 16);
  vst1q_u16(to, vshrn_high_n_u32(low, vreinterpretq_u32_f32(a.val[1]), 16));
}
/* a where the bits of b and c are the same, else c. */
OPERATION float32x4_t where_same(float32x4_t a, float32x4_t b, float32x4_t c) {
  return vbslq_f32(vceqq_u32(vreinterpretq_u32_f32(b), vreinterpretq_u32_f32(c)), a, c);
}
OPERATION vec vec_where_same(vec a, vec b, vec c) {
  return (vec){{where_same(a.val[0], b.val[0], c.val[0]), where_same(a.val[1], b.val[1], c.val[1])}};
}

#include "optim/vector_kernels.h"
#endif
