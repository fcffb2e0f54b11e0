// Sends rows, each to several ranks at once, and reports when a row's stores are done. This is the plain version, for
// any target; targets with TMA have their own (cuda_row_sender.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_a2a {

// A row, or a piece of one, at the sender: its values and, for float8, its scales. Offsets are those in the slot.
struct RowSource {
  const std::byte* values = nullptr;
  int64_t num_value_bytes = 0;
  int64_t values_offset = 0;
  const std::byte* scales = nullptr;
  int64_t num_scale_bytes = 0;
  int64_t scales_offset = 0;
  bool in_shared = false;  // in the block's shared memory; AMD's loads must know
};

// What a warp does with a row before it leaves: nothing, quantise it, or form it as a sum of other rows, with
// per-thread loads or streamed. kStoring: nothing, but the row does not allow bulk copies.
enum class StagedFor { kSending, kStoring, kQuantizing, kSumming, kStreaming };

// The fewest warps per block that have `in_flight` bytes of rows under way, if one per block has `per_warp`.
MOE_A2A_HOST_DEVICE constexpr int senders_for(int in_flight, int per_warp) {
  return (in_flight + per_warp - 1) / per_warp;
}

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// Writes a row, or a piece of one, to `target(rank)` on each of `dst_ranks`, `first_dst_rank` first.
template <class Group, class RankSet, class Target>
MOE_A2A_DEVICE void multicast_row(const Group& group, const RowSource& row, const RankSet& dst_ranks,
                                  int first_dst_rank, Target target) {
  const auto values_at = [&](int rank) { return target(rank) + row.values_offset; };
  multicast_bytes(group, dst_ranks, first_dst_rank, values_at, row.values, row.num_value_bytes, row.in_shared);
  if (row.num_scale_bytes > 0) {
    const auto scales_at = [&](int rank) { return target(rank) + row.scales_offset; };
    multicast_bytes(group, dst_ranks, first_dst_rank, scales_at, row.scales, row.num_scale_bytes, row.in_shared);
  }
}

// `Item` has `dst_ranks`, the set of ranks that a row goes to, and `first_dst_rank`, which is written first.
// `target(item, rank)` is where the row goes on a rank. One thread of the group calls `done(item)` once the row's
// stores are ordered before its next signal. `stage`: row_bytes of memory for rows that are formed rather than sent as
// they are.
template <class Group, class Item, class Target, class Done>
class PlainRowSender {
 public:
  MOE_A2A_DEVICE PlainRowSender(const Group& group, Target target, Done done, std::byte* stage)
      : group_(group), target_(target), done_(done), stage_(stage) {}

  MOE_A2A_DEVICE void send(const RowSource& row, const Item& item) {
    multicast_row(group_, row, item.dst_ranks, item.first_dst_rank, [&](int rank) { return target_(item, rank); });
    group_.release_sync();
    if (group_.rank() == 0) done_(item);
  }

  // Where the group forms a row; send_staged() then sends it.
  MOE_A2A_DEVICE std::byte* open_stage(const Item&) {
    group_.sync();  // the previous row has been read
    return stage_;
  }

  MOE_A2A_DEVICE void send_staged(const RowSource& row, const Item& item) {
    group_.sync();  // the row is complete before any thread sends part of it
    send(row, item);
  }

  MOE_A2A_DEVICE void finish() {}

 private:
  const Group& group_;
  Target target_;
  Done done_;
  std::byte* stage_;
};

#if !defined(MOE_A2A_HAS_WARP_SENDER)
// How many of a block's `most` sending warps take part if they only copy rows: all, since their lanes do the copying.
MOE_A2A_HOST_DEVICE constexpr int num_copying_warps(int /*num_blocks*/, int /*row_bytes*/, int most) { return most; }

// Shared memory for one warp's sender: only for rows that are quantised first.
MOE_A2A_HOST_DEVICE constexpr int64_t warp_staging_bytes(int64_t row_bytes, StagedFor what) {
  return what == StagedFor::kQuantizing ? (row_bytes + 127) / 128 * 128 : 0;
}
template <class Item, class Target, class Done>
MOE_A2A_DEVICE auto make_warp_sender(const Warp& warp, Target target, Done done, std::byte* stage, int64_t) {
  return PlainRowSender<Warp, Item, Target, Done>(warp, target, done, stage);
}
#endif

}  // namespace moe_a2a::inline MOE_A2A_TARGET
