// Sends rows, each to several ranks at once, and tells when a row's stores are done. The plain form, for any target:
// a target with a copy engine inside the kernel has a form of its own (see cuda_row_sender.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_a2a {

// A row as it lies at the sender: its values, and for float8 rows the scales, which land `scales_offset` behind.
struct RowSource {
  const std::byte* values = nullptr;
  int64_t num_value_bytes = 0;
  const std::byte* scales = nullptr;
  int64_t num_scale_bytes = 0;
  int64_t scales_offset = 0;
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// `Item` has `members`, the set of ranks that a row goes to. `target(item, rank)` is where it lands on a rank;
// `done(item)` is called by every thread of the group when the row's stores come before whatever the thread signals
// next. `staging`: where a row is put together that is not sent as it lies in memory, row_bytes long.
template <class Group, class Item, class Target, class Done>
class PlainRowSender {
 public:
  MOE_A2A_DEVICE PlainRowSender(const Group& group, Target target, Done done, std::byte* staging)
      : group_(group), target_(target), done_(done), staging_(staging) {}

  MOE_A2A_DEVICE void send(const RowSource& row, const Item& item) {
    const auto values_at = [&](int rank) { return target_(item, rank); };
    multicast_bytes(group_, item.members, values_at, row.values, row.num_value_bytes);
    if (row.num_scale_bytes > 0) {
      const auto scales_at = [&](int rank) { return target_(item, rank) + row.scales_offset; };
      multicast_bytes(group_, item.members, scales_at, row.scales, row.num_scale_bytes);
    }
    group_.release_sync();
    done_(item);
  }

  // The caller's group writes a row here, then send_staged() sends it.
  MOE_A2A_DEVICE std::byte* open_stage() { return staging_; }

  MOE_A2A_DEVICE void send_staged(int64_t num_bytes, const Item& item) {
    group_.sync();  // the staged row is complete before any thread sends a part of it
    send({.values = staging_, .num_value_bytes = num_bytes}, item);
  }

  MOE_A2A_DEVICE void finish() {}

 private:
  const Group& group_;
  Target target_;
  Done done_;
  std::byte* staging_;
};

#if !defined(MOE_A2A_HAS_WARP_SENDER)
// The warp's sender of a target that has no better one.
// Shared memory that a warp's sender takes: only for rows that are put together first.
MOE_A2A_HOST_DEVICE constexpr int64_t warp_staging_bytes(int64_t row_bytes, bool staged) {
  return staged ? (row_bytes + 127) / 128 * 128 : 0;
}
template <class Item, class Target, class Done>
MOE_A2A_DEVICE auto make_warp_sender(const Warp& warp, Target target, Done done, std::byte* staging, int64_t) {
  return PlainRowSender<Warp, Item, Target, Done>(warp, target, done, staging);
}
#endif

}  // namespace moe_a2a::inline MOE_A2A_TARGET
