#include "bindings/clients.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>

namespace moe_a2a::bindings {
namespace {

std::shared_ptr<Communicator> make_communicator(int rank, int num_ranks, const std::string& target,
                                                const at::Device& device, double timeout) {
  const std::string violation = Communicator::violation(rank, num_ranks);
  if (!violation.empty()) throw py::value_error(violation + " (rank " + std::to_string(rank) + ")");
  return std::make_shared<Communicator>(Member{.rank = rank,
                                               .num_ranks = num_ranks,
                                               .target = target,
                                               .device = device.has_index() ? device.index() : 0,
                                               .timeout_seconds = timeout});
}

}  // namespace

py::bytes handles_of(const std::vector<Client*>& clients) {
  std::string bytes;
  for (Client* client : clients) {
    const RegionHandle handle = client->handle();
    bytes.append(reinterpret_cast<const char*>(&handle), sizeof(handle));
  }
  return bytes;
}

void connect(const std::vector<Client*>& clients, const std::vector<std::string>& handles, bool carried) {
  const size_t expected = clients.size() * sizeof(RegionHandle);
  for (size_t r = 0; r < handles.size(); ++r) {
    if (handles[r].size() == expected) continue;
    throw py::value_error("handle " + std::to_string(r) + " has " + std::to_string(handles[r].size()) +
                          " bytes, expected " + std::to_string(expected) +
                          "; pass what get_comm_handle() returned, from the same version on every rank");
  }
  py::gil_scoped_release unlocked;
  size_t num_connected = 0;
  try {
    for (; num_connected < clients.size(); ++num_connected) {
      std::vector<RegionHandle> all(handles.size());
      for (size_t r = 0; r < handles.size(); ++r) {
        std::memcpy(static_cast<void*>(&all[r]), handles[r].data() + num_connected * sizeof(RegionHandle),
                    sizeof(RegionHandle));
      }
      clients[num_connected]->connect(all);
    }
    for (Client* client : clients) {
      if (carried) client->confirm_handles();
    }
  } catch (...) {
    while (num_connected > 0) clients[--num_connected]->disconnect();
    throw;
  }
}

void disconnect(const std::vector<Client*>& clients) {
  py::gil_scoped_release unlocked;
  for (Client* client : clients) client->disconnect();
}

void give_back(const std::vector<Client*>& clients) {
  for (Client* client : clients) client->give_back();
}

void close(const std::vector<Client*>& clients) {
  std::exception_ptr reported;
  for (Client* client : clients) {
    try {
      client->close();
    } catch (...) {
      if (!reported) reported = std::current_exception();
    }
  }
  if (reported) std::rethrow_exception(reported);
}

std::vector<std::array<int64_t, 3>> align_clocks(Communicator& comm, int num_rounds, void* stream) {
  py::gil_scoped_release unlocked;
  std::vector<std::array<int64_t, 3>> numbers;
  for (const ClockReading& reading : comm.align_clocks(num_rounds, stream)) {
    numbers.push_back({reading.offset, static_cast<int64_t>(reading.round_trip), static_cast<int64_t>(reading.at)});
  }
  return numbers;
}

void* current_stream(at::Device device) {
  if (device.is_cpu()) return nullptr;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

void bind_communicator(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
      .def(py::init(&make_communicator))
      .def("comm_handle", [](Communicator& comm) { return handles_of({&comm}); })
      .def("connect", [](Communicator& comm, const std::vector<std::string>& handles,
                         bool carried) { connect({&comm}, handles, carried); })
      .def("disconnect", [](Communicator& comm) { disconnect({&comm}); })
      .def("give_back", [](Communicator& comm) { give_back({&comm}); })
      .def("check", &Communicator::check, unlocked())
      .def("align_clocks",
           [](Communicator& comm, int num_rounds, const at::Device& device) {
             return align_clocks(comm, num_rounds, current_stream(device));
           })
      .def("close", &Communicator::close, unlocked())
      .def_property_readonly("rank", [](const Communicator& comm) { return comm.member().rank; })
      .def_property_readonly("nbytes", [](const Communicator& comm) { return comm.nbytes(); });
}

}  // namespace moe_a2a::bindings
