// Every field of the MoE region, by name, type and shape. Host, kernels and tests access the memory only through it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/arch.h"
#include "comm/rank_set.h"
#include "comm/region.h"
#include "comm/signal.h"
#include "moe/moe_config.h"
#include "moe/route/route_entry.h"

namespace moe_a2a {

// Tokens of a routing table behind one signal. Small tables use short chunks: long ones would be too few for the
// blocks.
inline constexpr int kMaxChunk = 256, kSmallChunk = 64, kFewTokens = 512;
MOE_A2A_HOST_DEVICE constexpr int chunk_length(int num_tokens) {
  return num_tokens <= kFewTokens ? kSmallChunk : kMaxChunk;
}
MOE_A2A_HOST_DEVICE constexpr int num_chunks(int num_tokens) {
  return num_tokens <= kFewTokens ? (num_tokens + kSmallChunk - 1) / kSmallChunk
                                  : (num_tokens + kMaxChunk - 1) / kMaxChunk;
}
// The most chunks of any batch of up to `num_tokens` tokens.
constexpr int most_chunks(int num_tokens) {
  const int of_few = num_chunks(num_tokens < kFewTokens ? num_tokens : kFewTokens);
  return num_chunks(num_tokens) > of_few ? num_chunks(num_tokens) : of_few;
}

// The largest expert_alignment.
inline constexpr int kMaxExpertAlignment = 256;

// Errors that kernels found and treated as dropped. In this rank's device memory, since a device may not be able to
// update host memory atomically. The host reads them in raise_reported().
struct ErrorCounters {
  uint32_t num_bad_choices = 0;
  uint32_t num_lost_routes = 0;     // no room in the masked layout
  uint32_t num_short_y_routes = 0;  // past the last row of the `y` given to combine
  // The latest bad choices, in a ring.
  static constexpr uint32_t kShown = 16;
  int64_t bad_expert[kShown] = {};
  int32_t bad_token[kShown] = {};
};

// B = num_buffers, R = num_ranks, T = num_max_tokens_per_rank, K = num_topk, El = num_local_experts.
struct MoeRegion {
  // ---- symmetric: written by the rank of the "src" index, read by the owner of the memory
  Array<Signal, 3> table_signal;       // [B, R src, chunks of T]  payload of chunk 0: a BatchHeader
  Array<RouteEntry, 4> table_route;    // [B, R src, T, K]
  Array<float, 4> table_weight;        // [B, R src, T, K]
  Array<int32_t, 3> table_landed_idx;  // [B, R src, T]  rows of its chunk that land here before it; -1: not here
  Array<int32_t, 4> table_count;    // [B, R src, chunks, El + 1]  routes to each expert here; last: rows that land here
  Array<Signal, 3> row_signal;      // [B, R src, T]  a row of src has landed
  Array<std::byte, 4> row;          // [B, R src, T, row_stride]  recv_x: each token's slot is its own index
  Array<Signal, 3> combine_signal;  // [B, R src, T]  a partial sum of src is here
  Array<std::byte, 4> combine_row;  // [B, R src, T, row_stride]
  // LL words of small batches, of medium ones the choices; L = num_max_ll_tokens. Accessed only by kernels.
  Array<std::byte, 4> ll_choices;  // [B, R src, L, ll_choices_stride]  expert, weight and batch header of each choice
  Array<std::byte, 4> ll_row;      // [B, R src, L, ll_row_stride]
  Array<std::byte, 4> ll_combine_row;  // [B, R src, L, ll_row_stride]
  // [B, R src]  src no longer reads what this rank dispatched up to this epoch; payload: CreditNote
  Array<Signal, 2> dispatch_credit;
  Array<Signal, 2> combine_refusal;   // [B, R src]  src refused its combine; payload: RefusalCount
  Array<Signal, 1> dispatch_refusal;  // [R src]  epoch: number of the latest dispatch that src had no buffer for

  // ---- local
  Array<uint64_t, 1> epoch;                    // [B]  of the dispatch that holds the buffer; advanced by kernels
  Array<uint32_t, 1> has_given_up;             // [1]  1: a dispatch gave up; what is queued behind it sends nothing
  Array<uint32_t, 1> is_void;                  // [B]  1: the latest dispatch sent nothing and receives nothing
  Array<ErrorCounters, 1> errors;              // [1]
  Array<uint32_t, 2> arrivals;                 // [B, kNumLaunches]  blocks counted in a launch; see count_block()
  Array<uint32_t, 2> tickets;                  // [B, kNumQueues]  units handed out in a launch; see comm/work_queue.h
  Array<int32_t, 2> expert_offsets;            // [B, El + 1]
  Array<int32_t, 2> expert_counts;             // [B, El]
  Array<int32_t, 2> expert_row_index;          // [B, routes]  row (src_rank * T + token) of each route; -1: padding
  Array<float, 2> route_weights;               // [B, routes]
  Array<int32_t, 2> route_src_rank;            // [B, routes]
  Array<int32_t, 2> route_src_token_idx;       // [B, routes]
  Array<int32_t, 2> landed_row;                // [B, R * T]  landed rows, in (src_rank, token) order
  Array<int32_t, 2> landed_offsets;            // [B, R + 1]  where the rows of each src begin in landed_row
  Array<RouteTerm, 3> landed_term;             // [B, R * T rows, K]  the routes of each row that landed, in k order
  Array<int32_t, 3> combine_order;             // [B, kNumOrders, R * T]  landed rows as combine sends them, if whole
  Array<int32_t, 2> num_recv_tokens_per_rank;  // [B, R src]  tokens in the batch of src
  Array<int32_t, 1> sums_return_ll;            // [B]  whether sums return as LL words: only if every batch's may
  Array<RankSet, 2> token_ranks;               // [B, T]  the ranks that each of this rank's tokens went to

  enum Launch { kDispatchSend, kCombineSend, kNumLaunches };
  // Dispatch has a queue for even and one for odd epochs; see advance_epoch().
  enum Queue { kDispatchQueue, kCombineQueue = kDispatchQueue + 2, kNumQueues };
  MOE_A2A_HOST_DEVICE static int dispatch_queue(uint64_t epoch) { return kDispatchQueue + static_cast<int>(epoch % 2); }
  enum RowOrder { kAllRows, kPeersRows, kNumOrders };  // kPeersRows omits the rank's own rows

  static MoeRegion take_from(RegionLayout& symmetric, RegionLayout& local, const MoeConfig& config);
};

// Routes in the largest layout, with expert blocks padded to `expert_alignment`.
int64_t route_list_capacity(const MoeConfig& config, int expert_alignment);

}  // namespace moe_a2a
