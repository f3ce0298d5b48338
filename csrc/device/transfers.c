/* Transfers: see transfers.h for what is promised.
 *
 * Problem: whoever submits must know when submit returns that the compute stream can be ordered behind the copy, and must not
 * wait for it; the CPU must learn, without polling, when each copy has been made; and a driver's call may fail at any point, with
 * a copy under way that still uses the caller's memory.
 *
 * Design: a stream and a thread. Submit hands the whole transfer to the stream: follow `after`, record its start, copy, record
 * its end. Then the transfer goes into a FIFO, whose thread waits for the ends one after the other and calls done. Start and end
 * are the lane's own pair of events, used again by later transfers: the caller's `end` may be recorded anew, or destroyed, before
 * the thread comes to it. A transfer that could not be handed over takes the same way, so that done is called in order and in one
 * place; where its copy may be under way and nothing marks its end, the thread waits for the stream.
 *
 * Invariants: the order in the FIFO is the order on the stream, which is what the order lock is for: it is held while a transfer
 * is handed over. The mutex is held for a moment only, never during a call of the device or of done. A pair of events belongs to
 * one transfer from submit until its end was seen, else it is in the list of free ones.
 */
#include "device/transfers.h"

#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/threads.h"

typedef struct ptn_transfer_events {
  struct ptn_transfer_events *next;
  ptn_event *start, *end;
} event_pair;

struct ptn_transfers {
  ptn_device *device;
  ptn_stream *stream;
  pid_t process;
  pthread_t thread;
  bool started;
  ptn_mutex order; /* transfers are handed to the stream one at a time */
  ptn_mutex mutex; /* of the following */
  ptn_condition work, idle;
  ptn_transfer *first, *last;
  uint64_t outstanding_count; /* submitted, and done has not returned */
  bool stop;
  event_pair *free_pairs;
};

/* ---- pairs of events ---- */

static void destroy_pair(ptn_device *device, event_pair *pair) {
  device->kind->destroy_event(device, pair->start);
  device->kind->destroy_event(device, pair->end);
  free(pair);
}

static ptn_status create_pair(ptn_device *device, event_pair **out) {
  event_pair *pair = calloc(1, sizeof *pair);
  if (!pair) return ptn_fail(PTN_MEMORY, "no memory for the events of a transfer");
  ptn_status status = device->kind->create_event(device, PTN_EVENT_TIME, &pair->start);
  if (status == PTN_OK) status = device->kind->create_event(device, PTN_EVENT_TIME, &pair->end);
  if (status != PTN_OK) destroy_pair(device, pair);
  else *out = pair;
  return status;
}

static ptn_status take_pair(ptn_transfers *transfers, event_pair **out) {
  ptn_lock(&transfers->mutex);
  *out = transfers->free_pairs;
  if (*out) transfers->free_pairs = (*out)->next;
  ptn_unlock(&transfers->mutex);
  return *out ? PTN_OK : create_pair(transfers->device, out);
}

/* ---- submitting ---- */

static void note_failure(ptn_transfer *transfer, ptn_status status) {
  if (status == PTN_OK || transfer->status != PTN_OK) return;
  transfer->status = status;
  ptn_error_save(&transfer->error);
}

/* Under the order lock. `moving` is set before the copy: one that failed may have begun. */
static ptn_status hand_over(ptn_transfers *transfers, ptn_transfer *transfer) {
  ptn_device *device = transfers->device;
  const ptn_device_kind *kind = device->kind;
  PTN_TRY(take_pair(transfers, &transfer->own.events));
  if (transfer->after) PTN_TRY(kind->follow(device, transfers->stream, transfer->after));
  PTN_TRY(kind->record(device, transfer->own.events->start, transfers->stream));
  if (transfer->bytes > 0) {
    transfer->own.moving = true;
    PTN_TRY(kind->copy(device, transfers->stream, transfer->to, transfer->from, transfer->bytes));
  }
  PTN_TRY(kind->record(device, transfer->own.events->end, transfers->stream));
  transfer->own.marked = true;
  return transfer->end ? kind->record(device, transfer->end, transfers->stream) : PTN_OK;
}

static void append(ptn_transfers *transfers, ptn_transfer *transfer) {
  ptn_lock(&transfers->mutex);
  if (transfers->first) transfers->last->own.next = transfer;
  else transfers->first = transfer;
  transfers->last = transfer;
  transfers->outstanding_count++;
  ptn_signal(&transfers->work);
  ptn_unlock(&transfers->mutex);
}

ptn_status ptn_transfers_submit(ptn_transfers *transfers, ptn_transfer *transfer) {
  transfer->status = PTN_OK;
  transfer->start_ns = transfer->end_ns = 0;
  memset(&transfer->own, 0, sizeof transfer->own);
  if (transfers->process != getpid()) {
    ptn_status refused =
        ptn_fail(PTN_INVALID, "a lane of transfers was used in a forked child; it belongs to the process that made it");
    note_failure(transfer, refused);
    transfer->done(transfer);
    return refused;
  }
  ptn_lock(&transfers->order);
  ptn_status status = hand_over(transfers, transfer);
  note_failure(transfer, status);
  append(transfers, transfer); /* it may be done, and gone, before this returns */
  ptn_unlock(&transfers->order);
  return status;
}

/* ---- ending ---- */

/* Returns when nothing of the transfer is under way. What fails here is the failure of the transfer, if it had none before. */
static void await(ptn_transfers *transfers, ptn_transfer *transfer) {
  ptn_device *device = transfers->device;
  event_pair *events = transfer->own.events;
  bool ended = !transfer->own.moving;
  int64_t taken_ns = 0;
  if (transfer->own.marked) {
    ptn_status status = device->kind->wait(device, events->end);
    note_failure(transfer, status);
    ended |= status == PTN_OK;
  }
  if (!ended) device->kind->finish(device, transfers->stream); /* what a device does that fails even here has ended with it */
  transfer->end_ns = ptn_now_ns();
  if (transfer->status == PTN_OK) note_failure(transfer, device->kind->elapsed(device, events->start, events->end, &taken_ns));
  transfer->start_ns = transfer->end_ns - taken_ns;
}

/* Gives the pair back, while the transfer is still the lane's. */
static void settle(ptn_transfers *transfers, ptn_transfer *transfer) {
  if (!transfer->own.events) return;
  ptn_lock(&transfers->mutex);
  transfer->own.events->next = transfers->free_pairs;
  transfers->free_pairs = transfer->own.events;
  ptn_unlock(&transfers->mutex);
}

static void *serve(void *argument) {
  ptn_transfers *transfers = argument;
  ptn_thread_be_prompt();
  ptn_lock(&transfers->mutex);
  for (;;) {
    while (!transfers->first && !transfers->stop) ptn_wait(&transfers->work, &transfers->mutex);
    ptn_transfer *transfer = transfers->first;
    if (!transfer) break;
    transfers->first = transfer->own.next;
    ptn_unlock(&transfers->mutex);
    await(transfers, transfer);
    settle(transfers, transfer);
    transfer->done(transfer); /* the caller's again: it may be gone after this */
    ptn_lock(&transfers->mutex);
    if (--transfers->outstanding_count == 0) ptn_broadcast(&transfers->idle);
  }
  ptn_unlock(&transfers->mutex);
  return NULL;
}

/* ---- the whole ---- */

static void end_thread(ptn_transfers *transfers) {
  ptn_lock(&transfers->mutex);
  while (transfers->outstanding_count > 0) ptn_wait(&transfers->idle, &transfers->mutex);
  transfers->stop = true;
  ptn_signal(&transfers->work);
  ptn_unlock(&transfers->mutex);
  ptn_thread_join(transfers->thread);
}

void ptn_transfers_destroy(ptn_transfers *transfers) {
  if (!transfers || transfers->process != getpid()) return; /* its thread is the parent's */
  if (transfers->started) end_thread(transfers);
  while (transfers->free_pairs) {
    event_pair *pair = transfers->free_pairs;
    transfers->free_pairs = pair->next;
    destroy_pair(transfers->device, pair);
  }
  transfers->device->kind->destroy_stream(transfers->device, transfers->stream);
  ptn_condition_destroy(&transfers->idle);
  ptn_condition_destroy(&transfers->work);
  ptn_mutex_destroy(&transfers->mutex);
  ptn_mutex_destroy(&transfers->order);
  free(transfers);
}

ptn_status ptn_transfers_create(ptn_transfers **out, ptn_device *device, const char *name) {
  *out = NULL;
  ptn_transfers *transfers = calloc(1, sizeof *transfers);
  if (!transfers) return ptn_fail(PTN_MEMORY, "no memory for a lane of transfers");
  transfers->device = device;
  transfers->process = getpid();
  ptn_mutex_create(&transfers->order);
  ptn_mutex_create(&transfers->mutex);
  ptn_condition_create(&transfers->work);
  ptn_condition_create(&transfers->idle);
  ptn_status status = device->kind->create_stream(device, &transfers->stream);
  if (status == PTN_OK) status = ptn_thread_start(&transfers->thread, name, serve, transfers);
  transfers->started = status == PTN_OK;
  if (status != PTN_OK) ptn_transfers_destroy(transfers);
  else *out = transfers;
  return status;
}
