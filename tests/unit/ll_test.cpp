// Small batches: words that carry their epoch, rows cut into words and reassembled, their sums, and the table of
// choices that a receiver counts itself.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "moe/dispatch/dispatch_send.h"
#include "moe/route/expert_lists.h"
#include "rows/ll_sum.h"
#include "seed.h"
#include "unit/heaps.h"
#include "unit/random.h"

namespace moe_a2a {
namespace {

constexpr uint64_t kEpoch = (uint64_t{1} << 31) + 5;
constexpr WaitSite kSite{moe_op::kDispatchRecv, moe_kind::kRowWait, 0};

MoeConfig draw_config(Random& random) {
  const int num_ranks = random.pick(1, 6);
  MoeConfig config{.num_ranks = num_ranks,
                   .num_experts = num_ranks * random.pick(1, 20),
                   .num_topk = random.pick(1, 9),
                   .hidden = random.pick(0, 1) ? random.pick(1, 40) : random.pick(1, 1700),
                   .num_max_tokens_per_rank = random.pick(1, 60),
                   .num_buffers = 2,
                   .dtype = static_cast<DType>(random.pick(0, 2))};
  config.num_max_ll_tokens = random.pick(1, config.ll_token_capacity());
  return config;
}

void poison(Heaps& heaps) {
  CacheLine poisoned;
  std::fill(std::begin(poisoned.bytes), std::end(poisoned.bytes), std::byte{0xa5});
  for (Memory& memory : heaps.symmetric) std::fill(memory.begin(), memory.end(), poisoned);
}

// ---- words

TEST(LlStamp, IsNeverThatOfClearedMemoryAndWrapsAfter31Bits) {
  for (const uint64_t epoch :
       {0ull, 1ull, (1ull << 31) - 1, 1ull << 31, (1ull << 32) - 1, 1ull << 32, (1ull << 44) - 1}) {
    uint64_t seen = 0;
    EXPECT_NE(ll_stamp(epoch), 0u);
    EXPECT_NE(ll_stamp(epoch), ll_stamp(epoch + 1));
    EXPECT_NE(ll_stamp(epoch), ll_stamp(epoch - 1));
    EXPECT_EQ(ll_stamp(epoch), ll_stamp(epoch + (1ull << 31)));
    EXPECT_TRUE(has_epoch({.data = {7}, .stamp = ll_stamp(epoch)}, epoch, seen));
    EXPECT_FALSE(has_epoch({.data = {7}, .stamp = ll_stamp(epoch)}, epoch + 1, seen));
    EXPECT_EQ(Signal::epoch_of(seen), epoch & 0x7fffffff);
    EXPECT_FALSE(has_epoch({}, epoch, seen));
    EXPECT_EQ(Signal::epoch_of(seen), 0u);
  }
}

// ---- rows

// Sends a row of rank `src` and receives it on every destination; memory is poisoned first.
TEST(LlStream, RowsComeAsTheyWereAndTouchNothingElse) {
  Random random(test_seed());
  for (int round = 0; round < 400; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    MoeConfig config = draw_config(random);
    Heaps heaps(config);
    const int num_ranks = config.num_ranks, src = random.pick(0, num_ranks - 1), buffer = random.pick(0, 1);
    const int token = random.pick(0, config.num_max_ll_tokens - 1), first = random.pick(0, num_ranks - 1);
    const RankSet dst_ranks{1 + static_cast<uint64_t>(random.pick(0, (1 << num_ranks) - 2))};
    const DType dtype = random.pick(0, 2) == 0 ? DType::kFloat8 : config.dtype;
    const RowLayout layout = config.row(dtype);
    const int pieces = layout.num_pieces(), words_per_piece = ll_words_per_piece(layout);
    std::vector<std::byte> x(config.hidden * size_of(dtype) + 16), scales(4 * config.num_scales());
    random.fill(x.data(), x.size());
    random.fill(scales.data(), scales.size());
    const std::byte* values = x.data() + random.pick(0, 15);  // any alignment
    poison(heaps);
    const std::vector<Memory> before = heaps.symmetric;

    const auto row_at = [&](const Context& c) { return c.region.ll_row.at(buffer, src, token); };
    for (int p = pieces - 1; p >= 0; --p) {
      const Context& c = heaps.context[src];
      RowSource row = layout.part(layout.piece(p));
      row.values = values + row.values_offset;
      row.scales = scales.data() + p * kPieceBlocks * 4;
      LlWord* local = reinterpret_cast<LlWord*>(row_at(c)) + p * words_per_piece;
      send_ll(Warp{}, {dst_ranks, token, first}, row, kEpoch, [&](int r) { return c.heap.peer(r, local); });
    }
    for (int r = 0; r < num_ranks; ++r) {
      const auto* bytes = reinterpret_cast<const std::byte*>(heaps.symmetric[r].data());
      const auto* old = reinterpret_cast<const std::byte*>(before[r].data());
      const int64_t begin = row_at(heaps.context[r]) - bytes, end = begin + config.ll_row_stride();
      const int64_t size = heaps.symmetric[r].size() * sizeof(CacheLine);
      ASSERT_EQ(std::memcmp(bytes, old, begin), 0);
      ASSERT_EQ(std::memcmp(bytes + end, old + end, size - end), 0);
      ASSERT_EQ(std::memcmp(bytes + begin, old + begin, end - begin) != 0, dst_ranks.contains(r));
    }
    for (RankSet rest = dst_ranks; !rest.empty(); rest.remove_first()) {
      const Context& c = heaps.context[rest.first()];
      // Between two guards as long as a row; bytes that are neither values nor scales may be anything.
      const int64_t stride = config.row_stride(dtype);
      std::vector<uint32_t> memory(3 * stride / 4, 0x5a5a5a5a);
      auto* target = reinterpret_cast<std::byte*>(memory.data()) + stride;
      for (int p = 0; p < pieces; ++p) {
        const RowSource row = layout.part(layout.piece(p));
        const LlWord* words = reinterpret_cast<const LlWord*>(row_at(c)) + p * words_per_piece;
        ASSERT_TRUE(receive_ll(Warp{}, c.heap, c.wait, words, row, target, kEpoch, kSite));
      }
      ASSERT_EQ(std::memcmp(target, values, config.hidden * size_of(dtype)), 0);
      if (dtype == DType::kFloat8) {
        ASSERT_EQ(std::memcmp(target + config.scales_offset(), scales.data(), scales.size()), 0);
      }
      const auto is_guard = [](uint32_t dword) { return dword == 0x5a5a5a5a; };
      ASSERT_TRUE(std::all_of(memory.begin(), memory.begin() + stride / 4, is_guard));
      ASSERT_TRUE(std::all_of(memory.end() - stride / 4, memory.end(), is_guard));
    }
  }
}

TEST(LlStream, OneWordOfAnotherEpochIsWaitedForInVain) {
  MoeConfig config{.num_experts = 1,
                   .num_topk = 1,
                   .hidden = 9,
                   .num_max_tokens_per_rank = 1,
                   .num_buffers = 1,
                   .dtype = DType::kFloat32,
                   .num_max_ll_tokens = 1};
  const std::vector<float> x(config.hidden, 3.0f);
  for (int late = 0; late < config.hidden; ++late) {
    Heaps heaps(config);
    const Context& c = heaps.context[0];
    RowSource row = config.row(config.dtype).part(config.row(config.dtype).whole());
    row.values = reinterpret_cast<const std::byte*>(x.data());
    auto* words = reinterpret_cast<LlWord*>(c.region.ll_row.at(0, 0, 0));
    send_ll(Warp{}, {RankSet::only(0), 0, 0}, row, kEpoch, [&](int) { return words; });
    words[late].stamp = ll_stamp(kEpoch - 1);
    std::vector<float> target(64);
    EXPECT_FALSE(
        receive_ll(Warp{}, c.heap, c.wait, words, row, reinterpret_cast<std::byte*>(target.data()), kEpoch, kSite));
    EXPECT_EQ(heaps.reports[0].failure.reason, Reason::kTimeout);
    EXPECT_EQ(heaps.reports[0].failure.expected_epoch, kEpoch);
    EXPECT_EQ(heaps.reports[0].failure.seen_epoch, (kEpoch - 1) & 0x7fffffff);
  }
}

// ---- sums

TEST(LlSum, AreThePlainSumsInAscendingOrderOfTheRanks) {
  Random random(test_seed());
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    MoeConfig config = draw_config(random);
    config.num_ranks = random.pick(1, 6), config.num_experts = config.num_ranks, config.num_local_experts = 1;
    config.num_max_ll_tokens = std::min(config.num_max_ll_tokens, config.ll_token_capacity());
    Heaps heaps(config);
    const int buffer = random.pick(0, 1), token = random.pick(0, config.num_max_ll_tokens - 1);
    const Context& me = heaps.context[random.pick(0, config.num_ranks - 1)];
    const RankSet ranks{static_cast<uint64_t>(random.pick(0, (1 << config.num_ranks) - 1))};
    me.region.token_ranks(buffer, token) = ranks;
    const RowLayout layout = config.row(config.dtype);
    const int words_per_piece = ll_words_per_piece(layout);
    const Exchange exchange = combine_rows(me, buffer, kEpoch);
    const WaitSite site{moe_op::kCombineRecv, moe_kind::kPartialWait, 0, token, buffer};
    with_element_type(config.dtype, [&](auto type) {
      using T = decltype(type);
      if constexpr (sizeof(T) > 1) {
        const bool keeps_own = config.row_bytes(config.dtype) % 4 == 0 && random.pick(0, 1) == 1;
        std::vector<T> own;
        std::vector<float> expected(config.hidden);
        for (int r = 0; r < config.num_ranks; ++r) {
          std::vector<T> y(config.hidden);
          for (T& value : y) value = from_float<T>(static_cast<float>(random.pick(-4000, 4000)) / 37);
          if (!ranks.contains(r)) continue;
          for (int i = 0; i < config.hidden; ++i) expected[i] += to_float(y[i]);
          if (keeps_own && r == me.heap.rank) own = y;
          for (int p = 0; p < config.num_pieces(); ++p) {
            RowSource row = layout.part(layout.piece(p));
            row.values = reinterpret_cast<const std::byte*>(y.data()) + row.values_offset;
            auto* words =
                reinterpret_cast<LlWord*>(me.region.ll_combine_row.at(buffer, r, token)) + p * words_per_piece;
            if (keeps_own && r == me.heap.rank) continue;  // this sum does not travel
            send_ll(Warp{}, {RankSet::only(me.heap.rank), token, 0}, row, kEpoch, [&](int) { return words; });
          }
        }
        const T guard = from_float<T>(77.0f);
        for (const bool vector_rows : {false, true}) {
          std::vector<T> combined(config.hidden + 8, guard);
          for (int p = 0; p < config.num_pieces(); ++p) {
            const Piece piece = layout.piece(p);
            const auto* own_piece =
                own.empty() ? nullptr : reinterpret_cast<const std::byte*>(own.data() + piece.first);
            const auto add = [&](auto sum) {
              const int num_parts = random.pick(1, 3);
              for (int part = 0; part < num_parts; ++part) {
                ASSERT_TRUE(sum.add(Warp{}, part, num_parts, piece.size(), vector_rows, combined.data() + piece.first));
              }
            };
            if (own.empty()) {
              add(LlSum<false>{exchange, ranks, site, me.region.combine_refusal, 1, SeenStrays{}, 0,
                               p * words_per_piece});
            } else {
              add(LlSum<true>{exchange, ranks, site, me.region.combine_refusal, 1, SeenStrays{}, 0, p * words_per_piece,
                              own_piece});
            }
          }
          for (int i = 0; i < config.hidden; ++i) {
            ASSERT_EQ(to_float(combined[i]), to_float(from_float<T>(expected[i]))) << "column " << i;
          }
          for (int i = config.hidden; i < config.hidden + 8; ++i) ASSERT_EQ(to_float(combined[i]), 77.0f);
        }
      }
    });
  }
}

// ---- choices

TEST(LlChoice, WordsStayInTheirTokensPlace) {
  Random random(test_seed());
  for (int round = 0; round < 200; ++round) {
    const MoeConfig config = draw_config(random);
    Heaps heaps(config);
    const int src = random.pick(0, config.num_ranks - 1), token = random.pick(0, config.num_max_ll_tokens - 1);
    const Context& c = heaps.context[src];
    poison(heaps);
    const std::vector<Memory> before = heaps.symmetric;
    for (int k = 0; k < config.num_topk; ++k) send_choice(c, 1, token + 1, token, k, k - 1, 0.5f * k, kEpoch);
    for (int r = 0; r < config.num_ranks; ++r) {
      const Context& there = heaps.context[r];
      const auto* bytes = reinterpret_cast<const std::byte*>(heaps.symmetric[r].data());
      const auto* old = reinterpret_cast<const std::byte*>(before[r].data());
      const int64_t begin = there.region.ll_choices.at(1, src, token) - bytes, end = begin + config.ll_choices_stride();
      ASSERT_EQ(std::memcmp(bytes, old, begin), 0);
      ASSERT_EQ(std::memcmp(bytes + end, old + end, heaps.symmetric[r].size() * sizeof(CacheLine) - end), 0);
      for (int k = 0; k < config.num_topk; ++k) {
        int expert;
        float weight;
        ASSERT_TRUE(receive_choice(there, 1, src, token, k, kEpoch, true, &expert, &weight));
        ASSERT_EQ(expert, local_expert(there.config, k - 1));
        ASSERT_EQ(weight, 0.5f * k);
      }
    }
  }
}

// Compares with a plain count.
TEST(LlTable, CountsAndNumbersLikeAPlainLoop) {
  Random random(test_seed());
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const MoeConfig config = draw_config(random);
    Heaps heaps(config);
    const int num_local = config.num_local_experts, num_topk = config.num_topk;
    const Context& me = heaps.context[random.pick(0, config.num_ranks - 1)];
    // None, some, as many as fit, and more: larger batches travel as tables and must not be in this one.
    std::vector<int32_t> num_tokens;
    std::vector<std::vector<int>> expert(config.num_ranks);
    std::vector<std::vector<float>> weight(config.num_ranks);
    for (int r = 0; r < config.num_ranks; ++r) {
      const int most = config.num_max_ll_tokens, kind = random.pick(0, 5);
      num_tokens.push_back(kind == 0 ? 0 : kind == 1 ? most : kind == 2 ? most + 1 : random.pick(0, most));
      for (int i = 0; i < num_tokens[r] * num_topk && num_tokens[r] <= most; ++i) {
        const int chosen = random.pick(0, 4) == 0 ? -1 : random.pick(0, config.num_experts - 1);
        weight[r].push_back(static_cast<float>(random.pick(0, 1000)));
        expert[r].push_back(local_expert(me.config, chosen));
        send_choice(heaps.context[r], 0, num_tokens[r], i / num_topk, i % num_topk, chosen, weight[r][i], kEpoch);
      }
    }
    SharedCarver carver;
    const LlTable::Plan plan = LlTable::plan(config, carver);
    SharedMemory shared(carver.bytes() + 128);
    std::memset(shared.data(), 0xa5, carver.bytes() + 128);
    Block::Scratch scratch;
    const Block block(scratch);
    LlTable table(me, 0, block, shared.data(), plan);
    table.clear();
    for (int n : num_tokens) table.expect(n);
    ASSERT_TRUE(table.receive(num_tokens.data(), kEpoch));
    table.count(num_tokens.data());
    for (int i = 0; i < 128; ++i) ASSERT_EQ(shared.data()[carver.bytes() + i], std::byte{0xa5});

    for (int r = 0; r < config.num_ranks; ++r) {
      if (!config.sends_ll_choices(num_tokens[r])) continue;
      const int length = 1 << table.segment_shift(), segments = (num_tokens[r] + length - 1) / length;
      ASSERT_LE(segments, 1 << LlTable::log2_segments(config));
      for (int s = 0; s < segments; ++s) {
        ASSERT_LT(s * length, num_tokens[r]);
        std::vector<int> count(num_local);
        int num_landed = 0;
        for (int t = s * length; t < std::min((s + 1) * length, num_tokens[r]); ++t) {
          bool lands = false;
          for (int k = 0; k < num_topk; ++k) {
            const LocalChoice choice = LlTable::Token(table, r, t).choice(k);
            const int local = expert[r][t * num_topk + k];
            ASSERT_EQ(choice.expert, local);
            ASSERT_EQ(LlTable::Token(table, r, t).weight(k), weight[r][t * num_topk + k]);
            if (local < 0) continue;
            ASSERT_EQ(choice.idx, count[local]++);
            lands = true;
          }
          ASSERT_EQ(LlTable::Token(table, r, t).landed_idx(), lands ? num_landed : -1);
          num_landed += lands;
        }
        for (int e = 0; e < num_local; ++e) ASSERT_EQ(table.counts_of(r, s)[e], count[e]);
        ASSERT_EQ(table.counts_of(r, s)[num_local], num_landed);
      }
      for (int s = segments; s < 1 << LlTable::log2_segments(config); ++s) {
        for (int e = 0; e <= num_local; ++e) ASSERT_EQ(table.counts_of(r, s)[e], 0);
      }
    }
  }
}

}  // namespace
}  // namespace moe_a2a
