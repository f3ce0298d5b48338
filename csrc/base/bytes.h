/* Sizes and alignment. Every size in the core is a count of bytes in a uint64_t or size_t; names end in _bytes. */
#ifndef PTN_BASE_BYTES_H
#define PTN_BASE_BYTES_H

#include <stddef.h>
#include <stdint.h>

#define PTN_PAGE_BYTES ((size_t)4096)         /* unit of disk I/O and of large memory */
#define PTN_HUGE_BYTES ((size_t)2 << 20)      /* a huge page */
#define PTN_LINE_BYTES ((size_t)64)           /* of a processor's cache */
#define PTN_TENSOR_ALIGN_BYTES ((size_t)64)   /* where parameters start in a chunk, as torch's own tensors do */
#define PTN_MIB ((uint64_t)1 << 20)

static inline uint64_t ptn_round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }
static inline uint64_t ptn_min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t ptn_max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }
static inline int64_t ptn_min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ptn_max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

static inline double ptn_min_f64(double a, double b) { return a < b ? a : b; }
static inline double ptn_max_f64(double a, double b) { return a > b ? a : b; }

/* What is going to be read or written soon, by whoever meanwhile moves so many bytes that no cache would have it then. Nothing is
 * touched: it may be anything, also no memory. */
static inline void ptn_fetch_soon(const void *begin, size_t bytes) {
  for (size_t at = 0; at < bytes; at += PTN_LINE_BYTES) __builtin_prefetch((const void *)((uintptr_t)begin + at), 1);
}

#endif
