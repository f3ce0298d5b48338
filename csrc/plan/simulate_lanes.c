/* How what is under way shares the lanes.
 *
 * Problem: a fetch, activations both ways and an update want the same disk, the same link and some of compute's time. Design: a
 * flow uses all its lanes at once, as a pipeline does, at the pace of the slowest. Flows take turns in the order of their names,
 * each as much as it can use of what those before it left: fetches first, for the store serves what is urgent first, piece by
 * piece; then activations that backward waits for, then those that memory waits for, and updates with the rest. So no lane rests
 * while a flow could use it. Both directions of the disk, and of the link, have `overlap` seconds of work in a second between
 * them, each at most one.
 *
 * Compute goes slower by what the flows cost it, and never below a fifth of its speed: it has its own share of processor and
 * memory.
 *
 * Invariants: the busy part of a lane is at most 1, that of two directions together at most their overlap; a rate is finite.
 */
#include "plan/simulate_internal.h"

#define LEAST_NS_PER_BYTE 1e-9 /* faster lanes are as fast as this: rates stay finite */
#define NOTHING_LEFT 1e-9      /* of a lane's time */

void ptn_lanes_read(ptn_lanes *lanes, const ptn_profile *profile) {
  for (int i = 0; i < PTN_N_LANES; i++) {
    const ptn_lane_speed *speed = &profile->lanes[i];
    double idle_bytes_per_s = speed->idle_bytes_per_s > 0 ? speed->idle_bytes_per_s : speed->bytes_per_s;
    lanes->present[i] = speed->bytes_per_s > 0;
    lanes->ns_per_byte[0][i] = lanes->present[i] ? ptn_max_f64(1e9 / speed->bytes_per_s, LEAST_NS_PER_BYTE) : 0;
    lanes->ns_per_byte[1][i] = lanes->present[i] ? ptn_max_f64(1e9 / idle_bytes_per_s, LEAST_NS_PER_BYTE) : 0;
    lanes->drag_ns_per_byte[i] = speed->drag_ns_per_byte;
  }
  lanes->disk_overlap = ptn_min_f64(ptn_max_f64(profile->disk_overlap, 1), 2);
  lanes->link_overlap = ptn_min_f64(ptn_max_f64(profile->link_overlap, 1), 2);
}

void ptn_flow_start(const ptn_lanes *lanes, ptn_flow *flow, const double *unit_bytes, double more_drag_ns) {
  flow->active = true;
  flow->rate = 0;
  flow->drag_ns = more_drag_ns;
  for (int i = 0; i < PTN_N_LANES; i++) {
    flow->unit_bytes[i] = unit_bytes[i];
    flow->drag_ns += unit_bytes[i] * lanes->drag_ns_per_byte[i];
  }
}

/* The ns that one unit takes with what is left of the lanes, hardly any where it moves nothing; 0: a lane that it needs is taken.
 * */
static double pace(const double *needs_ns, const double *left, double disk_left, double link_left) {
  double unit_ns = LEAST_NS_PER_BYTE;
  for (int i = 0; i < PTN_N_LANES; i++) {
    if (needs_ns[i] == 0) continue;
    if (left[i] <= NOTHING_LEFT) return 0;
    unit_ns = ptn_max_f64(unit_ns, left[i] == 1 ? needs_ns[i] : needs_ns[i] / left[i]);
  }
  double disk_ns = needs_ns[PTN_DISK_READ] + needs_ns[PTN_DISK_WRITE], link_ns = needs_ns[PTN_UPLOAD] + needs_ns[PTN_OFFLOAD];
  if ((disk_ns > 0 && disk_left <= NOTHING_LEFT) || (link_ns > 0 && link_left <= NOTHING_LEFT)) return 0;
  if (disk_ns > unit_ns * disk_left) unit_ns = disk_ns / disk_left;
  if (link_ns > unit_ns * link_left) unit_ns = link_ns / link_left;
  return unit_ns;
}

void ptn_lanes_share(ptn_lanes *lanes, ptn_flow *flows, bool compute_runs) {
  double left[PTN_N_LANES], disk_left = lanes->disk_overlap, link_left = lanes->link_overlap, drag = 0;
  const double *ns_per_byte = lanes->ns_per_byte[compute_runs ? 0 : 1];
  for (int i = 0; i < PTN_N_LANES; i++) left[i] = 1;
  for (int f = 0; f < PTN_N_FLOWS; f++) {
    ptn_flow *flow = &flows[f];
    if (!flow->active) continue;
    double needs_ns[PTN_N_LANES];
    for (int i = 0; i < PTN_N_LANES; i++) needs_ns[i] = flow->unit_bytes[i] * ns_per_byte[i];
    double unit_ns = pace(needs_ns, left, disk_left, link_left);
    flow->rate = unit_ns > 0 ? 1 / unit_ns : 0;
    if (flow->rate == 0) continue;
    for (int i = 0; i < PTN_N_LANES; i++) left[i] = ptn_max_f64(left[i] - flow->rate * needs_ns[i], 0);
    disk_left = ptn_max_f64(disk_left - flow->rate * (needs_ns[PTN_DISK_READ] + needs_ns[PTN_DISK_WRITE]), 0);
    link_left = ptn_max_f64(link_left - flow->rate * (needs_ns[PTN_UPLOAD] + needs_ns[PTN_OFFLOAD]), 0);
    drag += flow->rate * flow->drag_ns;
  }
  for (int i = 0; i < PTN_N_LANES; i++) lanes->busy[i] = 1 - left[i];
  lanes->compute_speed = ptn_max_f64(1 - drag, PTN_LEAST_COMPUTE_SPEED);
}
