/* What the stash's files share. One mutex guards all of it. It is never held across I/O, an allocation (whose pressure may ask the
 * stash), a call of the store that may wait, or a wait other than on its own condition; the arena's own lock may be taken inside
 * it. */
#ifndef PTN_RUNTIME_STASH_INTERNAL_H
#define PTN_RUNTIME_STASH_INTERNAL_H

#include "base/bytes.h"
#include "base/threads.h"
#include "runtime/stash.h"

/* Where a record's bytes are. */
typedef enum record_state {
  RECORD_IN_MEMORY, /* and nowhere else */
  RECORD_QUEUED, /* in memory, to be written */
  RECORD_WRITING, /* in memory, being written */
  RECORD_ON_DISK, /* and not held in memory by the stash; whoever else may have the block still has it */
  RECORD_READING, /* on disk, memory for it is being found and filled */
  RECORD_IN_BOTH,
} record_state;

typedef struct pass pass;

struct ptn_record {
  ptn_stash *stash;
  pass *pass;
  record_state state;
  ptn_block block; /* where the bytes are, or were last: only serial tells whether they still are */
  uint64_t serial; /* of the block that was put, and its version by this counter */
  const void *counter;
  uint32_t version;
  int32_t number;
  uint32_t place; /* in its pass, by the first put */
  uint32_t uses, waiting; /* living uses; those of them that were not asked for */
  bool asked; /* by any of its uses */
  bool passed; /* by reading ahead: backward is near */
  bool dropped; /* no use left: goes when what is in flight has ended */
  bool summed; /* its sums were noted when it was put */
  bool unchecked; /* its block came from the disk, and was not compared yet */
  ptn_extent extent;
  ptn_status status; /* of the last read, until somebody was told; io.error tells */
  _Atomic(void *) owner; /* set without the lock, while others may look at the record */
  ptn_record *before, *after; /* in its pass, by the last put */
  ptn_record *queue_before, *queue_after;
  ptn_record *table_next; /* also among those that may be used again */
  ptn_io io; /* last: it begins unwritten */
};

struct pass {
  pass *next; /* among those with records, or current */
  ptn_record *first, *last;
  ptn_record *ahead; /* the next to be read ahead; those after it were looked at */
  uint32_t records;
  uint64_t spare_bytes; /* at its turn: what its records could have had of memory under the goal */
  uint64_t forced_bytes; /* kept by the rule, and written after all because memory was short */
  ptn_stash_moment *moments; /* by place */
  size_t n_moments, max_moments;
};

/* Requests of one direction in flight. */
typedef struct traffic {
  uint64_t in_flight_bytes, in_flight_count;
  int64_t since_ns; /* the first of them started */
  uint64_t window_bytes; /* since the pass began */
  int64_t window_ns; /* in which at least one was in flight */
  double bytes_per_s; /* of the last window that tells; 0: not known yet */
} traffic;

/* When records of a block are put, or asked for: looked at once for so many bytes of them, in which a disk does not get far. */
#define CLOCK_BYTES PTN_MIB
typedef struct moment_clock {
  int64_t now_ns;
  uint64_t left_bytes; /* for which it still counts */
  int32_t number; /* of the block */
} moment_clock;

#define STASH_BUCKETS 1024

struct ptn_stash {
  ptn_mutex mutex;
  ptn_condition changed; /* a request ended, a record became available, a reader of ahead stopped */
  uint64_t references; /* the creator's and one for each record */
  ptn_store *store;
  ptn_account *account;
  ptn_trace *trace;
  bool closed;
  bool turned; /* between end and the next begin: backward, memory is for reading */
  bool advancing, advance_again; /* one thread at a time reads ahead, */
  bool starting, start_again, pressed; /* and one starts writes; pressed: whether backward is near or not */
  uint32_t finishing_count; /* threads of the store in a callback */
  uint32_t outside_count; /* threads inside the store on behalf of a record */
  ptn_record *idle_records; /* to be used again: to the end, as many as there ever were at once */
  pass *passes, *current;
  pass *backward; /* whose records were asked for last */
  ptn_record *queue_first, *queue_last;
  uint64_t queued_bytes;
  moment_clock puts, gets;
  traffic writes, reads;
  uint64_t ended_count; /* writes and reads */
  uint32_t reads_moving_count; /* of reads.in_flight_count: those that end without anybody's help */
  bool hold_back; /* memory was given up to somebody who needs it: no reading ahead until the next operation */
  uint64_t headroom_bytes, near_headroom_bytes; /* near: beside records of blocks from near_number on */
  int32_t near_number;
  ptn_status failure; /* of a write, until somebody was told */
  ptn_error failure_error;
  ptn_stash_moment *last_moments; /* of the last pass that is over, and what the rule makes of them */
  bool *keep;
  size_t n_last;
  uint64_t spare_bytes;
  ptn_stash_stats stats;
  ptn_record *table[STASH_BUCKETS]; /* records of the current pass by serial */
};

/* ---- all of the following are called with the lock ---- */

/* stash_io.c */
void ptn_stash_enqueue(ptn_stash *stash, ptn_record *record);
void ptn_stash_unqueue(ptn_stash *stash, ptn_record *record);
void ptn_stash_write(ptn_stash *stash, bool pressed); /* starts writes; unlocks meanwhile */
/* What a write failed with since the last call, for which nobody waited. */
ptn_status ptn_stash_report_failure(ptn_stash *stash);
ptn_status ptn_stash_read(ptn_stash *stash, ptn_record *record); /* urgently: ON_DISK to READING; unlocks meanwhile */
void ptn_stash_advance(ptn_stash *stash); /* reads ahead; unlocks meanwhile */
void ptn_stash_new_window(ptn_stash *stash);
void ptn_stash_wait(ptn_stash *stash, ptn_trace_kind kind, int32_t number); /* for `changed`, counted */

/* stash.c */
void ptn_record_let_go(ptn_record *record); /* the stash's hold on its block */
void ptn_record_destroy(ptn_record *record); /* no use, nothing in flight; unlocks for a moment */
void ptn_record_release_space(ptn_record *record); /* unlocks for a moment */

/* Without the room for an error. NULL is allowed. */
static inline void ptn_record_fetch_soon(const ptn_record *record) { ptn_fetch_soon(record, offsetof(ptn_record, io.error)); }

static inline bool record_is_held(const ptn_record *record) {
  return record->state == RECORD_IN_MEMORY || record->state == RECORD_QUEUED || record->state == RECORD_WRITING ||
         record->state == RECORD_IN_BOTH;
}

#endif
