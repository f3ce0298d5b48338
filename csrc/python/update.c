/* The update kernels by themselves: what tests and benchmarks call. */
#include <string.h>

#include "python/binding.h"

static const char *const KINDS[] = {"adam", "adamw", "sgd"};

int ptn_python_hyper(PyObject *tuple, ptn_hyper *out) {
  int kind, maximize, amsgrad, nesterov, fused, lr_is_float;
  memset(out, 0, sizeof *out);
  if (!PyArg_ParseTuple(tuple, "iddpdddpddppp", &kind, &out->lr, &out->weight_decay, &maximize, &out->beta1, &out->beta2,
                        &out->eps, &amsgrad, &out->momentum, &out->dampening, &nesterov, &fused, &lr_is_float))
    return 0;
  out->kind = (ptn_optimizer_kind)kind;
  out->maximize = maximize != 0;
  out->amsgrad = amsgrad != 0;
  out->nesterov = nesterov != 0;
  out->fused = fused != 0;
  out->lr_is_float = lr_is_float != 0;
  return 1;
}

static double number_of(PyObject *dict, const char *name) {
  PyObject *value = PyDict_GetItemString(dict, name); /* borrowed */
  return value ? PyFloat_AsDouble(value) : 0.0;
}

static int read_hyper(const char *kind, PyObject *dict, ptn_hyper *out) {
  memset(out, 0, sizeof *out);
  int found = 0;
  for (int i = 0; i < 3; i++)
    if (strcmp(kind, KINDS[i]) == 0) {
      out->kind = (ptn_optimizer_kind)i;
      found = 1;
    }
  if (!found) {
    PyErr_Format(PyExc_ValueError, "kind is %s; adam, adamw and sgd are known", kind);
    return 0;
  }
  out->lr = number_of(dict, "lr");
  out->weight_decay = number_of(dict, "weight_decay");
  out->maximize = number_of(dict, "maximize") != 0;
  out->beta1 = number_of(dict, "beta1");
  out->beta2 = number_of(dict, "beta2");
  out->eps = number_of(dict, "eps");
  out->amsgrad = number_of(dict, "amsgrad") != 0;
  out->momentum = number_of(dict, "momentum");
  out->dampening = number_of(dict, "dampening");
  out->nesterov = number_of(dict, "nesterov") != 0;
  out->fused = number_of(dict, "fused") != 0;
  out->lr_is_float = number_of(dict, "lr_is_float") != 0;
  return !PyErr_Occurred();
}

static ptn_update_kernel kernel_named(ptn_optimizer_kind kind, const char *name) {
  for (ptn_simd simd = PTN_SIMD_PLAIN; simd < PTN_SIMD_COUNT; simd++)
    if (strcmp(name, ptn_simd_name(simd)) == 0) return ptn_update_kernel_for(kind, simd);
  return NULL;
}

static ptn_bf16_kernel bf16_kernel_named(ptn_optimizer_kind kind, const char *name) {
  for (ptn_simd simd = PTN_SIMD_PLAIN; simd < PTN_SIMD_COUNT; simd++)
    if (strcmp(name, ptn_simd_name(simd)) == 0) return ptn_bf16_kernel_for(kind, simd);
  return NULL;
}

/* Parameter and gradient are bf16, the master and the states fp32; sizes are checked by the caller. */
static PyObject *run_bf16(const ptn_update *update, ptn_bf16 *param, float *master, float *const arrays[], const ptn_bf16 *grad,
                          size_t count, const char *simd) {
  bool best = strcmp(simd, "auto") == 0;
  ptn_bf16_kernel kernel = best ? NULL : bf16_kernel_named(update->hyper.kind, simd);
  if (!best && !kernel) return PyErr_Format(PyExc_ValueError, "simd is %s; this CPU or this build lacks it", simd);
  Py_BEGIN_ALLOW_THREADS
  if (best) ptn_update_run_bf16(false, update, param, master, arrays, grad, ptn_span_whole(count));
  else kernel(update, param, master, arrays, grad, ptn_span_whole(count));
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

/* Runs over buffers of equal counts; checks that they are. master: of bf16 parameters; its buf is NULL where all is fp32. */
static PyObject *run(const ptn_hyper *hyper, unsigned long long step, double grad_scale, const Py_buffer *param,
                     Py_buffer *states, Py_ssize_t n_states, const Py_buffer *grad, const Py_buffer *master, const char *simd) {
  Py_ssize_t wide = master->buf ? 2 * param->len : param->len; /* bytes of an fp32 array */
  float *arrays[PTN_STATE_MAX] = {0};
  if (n_states != ptn_state_count(hyper) || grad->len != param->len || wide % (Py_ssize_t)sizeof(float) != 0 ||
      (master->buf && master->len != wide))
    return PyErr_Format(PyExc_ValueError, "%zd state arrays for an optimizer with %d, or buffers of unequal size", n_states,
                        ptn_state_count(hyper));
  for (Py_ssize_t i = 0; i < n_states; i++) {
    if (states[i].len != wide)
      return PyErr_Format(PyExc_ValueError, "state array %zd has %zd bytes, the parameter's would have %zd", i, states[i].len,
                          wide);
    arrays[i] = states[i].buf;
  }
  ptn_update update;
  if (ptn_update_prepare(&update, hyper, step, (float)grad_scale) != PTN_OK) return ptn_python_raise();
  ptn_span span = ptn_span_whole((size_t)wide / sizeof(float));
  if (master->buf) return run_bf16(&update, param->buf, master->buf, arrays, grad->buf, span.total, simd);
  if (strcmp(simd, "auto") == 0) {
    Py_BEGIN_ALLOW_THREADS
    ptn_update_run(false, &update, param->buf, arrays, grad->buf, span);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
  }
  ptn_update_kernel kernel = kernel_named(hyper->kind, simd);
  if (!kernel) return PyErr_Format(PyExc_ValueError, "simd is %s; this CPU or this build lacks it", simd);
  Py_BEGIN_ALLOW_THREADS
  kernel(&update, param->buf, arrays, grad->buf, span);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject *ptn_python_update(PyObject *module, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"kind", "hyper", "step", "grad_scale", "param", "state", "grad", "simd", "master", NULL};
  (void)module;
  const char *kind, *simd = "auto";
  PyObject *dict, *list;
  unsigned long long step;
  double grad_scale;
  Py_buffer param, grad, master = {0}, states[PTN_STATE_MAX];
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "sO!Kdw*O!y*|sw*", names, &kind, &PyDict_Type, &dict, &step, &grad_scale,
                                   &param, &PyList_Type, &list, &grad, &simd, &master))
    return NULL;
  PyObject *result = NULL;
  Py_ssize_t held = 0, n_states = PyList_Size(list);
  ptn_hyper hyper;
  if (n_states > PTN_STATE_MAX) PyErr_Format(PyExc_ValueError, "%zd state arrays, at most %d", n_states, PTN_STATE_MAX);
  while (!PyErr_Occurred() && held < n_states &&
         PyObject_GetBuffer(PyList_GetItem(list, held), &states[held], PyBUF_WRITABLE) == 0)
    held++;
  if (!PyErr_Occurred() && read_hyper(kind, dict, &hyper))
    result = run(&hyper, step, grad_scale, &param, states, n_states, &grad, &master, simd);
  for (Py_ssize_t i = 0; i < held; i++) PyBuffer_Release(&states[i]);
  PyBuffer_Release(&param);
  PyBuffer_Release(&grad);
  if (master.obj) PyBuffer_Release(&master);
  return result;
}
