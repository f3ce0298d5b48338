/* What only torch's C++ classes offer: its CPU allocator on the arena, storages that refuse to be read, version counters of
 * tensors. The only C++ of the core, against c10's headers alone.
 *
 * torch asks for memory on any thread, with the GIL or without, also inside parallel regions whose main thread holds the GIL
 * and waits. So nothing here takes the GIL: a refusal is thrown as one of torch's own exceptions, which carries the error
 * record through autograd and parallel regions, and becomes a Python exception where torch hands it to Python and holds the
 * GIL anyway. See docs/decisions/0002-allocator-errors.md.
 *
 * Invariant: data of 0 bytes is a null pointer, all other data is a block of the arena, whose deleter needs nothing but its
 * address; a tensor may outlive every account.
 */
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <exception>
#include <new>
#include <string>
#include <utility>

extern "C" {
#include "memory/arena.h"
}
#include "torch/allocator.h"
#include "torch/storage.h"
#include "torch/tensor.h"

struct _object; // PyObject, without Python.h

namespace torch {

/* As torch/csrc/Exceptions.h declares it, in torch 2.11 to 2.13: its base, then its virtual functions, then its data. That
 * header would bring pybind11 and with it symbols outside of Python's stable ABI. torch catches this class by its name, and
 * raises python_type() with what(). */
struct PyTorchError : public std::exception {
  explicit PyTorchError(std::string message) : msg(std::move(message)) {}
  virtual _object *python_type() = 0;
  const char *what() const noexcept override { return msg.c_str(); }
  std::string msg;
};

} // namespace torch

namespace {

struct refusal final : torch::PyTorchError {
  explicit refusal(const ptn_error &error) : torch::PyTorchError(error.message), record(error) {}
  _object *python_type() override { return static_cast<_object *>(ptn_torch_exception_class(&record)); }
  ptn_error record;
};

struct arena_allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &ptn_arena_free, cpu};
    void *block = nullptr;
    if (ptn_arena_alloc(ptn_arena_used(), bytes, &block) != PTN_OK) throw refusal(*ptn_last_error());
    return {block, block, &ptn_arena_free, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &ptn_arena_free; }
  void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

} // namespace

extern "C" void ptn_torch_install_allocator(void) {
  static arena_allocator *const allocator = [] {
    auto *made = new arena_allocator; // never deleted: tensors may be freed while the process ends
    c10::SetCPUAllocator(made, 255);
    return made;
  }();
  (void)allocator;
}

/* torch 2.11 could not open it again. */
template <typename storage>
static void open_or_shut(storage *place, bool open) {
  if constexpr (requires { place->clear_data_ptr_access_error_msg_(); }) {
    if (open) place->clear_data_ptr_access_error_msg_();
    else place->release_data_and_set_meta_custom_data_ptr_error_msg_(PTN_TORCH_SHUT);
  }
}

extern "C" void ptn_torch_open_storage(void *storage, bool open) { open_or_shut(static_cast<c10::StorageImpl *>(storage), open); }

struct ptn_counter {
  c10::VariableVersion of;
};

static const c10::TensorImpl &tensor_at(const void *tensor) { return *static_cast<const c10::TensorImpl *>(tensor); }

extern "C" bool ptn_torch_version(const void *tensor, uint32_t *version) {
  const c10::VariableVersion &counter = tensor_at(tensor).version_counter();
  if (counter.enabled()) *version = counter.current_version();
  return counter.enabled();
}

extern "C" bool ptn_torch_is_lazy(const void *tensor) {
  return tensor_at(tensor).key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Negative, c10::DispatchKey::Conjugate}));
}

extern "C" ptn_counter *ptn_torch_counter(const void *tensor) {
  const c10::VariableVersion &counter = tensor_at(tensor).version_counter();
  return counter.enabled() ? new (std::nothrow) ptn_counter{counter} : nullptr;
}

extern "C" void ptn_torch_count_by(void *tensor, const ptn_counter *counter) {
  auto *of = static_cast<c10::TensorImpl *>(tensor);
  if (!of->is_inference()) of->set_version_counter(counter->of);
}

extern "C" uint32_t ptn_counter_version(const ptn_counter *counter) { return counter->of.current_version(); }

extern "C" void ptn_counter_drop(ptn_counter *counter) { delete counter; }
