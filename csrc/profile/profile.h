/* The profile: what was measured of a machine and of a step's computation, as the planner reads it.
 *
 * Where it comes from is not its business: a training step that was timed, a rehearsal of the model without its states, or counted
 * operations and a description of hardware. What a step holds in memory is told apart from it, in the phases of a request
 * (plan/plan.h); the times here are of the same phases, in the same order.
 *
 * A lane carries bytes beside compute. Compute loses time to it where both want the same processor or the same memory: the drag.
 * Bytes of the update lane are those of parameters and state that it updates, gradients not counted.
 */
#ifndef PTN_PROFILE_PROFILE_H
#define PTN_PROFILE_PROFILE_H

#include <stdint.h>

typedef enum ptn_lane_name {
  PTN_UPLOAD = 0, /* host to device */
  PTN_OFFLOAD,    /* device to host */
  PTN_GATHER,     /* between devices: parts of chunks to whole ones, and whole gradients to parts */
  PTN_DISK_READ,
  PTN_DISK_WRITE,
  PTN_UPDATE,
  PTN_N_LANES,
} ptn_lane_name;

typedef struct ptn_lane_speed {
  double bytes_per_s;      /* while compute runs; 0: the machine has no such lane */
  double idle_bytes_per_s; /* while compute waits; 0: the same */
  double drag_ns_per_byte; /* compute time lost for each byte */
} ptn_lane_speed;

typedef struct ptn_phase_times {
  int64_t compute_ns;   /* its operations, with all they need in place; of a backward without recomputation */
  int64_t recompute_ns; /* of the backward of a block: what of its forward runs again; 0 for other phases */
} ptn_phase_times;

typedef struct ptn_profile {
  uint32_t n_phases;
  const ptn_phase_times *phases;
  ptn_lane_speed lanes[PTN_N_LANES];
  double disk_overlap;           /* 1: reads and writes share the disk's time; 2: neither slows the other; between: partly */
  double link_overlap;           /* the same of upload and offload */
  double stash_drag_ns_per_byte; /* on top of the lane's, for bytes of activations; negative, at most all of it: they cost less */
  double
      step_update_bytes_per_s; /* parameters and state of chunks at home on the device, updated in step() while nothing else runs */
  int64_t step_fixed_ns; /* of a step, beside phases, updates and waits: the optimizer's own work, hooks of every step */
  int64_t access_ns; /* of a demand of a chunk that is there */
  int64_t checkpoint_ns; /* of a block that is recomputed, beside its recomputation */
  int64_t swap_ns; /* of a block of a swap mode: its hooks */
  double
      request_ns; /* compute lost for a request to the disk that the lanes' drag does not count: for small pieces of the ring */
} ptn_profile;

#endif
