#include "bindings/tensor_gate.h"

#include <ATen/TracerMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/DynamicTypes.h>

#include <sstream>

#include "bindings/unlocked.h"

namespace moe_a2a::bindings {
namespace {

using at::DispatchKey;
using c10::impl::TorchDispatchModeKey;
using c10::impl::TorchDispatchModeTLS;

// An argument's name. A string is built only for errors, since every call passes here.
struct Name {
  const char* text;
};
std::string operator+(const Name& name, const char* behind) { return std::string(name.text) + behind; }
std::string operator+(const std::string& before, const Name& name) { return before + name.text; }
std::string operator+(const char* before, const Name& name) { return std::string(before) + name.text; }

std::string type_name(const at::Tensor& tensor) {
  py::gil_scoped_acquire locked;  // a call may allocate its result without it
  return py::str(py::type::handle_of(py::cast(tensor)).attr("__name__")).cast<std::string>();
}

// Wrappers that only Python or a PyTorch transform can look into.
bool is_wrapper(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->is_python_dispatch() || impl->key_set().has_any(c10::DispatchKeySet({
                                           DispatchKey::FuncTorchBatched,
                                           DispatchKey::FuncTorchGradWrapper,
                                           DispatchKey::Batched,
                                           DispatchKey::Functionalize,
                                       }));
}

void check_is_tensor_of_memory(const Place& place, const at::Tensor& tensor, const Name& name) {
  if (is_wrapper(tensor)) {
    raise_type(
        place.rank, name + " is a " + type_name(tensor) + ", which wraps memory or stands for it",
        "pass the plain tensor (to_local() of a DTensor), and call outside of torch.compile, torch.export, torch.func "
        "and FakeTensorMode");
  }
  if (tensor.is_nested()) {
    raise_type(place.rank, name + " is a nested tensor", "pass " + name + ".to_padded_tensor(0), or its rows in one");
  }
  if (tensor.layout() != at::kStrided) {
    std::ostringstream layout;
    layout << tensor.layout();
    raise_type(place.rank, name + " has layout " + layout.str(), "pass " + name + ".to_dense()");
  }
}

// Bytes from the start of the first element to the end of the last.
uint64_t num_bytes_reached(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return static_cast<uint64_t>(last + 1) * tensor.element_size();
}

// Resizing a storage does not update the sizes of its tensors.
void check_storage(const Place& place, const at::Tensor& tensor, const Name& name) {
  if (!tensor.has_storage()) {
    raise_type(place.rank, name + " is a " + type_name(tensor) + " without storage", "pass a plain torch.Tensor");
  }
  if (tensor.numel() == 0) return;
  const uint64_t needed = tensor.storage_offset() * tensor.element_size() + num_bytes_reached(tensor);
  const c10::Storage& storage = tensor.storage();
  if (storage.nbytes() >= needed && storage.data() != nullptr) return;
  raise_value(place.rank,
              name + " has a storage of " + std::to_string(storage.nbytes()) + " bytes and sizes that reach " +
                  std::to_string(needed) + ": it was freed or resized",
              "pass a tensor that still has its memory");
}

// A tracer records calls of PyTorch's operators only: a result of ours would become a constant of its graph.
void check_is_not_traced(const Place& place, const Name& name) {
  const bool by_jit = at::tracer::impl::is_dispatch_enabled();
  if (by_jit || TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value()) {
    raise_value(
        place.rank,
        name + " is traced by " + (by_jit ? "torch.jit.trace" : "make_fx()") + ", which would not record this call",
        "use torch.compile or torch.export");
  }
}

void check_device(const Place& place, const at::Tensor& tensor, const Name& name) {
  const bool same = place.device.is_cpu() ? tensor.device().is_cpu() : tensor.device() == place.device;
  if (same) return;
  raise_value(place.rank, name + " is on " + tensor.device().str() + ", " + place.owner + " on " + place.device.str(),
              "pass " + name + ".to(\"" + place.device.str() + "\")");
}

void check_has_values(const Place& place, const at::Tensor& tensor, const Name& name) {
  if (tensor.is_neg()) {
    raise_value(place.rank, name + " is a negative view: its memory holds the values with the opposite sign",
                "pass " + name + ".resolve_neg()");
  }
  if (tensor.is_conj()) {
    raise_value(place.rank, name + " is a conjugate view", "pass " + name + ".resolve_conj()");
  }
  if (tensor._is_zerotensor()) {
    raise_value(place.rank, name + " is a zero tensor without memory", "pass " + name + ".clone()");
  }
}

}  // namespace

std::string on_rank(int rank) { return rank == kNoRank ? "" : " on rank " + std::to_string(rank); }

void raise_value(int rank, const std::string& what, const std::string& remedy) {
  throw py::value_error(what + on_rank(rank) + "; " + remedy);
}
void raise_type(int rank, const std::string& what, const std::string& remedy) {
  throw py::type_error(what + on_rank(rank) + "; " + remedy);
}

void check_plain(const Place& place, const at::Tensor& tensor, const char* name) {
  if (!tensor.defined()) raise_type(place.rank, std::string(name) + " is undefined", "pass a torch.Tensor");
  check_is_not_traced(place, {name});
  check_is_tensor_of_memory(place, tensor, {name});
  check_device(place, tensor, {name});
  check_has_values(place, tensor, {name});
  check_storage(place, tensor, {name});
}

void check_dtype(int rank, const at::Tensor& tensor, const char* name, at::ScalarType expected, const char* why) {
  if (tensor.scalar_type() == expected) return;
  raise_type(
      rank, std::string(name) + " has dtype " + text_of(tensor.scalar_type()) + ", expected " + text_of(expected) + why,
      std::string("pass ") + name + ".to(" + text_of(expected) + ")");
}

void check_contiguous(int rank, const at::Tensor& tensor, const char* name) {
  if (tensor.is_contiguous()) return;
  raise_value(rank, std::string(name) + " is not contiguous (strides " + text_of(tensor.strides()) + ")",
              std::string("pass ") + name + ".contiguous()");
}

void check_no_grad(int rank, const at::Tensor& tensor, const char* name, const char* trained_by) {
  if (tensor._fw_grad(/*level=*/0).defined()) {
    raise_value(rank, std::string(name) + " has a tangent (forward-mode AD), which this call would not propagate",
                std::string("pass torch.autograd.forward_ad.unpack_dual(") + name + ").primal");
  }
  if (!at::GradMode::is_enabled() || !tensor.requires_grad()) return;
  const std::string training = trained_by == nullptr ? "" : std::string("train with ") + trained_by + ", ";
  raise_value(rank, std::string(name) + " requires grad, which this call would not record",
              training + "call under torch.no_grad(), or pass " + name + ".detach()");
}

std::string text_of(at::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  return text + "]";
}

std::string text_of(at::ScalarType type) { return std::string("torch.") + torch::getTHPDtype(type)->name; }

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* begin_a = static_cast<const std::byte*>(a.const_data_ptr());
  const auto* begin_b = static_cast<const std::byte*>(b.const_data_ptr());
  return begin_a < begin_b + num_bytes_reached(b) && begin_b < begin_a + num_bytes_reached(a);
}

void count_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

at::Tensor make_tensor(const Place& place, at::IntArrayRef shape, at::ScalarType type) {
  const at::Tensor tensor = [&] {
    const Unlocked unlocked;  // PyTorch may have to ask the device for memory
    return at::empty(shape, at::TensorOptions().dtype(type).device(place.device));
  }();
  check_plain(place, tensor, "the result that PyTorch allocates");
  return tensor;
}

}  // namespace moe_a2a::bindings
