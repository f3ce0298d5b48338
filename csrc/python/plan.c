/* The planner from Python: lists of tuples in, a dict out. What the fields mean stands in csrc/plan/plan.h. */
#include <string.h>

#include "plan/plan.h"
#include "python/binding.h"

/* Reads (bytes, number of its block) of each parameter; to be freed with PyMem_Free. NULL with an exception. */
static ptn_layout_param *read_params(PyObject *list, Py_ssize_t count) {
  ptn_layout_param *params = PyMem_Calloc((size_t)(count + 1), sizeof *params);
  if (!params) {
    PyErr_NoMemory();
    return NULL;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    unsigned long long bytes;
    int block;
    if (!PyArg_ParseTuple(PyList_GetItem(list, i), "O&i", ptn_python_u64, &bytes, &block)) {
      PyMem_Free(params);
      return NULL;
    }
    params[i] = (ptn_layout_param){.bytes = bytes, .block = block};
  }
  return params;
}

PyObject *ptn_python_layout(PyObject *module, PyObject *arguments) {
  (void)module;
  PyObject *list;
  unsigned long long chunk_bytes;
  if (!PyArg_ParseTuple(arguments, "O!O&", &PyList_Type, &list, ptn_python_u64, &chunk_bytes)) return NULL;
  Py_ssize_t count = PyList_Size(list);
  ptn_layout_param *params = read_params(list, count);
  if (!params) return NULL;
  PyObject *result = NULL;
  uint32_t n_chunks = 0;
  if (ptn_layout(params, (size_t)count, chunk_bytes, &n_chunks) != PTN_OK) ptn_python_raise();
  else result = PyList_New(count);
  for (Py_ssize_t i = 0; result && i < count; i++) {
    PyObject *item = Py_BuildValue("(IK)", params[i].chunk, (unsigned long long)params[i].offset_bytes);
    if (!item) Py_CLEAR(result);
    else PyList_SetItem(result, i, item);
  }
  PyMem_Free(params);
  return result;
}

PyObject *ptn_python_layout_size(PyObject *module, PyObject *arguments) {
  (void)module;
  PyObject *list;
  unsigned long long least_bytes, most_bytes;
  if (!PyArg_ParseTuple(arguments, "O!O&O&", &PyList_Type, &list, ptn_python_u64, &least_bytes, ptn_python_u64, &most_bytes))
    return NULL;
  Py_ssize_t count = PyList_Size(list);
  ptn_layout_param *params = read_params(list, count);
  if (!params) return NULL;
  uint64_t chunk_bytes = 0;
  ptn_status status = ptn_layout_size(params, (size_t)count, least_bytes, most_bytes, &chunk_bytes);
  PyMem_Free(params);
  return status == PTN_OK ? PyLong_FromUnsignedLongLong(chunk_bytes) : ptn_python_raise();
}

/* Everything a request and its result point to, in one allocation each. */
typedef struct plan_arrays {
  ptn_plan_chunk *chunks;
  ptn_phase *phases;
  ptn_phase_times *times;
  uint32_t *accesses, *access_phases;
  ptn_mode *given_modes, *modes;
  int32_t *slots;
  uint64_t *slot_bytes;
} plan_arrays;

static void free_arrays(plan_arrays *arrays) {
  PyMem_Free(arrays->chunks);
  PyMem_Free(arrays->phases);
  PyMem_Free(arrays->times);
  PyMem_Free(arrays->accesses);
  PyMem_Free(arrays->access_phases);
  PyMem_Free(arrays->given_modes);
  PyMem_Free(arrays->modes);
  PyMem_Free(arrays->slots);
  PyMem_Free(arrays->slot_bytes);
}

static int make_arrays(plan_arrays *arrays, size_t chunks, size_t phases, size_t accesses, size_t blocks) {
  arrays->chunks = PyMem_Calloc(chunks + 1, sizeof *arrays->chunks);
  arrays->phases = PyMem_Calloc(phases + 1, sizeof *arrays->phases);
  arrays->times = PyMem_Calloc(phases + 1, sizeof *arrays->times);
  arrays->accesses = PyMem_Calloc(accesses + 1, sizeof *arrays->accesses);
  arrays->access_phases = PyMem_Calloc(accesses + 1, sizeof *arrays->access_phases);
  arrays->given_modes = PyMem_Calloc(blocks + 1, sizeof *arrays->given_modes);
  arrays->modes = PyMem_Calloc(blocks + 1, sizeof *arrays->modes);
  arrays->slots = PyMem_Calloc(chunks + 1, sizeof *arrays->slots);
  arrays->slot_bytes = PyMem_Calloc(chunks + 1, sizeof *arrays->slot_bytes);
  if (arrays->chunks && arrays->phases && arrays->times && arrays->accesses && arrays->access_phases && arrays->given_modes &&
      arrays->modes && arrays->slots && arrays->slot_bytes)
    return 1;
  PyErr_NoMemory();
  return 0;
}

/* These take as many as there was room made for: a number of the user's own class may run code that changes a list. */
static int read_chunks(PyObject *list, Py_ssize_t count, ptn_plan_chunk *chunks) {
  for (Py_ssize_t i = 0; i < count; i++) {
    unsigned long long params, grads, states, less = 0, here = 0, away = 0;
    unsigned int phase;
    if (!PyArg_ParseTuple(PyList_GetItem(list, i), "O&O&O&O&|O&O&O&", ptn_python_u64, &params, ptn_python_u64, &grads,
                          ptn_python_u64, &states, ptn_python_u32, &phase, ptn_python_u64, &less, ptn_python_u64, &here,
                          ptn_python_u64, &away))
      return 0;
    chunks[i] = (ptn_plan_chunk){.param_bytes = params,
                                 .grad_bytes = grads,
                                 .state_bytes = states,
                                 .complete_phase = phase,
                                 .less_bytes = less,
                                 .update_here_bytes = here,
                                 .update_away_bytes = away};
  }
  return 1;
}

static int read_phases(PyObject *list, Py_ssize_t count, ptn_phase *phases) {
  for (Py_ssize_t i = 0; i < count; i++) {
    int block, backward;
    unsigned int own = 0;
    unsigned long long entry[3] = {0}, peak[3] = {0}, after[3] = {0}, working = 0, small = 0;
    if (!PyArg_ParseTuple(PyList_GetItem(list, i), "ipO&O&O&O&|O&O&O&O&O&O&O&O&", &block, &backward, ptn_python_u64, &entry[0],
                          ptn_python_u64, &peak[0], ptn_python_u64, &entry[1], ptn_python_u64, &peak[1], ptn_python_u64, &working,
                          ptn_python_u64, &small, ptn_python_u64, &entry[2], ptn_python_u64, &peak[2], ptn_python_u32, &own,
                          ptn_python_u64, &after[0], ptn_python_u64, &after[1], ptn_python_u64, &after[2]))
      return 0;
    phases[i] = (ptn_phase){.block = block,
                            .backward = backward != 0,
                            .keep_entry_bytes = entry[0],
                            .keep_peak_bytes = peak[0],
                            .keep_working_bytes = working,
                            .small_bytes = small,
                            .checkpoint_entry_bytes = entry[1],
                            .checkpoint_peak_bytes = peak[1],
                            .swap_entry_bytes = entry[2],
                            .swap_peak_bytes = peak[2],
                            .own_accesses = own,
                            .keep_after_bytes = after[0],
                            .checkpoint_after_bytes = after[1],
                            .swap_after_bytes = after[2]};
  }
  return 1;
}

static int read_numbers(PyObject *list, Py_ssize_t count, uint32_t *numbers) {
  for (Py_ssize_t i = 0; i < count; i++) {
    if (!ptn_python_u32(PyList_GetItem(list, i), &numbers[i])) return 0;
  }
  return 1;
}

static int read_modes(PyObject *list, Py_ssize_t count, ptn_mode *modes) {
  for (Py_ssize_t i = 0; i < count; i++) {
    unsigned int mode;
    if (!ptn_python_u32(PyList_GetItem(list, i), &mode)) return 0;
    modes[i] = (ptn_mode)mode;
  }
  return 1;
}

/* (times, lanes, disk_overlap, link_overlap, stash_drag, step_update, step_fixed_ns, access_ns, checkpoint_ns, swap_ns,
 * request_ns or none) */
static int read_profile(PyObject *tuple, size_t n_phases, ptn_phase_times *times, ptn_profile *out) {
  PyObject *phases, *lanes;
  long long fixed_ns, access_ns, checkpoint_ns, swap_ns;
  if (!PyTuple_Check(tuple) ||
      !PyArg_ParseTuple(tuple, "O!O!ddddLLLL|d", &PyList_Type, &phases, &PyList_Type, &lanes, &out->disk_overlap,
                        &out->link_overlap, &out->stash_drag_ns_per_byte, &out->step_update_bytes_per_s, &fixed_ns, &access_ns,
                        &checkpoint_ns, &swap_ns, &out->request_ns)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "profile must be a tuple or None");
    return 0;
  }
  if ((size_t)PyList_Size(phases) != n_phases || PyList_Size(lanes) != PTN_N_LANES) {
    PyErr_Format(PyExc_ValueError, "profile has times of %zd phases and %zd lanes; %zu and %d are needed", PyList_Size(phases),
                 PyList_Size(lanes), n_phases, (int)PTN_N_LANES);
    return 0;
  }
  for (Py_ssize_t i = 0; i < (Py_ssize_t)n_phases; i++) {
    long long compute_ns, recompute_ns;
    if (!PyArg_ParseTuple(PyList_GetItem(phases, i), "LL", &compute_ns, &recompute_ns)) return 0;
    times[i] = (ptn_phase_times){.compute_ns = compute_ns, .recompute_ns = recompute_ns};
  }
  for (int i = 0; i < PTN_N_LANES; i++) {
    ptn_lane_speed *lane = &out->lanes[i];
    if (!PyArg_ParseTuple(PyList_GetItem(lanes, i), "ddd", &lane->bytes_per_s, &lane->idle_bytes_per_s, &lane->drag_ns_per_byte))
      return 0;
  }
  out->n_phases = (uint32_t)n_phases;
  out->phases = times;
  out->step_fixed_ns = fixed_ns;
  out->access_ns = access_ns;
  out->checkpoint_ns = checkpoint_ns;
  out->swap_ns = swap_ns;
  return 1;
}

static PyObject *integers(const void *values, size_t count, size_t width, int is_signed) {
  PyObject *list = PyList_New((Py_ssize_t)count);
  for (size_t i = 0; list && i < count; i++) {
    PyObject *item = width == sizeof(uint64_t) && is_signed ? PyLong_FromLongLong(((const int64_t *)values)[i])
                     : width == sizeof(uint64_t)            ? PyLong_FromUnsignedLongLong(((const uint64_t *)values)[i])
                     : is_signed                            ? PyLong_FromLong(((const int32_t *)values)[i])
                                                            : PyLong_FromUnsignedLong(((const uint32_t *)values)[i]);
    if (!item) Py_CLEAR(list);
    else PyList_SetItem(list, (Py_ssize_t)i, item);
  }
  return list;
}

static int add(PyObject *dict, const char *name, PyObject *value) {
  if (!value) return 0;
  int status = PyDict_SetItemString(dict, name, value);
  Py_DECREF(value);
  return status == 0;
}

static int add_number(PyObject *dict, const char *name, uint64_t value) {
  return add(dict, name, PyLong_FromUnsignedLongLong(value));
}

static PyObject *answer_forecast(const ptn_forecast *forecast) {
  PyObject *dict = PyDict_New();
  if (!dict) return NULL;
  if (add(dict, "step_ns", PyLong_FromLongLong(forecast->step_ns)) &&
      add(dict, "compute_ns", PyLong_FromLongLong(forecast->compute_ns)) &&
      add(dict, "recompute_ns", PyLong_FromLongLong(forecast->recompute_ns)) &&
      add(dict, "fixed_ns", PyLong_FromLongLong(forecast->fixed_ns)) &&
      add(dict, "drag_ns", PyLong_FromLongLong(forecast->drag_ns)) &&
      add(dict, "update_ns", PyLong_FromLongLong(forecast->update_ns)) &&
      add(dict, "wait_ns", integers(forecast->wait_ns, PTN_N_WAITS, sizeof(int64_t), 1)) &&
      add(dict, "busy_ns", integers(forecast->busy_ns, PTN_N_LANES, sizeof(int64_t), 1)) &&
      add(dict, "moved_bytes", integers(forecast->moved_bytes, PTN_N_LANES, sizeof(uint64_t), 0)))
    return dict;
  Py_DECREF(dict);
  return NULL;
}

static PyObject *answer_plan(const ptn_plan_request *request, const ptn_plan *plan) {
  PyObject *dict = PyDict_New();
  if (!dict) return NULL;
  if (add_number(dict, "n_persist", plan->n_persist) && add_number(dict, "n_host", plan->n_host) &&
      add_number(dict, "n_buffer", plan->n_buffer) && add_number(dict, "n_ahead", plan->n_ahead) &&
      add_number(dict, "piece_bytes", plan->piece_bytes) && add_number(dict, "n_pieces", plan->n_pieces) &&
      add_number(dict, "slot_bytes_total", plan->slot_bytes_total) && add_number(dict, "ring_bytes", plan->ring_bytes) &&
      add_number(dict, "static_bytes", plan->static_bytes) && add_number(dict, "peak_bytes", plan->peak_bytes) &&
      add_number(dict, "computed_bytes", plan->computed_bytes) && add_number(dict, "smallest_bytes", plan->smallest_bytes) &&
      add_number(dict, "safest_bytes", plan->safest_bytes) && add_number(dict, "stash_bytes", plan->stash_bytes) &&
      add_number(dict, "rise_bytes", plan->rise_bytes) && add_number(dict, "headroom_bytes", plan->headroom_bytes) &&
      add_number(dict, "recompute_bytes", plan->recompute_bytes) && add_number(dict, "pending_bytes", plan->pending_bytes) &&
      add_number(dict, "disk_bytes", plan->disk_bytes) && add_number(dict, "host_bytes", plan->host_bytes) &&
      add(dict, "slot_of_chunk", integers(plan->slot_of_chunk, request->n_chunks, sizeof(int32_t), 1)) &&
      add(dict, "slot_bytes", integers(plan->slot_bytes, plan->n_buffer, sizeof(uint64_t), 0)) &&
      add(dict, "modes", integers(plan->modes, request->n_blocks, sizeof(ptn_mode), 0)) &&
      add(dict, "forecast", answer_forecast(&plan->forecast)))
    return dict;
  Py_DECREF(dict);
  return NULL;
}

/* make_plan(budget, fixed, chunks, phases, accesses, access_phases, n_together, n_arrays, n_blocks, modes or None,
 * n_persist or -1, n_buffer or 0, n_ahead or 0, grads_outlive_backward, n_passes, host_budget, n_ranks, profile or None, ring_host or none,
 * update or none, widening or none, disk_budget or none) */
PyObject *ptn_python_make_plan(PyObject *module, PyObject *arguments) {
  (void)module;
  unsigned long long budget, fixed, host_budget, ring_host = 0, update = 0, disk_budget = 0;
  PyObject *chunks, *phases, *accesses, *access_phases, *modes, *profile;
  unsigned int n_together, n_arrays, n_blocks, n_passes, n_ranks, widening = 1;
  long long n_persist, n_buffer, n_ahead;
  int outlive;
  if (!PyArg_ParseTuple(arguments, "O&O&O!O!O!O!O&O&O&OLLLpO&O&O&O|O&O&O&O&", ptn_python_u64, &budget, ptn_python_u64, &fixed,
                        &PyList_Type, &chunks, &PyList_Type, &phases, &PyList_Type, &accesses, &PyList_Type, &access_phases,
                        ptn_python_u32, &n_together, ptn_python_u32, &n_arrays, ptn_python_u32, &n_blocks, &modes, &n_persist,
                        &n_buffer, &n_ahead, &outlive, ptn_python_u32, &n_passes, ptn_python_u64, &host_budget, ptn_python_u32,
                        &n_ranks, &profile, ptn_python_u64, &ring_host, ptn_python_u64, &update, ptn_python_u32, &widening,
                        ptn_python_u64, &disk_budget))
    return NULL;
  if (modes != Py_None && (!PyList_Check(modes) || PyList_Size(modes) != (Py_ssize_t)n_blocks))
    return PyErr_Format(PyExc_ValueError, "modes must be None or a list of %u", n_blocks);
  Py_ssize_t n_chunks = PyList_Size(chunks), n_phases = PyList_Size(phases), n_accesses = PyList_Size(accesses);
  bool ordered = PyList_Size(access_phases) > 0;
  if (ordered && PyList_Size(access_phases) != n_accesses)
    return PyErr_Format(PyExc_ValueError, "access_phases must be empty or as long as accesses");
  plan_arrays arrays = {0};
  ptn_profile measured = {0};
  PyObject *result = NULL;
  if (make_arrays(&arrays, (size_t)n_chunks, (size_t)n_phases, (size_t)n_accesses, n_blocks) &&
      read_chunks(chunks, n_chunks, arrays.chunks) && read_phases(phases, n_phases, arrays.phases) &&
      read_numbers(accesses, n_accesses, arrays.accesses) &&
      read_numbers(access_phases, ordered ? n_accesses : 0, arrays.access_phases) &&
      (modes == Py_None || read_modes(modes, (Py_ssize_t)n_blocks, arrays.given_modes)) &&
      (profile == Py_None || read_profile(profile, (size_t)n_phases, arrays.times, &measured))) {
    ptn_plan_request request = {.budget_bytes = budget,
                                .fixed_bytes = fixed,
                                .update_bytes = update,
                                .n_chunks = (uint32_t)n_chunks,
                                .chunks = arrays.chunks,
                                .n_blocks = n_blocks,
                                .n_phases = (uint32_t)n_phases,
                                .phases = arrays.phases,
                                .n_accesses = (uint32_t)n_accesses,
                                .accesses = arrays.accesses,
                                .access_phases = ordered ? arrays.access_phases : NULL,
                                .n_together = n_together,
                                .n_arrays = n_arrays,
                                .widening = widening,
                                .disk_budget_bytes = disk_budget,
                                .modes = modes == Py_None ? NULL : arrays.given_modes,
                                .n_persist = n_persist,
                                .n_buffer = n_buffer,
                                .n_ahead = n_ahead,
                                .grads_outlive_backward = outlive != 0,
                                .n_passes = n_passes,
                                .profile = profile == Py_None ? NULL : &measured,
                                .host_budget_bytes = host_budget,
                                .n_ranks = n_ranks,
                                .ring_host_bytes = ring_host};
    ptn_plan plan = {.slot_of_chunk = arrays.slots, .slot_bytes = arrays.slot_bytes, .modes = arrays.modes};
    ptn_status status;
    PTN_WITHOUT_GIL(status, ptn_plan_make(&request, &plan));
    result = status == PTN_OK ? answer_plan(&request, &plan) : ptn_python_raise();
  }
  free_arrays(&arrays);
  return result;
}
