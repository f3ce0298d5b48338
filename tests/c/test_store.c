/* The store as its users see it, on both engines: bytes come back as written, urgent requests go first, done may submit again,
 * wrong requests are refused, the figures are the kernel's, and nothing stays behind. */
/* sources: csrc/disk/?*.c */
/* threads */
#define _GNU_SOURCE
#include "disk/store.h"

#include <dirent.h>
#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

#include "faulty_engine.h"

static const char *folder;
static ptn_mutex mutex;
static ptn_condition condition;
static int left_count; /* requests whose done has not been called */

static void done(ptn_io *io) {
  CHECK(io->status == PTN_OK);
  ptn_lock(&mutex);
  if (--left_count == 0) ptn_signal(&condition);
  ptn_unlock(&mutex);
}

static void wait_until_left(int count) {
  ptn_lock(&mutex);
  while (left_count > count) CHECK(ptn_wait_ns(&condition, &mutex, HUNG_NS)); /* longer is a hang */
  ptn_unlock(&mutex);
}

static size_t entries_of(const char *path) {
  DIR *listing = opendir(path);
  CHECK(listing);
  size_t count = 0;
  while (readdir(listing)) count++;
  closedir(listing);
  return count;
}

static unsigned char *pages(size_t count) {
  unsigned char *memory = aligned_alloc(PTN_PAGE_BYTES, count * PTN_PAGE_BYTES);
  CHECK(memory);
  return memory;
}

/* ---- bytes ---- */

#define CELL_PAGES 64
#define CELLS 48

typedef struct cell { /* a region with one request at a time */
  ptn_extent extent;
  unsigned char *memory;
  ptn_io io;
  uint64_t first_page, pages_count; /* of the request */
  uint64_t version[CELL_PAGES];     /* what each page on disk holds; 0: zeros */
} cell;

static void fill_page(unsigned char *page, uint64_t cell, uint64_t number, uint64_t version) {
  uint64_t *words = (uint64_t *)(void *)page;
  for (uint64_t i = 0; i < PTN_PAGE_BYTES / 8; i++) words[i] = version == 0 ? 0 : (version << 40 | cell << 32 | number << 16 | i);
}

static void check_page(const unsigned char *page, uint64_t cell, uint64_t number, uint64_t version) {
  unsigned char expected[PTN_PAGE_BYTES] __attribute__((aligned(8)));
  fill_page(expected, cell, number, version);
  CHECK(memcmp(page, expected, PTN_PAGE_BYTES) == 0);
}

static void submit_cell(ptn_store *store, cell *cells, size_t index, uint64_t *seed, uint64_t version) {
  cell *cell = &cells[index];
  cell->first_page = check_random(seed) % CELL_PAGES;
  cell->pages_count = 1 + check_random(seed) % (CELL_PAGES - cell->first_page);
  bool write = check_random(seed) % 2;
  for (uint64_t i = 0; i < cell->pages_count; i++) {
    uint64_t page = cell->first_page + i;
    if (write) cell->version[page] = version;
    fill_page(cell->memory + i * PTN_PAGE_BYTES, index, page, write ? version : ~(uint64_t)0);
  }
  cell->io = (ptn_io){.memory = cell->memory,
                      .offset = cell->extent.offset + cell->first_page * PTN_PAGE_BYTES,
                      .bytes = cell->pages_count * PTN_PAGE_BYTES,
                      .write = write,
                      .urgent = check_random(seed) % 4 == 0,
                      .done = done};
  ptn_store_submit(store, &cell->io);
}

static void bytes_come_back(ptn_disk_engine engine) {
  ptn_store *store;
  ptn_store_options options = {.engine = engine, .piece_bytes = 7 * PTN_PAGE_BYTES, .depth = 5};
  CHECK_OK(ptn_store_create_with(&store, folder, &options));
  cell *cells = calloc(CELLS, sizeof *cells);
  CHECK(cells);
  for (size_t i = 0; i < CELLS; i++) {
    cells[i].memory = pages(CELL_PAGES);
    CHECK_OK(ptn_store_reserve(store, CELL_PAGES * PTN_PAGE_BYTES, &cells[i].extent));
  }
  uint64_t seed = 11;
  for (uint64_t round = 1; round <= 12; round++) {
    left_count = CELLS;
    for (size_t i = 0; i < CELLS; i++) submit_cell(store, cells, i, &seed, round);
    wait_until_left(0);
    for (size_t i = 0; i < CELLS; i++)
      for (uint64_t page = 0; page < cells[i].pages_count; page++)
        check_page(cells[i].memory + page * PTN_PAGE_BYTES, i, cells[i].first_page + page,
                   cells[i].version[cells[i].first_page + page]);
  }
  for (size_t i = 0; i < CELLS; i++) {
    CHECK_OK(ptn_store_transfer(store, cells[i].memory, cells[i].extent.offset, CELL_PAGES * PTN_PAGE_BYTES, false));
    for (uint64_t page = 0; page < CELL_PAGES; page++)
      check_page(cells[i].memory + page * PTN_PAGE_BYTES, i, page, cells[i].version[page]);
    free(cells[i].memory);
    ptn_store_release(store, &cells[i].extent);
    CHECK(cells[i].extent.bytes == 0);
  }
  ptn_store_trim(store, 0);
  ptn_store_stats stats;
  ptn_store_get_stats(store, &stats);
  CHECK(stats.reserved_bytes == 0); /* all of it was at the end */
  free(cells);
  ptn_store_destroy(store);
}

/* ---- order ---- */

static void urgent_first_then_in_order(ptn_disk_engine which) {
  ptn_store *store;
  faulty_engine engine;
  ptn_store_options options = {
      .engine = which, .piece_bytes = PTN_PAGE_BYTES, .depth = 1, .wrap = faulty_wrap, .context = &engine};
  CHECK_OK(ptn_store_create_with(&store, folder, &options));
  ptn_extent extent;
  CHECK_OK(ptn_store_reserve(store, 64 * PTN_PAGE_BYTES, &extent));
  unsigned char *memory = pages(64);
  memset(memory, 1, 64 * PTN_PAGE_BYTES);
  CHECK_OK(ptn_store_transfer(store, memory, extent.offset, 64 * PTN_PAGE_BYTES, true));
  faulty_tell(&engine, FAULT_NONE, 0, 0, 0);
  faulty_close(&engine);
  ptn_io requests[8];
  left_count = 8;
  for (uint64_t i = 0; i < 8; i++) {
    requests[i] = (ptn_io){.memory = memory + 4 * i * PTN_PAGE_BYTES,
                           .offset = extent.offset + 4 * i * PTN_PAGE_BYTES,
                           .bytes = 4 * PTN_PAGE_BYTES,
                           .urgent = i == 5 || i == 6,
                           .done = done};
    ptn_store_submit(store, &requests[i]);
  }
  CHECK(faulty_count(&engine) == 1); /* the first piece of request 0; everything else waits */
  faulty_open(&engine);
  wait_until_left(0);
  CHECK(engine.count == 32 && engine.most_in_flight_count == 1);
  static const uint64_t order[] = {0, 20, 21, 22, 23, 24, 25, 26, 27, 1,  2,  3,  4,  5,  6,  7,
                                   8, 9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 28, 29, 30, 31};
  for (size_t i = 0; i < 32; i++) CHECK(engine.log_offsets[i] == extent.offset + order[i] * PTN_PAGE_BYTES);
  free(memory);
  ptn_store_destroy(store);
}

/* ---- done ---- */

typedef struct chain {
  ptn_store *store;
  int links_count;
  uint64_t last_byte; /* of the extent */
  uint64_t first_byte;
} chain;

static void next_link(ptn_io *io) {
  CHECK(io->status == PTN_OK);
  chain *chain = io->context;
  if (--chain->links_count == 0) {
    done(io);
    return;
  }
  io->write = !io->write;
  io->offset += io->bytes;
  if (io->offset + io->bytes > chain->last_byte) io->offset = chain->first_byte;
  ptn_store_submit(chain->store, io);
}

/* Thousands of small requests, each submitted by the end of the one before it. */
static void done_may_submit(ptn_disk_engine engine) {
  ptn_store *store;
  CHECK_OK(ptn_store_create(&store, folder, engine));
  enum { CHAINS = 16, LINKS = 100, SMALL = 65536 };
  ptn_extent extent;
  CHECK_OK(ptn_store_reserve(store, 2 * CHAINS * SMALL, &extent));
  unsigned char *memory = pages(CHAINS * SMALL / PTN_PAGE_BYTES);
  memset(memory, 7, CHAINS * SMALL);
  ptn_io requests[CHAINS];
  chain chains[CHAINS];
  left_count = CHAINS;
  for (uint64_t i = 0; i < CHAINS; i++) {
    uint64_t begin = extent.offset + 2 * i * SMALL;
    chains[i] = (chain){.store = store, .links_count = LINKS, .first_byte = begin, .last_byte = begin + 2 * SMALL};
    requests[i] = (ptn_io){
        .memory = memory + i * SMALL, .offset = begin, .bytes = SMALL, .write = true, .done = next_link, .context = &chains[i]};
    ptn_store_submit(store, &requests[i]);
  }
  wait_until_left(0);
  ptn_store_stats stats;
  ptn_store_get_stats(store, &stats);
  CHECK(stats.write_bytes == CHAINS * LINKS / 2 * SMALL && stats.read_bytes == stats.write_bytes);
  free(memory);
  ptn_store_destroy(store);
}

/* ---- refusals ---- */

static int refused_count;
static void refused(ptn_io *io) {
  CHECK(io->status == PTN_INVALID && io->error.code == PTN_INVALID);
  refused_count++;
}

static void wrong_requests_are_refused(ptn_disk_engine engine) {
  ptn_store *store;
  CHECK_OK(ptn_store_create(&store, folder, engine));
  ptn_extent extent, none;
  unsigned char *memory = pages(2);
  ptn_io io = {.memory = memory, .bytes = PTN_PAGE_BYTES, .done = refused};
  refused_count = 0;
  ptn_store_submit(store, &io); /* nothing is reserved yet */
  CHECK(refused_count == 1 && strstr(io.error.message, "reserve"));
  CHECK_OK(ptn_store_reserve(store, 1, &extent));
  CHECK(extent.bytes == PTN_PAGE_BYTES);
  ptn_store_stats stats;
  ptn_store_get_stats(store, &stats);
  uint64_t end = stats.reserved_bytes;
  ptn_io wrong[] = {
      {.memory = memory + 8, .offset = 0, .bytes = PTN_PAGE_BYTES},
      {.memory = memory, .offset = 512, .bytes = PTN_PAGE_BYTES},
      {.memory = memory, .offset = 0, .bytes = 100},
      {.memory = memory, .offset = end, .bytes = PTN_PAGE_BYTES},
      {.memory = memory, .offset = end - PTN_PAGE_BYTES, .bytes = 2 * PTN_PAGE_BYTES},
      {.memory = memory, .offset = ~(uint64_t)0 - PTN_PAGE_BYTES + 1, .bytes = 2 * PTN_PAGE_BYTES},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    wrong[i].done = refused;
    ptn_store_submit(store, &wrong[i]);
    CHECK(refused_count == (int)i + 2);
  }
  CHECK(ptn_store_transfer(store, memory, end, PTN_PAGE_BYTES, false) == PTN_INVALID);
  CHECK_OK(ptn_store_transfer(store, memory, 0, 0, false)); /* nothing to do */
  CHECK_OK(ptn_store_transfer(store, memory, end - PTN_PAGE_BYTES, PTN_PAGE_BYTES, false));
  CHECK_OK(ptn_store_reserve(store, 0, &none));
  CHECK(none.bytes == 0);
  ptn_store_release(store, &none);
  CHECK(ptn_store_reserve(store, (uint64_t)1 << 61, &none) == PTN_DISK && none.bytes == 0);
  CHECK(ptn_last_error()->sys_errno == ENOSPC);
  CHECK(ptn_store_reserve(store, ~(uint64_t)0, &none) == PTN_DISK && none.bytes == 0);
  CHECK(ptn_last_error()->sys_errno == EFBIG && ptn_last_error()->asked_bytes == ~(uint64_t)0);
  CHECK_OK(ptn_store_reserve(store, PTN_PAGE_BYTES, &none)); /* as before */
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    bool refused = ptn_store_transfer(store, memory, extent.offset, PTN_PAGE_BYTES, true) == PTN_INVALID;
    ptn_store_destroy(store); /* does nothing, does not hang */
    _exit(refused ? 0 : 1);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK_OK(ptn_store_transfer(store, memory, extent.offset, PTN_PAGE_BYTES, true));
  free(memory);
  ptn_store_destroy(store);
}

/* ---- figures and leftovers ---- */

static void kernel_figures(uint64_t *read_bytes, uint64_t *write_bytes) {
  FILE *file = fopen("/proc/self/io", "r");
  CHECK(file);
  char line[128];
  while (fgets(line, sizeof line, file)) {
    sscanf(line, "read_bytes: %lu", read_bytes);
    sscanf(line, "write_bytes: %lu", write_bytes);
  }
  fclose(file);
}

static bool near(uint64_t a, uint64_t b) { return a >= b - b / 20 && a <= b + b / 20; }

static void figures_are_the_kernels(ptn_disk_engine engine) {
  ptn_store *store;
  CHECK_OK(ptn_store_create(&store, folder, engine));
  enum { BYTES = 24 << 20 };
  ptn_extent extent;
  CHECK_OK(ptn_store_reserve(store, BYTES, &extent));
  unsigned char *memory = pages(BYTES / PTN_PAGE_BYTES);
  memset(memory, 3, BYTES);
  uint64_t read_before = 0, write_before = 0, read_after = 0, write_after = 0;
  kernel_figures(&read_before, &write_before);
  size_t threads = entries_of("/proc/self/task");
  for (int i = 0; i < 2; i++) {
    CHECK_OK(ptn_store_transfer(store, memory, extent.offset, BYTES, true)); /* first into what was never written */
    CHECK(entries_of("/proc/self/task") == threads);
    CHECK_OK(ptn_store_transfer(store, memory, extent.offset, BYTES, false));
    CHECK(entries_of("/proc/self/task") == threads);
  }
  kernel_figures(&read_after, &write_after);
  ptn_store_stats stats;
  ptn_store_get_stats(store, &stats);
  CHECK(stats.read_bytes == 2 * (uint64_t)BYTES && stats.write_bytes == 2 * (uint64_t)BYTES);
  CHECK(near(read_after - read_before, stats.read_bytes) && near(write_after - write_before, stats.write_bytes));
  CHECK(stats.read_ns > 0 && stats.write_ns > 0 && stats.reserved_bytes >= BYTES);
  free(memory);
  ptn_store_destroy(store);
}

static uint64_t reserved_bytes(ptn_store *store) {
  ptn_store_stats stats;
  ptn_store_get_stats(store, &stats);
  return stats.reserved_bytes;
}

static void released_space_is_used_again_and_trimmed(void) {
  ptn_store *store;
  CHECK_OK(ptn_store_create(&store, folder, PTN_DISK_AUTO));
  ptn_store_trim(store, 0); /* of nothing */
  CHECK(reserved_bytes(store) == 0);
  ptn_extent a, b, c, d;
  CHECK_OK(ptn_store_reserve(store, 100 * PTN_MIB, &a));
  CHECK_OK(ptn_store_reserve(store, 100 * PTN_MIB, &b));
  CHECK_OK(ptn_store_reserve(store, 100 * PTN_MIB, &c));
  uint64_t most = reserved_bytes(store);
  CHECK(most >= 300 * PTN_MIB && most <= 400 * PTN_MIB);
  uint64_t hole = b.offset;
  CHECK(ptn_store_release_at_once(store, &b) && b.bytes == 0 && ptn_store_release_at_once(store, &b));
  CHECK_OK(ptn_store_reserve(store, 60 * PTN_MIB, &d));
  CHECK(d.offset == hole);
  CHECK(reserved_bytes(store) == most);
  ptn_store_trim(store, 0); /* c is at the end, and in use */
  CHECK(reserved_bytes(store) == 320 * PTN_MIB);
  ptn_store_release(store, &c);
  CHECK(reserved_bytes(store) == 320 * PTN_MIB); /* releasing keeps the file */
  ptn_store_trim(store, 160 * PTN_MIB);
  CHECK(reserved_bytes(store) == 320 * PTN_MIB); /* 160 in use, 160 to spare */
  ptn_store_trim(store, ~(uint64_t)0);
  CHECK(reserved_bytes(store) == 320 * PTN_MIB);
  ptn_store_trim(store, 40 * PTN_MIB);
  CHECK(reserved_bytes(store) == 256 * PTN_MIB);
  ptn_store_trim(store, 160 * PTN_MIB); /* never grows */
  CHECK(reserved_bytes(store) == 256 * PTN_MIB);
  CHECK_OK(ptn_store_reserve(store, 90 * PTN_MIB, &c)); /* from what was spared */
  CHECK(c.offset == 160 * PTN_MIB && reserved_bytes(store) == 256 * PTN_MIB);
  ptn_store_release(store, &c);
  ptn_store_trim(store, 0);
  CHECK(reserved_bytes(store) == 192 * PTN_MIB); /* 160, in steps of 64 */
  ptn_store_release(store, &d);
  ptn_store_release(store, &a);
  CHECK(reserved_bytes(store) == 192 * PTN_MIB);
  ptn_store_trim(store, 0);
  CHECK(reserved_bytes(store) == 0);
  ptn_store_destroy(store);
}

/* What is in use keeps its bytes when the file is cut behind it and grows again, and what was cut off is refused. */
static void trimming_leaves_what_is_in_use(ptn_disk_engine engine) {
  ptn_store *store;
  CHECK_OK(ptn_store_create(&store, folder, engine));
  unsigned char *memory = pages(1);
  ptn_extent kept, gone;
  CHECK_OK(ptn_store_reserve(store, PTN_PAGE_BYTES, &kept));
  fill_page(memory, 1, 0, 1);
  CHECK_OK(ptn_store_transfer(store, memory, kept.offset, PTN_PAGE_BYTES, true));
  for (uint64_t round = 2; round < 6; round++) {
    CHECK_OK(ptn_store_reserve(store, 70 * PTN_MIB, &gone));
    uint64_t last_page = gone.offset + gone.bytes - PTN_PAGE_BYTES;
    fill_page(memory, 1, 1, round);
    CHECK_OK(ptn_store_transfer(store, memory, last_page, PTN_PAGE_BYTES, true));
    ptn_store_release(store, &gone);
    ptn_store_trim(store, 0);
    CHECK(reserved_bytes(store) == 64 * PTN_MIB);
    CHECK(ptn_store_transfer(store, memory, last_page, PTN_PAGE_BYTES, false) == PTN_INVALID);
    CHECK_OK(ptn_store_transfer(store, memory, kept.offset, PTN_PAGE_BYTES, false));
    check_page(memory, 1, 0, 1);
  }
  free(memory);
  ptn_store_destroy(store);
}

/* Fifty stores in a row, each destroyed with requests under way. */
static void nothing_stays_behind(ptn_disk_engine engine) {
  size_t files = entries_of("/proc/self/fd"), names = entries_of(folder), threads = entries_of("/proc/self/task");
  unsigned char *memory = pages(64);
  memset(memory, 5, 64 * PTN_PAGE_BYTES);
  for (int i = 0; i < 50; i++) {
    ptn_store *store;
    CHECK_OK(ptn_store_create(&store, folder, engine));
    CHECK(strcmp(ptn_store_folder(store), folder) == 0);
    ptn_extent extent;
    CHECK_OK(ptn_store_reserve(store, 64 * PTN_PAGE_BYTES, &extent));
    ptn_io requests[8];
    left_count = 8;
    for (uint64_t j = 0; j < 8; j++) {
      requests[j] = (ptn_io){.memory = memory + j * 8 * PTN_PAGE_BYTES,
                             .offset = extent.offset + j * 8 * PTN_PAGE_BYTES,
                             .bytes = 8 * PTN_PAGE_BYTES,
                             .write = true,
                             .done = done};
      ptn_store_submit(store, &requests[j]);
    }
    ptn_store_destroy(store);
    CHECK(left_count == 0);
  }
  free(memory);
  CHECK(entries_of("/proc/self/fd") == files && entries_of(folder) == names);
  for (int i = 0; entries_of("/proc/self/task") != threads; i++) { /* a joined thread leaves the list a moment later */
    CHECK(i < 5000);
    usleep(1000);
  }
}

static void run(ptn_disk_engine engine) {
  bytes_come_back(engine);
  urgent_first_then_in_order(engine);
  done_may_submit(engine);
  wrong_requests_are_refused(engine);
  trimming_leaves_what_is_in_use(engine);
  figures_are_the_kernels(engine);
  nothing_stays_behind(engine);
}

/* What is reserved anew reads as zeros, not as what an earlier owner wrote. */
static void new_space_reads_as_zeros(void) {
  ptn_store *store;
  ptn_extent extent;
  ptn_store_stats stats;
  unsigned char *memory = aligned_alloc(PTN_PAGE_BYTES, 2 * PTN_PAGE_BYTES);
  CHECK(memory);
  CHECK_OK(ptn_store_create(&store, ".", PTN_DISK_AUTO));
  for (int round = 0; round < 3; round++) {
    CHECK_OK(ptn_store_reserve(store, 2 * PTN_PAGE_BYTES, &extent));
    memset(memory, 9, 2 * PTN_PAGE_BYTES);
    CHECK_OK(ptn_store_transfer(store, memory, extent.offset, 2 * PTN_PAGE_BYTES, false));
    for (size_t i = 0; i < 2 * PTN_PAGE_BYTES; i++) CHECK(memory[i] == 0);
    ptn_store_get_stats(store, &stats);
    CHECK(stats.unwritten_bytes == 2 * PTN_PAGE_BYTES * (uint64_t)(round + 1));
    memset(memory, 7, 2 * PTN_PAGE_BYTES);
    CHECK_OK(ptn_store_transfer(store, memory, extent.offset, 2 * PTN_PAGE_BYTES, true));
    CHECK_OK(ptn_store_transfer(store, memory, extent.offset, 2 * PTN_PAGE_BYTES, false));
    CHECK(memory[PTN_PAGE_BYTES] == 7);
    ptn_store_release(store, &extent);
    if (round == 1) ptn_store_trim(store, 0);
  }
  ptn_store_destroy(store);
  free(memory);
}

int main(void) {
  const char *given = getenv("TMPDIR");
  char own[4096];
  int length = snprintf(own, sizeof own, "%s/protrain-store-XXXXXX", given ? given : "/tmp");
  CHECK(length > 0 && (size_t)length < sizeof own && mkdtemp(own)); /* its names are counted, so nobody else may make any */
  folder = own;
  ptn_mutex_create(&mutex);
  ptn_condition_create(&condition);
  run(PTN_DISK_THREADS);
  released_space_is_used_again_and_trimmed();
  ptn_store *store;
  if (ptn_store_create(&store, folder, PTN_DISK_URING) == PTN_OK) {
    CHECK(strcmp(ptn_store_engine_name(store), "io_uring") == 0);
    ptn_store_destroy(store);
    run(PTN_DISK_URING);
  } else {
    CHECK(strstr(ptn_last_error()->message, "io_uring cannot be used"));
    printf("without io_uring: %s\n", ptn_last_error()->message);
  }
  ptn_condition_destroy(&condition);
  ptn_mutex_destroy(&mutex);
  CHECK(rmdir(folder) == 0);
  new_space_reads_as_zeros();
  return 0;
}
