/* What an update computes: a part of a chunk, its values and state at given addresses, gradients and sums beside them.
 *
 * Both lanes come here, the one that streams from the disk and the one that works on the host: each says where the arrays of a part
 * are. Results do not depend on how a chunk is cut (optim.h).
 */
#include <string.h>

#include "runtime/internal.h"

bool ptn_spilled_any(const ptn_engine *engine, const chunk *chunk) {
  for (uint32_t i = 0; i < chunk->n_params; i++)
    if (engine->params[engine->order_params[chunk->first_param + i]].spilled) return true;
  return false;
}

void ptn_job_open(ptn_engine *engine, job *job) {
  chunk *chunk = &engine->chunks[job->chunk];
  job->from_shadow = job->update && chunk->has_shadow && !job->late;
  job->zero_state = chunk->zero_state && !job->from_shadow;
  job->zero_master = chunk->zero_master && !job->from_shadow;
  job->opened = true;
  for (uint32_t i = 0; i < job->n_grads; i++) {
    job_grad *grad = &job->grads[i];
    grad->add_disk = engine->params[grad->param].spilled && !grad->total;
    job->reads_grads |= grad->add_disk;
  }
  if (!job->update) { /* what other parameters have on disk must survive the write of whole pieces */
    job->reads_grads |= ptn_spilled_any(engine, chunk);
  }
}

/* In elements of the parameter; false when no part of it lies there. */
static bool overlaps(const ptn_engine *engine, uint64_t offset_bytes, uint64_t bytes, const param *param, uint64_t *begin,
                     uint64_t *end) {
  uint64_t size = engine->element_bytes, first = ptn_max_u64(offset_bytes, param->offset_bytes);
  uint64_t last = ptn_min_u64(offset_bytes + bytes, param->offset_bytes + param->count * size);
  if (first >= last) return false;
  *begin = (first - param->offset_bytes) / size;
  *end = (last - param->offset_bytes) / size;
  return true;
}

bool ptn_part_wanted(const ptn_engine *engine, const job *job, uint64_t offset_bytes, uint64_t bytes) {
  if (!job->from_shadow) return true; /* the whole chunk goes to its other extent */
  uint64_t begin, end;
  for (uint32_t i = 0; i < job->n_grads; i++)
    if (overlaps(engine, offset_bytes, bytes, &engine->params[job->grads[i].param], &begin, &end)) return true;
  return false;
}

/* One stretch of a parameter: `inside` elements into the arrays, span in the parameter. */
static void run_update(const ptn_engine *engine, const part *part, const job_grad *grad, const char *data, uint64_t inside,
                       ptn_span span) {
  float *states[PTN_STATE_MAX] = {0};
  for (uint32_t i = 0; i < engine->n_states; i++) states[i] = (float *)(void *)part->arrays[PIECE_STATE + i] + inside;
  void *param = part->arrays[PIECE_PARAM] + inside * engine->element_bytes;
  if (engine->bf16) {
    float *master = (float *)(void *)part->arrays[PIECE_STATE + engine->n_states] + inside;
    ptn_update_run_bf16(false, &grad->update, param, master, states, (const ptn_bf16 *)(const void *)data, span);
  } else {
    ptn_update_run(false, &grad->update, param, states, (const float *)(const void *)data, span);
  }
}

static void compute_grad(const ptn_engine *engine, const part *part, const job_grad *grad) {
  const param *param = &engine->params[grad->param];
  uint64_t begin, end;
  if (!overlaps(engine, part->offset_bytes, part->bytes, param, &begin, &end)) return;
  uint64_t size = engine->element_bytes, inside = (param->offset_bytes + begin * size - part->offset_bytes) / size;
  const char *data = grad->data ? (const char *)grad->data + begin * size : NULL;
  char *sum = part->arrays[PIECE_GRAD] ? part->arrays[PIECE_GRAD] + inside * size : NULL;
  size_t count = (size_t)(end - begin);
  if (grad->add_disk && data) {
    if (engine->bf16) ptn_accumulate_bf16((ptn_bf16 *)(void *)sum, (const ptn_bf16 *)(const void *)data, count);
    else ptn_accumulate((float *)(void *)sum, (const float *)(const void *)data, count);
    data = NULL;
  } else if (!part->job->update) {
    memcpy(sum, data, count * size);
  }
  if (!part->job->update) return;
  ptn_span span = {(size_t)begin, count, (size_t)param->count};
  run_update(engine, part, grad, data ? data : sum, inside, span);
}

void ptn_part_compute(const ptn_engine *engine, const part *part) {
  for (uint32_t i = 0; i < part->job->n_grads; i++) compute_grad(engine, part, &part->job->grads[i]);
}
