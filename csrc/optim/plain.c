/* The reference kernels: one element after the other, for any CPU. Where the compiler's target has no fused multiply-add,
 * fmaf is a library call; it is still exact, only slow. */
#include "optim/element.h"
#include "optim/kernels.h"

void ptn_adam_plain(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span) {
  size_t body = ptn_body_count(&update->scalars, span);
  ptn_adam_elements(&update->scalars, param, state, grad, 0, body, false);
  ptn_adam_elements(&update->scalars, param, state, grad, body, span.count, true);
}

void ptn_sgd_plain(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span) {
  size_t body = ptn_body_count(&update->scalars, span);
  ptn_sgd_elements(&update->scalars, param, state, grad, 0, body, false);
  ptn_sgd_elements(&update->scalars, param, state, grad, body, span.count, true);
}

void ptn_adam_bf16_plain(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[], const ptn_bf16 *grad,
                         ptn_span span) {
  size_t body = ptn_body_count(&update->scalars, span);
  ptn_adam_bf16_elements(&update->scalars, param, master, state, grad, 0, body, false);
  ptn_adam_bf16_elements(&update->scalars, param, master, state, grad, body, span.count, true);
}

void ptn_sgd_bf16_plain(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[], const ptn_bf16 *grad,
                        ptn_span span) {
  size_t body = ptn_body_count(&update->scalars, span);
  ptn_sgd_bf16_elements(&update->scalars, param, master, state, grad, 0, body, false);
  ptn_sgd_bf16_elements(&update->scalars, param, master, state, grad, body, span.count, true);
}
