// The real kernels and host objects, ranks as threads, hundreds of rounds back to back without a barrier: changing
// numbers of tokens, routings, layouts and blocks, with releases and refusals. Every value is checked. Built with
// ThreadSanitizer, with AddressSanitizer and UBSan, and for warps of many lanes (tests/lanes), the latter also with
// both halves of a call in one launch.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "arch/arch.h"
#include "seed.h"
#include "thread_ranks.h"
#include "traffic.h"

namespace moe_a2a {
namespace {

// One rank's part of the rounds.
class Worker {
 public:
  Worker(ExpertParallel& ep, uint64_t seed)
      : ep_(ep), config_(ep.config()), seed_(seed), in_one_launch_(!ep.device().is_synchronous()) {}

  void run(const std::vector<Round>& rounds) {
    for (size_t i = 0; i < rounds.size() && !::testing::Test::HasFailure(); ++i) {
      auto first = dispatch(rounds[i]);
      if (!rounds[i].opens_second) {
        finish(rounds[i], first);
        continue;
      }
      auto second = dispatch(rounds[i + 1]);
      finish(rounds[i], first);
      finish(rounds[i + 1], second);
      ++i;
    }
  }

 private:
  using Handle = std::shared_ptr<DispatchHandle>;

  // Null if the round's dispatch was refused, here or by another rank.
  Handle dispatch(const Round& round) {
    const bool is_refused = round.end == Round::End::kRefusedDispatch;
    const LaunchPlace place{.num_blocks = round.num_blocks};
    if (is_refused && round.refusing_rank == config_.rank) {
      ep_.refuse_dispatch(refusal(round), place);
      return nullptr;
    }
    const Tokens tokens(seed_, config_, config_.rank, round.number);
    const DispatchInput input{.num_tokens = tokens.count,
                              .topk_idx = {tokens.topk_idx.data(), true},
                              .topk_weights = tokens.weights.data(),
                              .x = {tokens.x.data(), config_.hidden * size_of(config_.dtype)},
                              .x_scales = {},
                              .format = round.quantize ? RowFormat::kFloat8 : RowFormat::kPlain,
                              .quantize = round.quantize};
    if (in_one_launch_) {
      auto handle = ep_.dispatch(input, round.layout, round.expert_alignment, place);
      ep_.check();
      work(round, *handle);
      return handle;
    }
    auto handle = ep_.dispatch_send(input, place);
    try {
      ep_.dispatch_recv(*handle, round.layout, round.expert_alignment, place);
      EXPECT_FALSE(is_refused);
    } catch (const PeerRefused& refused) {
      EXPECT_TRUE(is_refused);
      EXPECT_EQ(refused.peer, round.refusing_rank);
      EXPECT_NE(std::string(refused.what()).find(refusal(round)), std::string::npos) << refused.what();
      return nullptr;
    }
    work(round, *handle);
    return handle;
  }

  static std::string refusal(const Round& round) { return "round " + std::to_string(round.number) + " is refused"; }

  // Checks every landed row and route; computes y for the combine.
  void work(const Round& round, const DispatchHandle& handle) {
    const MoeRegion& region = ep_.region();
    const int b = handle.buffer, local_experts = config_.num_local_experts;
    const int64_t num_positions = round.layout == Layout::kMasked ? local_experts * config_.row_capacity()
                                                                  : region.expert_offsets(b, local_experts);
    const int64_t row_bytes = config_.hidden * size_of(config_.dtype);
    std::vector<std::byte>& y = y_[b];
    y.assign(num_positions * row_bytes, std::byte{0xff});
    int64_t expected_routes = 0;
    for (int src = 0; src < config_.num_ranks; ++src) {
      const Tokens tokens(seed_, config_, src, round.number);
      EXPECT_EQ(region.num_recv_tokens_per_rank(b, src), tokens.count);
      for (const int64_t expert : tokens.topk_idx)
        expected_routes += expert >= 0 && expert / local_experts == config_.rank;
    }
    int64_t routes = 0;
    for (int e = 0; e < local_experts; ++e) {
      for (int i = 0; i < region.expert_counts(b, e); ++i, ++routes) {
        const int position = region.expert_offsets(b, e) + i, row = region.expert_row_index(b, position);
        const int src = row / config_.num_max_tokens_per_rank, token = row % config_.num_max_tokens_per_rank;
        EXPECT_EQ(region.route_src_rank(b, position), src);
        EXPECT_EQ(region.route_src_token_idx(b, position), token);
        check_row(round, region.row.at(b, src, token), src, token);
        const int expert = config_.rank * local_experts + e;
        for (int c = 0; c < config_.hidden; ++c) {
          store_element(&y[position * row_bytes], config_.dtype, c,
                        expert_output(expert, x_value(src, token, round.number, c)));
        }
      }
    }
    EXPECT_EQ(routes, expected_routes);
    if (round.layout != Layout::kRows && !round.quantize) check_gathered(round, handle, num_positions);
  }

  void check_row(const Round& round, const std::byte* row, int src, int token) const {
    if (round.quantize) return check_quantized_row(round, row, src, token);
    for (int c = 0; c < config_.hidden; ++c) {
      ASSERT_EQ(load_element(row, config_.dtype, c), x_value(src, token, round.number, c))
          << "round " << round.number << ", row of rank " << src << " token " << token << " column " << c;
    }
  }

  void check_quantized_row(const Round& round, const std::byte* row, int src, int token) const {
    for (int begin = 0; begin < config_.hidden; begin += kScaleBlock) {
      const int end = std::min(begin + kScaleBlock, config_.hidden);
      float amax = 1e-12f;
      for (int c = begin; c < end; ++c) amax = std::max(amax, std::fabs(x_value(src, token, round.number, c)));
      float scale;
      std::memcpy(&scale, row + config_.scales_offset() + begin / kScaleBlock * sizeof(float), sizeof(float));
      ASSERT_EQ(scale, amax / kFloat8Max);
      for (int c = begin; c < end; ++c) {
        const Float8 expected = from_float<Float8>(x_value(src, token, round.number, c) * (kFloat8Max / amax));
        ASSERT_EQ(static_cast<uint8_t>(row[c]), expected.bits) << "round " << round.number << " column " << c;
      }
    }
  }

  void check_gathered(const Round& round, const DispatchHandle& handle, int64_t num_positions) {
    const MoeRegion& region = ep_.region();
    const int64_t row_bytes = config_.hidden * size_of(config_.dtype);
    std::vector<std::byte> expert_x(num_positions * row_bytes);
    ep_.gather_rows(handle, expert_x.data(), nullptr, false, {.num_blocks = round.num_blocks});
    for (int e = 0; e < config_.num_local_experts; ++e) {
      for (int i = 0; i < region.expert_counts(handle.buffer, e); ++i) {
        const int position = region.expert_offsets(handle.buffer, e) + i;
        check_row(round, &expert_x[position * row_bytes], region.route_src_rank(handle.buffer, position),
                  region.route_src_token_idx(handle.buffer, position));
      }
    }
  }

  void finish(const Round& round, const Handle& handle) {
    if (!handle) return;
    const LaunchPlace place{.num_blocks = round.num_blocks};
    if (round.end == Round::End::kRelease) return ep_.release(*handle, place);
    if (round.end == Round::End::kRefusedCombine && round.refusing_rank == config_.rank) {
      ep_.refuse_combine(handle.get(), refusal(round), place);
    }
    if (round.presummed) sum_here(round, y_[handle->buffer]);
    const std::vector<std::byte>& y = y_[handle->buffer];
    const int64_t row_bytes = config_.hidden * size_of(config_.dtype);
    const CombineInput input{.y = {y.data(), row_bytes},
                             .num_y_rows = static_cast<int64_t>(y.size()) / row_bytes,
                             .presummed = round.presummed,
                             .codec = round.codec_of(config_.rank)};
    std::vector<std::byte> combined(handle->num_tokens * row_bytes);
    if (in_one_launch_) {
      ep_.combine(*handle, input, combined.data(), place);
      ep_.check();
      return check_combined(round, combined);
    }
    ep_.combine_send(*handle, input, place);
    while (handle->stage != DispatchHandle::Stage::kClosed) {
      try {
        ep_.combine_recv(*handle, combined.data(), place);
      } catch (const PeerRefused& refused) {
        EXPECT_EQ(round.end, Round::End::kRefusedCombine);
        EXPECT_EQ(refused.peer, round.refusing_rank);
      }
    }
    check_combined(round, combined);
  }

  // Replaces the experts' outputs by one row per landed row.
  void sum_here(const Round& round, std::vector<std::byte>& y) const {
    const int64_t row_bytes = config_.hidden * size_of(config_.dtype);
    y.assign(config_.row_capacity() * row_bytes, std::byte{0xff});
    for (int src = 0; src < config_.num_ranks; ++src) {
      const Tokens tokens(seed_, config_, src, round.number);
      for (int t = 0; t < tokens.count; ++t) {
        std::byte* row = &y[(int64_t{src} * config_.num_max_tokens_per_rank + t) * row_bytes];
        for (int c = 0; c < config_.hidden; ++c) {
          store_element(row, config_.dtype, c, partial_sum(tokens, config_.rank, src, t, c, round));
        }
      }
    }
  }

  // The sum of rank `r`'s experts for a token: choice by choice, not yet rounded to the wire's type.
  float partial_sum(const Tokens& tokens, int r, int src, int token, int c, const Round& round) const {
    float partial = 0;
    for (int k = 0; k < config_.num_topk; ++k) {
      const auto expert = static_cast<int>(tokens.topk_idx[token * config_.num_topk + k]);
      if (expert < 0 || expert / config_.num_local_experts != r) continue;
      const float y = rounded(config_.dtype, expert_output(expert, x_value(src, token, round.number, c)));
      const volatile float product = tokens.weights[token * config_.num_topk + k] * y;  // rounded before it is added
      partial += product;
    }
    return partial;
  }

  // The contract's arithmetic: one partial sum per rank, rounded to the wire's type, then their sum, ranks ascending.
  void check_combined(const Round& round, const std::vector<std::byte>& combined) const {
    const Tokens tokens(seed_, config_, config_.rank, round.number);
    const int64_t row_bytes = config_.hidden * size_of(config_.dtype);
    for (int t = 0; t < tokens.count; ++t) {
      std::vector<float> sums(config_.hidden), bounds(config_.hidden);
      for (int r = 0; r < config_.num_ranks; ++r) add_partial(tokens, r, t, round, sums, bounds);
      for (int c = 0; c < config_.hidden; ++c) {
        const float got = load_element(&combined[t * row_bytes], config_.dtype, c);
        const float expected = rounded(config_.dtype, sums[c]);
        // Sums of coded rows are rounded once more, to at least 8 bits.
        const float bound = bounds[c] == 0 ? 0 : bounds[c] + (std::abs(sums[c]) + bounds[c]) / 128;
        ASSERT_LE(std::abs(got - expected), bound)
            << "round " << round.number << " token " << t << " column " << c << " on rank " << config_.rank;
      }
    }
  }

  // Adds what rank `r` sends for a token, and the errors of its codec.
  void add_partial(const Tokens& tokens, int r, int t, const Round& round, std::vector<float>& sums,
                   std::vector<float>& bounds) const {
    const LineCodec codec = r == config_.rank ? LineCodec::kNone : round.codec_of(r);
    constexpr float kOneRounding[] = {0, 1.0f / 16, 1.0f / 127, 1.0f / 31, 1.0f / 7};  // of a block's largest magnitude
    for (int first = 0; first < config_.hidden; first += kLineBlock) {
      const int end = std::min(first + kLineBlock, config_.hidden);
      float largest = 0;
      for (int c = first; c < end; ++c) {
        const float partial = rounded(config_.dtype, partial_sum(tokens, r, config_.rank, t, c, round));
        sums[c] += partial;
        largest = std::max(largest, std::abs(partial));
      }
      for (int c = first; c < end; ++c) bounds[c] += kOneRounding[static_cast<int>(codec)] * largest;
    }
  }

  ExpertParallel& ep_;
  const MoeConfig config_;
  uint64_t seed_;
  bool in_one_launch_;           // refusals then surface later, so rounds contain none
  std::vector<std::byte> y_[3];  // per buffer
};

struct Setting {
  int num_ranks, num_buffers, num_rounds;
  DType dtype;
  int least_hidden = 1, most_hidden = 150, least_tokens = 1, most_tokens = 12;
  bool small_batches = true;
  int least_local_experts = 2, most_local_experts = 4;
  int least_topk = 1, most_topk = 6;
};

// For targets on which rounds are slow.
int rounds_divisor() {
  const char* divisor = std::getenv("MOE_A2A_ROUNDS_DIVISOR");
  return divisor != nullptr ? std::atoi(divisor) : 1;
}

// The rounds that remain where a refusal surfaces too late to tell which round it belongs to.
std::vector<Round> without_refusals(std::vector<Round> rounds) {
  for (Round& round : rounds) {
    const bool is_refusal = round.end == Round::End::kRefusedDispatch || round.end == Round::End::kRefusedCombine;
    if (is_refusal) round.end = Round::End::kCombine;
  }
  return rounds;
}

class BackToBackTest : public ::testing::TestWithParam<Setting> {};

TEST_P(BackToBackTest, EveryValueIsRight) {
  const auto [num_ranks, num_buffers, num_rounds, dtype, least_hidden, most_hidden, least_tokens, most_tokens,
              small_batches, least_local_experts, most_local_experts, least_topk, most_topk] = GetParam();
  const uint64_t seed = test_seed();
  std::mt19937_64 random(seed);
  const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); };
  const int num_experts = num_ranks * pick(least_local_experts, most_local_experts),
            any = pick(least_hidden, most_hidden);
  MoeConfig config{.num_ranks = num_ranks,
                   .num_experts = num_experts,
                   .num_topk = pick(least_topk, std::min(num_experts, most_topk)),
                   .hidden = pick(0, 1) ? (any + 15) / 16 * 16 : any,  // some in rows of whole vectors
                   .num_max_tokens_per_rank = pick(least_tokens, most_tokens),
                   .num_buffers = num_buffers,
                   .dtype = dtype};
  // All batches travel as LL words, or only those of up to half the tokens.
  const int most = config.ll_token_capacity();
  if (small_batches) config.num_max_ll_tokens = pick(0, 1) ? most : (most + 1) / 2;
  if (pick(0, 2) == 0) config.max_ll_row_tokens = config.max_ll_quantized_row_tokens = 0;  // only their choices
  const std::vector<Round> rounds = draw_rounds(seed, config, std::max(1, num_rounds / rounds_divisor()));
  run_ranks(config, 20.0, [&](ExpertParallel& ep) {
    Worker(ep, seed).run(ep.device().is_synchronous() ? rounds : without_refusals(rounds));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, BackToBackTest,
                         ::testing::Values(Setting{1, 2, 1000, DType::kFloat32}, Setting{2, 1, 1500, DType::kFloat32},
                                           Setting{2, 2, 1000, DType::kFloat16, 1, 150, 1, 12, false},
                                           Setting{2, 3, 1500, DType::kBfloat16}, Setting{3, 2, 1000, DType::kFloat16},
                                           Setting{4, 2, 800, DType::kBfloat16}, Setting{5, 1, 500, DType::kFloat32},
                                           Setting{6, 2, 500, DType::kBfloat16, 1, 150, 1, 12, false},
                                           Setting{8, 2, 400, DType::kFloat32},
                                           // Rows of several pieces.
                                           Setting{2, 2, 60, DType::kFloat32, 1100, 2200, 50, 90},
                                           // Tables of several chunks, by up to three blocks.
                                           Setting{3, 2, 60, DType::kFloat32, 1, 4, 300, 700},
                                           // Two threads per token of a table, and fewer choices than a vector holds.
                                           Setting{2, 2, 60, DType::kFloat32, 1, 4, 20, 60, false, 2, 4, 2, 3},
                                           // More lists than a warp or a block has lanes.
                                           Setting{2, 2, 60, DType::kFloat32, 1, 4, 30, 200, true, 60, 300}),
                         [](const auto& info) {
                           return std::to_string(info.param.num_ranks) + "_ranks_" +
                                  std::to_string(info.param.num_buffers) + "_buffers_" +
                                  std::to_string(info.param.most_tokens) + "_tokens";
                         });

}  // namespace
}  // namespace moe_a2a
