// Pieces of small batches: the warps of a block copy them by plain stores, then one fence and the block's leader tell
// of all of them.
#pragma once

#include "kernels/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// A row or a sum, or a piece of one, on its way: to whom, and for which token.
struct SentPiece {
  RankSet members;
  int token = 0;
  int turn = 0;  // the rank that is written to first
  int unit = 0;  // what its signal stands for
};

// `Item` has `members`, the ranks that a piece has been written to. `signal_of(item)` is the piece's signal here.
template <class Item, class SignalOf>
class Outbox {
 public:
  // Items of a warp before it tells of them itself.
  static constexpr int kRoom = 8;

  struct Shelf {  // of a warp
    int num_items;
    Item item[kRoom];
  };

  MOE_A2A_HOST_DEVICE static constexpr size_t shared_bytes() {
    return (kBlockThreads / kWarpSize * sizeof(Shelf) + 127) / 128 * 128;
  }

  MOE_A2A_DEVICE Outbox(const Context& context, const Block& block, std::byte* shared, uint64_t epoch,
                        SignalOf signal_of)
      : context_(context),
        block_(block),
        shelf_(reinterpret_cast<Shelf*>(shared)),
        epoch_(epoch),
        signal_of_(signal_of) {}

  // What this warp has written.
  MOE_A2A_DEVICE void add(const Item& item) {
    const Warp warp = block_.warp();
    if (num_items_ == kRoom) {
      warp.release_sync();
      if (warp.rank() == 0) {
        signal_batch(context_.heap, epoch_, context_.trace(), [&](auto publish) { visit(mine(), kRoom, publish); });
      }
      num_items_ = 0;
    }
    if (warp.rank() == 0) mine().item[num_items_] = item;
    ++num_items_;
  }

  // Once, by all threads of the block.
  MOE_A2A_DEVICE void post() {
    if (block_.warp().rank() == 0) mine().num_items = num_items_;
    block_.release_sync();
    if (block_.rank() != 0) return;
    signal_batch(context_.heap, epoch_, context_.trace(), [&](auto publish) {
      for (int w = 0; w < block_.num_warps(); ++w) visit(shelf_[w], shelf_[w].num_items, publish);
    });
  }

 private:
  MOE_A2A_DEVICE Shelf& mine() const { return shelf_[block_.warp_rank()]; }

  template <class Publish>
  MOE_A2A_DEVICE void visit(const Shelf& shelf, int count, const Publish& publish) const {
    for (int i = 0; i < count; ++i) {
      publish(SharedSignal{shelf.item[i].members, signal_of_(shelf.item[i]), shelf.item[i].token});
    }
  }

  const Context& context_;
  const Block& block_;
  Shelf* shelf_;  // [num_warps]
  uint64_t epoch_;
  SignalOf signal_of_;
  int num_items_ = 0;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
