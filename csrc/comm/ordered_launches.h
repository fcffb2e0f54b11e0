// What the clients of an ordered communicator share: their launches run one after another, whatever streams they are
// queued on. So together they take the share of one client (device_share.h).
#pragma once

#include <mutex>

#include "arch/device.h"
#include "comm/device_share.h"

namespace moe_a2a {

class OrderedLaunches {
 public:
  // counts: as for a DeviceShare.
  OrderedLaunches(int device, bool counts) : share_(device, counts) {}

  // Calls queue(), which launches on `stream`, after all launches so far.
  template <class Queue>
  void launch(Device& device, void* stream, const Queue& queue) {
    const std::lock_guard lock(mutex_);
    order_.next(device, stream);
    queue();
  }
  void forget(void* stream) {
    const std::lock_guard lock(mutex_);
    order_.forget(stream);
  }

  const DeviceShare& share() const { return share_; }
  void leave() { share_.leave(); }

 private:
  std::mutex mutex_;
  LaunchOrder order_;
  DeviceShare share_;
};

}  // namespace moe_a2a
