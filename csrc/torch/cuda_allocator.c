/* Segments of torch's pools on a GPU, counted where they are handed out.
 *
 * Problem: the budget of a device holds slots and persistent chunks, which the engine takes itself, and all that torch's operations
 * make. Design: torch's caching allocator stays what it is, with its streams and its statistics, and asks here for the segments of a
 * pool that it cuts tensors from. Each is charged to the account that is in use for the GPU at that moment; giving it back discharges
 * that same account, whichever is in use then. So the sum of the engine's memory and of torch's segments never passes the limit, and
 * what torch keeps for later counts: it is not free for anybody else.
 *
 * Invariants: one mutex, never held during a call of the driver; an entry is there from malloc to free.
 */
#include "torch/cuda_allocator.h"

#include <stdlib.h>

#include "base/threads.h"

#define GPUS_MAX 64

typedef struct segment {
  struct segment *next;
  void *memory;
  ptn_device *device;
  ptn_account *account;
  uint64_t bytes;
} segment;

typedef struct gpu {
  ptn_device *device; /* NULL: nobody uses it */
  ptn_account *account;
} gpu;

static ptn_mutex mutex;
static gpu gpus[GPUS_MAX];
static segment *segments;

bool ptn_torch_cuda_use(int number, ptn_device *device, ptn_account *account) {
  if (number < 0 || number >= GPUS_MAX) return false;
  ptn_lock(&mutex);
  gpus[number] = (gpu){device, account};
  ptn_unlock(&mutex);
  return true;
}

void ptn_torch_cuda_forget(const ptn_account *account) {
  ptn_lock(&mutex);
  for (int i = 0; i < GPUS_MAX; i++)
    if (gpus[i].account == account) gpus[i].account = NULL;
  ptn_unlock(&mutex);
}

/* The account that is in use is open: whoever closes it says so first. */
static ptn_status charge(segment *made, int number) {
  ptn_lock(&mutex);
  made->device = gpus[number].device;
  made->account = gpus[number].account;
  ptn_status status = made->device ? ptn_account_charge(made->account, made->bytes) : PTN_DEVICE;
  ptn_unlock(&mutex);
  return status;
}

static void keep(segment *made) {
  ptn_lock(&mutex);
  made->next = segments;
  segments = made;
  ptn_unlock(&mutex);
}

void *ptn_cuda_malloc(size_t bytes, int number, void *stream) {
  (void)stream; /* memory of the driver belongs to no stream */
  segment *made = number >= 0 && number < GPUS_MAX && bytes > 0 ? calloc(1, sizeof *made) : NULL;
  if (!made) return NULL;
  made->bytes = bytes;
  if (charge(made, number) != PTN_OK) {
    free(made);
    return NULL;
  }
  if (made->device->kind->allocate(made->device, bytes, &made->memory) != PTN_OK) {
    ptn_account_discharge(made->account, bytes);
    free(made);
    return NULL;
  }
  keep(made);
  return made->memory;
}

void ptn_cuda_free(void *memory, size_t bytes, int number, void *stream) {
  (void)bytes, (void)number, (void)stream;
  ptn_lock(&mutex);
  segment **at = &segments;
  while (*at && (*at)->memory != memory) at = &(*at)->next;
  segment *gone = *at;
  if (gone) *at = gone->next;
  ptn_unlock(&mutex);
  if (!gone) return;
  gone->device->kind->free(gone->device, memory);
  ptn_account_discharge(gone->account, gone->bytes);
  free(gone);
}
