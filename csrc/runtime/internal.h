/* What the runtime's files share. One mutex guards all of it; it is never held across I/O, an allocation or a wait other than
 * on its own conditions. */
#ifndef PTN_RUNTIME_INTERNAL_H
#define PTN_RUNTIME_INTERNAL_H

#include "base/bytes.h"
#include "runtime/engine.h"

#define NO_CHUNK UINT32_MAX

typedef enum home_kind { HOME_NOWHERE, HOME_MEMORY, HOME_DISK } home_kind;

typedef struct chunk {
  uint64_t param_bytes;
  bool trained;
  home_kind home;
  /* home in memory */
  ptn_region *params;
  float *states; /* n_states arrays, or NULL: zeros */
  float *master; /* the same */
  /* home on disk: the extent in use and its shadow hold parameters, then the state arrays, then the master */
  ptn_extent extents[2];
  int current;
  bool has_shadow;  /* extents[1 - current] holds this step's update */
  bool zero_state;  /* the state of the current extent was never written: zeros */
  bool zero_master; /* the same */
  ptn_extent grads; /* gradients on disk, laid out as the parameters */
  int32_t slot;     /* -1: none */
  uint32_t first_param, n_params; /* in engine->order_params */
  uint32_t missing;       /* expected gradients that have not come in this pass */
  uint32_t arrived;       /* gradients held, not yet queued */
  uint64_t arrived_bytes;
  uint32_t jobs;          /* queued or running on the lane */
} chunk;

typedef struct param {
  uint32_t chunk;
  uint64_t offset_bytes, count;
  uint32_t group;
  bool trained, expected;
  bool spilled;    /* its gradient on disk counts */
  bool updated;    /* in this step's shadow */
  bool counted;    /* came in this pass */
  uint64_t steps;
  const void *grad; /* held, not yet queued */
  void *owner;
  ptn_gradient_use use;
} param;

typedef enum slot_state { SLOT_EMPTY, SLOT_LOADING, SLOT_LOADED } slot_state;

typedef struct slot {
  ptn_region *region;
  uint32_t chunk; /* NO_CHUNK: none */
  slot_state state;
  bool shadow;    /* holds the chunk as this step's update made it, not as its home has it */
  bool broken;    /* being changed in place by the lane: not readable until the job ends */
  uint32_t in_use, pins; /* by the driving thread, by the lane */
  ptn_io io;
  struct ptn_engine *engine;
  ptn_status status;
  ptn_error error;
} slot;

/* One gradient of a job. */
typedef struct job_grad {
  uint32_t param;
  const void *data;  /* NULL: on disk only */
  void *owner;
  bool total;        /* data replaces what is on disk */
  bool add_disk;     /* the sum on disk comes first: total = disk + data */
  ptn_update update;
} job_grad;

typedef struct job {
  struct job *next;
  uint32_t chunk;
  bool update;       /* else spill */
  bool from_shadow;  /* the chunk was updated before in this step: other parameters follow */
  bool in_slot;      /* parameters are read and changed in the slot */
  bool zero_state, zero_master;
  bool reads_grads;
  bool opened;          /* its source is decided, pieces may be under way */
  bool open;            /* read ahead: its gradients have not come */
  bool cancelled;       /* read ahead in vain */
  bool failed;
  uint64_t grad_bytes;
  uint64_t next_offset; /* of the next piece to start */
  uint32_t pieces;      /* started, not yet finished */
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
  void *arrays[PIECE_ARRAYS];  /* in the ring */
  ptn_io io[PIECE_ARRAYS];
  bool has_params; /* in the ring or in the slot */
  uint32_t in_flight;
  ptn_status status;
  ptn_error error;
} piece;

struct ptn_engine {
  ptn_mutex mutex;
  ptn_condition changed; /* loads finished, jobs finished: the driving thread waits on it */
  ptn_condition lane_work; /* a job came, a piece's I/O finished: the lane waits on it */
  ptn_account *account;
  ptn_trace *trace; /* its lock is a leaf: events are added with and without the mutex */
  ptn_store *store;
  ptn_stash *stash;
  uint64_t stash_bytes; /* on disk at most in the step before */
  uint64_t own_bytes;   /* of extents that the caller reserved */
  ptn_team *team;
  void (*release)(void *owner);
  uint32_t n_chunks, n_params, n_groups, n_states;
  bool bf16;
  uint64_t element_bytes; /* of parameters and gradients */
  uint64_t widening;      /* bytes of an fp32 array beside one of parameters */
  uint32_t n_arrays;      /* of fp32 beside the parameters: states, and the master of bf16 */
  chunk *chunks;
  param *params;
  uint32_t *order_params; /* params by chunk, by offset */
  ptn_hyper *hypers;

  slot *slots;
  uint32_t n_slots, max_slots;
  uint32_t *order;        /* recorded moments */
  uint32_t n_order, cursor;
  uint32_t *seen;         /* for each chunk, the scan that met it last */
  uint32_t scan;

  pthread_t lane;
  bool lane_started, stop;
  job *first_job, *last_job; /* FIFO: the first may be running */
  job *ahead;                /* the open one among them, always the last */
  job *starting;             /* the job whose pieces are started next */
  uint64_t job_bytes;        /* gradients that jobs hold */
  uint64_t pending_bytes;
  uint32_t n_jobs;
  ptn_status lane_status;    /* first failure since the last drop or commit */
  ptn_error lane_error;
  void *ring_memory;
  piece *pieces;
  uint32_t n_pieces, piece_head, piece_tail; /* ring: started at head, finished at tail */
  uint32_t piece_count;
  uint64_t piece_bytes;
  bool ring_has_grads;

  void **owners; /* to be released */
  size_t n_owners, max_owners;
  uint64_t owner_bytes; /* of gradients, of which the lane let go since there was none */
  uint32_t gradients; /* taken since the last commit or drop */
  /* the order in which chunks went to the lane: of the last step, to read ahead in, and of this one */
  uint32_t *last_updates, *updates;
  uint32_t n_last_updates, n_updates;
  bool read_ahead;
  bool any_shadow;
  int64_t wait_ns, update_ns;
  uint64_t loaded_bytes, loads, hits;
};

/* residency.c */
void ptn_residency_advance(ptn_engine *engine); /* locked: orders the next reads; unlocks while it submits */
void ptn_residency_forget(ptn_engine *engine, chunk *chunk); /* locked: the slot no longer holds a readable copy */
void ptn_residency_settle(ptn_engine *engine); /* locked: waits until no load is under way */

/* homes.c: between memory and a stretch of the disk that need not lie on pages */
ptn_status ptn_homes_transfer(ptn_engine *engine, uint64_t offset, char *memory, uint64_t bytes, bool write);

/* lane.c */
ptn_status ptn_lane_start(ptn_engine *engine);
void ptn_lane_stop(ptn_engine *engine);
void ptn_lane_enqueue(ptn_engine *engine, job *job); /* locked; takes the job, which may be merged into the open one */
void ptn_lane_read_ahead(ptn_engine *engine);        /* locked: opens a job for the chunk that is expected next */
void ptn_lane_cancel(ptn_engine *engine);            /* locked: the open job, if any, comes to nothing */
void ptn_lane_settle(ptn_engine *engine);            /* locked: waits until no job is left */
void ptn_lane_owner(ptn_engine *engine, void *owner); /* locked: to be released by the driving thread */

/* Where fp32 array `array` begins in a chunk's extent: behind the parameters, and the arrays before it. */
static inline uint64_t array_offset(const ptn_engine *engine, const chunk *chunk, uint32_t array) {
  return chunk->param_bytes * (1 + engine->widening * array);
}

static inline uint64_t extent_bytes(const ptn_engine *engine, const chunk *chunk) {
  return array_offset(engine, chunk, chunk->trained ? engine->n_arrays : 0);
}

#endif
