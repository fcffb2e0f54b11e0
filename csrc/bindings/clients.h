// What Python holds of a Communicator and of each of its clients.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "bindings/python.h"
#include "comm/communicator.h"

namespace moe_a2a::bindings {

namespace py = pybind11;

// Base of what Python holds: the calls that all clients have.
class ClientCore {
 public:
  // `owns_comm`: the communicator was made for this client alone, so both are connected and closed together.
  ClientCore(std::shared_ptr<Client> client, std::shared_ptr<Communicator> comm, bool owns_comm, at::Device device)
      : device_(device),
        name_(client->name()),
        client_(std::move(client)),
        comm_(std::move(comm)),
        owns_comm_(owns_comm) {}
  virtual ~ClientCore() = default;

  // Each call holds a reference: another thread may close the object during it.
  std::shared_ptr<Client> open() const;

  // The handles of the client and of its own communicator, if it has one.
  py::bytes comm_handle() const;
  // Connects both or none. `handles`: comm_handle() of every rank, in rank order. `carried`: by the caller, who may mix
  // up objects; see Client::confirm_handles().
  void connect(const std::vector<std::string>& handles, bool carried);
  // For objects whose construction failed; see Client.
  void disconnect();
  void give_back();

  void check();
  void raise_reported();
  size_t nbytes() const;
  // Closes both, even if one throws what its kernels have reported. The memory is freed with the last view of it.
  virtual void close();

  // Per rank: (its clock minus this rank's, shortest round trip, time of measurement), in ticks; for this rank itself:
  // (0, clock step, time).
  std::vector<std::array<int64_t, 3>> align_clocks(int num_rounds);
  py::dict read_trace();

 protected:
  const at::Device device_;

 private:
  std::vector<std::shared_ptr<Client>> parts() const;

  const char* name_;
  std::shared_ptr<Client> client_;  // null once closed
  std::shared_ptr<Communicator> comm_;
  bool owns_comm_;
};

class CommunicatorCore : public ClientCore {
 public:
  CommunicatorCore(const std::shared_ptr<Communicator>& comm, at::Device device)
      : ClientCore(comm, comm, false, device) {}
  std::shared_ptr<Communicator> communicator() const { return std::static_pointer_cast<Communicator>(open()); }
};

// Makes a client, and frees it, without the GIL: allocating or freeing memory may wait for kernels, and these for a
// rank in another thread.
void delete_unlocked(const Client* client);
template <class T, class... Args>
std::shared_ptr<T> make_unlocked(const Args&... args) {
  const py::gil_scoped_release unlocked;
  return {new T(args...), delete_unlocked};
}

// Lets our calls change the current GPU as PyTorch's operators do; see arch/device_switch.h.
void switch_devices_like_pytorch();

// PyTorch's current stream of the device; null on the CPU.
void* current_stream(at::Device device);
// PyTorch's allocator reuses the tensor's memory only after what is queued on that stream, even if it was made on
// another.
void keep_for_current_stream(const at::Tensor& tensor);

void bind_communicator(py::module_& m);

}  // namespace moe_a2a::bindings
