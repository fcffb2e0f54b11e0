#include "comm/communicator.h"

#include <stdexcept>
#include <string>

#include "comm/align_clocks.h"

namespace moe_a2a {

std::string Communicator::violation(int rank, int num_ranks) {
  const std::string limit = std::to_string(kMaxRanks);
  if (num_ranks < 1) return "num_ranks=" + std::to_string(num_ranks) + " < 1; pass num_ranks=1 or more";
  if (num_ranks > kMaxRanks) {
    return "num_ranks=" + std::to_string(num_ranks) + " > " + limit + "; pass a group of at most " + limit + " ranks";
  }
  if (rank < 0 || rank >= num_ranks) {
    return "rank=" + std::to_string(rank) + " is not in [0, " + std::to_string(num_ranks) + ")";
  }
  return {};
}

Communicator::Communicator(const Member& member, bool is_ordered) : Client(member, kCommVocabulary, context_) {
  if (is_ordered) ordered_launches_ = std::make_shared<OrderedLaunches>(member.device, member.shares_a_gpu());
  allocate({agreed("ordered", is_ordered ? "True" : "False")}, [&](std::byte* symmetric, std::byte* local) {
    return place_region(context_, member.num_ranks, symmetric, local);
  });
  link(poison_link());
}

void Communicator::after_connect(const HeapView& heap) {
  device_->copy_to_device(region().heap.data, &heap, sizeof(heap));
}

void Communicator::after_close() {
  if (ordered_launches_) ordered_launches_->leave();
}

std::vector<ClockReading> Communicator::align_clocks(int num_rounds, void* stream) {
  if (num_rounds < 2 || num_rounds > kMaxClockRounds) {
    throw std::invalid_argument("num_rounds=" + std::to_string(num_rounds) + " is not in [2, " +
                                std::to_string(kMaxClockRounds) + "]");
  }
  const CallGate::Turn turn = gate_.enter();
  check();
  AlignClocksArgs args{.context = context_, .num_rounds = num_rounds};
  args.context.wait.trace = {};  // recording hundreds of short waits would distort the measurement
  launch(args, 1, stream);
  device_->synchronize();
  std::vector<ClockReading> readings(member_.num_ranks);
  device_->copy_to_host(readings.data(), region().clock_reading.data, readings.size() * sizeof(ClockReading));
  clock_step_ = readings[member_.rank].round_trip;
  check();
  return readings;
}

}  // namespace moe_a2a
