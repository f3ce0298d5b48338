/* Where torch was built with MKL, torch.sqrt of fp32 is MKL's vmsSqrt, whose results are not always rounded correctly (one in six
 * is the neighbour on a Zen 5) and depend on the processor, but not on where an element lies. The library is inside torch's
 * own, so the same function is called in the same mode. Builds without MKL take the processor's square roots.
 */
#include "torch/square_roots.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#include "optim/optim.h"

/* VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE */
#define MODE ((long long)(0x2 | 0x140000 | 0x100))

/* The count is of 32 or of 64 bits, as MKL was built: one that fits in 32 is passed alike. */
static void (*mkl)(long long count, const float *in, float *out, long long mode);
static int (*set_threads)(int count); /* of the calling thread; returns what it was, 0: as the process's */

/* By this thread alone: outside of torch's own regions MKL would begin one for some hundreds of numbers. */
static void take(size_t count, const float *in, float *out) {
  int before = set_threads(1);
  mkl((long long)count, in, out, MODE);
  set_threads(before);
}

void ptn_torch_use_square_roots(void) {
  void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void *found = torch ? dlsym(torch, "vmsSqrt") : NULL, *threads = torch ? dlsym(torch, "MKL_Set_Num_Threads_Local") : NULL;
  if (torch) dlclose(torch); /* it stays: somebody else loaded it */
  if (!found || !threads) return;
  memcpy(&mkl, &found, sizeof mkl);
  memcpy(&set_threads, &threads, sizeof set_threads);
  ptn_update_use_square_roots(take);
}
