/* The stash as the simulation sees it: bytes in the order they were put, a part of them written, a part of those read again.
 *
 * Problem: hundreds of tensors are written and read; what matters is how many bytes wait, and when those of a block are there.
 * Design: two counters of a pass, put and written; what lies between them is queued, and how far each block's bytes are follows
 * from where they start. What stays in memory by the rule is in neither. Backward that consumes bytes at the end of the queue
 * takes them out of it.
 *
 * Reads leave room to gradients: what is read of the next block goes into memory that the block under way has freed, though here it is
 * counted as read in any case; and where memory is short that block's own records come as its operations ask for them, but for what
 * keeps the disk busy. So gradients wait for neither.
 *
 * Invariants: written_bytes <= put_bytes; ahead_bytes is what was read of blocks that are not consumed; a write goes on after the
 * turn only while compute waits for memory.
 */
#include <stdlib.h>

#include "base/bytes.h"
#include "plan/simulate_internal.h"

#define AHEAD_SECONDS (1.0 / 16) /* of the stash's reads (runtime/stash_io.c) */
#define LEAST_AHEAD_BYTES ((double)(32 * PTN_MIB)) /* the same */
#define SOME_BYTES 0.5 /* less is nothing: sums of fractions */

static double queued_bytes(const ptn_simulation *run) { return run->put_bytes - run->written_bytes; }

static double unread_bytes(const ptn_simulation *run, const ptn_saved *saved) {
  double written_bytes = ptn_min_f64(ptn_max_f64(run->written_bytes - saved->start_bytes, 0), saved->away_bytes);
  return saved->put && !saved->consumed ? written_bytes - saved->read_bytes : 0;
}

static double room_bytes(const ptn_simulation *run) {
  const ptn_course *course = &run->course;
  return run->at < course->n_stretches ? course->stretches[run->at].room_bytes : 0;
}

/* Of the room in the whole phase under way, what records of its own block have that need not be there at once. */
static double streamed_bytes(const ptn_simulation *run, uint32_t phase) {
  const ptn_course *course = &run->course;
  int32_t own = course->saved_for_phase[phase];
  if (own < 0 || course->candidate->least) return 0; /* with the least they are not counted as there */
  bool asked_for =
      course->candidate->modes[course->request->phases[phase].block] == PTN_SWAP; /* by one operation after another */
  return asked_for ? course->saved[own].read_bytes * (1 - 1.0 / PTN_STREAM_PART) : 0;
}

double ptn_saved_free_bytes(const ptn_simulation *run) {
  const ptn_course *course = &run->course;
  if (run->at == course->n_stretches) return 0;
  const ptn_stretch *stretch = &course->stretches[run->at];
  double held_bytes = queued_bytes(run) + run->kept_bytes + run->ahead_bytes;
  if (run->consumer < course->n_saved) held_bytes -= course->saved[course->readers[run->consumer]].read_bytes;
  double room = ptn_max_f64(course->room_bytes[stretch->phase] + streamed_bytes(run, stretch->phase), stretch->room_bytes);
  return ptn_max_f64(room - held_bytes, 0);
}

static void start_moving(ptn_simulation *run, bool read, double bytes) {
  ptn_flow *flow = &run->flows[read ? PTN_FLOW_STASH_READ : PTN_FLOW_STASH_WRITE];
  double unit_bytes[PTN_N_LANES] = {0};
  flow->active = bytes > SOME_BYTES;
  if (!flow->active) return;
  if (run->has_link) unit_bytes[read ? PTN_UPLOAD : PTN_OFFLOAD] = 1;
  if (!run->course.stash_on_host) unit_bytes[read ? PTN_DISK_READ : PTN_DISK_WRITE] = 1;
  for (int i = 0; i < PTN_N_LANES; i++)
    if (unit_bytes[i] > 0 && !run->lanes.present[i]) ptn_simulation_stop(run, read ? PTN_WAIT_STASH_READ : PTN_WAIT_STASH_WRITE);
  ptn_flow_start(&run->lanes, flow, unit_bytes, run->course.request->profile->stash_drag_ns_per_byte);
  flow->left = bytes;
}

static double most_ahead_bytes(const ptn_simulation *run) {
  ptn_lane_name lane = run->course.stash_on_host ? PTN_UPLOAD : PTN_DISK_READ;
  return ptn_max_f64(run->course.request->profile->lanes[lane].bytes_per_s * AHEAD_SECONDS, LEAST_AHEAD_BYTES);
}

/* Bytes to read now of what is next; sets `reading`. */
static double next_read_bytes(ptn_simulation *run) {
  const ptn_course *course = &run->course;
  if (!run->turned || run->at == course->n_stretches) return 0;
  if (!run->runs && run->wait == PTN_WAIT_STASH_READ) {
    run->reading = (uint32_t)course->saved_for_phase[course->stretches[run->at].phase];
    return unread_bytes(run, &course->saved[run->reading]);
  }
  while (run->reader < course->n_saved && unread_bytes(run, &course->saved[course->readers[run->reader]]) <= SOME_BYTES)
    run->reader++;
  if (run->reader == course->n_saved) return 0;
  run->reading = course->readers[run->reader];
  double unread = unread_bytes(run, &course->saved[run->reading]);
  double held_bytes = queued_bytes(run) + run->kept_bytes + run->ahead_bytes;
  return run->reader == run->consumer ? unread - course->saved[run->reading].late_bytes
                                      : ptn_min_f64(unread, ptn_min_f64(room_bytes(run), most_ahead_bytes(run)) - held_bytes);
}

void ptn_saved_move(ptn_simulation *run) {
  bool pressed = !run->runs && run->wait == PTN_WAIT_STASH_WRITE;
  double write_bytes = run->turned && !pressed ? 0 : queued_bytes(run);
  if (pressed) write_bytes = ptn_min_f64(write_bytes, queued_bytes(run) + run->kept_bytes - room_bytes(run));
  start_moving(run, false, write_bytes);
  start_moving(run, true, next_read_bytes(run));
}

/* What the phase consumes is not written any more, and its memory is counted as the phase's. */
static void take_back(ptn_simulation *run, ptn_saved *saved) {
  run->kept_bytes -= saved->kept_bytes;
  bool last = saved->start_bytes + saved->away_bytes >= run->put_bytes;
  if (last && queued_bytes(run) > 0) run->put_bytes = ptn_max_f64(run->written_bytes, saved->start_bytes);
}

static void consume(ptn_simulation *run, ptn_saved *saved) {
  saved->consumed = true;
  run->ahead_bytes -= saved->read_bytes;
  while (run->consumer < run->course.n_saved && run->course.saved[run->course.readers[run->consumer]].consumed) run->consumer++;
}

void ptn_saved_put(ptn_simulation *run, ptn_saved *saved) {
  ptn_simulation_settle(run);
  saved->put = true;
  saved->start_bytes = run->put_bytes;
  run->put_bytes += saved->away_bytes;
  run->kept_bytes += saved->kept_bytes;
}

bool ptn_saved_may_begin(ptn_simulation *run, uint32_t p) {
  const ptn_phase *phase = &run->course.request->phases[p];
  int32_t number = run->course.saved_for_phase[p];
  ptn_saved *saved = number >= 0 && run->course.saved[number].put ? &run->course.saved[number] : NULL;
  ptn_simulation_settle(run);
  if (!run->begun) {
    run->begun = true;
    run->turned |= phase->backward && phase->block >= 0;
    if (saved) take_back(run, saved);
  }
  if (queued_bytes(run) > SOME_BYTES && queued_bytes(run) + run->kept_bytes > room_bytes(run) + SOME_BYTES)
    return ptn_simulation_stall(run, PTN_WAIT_STASH_WRITE);
  if (!saved) return true;
  if (unread_bytes(run, saved) > SOME_BYTES) return ptn_simulation_stall(run, PTN_WAIT_STASH_READ);
  consume(run, saved);
  return true;
}

void ptn_saved_begin_pass(ptn_simulation *run) {
  run->turned = false;
  run->put_bytes = run->written_bytes = run->kept_bytes = run->ahead_bytes = 0;
  run->reader = run->consumer = 0;
  for (uint32_t i = 0; i < run->course.n_saved; i++) {
    ptn_saved *saved = &run->course.saved[i];
    saved->put = saved->consumed = false;
    saved->read_bytes = 0;
  }
}
