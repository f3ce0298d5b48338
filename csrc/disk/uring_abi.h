/* What the kernel documents of io_uring, as far as the engine uses it: so that the core builds where the headers of the
 * system are older than its kernel, and needs no library. Layouts and numbers are the kernel's, fixed since Linux 5.6. */
#ifndef PTN_DISK_URING_ABI_H
#define PTN_DISK_URING_ABI_H

#include <stdint.h>

enum { /* system calls: the same numbers on every architecture but alpha */
       URING_CALL_SETUP = 425,
       URING_CALL_ENTER = 426,
};
enum { URING_OP_READV = 1, URING_OP_WRITEV = 2, URING_OP_POLL_ADD = 6 };
enum { URING_ENTER_GETEVENTS = 1 };
enum { URING_RWF_NOWAIT = 8 };
enum { URING_FEATURE_SINGLE_MMAP = 1, URING_FEATURE_NODROP = 2 };
#define URING_OFFSET_RINGS 0
#define URING_OFFSET_ENTRIES 0x10000000

typedef struct uring_entry { /* one order */
  uint8_t opcode, flags;
  uint16_t priority;
  int32_t fd;
  uint64_t offset;
  uint64_t address; /* of an array of struct iovec */
  uint32_t length;  /* its elements */
  uint32_t operation_flags; /* RWF_* of a read or write, the events of a poll */
  uint64_t user_data;
  uint64_t unused[3];
} uring_entry;

typedef struct uring_event { /* one answer */
  uint64_t user_data;
  int32_t result;
  uint32_t flags;
} uring_event;

typedef struct uring_order_offsets {
  uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, unused;
  uint64_t user_address;
} uring_order_offsets;

typedef struct uring_answer_offsets {
  uint32_t head, tail, ring_mask, ring_entries, overflow, events, flags, unused;
  uint64_t user_address;
} uring_answer_offsets;

typedef struct uring_parameters {
  uint32_t order_entries, answer_entries, flags, poll_thread_cpu, poll_thread_idle, features, queue_fd;
  uint32_t unused[3];
  uring_order_offsets orders;
  uring_answer_offsets answers;
} uring_parameters;

_Static_assert(sizeof(uring_entry) == 64, "an order has 64 bytes");
_Static_assert(sizeof(uring_event) == 16, "an answer has 16 bytes");
_Static_assert(sizeof(uring_parameters) == 120, "the parameters have 120 bytes");

#endif
