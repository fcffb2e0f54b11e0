// The second product that sends its rows itself, ranks as threads, rounds back to back: the bits equal those of the
// product followed by the combine. Several blocks multiply and several send; some have nothing to do.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "arch/arch.h"
#include "arch/block_tile.h"
#include "moe/experts/run_grouped_gemm.h"
#include "moe/experts/tile_order.h"
#include "rows_of.h"
#include "seed.h"
#include "thread_ranks.h"
#include "trace_records.h"
#include "traffic.h"

namespace moe_a2a {
namespace {

constexpr int kDepth = 32;

MoeConfig product_config(int num_ranks) {
  return {.num_ranks = num_ranks,
          .num_experts = 3 * num_ranks,
          .num_topk = num_ranks < 2 ? 2 : 3,
          .hidden = 272,  // several tiles of columns, the last one not full
          .num_max_tokens_per_rank = 40,
          .num_buffers = 2,
          .dtype = DType::kBfloat16};
}

class ProductWorker {
 public:
  ProductWorker(ExpertParallel& ep, uint64_t seed)
      : ep_(ep),
        config_(ep.config()),
        seed_(seed),
        x_(config_.route_capacity() * 4 * kDepth),
        w_(static_cast<size_t>(config_.num_local_experts) * config_.hidden * kDepth) {
    std::mt19937 random(static_cast<uint32_t>(seed + config_.rank));
    for (auto* values : {&x_, &w_}) {
      for (uint16_t& value : *values) {
        store_element(reinterpret_cast<std::byte*>(&value), DType::kBfloat16, 0, static_cast<float>(random() % 9) - 4);
      }
    }
  }

  void run(int round) {
    const Layout layout = round % 3 == 2 ? Layout::kExpertMajor : Layout::kRows;
    const Tokens tokens(seed_, config_, config_.rank, round);
    const std::vector<uint16_t> apart = combined(tokens, round, layout, false);
    const std::vector<uint16_t> fused = combined(tokens, round, layout, true);
    ASSERT_EQ(fused, apart) << "round " << round << " rank " << config_.rank;
  }
  // Of all tiles that were to be computed in fused launches.
  int64_t num_tile_rows() const { return num_tile_rows_; }

 private:
  std::vector<uint16_t> combined(const Tokens& tokens, int round, Layout layout, bool fuses) {
    const LaunchPlace place{.num_blocks = 1 + round % 3};
    const auto handle = ep_.dispatch({.num_tokens = tokens.count,
                                      .topk_idx = {tokens.topk_idx.data(), true},
                                      .topk_weights = tokens.weights.data(),
                                      .x = {tokens.x.data(), config_.hidden * int64_t{2}}},
                                     layout, layout == Layout::kExpertMajor ? 5 : 1, place);
    ep_.check();
    const int64_t num_rows = ep_.num_positions(*handle);
    std::vector<uint16_t> y(num_rows * config_.hidden, 0xffff);  // NaN
    std::vector<uint16_t> out(static_cast<size_t>(tokens.count) * config_.hidden, 0xffff);
    std::vector<uint32_t> stored_tiles(num_rows);
    GroupedGemmArgs product = {.x = x_.data(),
                               .expert_offsets = ep_.region().expert_offsets.at(handle->buffer),
                               .w = w_.data(),
                               .out = y.data(),
                               .x_stride = kDepth,
                               .num_experts = config_.num_local_experts,
                               .num_x_rows = static_cast<int32_t>(num_rows),
                               .num_rows = static_cast<int32_t>(num_rows),
                               .num_columns = config_.hidden,
                               .depth = kDepth};
    EXPECT_TRUE(ep_.can_send_with_product(*handle));
    if (fuses) {
      product.stored_tiles = stored_tiles.data();
      for (int e = 0; e < config_.num_local_experts; ++e) {
        const int rows = product.expert_offsets[e + 1] - product.expert_offsets[e];
        num_tile_rows_ += rows * div_up(config_.hidden, 2 * BlockTile<Bfloat16>::kColumns);
      }
      ep_.product_combine_send(*handle, product, {.num_blocks = 2 + round % 4 * 8});
    } else {
      run_grouped_gemm({.target = "cpu", .num_blocks = 2}, product);
      ep_.combine_send(*handle, {.y = rows_of(y, config_.hidden), .num_y_rows = num_rows}, place);
    }
    ep_.combine_recv(*handle, out.data(), place);
    ep_.check();
    return out;
  }

  ExpertParallel& ep_;
  const MoeConfig& config_;
  uint64_t seed_;
  std::vector<uint16_t> x_, w_;  // bfloat16
  int64_t num_tile_rows_ = 0;
};

class ProductCombineTest : public testing::TestWithParam<int> {};

TEST_P(ProductCombineTest, GivesTheBitsOfBothInTurn) {
  const uint64_t seed = test_seed();
  run_ranks(product_config(GetParam()), 60, [&](ExpertParallel& ep) {
    ProductWorker worker(ep, seed);
    for (int round = 0; round < 12 && !HasFatalFailure(); ++round) worker.run(round);
  });
}

TEST_P(ProductCombineTest, RecordsItsTilesAndTheWaitsForThem) {
  const uint64_t seed = test_seed();
  run_ranks(product_config(GetParam()), 60, [&](ExpertParallel& ep) {
    ProductWorker worker(ep, seed);
    ep.tracer().start(20000);
    for (int round = 0; round < 6 && !HasFatalFailure(); ++round) worker.run(round);
    const TraceDump dump = ep.tracer().read();
    EXPECT_EQ(*std::max_element(dump.segment_dropped.begin(), dump.segment_dropped.end()), 0);
    int64_t num_rows = 0;
    for (const TraceRecord& record : dump.records) {
      const TraceFields fields(record);
      if (fields.kind == moe_kind::kTile) num_rows += static_cast<int64_t>(fields.polls);
      EXPECT_TRUE(fields.kind != moe_kind::kStoredWait || fields.polls > 1);
    }
    EXPECT_EQ(num_rows, worker.num_tile_rows());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ProductCombineTest, testing::Values(1, 2, 4));

}  // namespace
}  // namespace moe_a2a
