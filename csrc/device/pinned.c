/* Pinned memory is a mapping of its own, of exactly the pages that were asked for: allocators of pinned memory round to powers of
 * two, which on chunks wastes up to half of the host's memory.
 *
 * Pages are made resident here and not by whoever locks them, so that a host without memory is told in one line, and on huge
 * pages where a whole one fits, so that the driver locks and the device's tables hold one entry for 2 MiB instead of 512.
 *
 * A forked child does not get them. If it shared them, the next write of the parent would go to a copy of the page, and the
 * device would go on with the old one.
 */
#define _GNU_SOURCE
#include "device/pinned.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "base/bytes.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* since Linux 5.14 */
#endif

/* Older kernels do not know the advice: there each page is written to. */
static ptn_status make_resident(char *memory, uint64_t bytes) {
  while (madvise(memory, (size_t)bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) {
      int sys_errno = errno;
      ptn_fail(PTN_MEMORY, "the system has no %llu bytes of memory to pin: %s; give less host memory", (unsigned long long)bytes,
               strerror(sys_errno));
      ptn_last_error()->sys_errno = sys_errno;
      ptn_last_error()->asked_bytes = bytes;
      return PTN_MEMORY;
    }
    for (uint64_t at = 0; at < bytes; at += PTN_PAGE_BYTES) *(volatile char *)(memory + at) = 0;
    break;
  }
  return PTN_OK;
}

ptn_status ptn_pinned_map(uint64_t bytes, ptn_pinned *out) {
  *out = (ptn_pinned){0};
  if (bytes == 0) return ptn_fail(PTN_INVALID, "0 bytes of pinned memory were asked for: at least 1 is wanted");
  if (bytes > SIZE_MAX / 2)
    return ptn_fail(PTN_MEMORY, "%llu bytes are more than there are addresses", (unsigned long long)bytes);
  size_t whole = (size_t)ptn_round_up(bytes, PTN_PAGE_BYTES), got = 0;
  const ptn_page_source *pages = ptn_host_pages();
  PTN_TRY(pages->reserve(whole, whole, &got, &out->memory));
  out->bytes = got;
  size_t huge = whole / PTN_HUGE_BYTES * PTN_HUGE_BYTES;
  if (huge > 0) pages->allow_huge(out->memory, huge, true);
  madvise(out->memory, whole, MADV_DONTFORK); /* known to every kernel that runs this */
  ptn_status status = make_resident(out->memory, whole);
  if (status != PTN_OK) ptn_pinned_unmap(out);
  return status;
}

void ptn_pinned_unmap(ptn_pinned *pinned) {
  if (pinned->memory) ptn_host_pages()->unreserve(pinned->memory, (size_t)pinned->bytes);
  *pinned = (ptn_pinned){0};
}
