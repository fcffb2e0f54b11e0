// One-shot all-reduce: every rank writes its vector to every rank, and each adds up all of them in rank order. One trip
// over the link, R times the bytes: for small messages. All ranks get the same bits.
#pragma once

#include "collectives/collective_region.h"
#include "collectives/vocabulary.h"
#include "comm/launch_count.h"

namespace moe_a2a {

struct OneShotArgs {
  CollectiveContext context;
  const std::byte* x = nullptr;
  std::byte* out = nullptr;  // may be x
  int64_t count = 0;         // elements, at most kMaxOneShotBytes in all
  DType dtype = DType::kFloat32;
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

struct OneShot {
  using Args = OneShotArgs;
  static constexpr const char* kName = "one_shot_all_reduce";

  static size_t shared_bytes(const Args&) { return 0; }

  // Every block sends all of its chunks before it waits for any. A message without elements is one empty chunk, since
  // every call must reach every rank: the reuse of the halves rests on it.
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const CollectiveRegion& region = args.context.region;
    const uint64_t epoch = region.epoch(0) + 1;
    const int64_t nbytes = args.count * size_of(args.dtype);
    const int num_chunks = nbytes > 0 ? static_cast<int>((nbytes + kCollectiveChunk - 1) / kCollectiveChunk) : 1;
    for (int chunk = grid.rank(); chunk < num_chunks; chunk += grid.size()) push(args, block, chunk, epoch);
    bool good = true;
    for (int chunk = grid.rank(); good && chunk < num_chunks; chunk += grid.size()) {
      good = receive(args, block, chunk, epoch);
    }
    if (last_block_done(grid, block, region.arrivals.data)) region.epoch(0) = epoch;
  }

  MOE_A2A_DEVICE static int64_t chunk_bytes(const Args& args, int chunk) {
    const int64_t rest = args.count * size_of(args.dtype) - int64_t{chunk} * kCollectiveChunk;
    return rest < kCollectiveChunk ? rest : kCollectiveChunk;
  }

  MOE_A2A_DEVICE static void push(const Args& args, const Block& block, int chunk, uint64_t epoch) {
    const CollectiveContext& c = args.context;
    const uint64_t start = trace_now();
    const int half = static_cast<int>(epoch % 2);
    const int64_t first = int64_t{chunk} * kCollectiveChunk, nbytes = chunk_bytes(args, chunk);
    const RankSet all = RankSet::all(c.heap.num_ranks);
    std::byte* mine = c.region.message.at(half, c.heap.rank, first);
    if (nbytes > 0) {
      multicast_bytes(
          block, all, c.heap.rank, [&](int rank) { return c.heap.peer(rank, mine); }, args.x + first, nbytes);
    }
    block.release_sync();
    if (block.rank() == 0) {  // pairs with the acquire in receive()
      signal_many(c.heap, all, c.region.chunk_signal.at(half, c.heap.rank, chunk), epoch);
    }
    record(c.trace(), block, {.kind = collective_kind::kPush, .begin = start, .token = chunk});
  }

  // False when a rank did not come.
  MOE_A2A_DEVICE static bool receive(const Args& args, const Block& block, int chunk, uint64_t epoch) {
    const CollectiveContext& c = args.context;
    const int half = static_cast<int>(epoch % 2);
    bool good = true;
    for (int r = block.rank(); r < c.heap.num_ranks; r += block.size()) {
      const WaitSite site{collective_op::kOneShot, collective_kind::kChunkWait, r, chunk};
      good &= wait_for(c.region.chunk_signal.at(half, r, chunk), epoch, site, c.wait, c.heap);
    }
    if (block.any(!good)) return false;
    const uint64_t start = trace_now();
    if (args.dtype == DType::kFloat32) {
      add<float>(args, block, chunk, half);
    } else {
      add<Bfloat16>(args, block, chunk, half);
    }
    record(c.trace(), block, {.kind = TraceKind::kReduce, .begin = start, .token = chunk});
    return true;
  }

  template <class T>
  MOE_A2A_DEVICE static void add(const Args& args, const Block& block, int chunk, int half) {
    const CollectiveContext& c = args.context;
    const int64_t first = int64_t{chunk} * kCollectiveChunk;
    const int count = static_cast<int>(chunk_bytes(args, chunk) / int64_t{sizeof(T)});
    T* out = reinterpret_cast<T*>(args.out + first);
    for (int i = block.rank(); i < count; i += block.size()) {
      float sum = 0;
      for (int r = 0; r < c.heap.num_ranks; ++r) {
        sum += to_float(reinterpret_cast<const T*>(c.region.message.at(half, r, first))[i]);
      }
      out[i] = from_float<T>(sum);
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
