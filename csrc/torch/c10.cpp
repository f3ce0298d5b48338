/* What only torch's C++ classes offer: its CPU allocator on the arena, storages that refuse to be read, tensors and their
 * version counters (tensor.h). The only C++ of the core; it includes nothing of torch's that includes Python's headers.
 *
 * torch asks for memory on any thread, with the GIL or without, also inside parallel regions whose main thread holds the GIL
 * and waits. So nothing here takes the GIL: a refusal is thrown as one of torch's own exceptions, which carries the error
 * record through autograd and parallel regions, and becomes a Python exception where torch hands it to Python and holds the
 * GIL anyway. See docs/decisions/0002-allocator-errors.md.
 *
 * Invariant: data of 0 bytes is a null pointer, all other data is a block of the arena, whose deleter needs nothing but its
 * address; a tensor may outlive every account.
 */
#include <ATen/core/TensorBase.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <typeinfo>
#include <utility>

extern "C" {
#include "memory/arena.h"
}
#include "torch/allocator.h"
#include "torch/storage.h"
#include "torch/tensor.h"

struct _object; // PyObject, without Python.h

/* As torch/csrc/autograd/python_variable.h declares it, in torch 2.11 to 2.13: Python's object of a tensor. */
_object *THPVariable_Wrap(at::TensorBase &&tensor);

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

extern "C" void ptn_torch_swap_memory(void *one, void *other) {
  auto *first = static_cast<c10::StorageImpl *>(one), *second = static_cast<c10::StorageImpl *>(other);
  c10::DataPtr memory = first->set_data_ptr(c10::DataPtr());
  first->set_data_ptr_noswap(second->set_data_ptr(std::move(memory)));
}

/* A hold is torch's own class, which is a pointer to the counter: the bytes of that are ptn_counter's address, and nothing has to
 * be allocated. */
static_assert(sizeof(c10::VariableVersion) == sizeof(void *) && alignof(c10::VariableVersion) <= alignof(void *));

struct hold {
  alignas(c10::VariableVersion) unsigned char place[sizeof(c10::VariableVersion)];

  // One more, which nothing here gives up.
  explicit hold(const c10::VariableVersion &counter) { new (place) c10::VariableVersion(counter); }
  explicit hold(const ptn_counter *counter) { std::memcpy(place, &counter, sizeof place); }
  c10::VariableVersion &version() { return *std::launder(reinterpret_cast<c10::VariableVersion *>(place)); }
  ptn_counter *bytes() const {
    ptn_counter *counter;
    std::memcpy(&counter, place, sizeof place);
    return counter;
  }
};

using tensor_pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

static const c10::TensorImpl &tensor_at(const void *tensor) { return *static_cast<const c10::TensorImpl *>(tensor); }

/* Of torch's own class and no subclass of that: what is sparse, quantized, or wrapped for a transform has others. */
static bool is_usual(const c10::TensorImpl &tensor) { return typeid(tensor) == typeid(c10::TensorImpl); }

static_assert(static_cast<int>(c10::DeviceType::CPU) == PTN_TORCH_CPU &&
              static_cast<int>(c10::DeviceType::CUDA) == PTN_TORCH_CUDA);
static_assert(static_cast<int>(c10::ScalarType::Float) == PTN_TORCH_FLOAT &&
              static_cast<int>(c10::ScalarType::BFloat16) == PTN_TORCH_BFLOAT16);

extern "C" bool ptn_torch_facts(const void *tensor, ptn_tensor_facts *facts) {
  const c10::TensorImpl &of = tensor_at(tensor);
  if (!is_usual(of) || !of.has_storage() || of.has_symbolic_sizes_strides()) return false;
  try {
    // Where it is about to be changed, so that a copy that was put off is made now.
    c10::StorageImpl *storage = of.unsafe_storage().unsafeGetStorageImpl();
    char *memory = static_cast<char *>(storage->mutable_data());
    const c10::DataPtr &pointer = storage->data_ptr();
    facts->block = pointer.get_deleter() == &ptn_arena_free ? pointer.get_context() : nullptr;
    // Where it has no element its offset may be the end of its memory, where another's begins.
    const auto skipped = of.numel() == 0 ? 0 : static_cast<size_t>(of.storage_offset()) * of.itemsize();
    facts->data = memory ? memory + skipped : nullptr;
    facts->whole = static_cast<size_t>(of.numel()) * of.itemsize() == storage->nbytes();
  } catch (...) {
    return false; // shut
  }
  facts->sizes = of.sizes().data();
  facts->strides = of.strides().data();
  facts->ndim = static_cast<int32_t>(of.dim());
  for (int32_t i = 0; i < facts->ndim; i++) facts->whole &= facts->strides[i] != 0 || facts->sizes[i] <= 1; // expanded
  facts->device_type = static_cast<int32_t>(of.device_type());
  facts->type = static_cast<int32_t>(of.dtype().toScalarType());
  facts->lazy = of.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Negative, c10::DispatchKey::Conjugate}));
  return true;
}

extern "C" bool ptn_torch_is_leaf(const void *tensor) {
  if (!tensor_at(tensor).requires_grad()) return true;
  auto *of = const_cast<c10::TensorImpl *>(&tensor_at(tensor));
  try {
    // Not its is_leaf(), which does not see that the base of a view was changed in place and has a graph now.
    return !at::TensorBase(tensor_pointer::reclaim_copy(of)).grad_fn();
  } catch (...) {
    return false;
  }
}

extern "C" bool ptn_torch_version(const void *tensor, uint32_t *version) {
  const c10::VariableVersion &counter = tensor_at(tensor).version_counter();
  if (counter.enabled()) *version = counter.current_version();
  return counter.enabled();
}

/* Bytes from the first element to behind the last. */
static size_t extent_bytes(c10::IntArrayRef sizes, c10::IntArrayRef strides, size_t element_bytes) {
  int64_t elements = 1;
  for (size_t i = 0; i < sizes.size(); i++) {
    if (sizes[i] == 0) return 0;
    elements += (sizes[i] - 1) * strides[i];
  }
  return static_cast<size_t>(elements) * element_bytes;
}

extern "C" void *ptn_torch_make(const ptn_torch_memory *memory, int32_t type, int32_t ndim, const int64_t *geometry,
                                const ptn_counter *counter) {
  try {
    bool on_cpu = memory->device_type == PTN_TORCH_CPU;
    const c10::Device device(static_cast<c10::DeviceType>(memory->device_type),
                             static_cast<c10::DeviceIndex>(on_cpu ? -1 : memory->device_number));
    c10::DataPtr data(memory->data, memory->context, memory->release, device); // from here on it releases the memory
    const c10::IntArrayRef sizes(geometry, static_cast<size_t>(ndim)), strides(geometry + ndim, static_cast<size_t>(ndim));
    const auto scalar = static_cast<c10::ScalarType>(type);
    const size_t bytes = extent_bytes(sizes, strides, c10::elementSize(scalar));
    c10::Allocator *copies = on_cpu ? c10::GetCPUAllocator() : nullptr; // torch asks it when a copy was put off
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), copies, false);
    const c10::DispatchKeySet keys(on_cpu ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
    tensor_pointer made =
        c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, caffe2::TypeMeta::fromScalarType(scalar));
    made->set_sizes_and_strides(sizes, strides);
    if (counter && !made->is_inference()) made->set_version_counter(hold(counter).version());
    return THPVariable_Wrap(at::TensorBase(std::move(made)));
  } catch (...) {
    return nullptr;
  }
}

extern "C" void *ptn_torch_alias(const void *tensor) {
  const c10::TensorImpl &of = tensor_at(tensor);
  if (!is_usual(of)) return nullptr;
  try {
    tensor_pointer made = of.shallow_copy_and_detach(of.version_counter(), false);
    return THPVariable_Wrap(at::TensorBase(std::move(made)));
  } catch (...) {
    return nullptr;
  }
}

extern "C" ptn_counter *ptn_torch_counter(const void *tensor) {
  const c10::VariableVersion &counter = tensor_at(tensor).version_counter();
  return counter.enabled() ? hold(counter).bytes() : nullptr;
}

extern "C" const ptn_counter *ptn_torch_counter_of(const void *tensor) {
  const ptn_counter *counter;
  std::memcpy(&counter, &tensor_at(tensor).version_counter(), sizeof counter);
  return counter;
}

extern "C" uint32_t ptn_counter_version(const ptn_counter *counter) { return hold(counter).version().current_version(); }

extern "C" void ptn_counter_drop(ptn_counter *counter) {
  if (counter) hold(counter).version().~VariableVersion();
}
