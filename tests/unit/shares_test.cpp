// How tensors are divided into shares: every element is in exactly one chunk of one slice, and no slice exceeds a share
// of the workspace.
#include "collectives/shares.h"

#include <gtest/gtest.h>

#include <random>

#include "seed.h"

namespace moe_a2a {
namespace {

void check_slices(const Shares& shares, int num_ranks, const std::vector<Slice>& slices, int64_t share_bytes,
                  int element_size) {
  ASSERT_GE(slices.size(), 1u);
  for (int r = 0; r < num_ranks; ++r) {
    int64_t next = shares.offset[r];
    for (const Slice& slice : slices) {
      ASSERT_LE(slice.size_of_share(shares, r) * element_size, share_bytes);
      const int num_chunks = slice.num_chunks(shares, r);
      ASSERT_LE(num_chunks, kMaxChunks);
      for (int i = 0; i < num_chunks; ++i) {
        const Span span = slice.chunk_of(shares, r, i);
        ASSERT_EQ(span.begin, next);
        ASSERT_GT(span.count, 0);
        ASSERT_LE(span.count, slice.chunk);
        next += span.count;
      }
      ASSERT_EQ(slice.chunk_of(shares, r, num_chunks).count, 0);
    }
    ASSERT_EQ(next, shares.offset[r + 1]);
  }
}

void check_cut(const Shares& shares, int num_ranks, int64_t share_bytes, int element_size) {
  const int64_t largest = shares.largest(num_ranks);
  check_slices(shares, num_ranks, slices_of(largest, share_bytes, element_size), share_bytes, element_size);
  const Slice whole = whole_of(largest, element_size);
  check_slices(shares, num_ranks, {whole}, largest * element_size, element_size);
  for (int r = 0; r < num_ranks; ++r) ASSERT_LE(whole.num_chunks(shares, r), kChunksPerRound);
}

TEST(Shares, AreCutIntoChunksWithoutGapOrOverlap) {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 300; ++round) {
    const int num_ranks = 1 + static_cast<int>(random() % 8), element_size = random() % 2 ? 4 : 2;
    const int64_t share_bytes = share_bytes_for(1 + static_cast<int64_t>(random() % (1 << 20)), num_ranks);
    check_cut(Shares::even(static_cast<int64_t>(random() % 300000), num_ranks), num_ranks, share_bytes, element_size);
    std::vector<int64_t> counts(num_ranks);
    for (int64_t& count : counts) count = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 100000);
    check_cut(Shares::of(counts), num_ranks, share_bytes, element_size);
  }
}

TEST(Shares, HaveADigestThatTellsThemApart) {
  EXPECT_NE(Shares::of({4, 6}).digest(2), Shares::of({5, 5}).digest(2));
  EXPECT_EQ(Shares::of({5, 5}).digest(2), Shares::of({5, 5}).digest(2));
}

}  // namespace
}  // namespace moe_a2a
