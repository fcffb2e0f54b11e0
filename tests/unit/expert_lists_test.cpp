// The tables or LL choices that every source rank sends, and the expert lists that a receiver builds from them,
// compared with a model that sorts: random routings, layouts and grids.

#include "moe/route/expert_lists.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <vector>

#include "moe/dispatch/dispatch_send.h"
#include "seed.h"
#include "unit/heaps.h"
#include "unit/random.h"

namespace moe_a2a {
namespace {

// The routing of one rank: choices and weights [num_tokens, num_topk].
struct Routing {
  int num_tokens = 0;
  std::vector<int32_t> choice;
  std::vector<float> weight;

  Routing(Random& random, const MoeConfig& config, int receiver) {
    // Any routing, all to one expert, all dropped, all to the receiver, or with ids out of range.
    const int kind = random.pick(0, 4), local = config.num_local_experts, mine = receiver * local;
    const int most = config.num_max_tokens_per_rank;
    num_tokens = random.pick(0, 3) == 0 ? 0 : random.pick(0, 2) == 0 ? most : random.pick(0, most);
    for (int i = 0; i < num_tokens * config.num_topk; ++i) {
      choice.push_back(kind == 1   ? mine
                       : kind == 2 ? -1
                       : kind == 3 ? mine + random.pick(0, local - 1)
                       : kind == 4 ? random.pick(-3, config.num_experts + 2)
                                   : random.pick(-1, config.num_experts - 1));
      weight.push_back(static_cast<float>(random.pick(0, 1000)));
    }
  }
};

struct Size {
  const char* name;
  int most_tokens, most_ranks, most_local_experts, num_rounds;
};
constexpr Size kSmall{"small", 40, 5, 8, 300}, kChunks{"several_chunks", 700, 4, 8, 60},
    // One pass over a chunk counts the choices of 4096 experts on this target.
    kPasses{"several_passes", 300, 3, 5000, 12};

// All ranks send, one receives.
class RoutingExchange {
 public:
  RoutingExchange(Random& random, const Size& size, Layout layout)
      : config_(draw(random, size)),
        heaps_(config_),
        me_(random.pick(0, config_.num_ranks - 1)),
        buffer_(random.pick(0, 1)),
        layout_(layout),
        alignment_(layout == Layout::kExpertMajor ? random.pick(1, 16) : 1) {
    for (int r = 0; r < config_.num_ranks; ++r) sent_.emplace_back(random, config_, me_);
  }

  void send_tables(int num_blocks) {
    SharedMemory shared(RoutingTable::plan(config_).bytes);
    for (int r = 0; r < config_.num_ranks; ++r) {
      const DispatchSendArgs args{.context = heaps_.context[r],
                                  .buffer = buffer_,
                                  .num_tokens = sent_[r].num_tokens,
                                  .topk_idx = {sent_[r].choice.data(), false},
                                  .topk_weights = sent_[r].weight.data(),
                                  .x = {},
                                  .x_scales = {}};
      if (is_small(r)) {
        for (int t = sent_[r].num_tokens - 1; t >= 0; --t) send_choices(args, Warp{}, t, kEpoch);
        continue;
      }
      for (int b = num_blocks - 1; b >= 0; --b) {
        Block::Scratch scratch;
        RoutingTable(args, Block(scratch), shared.data()).send(Grid{b, num_blocks}, kEpoch);
      }
    }
  }

  void build_lists(int num_blocks) {
    const DispatchRecvArgs args{
        .context = heaps_.context[me_], .buffer = buffer_, .layout = layout_, .expert_alignment = alignment_};
    const ExpertLists::Plan plan = ExpertLists::plan(config_);
    SharedMemory shared(plan.bytes);
    for (int b = 0; b < num_blocks; ++b) {
      Block::Scratch scratch;
      const Grid grid{b, num_blocks};
      const Block block(scratch);
      std::vector<int32_t> num_tokens(config_.num_ranks, -1);
      ExpertLists lists(args, grid, block, shared.data(), plan, num_tokens.data());
      ASSERT_TRUE(lists.build(kEpoch, [&] {
        for (int r = 0; r < config_.num_ranks; ++r) num_tokens[r] = sent_[r].num_tokens;
        return true;
      }));
    }
  }

  // Checks every chunk's signal on every rank, and where the sender's tokens go.
  void check_tables() const {
    for (int src = 0; src < config_.num_ranks; ++src) {
      const int num_tokens = sent_[src].num_tokens;
      for (int r = 0; r < config_.num_ranks; ++r) {
        const MoeRegion& region = heaps_.context[r].region;
        if (is_small(src)) {
          ASSERT_EQ(region.table_signal(buffer_, src, 0).word, 0u);
          uint32_t seen = 0;
          ASSERT_EQ(find_ll_header(heaps_.context[r], buffer_, src, kEpoch, &seen), num_tokens > 0);
          ASSERT_TRUE(num_tokens == 0 || seen == BatchHeader::pack(config_, num_tokens, RowFormat::kPlain));
          continue;
        }
        ASSERT_EQ(region.table_signal(buffer_, src, 0).word,
                  Signal::pack(kEpoch, BatchHeader::pack(config_, num_tokens, RowFormat::kPlain)));
        for (int chunk = 1; chunk < num_chunks(num_tokens); ++chunk) {
          ASSERT_EQ(region.table_signal(buffer_, src, chunk).word, Signal::pack(kEpoch, 0));
        }
      }
      uint32_t num_bad = 0;
      for (int t = 0; t < num_tokens; ++t) {
        RankSet expected;
        for (int k = 0; k < config_.num_topk; ++k) {
          const int choice = sent_[src].choice[t * config_.num_topk + k];
          num_bad += choice < -1 || choice >= config_.num_experts;
          if (choice >= 0 && choice < config_.num_experts) expected.insert(choice / config_.num_local_experts);
        }
        ASSERT_EQ(heaps_.context[src].region.token_ranks(buffer_, t).bits, expected.bits);
      }
      ASSERT_EQ(heaps_.context[src].region.errors.data->num_bad_choices, num_bad);
    }
  }

  void check_lists() const {
    const MoeRegion& region = heaps_.context[me_].region;
    const std::vector<std::vector<Route>> routes = routes_by_expert();
    const int64_t room = config_.row_capacity();
    std::vector<std::vector<RouteTerm>> terms(room * config_.num_topk);  // by row and choice
    uint32_t num_lost = 0;
    int32_t position = 0;
    for (int e = 0; e < config_.num_local_experts; ++e) {
      if (layout_ == Layout::kMasked) position = static_cast<int32_t>(e * room);
      ASSERT_EQ(region.expert_offsets(buffer_, e), position);
      int count = 0;
      for (const Route& route : routes[e]) {
        if (layout_ == Layout::kMasked && count == room) {
          ++num_lost;
          continue;
        }
        ASSERT_EQ(region.expert_row_index(buffer_, position), route.row);
        ASSERT_EQ(region.route_src_rank(buffer_, position), route.row / config_.num_max_tokens_per_rank);
        ASSERT_EQ(region.route_src_token_idx(buffer_, position), route.row % config_.num_max_tokens_per_rank);
        ASSERT_EQ(region.route_weights(buffer_, position), route.weight);
        terms[route.row * config_.num_topk + route.k].push_back({position, route.weight});
        ++count, ++position;
      }
      ASSERT_EQ(region.expert_counts(buffer_, e), count);
      for (; layout_ == Layout::kExpertMajor && position % alignment_ != 0; ++position) {
        ASSERT_EQ(region.expert_row_index(buffer_, position), -1);
        ASSERT_EQ(region.route_src_rank(buffer_, position), -1);
        ASSERT_EQ(region.route_weights(buffer_, position), 0.0f);
      }
    }
    if (layout_ != Layout::kMasked) {
      ASSERT_EQ(region.expert_offsets(buffer_, config_.num_local_experts), position);
    }
    ASSERT_EQ(heaps_.context[me_].region.errors.data->num_lost_routes, num_lost);
    check_landed(terms);
  }

 private:
  static constexpr uint64_t kEpoch = 7;

  struct Route {
    int32_t row;
    int k;
    float weight;
  };

  bool is_small(int rank) const { return config_.sends_ll_choices(sent_[rank].num_tokens); }

  static MoeConfig draw(Random& random, const Size& size) {
    const int num_ranks = random.pick(1, size.most_ranks);
    const int num_local = random.pick(std::max(1, size.most_local_experts / 2), size.most_local_experts);
    MoeConfig config{.num_ranks = num_ranks,
                     .num_experts = num_ranks * num_local,
                     .num_topk = random.pick(1, 9),
                     .hidden = 1,
                     .num_max_tokens_per_rank = random.pick(std::max(1, size.most_tokens / 2), size.most_tokens),
                     .num_buffers = 2};
    // Small batches: none, some, or all that can be.
    const int most = config.ll_token_capacity(), kind = random.pick(0, 3);
    config.num_max_ll_tokens = kind == 0 ? 0 : kind == 1 ? most : random.pick(0, most);
    if (random.pick(0, 2) == 0) config.max_ll_sum_tokens = 0;
    return config;
  }

  // In (source rank, token, choice) order.
  std::vector<std::vector<Route>> routes_by_expert() const {
    std::vector<std::vector<Route>> routes(config_.num_local_experts);
    for (int r = 0; r < config_.num_ranks; ++r) {
      for (int i = 0; i < sent_[r].num_tokens * config_.num_topk; ++i) {
        const int e = sent_[r].choice[i] - me_ * config_.num_local_experts;
        if (e < 0 || e >= config_.num_local_experts) continue;
        const int32_t row = r * config_.num_max_tokens_per_rank + i / config_.num_topk;
        routes[e].push_back({row, i % config_.num_topk, sent_[r].weight[i]});
      }
    }
    return routes;
  }

  // `terms`: per row and choice, at most one.
  void check_landed(const std::vector<std::vector<RouteTerm>>& terms) const {
    const MoeRegion& region = heaps_.context[me_].region;
    int32_t landed = 0;
    bool sums_return_ll = true;
    for (int r = 0; r < config_.num_ranks; ++r) {
      sums_return_ll &= config_.returns_ll(sent_[r].num_tokens);
      ASSERT_EQ(region.num_recv_tokens_per_rank(buffer_, r), sent_[r].num_tokens);
      ASSERT_EQ(region.landed_offsets(buffer_, r), landed);
      for (int t = 0; t < sent_[r].num_tokens; ++t) {
        if (!heaps_.context[r].region.token_ranks(buffer_, t).contains(me_)) continue;
        const int row = r * config_.num_max_tokens_per_rank + t;
        ASSERT_EQ(region.landed_row(buffer_, landed), row);
        int num_terms = 0;
        for (int k = 0; k < config_.num_topk; ++k) {
          for (const RouteTerm& term : terms[row * config_.num_topk + k]) {
            ASSERT_EQ(region.landed_term(buffer_, row, num_terms).position, term.position);
            ASSERT_EQ(region.landed_term(buffer_, row, num_terms++).weight, term.weight);
          }
        }
        if (num_terms < config_.num_topk) {
          ASSERT_EQ(region.landed_term(buffer_, row, num_terms).position, -1);
        }
        ++landed;
      }
    }
    ASSERT_EQ(region.landed_offsets(buffer_, config_.num_ranks), landed);
    ASSERT_EQ(region.sums_return_ll(buffer_), sums_return_ll);
    if (sums_return_ll) return;  // combine then sends words, in a different order
    check_combine_order(MoeRegion::kAllRows, true);
    check_combine_order(MoeRegion::kPeersRows, false);
  }

  // The next owner after the previous one that has rows left, and its first remaining row: so each row occurs exactly
  // once.
  void check_combine_order(MoeRegion::RowOrder order, bool with_own) const {
    const MoeRegion& region = heaps_.context[me_].region;
    const int32_t* offsets = region.landed_offsets.at(buffer_);
    std::vector<int> next(offsets, offsets + config_.num_ranks), left(config_.num_ranks);
    for (int r = 0; r < config_.num_ranks; ++r) left[r] = r == me_ && !with_own ? 0 : offsets[r + 1] - offsets[r];
    const int num_rows = std::accumulate(left.begin(), left.end(), 0);
    int owner = me_;
    for (int i = 0; i < num_rows; ++i) {
      do owner = (owner + 1) % config_.num_ranks;
      while (left[owner] == 0);
      --left[owner];
      ASSERT_EQ(region.combine_order(buffer_, order, i), region.landed_row(buffer_, next[owner]++)) << "row " << i;
    }
  }

  MoeConfig config_;
  Heaps heaps_;
  int me_, buffer_;
  Layout layout_;
  int alignment_;
  std::vector<Routing> sent_;
};

class ExpertListsTest : public ::testing::TestWithParam<std::tuple<Layout, Size>> {};

TEST_P(ExpertListsTest, EqualTheModel) {
  const auto [layout, size] = GetParam();
  Random random(test_seed());
  for (int round = 0; round < size.num_rounds && !HasFatalFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    RoutingExchange exchange(random, size, layout);
    exchange.send_tables(1 + round % 3);
    exchange.check_tables();
    if (HasFatalFailure()) return;
    exchange.build_lists(1 + round % 7);
    if (HasFatalFailure()) return;
    exchange.check_lists();
  }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Layout, Size>>& info) {
  const std::array layouts = {"rows_", "expert_major_", "masked_"};
  return std::string(layouts[static_cast<size_t>(std::get<Layout>(info.param))]) + std::get<Size>(info.param).name;
}

INSTANTIATE_TEST_SUITE_P(Each, ExpertListsTest,
                         ::testing::Combine(::testing::Values(Layout::kRows, Layout::kExpertMajor, Layout::kMasked),
                                            ::testing::Values(kSmall, kChunks, kPasses)),
                         name_of);

TEST(DstRanks, AreTheDistinctRanksOfATokensExperts) {
  const int32_t choices[] = {11, -1, 0, 2, 9, -1, 12, -1, -1, -7};
  Context context;
  context.config = {.num_ranks = 4, .num_experts = 12, .num_topk = 5};
  const DispatchSendArgs args{
      .context = context, .num_tokens = 2, .topk_idx = {choices, false}, .x = {}, .x_scales = {}};
  EXPECT_EQ(dst_ranks_of(Warp{}, args, 0).bits, 0b1001u);
  EXPECT_TRUE(dst_ranks_of(Warp{}, args, 1).empty());
}

}  // namespace
}  // namespace moe_a2a
