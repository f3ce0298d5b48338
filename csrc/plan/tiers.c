/* Tiers: where chunks that are not persistent are at home, and what is written of activations.
 *
 * Problem: host memory is faster than the disk and holds less. Design: behind the persistent chunks come those at home on the
 * host, as many as it holds, then those on disk: the first ones are updated last, so what is fast comes first. Activations go
 * where chunks left room for all of them; where the disk is too small for that, before the chunks. All figures are of one rank:
 * what is not persistent is shared by the ranks.
 *
 * A tier is there where a lane leads to it. Without a profile no lanes are known, and all goes to disk.
 *
 * Invariants: what is possible with some persistent chunks is possible with more; with all of them and nothing written, always.
 */
#include "base/bytes.h"
#include "plan/parts.h"

bool ptn_tiers_has_host(const ptn_plan_request *request) {
  return request->profile && request->host_budget_bytes > 0 && request->profile->lanes[PTN_UPLOAD].bytes_per_s > 0;
}

bool ptn_tiers_has_disk(const ptn_plan_request *request) {
  const ptn_profile *profile = request->profile;
  return !profile || (profile->lanes[PTN_DISK_READ].bytes_per_s > 0 && profile->lanes[PTN_DISK_WRITE].bytes_per_s > 0);
}

uint64_t ptn_tiers_disk_bytes(const ptn_plan_request *request) {
  return !ptn_tiers_has_disk(request) ? 0 : request->disk_budget_bytes > 0 ? request->disk_budget_bytes : UINT64_MAX;
}

uint64_t ptn_tiers_host_room(const ptn_plan_request *request, uint32_t n_persist) {
  if (!ptn_tiers_has_host(request)) return 0;
  uint64_t ring_bytes = 0;
  for (uint32_t at = n_persist; at < request->n_chunks && ring_bytes == 0; at++) {
    if (request->chunks[at].grad_bytes > 0) ring_bytes = ptn_fit_host_ring_bytes(request);
  }
  return request->host_budget_bytes > ring_bytes ? request->host_budget_bytes - ring_bytes : 0;
}

uint64_t ptn_tiers_part(const ptn_plan_request *request, uint64_t bytes) {
  uint64_t n_ranks = request->n_ranks > 0 ? request->n_ranks : 1;
  return (bytes + n_ranks - 1) / n_ranks;
}

static uint64_t on_host_bytes(const ptn_plan_request *request, const ptn_plan_chunk *chunk) {
  return ptn_tiers_part(request, chunk->param_bytes + chunk->state_bytes);
}

static uint64_t on_disk_bytes(const ptn_plan_request *request, const ptn_plan_chunk *chunk) {
  uint64_t home_bytes = ptn_round_up(ptn_tiers_part(request, chunk->param_bytes), PTN_PAGE_BYTES) +
                        ptn_round_up(ptn_tiers_part(request, chunk->state_bytes), PTN_PAGE_BYTES);
  uint64_t total_bytes = chunk->grad_bytes > 0 ? 2 * home_bytes : home_bytes; /* trained: the home and its shadow */
  if (request->grads_outlive_backward || request->n_passes > 1) { /* there they lie as the parameters do */
    uint64_t grad_bytes = ptn_min_u64(chunk->grad_bytes, chunk->param_bytes);
    total_bytes += ptn_round_up(ptn_tiers_part(request, grad_bytes), PTN_PAGE_BYTES);
  }
  return total_bytes;
}

/* The chunks behind the persistent ones, to the host as far as they have room there. */
static void place_chunks(const ptn_plan_request *request, uint32_t n_persist, uint64_t room_bytes, ptn_tiers *out) {
  uint32_t at = n_persist;
  *out = (ptn_tiers){0};
  for (; at < request->n_chunks; at++) {
    uint64_t bytes = on_host_bytes(request, &request->chunks[at]);
    if (!ptn_tiers_has_host(request) || bytes > room_bytes - out->host_bytes) break;
    out->host_bytes += bytes;
  }
  out->n_host = at - n_persist;
  for (; at < request->n_chunks; at++) out->disk_bytes += on_disk_bytes(request, &request->chunks[at]);
}

static bool fits_disk(const ptn_plan_request *request, uint32_t n_persist, uint64_t stash_bytes, const ptn_tiers *tiers) {
  bool needs_none = n_persist + tiers->n_host == request->n_chunks && (stash_bytes == 0 || tiers->stash_on_host);
  if (needs_none) return true;
  return ptn_tiers_has_disk(request) && tiers->disk_bytes <= ptn_tiers_disk_bytes(request);
}

bool ptn_tiers_split(const ptn_plan_request *request, uint32_t n_persist, uint64_t stash_bytes, ptn_tiers *out) {
  uint64_t room_bytes = ptn_tiers_host_room(request, n_persist);
  place_chunks(request, n_persist, room_bytes, out);
  out->stash_on_host = stash_bytes > 0 && stash_bytes <= room_bytes - out->host_bytes;
  *(out->stash_on_host ? &out->host_bytes : &out->disk_bytes) += stash_bytes;
  if (fits_disk(request, n_persist, stash_bytes, out)) return true;
  if (out->stash_on_host || stash_bytes == 0 || stash_bytes > room_bytes) return false;
  place_chunks(request, n_persist, room_bytes - stash_bytes, out); /* homes take more of a disk than of the host */
  out->stash_on_host = true;
  out->host_bytes += stash_bytes;
  return fits_disk(request, n_persist, stash_bytes, out);
}

ptn_status ptn_tiers_least_persist(const ptn_plan_request *request, uint64_t stash_bytes, uint32_t *least_persist) {
  ptn_tiers tiers;
  uint32_t least = 0, most = request->n_chunks;
  if (!ptn_tiers_split(request, most, stash_bytes, &tiers)) {
    return ptn_fail_budget(stash_bytes, request->host_budget_bytes, 0,
                           "the blocks that swap write %llu bytes, the host budget is %llu, and the disk's %llu: give more host "
                           "memory or a larger disk, or swap fewer blocks",
                           (unsigned long long)stash_bytes, (unsigned long long)request->host_budget_bytes,
                           (unsigned long long)ptn_tiers_disk_bytes(request));
  }
  while (least < most) {
    uint32_t middle = least + (most - least) / 2;
    if (ptn_tiers_split(request, middle, stash_bytes, &tiers)) most = middle;
    else least = middle + 1;
  }
  *least_persist = least;
  return PTN_OK;
}
