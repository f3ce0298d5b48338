/* The store: page-aligned extents in one file, moved by requests that run beside compute.
 *
 * The file is made in the user's folder and unlinked at once, so that nothing is left whatever happens to the process.
 * Space is reserved before it is used: a write into an extent does not fail for lack of space. All I/O is direct: the page
 * cache would cost a core and twice the memory. An engine (threads with blocking calls, or io_uring) is chosen when the
 * store is created; both give the same results.
 *
 * Every byte that comes back is what was written, or the request fails: pages have checksums in memory (page_sums.h), taken when a write
 * has ended and compared when a read has ended, on the threads of the store, before done is called. A page that differs is PTN_DISK
 * with EBADMSG, which names its place; it may be read again. A write that failed has the sums of the pages that the disk took before it
 * did: what is read then is, page by page, what was there before or was to be written, or an error. Who makes bytes or is about to use
 * them may take and compare sums for itself, while it has them in its caches: a request then leaves that to its caller, and where such a
 * write failed what is read is what was to be written, or an error.
 *
 * A request is memory, an offset and a length, all multiples of PTN_PAGE_BYTES. A long one is cut into pieces, and several
 * pieces are in flight. Short ones that come one behind the other, lie side by side in the file, go the same way and have one
 * done are one piece, and fail together: a system call and an interrupt take as long for a page as for a MiB. Requests of one
 * urgency are started in the order they came, urgent ones first; they may finish in any order, so one that must follow another
 * is submitted after the other has finished.
 */
#ifndef PTN_DISK_STORE_H
#define PTN_DISK_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define PTN_PIECE_PARTS 64 /* short requests that are moved as one piece, at most */

typedef struct ptn_store ptn_store;

typedef struct ptn_extent {
  uint64_t offset, bytes; /* multiples of PTN_PAGE_BYTES; bytes 0: none */
} ptn_extent;

/* AUTO: threads (why: docs/decisions/0001-disk-engine.md). URING fails with the reason where it cannot be had. */
typedef enum ptn_disk_engine { PTN_DISK_AUTO = 0, PTN_DISK_URING, PTN_DISK_THREADS } ptn_disk_engine;

/* One request. The caller owns it and its memory, and touches neither between submit and the call of done. */
typedef struct ptn_io ptn_io;
struct ptn_io {
  void *memory;
  uint64_t offset; /* in the file: extent.offset + where in the extent */
  uint64_t bytes;
  bool write;
  bool urgent; /* compute waits for it, or soon will */
  bool caller_sums; /* the caller calls ptn_store_note before a write, ptn_store_check after a read, or needs neither */
  /* Called once, on a thread of the store (or inside submit when it fails at once), with no lock held. It may submit. */
  void (*done)(ptn_io *io);
  void *context; /* the caller's */
  /* Set before done is called. */
  ptn_status status;
  int64_t start_ns, end_ns;   /* when the first piece started and the last ended, by ptn_now_ns */
  struct {                    /* the store's own */
    ptn_io *next, *beside;    /* in the queue; in the same piece */
    uint64_t next_bytes;      /* how much has been started */
    uint32_t in_flight_count;
    uint64_t bad_offset;      /* of a page that is not what was written; otherwise PTN_PAGE_SUMS_ALL_GOOD */
  } own;
  ptn_error error; /* written where status is not PTN_OK: most of these bytes, which requests that go well never touch */
};

typedef struct ptn_store_stats {
  uint64_t read_bytes, write_bytes; /* finished, as the kernel counts them */
  uint64_t read_ns, write_ns;       /* time with at least one read, one write in flight */
  uint64_t reserved_bytes;          /* of the file */
  uint64_t unwritten_bytes;         /* read where nothing was ever written: zeros */
  int64_t checksum_ns; /* processor time of the store's threads, and time of callers that share, in parts an estimate */
} ptn_store_stats;

/* folder must exist, be writable, not be a tmpfs and have direct I/O (PTN_DISK with a message that says what to do). Bytes of
 * state in memory held by the store itself: a few KiB, and 1 MiB of checksums for each GiB of the file. */
ptn_status ptn_store_create(ptn_store **out, const char *folder, ptn_disk_engine engine);
/* Waits for what has been submitted, ends the threads, gives the space back. Not from within done. In a forked child, where the
 * store cannot be used, it does nothing. */
void ptn_store_destroy(ptn_store *store);
const char *ptn_store_folder(const ptn_store *store);
const char *ptn_store_engine_name(const ptn_store *store); /* "io_uring" or "threads" */

/* Space for bytes (rounded up to pages), contiguous, reserved on the disk: PTN_DISK with ENOSPC where there is none. What has
 * been released is used again, and goes back to the disk with ptn_store_trim: growing and shrinking a file in every step costs
 * more than keeping it. What has been reserved and never written since reads as zeros. Release only what no request uses. */
ptn_status ptn_store_reserve(ptn_store *store, uint64_t bytes, ptn_extent *out);
void ptn_store_release(ptn_store *store, ptn_extent *extent); /* sets *extent to none */
/* The same where it does not have to wait, as for a file that grows; else false, and nothing has changed. */
bool ptn_store_release_at_once(ptn_store *store, ptn_extent *extent);
/* What lies in a reserved extent, which no request uses, counts no more: it reads as zeros, as if it had never been written. */
void ptn_store_forget(ptn_store *store, ptn_extent extent);
/* Gives released space at the end of the file back, in steps of 64 MiB, but for spare_bytes there that are expected to be needed
 * again. Never fails: what the disk does not take back is kept, and used again. */
void ptn_store_trim(ptn_store *store, uint64_t spare_bytes);

/* Starts io; never fails itself: failures arrive in io->status. What lies outside of the reserved space is PTN_INVALID. */
void ptn_store_submit(ptn_store *store, ptn_io *io);
/* The same for several, in this order, before any of them is started: those that lie side by side in the file, in either order,
 * are moved as one piece where they are short enough. What fails then fails for each of them. */
void ptn_store_submit_all(ptn_store *store, ptn_io *const *ios, size_t count);
/* Short requests that lie side by side are best submitted together until they have so many bytes; 0: each is moved by itself. */
uint64_t ptn_store_gathered_bytes(const ptn_store *store);
/* Reads or writes and waits; not urgent-aware callers (tools, tests, state_dict) use this. */
ptn_status ptn_store_transfer(ptn_store *store, void *memory, uint64_t offset, uint64_t bytes, bool write);
/* For requests with caller_sums. No request for these pages is in flight. note: memory is going to be written there; check: it was
 * read from there, PTN_DISK where it differs. shared: on all threads that the caller computes with (base/openmp.h). */
void ptn_store_note(ptn_store *store, bool shared, const void *memory, uint64_t offset, uint64_t bytes);
ptn_status ptn_store_check(ptn_store *store, bool shared, void *memory, uint64_t offset, uint64_t bytes);
void ptn_store_get_stats(ptn_store *store, ptn_store_stats *out);

#endif
