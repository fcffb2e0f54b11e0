#include "moe/workspace.h"

#include <algorithm>

namespace moe_a2a {
namespace {

// Hands out arrays one after the other, each on a 128-byte line of its own.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <class T, class... Extent>
  Array<T, sizeof...(Extent)> take(Extent... extent) {
    constexpr int kRank = sizeof...(Extent);
    const int64_t extents[] = {static_cast<int64_t>(extent)...};
    Array<T, kRank> array;
    int64_t count = 1;
    for (int i = kRank - 1; i >= 0; --i) {
      if (i < kRank - 1) array.stride[i] = count;
      count *= extents[i];
    }
    offset_ = (offset_ + 127) / 128 * 128;
    array.data = reinterpret_cast<T*>(base_ + offset_);
    const size_t nbytes = static_cast<size_t>(count) * sizeof(T);
    digest_ = (digest_ ^ offset_ ^ nbytes) * 0x100000001b3u;  // FNV-1a over the sequence of allocations
    offset_ += nbytes;
    return array;
  }

  size_t size() const { return (offset_ + 4095) / 4096 * 4096; }
  uint64_t digest() const { return digest_; }

 private:
  std::byte* base_;
  size_t offset_ = 0;
  uint64_t digest_ = 0xcbf29ce484222325u;
};

}  // namespace

int64_t route_list_capacity(const MoeConfig& config, int expert_alignment) {
  return config.route_capacity() + static_cast<int64_t>(config.num_local_experts()) * (expert_alignment - 1);
}

Workspace make_workspace(const MoeConfig& config, std::byte* symmetric, std::byte* local, WorkspaceSize* size) {
  const int64_t b = config.num_buffers, r = config.num_ranks, t = config.num_max_tokens_per_rank;
  const int64_t k = config.num_topk, experts = config.num_local_experts();
  const int64_t chunks = most_chunks(config.num_max_tokens_per_rank), ll = config.num_max_ll_tokens;
  const int64_t lists = std::max(route_list_capacity(config, kMaxExpertAlignment), experts * r * t);
  Workspace w;

  Carver shared(symmetric);
  w.table_signal = shared.take<Signal>(b, r, chunks);
  w.table_route = shared.take<RouteEntry>(b, r, t, k);
  w.table_weight = shared.take<float>(b, r, t, k);
  w.table_landing = shared.take<int32_t>(b, r, t);
  w.table_count = shared.take<int32_t>(b, r, chunks, experts + 1);
  w.row_signal = shared.take<Signal>(b, r, t);
  w.row = shared.take<std::byte>(b, r, t, config.max_row_stride());
  w.combine_signal = shared.take<Signal>(b, r, t);
  w.combine_row = shared.take<std::byte>(b, r, t, config.row_stride(config.dtype));
  w.ll_choices = shared.take<std::byte>(b, r, ll, config.ll_choices_stride());
  w.ll_row = shared.take<std::byte>(b, r, ll, config.ll_row_stride());
  w.ll_combine_row = shared.take<std::byte>(b, r, ll, config.ll_row_stride());
  w.dispatch_credit = shared.take<Signal>(b, r);
  w.combine_refusal = shared.take<Signal>(b, r);
  w.refusal_text = shared.take<uint64_t>(b, r, kRefusalWords);
  w.goodbye = shared.take<Signal>(r);
  w.clock_meeting = shared.take<Signal>(r);
  w.clock_message = shared.take<Signal>(r);
  w.clock_log = shared.take<uint64_t>(r, kMaxClockRounds + 1);
  w.poison = shared.take<uint32_t>(1);

  Carver own(local);
  w.epoch = own.take<uint64_t>(b);
  w.tally = own.take<Tally>(1);
  w.clock_epoch = own.take<uint64_t>(r);
  w.clock_reading = own.take<ClockReading>(r);
  w.arrivals = own.take<uint32_t>(b, Workspace::kNumLaunches);
  w.tickets = own.take<uint32_t>(b, Workspace::kNumLaunches);
  w.expert_offsets = own.take<int32_t>(b, experts + 1);
  w.expert_counts = own.take<int32_t>(b, experts);
  w.expert_row_index = own.take<int32_t>(b, lists);
  w.route_weight = own.take<float>(b, lists);
  w.route_src_rank = own.take<int32_t>(b, lists);
  w.route_src_token = own.take<int32_t>(b, lists);
  w.landed_row = own.take<int32_t>(b, r * t);
  w.landed_offsets = own.take<int32_t>(b, r + 1);
  w.landed_term = own.take<RouteTerm>(b, r * t, k);
  w.num_recv_tokens = own.take<int32_t>(b, r);
  w.all_send_ll = own.take<int32_t>(b, 1);
  w.token_ranks = own.take<RankSet>(b, t);

  *size = {shared.size(), own.size(), shared.digest()};
  return w;
}

}  // namespace moe_a2a
