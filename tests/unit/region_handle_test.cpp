// What ranks exchange when they meet: damage, wrong positions and disagreements are detected before anything is mapped.
#include "comm/region_handle.h"

#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "unit/expect_says.h"

namespace moe_a2a {
namespace {

std::vector<RegionHandle> handles_of_all(int hidden = 20) {
  std::vector<RegionHandle> handles(4);
  for (int r = 0; r < 4; ++r) {
    RegionHandle& handle = handles[r];
    handle.memory.nbytes = 4096;
    handle.layout_digest = 77;
    handle.rank = r;
    handle.num_ranks = 4;
    handle.num_fields = 2;
    handle.field[0] = agreed("hidden", hidden);
    handle.field[1] = agreed("dtype", "bfloat16");
    std::strcpy(handle.client, "ExpertParallel");
    std::strcpy(handle.target, "cpu");
    handle.seal();
  }
  return handles;
}

// The handles after a change to that of `rank`, sealed as if its object had made it that way.
template <class Change>
std::vector<RegionHandle> with(int rank, Change change) {
  auto handles = handles_of_all();
  change(handles[rank]);
  handles[rank].seal();
  return handles;
}

TEST(Disagreement, IsEmptyWhenAllAgree) { EXPECT_EQ(disagreement(handles_of_all()), ""); }

TEST(Disagreement, NamesBothRanksTheArgumentAndTheValues) {
  EXPECT_EQ(disagreement(with(2, [](RegionHandle& h) { h.field[0] = agreed("hidden", 21); })),
            "ranks disagree: hidden=20 on rank 0 but hidden=21 on rank 2; pass the same hidden on every rank");
  EXPECT_EQ(disagreement(with(3, [](RegionHandle& h) { h.field[1] = agreed("dtype", "float32"); })),
            "ranks disagree: dtype=bfloat16 on rank 0 but dtype=float32 on rank 3; pass the same "
            "dtype on every rank");
  expect_says(disagreement(with(1, [](RegionHandle& h) { h.num_ranks = 2; })),
              "num_ranks=4 on rank 0 but num_ranks=2 on rank 1");
  expect_says(disagreement(with(1, [](RegionHandle& h) { std::strcpy(h.client, "Collectives"); })),
              "ExpertParallel on rank 0 but Collectives on rank 1; make the same objects in the same order");
}

TEST(Disagreement, SeesWrongOrderOtherDevicesAndOtherVersions) {
  auto handles = handles_of_all();
  std::swap(handles[1], handles[2]);
  EXPECT_EQ(disagreement(handles), "the handle at place 1 is that of rank 2; pass the handles in rank order");
  expect_says(disagreement(with(1, [](RegionHandle& h) { std::strcpy(h.target, "gpu"); })),
              "target cpu on rank 0 but target gpu on rank 1");
  expect_says(disagreement(with(3, [](RegionHandle& h) { h.layout_digest = 78; })), "run the same version of moe_a2a");
  expect_says(disagreement(with(3, [](RegionHandle& h) { h.version = 1; })), "place 3 has version 1");
  expect_says(disagreement(with(2, [](RegionHandle& h) { h.magic = 0; })), "place 2 is not a handle");
}

TEST(Disagreement, SeesEveryFlippedBit) {
  for (size_t bit = 0; bit < 8 * sizeof(RegionHandle); ++bit) {
    auto handles = handles_of_all();
    unsigned char bytes[sizeof(RegionHandle)];
    std::memcpy(bytes, &handles[1], sizeof(bytes));
    bytes[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
    std::memcpy(static_cast<void*>(&handles[1]), bytes, sizeof(bytes));
    expect_says(disagreement(handles), "the handle at place 1");
  }
}

// Regression: handles that agreed with each other but not with the receiving object caused a SIGSEGV.
TEST(Disagreement, AnObjectKnowsItsOwnHandle) {
  const auto own = handles_of_all();
  for (const RegionHandle& handle : own) EXPECT_EQ(not_own(own, handle), "");
  const auto others = handles_of_all(10);
  EXPECT_EQ(disagreement(others), "");
  EXPECT_EQ(not_own(others, own[2]),
            "the handle at place 2, of rank 2 itself, is another object's (hidden=10, here hidden=20); pass what "
            "get_comm_handle() of this object returned");
  auto twins = handles_of_all();
  twins[2].memory.nbytes = 8192;
  twins[2].seal();
  expect_says(not_own(twins, own[2]), "is another object's; pass");
}

}  // namespace
}  // namespace moe_a2a
