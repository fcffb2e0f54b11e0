#include "collectives/shares.h"

#include <algorithm>

#include "comm/fnv1a.h"

namespace moe_a2a {
namespace {

int64_t in_units(int64_t count) { return (count + kShareUnit - 1) / kShareUnit * kShareUnit; }

}  // namespace

Shares Shares::even(int64_t count, int num_ranks) {
  const int64_t share = in_units((count + num_ranks - 1) / num_ranks);
  Shares shares;
  for (int r = 1; r <= num_ranks; ++r) shares.offset[r] = std::min(count, r * share);
  return shares;
}

Shares Shares::of(const std::vector<int64_t>& counts) {
  Shares shares;
  for (size_t r = 0; r < counts.size(); ++r) shares.offset[r + 1] = shares.offset[r] + counts[r];
  return shares;
}

uint64_t Shares::digest(int num_ranks) const {
  Fnv1a hash;
  for (int r = 0; r <= num_ranks; ++r) hash.add(static_cast<uint64_t>(offset[r]));
  return hash.digest;
}

std::vector<Slice> slices_of(int64_t largest_share, int64_t share_bytes, int element_size) {
  const int64_t most = share_bytes / element_size / kShareUnit * kShareUnit;
  std::vector<Slice> slices;
  for (int64_t first = 0; first == 0 || first < largest_share; first += most) {
    const int64_t count = std::min(most, largest_share - first);
    // One chunk per block of a large GPU, or several if they are large enough to be sent while others are reduced.
    const int64_t rounds =
        std::clamp<int64_t>(count * element_size / (kChunksPerRound * kLargeChunkBytes), 1, kMaxRounds);
    const int64_t num_chunks = rounds * kChunksPerRound;
    const int64_t chunk = std::max<int64_t>(kMinChunkBytes / element_size, (count + num_chunks - 1) / num_chunks);
    slices.push_back({.first = first, .most = most, .chunk = in_units(chunk)});
  }
  return slices;
}

}  // namespace moe_a2a
