// Step 4 of 4: of each of this rank's tokens, wait for the sums of the ranks that worked on it and add them up.
#pragma once

#include "moe/combine/own_sums.h"
#include "rows/ll_sum.h"
#include "rows/streamed_sum.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Where the sum of a rank for a token is.
MOE_A2A_DEVICE const std::byte* partial_sum(const CombineRecvArgs& args, OwnSums own, int rank, int token) {
  return own.keep(rank) ? own.of(token) : args.context.ws.combine_row.at(args.buffer, rank, token);
}

// The partial sums of a token, ranks in ascending order: the order of addition is part of the contract.
template <class T>
class PartialSums {
 public:
  MOE_A2A_DEVICE PartialSums(const CombineRecvArgs& args, OwnSums own, RankSet ranks, int token)
      : args_(args), own_(own), ranks_(ranks), token_(token) {}

  MOE_A2A_DEVICE Term<T> next() {
    if (ranks_.empty()) return {};
    const int rank = ranks_.first();
    ranks_.remove_first();
    return {reinterpret_cast<const T*>(partial_sum(args_, own_, rank, token_)), 1.0f};
  }

 private:
  const CombineRecvArgs& args_;
  OwnSums own_;
  RankSet ranks_;
  int token_;
};

struct CombineRecv {
  using Args = CombineRecvArgs;
  static constexpr const char* kName = "combine_recv";
  static constexpr int kWarps = kBlockThreads / kWarpSize;

  // Shared memory: per warp, what streams the sums of the ranks.
  MOE_A2A_HOST_DEVICE static bool streams(const Args& args) {
    const MoeConfig& config = args.context.config;
    return can_stream(config.num_ranks, args.vector_rows, config.row_bytes(config.dtype)) &&
           kReaderBytes * kWarps <= args.context.max_shared_bytes;
  }
  static size_t shared_bytes(const Args& args) { return streams(args) ? kReaderBytes * kWarps : 0; }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                 OwnSums own = OwnSums()) {
    const uint64_t epoch = args.context.ws.epoch(args.buffer);
    if (args.context.ws.all_send_ll(args.buffer, 0)) {
      for_units_of_warp(args, grid, block, MoeConfig::piece_length(), [&](int token, int number) {
        return receive_piece(args, own, block.warp(), token, number, epoch);
      });
    } else {
      const int length = whole_part_length(args, grid);
      RowReader reader(block.warp(), streams(args) ? shared + block.warp_rank() * kReaderBytes : nullptr);
      for_units_of_warp(args, grid, block, length, [&](int token, int number) {
        const Piece part = Piece::of(args.context.config, number, length);
        return receive_part(args, own, block.warp(), reader, token, part, epoch);
      });
    }
  }

  // Calls receive(token, number) for the parts of the rows, `length` values each, that are this warp's; until one is
  // given up. From the last warp on: the first ones may still be sending.
  template <class Receive>
  MOE_A2A_DEVICE static void for_units_of_warp(const Args& args, const Grid& grid, const Block& block, int length,
                                               const Receive& receive) {
    const int parts = (args.context.config.hidden + length - 1) / length, num_units = args.num_tokens * parts;
    const int warp = kWarps - 1 - block.warp_rank();
    for (int unit = grid.rank() + grid.size() * warp; unit < num_units; unit += grid.size() * kWarps) {
      if (!receive(unit / parts, unit % parts)) return;
    }
  }

  // Where there are few rows for each warp, several add a row up: it makes the last one's way shorter.
  MOE_A2A_DEVICE static int whole_part_length(const Args& args, const Grid& grid) {
    constexpr int kPartsOfRow = kBlockThreads > 1 ? 4 : 1;
    const int parts = args.num_tokens >= 2 * grid.size() * kWarps ? 1 : kPartsOfRow;
    const int length = (args.context.config.hidden + parts - 1) / parts;
    return (length + kScaleBlock - 1) / kScaleBlock * kScaleBlock;
  }

  // A piece that comes as LL words.
  MOE_A2A_DEVICE static bool receive_piece(const Args& args, OwnSums own, const Warp& warp, int token, int number,
                                           uint64_t epoch) {
    const Context& c = args.context;
    const uint64_t start = trace_now();
    const Piece piece = Piece::of(c.config, number);
    const int first_word = number * ll_words_of_piece(c.config, c.config.dtype);
    bool good = true;
    with_element_type(c.config.dtype, [&](auto type) {
      using T = decltype(type);
      T* target = target_of<T>(args, token, piece);
      if (own.are_kept()) {
        const std::byte* own_piece = own.of(token) + piece.first * sizeof(T);
        const LlSums<true> sums{c, args.buffer, token, args.attempt, first_word, epoch, own_piece};
        good = sums.add(warp, piece.size(), args.vector_rows, target);
      } else {
        const LlSums<false> sums{c, args.buffer, token, args.attempt, first_word, epoch};
        good = sums.add(warp, piece.size(), args.vector_rows, target);
      }
    });
    record(c.trace(), warp, {.kind = TraceKind::kReduce, .begin = start, .token = token});
    return !warp.any(!good);
  }

  // A part of a row that comes whole.
  MOE_A2A_DEVICE static bool receive_part(const Args& args, OwnSums own, const Warp& warp, RowReader& reader, int token,
                                          const Piece& part, uint64_t epoch) {
    const Context& c = args.context;
    const RankSet ranks = c.ws.token_ranks(args.buffer, token);
    const RankSet awaited = own.are_kept() ? ranks.without(c.heap.rank) : ranks;
    bool good = true;
    for (int r = warp.rank(); r < c.heap.num_ranks; r += warp.size()) {
      if (!awaited.contains(r)) continue;
      const WaitSite site{moe_op::kCombineRecv, moe_kind::kPartialWait, r, token, args.buffer};
      good &= wait_for(c.ws.combine_signal.at(args.buffer, r, token), epoch, site, c.wait, c.heap, nullptr,
                       {c.ws.combine_refusal.at(args.buffer, r), args.attempt});
    }
    if (warp.any(!good)) return false;  // also what lets the other lanes read what the waiting ones have acquired
    const uint64_t start = trace_now();
    with_element_type(c.config.dtype, [&](auto type) {
      using T = decltype(type);
      T* target = target_of<T>(args, token, part);
      if (streams(args)) {
        const int lane = warp.rank() < c.heap.num_ranks ? warp.rank() : 0;
        const std::byte* row = partial_sum(args, own, lane, token) + part.first * sizeof(T);
        const uint32_t lanes = static_cast<uint32_t>(ranks.bits);
        reader.begin(row, lanes, part.size() * static_cast<int>(sizeof(T)));
        const auto open = [&](int first) { return target + first; };
        add_streamed<T>(warp, reader, lanes, part.size(), [](int) { return 1.0f; }, open, [](int) {});
      } else {
        add_rows(warp, part, args.vector_rows, PartialSums<T>(args, own, ranks, token), target);
      }
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
