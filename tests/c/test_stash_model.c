/* Thousands of random calls on a stash under a budget, on a disk that delays and reorders, held against a plain list of what was
 * put: each answer has the bytes of its record, each record ends with its last use, memory is refused only where the driver
 * itself has too much of it, and in the end nothing is left. */
/* sources: csrc/device/?*.c csrc/disk/?*.c csrc/memory/?*.c csrc/runtime/stash*.c */
/* threads */
#include "stash_fixture.h"

enum { most_tensors = 12, most_records = 160, most_uses = 240, most_memories = 6, calls = 4000 };

/* A record as the model knows it. */
typedef struct known {
  ptn_record *record; /* NULL: a free place */
  uint64_t serial, bytes, seed, pass;
  uint32_t version, uses;
  bool asked;
} known;

typedef struct use {
  known *of; /* NULL: a free place */
  bool asked;
} use;

typedef struct model {
  world world;
  uint64_t state, limit_bytes, pass, next_seed;
  tensor tensors[most_tensors]; /* held by the driver; memory NULL: a free place */
  tensor memories[most_memories]; /* handed out by get and not yet freed */
  known records[most_records];
  use uses[most_uses];
  uint64_t use_count, refused_count, get_count, forwarded_count;
} model;

static uint64_t below(model *model, uint64_t bound) { return check_random(&model->state) % bound; }

/* ---- what the driver holds ---- */

/* Bytes of distinct blocks, since a tensor and what get has handed out may be the same one. */
static uint64_t held_bytes(const model *model) {
  uint64_t bytes = 0, serials[most_tensors + most_memories];
  size_t count = 0;
  for (size_t i = 0; i < most_tensors + most_memories; i++) {
    const tensor *tensor = i < most_tensors ? &model->tensors[i] : &model->memories[i - most_tensors];
    if (!tensor->memory) continue;
    bool seen = false;
    for (size_t k = 0; k < count; k++) seen |= serials[k] == tensor->block.serial;
    if (seen) continue;
    serials[count++] = tensor->block.serial;
    bytes += tensor->block.bytes;
  }
  return bytes;
}

/* A refusal is right only where the driver has the memory: the stash gives all that it has but for records that were asked for
 * and live on (a kept graph), which need not be on disk. */
static void check_refusal(model *model, uint64_t bytes) {
  uint64_t asked_bytes = 0;
  for (size_t i = 0; i < most_records; i++)
    if (model->records[i].record && model->records[i].asked) asked_bytes += model->records[i].bytes;
  CHECK(ptn_last_error()->code == PTN_BUDGET);
  CHECK(held_bytes(model) + ptn_round_up(bytes, PAGE) + asked_bytes > model->limit_bytes);
  model->refused_count++;
}

/* ---- the calls ---- */

static void make_tensor(model *model) {
  tensor *place = &model->tensors[below(model, most_tensors)];
  if (place->memory) {
    CHECK(words_are(place->memory, place->block.bytes, place->seed));
    tensor_free(place);
    return;
  }
  uint64_t bytes = (1 + below(model, below(model, 4) ? 4 : 24)) * PAGE - below(model, 64);
  if (tensor_try(&model->world, bytes, model->next_seed++, place) != PTN_OK) {
    place->memory = NULL;
    check_refusal(model, bytes);
  }
}

static known *find_known(model *model, const ptn_record *record) {
  for (size_t i = 0; i < most_records; i++)
    if (model->records[i].record == record) return &model->records[i];
  return NULL;
}

static void note_fresh(model *model, const tensor *tensor, ptn_record *record, known *place) {
  for (size_t i = 0; i < most_records; i++) {
    const known *other = &model->records[i];
    if (!other->record) continue;
    CHECK(other->record != record);
    CHECK(other->serial != tensor->block.serial || other->version != tensor->version || other->pass != model->pass);
  }
  *place = (known){.record = record,
                   .serial = tensor->block.serial,
                   .bytes = tensor->block.bytes,
                   .seed = tensor->seed,
                   .pass = model->pass,
                   .version = tensor->version};
  CHECK(ptn_record_owner(record) == NULL && ptn_record_bytes(record) == place->bytes);
  ptn_record_set_owner(record, place);
}

/* Saves a tensor of the driver, or memory that get has handed out (double backward does that). */
static void put(model *model) {
  size_t i = (size_t)below(model, most_tensors + most_memories);
  tensor *tensor = i < most_tensors ? &model->tensors[i] : &model->memories[i - most_tensors];
  use *use = &model->uses[below(model, most_uses)];
  known *place = find_known(model, NULL);
  if (!tensor->memory || use->of || !place) return;
  if (below(model, 8) == 0) tensor->version++; /* a change that leaves the bytes as they were */
  ptn_record *record;
  bool fresh;
  CHECK_OK(ptn_stash_put(model->world.stash, &tensor->block, NULL, tensor->version, (int32_t)i, &record, &fresh));
  if (fresh) note_fresh(model, tensor, record, place);
  known *known = find_known(model, record);
  CHECK(known && known->serial == tensor->block.serial && known->version == tensor->version && known->seed == tensor->seed);
  known->uses++;
  *use = (struct use){.of = known};
  model->use_count++;
  if (i < most_tensors && below(model, 3)) tensor_free(tensor);
}

/* Backward asks for the latest first, most of the time. */
static use *choose_use(model *model) {
  use *chosen = NULL;
  for (int tries = below(model, 4) ? 24 : 3; tries > 0; tries--) {
    use *use = &model->uses[below(model, most_uses)];
    if (use->of && (!chosen || use->of->seed > chosen->of->seed)) chosen = use;
  }
  return chosen;
}

static void drop(model *model, use *use) {
  known *known = use->of;
  bool last = --known->uses == 0;
  ptn_record *record = known->record;
  if (last) known->record = NULL;
  void *owner = ptn_record_drop(record, use->asked);
  CHECK(owner == (last ? known : NULL));
  use->of = NULL;
  model->use_count--;
}

static void get(model *model) {
  use *use = choose_use(model);
  if (!use) return;
  known *known = use->of;
  void *memory;
  ptn_status status = stash_ask(known->record, !use->asked, &memory);
  if (status != PTN_OK) {
    CHECK(status == PTN_BUDGET && memory == NULL);
    check_refusal(model, known->bytes);
    return;
  }
  use->asked = known->asked = true;
  model->get_count++;
  CHECK(words_are(memory, known->bytes, known->seed));
  tensor *place = &model->memories[below(model, most_memories)];
  if (place->memory) {
    CHECK(words_are(place->memory, place->block.bytes, place->seed));
    tensor_free(place);
  }
  *place = (tensor){.memory = memory, .seed = known->seed};
  CHECK(ptn_arena_find(memory, &place->block));
  if (place->block.serial == known->serial) place->version = known->version; /* the same block is the same record */
  if (below(model, 2)) tensor_free(place);
  if (below(model, 4)) drop(model, use);
}

static void press(model *model) {
  uint64_t bytes = (1 + below(model, model->limit_bytes / PAGE)) * PAGE;
  tensor work;
  if (tensor_try(&model->world, bytes, model->next_seed++, &work) == PTN_OK) {
    CHECK(words_are(work.memory, bytes, work.seed));
    tensor_free(&work);
  } else {
    check_refusal(model, bytes);
  }
}

static void turn(model *model) {
  ptn_stash *stash = model->world.stash;
  switch (below(model, 10)) {
    case 0:
    case 1:
      ptn_stash_begin(stash);
      model->pass++;
      break;
    case 2:
    case 3:
    case 4: ptn_stash_end(stash); break;
    case 5:
      ptn_stash_set_headroom(stash, below(model, 2) ? 0 : below(model, model->limit_bytes), below(model, model->limit_bytes));
      break;
    case 6: ptn_account_set_goal(model->world.account, below(model, 2) ? 0 : below(model, model->limit_bytes + PAGE)); break;
    case 7: ptn_stash_go_on(stash); break;
    case 8: ptn_stash_near(stash, NUMBER - 1 + (int32_t)below(model, 3)); break;
    default: ptn_stash_relieve(stash, below(model, 2)); break;
  }
}

static void check_all(model *model) {
  ptn_stash_stats stats = world_stats(&model->world);
  ptn_account_stats account = world_account(&model->world);
  CHECK(account.peak_bytes <= model->limit_bytes && stats.most_disk_bytes >= stats.disk_bytes);
  CHECK(stats.record_count <= stats.put_count && stats.written_bytes <= stats.put_bytes);
  ptn_arena_check();
}

static void end_of_all(model *model) {
  for (size_t i = 0; i < most_uses; i++)
    if (model->uses[i].of) drop(model, &model->uses[i]);
  for (size_t i = 0; i < most_records; i++) CHECK(!model->records[i].record);
  for (size_t i = 0; i < most_tensors; i++)
    if (model->tensors[i].memory) tensor_free(&model->tensors[i]);
  for (size_t i = 0; i < most_memories; i++)
    if (model->memories[i].memory) tensor_free(&model->memories[i]);
}

static void run(uint64_t seed, uint64_t limit_pages, uint32_t depth, uint64_t piece_bytes, bool together, long most_pause_ns) {
  static model model;
  memset(&model, 0, sizeof model);
  model.state = seed;
  model.limit_bytes = limit_pages * PAGE;
  model.next_seed = 1;
  world_open(&model.world,
             (world_options){.limit_bytes = model.limit_bytes, .depth = depth, .piece_bytes = piece_bytes, .together = together});
  faulty_shaker shaker;
  faulty_start_shaking(&shaker, &model.world.disk, seed, most_pause_ns);
  for (int call = 0; call < calls; call++) {
    uint64_t dice = below(&model, 100);
    if (dice < 30) make_tensor(&model);
    else if (dice < 60) put(&model);
    else if (dice < 80) get(&model);
    else if (dice < 86) press(&model);
    else if (dice < 92) turn(&model);
    else if (model.use_count > most_uses / 2 || dice < 94) {
      use *use = choose_use(&model);
      if (use) drop(&model, use);
    }
    if (call % 64 == 0) check_all(&model);
  }
  ptn_stash_stats stats = world_stats(&model.world);
  CHECK(model.get_count > calls / 20 && stats.written_bytes > 0 && stats.read_bytes > 0 && stats.forwarded_bytes > 0);
  CHECK(model.refused_count > 0 && model.refused_count < calls / 4);
  if (seed % 2) {
    end_of_all(&model);
    faulty_calm(&shaker);
  } else {
    ptn_stash_close(model.world.stash); /* with everything alive and the disk still slow */
    end_of_all(&model);
    CHECK(world_account(&model.world).live_bytes == 0);
    faulty_calm(&shaker);
  }
  world_close(&model.world);
}

int main(void) {
  alarm(HUNG_SECONDS); /* a hang ends here */
  run(1, 200, 6, 0, false, 100000);
  run(2, 60, 2, 0, true, 100000);
  run(3, 120, 1, 0, false, 50000);
  run(4, 90, 4, 2 * PAGE, false, 50000);
  run(5, 400, 6, 4 * PAGE, true, 400000);
  run(6, 40, 3, 0, false, 20000);
  run(7, 200, 2, 16 * PAGE, true, 50000);
  run(8, 120, 4, 0, true, 100000);
  nothing_is_left();
  return 0;
}
