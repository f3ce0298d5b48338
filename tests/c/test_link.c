/* The link measured over the host and over a GPU that does its worst: figures of a link, everything given back, and where any one
 * call of the driver fails, its error. */
/* sources: csrc/device/host.c csrc/device/host_device.c csrc/device/pinned.c csrc/device/cuda.c csrc/device/transfers.c
 * csrc/profile/link.c */
/* library: tests/c/fake_cuda.c tests/c/fake_gpu.c tests/c/fake_control.c */
/* threads */
#include "profile/link.h"

#include "device_subject.h"

#define PIECE_BYTES 20000
#define COUNT 3
#define CUDA_LAUNCH_FAILED 719

static void a_link_has_speeds(bool cuda, uint64_t seed, fake_mode mode) {
  subject subject;
  ptn_link_speed speed = {0};
  CHECK_OK(subject_open(&subject, cuda, seed, mode));
  CHECK_OK(ptn_link_measure(subject.device, PIECE_BYTES, COUNT, &speed));
  CHECK(speed.upload_bytes_per_s > 0 && speed.offload_bytes_per_s > 0);
  CHECK(speed.overlap >= 1 && speed.overlap <= 2);
  CHECK(!cuda || fake_calls("cuMemcpyAsync") >= 2 + 2 * COUNT + 2 * COUNT);
  CHECK(ptn_link_measure(subject.device, 0, COUNT, &speed) == PTN_INVALID);
  CHECK(ptn_link_measure(subject.device, PIECE_BYTES, 0, &speed) == PTN_INVALID);
  subject_close(&subject);
}

static void each_call_fails_once(void) {
  static const char *const entries[] = {"cuMemAlloc_v2", "cuStreamCreate",     "cuEventCreate",     "cuEventRecord",
                                        "cuMemcpyAsync", "cuEventSynchronize", "cuEventElapsedTime"};
  for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
    uint64_t failed_count = 0;
    for (uint64_t n = 1;; n++) {
      subject subject;
      ptn_link_speed speed;
      CHECK_OK(subject_open(&subject, true, n, (fake_mode)(n % 3)));
      fake_fail(entries[i], n, CUDA_LAUNCH_FAILED);
      ptn_status status = ptn_link_measure(subject.device, PIECE_BYTES, COUNT, &speed);
      fake_fail(NULL, 0, 0);
      subject_close(&subject);
      if (status == PTN_OK) break;
      CHECK(status == PTN_DEVICE || status == PTN_MEMORY);
      failed_count++;
    }
    CHECK(failed_count > 0);
  }
}

int main(void) {
  for (uint64_t seed = 0; seed < 6; seed++) a_link_has_speeds(seed % 2, seed, (fake_mode)(seed % 3));
  each_call_fails_once();
  fake_reset(0, FAKE_ANY);
  return 0;
}
