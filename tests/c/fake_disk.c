/* A disk that misbehaves as it is told, put before the C library by LD_PRELOAD.
 *
 * Calls are numbered by kind from the moment of disk_tell on (pread and pwrite with those of several parts): those about the
 * store's file (made with O_TMPFILE, or under the store's name); from write on, about what is being written beside its target (files, their folder, its making, its taking the
 * target's name, the folder of both); open and read, about the files of a checkpoint. Those from first to last go wrong; all
 * others are the kernel's. The program asks by ctypes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "parts.h"

#define SHOWN __attribute__((visibility("default")))

enum { PREAD, PWRITE, FALLOCATE, FTRUNCATE, OPENAT, WRITE, FSYNC, RENAME, MKDIR, OPEN, READ, KINDS };
enum { NONE, FAIL, SHORT, NOTHING, LATE, WRONG, LOST, TORN, MOST_FILES = 4096, PAGE_BYTES = 4096 };

static struct {
  _Atomic int kind, fault, sys_errno;
  _Atomic long first, last, counts[KINDS];
  _Atomic bool ours[MOST_FILES]; /* the store's files, by their number */
} disk;

SHOWN void disk_tell(int kind, int fault, int sys_errno, long first, long last);
SHOWN long disk_count(int kind);
SHOWN ssize_t write(int fd, const void *memory, size_t bytes);
SHOWN ssize_t read(int fd, void *memory, size_t bytes);
SHOWN int open64(const char *path, int flags, ...);
SHOWN int fsync(int fd);
SHOWN int renameat2(int old_folder, const char *old, int new_folder, const char *new, unsigned flags);

void disk_tell(int kind, int fault, int sys_errno, long first, long last) {
  atomic_store(&disk.kind, -1);
  for (int i = 0; i < KINDS; i++) atomic_store(&disk.counts[i], 0);
  atomic_store(&disk.fault, fault);
  atomic_store(&disk.sys_errno, sys_errno);
  atomic_store(&disk.first, first);
  atomic_store(&disk.last, last);
  atomic_store(&disk.kind, kind);
}

long disk_count(int kind) { return atomic_load(&disk.counts[kind]); }

static int fault_of(int kind) {
  long number = atomic_fetch_add(&disk.counts[kind], 1) + 1;
  bool chosen = atomic_load(&disk.kind) == kind && number >= atomic_load(&disk.first) && number <= atomic_load(&disk.last);
  int fault = chosen ? atomic_load(&disk.fault) : NONE;
  if (fault == TORN) fault = number == atomic_load(&disk.first) ? SHORT : FAIL; /* half of it is made, and no more */
  if (fault == LATE) nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
  return fault == LATE ? NONE : fault;
}

static int failed(void) {
  errno = atomic_load(&disk.sys_errno);
  return -1;
}

static bool is_ours(int fd) { return fd >= 0 && fd < MOST_FILES && atomic_load(&disk.ours[fd]); }

static const char *path_of(int fd, char path[4096]) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, 4095);
  path[length > 0 ? length : 0] = 0;
  return path;
}

/* A file that will take its target's name when it is whole. */
static bool is_partial(int fd) { return strstr(path_of(fd, (char[4096]){0}), ".partial") != NULL; }

/* A file of a checkpoint that has its name. */
static bool is_saved(const char *path) {
  return !strstr(path, ".partial") &&
         (strstr(path, "/protrain.json") || strstr(path, ".safetensors") || strstr(path, "/optimizer.pt"));
}

static bool is_folder(int fd) {
  struct stat about;
  return fstat(fd, &about) == 0 && S_ISDIR(about.st_mode);
}

static size_t half(size_t bytes) { return bytes > PAGE_BYTES ? bytes / 2 / PAGE_BYTES * PAGE_BYTES : 512; }

/* ---- calls ---- */

SHOWN int openat(int folder, const char *path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  bool ours = (flags & O_TMPFILE) == O_TMPFILE || strncmp(path, ".protrain-store-", 16) == 0;
  if (ours && fault_of(OPENAT) == FAIL) return failed();
  int fd = (int)syscall(SYS_openat, folder, path, flags, mode);
  if (fd >= 0 && fd < MOST_FILES) atomic_store(&disk.ours[fd], ours);
  return fd;
}

int open64(const char *path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if (atomic_load(&disk.kind) == OPEN && is_saved(path) && fault_of(OPEN) == FAIL) return failed();
  return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

SHOWN int close(int fd) {
  if (fd >= 0 && fd < MOST_FILES) atomic_store(&disk.ours[fd], false);
  return (int)syscall(SYS_close, fd);
}

SHOWN ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) {
  int fault = is_ours(fd) ? fault_of(PREAD) : NONE;
  if (fault == FAIL) return failed();
  if (fault == NOTHING) return 0;
  ssize_t moved = syscall(SYS_preadv, fd, parts, (long)count, offset, 0L);
  if (fault == WRONG && moved > 0) *parts_byte(parts, (size_t)moved / 3) ^= 4;
  return fault == SHORT && moved > 0 ? (ssize_t)half(parts_bytes(parts, count)) : moved;
}

ssize_t read(int fd, void *memory, size_t bytes) {
  bool asked = atomic_load(&disk.kind) == READ && bytes && is_saved(path_of(fd, (char[4096]){0}));
  int fault = asked ? fault_of(READ) : NONE;
  if (fault == FAIL) return failed();
  if (fault == NOTHING) return 0;
  ssize_t moved = syscall(SYS_read, fd, memory, fault == SHORT ? (bytes + 1) / 2 : bytes);
  if (fault == WRONG && moved > 0) ((unsigned char *)memory)[moved / 3] ^= 4;
  return moved;
}

SHOWN ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
  int fault = is_ours(fd) ? fault_of(PWRITE) : NONE;
  size_t bytes = parts_bytes(parts, count);
  if (fault == FAIL) return failed();
  if (fault == NOTHING) return 0;
  if (fault == LOST) return (ssize_t)bytes;
  if (fault != WRONG && fault != SHORT) return syscall(SYS_pwritev, fd, parts, (long)count, offset, 0L);
  unsigned char *other = parts_gathered(parts, count);
  if (fault == WRONG) other[bytes / 3] ^= 4;
  ssize_t moved = syscall(SYS_pwrite64, fd, other, fault == SHORT ? half(bytes) : bytes, offset);
  free(other);
  return moved;
}

SHOWN ssize_t pread(int fd, void *memory, size_t bytes, off_t offset) {
  return preadv(fd, &(struct iovec){.iov_base = memory, .iov_len = bytes}, 1, offset);
}

SHOWN ssize_t pwrite(int fd, const void *memory, size_t bytes, off_t offset) {
  return pwritev(fd, &(struct iovec){.iov_base = (void *)(uintptr_t)memory, .iov_len = bytes}, 1, offset);
}

SHOWN int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  if (is_ours(fd) && fault_of(FALLOCATE) == FAIL) return failed();
  return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
}

SHOWN int ftruncate(int fd, off_t bytes) {
  if (is_ours(fd) && fault_of(FTRUNCATE) == FAIL) return failed();
  return (int)syscall(SYS_ftruncate, fd, bytes);
}

ssize_t write(int fd, const void *memory, size_t bytes) {
  int fault = atomic_load(&disk.kind) == WRITE && is_partial(fd) ? fault_of(WRITE) : NONE;
  if (fault == FAIL) return failed();
  return syscall(SYS_write, fd, memory, fault == SHORT ? (bytes + 1) / 2 : bytes);
}

/* Nothing but what takes a name syncs a folder: the one that it writes, then the one that holds the target. */
int fsync(int fd) {
  if (atomic_load(&disk.kind) == FSYNC && (is_partial(fd) || is_folder(fd)) && fault_of(FSYNC) == FAIL) return failed();
  return (int)syscall(SYS_fsync, fd);
}

static bool fails_by_name(int kind, const char *one, const char *other) {
  bool ours = atomic_load(&disk.kind) == kind && (strstr(one, ".partial") || strstr(other, ".partial"));
  return ours && fault_of(kind) == FAIL;
}

int renameat2(int old_folder, const char *old, int new_folder, const char *new, unsigned flags) {
  if (fails_by_name(RENAME, old, new)) return failed();
  return (int)syscall(SYS_renameat2, old_folder, old, new_folder, new, flags);
}

SHOWN int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

SHOWN int mkdir(const char *path, mode_t mode) {
  if (fails_by_name(MKDIR, path, "")) return failed();
  return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}
