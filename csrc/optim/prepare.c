/* The constants of a step, computed as torch computes them: in double, then rounded once to fp32.
 *
 * Two things are easily done otherwise and then differ in a bit: 1 - lr * weight_decay is one operation in double in the
 * fused kernels and two in the loop, and the step counter is a float32 tensor, which stays at 2^24 once it is there.
 */
#include <math.h>
#include <string.h>

#include "optim/optim.h"

int ptn_state_count(const ptn_hyper *hyper) {
  if (hyper->kind == PTN_SGD) return hyper->momentum != 0 ? 1 : 0;
  return hyper->amsgrad ? 3 : 2;
}

bool ptn_update_counts(const ptn_hyper *hyper) { return hyper->kind != PTN_SGD || hyper->momentum != 0; }

static ptn_square_roots torch_roots;

void ptn_update_use_square_roots(ptn_square_roots roots) { torch_roots = roots; }

/* 1 - lr * weight_decay, and lr / bias1. */
static void prepare_rates(ptn_update_scalars *s, const ptn_hyper *hyper, double bias1) {
  double lr = hyper->lr, decay = hyper->kind == PTN_ADAMW ? hyper->weight_decay : 0;
  bool in_float = hyper->lr_is_float && !hyper->fused;
  s->step_size = in_float ? (float)lr / (float)bias1 : (float)(lr / bias1);
  if (decay == 0) s->param_factor = 1;
  else if (in_float) s->param_factor = 1 - (float)lr * (float)decay;
  else s->param_factor = (float)(hyper->fused ? fma(-lr, decay, 1) : 1 - lr * decay);
}

static void prepare_adam(ptn_update_scalars *s, const ptn_hyper *hyper, double step) {
  double bias1 = 1 - pow(hyper->beta1, step);
  double bias2 = 1 - pow(hyper->beta2, step);
  prepare_rates(s, hyper, bias1);
  float average_weight = (float)(1 - hyper->beta1);
  s->lerp_from_grad = !(fabsf(average_weight) < 0.5f);
  s->lerp_weight = s->lerp_from_grad ? average_weight - 1 : average_weight;
  s->lerp_tail = s->lerp_from_grad ? -(1 - average_weight) : average_weight;
  s->beta2 = (float)hyper->beta2;
  s->square_weight = (float)(1 - hyper->beta2);
  s->bias2_root = (float)(hyper->fused ? sqrt(bias2) : pow(bias2, 0.5));
  s->eps = (float)hyper->eps;
  s->amsgrad = hyper->amsgrad;
  s->roots = hyper->fused ? NULL : torch_roots;
}

static void prepare_sgd(ptn_update_scalars *s, const ptn_hyper *hyper, double step) {
  s->lr = (float)hyper->lr;
  s->momentum = (float)hyper->momentum;
  s->grad_weight = (float)(1 - hyper->dampening);
  s->has_momentum = hyper->momentum != 0;
  s->first_step = step == 1;
  s->nesterov = hyper->nesterov;
}

ptn_status ptn_update_prepare(ptn_update *out, const ptn_hyper *hyper, uint64_t step, float grad_scale) {
  if (hyper->kind != PTN_ADAM && hyper->kind != PTN_ADAMW && hyper->kind != PTN_SGD)
    return ptn_fail(PTN_INVALID, "the optimizer kind %d is unknown: use adam, adamw or sgd", (int)hyper->kind);
  if (step == 0) return ptn_fail(PTN_INVALID, "the step of an update is 0: steps count from 1");
  memset(out, 0, sizeof *out);
  out->hyper = *hyper;
  const uint64_t float_limit = (uint64_t)1 << 24; /* adding 1 to a float32 that holds it changes nothing */
  out->step = (double)(step < float_limit ? step : float_limit);
  ptn_update_scalars *s = &out->scalars;
  s->has_tail = hyper->fused;
  s->grad_factor = hyper->maximize ? -grad_scale : grad_scale;
  s->weight_decay = hyper->kind == PTN_ADAMW ? 0 : (float)hyper->weight_decay;
  s->add_decay = hyper->kind != PTN_ADAMW && hyper->weight_decay != 0;
  if (hyper->kind == PTN_SGD) prepare_sgd(s, hyper, out->step);
  else prepare_adam(s, hyper, out->step);
  return PTN_OK;
}
