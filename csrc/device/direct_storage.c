/* Looking for GPUDirect Storage.
 *
 * Problem: the library is part of CUDA's toolkit and of torch's packages for it, not of the driver, and is there on machines whose
 * kernel cannot serve it; it then copies through memory of its own and says so in a file. Design: the library is opened by name and
 * asked for its entry points and its version, which starts nothing; whether the kernel serves it is read from the kernel's list of
 * modules. Opening cuFile's driver would tell more, and writes a log where the process stands, so it is not opened.
 */
#define _GNU_SOURCE
#include "device/direct_storage.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

typedef struct file_result {
  int error; /* 0: none; cuFile's own numbers begin at 5001 */
  int cuda_error;
} file_result;

static const char *const entries[] = {"cuFileDriverOpen",       "cuFileDriverClose", "cuFileHandleRegister",
                                      "cuFileHandleDeregister", "cuFileRead",        "cuFileWrite"};

static void find_library(ptn_direct_storage *out, const char *name) {
  void *handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
  if (!handle) {
    snprintf(out->reason, sizeof out->reason, "%s", dlerror());
    return;
  }
  for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
    if (dlsym(handle, entries[i])) continue;
    snprintf(out->reason, sizeof out->reason, "%s has no %s", name, entries[i]);
    dlclose(handle);
    return;
  }
  out->library = true;
  void *found = dlsym(handle, "cuFileGetVersion"); /* not in the oldest */
  if (!found) return;
  file_result (*get_version)(int *version);
  memcpy(&get_version, &found, sizeof get_version);
  int version = 0;
  if (get_version(&version).error == 0 && version > 0) out->version = version;
}

static void find_module(ptn_direct_storage *out, const char *folder) {
  struct stat info;
  char path[512];
  out->module = stat(folder, &info) == 0 && S_ISDIR(info.st_mode);
  if (!out->module || snprintf(path, sizeof path, "%s/version", folder) >= (int)sizeof path) return;
  FILE *file = fopen(path, "re");
  if (!file) return;
  if (fgets(out->module_version, sizeof out->module_version, file)) {
    out->module_version[strcspn(out->module_version, "\r\n")] = '\0';
  }
  fclose(file);
}

void ptn_direct_storage_find(ptn_direct_storage *out, const char *library, const char *module) {
  *out = (ptn_direct_storage){0};
  find_library(out, library ? library : "libcufile.so.0");
  find_module(out, module ? module : "/sys/module/nvidia_fs");
}
