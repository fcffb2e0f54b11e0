// Sends rows, each to several ranks at once, and tells when a row's stores are done. The plain form, for any target:
// a target with a copy engine inside the kernel has a form of its own (see cuda_row_sender.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_a2a {

// A row, or a piece of one, as it lies at the sender: its values, and for float8 rows the scales. The offsets say where
// they land in the row.
struct RowSource {
  const std::byte* values = nullptr;
  int64_t num_value_bytes = 0;
  int64_t values_offset = 0;
  const std::byte* scales = nullptr;
  int64_t num_scale_bytes = 0;
  int64_t scales_offset = 0;
  bool in_shared = false;  // put together in the block's shared memory, which AMD's loads must know
};

// What a warp does with a row before it leaves.
enum class StagedFor { kSending, kQuantizing };

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// Writes a row, or a piece of one, to `target(rank)` on each rank of `members`, beginning with `turn`.
template <class Group, class Members, class Target>
MOE_A2A_DEVICE void multicast_row(const Group& group, const RowSource& row, const Members& members, int turn,
                                  Target target) {
  const auto values_at = [&](int rank) { return target(rank) + row.values_offset; };
  multicast_bytes(group, members, turn, values_at, row.values, row.num_value_bytes, row.in_shared);
  if (row.num_scale_bytes > 0) {
    const auto scales_at = [&](int rank) { return target(rank) + row.scales_offset; };
    multicast_bytes(group, members, turn, scales_at, row.scales, row.num_scale_bytes, row.in_shared);
  }
}

// `Item` has `members`, the set of ranks that a row goes to, and `turn`, the rank that is written to first: when all
// ranks begin with the same one, its link is the limit. `target(item, rank)` is where the row lands on a rank;
// `done(item)` is called by one thread of the group when the row's stores come before whatever that thread signals
// next. `staging`: where a row is put together that is not sent as it lies in memory, row_bytes long.
template <class Group, class Item, class Target, class Done>
class PlainRowSender {
 public:
  MOE_A2A_DEVICE PlainRowSender(const Group& group, Target target, Done done, std::byte* staging)
      : group_(group), target_(target), done_(done), staging_(staging) {}

  MOE_A2A_DEVICE void send(const RowSource& row, const Item& item) {
    multicast_row(group_, row, item.members, item.turn, [&](int rank) { return target_(item, rank); });
    group_.release_sync();
    if (group_.rank() == 0) done_(item);
  }

  // The caller's group puts a row together here, then send_staged() sends it.
  MOE_A2A_DEVICE std::byte* open_stage() {
    group_.sync();  // the row before has been read
    return staging_;
  }

  MOE_A2A_DEVICE void send_staged(const RowSource& row, const Item& item) {
    group_.sync();  // the staged row is complete before any thread sends a part of it
    send(row, item);
  }

  MOE_A2A_DEVICE void finish() {}

 private:
  const Group& group_;
  Target target_;
  Done done_;
  std::byte* staging_;
};

#if !defined(MOE_A2A_HAS_WARP_SENDER)
// The warp's sender of whole rows of a target that has no better one.
// Shared memory that a warp's sender takes: only for rows that are quantised first.
MOE_A2A_HOST_DEVICE constexpr int64_t warp_staging_bytes(int64_t row_bytes, StagedFor what) {
  return what == StagedFor::kQuantizing ? (row_bytes + 127) / 128 * 128 : 0;
}
template <class Item, class Target, class Done>
MOE_A2A_DEVICE auto make_warp_sender(const Warp& warp, Target target, Done done, std::byte* staging, int64_t) {
  return PlainRowSender<Warp, Item, Target, Done>(warp, target, done, staging);
}
#endif

}  // namespace moe_a2a::inline MOE_A2A_TARGET
