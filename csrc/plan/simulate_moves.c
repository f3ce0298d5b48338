/* Moves: the bytes that each lane carries for one chunk, whatever time it takes. What the simulation, the bounds and the sums know
 * of lanes is this.
 *
 * Ranks share what is not persistent: each has a part of a chunk at home, and gathers the others' when it is fetched; of gradients
 * it keeps its own part, after the others have added theirs. A chunk at home on the host has the link to the device between them,
 * one on disk as well where there is a link. */
#include <string.h>

#include "plan/simulate_internal.h"

void ptn_moves_fetch(const ptn_plan_request *request, uint32_t chunk, bool on_host, bool has_link, double *bytes) {
  uint64_t whole_bytes = request->chunks[chunk].param_bytes, part_bytes = ptn_tiers_part(request, whole_bytes);
  memset(bytes, 0, PTN_N_LANES * sizeof *bytes);
  if (!on_host) bytes[PTN_DISK_READ] = (double)part_bytes;
  if (on_host || has_link) bytes[PTN_UPLOAD] = (double)part_bytes;
  bytes[PTN_GATHER] = (double)(whole_bytes - part_bytes);
}

/* Gradients of one pass leave the device; returns how many. */
static double take_gradients(const ptn_plan_request *request, uint32_t chunk, bool on_host, bool has_link, double *bytes) {
  uint64_t whole_bytes = request->chunks[chunk].grad_bytes, part_bytes = ptn_tiers_part(request, whole_bytes);
  bytes[PTN_GATHER] = (double)(whole_bytes - part_bytes);
  if (on_host || has_link) bytes[PTN_OFFLOAD] = (double)part_bytes;
  return (double)part_bytes;
}

void ptn_moves_keep(const ptn_plan_request *request, uint32_t chunk, bool on_host, bool has_link, bool add, double *bytes) {
  memset(bytes, 0, PTN_N_LANES * sizeof *bytes);
  double grad_bytes = take_gradients(request, chunk, on_host, has_link, bytes);
  if (on_host) return;
  bytes[PTN_DISK_WRITE] = grad_bytes;
  if (add) bytes[PTN_DISK_READ] = grad_bytes;
}

void ptn_moves_update(const ptn_plan_request *request, uint32_t chunk, bool on_host, bool has_link, bool in_slot, double *bytes) {
  const ptn_plan_chunk *of = &request->chunks[chunk];
  double grad_bytes = (double)ptn_tiers_part(request, of->grad_bytes),
         param_bytes = (double)ptn_tiers_part(request, of->param_bytes);
  double state_bytes = (double)ptn_tiers_part(request, of->state_bytes);
  bool kept = request->grads_outlive_backward || request->n_passes > 1;
  memset(bytes, 0, PTN_N_LANES * sizeof *bytes);
  if (!request->grads_outlive_backward) take_gradients(request, chunk, on_host, has_link, bytes);
  bytes[PTN_UPDATE] = param_bytes + state_bytes;
  if (on_host) return;
  bytes[PTN_DISK_READ] = state_bytes + (in_slot ? 0 : param_bytes) + (kept ? grad_bytes : 0);
  bytes[PTN_DISK_WRITE] = param_bytes + state_bytes;
}
