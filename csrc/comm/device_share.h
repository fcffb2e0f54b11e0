// How the clients of one process share a device. Kernels wait for peers, which may launch those of several clients in
// any order, so the kernels of all clients must be resident at once, each on a stream of its own.
#pragma once

namespace moe_a2a {

// Most blocks of each client's launches. If this is less than kFewestBlocks, there are too many clients.
inline constexpr int kFewestBlocks = 2;  // one sends, one receives
inline int share_of(int max_blocks, int num_clients) { return num_clients > 1 ? max_blocks / num_clients : max_blocks; }

// Counts a client among those of its device, until it leaves.
class DeviceShare {
 public:
  // counts: false for a client that launches nothing concurrently with others, or waits for nobody.
  DeviceShare(int device, bool counts);
  ~DeviceShare() { leave(); }
  DeviceShare(const DeviceShare&) = delete;
  DeviceShare& operator=(const DeviceShare&) = delete;

  void leave();
  int num_clients() const;

 private:
  int device_;
  bool counts_;
};

}  // namespace moe_a2a
