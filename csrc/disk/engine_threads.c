/* The engine of plain calls: preadv and pwritev on a few threads.
 *
 * A thread that waits in a direct read costs no CPU time, so a handful of them keeps a disk busy; the price beside a ring is one
 * wake-up per piece. Pieces wait in one FIFO. Each wakes one of the threads that sleep, and a thread that ends a piece and finds
 * another in the FIFO goes on with it without sleeping.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/threads.h"
#include "disk/engine.h"

typedef struct threads_engine {
  ptn_io_engine base;
  ptn_mutex mutex;
  ptn_condition work;
  ptn_piece *first, *last;
  bool stop;
  int fd;
  uint32_t threads_count;
  pthread_t threads[];
} threads_engine;

static int64_t attempt(int fd, const ptn_piece *piece) {
  ssize_t moved = piece->write ? pwritev(fd, piece->parts, (int)piece->parts_count, (off_t)piece->offset)
                               : preadv(fd, piece->parts, (int)piece->parts_count, (off_t)piece->offset);
  return moved < 0 ? -(int64_t)errno : (int64_t)moved;
}

static void *serve(void *argument) {
  threads_engine *engine = argument;
  ptn_thread_be_prompt();
  ptn_lock(&engine->mutex);
  for (;;) {
    while (!engine->first && !engine->stop) ptn_wait(&engine->work, &engine->mutex);
    ptn_piece *piece = engine->first;
    if (!piece) break;
    engine->first = piece->next;
    ptn_unlock(&engine->mutex);
    piece->finish(piece, attempt(engine->fd, piece));
    ptn_lock(&engine->mutex);
  }
  ptn_unlock(&engine->mutex);
  return NULL;
}

static void start(ptn_io_engine *base, ptn_piece *piece) {
  threads_engine *engine = (threads_engine *)base;
  piece->next = NULL;
  ptn_lock(&engine->mutex);
  if (engine->first) engine->last->next = piece;
  else engine->first = piece;
  engine->last = piece;
  ptn_signal(&engine->work);
  ptn_unlock(&engine->mutex);
}

static void destroy(ptn_io_engine *base) {
  threads_engine *engine = (threads_engine *)base;
  ptn_lock(&engine->mutex);
  engine->stop = true;
  ptn_broadcast(&engine->work);
  ptn_unlock(&engine->mutex);
  for (uint32_t i = 0; i < engine->threads_count; i++) ptn_thread_join(engine->threads[i]);
  ptn_condition_destroy(&engine->work);
  ptn_mutex_destroy(&engine->mutex);
  free(engine);
}

static const ptn_io_engine_kind kind = {.name = "threads", .start = start, .destroy = destroy};

ptn_status ptn_io_engine_create_threads(ptn_io_engine **out, int fd, uint32_t threads_count) {
  *out = NULL;
  threads_engine *engine = calloc(1, sizeof *engine + threads_count * sizeof engine->threads[0]);
  if (!engine) return ptn_fail(PTN_MEMORY, "no memory for the threads of the disk store");
  engine->base.kind = &kind;
  engine->fd = fd;
  ptn_mutex_create(&engine->mutex);
  ptn_condition_create(&engine->work);
  for (; engine->threads_count < threads_count; engine->threads_count++) {
    ptn_status status = ptn_thread_start(&engine->threads[engine->threads_count], "ptn-disk", serve, engine);
    if (status != PTN_OK) {
      destroy(&engine->base);
      return status;
    }
  }
  *out = &engine->base;
  return PTN_OK;
}
