/* See metadata.h. */
#define _GNU_SOURCE
#include "memory/metadata.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "base/bytes.h"

static const size_t refill_bytes = 16 * PTN_PAGE_BYTES;

ptn_status ptn_metadata_map(size_t bytes, void **out) {
  void *begin = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    int sys_errno = errno;
    ptn_fail(PTN_MEMORY, "the system refuses %zu bytes for the arena's own records: %s", bytes, strerror(sys_errno));
    ptn_last_error()->sys_errno = sys_errno;
    ptn_last_error()->asked_bytes = bytes;
    return PTN_MEMORY;
  }
  madvise(begin, bytes, MADV_NOHUGEPAGE); /* leaves are sparse */
  *out = begin;
  return PTN_OK;
}

ptn_status ptn_metadata_stock(ptn_metadata_pool *pool, size_t count) {
  if (pool->free_count >= count) return PTN_OK;
  void *page;
  PTN_TRY(ptn_metadata_map(refill_bytes, &page));
  for (size_t at = 0; at + pool->record_bytes <= refill_bytes; at += pool->record_bytes)
    ptn_metadata_give(pool, (char *)page + at);
  return PTN_OK;
}

void *ptn_metadata_take(ptn_metadata_pool *pool) {
  void *record = pool->free_records;
  memcpy(&pool->free_records, record, sizeof(void *));
  pool->free_count--;
  return memset(record, 0, pool->record_bytes);
}

void ptn_metadata_give(ptn_metadata_pool *pool, void *record) {
  memcpy(record, &pool->free_records, sizeof(void *));
  pool->free_records = record;
  pool->free_count++;
}
