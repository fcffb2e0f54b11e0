// What the clients of a group of ranks share: who they are and where they run, how long they wait, the poison that
// tells all of them that a rank is gone, and how the clocks of the ranks stand to each other. It knows nothing of what
// its clients do.
#pragma once

#include <memory>
#include <vector>

#include "comm/client.h"

namespace moe_a2a {

class Communicator : public Client {
 public:
  explicit Communicator(const Member& member);

  // The first rule that does not hold, in words that name value, limit and argument; empty when all hold.
  static std::string violation(int rank, int num_ranks);

  // Of a client's region and waits.
  PoisonLink poison_link() const { return {region().poison.data, &context_.heap, device_heap_}; }

  // One reading per rank. Every rank calls it with the same number of rounds, 2 ... kMaxClockRounds.
  std::vector<ClockReading> align_clocks(int num_rounds, void* stream);
  // The smallest step of the clock, as the newest align_clocks() has seen it; 0: none yet.
  uint64_t clock_step() const { return clock_step_; }

 private:
  const CommRegion& region() const { return context_.region; }
  void after_connect(const HeapView& heap) override;

  CommContext context_;
  HeapView* device_heap_ = nullptr;  // this communicator's, where kernels can read it
  uint64_t clock_step_ = 0;
};

}  // namespace moe_a2a
