/* The stash: records and passes. See stash.h for what it promises, stash_io.c for what moves when.
 *
 * A record in memory is held through the arena: the block stays in use, whoever else frees it, until the stash lets go. So nothing
 * is copied, nothing of torch is touched from another thread, and a block that a tensor still has can be handed back as long as
 * it lives, though the stash let go of it long ago: its serial tells whether it is still the same.
 *
 * A record in no tier but memory is held until its last use is dropped, since its bytes could not be had again: backward may ask
 * twice (retain_graph). One that is on disk is held only while uses wait that did not ask yet; the last of them takes the hold.
 *
 * Invariants: held (record_is_held) and counted in stats.memory_bytes are one; a record is in the queue exactly in state QUEUED;
 * its extent is reserved from QUEUED on until it is destroyed, or until it is known that it will not be written; a record with
 * no use is gone, or in flight and marked dropped; a pass is freed when it has no record and is neither current nor asked.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "runtime/stash_internal.h"

/* ---- the whole ---- */

ptn_status ptn_stash_create(ptn_stash **out, ptn_store *store, ptn_account *account, ptn_trace *trace) {
  ptn_stash *stash = *out = calloc(1, sizeof *stash);
  if (!stash) return ptn_fail(PTN_MEMORY, "no memory for a stash");
  ptn_mutex_create(&stash->mutex);
  ptn_condition_create(&stash->changed);
  stash->references = 1;
  stash->store = store;
  stash->account = account;
  stash->trace = trace;
  return PTN_OK;
}

static void free_pass(pass *pass) {
  free(pass->moments);
  free(pass);
}

/* Unlocks. */
static void unreference(ptn_stash *stash) {
  bool last = --stash->references == 0;
  ptn_unlock(&stash->mutex);
  if (!last) return;
  while (stash->passes) {
    pass *next = stash->passes->next;
    free_pass(stash->passes);
    stash->passes = next;
  }
  while (stash->idle_records) {
    ptn_record *next = stash->idle_records->table_next;
    free(stash->idle_records);
    stash->idle_records = next;
  }
  free(stash->last_moments);
  free(stash->keep);
  ptn_condition_destroy(&stash->changed);
  ptn_mutex_destroy(&stash->mutex);
  free(stash);
}

void ptn_stash_release(ptn_stash *stash) {
  if (!stash) return;
  ptn_lock(&stash->mutex);
  unreference(stash);
}

static ptn_record *any_with_something(const ptn_stash *stash) {
  for (const pass *pass = stash->passes; pass; pass = pass->next)
    for (ptn_record *record = pass->first; record; record = record->after)
      if (record_is_held(record) || record->extent.bytes > 0) return record;
  return NULL;
}

void ptn_stash_close(ptn_stash *stash) {
  if (!stash) return;
  ptn_lock(&stash->mutex);
  stash->closed = true;
  while (stash->queue_first) {
    ptn_record *record = stash->queue_first;
    ptn_stash_unqueue(stash, record);
    ptn_record_release_space(record);
  }
  while (stash->writes.in_flight_count + stash->reads.in_flight_count > 0 || stash->finishing_count > 0 || stash->advancing ||
         stash->starting)
    ptn_wait(&stash->changed, &stash->mutex);
  for (;;) {
    if (stash->outside_count > 0) {
      ptn_wait(&stash->changed, &stash->mutex); /* others use the store and what lies there, and may come back with more */
      continue;
    }
    ptn_record *record = any_with_something(stash);
    if (!record) break;
    if (record_is_held(record)) ptn_record_let_go(record);
    record->state = RECORD_ON_DISK;
    ptn_record_release_space(record);
  }
  ptn_broadcast(&stash->changed);
  ptn_unlock(&stash->mutex);
}

/* ---- passes ---- */

static void remove_pass(ptn_stash *stash, pass *gone) {
  pass **at = &stash->passes;
  while (*at != gone) at = &(*at)->next;
  *at = gone->next;
  if (stash->backward == gone) stash->backward = NULL;
  free_pass(gone);
}

static void apply_rule(ptn_stash *stash) {
  double write = stash->writes.bytes_per_s, read = stash->reads.bytes_per_s;
  if (write > 0 && read > 0) ptn_stash_rule(stash->last_moments, stash->n_last, write, read, stash->spare_bytes, stash->keep);
}

/* What the pass teaches about the next, when backward has asked for its first record. */
static void learn(ptn_stash *stash, const pass *pass) {
  bool *keep = calloc(pass->n_moments + 1, sizeof *keep);
  ptn_stash_moment *moments = malloc((pass->n_moments + 1) * sizeof *moments);
  if (!keep || !moments) { /* without it everything is written */
    free(keep);
    free(moments);
    return;
  }
  free(stash->keep);
  free(stash->last_moments);
  if (pass->n_moments) memcpy(moments, pass->moments, pass->n_moments * sizeof *moments);
  stash->keep = keep;
  stash->last_moments = moments;
  stash->n_last = pass->n_moments;
  stash->spare_bytes = pass->spare_bytes > pass->forced_bytes ? pass->spare_bytes - pass->forced_bytes : 0;
  apply_rule(stash);
}

static void forget_if_empty(ptn_stash *stash, pass *pass) {
  if (pass->records > 0 || pass == stash->current) return;
  bool backward_came = false;
  for (size_t i = 0; i < pass->n_moments; i++) {
    if (pass->moments[i].get_ns != 0) backward_came = true;
    else pass->moments[i].get_ns = INT64_MAX;
  }
  if (backward_came) learn(stash, pass);
  remove_pass(stash, pass);
}

static bool new_pass(ptn_stash *stash) {
  pass *made = calloc(1, sizeof *made);
  if (!made) return false;
  pass *before = stash->current;
  memset(stash->table, 0, sizeof stash->table);
  stash->current = made;
  made->next = stash->passes;
  stash->passes = made;
  if (before) forget_if_empty(stash, before);
  ptn_stash_new_window(stash);
  apply_rule(stash);
  return true;
}

static bool any_record(const ptn_stash *stash) {
  const pass *pass = stash->passes;
  while (pass && !pass->first) pass = pass->next;
  return pass != NULL;
}

void ptn_stash_begin(ptn_stash *stash) {
  ptn_lock(&stash->mutex);
  if (!stash->closed) {
    stash->backward = NULL;
    stash->turned = stash->hold_back = false;
    stash->near_number = INT32_MAX;
    stash->puts.left_bytes = stash->gets.left_bytes = 0;
    if (!any_record(stash)) stash->failure = PTN_OK; /* of a write that nobody was told of: its record is gone */
    if (!stash->current || stash->current->n_moments > 0) new_pass(stash); /* where it fails the pass before goes on */
    ptn_stash_write(stash, false);
  }
  ptn_unlock(&stash->mutex);
}

void ptn_stash_end(ptn_stash *stash) {
  ptn_lock(&stash->mutex);
  if (!stash->closed && stash->current && !stash->turned) {
    stash->turned = true;
    uint64_t room_bytes = ptn_account_room(stash->account);
    uint64_t could_bytes = room_bytes < UINT64_MAX / 2 ? room_bytes + stash->stats.memory_bytes : UINT64_MAX / 2;
    stash->current->spare_bytes = could_bytes > stash->headroom_bytes ? could_bytes - stash->headroom_bytes : 0;
    if (!stash->backward) { /* until something is asked for the last pass is the likeliest */
      stash->current->ahead = stash->current->last;
      stash->backward = stash->current;
    }
    ptn_stash_write(stash, false); /* what waited for company goes where backward lacks room */
    ptn_stash_advance(stash);
  }
  ptn_unlock(&stash->mutex);
}

static void go_on(ptn_stash *stash) {
  stash->hold_back = false;
  if (stash->turned && stash->backward && stash->backward->ahead) ptn_stash_advance(stash);
}

void ptn_stash_go_on(ptn_stash *stash) {
  ptn_lock(&stash->mutex);
  go_on(stash);
  ptn_unlock(&stash->mutex);
}

void ptn_stash_near(ptn_stash *stash, int32_t number) {
  ptn_lock(&stash->mutex);
  stash->near_number = number;
  go_on(stash);
  ptn_unlock(&stash->mutex);
}

/* ---- records: their memory and their lists ---- */

#ifdef __SANITIZE_ADDRESS__
#define USE_AGAIN false /* it is to see who touches one that is gone */
#else
#define USE_AGAIN true /* an allocator takes longer for blocks as long as these */
#endif

static ptn_record *take_record(ptn_stash *stash) {
  ptn_record *record = stash->idle_records;
  if (!record) return malloc(sizeof *record);
  stash->idle_records = record->table_next;
  ptn_record_fetch_soon(stash->idle_records);
  return record;
}

static void give_record(ptn_stash *stash, ptn_record *record) {
  if (!USE_AGAIN) {
    free(record);
    return;
  }
  record->table_next = stash->idle_records;
  stash->idle_records = record;
}

static ptn_record **bucket(ptn_stash *stash, uint64_t serial) { return &stash->table[serial * 0x9e3779b97f4a7c15u >> 54]; }

static ptn_record *look_up(ptn_stash *stash, uint64_t serial, const void *counter, uint32_t version) {
  ptn_record *record = *bucket(stash, serial);
  while (record && (record->serial != serial || record->counter != counter || record->version != version))
    record = record->table_next;
  return record;
}

static void remove_from_table(ptn_stash *stash, const ptn_record *record) {
  if (record->pass != stash->current) return; /* the table was emptied when its pass ended */
  ptn_record **at = bucket(stash, record->serial);
  while (*at && *at != record) at = &(*at)->table_next;
  if (*at) *at = record->table_next;
}

static void append(pass *pass, ptn_record *record) {
  record->before = pass->last;
  record->after = NULL;
  *(pass->last ? &pass->last->after : &pass->first) = record;
  pass->last = record;
}

static void unlink_from(pass *pass, ptn_record *record) {
  if (pass->ahead == record) pass->ahead = record->before;
  *(record->before ? &record->before->after : &pass->first) = record->after;
  *(record->after ? &record->after->before : &pass->last) = record->before;
}

void ptn_record_let_go(ptn_record *record) {
  record->stash->stats.memory_bytes -= record->block.bytes;
  ptn_arena_free(record->block.memory);
}

/* Around calls of the store, which close waits for. */
static void go_outside(ptn_stash *stash) {
  stash->outside_count++;
  ptn_unlock(&stash->mutex);
}

static void come_back(ptn_stash *stash) {
  ptn_lock(&stash->mutex);
  if (--stash->outside_count == 0 && stash->closed) ptn_broadcast(&stash->changed);
}

void ptn_record_release_space(ptn_record *record) {
  ptn_stash *stash = record->stash;
  ptn_extent extent = record->extent;
  record->extent = (ptn_extent){0};
  if (extent.bytes == 0) return;
  stash->stats.disk_bytes -= extent.bytes;
  if (ptn_store_release_at_once(stash->store, &extent)) return;
  go_outside(stash);
  ptn_store_release(stash->store, &extent);
  come_back(stash);
}

void ptn_record_destroy(ptn_record *record) {
  ptn_stash *stash = record->stash;
  pass *pass = record->pass;
  if (record->state == RECORD_QUEUED) ptn_stash_unqueue(stash, record);
  if (record_is_held(record)) ptn_record_let_go(record);
  record->state = RECORD_ON_DISK;
  remove_from_table(stash, record);
  unlink_from(pass, record);
  ptn_record_release_space(record);
  pass->records--; /* after the unlocked moment: it keeps the pass */
  forget_if_empty(stash, pass);
  give_record(stash, record);
  stash->references--; /* never the last: the caller has one, or a request in flight keeps close waiting */
}

void ptn_record_set_owner(ptn_record *record, void *owner) { atomic_store_explicit(&record->owner, owner, memory_order_release); }
void *ptn_record_owner(const ptn_record *record) { return atomic_load_explicit(&record->owner, memory_order_acquire); }
uint64_t ptn_record_bytes(const ptn_record *record) { return record->block.bytes; }

/* ---- put ---- */

ptn_status ptn_stash_report_failure(ptn_stash *stash) {
  if (stash->failure == PTN_OK) return PTN_OK;
  stash->failure = PTN_OK;
  return ptn_error_restore(&stash->failure_error);
}

static int64_t look_at(moment_clock *clock, uint64_t bytes, int32_t number) {
  if (clock->left_bytes < bytes || clock->number != number)
    *clock = (moment_clock){.now_ns = ptn_now_ns(), .left_bytes = ptn_max_u64(CLOCK_BYTES, bytes), .number = number};
  clock->left_bytes -= bytes;
  return clock->now_ns;
}

static bool note_moment(pass *pass, uint64_t bytes, int64_t now_ns) {
  if (pass->n_moments == pass->max_moments) {
    size_t more = pass->max_moments ? 2 * pass->max_moments : 64;
    ptn_stash_moment *grown = realloc(pass->moments, more * sizeof *grown);
    if (!grown) return false;
    pass->moments = grown;
    pass->max_moments = more;
  }
  pass->moments[pass->n_moments++] = (ptn_stash_moment){.bytes = bytes, .put_ns = now_ns};
  return true;
}

static bool kept_by_rule(const ptn_stash *stash, const ptn_record *record) {
  return record->place < stash->n_last && stash->keep[record->place] &&
         stash->last_moments[record->place].bytes == record->block.bytes;
}

static ptn_status make_record(ptn_stash *stash, const ptn_block *block, const void *counter, uint32_t version, int32_t number,
                              ptn_record **out) {
  ptn_record *record = take_record(stash);
  if (!record || (!stash->current && !new_pass(stash)) ||
      !note_moment(stash->current, block->bytes, look_at(&stash->puts, block->bytes, number))) {
    if (record) give_record(stash, record);
    return ptn_fail(PTN_MEMORY, "no memory to note a saved tensor");
  }
  if (!ptn_arena_hold_more(block)) {
    stash->current->n_moments--;
    give_record(stash, record);
    return ptn_fail(PTN_INVALID, "a saved tensor's memory was given back before it could be taken over");
  }
  pass *pass = stash->current;
  memset(record, 0, offsetof(ptn_record, io));
  record->stash = stash;
  record->pass = pass;
  record->state = RECORD_IN_MEMORY;
  record->block = *block;
  record->serial = block->serial;
  record->counter = counter;
  record->version = version;
  record->number = number;
  record->place = (uint32_t)pass->n_moments - 1;
  record->uses = record->waiting = 1;
  stash->references++;
  stash->stats.record_count++;
  stash->stats.put_bytes += block->bytes;
  stash->stats.memory_bytes += block->bytes;
  ptn_record **at = bucket(stash, record->serial);
  record->table_next = *at;
  *at = record;
  append(pass, record);
  pass->records++;
  *out = record;
  return PTN_OK;
}

/* Space for it on the disk, also where the rule keeps it: memory may need it to go after all. What is going to be written is summed
 * now, while those who computed it have it in their caches. Unlocks meanwhile; the caller's use keeps the record. */
static ptn_status reserve(ptn_stash *stash, ptn_record *record) {
  ptn_extent extent;
  bool sum = !kept_by_rule(stash, record);
  go_outside(stash);
  ptn_status status = ptn_store_reserve(stash->store, record->block.bytes, &extent);
  if (status == PTN_OK && sum) ptn_store_note(stash->store, true, record->block.memory, extent.offset, record->block.bytes);
  come_back(stash);
  if (status != PTN_OK) return status;
  record->summed = sum;
  record->extent = extent;
  stash->stats.disk_bytes += extent.bytes;
  stash->stats.most_disk_bytes = ptn_max_u64(stash->stats.most_disk_bytes, stash->stats.disk_bytes);
  return PTN_OK;
}

static ptn_status put_fresh(ptn_stash *stash, const ptn_block *block, const void *counter, uint32_t version, int32_t number,
                            ptn_record **out) {
  PTN_TRY(make_record(stash, block, counter, version, number, out));
  ptn_status status = reserve(stash, *out);
  ptn_record *record = *out;
  if (status != PTN_OK) {
    record->waiting--;
    if (--record->uses > 0) return status; /* another thread saved it too, and has it in memory */
    stash->stats.record_count--;
    stash->stats.put_bytes -= record->block.bytes;
    if (record->place + 1 == record->pass->n_moments) record->pass->n_moments--;
    ptn_record_destroy(record);
    return status;
  }
  if (stash->closed || record->asked || kept_by_rule(stash, record)) return PTN_OK;
  ptn_stash_enqueue(stash, record);
  ptn_stash_write(stash, false);
  return PTN_OK;
}

bool ptn_stash_gains(const ptn_stash *stash, const ptn_block *block) { return block->account == stash->account; }

ptn_status ptn_stash_put(ptn_stash *stash, const ptn_block *block, const void *counter, uint32_t version, int32_t number,
                         ptn_record **out, bool *fresh) {
  *out = NULL;
  *fresh = false;
  ptn_lock(&stash->mutex);
  ptn_status status = stash->closed ? ptn_fail(PTN_STEP, "a tensor was saved for a model that is not wrapped any more")
                                    : ptn_stash_report_failure(stash);
  ptn_record *record = status == PTN_OK ? look_up(stash, block->serial, counter, version) : NULL;
  if (record) {
    record->uses++;
    record->waiting++;
    unlink_from(record->pass, record); /* it is asked for with the last that saved it */
    append(record->pass, record);
  } else if (status == PTN_OK) {
    status = put_fresh(stash, block, counter, version, number, &record);
    *fresh = status == PTN_OK;
  }
  if (status == PTN_OK) {
    stash->stats.put_count++;
    *out = record;
  }
  ptn_unlock(&stash->mutex);
  return status;
}

/* ---- get ---- */

/* What is in memory, with a second hold for the caller, or the stash's own where it needs none any more; else NULL. */
static void *hand_over(ptn_stash *stash, ptn_record *record) {
  if (record->state == RECORD_IN_BOTH && record->waiting == 0) {
    record->state = RECORD_ON_DISK;
    stash->stats.memory_bytes -= record->block.bytes;
  } else if (record_is_held(record)) {
    if (!ptn_arena_hold_more(&record->block))
      abort(); /* the stash's hold is gone: memory would be handed out that is somebody else's */
  } else if (record->state == RECORD_ON_DISK && ptn_arena_hold(&record->block)) { /* somebody else has it still */
    stash->stats.forwarded_bytes += record->block.bytes;
  } else {
    return NULL;
  }
  return record->block.memory;
}

/* The caller has its hold on what came from the disk: it is compared now, by those who are about to use it and have it in their caches
 * then. What differs is nobody's, and may be read again. Unlocks meanwhile. */
static ptn_status check(ptn_stash *stash, ptn_record *record, void *memory) {
  if (!record->unchecked) return PTN_OK;
  uint64_t serial = record->block.serial, offset = record->extent.offset, bytes = record->block.bytes;
  go_outside(stash);
  ptn_status status = ptn_store_check(stash->store, true, memory, offset, bytes);
  come_back(stash);
  bool same = record->block.serial == serial; /* another may have found it bad, and read it again */
  if (status == PTN_OK) {
    if (same) record->unchecked = false;
    return PTN_OK;
  }
  ptn_error error;
  ptn_error_save(&error);
  size_t length = strlen(error.message);
  snprintf(error.message + length, sizeof error.message - length, ", or the tensor was changed after it was saved");
  ptn_error_of(&error, "activations of block %d", (int)record->number);
  if (same && record->state == RECORD_IN_BOTH) {
    ptn_record_let_go(record);
    record->state = RECORD_ON_DISK;
  }
  ptn_arena_free(memory);
  return ptn_error_restore(&error);
}

/* Needed before its write began: it is not made. May unlock for a moment. */
static void withdraw(ptn_stash *stash, ptn_record *record) {
  ptn_stash_unqueue(stash, record);
  ptn_record_release_space(record);
}

static ptn_status get(ptn_stash *stash, ptn_record *record, void **memory) {
  for (;;) {
    if (stash->closed) return ptn_fail(PTN_STEP, "backward needs activations of a model that is not wrapped any more");
    if (record->status != PTN_OK) {
      record->status = PTN_OK;
      return ptn_error_restore(&record->io.error);
    }
    if (record->state == RECORD_QUEUED) {
      withdraw(stash, record);
      continue;
    }
    *memory = hand_over(stash, record);
    if (*memory) return check(stash, record, *memory);
    if (record->state == RECORD_ON_DISK) PTN_TRY(ptn_stash_read(stash, record));
    else ptn_stash_wait(stash, PTN_TRACE_ACTIVATIONS, record->number);
  }
}

/* When backward came to the record, and that it stands in its pass. */
static void note_asked(ptn_stash *stash, ptn_record *record) {
  pass *pass = record->pass;
  if (!record->asked) {
    record->asked = true;
    if (!stash->closed) pass->moments[record->place].get_ns = look_at(&stash->gets, record->block.bytes, record->number);
    if (record->state == RECORD_IN_MEMORY || record->state == RECORD_QUEUED || record->state == RECORD_WRITING)
      stash->stats.forwarded_bytes += record->block.bytes;
  }
  if (stash->backward != pass) {
    stash->backward = pass;
    pass->ahead = record->before;
  }
}

/* Whether asking for the record changes what is read ahead. */
static bool moves_on(const ptn_stash *stash, const ptn_record *record) {
  if (stash->backward != record->pass) return true;
  return !record->asked && stash->turned && record->pass->ahead;
}

/* Backward asks for them next: for the one before, which the last call has fetched, all that it leads to. */
static void fetch_those_before(ptn_stash *stash, const ptn_record *record) {
  const ptn_record *next = record->before;
  if (!next) return;
  ptn_fetch_soon(bucket(stash, next->serial), 1);
  ptn_fetch_soon(atomic_load_explicit(&next->owner, memory_order_relaxed), 1);
  ptn_arena_fetch_soon(&next->block);
  ptn_record_fetch_soon(next->before);
}

bool ptn_stash_get_at_once(ptn_record *record, bool first, void **memory) {
  ptn_stash *stash = record->stash;
  *memory = NULL;
  ptn_lock(&stash->mutex);
  fetch_those_before(stash, record);
  if (record->status == PTN_OK && stash->failure == PTN_OK && !stash->closed && !moves_on(stash, record)) {
    note_asked(stash, record);
    if (record->state == RECORD_QUEUED) withdraw(stash, record);
    if (first) record->waiting--;
    if (!record->unchecked && !stash->closed) *memory = hand_over(stash, record);
    if (*memory) stash->hold_back = false;
    else if (first) record->waiting++;
  }
  ptn_unlock(&stash->mutex);
  return *memory != NULL;
}

ptn_status ptn_stash_get(ptn_record *record, bool first, void **memory) {
  ptn_stash *stash = record->stash;
  *memory = NULL;
  ptn_lock(&stash->mutex);
  ptn_status status = stash->closed ? PTN_OK : ptn_stash_report_failure(stash);
  if (status == PTN_OK) {
    note_asked(stash, record);
    if (first) record->waiting--;
    status = get(stash, record, memory);
    if (status != PTN_OK) {
      *memory = NULL;
      if (first) record->waiting++;
    }
    stash->hold_back = false;
    if (status == PTN_OK) ptn_stash_advance(stash);
  }
  ptn_unlock(&stash->mutex);
  return status;
}

void *ptn_record_drop(ptn_record *record, bool asked) {
  ptn_stash *stash = record->stash;
  void *owner = NULL;
  ptn_lock(&stash->mutex);
  if (!asked) record->waiting--;
  if (--record->uses > 0) {
    if (record->waiting == 0 && record->state == RECORD_IN_BOTH) {
      ptn_record_let_go(record);
      record->state = RECORD_ON_DISK;
    }
  } else {
    owner = ptn_record_owner(record);
    if (record->state == RECORD_WRITING || record->state == RECORD_READING) {
      record->dropped = true;
      remove_from_table(stash, record);
    } else {
      stash->references++;
      ptn_record_destroy(record);
      unreference(stash);
      return owner;
    }
  }
  ptn_unlock(&stash->mutex);
  return owner;
}

/* ---- figures ---- */

void ptn_stash_set_headroom(ptn_stash *stash, uint64_t headroom_bytes, uint64_t recompute_bytes) {
  ptn_lock(&stash->mutex);
  stash->near_headroom_bytes = headroom_bytes;
  stash->headroom_bytes = ptn_max_u64(headroom_bytes, recompute_bytes);
  ptn_unlock(&stash->mutex);
}

void ptn_stash_get_stats(ptn_stash *stash, ptn_stash_stats *out) {
  ptn_lock(&stash->mutex);
  *out = stash->stats;
  ptn_unlock(&stash->mutex);
}

uint64_t ptn_stash_mark(ptn_stash *stash) {
  ptn_lock(&stash->mutex);
  uint64_t most_bytes = stash->stats.most_disk_bytes;
  stash->stats.most_disk_bytes = stash->stats.disk_bytes;
  ptn_unlock(&stash->mutex);
  return most_bytes;
}
