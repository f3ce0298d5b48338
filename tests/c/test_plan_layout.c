/* Layout: what a chunk may hold, on cases by hand and on random models. */
/* sources: csrc/plan/layout.c */
#include "base/bytes.h"
#include "check.h"
#include "plan/plan.h"

static void by_hand(void) {
  /* embedding, two small blocks, a block larger than a chunk, a small block, norm and a large head */
  ptn_layout_param params[] = {
      {5000, -1, 0, 0}, {100, 0, 0, 0}, {60, 0, 0, 0},  {100, 1, 0, 0},   {700, 2, 0, 0},
      {700, 2, 0, 0},   {10, 3, 0, 0},  {64, -1, 0, 0}, {5000, -1, 0, 0}, {0, -1, 0, 0},
  };
  const uint32_t chunk[] = {0, 1, 1, 1, 2, 3, 4, 5, 6, 6};
  const uint64_t offset[] = {0, 0, 128, 192, 0, 0, 0, 0, 0, 5056};
  uint32_t n_chunks;
  CHECK_OK(ptn_layout(params, 9, 1024, &n_chunks));
  CHECK(n_chunks == 7);
  for (int i = 0; i < 9; i++) {
    CHECK(params[i].chunk == chunk[i]);
    CHECK(params[i].offset_bytes == offset[i]);
  }
  CHECK_OK(ptn_layout(params, 0, 1024, &n_chunks));
  CHECK(n_chunks == 0);
  CHECK(ptn_layout(params, 9, 0, &n_chunks) == PTN_INVALID);
  params[3].block = -2;
  CHECK(ptn_layout(params, 9, 1024, &n_chunks) == PTN_INVALID);
  params[3].block = 1;
  params[3].bytes = UINT64_MAX;
  CHECK(ptn_layout(params, 9, 1024, &n_chunks) == PTN_INVALID);
}

static uint64_t run_bytes(const ptn_layout_param *params, size_t begin, size_t end) {
  uint64_t bytes = 0;
  for (size_t i = begin; i < end; i++) bytes = ptn_round_up(bytes, PTN_TENSOR_ALIGN_BYTES) + params[i].bytes;
  return bytes;
}

static void check_model(const ptn_layout_param *params, size_t n_params, uint64_t chunk_bytes, uint32_t n_chunks) {
  CHECK((n_params == 0) == (n_chunks == 0));
  for (size_t i = 0; i < n_params; i++) {
    CHECK(params[i].offset_bytes % PTN_TENSOR_ALIGN_BYTES == 0);
    bool first = i == 0 || params[i].chunk != params[i - 1].chunk;
    CHECK(first ? params[i].chunk == (i == 0 ? 0 : params[i - 1].chunk + 1) && params[i].offset_bytes == 0
                : params[i].offset_bytes >= params[i - 1].offset_bytes + params[i - 1].bytes);
    if (!first) {
      CHECK(params[i].offset_bytes + params[i].bytes <= chunk_bytes);
      CHECK((params[i].block < 0) == (params[i - 1].block < 0));
    }
  }
  if (n_params > 0) CHECK(params[n_params - 1].chunk + 1 == n_chunks);
  for (size_t begin = 0, end; begin < n_params; begin = end) {
    for (end = begin + 1; end < n_params && params[end].block == params[begin].block;) end++;
    bool split = params[begin].chunk != params[end - 1].chunk;
    if (params[begin].block < 0) continue;
    CHECK(split == (run_bytes(params, begin, end) > chunk_bytes) || (end == begin + 1 && !split));
    if (split) { /* its chunks hold nothing else */
      CHECK(begin == 0 || params[begin - 1].chunk != params[begin].chunk);
      CHECK(end == n_params || params[end].chunk != params[end - 1].chunk);
    }
  }
}

/* A block of 12 units, of which chunks may hold 11: thirds fill their slots, one of 8 and one of 4 would not. */
static void size_by_hand(void) {
  enum { UNIT = 1 << 20 };
  ptn_layout_param params[8];
  uint64_t chunk_bytes;
  for (int i = 0; i < 8; i++) {
    static const uint64_t units[4] = {3, 1, 4, 4};
    params[i] = (ptn_layout_param){.bytes = units[i % 4] * UNIT, .block = i / 4};
  }
  CHECK_OK(ptn_layout_size(params, 8, 4 * UNIT, 11 * UNIT, &chunk_bytes));
  CHECK(chunk_bytes >= 4 * UNIT && chunk_bytes < 8 * UNIT);
  CHECK_OK(ptn_layout_size(params, 8, 6 * UNIT, 12 * UNIT, &chunk_bytes)); /* the block as a whole is as good, and larger */
  CHECK(chunk_bytes == 12 * UNIT);
  CHECK_OK(ptn_layout_size(params, 0, 1, 5000, &chunk_bytes));
  CHECK(chunk_bytes == 8192);
  CHECK(ptn_layout_size(params, 8, 0, 11 * UNIT, &chunk_bytes) == PTN_INVALID);
  CHECK(ptn_layout_size(params, 8, 2, 1, &chunk_bytes) == PTN_INVALID);
}

int main(void) {
  by_hand();
  size_by_hand();
  uint64_t random = 1;
  for (int round = 0; round < 5000; round++) {
    ptn_layout_param params[64] = {0};
    size_t n_params = check_random(&random) % 65;
    int32_t block = -1, blocks = 0;
    for (size_t i = 0; i < n_params; i++) {
      if (check_random(&random) % 3 == 0) block = check_random(&random) % 4 == 0 ? -1 : blocks++;
      uint64_t most_bytes = check_random(&random) % 8 == 0 ? 9000 : 900;
      params[i] = (ptn_layout_param){.bytes = check_random(&random) % most_bytes, .block = block};
    }
    uint64_t chunk_bytes = 1 + check_random(&random) % 8192;
    uint32_t n_chunks;
    CHECK_OK(ptn_layout(params, n_params, chunk_bytes, &n_chunks));
    check_model(params, n_params, chunk_bytes, n_chunks);
  }
  return 0;
}
