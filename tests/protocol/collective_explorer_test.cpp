// The protocol of the collectives in small cases, in every schedule within a bound. Then each of its parts is broken in
// turn, and some case must fail.
#include <utility>

#include "collective_world.h"
#include "explore.h"
#include "seed.h"

namespace moe_a2a {
namespace {

using Kind = ModelCall::Kind;
constexpr Kind kOneShot = Kind::kOneShot, kTwoShot = Kind::kTwoShot, kReduceScatter = Kind::kReduceScatter,
               kAllGather = Kind::kAllGather;

std::vector<CollectiveCase> all_cases() {
  const ModelCall one_shot{.kind = kOneShot, .num_elements = 3}, two_shot{}, scatter{.kind = kReduceScatter},
      gather{.kind = kAllGather}, ring{.kind = Kind::kRing},
      doubling{.kind = Kind::kRecursiveDoubling, .num_elements = 3}, in_place{.in_place = true},
      sliced{.num_elements = 12}, nothing{.num_elements = 0}, odd{.odd_rank = 1}, one_element{.num_elements = 1},
      scatter_one{.kind = kReduceScatter, .num_elements = 1}, gather_one{.kind = kAllGather, .num_elements = 1},
      odd_slices{.num_elements = 12, .odd_rank = 0}, refused{.num_elements = 12, .refusing_rank = 1},
      refused_by_first{.refusing_rank = 0}, words{.kind = Kind::kOneShotWords, .num_elements = 3},
      no_words{.kind = Kind::kOneShotWords, .num_elements = 0},
      one_word{.kind = Kind::kOneShotWords, .num_elements = 1},
      words_in_place{.kind = Kind::kOneShotWords, .num_elements = 3, .in_place = true},
      odd_words{.kind = Kind::kOneShotWords, .num_elements = 3, .odd_rank = 1},
      words_or_rows{.kind = Kind::kOneShotWords, .num_elements = 3, .odd_rank = 0, .odd_kind = kTwoShot},
      rows_or_words{.kind = kOneShot, .num_elements = 1, .odd_rank = 1, .odd_kind = Kind::kOneShotWords},
      refused_words{.kind = Kind::kOneShotWords, .num_elements = 3, .refusing_rank = 1},
      late{.kind = kOneShot, .num_elements = 1, .late_rank = 1}, direct{.kind = Kind::kDirectAllReduce},
      direct_one{.kind = Kind::kDirectAllReduce, .num_elements = 1},
      direct_in_place{.kind = Kind::kDirectAllReduce, .in_place = true},
      direct_none{.kind = Kind::kDirectAllReduce, .num_elements = 0},
      direct_scatter{.kind = Kind::kDirectReduceScatter}, direct_gather{.kind = Kind::kDirectAllGather},
      direct_scatter_one{.kind = Kind::kDirectReduceScatter, .num_elements = 1},
      direct_gather_one{.kind = Kind::kDirectAllGather, .num_elements = 1},
      odd_direct{.kind = Kind::kDirectAllReduce, .odd_rank = 1},
      direct_or_two_shot{.kind = Kind::kDirectAllReduce, .odd_rank = 0, .odd_kind = kTwoShot},
      refused_direct{.kind = Kind::kDirectAllReduce, .refusing_rank = 1},
      late_direct{.kind = Kind::kDirectAllReduce, .num_elements = 1, .late_rank = 1},
      late_words{.kind = Kind::kOneShotWords, .num_elements = 1, .late_rank = 1}, coded{.kind = Kind::kCodedTwoShot},
      coded_in_place{.kind = Kind::kCodedTwoShot, .in_place = true},
      coded_one{.kind = Kind::kCodedTwoShot, .num_elements = 1},
      coded_slices{.kind = Kind::kCodedTwoShot, .num_elements = 12},
      odd_coded{.kind = Kind::kCodedTwoShot, .odd_rank = 1},
      coded_or_two_shot{.kind = Kind::kCodedTwoShot, .odd_rank = 0, .odd_kind = kTwoShot};
  return {
      {.name = "two-shot", .calls = {two_shot, two_shot, two_shot}},
      {.name = "two-shot, two blocks", .calls = {two_shot, two_shot}, .num_blocks = 2},
      {.name = "two-shot in place, two blocks", .calls = {in_place, in_place}, .num_blocks = 2},
      {.name = "two-shot of three ranks", .calls = {two_shot, two_shot, two_shot}, .num_ranks = 3},
      {.name = "two-shot of one rank", .calls = {two_shot, two_shot}, .num_ranks = 1, .num_blocks = 2},
      {.name = "one-shot", .calls = {one_shot, one_shot, one_shot}},
      {.name = "one-shot, two blocks", .calls = {one_shot, one_shot, one_shot}, .num_blocks = 2},
      {.name = "reduce-scatter", .calls = {scatter, scatter, scatter}},
      {.name = "all-gather", .calls = {gather, gather, gather}},
      {.name = "two-shot, shares without elements", .calls = {one_element, one_element, two_shot}, .num_ranks = 3},
      {.name = "reduce-scatter, shares without elements", .calls = {scatter_one, scatter_one, scatter_one}},
      {.name = "reduce-scatter, shares without elements, two blocks", .calls = {scatter_one, scatter}, .num_blocks = 2},
      {.name = "all-gather, shares without elements", .calls = {gather_one, gather_one, gather_one}},
      {.name = "ring", .calls = {ring, ring, ring}},
      {.name = "ring of three ranks", .calls = {ring, ring, ring}, .num_ranks = 3},
      {.name = "ring of three ranks, two blocks", .calls = {ring, ring}, .num_ranks = 3, .num_blocks = 2},
      {.name = "recursive doubling", .calls = {doubling, doubling, doubling}},
      {.name = "recursive doubling of three ranks", .calls = {doubling, doubling, doubling}, .num_ranks = 3},
      {.name = "recursive doubling of four ranks", .calls = {doubling, doubling, doubling}, .num_ranks = 4},
      {.name = "alternating algorithms", .calls = {doubling, ring, two_shot, doubling, one_shot, ring}, .num_ranks = 3},
      {.name = "slices", .calls = {sliced, two_shot}},
      {.name = "calls without elements", .calls = {nothing, two_shot, nothing, two_shot}},
      {.name = "alternating collectives", .calls = {two_shot, one_shot, gather, scatter, one_shot, two_shot}},
      {.name = "alternating collectives, three ranks", .calls = {gather, nothing, scatter, one_shot}, .num_ranks = 3},
      {.name = "epoch wraps", .calls = {two_shot, one_shot, two_shot}, .first_epoch = (uint64_t{1} << 44) - 2},
      {.name = "ranks disagree", .calls = {odd, two_shot}},
      {.name = "ranks disagree, two blocks", .calls = {odd, two_shot}, .num_blocks = 2},
      {.name = "ranks disagree on the number of slices", .calls = {odd_slices, two_shot, gather}},
      {.name = "one of three ranks disagrees", .calls = {odd, two_shot}, .num_ranks = 3},
      {.name = "a refused call", .calls = {refused, two_shot, gather}},
      {.name = "two refused calls", .calls = {refused, refused, two_shot}},
      {.name = "three refused calls", .calls = {refused, refused, refused, two_shot}},
      {.name = "alternating refusals", .calls = {refused, refused_by_first, two_shot}},
      {.name = "a refused call of three ranks", .calls = {two_shot, refused, two_shot}, .num_ranks = 3},
      {.name = "a rank comes too late", .calls = {one_shot, late, late}},
      {.name = "words", .calls = {one_word, words, one_word, words}},
      {.name = "words, two blocks", .calls = {words, words_in_place, words}, .num_blocks = 2},
      {.name = "words of three ranks", .calls = {one_word, one_word, one_word}, .num_ranks = 3},
      {.name = "words of one rank", .calls = {words, two_shot, words}, .num_ranks = 1, .num_blocks = 2},
      {.name = "words in place", .calls = {words_in_place, words_in_place, words_in_place}},
      {.name = "words: calls without elements", .calls = {no_words, one_word, no_words, no_words, one_word}},
      {.name = "words and rows by turns", .calls = {two_shot, words, two_shot, words, words, one_shot}},
      {.name = "words and rows by turns, two blocks", .calls = {one_shot, words, one_shot}, .num_blocks = 2},
      {.name = "words and rows by turns, three ranks", .calls = {one_shot, no_words, one_shot}, .num_ranks = 3},
      {.name = "words: epoch passes 2^31", .calls = {words, one_word, words}, .first_epoch = (uint64_t{1} << 31) - 2},
      {.name = "words: epoch passes 2^32", .calls = {words, one_word, words}, .first_epoch = (uint64_t{1} << 32) - 2},
      {.name = "words: epoch wraps", .calls = {words, two_shot, words}, .first_epoch = (uint64_t{1} << 44) - 2},
      {.name = "words: ranks disagree", .calls = {odd_words, words, two_shot}},
      {.name = "words: ranks disagree, two blocks", .calls = {odd_words, words}, .num_blocks = 2},
      {.name = "words: one of three ranks disagrees", .calls = {odd_words, one_word}, .num_ranks = 3},
      {.name = "words: one rank sends rows", .calls = {words_or_rows, words, words_or_rows, two_shot}},
      {.name = "words: one of three ranks sends rows", .calls = {words_or_rows, one_word}, .num_ranks = 3},
      {.name = "words: one rank sends words", .calls = {rows_or_words, one_shot, rows_or_words, words}},
      {.name = "words: a refused call", .calls = {words, refused_words, words, two_shot}},
      {.name = "words: two refused calls", .calls = {words, refused_words, refused_words, words}},
      {.name = "words: a rank comes too late", .calls = {words, late_words, late_words}},
      {.name = "coded two-shot", .calls = {coded, coded_in_place, coded}},
      {.name = "coded two-shot, two blocks", .calls = {coded, coded}, .num_blocks = 2},
      {.name = "coded two-shot of three ranks, shares without elements",
       .calls = {coded_one, coded_one},
       .num_ranks = 3},
      {.name = "coded two-shot, slices", .calls = {coded_slices, coded_one}},
      {.name = "coded two-shot and others by turns", .calls = {coded_one, two_shot, coded_one, words, coded_one}},
      {.name = "coded two-shot: ranks disagree", .calls = {odd_coded, coded_one, coded_or_two_shot, coded_one}},
      {.name = "direct", .calls = {direct, direct, direct}},
      {.name = "direct, two blocks", .calls = {direct, direct_in_place}, .num_blocks = 2},
      {.name = "direct in place", .calls = {direct_in_place, direct_in_place, direct_in_place}},
      {.name = "direct of three ranks", .calls = {direct, direct, direct}, .num_ranks = 3},
      {.name = "direct in place, three ranks", .calls = {direct_in_place, direct_in_place}, .num_ranks = 3},
      {.name = "direct of one rank", .calls = {direct, direct_in_place, two_shot}, .num_ranks = 1},
      {.name = "direct, shares without elements", .calls = {direct_one, direct_one, direct}, .num_ranks = 3},
      {.name = "direct, calls without elements", .calls = {direct_none, direct_none, direct}},
      {.name = "direct reduce-scatter", .calls = {direct_scatter, direct_scatter, direct_scatter}},
      {.name = "direct reduce-scatter, shares without elements",
       .calls = {direct_scatter_one, direct_scatter_one, direct_scatter}},
      {.name = "direct all-gather", .calls = {direct_gather, direct_gather, direct_gather}},
      {.name = "direct all-gather, shares without elements",
       .calls = {direct_gather_one, direct_gather_one, direct_gather}},
      {.name = "direct collectives by turns", .calls = {direct, direct_gather, direct_scatter, direct_in_place}},
      {.name = "direct and others by turns", .calls = {direct, words, direct, two_shot, direct_in_place}},
      {.name = "direct and others by turns, three ranks", .calls = {direct_one, one_word, direct_one}, .num_ranks = 3},
      {.name = "direct: epoch wraps", .calls = {direct, direct, direct}, .first_epoch = (uint64_t{1} << 44) - 2},
      {.name = "direct: ranks disagree", .calls = {odd_direct, direct}},
      {.name = "direct: one of three ranks disagrees", .calls = {odd_direct, direct_one}, .num_ranks = 3},
      {.name = "direct: one rank has other tensors", .calls = {direct_or_two_shot, direct, two_shot}},
      {.name = "direct: a refused call", .calls = {direct, refused_direct, direct}},
      {.name = "direct: a rank comes too late", .calls = {direct_one, late_direct, late_direct}},
      {.name = "words: refused by turns", .calls = {refused_words, refused_by_first, words, words}},
  };
}

constexpr int64_t kMostSchedules = 2'000;  // per case and number of delays

int64_t most_schedules(const CollectiveCase&, int /*delays*/) { return schedules_or(kMostSchedules); }

class CollectiveProtocolTest : public ::testing::TestWithParam<CollectiveCase> {};

TEST_P(CollectiveProtocolTest, HoldsInEverySchedule) { expect_holds<CollectiveWorld>(GetParam(), 2, most_schedules); }

TEST_P(CollectiveProtocolTest, HoldsInRandomSchedules) {
  const uint64_t seed = test_seed();
  CollectiveWorld world(GetParam());
  const Exploration found = Explorer(world, {}).random(seed, schedules_or(kMostSchedules) / 4);
  EXPECT_EQ(found.failure, "");
}

INSTANTIATE_TEST_SUITE_P(All, CollectiveProtocolTest, ::testing::ValuesIn(all_cases()), test_name<CollectiveCase>);

// Negative controls.
std::vector<Mutant> all_collective_mutants() {
  using MutationKind = Mutation::Kind;
  const struct {
    Field field;
    const char* name;
  } signals[] = {{Field::kCallSignal, "call signal"},
                 {Field::kChunkSignal, "chunk signal"},
                 {Field::kResultSignal, "result signal"}};
  const struct {
    MutationKind kind;
    const char* name;
  } kinds[] = {{MutationKind::kRelaxedRelease, "no release"},
               {MutationKind::kRelaxedAcquire, "no acquire"},
               {MutationKind::kWaitSkipped, "no wait"},
               {MutationKind::kOneUseEarly, "waits for the use before"},
               {MutationKind::kRaisedEarly, "raised before the work"},
               {MutationKind::kStoreLost, "not raised"}};
  std::vector<Mutant> mutants;
  for (const auto& signal : signals) {
    for (const auto& kind : kinds) {
      if (signal.field == Field::kCallSignal && kind.kind == MutationKind::kRaisedEarly) continue;  // see below
      mutants.push_back({std::string(signal.name) + ": " + kind.name, {.kind = kind.kind, .field = signal.field}});
      for (const char* launch : {signal.field == Field::kChunkSignal ? kGatherLaunch : kDirectLaunch, kCodedLaunch}) {
        if (signal.field == Field::kCallSignal && launch == kCodedLaunch) continue;
        mutants.push_back({std::string(signal.name) + " of " + launch + ": " + kind.name,
                           {.kind = kind.kind, .field = signal.field, .launch = launch}});
      }
    }
  }
  for (const auto& [field, name] : {std::pair{Field::kAnnouncement, "announcement"}, {Field::kWords, "words"}}) {
    for (const auto& [kind, how] : {std::pair{MutationKind::kWaitSkipped, "no wait for each"},
                                    {MutationKind::kOneUseEarly, "content with the stamp of the use before"},
                                    {MutationKind::kStampFirst, "the stamp is written before the data"},
                                    {MutationKind::kOneHalf, "one half for all epochs"},
                                    {MutationKind::kStoreLost, "not sent"}}) {
      mutants.push_back({std::string(name) + ": " + how, {.kind = kind, .field = field}});
    }
  }
  mutants.push_back({"rows after words: do not catch up", {.kind = MutationKind::kForgotten, .field = Field::kWords}});
  mutants.push_back(
      {"words after a refusal: do not catch up", {.kind = MutationKind::kForgotten, .field = Field::kRefusalText}});
  mutants.push_back(
      {"a rank that has given up: forgets it", {.kind = MutationKind::kForgotten, .field = Field::kPoison}});
  mutants.push_back({"call signal of refuse_collective: raised before the work",  // of other launches it guards nothing
                     {.kind = MutationKind::kRaisedEarly, .field = Field::kCallSignal, .launch = kRefuseCollective}});
  for (const auto& [kind, how] :
       {std::pair{MutationKind::kRelaxedRelease, "no release"}, {MutationKind::kStoreLost, "not raised"}}) {
    mutants.push_back({std::string("call signal of words: ") + how,
                       {.kind = kind, .field = Field::kCallSignal, .launch = kWordsLaunch}});
    mutants.push_back({std::string("call signal of refuse_collective: ") + how,
                       {.kind = kind, .field = Field::kCallSignal, .launch = kRefuseCollective}});
  }
  for (const auto& [kind, how] :
       {std::pair{MutationKind::kAddLost, "not added"}, {MutationKind::kAddedTwice, "added twice"}}) {
    mutants.push_back({std::string("progress: ") + how, {.kind = kind, .field = Field::kProgress}});
  }
  mutants.push_back({"failed call: not noted", {.kind = MutationKind::kStoreLost, .field = Field::kFailedCall}});
  mutants.push_back({"fence before signals: none", {.kind = MutationKind::kFenceLost, .signals_by_fence = true}});
  return mutants;
}

TEST(CollectiveMutantTest, EachIsCaught) {
  expect_each_is_caught<CollectiveWorld>(all_collective_mutants(), all_cases(), most_schedules);
}

}  // namespace
}  // namespace moe_a2a
