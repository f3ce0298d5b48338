/* What the binding's files share: module state, errors, a hyper from a tuple. Stable ABI of CPython 3.11; one type per file. */
#ifndef PTN_PYTHON_BINDING_H
#define PTN_PYTHON_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base/status.h"
#include "optim/optim.h"
#include "runtime/engine.h"

typedef struct ptn_module_state {
  PyObject *region_type, *device_type, *engine_type, *saved_type, *saved_tensors_type, *recomputed_type, *saved_order_type,
      *device_record_type, *machine_bench_type;
} ptn_module_state;

/* How often this process was forked off from another one since the module was loaded: what has threads is of one process, and
 * asking for its id would cost a system call each time. */
extern int ptn_python_forks;

/* Sets the Python exception that the thread's error record describes and returns NULL; needs the GIL. */
PyObject *ptn_python_raise(void);
/* None, or that. */
PyObject *ptn_python_answer(ptn_status status);

extern PyType_Spec ptn_region_spec, ptn_device_spec, ptn_engine_spec, ptn_saved_spec, ptn_saved_tensors_spec, ptn_recomputed_spec,
    ptn_saved_order_spec, ptn_device_record_spec, ptn_machine_bench_spec;
/* A Region over memory that the object then owns a reference to; NULL region gives None. */
PyObject *ptn_python_region(PyObject *region_type, ptn_region *region);

/* (kind, lr, weight_decay, maximize, beta1, beta2, eps, amsgrad, momentum, dampening, nesterov, fused, lr_is_float); 0 with an exception set. */
int ptn_python_hyper(PyObject *tuple, ptn_hyper *out);

/* numbers.c. Converters for PyArg_Parse ("O&") into unsigned int and unsigned long long; what is negative or too large is an
 * OverflowError. */
int ptn_python_u32(PyObject *object, void *out);
int ptn_python_u64(PyObject *object, void *out);
/* Whether the engine has a chunk, a parameter of this number; false with an exception set. */
bool ptn_python_has_chunk(const ptn_engine *engine, uint32_t chunk);
bool ptn_python_has_param(const ptn_engine *engine, uint32_t param);
/* A list of non-negative integers as an array of uint64; NULL with an exception set. Free with PyMem_Free. */
uint64_t *ptn_python_integers(PyObject *list, Py_ssize_t *count);

/* The engine of an Engine; NULL with an exception set where it is none, closed, or of a parent process. The driver stays. */
ptn_engine *ptn_python_engine(PyObject *object);
/* The same, over a device behind what torch has ordered on its present stream. */
ptn_engine *ptn_python_behind_stream(PyObject *object);
/* The same for the driving thread. */
ptn_engine *ptn_python_drive(PyObject *object);
/* Whether the calling thread is the driving one. */
bool ptn_python_drives(PyObject *object);
/* The driving thread comes by between two operations (ptn_engine_share); an Engine that is closed has nothing to share. */
void ptn_python_share(PyObject *engine);
/* Of an Engine that ptn_python_engine gave the engine of: */
ptn_account *ptn_python_account(PyObject *object);      /* of what computes: its budget; borrowed */
ptn_account *ptn_python_host_account(PyObject *object); /* over a device: of ordinary memory beside it; else NULL */
int ptn_python_device_number(PyObject *object);         /* of the GPU; -1: it computes in ordinary memory */
bool ptn_python_is_bf16(PyObject *object);
PyObject *ptn_python_device_record_type(PyObject *object); /* borrowed; NULL with an exception set */

/* The device of a Device, and its number as above, where asked for; NULL with an exception set. */
ptn_device *ptn_python_device(PyObject *object, int *number);

/* Around a call of the engine that gives the GIL up, or during which an owner of a gradient may die, whose end may run anything: closed
 * meanwhile, the engine is destroyed when the last of such calls is over. With the GIL, right after the engine was given. */
void ptn_python_enter(PyObject *object);
void ptn_python_leave(PyObject *object);

/* Functions of the module. */
PyObject *ptn_python_update(PyObject *module, PyObject *arguments, PyObject *keywords);
PyObject *ptn_python_layout(PyObject *module, PyObject *arguments);
PyObject *ptn_python_layout_size(PyObject *module, PyObject *arguments);
PyObject *ptn_python_make_plan(PyObject *module, PyObject *arguments);
PyObject *ptn_python_disk_bench(PyObject *module, PyObject *arguments);
PyObject *ptn_python_trace_events(PyObject *module, PyObject *arguments);
PyObject *ptn_python_trace_grow(PyObject *module, PyObject *object);
PyObject *ptn_python_trace_add(PyObject *module, PyObject *arguments);
PyObject *ptn_python_now_ns(PyObject *module, PyObject *unused);

#define PTN_WITHOUT_GIL(status, call) \
  do {                                \
    Py_BEGIN_ALLOW_THREADS            \
    status = (call);                  \
    Py_END_ALLOW_THREADS              \
  } while (0)

/* The same for a statement with a call of an Engine's engine, which is not closed before it is over. */
#define PTN_IN_ENGINE(object, statement) \
  do {                                   \
    ptn_python_enter(object);            \
    Py_BEGIN_ALLOW_THREADS               \
    statement;                           \
    Py_END_ALLOW_THREADS                 \
    ptn_python_leave(object);            \
  } while (0)

#endif
