// One-shot all-reduce: every rank writes its vector to every rank, and each reduces all of them in rank order. One trip
// over the link, R times the bytes: for small messages. All ranks get the same bits.
#pragma once

#include "collectives/meeting.h"
#include "collectives/reduction.h"
#include "collectives/shares.h"

namespace moe_a2a {

struct OneShotArgs {
  CollectiveContext context;
  Announcement announcement;
  int slice = 0;  // its number
  const std::byte* x = nullptr;
  std::byte* out = nullptr;  // may be x
  int64_t count = 0;         // elements of this slice
  int64_t chunk = 0;         // elements behind one signal
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;

  MOE_A2A_HOST_DEVICE int num_chunks() const { return static_cast<int>((count + chunk - 1) / chunk); }
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

struct OneShot {
  using Args = OneShotArgs;
  static constexpr const char* kName = "one_shot_all_reduce";

  static size_t shared_bytes(const Args&) { return 0; }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const int num_chunks = args.num_chunks();
    const int ahead = chunks_ahead(num_chunks, grid) * grid.size();
    const auto send = [&](const Part& part) {
      for (int chunk = grid.rank(); chunk < num_chunks && chunk < ahead; chunk += grid.size()) {
        push(args, part, block, chunk);
      }
    };
    const auto receive = [&](const Part& part) {
      bool good = true;
      for (int chunk = grid.rank(); good && chunk < num_chunks; chunk += grid.size()) {
        if (chunk + ahead < num_chunks) push(args, part, block, chunk + ahead);
        good = reduce(args, part, block, chunk);
      }
      return good;
    };
    take_part(args, collective_op::kOneShot, grid, block, send, receive);
  }

  MOE_A2A_DEVICE static int chunk_size(const Args& args, int chunk) {
    const int64_t rest = args.count - chunk * args.chunk;
    return static_cast<int>(rest < args.chunk ? rest : args.chunk);
  }

  MOE_A2A_DEVICE static void push(const Args& args, const Part& part, const Block& block, int chunk) {
    const CollectiveContext& c = args.context;
    const RankSet others = part.others();
    if (others.empty()) return;
    const uint64_t start = trace_now();
    const int64_t first = chunk * args.chunk * size_of(args.dtype);
    std::byte* local = c.region.landing.at(part.half(), part.rank(), first);
    multicast_bytes(
        block, others, part.rank(), [&](int rank) { return c.heap.peer(rank, local); }, args.x + first,
        chunk_size(args, chunk) * size_of(args.dtype));
    block.release_sync();
    if (block.rank() == 0) {  // pairs with the acquire in reduce()
      signal_many(c.heap, others, c.region.chunk_signal.at(part.half(), part.rank(), chunk), part.epoch);
    }
    record(c.trace(), block, {.kind = collective_kind::kPush, .begin = start, .token = chunk});
  }

  // False when a rank did not come.
  MOE_A2A_DEVICE static bool reduce(const Args& args, const Part& part, const Block& block, int chunk) {
    if (!wait_for_chunk(part, block, part.context.region.chunk_signal, part.others(), chunk)) return false;
    const uint64_t start = trace_now();
    const int64_t first = chunk * args.chunk;
    with_element_type(args.dtype, [&](auto element) {
      using T = decltype(element);
      const T* x = reinterpret_cast<const T*>(args.x) + first;
      T* out = reinterpret_cast<T*>(args.out) + first;
      const auto row = [&](int r) {
        const auto* landed = args.context.region.landing.at(part.half(), r, first * int64_t{sizeof(T)});
        return r == part.rank() ? x : reinterpret_cast<const T*>(landed);
      };
      with_operator(args.op, [&](auto op) {
        reduce_rows<T, decltype(op)>(block, part.num_ranks(), chunk_size(args, chunk), are_vectors(x, out), row, out,
                                     static_cast<T*>(nullptr));
      });
    });
    record(args.context.trace(), block, {.kind = TraceKind::kReduce, .begin = start, .token = chunk});
    return true;
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
