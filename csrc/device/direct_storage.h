/* GPUDirect Storage, as far as it is looked for: whether bytes could go between this machine's GPUs and its disks without host
 * memory. Nothing uses it: why, docs/decisions/0016-direct-storage.md. */
#ifndef PTN_DEVICE_DIRECT_STORAGE_H
#define PTN_DEVICE_DIRECT_STORAGE_H

#include <stdbool.h>

typedef struct ptn_direct_storage {
  bool library;           /* cuFile's is there, with every entry point that moving bytes takes */
  int version;            /* of it, 1000 * major + 10 * minor; 0: it does not say */
  bool module;            /* the kernel's part, nvidia-fs, is loaded */
  char module_version[32]; /* empty: not loaded, or it does not say */
  char reason[256];       /* where there is no library: why, in a line */
} ptn_direct_storage;

/* Looks, opens no driver and makes no file. library: NULL: libcufile.so.0; module: the folder of the kernel's part, NULL:
 * /sys/module/nvidia_fs. What is found in the library stays loaded. */
void ptn_direct_storage_find(ptn_direct_storage *out, const char *library, const char *module);

#endif
