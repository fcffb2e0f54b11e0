#include "bindings/clients.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>

#include "arch/device_switch.h"
#include "bindings/trace_records.h"
#include "bindings/unlocked.h"

namespace moe_a2a::bindings {
namespace {

std::unique_ptr<CommunicatorCore> make_communicator(int rank, int num_ranks, const std::string& target,
                                                    const at::Device& device, double timeout, bool is_ordered) {
  const std::string violation = Communicator::violation(rank, num_ranks);
  if (!violation.empty()) throw py::value_error(violation + " (rank " + std::to_string(rank) + ")");
  const Member member{.rank = rank,
                      .num_ranks = num_ranks,
                      .target = target,
                      .device = device.has_index() ? device.index() : 0,
                      .timeout_seconds = timeout};
  return std::make_unique<CommunicatorCore>(make_unlocked<Communicator>(member, is_ordered), device);
}

c10::impl::VirtualGuardImpl gpus() { return c10::impl::VirtualGuardImpl(at::kCUDA); }
at::Device gpu(int index) { return {at::kCUDA, static_cast<at::DeviceIndex>(index)}; }
int exchange_gpu(int index) { return gpus().exchangeDevice(gpu(index)).index(); }
void restore_gpu(int index) { gpus().uncheckedSetDevice(gpu(index)); }

}  // namespace

std::shared_ptr<Client> ClientCore::open() const {
  if (!client_) throw std::runtime_error(std::string("this ") + name_ + " is closed");
  client_->require_own_process();
  return client_;
}

std::vector<std::shared_ptr<Client>> ClientCore::parts() const {
  if (owns_comm_) return {open(), comm_};
  return {open()};
}

py::bytes ClientCore::comm_handle() const {
  std::string bytes;
  for (const auto& part : parts()) {
    const RegionHandle handle = part->handle();
    bytes.append(reinterpret_cast<const char*>(&handle), sizeof(handle));
  }
  return bytes;
}

void ClientCore::connect(const std::vector<std::string>& handles, bool carried) {
  const auto parts = this->parts();
  const size_t expected = parts.size() * sizeof(RegionHandle);
  for (size_t r = 0; r < handles.size(); ++r) {
    if (handles[r].size() == expected) continue;
    throw py::value_error("handle " + std::to_string(r) + " has " + std::to_string(handles[r].size()) +
                          " bytes, expected " + std::to_string(expected) +
                          "; pass what get_comm_handle() returned, from the same version on every rank");
  }
  py::gil_scoped_release unlocked;
  size_t num_connected = 0;
  try {
    for (; num_connected < parts.size(); ++num_connected) {
      std::vector<RegionHandle> all(handles.size());
      for (size_t r = 0; r < handles.size(); ++r) {
        std::memcpy(static_cast<void*>(&all[r]), handles[r].data() + num_connected * sizeof(RegionHandle),
                    sizeof(RegionHandle));
      }
      parts[num_connected]->connect(all);
    }
    for (const auto& part : parts) {
      if (carried) part->confirm_handles();
    }
  } catch (...) {
    while (num_connected > 0) parts[--num_connected]->disconnect();
    throw;
  }
}

void ClientCore::disconnect() {
  const auto parts = this->parts();
  py::gil_scoped_release unlocked;
  for (const auto& part : parts) part->disconnect();
}

void ClientCore::give_back() {
  const auto parts = this->parts();
  py::gil_scoped_release unlocked;
  for (const auto& part : parts) part->give_back();
}

void ClientCore::check() {
  const auto client = open();
  py::gil_scoped_release unlocked;
  client->check();
}

void ClientCore::raise_reported() {
  const auto client = open();
  py::gil_scoped_release unlocked;
  client->raise_reported();
}

size_t ClientCore::nbytes() const {
  size_t total = 0;
  for (const auto& part : parts()) total += part->nbytes();
  return total;
}

void ClientCore::close() {
  if (!client_) return;
  std::vector<std::shared_ptr<Client>> parts = {std::move(client_)};
  if (owns_comm_) parts.push_back(std::move(comm_));
  py::gil_scoped_release unlocked;
  std::exception_ptr reported;
  for (const auto& part : parts) {
    try {
      part->close();
    } catch (...) {
      if (!reported) reported = std::current_exception();
    }
  }
  parts.clear();  // without the GIL, since that may wait for the device
  if (reported) std::rethrow_exception(reported);
}

std::vector<std::array<int64_t, 3>> ClientCore::align_clocks(int num_rounds) {
  const auto client = open();
  const auto comm = comm_;
  void* stream = current_stream(device_);
  py::gil_scoped_release unlocked;
  std::vector<std::array<int64_t, 3>> numbers;
  for (const ClockReading& reading : comm->align_clocks(num_rounds, stream)) {
    numbers.push_back({reading.offset, static_cast<int64_t>(reading.round_trip), static_cast<int64_t>(reading.at)});
  }
  return numbers;
}

py::dict ClientCore::read_trace() {
  const auto client = open();
  const auto comm = comm_;
  return bindings::read_trace(*client, *comm);
}

// The last owner may be a Python object, freed with the GIL, or a tensor, which PyTorch frees without.
void delete_unlocked(const Client* client) {
  const Unlocked unlocked;
  delete client;
}

void switch_devices_like_pytorch() { set_device_switch({.exchange = exchange_gpu, .restore = restore_gpu}); }

void* current_stream(at::Device device) {
  if (device.is_cpu()) return nullptr;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

void keep_for_current_stream(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

void bind_communicator(py::module_& m) {
  py::class_<ClientCore>(m, "Client")
      .def("comm_handle", &ClientCore::comm_handle)
      .def("connect", &ClientCore::connect)
      .def("disconnect", &ClientCore::disconnect)
      .def("give_back", &ClientCore::give_back)
      .def("check", &ClientCore::check)
      .def("raise_reported", &ClientCore::raise_reported)
      .def("close", &ClientCore::close)
      .def("align_clocks", &ClientCore::align_clocks)
      .def("trace_start", [](ClientCore& core, int64_t records) { start_trace(*core.open(), records); })
      .def("trace_stop", [](ClientCore& core) { stop_trace(*core.open()); })
      .def("trace_read", &ClientCore::read_trace)
      .def_property_readonly("nbytes", &ClientCore::nbytes);
  py::class_<CommunicatorCore, ClientCore>(m, "Communicator")
      .def(py::init(&make_communicator))
      .def_property_readonly("rank", [](const CommunicatorCore& core) { return core.open()->member().rank; });
}

}  // namespace moe_a2a::bindings
