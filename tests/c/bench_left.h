/* Requests that a measurement waits for: it sets how many are out before it submits them. One that fails ends the program. */
#ifndef PTN_TESTS_BENCH_LEFT_H
#define PTN_TESTS_BENCH_LEFT_H

#include <stdio.h>
#include <stdlib.h>

#include "base/threads.h"
#include "disk/store.h"

static ptn_mutex mutex;
static ptn_condition condition;
static size_t left_count;

static void done(ptn_io *io) {
  if (io->status != PTN_OK) {
    fprintf(stderr, "%s\n", io->error.message);
    exit(1);
  }
  ptn_lock(&mutex);
  if (--left_count == 0) ptn_signal(&condition);
  ptn_unlock(&mutex);
}

#endif
