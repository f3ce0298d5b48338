/* The pages of pinned memory, before a driver locks them: what every device shares. */
#ifndef PTN_DEVICE_PINNED_H
#define PTN_DEVICE_PINNED_H

#include "device/device.h"

/* A mapping of its own: zeros, resident, on huge pages where it is long enough, not locked. PTN_MEMORY when there is none. */
ptn_status ptn_pinned_map(uint64_t bytes, ptn_pinned *out);
void ptn_pinned_unmap(ptn_pinned *pinned); /* sets *pinned to none; none is allowed */

#endif
