/* The update of one element, as plainly as it can be said: the reference of the vector kernels, and what they use for the
 * few elements that fill no vector.
 *
 * `tail` picks the rounding of torch's scalar loop (optim.h says where that runs). Fused products are written as fmaf;
 * everything else must round by itself: these files are compiled with -ffp-contract=off.
 * Always inlined, so that in a function compiled for FMA an fmaf is one instruction.
 */
#ifndef PTN_OPTIM_ELEMENT_H
#define PTN_OPTIM_ELEMENT_H

#include <math.h>

#include "optim/optim.h"

#define PTN_TAIL_UNIT ((size_t)8) /* elements of torch's vectors; what is left of a parameter is its tail */

/* How many elements of the span are not in their parameter's tail: a prefix. */
static inline size_t ptn_body_count(const ptn_update_scalars *s, ptn_span span) {
  if (!s->has_tail) return span.count;
  size_t tail_first = span.total - span.total % PTN_TAIL_UNIT;
  if (tail_first <= span.first) return 0;
  size_t body = tail_first - span.first;
  return body < span.count ? body : span.count;
}

static inline __attribute__((always_inline)) float ptn_larger(float maximum, float value, bool tail) {
  if (!tail && (isnan(maximum) || isnan(value))) return NAN;
  if (tail) return maximum < value ? value : maximum;
  return maximum > value ? maximum : value;
}

static inline __attribute__((always_inline)) float ptn_square_root(const ptn_update_scalars *s, float value) {
  if (!s->roots) return sqrtf(value);
  float root;
  s->roots(1, &value, &root);
  return root;
}

/* largest: NULL without amsgrad. */
static inline __attribute__((always_inline)) void ptn_adam_element(const ptn_update_scalars *s, float *param, float *average,
                                                                   float *square, float *largest, float grad, bool tail) {
  float p = *param, g = grad * s->grad_factor;
  if (s->add_decay) g = fmaf(p, s->weight_decay, g);
  p *= s->param_factor;
  float m = fmaf(tail ? s->lerp_tail : s->lerp_weight, g - *average, s->lerp_from_grad ? g : *average);
  float weighted = s->square_weight * g;
  float v = tail ? fmaf(*square, s->beta2, weighted * g) : fmaf(weighted, g, *square * s->beta2);
  *average = m;
  *square = v;
  if (largest) v = *largest = ptn_larger(*largest, v, tail);
  float denominator = ptn_square_root(s, v) / s->bias2_root + s->eps;
  *param = p - s->step_size * m / denominator;
}

/* buffer: NULL without momentum. */
static inline __attribute__((always_inline)) void ptn_sgd_element(const ptn_update_scalars *s, float *param, float *buffer,
                                                                  float grad, bool tail) {
  float p = *param, g = grad * s->grad_factor;
  if (s->add_decay) g = fmaf(p, s->weight_decay, g);
  if (buffer) {
    float b = g;
    if (!s->first_step && tail) b = fmaf(*buffer, s->momentum, s->grad_weight * g);
    if (!s->first_step && !tail) b = fmaf(s->grad_weight, g, *buffer * s->momentum);
    *buffer = b;
    g = s->nesterov ? fmaf(b, s->momentum, g) : b;
  }
  *param = fmaf(g, -s->lr, p);
}

/* What the master of a bf16 parameter holds before an update: itself where the parameter is its rounding, else what somebody
 * wrote to the parameter. */
static inline __attribute__((always_inline)) float ptn_master_element(float master, ptn_bf16 param) {
  return ptn_bf16_round(master) == param ? master : ptn_bf16_widen(param);
}

/* The elements [begin, end) of the arrays. */
static inline __attribute__((always_inline)) void ptn_adam_elements(const ptn_update_scalars *s, float *param,
                                                                    float *const state[], const float *grad, size_t begin,
                                                                    size_t end, bool tail) {
  for (size_t i = begin; i < end; i++)
    ptn_adam_element(s, param + i, state[0] + i, state[1] + i, s->amsgrad ? state[2] + i : NULL, grad[i], tail);
}

static inline __attribute__((always_inline)) void ptn_sgd_elements(const ptn_update_scalars *s, float *param,
                                                                   float *const state[], const float *grad, size_t begin,
                                                                   size_t end, bool tail) {
  for (size_t i = begin; i < end; i++) ptn_sgd_element(s, param + i, s->has_momentum ? state[0] + i : NULL, grad[i], tail);
}

static inline __attribute__((always_inline)) void ptn_adam_bf16_elements(const ptn_update_scalars *s, ptn_bf16 *param,
                                                                         float *master, float *const state[],
                                                                         const ptn_bf16 *grad, size_t begin, size_t end,
                                                                         bool tail) {
  for (size_t i = begin; i < end; i++) {
    master[i] = ptn_master_element(master[i], param[i]);
    ptn_adam_element(s, master + i, state[0] + i, state[1] + i, s->amsgrad ? state[2] + i : NULL, ptn_bf16_widen(grad[i]), tail);
    param[i] = ptn_bf16_round(master[i]);
  }
}

static inline __attribute__((always_inline)) void ptn_sgd_bf16_elements(const ptn_update_scalars *s, ptn_bf16 *param,
                                                                        float *master, float *const state[], const ptn_bf16 *grad,
                                                                        size_t begin, size_t end, bool tail) {
  for (size_t i = begin; i < end; i++) {
    master[i] = ptn_master_element(master[i], param[i]);
    ptn_sgd_element(s, master + i, s->has_momentum ? state[0] + i : NULL, ptn_bf16_widen(grad[i]), tail);
    param[i] = ptn_bf16_round(master[i]);
  }
}

#endif
