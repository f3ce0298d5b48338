/* The store's file.
 *
 * Problem: gigabytes of training state go to a folder of the user. Nothing of it may stay when the process ends, however it
 * ends; nobody else may read it; two runs in one folder may not meet; and a write in the middle of a step may not find the
 * disk full.
 *
 * Design: the file never has a name (O_TMPFILE), or only for the moment between its creation and its unlinking, on
 * filesystems that cannot do without. A process killed in that moment leaves an empty name behind; the next store in the
 * folder that goes this way removes it, which harms nobody: a live store does not need its name. Space is reserved
 * with fallocate before any extent of it is handed out. I/O is direct, and one page is written and read at the start,
 * since a filesystem may take O_DIRECT at open and refuse it at the first transfer. There is no way around the page
 * cache where direct I/O is refused, so such a folder is refused too, as is one in memory (tmpfs).
 *
 * Invariant: bytes is the size of the file, and all of it is reserved.
 */
#define _GNU_SOURCE
#include "disk/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include "base/bytes.h"

#define FILE_FLAGS (O_RDWR | O_DIRECT | O_CLOEXEC | O_NOFOLLOW)
static const char name_start[] = ".protrain-store-";

/* PTN_DISK about the folder, with a message of its own. */
__attribute__((format(printf, 4, 5))) static ptn_status fail(int sys_errno, const char *folder, uint64_t asked_bytes,
                                                             const char *format, ...) {
  ptn_fail_disk(sys_errno, folder, asked_bytes, "");
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(ptn_last_error()->message, sizeof ptn_last_error()->message, format, arguments);
  va_end(arguments);
  return PTN_DISK;
}

/* ---- opening ---- */

static ptn_status refuse_memory_folder(int folder_fd, const char *folder) {
  struct statfs about;
  if (fstatfs(folder_fd, &about) != 0) return ptn_fail_disk(errno, folder, 0, "looking at the filesystem");
  uint32_t magic = (uint32_t)about.f_type;
  if (magic != 0x01021994u && magic != 0x858458F6u && magic != 0x958458F6u) return PTN_OK;
  const char *kind = magic == 0x01021994u ? "tmpfs" : magic == 0x858458F6u ? "ramfs" : "hugetlbfs";
  return fail(ENOTSUP, folder, 0,
              "the folder %s is a %s: what is put there stays in memory; "
              "name a folder on a disk (disk=\"...\" or the environment variable PROTRAIN_DISK)",
              folder, kind);
}

/* Names that a process killed between creation and unlinking has left. */
static void remove_stale_names(int folder_fd) {
  int fd = openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *listing = fd >= 0 ? fdopendir(fd) : NULL;
  if (!listing) {
    if (fd >= 0) close(fd);
    return; /* a folder that cannot be listed can still hold a file */
  }
  for (struct dirent *entry; (entry = readdir(listing));)
    if (strncmp(entry->d_name, name_start, sizeof name_start - 1) == 0) unlinkat(folder_fd, entry->d_name, 0);
  closedir(listing);
}

static int open_named(int folder_fd) {
  remove_stale_names(folder_fd);
  for (int attempt = 0; attempt < 16; attempt++) {
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) return -1;
    char name[64];
    snprintf(name, sizeof name, "%s%016" PRIx64 "%016" PRIx64, name_start, random[0], random[1]);
    int fd = openat(folder_fd, name, FILE_FLAGS | O_CREAT | O_EXCL, 0600);
    if (fd < 0 && errno == EEXIST) continue;
    int failure = errno;
    /* Some filesystems create the name before they refuse O_DIRECT. */
    if (unlinkat(folder_fd, name, 0) != 0 && fd >= 0 && errno != ENOENT) {
      failure = errno;
      close(fd);
      fd = -1;
    }
    errno = failure;
    return fd;
  }
  errno = EEXIST;
  return -1;
}

static ptn_status open_file(int folder_fd, const char *folder, bool named, int *fd) {
  *fd = -1;
  if (!named) *fd = openat(folder_fd, ".", FILE_FLAGS | O_TMPFILE | O_EXCL, 0600);
  /* EISDIR, ENOENT: a kernel that does not know O_TMPFILE. EINVAL: no O_TMPFILE or no O_DIRECT; the second way tells which. */
  bool second_way = named || (*fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT || errno == EINVAL));
  if (second_way) *fd = open_named(folder_fd);
  if (*fd >= 0) return PTN_OK;
  if (errno == EINVAL || errno == EOPNOTSUPP)
    return fail(errno, folder, 0,
                "the filesystem of the folder %s has no direct I/O (O_DIRECT: %s); name a folder on another one "
                "(ext4, xfs and btrfs have it)",
                folder, strerror(errno));
  return fail(errno, folder, 0, "cannot make a file in the folder %s: %s; name a folder that can be written (disk=\"...\")",
              folder, strerror(errno));
}

/* ---- size ---- */

static int write_zeros(int fd, uint64_t from, uint64_t to) {
  size_t step = (size_t)PTN_MIB;
  void *zeros = mmap(NULL, step, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (zeros == MAP_FAILED) return errno;
  int failure = 0;
  while (from < to && failure == 0) {
    ssize_t written = pwrite(fd, zeros, (size_t)ptn_min_u64(step, to - from), (off_t)from);
    if (written >= (ssize_t)PTN_PAGE_BYTES) from += (uint64_t)written / PTN_PAGE_BYTES * PTN_PAGE_BYTES;
    else if (written >= 0) failure = ENOSPC;
    else if (errno != EINTR) failure = errno;
  }
  munmap(zeros, step);
  return failure;
}

/* 0 or an errno. posix_fallocate is not used: where the filesystem cannot reserve, it writes single bytes, which a direct
 * file refuses. */
static int reserve(int fd, uint64_t from, uint64_t to) {
  int result;
  do result = fallocate(fd, 0, (off_t)from, (off_t)(to - from));
  while (result != 0 && errno == EINTR);
  if (result == 0) return 0;
  return errno == EOPNOTSUPP || errno == ENOSYS ? write_zeros(fd, from, to) : errno;
}

static ptn_status fail_growth(const ptn_file *file, int sys_errno, uint64_t more_bytes, uint64_t free_bytes) {
  if (sys_errno == EDQUOT) /* what is free there is others' */
    return fail(sys_errno, file->folder, more_bytes,
                "cannot reserve %" PRIu64 " bytes more in %s: %s; the file has %" PRIu64
                "; make room, ask for a larger quota or name another folder",
                more_bytes, file->folder, strerror(sys_errno), file->bytes);
  return fail(sys_errno, file->folder, more_bytes,
              "cannot reserve %" PRIu64 " bytes more in %s: %s; %" PRIu64 " bytes are free there and the file has %" PRIu64
              "; make room or name another folder",
              more_bytes, file->folder, strerror(sys_errno), free_bytes, file->bytes);
}

static ptn_status grow(ptn_file *file, uint64_t bytes) {
  uint64_t more_bytes = bytes - file->bytes;
  /* Past this limit the kernel would send SIGXFSZ, which ends a process that has not asked otherwise. */
  struct rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur)
    return fail(EFBIG, file->folder, more_bytes,
                "cannot reserve %" PRIu64 " bytes more in %s: the file would have %" PRIu64
                " bytes and this process may write files of %llu (ulimit -f); raise that limit",
                more_bytes, file->folder, bytes, (unsigned long long)limit.rlim_cur);
  struct statfs about;
  bool known = fstatfs(file->fd, &about) == 0;
  /* As df tells it: without what the filesystem holds back, for root or for itself. */
  uint64_t free_bytes = known ? (uint64_t)about.f_bavail * (uint64_t)about.f_bsize : UINT64_MAX;
  uint64_t most_bytes = known && geteuid() == 0 ? (uint64_t)about.f_bfree * (uint64_t)about.f_bsize : free_bytes;
  /* Asked first, since fallocate would fill the disk to the brim, for everyone, before it fails. */
  if (more_bytes > most_bytes) return fail_growth(file, ENOSPC, more_bytes, free_bytes);
  int failure = bytes > INT64_MAX ? EFBIG : reserve(file->fd, file->bytes, bytes);
  if (failure == 0) {
    file->bytes = bytes;
    return PTN_OK;
  }
  /* What was reserved before the failure goes back; if even that fails it stays reserved, past the end of what is used. */
  if (ftruncate(file->fd, (off_t)file->bytes) != 0) errno = 0;
  return fail_growth(file, failure, more_bytes, free_bytes);
}

ptn_status ptn_file_resize(ptn_file *file, uint64_t bytes) {
  if (bytes > file->bytes) return grow(file, bytes);
  int result = 0;
  if (bytes < file->bytes) do
      result = ftruncate(file->fd, (off_t)bytes);
    while (result != 0 && errno == EINTR);
  if (result != 0) return ptn_fail_disk(errno, file->folder, file->bytes - bytes, "giving back");
  file->bytes = bytes;
  return PTN_OK;
}

/* ---- the whole ---- */

static bool move_page(int fd, unsigned char *page, bool write) {
  ssize_t result;
  do result = write ? pwrite(fd, page, PTN_PAGE_BYTES, 0) : pread(fd, page, PTN_PAGE_BYTES, 0);
  while (result < 0 && errno == EINTR);
  return result == (ssize_t)PTN_PAGE_BYTES;
}

/* One page there and back. */
static ptn_status try_page(ptn_file *file) {
  PTN_TRY(ptn_file_resize(file, PTN_PAGE_BYTES));
  unsigned char *page = mmap(NULL, 2 * PTN_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return ptn_fail(PTN_MEMORY, "no memory for two pages: %s", strerror(errno));
  memset(page, 0x5A, PTN_PAGE_BYTES);
  errno = EIO; /* for a transfer that falls short */
  bool moved = move_page(file->fd, page, true) && move_page(file->fd, page + PTN_PAGE_BYTES, false);
  int failure = errno;
  bool same = moved && memcmp(page, page + PTN_PAGE_BYTES, PTN_PAGE_BYTES) == 0;
  munmap(page, 2 * PTN_PAGE_BYTES);
  if (!moved)
    return fail(failure, file->folder, PTN_PAGE_BYTES,
                "direct I/O of %zu bytes does not work in the folder %s: %s; name a folder on "
                "another filesystem",
                PTN_PAGE_BYTES, file->folder, strerror(failure));
  if (!same)
    return fail(EIO, file->folder, PTN_PAGE_BYTES, "the disk of %s gives back other bytes than were written", file->folder);
  return ptn_file_resize(file, 0);
}

ptn_status ptn_file_open(ptn_file *out, const char *folder, bool named) {
  *out = (ptn_file){.fd = -1};
  int folder_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_fd < 0)
    return fail(errno, folder, 0,
                "cannot use the folder %s for the disk: %s; name a folder that exists and can be read and "
                "written (disk=\"...\")",
                folder, strerror(errno));
  ptn_status status = refuse_memory_folder(folder_fd, folder);
  if (status == PTN_OK) status = open_file(folder_fd, folder, named, &out->fd);
  close(folder_fd);
  if (status != PTN_OK) return status;
  out->folder = strdup(folder);
  status = out->folder ? try_page(out) : ptn_fail(PTN_MEMORY, "no memory for the name of the disk folder");
  if (status != PTN_OK) ptn_file_close(out);
  return status;
}

void ptn_file_close(ptn_file *file) {
  if (file->fd >= 0) {
    if (ftruncate(file->fd, 0) != 0) errno = 0; /* closing gives the space back as well, if later */
    close(file->fd);
  }
  free(file->folder);
  *file = (ptn_file){.fd = -1};
}
