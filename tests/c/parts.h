/* The bytes of a transfer that lie in several parts of memory, for those that stand in for preadv and pwritev. */
#ifndef PTN_TESTS_PARTS_H
#define PTN_TESTS_PARTS_H

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

static inline size_t parts_bytes(const struct iovec *parts, int count) {
  size_t bytes = 0;
  for (int i = 0; i < count; i++) bytes += parts[i].iov_len;
  return bytes;
}

static inline unsigned char *parts_byte(const struct iovec *parts, size_t at) {
  for (; at >= parts->iov_len; parts++) at -= parts->iov_len;
  return (unsigned char *)parts->iov_base + at;
}

/* All of them, in memory of the caller's that begins on a page and is freed by free. */
static inline unsigned char *parts_gathered(const struct iovec *parts, int count) {
  unsigned char *all = aligned_alloc(4096, parts_bytes(parts, count));
  if (!all) abort();
  for (unsigned char *at = all; count > 0; at += parts->iov_len, parts++, count--) memcpy(at, parts->iov_base, parts->iov_len);
  return all;
}

#endif
