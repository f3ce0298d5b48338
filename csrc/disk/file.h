/* The store's file: without a name, direct, its space reserved. See file.c. */
#ifndef PTN_DISK_FILE_H
#define PTN_DISK_FILE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct ptn_file {
  int fd;
  char *folder;
  uint64_t bytes; /* reserved on the disk */
} ptn_file;

/* named: make a file with a name and remove the name at once, which is the way where the filesystem has no files without
 * one; ptn_file_open goes that way by itself, tests ask for it. */
ptn_status ptn_file_open(ptn_file *out, const char *folder, bool named);
void ptn_file_close(ptn_file *file); /* the space is given back even if a forked child still holds the file */
/* Reserves to, or cuts at, bytes. On failure the file is as it was. */
ptn_status ptn_file_resize(ptn_file *file, uint64_t bytes);

#endif
