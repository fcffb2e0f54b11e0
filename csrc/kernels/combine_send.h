// Step 3 of 4: of each landed row, add up what the local experts made of it and push the one sum back to its owner.
#pragma once

#include "kernels/outbox.h"
#include "kernels/row.h"
#include "kernels/units.h"

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

struct CombineSend {
  using Args = CombineSendArgs;
  static constexpr const char* kName = "combine_send";

  using Item = SentPiece;
  static constexpr size_t kOutboxBytes = Outbox<Item, int>::shared_bytes();

  // Shared memory: a row sender's staging per warp.
  MOE_A2A_HOST_DEVICE static StagedFor staged_for(const Args& args) {
    return args.presummed ? StagedFor::kSending : StagedFor::kAdding;
  }
  MOE_A2A_HOST_DEVICE static int64_t staging_bytes(const Args& args) {
    const bool whole_vectors = args.vector_rows && row_bytes(args) % 16 == 0;
    if (!args.presummed && !(kSumsAreStaged && whole_vectors)) return 0;
    return staging_that_fits(args.context, warp_staging_bytes(row_bytes(args), staged_for(args)));
  }
  MOE_A2A_HOST_DEVICE static int64_t row_bytes(const Args& args) {
    return args.context.config.row_bytes(args.context.config.dtype);
  }
  static size_t shared_bytes(const Args& args) {
    const size_t staging = staging_bytes(args) * warps_with_staging(args.context, staging_bytes(args));
    return staging > kOutboxBytes ? staging : kOutboxBytes;
  }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const Context& c = args.context;
    const uint64_t epoch = c.ws.epoch(args.buffer);
    send(args, grid, block, shared, epoch);
    if (last_block_done(grid, block, c.ws, args.buffer, Workspace::kCombineSend)) {
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

  // The landed row that is the i-th to be sent: the owners in turn, beginning behind this rank, as long as they have
  // rows left. So no rank is sent to by all at once, and each gets its rows in the order in which it waits for them.
  MOE_A2A_DEVICE static int landed_in_turn(const Context& c, int buffer, int i) {
    const int32_t* offsets = c.ws.landed_offsets.at(buffer);
    const int num_ranks = c.heap.num_ranks;
    const auto num_rows = [&](int r) { return offsets[r + 1] - offsets[r]; };
    for (int done = 0;;) {
      int num_left = 0, fewest = 0;  // owners with more rows than `done`, and the rows of the first of them to end
      for (int r = 0; r < num_ranks; ++r) {
        if (num_rows(r) <= done) continue;
        fewest = num_left == 0 || num_rows(r) < fewest ? num_rows(r) : fewest;
        ++num_left;
      }
      if (i < (fewest - done) * num_left) {
        int rank = c.heap.rank;
        for (int skip = i % num_left; skip >= 0; skip -= num_rows(rank) > done) rank = (rank + 1) % num_ranks;
        return offsets[rank] + done + i / num_left;
      }
      i -= (fewest - done) * num_left;
      done = fewest;
    }
  }

  // The pieces of all rows lie on one line and the warps take units in turn.
  MOE_A2A_DEVICE static void send(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                  uint64_t epoch) {
    const Context& c = args.context;
    const int pieces = c.ws.num_pieces(args.buffer, 0), num_rows = c.ws.landed_offsets(args.buffer, c.heap.num_ranks);
    if (pieces == 1) {
      send_whole_rows(args, grid, block, shared, num_rows, epoch);
    } else {
      send_pieces(args, grid, block, shared, num_rows, pieces, epoch);
    }
  }

  MOE_A2A_DEVICE static void send_whole_rows(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                             int num_rows, uint64_t epoch) {
    const Context& c = args.context;
    const int num_warps = warps_with_staging(c, staging_bytes(args));
    if (block.warp_rank() >= num_warps) return;
    const Warp warp = block.warp();
    const Piece whole{0, c.config.hidden};
    const auto landing_at = [&](const Item& item, int rank) { return landing(args, item, rank); };
    const auto signal = [&](const Item& item) {
      signal_many(c.heap, item.members, signal_of(args, item), epoch, 0, c.trace(), item.token);
    };
    std::byte* staging = staging_bytes(args) > 0 ? shared + block.warp_rank() * staging_bytes(args) : nullptr;
    auto sender = make_warp_sender<Item>(warp, landing_at, signal, staging, row_bytes(args), staged_for(args));
    uint32_t* ticket = c.ws.tickets.at(args.buffer, Workspace::kCombineSend);
    for (Units units(grid, block, num_warps, ticket); units.current() < num_rows; units.advance()) {
      const int landed = landed_in_turn(c, args.buffer, units.current());
      const Item item = item_of(args, landed, 1, 0);
      const uint64_t start = trace_now(c.trace());
      if (args.presummed) {
        sender.send(row_source(args, whole, item), item);
      } else if (kSumsAreStaged && staging != nullptr) {
        add_up(args, warp, whole, landed, sender.open_stage());
        sender.send_staged(row_source(args, whole, item), item);
      } else {
        add_up(args, warp, whole, landed, landing(args, item, item.turn));
        warp.release_sync();
        if (warp.rank() == 0) signal(item);
      }
      record_unit(args, warp, item, start);
    }
    sender.finish();
  }

  MOE_A2A_DEVICE static void send_pieces(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                         int num_rows, int pieces, uint64_t epoch) {
    const Context& c = args.context;
    const Warp warp = block.warp();
    const auto signal = [&](const Item& item) { return signal_of(args, item); };
    Outbox<Item, decltype(signal)> outbox(c, block, shared, epoch, signal);
    const int num_units = num_rows * pieces;
    uint32_t* ticket = c.ws.tickets.at(args.buffer, Workspace::kCombineSend);
    for (Units units(grid, block, block.num_warps(), ticket); units.current() < num_units; units.advance()) {
      const int landed = landed_in_turn(c, args.buffer, units.current() / pieces), number = units.current() % pieces;
      const Piece piece = Piece::of(c.config, pieces, number);
      const Item item = item_of(args, landed, pieces, number);
      const uint64_t start = trace_now(c.trace());
      if (args.presummed) {
        multicast_row(warp, row_source(args, piece, item), item.members, item.turn,
                      [&](int rank) { return landing(args, item, rank); });
      } else {
        add_up(args, warp, piece, landed, landing(args, item, item.turn));
      }
      record_unit(args, warp, item, start);
      outbox.add(item);
    }
    outbox.post();
  }

  MOE_A2A_DEVICE static Item item_of(const Args& args, int landed, int pieces, int piece) {
    const MoeConfig& config = args.context.config;
    const int row = args.context.ws.landed_row(args.buffer, landed);
    const int owner = row / config.num_max_tokens_per_rank, token = row % config.num_max_tokens_per_rank;
    return {RankSet::only(owner), token, owner, token * pieces + piece};
  }
  MOE_A2A_DEVICE static std::byte* landing(const Args& args, const Item& item, int rank) {
    const Context& c = args.context;
    return c.heap.peer(rank, c.ws.combine_row.at(args.buffer, c.heap.rank, item.token));
  }
  // Pairs with wait_for() in combine_recv.
  MOE_A2A_DEVICE static Signal* signal_of(const Args& args, const Item& item) {
    return args.context.ws.combine_signal.at(args.buffer, args.context.heap.rank, item.unit);
  }

  MOE_A2A_DEVICE static void record_unit(const Args& args, const Warp& warp, const Item& item, uint64_t start) {
    const TraceKind kind = args.presummed ? TraceKind::kSend : TraceKind::kSum;
    record(args.context.trace(), warp, {.kind = kind, .begin = start, .peer = item.turn, .token = item.token});
  }

  // A row that the caller has summed is sent as it lies in y.
  MOE_A2A_DEVICE static RowSource row_source(const Args& args, const Piece& piece, const Item& item) {
    const MoeConfig& config = args.context.config;
    const int64_t row = int64_t{item.turn} * config.num_max_tokens_per_rank + item.token;
    const int64_t element = size_of(config.dtype);
    return {.values = args.y[row] + piece.first * element,
            .num_value_bytes = piece.size() * element,
            .values_offset = piece.first * element};
  }

  // The sum is formed in registers on its way to `target`, where its row begins.
  MOE_A2A_DEVICE static void add_up(const Args& args, const Warp& warp, const Piece& piece, int landed,
                                    std::byte* target) {
    const RouteTerm* terms = args.context.ws.landed_term.at(args.buffer, landed);
    if (warp.rank() == 0 && piece.first == 0) count_short_routes(args, terms);
    with_element_type(args.context.config.dtype, [&](auto type) {
      using T = decltype(type);
      add_rows(warp, piece, args.vector_rows, RouteTerms<T>(args, terms), reinterpret_cast<T*>(target));
    });
  }

  // Routes that stand behind the end of a `y` that is too short; raised at the next call that looks.
  MOE_A2A_DEVICE static void count_short_routes(const Args& args, const RouteTerm* terms) {
    const Context& c = args.context;
    for (int k = 0; k < c.config.num_topk && terms[k].position >= 0; ++k) {
      if (terms[k].position >= args.num_y_rows) {
        atomic_add<Order::kRelaxed, Scope::kDevice>(&c.wait.tally->num_short_y_routes, 1u);
      }
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
