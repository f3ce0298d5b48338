/* Regions: page-aligned memory that engine and tensors own together. A tensor made over a region may outlive the engine (a view
 * that a user kept), so the last owner frees. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "runtime/internal.h"

ptn_status ptn_region_create(ptn_device *device, ptn_account *account, uint64_t bytes, ptn_region **out) {
  *out = NULL;
  ptn_region *region = calloc(1, sizeof *region);
  if (!region) return ptn_fail(PTN_MEMORY, "no memory to describe a region of %llu bytes", (unsigned long long)bytes);
  region->bytes = ptn_max_u64(ptn_round_up(bytes, PTN_PAGE_BYTES), PTN_PAGE_BYTES);
  region->device = device;
  region->account = device ? account : NULL; /* the arena knows its own */
  ptn_status status = device ? ptn_device_take(device, account, region->bytes, &region->memory)
                             : ptn_arena_alloc(account, region->bytes, &region->memory);
  if (status != PTN_OK) {
    free(region);
    return status;
  }
  if (!device) ptn_arena_set_use(region->memory, PTN_BLOCK_STATIC); /* the stash leaves it alone, whoever saves a tensor in it */
  atomic_init(&region->references, 1);
  *out = region;
  return PTN_OK;
}

ptn_status ptn_device_take(ptn_device *device, ptn_account *account, uint64_t bytes, void **out) {
  *out = NULL;
  PTN_TRY(ptn_account_charge(account, bytes));
  ptn_status status = device->kind->allocate(device, bytes, out);
  if (status != PTN_OK) ptn_account_discharge(account, bytes);
  return status;
}

void ptn_device_give(ptn_device *device, ptn_account *account, void *memory, uint64_t bytes) {
  if (!memory) return;
  device->kind->free(device, memory);
  ptn_account_discharge(account, bytes);
}

ptn_region *ptn_region_acquire(ptn_region *region) {
  atomic_fetch_add_explicit(&region->references, 1, memory_order_relaxed);
  return region;
}

void ptn_region_release(ptn_region *region) {
  if (!region || atomic_fetch_sub_explicit(&region->references, 1, memory_order_acq_rel) != 1) return;
  if (region->device) ptn_device_give(region->device, region->account, region->memory, region->bytes);
  else ptn_arena_free(region->memory);
  free(region);
}
