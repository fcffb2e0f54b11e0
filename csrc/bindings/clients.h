// What Python does with every client of a communicator, and the Communicator itself.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "bindings/python.h"
#include "comm/communicator.h"

namespace moe_a2a::bindings {

namespace py = pybind11;

// The handles of clients that are made together, as one byte string per rank.
py::bytes handles_of(const std::vector<Client*>& clients);
// Connects all of them or none. `handles`: what handles_of() returned on each rank, in rank order. `carried`: by the
// caller, who may mix up objects; see Client::confirm_handles().
void connect(const std::vector<Client*>& clients, const std::vector<std::string>& handles, bool carried);
// For objects whose construction failed; see Client.
void disconnect(const std::vector<Client*>& clients);
void give_back(const std::vector<Client*>& clients);
// Closes all of them, even if one throws what its kernels have reported.
void close(const std::vector<Client*>& clients);

// Per rank: (its clock minus this rank's, shortest round trip, time of measurement), in ticks; for this rank itself:
// (0, clock step, time).
std::vector<std::array<int64_t, 3>> align_clocks(Communicator& comm, int num_rounds, void* stream);

// PyTorch's current stream of the device; null on the CPU.
void* current_stream(at::Device device);

void bind_communicator(py::module_& m);

}  // namespace moe_a2a::bindings
