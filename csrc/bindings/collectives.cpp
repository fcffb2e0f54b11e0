#include "bindings/collectives.h"

#include "bindings/clients.h"
#include "bindings/tensors.h"
#include "collectives/collectives.h"

namespace moe_a2a::bindings {
namespace {

// What Python holds: the host object and its device.
class Core {
 public:
  Core(std::shared_ptr<Communicator> comm, bool owns_comm, at::Device device)
      : device_(device), owns_comm_(owns_comm), comm_(comm), collectives_(std::move(comm)) {}

  std::vector<Client*> clients() {
    if (owns_comm_) return {comm_.get(), &collectives_};
    return {&collectives_};
  }

  at::Tensor all_reduce(const at::Tensor& x, const std::optional<at::Tensor>& out) {
    collectives_.require_open();
    const int rank = comm_->member().rank;
    const DType dtype = to_dtype(x.scalar_type(), "x", rank);
    if (dtype != DType::kFloat32 && dtype != DType::kBfloat16) {
      throw py::type_error(std::string("x has dtype ") + c10::toString(x.scalar_type()) + " on rank " +
                           std::to_string(rank) + ", expected float32 or bfloat16; pass x.to(torch.float32)");
    }
    const int64_t nbytes = x.numel() * x.element_size();
    if (nbytes > Collectives::max_nbytes()) {
      throw py::value_error("x has " + std::to_string(nbytes) + " bytes > " +
                            std::to_string(Collectives::max_nbytes()) + " on rank " + std::to_string(rank) +
                            "; pass it in slices");
    }
    check_dense(x, "x", rank, device_);
    if (out) {
      check_dense(*out, "out", rank, device_);
      if (out->sizes() != x.sizes() || out->scalar_type() != x.scalar_type()) {
        throw py::value_error("out is not of the shape and dtype of x on rank " + std::to_string(rank) +
                              "; pass torch.empty_like(x)");
      }
    }
    const at::Tensor result = out ? *out : at::empty_like(x);
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
  static void check_dense(const at::Tensor& tensor, const char* name, int rank, at::Device device) {
    const std::string where = std::string(name) + " on rank " + std::to_string(rank);
    if (tensor.device() != device) {
      throw py::value_error(where + " is on " + tensor.device().str() + ", these Collectives on " + device.str() +
                            "; pass " + name + ".to(\"" + device.str() + "\")");
    }
    if (!tensor.is_contiguous()) throw py::value_error(where + " is not contiguous; pass " + name + ".contiguous()");
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
