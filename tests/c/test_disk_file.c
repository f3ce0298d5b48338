/* The store's file: what it is, what it refuses, and each system call it makes failing. The calls are replaced here by ones of
 * the same name that do as told and otherwise ask the kernel. */
/* sources: csrc/disk/file.c */
#define _GNU_SOURCE
#include "disk/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/bytes.h"
#include "check.h"

static struct {
  int fallocate_errno, fallocate_times; /* fail that often */
  bool fallocate_half;                  /* reserve half of it before failing */
  int ftruncate_errno;
  int openat_errno, openat_flags; /* fail calls with one of these flags */
  int pwrite_errno, pread_errno;
  bool pwrite_short, pread_wrong;
  uint32_t filesystem; /* pretend to be this one */
  uint64_t free_pages; /* of the disk, where it is not zero; none of them for others than root */
  uid_t user;          /* root, where nothing is told */
} tell;

static int failed(int sys_errno) {
  errno = sys_errno;
  return -1;
}

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  if (tell.fallocate_errno != 0 && tell.fallocate_times-- > 0) {
    if (tell.fallocate_half && syscall(SYS_fallocate, fd, mode, offset, bytes / 2) != 0) return -1;
    return failed(tell.fallocate_errno);
  }
  return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
}
int ftruncate(int fd, off_t bytes) {
  return tell.ftruncate_errno ? failed(tell.ftruncate_errno) : (int)syscall(SYS_ftruncate, fd, bytes);
}
int openat(int fd, const char *path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if (tell.openat_errno != 0 && (flags & tell.openat_flags)) return failed(tell.openat_errno);
  return (int)syscall(SYS_openat, fd, path, flags, mode);
}
int fstatfs(int fd, struct statfs *out) {
  int result = (int)syscall(SYS_fstatfs, fd, out);
  if (tell.filesystem) out->f_type = (__fsword_t)tell.filesystem;
  if (tell.free_pages) {
    out->f_bsize = (__fsword_t)PTN_PAGE_BYTES;
    out->f_bfree = tell.free_pages;
    out->f_bavail = 0;
  }
  return result;
}
uid_t geteuid(void) { return tell.user; }
ssize_t pwrite(int fd, const void *memory, size_t bytes, off_t offset) {
  if (tell.pwrite_errno) return failed(tell.pwrite_errno);
  return syscall(SYS_pwrite64, fd, memory, tell.pwrite_short ? bytes / 2 / 512 * 512 : bytes, offset);
}
ssize_t pread(int fd, void *memory, size_t bytes, off_t offset) {
  if (tell.pread_errno) return failed(tell.pread_errno);
  ssize_t moved = syscall(SYS_pread64, fd, memory, bytes, offset);
  if (tell.pread_wrong) ((unsigned char *)memory)[100] ^= 1;
  return moved;
}

static const char *folder;

static size_t names_in_folder(void) {
  DIR *listing = opendir(folder);
  CHECK(listing);
  size_t count = 0;
  while (readdir(listing)) count++;
  closedir(listing);
  return count - 2;
}

static size_t open_files(void) {
  DIR *listing = opendir("/proc/self/fd");
  CHECK(listing);
  size_t count = 0;
  while (readdir(listing)) count++;
  closedir(listing);
  return count;
}

static uint64_t blocks_bytes(const ptn_file *file) {
  struct stat about;
  CHECK(fstat(file->fd, &about) == 0);
  return (uint64_t)about.st_blocks * 512;
}

static void is_private_direct_and_nameless(bool named) {
  size_t names = names_in_folder(), files = open_files();
  ptn_file file;
  CHECK_OK(ptn_file_open(&file, folder, named));
  struct stat about;
  CHECK(fstat(file.fd, &about) == 0);
  CHECK((about.st_mode & 0777) == 0600 && about.st_nlink == 0 && about.st_size == 0 && file.bytes == 0);
  CHECK(fcntl(file.fd, F_GETFL) & O_DIRECT);
  CHECK(fcntl(file.fd, F_GETFD) & FD_CLOEXEC);
  CHECK(names_in_folder() == names);
  CHECK_OK(ptn_file_resize(&file, 8 * PTN_MIB));
  CHECK(blocks_bytes(&file) >= 8 * PTN_MIB && file.bytes == 8 * PTN_MIB);
  CHECK_OK(ptn_file_resize(&file, PTN_MIB));
  CHECK(blocks_bytes(&file) < 2 * PTN_MIB && file.bytes == PTN_MIB);
  int second = dup(file.fd); /* as a forked child would hold it */
  ptn_file_close(&file);
  CHECK(fstat(second, &about) == 0 && about.st_blocks == 0);
  close(second);
  CHECK(names_in_folder() == names && open_files() == files);
}

static void stale_names_are_removed(void) {
  size_t names = names_in_folder();
  char path[4096];
  snprintf(path, sizeof path, "%s/.protrain-store-00112233445566778899aabbccddeeff", folder);
  int fd = open(path, O_CREAT | O_WRONLY, 0600);
  CHECK(fd >= 0);
  close(fd);
  snprintf(path, sizeof path, "%s/.protrain-other", folder);
  fd = open(path, O_CREAT | O_WRONLY, 0600);
  CHECK(fd >= 0);
  close(fd);
  ptn_file file;
  CHECK_OK(ptn_file_open(&file, folder, true));
  ptn_file_close(&file);
  CHECK(names_in_folder() == names + 1); /* the other is not ours to remove */
  CHECK(unlink(path) == 0);
}

/* The open fails with this errno and with these words, and leaves nothing. */
static void refuses(const char *where, int sys_errno, const char *words) {
  size_t names = names_in_folder(), files = open_files();
  ptn_file file;
  CHECK(ptn_file_open(&file, where, false) == PTN_DISK);
  CHECK(ptn_last_error()->sys_errno == sys_errno);
  CHECK(strstr(ptn_last_error()->message, words) && strstr(ptn_last_error()->message, where));
  CHECK(strcmp(ptn_last_error()->path, where) == 0);
  CHECK(names_in_folder() == names && open_files() == files);
  memset(&tell, 0, sizeof tell);
}

static void unusable_folders_are_refused(void) {
  char path[4096];
  snprintf(path, sizeof path, "%s/missing", folder);
  refuses(path, ENOENT, "exists");
  snprintf(path, sizeof path, "%s/plain-file", folder);
  int fd = open(path, O_CREAT | O_WRONLY, 0600);
  CHECK(fd >= 0);
  close(fd);
  refuses(path, ENOTDIR, "Not a directory");
  CHECK(unlink(path) == 0);
  tell.filesystem = 0x01021994u;
  refuses(folder, ENOTSUP, "tmpfs");
  tell.filesystem = 0x858458F6u;
  refuses(folder, ENOTSUP, "ramfs");
  tell.openat_errno = EINVAL;
  tell.openat_flags = O_DIRECT;
  refuses(folder, EINVAL, "O_DIRECT");
  tell.openat_errno = EROFS;
  tell.openat_flags = O_DIRECT;
  refuses(folder, EROFS, "can be written");
  tell.pwrite_errno = EINVAL;
  refuses(folder, EINVAL, "does not work");
  tell.pread_errno = EIO;
  refuses(folder, EIO, "does not work");
  tell.pwrite_short = true;
  refuses(folder, EIO, "does not work");
  tell.pread_wrong = true;
  refuses(folder, EIO, "other bytes");
}

static void folders_without_nameless_files_work(void) {
  int errnos[] = {EOPNOTSUPP, EISDIR, ENOENT, EINVAL};
  for (size_t i = 0; i < sizeof errnos / sizeof *errnos; i++) {
    size_t names = names_in_folder();
    tell.openat_errno = errnos[i];
    tell.openat_flags = O_TMPFILE & ~O_DIRECTORY;
    ptn_file file;
    CHECK_OK(ptn_file_open(&file, folder, false));
    CHECK(names_in_folder() == names);
    ptn_file_close(&file);
    memset(&tell, 0, sizeof tell);
  }
}

static void fails_to_grow(ptn_file *file, uint64_t bytes, int sys_errno) {
  uint64_t before = file->bytes, blocks = blocks_bytes(file);
  CHECK(ptn_file_resize(file, bytes) == PTN_DISK);
  CHECK(ptn_last_error()->sys_errno == sys_errno && ptn_last_error()->asked_bytes == bytes - before);
  struct stat about;
  CHECK(fstat(file->fd, &about) == 0);
  CHECK(file->bytes == before && (uint64_t)about.st_size == before && blocks_bytes(file) == blocks);
}

static void a_full_disk_is_an_error_and_changes_nothing(void) {
  ptn_file file;
  CHECK_OK(ptn_file_open(&file, folder, false));
  CHECK_OK(ptn_file_resize(&file, PTN_MIB));
  struct statfs about;
  CHECK(fstatfs(file.fd, &about) == 0);
  uint64_t disk_bytes = (uint64_t)about.f_blocks * (uint64_t)about.f_bsize;
  fails_to_grow(&file, ptn_round_up(disk_bytes + PTN_MIB, PTN_PAGE_BYTES), ENOSPC);
  int errnos[] = {ENOSPC, EDQUOT, EFBIG, EIO};
  for (size_t i = 0; i < sizeof errnos / sizeof *errnos; i++) {
    tell.fallocate_errno = errnos[i];
    tell.fallocate_times = 1;
    tell.fallocate_half = true;
    fails_to_grow(&file, 64 * PTN_MIB, errnos[i]);
  }
  memset(&tell, 0, sizeof tell);
  struct rlimit before;
  CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK(setrlimit(RLIMIT_FSIZE, &(struct rlimit){8 * PTN_MIB, before.rlim_max}) == 0);
  CHECK_OK(ptn_file_resize(&file, 8 * PTN_MIB));
  fails_to_grow(&file, 9 * PTN_MIB, EFBIG); /* and no SIGXFSZ, which would end this program */
  CHECK(strstr(ptn_last_error()->message, "ulimit"));
  CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK_OK(ptn_file_resize(&file, 9 * PTN_MIB));
  ptn_file_close(&file);
}

/* What a filesystem holds back is not told to be free, and is asked for by root alone. */
static void space_that_is_held_back_is_not_free(void) {
  ptn_file file;
  CHECK_OK(ptn_file_open(&file, folder, false));
  for (uid_t user = 0; user < 2; user++) {
    tell.user = user;
    tell.free_pages = 2 * PTN_MIB / PTN_PAGE_BYTES;
    tell.fallocate_errno = ENOSPC;
    tell.fallocate_times = 1;
    fails_to_grow(&file, PTN_MIB, ENOSPC);
    CHECK(strstr(ptn_last_error()->message, "; 0 bytes are free there"));
    CHECK(tell.fallocate_times == (user == 0 ? 0 : 1));
  }
  tell.user = 0;
  tell.fallocate_times = 0;
  CHECK_OK(ptn_file_resize(&file, PTN_MIB));
  memset(&tell, 0, sizeof tell);
  ptn_file_close(&file);
}

static void interruptions_are_no_errors(void) {
  ptn_file file;
  CHECK_OK(ptn_file_open(&file, folder, false));
  tell.fallocate_errno = EINTR;
  tell.fallocate_times = 3;
  CHECK_OK(ptn_file_resize(&file, PTN_MIB));
  CHECK(tell.fallocate_times < 0);
  memset(&tell, 0, sizeof tell);
  tell.ftruncate_errno = EIO;
  CHECK(ptn_file_resize(&file, 4096) == PTN_DISK);
  CHECK(ptn_last_error()->sys_errno == EIO && file.bytes == PTN_MIB);
  memset(&tell, 0, sizeof tell);
  ptn_file_close(&file);
}

static void space_is_written_where_it_cannot_be_reserved(void) {
  ptn_file file;
  tell.fallocate_errno = EOPNOTSUPP;
  tell.fallocate_times = 1 << 20;
  CHECK_OK(ptn_file_open(&file, folder, false));
  CHECK_OK(ptn_file_resize(&file, 3 * PTN_MIB + 4096));
  CHECK(file.bytes == 3 * PTN_MIB + 4096 && blocks_bytes(&file) >= file.bytes);
  tell.pwrite_errno = ENOSPC;
  fails_to_grow(&file, 5 * PTN_MIB, ENOSPC);
  memset(&tell, 0, sizeof tell);
  ptn_file_close(&file);
}

int main(void) {
  const char *given = getenv("TMPDIR");
  folder = given ? given : "/tmp";
  is_private_direct_and_nameless(false);
  is_private_direct_and_nameless(true);
  stale_names_are_removed();
  unusable_folders_are_refused();
  folders_without_nameless_files_work();
  a_full_disk_is_an_error_and_changes_nothing();
  space_that_is_held_back_is_not_free();
  interruptions_are_no_errors();
  space_is_written_where_it_cannot_be_reserved();
  return 0;
}
