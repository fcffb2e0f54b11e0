// Where the fields of a rank's memory are: apart, at the same place on every rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "comm/heap_view.h"
#include "moe/context.h"
#include "moe/moe_region.h"
#include "seed.h"
#include "unit/random.h"

namespace moe_a2a {
namespace {

constexpr MoeConfig kTwoBuffers{
    .num_ranks = 4, .num_experts = 8, .num_topk = 3, .hidden = 20, .num_max_tokens_per_rank = 5, .num_buffers = 2};

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
          {"num_reports", context.services.num_reports.data, 4 * Reports::kNum},
          {"arrivals", w.arrivals.data, b * MoeRegion::kNumLaunches * 4},
          {"tickets", w.tickets.data, b * MoeRegion::kNumQueues * 4},
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
  return {{"num_reports", s.num_reports.data, 4 * Reports::kNum},
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
  Random random(test_seed());
  for (int round = 0; round < 300; ++round) {
    const int ranks = random.pick(1, 9);
    MoeConfig config{.num_ranks = ranks,
                     .num_experts = ranks * random.pick(1, 20),
                     .num_topk = random.pick(1, 9),
                     .hidden = random.pick(1, 700),
                     .num_max_tokens_per_rank = random.pick(1, 600),
                     .num_buffers = random.pick(1, 4),
                     .dtype = static_cast<DType>(random.pick(0, 2))};
    config.rank = random.pick(0, config.num_ranks - 1);
    config.num_max_ll_tokens = random.pick(0, config.ll_token_capacity());
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
  Context context = context_of(kTwoBuffers);
  const RegionSize size = place_region(context, nullptr, nullptr);
  context.config.num_max_tokens_per_rank = 300;  // a second chunk of the routing table
  const RegionSize other_size = place_region(context, nullptr, nullptr);
  EXPECT_NE(size.layout_digest, other_size.layout_digest);
}

TEST(MoeRegion, EveryElementHasAnAddressOfItsOwn) {
  const MoeConfig& c = kTwoBuffers;
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
