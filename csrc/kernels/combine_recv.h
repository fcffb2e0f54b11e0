// Step 4 of 4: of each of this rank's tokens, wait for the sums of the ranks that worked on it and add them up.
#pragma once

#include "kernels/ll_sum.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The partial sums of a token, ranks in ascending order: the order of addition is part of the contract.
template <class T>
class PartialSums {
 public:
  MOE_A2A_DEVICE PartialSums(const CombineRecvArgs& args, RankSet ranks, int token)
      : args_(args), ranks_(ranks), token_(token) {}

  MOE_A2A_DEVICE Term<T> next() {
    if (ranks_.empty()) return {};
    const int rank = ranks_.first();
    ranks_.remove_first();
    return {reinterpret_cast<const T*>(args_.context.ws.combine_row.at(args_.buffer, rank, token_)), 1.0f};
  }

 private:
  const CombineRecvArgs& args_;
  RankSet ranks_;
  int token_;
};

struct CombineRecv {
  using Args = CombineRecvArgs;
  static constexpr const char* kName = "combine_recv";

  static size_t shared_bytes(const Args&) { return 0; }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const Context& c = args.context;
    const uint64_t epoch = c.ws.epoch(args.buffer);
    const bool by_ll = c.ws.all_send_ll(args.buffer, 0);
    // Whole rows are added up by several warps too, which makes the last one's way shorter.
    const int length = by_ll ? MoeConfig::piece_length() : (c.config.hidden + kPartsOfRow - 1) / kPartsOfRow;
    const int part_length = (length + kScaleBlock - 1) / kScaleBlock * kScaleBlock;
    const int parts = (c.config.hidden + part_length - 1) / part_length;
    const int num_units = args.num_tokens * parts, stride = grid.size() * block.num_warps();
    // From the last warp on: the first ones may still be sending.
    const int warp = block.num_warps() - 1 - block.warp_rank();
    for (int unit = grid.rank() + grid.size() * warp; unit < num_units; unit += stride) {
      const int token = unit / parts, number = unit % parts;
      const bool good = by_ll
                            ? receive_piece(args, block.warp(), token, number, epoch)
                            : receive_part(args, block.warp(), token, Piece::of(c.config, number, part_length), epoch);
      if (!good) return;
    }
  }

  static constexpr int kPartsOfRow = kBlockThreads > 1 ? 4 : 1;

  // A piece that comes as LL words.
  MOE_A2A_DEVICE static bool receive_piece(const Args& args, const Warp& warp, int token, int number, uint64_t epoch) {
    const Context& c = args.context;
    const uint64_t start = trace_now(c.trace());
    const Piece piece = Piece::of(c.config, number);
    const LlSums sums{c, args.buffer, token, args.attempt, number * ll_words_of_piece(c.config, c.config.dtype), epoch};
    bool good = true;
    with_element_type(c.config.dtype, [&](auto type) {
      using T = decltype(type);
      good = sums.add(warp, piece.size(), args.vector_rows, target_of<T>(args, token, piece));
    });
    record(c.trace(), warp, {.kind = TraceKind::kReduce, .begin = start, .token = token});
    return !warp.any(!good);
  }

  // A part of a row that comes whole.
  MOE_A2A_DEVICE static bool receive_part(const Args& args, const Warp& warp, int token, const Piece& part,
                                          uint64_t epoch) {
    const Context& c = args.context;
    const RankSet ranks = c.ws.token_ranks(args.buffer, token);
    bool good = true;
    for (int r = warp.rank(); r < c.heap.num_ranks; r += warp.size()) {
      if (!ranks.contains(r)) continue;
      const WaitSite site{Operation::kCombineRecv, Phase::kPartialSum, r, token, args.buffer};
      good &= wait_for(c.ws.combine_signal.at(args.buffer, r, token), epoch, site, c.wait, c.heap, nullptr,
                       {c.ws.combine_refusal.at(args.buffer, r), args.attempt});
    }
    if (warp.any(!good)) return false;  // also what lets the other lanes read what the waiting ones have acquired
    const uint64_t start = trace_now(c.trace());
    with_element_type(c.config.dtype, [&](auto type) {
      using T = decltype(type);
      add_rows(warp, part, args.vector_rows, PartialSums<T>(args, ranks, token), target_of<T>(args, token, part));
    });
    record(c.trace(), warp, {.kind = TraceKind::kReduce, .begin = start, .token = token});
    return true;
  }

  template <class T>
  MOE_A2A_DEVICE static T* target_of(const Args& args, int token, const Piece& piece) {
    return reinterpret_cast<T*>(args.combined_x) + static_cast<int64_t>(token) * args.context.config.hidden +
           piece.first;
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
