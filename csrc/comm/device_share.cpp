#include "comm/device_share.h"

#include <atomic>
#include <iterator>
#include <utility>

namespace moe_a2a {
namespace {

std::atomic<int> clients_of[64];  // by device index

}  // namespace

DeviceShare::DeviceShare(int device, bool counts)
    : device_(device % static_cast<int>(std::size(clients_of))), counts_(counts) {
  if (counts_) ++clients_of[device_];
}

void DeviceShare::leave() {
  if (std::exchange(counts_, false)) --clients_of[device_];
}

int DeviceShare::num_clients() const { return clients_of[device_]; }

}  // namespace moe_a2a
