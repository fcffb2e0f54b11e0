// Where the warps of a block leave what they have sent, for one warp that tells of it: what has been left meanwhile
// goes behind one fence. A fence of every warp for every row is what an SM of an H200 spends most of its time on: they
// come one after the other, 2 to 5 us each, so that few blocks cannot fill the link.
#pragma once

#include "moe/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// `Item`: what a row's signal must be known by.
template <class Item>
class SignalDesk {
 public:
  MOE_A2A_HOST_DEVICE static constexpr int shared_bytes() {
    return kTellerPays ? (static_cast<int>(sizeof(Desk)) + 127) / 128 * 128 : 0;
  }
  // Of so many warps that could send, those that do: one is left to tell.
  MOE_A2A_HOST_DEVICE static constexpr int num_senders(int num_warps) {
    constexpr int kWarps = kBlockThreads / kWarpSize;
    return kTellerPays && num_warps == kWarps ? kWarps - 1 : num_warps;
  }

  // By all threads of the block.
  MOE_A2A_DEVICE SignalDesk(const Block& block, std::byte* shared, int num_senders)
      : block_(block),
        desk_(reinterpret_cast<Desk*>(shared)),
        num_senders_(num_senders),
        next_slot_(block.warp_rank()) {
    if constexpr (kTellerPays) {
      if (block.rank() < kSlots) desk_->slot[block.rank()].is_full = 0;
      if (block.rank() == 0) desk_->num_closed = 0;
      block.sync();
    }
  }

  MOE_A2A_DEVICE bool is_sender() const { return block_.warp_rank() < num_senders_; }
  MOE_A2A_DEVICE bool is_teller() const { return kTellerPays && block_.warp_rank() == num_senders_; }

  // By the leader of a warp that sends, when a row's stores come before whatever it signals next.
  template <class TellOf>
  MOE_A2A_DEVICE void leave(const Item& item, const TellOf& tell_of) {
    if constexpr (kTellerPays) {
      Slot& slot = desk_->slot[next_slot_];
      next_slot_ += num_senders_;
      if (next_slot_ + num_senders_ - block_.warp_rank() > kSlots) next_slot_ = block_.warp_rank();
      while (atomic_load<Order::kAcquire, Scope::kBlock>(&slot.is_full) != 0) pause();
      slot.item = item;
      atomic_store<Order::kRelease, Scope::kBlock>(&slot.is_full, 1u);  // pairs with the acquire in tell()
    } else {
      tell_of(item);
    }
  }

  // By every warp that sends, when it has left its last row.
  MOE_A2A_DEVICE void close() const {
    if constexpr (kTellerPays) {
      if (block_.warp().rank() == 0) atomic_add<Order::kAcqRel, Scope::kBlock>(&desk_->num_closed, 1u);
    }
  }

  // By the warp that tells, a slot to each lane, until all have closed. The lanes' fences are one instruction.
  template <class TellOf>
  MOE_A2A_DEVICE void tell(const TellOf& tell_of) const {
    const Warp warp = block_.warp();
    for (;;) {
      const bool all_closed =
          atomic_load<Order::kAcquire, Scope::kBlock>(&desk_->num_closed) == static_cast<uint32_t>(num_senders_);
      Slot& slot = desk_->slot[warp.rank() % kSlots];
      const bool is_full = atomic_load<Order::kAcquire, Scope::kBlock>(&slot.is_full) != 0;
      if (is_full) {
        tell_of(slot.item);
        atomic_store<Order::kRelease, Scope::kBlock>(&slot.is_full, 0u);
      }
      if (!warp.any(is_full)) {
        if (!warp.any(!all_closed)) return;  // each lane has looked at its slot after that
        pause();
      }
    }
  }

 private:
  static constexpr int kSlots = kWarpSize;  // a warp has every num_senders-th of them
  struct Slot {
    uint32_t is_full;
    Item item;
  };
  struct Desk {
    uint32_t num_closed;
    Slot slot[kSlots];
  };

  const Block& block_;
  Desk* desk_;
  int num_senders_, next_slot_;
};

// Runs send(done) in those warps of the block that send; what they leave with done(item) is told by tell(item).
template <class Item, class Tell, class Send>
MOE_A2A_DEVICE void send_and_tell(const Block& block, std::byte* shared, int num_senders, const Tell& tell,
                                  const Send& send) {
  SignalDesk<Item> desk(block, shared, num_senders);
  if (desk.is_teller()) desk.tell(tell);
  if (!desk.is_sender()) return;
  send([&](const Item& item) { desk.leave(item, tell); });
  desk.close();
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
