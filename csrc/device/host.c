/* Pages of the host: anonymous mappings.
 *
 * Ranges are large where addresses are free (no limit on them, no strict overcommit), so that free space seldom ends in the
 * middle of a range, and small where every reserved byte counts against a limit. A range starts without huge pages, because
 * with them the first write to a free page would make up to 2 MiB resident that nobody asked for.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "base/bytes.h"
#include "device/device.h"

static const size_t limited_range_bytes = (size_t)64 << 20;

/* Strict overcommit charges a mapping when it is made, whatever is touched of it. */
static bool strict_overcommit(void) {
  FILE *file = fopen("/proc/sys/vm/overcommit_memory", "re");
  if (!file) return false;
  int mode = fgetc(file);
  fclose(file);
  return mode == '2';
}

static size_t affordable_bytes(size_t wished_bytes) {
  struct rlimit limit;
  bool limited = getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY;
  return limited || strict_overcommit() ? (size_t)ptn_min_u64(wished_bytes, limited_range_bytes) : wished_bytes;
}

/* mmap aligns to pages only: reserve one huge page more and give the edges back. */
static void *map_aligned(size_t bytes) {
  char *begin = mmap(NULL, bytes + PTN_HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) return NULL;
  size_t skip = (size_t)(ptn_round_up((uintptr_t)begin, PTN_HUGE_BYTES) - (uintptr_t)begin);
  if (skip > 0) munmap(begin, skip);
  if (skip < PTN_HUGE_BYTES) munmap(begin + skip + bytes, PTN_HUGE_BYTES - skip);
  return begin + skip;
}

static ptn_status host_reserve(size_t least_bytes, size_t wished_bytes, size_t *got_bytes, void **out) {
  size_t bytes = (size_t)ptn_max_u64(least_bytes, affordable_bytes(wished_bytes));
  *out = map_aligned(bytes);
  if (!*out && bytes > least_bytes) *out = map_aligned(bytes = least_bytes);
  if (!*out) {
    int sys_errno = errno;
    ptn_fail(PTN_MEMORY, "the system refuses %zu bytes of addresses (%s): raise the limit on addresses (ulimit -v) or use less",
             bytes, strerror(sys_errno));
    ptn_last_error()->sys_errno = sys_errno;
    ptn_last_error()->asked_bytes = bytes;
    return PTN_MEMORY;
  }
  *got_bytes = bytes;
  madvise(*out, bytes, MADV_NOHUGEPAGE); /* fails only where there are none */
  return PTN_OK;
}

static void host_unreserve(void *begin, size_t bytes) { munmap(begin, bytes); }

static bool host_purge(void *begin, size_t bytes) {
  if (madvise(begin, bytes, MADV_DONTNEED) == 0) return true;
#ifdef MADV_DONTNEED_LOCKED
  return madvise(begin, bytes, MADV_DONTNEED_LOCKED) == 0;
#else
  return false;
#endif
}

static void host_allow_huge(void *begin, size_t bytes, bool allowed) {
  madvise(begin, bytes, allowed ? MADV_HUGEPAGE : MADV_NOHUGEPAGE); /* a hint */
}

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* since Linux 6.1; older ones refuse it, and gather pages where huge ones are allowed in time */
#endif

static void host_gather_huge(void *begin) {
  if (madvise(begin, PTN_HUGE_BYTES, MADV_HUGEPAGE) == 0) madvise(begin, PTN_HUGE_BYTES, MADV_COLLAPSE);
}

const ptn_page_source *ptn_host_pages(void) {
  static const ptn_page_source source = {host_reserve, host_unreserve, host_purge, host_allow_huge, host_gather_huge};
  return &source;
}
