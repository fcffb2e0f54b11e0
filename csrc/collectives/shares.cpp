#include "collectives/shares.h"

#include <algorithm>

#include "comm/fnv1a.h"

namespace moe_a2a {
namespace {

int64_t in_units(int64_t count) { return (count + kShareUnit - 1) / kShareUnit * kShareUnit; }

// `count` elements in `num_chunks`, or in fewer of kMinChunkBytes.
int64_t chunk_of(int64_t count, int64_t num_chunks, int element_size) {
  return in_units(std::max<int64_t>(kMinChunkBytes / element_size, (count + num_chunks - 1) / num_chunks));
}

Slice slice_of(int64_t first, int64_t most, int64_t count, int64_t chunk) {
  return {.first = first, .most = most, .chunk = chunk, .most_chunks = static_cast<int>((count + chunk - 1) / chunk)};
}

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

int64_t Shares::largest(int num_ranks) const {
  int64_t most = 0;
  for (int r = 0; r < num_ranks; ++r) most = std::max(most, size(r));
  return most;
}

uint64_t Shares::digest(int num_ranks) const {
  Fnv1a hash;
  for (int r = 0; r <= num_ranks; ++r) hash.add(static_cast<uint64_t>(offset[r]));
  return hash.digest;
}

Slice whole_of(int64_t largest_share, int element_size) {
  return slice_of(0, largest_share, largest_share, chunk_of(largest_share, kChunksPerRound, element_size));
}

std::vector<Slice> slices_of(int64_t largest_share, int64_t share_bytes, int element_size, int large_chunk_bytes) {
  const int64_t most = share_bytes / element_size / kShareUnit * kShareUnit;
  std::vector<Slice> slices;
  for (int64_t first = 0; first == 0 || first < largest_share; first += most) {
    const int64_t count = std::min(most, largest_share - first);
    // One chunk per block of a large GPU, or several if they are large enough to be sent while others are used.
    const int64_t large_round = int64_t{kChunksPerRound} * large_chunk_bytes;
    const int64_t rounds = std::clamp<int64_t>(count * element_size / large_round, 1, kMaxRounds);
    slices.push_back(slice_of(first, most, count, chunk_of(count, rounds * kChunksPerRound, element_size)));
  }
  return slices;
}

}  // namespace moe_a2a
