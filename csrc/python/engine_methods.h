/* The methods of Engine, of which engine_type.c makes the type: each is METH_NOARGS, METH_O or METH_VARARGS, as its second argument
 * is called. */
#ifndef PTN_PYTHON_ENGINE_METHODS_H
#define PTN_PYTHON_ENGINE_METHODS_H

#include "python/binding.h"

#define PTN_ENGINE_TO_DRIVE                      \
  ptn_engine *engine = ptn_python_drive(object); \
  if (!engine) return NULL
/* Of what changes nothing: any thread may ask, and the one that drives the step stays it. */
#define PTN_ENGINE_TO_ASK                         \
  ptn_engine *engine = ptn_python_engine(object); \
  if (!engine) return NULL

/* About homes (engine_homes.c). */
PyObject *ptn_python_in_memory(PyObject *object, PyObject *arguments);
PyObject *ptn_python_to_memory(PyObject *object, PyObject *arguments);
PyObject *ptn_python_to_disk(PyObject *object, PyObject *arguments);
PyObject *ptn_python_set_slots(PyObject *object, PyObject *arguments);
PyObject *ptn_python_drop_slots(PyObject *object, PyObject *unused);
PyObject *ptn_python_own_slot(PyObject *object, PyObject *arguments);
PyObject *ptn_python_set_ring(PyObject *object, PyObject *arguments);
PyObject *ptn_python_drop_ring(PyObject *object, PyObject *unused);
PyObject *ptn_python_set_pending(PyObject *object, PyObject *arguments);
PyObject *ptn_python_region_of(PyObject *object, PyObject *arguments);
PyObject *ptn_python_transfer(PyObject *object, PyObject *arguments);
PyObject *ptn_python_transfer_part(PyObject *object, PyObject *arguments);
PyObject *ptn_python_begin_fill(PyObject *object, PyObject *arguments);
PyObject *ptn_python_end_fill(PyObject *object, PyObject *arguments);
PyObject *ptn_python_steps(PyObject *object, PyObject *arguments);
PyObject *ptn_python_set_steps(PyObject *object, PyObject *arguments);

/* Of a step (engine_step.c). */
PyObject *ptn_python_set_order(PyObject *object, PyObject *arguments);
PyObject *ptn_python_seek(PyObject *object, PyObject *arguments);
PyObject *ptn_python_demand(PyObject *object, PyObject *arguments);
PyObject *ptn_python_unuse(PyObject *object, PyObject *arguments);
PyObject *ptn_python_unuse_all(PyObject *object, PyObject *unused);
PyObject *ptn_python_set_hyper(PyObject *object, PyObject *arguments);
PyObject *ptn_python_gradient(PyObject *object, PyObject *arguments);
PyObject *ptn_python_spilled(PyObject *object, PyObject *arguments);
PyObject *ptn_python_read_ahead(PyObject *object, PyObject *arguments);
PyObject *ptn_python_yield_states(PyObject *object, PyObject *arguments);
PyObject *ptn_python_flush(PyObject *object, PyObject *unused);
PyObject *ptn_python_update_spilled(PyObject *object, PyObject *arguments);
PyObject *ptn_python_wait(PyObject *object, PyObject *unused);
PyObject *ptn_python_make_step(PyObject *object, PyObject *arguments);
PyObject *ptn_python_commits(PyObject *object, PyObject *unused);
PyObject *ptn_python_drop(PyObject *object, PyObject *unused);
PyObject *ptn_python_has_gradients(PyObject *object, PyObject *unused);

/* About memory and figures (engine_memory.c). */
PyObject *ptn_python_stats(PyObject *object, PyObject *unused);
PyObject *ptn_python_held(PyObject *object, PyObject *unused);
PyObject *ptn_python_mark(PyObject *object, PyObject *unused);
PyObject *ptn_python_mark_yielded(PyObject *object, PyObject *unused);
PyObject *ptn_python_set_goal(PyObject *object, PyObject *number);
PyObject *ptn_python_set_named(PyObject *object, PyObject *number);
PyObject *ptn_python_set_growth(PyObject *object, PyObject *number);
PyObject *ptn_python_set_headroom(PyObject *object, PyObject *arguments);
PyObject *ptn_python_stash_begin(PyObject *object, PyObject *unused);
PyObject *ptn_python_stash_flush(PyObject *object, PyObject *unused);
PyObject *ptn_python_stash_end(PyObject *object, PyObject *unused);
PyObject *ptn_python_stash_go_on(PyObject *object, PyObject *unused);
PyObject *ptn_python_stash_near(PyObject *object, PyObject *number);

/* Over a device (engine_device.c). */
PyObject *ptn_python_to_host(PyObject *object, PyObject *arguments);
PyObject *ptn_python_set_gradient_memory(PyObject *object, PyObject *number);
PyObject *ptn_python_set_staging(PyObject *object, PyObject *arguments);
PyObject *ptn_python_set_stash_memory(PyObject *object, PyObject *number);
PyObject *ptn_python_stash_check(PyObject *object, PyObject *unused);
PyObject *ptn_python_unlocked_reason(PyObject *object, PyObject *unused);
PyObject *ptn_python_base(PyObject *object, PyObject *arguments);
PyObject *ptn_python_state(PyObject *object, PyObject *arguments);
PyObject *ptn_python_put(PyObject *object, PyObject *arguments); /* device_record_type.c */

/* For updates that Python computes (engine_staging.c). */
PyObject *ptn_python_stage(PyObject *object, PyObject *arguments);
PyObject *ptn_python_stage_rest(PyObject *object, PyObject *unused);
PyObject *ptn_python_reserve(PyObject *object, PyObject *number);
PyObject *ptn_python_release(PyObject *object, PyObject *arguments);
PyObject *ptn_python_move(PyObject *object, PyObject *arguments);

#endif
