// The grouped GEMM's kernel with several blocks, under the sanitizers and with the lanes of a GPU's warps, against a
// plain loop. Values are small integers: every sum is exact, in any order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "../seed.h"
#include "arch/arch.h"
#include "arch/block_tile.h"
#include "moe/experts/run_grouped_gemm.h"
#include "moe/experts/tile_order.h"
#include "moe/vocabulary.h"
#include "trace_records.h"

namespace moe_a2a {
namespace {

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);  // exact for small integers
}
float to_float(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

struct Problem {
  std::vector<int32_t> counts;
  int depth, columns, num_x_rows;
};

constexpr int kWarpsPerBlock = kBlockThreads / kWarpSize;
constexpr Activation kSwiglu = {.function = Activation::Function::kSilu, .is_gated = true};

class GroupedGemmTest : public testing::TestWithParam<Problem> {
 protected:
  void SetUp() override {
    const Problem& p = GetParam();
    std::mt19937 random(test_seed());
    std::uniform_int_distribution<int> small(-2, 2), row(-1, p.num_x_rows - 1);
    for (int32_t count : p.counts) offsets_.push_back(offsets_.back() + count);
    x_.resize(static_cast<size_t>(p.num_x_rows) * p.depth);
    w_.resize(p.counts.size() * 2 * p.columns * p.depth);
    row_index_.resize(static_cast<size_t>(offsets_.back()));
    for (uint16_t& value : x_) value = to_bfloat16(static_cast<float>(small(random)));
    for (uint16_t& value : w_) value = to_bfloat16(static_cast<float>(small(random)));
    for (int32_t& index : row_index_) index = row(random);
  }

  std::vector<uint16_t> run(const Activation& activation, int num_blocks, const float* bias = nullptr,
                            const TraceBuffer& trace = {}) {
    const Problem& p = GetParam();
    const int columns = activation.is_gated ? p.columns : 2 * p.columns;
    std::vector<uint16_t> out(row_index_.size() * columns, 0xffff);  // NaN
    run_grouped_gemm({.target = "cpu", .num_blocks = num_blocks}, {.x = x_.data(),
                                                                   .row_index = row_index_.data(),
                                                                   .expert_offsets = offsets_.data(),
                                                                   .w = w_.data(),
                                                                   .bias = bias,
                                                                   .out = out.data(),
                                                                   .x_stride = p.depth,
                                                                   .num_experts = static_cast<int32_t>(p.counts.size()),
                                                                   .num_x_rows = p.num_x_rows,
                                                                   .num_rows = offsets_.back(),
                                                                   .num_columns = columns,
                                                                   .depth = p.depth,
                                                                   .activation = activation,
                                                                   .trace = trace});
    return out;
  }

  float exact(int expert, int position, int column) const {
    const Problem& p = GetParam();
    if (row_index_[position] < 0) return 0;
    const uint16_t* row = x_.data() + static_cast<size_t>(row_index_[position]) * p.depth;
    const uint16_t* weights = w_.data() + (static_cast<size_t>(expert) * 2 * p.columns + column) * p.depth;
    float sum = 0;
    for (int k = 0; k < p.depth; ++k) sum += to_float(row[k]) * to_float(weights[k]);
    return sum;
  }

  std::vector<uint16_t> x_, w_;
  std::vector<int32_t> row_index_, offsets_ = {0};
};

TEST_P(GroupedGemmTest, EveryElementIsExact) {
  const Problem& p = GetParam();
  const std::vector<uint16_t> out = run({}, 3);
  for (size_t e = 0; e < p.counts.size(); ++e) {
    for (int i = offsets_[e]; i < offsets_[e + 1]; ++i) {
      for (int j = 0; j < 2 * p.columns; ++j) {
        const float expected = exact(static_cast<int>(e), i, j), got = to_float(out[i * size_t(2) * p.columns + j]);
        // Sums beyond 256 are rounded to 8 bits.
        ASSERT_LE(std::abs(got - expected), std::abs(expected) / 256)
            << "expert " << e << " row " << i << " column " << j;
      }
    }
  }
}

TEST_P(GroupedGemmTest, RecordsEveryTileOnceAndComputesTheSame) {
  using Tile = BlockTile<Bfloat16>;
  constexpr int kBlocks = 3, kRoom = 500, kSegments = kBlocks * kWarpsPerBlock;
  const Problem& p = GetParam();
  for (const Activation& activation : {Activation{}, kSwiglu}) {
    std::vector<uint64_t> attempts(kSegments);
    std::vector<TraceRecord> records(kSegments * kRoom);
    const TraceBuffer trace = {attempts.data(), records.data(), kRoom};
    EXPECT_EQ(run(activation, kBlocks, nullptr, trace), run(activation, kBlocks));
    EXPECT_EQ(run(activation, kBlocks - 1, nullptr, trace), run(activation, kBlocks));
    std::vector<int> rows(p.counts.size()), tiles(p.counts.size());
    int num_launches = 0;
    for (int segment = 0; segment < kSegments; ++segment) {
      ASSERT_LT(attempts[segment], uint64_t{kRoom});
      EXPECT_TRUE(attempts[segment] == 0 || segment % kWarpsPerBlock == 0) << "a block's first warp speaks for it";
      for (uint64_t i = 0; i < attempts[segment]; ++i) {
        const TraceFields record(records[segment * kRoom + i]);
        if (record.kind == TraceKind::kKernel) {
          EXPECT_EQ(record.token, static_cast<uint64_t>(moe_op::kGroupedGemm));
          ++num_launches;
          continue;
        }
        ASSERT_EQ(record.kind, moe_kind::kTile);
        ASSERT_LT(record.token, p.counts.size());
        rows[record.token] += static_cast<int>(record.polls);
        ++tiles[record.token];
      }
    }
    EXPECT_EQ(num_launches, kBlocks + kBlocks - 1);
    const int column_tiles = div_up(activation.is_gated ? p.columns : 2 * p.columns,
                                    activation.is_gated ? int{Tile::kColumns} : 2 * Tile::kColumns);
    for (size_t e = 0; e < p.counts.size(); ++e) {
      EXPECT_EQ(rows[e], 2 * p.counts[e] * column_tiles) << "expert " << e;
      EXPECT_EQ(tiles[e], 2 * div_up(p.counts[e], Tile::kRows) * column_tiles) << "expert " << e;
    }
  }
}

TEST_P(GroupedGemmTest, SwigluTakesGateAndUpOfTheSameColumn) {
  const Problem& p = GetParam();
  const std::vector<uint16_t> out = run(kSwiglu, 3);
  for (size_t e = 0; e < p.counts.size(); ++e) {
    for (int i = offsets_[e]; i < offsets_[e + 1]; ++i) {
      for (int j = 0; j < p.columns; ++j) {
        const float gate = exact(static_cast<int>(e), i, j), up = exact(static_cast<int>(e), i, p.columns + j);
        const float expected = gate / (1 + std::exp(-gate)) * up, got = to_float(out[i * size_t(1) * p.columns + j]);
        ASSERT_LE(std::abs(got - expected), std::abs(expected) / 128)
            << "expert " << e << " row " << i << " column " << j;
      }
    }
  }
}

// As in GPT-OSS.
TEST_P(GroupedGemmTest, ClampedSwigluWithBiasOfInterleavedRows) {
  const Problem& p = GetParam();
  Activation activation = kSwiglu;
  activation.is_interleaved = true;
  activation.alpha = 1.5f;
  activation.limit = 4;
  activation.up_shift = 1;
  std::vector<float> bias(p.counts.size() * 2 * p.columns);
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i % 11) - 5;
  const std::vector<uint16_t> out = run(activation, 3, bias.data());
  for (size_t e = 0; e < p.counts.size(); ++e) {
    for (int i = offsets_[e]; i < offsets_[e + 1]; ++i) {
      for (int j = 0; j < p.columns; ++j) {
        const float* of_pair = bias.data() + e * 2 * p.columns + 2 * j;
        const float gate = std::min(exact(static_cast<int>(e), i, 2 * j) + of_pair[0], 4.0f);
        const float up = std::clamp(exact(static_cast<int>(e), i, 2 * j + 1) + of_pair[1], -4.0f, 4.0f);
        const float expected = gate / (1 + std::exp(-1.5f * gate)) * (up + 1), got = to_float(out[i * p.columns + j]);
        ASSERT_LE(std::abs(got - expected), std::abs(expected) / 128)
            << "expert " << e << " row " << i << " column " << j;
      }
    }
  }
}

// ---- float8

uint8_t to_float8(int value) {  // -2 to 2
  constexpr uint8_t kBits[] = {0x00, 0x38, 0x40};
  return static_cast<uint8_t>(kBits[std::abs(value)] | (value < 0 ? 0x80 : 0));
}
float from_float8(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                        : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

// The operands as float8 with scales that are powers of two, so that scaled sums are exact.
class Float8GemmTest : public GroupedGemmTest {
 protected:
  void SetUp() override {
    GroupedGemmTest::SetUp();
    const Problem& p = GetParam();
    std::mt19937 random(test_seed());
    std::uniform_int_distribution<int> exponent(-1, 1);
    for (uint16_t value : x_) x8_.push_back(to_float8(static_cast<int>(to_float(value))));
    for (uint16_t value : w_) w8_.push_back(to_float8(static_cast<int>(to_float(value))));
    num_scales_ = (p.depth + 127) / 128;
    x_scales_.resize(static_cast<size_t>(p.num_x_rows) * num_scales_);
    w_scales_.resize(p.counts.size() * 2 * ((p.columns + 127) / 128) * num_scales_);
    for (float& scale : x_scales_) scale = std::ldexp(1.0f, exponent(random));
    for (float& scale : w_scales_) scale = std::ldexp(1.0f, exponent(random));
  }

  GroupedGemmArgs args(bool is_gated, DType out_dtype, void* out, float* out_scales = nullptr) {
    const Problem& p = GetParam();
    return {.x = x8_.data(),
            .row_index = row_index_.data(),
            .expert_offsets = offsets_.data(),
            .w = w8_.data(),
            .out = out,
            .x_scales = x_scales_.data(),
            .w_scales = w_scales_.data(),
            .out_scales = out_scales,
            .x_stride = p.depth,
            .x_scales_stride = num_scales_,
            .num_experts = static_cast<int32_t>(p.counts.size()),
            .num_x_rows = p.num_x_rows,
            .num_rows = offsets_.back(),
            .num_columns = is_gated ? p.columns : 2 * p.columns,
            .depth = p.depth,
            .dtype = DType::kFloat8,
            .out_dtype = out_dtype,
            .activation = is_gated ? kSwiglu : Activation{}};
  }

  // column: of the rows of w. row_block: of w's scales.
  float exact_scaled(int expert, int position, int column, int row_block) const {
    const Problem& p = GetParam();
    if (row_index_[position] < 0) return 0;
    const size_t row = static_cast<size_t>(row_index_[position]), num_blocks = 2 * ((p.columns + 127) / 128);
    float sum = 0;
    for (int k = 0; k < p.depth; ++k) {
      const float scale =
          x_scales_[row * num_scales_ + k / 128] * w_scales_[(expert * num_blocks + row_block) * num_scales_ + k / 128];
      sum += to_float(x_[row * p.depth + k]) *
             to_float(w_[(static_cast<size_t>(expert) * 2 * p.columns + column) * p.depth + k]) * scale;
    }
    return sum;
  }
  float exact_swiglu(int expert, int position, int column) const {
    const Problem& p = GetParam();
    const float gate = exact_scaled(expert, position, column, column / 128);
    const float up = exact_scaled(expert, position, p.columns + column, (p.columns + 127) / 128 + column / 128);
    return gate / (1 + std::exp(-gate)) * up;
  }

  std::vector<uint8_t> x8_, w8_;
  std::vector<float> x_scales_, w_scales_;
  int num_scales_ = 0;
};

TEST_P(Float8GemmTest, EveryGatedElementIsScaled) {
  const Problem& p = GetParam();
  std::vector<uint16_t> out(row_index_.size() * p.columns, 0xffff);  // NaN
  run_grouped_gemm({.target = "cpu", .num_blocks = 3}, args(true, DType::kBfloat16, out.data()));
  for (size_t e = 0; e < p.counts.size(); ++e) {
    for (int i = offsets_[e]; i < offsets_[e + 1]; ++i) {
      for (int j = 0; j < p.columns; ++j) {
        const float expected = exact_swiglu(static_cast<int>(e), i, j),
                    got = to_float(out[i * size_t(1) * p.columns + j]);
        ASSERT_LE(std::abs(got - expected), std::abs(expected) / 128)
            << "expert " << e << " row " << i << " column " << j;
      }
    }
  }
}

TEST_P(Float8GemmTest, ResultsAreQuantizedByRow) {
  const Problem& p = GetParam();
  const int blocks = (p.columns + 127) / 128;
  std::vector<uint8_t> out(row_index_.size() * p.columns, 0x7f);  // NaN
  std::vector<float> scales(row_index_.size() * blocks, std::nanf(""));
  run_grouped_gemm({.target = "cpu", .num_blocks = 3}, args(true, DType::kFloat8, out.data(), scales.data()));
  for (size_t e = 0; e < p.counts.size(); ++e) {
    for (int i = offsets_[e]; i < offsets_[e + 1]; ++i) {
      for (int j = 0; j < p.columns; ++j) {
        const float scale = scales[i * blocks + j / 128], expected = exact_swiglu(static_cast<int>(e), i, j);
        const float got = from_float8(out[i * size_t(1) * p.columns + j]) * scale;
        // 3 bits of fraction; subnormal values are multiples of 2^-9.
        ASSERT_LE(std::abs(got - expected), std::abs(expected) / 15 + scale / 512)
            << "expert " << e << " row " << i << " column " << j;
      }
    }
  }
}

TEST_P(Float8GemmTest, BlocksDoNotMatter) {
  std::vector<std::vector<uint16_t>> outs;
  for (int num_blocks : {1, 2, 5}) {
    outs.emplace_back(row_index_.size() * 2 * GetParam().columns, 0xffff);
    run_grouped_gemm({.target = "cpu", .num_blocks = num_blocks}, args(false, DType::kBfloat16, outs.back().data()));
    EXPECT_EQ(outs.back(), outs.front());
  }
}

TEST_P(GroupedGemmTest, BlocksDoNotMatter) {
  const std::vector<uint16_t> one = run({}, 1);
  for (int num_blocks : {2, 5}) EXPECT_EQ(run({}, num_blocks), one);
}

const auto kProblems = testing::Values(Problem{{3, 0, 5, 1}, 16, 16, 4},                  // the smallest sizes
                                       Problem{{70, 0, 129}, 48, 80, 50},                 // tails everywhere
                                       Problem{{0, 0, 0, 66, 0}, 544, 64, 20},            // deeper than a step
                                       Problem{{5, 40}, 272, 208, 20},                    // several blocks of scales
                                       Problem{std::vector<int32_t>(40, 2), 32, 48, 9});  // more experts than lanes
INSTANTIATE_TEST_SUITE_P(Routings, GroupedGemmTest, kProblems);
INSTANTIATE_TEST_SUITE_P(Routings, Float8GemmTest, kProblems);

}  // namespace
}  // namespace moe_a2a
