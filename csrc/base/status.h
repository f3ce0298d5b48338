/* One way to fail.
 *
 * Every function that can fail returns a ptn_status. The details of a failure are written once, where it is found, into a
 * record of the failing thread; PTN_TRY passes the status on. A record that must cross threads (a worker's failure that
 * another thread reports) is copied with ptn_error_save and put back with ptn_error_restore.
 */
#ifndef PTN_BASE_STATUS_H
#define PTN_BASE_STATUS_H

#include <stdint.h>

typedef enum ptn_status {
  PTN_OK = 0,
  PTN_BUDGET,  /* more memory needed than the budget holds: needed_bytes, budget_bytes, smallest_bytes */
  PTN_MEMORY,  /* the operating system, or the device, gives no memory: asked_bytes */
  PTN_DISK,    /* an I/O call failed: sys_errno, path, asked_bytes */
  PTN_STEP,    /* calls came in an order that no training step has */
  PTN_PLAN,    /* a plan cannot be used as given */
  PTN_INVALID, /* a wrong argument */
  PTN_DEVICE,  /* the device that computes is missing, cannot be used or has failed: asked_bytes where bytes were asked for */
} ptn_status;

typedef struct ptn_error {
  ptn_status code;
  int sys_errno;           /* 0 where no system call failed */
  uint64_t asked_bytes;    /* what the failing call asked for */
  uint64_t needed_bytes;   /* PTN_BUDGET: memory that would have been in use */
  uint64_t budget_bytes;   /* PTN_BUDGET: the budget that was in force */
  uint64_t smallest_bytes; /* PTN_BUDGET: the smallest budget that works, 0 where not known */
  char path[256];          /* PTN_DISK: the file or folder, cut at its end */
  char message[512];
} ptn_error;

/* The record of the calling thread; what it holds is valid after a call that did not return PTN_OK. */
ptn_error *ptn_last_error(void);

/* Writes a fresh record and returns code. */
ptn_status ptn_fail(ptn_status code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* PTN_DISK: what is the operation in words ("read", "write", "reserve"); path may be NULL. */
ptn_status ptn_fail_disk(int sys_errno, const char *path, uint64_t asked_bytes, const char *what);

/* PTN_BUDGET with its three figures. */
ptn_status ptn_fail_budget(uint64_t needed_bytes, uint64_t budget_bytes, uint64_t smallest_bytes, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

void ptn_error_save(ptn_error *to);
ptn_status ptn_error_restore(const ptn_error *from); /* returns from->code */

/* Says in a saved record, in a few words, what the bytes are that it speaks of: "words: message". */
void ptn_error_of(ptn_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define PTN_TRY(call)                              \
  do {                                             \
    ptn_status ptn_status_ = (call);               \
    if (ptn_status_ != PTN_OK) return ptn_status_; \
  } while (0)

#endif
