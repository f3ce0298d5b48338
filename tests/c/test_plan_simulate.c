/* The simulation of a step: cases computed by hand, and what holds of every step on random ones: parts that sum, bytes that are
 * moved, lower bounds, faster lanes that are never slower. All times are the simulation's own; nothing here looks at a clock. */
/* sources: csrc/plan/fit.c csrc/plan/peak.c csrc/plan/room.c csrc/plan/simulate.c csrc/plan/simulate_*.c csrc/plan/slots.c
 * csrc/plan/swap.c csrc/plan/tiers.c */
#include <string.h>

#include "base/bytes.h"
#include "check.h"
#include "plan/parts.h"

#define MOST 64
#define US ((int64_t)1000)
#define MS ((int64_t)1000000)
#define CHUNK_BYTES ((uint64_t)4096 * 1000) /* 4.096 ms at a byte each ns */
#define CHUNK_NS ((int64_t)4096 * 1000)

/* One step: before the blocks, each block's forward, the head, each block's backward, the tail. */
static ptn_plan_chunk chunks[MOST];
static ptn_phase phases[2 * MOST];
static ptn_phase_times times[2 * MOST];
static uint32_t accesses[8 * MOST], access_phases[8 * MOST], consumers[2 * MOST];
static ptn_mode modes[MOST];
static int32_t slots[MOST];
static ptn_live live[2 * MOST];
static ptn_profile profile;
static ptn_plan_request step;
static ptn_candidate candidate;

static ptn_lane_speed speed(double bytes_per_s) { return (ptn_lane_speed){bytes_per_s, bytes_per_s, 0}; }

static uint32_t forward_of(uint32_t block) { return 1 + block; }
static uint32_t backward_of(uint32_t block) { return 2 * step.n_blocks + 1 - block; }

static void demand(uint32_t phase, uint32_t chunk) {
  accesses[step.n_accesses] = chunk;
  access_phases[step.n_accesses++] = phase;
}

/* A block for each of n chunks, all on disk, each in a slot of its own, trained with two states, kept; 1 ms in each phase; lanes
 * of a disk at a byte each ns that do not disturb each other; updates at no cost. */
static void begin(uint32_t n) {
  uint32_t n_phases = 2 * n + 3;
  memset(phases, 0, sizeof phases);
  memset(times, 0, sizeof times);
  step = (ptn_plan_request){.n_chunks = n,
                            .chunks = chunks,
                            .n_blocks = n,
                            .n_phases = n_phases,
                            .phases = phases,
                            .accesses = accesses,
                            .access_phases = access_phases,
                            .n_arrays = 3,
                            .profile = &profile};
  profile =
      (ptn_profile){.n_phases = n_phases, .phases = times, .disk_overlap = 2, .link_overlap = 2, .step_update_bytes_per_s = 1e9};
  profile.lanes[PTN_DISK_READ] = profile.lanes[PTN_DISK_WRITE] = speed(1e9);
  profile.lanes[PTN_UPDATE] = speed(1e18);
  for (uint32_t p = 0; p < n_phases; p++) {
    phases[p].block = p == 0 || p == n + 1 || p == n_phases - 1 ? -1 : (int32_t)(p <= n ? p - 1 : 2 * n + 1 - p);
    phases[p].backward = p > n + 1;
    times[p].compute_ns = MS;
    if (phases[p].block >= 0) demand(p, (uint32_t)phases[p].block);
  }
  for (uint32_t c = 0; c < n; c++) {
    chunks[c] = (ptn_plan_chunk){CHUNK_BYTES, CHUNK_BYTES, 2 * CHUNK_BYTES, backward_of(c), 0, 0, 0};
    modes[c] = PTN_KEEP;
    slots[c] = (int32_t)c;
  }
  memset(live, 0, sizeof live);
  candidate = (ptn_candidate){.modes = modes, .slot_of_chunk = slots, .live = live, .pending_bytes = UINT64_MAX / 2};
}

static void freeze(void) {
  for (uint32_t c = 0; c < step.n_chunks; c++) chunks[c].grad_bytes = chunks[c].state_bytes = 0;
}

static void persist(uint32_t n) {
  candidate.n_persist = n;
  for (uint32_t c = 0; c < n; c++) slots[c] = -1;
}

static int64_t sum_of(const ptn_forecast *found) {
  int64_t sum_ns = found->compute_ns + found->recompute_ns + found->fixed_ns + found->drag_ns + found->update_ns;
  for (int i = 0; i < PTN_N_WAITS; i++) sum_ns += found->wait_ns[i];
  return sum_ns;
}

static ptn_forecast simulate(void) {
  ptn_simulation *simulation;
  ptn_forecast found, again;
  memset(&found, 0xab, sizeof found);
  ptn_peak_match(&step, consumers);
  CHECK_OK(ptn_simulation_create(&simulation, &step, consumers));
  ptn_simulate(simulation, &candidate, &found);
  ptn_simulate(simulation, &candidate, &again);
  CHECK(memcmp(&found, &again, sizeof found) == 0); /* nothing of one run is left for the next */
  ptn_simulation_destroy(simulation);
  CHECK(found.step_ns == sum_of(&found));
  CHECK(found.step_ns >= 0 && found.step_ns <= PTN_NEVER_NS);
  return found;
}

static bool near(int64_t a, int64_t b) { return a - b <= 2 && b - a <= 2; } /* ns: each part is rounded */

static int64_t waits_of(const ptn_forecast *found) {
  int64_t sum_ns = 0;
  for (int i = 0; i < PTN_N_WAITS; i++) sum_ns += found->wait_ns[i];
  return sum_ns;
}

/* ---- compute ---- */

static void all_in_memory(void) {
  begin(4);
  persist(4);
  profile.step_fixed_ns = 7 * US;
  ptn_forecast found = simulate();
  CHECK(found.compute_ns == 11 * MS && found.fixed_ns == 7 * US && found.recompute_ns == 0 && found.drag_ns == 0);
  CHECK(found.update_ns == 4 * 3 * CHUNK_NS);
  CHECK(waits_of(&found) == 0 && found.moved_bytes[PTN_DISK_READ] == 0 && found.moved_bytes[PTN_DISK_WRITE] == 0);
  profile.step_update_bytes_per_s = 0;
  CHECK(simulate().step_ns == PTN_NEVER_NS);
  freeze();
  CHECK(simulate().step_ns == 11 * MS + 7 * US);
}

static void recomputation(void) {
  begin(3);
  persist(3);
  freeze();
  for (uint32_t b = 0; b < 3; b++) times[backward_of(b)].recompute_ns = 600 * US;
  profile.checkpoint_ns = 11 * US;
  CHECK(simulate().step_ns == 9 * MS);
  modes[1] = PTN_CHECKPOINT;
  ptn_forecast found = simulate();
  CHECK(found.compute_ns == 9 * MS && found.recompute_ns == 611 * US);
  modes[2] = PTN_CHECKPOINT;
  CHECK(simulate().recompute_ns == 2 * 611 * US);
}

/* A block of two chunks: recomputation visits both, its backward goes back; kept it visits each once, or as is said. */
static void visits_of_a_block(void) {
  begin(2);
  freeze();
  step.n_accesses = 0;
  step.n_blocks = 1;
  step.n_phases = profile.n_phases = 5;
  const ptn_phase given[] = {
      {.block = -1}, {.block = 0}, {.block = -1}, {.block = 0, .backward = true}, {.block = -1, .backward = true}};
  memcpy(phases, given, sizeof given);
  const uint32_t order[] = {0, 1, 0, 1, 0}, at[] = {1, 1, 3, 3, 3};
  for (int i = 0; i < 5; i++) demand(at[i], order[i]);
  slots[1] = 0; /* one slot: each visit to the other chunk is a fetch; the first is there from the step before */
  times[3].recompute_ns = MS;
  profile.access_ns = 3;
  ptn_forecast kept = simulate();
  CHECK(kept.moved_bytes[PTN_DISK_READ] == 2 * CHUNK_BYTES && kept.fixed_ns == 4 * 3 && kept.recompute_ns == 0);
  phases[3].own_accesses = 3;
  ptn_forecast to_and_fro = simulate();
  CHECK(to_and_fro.moved_bytes[PTN_DISK_READ] == 4 * CHUNK_BYTES && to_and_fro.fixed_ns == 5 * 3);
  CHECK(to_and_fro.compute_ns == kept.compute_ns && to_and_fro.recompute_ns == 0);
  phases[3].own_accesses = 1;
  CHECK(simulate().moved_bytes[PTN_DISK_READ] == 2 * CHUNK_BYTES && simulate().fixed_ns == 3 * 3);
  phases[3].own_accesses = 0;
  modes[0] = PTN_CHECKPOINT;
  ptn_forecast again = simulate();
  CHECK(again.moved_bytes[PTN_DISK_READ] == 4 * CHUNK_BYTES && again.fixed_ns == 5 * 3 && again.recompute_ns == MS);
  CHECK(near(again.wait_ns[PTN_WAIT_CHUNK], 4 * CHUNK_NS));
}

/* ---- fetches ---- */

/* Three chunks in two slots: of each pass the last is read in forward, and the first in backward; both find the slot free one phase
 * before. */
static void begin_reads(int64_t phase_ns) {
  begin(3);
  freeze();
  slots[2] = 0;
  for (uint32_t p = 0; p < step.n_phases; p++) times[p].compute_ns = phase_ns;
}

static void bound_by_reads(void) {
  begin_reads(MS);
  profile.lanes[PTN_DISK_READ].idle_bytes_per_s = 2e9;
  ptn_forecast found = simulate(); /* a millisecond of each behind compute, the rest at twice the speed */
  CHECK(near(found.wait_ns[PTN_WAIT_CHUNK], 2 * (CHUNK_NS - MS) / 2));
  CHECK(near(found.step_ns, 9 * MS + 2 * (CHUNK_NS - MS) / 2));
  CHECK(found.moved_bytes[PTN_DISK_READ] == 2 * CHUNK_BYTES);
  CHECK(near(found.busy_ns[PTN_DISK_READ], 2 * MS + 2 * (CHUNK_NS - MS) / 2));
}

static void what_stays_in_its_slot(void) {
  begin(4);
  for (uint32_t p = 0; p < step.n_phases; p++) times[p].compute_ns = 20 * MS;
  ptn_forecast found = simulate(); /* each has its own: state alone is read */
  CHECK(found.moved_bytes[PTN_DISK_READ] == 4 * 2 * CHUNK_BYTES && found.wait_ns[PTN_WAIT_CHUNK] == 0);
  chunks[2].grad_bytes = 0; /* frozen */
  CHECK(simulate().moved_bytes[PTN_DISK_READ] == 3 * 2 * CHUNK_BYTES);
}

static void hidden_reads(void) {
  begin(4);
  freeze();
  for (uint32_t c = 0; c < 4; c++) slots[c] = (int32_t)(c % 2);
  for (uint32_t p = 0; p < step.n_phases; p++) times[p].compute_ns = 5 * MS;
  ptn_forecast found = simulate();
  CHECK(found.step_ns == 11 * 5 * MS && waits_of(&found) == 0);
  CHECK(found.moved_bytes[PTN_DISK_READ] ==
        4 * CHUNK_BYTES); /* the last two stay for backward, the first two for the next step */
  for (uint32_t c = 0; c < 4; c++) slots[c] = 0;
  found = simulate(); /* one slot: nothing can be read while the chunk before is needed */
  CHECK(found.moved_bytes[PTN_DISK_READ] == 6 * CHUNK_BYTES);
  CHECK(near(found.wait_ns[PTN_WAIT_CHUNK], 6 * CHUNK_NS));
}

static void ahead_as_slots_allow(void) {
  begin(6);
  freeze();
  for (uint32_t c = 0; c < 6; c++) slots[c] = c == 0 || c == 5; /* the slot of the last is free from the second on */
  ptn_forecast found = simulate();
  /* The first two are there. While the second to the fourth are used the last is not read: there are two slots, and more chunks before
   * it. It is read behind the fourth, before the fifth, which waits for both. Backward goes the same way back. */
  CHECK(near(found.wait_ns[PTN_WAIT_CHUNK], 2 * (2 * CHUNK_NS + 2 * CHUNK_NS - MS)));
}

static void drag_of_lanes(void) {
  begin_reads(20 * MS);
  profile.lanes[PTN_DISK_READ].drag_ns_per_byte = 0.5;
  ptn_forecast found = simulate(); /* hidden, and half of compute lost while it lasts */
  CHECK(waits_of(&found) == 0 && near(found.drag_ns, 2 * CHUNK_NS / 2));
  profile.lanes[PTN_DISK_READ].drag_ns_per_byte = 3;
  found = simulate(); /* compute keeps a fifth of its speed */
  CHECK(waits_of(&found) == 0 && near(found.drag_ns, 2 * CHUNK_NS * 4 / 5));
}

/* ---- updates ---- */

static void tail_of_updates(void) {
  begin(1);
  profile.lanes[PTN_DISK_WRITE] = speed(2e9);
  profile.lanes[PTN_UPDATE] = speed(4e9);
  times[0].compute_ns = 10 * MS;
  /* State is read (2 chunks at 1), parameters and state written (3 at 2) and updated (3 at 4), behind the tail of a millisecond.
   * */
  ptn_forecast found = simulate();
  CHECK(near(found.wait_ns[PTN_WAIT_UPDATE], 2 * CHUNK_NS - MS) && near(waits_of(&found), 2 * CHUNK_NS - MS));
  CHECK(found.moved_bytes[PTN_DISK_READ] == 2 * CHUNK_BYTES && found.moved_bytes[PTN_DISK_WRITE] == 3 * CHUNK_BYTES);
  CHECK(found.moved_bytes[PTN_UPDATE] == 3 * CHUNK_BYTES && found.update_ns == 0);
  profile.disk_overlap = 1;
  CHECK(near(simulate().wait_ns[PTN_WAIT_UPDATE], 2 * CHUNK_NS + 3 * CHUNK_NS / 2 - MS));
  profile.disk_overlap = 1.5;
  CHECK(near(simulate().wait_ns[PTN_WAIT_UPDATE], (2 * CHUNK_NS + 3 * CHUNK_NS / 2) * 2 / 3 - MS));
  profile.disk_overlap = 2;
  profile.lanes[PTN_UPDATE] = speed(1e9);
  CHECK(near(simulate().wait_ns[PTN_WAIT_UPDATE], 3 * CHUNK_NS - MS));
}

/* Two chunks in one slot: while one is updated in it the other cannot come, though compute waits. */
static void updates_hold_their_slot(void) {
  begin(2);
  slots[1] = 0;
  times[0].compute_ns = 10 * MS;
  ptn_forecast found = simulate();
  /* forward: the second chunk; backward: the update of the second (3 chunks are written), then the first */
  CHECK(near(found.wait_ns[PTN_WAIT_CHUNK], CHUNK_NS + 3 * CHUNK_NS + CHUNK_NS));
  CHECK(near(found.wait_ns[PTN_WAIT_UPDATE], 3 * CHUNK_NS - MS));
  CHECK(found.moved_bytes[PTN_DISK_READ] == (2 + 2 * 2) * CHUNK_BYTES);
}

/* A chunk that is complete after its slot went to another is read for its update. */
static void updates_that_lost_their_slot(void) {
  begin(2);
  slots[1] = 0;
  chunks[1].complete_phase = step.n_phases - 1;
  ptn_forecast found = simulate();
  CHECK(found.moved_bytes[PTN_DISK_READ] == (2 + 2 * 2 + 1) * CHUNK_BYTES);
}

static void too_many_gradients(void) {
  begin(3);
  times[0].compute_ns = 100 * MS;
  candidate.pending_bytes = CHUNK_BYTES;
  ptn_forecast found = simulate();
  /* An update takes 3 chunks' time. With two under way the third backward waits for the first, which has had one phase. */
  CHECK(near(found.wait_ns[PTN_WAIT_GRADIENTS], 3 * CHUNK_NS - MS));
  CHECK(near(found.wait_ns[PTN_WAIT_UPDATE], 6 * CHUNK_NS - 2 * MS));
  candidate.pending_bytes = 2 * CHUNK_BYTES;
  found = simulate();
  CHECK(found.wait_ns[PTN_WAIT_GRADIENTS] == 0 && near(found.wait_ns[PTN_WAIT_UPDATE], 9 * CHUNK_NS - 3 * MS));
  candidate.pending_bytes = 0;
  found = simulate();
  CHECK(near(found.wait_ns[PTN_WAIT_GRADIENTS], 2 * 3 * CHUNK_NS));
  /* Where it recomputes, gradients come after that. */
  modes[0] = PTN_CHECKPOINT;
  times[backward_of(0)].recompute_ns = 2 * MS;
  CHECK(near(simulate().wait_ns[PTN_WAIT_GRADIENTS], 3 * CHUNK_NS + (3 * CHUNK_NS - 2 * MS)));
}

/* All chunks are complete in the backward of the last block, one after another. */
static void gradients_behind_completions(void) {
  begin(3);
  step.n_accesses = 0;
  for (uint32_t c = 0; c < 3; c++) demand(forward_of(2), c);
  for (uint32_t c = 3; c-- > 0;) demand(backward_of(2), c);
  for (uint32_t c = 0; c < 3; c++) chunks[c].complete_phase = backward_of(2);
  times[0].compute_ns = 100 * MS;
  candidate.pending_bytes = 0;
  candidate.above_static_bytes = 11 * CHUNK_BYTES; /* the one that may wait is counted */
  live[backward_of(2)] = (ptn_live){10 * (int64_t)CHUNK_BYTES, 10 * (int64_t)CHUNK_BYTES};
  CHECK(near(simulate().wait_ns[PTN_WAIT_GRADIENTS], 2 * 3 * CHUNK_NS)); /* no room at all: one update after the other */
  chunks[0].less_bytes = chunks[1].less_bytes = CHUNK_BYTES;
  CHECK(near(simulate().wait_ns[PTN_WAIT_GRADIENTS], 3 * CHUNK_NS)); /* behind the second there is room for one chunk */
  chunks[2].less_bytes = CHUNK_BYTES;
  CHECK(near(simulate().wait_ns[PTN_WAIT_GRADIENTS],
             3 * CHUNK_NS - MS / 3)); /* behind the first, too: the third waits for its update */
  chunks[0].less_bytes = 0;
  CHECK(near(simulate().wait_ns[PTN_WAIT_GRADIENTS], 2 * 3 * CHUNK_NS)); /* what comes later in the phase counts */
}

/* ---- passes ---- */

static void passes_with_gradients_on_disk(void) {
  begin(1);
  times[0].compute_ns = 10 * MS;
  step.grads_outlive_backward = true;
  ptn_forecast found = simulate(); /* clipping: gradients are written behind the tail, all updates are in the open */
  CHECK(near(found.wait_ns[PTN_WAIT_UPDATE], CHUNK_NS - MS) && near(found.update_ns, 3 * CHUNK_NS));
  CHECK(found.moved_bytes[PTN_DISK_READ] == 3 * CHUNK_BYTES && found.moved_bytes[PTN_DISK_WRITE] == (1 + 3) * CHUNK_BYTES);
  step.n_passes = 2;
  found = simulate(); /* the second reads and adds them; its parameters are still there */
  CHECK(found.compute_ns == 2 * 14 * MS && near(found.wait_ns[PTN_WAIT_UPDATE], CHUNK_NS - MS));
  CHECK(found.moved_bytes[PTN_DISK_READ] == (1 + 3) * CHUNK_BYTES);
  CHECK(found.moved_bytes[PTN_DISK_WRITE] == (1 + 1 + 3) * CHUNK_BYTES);
  CHECK(near(found.step_ns, 2 * 14 * MS + (CHUNK_NS - MS) + 3 * CHUNK_NS));
  step.grads_outlive_backward = false;
  found = simulate(); /* the last pass updates behind backward, with what is on disk */
  CHECK(found.update_ns == 0 && near(found.wait_ns[PTN_WAIT_UPDATE], 3 * CHUNK_NS - MS));
  CHECK(found.moved_bytes[PTN_DISK_READ] == 3 * CHUNK_BYTES && found.moved_bytes[PTN_DISK_WRITE] == (1 + 3) * CHUNK_BYTES);
}

/* Passes that are alike are not simulated one by one; what they move and take grows by the same each. */
static void many_passes(void) {
  ptn_forecast found[12];
  begin(5);
  for (uint32_t c = 0; c < 5; c++) slots[c] = (int32_t)(c % 2);
  for (uint32_t b = 0; b < 5; b += 2) modes[b] = PTN_SWAP;
  for (uint32_t p = 0; p < step.n_phases; p++) {
    uint64_t put = p <= 5 ? p : 11 - p;
    phases[p].keep_entry_bytes = phases[p].keep_peak_bytes = (put > 0 ? put - 1 : 0) * 8 * PTN_MIB;
  }
  step.grads_outlive_backward = true;
  candidate.pending_bytes = CHUNK_BYTES;
  candidate.above_static_bytes = 4 * PTN_MIB;
  profile.lanes[PTN_DISK_READ].drag_ns_per_byte = 0.1;
  for (uint32_t n = 1; n < 12; n++) {
    step.n_passes = n;
    found[n] = simulate();
  }
  CHECK(found[4].wait_ns[PTN_WAIT_CHUNK] > 0 && found[4].wait_ns[PTN_WAIT_STASH_READ] > 0);
  for (uint32_t n = 5; n < 11; n++) {
    CHECK(near(found[n + 1].step_ns - found[n].step_ns, found[n].step_ns - found[n - 1].step_ns));
    CHECK(near(found[n + 1].drag_ns - found[n].drag_ns, found[n].drag_ns - found[n - 1].drag_ns));
    for (int i = 0; i < PTN_N_LANES; i++)
      CHECK(found[n + 1].moved_bytes[i] - found[n].moved_bytes[i] == found[n].moved_bytes[i] - found[n - 1].moved_bytes[i]);
  }
  step.n_passes = UINT32_MAX;
  CHECK(simulate().step_ns > found[11].step_ns);
}

/* ---- the stash ---- */

#define SAVED_BYTES ((uint64_t)4 << 20)
#define SAVED_NS ((int64_t)4 << 20)

/* Blocks that swap, of which each saves 4 MiB; nothing else moves. */
static void begin_stash(uint32_t n, uint64_t room_bytes) {
  begin(n);
  persist(n);
  freeze();
  for (uint32_t b = 0; b < n; b++) {
    modes[b] = PTN_SWAP;
    phases[forward_of(b)].keep_entry_bytes = phases[forward_of(b)].keep_peak_bytes = b * SAVED_BYTES;
    phases[backward_of(b)].keep_entry_bytes = phases[backward_of(b)].keep_peak_bytes = (b + 1) * SAVED_BYTES;
  }
  phases[n + 1].keep_entry_bytes = phases[n + 1].keep_peak_bytes = n * SAVED_BYTES;
  candidate.above_static_bytes = room_bytes;
}

static void stash_without_room(void) {
  begin_stash(2, 0);
  ptn_forecast found =
      simulate(); /* each forward is written from its middle on before the next; each backward is read before it */
  CHECK(near(found.wait_ns[PTN_WAIT_STASH_WRITE], 2 * (SAVED_NS - MS / 2)));
  CHECK(near(found.wait_ns[PTN_WAIT_STASH_READ], SAVED_NS + (SAVED_NS - MS))); /* the next block is read ahead in any case */
  CHECK(found.moved_bytes[PTN_DISK_READ] == 2 * SAVED_BYTES && found.moved_bytes[PTN_DISK_WRITE] == 2 * SAVED_BYTES);
  profile.swap_ns = 8 * US;
  CHECK(simulate().fixed_ns == 2 * 8 * US);
  profile.swap_ns = 0;
  profile.stash_drag_ns_per_byte = 0.25;
  profile.lanes[PTN_DISK_WRITE].drag_ns_per_byte = 0.25;
  found = simulate();
  /* Writing is beside half of each forward, at half speed: a millisecond of it; the second read beside a backward at 3/4. */
  CHECK(near(found.drag_ns, 2 * MS / 2 + MS / 3));
  CHECK(near(found.wait_ns[PTN_WAIT_STASH_WRITE], 2 * (SAVED_NS - MS)));
}

static void stash_with_room(void) {
  begin_stash(4, 64 * PTN_MIB);
  for (uint32_t p = 0; p < step.n_phases; p++) times[p].compute_ns = 20 * MS;
  ptn_forecast found = simulate(); /* a quarter of all, which is the last block, stays; the others are hidden both ways */
  CHECK(waits_of(&found) == 0);
  CHECK(found.moved_bytes[PTN_DISK_READ] == 3 * SAVED_BYTES && found.moved_bytes[PTN_DISK_WRITE] == 3 * SAVED_BYTES);
  for (uint32_t p = 0; p < step.n_phases; p++) times[p].compute_ns = MS;
  found = simulate(); /* too slow a disk: what is not written when backward comes stays as well, and is not read */
  uint64_t written_bytes = (uint64_t)(4 * MS + MS / 2); /* from the middle of the first forward to the end of the head */
  CHECK(found.moved_bytes[PTN_DISK_WRITE] == written_bytes && found.moved_bytes[PTN_DISK_READ] == written_bytes);
  CHECK(found.wait_ns[PTN_WAIT_STASH_WRITE] == 0);
  live[5].peak_bytes = 64 * (int64_t)PTN_MIB; /* the head leaves no room: nothing stays over it */
  found = simulate();
  CHECK(found.moved_bytes[PTN_DISK_WRITE] == 4 * SAVED_BYTES && found.moved_bytes[PTN_DISK_READ] == 4 * SAVED_BYTES);
  CHECK(near(found.wait_ns[PTN_WAIT_STASH_WRITE], 4 * SAVED_NS - 3 * MS - MS / 2)); /* all before the head */
}

/* With the least, what has no room while a block's backward runs is read when it is asked for, and nothing of it before. */
static void stash_without_room_to_stream(void) {
  begin_stash(4, 64 * PTN_MIB);
  candidate.least = true;
  for (uint32_t p = 0; p < step.n_phases; p++) times[p].compute_ns = 20 * MS;
  ptn_forecast found = simulate(); /* room enough */
  CHECK(waits_of(&found) == 0 && found.moved_bytes[PTN_DISK_READ] == 3 * SAVED_BYTES);
  for (int64_t parts = 0; parts <= 2; parts++) { /* room for none, for half of what streams, for all of that */
    int64_t stream_bytes = (int64_t)(SAVED_BYTES / PTN_STREAM_PART);
    for (uint32_t b = 0; b < 4; b++) live[backward_of(b)].peak_bytes = 64 * (int64_t)PTN_MIB - parts * stream_bytes / 2;
    found = simulate();
    CHECK(near(found.wait_ns[PTN_WAIT_STASH_READ], 3 * (2 - parts) * SAVED_NS / 2));
    CHECK(found.moved_bytes[PTN_DISK_READ] == 3 * SAVED_BYTES);
    candidate.least = false;
    ptn_forecast ahead = simulate(); /* the next block is read ahead in any case */
    CHECK(ahead.wait_ns[PTN_WAIT_STASH_READ] == 0);
    candidate.least = true;
  }
}

/* Read ahead: 32 MiB at least, which is what holds back here; with it the reads of what comes after them wait. */
static void stash_ahead(void) {
  begin_stash(16, 1024 * PTN_MIB);
  for (uint32_t p = 0; p < step.n_phases; p++) times[p].compute_ns = p <= 17 ? 1000 * MS : MS;
  profile.lanes[PTN_DISK_READ].bytes_per_s = profile.lanes[PTN_DISK_READ].idle_bytes_per_s = 0.25e9;
  times[backward_of(14)].compute_ns = 1000 * MS;
  ptn_forecast found = simulate();
  CHECK(found.moved_bytes[PTN_DISK_READ] == 12 * SAVED_BYTES); /* a quarter stays: blocks 12 to 15 */
  /* Behind the long backward two blocks that stayed leave 24 MiB to read ahead. From its end on reads go on without a pause,
   * since each block that is consumed makes room for one more, and 13 phases go by until the first block needs the last of them.
   * */
  int64_t read_ns = 4 * SAVED_NS;
  int64_t after_ns = 12 * read_ns - (int64_t)(24 * PTN_MIB) * 4; /* what is not there when the long one ends */
  CHECK(near(found.wait_ns[PTN_WAIT_STASH_READ], after_ns - 13 * MS));
}

/* No memory but what blocks themselves take: gradients wait where blocks keep, and not for what is only read again. */
static void gradients_beside_reads(void) {
  begin(3);
  for (uint32_t p = 0; p <= step.n_blocks; p++) times[p].compute_ns = 100 * MS;
  for (uint32_t b = 0; b < 3; b++) {
    phases[forward_of(b)].keep_entry_bytes = phases[forward_of(b)].keep_peak_bytes = b * 2 * SAVED_BYTES;
    phases[backward_of(b)].keep_entry_bytes = phases[backward_of(b)].keep_peak_bytes = (b + 1) * 2 * SAVED_BYTES;
  }
  phases[4].keep_entry_bytes = phases[4].keep_peak_bytes = 6 * SAVED_BYTES;
  candidate.pending_bytes = CHUNK_BYTES;
  CHECK(near(simulate().wait_ns[PTN_WAIT_GRADIENTS], 3 * CHUNK_NS - MS));
  for (uint32_t b = 0; b < 3; b++) modes[b] = PTN_SWAP;
  ptn_forecast found = simulate();
  CHECK(found.wait_ns[PTN_WAIT_GRADIENTS] == 0 && found.moved_bytes[PTN_DISK_READ] > 3 * 2 * SAVED_BYTES);
  CHECK(found.wait_ns[PTN_WAIT_STASH_READ] > 0); /* the first of all */
  candidate.least = true; /* blocks are counted without their records: that memory is not theirs to give */
  CHECK(simulate().wait_ns[PTN_WAIT_GRADIENTS] > 0);
}

/* ---- three tiers, several ranks ---- */

static void begin_link(uint32_t n) {
  begin(n);
  times[0].compute_ns = 20 * MS;
  profile.lanes[PTN_UPLOAD] = profile.lanes[PTN_OFFLOAD] = speed(2e9);
  step.host_budget_bytes = (uint64_t)1 << 40;
}

static void homes_on_the_host(void) {
  begin_link(1);
  candidate.n_host = 1;
  profile.lanes[PTN_UPDATE] = speed(1e9);
  ptn_forecast found = simulate();
  CHECK(found.moved_bytes[PTN_UPLOAD] == CHUNK_BYTES && found.moved_bytes[PTN_OFFLOAD] == CHUNK_BYTES);
  CHECK(found.moved_bytes[PTN_DISK_READ] == 0 && found.moved_bytes[PTN_DISK_WRITE] == 0);
  CHECK(found.moved_bytes[PTN_UPDATE] == 3 * CHUNK_BYTES && near(found.wait_ns[PTN_WAIT_UPDATE], 3 * CHUNK_NS - MS));
  candidate.n_host = 0; /* from the disk through the host; the update reads parameters as well */
  profile.lanes[PTN_UPLOAD] = speed(0.5e9);
  times[0].compute_ns = MS;
  found = simulate();
  CHECK(near(found.wait_ns[PTN_WAIT_CHUNK], 2 * CHUNK_NS - MS));
  CHECK(found.moved_bytes[PTN_DISK_READ] == 4 * CHUNK_BYTES && found.moved_bytes[PTN_DISK_WRITE] == 3 * CHUNK_BYTES);
  CHECK(found.moved_bytes[PTN_UPLOAD] == CHUNK_BYTES && found.moved_bytes[PTN_OFFLOAD] == CHUNK_BYTES);
  profile.lanes[PTN_UPLOAD] = speed(0);
  candidate.n_host = 1;
  CHECK(simulate().step_ns == PTN_NEVER_NS); /* nothing leads from the host to the device */
}

/* On the host no slot is held by an update; gradients that stay are added up there. */
static void host_with_passes(void) {
  begin_link(2);
  candidate.n_host = 2;
  slots[1] = 0;
  profile.lanes[PTN_UPDATE] = speed(1e9);
  ptn_forecast found = simulate();
  CHECK(near(found.wait_ns[PTN_WAIT_CHUNK], CHUNK_NS / 2 + CHUNK_NS / 2));
  step.n_passes = 3;
  step.grads_outlive_backward = true;
  found = simulate();
  CHECK(found.moved_bytes[PTN_OFFLOAD] == 3 * 2 * CHUNK_BYTES && found.moved_bytes[PTN_DISK_WRITE] == 0);
  CHECK(found.moved_bytes[PTN_UPDATE] == 6 * CHUNK_BYTES && near(found.update_ns, 6 * CHUNK_NS));
}

static void several_ranks(void) {
  begin_link(2);
  persist(1);
  candidate.n_host = 1;
  step.n_ranks = 4;
  profile.lanes[PTN_GATHER] = speed(1e9);
  profile.lanes[PTN_UPDATE] = speed(1e9);
  ptn_forecast found = simulate();
  CHECK(found.moved_bytes[PTN_UPLOAD] == CHUNK_BYTES / 4 && found.moved_bytes[PTN_OFFLOAD] == CHUNK_BYTES / 4);
  CHECK(found.moved_bytes[PTN_UPDATE] == 3 * CHUNK_BYTES / 4);
  CHECK(found.moved_bytes[PTN_GATHER] == 3 * CHUNK_BYTES / 4 * (1 + 1 + 2)); /* parameters; gradients; those of all, both ways */
  CHECK(near(found.update_ns, 3 * CHUNK_NS)); /* each rank updates what is persistent */
  profile.lanes[PTN_GATHER] = speed(0);
  CHECK(simulate().step_ns == PTN_NEVER_NS);
}

static void stash_on_the_host(void) {
  begin_stash(1, 0);
  profile.lanes[PTN_UPLOAD] = profile.lanes[PTN_OFFLOAD] = speed(2e9);
  ptn_forecast found = simulate(); /* no host memory: through the link to the disk */
  for (int i = 0; i <= PTN_DISK_WRITE; i++) CHECK(found.moved_bytes[i] == (i == PTN_GATHER ? 0 : SAVED_BYTES));
  step.host_budget_bytes = SAVED_BYTES - 1;
  CHECK(simulate().moved_bytes[PTN_DISK_WRITE] == SAVED_BYTES); /* too little of it */
  step.host_budget_bytes = SAVED_BYTES;
  found = simulate();
  CHECK(found.moved_bytes[PTN_OFFLOAD] == SAVED_BYTES && found.moved_bytes[PTN_DISK_WRITE] == 0);
  CHECK(near(found.wait_ns[PTN_WAIT_STASH_WRITE], SAVED_NS / 2 - MS / 2));
  CHECK(near(found.wait_ns[PTN_WAIT_STASH_READ], SAVED_NS / 2));
}

/* ---- extremes ---- */

static void extremes(void) {
  begin(0); /* nothing but what is outside of blocks */
  CHECK(simulate().step_ns == 3 * MS);
  step.n_phases = profile.n_phases = 0;
  CHECK(simulate().step_ns == 0);
  step.n_passes = UINT32_MAX;
  CHECK(simulate().step_ns == 0);
  begin(2);
  profile.lanes[PTN_DISK_READ].idle_bytes_per_s = profile.lanes[PTN_DISK_READ].bytes_per_s;
  int64_t same_ns = simulate().step_ns;
  profile.lanes[PTN_DISK_READ].idle_bytes_per_s = 0; /* the same */
  CHECK(simulate().step_ns == same_ns && same_ns < PTN_NEVER_NS);
  profile.lanes[PTN_DISK_READ] = speed(0);
  slots[1] = 0;
  ptn_forecast found = simulate();
  CHECK(found.step_ns == PTN_NEVER_NS && found.wait_ns[PTN_WAIT_CHUNK] > PTN_NEVER_NS / 2 && found.compute_ns == 7 * MS);
  begin(2);
  profile.lanes[PTN_DISK_WRITE] = speed(0);
  CHECK(simulate().step_ns == PTN_NEVER_NS);
  freeze();
  CHECK(simulate().step_ns < PTN_NEVER_NS); /* nothing is written */
  slots[1] = 0;
  profile.lanes[PTN_DISK_READ] = speed(1e-300);
  CHECK(simulate().step_ns == PTN_NEVER_NS);
  begin(2);
  for (uint32_t c = 0; c < 2; c++)
    chunks[c] = (ptn_plan_chunk){(uint64_t)1 << 40, (uint64_t)1 << 40, (uint64_t)1 << 41, backward_of(c), 0, 0, 0};
  found = simulate();
  CHECK(found.step_ns > ((int64_t)1 << 40) && found.step_ns < ((int64_t)1 << 44));
  CHECK(found.moved_bytes[PTN_DISK_WRITE] == (uint64_t)6 << 40);
  profile.lanes[PTN_DISK_READ] = profile.lanes[PTN_DISK_WRITE] = speed(1e300);
  CHECK(simulate().step_ns == 7 * MS); /* all hidden */
  for (uint32_t p = 0; p < step.n_phases; p++) times[p].compute_ns = INT64_MAX / 2;
  CHECK(simulate().step_ns == PTN_NEVER_NS);
  begin_stash(2, 0); /* years of compute, beside which what the stash moves takes less than the clock's last digit */
  for (uint32_t p = 0; p < step.n_phases; p++) times[p].compute_ns = (int64_t)1 << 57;
  profile.lanes[PTN_DISK_READ] = profile.lanes[PTN_DISK_WRITE] = speed(1e15);
  found = simulate();
  CHECK(found.step_ns == (int64_t)7 << 57 && waits_of(&found) == 0);
  CHECK(found.moved_bytes[PTN_DISK_READ] == 2 * SAVED_BYTES && found.moved_bytes[PTN_DISK_WRITE] == 2 * SAVED_BYTES);
}

static void refused(void) {
  ptn_simulation *simulation;
  begin(2);
  step.profile = NULL;
  CHECK(ptn_simulation_create(&simulation, &step, consumers) == PTN_INVALID && !simulation);
  begin(2);
  step.access_phases = NULL;
  CHECK(ptn_simulation_create(&simulation, &step, consumers) == PTN_INVALID && !simulation);
  begin(2);
  profile.n_phases--;
  CHECK(ptn_simulation_create(&simulation, &step, consumers) == PTN_INVALID && !simulation);
  begin(2);
  access_phases[1] = 0;
  CHECK(ptn_simulation_create(&simulation, &step, consumers) == PTN_INVALID && !simulation);
  begin(2);
  chunks[0].complete_phase = step.n_phases;
  CHECK(ptn_simulation_create(&simulation, &step, consumers) == PTN_INVALID && !simulation);
  begin(2);
  access_phases[step.n_accesses - 1] = step.n_phases;
  CHECK(ptn_simulation_create(&simulation, &step, consumers) == PTN_INVALID && !simulation);
  ptn_simulation_destroy(NULL);
}

/* ---- random steps ---- */

static uint64_t seed = 5, after_seed = 11; /* of its own: the steps are those that were drawn without */
static uint64_t below(uint64_t limit) { return check_random(&seed) % limit; }
static double between(double low, double high) { return low + (high - low) * (double)below(1 << 20) / (double)(1 << 20); }

static void random_phases(uint32_t n) {
  uint64_t keep = 0, checkpoint = 0;
  for (uint32_t p = 0; p < step.n_phases; p++) {
    ptn_phase *phase = &phases[p];
    phase->keep_entry_bytes = keep;
    phase->checkpoint_entry_bytes = checkpoint;
    phase->keep_peak_bytes = keep + below(8 * PTN_MIB);
    phase->checkpoint_peak_bytes = checkpoint + below(8 * PTN_MIB);
    phase->keep_after_bytes = check_random(&after_seed) % (phase->keep_peak_bytes + 1);
    phase->checkpoint_after_bytes = check_random(&after_seed) % (phase->checkpoint_peak_bytes + 1);
    if (p >= 1 && p <= n) keep += below(30 * PTN_MIB), checkpoint += below(3 * PTN_MIB);
    else if (p > n) keep = keep / 2, checkpoint = checkpoint / 2;
    times[p] = (ptn_phase_times){(int64_t)below(20) * MS, phase->block >= 0 && phase->backward ? (int64_t)below(9) * MS : 0};
  }
  for (uint32_t b = 0; b < step.n_blocks; b++) modes[b] = (ptn_mode)below(4);
}

static void random_chunks(uint32_t n_chunks) {
  uint32_t n_slots = n_chunks > 0 ? 1 + (uint32_t)below(n_chunks) : 1, n_persist = (uint32_t)below(n_chunks + 1);
  step.n_chunks = n_chunks;
  for (uint32_t c = 0; c < n_chunks; c++) {
    bool trained = below(4) > 0;
    uint64_t bytes = PTN_PAGE_BYTES * (1 + below(5000));
    chunks[c] = (ptn_plan_chunk){bytes,
                                 trained ? bytes : 0,
                                 trained ? below(3) * bytes : 0,
                                 step.n_blocks + 1 + (uint32_t)below(step.n_phases - step.n_blocks - 1),
                                 0,
                                 0,
                                 0};
    slots[c] = c < n_persist ? -1 : (int32_t)below(n_slots);
  }
  candidate.n_persist = n_persist;
  step.n_accesses = 0;
  for (uint32_t p = 0; n_chunks > 0 && p < step.n_phases; p++)
    for (uint64_t i = below(4); i > 0 && step.n_accesses < 8 * MOST; i--) {
      demand(p, (uint32_t)below(n_chunks));
      phases[p].own_accesses += (uint32_t)below(2);
    }
}

static void random_step(void) {
  uint32_t n = (uint32_t)below(7);
  begin(n);
  bool disordered = below(5) == 0; /* phases in an order that no model has */
  for (uint32_t p = 0; disordered && p < step.n_phases; p++) {
    phases[p].block = (int32_t)below(n + 1) - 1;
    phases[p].backward = below(2);
  }
  random_chunks((uint32_t)below(9));
  random_phases(n);
  bool link = below(3) == 0;
  for (int i = 0; i < PTN_N_LANES; i++) {
    double busy = between(0.2e9, 4e9);
    profile.lanes[i] = (ptn_lane_speed){busy, busy * between(1, 1.5), below(2) ? between(0, 0.1) : 0};
  }
  if (!link) profile.lanes[PTN_UPLOAD] = profile.lanes[PTN_OFFLOAD] = speed(0);
  profile.disk_overlap = between(1, 2);
  profile.link_overlap = between(1, 2);
  double least_ns = 1;
  for (int i = 0; i < PTN_N_LANES; i++)
    if (profile.lanes[i].bytes_per_s > 0 && profile.lanes[i].drag_ns_per_byte < least_ns)
      least_ns = profile.lanes[i].drag_ns_per_byte;
  profile.stash_drag_ns_per_byte = below(2) ? 0.05 : -(double)below(3) / 2 * least_ns;
  profile.access_ns = (int64_t)below(2000);
  profile.checkpoint_ns = profile.swap_ns = (int64_t)below(100000);
  profile.step_fixed_ns = (int64_t)below(1000000);
  step.n_ranks = 1 + (uint32_t)below(3);
  step.n_passes = 1 + (uint32_t)below(6);
  step.grads_outlive_backward = below(3) == 0;
  step.host_budget_bytes = link ? below(400 * PTN_MIB) : 0;
  candidate.n_host = link ? (uint32_t)below(step.n_chunks - candidate.n_persist + 1) : 0;
  candidate.pending_bytes = below(4) * 10 * PTN_MIB;
  ptn_peak *peak;
  ptn_peak_match(&step, consumers);
  CHECK_OK(ptn_peak_create(&peak, &step, consumers));
  ptn_peak_compose(peak, modes, false, live);
  ptn_peak_destroy(peak);
  for (uint32_t p = 0; p < step.n_phases; p++)
    if (candidate.above_static_bytes < (uint64_t)live[p].peak_bytes) candidate.above_static_bytes = (uint64_t)live[p].peak_bytes;
  candidate.above_static_bytes += below(3) * 20 * PTN_MIB;
}

static uint64_t part_of(uint64_t bytes) { return (bytes + step.n_ranks - 1) / step.n_ranks; }

/* What gradients and updates move in one step, by their description alone; what is in slots may be read or not. */
static void check_updates(const ptn_forecast *found) {
  uint64_t offload = 0, write = 0, update = 0, passes = step.n_passes;
  bool link = profile.lanes[PTN_UPLOAD].bytes_per_s > 0, outlive = step.grads_outlive_backward;
  for (uint32_t c = candidate.n_persist; c < step.n_chunks; c++) {
    uint64_t state = part_of(chunks[c].param_bytes) + part_of(chunks[c].state_bytes), grad = part_of(chunks[c].grad_bytes);
    bool host = c < candidate.n_persist + candidate.n_host;
    if (grad == 0) continue;
    update += state;
    if (link) offload += passes * grad;
    if (!host) write += state + (outlive ? passes : passes - 1) * grad;
  }
  uint64_t stash = ptn_swap_stash_bytes(&step, consumers, modes);
  CHECK(found->moved_bytes[PTN_UPDATE] == update);
  CHECK(found->moved_bytes[PTN_DISK_WRITE] >= write && found->moved_bytes[PTN_DISK_WRITE] <= write + passes * stash + 1);
  CHECK(found->moved_bytes[PTN_OFFLOAD] >= offload && found->moved_bytes[PTN_OFFLOAD] <= offload + passes * stash + 1);
}

static void check_bounds(const ptn_forecast *found) {
  CHECK(found->step_ns < PTN_NEVER_NS);
  CHECK(found->step_ns >= found->compute_ns + found->recompute_ns + found->fixed_ns);
  for (int i = 0; i < PTN_N_LANES; i++) {
    double least_ns = (double)found->moved_bytes[i] / profile.lanes[i].idle_bytes_per_s * 1e9;
    CHECK(found->moved_bytes[i] == 0 || (double)found->step_ns >= least_ns - 4);
    CHECK(found->moved_bytes[i] == 0 || (double)found->busy_ns[i] >= least_ns * (1 - 1e-6) - 4);
    CHECK((double)found->busy_ns[i] <= (double)found->step_ns + 4);
  }
  double disk_ns = (double)(found->busy_ns[PTN_DISK_READ] + found->busy_ns[PTN_DISK_WRITE]);
  CHECK(disk_ns <= (double)found->step_ns * profile.disk_overlap + 4);
}

/* How much slower the step is where lanes are faster. */
typedef struct slower {
  double worst, sum;
  int count;
} slower;

/* Faster lanes may change who comes first where a lane is shared, and cost others a little. More than a little only where the
 * stash is written faster: what is unwritten when backward comes stays in memory, what is written has to be read again. */
static void check_faster(const ptn_forecast *found, slower *any, slower *stash_written) {
  ptn_lane_speed before[PTN_N_LANES];
  memcpy(before, profile.lanes, sizeof before);
  uint64_t which = below(PTN_N_LANES + 1); /* the last: all */
  bool writes = which == PTN_OFFLOAD || which == PTN_DISK_WRITE || which == PTN_N_LANES;
  for (uint64_t i = 0; i < PTN_N_LANES; i++) {
    double times_faster = which == i || which == PTN_N_LANES ? between(1, 3) : 1;
    profile.lanes[i].bytes_per_s *= times_faster;
    profile.lanes[i].idle_bytes_per_s *= times_faster;
  }
  ptn_forecast faster = simulate();
  memcpy(profile.lanes, before, sizeof before);
  slower *of = writes && ptn_swap_stash_bytes(&step, consumers, modes) > 0 ? stash_written : any;
  double part = (double)faster.step_ns / (double)(found->step_ns + 1) - 1;
  of->count++;
  if (part > 0) of->sum += part;
  if (of->worst < part) of->worst = part;
}

static void random_steps(void) {
  slower any = {0}, stash_written = {0};
  for (int i = 0; i < 20000; i++) {
    random_step();
    ptn_forecast found = simulate();
    check_updates(&found);
    check_bounds(&found);
    check_faster(&found, &any, &stash_written);
  }
  CHECK(any.count > 10000 && any.worst < 0.03 && any.sum / any.count < 1e-5);
  CHECK(stash_written.count > 3000 && stash_written.sum / stash_written.count < 1e-3);
}

int main(void) {
  all_in_memory();
  recomputation();
  visits_of_a_block();
  bound_by_reads();
  what_stays_in_its_slot();
  hidden_reads();
  ahead_as_slots_allow();
  drag_of_lanes();
  tail_of_updates();
  updates_hold_their_slot();
  updates_that_lost_their_slot();
  too_many_gradients();
  gradients_behind_completions();
  passes_with_gradients_on_disk();
  many_passes();
  stash_without_room();
  stash_with_room();
  stash_without_room_to_stream();
  stash_ahead();
  gradients_beside_reads();
  homes_on_the_host();
  host_with_passes();
  several_ranks();
  stash_on_the_host();
  extremes();
  refused();
  random_steps();
  return 0;
}
