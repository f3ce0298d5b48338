/* The link between a host and its device, measured by the lanes that carry a step's bytes (device/transfers.h). */
#ifndef PTN_PROFILE_LINK_H
#define PTN_PROFILE_LINK_H

#include <stdint.h>

#include "base/status.h"
#include "device/device.h"

typedef struct ptn_link_speed {
  double upload_bytes_per_s, offload_bytes_per_s; /* each alone */
  double overlap; /* of both at once, as ptn_profile has it: 1, they share the time, to 2, neither slows the other */
} ptn_link_speed;

/* Copies pieces of pinned memory to the device, others away from it, then both at once: `count` at least of each, each of
 * piece_bytes. Takes as much memory of the device, and of the host, as two pieces have. Between steps only: what else the device
 * does meanwhile makes the link look slower. Both arguments are at least 1. */
ptn_status ptn_link_measure(ptn_device *device, uint64_t piece_bytes, uint32_t count, ptn_link_speed *out);

#endif
