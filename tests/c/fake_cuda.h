/* A CUDA driver without a GPU, and what tests do to it.
 *
 * It is a shared library with the driver's own entry points, which the product opens by its path, as it opens the real one; tests
 * are linked with it too, for the functions below. It does all that CUDA allows and nothing that it promises only by habit:
 *
 *   - Streams advance in any interleaving, by a seed. A copy is made in parts, in any order; each part is read at one moment and
 *     written at a later one, with anything in between. EARLY: everything as soon as CUDA allows it. LATE: nothing before
 *     somebody waits for it, and then only what that needs.
 *   - Device memory cannot be touched by the CPU: its addresses are not mapped. Kernels (fake_launch) get at it by fake_memory.
 *     It is poisoned when it is allocated.
 *   - Host memory that is not registered is copied as CUDA documents: to the device staged in the call or after all earlier work
 *   of
 *     the stream, from the device in the call.
 *   - It complains of what CUDA would let pass or crash on: a call without the context, a destroyed handle, memory freed or
 *     unregistered under a queued copy, a wait for an event that was never recorded, a sleep that would spin.
 *   - There is no call that waits for the whole device: a product that looks one up does not open.
 */
#ifndef PTN_TESTS_FAKE_CUDA_H
#define PTN_TESTS_FAKE_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/cuda_abi.h"

#pragma GCC visibility push(default)

typedef enum fake_mode { FAKE_ANY = 0, FAKE_EARLY, FAKE_LATE } fake_mode;

const char *fake_library(void); /* its path */

/* A new machine: one GPU with much memory, a current driver, nothing made, no faults. No call is under way. */
void fake_reset(uint64_t seed, fake_mode mode);
void fake_describe(int version, int gpus_count);
void fake_limit(uint64_t device_bytes, uint64_t lockable_bytes);

/* The GPU stands still, but for what a thread that orders a copy waits for, until fake_thaw. */
void fake_freeze(void);
void fake_thaw(void);

/* ---- faults; entry is a name as "cuMemcpyAsync", NULL: any ---- */

/* The nth call from now on (from 1) returns error, once. Calls that give something back do so all the same: what they return may
 * be an error of earlier work. */
void fake_fail(const char *entry, uint64_t nth, cuda_result error);
/* The nth copy made from now on fails on the device: from then on every call returns error, and queued work is gone. */
void fake_break(uint64_t nth, cuda_result error);
/* The nth call from now on of "cuStreamWaitEvent" or "cuEventRecord" returns CUDA_OK and does nothing. Then the driver does its
 * worst: the work that was to be waited for is held back until whoever no longer waits for it has gone on. */
void fake_ignore(const char *entry, uint64_t nth);
/* Whether that made a difference: somebody would have waited for work that was not yet done. */
bool fake_ignored_counts(void);
/* The calling thread has done what it may do when the event that it waited for last has happened. True: it was too early, the
 * wait was one that did nothing. */
bool fake_went_on(void);

/* ---- looks ---- */

uint64_t fake_calls(const char *entry); /* since the reset */
uint64_t fake_alive(void);              /* contexts, streams, events, memory, registrations that were not given back */
const char *fake_complaint(void);       /* the first since the last look; "" when there was none */
bool fake_busy(const void *address, size_t bytes); /* a copy from or to these bytes is queued, or under way */

/* ---- what else is in the process: torch ---- */

ptn_stream *fake_stream(void); /* a stream that is not counted as alive */
/* A kernel of some parts, each called in its turn, with others in between. It calls nothing of the driver. */
void fake_launch(ptn_stream *stream, void (*kernel)(void *argument, int part), void *argument, int parts_count);
void *fake_memory(const void *address); /* in a kernel: where the bytes of a device address are */
cuda_context *fake_other_context(void); /* some other context, to be pushed around */
cuda_context *fake_current(void);       /* of this thread; NULL: none */
void fake_set_current(cuda_context *context);

#pragma GCC visibility pop

#endif
