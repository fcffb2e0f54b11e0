// How the clients of one process share a device. Kernels wait for peers, which may launch those of several clients in
// any order, so the kernels of all clients must be resident at once, each client's on its own stream.
#pragma once

#include <algorithm>
#include <vector>

namespace moe_a2a {

// Fewest blocks that a client may have. If its share is smaller, there are too many clients.
inline constexpr int kFewestBlocks = 2;  // one sends, one receives

// The most blocks of a client's launches. Clients get equal shares, but whatever those with a limit leave goes to the
// others. limits: of all clients; 0: none. dies: of the device, among which it deals the blocks of a launch in turn;
// each must hold what it gets of every client.
inline int share_of(int max_blocks, int limit, const std::vector<int>& limits, int dies = 1) {
  if (limits.size() < 2) return max_blocks;
  const int equal = max_blocks / dies / static_cast<int>(limits.size());  // per die, as the rest
  if (limit > 0) return std::min(limit, equal * dies);
  int rest = max_blocks / dies, num_unlimited = 0;
  for (const int other : limits) {
    if (other == 0) ++num_unlimited;
    if (other > 0) rest -= std::min((other + dies - 1) / dies, equal);
  }
  return rest / std::max(1, num_unlimited) * dies;
}

// How many clients a device can have.
inline int most_clients(int max_blocks, int dies) { return std::min(max_blocks / kFewestBlocks, max_blocks / dies); }

// Counts a client among those of its device, until it leaves.
class DeviceShare {
 public:
  // counts: false for a client that launches nothing concurrently with others, or waits for no rank. limit: the most
  // blocks of its launches; 0: none.
  DeviceShare(int device, bool counts, int limit = 0);
  ~DeviceShare() { leave(); }
  DeviceShare(const DeviceShare&) = delete;
  DeviceShare& operator=(const DeviceShare&) = delete;

  void leave();
  int num_clients() const;
  int of(int max_blocks, int dies = 1) const;

 private:
  int device_;
  bool counts_;
  int limit_;
};

}  // namespace moe_a2a
