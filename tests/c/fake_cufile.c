/* A library of GPUDirect Storage that is none: the entry points that are looked for, of which only the version may be called. What it
 * lacks, and the version, are chosen where it is compiled. */
#include <stdlib.h>

#ifndef FAKE_CUFILE_VERSION
#define FAKE_CUFILE_VERSION 1130
#endif
#ifndef FAKE_CUFILE_ERROR
#define FAKE_CUFILE_ERROR 0
#endif

typedef struct fake_cufile_result {
  int error, cuda_error;
} fake_cufile_result;

#define NEVER(name)                                       \
  __attribute__((visibility("default"))) void name(void); \
  __attribute__((visibility("default"))) void name(void) { abort(); }

NEVER(cuFileDriverOpen)
NEVER(cuFileDriverClose)
NEVER(cuFileHandleRegister)
NEVER(cuFileHandleDeregister)
NEVER(cuFileRead)
#ifndef FAKE_CUFILE_NO_WRITE
NEVER(cuFileWrite)
#endif

#ifndef FAKE_CUFILE_OLD
__attribute__((visibility("default"))) fake_cufile_result cuFileGetVersion(int *version);
__attribute__((visibility("default"))) fake_cufile_result cuFileGetVersion(int *version) {
  *version = FAKE_CUFILE_VERSION;
  return (fake_cufile_result){FAKE_CUFILE_ERROR, 0};
}
#endif
