// The memory of the collectives, and what their kernels are given beside their own arguments.
#pragma once

#include "comm/context.h"

namespace moe_a2a {

// Bytes that one signal hands over: small enough that the blocks of a launch share a message of 1 MiB.
inline constexpr int kCollectiveChunk = 16 << 10;
// Largest message.
inline constexpr int kMaxOneShotBytes = 1 << 20;
inline constexpr int kMaxChunks = kMaxOneShotBytes / kCollectiveChunk;

// R = num_ranks. A message of epoch e lies in half e % 2: by the time that a rank writes epoch e there, it has seen
// every rank's signals of epoch e - 1, which each of them sent after it had read epoch e - 2 to the end.
struct CollectiveRegion {
  // ---- symmetric: written by the rank named in the index "src", read by the owner of the memory
  Array<Signal, 3> chunk_signal;  // [2, R src, chunks]  a chunk of src is here
  Array<std::byte, 3> message;    // [2, R src, kMaxOneShotBytes]

  // ---- local
  Array<uint64_t, 1> epoch;     // [1]  of the newest call; kernels advance it, so that a graph's replay is a new call
  Array<uint32_t, 1> arrivals;  // [1]  blocks that have finished a launch
};

struct CollectiveContext : ClientContext {
  CollectiveRegion region;
};

// Lays out the region from the two bases and points the context at it; with null bases only the size means anything.
inline RegionSize place_region(CollectiveContext& context, int num_ranks, std::byte* symmetric_base,
                               std::byte* local_base) {
  return place_client(context, num_ranks, 1, symmetric_base, local_base, [&](auto& symmetric, auto& local) {
    context.region = {.chunk_signal = symmetric.template take<Signal>(2, num_ranks, kMaxChunks),
                      .message = symmetric.template take<std::byte>(2, num_ranks, kMaxOneShotBytes),
                      .epoch = local.template take<uint64_t>(1),
                      .arrivals = local.template take<uint32_t>(1)};
  });
}

}  // namespace moe_a2a
