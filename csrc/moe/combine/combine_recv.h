// Step 4 of 4: for each of this rank's tokens, add up the sums of the ranks that worked on it, as they arrive.
#pragma once

#include "moe/combine/own_sums.h"
#include "moe/wires.h"
#include "rows/coded_row.h"
#include "rows/ll_sum.h"
#include "rows/row_sum.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Where a rank's sum for a token lies.
MOE_A2A_DEVICE const std::byte* partial_sum(const CombineRecvArgs& args, const OwnSums& own, int rank, int token) {
  return own.keep(rank) ? own.of(token) : args.context.region.combine_row.at(args.buffer, rank, token);
}

// A token's partial sums, ranks ascending: the order of addition is part of the contract.
template <class T>
class PartialSums {
 public:
  MOE_A2A_DEVICE PartialSums(const CombineRecvArgs& args, const OwnSums& own, RankSet ranks, int token)
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

// The same as rows that may be coded. A row's signal carries its codec; own sums that are kept in place have no signal.
class CodedPartialSums {
 public:
  MOE_A2A_DEVICE CodedPartialSums(const CombineRecvArgs& args, const OwnSums& own, const Warp& warp, RankSet ranks,
                                  int token)
      : args_(args), own_(own), ranks_(ranks), token_(token) {
    uint64_t bits[kCodecBits] = {};
    for (int r = warp.rank(); r < args.context.heap.num_ranks; r += warp.size()) {
      if (!ranks.contains(r) || own.keep(r)) continue;
      const Signal* signal = args.context.region.combine_signal.at(args.buffer, r, token);
      const uint32_t codec = Signal::payload_of(atomic_load<Order::kRelaxed, Scope::kSystem>(&signal->word));
      for (int i = 0; i < kCodecBits; ++i) bits[i] |= uint64_t{codec >> i & 1} << r;
    }
    for (int i = 0; i < kCodecBits; ++i) codec_bits_[i] = warp.reduce_or(bits[i]);
  }

  MOE_A2A_DEVICE CodedRow next() {
    if (ranks_.empty()) return {};
    const int rank = ranks_.first();
    ranks_.remove_first();
    uint32_t codec = 0;
    for (int i = 0; i < kCodecBits; ++i) codec |= static_cast<uint32_t>(codec_bits_[i] >> rank & 1) << i;
    const MoeConfig& config = args_.context.config;
    return {const_cast<std::byte*>(partial_sum(args_, own_, rank, token_)), static_cast<LineCodec>(codec), config.dtype,
            config.hidden};
  }

 private:
  static constexpr int kCodecBits = 3;

  const CombineRecvArgs& args_;
  OwnSums own_;
  RankSet ranks_;
  int token_;
  uint64_t codec_bits_[kCodecBits];  // bit i of each rank's codec
};

// This warp's parts of rows. The last warps get the first parts: the first warps may still be sending.
MOE_A2A_DEVICE RoundRobin<> parts_of_warp(const Grid& grid, const Block& block) {
  return make_round_robin(grid, kBlockWarps - 1 - block.warp_rank(), kBlockWarps);
}

// Calls receive(token, number) for the rest of `parts`, `length` values each, until one returns false: the next walk
// begins with that one.
template <class Receive>
MOE_A2A_DEVICE void walk_parts(const CombineRecvArgs& args, RoundRobin<>& parts, int length, const Receive& receive) {
  const int per_row = (args.context.config.hidden + length - 1) / length;
  parts.walk(args.num_tokens * per_row, [&](int part) { return receive(part / per_row, part % per_row); });
}

// For whole rows: if there are few, several warps share each, so that the last ones finish earlier.
MOE_A2A_DEVICE int part_length(const CombineRecvArgs& args, const Grid& grid) {
  constexpr int kPartsOfRow = kBlockThreads > 1 ? 4 : 1;
  const int parts = args.num_tokens >= 2 * grid.size() * kBlockWarps ? 1 : kPartsOfRow;
  const int length = (args.context.config.hidden + parts - 1) / parts;
  return (length + kScaleBlock - 1) / kScaleBlock * kScaleBlock;
}

enum class Arrived { kNot, kPlain, kCoded };  // kCoded: some of the sums are

// Waits for a token's sums, one lane per rank; kNot if a wait gave up.
MOE_A2A_DEVICE Arrived wait_for_sums(const CombineRecvArgs& args, const OwnSums& own, const Exchange& exchange,
                                     const Warp& warp, RankSet ranks, int token) {
  const Context& c = args.context;
  const RankSet awaited = own.are_kept() ? ranks.without(c.heap.rank) : ranks;
  constexpr uint32_t kGaveUp = ~0u;
  uint32_t codecs = 0;
  for (int r = warp.rank(); r < c.heap.num_ranks; r += warp.size()) {
    if (!awaited.contains(r)) continue;
    const WaitSite site{moe_op::kCombineRecv, moe_kind::kPartialWait, r, token, args.buffer};
    uint32_t codec = 0;
    codecs |= RowWire::receive(exchange, site, args.refusal_of(r), &codec) ? codec : kGaveUp;
  }
  // The votes also let the other lanes read what the waiting ones have acquired.
  if (!warp.any(codecs != 0)) return Arrived::kPlain;
  return warp.any(codecs == kGaveUp) ? Arrived::kNot : Arrived::kCoded;
}

// Receives the rest of this warp's parts, coded or not. Out of line, called last and with copies, so that loops without
// coded sums keep their registers.
MOE_A2A_RARE void receive_coded(const CombineRecvArgs& args, OwnSums own, RoundRobin<> parts, int length) {
  const Context& c = args.context;
  const Exchange exchange = combine_rows(c, args.buffer, c.region.epoch(args.buffer));
  const RowLayout layout = c.config.row(c.config.dtype);
  const Warp warp;
  walk_parts(args, parts, length, [&](int token, int number) {
    const RankSet ranks = c.region.token_ranks(args.buffer, token);
    if (wait_for_sums(args, own, exchange, warp, ranks, token) == Arrived::kNot) return false;
    const uint64_t start = trace_now();
    const Piece part = layout.piece(number, length);
    const int64_t first_value = static_cast<int64_t>(token) * c.config.hidden + part.first;
    add_coded_rows(warp, part, args.vector_rows, CodedPartialSums(args, own, warp, ranks, token), c.config.dtype,
                   args.combined_x + first_value * size_of(c.config.dtype));
    record(exchange.trace(), warp, {.kind = TraceKind::kReduce, .begin = start, .token = token});
    return true;
  });
}

struct CombineRecv {
  using Args = CombineRecvArgs;
  static constexpr const char* kName = "combine_recv";

  struct Plan {
    SharedPart<std::byte> readers;  // [warps, kReaderBytes]  if sums are streamed
    int bytes = 0;
  };
  MOE_A2A_HOST_DEVICE static bool streams(const Args& args) {
    const Context& c = args.context;
    return can_stream(c.config.num_ranks, args.vector_rows, c.config.row_bytes(c.config.dtype)) &&
           kReaderBytes * kBlockWarps <= c.max_shared_bytes;
  }
  MOE_A2A_HOST_DEVICE static Plan plan(const Args& args) {
    SharedCarver carver;
    const SharedPart<std::byte> readers = carver.take_lines(streams(args) ? kReaderBytes * kBlockWarps : 0);
    return {readers, carver.bytes()};
  }
  static size_t shared_bytes(const Args& args) { return plan(args).bytes; }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    with_wire(args.context.region.sums_return_ll(args.buffer),
              [&](auto wire) MOE_A2A_INLINED { receive(wire, args, OwnSums(), grid, block, shared); });
  }

  // ---- the steps, run by its own launch or by a fused one (combine.h)

  // LL words: two warps share a piece if some are free; each then has all of its words in flight at once.
  MOE_A2A_DEVICE static int log2_parts(const Args& args, const Grid& grid, const Block& block) {
    const int pieces = args.num_tokens * args.context.config.num_pieces();
    return kBlockThreads > 1 && 2 * pieces < grid.size() * block.num_warps() ? 1 : 0;
  }
  // Prefetches what receiving this warp's first part begins with, if sums return as LL words.
  MOE_A2A_DEVICE static void prefetch_first_part(const Args& args, const Grid& grid, const Block& block) {
    const int piece = parts_of_warp(grid, block).next() >> log2_parts(args, grid, block);
    if (block.warp().rank() != 0 || piece >= args.num_tokens * args.context.config.num_pieces()) return;
    prefetch(args.context.region.token_ranks.at(args.buffer, args.context.config.by_pieces.divide(piece).quotient));
  }

  MOE_A2A_DEVICE static void receive(std::type_identity<LlWire>, const Args& args, const OwnSums& own, const Grid& grid,
                                     const Block& block, std::byte*) {
    const Exchange exchange = combine_rows(args.context, args.buffer, args.context.region.epoch(args.buffer));
    RoundRobin<> parts = parts_of_warp(grid, block);
    const int log2 = log2_parts(args, grid, block);
    parts.walk(args.num_tokens * args.context.config.num_pieces() << log2, [&](int unit) {
      const auto [token, piece] = exchange.by_pieces.divide(unit >> log2);
      return receive_part(args, own, exchange, block.warp(), token, piece, unit & ((1 << log2) - 1), 1 << log2);
    });
  }

  MOE_A2A_DEVICE static void receive(std::type_identity<RowWire>, const Args& args, const OwnSums& own,
                                     const Grid& grid, const Block& block, std::byte* shared) {
    const Exchange exchange = combine_rows(args.context, args.buffer, args.context.region.epoch(args.buffer));
    const RowLayout layout = args.context.config.row(args.context.config.dtype);
    const int length = part_length(args, grid);
    const Warp warp = block.warp();
    RoundRobin<> parts = parts_of_warp(grid, block);
    auto arrived = Arrived::kPlain;
    // add(token, part, ranks) forms the sum once its terms have arrived.
    const auto receive_all = [&](const auto& add) {
      walk_parts(args, parts, length, [&](int token, int number) {
        const RankSet ranks = args.context.region.token_ranks(args.buffer, token);
        arrived = wait_for_sums(args, own, exchange, warp, ranks, token);
        if (arrived != Arrived::kPlain) return false;
        const uint64_t start = trace_now();
        add(token, layout.piece(number, length), ranks);
        record(exchange.trace(), warp, {.kind = TraceKind::kReduce, .begin = start, .token = token});
        return true;
      });
    };
    if (streams(args)) {
      std::byte* memory = plan(args).readers.in(shared) + block.warp_rank() * kReaderBytes;
      with_row_reader(warp, memory, [&](auto& reader) {
        receive_all(
            [&](int token, const Piece& part, RankSet ranks) { stream(args, own, warp, reader, token, part, ranks); });
      });
    } else {
      receive_all([&](int token, const Piece& part, RankSet ranks) { add(args, own, warp, token, part, ranks); });
    }
    if (arrived == Arrived::kCoded) receive_coded(args, own, parts, length);
  }

 private:
  template <class T>
  MOE_A2A_DEVICE static T* target_of(const Args& args, int token, const Piece& piece) {
    return reinterpret_cast<T*>(args.combined_x) + static_cast<int64_t>(token) * args.context.config.hidden +
           piece.first;
  }

  // ---- LL words

  MOE_A2A_DEVICE static bool receive_part(const Args& args, const OwnSums& own, const Exchange& exchange,
                                          const Warp& warp, int token, int number, int part, int num_parts) {
    const Context& c = args.context;
    const uint64_t start = trace_now();
    const RowLayout layout = c.config.row(c.config.dtype);
    const Piece piece = layout.piece(number);
    const int first_word = number * ll_words_per_piece(layout);
    const WaitSite site{moe_op::kCombineRecv, moe_kind::kPartialWait, 0, token, args.buffer};
    bool good = true;
    with_element_type(c.config.dtype, [&](auto type) {
      using T = decltype(type);
      T* target = target_of<T>(args, token, piece);
      if (own.are_kept()) {
        const std::byte* own_piece = own.of(token) + piece.first * sizeof(T);
        LlSum<true> sum{exchange,     c.region.token_ranks(args.buffer, token),
                        site,         c.region.combine_refusal,
                        args.attempt, args.seen,
                        args.number,  first_word,
                        own_piece};
        good = sum.add(warp, part, num_parts, piece.size(), args.vector_rows, target);
      } else {
        LlSum<false> sum{exchange,     c.region.token_ranks(args.buffer, token),
                         site,         c.region.combine_refusal,
                         args.attempt, args.seen,
                         args.number,  first_word};
        good = sum.add(warp, part, num_parts, piece.size(), args.vector_rows, target);
      }
    });
    record(c.trace(), warp, {.kind = TraceKind::kReduce, .begin = start, .token = token});
    return !warp.any(!good);
  }

  // ---- whole rows

  MOE_A2A_DEVICE static void add(const Args& args, const OwnSums& own, const Warp& warp, int token, const Piece& part,
                                 RankSet ranks) {
    with_element_type(args.context.config.dtype, [&](auto type) {
      using T = decltype(type);
      add_rows(warp, part, args.vector_rows, PartialSums<T>(args, own, ranks, token), target_of<T>(args, token, part));
    });
  }

  template <class Reader>
  MOE_A2A_DEVICE static void stream(const Args& args, const OwnSums& own, const Warp& warp, Reader& reader, int token,
                                    const Piece& part, RankSet ranks) {
    const int rank = warp.rank() < args.context.heap.num_ranks ? warp.rank() : 0;
    const uint32_t lanes = static_cast<uint32_t>(ranks.bits);
    with_element_type(args.context.config.dtype, [&](auto type) {
      using T = decltype(type);
      T* target = target_of<T>(args, token, part);
      const std::byte* row = partial_sum(args, own, rank, token) + part.first * sizeof(T);
      reader.begin(row, lanes, part.size() * static_cast<int>(sizeof(T)));
      const auto store = [&](int first, const StreamedSums<T>& sums) {
        store_streamed(warp, sums, part.size() - first, target + first);
      };
      add_streamed<T>(warp, reader, lanes, part.size(), [](int) { return 1.0f; }, store);
    });
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
