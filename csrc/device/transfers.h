/* Transfers: a lane of copies between host and device memory, beside compute.
 *
 * A lane is a FIFO: the upload lane brings chunks and activations to the device, the offload lane takes gradients and activations
 * away. A transfer is ordered against the compute stream, and against other lanes, by events (device.h), in both directions: it
 * begins when the event `after` has happened, and records the event `end` behind itself for others to follow. So the thread that
 * submits does not wait, and neither does the one that computes: on CUDA everything is ordered on the device. Who needs the bytes
 * on the CPU is called when they are there.
 *
 *   a chunk into a slot:    record(free, compute) behind the last operation on what was there;
 *                           submit with after = free, end = loaded;
 *                           follow(compute, loaded) before the first operation on the chunk
 *   a gradient to the host: record(made, compute) behind the operation that made it;
 *                           submit with after = made, end = gone; done: the update may read the bytes;
 *                           follow(compute, gone) before the memory is used again
 *
 * Transfers of one lane are carried out, and their done called, in the order they were submitted; lanes run beside each other.
 */
#ifndef PTN_DEVICE_TRANSFERS_H
#define PTN_DEVICE_TRANSFERS_H

#include <stdint.h>

#include "base/status.h"
#include "device/device.h"

typedef struct ptn_transfers ptn_transfers;

/* One transfer. The caller owns it and its memory, and touches neither between submit and the call of done, but for what is
 * ordered behind `end` on the device. */
typedef struct ptn_transfer ptn_transfer;
struct ptn_transfer {
  void *to;
  const void *from;
  uint64_t bytes;   /* 0: nothing is moved; done then says that `after`, and all that was submitted before, has happened */
  ptn_event *after; /* NULL: at once, when the lane comes to it */
  ptn_event *end;   /* recorded when the transfer is submitted; NULL: nobody follows it */
  /* Called once, on the lane's thread (inside submit in a forked child, where there is none), with no lock held: the bytes have
   * arrived and `from` may be changed, or status tells what failed and nothing is being moved any more. It may submit, and should
   * be short: it holds up the next one. */
  void (*done)(ptn_transfer *transfer);
  void *context; /* the caller's */
  /* Set before done is called. */
  ptn_status status;
  ptn_error error; /* where status is not PTN_OK */
  int64_t start_ns, end_ns; /* by ptn_now_ns: the end as the lane's thread saw it, the time between by the device's clock */
  struct { /* the lane's own */
    ptn_transfer *next;
    struct ptn_transfer_events *events;
    bool moving, marked; /* a copy was asked for; its end is recorded */
  } own;
};

/* The device outlives the lane. name: of its thread, at most 15 characters. */
ptn_status ptn_transfers_create(ptn_transfers **out, ptn_device *device, const char *name);
/* Waits for what has been submitted and ends the thread. Not from within done. In a forked child it does nothing. */
void ptn_transfers_destroy(ptn_transfers *transfers);
/* From any thread. PTN_OK: the transfer is ordered, and whoever follows `end` from now on comes after it. Anything else, which
 * done brings too: nothing may be built on `end`. done is called in either case, as the lane comes to it. */
ptn_status ptn_transfers_submit(ptn_transfers *transfers, ptn_transfer *transfer);

#endif
