/* The engine: where a model's states are at each moment of a training step.
 *
 * Words (design.md): a chunk is the unit of movement; its home is memory (persistent), the host or disk; chunks whose home is not
 * memory share slots, fixed buffers at which their parameters are permanent views; the update lane reads state, updates, writes.
 *
 * Who calls: one thread at a time drives a step (torch's thread); the store's threads and the update lane work beside it and
 * never need anything that the driving thread may hold. Python is unknown here: a gradient's owner is an opaque handle that
 * the engine hands back through `release`, on the driving thread only.
 *
 * Parameters and gradients are fp32, or bf16 with an fp32 master beside the states (optim.h says how they go together). Then a
 * byte of parameters has two bytes of each fp32 array beside it; offsets and sizes of chunks, slots, pieces and gradients are those
 * of the parameters.
 *
 * Nothing is irrevocable before ptn_engine_commit: an update writes the other extent of the chunk (its shadow), commit turns
 * shadows into homes, ptn_engine_drop forgets them. Eviction from a slot is dropping: home is always current.
 *
 * Over a device (device/device.h) memory is the device's: slots and persistent chunks lie there, and the host is a home of its own,
 * in pinned memory. Parameters come up and gradients go down in two lanes of transfers, ordered against the compute stream by events,
 * so that the driving thread waits for neither; docs/decisions/0012-engine-over-a-device.md says how. Then addresses of regions and
 * of gradients are the device's, the account counts only what the engine has in ordinary memory, and device_account is charged for
 * slots and persistent chunks.
 */
#ifndef PTN_RUNTIME_ENGINE_H
#define PTN_RUNTIME_ENGINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/threads.h"
#include "base/trace.h"
#include "device/device.h"
#include "disk/store.h"
#include "memory/arena.h"
#include "optim/optim.h"
#include "runtime/device_stash.h"
#include "runtime/stash.h"

/* Of parameters, that an update works on at a time: with gradients and state they lie in a core's cache. */
#define PTN_UPDATE_PART_BYTES ((uint64_t)64 << 10)

typedef struct ptn_engine ptn_engine;

/* ---- memory that tensors may outlive the engine with (runtime/region.c) ---- */

typedef struct ptn_region {
  void *memory; /* page-aligned; on a device as its kind aligns */
  uint64_t bytes;
  ptn_device *device;   /* NULL: ordinary memory; outlives the region */
  ptn_account *account; /* of memory of a device: charged for it */
  atomic_int references;
} ptn_region;
/* With one reference; holds anything. device: NULL for ordinary memory. account: of the device's memory it may be NULL. */
ptn_status ptn_region_create(ptn_device *device, ptn_account *account, uint64_t bytes, ptn_region **out);
ptn_region *ptn_region_acquire(ptn_region *region);
void ptn_region_release(ptn_region *region); /* NULL is allowed */

/* ---- description ---- */

typedef struct ptn_engine_chunk {
  uint64_t param_bytes; /* a multiple of PTN_PAGE_BYTES */
  bool trained;         /* false: no parameter of it is */
} ptn_engine_chunk;

typedef struct ptn_engine_param {
  uint32_t chunk;
  uint64_t offset_bytes; /* in its chunk */
  uint64_t count;        /* elements */
  uint32_t group;        /* of the optimizer; ignored where not trained */
  bool trained;
} ptn_engine_param;

typedef struct ptn_engine_config {
  const char *folder;
  ptn_disk_engine disk_engine;
  ptn_account *account; /* outlives the engine */
  uint32_t n_chunks, n_params, n_groups;
  const ptn_engine_chunk *chunks;
  const ptn_engine_param *params;
  uint32_t n_states;    /* arrays of optimizer state, 0 to PTN_STATE_MAX */
  bool bf16;            /* parameters and gradients; false: fp32 */
  void (*release)(void *owner); /* called on the driving thread for each gradient's owner */
  ptn_device *device; /* what computes; NULL: the CPU, in memory of the account. Outlives the engine and its regions */
  ptn_account *device_account; /* charged for what the engine takes of the device's memory; NULL: nobody counts it */
} ptn_engine_config;

typedef struct ptn_engine_stats {
  int64_t wait_ns; /* the driving thread waited, or computed for the lane meanwhile, since create, for both stashes too */
  int64_t update_ns; /* updates of the lanes were computed, since create, whoever did it */
  uint64_t loaded_bytes; /* parameters read into slots */
  uint64_t loads, hits; /* demands that had to load, that found the chunk there or under way */
  uint64_t torn_writes; /* to homes on disk, of single parameters, that failed under way: what lies there may be a mixture */
  uint64_t disk_bytes; /* reserved extents */
  uint64_t host_bytes; /* pinned; 0 without a device */
  uint64_t device_bytes; /* slots and persistent chunks on the device; 0 without one */
} ptn_engine_stats;

/* What the engine has of the account's live bytes, as the arena counts them. Gradients count until the driving thread has released them;
 * the stash's memory is in its own stats. */
typedef struct ptn_engine_held {
  uint64_t parameter_bytes, state_bytes; /* of chunks at home in memory; a master counts as state */
  uint64_t slot_bytes, ring_bytes;
  uint64_t gradient_bytes; /* given by ptn_engine_gradient */
  uint64_t yielded_bytes; /* not among them: of state of chunks in memory, which gave way */
} ptn_engine_held;

ptn_status ptn_engine_create(ptn_engine **out, const ptn_engine_config *config);
void ptn_engine_destroy(ptn_engine *engine); /* waits for what is under way; nothing is committed */
uint32_t ptn_engine_chunks_count(const ptn_engine *engine);
uint32_t ptn_engine_params_count(const ptn_engine *engine);
void ptn_engine_get_stats(ptn_engine *engine, ptn_engine_stats *out);
void ptn_engine_get_held(ptn_engine *engine, ptn_engine_held *out); /* runtime/homes.c */
ptn_store *ptn_engine_store(ptn_engine *engine); /* borrowed */
ptn_stash *ptn_engine_stash(ptn_engine *engine); /* borrowed */
ptn_trace *ptn_engine_trace(ptn_engine *engine); /* borrowed; what the engine did when, the last 64 Ki events at first */

/* ---- the device (runtime/device_memory.c) ---- */

/* The stream on which the caller's operations are ordered from now on: demand, unuse and gradient act on it. Before the first call it
 * is NULL. What a stream did with a chunk is waited for whichever stream gives the chunk back. At most 64 of them. */
ptn_status ptn_engine_set_stream(ptn_engine *engine, ptn_stream *stream);
/* Pinned memory in which gradients wait for their update: at least the largest of a chunk on the host or on disk. When it is full
 * the driving thread waits. Between steps; 0: none. */
ptn_status ptn_engine_set_gradient_memory(ptn_engine *engine, uint64_t bytes);
/* Pinned memory through which parameters on disk go to the device, in n_pieces of piece_bytes, a multiple of PTN_PAGE_BYTES. Between
 * steps; 0: none. */
ptn_status ptn_engine_set_staging(ptn_engine *engine, uint64_t piece_bytes, uint32_t n_pieces);
/* One line that says why some of the engine's host memory is not locked, so that copies are slower; "": all is. */
const char *ptn_engine_unlocked_reason(const ptn_engine *engine);
bool ptn_engine_over_device(const ptn_engine *engine);
/* Whether this address of the device lies in a slot; on the driving thread. */
bool ptn_engine_in_slot(const ptn_engine *engine, const void *address);
/* Whether it lies in a persistent chunk; the same. */
bool ptn_engine_in_chunk(const ptn_engine *engine, const void *address);
/* The stream that was set last. */
ptn_stream *ptn_engine_stream(const ptn_engine *engine);
/* Activations that leave the device's memory; borrowed, NULL without a device. */
ptn_device_stash *ptn_engine_device_stash(ptn_engine *engine);
/* Pinned memory for them; between steps. Records that there are go to the disk, and the largest of them fits in any case. */
ptn_status ptn_engine_set_stash_memory(ptn_engine *engine, uint64_t bytes);
/* ptn_device_record_let_go for every compute stream. */
ptn_status ptn_engine_let_go(ptn_engine *engine, ptn_device_record *record);

/* ---- homes and slots; between steps only (runtime/homes.c) ---- */

bool ptn_engine_in_memory(const ptn_engine *engine, uint32_t chunk);
/* Moves a chunk's home, its parameters and state with it. A fresh engine has every chunk nowhere: its first home holds zeros.
 * with_state: a memory home gets its state arrays now, not at its first update. */
ptn_status ptn_engine_to_memory(ptn_engine *engine, uint32_t chunk, bool with_state);
ptn_status ptn_engine_to_disk(ptn_engine *engine, uint32_t chunk);
/* Over a device: pinned memory of the host. with_shadow: twice, and updates run behind backward; else they run after commit, behind
 * the next forward, and gradients are kept on the host until then. Again, with another answer, makes the shadow or drops it. */
ptn_status ptn_engine_to_host(ptn_engine *engine, uint32_t chunk, bool with_shadow);
/* Over a device: where fp32 array `array` of a chunk in memory lies there, as numbered in ptn_engine_transfer from 1 on; laid out as
 * the parameters. NULL: it was not made. */
void *ptn_engine_state(ptn_engine *engine, uint32_t chunk, uint32_t array);
/* slot_of_chunk: n_chunks entries, -1 where the home is memory. Slots are allocated; there must be none. */
ptn_status ptn_engine_set_slots(ptn_engine *engine, const int32_t *slot_of_chunk, const uint64_t *slot_bytes, uint32_t n_slots);
void ptn_engine_drop_slots(ptn_engine *engine);
/* One more slot, for a chunk whose own is taken by another that is needed at the same moment. */
ptn_status ptn_engine_own_slot(ptn_engine *engine, uint32_t chunk);
/* The ring of pieces through which updates stream; piece_bytes is a multiple of PTN_PAGE_BYTES. */
ptn_status ptn_engine_set_ring(ptn_engine *engine, uint64_t piece_bytes, uint32_t n_pieces);
void ptn_engine_drop_ring(ptn_engine *engine);
/* Gradients that always may wait for the update lane: bytes, beside those of the chunk being made. Those beyond wait as long as what
 * is live stays within the account's goal: who asks for memory beyond it waits for them. Without a goal the driving thread waits when
 * the next gradient comes. Over a device ptn_engine_set_gradient_memory says it. */
void ptn_engine_set_pending(ptn_engine *engine, uint64_t pending_bytes);
/* The memory at which the chunk's parameters lie when they are there; borrowed, NULL where it has neither home nor slot. */
ptn_region *ptn_engine_region(ptn_engine *engine, uint32_t chunk);

/* Who gives the memory at which a chunk lies to others: told at once, and whenever it changes, whether the chunk is in use there. What
 * is read while it is not may be another's. Who was told before is told that it is not, for the last time. tell is called under the
 * engine's lock, on any thread. */
typedef struct ptn_guard {
  void (*tell)(void *place, bool in_use); /* NULL: nobody */
  void *place;
} ptn_guard;
void ptn_engine_set_guard(ptn_engine *engine, uint32_t chunk, ptn_guard guard);

/* One parameter's values (array 0) or state array i (1 + i), to or from the caller's memory; current committed values. Where
 * parameters are bf16, array 1 + n_states is the master; zeros where nobody wrote it and no update was made, which says that it is
 * the parameter, widened. */
ptn_status ptn_engine_transfer(ptn_engine *engine, uint32_t param, uint32_t array, void *memory, bool write);
/* The same for count of its elements, from number first on. */
ptn_status ptn_engine_transfer_part(ptn_engine *engine, uint32_t param, uint32_t array, uint64_t first, uint64_t count,
                                    void *memory, bool write);
/* Makes the slot hold the chunk without reading it; the caller fills it and calls ptn_engine_end_fill. */
ptn_status ptn_engine_begin_fill(ptn_engine *engine, uint32_t chunk);
ptn_status ptn_engine_end_fill(ptn_engine *engine, uint32_t chunk);
uint64_t ptn_engine_steps(const ptn_engine *engine, uint32_t param); /* updates made of it that count */
void ptn_engine_set_steps(ptn_engine *engine, uint32_t param, uint64_t steps);

/* ---- residency (runtime/residency.c) ---- */

/* The recorded moments: chunks in the order they are accessed in one step. */
ptn_status ptn_engine_set_order(ptn_engine *engine, const uint32_t *accesses, uint32_t n_accesses);
void ptn_engine_seek(ptn_engine *engine, uint32_t moment); /* a step begins (0): reads ahead from there */

/* Returns when the chunk is in its slot, current, and in use: it stays there until as many calls of unuse as of demand;
 * orders the next chunks. *conflict: the slot holds another chunk that is in use; nothing changed. Chunks in memory are always
 * there. Over a device the chunk is there for what is ordered on the compute stream from now on. */
ptn_status ptn_engine_demand(ptn_engine *engine, uint32_t chunk, bool *conflict);
void ptn_engine_unuse(ptn_engine *engine, uint32_t chunk);
/* As often as it takes for every chunk: what used them was interrupted. Gradients stay. */
void ptn_engine_unuse_all(ptn_engine *engine);

/* ---- gradients and updates (runtime/gradients.c, runtime/lane.c) ---- */

ptn_status ptn_engine_set_hyper(ptn_engine *engine, uint32_t group, const ptn_hyper *hyper);

typedef enum ptn_gradient_use {
  PTN_GRADIENT_UPDATE, /* the last of this step: update the chunk when it is complete */
  PTN_GRADIENT_SPILL, /* add it to the chunk's gradients on disk, or on the host, when it is complete */
  PTN_GRADIENT_SPILL_TOTAL, /* replaces what they hold for this parameter */
} ptn_gradient_use;

/* Takes a gradient over: count elements at data stay valid until release(owner). For parameters of chunks on disk or the host. Waits
 * while too much is pending. A chunk's gradients of one pass have one use. Over a device the gradient is what the compute stream has
 * made of data when it has done all that is ordered on it so far; its owner is released when it has been copied. */
ptn_status ptn_engine_gradient(ptn_engine *engine, uint32_t param, const void *data, void *owner, ptn_gradient_use use);
/* The gradient that lies on disk, or on the host, for this parameter, into ordinary memory. */
ptn_status ptn_engine_spilled(ptn_engine *engine, uint32_t param, void *memory, bool *found);
/* A step begins whose gradients are all for updates: state is read while they are still being made, in the order in which the
 * chunks were complete in the step before. */
void ptn_engine_read_ahead(ptn_engine *engine, bool on);
/* Backward is over: chunks that lack a gradient go on with those they have. */
ptn_status ptn_engine_flush(ptn_engine *engine);
/* Queues the update of every chunk that has gradients on disk or on the host and no update yet; grad_scale multiplies them. */
ptn_status ptn_engine_update_spilled(ptn_engine *engine, float grad_scale);
/* Waits for every update under way; the lane's error, if any. */
ptn_status ptn_engine_wait(ptn_engine *engine);
typedef struct ptn_memory_update {
  uint32_t param;
  const void *grad; /* NULL: the caller has updated it, as always over a device, on ptn_engine_region and ptn_engine_state */
} ptn_memory_update;
/* Makes the step in one call, which nothing comes between: these parameters of chunks in memory are updated, and shadows turn into
 * homes; after a successful wait. Where it fails nothing was updated. One that the caller has updated, or of no elements, wherever
 * it is, has its step counted; where all are such it does not fail. */
ptn_status ptn_engine_make_step(ptn_engine *engine, const ptn_memory_update *updates, size_t count, float grad_scale);
/* How many steps were made: who was interrupted in one learns whether it was. */
uint64_t ptn_engine_commits_count(const ptn_engine *engine);

/* ---- updates that the caller computes (runtime/staging.c); after a successful wait ---- */

/* The new values of one trained parameter of a chunk on disk, or on the host with a shadow, in ordinary memory: written to the
 * chunk's shadow, they count from commit on. */
ptn_status ptn_engine_stage(ptn_engine *engine, uint32_t param, const float *values);
/* Completes the shadows with the parameters that were not staged; commit comes next. */
ptn_status ptn_engine_stage_rest(ptn_engine *engine);
/* Space in the engine's file for what is the caller's own; as ptn_store_reserve and ptn_store_release. */
ptn_status ptn_engine_reserve(ptn_engine *engine, uint64_t bytes, ptn_extent *out);
void ptn_engine_release(ptn_engine *engine, ptn_extent *extent);
/* Between memory and such an extent. offset is a multiple of PTN_PAGE_BYTES; memory that begins on a page goes without a copy. What is
 * written has its last page for itself. */
ptn_status ptn_engine_move(ptn_engine *engine, uint64_t offset, void *memory, uint64_t bytes, bool write);

/* Turns shadows into homes; call after a successful wait. */
void ptn_engine_commit(ptn_engine *engine);
/* Forgets gradients and shadows of the step under way; no chunk is in use any more. */
void ptn_engine_drop(ptn_engine *engine);
/* Gradients taken, not yet committed or dropped. */
bool ptn_engine_has_gradients(ptn_engine *engine);
/* Hands owners of gradients back that are no longer needed. */
void ptn_engine_collect(ptn_engine *engine);
/* On the driving thread, between two operations: where it takes all cores when it computes, what the update lane has read is
 * computed here, by all of them. A demand and a gradient do so by themselves. */
void ptn_engine_share(ptn_engine *engine);
/* On the driving thread, which comes by: whether ptn_engine_share may find something. */
bool ptn_engine_may_share(ptn_engine *engine);
/* For the account's pressure: waits for an update under way, if any, so that its gradients go. must: also where no more wait than
 * may, and state of chunks in memory may give way. On the driving thread. */
bool ptn_engine_relieve(ptn_engine *engine, bool must);

/* ---- state in memory that gives way (runtime/states.c) ---- */

/* A step has begun, and where it lacks memory the state of chunks in memory may go to the disk; from ptn_engine_make_step or
 * ptn_engine_drop on it may not. ptn_engine_make_step, or ptn_engine_to_memory with state, brings it back. Not over a device. */
void ptn_engine_yield(ptn_engine *engine, bool on);
/* Bytes that had given way at most since the last mark; mark: this is one. */
uint64_t ptn_engine_yielded(ptn_engine *engine, bool mark);

#endif
