/* What the core needs from a device: pages, memory, streams, events and copies between memories.
 *
 * A device is what computes. Work is handed to it in streams: a stream does its work in order, beside the thread that hands it
 * over and beside other streams. An event is a point in a stream. Whatever must come after something in another stream is ordered
 * by an event: recorded on the one, followed by the other. The thread that orders does not wait, so a step is handed over without
 * one wait, and no function here waits for the whole device.
 *
 * There are two. CUDA: streams and events are the driver's, device memory is the GPU's. Host: the CPU computes, device memory is
 * ordinary memory, a stream is a thread; it makes the same promises, so that what is built on them is tested on any machine.
 *
 * The compute stream is the caller's: on CUDA the handle of torch's current stream, NULL among them, which is the default stream.
 * On the host it is the calling thread, and NULL stands for it: what is ordered on NULL is done before the function returns.
 *
 * Functions may be called from any thread, unless they say otherwise. A function that orders something and fails has ordered
 * nothing, but a failed copy may have begun. After fork a device is of no use to the child, which may only forget it.
 */
#ifndef PTN_DEVICE_DEVICE_H
#define PTN_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* ---- pages of the host ----
 *
 * The arena decides what lives where; a page source only reserves ranges of addresses, takes memory back from a part of
 * one, and puts a part on huge pages. A reserved range costs nothing until it is written to; a purged part costs nothing
 * until it is written to again, and then reads as zeros.
 */
typedef struct ptn_page_source {
  /* Reserves at least least_bytes of addresses, wished_bytes where they are free of cost (both multiples of PTN_PAGE_BYTES);
   * *out is a multiple of PTN_HUGE_BYTES and *got_bytes of PTN_PAGE_BYTES. PTN_MEMORY when refused. */
  ptn_status (*reserve)(size_t least_bytes, size_t wished_bytes, size_t *got_bytes, void **out);
  void (*unreserve)(void *begin, size_t bytes);
  /* Gives the memory of whole pages back; what they held is lost. False when the system refuses (locked memory). */
  bool (*purge)(void *begin, size_t bytes);
  /* Multiples of PTN_HUGE_BYTES. Allowed: the next write to any byte may make a whole huge page resident. Ranges start
   * disallowed. A hint: a system without huge pages does nothing. */
  void (*allow_huge)(void *begin, size_t bytes, bool allowed);
  /* Of one huge page, at a multiple of PTN_HUGE_BYTES: allows it, and moves there at once what lies in small pages; bytes stay as
   * they are, whoever uses them meanwhile. All of it is resident then. A hint, as above, and where the system cannot do it now
   * (a device is using the pages) it may do so later. */
  void (*gather_huge)(void *begin);
} ptn_page_source;

const ptn_page_source *ptn_host_pages(void);

/* ---- the device ---- */

typedef struct ptn_device ptn_device;
typedef struct ptn_stream ptn_stream; /* NULL is one too; a handle of the driver may be cast to it */
typedef struct ptn_event ptn_event;

/* ORDER: streams follow it, nothing else; the cheapest. TIME: a thread may wait for it as well, and time between two is told. */
typedef enum ptn_event_use { PTN_EVENT_ORDER = 0, PTN_EVENT_TIME } ptn_event_use;

/* Host memory that the device copies from and to by itself. A forked child has none at its address. */
typedef struct ptn_pinned {
  void *memory;   /* at a multiple of PTN_HUGE_BYTES */
  uint64_t bytes; /* what was asked for, in whole pages */
  /* False: the device's driver would not lock it, and reason says so in one line. Copies are right all the same, but slower, and
   * the thread that orders one may wait until it has been made. */
  bool locked;
  char reason[256];
} ptn_pinned;

typedef struct ptn_device_kind {
  const char *name; /* "host", "cuda" */
  /* What was made of it is gone before. */
  void (*destroy)(ptn_device *device);

  /* ---- memory: between steps only, since giving it back may wait for all the device does ---- */

  /* bytes is at least 1. *out is a multiple of PTN_TENSOR_ALIGN_BYTES and holds anything. PTN_MEMORY when there is none. */
  ptn_status (*allocate)(ptn_device *device, uint64_t bytes, void **out);
  void (*free)(ptn_device *device, void *memory); /* no work that is ordered uses it; NULL is allowed */
  /* Zeros, resident, on huge pages where it is long enough. PTN_MEMORY when the host has none. */
  ptn_status (*pin)(ptn_device *device, uint64_t bytes, ptn_pinned *out);
  void (*unpin)(ptn_device *device, ptn_pinned *pinned); /* as free; sets *pinned to none; none is allowed */

  /* ---- streams and events ---- */

  /* One that runs beside every other, the default stream too. */
  ptn_status (*create_stream)(ptn_device *device, ptn_stream **out);
  void (*destroy_stream)(ptn_device *device, ptn_stream *stream); /* its work is done; NULL is allowed */
  ptn_status (*create_event)(ptn_device *device, ptn_event_use use, ptn_event **out);
  void (*destroy_event)(ptn_device *device, ptn_event *event); /* at any time: who follows it still does; NULL is allowed */

  /* The event is from now on the point that stream has reached when it has done all that is ordered on it so far. */
  ptn_status (*record)(ptn_device *device, ptn_event *event, ptn_stream *stream);
  /* What is ordered on stream from now on begins when the event, as it was last recorded, has happened. One that was never
   * recorded has happened. */
  ptn_status (*follow)(ptn_device *device, ptn_stream *stream, ptn_event *event);
  /* The same for the calling thread, which sleeps. Of a TIME event. PTN_DEVICE where the device failed before. */
  ptn_status (*wait)(ptn_device *device, ptn_event *event);
  /* Sleeps until stream has done all that is ordered on it. For ends and errors; a step needs none. */
  ptn_status (*finish)(ptn_device *device, ptn_stream *stream);
  /* From first to last, by the device's clock. Both are TIME events that have happened. */
  ptn_status (*elapsed)(ptn_device *device, ptn_event *first, ptn_event *last, int64_t *out_ns);

  /* Orders a copy on stream between any two of device memory, pinned memory and other host memory; they do not overlap. Host
   * memory that is not pinned is slow, as in ptn_pinned. Until the copy has been made nobody else writes to either. */
  ptn_status (*copy)(ptn_device *device, ptn_stream *stream, void *to, const void *from, uint64_t bytes);
} ptn_device_kind;

struct ptn_device {
  const ptn_device_kind *kind; /* first member of every device */
};

ptn_status ptn_device_open_host(ptn_device **out);
/* The GPU of this number among those that the driver shows, in the context that torch uses there. library: the driver's, NULL for
 * the system's own. PTN_DEVICE with one line that says what is missing: a driver, a GPU, a newer driver. PTN_INVALID: no such
 * number. */
ptn_status ptn_device_open_cuda(ptn_device **out, int number, const char *library);

#endif
