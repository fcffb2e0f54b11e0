// What each launch of the collectives leaves for the next one on the same rank.
#pragma once

#include "arch/arch.h"

namespace moe_a2a {

// What a rank has observed of a launch, from all ranks.
enum class Seen : uint32_t {
  kSignals,  // call_signal, acquired: what came before the launch on every rank is ordered
  kWords,    // LL words, which order nothing: every rank has begun the launch
  kNothing,
};

// Local. Blocks read and write it by relaxed atomics, and none needs to know whether it is the last: finding the last
// one would cost a fence and a round trip to the cache.
struct CallState {
  static constexpr int kProgressBits = 20, kFailures = 4;

  // The epoch of the newest complete launch, and below it the share of the running one that has ended. The device
  // advances it, so that a graph's replay is a new call. A block reads the epoch before it adds its share, so all
  // blocks of a launch read the same.
  uint64_t progress = 0;
  uint32_t has_given_up = 0;  // a wait of this rank or a peer: no later launch does anything
  uint32_t seen = 0;          // a Seen in 8 bits for each half: of the newest launch there
  // [epoch % kFailures] A rank makes another call or none: the other blocks stop, and the later slices of that call do
  // nothing. (A call of words has one slice.) A launch clears the next one's.
  uint32_t has_failed[kFailures] = {};
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

MOE_A2A_DEVICE uint64_t newest_epoch(const CallState& state) {
  return atomic_load<Order::kRelaxed, Scope::kDevice>(&state.progress) >> CallState::kProgressBits;
}

// What this rank has observed of the newest launch of each half, 8 bits each.
MOE_A2A_DEVICE uint32_t seen_in_halves(const CallState& state) {
  return atomic_load<Order::kRelaxed, Scope::kDevice>(&state.seen);
}
MOE_A2A_DEVICE Seen seen_of(uint32_t in_halves, uint64_t epoch) {
  return static_cast<Seen>(in_halves >> epoch % 2 * 8 & 0xff);
}
MOE_A2A_DEVICE uint32_t with_seen(uint32_t in_halves, uint64_t epoch, Seen seen) {
  const int shift = epoch % 2 * 8;
  return (in_halves & ~(0xffu << shift)) | static_cast<uint32_t>(seen) << shift;
}

MOE_A2A_DEVICE bool has_failed(const CallState& state, uint64_t epoch) {
  return atomic_load<Order::kRelaxed, Scope::kDevice>(&state.has_failed[epoch % CallState::kFailures]) != 0;
}
MOE_A2A_DEVICE void set_failed(CallState& state, uint64_t epoch, bool failed) {
  atomic_store<Order::kRelaxed, Scope::kDevice>(&state.has_failed[epoch % CallState::kFailures], uint32_t{failed});
}

MOE_A2A_DEVICE bool has_given_up(const CallState& state) {
  return atomic_load<Order::kRelaxed, Scope::kDevice>(&state.has_given_up) != 0;
}
MOE_A2A_DEVICE void set_given_up(CallState& state) {
  atomic_store<Order::kRelaxed, Scope::kDevice>(&state.has_given_up, 1u);
}

// Begins launch `epoch`, in one thread. No other block reads what this writes before the next launch.
MOE_A2A_DEVICE void begin_epoch(CallState& state, uint64_t epoch, uint32_t before, Seen seen) {
  atomic_store<Order::kRelaxed, Scope::kDevice>(&state.seen, with_seen(before, epoch, seen));
  set_failed(state, epoch + 1, false);
}

// Ends a block's part of a launch, in one thread. The epoch is complete once every block has added its share.
MOE_A2A_DEVICE void advance_epoch(CallState& state, const Grid& grid) {
  constexpr uint32_t kWhole = 1u << CallState::kProgressBits;
  const uint32_t share = kWhole / grid.size() + (grid.rank() == 0 ? kWhole % grid.size() : 0);
  atomic_add<Order::kRelaxed, Scope::kDevice>(&state.progress, uint64_t{share});
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
