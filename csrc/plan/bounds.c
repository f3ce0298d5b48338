/* Bounds: the least that a candidate can take.
 *
 * Problem: there are more candidates than can be simulated. Design: three bounds that hold together, each of which forgets
 * something, so that none is above what simulate.c says; the highest is the answer.
 *
 *   work    Compute, recomputation and all that is done in the open, and what the bytes moved cost compute meanwhile: the drag.
 *           Bytes that move while compute waits cost nothing, but the wait is longer than what they would have cost; where
 *           lanes could drag compute to its least speed, only that part counts.
 *   lanes   Each lane's bytes at its best speed; both directions of the disk, and of the link, in the time that they share.
 *   walk    The step in its order, once through the recorded accesses: an access waits for the fetch of its chunk, a fetch for its
 *           slot, updates are one after another and wait for their gradients, a phase waits until memory has room beside what
 *           is not yet written. Lanes drag nothing in it, and fetches and updates do not wait for each other; but the step does
 *           not end before the disk (the link) has moved everything, each from when it was possible. These are the equations
 *           (2) to (7) of arXiv 2406.08334, one term an access, with slots in place of a number of buffers. Passes after the
 *           first count their work alone.
 *
 * What is written of activations is known at least: what has no room in memory when backward comes to the blocks.
 *
 * Invariants: admissible (the tests hold it against the simulation); nothing is allocated after create.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "plan/search_internal.h"
#include "plan/simulate_internal.h"

#define MOST_DRAG (1 - PTN_LEAST_COMPUTE_SPEED)
#define NOTHING UINT32_MAX

/* Several lanes with one time between them, or one by itself. Readers: where nothing but the disk slows fetches down, each that
 * reads has the disk's reading for itself, and an update stands still, its writes too, while something else reads. */
typedef enum queue { DISK_QUEUE, LINK_QUEUE, READ_QUEUE, WRITE_QUEUE, UPLOAD_QUEUE, OFFLOAD_QUEUE, READER_QUEUE, N_QUEUES } queue;

/* Bytes that move at once. */
typedef struct transfer {
  double bytes[PTN_N_LANES];
  double ns;                 /* at least, with the lanes to itself */
  double queue_ns[N_QUEUES]; /* of each queue's time */
  bool impossible;           /* a lane is not there */
} transfer;

typedef struct chunk_transfers {
  transfer fetch, update;
  transfer keep, add; /* of gradients that are not updated behind their pass: the first, and others that are added to them */
} chunk_transfers;

struct ptn_bounds {
  ptn_course course; /* of it what belongs to the request */
  ptn_lanes lanes;
  double best_ns_per_byte[PTN_N_LANES];
  double drag_part; /* of the drag, what is certain */
  bool disk_alone;  /* slows fetches down */
  double keeps;     /* passes whose gradients are not updated behind them */
  chunk_transfers *transfers; /* of each chunk with its home on the host, then of each with it on disk */
  uint32_t *holder;   /* of each slot: its chunk in the walk */
  double *free_ns;    /* of each slot: since when its chunk is not needed */
  uint32_t *last;     /* of each slot: the access that was its last */
  uint32_t *releases; /* of each access: the chunk that may come into the slot from then on */
};

typedef struct walk {
  const ptn_candidate *candidate;
  double work_ns;            /* of one pass, with costs of accesses */
  double compute_ns, fetch_ns, update_ns; /* the clocks: until when each is busy */
  double since_ns, all_fetches_ns; /* what fetch_ns counts could not begin before; all of the pass */
  double bytes[PTN_N_LANES]; /* moved, of all passes */
  double readers_ns;         /* of all that reads the disk, one after another, where that is so */
  double queue_ns[N_QUEUES]; /* the clocks of the lanes, with all that may have begun */
  double put_bytes, put_ns;  /* to the stash; since when something is */
  double written_bytes, turn_ns; /* of it written at least; backward comes to the blocks */
  double total_stash_bytes;
  bool turned, impossible;
} walk;

/* ---- lanes ---- */

/* What it takes to move these bytes through all their lanes at once. */
static double pipeline_ns(const ptn_bounds *bounds, const double *bytes) {
  double ns[PTN_N_LANES], longest_ns = 0;
  for (int i = 0; i < PTN_N_LANES; i++) longest_ns = ptn_max_f64(longest_ns, ns[i] = bytes[i] * bounds->best_ns_per_byte[i]);
  longest_ns = ptn_max_f64(longest_ns, (ns[PTN_DISK_READ] + ns[PTN_DISK_WRITE]) / bounds->lanes.disk_overlap);
  return ptn_max_f64(longest_ns, (ns[PTN_UPLOAD] + ns[PTN_OFFLOAD]) / bounds->lanes.link_overlap);
}

static transfer make_transfer(const ptn_bounds *bounds, const double *bytes) {
  transfer made = {.ns = pipeline_ns(bounds, bytes)};
  double ns[PTN_N_LANES];
  for (int i = 0; i < PTN_N_LANES; i++) {
    ns[i] = bytes[i] * bounds->best_ns_per_byte[i];
    made.bytes[i] = bytes[i];
    made.impossible |= bytes[i] > 0 && !bounds->lanes.present[i];
  }
  made.queue_ns[DISK_QUEUE] = (ns[PTN_DISK_READ] + ns[PTN_DISK_WRITE]) / bounds->lanes.disk_overlap;
  made.queue_ns[LINK_QUEUE] = (ns[PTN_UPLOAD] + ns[PTN_OFFLOAD]) / bounds->lanes.link_overlap;
  made.queue_ns[READ_QUEUE] = ns[PTN_DISK_READ];
  made.queue_ns[WRITE_QUEUE] = ns[PTN_DISK_WRITE];
  made.queue_ns[UPLOAD_QUEUE] = ns[PTN_UPLOAD];
  made.queue_ns[OFFLOAD_QUEUE] = ns[PTN_OFFLOAD];
  made.queue_ns[READER_QUEUE] = bounds->disk_alone && ns[PTN_DISK_READ] > 0 ? made.ns : 0;
  return made;
}

/* An update may find the parameters in their slot, unless it is made on the host. */
static chunk_transfers make_transfers(const ptn_bounds *bounds, uint32_t chunk, bool host) {
  const ptn_plan_request *request = bounds->course.request;
  bool link = bounds->lanes.present[PTN_UPLOAD];
  double fetch[PTN_N_LANES], update[PTN_N_LANES], keep[PTN_N_LANES], add[PTN_N_LANES];
  ptn_moves_fetch(request, chunk, host, link, fetch);
  ptn_moves_update(request, chunk, host, link, !link, update);
  ptn_moves_keep(request, chunk, host, link, false, keep);
  ptn_moves_keep(request, chunk, host, link, true, add);
  return (chunk_transfers){.fetch = make_transfer(bounds, fetch),
                           .update = make_transfer(bounds, update),
                           .keep = make_transfer(bounds, keep),
                           .add = make_transfer(bounds, add)};
}

static const chunk_transfers *transfers_of(const ptn_bounds *bounds, const walk *at, uint32_t chunk) {
  bool host = chunk < at->candidate->n_persist + at->candidate->n_host;
  return &bounds->transfers[chunk + (host ? 0 : bounds->course.request->n_chunks)];
}

/* Certainly moves, `times` times. */
static void move(walk *at, const transfer *moved, double times) {
  for (int i = 0; i < PTN_N_LANES; i++) at->bytes[i] += times * moved->bytes[i];
  at->readers_ns += times * moved->queue_ns[READER_QUEUE];
  at->impossible |= moved->impossible && times > 0;
}

/* May begin now, and not before. Queues are told in the order of time. */
static void enqueue(walk *at, double now_ns, const transfer *begun) {
  for (int i = 0; i < N_QUEUES; i++) {
    double end_ns = ptn_max_f64(at->queue_ns[i], now_ns) + begun->queue_ns[i];
    at->queue_ns[i] = begun->queue_ns[i] > 0 ? end_ns : at->queue_ns[i];
  }
}

/* ---- create ---- */

double ptn_bounds_drag_part(const ptn_profile *profile) {
  ptn_lanes lanes;
  double busy = 0, idle = 0;
  ptn_lanes_read(&lanes, profile);
  for (int i = 0; i < PTN_N_LANES; i++) {
    if (!lanes.present[i]) continue;
    bool stash = i == PTN_DISK_READ || i == PTN_DISK_WRITE || i == PTN_UPLOAD || i == PTN_OFFLOAD;
    double drag_ns = lanes.drag_ns_per_byte[i] + (stash ? ptn_max_f64(profile->stash_drag_ns_per_byte, 0) : 0);
    busy += drag_ns / lanes.ns_per_byte[0][i];
    idle += drag_ns / lanes.ns_per_byte[1][i];
  }
  double certain = busy > MOST_DRAG ? MOST_DRAG / busy : 1;
  return idle * certain > 1 ? 1 / idle : certain;
}

static void read_request(ptn_bounds *bounds) {
  const ptn_plan_request *request = bounds->course.request;
  ptn_lanes_read(&bounds->lanes, request->profile);
  for (int i = 0; i < PTN_N_LANES; i++) {
    bounds->best_ns_per_byte[i] = ptn_min_f64(bounds->lanes.ns_per_byte[0][i], bounds->lanes.ns_per_byte[1][i]);
  }
  bounds->disk_alone = !bounds->lanes.present[PTN_UPLOAD] && request->n_ranks <= 1;
  bounds->drag_part = ptn_bounds_drag_part(request->profile);
  bounds->keeps = bounds->course.n_passes - (request->grads_outlive_backward ? 0 : 1);
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    bounds->transfers[c] = make_transfers(bounds, c, true);
    bounds->transfers[request->n_chunks + c] = make_transfers(bounds, c, false);
  }
}

ptn_status ptn_bounds_create(ptn_bounds **out, const ptn_plan_request *request, const uint32_t *consumer_of_phase) {
  ptn_bounds *bounds = *out = calloc(1, sizeof *bounds);
  if (!bounds) return ptn_fail(PTN_MEMORY, "no memory for the bounds of a plan");
  ptn_status status = ptn_course_create(&bounds->course, request, consumer_of_phase);
  if (status == PTN_OK) {
    bounds->holder = calloc((size_t)request->n_chunks + 1, sizeof *bounds->holder);
    bounds->free_ns = calloc((size_t)request->n_chunks + 1, sizeof *bounds->free_ns);
    bounds->transfers = calloc(2 * (size_t)request->n_chunks + 1, sizeof *bounds->transfers);
    bounds->last = calloc((size_t)request->n_chunks + 1, sizeof *bounds->last);
    bounds->releases = calloc((size_t)request->n_accesses + 1, sizeof *bounds->releases);
    if (!bounds->transfers || !bounds->holder || !bounds->free_ns || !bounds->last || !bounds->releases)
      status = ptn_fail(PTN_MEMORY, "no memory for bounds of %u chunks", request->n_chunks);
  }
  if (status != PTN_OK) {
    ptn_bounds_destroy(bounds);
    *out = NULL;
    return status;
  }
  read_request(bounds);
  return PTN_OK;
}

void ptn_bounds_destroy(ptn_bounds *bounds) {
  if (!bounds) return;
  ptn_course_destroy(&bounds->course);
  free(bounds->transfers);
  free(bounds->holder);
  free(bounds->free_ns);
  free(bounds->last);
  free(bounds->releases);
  free(bounds);
}

/* ---- the walk ---- */

static bool recomputes_in(const walk *at, const ptn_phase *phase) {
  return phase->backward && phase->block >= 0 && ptn_mode_recomputes(at->candidate->modes[phase->block]);
}

/* Before backward comes to the blocks: what is saved is written so far that the phase has room. */
static void wait_for_room(const ptn_bounds *bounds, walk *at, uint32_t p, double write_ns_per_byte) {
  const ptn_candidate *candidate = at->candidate;
  double room_bytes =
      (double)candidate->above_static_bytes - (double)bounds->course.request->fixed_bytes - (double)candidate->live[p].peak_bytes;
  double written_bytes = at->put_bytes - ptn_max_f64(room_bytes, 0);
  written_bytes = ptn_min_f64(written_bytes, at->put_bytes - at->total_stash_bytes / PTN_KEPT_PART);
  if (written_bytes <= at->written_bytes) return;
  at->written_bytes = written_bytes;
  at->compute_ns = ptn_max_f64(at->compute_ns, at->put_ns + (written_bytes - 1) * write_ns_per_byte);
}

static void spend(walk *at, double ns) {
  at->compute_ns += ns;
  at->work_ns += ns;
}

/* Fetches need not come in the order of their demands. Those of all demands so far, which could not begin before since_ns, one
 * after another: so much is certain, and as much of all of them from the begin of the pass. */
static void wait_for_fetch(walk *at, double free_ns, double ns) {
  at->all_fetches_ns += ns;
  if (free_ns > at->fetch_ns) at->since_ns = free_ns, at->fetch_ns = free_ns + ns;
  else if (free_ns >= at->since_ns) at->fetch_ns += ns;
  if (free_ns + ns > at->fetch_ns) at->since_ns = free_ns, at->fetch_ns = free_ns + ns;
  if (at->all_fetches_ns > at->fetch_ns) at->since_ns = 0, at->fetch_ns = at->all_fetches_ns;
}

static void demand(const ptn_bounds *bounds, walk *at, uint32_t chunk) {
  uint32_t slot = (uint32_t)at->candidate->slot_of_chunk[chunk];
  spend(at, (double)bounds->course.request->profile->access_ns);
  if (bounds->holder[slot] == chunk) return;
  const transfer *fetch = &transfers_of(bounds, at, chunk)->fetch;
  move(at, fetch, 1);
  wait_for_fetch(at, bounds->free_ns[slot], fetch->ns);
  /* The cost of the access itself comes after the wait. */
  at->compute_ns = ptn_max_f64(at->compute_ns, at->fetch_ns + (double)bounds->course.request->profile->access_ns);
  bounds->holder[slot] = chunk;
}

/* A chunk whose gradients are made stays in its slot until it is updated there. */
static void hold_slot(const ptn_bounds *bounds, const walk *at, uint32_t chunk, uint32_t p) {
  uint32_t slot = (uint32_t)at->candidate->slot_of_chunk[chunk];
  if (bounds->holder[slot] != chunk || bounds->last[slot] == NOTHING) return;
  uint32_t last_phase = bounds->course.request->access_phases[bounds->last[slot]];
  bool makes = last_phase == p || bounds->course.request->phases[last_phase].backward;
  if (makes) bounds->free_ns[slot] = ptn_max_f64(bounds->free_ns[slot], at->update_ns);
}

/* The chunk, which is not persistent, is complete now. */
static void walk_update(const ptn_bounds *bounds, walk *at, uint32_t chunk, uint32_t p) {
  const ptn_course *course = &bounds->course;
  bool behind = course->n_passes == 1 && !course->request->grads_outlive_backward;
  const chunk_transfers *transfers = transfers_of(bounds, at, chunk);
  if (course->n_passes == 1) enqueue(at, at->compute_ns, behind ? &transfers->update : &transfers->keep);
  move(at, &transfers->update, 1);
  if (bounds->keeps > 0) move(at, &transfers->keep, 1);
  if (bounds->keeps > 1) move(at, &transfers->add, bounds->keeps - 1);
  at->update_ns = (behind ? ptn_max_f64(at->update_ns, at->compute_ns) : at->update_ns) + transfers->update.ns;
  if (behind && !bounds->lanes.present[PTN_UPLOAD]) hold_slot(bounds, at, chunk, p);
}

static void walk_accesses(const ptn_bounds *bounds, walk *at, uint32_t p, bool recomputes) {
  const ptn_course *course = &bounds->course;
  for (uint32_t i = course->first_access[p]; i < course->first_access[p + 1]; i++) {
    uint32_t chunk = course->request->accesses[i];
    if (!course->own[i] && !recomputes) continue;
    bool demands = chunk >= at->candidate->n_persist;
    if (demands) demand(bounds, at, chunk);
    spend(at, course->own_ns[i] + (recomputes ? course->again_ns[i] : 0));
    if (!demands) continue;
    bounds->free_ns[at->candidate->slot_of_chunk[chunk]] = at->compute_ns;
    bounds->last[at->candidate->slot_of_chunk[chunk]] = i;
    if (course->completes[i]) walk_update(bounds, at, chunk, p);
    if (bounds->releases[i] != NOTHING) enqueue(at, at->compute_ns, &transfers_of(bounds, at, bounds->releases[i])->fetch);
  }
}

static void walk_phase(const ptn_bounds *bounds, walk *at, uint32_t p) {
  const ptn_course *course = &bounds->course;
  const ptn_phase *phase = &course->request->phases[p];
  const ptn_profile *profile = course->request->profile;
  ptn_mode mode = phase->block >= 0 ? at->candidate->modes[phase->block] : PTN_KEEP;
  bool recomputes = recomputes_in(at, phase);
  if (recomputes) spend(at, (double)profile->checkpoint_ns);
  if (ptn_mode_swaps(mode)) spend(at, (double)profile->swap_ns / 2);
  if (course->first_access[p] == course->first_access[p + 1]) {
    spend(at, (double)profile->phases[p].compute_ns + (recomputes ? (double)profile->phases[p].recompute_ns : 0));
  } else {
    walk_accesses(bounds, at, p, recomputes);
  }
}

/* Chunks that the end of the phase completes. */
static void walk_updates(const ptn_bounds *bounds, walk *at, uint32_t p) {
  const ptn_course *course = &bounds->course;
  for (uint32_t i = course->first_complete[p]; i < course->first_complete[p + 1]; i++) {
    uint32_t chunk = course->complete[i];
    if (chunk >= at->candidate->n_persist && !course->complete_inside[chunk]) walk_update(bounds, at, chunk, p);
  }
}

/* So many passes that are alike: each finds in the slots what is there, and leaves what it reads. */
static void walk_fetches(const ptn_bounds *bounds, walk *at, double times) {
  const ptn_course *course = &bounds->course;
  const ptn_plan_request *request = course->request;
  for (uint32_t p = 0; p < request->n_phases; p++) {
    bool recomputes = recomputes_in(at, &request->phases[p]);
    for (uint32_t i = course->first_access[p]; i < course->first_access[p + 1]; i++) {
      uint32_t chunk = request->accesses[i];
      if ((!course->own[i] && !recomputes) || chunk < at->candidate->n_persist) continue;
      uint32_t slot = (uint32_t)at->candidate->slot_of_chunk[chunk];
      if (bounds->holder[slot] != chunk) move(at, &transfers_of(bounds, at, chunk)->fetch, times);
      bounds->holder[slot] = chunk;
    }
  }
}

/* A step is over: of what is in the slots the next one finds what is not out of date, and nothing was used in it yet. */
static void begin_step(const ptn_bounds *bounds, const walk *at) {
  const ptn_plan_request *request = bounds->course.request;
  bool link = bounds->lanes.present[PTN_UPLOAD];
  for (uint32_t c = 0; c < request->n_chunks; c++) {
    uint32_t *holder = &bounds->holder[c];
    if (*holder != NOTHING && !ptn_course_leaves(at->candidate, *holder, link)) *holder = NOTHING;
    bounds->last[c] = NOTHING;
  }
}

/* Which fetch each access makes possible, by leaving its slot; the first ones are so from the begin on. */
static void find_releases(const ptn_bounds *bounds, walk *at) {
  const ptn_course *course = &bounds->course;
  const ptn_plan_request *request = course->request;
  for (uint32_t p = 0; p < request->n_phases; p++) {
    bool recomputes = recomputes_in(at, &request->phases[p]);
    for (uint32_t i = course->first_access[p]; i < course->first_access[p + 1]; i++) {
      uint32_t chunk = request->accesses[i];
      bounds->releases[i] = NOTHING;
      if ((!course->own[i] && !recomputes) || chunk < at->candidate->n_persist) continue;
      uint32_t slot = (uint32_t)at->candidate->slot_of_chunk[chunk];
      if (bounds->holder[slot] != chunk) {
        if (bounds->last[slot] == NOTHING) enqueue(at, 0, &transfers_of(bounds, at, chunk)->fetch);
        else bounds->releases[bounds->last[slot]] = chunk;
      }
      bounds->holder[slot] = chunk;
      bounds->last[slot] = i;
    }
  }
}

/* Of the stash's bytes up to those that phase p consumes, what was written must be read again before it begins. */
static void wait_for_stash(walk *at, double start_bytes, double read_ns_per_byte) {
  double read_bytes = at->written_bytes - start_bytes - 1;
  if (read_bytes > 0) at->compute_ns = ptn_max_f64(at->compute_ns, at->turn_ns + read_bytes * read_ns_per_byte);
}

/* The first pass. start_bytes of what each forward phase saves are left in room_bytes, which is the course's scratch. */
static void walk_pass(const ptn_bounds *bounds, walk *at, const transfer *write, const transfer *read) {
  const ptn_course *course = &bounds->course;
  const ptn_plan_request *request = course->request;
  double *start_bytes = course->room_bytes;
  for (uint32_t p = 0; p < request->n_phases; p++) start_bytes[p] = -1;
  for (uint32_t p = 0; p < request->n_phases; p++) {
    if (request->phases[p].backward && request->phases[p].block >= 0 && !at->turned) {
      at->turned = true;
      at->turn_ns = at->compute_ns;
      transfer all = *read;
      for (int i = 0; i < N_QUEUES; i++) all.queue_ns[i] *= at->written_bytes;
      enqueue(at, at->turn_ns, &all);
    }
    if (at->put_bytes > 0 && !at->turned) wait_for_room(bounds, at, p, write->ns);
    if (start_bytes[p] >= 0) wait_for_stash(at, start_bytes[p], read->ns);
    double begin_ns = at->compute_ns, begin_work_ns = at->work_ns;
    walk_phase(bounds, at, p);
    uint64_t saved_bytes = ptn_swap_phase_bytes(request, course->consumer_of_phase, at->candidate->modes, p);
    if (saved_bytes > 0 && at->put_bytes == 0) at->put_ns = begin_ns + (at->work_ns - begin_work_ns) / 2;
    if (saved_bytes > 0) start_bytes[course->consumer_of_phase[p]] = at->put_bytes;
    at->put_bytes += (double)saved_bytes;
    walk_updates(bounds, at, p);
  }
}

static double in_step_ns(const ptn_bounds *bounds, walk *at) {
  const ptn_plan_request *request = bounds->course.request;
  double bytes = 0;
  for (uint32_t c = 0; c < at->candidate->n_persist; c++) {
    const ptn_plan_chunk *chunk = &request->chunks[c];
    if (chunk->grad_bytes > 0) bytes += (double)(chunk->param_bytes + chunk->state_bytes);
  }
  if (bytes > 0 && request->profile->step_update_bytes_per_s <= 0) at->impossible = true;
  return at->impossible || bytes == 0 ? 0 : bytes * 1e9 / request->profile->step_update_bytes_per_s;
}

/* ---- the bound ---- */

static double stash_bytes(const ptn_bounds *bounds, const ptn_candidate *candidate) {
  const ptn_course *course = &bounds->course;
  return (double)ptn_swap_stash_bytes(course->request, course->consumer_of_phase, candidate->modes);
}

/* Its parts are found in the order in which each needs the one before. */
int64_t ptn_bound_ns(ptn_bounds *bounds, const ptn_candidate *candidate, uint64_t *moved_bytes) {
  const ptn_plan_request *request = bounds->course.request;
  const ptn_profile *profile = request->profile;
  walk at = {.candidate = candidate, .total_stash_bytes = stash_bytes(bounds, candidate)};
  ptn_tiers tiers;
  ptn_tiers_split(request, candidate->n_persist, (uint64_t)at.total_stash_bytes, &tiers);
  bool link = bounds->lanes.present[PTN_UPLOAD];
  transfer write =
      make_transfer(bounds, (const double[PTN_N_LANES]){[PTN_OFFLOAD] = link, [PTN_DISK_WRITE] = !tiers.stash_on_host});
  transfer read = make_transfer(bounds, (const double[PTN_N_LANES]){[PTN_UPLOAD] = link, [PTN_DISK_READ] = !tiers.stash_on_host});
  for (uint32_t c = 0; c < request->n_chunks; c++) bounds->holder[c] = NOTHING, bounds->free_ns[c] = 0;
  walk_fetches(bounds, &at, 0); /* the step before, for what it leaves */
  begin_step(bounds, &at);
  find_releases(bounds, &at);
  begin_step(bounds, &at);
  walk_pass(bounds, &at, &write, &read);
  double passes = bounds->course.n_passes, fixed_ns = (double)profile->step_fixed_ns, stash_drag_ns = 0;
  if (bounds->course.n_passes > 1) walk_fetches(bounds, &at, bounds->course.n_passes - 1);
  double chunk_bytes = 0;
  for (int i = 0; i < PTN_N_LANES; i++) chunk_bytes += at.bytes[i];
  if (at.written_bytes > 0) {
    move(&at, &write, passes * at.written_bytes);
    move(&at, &read, passes * at.written_bytes);
    stash_drag_ns = 2 * passes * at.written_bytes * profile->stash_drag_ns_per_byte;
  }
  *moved_bytes = (uint64_t)(chunk_bytes + 2 * at.total_stash_bytes);

  double open_ns = in_step_ns(bounds, &at), lanes_ns = ptn_max_f64(pipeline_ns(bounds, at.bytes), at.readers_ns),
         drag_ns = stash_drag_ns;
  for (int i = 0; i < PTN_N_LANES; i++) drag_ns += at.bytes[i] * bounds->lanes.drag_ns_per_byte[i];
  double work_ns = passes * at.work_ns + drag_ns * bounds->drag_part;
  double walk_ns = at.compute_ns + (passes - 1) * at.work_ns;
  bool behind = bounds->course.n_passes == 1 && !request->grads_outlive_backward;
  for (int i = 0; i < N_QUEUES; i++) walk_ns = ptn_max_f64(walk_ns, at.queue_ns[i]);
  if (request->grads_outlive_backward) walk_ns += at.update_ns;
  if (behind) walk_ns = ptn_max_f64(walk_ns, at.update_ns);
  double bound_ns = (ptn_max_f64(work_ns, ptn_max_f64(walk_ns, lanes_ns)) + open_ns + fixed_ns) * (1 - 1e-9) - 16;
  return at.impossible || bound_ns >= (double)PTN_NEVER_NS ? PTN_NEVER_NS : bound_ns > 0 ? (int64_t)bound_ns : 0;
}
