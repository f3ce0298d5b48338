/* The stash: saved tensors that leave memory between forward and backward, and come back before they are asked for.
 *
 * Words: a record is one block of the arena (arena.h) as it was when autograd saved a tensor in it. Tensors that share a block, its
 * version and what counts that share the record: it is written once. A use is one saved tensor of a record. A pass is one forward of
 * the model and the records it made; several passes may be in flight.
 *
 * What moves when: records are written in the order of the forward pass, straight from the block they lie in; a block goes back to
 * the arena when its write has ended and nobody else holds it. Backward asks for records in reverse: what is still in memory is
 * handed back, with no read (a write that has not begun is not made at all); the others are read ahead, in reverse order, a
 * fraction of a second of the disk's work, while the account has room under its goal. A record that could not be written and read
 * again in the time that the pass before left between saving and asking stays in memory, and so do the last ones for which there is
 * memory to spare (runtime/stash_rule.c).
 *
 * What the disk returns and is not what was written is PTN_DISK (disk/store.h), and never handed out.
 *
 * Threads: all functions may be called from any thread; what waits says so. Worker threads need nothing that a caller holds.
 */
#ifndef PTN_RUNTIME_STASH_H
#define PTN_RUNTIME_STASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/trace.h"
#include "disk/store.h"
#include "memory/arena.h"

typedef struct ptn_stash ptn_stash;
typedef struct ptn_record ptn_record;

typedef struct ptn_stash_stats {
  uint64_t put_count, record_count;        /* tensors given, records made of them, since create */
  uint64_t put_bytes;                      /* of the records made */
  uint64_t written_bytes, read_bytes;      /* since create */
  uint64_t forwarded_bytes;                /* asked for and handed back from memory, without a read */
  uint64_t memory_bytes;                   /* that only the stash holds, now: to be written, read ahead, kept back */
  uint64_t disk_bytes, most_disk_bytes;    /* in records now; the most since ptn_stash_mark */
  int64_t wait_ns;                         /* callers waited for reads and for memory */
} ptn_stash_stats;

/* store, account and trace (which may be NULL) are borrowed until close. */
ptn_status ptn_stash_create(ptn_stash **out, ptn_store *store, ptn_account *account, ptn_trace *trace);
/* Waits for what is in flight and gives memory and disk space back. Records may live on: asking for one is then PTN_STEP. The
 * store may be destroyed after this. */
void ptn_stash_close(ptn_stash *stash);
void ptn_stash_release(ptn_stash *stash); /* the creator's reference; after close */

/* ---- passes ---- */

void ptn_stash_begin(ptn_stash *stash); /* a forward begins: what is put from now on makes a new pass */
/* Backward has come to the records: from now on memory is for reading ahead. Best called when what lies behind the records, the
 * head of a model, has had its backward: until then memory is its. */
void ptn_stash_end(ptn_stash *stash);
/* An operation of backward is over that may have freed memory of others, such as what a kept block saved: reads ahead. */
void ptn_stash_go_on(ptn_stash *stash);
/* The same; nothing is to be recomputed before records of blocks from `number` on are asked for: they are near. */
void ptn_stash_near(ptn_stash *stash, int32_t number);

/* ---- records ---- */

/* Whether memory that it takes is room in the budget: what the user made beside the model counts nowhere, and only costs. */
bool ptn_stash_gains(const ptn_stash *stash, const ptn_block *block);
/* A saved tensor lies in this block, which somebody holds, and counts its changes by this counter, which lives as long as a record's
 * owner: what counts by another has another record. counter NULL: of what nothing changes any more. *out: a use of its record, to be
 * dropped once; *fresh: the record was made by this call. number: of the model's block, for the trace. PTN_DISK where there is no
 * space, or where a write that was under way has failed and nobody was told of that. */
ptn_status ptn_stash_put(ptn_stash *stash, const ptn_block *block, const void *counter, uint32_t version, int32_t number,
                         ptn_record **out, bool *fresh);

/* The record's memory with its bytes in it and one hold for the caller, who ends it with ptn_arena_free. May wait. first: this use
 * was not asked for before. A record may be asked for again as long as one of its uses lives. */
ptn_status ptn_stash_get(ptn_record *record, bool first, void **memory);

/* The same where there is nothing to wait for, to compare, to read, also ahead, or to tell; else false, and ptn_stash_get is to
 * be asked. */
bool ptn_stash_get_at_once(ptn_record *record, bool first, void **memory);

/* A use is over; asked: it was asked for at least once. With its last use a record gives up memory and disk space, at once or when
 * what is in flight has ended, and what was set by ptn_record_set_owner is returned, else NULL. */
void *ptn_record_drop(ptn_record *record, bool asked);
void ptn_record_set_owner(ptn_record *record, void *owner); /* the caller's; right after a fresh put */
void *ptn_record_owner(const ptn_record *record);
uint64_t ptn_record_bytes(const ptn_record *record);

/* ---- memory and time ---- */

/* For the account's pressure: makes some memory free, true when it may have; waits. must: also what was read ahead gives way, and is
 * read again later. On a thread of the store, and of one that is about to submit reads, it does nothing. */
bool ptn_stash_relieve(ptn_stash *stash, bool must);
/* Waits until all that is to be written is; what a write fails with is told where its records are. */
void ptn_stash_flush(ptn_stash *stash);
/* For the account's pressure, where nothing gave way: what a write of this pass failed with and nobody was told of yet, once, where the
 * stash has something in memory. */
ptn_status ptn_stash_tell_failure(ptn_stash *stash);
/* What operations take while backward runs, in bytes; what is kept and what is read ahead leave so much room. recompute_bytes: what
 * the recomputation of a block takes; only what is near is read ahead into that. */
void ptn_stash_set_headroom(ptn_stash *stash, uint64_t headroom_bytes, uint64_t recompute_bytes);
void ptn_stash_get_stats(ptn_stash *stash, ptn_stash_stats *out);
uint64_t ptn_stash_mark(ptn_stash *stash); /* returns most_disk_bytes and starts it anew */

/* ---- the rule (runtime/stash_rule.c): which records of a pass are not worth writing ---- */

typedef struct ptn_stash_moment {
  uint64_t bytes;
  int64_t put_ns, get_ns; /* when it was put, when it was first asked for */
} ptn_stash_moment;
/* moments: of a pass that is over, in the order they were put. keep[i]: record i could not have been on disk and back by get_ns,
 * with writes in order at write_bytes_per_s and a read at read_bytes_per_s. */
void ptn_stash_too_late(const ptn_stash_moment *moments, size_t count, double write_bytes_per_s, double read_bytes_per_s,
                        bool *keep);
/* keep[i]: too late, or among the last, which are a quarter of all bytes at most; and it fits spare_bytes together with those behind
 * it that are kept. */
void ptn_stash_rule(const ptn_stash_moment *moments, size_t count, double write_bytes_per_s, double read_bytes_per_s,
                    uint64_t spare_bytes, bool *keep);

#endif
