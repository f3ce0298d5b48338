/* What the hooks of recomputed blocks (recomputed_type.c) share with those of blocks that swap and of operations (saved_type.c).
 * hooks is a SavedTensors everywhere. */
#ifndef PTN_PYTHON_SAVED_H
#define PTN_PYTHON_SAVED_H

#include "python/binding.h"

/* A SavedOrder (recomputed_type.c). */
PyObject *ptn_recomputed_order(const ptn_module_state *state, PyObject *hooks, PyObject *frame);

/* What saved_parameter says of a tensor that may lie in a parameter on disk, else None; NULL with an exception set. */
PyObject *ptn_saved_parameter(PyObject *hooks, PyObject *tensor);
/* What unpack_parameter gives for that. */
PyObject *ptn_saved_unpack_parameter(PyObject *hooks, PyObject *packed);
/* tensor.detach(), by torch's own method. */
PyObject *ptn_saved_alias(PyObject *hooks, PyObject *tensor);
/* An alias that shares the tensor's version counter and lies over no memory; None of a tensor that has no ordinary memory, or of
 * a class of its own; NULL with an exception set. */
PyObject *ptn_saved_over_nothing(PyObject *hooks, PyObject *tensor);
/* False with an exception set, as for a tensor made in inference mode, which has none. */
bool ptn_saved_version(PyObject *hooks, PyObject *tensor, uint32_t *version);
/* Whether the owner of a counter is at this version; false with an exception set, which says that a tensor of that shape was
 * changed in place. shape: a torch.Size, or a list. */
bool ptn_saved_check_version(PyObject *hooks, PyObject *owner, uint32_t version, PyObject *shape);

#endif
