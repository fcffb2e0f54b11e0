// Which rows of a product's result are complete, for readers in the same launch.
#pragma once

#include "arch/arch.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct StoredTiles {
  uint32_t* count;    // [positions]  column tiles stored so far; zero when the launch begins
  uint32_t of_a_row;  // column tiles of a complete row

  // Call it after the group has stored a tile of these positions and passed its release barrier. Pairs with the acquire
  // in wait_for_row().
  template <class Group>
  MOE_A2A_DEVICE static void add(uint32_t* count, const Group& group, int first_position, int num_positions) {
    fence_before_signals<Scope::kDevice>();  // one for all: a fence takes microseconds
    for (int i = group.rank(); i < num_positions; i += group.size()) {
      atomic_add<kSignalOrder, Scope::kDevice>(count + first_position + i, 1u);
    }
  }

  // Needs no deadline: the product waits for nothing, so it completes. Returns the number of polls.
  MOE_A2A_DEVICE uint32_t wait_for_row(int position) const {
    const uint32_t* stored = count + position;
    uint32_t polls = 1;
    for (; atomic_load<Order::kRelaxed, Scope::kDevice>(stored) != of_a_row; ++polls) pause(polls);
    atomic_load<Order::kAcquire, Scope::kDevice>(stored);  // pairs with the release in add()
    return polls;
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
