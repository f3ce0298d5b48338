/* The plan: from sizes and orders to decisions, deterministic, with no torch and no Python.
 *
 * The caller describes the model (chunks in execution order, blocks, the order of accesses) and what one step of one batch
 * shape holds in memory in each of its phases; the planner says which chunks stay in memory, how many slots the others share,
 * and each block's mode.
 */
#ifndef PTN_PLAN_PLAN_H
#define PTN_PLAN_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "profile/profile.h"

typedef enum ptn_mode { PTN_KEEP = 0, PTN_SWAP, PTN_CHECKPOINT, PTN_CHECKPOINT_SWAP } ptn_mode;

/* ---- layout: parameters into chunks (plan/layout.c) ---- */

typedef struct ptn_layout_param {
  uint64_t bytes;   /* of the parameter; 0 is allowed */
  int32_t block;    /* index of its block, -1 outside of any */
  /* result */
  uint32_t chunk;
  uint64_t offset_bytes; /* in its chunk, a multiple of PTN_TENSOR_ALIGN_BYTES */
} ptn_layout_param;

/* Packs params, in the order given, into chunks of at most chunk_bytes (a larger parameter has a chunk of its own). A chunk
 * never mixes blocked and unblocked parameters; a block that fits a chunk is never split; consecutive whole blocks share a
 * chunk while they fit. Writes chunk and offset_bytes; *n_chunks is set; chunk sizes are the caller's to sum. */
ptn_status ptn_layout(ptn_layout_param *params, size_t n_params, uint64_t chunk_bytes, uint32_t *n_chunks);

/* The chunk size from least_bytes to most_bytes, rounded up to a page, with which packing wastes least: the parameters of blocks
 * are packed with each size of a grid, and the size counts whose chunks fill the largest of them best; of those as good, the
 * largest. Overwrites chunk and offset_bytes of params. */
ptn_status ptn_layout_size(ptn_layout_param *params, size_t n_params, uint64_t least_bytes, uint64_t most_bytes,
                           uint64_t *chunk_bytes);

/* ---- the request ---- */

typedef struct ptn_plan_chunk {
  uint64_t param_bytes;   /* its parameters with padding, a multiple of PTN_PAGE_BYTES */
  uint64_t grad_bytes;    /* what those of its trained parameters count, each by itself; 0: frozen */
  uint64_t state_bytes;   /* optimizer state of its trained parameters, laid out as the parameters are */
  uint32_t complete_phase; /* index of the backward phase in which the last of its gradients comes */
  /* Where other chunks are complete in that phase before it: behind its own completion so much less is live than behind the first
   * one, in every run. What there is behind the first has gradients of those that are complete later in it. 0: not known. */
  uint64_t less_bytes;
  /* Of an update that runs in step(), one parameter after another, when all gradients are there or away: what one of its parameters
   * takes at most beside what is in memory then, where the chunk is persistent, and where it is not. */
  uint64_t update_here_bytes, update_away_bytes;
} ptn_plan_chunk;

/* One phase of a step as a dry run saw it, with every block kept, with every block checkpointed and, where that is known, with
 * every block swapped and nothing of the stash in memory but what an operation uses. Phases come in the order of the step: before
 * the blocks, each block's forward, the head (from the last block's forward to its backward), each block's backward in reverse, the
 * tail. A block used twice in a step has two phases of each kind. What runs between two blocks belongs to the phase of the one that
 * ran before. Bytes count activations and temporaries only, and gradients only until their chunk is complete; never parameters or
 * optimizer state. `entry` is what was live when the phase began, `peak` the highest during it. */
typedef struct ptn_phase {
  int32_t block; /* -1: none */
  bool backward;
  uint64_t keep_entry_bytes, keep_peak_bytes;
  uint64_t checkpoint_entry_bytes, checkpoint_peak_bytes;
  uint64_t swap_entry_bytes, swap_peak_bytes; /* a peak of 0 in every phase: not known */
  uint64_t keep_working_bytes; /* by how much what was live rose above the least before it in the phase, at most; 0: not known */
  uint64_t small_bytes; /* of a block's forward: what the keep run saved in it that swap leaves in memory, as it is too small */
  uint32_t own_accesses; /* of a block's backward: so many of the accesses in it, the last, are its own, and those before them
                          * recomputation's; 0: not known, then the last visit of each chunk is taken for its own */
  /* The highest in the phase from the first moment on at which a chunk's gradients were complete in it; 0: not known, then its
   * peak stands for it. */
  uint64_t keep_after_bytes, checkpoint_after_bytes, swap_after_bytes;
} ptn_phase;

typedef struct ptn_plan_request {
  uint64_t budget_bytes;
  uint64_t fixed_bytes; /* live whatever the plan is: buffers, batch */
  uint64_t update_bytes; /* live beside that while such an update runs, whatever parameter it is at */
  uint32_t n_chunks;
  const ptn_plan_chunk *chunks; /* in execution order */
  uint32_t n_blocks;
  uint32_t n_phases; /* 0: nothing is known of the activations, they are not counted */
  const ptn_phase *phases;
  uint32_t n_accesses;
  const uint32_t *accesses; /* chunk of each access in a step, in order, forward and backward */
  const uint32_t *access_phases; /* the phase of each access, never falling; NULL: not known, then nothing is timed */
  uint32_t n_together; /* the most chunks that one operation reads at once; 0 is read as 1 */
  uint32_t n_arrays; /* arrays in a piece of the ring, in the size of one of parameters: parameters, each of state, gradients */
  uint32_t widening; /* an array of state counts so many times there: 2 where fp32 is beside bf16; 0 is read as 1 */
  const ptn_mode *modes; /* n_blocks modes to use as they are; NULL: free (keep or checkpoint without a profile) */
  int64_t n_persist; /* as given, or -1: the planner chooses */
  int64_t n_buffer, n_ahead; /* with n_persist given: slots, and how far ahead is read, of the plan that it is from, where they
                              * fit; n_ahead 0 or less: any with so many slots; n_buffer 0 or less: free */
  bool grads_outlive_backward; /* clipping: gradients of chunks on disk pass through the disk, those of the last pass too */
  uint32_t n_passes; /* forward and backward in one step; 0 is read as 1. Gradients of all but the last are added up there */
  const ptn_profile *profile; /* NULL: nothing was timed, a fixed rule decides from memory alone (plan/rule.c) */
  uint64_t host_budget_bytes; /* of the host tier, for chunks that are not persistent, activations, and the ring where it is
                               * there; 0: there is none */
  uint64_t disk_budget_bytes; /* of one rank, for homes with their shadows and activations; 0: as much as they take */
  uint32_t n_ranks; /* devices that share the chunks which are not persistent; 0 is read as 1 */
  uint64_t ring_host_bytes; /* beside a device: all of host memory, of which the ring has a part; 0: it is in budget_bytes */
} ptn_plan_request;

/* What a step is going to take, by the simulation (plan/simulate.c). All of one step of all its passes. */
typedef enum ptn_wait_reason {
  PTN_WAIT_CHUNK = 0, /* for parameters that are still being brought */
  PTN_WAIT_STASH_WRITE, /* for memory that activations still take */
  PTN_WAIT_STASH_READ, /* for activations */
  PTN_WAIT_GRADIENTS, /* in backward, for gradients to leave memory */
  PTN_WAIT_UPDATE, /* in step(), for updates under way */
  PTN_N_WAITS,
} ptn_wait_reason;

typedef struct ptn_forecast {
  int64_t step_ns; /* the sum of what follows up to wait_ns; 0: nothing was timed */
  int64_t compute_ns, recompute_ns, fixed_ns;
  int64_t drag_ns; /* compute lost to lanes, and to a budget that is full */
  int64_t update_ns; /* in step(): updates of chunks on the device, and those that could not begin before */
  int64_t wait_ns[PTN_N_WAITS];
  int64_t busy_ns[PTN_N_LANES]; /* beside compute */
  uint64_t moved_bytes[PTN_N_LANES];
} ptn_forecast;

typedef struct ptn_plan {
  uint32_t n_persist; /* the first n_persist chunks stay in memory */
  uint32_t n_buffer; /* slots that the others share: entries of slot_bytes */
  uint32_t n_ahead; /* so many distinct chunks after the one in use, in recorded order, are in slots of their own */
  uint64_t slot_bytes_total;
  uint64_t piece_bytes; /* of each array in the ring of the update lane; 0: no chunk on disk is trained, no ring */
  uint32_t n_pieces; /* in the ring */
  uint64_t ring_bytes;
  uint64_t static_bytes; /* of the peak, live always: persistent chunks with their state, slots, a ring that is not the host's */
  uint64_t peak_bytes; /* predicted, all that counts */
  uint64_t computed_bytes; /* of the peak, without an update that runs in step() */
  uint64_t smallest_bytes; /* the smallest budget for which this request has a plan (with modes and n_persist free) */
  uint64_t safest_bytes; /* the same of plans in which a block that swaps counts as one that is recomputed */
  uint64_t stash_bytes; /* about what blocks of swap modes write in one step; 0 also where n_phases is */
  uint64_t rise_bytes; /* by which backward of a block rises above its saved tensors; 0 where nothing swaps, as the next two */
  uint64_t headroom_bytes; /* left free by reading ahead, so that backward stays within the peak */
  uint64_t recompute_bytes; /* the same beside what is asked for behind a block that recomputes */
  uint64_t pending_bytes; /* gradients that may always wait for their updates; more of them within the peak */
  uint64_t disk_bytes; /* homes and shadows of chunks on disk, and the stash where it is there */
  uint32_t n_host; /* chunks from n_persist on whose home is the host; those behind them are on disk */
  uint64_t host_bytes; /* their parameters and state, and the stash and the ring where they are there; of one rank */
  ptn_forecast forecast; /* zeros without a profile */
  /* The caller's arrays: n_chunks and n_blocks entries, n_buffer <= n_chunks. */
  int32_t *slot_of_chunk; /* -1: persistent */
  uint64_t *slot_bytes;
  ptn_mode *modes;
} ptn_plan;

/* PTN_BUDGET (needed, budget, smallest) where nothing fits: needed and smallest are the smallest budget that works for what was
 * asked, with modes and n_persist as they are given; where too few chunks are to stay for the disk and the host's memory that there
 * are, and no budget would do, the smallest with n_persist free; PTN_PLAN where modes or n_persist are wrong in themselves;
 * PTN_INVALID where the description of the model, of its phases or of their times is, and where everything that fits needs a lane
 * that the machine lacks. The memory of a block that swaps is counted as that of one that is recomputed, an upper bound that leaves
 * room for writes and reads beside compute; swap is chosen where times are known, checkpoint_swap never, only given. Where nothing
 * fits so, blocks that swap are counted with what they cannot do without (why: peak.c), and all swap where modes are free. */
ptn_status ptn_plan_make(const ptn_plan_request *request, ptn_plan *out);

#endif
