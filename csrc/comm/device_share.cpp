#include "comm/device_share.h"

#include <mutex>
#include <utility>

namespace moe_a2a {
namespace {

struct Clients {
  std::mutex mutex;
  std::vector<int> limits;  // of each
};

constexpr int kMaxDevices = 64;

Clients& clients_of(int device) {
  static auto* const clients = new Clients[kMaxDevices];  // never destroyed: clients may leave while the process exits
  return clients[device];
}

}  // namespace

DeviceShare::DeviceShare(int device, bool counts, int limit)
    : device_(device % kMaxDevices), counts_(counts), limit_(limit) {
  if (!counts_) return;
  Clients& clients = clients_of(device_);
  const std::lock_guard lock(clients.mutex);
  clients.limits.push_back(limit_);
}

void DeviceShare::leave() {
  if (!std::exchange(counts_, false)) return;
  Clients& clients = clients_of(device_);
  const std::lock_guard lock(clients.mutex);
  clients.limits.erase(std::find(clients.limits.begin(), clients.limits.end(), limit_));
}

int DeviceShare::num_clients() const {
  Clients& clients = clients_of(device_);
  const std::lock_guard lock(clients.mutex);
  return static_cast<int>(clients.limits.size());
}

int DeviceShare::of(int max_blocks, int dies) const {
  Clients& clients = clients_of(device_);
  const std::lock_guard lock(clients.mutex);
  return share_of(max_blocks, limit_, clients.limits, dies);
}

}  // namespace moe_a2a
