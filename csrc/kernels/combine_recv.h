// Step 4 of 4: of each of this rank's tokens, wait for the sums of the ranks that worked on it and add them up.
#pragma once

#include "kernels/row.h"

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
    const int pieces = c.ws.num_pieces(args.buffer, 0);
    // Whole rows are added up by several warps, which makes the last one's way shorter.
    const int parts = pieces > 1 ? pieces : c.config.num_pieces(kMaxPiecesOfBatch / kPartsOfRow);
    const int num_units = args.num_tokens * parts, stride = grid.size() * block.num_warps();
    for (int unit = grid.rank() + grid.size() * block.warp_rank(); unit < num_units; unit += stride) {
      const int token = unit / parts;
      const Piece part = Piece::of(c.config, parts, unit % parts);
      if (!receive_part(args, block.warp(), token, part, pieces > 1 ? unit : token, epoch)) return;
    }
  }

  static constexpr int kPartsOfRow = kBlockThreads > 1 ? 4 : 1;

  // `signal_idx`: of the piece that the part lies in.
  MOE_A2A_DEVICE static bool receive_part(const Args& args, const Warp& warp, int token, const Piece& part,
                                          int signal_idx, uint64_t epoch) {
    const Context& c = args.context;
    const RankSet ranks = c.ws.token_ranks(args.buffer, token);
    bool good = true;
    for (int r = warp.rank(); r < c.heap.num_ranks; r += warp.size()) {
      if (!ranks.contains(r)) continue;
      const WaitSite site{Operation::kCombineRecv, Phase::kPartialSum, r, token, args.buffer};
      good &= wait_for(c.ws.combine_signal.at(args.buffer, r, signal_idx), epoch, site, c.wait, c.heap, nullptr,
                       c.ws.combine_refusal.at(args.buffer, r), args.attempt);
    }
    if (warp.any(!good)) return false;  // also what lets the other lanes read what the waiting ones have acquired
    const uint64_t start = trace_now(c.trace());
    with_element_type(c.config.dtype, [&](auto type) {
      using T = decltype(type);
      T* target = reinterpret_cast<T*>(args.combined_x) + static_cast<int64_t>(token) * c.config.hidden;
      add_rows(warp, part, args.vector_rows, PartialSums<T>(args, ranks, token), target);
    });
    record(c.trace(), warp, {.kind = TraceKind::kReduce, .begin = start, .token = token});
    return true;
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
