/* What the hooks of recomputed blocks (recomputed_type.c) share with those of blocks that swap and of operations (saved_type.c).
 * hooks is a SavedTensors everywhere. */
#ifndef PTN_PYTHON_SAVED_H
#define PTN_PYTHON_SAVED_H

#include "python/binding.h"
#include "torch/tensor.h"

/* A SavedOrder (recomputed_type.c). */
PyObject *ptn_recomputed_order(const ptn_module_state *state, PyObject *hooks, PyObject *frame);

/* What saved_parameter says of a tensor that may lie in a parameter on disk, else None; NULL with an exception set. */
PyObject *ptn_saved_parameter(PyObject *hooks, PyObject *tensor);
/* What unpack_parameter gives for that. */
PyObject *ptn_saved_unpack_parameter(PyObject *hooks, PyObject *packed);
/* tensor.detach(), by torch's own method. */
PyObject *ptn_saved_alias(PyObject *hooks, PyObject *tensor);
/* False with an exception set, as for a tensor made in inference mode, which has none. */
bool ptn_saved_version(PyObject *hooks, PyObject *tensor, uint32_t *version);
/* The tensor's version counter, to be given up by ptn_counter_drop; NULL with an exception set, as above. */
ptn_counter *ptn_saved_counter(PyObject *hooks, PyObject *tensor);
/* Whether what was saved at `version` is at it still; false with an exception set, which says that a tensor of that shape was changed
 * in place. shape: a torch.Size, or a list. */
bool ptn_saved_check_version(uint32_t now, uint32_t version, PyObject *shape);

#endif
