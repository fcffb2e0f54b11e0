// The rows that a block's warps have sent but not yet signalled. Warps push completed rows; one warp publishes all that
// it finds behind a single fence. With a fence per row and warp, an SM of an H200 does little else: fences take 2 to 5
// us each and serialize, so a few blocks cannot saturate the link.
#pragma once

#include "arch/arch.h"
#include "arch/shared_plan.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// `Item`: what a row's signal needs.
template <class Item>
class SignalQueue {
 public:
  // Zero where every warp publishes its own rows.
  MOE_A2A_HOST_DEVICE static constexpr int shared_bytes() {
    return kOneWarpPublishes ? SharedCarver::round_up(sizeof(Shared), SharedCarver::kLine) : 0;
  }
  // How many of the `num_able` warps that could send do so: if they are all of the block's, one is reserved to publish.
  MOE_A2A_HOST_DEVICE static constexpr int num_senders(int num_able, int num_warps) {
    return kOneWarpPublishes && num_able == num_warps ? num_warps - 1 : num_able;
  }

  // Whether the block needs a barrier between the constructor and the first push() or publish().
  static constexpr bool kNeedsBarrier = kOneWarpPublishes;
  // Called by all threads of the block.
  MOE_A2A_DEVICE SignalQueue(const Block& block, std::byte* shared, int num_senders)
      : block_(block),
        shared_(reinterpret_cast<Shared*>(shared)),
        num_senders_(num_senders),
        next_cell_(block.warp_rank()) {
    if constexpr (kOneWarpPublishes) {
      if (block.rank() < kCells) shared_->cell[block.rank()].is_full = 0;
      if (block.rank() == 0) shared_->num_closed = 0;
    }
  }

  MOE_A2A_DEVICE bool is_sender() const { return block_.warp_rank() < num_senders_; }
  MOE_A2A_DEVICE bool is_publisher() const { return kOneWarpPublishes && block_.warp_rank() == num_senders_; }

  // Called by a sending warp's leader once the row's stores are ordered before its next signal.
  template <class Signal>
  MOE_A2A_DEVICE void push(const Item& item, const Signal& signal) {
    if constexpr (kOneWarpPublishes) {
      Cell& cell = shared_->cell[next_cell_];
      next_cell_ += num_senders_;
      if (next_cell_ + num_senders_ - block_.warp_rank() > kCells) next_cell_ = block_.warp_rank();
      while (atomic_load<Order::kAcquire, Scope::kBlock>(&cell.is_full) != 0) pause();  // pairs with publish()
      cell.item = item;
      atomic_store<Order::kRelease, Scope::kBlock>(&cell.is_full, 1u);  // pairs with the acquire in publish()
    } else {
      signal(item);
    }
  }

  // Called by each sending warp after its last row.
  MOE_A2A_DEVICE void close() const {
    if constexpr (kOneWarpPublishes) {
      if (block_.warp().rank() == 0) atomic_add<Order::kAcqRel, Scope::kBlock>(&shared_->num_closed, 1u);
    }
  }

  // Called by the publishing warp, one cell per lane; returns once all senders have closed. The lanes' fences are one
  // instruction.
  template <class Signal>
  MOE_A2A_DEVICE void publish(const Signal& signal) const {
    const Warp warp = block_.warp();
    for (;;) {
      const bool all_closed =
          atomic_load<Order::kAcquire, Scope::kBlock>(&shared_->num_closed) == static_cast<uint32_t>(num_senders_);
      Cell& cell = shared_->cell[warp.rank() % kCells];
      const bool is_full = atomic_load<Order::kAcquire, Scope::kBlock>(&cell.is_full) != 0;  // pairs with push()
      if (is_full) {
        signal(cell.item);
        atomic_store<Order::kRelease, Scope::kBlock>(&cell.is_full, 0u);  // pairs with the acquire in push()
      }
      if (!warp.any(is_full)) {
        if (!warp.any(!all_closed)) return;  // each lane has checked its cell since
        pause();
      }
    }
  }

 private:
  static constexpr int kCells = kWarpSize;  // each sending warp owns every num_senders-th
  struct Cell {
    uint32_t is_full;
    Item item;
  };
  struct Shared {
    uint32_t num_closed;
    Cell cell[kCells];
  };

  const Block& block_;
  Shared* shared_;
  int num_senders_, next_cell_;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
