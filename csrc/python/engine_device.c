/* Engine's methods over a device: homes on the host, what gradients and loads pass through, and tensors over the device's memory.
 * What gives the memory of such a tensor back is a C function that needs neither Python nor the engine. */
#include "python/engine_methods.h"
#include "torch/tensor.h"

PyObject *ptn_python_to_host(PyObject *object, PyObject *arguments) {
  ptn_engine *engine = ptn_python_drive(object);
  unsigned int chunk;
  int with_shadow;
  if (!engine || !PyArg_ParseTuple(arguments, "O&p", ptn_python_u32, &chunk, &with_shadow) ||
      !ptn_python_has_chunk(engine, chunk))
    return NULL;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_engine_to_host(engine, chunk, with_shadow != 0));
  return ptn_python_answer(status);
}

static PyObject *set_memory(PyObject *object, PyObject *number, ptn_status (*set)(ptn_engine *engine, uint64_t bytes)) {
  ptn_engine *engine = ptn_python_drive(object);
  unsigned long long bytes = engine ? PyLong_AsUnsignedLongLong(number) : 0;
  if (PyErr_Occurred()) return NULL;
  ptn_status status;
  PTN_IN_ENGINE(object, status = set(engine, bytes));
  return ptn_python_answer(status);
}

PyObject *ptn_python_set_gradient_memory(PyObject *object, PyObject *number) {
  return set_memory(object, number, ptn_engine_set_gradient_memory);
}

PyObject *ptn_python_set_staging(PyObject *object, PyObject *arguments) {
  ptn_engine *engine = ptn_python_drive(object);
  unsigned long long piece_bytes;
  unsigned int n_pieces;
  if (!engine || !PyArg_ParseTuple(arguments, "O&O&", ptn_python_u64, &piece_bytes, ptn_python_u32, &n_pieces)) return NULL;
  ptn_status status;
  PTN_IN_ENGINE(object, status = ptn_engine_set_staging(engine, piece_bytes, n_pieces));
  return ptn_python_answer(status);
}

PyObject *ptn_python_set_stash_memory(PyObject *object, PyObject *number) {
  return set_memory(object, number, ptn_engine_set_stash_memory);
}

PyObject *ptn_python_stash_check(PyObject *object, PyObject *unused) {
  (void)unused;
  ptn_engine *engine = ptn_python_engine(object);
  if (!engine) return NULL;
  return ptn_python_answer(ptn_engine_over_device(engine) ? ptn_device_stash_check(ptn_engine_device_stash(engine)) : PTN_OK);
}

PyObject *ptn_python_unlocked_reason(PyObject *object, PyObject *unused) {
  (void)unused;
  ptn_engine *engine = ptn_python_engine(object);
  return engine ? PyUnicode_FromString(ptn_engine_unlocked_reason(engine)) : NULL;
}

/* ---- tensors ---- */

static void release_region(void *region) { ptn_region_release(region); } /* NULL: what is borrowed */

/* A flat tensor of count elements of so many bits. region: what it holds, NULL: it is borrowed. */
static PyObject *make_tensor(PyObject *object, void *address, ptn_region *region, int bits, uint64_t count) {
  int number = ptn_python_device_number(object);
  const ptn_torch_memory memory = {.data = address,
                                   .context = region ? ptn_region_acquire(region) : NULL,
                                   .release = release_region,
                                   .device_type = number < 0 ? PTN_TORCH_CPU : PTN_TORCH_CUDA,
                                   .device_number = number};
  const int64_t geometry[] = {(int64_t)count, 1};
  PyObject *tensor = ptn_torch_make(&memory, bits == 16 ? PTN_TORCH_BFLOAT16 : PTN_TORCH_FLOAT, 1, geometry, NULL);
  return tensor || PyErr_Occurred() ? tensor : PyErr_NoMemory();
}

PyObject *ptn_python_base(PyObject *object, PyObject *arguments) {
  ptn_engine *engine = ptn_python_drive(object);
  unsigned int chunk;
  if (!engine || !PyArg_ParseTuple(arguments, "O&", ptn_python_u32, &chunk) || !ptn_python_has_chunk(engine, chunk)) return NULL;
  ptn_region *region = ptn_engine_region(engine, chunk);
  if (!region) Py_RETURN_NONE;
  int bits = ptn_python_is_bf16(object) ? 16 : 32;
  return make_tensor(object, region->memory, region, bits, region->bytes * 8 / (unsigned)bits);
}

PyObject *ptn_python_state(PyObject *object, PyObject *arguments) {
  ptn_engine *engine = ptn_python_drive(object);
  unsigned int chunk, array;
  if (!engine || !PyArg_ParseTuple(arguments, "O&O&", ptn_python_u32, &chunk, ptn_python_u32, &array) ||
      !ptn_python_has_chunk(engine, chunk))
    return NULL;
  void *memory = ptn_engine_state(engine, chunk, array);
  if (!memory) Py_RETURN_NONE;
  uint64_t element_bytes = ptn_python_is_bf16(object) ? 2 : 4;
  return make_tensor(object, memory, NULL, 32, ptn_engine_region(engine, chunk)->bytes / element_bytes);
}
