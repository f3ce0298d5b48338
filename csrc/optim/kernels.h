/* The kernels by instruction set: see optim.h for what they do, select.c for how one is chosen. The AVX ones exist in builds
 * for x86-64 alone and must only be called where the CPU has them; those for NEON in builds for 64-bit ARM, where every CPU has it. */
#ifndef PTN_OPTIM_KERNELS_H
#define PTN_OPTIM_KERNELS_H

#include "optim/optim.h"

#if defined(__x86_64__)
#define PTN_HAVE_AVX 1
#else
#define PTN_HAVE_AVX 0
#endif
#if defined(__aarch64__)
#define PTN_HAVE_NEON 1
#else
#define PTN_HAVE_NEON 0
#endif

void ptn_adam_plain(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span);
void ptn_adam_bf16_plain(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[], const ptn_bf16 *grad,
                         ptn_span span);
void ptn_sgd_plain(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span);
void ptn_sgd_bf16_plain(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[], const ptn_bf16 *grad,
                        ptn_span span);

#if PTN_HAVE_AVX
void ptn_adam_avx2(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span);
void ptn_adam_bf16_avx2(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[], const ptn_bf16 *grad,
                        ptn_span span);
void ptn_sgd_avx2(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span);
void ptn_sgd_bf16_avx2(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[], const ptn_bf16 *grad,
                       ptn_span span);
void ptn_adam_avx512(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span);
void ptn_adam_bf16_avx512(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[], const ptn_bf16 *grad,
                          ptn_span span);
void ptn_sgd_avx512(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span);
void ptn_sgd_bf16_avx512(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[], const ptn_bf16 *grad,
                         ptn_span span);
#endif

#if PTN_HAVE_NEON
void ptn_adam_neon(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span);
void ptn_adam_bf16_neon(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[], const ptn_bf16 *grad,
                        ptn_span span);
void ptn_sgd_neon(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span);
void ptn_sgd_bf16_neon(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[], const ptn_bf16 *grad,
                       ptn_span span);
#endif

#endif
