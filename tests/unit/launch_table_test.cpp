// How many blocks a call uses: its own number, the table's, the target's default.
#include "moe/launch_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "alone.h"
#include "arch/dies.h"
#include "comm/device_share.h"
#include "comm/ordered_launches.h"
#include "moe/expert_parallel.h"

namespace moe_a2a {
namespace {

TEST(LaunchTable, PicksTheFirstStepThatHoldsTheTokens) {
  const LaunchTable table({{8, 3, 4}, {128, 5, 6}});
  for (const int tokens : {0, 1, 8}) {
    EXPECT_EQ(table.dispatch_blocks(tokens), 3);
    EXPECT_EQ(table.combine_blocks(tokens), 4);
  }
  for (const int tokens : {9, 128, 4096}) {  // the last step also serves larger calls
    EXPECT_EQ(table.dispatch_blocks(tokens), 5);
    EXPECT_EQ(table.combine_blocks(tokens), 6);
  }
}

TEST(LaunchTable, AnEmptyOneSaysNothing) { EXPECT_EQ(LaunchTable().dispatch_blocks(7), 0); }

TEST(LaunchTable, RefusesStepsThatDoNotAscendOrAreNotPositive) {
  EXPECT_THROW(LaunchTable({{8, 1, 1}, {8, 2, 2}}), std::invalid_argument);
  EXPECT_THROW(LaunchTable({{0, 1, 1}}), std::invalid_argument);
  EXPECT_THROW(LaunchTable({{8, 0, 1}}), std::invalid_argument);
  EXPECT_THROW(LaunchTable({{8, 1, 0}}), std::invalid_argument);
}

TEST(LaunchTable, ACallComesBeforeTheTableAndTheTableBeforeTheTarget) {
  ExpertParallel ep(alone(), {.num_experts = 4, .num_topk = 2, .hidden = 10, .num_max_tokens_per_rank = 8});
  EXPECT_EQ(ep.dispatch_blocks(4), ep.device().default_blocks());
  ep.set_launch_table(LaunchTable({{4, 2, 3}}));
  EXPECT_EQ(ep.dispatch_blocks(4), 2);
  EXPECT_EQ(ep.combine_blocks(4), 3);
  EXPECT_EQ(ep.combine_blocks(4, {.num_blocks = 7}), 7);
  EXPECT_EQ(ep.dispatch_blocks(4, {.num_blocks = 1 << 20}), ep.device().max_blocks());
}

// Regression: with more than two clients, each took half of the device.
TEST(DeviceShare, KernelsOfAllClientsAreResidentAtOnce) {
  for (const int units : {1, 2, 3, 8, 20, 78, 132, 304}) {
    for (int clients = 1; clients <= units; ++clients) {
      for (const int num_limited : {0, 1, clients / 2, clients}) {
        std::vector<int> limits(clients, 0);
        std::fill_n(limits.begin(), std::min(num_limited, clients), 3);
        int sum = 0;
        for (const int limit : limits) {
          const int share = share_of(units, limit, limits), equal = units / clients;
          EXPECT_GE(share, limit > 0 && clients > 1 ? std::min(limit, equal) : equal);
          sum += share;
        }
        EXPECT_LE(sum, units);
      }
    }
  }
}

// Regression: three clients of an MI300X took 101 blocks each, 13 of each on the first die, which holds 38.
TEST(DeviceShare, KernelsOfAllClientsAreResidentOnEachDie) {
  for (const int units : {64, 76, 80, 128, 152, 228, 256, 304}) {
    const int dies = most_dies_of_mi300(units);
    EXPECT_EQ(units % dies, 0);
    for (int clients = 2; clients <= most_clients(units, dies); ++clients) {
      for (const int limit : {3, 17, 1000}) {
        for (int num_limited = 0; num_limited <= clients; ++num_limited) {
          std::vector<int> limits(clients, 0);
          std::fill_n(limits.begin(), num_limited, limit);
          int on_first_die = 0;
          for (const int own : limits) {
            const int share = share_of(units, own, limits, dies);
            EXPECT_GE(share, kFewestBlocks);
            on_first_die += (share + dies - 1) / dies;
          }
          EXPECT_LE(on_first_die, units / dies) << units << " units, " << clients << " clients, limit " << limit;
        }
      }
    }
  }
  EXPECT_EQ(share_of(304, 0, {0, 0, 0}, 8), 96);
  EXPECT_EQ(share_of(304, 0, {20, 0}, 8), 280);
  EXPECT_EQ(share_of(304, 0, {0}, 8), 304);
}

TEST(DeviceShare, TheDiesOfEachMi300AndItsPartitions) {
  struct Case {
    int units, dies;
  };
  // MI300X in 1, 2, 4 and 8 partitions; MI300A in 1 and 3; MI308X; MI355X in 1, 2, 4 and 8.
  for (const auto [units, dies] :
       {Case{304, 8}, {152, 4}, {76, 2}, {38, 1}, {228, 6}, {76, 2}, {80, 4}, {256, 8}, {128, 4}, {64, 2}, {32, 1}}) {
    EXPECT_EQ(most_dies_of_mi300(units) % dies, 0) << units << " compute units";
  }
  EXPECT_EQ(most_dies_of_mi300(38), 1);
}

TEST(LaunchTable, BlocksOfAnMi200) {
  EXPECT_EQ(resident_blocks_of_mi200(110), 96);
  EXPECT_EQ(resident_blocks_of_mi200(104), 96);
  EXPECT_EQ(resident_blocks_of_mi200(96), 96);
}

TEST(DeviceShare, WhatClientsWithALimitLeaveGoesToTheOthers) {
  EXPECT_EQ(share_of(132, 0, {0}), 132);
  EXPECT_EQ(share_of(132, 0, {0, 0}), 66);
  EXPECT_EQ(share_of(132, 0, {16, 0}), 116);
  EXPECT_EQ(share_of(132, 16, {16, 0}), 16);
  EXPECT_EQ(share_of(132, 0, {0, 16, 0}), 58);
  EXPECT_EQ(share_of(132, 100, {100, 0}), 66);
  const DeviceShare limited(59, true, 16), other(59, true);
  EXPECT_EQ(limited.of(132), 16);
  EXPECT_EQ(other.of(132), 116);
}

TEST(DeviceShare, AClientCountsUntilItLeaves) {
  const DeviceShare first(61, true), uncounted(61, false);
  DeviceShare second(61, true);
  EXPECT_EQ(first.num_clients(), 2);
  {
    const DeviceShare third(61, true), elsewhere(60, true);
    EXPECT_EQ(uncounted.num_clients(), 3);
  }
  second.leave();
  second.leave();
  EXPECT_EQ(first.num_clients(), 1);
}

TEST(DeviceShare, AnOrderedCommunicatorTakesTheShareOfOneClient) {
  OrderedLaunches ordered(62, true);
  EXPECT_EQ(ordered.share().of(132), 132);
  const DeviceShare client(62, true);
  EXPECT_EQ(ordered.share().of(132), 66);
  EXPECT_EQ(client.of(132), 66);
  ordered.leave();
  EXPECT_EQ(client.of(132), 132);
}

// Regression: the default of 32 blocks was launched on a device with 8 compute units, so blocks waited for others that
// never became resident.
TEST(LaunchTable, NoLaunchTakesMoreBlocksThanTheDeviceHolds) {
  EXPECT_EQ(resident_blocks(32, 8), 8);
  EXPECT_EQ(resident_blocks(32, 132), 32);
  EXPECT_EQ(resident_blocks(1, 1), 1);
  for (int units = 2; units <= 16; ++units) {  // each half has a block
    const int num_blocks = resident_blocks(32, units);
    EXPECT_GE(dispatch_senders(num_blocks), 1);
    EXPECT_LT(dispatch_senders(num_blocks), num_blocks);
    for (const bool presummed : {false, true}) {
      EXPECT_GE(combine_senders(num_blocks, presummed, 4), 1);
      EXPECT_LT(combine_senders(num_blocks, presummed, 4), num_blocks);
      EXPECT_GE(coded_combine_senders(num_blocks, presummed, 4), 1);
      EXPECT_LT(coded_combine_senders(num_blocks, presummed, 4), num_blocks);
    }
  }
}

}  // namespace
}  // namespace moe_a2a
