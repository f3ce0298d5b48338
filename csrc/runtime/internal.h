/* What the runtime's files share. One mutex guards all of it; it is never held across I/O, an allocation of the arena's or a wait
 * other than on its own conditions. */
#ifndef PTN_RUNTIME_INTERNAL_H
#define PTN_RUNTIME_INTERNAL_H

#include <fenv.h>
#include <stdatomic.h>

#include "base/bytes.h"
#include "device/pool.h"
#include "device/transfers.h"
#include "runtime/engine.h"

#define NO_CHUNK UINT32_MAX
#define MAX_STREAMS 64 /* compute streams that one engine knows, bits of a mask; torch gives out 32 of each priority in turn */

/* MEMORY is where it is computed: RAM under the account, or the device's memory. HOST: pinned, beside a device. */
typedef enum home_kind { HOME_NOWHERE, HOME_MEMORY, HOME_HOST, HOME_DISK } home_kind;

struct job;
struct offload;
struct staged;

typedef struct chunk {
  uint64_t param_bytes;
  bool trained;
  home_kind home;
  /* home in memory */
  ptn_region *params;
  float *states; /* n_states arrays, or NULL: zeros */
  float *master; /* the same */
  uint64_t yielded; /* bytes that both had when they gave way; 0: they did not (states.c) */
  /* home on disk: the extent in use and its shadow hold parameters, then the state arrays, then the master */
  ptn_extent extents[2];
  /* home on the host: the set in use and, where it has one, the other; each laid out as an extent */
  ptn_pinned host[2];
  char *sum; /* on the host: gradients of this step, laid out as the parameters; NULL: none yet */
  ptn_pinned sum_pinned; /* its memory where the chunk has no shadow; else it is of the account */
  struct job *late_job; /* updates of this step that are made after commit; not on a lane yet */
  bool late; /* such a job is on the lane: the home is not current before it ends */
  uint32_t uploads; /* from the set in use, or from what it was, under way */
  int current;
  bool has_shadow; /* extents or host[1 - current] hold this step's update */
  bool zero_state; /* the state, in memory or of the current extent, was never written: zeros */
  bool zero_master; /* the same */
  ptn_extent grads; /* gradients on disk, laid out as the parameters */
  int32_t slot; /* -1: none */
  ptn_guard guard;
  uint32_t first_param, n_params; /* in engine->order_params */
  uint32_t missing; /* expected gradients that have not come in this pass */
  uint32_t arrived; /* gradients held, not yet queued */
  uint64_t arrived_bytes; /* as the arena counts them */
  uint32_t jobs; /* queued or running on the lane */
} chunk;

typedef struct param {
  uint32_t chunk;
  uint64_t offset_bytes, count;
  uint32_t group;
  bool trained, expected;
  bool spilled; /* its gradient on disk counts */
  bool updated; /* in this step's shadow */
  bool counted; /* came in this pass */
  bool summed; /* over a device: a gradient of this step went to the host's sum, or to the disk's */
  uint64_t steps;
  const void *grad; /* held, not yet queued; in host memory */
  void *owner;
  struct offload *offload; /* over a device: what brings grad */
  ptn_gradient_use use;
} param;

/* LOADING: its bytes are read from the disk, or being handed to the device. ORDERED: the device will bring them, before whatever
 * follows the slot's event `loaded`. LOADED: they are there. */
typedef enum slot_state { SLOT_EMPTY, SLOT_LOADING, SLOT_ORDERED, SLOT_LOADED } slot_state;

/* Over a device (runtime/uploads.c). */
typedef struct slot_device {
  ptn_event *free; /* behind the last use of what was there, on the compute stream */
  ptn_event *loaded; /* behind the last transfer of the newest load */
  bool used; /* free was recorded */
  uint32_t marked; /* number of the stream that it was recorded on */
  bool unmarked; /* recording it failed: nothing is loaded before that was made good */
  uint64_t streams; /* compute streams that use what is there, since free was recorded */
  uint64_t followed; /* compute streams that are ordered behind loaded */
  uint64_t load; /* number of the newest load */
  bool ended; /* its last transfer ended before it was known to be ordered */
  /* of a load from the host */
  const char *source;
  bool prepared; /* nobody hands it over yet */
  /* of a load from the disk */
  uint64_t read_bytes, ordered_bytes; /* begun to be read; handed to the upload lane */
  uint32_t reads; /* under way */
  bool ordering; /* a thread hands over what is in ready */
  struct staged *ready; /* read, not handed over */
  struct slot *next; /* in the queue of loads that have bytes left to read */
} slot_device;

typedef struct slot {
  ptn_region *region;
  uint32_t chunk; /* NO_CHUNK: none */
  slot_state state;
  bool shadow; /* holds the chunk as this step's update made it, not as its home has it */
  bool unchecked; /* came from the disk, and nobody used it yet */
  bool broken; /* being changed in place by the lane: not readable until the job ends */
  uint32_t in_use, pins; /* by the driving thread, by the lane */
  ptn_io io;
  struct ptn_engine *engine;
  ptn_status status;
  ptn_error error;
  slot_device device;
} slot;

/* One gradient of a job. */
typedef struct job_grad {
  uint32_t param;
  const void *data; /* NULL: on disk only */
  void *owner;
  bool total; /* data replaces what is on disk */
  bool add_disk; /* the sum on disk comes first: total = disk + data */
  struct offload *offload; /* over a device: what brings data, which is the pool's until the job ends */
  ptn_update update;
} job_grad;

typedef struct job {
  struct job *next;
  uint32_t chunk;
  bool update; /* else spill */
  bool from_shadow; /* the chunk was updated before in this step: other parameters follow */
  bool in_slot; /* parameters are read and changed in the slot */
  bool zero_state, zero_master;
  bool reads_grads;
  bool opened; /* its source is decided, pieces may be under way */
  bool open; /* read ahead: its gradients have not come */
  bool cancelled; /* read ahead in vain */
  bool failed;
  bool late; /* of a step that is committed: changes the home in place */
  fenv_t arithmetic; /* of the thread that queued it on the host's lane, as the engine's is for the other */
  uint32_t arriving; /* gradients that the device has not brought yet: nothing is computed before */
  uint64_t grad_bytes;
  uint64_t next_offset; /* of the next piece to start */
  uint32_t pieces; /* started, not yet finished */
  bool all_started;
  uint32_t n_grads;
  job_grad grads[];
} job;

typedef enum piece_state { PIECE_FREE, PIECE_READING, PIECE_WRITING } piece_state;
/* From PIECE_STATE on the fp32 arrays: states, then the master. */
enum { PIECE_PARAM, PIECE_STATE, PIECE_GRAD = PIECE_STATE + PTN_STATE_MAX + 1, PIECE_ARRAYS };

typedef struct piece {
  struct ptn_engine *engine;
  piece_state state;
  job *job;
  uint64_t offset_bytes, bytes; /* in the chunk, of its parameters */
  void *arrays[PIECE_ARRAYS]; /* in the ring */
  ptn_io io[PIECE_ARRAYS];
  uint32_t read; /* arrays that come from the disk, a bit each, and are checked before they are used */
  bool has_params; /* in the ring or in the slot */
  uint32_t in_flight;
  ptn_status status;
  ptn_error error;
} piece;

/* What an update works on at a time: the job's bytes of a chunk's parameters, and where its arrays begin. */
typedef struct part {
  const job *job;
  uint64_t offset_bytes, bytes;
  char *arrays[PIECE_ARRAYS];
} part;

/* Pinned memory through which parameters on disk go to the device (runtime/uploads.c). */
typedef struct staged {
  ptn_transfer transfer; /* first member */
  struct staged *next; /* free, or ready */
  slot *slot;
  void *memory;
  ptn_io io;
  uint64_t load, offset_bytes, bytes; /* in the chunk */
  uint32_t chunk;
} staged;

/* What an engine over a device has beside the rest. */
typedef struct engine_device {
  ptn_device *device; /* NULL: there is none, and nothing below is used */
  ptn_account *account; /* of the device's memory; may be NULL */
  const ptn_device_kind *kind;
  ptn_transfers *upload, *offload;
  ptn_stream *streams[MAX_STREAMS]; /* compute streams that were told of */
  uint32_t n_streams, stream; /* stream: number of the present one */
  ptn_event *made, *joined;
  uint64_t loads;
  uint32_t uploads, offloads; /* transfers under way */
  char reason[256]; /* why some host memory is not locked; "": all is */
  /* gradients on their way to an update */
  ptn_pinned pool;
  ptn_pool_ranges ranges;
  /* loads from the disk */
  ptn_pinned staging;
  staged *pieces, *free_pieces;
  uint32_t n_pieces;
  uint64_t piece_bytes;
  slot *first_load;
  /* activations */
  ptn_device_stash *stash;
  ptn_pinned stash_pool;
  /* the lane that updates on the host */
  pthread_t lane;
  bool lane_started, stop;
  ptn_condition lane_work;
  job *first_job, *last_job;
  uint32_t n_jobs;
} engine_device;

struct ptn_engine {
  ptn_mutex mutex;
  ptn_condition changed; /* loads finished, jobs finished, pieces to be computed: the driving thread waits on it */
  ptn_condition lane_work; /* a job came, a piece's I/O finished: the lane waits on it */
  ptn_account *account;
  ptn_trace *trace; /* its lock is a leaf: events are added with and without the mutex */
  ptn_store *store;
  ptn_stash *stash;
  uint64_t stash_bytes; /* on disk at most in the step before */
  uint64_t own_bytes; /* of extents that the caller reserved */
  uint64_t torn_writes;
  ptn_team *team; /* of the host's lane over a device; else NULL */
  void (*release)(void *owner);
  uint32_t n_chunks, n_params, n_groups, n_states;
  bool bf16;
  uint64_t element_bytes; /* of parameters and gradients */
  uint64_t widening; /* bytes of an fp32 array beside one of parameters */
  uint32_t n_arrays; /* of fp32 beside the parameters: states, and the master of bf16 */
  chunk *chunks;
  param *params;
  uint32_t *order_params; /* params by chunk, by offset */
  ptn_hyper *hypers;

  slot *slots;
  uint32_t n_slots, max_slots;
  uint32_t *order; /* recorded moments */
  uint32_t n_order, cursor;
  uint32_t *seen; /* for each chunk, the scan that met it last */
  uint32_t scan;

  pthread_t lane;
  bool lane_started, stop;
  job *first_job, *last_job; /* FIFO: the first may be running */
  job *ahead; /* the open one among them, always the last */
  job *starting; /* the job whose pieces are started next */
  uint64_t job_bytes; /* gradients that jobs hold */
  uint64_t pending_bytes;
  uint32_t n_jobs;
  ptn_status lane_status; /* first failure since the last drop or commit */
  ptn_error lane_error;
  void *ring_memory;
  piece *pieces;
  uint32_t n_pieces;
  uint64_t piece_head, piece_middle, piece_tail; /* ring: started at head, computed at middle, finished at tail; ever, so wide */
  uint64_t piece_bytes;

  void **owners; /* to be released */
  size_t n_owners, max_owners;
  size_t owned_count; /* taken over and not released yet: among those above there is room for all of them */
  uint64_t owner_bytes; /* of gradients, of which the lane let go since there was none */
  uint32_t gradients; /* taken since the last commit or drop */
  uint64_t commits_count;
  /* the order in which chunks went to the lane: of the last step, to read ahead in, and of this one */
  uint32_t *last_updates, *updates;
  uint32_t n_last_updates, n_updates;
  bool read_ahead;
  fenv_t arithmetic; /* of the thread that drives: how it rounds, and whether it flushes denormal numbers */
  /* Who computes what the lane has read (lane.c). */
  atomic_uintptr_t driver; /* the thread that queued the last job, or waits for all of them */
  bool shares; /* it takes all cores when it computes: so its team does */
  uint32_t driver_is_here; /* in ptn_lane_wait, or computing */
  atomic_bool sharing; /* about: shares, and there are jobs */
  atomic_bool has_ready; /* something may be ready to be computed */
  _Atomic int64_t came_ns; /* when the driver last came by while there were jobs */
  bool any_shadow;
  bool yields; /* state in memory gives way where a step lacks memory */
  uint64_t yielded_bytes, most_yielded_bytes; /* that gave way: now, and at most since the last mark */
  int64_t wait_ns, update_ns;
  uint64_t loaded_bytes, loads, hits;
  engine_device over;
};

/* residency.c */
void ptn_residency_advance(ptn_engine *engine); /* locked: orders the next reads; unlocks while it submits */
void ptn_residency_unuse_all(ptn_engine *engine); /* locked: nobody uses a chunk any more */
/* Locked: so many use the chunk in this slot. */
void ptn_residency_set_uses(ptn_engine *engine, slot *slot, uint32_t count);
void ptn_residency_forget(ptn_engine *engine, chunk *chunk); /* locked: the slot no longer holds a readable copy */
void ptn_residency_settle(ptn_engine *engine); /* locked: waits until no load is under way */

/* homes.c: between memory and a stretch of the disk that need not lie on pages; the extents of a home on disk */
ptn_status ptn_homes_transfer(ptn_engine *engine, uint64_t offset, char *memory, uint64_t bytes, bool write);
ptn_status ptn_homes_reserve(ptn_engine *engine, chunk *chunk);
void ptn_homes_release(ptn_engine *engine, chunk *chunk);
/* Its parameters in memory, in the place of others or of none, which are given back: under the lock, as somebody may ask for figures. */
void ptn_homes_set_params(ptn_engine *engine, chunk *chunk, ptn_region *region);
ptn_status ptn_homes_quiet(ptn_engine *engine, const char *what); /* PTN_STEP in the middle of a step */

/* states.c: of chunks at home in memory, on the CPU; on the driving thread */
uint64_t ptn_states_bytes(const ptn_engine *engine, const chunk *chunk); /* of all its states; 0 where it is not trained */
uint64_t ptn_master_bytes(const ptn_engine *engine, const chunk *chunk);
ptn_status ptn_states_make(ptn_engine *engine, chunk *chunk); /* both are there, zeros where they were never written */
ptn_status ptn_states_make_one(ptn_engine *engine, chunk *chunk, bool master); /* that one is; both where they gave way */
ptn_status ptn_states_read(ptn_engine *engine, chunk *chunk); /* what its extent in use has of them; free them where it fails */
ptn_status ptn_states_write(ptn_engine *engine, const chunk *chunk); /* to the first extent, but what was never written */
void ptn_states_free(chunk *chunk);
void *ptn_states_hold(ptn_engine *engine, float *const *array); /* any thread: one of them, with a hold; NULL: it is not there */
void ptn_states_arrived(ptn_engine *engine, chunk *chunk); /* they have not given way any more */
bool ptn_states_yield_some(ptn_engine *engine); /* those of one chunk give way; false: none may, or the disk fails */

/* gradients.c */
ptn_status ptn_gradients_enqueue_some(ptn_engine *engine, bool *found); /* locked: a chunk that holds a part of its gradients */
void ptn_gradients_end_job(ptn_engine *engine, job *job); /* locked: what became of its gradients; frees it */

/* lane.c */
ptn_status ptn_lane_start(ptn_engine *engine);
void ptn_lane_stop(ptn_engine *engine);
void ptn_lane_enqueue(ptn_engine *engine, job *job); /* locked; takes the job, which may be merged into the open one */
void ptn_lane_read_ahead(ptn_engine *engine); /* locked: opens a job for the chunk that is expected next */
void ptn_lane_cancel(ptn_engine *engine); /* locked: the open job, if any, comes to nothing */
void ptn_lane_settle(ptn_engine *engine); /* locked: waits until no job is left */
void ptn_lane_driven(ptn_engine *engine); /* locked: the caller is the driving thread */
/* Locked, on the driving thread: waits for a change, or computes a piece that is ready in place of that; look again afterwards. */
void ptn_lane_wait(ptn_engine *engine);
void ptn_lane_owner(ptn_engine *engine, void *owner); /* locked: to be released by the driving thread */
void ptn_lane_fail(ptn_engine *engine, ptn_status status, const ptn_error *error); /* locked: this step's first failure */

/* compute.c */
bool ptn_part_wanted(const ptn_engine *engine, const job *job, uint64_t offset_bytes, uint64_t bytes);
void ptn_part_compute(const ptn_engine *engine, const part *part);
bool ptn_spilled_any(const ptn_engine *engine, const chunk *chunk); /* locked */
void ptn_job_open(ptn_engine *engine, job *job); /* locked: what each gradient is added to */

/* ---- over a device ---- */

/* region.c: memory of a device, counted */
ptn_status ptn_device_take(ptn_device *device, ptn_account *account, uint64_t bytes, void **out);
void ptn_device_give(ptn_device *device, ptn_account *account, void *memory, uint64_t bytes); /* NULL is allowed */

/* device_memory.c: memory, and copies that the caller waits for; between steps */
ptn_status ptn_over_open(ptn_engine *engine, ptn_device *device, ptn_account *account);
void ptn_over_close(ptn_engine *engine);
ptn_status ptn_over_pin(ptn_engine *engine, uint64_t bytes, ptn_pinned *out);
void ptn_over_unpin(ptn_engine *engine, ptn_pinned *pinned);
ptn_status ptn_over_copy(ptn_engine *engine, void *to, const void *from, uint64_t bytes);
ptn_status ptn_over_zero(ptn_engine *engine, void *memory, uint64_t bytes);
void ptn_over_settle(ptn_engine *engine); /* locked: waits for transfers and late updates */
void ptn_over_finish(ptn_engine *engine); /* waits for transfers, late updates and the compute streams */

/* device_homes.c */
ptn_status ptn_over_move(ptn_engine *engine, uint32_t number, home_kind to, bool extra); /* extra: state now, or a shadow */
void ptn_over_drop_home(ptn_engine *engine, chunk *chunk);
void ptn_over_count(const ptn_engine *engine, ptn_engine_stats *out);
ptn_status ptn_over_transfer(ptn_engine *engine, chunk *chunk, uint32_t array, uint64_t offset_bytes, void *memory,
                             uint64_t bytes, bool write);
ptn_status ptn_over_begin_fill(ptn_engine *engine, slot *slot, uint64_t bytes);
ptn_status ptn_over_end_fill(ptn_engine *engine, slot *slot, chunk *chunk);

/* uploads.c */
ptn_status ptn_upload_make_slot(ptn_engine *engine, slot *slot, uint64_t bytes);
void ptn_upload_drop_slot(ptn_engine *engine, slot *slot);
void ptn_upload_prepare(ptn_engine *engine, slot *slot, uint32_t number); /* locked */
void ptn_upload_start(ptn_engine *engine, slot *slot); /* locked; unlocks while it submits */
ptn_status ptn_upload_mark(ptn_engine *engine, slot *slot); /* locked, on the driving thread: records free; unlocks */
ptn_status ptn_upload_follow(ptn_engine *engine, slot *slot); /* the same: the compute stream comes behind loaded */

/* offloads.c */
ptn_status ptn_offload_take(ptn_engine *engine, uint32_t number, const void *data, struct offload **out);
bool ptn_offload_keep(struct offload *offload, void *owner); /* locked: hands the owner back at its end; false: it has ended */
void ptn_offload_abandon(ptn_engine *engine, struct offload *offload); /* waits for its end */
const void *ptn_offload_data(const struct offload *offload);
bool ptn_offload_is_direct(const struct offload *offload);
void ptn_offload_await(struct offload *offload, job *job); /* locked: the job is told when it has come */
void ptn_offload_release(ptn_engine *engine, struct offload *offload); /* locked: its memory goes back; NULL is allowed */

/* host_lane.c */
ptn_status ptn_host_start(ptn_engine *engine);
void ptn_host_stop(ptn_engine *engine);
void ptn_host_enqueue(ptn_engine *engine, job *job); /* locked, on the driving thread; takes the job */
ptn_status ptn_host_make_sum(ptn_engine *engine, chunk *chunk, bool pinned);
void ptn_host_drop_sum(ptn_engine *engine, chunk *chunk);
ptn_status ptn_host_note_late(ptn_engine *engine, chunk *chunk, uint32_t number, float grad_scale); /* locked */
void ptn_host_queue_late(ptn_engine *engine); /* locked: the step is committed */

static inline bool has_slot_home(const chunk *chunk) { return chunk->home == HOME_HOST || chunk->home == HOME_DISK; }

/* A chunk on the host without a shadow is updated after commit. */
static inline bool is_late(const chunk *chunk) {
  return chunk->home == HOME_HOST && chunk->trained && !chunk->host[1 - chunk->current].memory;
}

/* Where fp32 array `array` begins in a chunk's extent: behind the parameters, and the arrays before it. */
static inline uint64_t array_offset(const ptn_engine *engine, const chunk *chunk, uint32_t array) {
  return chunk->param_bytes * (1 + engine->widening * array);
}

static inline uint64_t extent_bytes(const ptn_engine *engine, const chunk *chunk) {
  return array_offset(engine, chunk, chunk->trained ? engine->n_arrays : 0);
}

#endif
