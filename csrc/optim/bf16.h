/* bf16: the upper half of an fp32 number. Widening is exact; rounding is to the nearest, ties to even, as torch rounds; every
 * NaN becomes the same quiet one, so that all variants of a kernel give the same bits. */
#ifndef PTN_OPTIM_BF16_H
#define PTN_OPTIM_BF16_H

#include <stdint.h>
#include <string.h>

typedef uint16_t ptn_bf16;

#define PTN_BF16_NAN ((ptn_bf16)0x7fc0)

static inline float ptn_bf16_widen(ptn_bf16 value) {
  uint32_t bits = (uint32_t)value << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

static inline ptn_bf16 ptn_bf16_round(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return PTN_BF16_NAN;
  return (ptn_bf16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16); /* past the largest number this is infinity, as it should be */
}

#endif
