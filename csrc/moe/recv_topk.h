// On request, after step 2: the local experts and weights of landed rows, for callers that multiply, weight and sum a
// row's experts themselves. Read from the tables that the rows' ranks have sent.
#pragma once

#include <bit>

#include "moe/route/ll_choice.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The choices of a token that has been dispatched to this rank's buffer.
class ReceivedChoices {
 public:
  // Without a token if row < 0, or if its rank's batch is shorter.
  MOE_A2A_DEVICE ReceivedChoices(const Context& c, int buffer, int row) : c_(c), buffer_(buffer) {
    if (row < 0) return;
    const auto [rank, token] = c.config.by_max_tokens.divide(row);
    const int num_tokens = c.region.num_recv_tokens_per_rank(buffer, rank);
    rank_ = rank;
    token_ = token;
    has_token_ = token < num_tokens;
    are_words_ = c.config.sends_ll_choices(num_tokens);
  }

  // The local expert; -1 if it is elsewhere or dropped.
  MOE_A2A_DEVICE int expert(int k) const {
    if (!has_token_) return -1;
    if (are_words_) return local_expert(c_.config, static_cast<int32_t>(dword(0, k)));
    const RouteEntry entry = c_.region.table_route(buffer_, rank_, token_, k);
    return entry.is_dropped() ? -1 : local_expert(c_.config, entry.expert());
  }
  MOE_A2A_DEVICE float weight(int k) const {
    return are_words_ ? std::bit_cast<float>(dword(1, k)) : c_.region.table_weight(buffer_, rank_, token_, k);
  }

 private:
  MOE_A2A_DEVICE uint32_t dword(int i, int k) const {
    return load_ll(ll_choice_at(c_, buffer_, rank_, token_, k) + i / kLlData).data[i % kLlData];
  }

  const Context& c_;
  int buffer_, rank_ = 0, token_ = 0;
  bool has_token_ = false, are_words_ = false;
};

struct RecvTopk {
  using Args = RecvTopkArgs;
  static constexpr const char* kName = "recv_topk";

  // One thread per row and choice: neighbours store side by side.
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const int num_topk = args.context.config.num_topk;
    const int64_t end = args.num_rows * num_topk, stride = int64_t{grid.size()} * block.size();
    if (args.packed && grid.rank() == 0) store_numbers(args, block);
    if (args.packed) report_rows_without_place(args, grid, block);
    for (int64_t i = int64_t{grid.rank()} * block.size() + block.rank(); i < end; i += stride) {
      const int64_t at = i / num_topk;
      const int k = static_cast<int>(i - at * num_topk);
      const int row = row_at(args, at);
      const ReceivedChoices choices(args.context, args.buffer, row);
      if (!args.packed) {
        store_without_gaps(args, at * num_topk, choices, k);
        continue;
      }
      store(args, i, choices, k);
      if (k > 0) continue;
      args.row_index[at] = row < 0 ? args.context.config.row_capacity() : row;
      if (row >= 0) args.sum_index[row] = static_cast<int32_t>(at);
    }
  }

 private:
  MOE_A2A_DEVICE static int row_at(const Args& args, int64_t i) {
    if (!args.packed) return static_cast<int>(i);
    const Context& c = args.context;
    return i < c.region.landed_offsets(args.buffer, c.config.num_ranks) ? c.region.landed_row(args.buffer, i) : -1;
  }

  MOE_A2A_DEVICE static void store_numbers(const Args& args, const Block& block) {
    const Context& c = args.context;
    for (int r = block.rank(); r < c.config.num_ranks; r += block.size()) {
      args.numbers[r] = c.region.landed_offsets(args.buffer, r + 1);
    }
    for (int e = block.rank(); e < c.config.num_local_experts; e += block.size()) {
      args.numbers[c.config.num_ranks + e] = c.region.expert_counts(args.buffer, e);
    }
  }

  // Rows that arrived past the last packed row. Their sums are wrong, and the host is told.
  MOE_A2A_DEVICE static void report_rows_without_place(const Args& args, const Grid& grid, const Block& block) {
    const Context& c = args.context;
    const int64_t num_landed = c.region.landed_offsets(args.buffer, c.config.num_ranks);
    const int64_t first = args.num_rows + int64_t{grid.rank()} * block.size() + block.rank();
    for (int64_t i = first; i < num_landed; i += int64_t{grid.size()} * block.size()) {
      args.sum_index[c.region.landed_row(args.buffer, i)] = 0;
      atomic_add<Order::kRelaxed, Scope::kDevice>(&c.region.errors.data->num_short_y_routes, 1u);
    }
  }

  MOE_A2A_DEVICE static int64_t no_expert(const Args& args, int64_t place) {
    const MoeConfig& config = args.context.config;
    const int num_others = config.num_experts - config.num_local_experts;
    if (!args.others_in_turn || num_others == 0) return args.no_expert;
    const auto turn = static_cast<uint32_t>(place) % static_cast<uint32_t>(num_others);
    return (args.first_expert + config.num_local_experts + turn) % config.num_experts;
  }

  // At `place`: choice k, or no expert if k < 0 or the expert is elsewhere.
  MOE_A2A_DEVICE static void store(const Args& args, int64_t place, const ReceivedChoices& choices, int k) {
    const int expert = k < 0 ? -1 : choices.expert(k);
    const int64_t id = expert < 0 ? no_expert(args, place) : args.first_expert + expert;
    if (args.wide_ids) {
      static_cast<int64_t*>(args.ids)[place] = id;
    } else {
      static_cast<int32_t*>(args.ids)[place] = static_cast<int32_t>(id);
    }
    args.weights[place] = expert < 0 ? 0.0f : choices.weight(k);
  }

  // The thread of the k-th column stores choice k behind those before it that are here, and fills the column if fewer
  // than k + 1 are.
  MOE_A2A_DEVICE static void store_without_gaps(const Args& args, int64_t first, const ReceivedChoices& choices,
                                                int k) {
    int num_before = 0, total = 0;
    MOE_A2A_ROLLED
    for (int j = 0; j < args.context.config.num_topk; ++j) {
      const bool is_here = choices.expert(j) >= 0;
      total += is_here;
      num_before += is_here && j < k;
    }
    if (choices.expert(k) >= 0) store(args, first + num_before, choices, k);
    if (k >= total) store(args, first + k, choices, -1);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
