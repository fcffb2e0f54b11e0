// Step 3 of 4: of each landed row, add up what the local experts made of it and push the one sum back to its owner.
#pragma once

#include "comm/signal_desk.h"
#include "comm/units.h"
#include "moe/combine/landed_line.h"
#include "rows/ll_stream.h"
#include "rows/streamed_sum.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The expert outputs of a landed row, choice by choice in k order: the order of addition is part of the contract.
template <class T>
class RouteTerms {
 public:
  MOE_A2A_DEVICE RouteTerms(const CombineSendArgs& args, const RouteTerm* term)
      : args_(args), term_(term), end_(term + args.context.config.num_topk) {}

  MOE_A2A_DEVICE Term<T> next() {
    while (term_ != end_) {
      const RouteTerm term = *term_++;
      if (term.position < 0) {
        term_ = end_;
      } else if (term.position < args_.num_y_rows) {
        return {reinterpret_cast<const T*>(args_.y[term.position]), term.weight};
      }
    }
    return {};
  }

 private:
  const CombineSendArgs& args_;
  const RouteTerm* term_;
  const RouteTerm* end_;
};

// The same, one to a lane of a warp; those of `lanes` are added, in ascending order.
struct LaneTerms {
  const std::byte* row = nullptr;
  float weight = 0;
  uint32_t lanes = 0;
};

struct CombineSend {
  using Args = CombineSendArgs;
  static constexpr const char* kName = "combine_send";

  // A sum on its way.
  struct Item {
    RankSet members;
    int token;
    int turn;  // the rank that it goes to
  };
  using Desk = SignalDesk<Item>;
  static constexpr int kDeskBytes = Desk::shared_bytes();

  // Shared memory: per warp, what a row sender takes, or what a streamed sum does, or the sum of a piece that leaves as
  // LL words. Whether they will be LL words is for the largest batch of any rank to say, so there is room for both.
  MOE_A2A_HOST_DEVICE static bool streams(const Args& args) {
    return !args.presummed && can_stream(args.context.config.num_topk, args.vector_rows, row_bytes(args));
  }
  MOE_A2A_HOST_DEVICE static int staging_bytes(const Args& args) {
    if (!args.presummed) return streams(args) ? kReaderBytes + kPieceSenderBytes : 0;
    return staging_that_fits(args.context, warp_staging_bytes(row_bytes(args), StagedFor::kSending), kDeskBytes);
  }
  // Warps of a block that send whole rows: as many as there is staging for.
  MOE_A2A_HOST_DEVICE static int num_senders(const Args& args) {
    return Desk::num_senders(warps_with_staging(args.context, staging_bytes(args), kDeskBytes));
  }
  MOE_A2A_HOST_DEVICE static int64_t row_bytes(const Args& args) {
    return args.context.config.row_bytes(args.context.config.dtype);
  }
  MOE_A2A_HOST_DEVICE static int ll_staging_bytes(const Args& args) {
    const MoeConfig& config = args.context.config;
    if (args.presummed || config.num_max_ll_tokens == 0) return 0;
    return MoeConfig::piece_length() * size_of(config.dtype);
  }
  static size_t shared_bytes(const Args& args) {
    const size_t rows = kDeskBytes + staging_bytes(args) * num_senders(args);
    const size_t pieces = ll_staging_bytes(args) * warps_with_staging(args.context, ll_staging_bytes(args));
    return rows > pieces ? rows : pieces;
  }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                 OwnSums own = OwnSums()) {
    const Context& c = args.context;
    const uint64_t epoch = c.ws.epoch(args.buffer);
    send(args, grid, block, shared, LandedLine(c, args.buffer, own), epoch);
    if (block.is_last_warp() && count_block(grid, c.ws, args.buffer, Workspace::kCombineSend)) {
      return_credit(c, args.buffer, epoch);
    }
  }

  // Tells every rank, also those that sent nothing, that its part of this buffer is no longer read here. Pairs with
  // wait_for_credits() in dispatch_send. (The combine rows need no credit of their own: a rank sends the routing table
  // of its next dispatch on this buffer after its combine_recv, and we write its combine rows again only after that
  // table has come, from every rank, tokens or none.)
  MOE_A2A_DEVICE static void return_credit(const Context& c, int buffer, uint64_t epoch) {
    signal_many(c.heap, RankSet::all(c.heap.num_ranks), c.ws.dispatch_credit.at(buffer, c.heap.rank), epoch);
  }

  // As LL words when the batches of all ranks are small.
  MOE_A2A_DEVICE static void send(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                  const LandedLine& line, uint64_t epoch) {
    if (args.context.ws.all_send_ll(args.buffer, 0)) {
      send_pieces(args, grid, block, shared, line, epoch);
    } else if (!args.presummed && !streams(args) && line.size() < grid.size() * block.num_warps() / 2) {
      send_few_sums(args, grid, block, line, epoch);
    } else {
      const auto tell = [&](const Item& item) { signal(args, item, epoch); };
      send_and_tell<Item>(block, shared, num_senders(args), tell, [&](const auto& done) {
        const int num_bytes = staging_bytes(args);
        std::byte* staging = num_bytes > 0 ? shared + kDeskBytes + block.warp_rank() * num_bytes : nullptr;
        if (args.presummed) {
          send_presummed(args, grid, block, staging, line, done);
        } else if (streams(args)) {
          stream_sums(args, grid, block, staging, line, done);
        } else {
          send_sums(args, grid, block, line, done);
        }
      });
    }
  }

  // Calls send(landed, item) for each row of this warp.
  template <class Send>
  MOE_A2A_DEVICE static void for_rows_of_warp(const Args& args, const Grid& grid, const Block& block,
                                              const LandedLine& line, const Send& send) {
    uint32_t* ticket = args.context.ws.tickets.at(args.buffer, Workspace::kCombineSend);
    const int num_rows = line.size();
    for (Units units(grid, block, num_senders(args), ticket); units.current() < num_rows; units.advance()) {
      const int landed = line.in_turn(units.current());
      const Item item = item_of(args, landed);
      const uint64_t start = trace_now();
      send(landed, item);
      record_unit(args, block.warp(), item, start);
    }
  }

  template <class Done>
  MOE_A2A_DEVICE static void send_presummed(const Args& args, const Grid& grid, const Block& block, std::byte* staging,
                                            const LandedLine& line, const Done& done) {
    const Warp warp = block.warp();
    const auto landing_at = [&](const Item& item, int rank) { return landing(args, item, rank); };
    auto sender = make_warp_sender<Item>(warp, landing_at, done, staging, row_bytes(args));
    const Piece whole{0, args.context.config.hidden};
    for_rows_of_warp(args, grid, block, line,
                     [&](int, const Item& item) { sender.send(row_source(args, whole, item), item); });
    sender.finish();
  }

  template <class Done>
  MOE_A2A_DEVICE static void stream_sums(const Args& args, const Grid& grid, const Block& block, std::byte* staging,
                                         const LandedLine& line, const Done& done) {
    const Warp warp = block.warp();
    const auto landing_at = [&](const Item& item, int rank) { return landing(args, item, rank); };
    RowReader reader(warp, staging);
    PieceSender<Item, decltype(landing_at), Done> sender(warp, landing_at, done, staging + kReaderBytes);
    with_element_type(args.context.config.dtype, [&](auto type) {
      using T = decltype(type);
      constexpr int kElement = sizeof(T);
      const int hidden = args.context.config.hidden;
      for_rows_of_warp(args, grid, block, line, [&](int landed, const Item& item) {
        const LaneTerms terms = lane_terms(args, warp, landed);
        reader.begin(terms.row, terms.lanes, hidden * kElement);
        const auto weight_of = [&](int lane) { return warp.broadcast(terms.weight, lane); };
        const auto open = [&](int) { return reinterpret_cast<T*>(sender.open()); };
        const auto close = [&](int first) {
          const int begin = first * kElement, left = hidden * kElement - begin;
          sender.send(item, begin, left < kStreamBytes ? left : kStreamBytes, left <= kStreamBytes);
        };
        add_streamed<T>(warp, reader, terms.lanes, hidden, weight_of, open, close);
      });
    });
    sender.finish();
  }

  // Without a stream: each sum is formed where it lands.
  template <class Done>
  MOE_A2A_DEVICE static void send_sums(const Args& args, const Grid& grid, const Block& block, const LandedLine& line,
                                       const Done& done) {
    const Warp warp = block.warp();
    const Piece whole{0, args.context.config.hidden};
    for_rows_of_warp(args, grid, block, line, [&](int landed, const Item& item) {
      add_up(args, warp, whole, landed, landing(args, item, item.turn));
      warp.release_sync();
      if (warp.rank() == 0) done(item);
    });
  }

  // The same where most warps would have no row of their own: the threads of a block form each sum together.
  MOE_A2A_DEVICE static void send_few_sums(const Args& args, const Grid& grid, const Block& block,
                                           const LandedLine& line, uint64_t epoch) {
    for (int i = grid.rank(); i < line.size(); i += grid.size()) {
      const int landed = line.in_turn(i);
      const Item item = item_of(args, landed);
      const uint64_t start = trace_now();
      add_up(args, block, Piece{0, args.context.config.hidden}, landed, landing(args, item, item.turn));
      block.release_sync();
      if (block.rank() == 0) signal(args, item, epoch);
      record_unit(args, block.warp(), item, start);
    }
  }

  // The warps go along the pieces of all rows side by side.
  MOE_A2A_DEVICE static void send_pieces(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                         const LandedLine& line, uint64_t epoch) {
    const Context& c = args.context;
    const Warp warp = block.warp();
    const int pieces = c.config.num_pieces(), num_units = line.size() * pieces;
    const int num_warps = warps_with_staging(c, ll_staging_bytes(args));
    if (block.warp_rank() >= num_warps) return;
    std::byte* staging = shared + block.warp_rank() * ll_staging_bytes(args);
    for (int unit = grid.rank() + grid.size() * block.warp_rank(); unit < num_units; unit += grid.size() * num_warps) {
      send_piece(args, warp, line.behind_own(unit / pieces), unit % pieces, staging, epoch);
    }
  }

  // Taken by LlSums in combine_recv.
  MOE_A2A_DEVICE static void send_piece(const Args& args, const Warp& warp, int landed, int number, std::byte* staging,
                                        uint64_t epoch) {
    const Context& c = args.context;
    const uint64_t start = trace_now();
    const Piece piece = Piece::of(c.config, number);
    const Item item = item_of(args, landed);
    RowSource row = row_source(args, piece, item);
    if (!args.presummed) {
      warp.sync();  // the piece before has been read by all lanes before any writes this one in its place
      add_up(args, warp, piece, landed, staging);
      warp.sync();
      row.values = staging;
      row.in_shared = true;
      record_unit(args, warp, item, start);
    }
    LlWord* local = ll_words_at(c.ws.ll_combine_row, args.buffer, c.heap.rank, item.token,
                                number * ll_words_of_piece(c.config, c.config.dtype));
    const uint64_t sent = trace_now();
    send_ll(warp, item.members, item.turn, row, epoch, [&](int rank) { return c.heap.peer(rank, local); });
    record_send_ll(c.trace(), warp, item.members, item.token, sent);
  }

  MOE_A2A_DEVICE static Item item_of(const Args& args, int landed) {
    const MoeConfig& config = args.context.config;
    const int row = args.context.ws.landed_row(args.buffer, landed);
    const int owner = row / config.num_max_tokens_per_rank, token = row % config.num_max_tokens_per_rank;
    return {RankSet::only(owner), token, owner};
  }
  MOE_A2A_DEVICE static std::byte* landing(const Args& args, const Item& item, int rank) {
    const Context& c = args.context;
    return c.heap.peer(rank, c.ws.combine_row.at(args.buffer, c.heap.rank, item.token));
  }
  // Pairs with wait_for() in combine_recv.
  MOE_A2A_DEVICE static void signal(const Args& args, const Item& item, uint64_t epoch) {
    const Context& c = args.context;
    Signal* local = c.ws.combine_signal.at(args.buffer, c.heap.rank, item.token);
    signal_token(c.heap, item.members, local, epoch, c.trace(), item.token);
  }

  MOE_A2A_DEVICE static void record_unit(const Args& args, const Warp& warp, const Item& item, uint64_t start) {
    const TraceKind kind = args.presummed ? TraceKind::kSend : moe_kind::kSum;
    record(args.context.trace(), warp, {.kind = kind, .begin = start, .peer = item.turn, .token = item.token});
  }

  // A row that the caller has summed is sent as it lies in y.
  MOE_A2A_DEVICE static RowSource row_source(const Args& args, const Piece& piece, const Item& item) {
    const MoeConfig& config = args.context.config;
    RowSource row = part_of_row(config, config.dtype, piece);
    row.values = args.y[int64_t{item.turn} * config.num_max_tokens_per_rank + item.token] + row.values_offset;
    return row;
  }

  // The sum is formed in registers on its way to `target`, where the piece begins.
  template <class Group>
  MOE_A2A_DEVICE static void add_up(const Args& args, const Group& group, const Piece& piece, int landed,
                                    std::byte* target) {
    const RouteTerm* terms = args.context.ws.landed_term.at(args.buffer, landed);
    if (group.rank() == 0 && piece.first == 0) count_short_routes(args, terms);
    with_element_type(args.context.config.dtype, [&](auto type) {
      using T = decltype(type);
      add_rows(group, piece, args.vector_rows, RouteTerms<T>(args, terms), reinterpret_cast<T*>(target));
    });
  }

  // The terms of a landed row, choice by choice in the lanes.
  MOE_A2A_DEVICE static LaneTerms lane_terms(const Args& args, const Warp& warp, int landed) {
    const RouteTerm* terms = args.context.ws.landed_term.at(args.buffer, landed);
    if (warp.rank() == 0) count_short_routes(args, terms);
    const RouteTerm term = warp.rank() < args.context.config.num_topk ? terms[warp.rank()] : RouteTerm{};
    const bool is_end = term.position < 0, is_there = !is_end && term.position < args.num_y_rows;
    const uint64_t ends_and_there =
        warp.union_of(uint64_t{is_end} << (warp.rank() + 32) | uint64_t{is_there} << warp.rank());
    const uint32_t ends = static_cast<uint32_t>(ends_and_there >> 32), there = static_cast<uint32_t>(ends_and_there);
    const uint32_t before_end = (ends & (~ends + 1)) - 1;
    return {is_there ? args.y[term.position] : nullptr, term.weight, there & before_end};
  }

  // Routes that stand behind the end of a `y` that is too short; raised at the next call that looks.
  MOE_A2A_DEVICE static void count_short_routes(const Args& args, const RouteTerm* terms) {
    const Context& c = args.context;
    for (int k = 0; k < c.config.num_topk && terms[k].position >= 0; ++k) {
      if (terms[k].position >= args.num_y_rows) {
        atomic_add<Order::kRelaxed, Scope::kDevice>(&c.ws.errors.data->num_short_y_routes, 1u);
      }
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
