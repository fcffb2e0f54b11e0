// How the elements of a tensor are divided: a share for each rank, slices of all shares, chunks of a slice. Pure
// arithmetic, the same on every rank.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/collective_region.h"

namespace moe_a2a {

// A range of a tensor's elements.
struct Span {
  int64_t begin = 0;
  int64_t count = 0;
};

// Rank r's share is the elements offset[r] ... offset[r + 1] - 1.
struct Shares {
  int64_t offset[kMaxRanks + 1] = {};

  MOE_A2A_HOST_DEVICE int64_t size(int rank) const { return offset[rank + 1] - offset[rank]; }
  int64_t largest(int num_ranks) const;

  // As even as whole units allow.
  static Shares even(int64_t count, int num_ranks);
  static Shares of(const std::vector<int64_t>& counts);
  uint64_t digest(int num_ranks) const;
};

// What one launch handles: at most `most` elements of each share, from `first` on, in chunks.
struct Slice {
  int64_t first = 0;
  int64_t most = 0;
  int64_t chunk = kShareUnit;
  int most_chunks = 0;  // of the largest share

  MOE_A2A_HOST_DEVICE int64_t size_of_share(const Shares& shares, int rank) const {
    const int64_t rest = shares.size(rank) - first;
    return rest < 0 ? 0 : rest < most ? rest : most;
  }
  MOE_A2A_HOST_DEVICE int num_chunks(const Shares& shares, int rank) const {
    return static_cast<int>((size_of_share(shares, rank) + chunk - 1) / chunk);
  }
  // The i-th chunk of a rank's share; empty past the last.
  MOE_A2A_HOST_DEVICE Span chunk_of(const Shares& shares, int rank, int i) const {
    const int64_t rest = size_of_share(shares, rank) - i * chunk;
    return {shares.offset[rank] + first + i * chunk, rest < 0 ? 0 : rest < chunk ? rest : chunk};
  }
};

// All of the shares in one launch, one chunk per block of a large GPU.
Slice whole_of(int64_t largest_share, int element_size);

// Cuts shares of at most `largest_share` elements into slices. At least one slice, since every call is a launch.
// `large_chunk_bytes`: large slices have several chunks of about this size per block.
std::vector<Slice> slices_of(int64_t largest_share, int64_t share_bytes, int element_size,
                             int large_chunk_bytes = kLargeChunkBytes);

}  // namespace moe_a2a
