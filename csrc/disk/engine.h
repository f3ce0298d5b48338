/* What an I/O engine does: it moves one piece between memory and the file, and says how that went.
 *
 * The store (store.c) decides what is moved and when, cuts requests into pieces and knows what a short transfer or an EINTR
 * means; an engine makes one attempt per start and judges nothing. So every rule about failures exists once, above this
 * table, and an engine that wraps another one can make any attempt fail, fall short, come late or bring wrong bytes, without
 * a line in the product for it.
 *
 * Invariants: for each start, finish is called exactly once, on a thread of the engine (or of an engine that wraps it), with
 * no lock held; finish may start pieces, the same one too. Threads are started by create and ended by destroy, never in
 * between: a process sees the same number of them at every step.
 */
#ifndef PTN_DISK_ENGINE_H
#define PTN_DISK_ENGINE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/status.h"
#include "disk/store.h"

/* One stretch of the file, whose bytes lie in memory in one part or in several. */
typedef struct ptn_piece ptn_piece;
struct ptn_piece {
  struct iovec *parts; /* in the order of the file; where each begins and its bytes: multiples of PTN_PAGE_BYTES, bytes > 0 */
  uint32_t parts_count;
  uint64_t offset, bytes; /* bytes: of all parts */
  bool write;
  void (*finish)(ptn_piece *piece, int64_t result); /* result: bytes moved, or -errno */
  ptn_piece *next; /* the engine's between start and finish, else the store's */
  struct {         /* the store's own */
    ptn_store *store;
    ptn_io *io; /* the first of those that have bytes in it */
    struct iovec parts[PTN_PIECE_PARTS];
    uint64_t offset, bytes;       /* as it was cut: what stands above is what is left of it */
    uint32_t idle_attempts_count; /* attempts in a row that moved nothing */
  } own;
};

typedef struct ptn_io_engine ptn_io_engine;
typedef struct ptn_io_engine_kind {
  const char *name;
  void (*start)(ptn_io_engine *engine, ptn_piece *piece); /* from any thread, does not wait for the disk */
  void (*destroy)(ptn_io_engine *engine);                 /* nothing is in flight any more */
} ptn_io_engine_kind;
struct ptn_io_engine {
  const ptn_io_engine_kind *kind; /* first member of every engine */
};

/* Blocking calls on this many threads; that many pieces are in flight at most, the others wait in order. */
ptn_status ptn_io_engine_create_threads(ptn_io_engine **out, int fd, uint32_t threads_count);
/* A ring with room for depth pieces, and threads_count threads for the pieces that would make the kernel wait. PTN_DISK with
 * the reason where the kernel, the container or the filesystem does not offer what it takes. */
ptn_status ptn_io_engine_create_uring(ptn_io_engine **out, int fd, uint32_t depth, uint32_t threads_count);

/* How tests and measurements make a store: 0 and NULL mean what ptn_store_create takes. */
typedef struct ptn_store_options {
  ptn_disk_engine engine;
  uint64_t piece_bytes; /* a multiple of PTN_PAGE_BYTES */
  uint32_t depth;       /* pieces in flight */
  uint32_t parts_count; /* of a piece at most; 1: each request moves by itself */
  ptn_io_engine *(*wrap)(ptn_io_engine *inner, void *context); /* an engine around the one that was made, which it then owns */
  void *context;
} ptn_store_options;
/* What parts_count 0 means from now on; 0: PTN_PIECE_PARTS. Tests of small models would see nothing of a disk that only moves
 * MiBs. */
void ptn_store_set_parts(uint32_t parts_count);
ptn_status ptn_store_create_with(ptn_store **out, const char *folder, const ptn_store_options *options);

#endif
