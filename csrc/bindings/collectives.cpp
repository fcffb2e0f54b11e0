#include "bindings/collectives.h"

#include "bindings/clients.h"
#include "bindings/tensor_gate.h"
#include "collectives/collectives.h"

namespace moe_a2a::bindings {
namespace {

// What Python holds: the host object and its device.
class Core {
 public:
  Core(std::shared_ptr<Communicator> comm, bool owns_comm, at::Device device)
      : device_(device), owns_comm_(owns_comm), comm_(comm), collectives_(std::move(comm)) {}

  std::vector<Client*> clients() {
    if (owns_comm_) return {&collectives_, comm_.get()};
    return {&collectives_};
  }

  at::Tensor all_reduce(const at::Tensor& x, const std::optional<at::Tensor>& out) {
    collectives_.require_open();
    const Place place{comm_->member().rank, device_};
    check_dense(place, x, "x");
    if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kBFloat16) {
      raise_type(place.rank, std::string("x has dtype ") + c10::toString(x.scalar_type()),
                 "expected float32 or bfloat16; pass x.to(torch.float32)");
    }
    const DType dtype = x.scalar_type() == at::kFloat ? DType::kFloat32 : DType::kBfloat16;
    const int64_t nbytes = x.numel() * x.element_size(), limit = Collectives::max_nbytes();
    if (nbytes > limit) {
      raise_value(place.rank, "x has " + std::to_string(nbytes) + " bytes > " + std::to_string(limit),
                  "pass it in slices");
    }
    if (out) check_out(place, *out, x);
    const at::Tensor result = out ? *out : make_tensor(place, x.sizes(), x.scalar_type());
    void* stream = current_stream(device_);
    py::gil_scoped_release unlocked;
    collectives_.all_reduce(static_cast<const std::byte*>(x.const_data_ptr()),
                            static_cast<std::byte*>(result.mutable_data_ptr()), x.numel(), dtype, stream);
    return result;
  }

  void check() {
    py::gil_scoped_release unlocked;
    collectives_.check();
  }
  void close() {
    py::gil_scoped_release unlocked;
    collectives_.close();
    if (owns_comm_) comm_->close();
  }
  bool is_closed() const { return collectives_.is_closed(); }

 private:
  static void check_dense(const Place& place, const at::Tensor& tensor, const char* name) {
    check_plain(place, tensor, name);
    if (!tensor.is_contiguous()) {
      raise_value(place.rank, std::string(name) + " is not contiguous", std::string("pass ") + name + ".contiguous()");
    }
  }
  static void check_out(const Place& place, const at::Tensor& out, const at::Tensor& x) {
    check_dense(place, out, "out");
    if (out.sizes() != x.sizes() || out.scalar_type() != x.scalar_type()) {
      raise_value(place.rank, "out is not of the shape and dtype of x", "pass torch.empty_like(x), or x itself");
    }
    if (overlap(out, x) && out.const_data_ptr() != x.const_data_ptr()) {
      raise_value(place.rank, "out overlaps x", "pass x itself, or memory apart from it");
    }
  }

  at::Device device_;
  bool owns_comm_;
  std::shared_ptr<Communicator> comm_;
  Collectives collectives_;
};

}  // namespace

void bind_collectives(py::module_& m) {
  py::class_<Core>(m, "Collectives")
      .def(py::init<std::shared_ptr<Communicator>, bool, at::Device>())
      .def("comm_handle", [](Core& core) { return handles_of(core.clients()); })
      .def("connect", [](Core& core, const std::vector<std::string>& handles) { connect(core.clients(), handles); })
      .def("disconnect",
           [](Core& core) {
             py::gil_scoped_release unlocked;
             for (Client* client : core.clients()) client->disconnect();
           })
      .def("give_back",
           [](Core& core) {
             for (Client* client : core.clients()) client->give_back();
           })
      .def("all_reduce", &Core::all_reduce)
      .def("check", &Core::check)
      .def("close", &Core::close)
      .def_property_readonly("is_closed", &Core::is_closed);
}

}  // namespace moe_a2a::bindings
