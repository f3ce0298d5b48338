/* torch's CPU allocator on the arena, and the way a refusal travels to Python. Decision 0002 says why it travels so. */
#ifndef PTN_TORCH_ALLOCATOR_H
#define PTN_TORCH_ALLOCATOR_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* From now on torch's CPU tensors lie in the arena, counted in ptn_arena_used(). Tensors made before keep their own
 * deleters. Once for the process; calls after the first do nothing. */
void ptn_torch_install_allocator(void);

/* Set once, by what binds Python, before the first refusal: raises the exception for ptn_last_error() of the calling thread.
 * It is called with the GIL, where the refusal arrives in Python, whichever thread was refused. */
extern void (*ptn_torch_raise)(ptn_status status);

/* For c10.cpp alone, called with the GIL: the class (a borrowed PyObject) that torch is to raise for a refusal. Calling
 * it gives the exception that ptn_torch_raise raises for this error. */
void *ptn_torch_exception_class(const ptn_error *error);

#ifdef __cplusplus
}
#endif

#endif
