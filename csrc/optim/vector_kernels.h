/* The vector kernels, written once for every vector width: avx2.c, avx512.c and neon.c include this file after they define
 *
 *   vec           the vector of LANES floats
 *   LANES         its number of elements, a multiple of 8
 *   TARGET        the function attribute of the instruction set
 *   vec_load, vec_store, vec_all, vec_add, vec_sub, vec_mul, vec_div, vec_sqrt, vec_fma (a*b+c), vec_maximum
 *   vec_widen, vec_round, vec_store_upper, vec_where_same   of bf16: load, round, store what was rounded, pick
 *   ADAM_KERNEL, SGD_KERNEL, ADAM_BF16_KERNEL, SGD_BF16_KERNEL   the names of the kernels
 *
 * Operation by operation these are the functions of element.h, which do the elements that fill no vector. What a step
 * decides once (weight decay, amsgrad, momentum) is a constant of each specialised loop, so no loop branches on it.
 * The passes are bound by memory or by the divider, never by the other arithmetic: a multiplication by 1 is cheaper than
 * one more specialisation. The loops for bf16 are the same ones: `rounded` is the bf16 parameter whose master `param` is, and
 * NULL, as a constant, where parameters are fp32.
 */
#include "optim/element.h"
#include "optim/kernels.h"

#define INLINE static inline __attribute__((always_inline)) TARGET

/* Asks for the elements 8 cache lines on: 3 % on arrays in memory, nothing lost in cache. The address may lie behind the
 * array, where it is never read and asking for it has no effect. */
INLINE void ahead(const void *at) { __builtin_prefetch((const void *)((uintptr_t)at + 512)); }

INLINE vec load_grad(const void *grad, size_t i, bool bf16) {
  return bf16 ? vec_widen((const ptn_bf16 *)grad + i) : vec_load((const float *)grad + i);
}

INLINE vec load_param(const float *param, const ptn_bf16 *rounded, size_t i) {
  vec p = vec_load(param + i);
  return rounded ? vec_where_same(p, vec_round(p), vec_widen(rounded + i)) : p;
}

INLINE void store_param(float *param, ptn_bf16 *rounded, size_t i, vec p) {
  vec_store(param + i, p);
  if (rounded) vec_store_upper(rounded + i, vec_round(p));
}

INLINE vec stepped(vec p, vec m, vec root, vec bias2_root, vec eps, vec step_size) {
  vec denominator = vec_add(vec_div(root, bias2_root), eps);
  return vec_sub(p, vec_div(vec_mul(step_size, m), denominator));
}

/* Returns the number of elements done: all whole vectors of the count. apart: without the parameters' step, for which square roots
 * are taken in between. */
INLINE size_t adam_vectors(const ptn_update_scalars *s, float *restrict param, float *restrict average, float *restrict square,
                           float *restrict largest, const void *restrict grad, ptn_bf16 *restrict rounded, size_t count,
                           bool add_decay, bool from_grad, bool apart) {
  const vec grad_factor = vec_all(s->grad_factor), weight_decay = vec_all(s->weight_decay);
  const vec param_factor = vec_all(s->param_factor), lerp_weight = vec_all(s->lerp_weight);
  const vec beta2 = vec_all(s->beta2), square_weight = vec_all(s->square_weight);
  const vec bias2_root = vec_all(s->bias2_root), eps = vec_all(s->eps), step_size = vec_all(s->step_size);
  size_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    ahead(param + i), ahead(average + i), ahead(square + i);
    ahead((const char *)grad + i * (rounded ? sizeof(ptn_bf16) : sizeof(float)));
    vec p = load_param(param, rounded, i), g = vec_mul(load_grad(grad, i, rounded != NULL), grad_factor);
    vec m = vec_load(average + i);
    if (add_decay) g = vec_fma(p, weight_decay, g);
    p = vec_mul(p, param_factor);
    m = vec_fma(lerp_weight, vec_sub(g, m), from_grad ? g : m);
    vec v = vec_fma(vec_mul(square_weight, g), g, vec_mul(vec_load(square + i), beta2));
    vec_store(average + i, m);
    vec_store(square + i, v);
    if (largest) {
      v = vec_maximum(vec_load(largest + i), v);
      vec_store(largest + i, v);
    }
    if (apart) vec_store(param + i, p);
    else store_param(param, rounded, i, stepped(p, m, vec_sqrt(v), bias2_root, eps, step_size));
  }
  return i;
}

INLINE size_t adam_state(const ptn_update_scalars *s, float *param, float *const state[], const void *grad, ptn_bf16 *rounded,
                         size_t count, bool add_decay, bool from_grad, bool apart) {
  float *largest = s->amsgrad ? state[2] : NULL;
  if (largest) return adam_vectors(s, param, state[0], state[1], largest, grad, rounded, count, add_decay, from_grad, apart);
  return adam_vectors(s, param, state[0], state[1], NULL, grad, rounded, count, add_decay, from_grad, apart);
}

INLINE size_t adam_pass(const ptn_update_scalars *s, float *param, float *const state[], const void *grad, ptn_bf16 *rounded,
                        size_t count, bool apart) {
  if (s->add_decay && s->lerp_from_grad) return adam_state(s, param, state, grad, rounded, count, true, true, apart);
  if (s->add_decay) return adam_state(s, param, state, grad, rounded, count, true, false, apart);
  if (s->lerp_from_grad) return adam_state(s, param, state, grad, rounded, count, false, true, apart);
  return adam_state(s, param, state, grad, rounded, count, false, false, apart);
}

/* What a pass apart leaves: the step of parameters, whose count is a multiple of LANES. */
INLINE void adam_steps(const ptn_update_scalars *s, float *restrict param, const float *restrict average,
                       const float *restrict roots, ptn_bf16 *restrict rounded, size_t count) {
  const vec bias2_root = vec_all(s->bias2_root), eps = vec_all(s->eps), step_size = vec_all(s->step_size);
  for (size_t i = 0; i < count; i += LANES) {
    vec p = vec_load(param + i), m = vec_load(average + i);
    store_param(param, rounded, i, stepped(p, m, vec_load(roots + i), bias2_root, eps, step_size));
  }
}

/* Square roots are another's for so many elements at a time, which lie in the nearest cache. */
#define ROOTS_COUNT ((size_t)512)

INLINE size_t adam_apart(const ptn_update_scalars *s, float *param, float *const state[], const void *grad, ptn_bf16 *rounded,
                         size_t body) {
  float roots[ROOTS_COUNT];
  size_t whole = body - body % LANES;
  for (size_t at = 0; at < whole; at += ROOTS_COUNT) {
    size_t count = whole - at < ROOTS_COUNT ? whole - at : ROOTS_COUNT;
    float *const states[] = {state[0] + at, state[1] + at, s->amsgrad ? state[2] + at : NULL};
    const char *grads = (const char *)grad + at * (rounded ? sizeof(ptn_bf16) : sizeof(float));
    adam_pass(s, param + at, states, grads, rounded ? rounded + at : NULL, count, true);
    s->roots(count, states[s->amsgrad ? 2 : 1], roots);
    adam_steps(s, param + at, states[0], roots, rounded ? rounded + at : NULL, count);
  }
  return whole;
}

INLINE size_t adam_all(const ptn_update_scalars *s, float *param, float *const state[], const void *grad, ptn_bf16 *rounded,
                       size_t body) {
  if (s->roots) return adam_apart(s, param, state, grad, rounded, body);
  return adam_pass(s, param, state, grad, rounded, body, false);
}

TARGET void ADAM_KERNEL(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span) {
  const ptn_update_scalars s = update->scalars;
  size_t body = ptn_body_count(&s, span), done = adam_all(&s, param, state, grad, NULL, body);
  ptn_adam_elements(&s, param, state, grad, done, body, false);
  ptn_adam_elements(&s, param, state, grad, body, span.count, true);
}

TARGET void ADAM_BF16_KERNEL(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[], const ptn_bf16 *grad,
                             ptn_span span) {
  const ptn_update_scalars s = update->scalars;
  if (span.count == 0) return; /* a NULL of an empty array would be taken for that of fp32 */
  size_t body = ptn_body_count(&s, span), done = adam_all(&s, master, state, grad, param, body);
  ptn_adam_bf16_elements(&s, param, master, state, grad, done, body, false);
  ptn_adam_bf16_elements(&s, param, master, state, grad, body, span.count, true);
}

INLINE size_t sgd_vectors(const ptn_update_scalars *s, float *restrict param, float *restrict buffer, const void *restrict grad,
                          ptn_bf16 *restrict rounded, size_t body, bool first_step, bool nesterov) {
  const vec grad_factor = vec_all(s->grad_factor), weight_decay = vec_all(s->weight_decay);
  const vec momentum = vec_all(s->momentum), grad_weight = vec_all(s->grad_weight), minus_lr = vec_all(-s->lr);
  const bool add_decay = s->add_decay;
  size_t i = 0;
  for (; i + LANES <= body; i += LANES) {
    vec p = load_param(param, rounded, i), g = vec_mul(load_grad(grad, i, rounded != NULL), grad_factor);
    if (add_decay) g = vec_fma(p, weight_decay, g);
    if (buffer) {
      vec b = first_step ? g : vec_fma(grad_weight, g, vec_mul(vec_load(buffer + i), momentum));
      vec_store(buffer + i, b);
      g = nesterov ? vec_fma(b, momentum, g) : b;
    }
    store_param(param, rounded, i, vec_fma(g, minus_lr, p));
  }
  return i;
}

INLINE size_t sgd_all(const ptn_update_scalars *s, float *param, float *const state[], const void *grad, ptn_bf16 *rounded,
                      size_t body) {
  if (!s->has_momentum) return sgd_vectors(s, param, NULL, grad, rounded, body, false, false);
  if (s->first_step) return sgd_vectors(s, param, state[0], grad, rounded, body, true, s->nesterov);
  return sgd_vectors(s, param, state[0], grad, rounded, body, false, s->nesterov);
}

TARGET void SGD_KERNEL(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span) {
  const ptn_update_scalars s = update->scalars;
  size_t body = ptn_body_count(&s, span), done = sgd_all(&s, param, state, grad, NULL, body);
  ptn_sgd_elements(&s, param, state, grad, done, body, false);
  ptn_sgd_elements(&s, param, state, grad, body, span.count, true);
}

TARGET void SGD_BF16_KERNEL(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[], const ptn_bf16 *grad,
                            ptn_span span) {
  const ptn_update_scalars s = update->scalars;
  if (span.count == 0) return;
  size_t body = ptn_body_count(&s, span), done = sgd_all(&s, master, state, grad, param, body);
  ptn_sgd_bf16_elements(&s, param, master, state, grad, done, body, false);
  ptn_sgd_bf16_elements(&s, param, master, state, grad, body, span.count, true);
}
