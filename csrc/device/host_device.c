/* The host as a device: device.h's promises, kept by threads and memcpy.
 *
 * Problem: what orders copies with streams and events must run, and be right, where the CPU computes.
 *
 * Design: a stream is a thread with a FIFO of orders. Recording an event makes a mark, which the event refers to from then on,
 * and puts it into the FIFO; the thread that comes to it sets it. Following an event puts the mark it refers to now into the
 * other FIFO, whose thread sleeps there until the mark is set. So an event that is recorded anew, or destroyed, changes nothing
 * for whoever followed it before. On the calling thread (stream NULL) a mark is set when it is made, and following waits.
 *
 * Invariants: one mutex guards queues, marks and events; it is not held during a copy. A mark lives as long as an event or an
 * order refers to it. Marks are set in the order of their stream.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/threads.h"
#include "device/device.h"
#include "device/pinned.h"

typedef struct mark {
  uint32_t references;
  bool set;
  int64_t set_ns;
} mark;

struct ptn_event {
  mark *mark; /* NULL: never recorded */
};

typedef enum order_kind { ORDER_COPY, ORDER_SET, ORDER_FOLLOW } order_kind;

typedef struct order {
  struct order *next;
  order_kind kind;
  void *to;
  const void *from;
  uint64_t bytes;
  mark *mark;
} order;

typedef struct host_device {
  ptn_device base;
  pid_t process;
  ptn_mutex mutex;
  ptn_condition marked; /* a mark was set */
} host_device;

struct ptn_stream {
  host_device *device;
  ptn_condition work; /* an order came, or the end */
  order *first, *last;
  bool stop;
  pthread_t thread;
};

static host_device *host_of(ptn_device *device) { return (host_device *)device; }

/* ---- marks (under the mutex) ---- */

static void mark_release(mark *mark) {
  if (mark && --mark->references == 0) free(mark);
}

static void mark_set(host_device *host, mark *mark) {
  mark->set = true;
  mark->set_ns = ptn_now_ns();
  ptn_broadcast(&host->marked);
}

static void mark_wait(host_device *host, mark *mark) {
  if (!mark) return;
  mark->references++;
  while (!mark->set) ptn_wait(&host->marked, &host->mutex);
  mark_release(mark);
}

/* ---- a stream ---- */

static void append(ptn_stream *stream, order *order) {
  if (stream->first) stream->last->next = order;
  else stream->first = order;
  stream->last = order;
  ptn_signal(&stream->work);
}

static void carry_out(host_device *host, order *order) {
  switch (order->kind) {
    case ORDER_COPY:
      ptn_unlock(&host->mutex);
      memcpy(order->to, order->from, (size_t)order->bytes);
      ptn_lock(&host->mutex);
      break;
    case ORDER_SET: mark_set(host, order->mark); break;
    case ORDER_FOLLOW: mark_wait(host, order->mark); break;
  }
  mark_release(order->mark);
}

static void *serve(void *argument) {
  ptn_stream *stream = argument;
  host_device *host = stream->device;
  ptn_lock(&host->mutex);
  for (;;) {
    while (!stream->first && !stream->stop) ptn_wait(&stream->work, &host->mutex);
    order *order = stream->first;
    if (!order) break;
    stream->first = order->next;
    carry_out(host, order);
    free(order);
  }
  ptn_unlock(&host->mutex);
  return NULL;
}

static ptn_status host_create_stream(ptn_device *device, ptn_stream **out) {
  *out = NULL;
  ptn_stream *stream = calloc(1, sizeof *stream);
  if (!stream) return ptn_fail(PTN_MEMORY, "no memory for a stream");
  stream->device = host_of(device);
  ptn_condition_create(&stream->work);
  ptn_status status = ptn_thread_start(&stream->thread, "ptn-stream", serve, stream);
  if (status != PTN_OK) {
    ptn_condition_destroy(&stream->work);
    free(stream);
    return status;
  }
  *out = stream;
  return PTN_OK;
}

static void host_destroy_stream(ptn_device *device, ptn_stream *stream) {
  host_device *host = host_of(device);
  if (!stream || host->process != getpid()) return; /* the thread is the parent's */
  ptn_lock(&host->mutex);
  stream->stop = true;
  ptn_signal(&stream->work);
  ptn_unlock(&host->mutex);
  ptn_thread_join(stream->thread);
  ptn_condition_destroy(&stream->work);
  free(stream);
}

/* ---- orders ---- */

static ptn_status no_order(void) { return ptn_fail(PTN_MEMORY, "no memory for an order of a stream"); }

static order *new_order(order_kind kind, mark *mark) {
  order *order = calloc(1, sizeof *order);
  if (!order) return NULL;
  order->kind = kind;
  order->mark = mark;
  return order;
}

static ptn_status host_create_event(ptn_device *device, ptn_event_use use, ptn_event **out) {
  (void)device, (void)use; /* every event is timed and waited for alike */
  *out = calloc(1, sizeof **out);
  return *out ? PTN_OK : ptn_fail(PTN_MEMORY, "no memory for an event");
}

static void host_destroy_event(ptn_device *device, ptn_event *event) {
  host_device *host = host_of(device);
  if (!event || host->process != getpid()) return;
  ptn_lock(&host->mutex);
  mark_release(event->mark);
  ptn_unlock(&host->mutex);
  free(event);
}

static ptn_status host_record(ptn_device *device, ptn_event *event, ptn_stream *stream) {
  host_device *host = host_of(device);
  mark *mark = calloc(1, sizeof *mark);
  order *order = stream ? new_order(ORDER_SET, mark) : NULL;
  if (!mark || (stream && !order)) {
    free(mark);
    free(order);
    return no_order();
  }
  ptn_lock(&host->mutex);
  mark_release(event->mark);
  event->mark = mark;
  mark->references = stream ? 2 : 1;
  if (stream) append(stream, order);
  else mark_set(host, mark);
  ptn_unlock(&host->mutex);
  return PTN_OK;
}

static ptn_status host_wait(ptn_device *device, ptn_event *event) {
  host_device *host = host_of(device);
  ptn_lock(&host->mutex);
  mark_wait(host, event->mark);
  ptn_unlock(&host->mutex);
  return PTN_OK;
}

static ptn_status host_follow(ptn_device *device, ptn_stream *stream, ptn_event *event) {
  if (!stream) return host_wait(device, event);
  host_device *host = host_of(device);
  order *order = new_order(ORDER_FOLLOW, NULL);
  if (!order) return no_order();
  ptn_lock(&host->mutex);
  order->mark = event->mark;
  if (order->mark) {
    order->mark->references++;
    append(stream, order);
  }
  bool queued = order->mark != NULL;
  ptn_unlock(&host->mutex);
  if (!queued) free(order);
  return PTN_OK;
}

static ptn_status host_finish(ptn_device *device, ptn_stream *stream) {
  if (!stream) return PTN_OK;
  ptn_event end = {0};
  PTN_TRY(host_record(device, &end, stream));
  PTN_TRY(host_wait(device, &end));
  host_device *host = host_of(device);
  ptn_lock(&host->mutex);
  mark_release(end.mark);
  ptn_unlock(&host->mutex);
  return PTN_OK;
}

static ptn_status host_elapsed(ptn_device *device, ptn_event *first, ptn_event *last, int64_t *out_ns) {
  host_device *host = host_of(device);
  ptn_lock(&host->mutex);
  bool happened = first->mark && first->mark->set && last->mark && last->mark->set;
  *out_ns = happened ? last->mark->set_ns - first->mark->set_ns : 0;
  ptn_unlock(&host->mutex);
  return happened ? PTN_OK : ptn_fail(PTN_INVALID, "the time between two events was asked for before both have happened");
}

static ptn_status host_copy(ptn_device *device, ptn_stream *stream, void *to, const void *from, uint64_t bytes) {
  if (!stream) {
    memcpy(to, from, (size_t)bytes);
    return PTN_OK;
  }
  host_device *host = host_of(device);
  order *order = new_order(ORDER_COPY, NULL);
  if (!order) return no_order();
  order->to = to;
  order->from = from;
  order->bytes = bytes;
  ptn_lock(&host->mutex);
  append(stream, order);
  ptn_unlock(&host->mutex);
  return PTN_OK;
}

/* ---- memory ---- */

static ptn_status host_allocate(ptn_device *device, uint64_t bytes, void **out) {
  (void)device;
  *out = NULL;
  if (bytes == 0) return ptn_fail(PTN_INVALID, "0 bytes of device memory were asked for: at least 1 is wanted");
  if (bytes <= SIZE_MAX - PTN_PAGE_BYTES) *out = aligned_alloc(PTN_PAGE_BYTES, (size_t)ptn_round_up(bytes, PTN_PAGE_BYTES));
  if (*out) return PTN_OK;
  ptn_fail(PTN_MEMORY, "the system gives no %llu bytes of memory", (unsigned long long)bytes);
  ptn_last_error()->asked_bytes = bytes;
  return PTN_MEMORY;
}

static void host_free(ptn_device *device, void *memory) {
  (void)device;
  free(memory);
}

static ptn_status host_pin(ptn_device *device, uint64_t bytes, ptn_pinned *out) {
  (void)device;
  PTN_TRY(ptn_pinned_map(bytes, out));
  out->locked = true; /* nothing has to be: a thread copies */
  return PTN_OK;
}

static void host_unpin(ptn_device *device, ptn_pinned *pinned) {
  (void)device;
  ptn_pinned_unmap(pinned);
}

static void host_destroy(ptn_device *device) {
  host_device *host = host_of(device);
  if (host->process != getpid()) return;
  ptn_condition_destroy(&host->marked);
  ptn_mutex_destroy(&host->mutex);
  free(host);
}

ptn_status ptn_device_open_host(ptn_device **out) {
  static const ptn_device_kind kind = {
      .name = "host",
      .destroy = host_destroy,
      .allocate = host_allocate,
      .free = host_free,
      .pin = host_pin,
      .unpin = host_unpin,
      .create_stream = host_create_stream,
      .destroy_stream = host_destroy_stream,
      .create_event = host_create_event,
      .destroy_event = host_destroy_event,
      .record = host_record,
      .follow = host_follow,
      .wait = host_wait,
      .finish = host_finish,
      .elapsed = host_elapsed,
      .copy = host_copy,
  };
  *out = NULL;
  host_device *host = calloc(1, sizeof *host);
  if (!host) return ptn_fail(PTN_MEMORY, "no memory for a device");
  host->base.kind = &kind;
  host->process = getpid();
  ptn_mutex_create(&host->mutex);
  ptn_condition_create(&host->marked);
  *out = &host->base;
  return PTN_OK;
}
