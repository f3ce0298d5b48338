/* The planner from Python: lists of tuples in, a dict out. What the fields mean stands in csrc/plan/plan.h. */
#include <string.h>

#include "plan/plan.h"
#include "python/binding.h"

PyObject *ptn_python_layout(PyObject *module, PyObject *arguments) {
  (void)module;
  PyObject *list;
  unsigned long long chunk_bytes;
  if (!PyArg_ParseTuple(arguments, "O!K", &PyList_Type, &list, &chunk_bytes)) return NULL;
  Py_ssize_t count = PyList_Size(list);
  ptn_layout_param *params = PyMem_Malloc((size_t)(count + 1) * sizeof *params);
  if (!params) return PyErr_NoMemory();
  PyObject *result = NULL;
  for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
    unsigned long long bytes;
    int block;
    if (PyArg_ParseTuple(PyList_GetItem(list, i), "Ki", &bytes, &block))
      params[i] = (ptn_layout_param){.bytes = bytes, .block = block};
  }
  uint32_t n_chunks = 0;
  if (!PyErr_Occurred()) {
    if (ptn_layout(params, (size_t)count, chunk_bytes, &n_chunks) != PTN_OK) ptn_python_raise();
    else result = PyList_New(count);
  }
  for (Py_ssize_t i = 0; result && i < count; i++) {
    PyObject *item = Py_BuildValue("(IK)", params[i].chunk, (unsigned long long)params[i].offset_bytes);
    if (!item) Py_CLEAR(result);
    else PyList_SetItem(result, i, item);
  }
  PyMem_Free(params);
  return result;
}

/* Everything a request and its result point to, in one allocation each. */
typedef struct plan_arrays {
  ptn_plan_chunk *chunks;
  ptn_phase *phases;
  uint32_t *accesses;
  ptn_mode *given_modes, *modes;
  int32_t *slots;
  uint64_t *slot_bytes;
} plan_arrays;

static void free_arrays(plan_arrays *arrays) {
  PyMem_Free(arrays->chunks);
  PyMem_Free(arrays->phases);
  PyMem_Free(arrays->accesses);
  PyMem_Free(arrays->given_modes);
  PyMem_Free(arrays->modes);
  PyMem_Free(arrays->slots);
  PyMem_Free(arrays->slot_bytes);
}

static int make_arrays(plan_arrays *arrays, size_t chunks, size_t phases, size_t accesses, size_t blocks) {
  arrays->chunks = PyMem_Calloc(chunks + 1, sizeof *arrays->chunks);
  arrays->phases = PyMem_Calloc(phases + 1, sizeof *arrays->phases);
  arrays->accesses = PyMem_Calloc(accesses + 1, sizeof *arrays->accesses);
  arrays->given_modes = PyMem_Calloc(blocks + 1, sizeof *arrays->given_modes);
  arrays->modes = PyMem_Calloc(blocks + 1, sizeof *arrays->modes);
  arrays->slots = PyMem_Calloc(chunks + 1, sizeof *arrays->slots);
  arrays->slot_bytes = PyMem_Calloc(chunks + 1, sizeof *arrays->slot_bytes);
  if (arrays->chunks && arrays->phases && arrays->accesses && arrays->given_modes && arrays->modes && arrays->slots &&
      arrays->slot_bytes)
    return 1;
  PyErr_NoMemory();
  return 0;
}

static int read_lists(PyObject *chunks, PyObject *phases, PyObject *accesses, PyObject *modes, plan_arrays *arrays) {
  for (Py_ssize_t i = 0; i < PyList_Size(chunks); i++) {
    unsigned long long params, grads, states;
    unsigned int phase;
    if (!PyArg_ParseTuple(PyList_GetItem(chunks, i), "KKKI", &params, &grads, &states, &phase)) return 0;
    arrays->chunks[i] =
        (ptn_plan_chunk){.param_bytes = params, .grad_bytes = grads, .state_bytes = states, .complete_phase = phase};
  }
  for (Py_ssize_t i = 0; i < PyList_Size(phases); i++) {
    int block, backward;
    unsigned long long entry[2], peak[2], working = 0;
    if (!PyArg_ParseTuple(PyList_GetItem(phases, i), "ipKKKK|K", &block, &backward, &entry[0], &peak[0], &entry[1], &peak[1],
                          &working))
      return 0;
    arrays->phases[i] = (ptn_phase){.block = block,
                                    .backward = backward != 0,
                                    .keep_entry_bytes = entry[0],
                                    .keep_peak_bytes = peak[0],
                                    .keep_working_bytes = working,
                                    .checkpoint_entry_bytes = entry[1],
                                    .checkpoint_peak_bytes = peak[1]};
  }
  for (Py_ssize_t i = 0; i < PyList_Size(accesses); i++)
    arrays->accesses[i] = (uint32_t)PyLong_AsUnsignedLong(PyList_GetItem(accesses, i));
  for (Py_ssize_t i = 0; modes != Py_None && i < PyList_Size(modes); i++)
    arrays->given_modes[i] = (ptn_mode)PyLong_AsLong(PyList_GetItem(modes, i));
  return !PyErr_Occurred();
}

static PyObject *integers(const void *values, size_t count, size_t width, int is_signed) {
  PyObject *list = PyList_New((Py_ssize_t)count);
  for (size_t i = 0; list && i < count; i++) {
    PyObject *item = width == sizeof(uint64_t) ? PyLong_FromUnsignedLongLong(((const uint64_t *)values)[i])
                     : is_signed               ? PyLong_FromLong(((const int32_t *)values)[i])
                                               : PyLong_FromUnsignedLong(((const uint32_t *)values)[i]);
    if (!item) Py_CLEAR(list);
    else PyList_SetItem(list, (Py_ssize_t)i, item);
  }
  return list;
}

static PyObject *answer_plan(const ptn_plan_request *request, const ptn_plan *plan) {
  PyObject *slots = integers(plan->slot_of_chunk, request->n_chunks, sizeof(int32_t), 1);
  PyObject *bytes = integers(plan->slot_bytes, plan->n_buffer, sizeof(uint64_t), 0);
  PyObject *modes = integers(plan->modes, request->n_blocks, sizeof(ptn_mode), 0);
  if (!slots || !bytes || !modes) {
    Py_XDECREF(slots);
    Py_XDECREF(bytes);
    Py_XDECREF(modes);
    return NULL;
  }
  return Py_BuildValue("{s:I,s:I,s:K,s:I,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:N,s:N,s:N}", "n_persist", plan->n_persist,
                       "n_buffer", plan->n_buffer, "piece_bytes", plan->piece_bytes, "n_pieces", plan->n_pieces,
                       "slot_bytes_total", plan->slot_bytes_total, "ring_bytes", plan->ring_bytes, "static_bytes",
                       plan->static_bytes, "peak_bytes", plan->peak_bytes, "smallest_bytes", plan->smallest_bytes, "stash_bytes",
                       plan->stash_bytes, "rise_bytes", plan->rise_bytes, "headroom_bytes", plan->headroom_bytes, "disk_bytes",
                       plan->disk_bytes, "slot_of_chunk", slots, "slot_bytes", bytes, "modes", modes);
}

/* make_plan(budget, fixed, chunks, phases, accesses, n_together, n_arrays, n_blocks, modes or None, n_persist or -1,
 * grads_outlive_backward) */
PyObject *ptn_python_make_plan(PyObject *module, PyObject *arguments) {
  (void)module;
  unsigned long long budget, fixed;
  PyObject *chunks, *phases, *accesses, *modes;
  unsigned int n_together, n_arrays, n_blocks;
  long long n_persist;
  int outlive;
  if (!PyArg_ParseTuple(arguments, "KKO!O!O!IIIOLp", &budget, &fixed, &PyList_Type, &chunks, &PyList_Type, &phases, &PyList_Type,
                        &accesses, &n_together, &n_arrays, &n_blocks, &modes, &n_persist, &outlive))
    return NULL;
  if (modes != Py_None && (!PyList_Check(modes) || PyList_Size(modes) != (Py_ssize_t)n_blocks))
    return PyErr_Format(PyExc_ValueError, "modes must be None or a list of %u", n_blocks);
  plan_arrays arrays = {0};
  PyObject *result = NULL;
  if (make_arrays(&arrays, (size_t)PyList_Size(chunks), (size_t)PyList_Size(phases), (size_t)PyList_Size(accesses), n_blocks) &&
      read_lists(chunks, phases, accesses, modes, &arrays)) {
    ptn_plan_request request = {.budget_bytes = budget,
                                .fixed_bytes = fixed,
                                .n_chunks = (uint32_t)PyList_Size(chunks),
                                .chunks = arrays.chunks,
                                .n_blocks = n_blocks,
                                .n_phases = (uint32_t)PyList_Size(phases),
                                .phases = arrays.phases,
                                .n_accesses = (uint32_t)PyList_Size(accesses),
                                .accesses = arrays.accesses,
                                .n_together = n_together,
                                .n_arrays = n_arrays,
                                .modes = modes == Py_None ? NULL : arrays.given_modes,
                                .n_persist = n_persist,
                                .grads_outlive_backward = outlive != 0};
    ptn_plan plan = {.slot_of_chunk = arrays.slots, .slot_bytes = arrays.slot_bytes, .modes = arrays.modes};
    result = ptn_plan_make(&request, &plan) == PTN_OK ? answer_plan(&request, &plan) : ptn_python_raise();
  }
  free_arrays(&arrays);
  return result;
}
