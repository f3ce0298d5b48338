/* Parameters on their way to slots of a device.
 *
 * Problem: a slot's bytes change while the compute stream has work ordered that reads the old ones, and the driving thread waits for
 * none of it. Design: a load is handed to the upload lane, ordered behind the event `free`, which was recorded behind the last use of
 * what was there; its last transfer records `loaded`, and the compute stream follows that before the first use. From the host a load
 * is one transfer out of the home itself. From the disk it is cut into pieces that pass through a small pinned staging area: each is
 * read, handed over as soon as it is there, and its place is free again when it has been copied. The driving thread waits until the
 * last piece was handed over, and reading ahead does that before it asks.
 *
 * A slot is EMPTY, LOADING (being read or handed over), ORDERED (the device will bring it) or LOADED. From ORDERED on it can change
 * hands: the lane is a FIFO, so the transfers of one load never pass those of another.
 *
 * Invariants: nothing is handed over for a slot whose free mark failed; free is recorded by the driving thread while the slot is in
 * use, and read by loads while it is not; one thread at a time hands over the pieces of a load, so the first of them alone follows
 * free.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/internal.h"

/* A whole load from the host. */
typedef struct lift {
  ptn_transfer transfer; /* first member */
  slot *slot;
  uint32_t chunk;
  uint64_t load;
} lift;

/* ---- slots ---- */

ptn_status ptn_upload_make_slot(ptn_engine *engine, slot *slot, uint64_t bytes) {
  engine_device *over = &engine->over;
  ptn_status status = ptn_region_create(over->device, over->account, bytes, &slot->region);
  if (status == PTN_OK) status = over->kind->create_event(over->device, PTN_EVENT_ORDER, &slot->device.free);
  if (status == PTN_OK) status = over->kind->create_event(over->device, PTN_EVENT_ORDER, &slot->device.loaded);
  if (status != PTN_OK) ptn_upload_drop_slot(engine, slot);
  return status;
}

void ptn_upload_drop_slot(ptn_engine *engine, slot *slot) {
  engine_device *over = &engine->over;
  over->kind->destroy_event(over->device, slot->device.free);
  over->kind->destroy_event(over->device, slot->device.loaded);
  slot->device.free = slot->device.loaded = NULL;
  ptn_region_release(slot->region);
  slot->region = NULL;
}

/* ---- against the compute stream, on the driving thread ---- */

/* What other streams did with the chunk comes before what the present one does from now on; what was behind the mark before, too,
 * which this one replaces. */
static ptn_status join_streams(ptn_engine *engine, const slot *slot) {
  engine_device *over = &engine->over;
  if (slot->device.used && slot->device.marked != over->stream)
    PTN_TRY(over->kind->follow(over->device, ptn_engine_stream(engine), slot->device.free));
  for (uint32_t i = 0; i < over->n_streams; i++) {
    if (i == over->stream || !(slot->device.streams >> i & 1)) continue;
    PTN_TRY(over->kind->record(over->device, over->joined, over->streams[i]));
    PTN_TRY(over->kind->follow(over->device, ptn_engine_stream(engine), over->joined));
  }
  return PTN_OK;
}

ptn_status ptn_upload_mark(ptn_engine *engine, slot *slot) {
  engine_device *over = &engine->over;
  ptn_unlock(&engine->mutex);
  ptn_status status = join_streams(engine, slot);
  if (status == PTN_OK) status = over->kind->record(over->device, slot->device.free, ptn_engine_stream(engine));
  ptn_lock(&engine->mutex);
  slot->device.unmarked = status != PTN_OK;
  if (status == PTN_OK) {
    slot->device.used = true;
    slot->device.marked = over->stream;
    slot->device.streams = 0;
  } else {
    ptn_lane_fail(engine, status, ptn_last_error());
  }
  return status;
}

ptn_status ptn_upload_follow(ptn_engine *engine, slot *slot) {
  engine_device *over = &engine->over;
  uint64_t bit = (uint64_t)1 << over->stream;
  slot->device.streams |= bit;
  if (slot->device.followed & bit) return PTN_OK;
  ptn_unlock(&engine->mutex);
  ptn_status status = over->kind->follow(over->device, ptn_engine_stream(engine), slot->device.loaded);
  ptn_lock(&engine->mutex);
  if (status == PTN_OK) slot->device.followed |= bit;
  return status;
}

/* ---- the end of a transfer, on the upload lane's thread ---- */

static void note_upload(ptn_engine *engine, uint32_t chunk, const ptn_transfer *transfer) {
  if (transfer->status != PTN_OK) return;
  ptn_trace_add(engine->trace, (ptn_trace_event){.start_ns = transfer->start_ns,
                                                 .end_ns = transfer->end_ns,
                                                 .bytes = transfer->bytes,
                                                 .number = (int32_t)chunk,
                                                 .lane = PTN_LANE_UPLOAD,
                                                 .kind = PTN_TRACE_PARAMETERS});
}

static void fail_slot(slot *slot, ptn_status status, const ptn_error *error) {
  if (slot->status != PTN_OK) return;
  slot->status = status;
  slot->error = *error;
}

/* Locked. A transfer of this load ended; last: with it all of them did. A failure after the compute stream went on is one of the step. */
static void end_transfer(ptn_engine *engine, slot *slot, uint64_t load, const ptn_transfer *transfer, bool last) {
  if (transfer->status != PTN_OK) ptn_lane_fail(engine, transfer->status, &transfer->error);
  engine->over.uploads--;
  if (slot->device.load == load) {
    if (transfer->status != PTN_OK) fail_slot(slot, transfer->status, &transfer->error);
    if (slot->state == SLOT_LOADING) slot->device.ended |= last;
    else if (slot->state == SLOT_ORDERED && slot->status != PTN_OK) slot->state = SLOT_EMPTY;
    else if (slot->state == SLOT_ORDERED && last) slot->state = SLOT_LOADED;
  }
  ptn_broadcast(&engine->changed);
}

static void end_loading(ptn_engine *engine, slot *slot) {
  slot->state = slot->status != PTN_OK ? SLOT_EMPTY : slot->device.ended ? SLOT_LOADED : SLOT_ORDERED;
  ptn_broadcast(&engine->changed);
}

static ptn_event *free_of(const slot *slot) { return slot->device.used ? slot->device.free : NULL; }

/* ---- from the host ---- */

/* Locked. An upload from the chunk's shadow is over: the host's lane may change it. */
static void end_lift(ptn_engine *engine, uint32_t number) {
  if (--engine->chunks[number].uploads == 0) ptn_signal(&engine->over.lane_work);
}

static void on_lifted(ptn_transfer *transfer) {
  lift *lift = (struct lift *)transfer;
  ptn_engine *engine = lift->slot->engine;
  note_upload(engine, lift->chunk, transfer);
  ptn_lock(&engine->mutex);
  end_lift(engine, lift->chunk);
  end_transfer(engine, lift->slot, lift->load, transfer, true);
  ptn_unlock(&engine->mutex);
  free(lift);
}

static void start_lift(ptn_engine *engine, slot *slot) {
  const chunk *chunk = &engine->chunks[slot->chunk];
  lift *lift = calloc(1, sizeof *lift);
  if (!lift) {
    ptn_fail(PTN_MEMORY, "no memory for a load of chunk %u", slot->chunk);
    end_lift(engine, slot->chunk);
    fail_slot(slot, PTN_MEMORY, ptn_last_error());
    end_loading(engine, slot);
    return;
  }
  *lift = (struct lift){.slot = slot, .chunk = slot->chunk, .load = slot->device.load};
  lift->transfer.to = slot->region->memory;
  lift->transfer.from = slot->device.source;
  lift->transfer.bytes = chunk->param_bytes;
  lift->transfer.after = free_of(slot);
  lift->transfer.end = slot->device.loaded;
  lift->transfer.done = on_lifted;
  engine->over.uploads++;
  ptn_unlock(&engine->mutex);
  ptn_status status = ptn_transfers_submit(engine->over.upload, &lift->transfer);
  ptn_lock(&engine->mutex);
  if (status != PTN_OK) fail_slot(slot, status, ptn_last_error());
  end_loading(engine, slot);
}

/* ---- from the disk ---- */

static void read_pieces(ptn_engine *engine);
static void look_after(ptn_engine *engine, slot *slot);

static void on_staged_sent(ptn_transfer *transfer) {
  staged *piece = (staged *)transfer;
  slot *slot = piece->slot;
  ptn_engine *engine = slot->engine;
  note_upload(engine, piece->chunk, transfer);
  ptn_lock(&engine->mutex);
  end_transfer(engine, slot, piece->load, transfer, transfer->end != NULL);
  piece->next = engine->over.free_pieces;
  engine->over.free_pieces = piece;
  look_after(engine, slot);
  read_pieces(engine);
  ptn_unlock(&engine->mutex);
}

/* Locked. Hands over what was read; whoever comes meanwhile leaves that to the one who is at it. */
static void send_pieces(ptn_engine *engine, slot *slot) {
  slot_device *device = &slot->device;
  if (device->ordering) return;
  device->ordering = true;
  while (device->ready && slot->status == PTN_OK) {
    staged *piece = device->ready;
    device->ready = piece->next;
    bool first = device->ordered_bytes == 0;
    device->ordered_bytes += piece->bytes;
    bool last = device->ordered_bytes == engine->chunks[slot->chunk].param_bytes;
    piece->transfer = (ptn_transfer){.to = (char *)slot->region->memory + piece->offset_bytes,
                                     .from = piece->memory,
                                     .bytes = piece->bytes,
                                     .after = first ? free_of(slot) : NULL,
                                     .end = last ? device->loaded : NULL,
                                     .done = on_staged_sent};
    engine->over.uploads++;
    ptn_unlock(&engine->mutex);
    ptn_status status = ptn_transfers_submit(engine->over.upload, &piece->transfer);
    ptn_lock(&engine->mutex);
    if (status != PTN_OK) fail_slot(slot, status, ptn_last_error());
  }
  device->ordering = false;
}

/* Locked. A load is over when all of it was handed over, or when it failed and nothing of it is being read. */
static void look_after(ptn_engine *engine, slot *slot) {
  slot_device *device = &slot->device;
  bool from_disk = engine->chunks[slot->chunk].home == HOME_DISK;
  if (slot->state != SLOT_LOADING || !from_disk || device->ordering || device->reads > 0) return;
  bool failed = slot->status != PTN_OK;
  if (!failed && device->ordered_bytes < engine->chunks[slot->chunk].param_bytes) return;
  while (device->ready) { /* of a load that failed */
    staged *piece = device->ready;
    device->ready = piece->next;
    piece->next = engine->over.free_pieces;
    engine->over.free_pieces = piece;
  }
  for (struct slot **at = &engine->over.first_load; *at; at = &(*at)->device.next)
    if (*at == slot) {
      *at = device->next;
      break;
    }
  end_loading(engine, slot);
}

static void on_staged_read(ptn_io *io) {
  staged *piece = io->context;
  slot *slot = piece->slot;
  ptn_engine *engine = slot->engine;
  if (io->status == PTN_OK)
    ptn_trace_add(engine->trace, (ptn_trace_event){.start_ns = io->start_ns,
                                                   .end_ns = io->end_ns,
                                                   .bytes = io->bytes,
                                                   .number = (int32_t)piece->chunk,
                                                   .lane = PTN_LANE_READ,
                                                   .kind = PTN_TRACE_PARAMETERS});
  ptn_lock(&engine->mutex);
  if (io->status != PTN_OK) {
    ptn_error_of(&io->error, "parameters of chunk %u", piece->chunk);
    fail_slot(slot, io->status, &io->error);
  }
  piece->next = slot->device.ready;
  slot->device.ready = piece;
  send_pieces(engine, slot);
  slot->device.reads--;
  look_after(engine, slot);
  read_pieces(engine);
  ptn_unlock(&engine->mutex);
}

static staged *next_piece(ptn_engine *engine) {
  engine_device *over = &engine->over;
  while (over->first_load && over->first_load->status != PTN_OK) over->first_load = over->first_load->device.next;
  slot *slot = over->first_load;
  staged *piece = over->free_pieces;
  if (!slot || !piece) return NULL;
  const chunk *chunk = &engine->chunks[slot->chunk];
  over->free_pieces = piece->next;
  piece->slot = slot;
  piece->chunk = slot->chunk;
  piece->load = slot->device.load;
  piece->offset_bytes = slot->device.read_bytes;
  piece->bytes = ptn_min_u64(over->piece_bytes, chunk->param_bytes - piece->offset_bytes);
  slot->device.read_bytes += piece->bytes;
  slot->device.reads++;
  if (slot->device.read_bytes == chunk->param_bytes) over->first_load = slot->device.next;
  memset(&piece->io, 0, sizeof piece->io);
  piece->io.memory = piece->memory;
  piece->io.offset = chunk->extents[chunk->current].offset + piece->offset_bytes;
  piece->io.bytes = piece->bytes;
  piece->io.urgent = true;
  piece->io.done = on_staged_read;
  piece->io.context = piece;
  return piece;
}

/* Locked; unlocks while it submits. As many pieces as there is room for, of the oldest load first. */
static void read_pieces(ptn_engine *engine) {
  for (staged *piece = next_piece(engine); piece; piece = next_piece(engine)) {
    ptn_unlock(&engine->mutex);
    ptn_store_submit(engine->store, &piece->io);
    ptn_lock(&engine->mutex);
  }
}

/* ---- a load ---- */

void ptn_upload_prepare(ptn_engine *engine, slot *slot, uint32_t number) {
  chunk *chunk = &engine->chunks[number];
  slot_device *device = &slot->device;
  slot->chunk = number;
  slot->state = SLOT_LOADING;
  slot->shadow = slot->broken = false;
  slot->status = PTN_OK;
  device->load = ++engine->over.loads;
  device->followed = 0;
  device->ended = false;
  device->read_bytes = device->ordered_bytes = 0;
  device->reads = 0;
  engine->loads++;
  engine->loaded_bytes += chunk->param_bytes;
  if (chunk->home == HOME_HOST) {
    device->source = chunk->host[chunk->current].memory;
    device->prepared = true;
    chunk->uploads++;
    return;
  }
  device->next = NULL;
  struct slot **at = &engine->over.first_load;
  while (*at) at = &(*at)->device.next;
  *at = slot;
}

/* While other loads that were prepared with this one are handed over, it may be started, and end, and the slot get another one. */
void ptn_upload_start(ptn_engine *engine, slot *slot) {
  bool lifted = slot->device.prepared;
  slot->device.prepared = false;
  if (lifted) start_lift(engine, slot);
  else read_pieces(engine);
}
