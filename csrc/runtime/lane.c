/* The update lane: it streams chunks through a ring of pieces, behind backward, with a thread of its own.
 *
 * A job is one chunk: its gradients, and what to do with them. It is cut into pieces. Each piece is read (parameters where the
 * slot does not have them, state, gradients kept on disk), computed, and written to the chunk's other extent; reads of later
 * pieces and writes of earlier ones go on meanwhile. Pieces start, are computed and finish in one order, so the ring is a queue with
 * three ends: tail (oldest not written) <= middle (next to compute) <= head (next to start).
 *
 * Reading ahead: the chunk that is expected to be complete next has an open job, whose state is read while its gradients are
 * still being made; the gradients join it, or it is cancelled when another chunk comes first. An open job is the last in the
 * queue, holds nothing but pieces of the ring, and decides about its parameters only when it is joined.
 *
 * What comes from the disk is checked and what goes there is summed by whoever computes with it, right before and after, a part at a
 * time: so memory is read once for all three. (Parameters in a slot were checked when they were demanded there.)
 *
 * Who computes a piece: the lane's thread, where a core is free for it. Where torch's threads take all of them it would take one
 * away, for as long, while the others of the team wait. There the driving thread computes what is ready with the whole team,
 * whenever it comes by the engine between two operations, and while it waits for the lane. When it has not come by for AWAY_NS, as
 * in a long operation or a long wait for activations, the lane's thread computes all the same.
 *
 * Invariants: a job starts only when no earlier job of its chunk is left; a slot that a job reads is pinned from the moment
 * the job is queued; the extent in use is never written; each piece is computed by whoever moves the middle past it.
 */
#include <stdlib.h>
#include <string.h>

#include "base/openmp.h"
#include "runtime/internal.h"

#define AWAY_NS ((int64_t)10000000)

static piece *piece_at(const ptn_engine *engine, uint64_t position) { return &engine->pieces[position % engine->n_pieces]; }

/* ---- queueing ---- */

/* Locked. A job that took its slot changes the parameters there in place. */
static void take_slot(ptn_engine *engine, job *job) {
  if (!job->in_slot) return;
  slot *slot = &engine->slots[engine->chunks[job->chunk].slot];
  bool good = slot->chunk == job->chunk && slot->state == SLOT_LOADED && !slot->broken && slot->in_use == 0 &&
              slot->shadow == job->from_shadow;
  if (good) {
    slot->broken = true;
  } else {
    job->in_slot = false;
    slot->pins--;
    ptn_broadcast(&engine->changed); /* a demand may wait for the slot */
  }
}

static void append(ptn_engine *engine, job *job) {
  engine->n_jobs++;
  atomic_store_explicit(&engine->sharing, engine->shares, memory_order_relaxed);
  if (engine->last_job) engine->last_job->next = job;
  else engine->first_job = job;
  engine->last_job = job;
  if (!engine->starting) engine->starting = job;
  ptn_signal(&engine->lane_work);
}

/* The chunk's parameters are taken from its slot where they are there and nobody else uses them; then the slot is pinned. */
static void pin_slot(ptn_engine *engine, job *job) {
  const chunk *chunk = &engine->chunks[job->chunk];
  if (!job->update || chunk->slot < 0 || engine->over.device) return; /* the CPU cannot work in a device's slot */
  slot *slot = &engine->slots[chunk->slot];
  if (slot->chunk != job->chunk || slot->state != SLOT_LOADED || slot->in_use > 0 || slot->unchecked) return;
  job->in_slot = true;
  slot->pins++;
}

static void note_order(ptn_engine *engine, uint32_t number) {
  if (engine->n_updates < engine->n_chunks) engine->updates[engine->n_updates++] = number;
}

/* The open job gets the gradients of `from`, which is freed. */
static void join(ptn_engine *engine, job *open, job *from) {
  open->n_grads = from->n_grads;
  memcpy(open->grads, from->grads, from->n_grads * sizeof from->grads[0]);
  open->grad_bytes = from->grad_bytes;
  open->failed = from->failed;
  for (uint32_t i = 0; i < open->n_grads; i++)
    if (open->grads[i].offload) ptn_offload_await(open->grads[i].offload, open);
  free(from);
  open->open = false;
  engine->ahead = NULL;
  pin_slot(engine, open);
}

void ptn_lane_enqueue(ptn_engine *engine, job *job) {
  chunk *chunk = &engine->chunks[job->chunk];
  struct job *ahead = engine->ahead;
  chunk->jobs++;
  engine->job_bytes += job->grad_bytes;
  atomic_store_explicit(&engine->has_ready, true, memory_order_relaxed); /* of what was read ahead */
  if (job->update) note_order(engine, job->chunk);
  if (ahead && ahead->chunk == job->chunk && job->update && !chunk->has_shadow && !ptn_spilled_any(engine, chunk)) {
    join(engine, ahead, job);
    if (ahead->opened) take_slot(engine, ahead);
    ptn_signal(&engine->lane_work);
  } else {
    ptn_lane_cancel(engine);
    pin_slot(engine, job);
    append(engine, job);
  }
  if (engine->read_ahead) ptn_lane_read_ahead(engine);
}

void ptn_lane_read_ahead(ptn_engine *engine) {
  if (engine->ahead || engine->n_updates >= engine->n_last_updates || engine->lane_status != PTN_OK || engine->n_pieces == 0)
    return;
  uint32_t number = engine->last_updates[engine->n_updates];
  const chunk *chunk = &engine->chunks[number];
  if (chunk->jobs || chunk->has_shadow || chunk->zero_state || chunk->home != HOME_DISK || engine->n_arrays == 0) return;
  job *job = calloc(1, sizeof *job + chunk->n_params * sizeof job->grads[0]);
  if (!job) return; /* reading ahead is a convenience */
  job->chunk = number;
  job->update = job->open = true;
  engine->ahead = job;
  append(engine, job);
}

void ptn_lane_cancel(ptn_engine *engine) {
  if (!engine->ahead) return;
  engine->ahead->open = false;
  engine->ahead->cancelled = true;
  engine->ahead = NULL;
  ptn_signal(&engine->lane_work);
}

void ptn_lane_owner(ptn_engine *engine, void *owner) {
  if (!owner) return;
  if (engine->n_owners == engine->max_owners) abort(); /* there was room when it was taken over */
  engine->owners[engine->n_owners++] = owner;
}

void ptn_lane_fail(ptn_engine *engine, ptn_status status, const ptn_error *error) {
  if (engine->lane_status != PTN_OK) return;
  engine->lane_status = status;
  engine->lane_error = *error;
}

void ptn_lane_settle(ptn_engine *engine) {
  ptn_lane_cancel(engine);
  while (engine->n_jobs) ptn_lane_wait(engine);
}

/* ---- a piece ---- */

static void note_piece_io(ptn_engine *engine, const piece *piece, const ptn_io *io) {
  if (io->status != PTN_OK) return;
  ptn_trace_add(engine->trace, (ptn_trace_event){.start_ns = io->start_ns,
                                                 .end_ns = io->end_ns,
                                                 .bytes = io->bytes,
                                                 .number = (int32_t)piece->job->chunk,
                                                 .lane = io->write ? PTN_LANE_WRITE : PTN_LANE_READ,
                                                 .kind = io == &piece->io[PIECE_GRAD] ? PTN_TRACE_GRADIENTS : PTN_TRACE_STATE});
}

static void note_computed(ptn_engine *engine, const piece *piece, int64_t start_ns, int64_t end_ns) {
  ptn_trace_add(engine->trace, (ptn_trace_event){.start_ns = start_ns,
                                                 .end_ns = end_ns,
                                                 .number = (int32_t)piece->job->chunk,
                                                 .lane = PTN_LANE_UPDATE,
                                                 .kind = PTN_TRACE_UPDATE});
}

static const char *name_of(uint32_t array) {
  return array == PIECE_GRAD ? "gradients" : array == PIECE_PARAM ? "parameters" : "state";
}

static void note_error(piece *piece, uint32_t array, ptn_status status) {
  piece->status = status;
  ptn_error_of(&piece->error, "%s of chunk %u", name_of(array), piece->job->chunk);
}

/* Locked. A piece has all that it was waiting for. */
static void tell_ready(ptn_engine *engine) {
  ptn_signal(&engine->lane_work);
  atomic_store_explicit(&engine->has_ready, true, memory_order_relaxed);
  if (engine->driver_is_here > 0) ptn_broadcast(&engine->changed);
}

static void on_piece_io(ptn_io *io) {
  piece *piece = io->context;
  ptn_engine *engine = piece->engine;
  note_piece_io(engine, piece, io); /* while a request is in flight, a piece keeps its job */
  ptn_lock(&engine->mutex);
  if (io->status != PTN_OK && piece->status == PTN_OK) {
    piece->error = io->error;
    note_error(piece, (uint32_t)(io - piece->io), io->status);
  }
  if (--piece->in_flight == 0) tell_ready(engine);
  ptn_unlock(&engine->mutex);
}

static uint64_t widening_of(const ptn_engine *engine, uint32_t array) {
  return array >= PIECE_STATE && array < PIECE_GRAD ? engine->widening : 1;
}

/* Of one array of a piece; array_begin is where the chunk's array lies in the file. */
static void prepare_io(piece *piece, uint32_t array, void *memory, uint64_t array_begin, bool write) {
  uint64_t widening = widening_of(piece->engine, array);
  ptn_io *io = &piece->io[array];
  memset(io, 0, sizeof *io);
  io->memory = memory;
  io->offset = array_begin + widening * piece->offset_bytes;
  io->bytes = widening * piece->bytes;
  io->write = write;
  io->caller_sums = true;
  io->done = on_piece_io;
  io->context = piece;
}

/* Unlocked: submits the requests that `mask` names; in_flight was set before, since the first may finish at once. */
static void submit_piece(ptn_engine *engine, piece *piece, uint32_t mask) {
  ptn_io *ios[PIECE_ARRAYS];
  size_t count = 0;
  for (uint32_t a = 0; a < PIECE_ARRAYS; a++)
    if (mask >> a & 1) ios[count++] = &piece->io[a];
  ptn_store_submit_all(engine->store, ios, count);
}

static uint32_t bits(uint32_t mask) { return (uint32_t)__builtin_popcount(mask); }

static char *slot_memory(const ptn_engine *engine, const piece *piece) {
  return (char *)engine->slots[engine->chunks[piece->job->chunk].slot].region->memory + piece->offset_bytes;
}

static char *values_of(const ptn_engine *engine, const piece *piece) {
  return piece->job->in_slot ? slot_memory(engine, piece) : piece->arrays[PIECE_PARAM];
}

static uint32_t n_arrays_of(const ptn_engine *engine, const job *job) { return job->update ? engine->n_arrays : 0; }

/* Prepares the reads of a piece, zeroes what was never written; notes which arrays are read. */
static void prepare_reads(ptn_engine *engine, piece *piece) {
  const job *job = piece->job;
  const chunk *chunk = &engine->chunks[job->chunk];
  uint64_t source = chunk->extents[job->from_shadow ? 1 - chunk->current : chunk->current].offset;
  uint32_t mask = 0;
  if (piece->has_params && job->update && !job->in_slot) {
    prepare_io(piece, PIECE_PARAM, piece->arrays[PIECE_PARAM], source, false);
    mask |= 1u << PIECE_PARAM;
  }
  for (uint32_t i = 0; i < n_arrays_of(engine, job); i++) {
    void *array = piece->arrays[PIECE_STATE + i];
    if (i < engine->n_states ? job->zero_state : job->zero_master) {
      memset(array, 0, engine->widening * piece->bytes);
      continue;
    }
    prepare_io(piece, PIECE_STATE + i, array, source + array_offset(engine, chunk, i), false);
    mask |= 1u << (PIECE_STATE + i);
  }
  if (job->reads_grads) {
    prepare_io(piece, PIECE_GRAD, piece->arrays[PIECE_GRAD], chunk->grads.offset, false);
    mask |= 1u << PIECE_GRAD;
  }
  piece->read = mask;
}

static uint32_t prepare_writes(ptn_engine *engine, piece *piece) {
  const job *job = piece->job;
  const chunk *chunk = &engine->chunks[job->chunk];
  if (!job->update) {
    prepare_io(piece, PIECE_GRAD, piece->arrays[PIECE_GRAD], chunk->grads.offset, true);
    return 1u << PIECE_GRAD;
  }
  uint64_t target = chunk->extents[1 - chunk->current].offset;
  prepare_io(piece, PIECE_PARAM, values_of(engine, piece), target, true);
  uint32_t mask = 1u << PIECE_PARAM;
  for (uint32_t i = 0; i < engine->n_arrays; i++) {
    prepare_io(piece, PIECE_STATE + i, piece->arrays[PIECE_STATE + i], target + array_offset(engine, chunk, i), true);
    mask |= 1u << (PIECE_STATE + i);
  }
  return mask;
}

/* ---- a job ---- */

/* Locked. Decides what the job works on, at its start: earlier jobs of the chunk have ended. */
static void open_job(ptn_engine *engine, job *job) {
  ptn_job_open(engine, job);
  take_slot(engine, job);
}

static void close_job(ptn_engine *engine, job *job) {
  chunk *chunk = &engine->chunks[job->chunk];
  if (job->in_slot) {
    slot *slot = &engine->slots[chunk->slot];
    slot->pins--;
    slot->broken = false;
    slot->shadow = true;
    if (job->failed) slot->state = SLOT_EMPTY;
  } else if (job->update && !job->cancelled && chunk->slot >= 0) {
    slot *slot = &engine->slots[chunk->slot];
    if (slot->chunk == job->chunk && slot->shadow) slot->state = SLOT_EMPTY; /* it lacks what this job made */
  }
  if (--engine->n_jobs == 0) atomic_store_explicit(&engine->sharing, false, memory_order_relaxed);
  engine->job_bytes -= job->grad_bytes;
  engine->owner_bytes += job->grad_bytes;
  if (engine->first_job != job) abort(); /* jobs end in order: one that was passed by would never end */
  engine->first_job = job->next;
  if (!engine->first_job) engine->last_job = NULL;
  ptn_gradients_end_job(engine, job);
  ptn_broadcast(&engine->changed);
  ptn_residency_advance(engine);
}

static bool first_of_its_chunk(const ptn_engine *engine, const job *job) {
  for (const struct job *other = engine->first_job; other != job; other = other->next)
    if (other->chunk == job->chunk) return false;
  return true;
}

/* Locked. Starts the next piece, or ends the start of a job; false when there is nothing to start. */
static bool start_piece(ptn_engine *engine) {
  job *job = engine->starting;
  if (!job || engine->piece_head - engine->piece_tail == engine->n_pieces) return false;
  if (job->next_offset == 0) {
    if (!first_of_its_chunk(engine, job)) return false;
    open_job(engine, job);
    if (engine->lane_status != PTN_OK && job->open) ptn_lane_cancel(engine);
    job->failed |= engine->lane_status != PTN_OK;
  }
  bool useless = job->failed || job->cancelled;
  uint64_t end = engine->chunks[job->chunk].param_bytes;
  uint64_t bytes = ptn_min_u64(engine->piece_bytes, end - job->next_offset);
  while (!useless && job->next_offset < end && !ptn_part_wanted(engine, job, job->next_offset, bytes)) {
    job->next_offset += bytes;
    bytes = ptn_min_u64(engine->piece_bytes, end - job->next_offset);
  }
  if (useless || job->next_offset == end) {
    job->all_started = true;
    engine->starting = job->next;
    if (job->pieces == 0 && job->arriving == 0 && engine->first_job == job) close_job(engine, job);
    return true;
  }
  piece *piece = piece_at(engine, engine->piece_head++);
  piece->job = job;
  piece->state = PIECE_READING;
  piece->status = PTN_OK;
  piece->offset_bytes = job->next_offset;
  piece->bytes = bytes;
  job->next_offset += bytes;
  job->pieces++;
  if (job->next_offset == end) {
    job->all_started = true;
    engine->starting = job->next;
  }
  piece->has_params = !job->open;
  piece->in_flight = 1; /* held until all requests are submitted */
  ptn_unlock(&engine->mutex);
  prepare_reads(engine, piece);
  ptn_lock(&engine->mutex);
  piece->in_flight += bits(piece->read);
  ptn_unlock(&engine->mutex);
  submit_piece(engine, piece, piece->read);
  ptn_lock(&engine->mutex);
  if (--piece->in_flight == 0) tell_ready(engine);
  return true;
}

static void note_failure(ptn_engine *engine, piece *piece) {
  if (piece->status == PTN_OK) return;
  piece->job->failed = true;
  if (!piece->job->cancelled) ptn_lane_fail(engine, piece->status, &piece->error); /* else nobody needs it */
}

/* Locked. A piece that was read ahead without its parameters turns out to need them: the slot does not have them. */
static void read_params(ptn_engine *engine, piece *piece) {
  const chunk *chunk = &engine->chunks[piece->job->chunk];
  piece->has_params = true;
  piece->read |= 1u << PIECE_PARAM;
  prepare_io(piece, PIECE_PARAM, piece->arrays[PIECE_PARAM], chunk->extents[chunk->current].offset, false);
  piece->in_flight = 1;
  ptn_unlock(&engine->mutex);
  submit_piece(engine, piece, 1u << PIECE_PARAM);
  ptn_lock(&engine->mutex);
}

/* A piece that is computed, by one thread or several. */
typedef struct work {
  ptn_engine *engine;
  piece *piece;
  fenv_t arithmetic;
  uint64_t from[PIECE_ARRAYS]; /* where its arrays were read */
  uint64_t part_bytes;
  uint32_t written; /* arrays that are to be written, a bit each */
  atomic_bool failed; /* whoever sets it notes the error */
} work;

/* Notes an error where a page is not what was written to it. */
static bool check_part(work *work, uint64_t at, uint64_t bytes) {
  ptn_engine *engine = work->engine;
  piece *piece = work->piece;
  for (uint32_t a = 0; a < PIECE_ARRAYS; a++) {
    if (!(piece->read >> a & 1)) continue;
    uint64_t widening = widening_of(engine, a);
    char *memory = (char *)piece->arrays[a] + widening * at;
    ptn_status status = ptn_store_check(engine->store, false, memory, work->from[a] + widening * at, widening * bytes);
    if (status == PTN_OK) continue;
    if (!atomic_exchange(&work->failed, true)) {
      ptn_error_save(&piece->error);
      note_error(piece, a, status);
    }
    return false;
  }
  return true;
}

static void sum_part(const work *work, uint64_t at, uint64_t bytes) {
  const ptn_engine *engine = work->engine;
  for (uint32_t a = 0; a < PIECE_ARRAYS; a++) {
    if (!(work->written >> a & 1)) continue;
    const ptn_io *io = &work->piece->io[a];
    uint64_t skipped = widening_of(engine, a) * at;
    ptn_store_note(engine->store, false, (char *)io->memory + skipped, io->offset + skipped, widening_of(engine, a) * bytes);
  }
}

/* Parts from begin to end, with the arithmetic of the thread that drives, whoever this one is. */
static void compute_parts(void *context, size_t begin, size_t end) {
  work *work = context;
  ptn_engine *engine = work->engine;
  const piece *piece = work->piece;
  uint64_t end_bytes = ptn_min_u64(end * work->part_bytes, piece->bytes);
  fenv_t own;
  fegetenv(&own);
  fesetenv(&work->arithmetic);
  for (uint64_t at = begin * work->part_bytes; at < end_bytes; at += work->part_bytes) {
    part part = {
        .job = piece->job, .offset_bytes = piece->offset_bytes + at, .bytes = ptn_min_u64(work->part_bytes, piece->bytes - at)};
    for (uint32_t a = 0; a < PIECE_ARRAYS; a++)
      if (piece->arrays[a]) part.arrays[a] = (char *)piece->arrays[a] + widening_of(engine, a) * at;
    part.arrays[PIECE_PARAM] = values_of(engine, piece) + at;
    if (atomic_load(&work->failed) || !check_part(work, at, part.bytes)) break;
    ptn_part_compute(engine, &part);
    sum_part(work, at, part.bytes);
  }
  fesetenv(&own);
}

/* Unlocked. Returns the mask of writes, which are prepared; none where the piece has an error now. */
static uint32_t compute_piece(ptn_engine *engine, piece *piece, const fenv_t *arithmetic, bool shared) {
  work work = {.engine = engine, .piece = piece, .arithmetic = *arithmetic, .part_bytes = PTN_UPDATE_PART_BYTES};
  for (uint32_t a = 0; a < PIECE_ARRAYS; a++) work.from[a] = piece->io[a].offset;
  work.written = prepare_writes(engine, piece);
  if (shared) { /* one for each thread: a ring may have small pieces */
    uint64_t threads = ptn_openmp_threads_count(), share_bytes = (piece->bytes + threads - 1) / threads;
    work.part_bytes = ptn_min_u64(work.part_bytes, ptn_round_up(share_bytes, PTN_PAGE_BYTES));
  }
  size_t n_parts = (size_t)((piece->bytes + work.part_bytes - 1) / work.part_bytes);
  if (shared) ptn_openmp_run(n_parts, 1, compute_parts, &work);
  else compute_parts(&work, 0, n_parts);
  return atomic_load(&work.failed) ? 0 : work.written;
}

/* The next to be computed, where it has been read, and its gradients are there. */
static const piece *next_ready(const ptn_engine *engine) {
  if (engine->piece_middle == engine->piece_head) return NULL;
  const piece *piece = piece_at(engine, engine->piece_middle);
  bool is_ready = piece->state == PIECE_READING && piece->in_flight == 0 && !piece->job->open && piece->job->arriving == 0;
  return is_ready ? piece : NULL;
}

/* shared: by the caller and its team. */
static bool compute_next(ptn_engine *engine, bool shared) {
  if (engine->piece_middle == engine->piece_head) return false;
  piece *piece = piece_at(engine, engine->piece_middle);
  if (piece->state != PIECE_READING || piece->in_flight) return false;
  if (piece->status != PTN_OK && piece->job->open) ptn_lane_cancel(engine);
  if (!next_ready(engine)) return false;
  if (piece->status == PTN_OK && !piece->has_params && !piece->job->in_slot && !piece->job->failed && !piece->job->cancelled) {
    read_params(engine, piece);
    return true;
  }
  engine->piece_middle++;
  piece->state = PIECE_WRITING;
  note_failure(engine, piece);
  if (piece->job->failed || piece->job->cancelled) return true;
  piece->in_flight = 1;
  fenv_t arithmetic = engine->arithmetic;
  ptn_unlock(&engine->mutex);
  int64_t begin = ptn_now_ns();
  uint32_t mask = compute_piece(engine, piece, &arithmetic, shared);
  int64_t end = ptn_now_ns();
  note_computed(engine, piece, begin, end);
  ptn_lock(&engine->mutex);
  engine->update_ns += end - begin;
  piece->in_flight += bits(mask);
  ptn_unlock(&engine->mutex);
  submit_piece(engine, piece, mask);
  ptn_lock(&engine->mutex);
  piece->in_flight--;
  note_failure(engine, piece); /* of its check; that of a write, if it is there already, comes to the same */
  return true;
}

static uintptr_t this_thread(void) {
  static _Thread_local char place;
  return (uintptr_t)&place;
}

void ptn_lane_driven(ptn_engine *engine) {
  atomic_store_explicit(&engine->driver, this_thread(), memory_order_relaxed);
  engine->shares = !engine->over.device && ptn_openmp_takes_all_cores();
}

static bool drives(const ptn_engine *engine) {
  return engine->shares && atomic_load_explicit(&engine->driver, memory_order_relaxed) == this_thread();
}

static void note_coming(ptn_engine *engine) { atomic_store_explicit(&engine->came_ns, ptn_now_ns(), memory_order_relaxed); }

/* Locked. The driving thread computes the next piece, or all that are ready, with its team; false: none was, or the caller is
 * another. */
static bool compute_shared(ptn_engine *engine, bool all) {
  if (!drives(engine)) return false;
  bool any = false;
  engine->driver_is_here++;
  atomic_store_explicit(&engine->has_ready, false, memory_order_relaxed);
  while (next_ready(engine) && (all || !any)) any |= compute_next(engine, true);
  if (next_ready(engine)) atomic_store_explicit(&engine->has_ready, true, memory_order_relaxed);
  engine->driver_is_here--;
  note_coming(engine);
  if (any) ptn_signal(&engine->lane_work); /* others can start, and end */
  return any;
}

bool ptn_engine_may_share(ptn_engine *engine) {
  if (!atomic_load_explicit(&engine->sharing, memory_order_relaxed)) return false;
  if (atomic_load_explicit(&engine->driver, memory_order_relaxed) != this_thread()) return false;
  note_coming(engine);
  return atomic_load_explicit(&engine->has_ready, memory_order_relaxed);
}

void ptn_engine_share(ptn_engine *engine) {
  if (!ptn_engine_may_share(engine)) return;
  ptn_lock(&engine->mutex);
  compute_shared(engine, true);
  ptn_unlock(&engine->mutex);
}

void ptn_lane_wait(ptn_engine *engine) {
  if (compute_shared(engine, false)) return;
  bool here = drives(engine);
  engine->driver_is_here += here;
  ptn_wait(&engine->changed, &engine->mutex);
  engine->driver_is_here -= here;
}

static bool finish_oldest(ptn_engine *engine) {
  if (engine->piece_tail == engine->piece_middle) return false;
  piece *piece = piece_at(engine, engine->piece_tail);
  if (piece->in_flight) return false;
  note_failure(engine, piece);
  job *job = piece->job;
  piece->state = PIECE_FREE;
  piece->job = NULL;
  engine->piece_tail++;
  job->pieces--;
  if (job->pieces == 0 && job->all_started) close_job(engine, job);
  return true;
}

/* A job that came to nothing before its first piece and waited for earlier jobs; looked for first, so that no later job ends
 * before it. */
static bool close_empty(ptn_engine *engine) {
  job *job = engine->first_job;
  if (!job || !job->all_started || job->pieces || job->arriving) return false;
  close_job(engine, job);
  return true;
}

/* Waits a while where the driving thread is here, or may come by, for what is next to be computed; false: it does not, or there is
 * nothing, or nothing to compute of it. */
static bool leave_for_sharing(ptn_engine *engine) {
  const piece *next = next_ready(engine);
  if (!engine->shares || engine->stop || !next) return false;
  bool has_all = next->has_params || next->job->in_slot;
  if (next->status != PTN_OK || next->job->failed || next->job->cancelled || !has_all) return false;
  int64_t came_ns = engine->driver_is_here > 0 ? ptn_now_ns() : atomic_load_explicit(&engine->came_ns, memory_order_relaxed);
  int64_t left_ns = came_ns + AWAY_NS - ptn_now_ns();
  /* Where the time is over the driver may have taken it meanwhile: then there is more to be looked at than what to compute. */
  return left_ns > 0 && (ptn_wait_ns(&engine->lane_work, &engine->mutex, left_ns) || !next_ready(engine));
}

static void *lane_body(void *argument) {
  ptn_engine *engine = argument;
  ptn_thread_be_prompt();
  ptn_lock(&engine->mutex);
  for (;;) {
    if (close_empty(engine) || finish_oldest(engine) || start_piece(engine)) continue;
    if (leave_for_sharing(engine) || compute_next(engine, false)) continue;
    if (engine->stop) break;
    ptn_wait(&engine->lane_work, &engine->mutex);
  }
  ptn_unlock(&engine->mutex);
  return NULL;
}

ptn_status ptn_lane_start(ptn_engine *engine) {
  PTN_TRY(ptn_thread_start(&engine->lane, "ptn-update", lane_body, engine));
  engine->lane_started = true;
  return PTN_OK;
}

void ptn_lane_stop(ptn_engine *engine) {
  ptn_lock(&engine->mutex);
  engine->stop = true;
  ptn_signal(&engine->lane_work);
  ptn_unlock(&engine->mutex);
  ptn_thread_join(engine->lane);
  engine->lane_started = false;
}
