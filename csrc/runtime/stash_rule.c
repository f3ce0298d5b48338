/* The rule: which records of a pass are not worth writing.
 *
 * SSDTrain keeps the last layers in memory, from the one on whose activations could not be written and read again before backward
 * asks for them (arXiv 2408.10013, adaptive offloading). Here the same question is asked of each record, with the times that were
 * measured in the pass before: writes go out in order, one after another, at the measured bandwidth; a record whose write would
 * end too late for its read to end before it was asked for stays, and takes no time of the disk. What backward asks for in the
 * middle of a step, at once after it was saved, is kept by the same rule as the last block is.
 *
 * Both only as far as memory goes that the pass before left unused under the goal when backward came, the last records first. Where
 * there is more of it the last records stay in any case: no moment needs that memory more, since they are the first to be gone, and
 * moving bytes takes processor time and bandwidth from compute, however well it is hidden. A quarter of the bytes at most: to keep
 * more is for the plan, which then gives blocks the mode keep.
 */
#include "base/bytes.h"
#include "runtime/stash.h"

#define SPARED_PART 4

void ptn_stash_too_late(const ptn_stash_moment *moments, size_t count, double write_bytes_per_s, double read_bytes_per_s,
                        bool *keep) {
  double idle_ns = (double)INT64_MIN; /* when the disk has written all before */
  for (size_t i = 0; i < count; i++) {
    double put_ns = (double)moments[i].put_ns, get_ns = (double)moments[i].get_ns, bytes = (double)moments[i].bytes;
    double written_ns = (idle_ns > put_ns ? idle_ns : put_ns) + bytes / write_bytes_per_s * 1e9;
    keep[i] = written_ns + bytes / read_bytes_per_s * 1e9 > get_ns;
    if (!keep[i]) idle_ns = written_ns;
  }
}

void ptn_stash_rule(const ptn_stash_moment *moments, size_t count, double write_bytes_per_s, double read_bytes_per_s,
                    uint64_t spare_bytes, bool *keep) {
  uint64_t total_bytes = 0, kept_bytes = 0;
  for (size_t i = 0; i < count; i++) total_bytes += moments[i].bytes;
  ptn_stash_too_late(moments, count, write_bytes_per_s, read_bytes_per_s, keep);
  bool last = true; /* none behind it went */
  for (size_t i = count; i-- > 0;) {
    last &= kept_bytes + moments[i].bytes <= total_bytes / SPARED_PART;
    keep[i] = (keep[i] || last) && kept_bytes + moments[i].bytes <= spare_bytes;
    if (keep[i]) kept_bytes += moments[i].bytes;
    else last = false;
  }
}
