// What the clients of a group of ranks share: rank and device, timeout, the poison word that tells all clients that a
// rank is gone, and the clock offsets between ranks. Knows nothing of what its clients do.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "comm/client.h"

namespace moe_a2a {

class Communicator : public Client {
 public:
  // is_ordered: all ranks make the calls of all clients in the same order, so that these run one after another.
  explicit Communicator(const Member& member, bool is_ordered = false);

  // The first violated rule, naming value, limit and argument; empty when all hold.
  static std::string violation(int rank, int num_ranks);

  // For clients: their waits read and write this communicator's poison.
  PoisonLink poison_link() { return {region().poison.data, &context_.heap, region().heap.data, &has_raised_}; }

  // For clients: null unless the communicator is ordered.
  const std::shared_ptr<OrderedLaunches>& ordered() const { return ordered_launches_; }

  // One reading per rank. Collective: every rank passes the same num_rounds, 2 ... kMaxClockRounds.
  std::vector<ClockReading> align_clocks(int num_rounds, void* stream);
  // The smallest clock step seen by the latest align_clocks(); 0 before the first.
  uint64_t clock_step() const { return clock_step_; }

 private:
  const CommRegion& region() const { return context_.region; }
  void after_connect(const HeapView& heap) override;
  void after_close() override;

  CommContext context_;
  std::shared_ptr<OrderedLaunches> ordered_launches_;
  uint64_t clock_step_ = 0;
  std::atomic<bool> has_raised_ = false;
};

}  // namespace moe_a2a
