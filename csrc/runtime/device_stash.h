/* The stash of a device: saved tensors that leave its memory between forward and backward for pinned memory of the host, and for the
 * disk where that is short, and come back before they are asked for.
 *
 * The device's memory is the caller's, who gives what is to be copied and takes it back when `ended` says so, or at once behind
 * ptn_device_record_let_go. So what stash.h does with holds of the arena is done here with events: nobody waits for a copy but the
 * device.
 *
 * Words: a record is memory of the device as it was when it was put. On the host it lies in a range of one pool of fixed size.
 *
 * What moves when: a record is copied down when it is put, behind what its stream has so far. Where the pool is full, the records
 * that were put first are written to the disk, since backward asks for them last; where the pass before tells that it will be full,
 * they are written before that. What was written keeps its range until another record needs it. In backward records on disk are read
 * ahead into ranges that became free, in reverse order. bring copies up again; when to, and into which memory, the caller decides.
 *
 * Threads: put, bring, let_go and follow are called on the thread that drives the step; the others from any.
 */
#ifndef PTN_RUNTIME_DEVICE_STASH_H
#define PTN_RUNTIME_DEVICE_STASH_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/trace.h"
#include "device/transfers.h"
#include "disk/store.h"

typedef struct ptn_device_stash ptn_device_stash;
typedef struct ptn_device_record ptn_device_record;

typedef struct ptn_device_stash_config { /* all borrowed until close */
  ptn_device *device;
  ptn_transfers *upload, *offload;
  ptn_store *store;
  ptn_trace *trace; /* may be NULL */
} ptn_device_stash_config;

typedef struct ptn_device_stash_stats {
  uint64_t record_count, put_bytes; /* since create */
  uint64_t brought_bytes; /* copied to the device again */
  uint64_t written_bytes, read_bytes; /* of the disk */
  uint64_t host_bytes; /* of the pool in use, now */
  uint64_t disk_bytes, most_disk_bytes; /* in records now; the most since ptn_device_stash_mark */
  int64_t wait_ns; /* the driving thread waited for the pool and for the disk */
} ptn_device_stash_stats;

ptn_status ptn_device_stash_create(ptn_device_stash **out, const ptn_device_stash_config *config);
/* Waits for what is in flight, and gives disk space and the pool up. Records may live on: asking for one is then PTN_STEP. */
void ptn_device_stash_close(ptn_device_stash *stash);
void ptn_device_stash_release(ptn_device_stash *stash); /* the creator's reference; after close */

/* The pool: at a multiple of PTN_PAGE_BYTES, borrowed until it is replaced or the stash closed; NULL: none. The one before is not
 * used any more when this returns PTN_OK: what lay there is on the disk. The largest record there is fits it. */
ptn_status ptn_device_stash_set_pool(ptn_device_stash *stash, void *memory, uint64_t bytes);
uint64_t ptn_device_stash_largest(ptn_device_stash *stash); /* bytes of the largest record there is */

void ptn_device_stash_begin(ptn_device_stash *stash); /* a forward begins */
void ptn_device_stash_end(ptn_device_stash *stash); /* backward has come to the records */

/* Copies bytes at `from` down, as they are when stream has done all that is ordered on it; number: of the model's block, for the trace.
 * May wait for the pool. PTN_INVALID: more than the pool. PTN_DISK, PTN_DEVICE: also where something that was under way has failed
 * since the last call. */
ptn_status ptn_device_stash_put(ptn_device_stash *stash, ptn_stream *stream, const void *from, uint64_t bytes, int32_t number,
                                ptn_device_record **out);
/* Copies a record up, behind what stream has so far. Its bytes are there for what is ordered behind ptn_device_record_follow. May wait
 * for the disk, and for an earlier bring of the same record. */
ptn_status ptn_device_record_bring(ptn_device_record *record, ptn_stream *stream, void *to);
ptn_status ptn_device_record_follow(ptn_device_record *record, ptn_stream *stream);
/* Whether bring would not wait. */
bool ptn_device_record_is_near(ptn_device_record *record);
/* Whether no copy from or to the device's memory is under way. */
bool ptn_device_record_ended(ptn_device_record *record);
/* stream comes behind the copies that are: memory that they use may be used again by what is ordered there later. */
ptn_status ptn_device_record_let_go(ptn_device_record *record, ptn_stream *stream);
/* Whether somebody will ask for it: only then it is read ahead. A record that was put is wanted. */
void ptn_device_record_want(ptn_device_record *record, bool wanted);
bool ptn_device_record_is_closed(ptn_device_record *record);
void ptn_device_record_drop(ptn_device_record *record); /* the caller's use is over */

/* A failure of what was under way that nobody was told of yet. */
ptn_status ptn_device_stash_check(ptn_device_stash *stash);
void ptn_device_stash_get_stats(ptn_device_stash *stash, ptn_device_stash_stats *out);
uint64_t ptn_device_stash_mark(ptn_device_stash *stash); /* returns most_disk_bytes and starts it anew */

#endif
