/* Sums: the least that many candidates at once can take.
 *
 * Problem: most candidates need not be looked at one by one. Design: what work there is, and what each lane carries, are sums
 * over the chunks behind the persistent ones, by tier; with sums over prefixes they cost the same for any number of chunks. A
 * range of candidates has the most persistent chunks for what movement costs, and the fewest for what updates in step() do.
 *
 * What is fetched: in forward every chunk but those that the pass before left in slots (with a link none in the first pass), in
 * backward every one but what the slots hold of it.
 *
 * Invariant: never above the simulation of a candidate.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/search_internal.h"
#include "plan/simulate_internal.h"

typedef enum tier { ON_HOST, ON_DISK, N_TIERS } tier;

typedef struct sum { /* over chunks before some chunk */
  double forward[PTN_N_LANES], backward[PTN_N_LANES]; /* lanes of fetching what forward and backward of one pass access */
  double updates[PTN_N_LANES];                        /* of all passes */
} sum;

struct ptn_sums {
  const ptn_plan_request *request;
  ptn_lanes lanes;
  double best_ns_per_byte[PTN_N_LANES];
  sum *of_tier[N_TIERS];  /* n_chunks + 1 entries */
  uint32_t *end_of_host;  /* with so many persistent, the first chunk on disk */
  double *visits;         /* demands in a pass of chunks before some chunk */
  double *in_step_ns;     /* updates of persistent chunks before some chunk */
  double base_ns, passes, link, drag_part; /* base_ns: of all passes; link: 1 where there is one */
};

/* ---- create ---- */

static void add(double *lanes, const double *bytes, double times) {
  for (int i = 0; i < PTN_N_LANES; i++) lanes[i] += times * bytes[i];
}

static void add_fetch(const ptn_sums *sums, uint32_t chunk, tier tier, double *lanes) {
  double bytes[PTN_N_LANES];
  ptn_moves_fetch(sums->request, chunk, tier == ON_HOST, sums->link > 0, bytes);
  add(lanes, bytes, 1);
}

/* As bounds.c has it. */
static void add_updates(const ptn_sums *sums, uint32_t chunk, tier tier, double *lanes) {
  const ptn_plan_request *request = sums->request;
  bool host = tier == ON_HOST, link = sums->link > 0;
  double bytes[PTN_N_LANES], keeps = sums->passes - (request->grads_outlive_backward ? 0 : 1);
  ptn_moves_update(request, chunk, host, link, !link, bytes);
  add(lanes, bytes, 1);
  for (int again = 0; again < 2 && keeps > again; again++) {
    ptn_moves_keep(request, chunk, host, link, again, bytes);
    add(lanes, bytes, again ? keeps - 1 : 1);
  }
}

/* seen: of each chunk, 1 accessed in forward, 2 in backward; visits: phases in which it is. What recomputation alone accesses is in
 * neither: of a block that is not recomputed it does not happen. Where a backward's own accesses are not known, one of each chunk
 * is. */
static void read_accesses(const ptn_sums *sums, uint8_t *seen, uint32_t *visits, uint32_t *last_phase) {
  const ptn_plan_request *request = sums->request;
  uint32_t turn = 0, end = 0;
  while (turn < request->n_phases && !request->phases[turn].backward) turn++;
  for (uint32_t i = 0; i < request->n_accesses; i++) {
    uint32_t chunk = request->accesses[i], phase = request->access_phases[i], n_own = request->phases[phase].own_accesses;
    while (end <= i || (end < request->n_accesses && request->access_phases[end] == phase)) end++;
    bool twice = request->phases[phase].backward && request->phases[phase].block >= 0;
    if (twice && n_own > 0 && end - i > n_own) continue;
    seen[chunk] |= phase < turn ? 1 : 2;
    visits[chunk] += last_phase[chunk] != phase + 1;
    last_phase[chunk] = phase + 1;
  }
}

static void add_up(ptn_sums *sums, const uint8_t *seen, const uint32_t *visits) {
  const ptn_plan_request *request = sums->request;
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    const ptn_plan_chunk *chunk = &request->chunks[c];
    for (int tier = 0; tier < N_TIERS; tier++) {
      sum *next = &sums->of_tier[tier][c + 1];
      *next = sums->of_tier[tier][c];
      if (seen[c] & 1) add_fetch(sums, c, (enum tier)tier, next->forward);
      if (seen[c] & 2) add_fetch(sums, c, (enum tier)tier, next->backward);
      if (chunk->grad_bytes > 0) add_updates(sums, c, (enum tier)tier, next->updates);
    }
    sums->visits[c + 1] = sums->visits[c] + visits[c];
    double speed = request->profile->step_update_bytes_per_s;
    double bytes = chunk->grad_bytes > 0 && speed > 0 ? (double)(chunk->param_bytes + chunk->state_bytes) : 0;
    sums->in_step_ns[c + 1] = sums->in_step_ns[c] + (bytes > 0 ? bytes * 1e9 / speed : 0);
  }
}

static ptn_status fill(ptn_sums *sums) {
  const ptn_plan_request *request = sums->request;
  size_t n = (size_t)request->n_chunks + 1;
  uint8_t *seen = calloc(n, sizeof *seen);
  uint32_t *visits = calloc(n, sizeof *visits), *last_phase = calloc(n, sizeof *last_phase);
  bool made = seen && visits && last_phase;
  for (int tier = 0; tier < N_TIERS; tier++) made &= (sums->of_tier[tier] = calloc(n, sizeof *sums->of_tier[tier])) != NULL;
  made &= (sums->end_of_host = calloc(n, sizeof *sums->end_of_host)) != NULL;
  made &= (sums->visits = calloc(n, sizeof *sums->visits)) != NULL;
  made &= (sums->in_step_ns = calloc(n, sizeof *sums->in_step_ns)) != NULL;
  if (made) {
    read_accesses(sums, seen, visits, last_phase);
    add_up(sums, seen, visits);
    for (uint32_t p = 0; p < n; p++) {
      ptn_tiers tiers;
      ptn_tiers_split(request, p, 0, &tiers);
      sums->end_of_host[p] = p + tiers.n_host;
    }
  }
  free(seen);
  free(visits);
  free(last_phase);
  return made ? PTN_OK : ptn_fail(PTN_MEMORY, "no memory to sum up %zu chunks", n - 1);
}

ptn_status ptn_sums_create(ptn_sums **out, const ptn_plan_request *request) {
  ptn_sums *sums = *out = calloc(1, sizeof *sums);
  if (!sums) return ptn_fail(PTN_MEMORY, "no memory to sum up a plan");
  const ptn_profile *profile = request->profile;
  sums->request = request;
  ptn_lanes_read(&sums->lanes, profile);
  sums->link = sums->lanes.present[PTN_UPLOAD];
  sums->passes = request->n_passes > 0 ? request->n_passes : 1;
  for (int i = 0; i < PTN_N_LANES; i++) {
    sums->best_ns_per_byte[i] = ptn_min_f64(sums->lanes.ns_per_byte[0][i], sums->lanes.ns_per_byte[1][i]);
  }
  for (uint32_t i = 0; i < profile->n_phases; i++) sums->base_ns += sums->passes * (double)profile->phases[i].compute_ns;
  sums->drag_part = ptn_bounds_drag_part(profile);
  ptn_status status = fill(sums);
  if (status == PTN_OK) return PTN_OK;
  ptn_sums_destroy(sums);
  *out = NULL;
  return status;
}

void ptn_sums_destroy(ptn_sums *sums) {
  if (!sums) return;
  for (int tier = 0; tier < N_TIERS; tier++) free(sums->of_tier[tier]);
  free(sums->end_of_host);
  free(sums->visits);
  free(sums->in_step_ns);
  free(sums);
}

/* ---- the least ---- */

/* Of what a part of a pass fetches, the slots hold some bytes; they may be those that cost a lane most. */
static void add_left(double *lanes, const double *whole, double held_bytes, double times) {
  for (int i = 0; i < PTN_N_LANES; i++) lanes[i] += times * ptn_max_f64(whole[i] - held_bytes, 0);
}

double ptn_sums_least_ns(const ptn_sums *sums, const ptn_many *many) {
  const ptn_plan_request *request = sums->request;
  uint32_t first = many->most_persist, middle = sums->end_of_host[first], end = request->n_chunks;
  const sum *host_from = &sums->of_tier[ON_HOST][first], *host_to = &sums->of_tier[ON_HOST][middle];
  const sum *disk_from = &sums->of_tier[ON_DISK][middle], *disk_to = &sums->of_tier[ON_DISK][end];
  double lanes[PTN_N_LANES], forward[PTN_N_LANES], backward[PTN_N_LANES], longest_ns = 0;
  double drag_ns = 2 * sums->passes * many->stash_bytes * request->profile->stash_drag_ns_per_byte;
  for (int i = 0; i < PTN_N_LANES; i++) {
    forward[i] = host_to->forward[i] - host_from->forward[i] + disk_to->forward[i] - disk_from->forward[i];
    backward[i] = host_to->backward[i] - host_from->backward[i] + disk_to->backward[i] - disk_from->backward[i];
    lanes[i] = host_to->updates[i] - host_from->updates[i] + disk_to->updates[i] - disk_from->updates[i];
  }
  add_left(lanes, backward, many->slots_bytes, sums->passes);
  add_left(lanes, forward, many->slots_bytes, sums->passes - sums->link);
  add(lanes, forward, sums->link);
  double stash_bytes = sums->passes * many->stash_bytes, over_link = sums->link * stash_bytes;
  double on_disk = ptn_tiers_has_host(request) ? 0 : stash_bytes; /* certainly */
  lanes[PTN_UPLOAD] += over_link;
  lanes[PTN_OFFLOAD] += over_link;
  lanes[PTN_DISK_READ] += on_disk;
  lanes[PTN_DISK_WRITE] += on_disk;
  for (int i = 0; i < PTN_N_LANES; i++) {
    drag_ns += lanes[i] * sums->lanes.drag_ns_per_byte[i];
    longest_ns = ptn_max_f64(longest_ns, lanes[i] *= sums->best_ns_per_byte[i]);
  }
  longest_ns = ptn_max_f64(longest_ns, (lanes[PTN_DISK_READ] + lanes[PTN_DISK_WRITE]) / sums->lanes.disk_overlap);
  longest_ns = ptn_max_f64(longest_ns, (lanes[PTN_UPLOAD] + lanes[PTN_OFFLOAD]) / sums->lanes.link_overlap);
  double demands = sums->visits[end] - sums->visits[many->most_persist];
  double work_ns = sums->base_ns + sums->passes * (many->recompute_ns + demands * (double)request->profile->access_ns);
  double open_ns = sums->in_step_ns[many->least_persist] + (double)request->profile->step_fixed_ns;
  return (ptn_max_f64(work_ns + drag_ns * sums->drag_part, longest_ns) + open_ns) * (1 - 1e-9) - 16; /* each part is rounded */
}
