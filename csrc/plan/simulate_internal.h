/* What the files of the simulation share.
 *
 * Words: a course is what one candidate does in one pass, in order, whatever time it takes: stretches of compute, demands of
 * chunks, activations that go to the stash and come back (simulate_course.c). A flow is what one lane or several in a row carry
 * now; a few flows share the lanes (simulate_lanes.c). simulate.c lets time pass. Times are in ns and bytes whole or in
 * fractions, both as double: exact for all that a real step has, and the same on every machine that rounds as IEEE 754 does.
 */
#ifndef PTN_PLAN_SIMULATE_INTERNAL_H
#define PTN_PLAN_SIMULATE_INTERNAL_H

#include "base/bytes.h"
#include "plan/parts.h"

#define PTN_LEAST_COMPUTE_SPEED 0.2 /* beside lanes, of its own */
#define PTN_KEPT_PART 4 /* of the stash's bytes, one in so many stays in memory (runtime/stash_rule.c) */

/* ---- lanes (simulate_lanes.c) ---- */

typedef enum ptn_flow_name {
  PTN_FLOW_FETCH = 0,
  PTN_FLOW_STASH_READ,
  PTN_FLOW_STASH_WRITE,
  PTN_FLOW_UPDATE,
  PTN_N_FLOWS
} ptn_flow_name;

typedef struct ptn_flow {
  bool active;
  double unit_bytes[PTN_N_LANES]; /* that each lane carries for one unit: a whole job, or a byte of the stash */
  double drag_ns;                 /* compute lost for each unit */
  double left;                    /* units, when the rates were last settled */
  double rate;                    /* units each ns */
  double end_ns;                  /* when none is left, if the rates stay */
} ptn_flow;

typedef struct ptn_lanes {
  bool present[PTN_N_LANES];
  double ns_per_byte[2][PTN_N_LANES]; /* while compute runs, while it waits */
  double drag_ns_per_byte[PTN_N_LANES];
  double disk_overlap, link_overlap;
  double busy[PTN_N_LANES]; /* the part of its time that each lane is busy now */
  double compute_speed;     /* 1: nothing drags */
} ptn_lanes;

void ptn_lanes_read(ptn_lanes *lanes, const ptn_profile *profile);
/* unit_bytes: PTN_N_LANES entries; more_drag_ns: for each unit, beside what the lanes cost. */
void ptn_flow_start(const ptn_lanes *lanes, ptn_flow *flow, const double *unit_bytes, double more_drag_ns);
/* Sets the rates of PTN_N_FLOWS flows, busy and compute_speed. */
void ptn_lanes_share(ptn_lanes *lanes, ptn_flow *flows, bool compute_runs);

/* ---- what lanes carry for a chunk that is not persistent (simulate_moves.c) ----
 *
 * bytes: PTN_N_LANES entries, all of them set. on_host: its home is the host, else the disk; has_link: the device has a host beside
 * it, with an upload lane between them. */

/* Its parameters come into a slot. */
void ptn_moves_fetch(const ptn_plan_request *request, uint32_t chunk, bool on_host, bool has_link, double *bytes);
/* Gradients of a pass are kept for a later update; add: to those of a pass before. */
void ptn_moves_keep(const ptn_plan_request *request, uint32_t chunk, bool on_host, bool has_link, bool add, double *bytes);
/* It is updated, in the step's last pass or behind it; in_slot: its parameters are in memory already. */
void ptn_moves_update(const ptn_plan_request *request, uint32_t chunk, bool on_host, bool has_link, bool in_slot, double *bytes);

/* ---- the course (simulate_course.c) ---- */

/* Compute without a demand in between. In the order of the flags: the phase begins, the demand, then ... */
typedef struct ptn_stretch {
  double work_ns;
  double room_bytes; /* that activations and gradients under way may take from its begin to the end of its phase */
  int32_t demand; /* that comes first; -1: none */
  uint32_t phase;
  bool begins; /* its phase */
  bool checks; /* gradients are about to be made: not too many may be under way */
  bool puts;   /* what the phase saves goes to the stash */
  uint32_t completes; /* one more than the chunk that has all its gradients when its work is done; 0: none */
  bool ends;   /* its phase, when its work is done */
} ptn_stretch;

typedef struct ptn_demand {
  uint32_t chunk, slot, phase;
  int32_t before;       /* the demand of the same slot before it in the pass; -1: none */
  uint32_t ready;       /* the demand from which on it may be fetched ahead */
  bool fetches;         /* its slot holds another chunk before */
  bool fetches_later;   /* the same of a pass that finds in the slots what the one before left */
  bool holds;           /* the chunk before stays until its gradients are complete, as far as reading ahead goes */
  int32_t next_ready;   /* the next that may be fetched from the same demand on; -1: none */
  uint32_t asked_count; /* passes in which it was put in the queue, and in which it was loaded */
  uint32_t loaded_count;
} ptn_demand;

/* What one forward phase gives to the stash. */
typedef struct ptn_saved {
  uint32_t phase, consumer;
  double kept_bytes; /* stays in memory */
  double away_bytes; /* is written, unless backward comes first */
  double late_bytes; /* of them, what is not read before the phase that consumes it waits for it */
  /* of the pass under way */
  double start_bytes; /* of all that goes to the stash, what comes before it */
  double read_bytes;
  bool put, consumed;
} ptn_saved;

typedef struct ptn_course {
  /* of the request, made once */
  const ptn_plan_request *request;
  const uint32_t *consumer_of_phase;
  uint32_t n_passes;
  uint32_t *first_access;   /* of each phase, n_phases + 1 entries */
  double *own_ns, *again_ns; /* of each access: its part of its phase's compute, of its recomputation */
  bool *own;                /* of each access: it happens where its block is not recomputed, too */
  bool *completes;          /* it is the last of its chunk in the phase in which that is complete */
  bool *complete_inside;    /* of each chunk: an access of it completes it, and not the end of a phase */
  uint32_t *first_complete; /* of each phase in `complete`, n_phases + 1 entries */
  uint32_t *complete;       /* trained chunks, by complete_phase; in one phase the last in execution order first */
  int64_t *last_trained;    /* of each phase: the highest chunk of which it makes gradients, -1: none */
  uint32_t *count, *visits; /* of each chunk, scratch */

  /* of the candidate */
  const ptn_candidate *candidate;
  ptn_stretch *stretches;
  ptn_demand *demands;
  int32_t *first_ready;  /* of each demand: the first that may be fetched once it is met */
  int32_t *last_of_slot; /* the last demand of each slot in a pass, -1: none */
  ptn_saved *saved;      /* in the order they are put */
  uint32_t *readers;     /* numbers of `saved` in the order of their consumers */
  int32_t *saved_of_phase, *saved_for_phase; /* that it puts, that it consumes; -1: none */
  double *room_bytes;    /* of each phase: that activations and gradients under way may take in all of it */
  double *behind_bytes;  /* of each chunk: the same, from its completion on to the end of the phase in which it is complete */
  uint32_t n_stretches, n_demands, n_slots, n_saved;
  bool stash_on_host;
  double recompute_ns, fixed_ns; /* of one pass; without what a step has once */
} ptn_course;

ptn_status ptn_course_create(ptn_course *course, const ptn_plan_request *request, const uint32_t *consumer_of_phase);
void ptn_course_destroy(ptn_course *course);
/* Whether a step finds in its slot a chunk that the step before used there last. Not what is updated on a host, whose parameters in the
 * slot are the old ones then. */
bool ptn_course_leaves(const ptn_candidate *candidate, uint32_t chunk, bool has_link);
/* has_link: the device has a host beside it, with an upload lane between them. */
void ptn_course_make(ptn_course *course, const ptn_candidate *candidate, bool has_link);

/* ---- what is under way ---- */

typedef enum job_kind { JOB_KEEP_GRADIENTS, JOB_UPDATE, JOB_REDUCE } job_kind;

typedef struct job {
  uint32_t chunk;
  job_kind kind;
  bool in_slot;
  uint64_t grad_bytes; /* in memory until it ends */
  double unit_bytes[PTN_N_LANES];
} job;

typedef struct slot {
  int64_t chunk; /* that it holds, or is about to; -1: none */
  int64_t blocked; /* the demand whose fetch waits for the slot, -1: none */
  bool pinned; /* its chunk is being updated in it */
} slot;

#define PTN_WAIT_OPEN PTN_N_WAITS /* for updates that could not begin before step() */

/* What a pass adds. */
typedef struct tally {
  double wait_ns[PTN_N_WAITS + 1], drag_ns, busy_ns[PTN_N_LANES];
  uint64_t moved_bytes[PTN_N_LANES];
  double read_bytes, written_bytes; /* of the stash */
} tally;

struct ptn_simulation {
  ptn_course course;
  ptn_lanes lanes;
  bool has_link;

  ptn_flow flows[PTN_N_FLOWS];
  double now_ns, since_ns; /* since_ns: the rates are what they are from then on */
  bool dirty;              /* the rates are settled up to now, and to be shared anew */
  tally tally, before;     /* before: at the begin of the last pass */

  uint32_t pass, at;       /* the stretch that is next, or under way */
  bool in_stretch, begun;  /* begun: the phase of the next stretch */
  bool runs;               /* compute; else it waits */
  uint32_t wait;
  double work_ns, end_ns;  /* left of the stretch when the rates were settled; when it ends if they stay */
  bool draining, open, finished, never;
  uint32_t never_wait;     /* what waits for the lane that is not there */

  int64_t cursor;          /* the last demand that was met, -1: none in this pass */
  slot *slots;
  uint32_t *complete_count; /* of each chunk: passes in which it was complete */
  uint32_t *fetches;       /* the queue of demands that are fetched */
  uint32_t fetch_first, fetch_count;

  job *jobs;               /* a ring */
  uint32_t job_first, job_count, job_most;
  double backlog_bytes[PTN_N_LANES]; /* when the pass began */
  uint64_t job_bytes;      /* of gradients in it */

  bool turned;             /* backward has come to the first block */
  double put_bytes, written_bytes; /* of the pass, in order; between them what is queued */
  double kept_bytes, ahead_bytes;  /* not consumed: that stay, that were read */
  uint32_t reader, consumer; /* in course.readers: the next to be read ahead, to be consumed */
  uint32_t reading;          /* of course.saved, what is being read */
};

/* ---- time (simulate.c) ---- */

/* Accounts for the time since the rates were set; call it before anything changes that they depend on. They are shared anew
 * before time goes on. */
void ptn_simulation_settle(ptn_simulation *run);
/* Compute waits. Returns false. */
bool ptn_simulation_stall(ptn_simulation *run, uint32_t wait);
/* A lane that is needed is not there: the step never ends. */
void ptn_simulation_stop(ptn_simulation *run, uint32_t wait);
/* A job is going to move these bytes. */
void ptn_simulation_count_moved(ptn_simulation *run, const double *unit_bytes, uint32_t wait);

/* ---- fetches, gradients and updates (simulate_jobs.c) ---- */

/* Reading ahead has come to what may be fetched from this demand on. */
void ptn_fetch_ahead(ptn_simulation *run, uint32_t cursor);
/* Its chunk is in its slot; if not, it is asked for. */
bool ptn_fetch_demand(ptn_simulation *run, uint32_t number);
void ptn_fetch_end(ptn_simulation *run);

void ptn_job_add(ptn_simulation *run, uint32_t chunk, job_kind kind);
void ptn_job_end(ptn_simulation *run);
/* The chunk, which is not persistent, has the last of its gradients. */
void ptn_job_complete(ptn_simulation *run, uint32_t chunk);
/* The phase has ended in which chunks have the last of their gradients: those that no access completes. */
void ptn_job_complete_phase(ptn_simulation *run, uint32_t phase);
bool ptn_job_too_many(const ptn_simulation *run);

/* ---- the stash (simulate_stash.c) ---- */

void ptn_saved_begin_pass(ptn_simulation *run);
void ptn_saved_put(ptn_simulation *run, ptn_saved *saved);
/* False: compute waits for memory, or for what the phase consumes. */
bool ptn_saved_may_begin(ptn_simulation *run, uint32_t phase);
/* What the phase under way leaves to gradients: beside activations on their way, but for what gives way to them. */
double ptn_saved_free_bytes(const ptn_simulation *run);
/* Settled: sets what the stash moves from now on. */
void ptn_saved_move(ptn_simulation *run);

#endif
