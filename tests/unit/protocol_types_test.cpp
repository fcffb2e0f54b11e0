// The pure functions that everything relies on: sizes, layout, sets of ranks, signals, agreement among ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "comm/communicator.h"
#include "comm/heap_view.h"
#include "comm/rank_set.h"
#include "comm/signal.h"
#include "moe/context.h"
#include "moe/moe_config.h"
#include "seed.h"

namespace moe_a2a {
namespace {

MoeConfig small_config() {
  return {.rank = 1,
          .num_ranks = 4,
          .num_experts = 8,
          .num_topk = 3,
          .hidden = 20,
          .num_max_tokens_per_rank = 5,
          .num_buffers = 2,
          .dtype = DType::kBfloat16};
}

TEST(Communicator, NamesAWrongRankAndWhatItsLimitIs) {
  EXPECT_EQ(Communicator::violation(3, 4), "");
  EXPECT_EQ(Communicator::violation(0, 0), "num_ranks=0 < 1; pass num_ranks=1 or more");
  EXPECT_EQ(Communicator::violation(0, 65), "num_ranks=65 > 64; pass a group of at most 64 ranks");
  EXPECT_EQ(Communicator::violation(4, 4), "rank=4 is not in [0, 4)");
  EXPECT_EQ(Communicator::violation(-1, 4), "rank=-1 is not in [0, 4)");
}

TEST(MoeConfig, HoldsWithOrdinaryNumbers) { EXPECT_EQ(small_config().violation(), ""); }

struct Rule {
  const char* name;
  void (*violate)(MoeConfig&);
  const char* text;
};

class MoeConfigRule : public ::testing::TestWithParam<Rule> {};
TEST_P(MoeConfigRule, NamesValueLimitAndArgument) {
  MoeConfig config = small_config();
  GetParam().violate(config);
  EXPECT_EQ(config.violation(), GetParam().text);
}

INSTANTIATE_TEST_SUITE_P(
    Each, MoeConfigRule,
    ::testing::Values(
        Rule{"experts", [](MoeConfig& c) { c.num_experts = 0; }, "num_experts=0 < 1; pass num_experts=1 or more"},
        Rule{"divisible", [](MoeConfig& c) { c.num_experts = 10; },
             "num_experts=10 is not divisible by num_ranks=4; pass num_experts=12 and leave the added experts unused"},
        Rule{"topk", [](MoeConfig& c) { c.num_topk = -2; }, "num_topk=-2 < 1; pass num_topk=1 or more"},
        Rule{"many_experts", [](MoeConfig& c) { c.num_experts = 65536; },
             "num_experts=65536 > 65535; pass num_experts=65535 or less"},
        Rule{"many_choices", [](MoeConfig& c) { c.num_topk = 65; }, "num_topk=65 > 64; pass num_topk=64 or less"},
        Rule{"hidden", [](MoeConfig& c) { c.hidden = 0; }, "hidden=0 < 1; pass hidden=1 or more"},
        Rule{"tokens", [](MoeConfig& c) { c.num_max_tokens_per_rank = 0; },
             "num_max_tokens_per_rank=0 < 1; pass num_max_tokens_per_rank=1 or more"},
        Rule{"many_tokens", [](MoeConfig& c) { c.num_max_tokens_per_rank = 1 << 19; },
             "num_max_tokens_per_rank=524288 > 349524; pass num_max_tokens_per_rank=349524 or less"},
        Rule{"ll_tokens", [](MoeConfig& c) { c.num_max_ll_tokens = -1; }, "num_max_ll_tokens=-1 < 0; pass 0 or more"},
        Rule{"many_ll_tokens", [](MoeConfig& c) { c.num_max_ll_tokens = 6; },
             "num_max_ll_tokens=6 > 5, the most that receivers can count; pass num_max_ll_tokens=5, or less"},
        Rule{"many_ll_choices",
             [](MoeConfig& c) { c.num_max_tokens_per_rank = 5000, c.num_topk = 20, c.num_max_ll_tokens = 52; },
             "num_max_ll_tokens=52 > 51, the most that receivers can count; pass num_max_ll_tokens=51, or less"},
        Rule{"ll_with_many_experts", [](MoeConfig& c) { c.num_experts = 2052, c.num_max_ll_tokens = 1; },
             "num_max_ll_tokens=1 > 0, the most that receivers can count; pass num_max_ll_tokens=0, or less"},
        Rule{"buffers", [](MoeConfig& c) { c.num_buffers = 0; }, "num_buffers=0 < 1; pass num_buffers=1 or more"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(MoeConfig, RowsStartOnLinesAndHoldTheirScales) {
  MoeConfig config = small_config();
  for (int hidden = 1; hidden < 300; ++hidden) {
    config.hidden = hidden;
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16, DType::kFloat8}) {
      EXPECT_EQ(config.row_stride(dtype) % 128, 0);
      EXPECT_GE(config.row_stride(dtype), config.row_bytes(dtype));
      EXPECT_LT(config.row_stride(dtype), config.row_bytes(dtype) + 128);
    }
    EXPECT_GE(config.scales_offset(), hidden);
    EXPECT_EQ(config.scales_offset() % 16, 0);
    EXPECT_EQ(config.row_bytes(DType::kFloat8), config.scales_offset() + 4 * ((hidden + 127) / 128));
    EXPECT_GE(config.max_row_stride(), config.row_stride(DType::kFloat8));
  }
}

TEST(MoeConfig, PiecesAreWholeScaleBlocksAndCoverTheRow) {
  MoeConfig config = small_config();
  EXPECT_EQ(RowLayout::piece_length() % kScaleBlock, 0);
  for (int hidden = 1; hidden < 3000; ++hidden) {
    config.hidden = hidden;
    ASSERT_GE(config.num_pieces() * RowLayout::piece_length(), hidden);
    ASSERT_LT((config.num_pieces() - 1) * RowLayout::piece_length(), hidden);  // the last piece is not empty
  }
  config.hidden = 7168;
  EXPECT_EQ(config.num_pieces(), 14);
}

TEST(MoeConfig, CapacityForLlTokensIsThatOfTheShortestLimit) {
  MoeConfig config = small_config();
  EXPECT_EQ(config.ll_token_capacity(), 5);  // per rank
  config.num_max_tokens_per_rank = 1000;
  EXPECT_EQ(config.ll_token_capacity(), 256);
  config.num_topk = 8;
  EXPECT_EQ(config.ll_token_capacity(), 128);  // 4096 choices over 4 ranks
  config.num_ranks = 64, config.num_topk = 64;
  EXPECT_EQ(config.ll_token_capacity(), 1);
  config.num_experts = 2048;
  EXPECT_EQ(config.ll_token_capacity(), 1);
  config.num_experts = 2112;
  EXPECT_EQ(config.ll_token_capacity(), 0);
}

TEST(MoeConfig, SendsABatchAsLlWordsUpToTheLimit) {
  MoeConfig config = small_config();
  EXPECT_FALSE(config.sends_ll_choices(0));  // with LL words disabled, even an empty batch is large
  config.num_max_ll_tokens = 3;
  EXPECT_TRUE(config.sends_ll_choices(0));
  EXPECT_TRUE(config.sends_ll_choices(3));
  EXPECT_FALSE(config.sends_ll_choices(4));
}

TEST(MoeConfig, SendsRowsAsLlWordsUpToTheirBytesToAllOtherRanks) {
  MoeConfig config{.num_ranks = 4, .hidden = 20, .num_max_ll_tokens = 5};
  config.max_ll_row_bytes = 3 * 3 * config.row_bytes(DType::kFloat32);
  EXPECT_TRUE(config.sends_ll_rows(3, DType::kFloat32) && !config.sends_ll_rows(4, DType::kFloat32));
  EXPECT_TRUE(config.sends_ll_rows(5, DType::kFloat16));
  config.max_ll_row_bytes = 2 * 3 * config.row_bytes(DType::kFloat8);  // and half as much again
  EXPECT_TRUE(config.sends_ll_rows(3, DType::kFloat8) && !config.sends_ll_rows(4, DType::kFloat8));
}

TEST(RouteEntry, KeepsItsPartsApart) {
  for (const uint32_t expert : {0u, 1u, 255u, static_cast<uint32_t>(kMaxExperts - 1)}) {
    for (const uint32_t idx : {0u, 1u, static_cast<uint32_t>(kMaxChunk * kMaxTopk - 1)}) {
      const RouteEntry entry = RouteEntry::pack(expert, idx);
      EXPECT_FALSE(entry.is_dropped());
      EXPECT_EQ(entry.expert(), static_cast<int>(expert));
      EXPECT_EQ(entry.idx_in_chunk(), static_cast<int>(idx));
    }
  }
  EXPECT_TRUE(RouteEntry::dropped().is_dropped());
  EXPECT_TRUE(RouteEntry{}.is_dropped());
}

// ---- RankSet

TEST(RankSet, IsVisitedInTheRoundFromAnyRank) {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 1000; ++round) {
    const RankSet set{random() & (round % 2 ? random() : ~uint64_t{0})};
    const int start = round % 64;
    std::vector<int> expected, seen;
    for (int i = 0; i < 64; ++i) {
      if (set.contains((start + i) % 64)) expected.push_back((start + i) % 64);
    }
    set.visit_from(start, [&](int rank) { seen.push_back(rank); });
    EXPECT_EQ(seen, expected);
  }
}

TEST(RankSet, IsASet) {
  RankSet set;
  EXPECT_TRUE(set.empty());
  std::vector<int> expected = {0, 3, 31, 32, 63};
  for (const int rank : {63, 3, 0, 32, 3, 31}) set.insert(rank);
  for (int rank = 0; rank < 64; ++rank)
    EXPECT_EQ(set.contains(rank), std::count(expected.begin(), expected.end(), rank));
  std::vector<int> seen;
  for (; !set.empty(); set.remove_first()) seen.push_back(set.first());
  EXPECT_EQ(seen, expected);
}

TEST(RankSet, AllAndOnly) {
  for (int n = 1; n <= kMaxRanks; ++n) {
    int count = 0;
    for (RankSet rest = RankSet::all(n); !rest.empty(); rest.remove_first()) EXPECT_EQ(rest.first(), count++);
    EXPECT_EQ(count, n);
    RankSet one = RankSet::only(n - 1);
    EXPECT_EQ(one.first(), n - 1);
    one.remove_first();
    EXPECT_TRUE(one.empty());
  }
}

// ---- Signal

constexpr uint64_t kEpochs = uint64_t{1} << 44;

TEST(Signal, KeepsEpochAndPayloadApart) {
  for (const uint64_t epoch : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, kEpochs - 1}) {
    for (const uint32_t payload : {0u, 1u, Signal::kPayloadMask}) {
      const uint64_t word = Signal::pack(epoch, payload);
      EXPECT_EQ(Signal::epoch_of(word), epoch);
      EXPECT_EQ(Signal::payload_of(word), payload);
    }
  }
  EXPECT_EQ(Signal::epoch_of(Signal::pack(kEpochs, 0)), 0u);  // wraps
}

TEST(Signal, ReachesAcrossTheWrap) {
  for (const uint64_t epoch : {uint64_t{1}, (uint64_t{1} << 32) - 1, uint64_t{1} << 32, kEpochs / 2 - 1, kEpochs / 2,
                               kEpochs - 2, kEpochs - 1, kEpochs, kEpochs + 1}) {
    for (const uint32_t payload : {0u, 5u, Signal::kPayloadMask}) {
      for (uint64_t later = 0; later < 4; ++later) {
        EXPECT_TRUE(Signal::reached(Signal::pack(epoch + later, payload), epoch)) << epoch << " + " << later;
        EXPECT_FALSE(Signal::reached(Signal::pack(epoch, payload), epoch + later + 1)) << epoch << " - " << later;
      }
      EXPECT_TRUE(Signal::reached(Signal::pack(epoch + kEpochs / 2 - 1, payload), epoch));
    }
  }
}

// ---- MoeRegion

struct Field {
  const char* name;
  const void* begin;
  size_t bytes;
};

std::vector<Field> symmetric_fields(const Context& context) {
  const MoeConfig& c = context.config;
  const MoeRegion& w = context.region;
  const size_t b = c.num_buffers, r = c.num_ranks, t = c.num_max_tokens_per_rank, k = c.num_topk;
  const size_t chunks = t <= 512 ? (t + 63) / 64 : std::max<size_t>(8, (t + 255) / 256), ll = c.num_max_ll_tokens;
  return {{"table_signal", w.table_signal.data, b * r * chunks * sizeof(Signal)},
          {"table_route", w.table_route.data, b * r * t * k * sizeof(RouteEntry)},
          {"table_weight", w.table_weight.data, b * r * t * k * 4},
          {"table_landed_idx", w.table_landed_idx.data, b * r * t * 4},
          {"table_count", w.table_count.data, b * r * chunks * (c.num_local_experts + 1) * 4},
          {"row_signal", w.row_signal.data, b * r * t * sizeof(Signal)},
          {"row", w.row.data, b * r * t * c.max_row_stride()},
          {"combine_signal", w.combine_signal.data, b * r * t * sizeof(Signal)},
          {"combine_row", w.combine_row.data, b * r * t * c.row_stride(c.dtype)},
          {"ll_choices", w.ll_choices.data, b * r * ll * c.ll_choices_stride()},
          {"ll_row", w.ll_row.data, b * r * ll * c.ll_row_stride()},
          {"ll_combine_row", w.ll_combine_row.data, b * r * ll * c.ll_row_stride()},
          {"dispatch_credit", w.dispatch_credit.data, b * r * sizeof(Signal)},
          {"combine_refusal", w.combine_refusal.data, b * r * sizeof(Signal)},
          {"dispatch_refusal", w.dispatch_refusal.data, r * sizeof(Signal)},
          {"refusal_text", context.services.refusal_text.data, (b + 1) * r * kRefusalWords * 8},
          {"goodbye", context.services.goodbye.data, r * sizeof(Signal)},
          {"handles_digest", context.services.handles_digest.data, r * 8}};
}

std::vector<Field> local_fields(const Context& context) {
  const MoeConfig& c = context.config;
  const MoeRegion& w = context.region;
  const size_t b = c.num_buffers, r = c.num_ranks, t = c.num_max_tokens_per_rank, k = c.num_topk;
  const size_t e = c.num_local_experts;
  const size_t lists = std::max<size_t>(r * t * k + e * (kMaxExpertAlignment - 1), e * r * t);
  return {{"epoch", w.epoch.data, b * 8},
          {"errors", w.errors.data, sizeof(ErrorCounters)},
          {"num_reports", context.services.num_reports.data, 4},
          {"arrivals", w.arrivals.data, b * MoeRegion::kNumLaunches * 4},
          {"tickets", w.tickets.data, b * MoeRegion::kNumLaunches * 4},
          {"expert_offsets", w.expert_offsets.data, b * (e + 1) * 4},
          {"expert_counts", w.expert_counts.data, b * e * 4},
          {"expert_row_index", w.expert_row_index.data, b * lists * 4},
          {"route_weights", w.route_weights.data, b * lists * 4},
          {"route_src_rank", w.route_src_rank.data, b * lists * 4},
          {"route_src_token_idx", w.route_src_token_idx.data, b * lists * 4},
          {"landed_row", w.landed_row.data, b * r * t * 4},
          {"landed_offsets", w.landed_offsets.data, b * (r + 1) * 4},
          {"landed_term", w.landed_term.data, b * r * t * k * sizeof(RouteTerm)},
          {"combine_order", w.combine_order.data, b * MoeRegion::kNumOrders * r * t * sizeof(int32_t)},
          {"num_recv_tokens_per_rank", w.num_recv_tokens_per_rank.data, b * r * 4},
          {"sums_return_ll", w.sums_return_ll.data, b * 4},
          {"token_ranks", w.token_ranks.data, b * t * sizeof(RankSet)}};
}

Context context_of(const MoeConfig& config) {
  Context context;
  context.config = config;
  return context;
}

std::vector<Field> fields_of(const CommContext& context, size_t num_ranks, bool symmetric) {
  const CommRegion& c = context.region;
  const ClientServices& s = context.services;
  if (symmetric) {
    return {{"goodbye", s.goodbye.data, num_ranks * sizeof(Signal)},
            {"refusal_text", s.refusal_text.data, num_ranks * kRefusalWords * 8},
            {"clock_meeting", c.clock_meeting.data, num_ranks * sizeof(Signal)},
            {"clock_message", c.clock_message.data, num_ranks * sizeof(Signal)},
            {"clock_log", c.clock_log.data, num_ranks * (kMaxClockRounds + 1) * 8},
            {"poison", c.poison.data, sizeof(*c.poison.data)}};
  }
  return {{"num_reports", s.num_reports.data, 4},
          {"clock_epoch", c.clock_epoch.data, num_ranks * 8},
          {"clock_reading", c.clock_reading.data, num_ranks * sizeof(ClockReading)},
          {"heap", c.heap.data, sizeof(HeapView)}};
}

void expect_apart(std::vector<Field> fields, const std::byte* base, size_t bytes) {
  // An empty field is at the address of the next one.
  std::sort(fields.begin(), fields.end(),
            [](const Field& a, const Field& b) { return std::tie(a.begin, a.bytes) < std::tie(b.begin, b.bytes); });
  const std::byte* end = base;
  for (const Field& field : fields) {
    const auto* begin = static_cast<const std::byte*>(field.begin);
    EXPECT_EQ((begin - base) % 128, 0) << field.name;
    EXPECT_GE(begin, end) << field.name;
    end = begin + field.bytes;
  }
  EXPECT_LE(end, base + bytes);
}

TEST(MoeRegion, FieldsLieApartOnLinesOfTheirOwn) {
  std::mt19937_64 random(test_seed());
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  for (int round = 0; round < 300; ++round) {
    const int ranks = pick(1, 9);
    MoeConfig config{.num_ranks = ranks,
                     .num_experts = ranks * pick(1, 20),
                     .num_topk = pick(1, 9),
                     .hidden = pick(1, 700),
                     .num_max_tokens_per_rank = pick(1, 600),
                     .num_buffers = pick(1, 4),
                     .dtype = static_cast<DType>(pick(0, 2))};
    config.rank = pick(0, config.num_ranks - 1);
    config.num_max_ll_tokens = pick(0, config.ll_token_capacity());
    auto* symmetric = reinterpret_cast<std::byte*>(uintptr_t{1} << 40);
    auto* local = reinterpret_cast<std::byte*>(uintptr_t{1} << 41);
    Context context = context_of(config);
    const RegionSize size = place_region(context, symmetric, local);
    expect_apart(symmetric_fields(context), symmetric, size.symmetric_bytes);
    expect_apart(local_fields(context), local, size.local_bytes);

    context.config.rank = 0;
    const RegionSize other_size = place_region(context, nullptr, nullptr);
    EXPECT_EQ(other_size.layout_digest, size.layout_digest);
    EXPECT_EQ(other_size.symmetric_bytes, size.symmetric_bytes);
  }
}

TEST(CommRegion, FieldsLieApartOnLinesOfTheirOwn) {
  auto* symmetric = reinterpret_cast<std::byte*>(uintptr_t{1} << 40);
  auto* local = reinterpret_cast<std::byte*>(uintptr_t{1} << 41);
  for (int num_ranks = 1; num_ranks <= kMaxRanks; ++num_ranks) {
    CommContext context;
    const RegionSize size = place_region(context, num_ranks, symmetric, local);
    expect_apart(fields_of(context, num_ranks, true), symmetric, size.symmetric_bytes);
    expect_apart(fields_of(context, num_ranks, false), local, size.local_bytes);
  }
}

TEST(MoeRegion, DigestTellsLayoutsApart) {
  Context context = context_of(small_config());
  const RegionSize size = place_region(context, nullptr, nullptr);
  context.config.num_max_tokens_per_rank = 300;  // a second chunk of the routing table
  const RegionSize other_size = place_region(context, nullptr, nullptr);
  EXPECT_NE(size.layout_digest, other_size.layout_digest);
}

TEST(MoeRegion, EveryElementHasAnAddressOfItsOwn) {
  const MoeConfig c = small_config();
  Context context = context_of(c);
  place_region(context, nullptr, nullptr);
  const MoeRegion& w = context.region;
  std::vector<const void*> seen;
  for (int b = 0; b < c.num_buffers; ++b) {
    for (int r = 0; r < c.num_ranks; ++r) {
      for (int t = 0; t < c.num_max_tokens_per_rank; ++t) {
        seen.push_back(w.row_signal.at(b, r, t));
        seen.push_back(w.row.at(b, r, t));
        for (int k = 0; k < c.num_topk; ++k) seen.push_back(w.table_route.at(b, r, t, k));
      }
    }
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end());
  EXPECT_EQ(w.row.at(1, 2, 3) - w.row.at(1, 2, 2), c.max_row_stride());
  EXPECT_EQ(w.table_route.at(0, 1) - w.table_route.at(0, 0), c.num_max_tokens_per_rank * c.num_topk);
}

TEST(HeapView, PeerIsTheSamePlaceInTheOtherHeap) {
  std::vector<std::vector<uint64_t>> heaps(3, std::vector<uint64_t>(100));
  HeapView view{.rank = 1, .num_ranks = 3};
  for (int r = 0; r < 3; ++r) view.base[r] = reinterpret_cast<std::byte*>(heaps[r].data());
  for (int r = 0; r < 3; ++r) {
    for (int i = 0; i < 100; ++i) EXPECT_EQ(view.peer(r, &heaps[1][i]), &heaps[r][i]);
  }
}

}  // namespace
}  // namespace moe_a2a
