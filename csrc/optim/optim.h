/* Update kernels: one pass over parameters, gradients and optimizer state in fp32, bit for bit what torch.optim.Adam, AdamW
 * and SGD give on the CPU, with fused=True and, where a group is not fused, with torch's default: a loop over parameters.
 *
 * Each kernel exists as a plain reference and for AVX2, AVX-512 and NEON; the fastest that this CPU runs is chosen. All
 * variants give the same bits. Arrays need only float alignment, any count is allowed, nothing is read or written outside.
 * Scalars are prepared once a step in double, as torch does, by ptn_update_prepare.
 *
 * The reference, exactly: torch's AVX2 kernels on x86-64, which torch also runs on a CPU with AVX-512 (its fused optimizers
 * are not registered for AVX-512). They round in one way where they work on vectors of 8 and in another way in the scalar
 * loop behind them, as their compiler fused other products there. torch splits a parameter over its threads at multiples of
 * 16 elements, so the scalar loop only ever sees the last `total % 8` elements of a parameter, whatever the number of
 * threads. Hence ptn_span: an element's result depends on where it lies in its parameter, not on how the parameter is split.
 *   every element: AdamW p = p*decay with decay = fma(-lr, weight_decay, 1) in double, then rounded; Adam and SGD
 *                  g = fma(p, weight_decay, g); m by lerp with one fma; p - step_size*m / (sqrt(v)/sqrt(bias2) + eps)
 *                  unfused; SGD p = fma(g, -lr, p), nesterov g = fma(buffer, momentum, g)
 *   in vectors:    v = fma((1-beta2)*g, g, v*beta2)    buffer = fma(1-dampening, g, buffer*momentum)
 *   in the tail:   v = fma(v, beta2, (1-beta2)*g*g)    buffer = fma(buffer, momentum, (1-dampening)*g)
 *   amsgrad:       the maximum passes on a NaN of either side in vectors; in the tail a NaN in v leaves the old maximum
 *
 * The loop, which is one operation of torch after the other (foreach=True is the same on a CPU): all elements round as in
 * vectors. Three things differ. 1 - lr*weight_decay is two operations in double; a tensor lr of fp32 is computed with in fp32;
 * and square roots are those of torch.sqrt, which a library takes that does not always round them correctly.
 *
 * torch restricted to ATEN_CPU_CAPABILITY=default, or on a CPU without AVX2, fuses nothing and is not the reference.
 * A NaN equals any NaN: its sign and payload are not part of the result (torch's own differ between its loops).
 *
 * Parameters and gradients may be bf16: then each parameter has an fp32 master. The same pass widens the gradient, updates
 * master and state as above, and rounds the master to the parameter. Between updates a parameter is its master rounded; an element
 * that is not was written by somebody else, and what was written, widened, is its master from then on.
 */
#ifndef PTN_OPTIM_OPTIM_H
#define PTN_OPTIM_OPTIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "optim/bf16.h"

typedef enum ptn_optimizer_kind { PTN_ADAM, PTN_ADAMW, PTN_SGD } ptn_optimizer_kind;

/* What a parameter group says: the fields torch's groups have. A tensor lr is its value: double of the float it holds.
 * torch's Adam with decoupled_weight_decay=True is PTN_ADAMW. */
typedef struct ptn_hyper {
  ptn_optimizer_kind kind;
  double lr, weight_decay;
  bool maximize;
  bool fused;               /* rounded as torch's fused kernels do; else as its loop over parameters */
  bool lr_is_float;         /* lr is of fp32, a tensor or a NumPy number */
  double beta1, beta2, eps; /* Adam, AdamW */
  bool amsgrad;             /* Adam, AdamW */
  double momentum, dampening; /* SGD */
  bool nesterov;              /* SGD */
} ptn_hyper;

#define PTN_STATE_MAX 3
/* Arrays of fp32 state for each parameter: Adam 2 (exp_avg, exp_avg_sq; with amsgrad max_exp_avg_sq), SGD 1 with momentum. */
int ptn_state_count(const ptn_hyper *hyper);
/* Whether an update with these is one of those that a parameter counts: Adam's all are. SGD has a buffer since the first that had
 * momentum, which takes the gradient as it is; those before and between leave no trace in its state, and are not counted. */
bool ptn_update_counts(const ptn_hyper *hyper);

/* Square roots of count floats. out does not overlap in. */
typedef void (*ptn_square_roots)(size_t count, const float *in, float *out);
/* What torch.sqrt gives, where that is not rounded correctly: updates that are not fused take theirs here. Set once, before the first. */
void ptn_update_use_square_roots(ptn_square_roots roots);

/* The constants of one step in fp32; what a kernel does not use is 0. For the kernels only. */
typedef struct ptn_update_scalars {
  bool has_tail;      /* fused: the last elements of a parameter round otherwise */
  float grad_factor;  /* grad_scale, negative to maximize */
  float weight_decay; /* Adam, SGD: times the parameter, added to the gradient */
  bool add_decay;     /* weight_decay is not 0 */
  /* Adam, AdamW */
  float param_factor;  /* AdamW: 1 - lr * weight_decay; else 1 */
  float lerp_weight;   /* 1 - beta1, less 1 where lerp_from_grad */
  float lerp_tail;     /* the same in the tail; but -0 where the other is +0, which decides the sign of a zero */
  bool lerp_from_grad; /* 1 - beta1 is at least one half */
  float beta2, square_weight, bias2_root, eps, step_size;
  bool amsgrad;
  ptn_square_roots roots; /* NULL: rounded correctly */
  /* SGD */
  float lr, momentum, grad_weight; /* grad_weight: 1 - dampening */
  bool has_momentum, first_step, nesterov;
} ptn_update_scalars;

/* One step's constants. Opaque to callers, passed by value where handy. */
typedef struct ptn_update {
  ptn_hyper hyper;
  double step;        /* of this update among those that count, from 1, as torch's float32 counter holds it */
  ptn_update_scalars scalars;
} ptn_update;
/* Every gradient is multiplied by grad_scale first, rounded to fp32 (clipping); by exactly 1 it is unchanged. PTN_INVALID: step 0 or
 * an unknown kind. Values of the group are taken as they are, as torch's kernels do. */
ptn_status ptn_update_prepare(ptn_update *out, const ptn_hyper *hyper, uint64_t step, float grad_scale);

/* The elements [first, first + count) of a parameter that has total elements. */
typedef struct ptn_span {
  size_t first, count, total;
} ptn_span;
static inline ptn_span ptn_span_whole(size_t total) { return (ptn_span){0, total, total}; }

/* param and state are changed in place. All arrays, the ptn_state_count ones of state too, begin at the span's first element
 * and hold span.count elements; they must not overlap. */
typedef void (*ptn_update_kernel)(const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span);

/* The same with bf16 parameters and gradients; master is what `param` is above, and param is the rounded result. */
typedef void (*ptn_bf16_kernel)(const ptn_update *update, ptn_bf16 *param, float *master, float *const state[],
                                const ptn_bf16 *grad, ptn_span span);

typedef enum ptn_simd { PTN_SIMD_PLAIN = 0, PTN_SIMD_AVX2, PTN_SIMD_AVX512, PTN_SIMD_NEON, PTN_SIMD_COUNT } ptn_simd;
ptn_simd ptn_simd_best(void);              /* of this CPU, as the operating system allows it */
const char *ptn_simd_name(ptn_simd simd);  /* "plain", "avx2", "avx512", "neon" */
/* NULL where this CPU or this build lacks it. */
ptn_update_kernel ptn_update_kernel_for(ptn_optimizer_kind kind, ptn_simd simd);
ptn_bf16_kernel ptn_bf16_kernel_for(ptn_optimizer_kind kind, ptn_simd simd);

/* The best kernel. shared: large ones are split among the threads that the caller's operations compute with (base/openmp.h). */
void ptn_update_run(bool shared, const ptn_update *update, float *param, float *const state[], const float *grad, ptn_span span);

void ptn_update_run_bf16(bool shared, const ptn_update *update, ptn_bf16 *param, float *master, float *const state[],
                         const ptn_bf16 *grad, ptn_span span);

/* sum[i] += term[i], as torch's in-place add: gradients of several backward passes. No overlap. */
void ptn_accumulate(float *sum, const float *term, size_t count);
void ptn_accumulate_bf16(ptn_bf16 *sum, const ptn_bf16 *term, size_t count); /* each sum in fp32, then rounded */

#endif
