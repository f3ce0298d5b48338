/* Memory for the arena's own records (stretches, slabs, leaves of the page map). It comes from the system directly: the arena
 * must not depend on malloc, which may be at its own limit, nor count itself. Never given back; a freed record is reused by
 * the pool it came from. Under the arena's lock. */
#ifndef PTN_MEMORY_METADATA_H
#define PTN_MEMORY_METADATA_H

#include <stddef.h>

#include "base/status.h"

/* Zeroed whole pages, resident only where written. PTN_MEMORY when refused. */
ptn_status ptn_metadata_map(size_t bytes, void **out);

typedef struct ptn_metadata_pool {
  const size_t record_bytes; /* a multiple of 8 */
  void *free_records;        /* linked through their first word */
  size_t free_count;
} ptn_metadata_pool;

/* Makes sure that count records can be taken without failing. */
ptn_status ptn_metadata_stock(ptn_metadata_pool *pool, size_t count);
void *ptn_metadata_take(ptn_metadata_pool *pool); /* from the stock */
void ptn_metadata_give(ptn_metadata_pool *pool, void *record);

#endif
