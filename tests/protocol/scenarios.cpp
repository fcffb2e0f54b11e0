#include "scenarios.h"

#include "ll_variants.h"
#include "steps.h"

namespace moe_a2a {

std::function<Program(ModelRank&)> layers(int n) {
  return [n](ModelRank& rank) {
    Program program;
    for (int call = 0; call < n; ++call) {
      append_dispatch(program, rank, call);
      append_combine(program, rank, call);
    }
    return program;
  };
}

Routing to_everybody(int num_tokens, int num_ranks) {
  return [=](int, int) { return Choices(num_tokens, num_ranks == 1 ? std::vector{0} : std::vector{0, 1}); };
}

namespace {

// layers(n), with both halves of each call in one launch.
std::function<Program(ModelRank&)> layers_in_one_launch(int n) {
  return [n](ModelRank& rank) {
    Program program;
    for (int call = 0; call < n; ++call) {
      append(program, {rank.dispatch(call), rank.experts(call), rank.combine(call), rank.check_combined(call)});
    }
    return program;
  };
}

// ---- ordinary traffic

Scenario plain(const char* name, int num_tokens, int num_blocks, uint64_t first_epoch = 0, int num_calls = 3) {
  return {.name = name,
          .shape = {.num_max_tokens = num_tokens,
                    .num_topk = 2,
                    .num_blocks = num_blocks,
                    .num_calls = num_calls,
                    .first_epoch = first_epoch,
                    .routing = to_everybody(num_tokens, 2)},
          .program = layers(num_calls)};
}

// If the caller pre-summed, a rank's own sums do not travel.
Scenario one_launch(bool presummed) {
  return {.name = presummed ? "both halves in one launch, summed by the caller" : "both halves in one launch",
          .shape = {.num_topk = 2, .presummed = presummed, .routing = to_everybody(1, 2)},
          .program = layers_in_one_launch(2)};
}

// The receivers learn from each row's signal whether it is coded.
Scenario coded(Scenario scenario) {
  scenario.name += ", coded";
  scenario.shape.coded = true;
  return scenario;
}

// Combine forms the sums from the landed rows, which the next dispatch overwrites.
Scenario simulated(Scenario scenario) {
  scenario.name += ", by simulated experts";
  scenario.shape.simulated = true;
  return scenario;
}

Scenario one_rank() {
  return {.name = "one rank, two blocks",
          .shape = {.num_ranks = 1,
                    .num_max_tokens = 2,
                    .num_experts = 1,
                    .num_blocks = 2,
                    .num_calls = 3,
                    .routing = to_everybody(2, 1)},
          .program = layers(3)};
}

// Rank 1 has tokens only in odd calls, rank 0 only in even ones, and they stay local; most pairs exchange nothing.
Scenario empty_pairs() {
  return {.name = "pairs of ranks that exchange nothing",
          .shape = {.num_calls = 3,
                    .routing = [](int rank, int call) { return call % 2 == rank ? Choices{{rank}} : Choices{}; }},
          .program = layers(3)};
}

Scenario one_way() {
  return {.name = "tokens go one way only",
          .shape = {.num_calls = 3, .routing = [](int rank, int) { return rank == 0 ? Choices{{1}} : Choices{}; }},
          .program = layers(3)};
}

// A buffer's routing changes from call to call: stale data of the previous call must not pass for new.
Scenario changing_routing() {
  return {.name = "routing changes from call to call",
          .shape = {.num_max_tokens = 2,
                    .num_topk = 2,
                    .num_experts = 4,
                    .num_calls = 3,
                    .routing =
                        [](int rank, int call) {
                          if (call == 0) return Choices{{0, 2}, {3, 3}};
                          if (call == 1) return Choices{{-1, rank}};
                          return Choices{{1, -1}, {-1, -1}};
                        }},
          .program = layers(3)};
}

Scenario three_ranks() {
  return {.name = "three ranks",
          .shape = {.num_ranks = 3,
                    .num_topk = 2,
                    .num_experts = 3,
                    .num_calls = 2,
                    .routing = [](int rank, int call) { return Choices{{rank, (rank + 1 + call) % 3}}; }},
          .program = layers(2)};
}

// Each call numbers its rows by its own bound, so the slots of a rank's tokens change from call to call, and rows land
// where another rank's rows have been.
Scenario changing_bound(int num_ranks) {
  const auto bound = [](int call) { return call == 1 ? 1 : 2; };
  return {.name = num_ranks == 2 ? "the bound of tokens changes from call to call"
                                 : "the bound of tokens changes, three ranks",
          .shape = {.num_ranks = num_ranks,
                    .num_max_tokens = 2,
                    .num_topk = 2,
                    .num_experts = num_ranks,
                    .num_calls = num_ranks == 2 ? 3 : 2,
                    .bound = [=](int, int call) { return bound(call); },
                    .routing =
                        [=](int rank, int call) {
                          const int num_tokens = call == 0 && rank > 0 ? 1 : bound(call);
                          return Choices(num_tokens, {rank, (rank + 1) % num_ranks});
                        }},
          .program = layers(num_ranks == 2 ? 3 : 2)};
}

// ---- more than one handle, no combine

// Calls 2n and 2n + 1 are open at the same time.
Scenario two_open(int num_blocks) {
  return {.name = num_blocks == 1 ? "two dispatches open" : "two dispatches open, two blocks",
          .shape = {.num_topk = 2,
                    .num_buffers = 2,
                    .num_blocks = num_blocks,
                    .num_calls = 4,
                    .routing = to_everybody(1, 2)},
          .program = [](ModelRank& rank) {
            Program program;
            for (int call = 0; call < 4; call += 2) {
              append_dispatch(program, rank, call);
              append_dispatch(program, rank, call + 1);
              append_combine(program, rank, call);
              append_combine(program, rank, call + 1);
            }
            return program;
          }};
}

Scenario released() {
  return {.name = "release instead of combine",
          .shape = {.num_topk = 2, .num_calls = 3, .routing = to_everybody(1, 2)},
          .program = [](ModelRank& rank) {
            Program program;
            for (int call = 0; call < 3; ++call) {
              append_dispatch(program, rank, call);
              if (call == 1) {
                append_combine(program, rank, call);
              } else {
                append(program, {rank.experts(call), rank.release(call)});
              }
            }
            return program;
          }};
}

// ---- clocks

// Twice, so that the second exchange may begin while times of the first are still read.
Scenario clocks(const char* name, int num_ranks) {
  return {.name = name,
          .shape = {.num_ranks = num_ranks, .num_topk = 2, .num_experts = num_ranks, .num_calls = 0, .routing = {}},
          .program = [](ModelRank& rank) {
            Program program;
            for (int time = 0; time < 2; ++time) append(program, {rank.align_clocks(), rank.check_clocks()});
            return program;
          }};
}

// ---- LL words

// Every token goes to the other rank, as rows of two words.
Scenario small(const char* name, int num_tokens, int num_blocks, uint64_t first_epoch = 0) {
  return {.name = name,
          .shape = {.num_max_tokens = num_tokens,
                    .hidden = 2,
                    .num_blocks = num_blocks,
                    .num_calls = 3,
                    .num_max_ll_tokens = num_tokens,
                    .first_epoch = first_epoch,
                    .routing = [=](int rank, int) { return Choices(num_tokens, {1 - rank}); }},
          .program = layers(3),
          .schedule_divisor = kLlDivisor};
}

// One token is a small batch, two are a large one. Sums travel as rows if any batch is large: in the second call rank 0
// may overwrite them only because rank 1 has announced its small batch. Nobody waits for the announcement of an empty
// one.
Scenario mixed(bool in_one_launch) {
  constexpr int kNumTokens[][2] = {{2, 1}, {2, 1}, {2, 0}, {2, 1}, {1, 1}, {1, 2}};
  return {.name = in_one_launch ? "LL: alternating, in one launch" : "LL: alternating large and small batches",
          .shape = {.num_max_tokens = 2,
                    .hidden = 1,
                    .num_calls = 6,
                    .num_max_ll_tokens = 1,
                    .routing = [=](int rank, int call) { return Choices(kNumTokens[call][rank], {1 - rank}); }},
          .program = in_one_launch ? layers_in_one_launch(6) : layers(6),
          .schedule_divisor = kLlDivisor};
}

}  // namespace

std::vector<Scenario> all_scenarios() {
  constexpr uint64_t kLastEpoch = (uint64_t{1} << 44) - 1;
  return {plain("one token", 1, 1),
          plain("two tokens, two blocks", 2, 2, 0, 2),
          plain("epoch wraps", 1, 1, kLastEpoch - 1),
          plain("epoch passes 2^32", 1, 1, (uint64_t{1} << 32) - 2),
          plain("epoch passes half its range", 1, 1, (uint64_t{1} << 43) - 2),
          one_launch(false),
          one_launch(true),
          coded(plain("two tokens, two blocks", 2, 2, 0, 2)),
          coded(one_launch(true)),
          simulated(plain("two tokens, two blocks", 2, 2, 0, 2)),
          simulated(one_launch(false)),
          product_sends(1),
          product_sends(2),
          one_rank(),
          empty_pairs(),
          one_way(),
          changing_routing(),
          changing_bound(2),
          changing_bound(3),
          three_ranks(),
          two_open(1),
          two_open(2),
          released(),
          refused_dispatch(),
          other_rows(false),
          other_rows(true),
          other_bound(false),
          other_bound(true),
          refused_combine(),
          abandoned_combine(),
          refused_twice(),
          clocks("clocks", 2),
          clocks("clocks of three ranks", 3),
          parting(),
          missing_rank(),
          late_rank(),
          small("LL: one token", 1, 1),
          small("LL: two tokens, two blocks", 2, 2),
          small("LL: epoch passes 2^31", 1, 1, (uint64_t{1} << 31) - 2),
          small("LL: epoch passes 2^32", 1, 1, (uint64_t{1} << 32) - 2),
          small("LL: epoch wraps", 1, 1, kLastEpoch - 1),
          with_row_sums(small("LL: one token", 1, 1)),
          with_row_sums(small("LL: two tokens, two blocks", 2, 2)),
          as_medium(plain("one token", 1, 1)),
          as_medium(plain("two tokens, two blocks", 2, 2, 0, 2)),
          as_medium(one_launch(false)),
          as_medium(one_launch(true)),
          as_medium(empty_pairs()),
          as_medium(changing_routing()),
          as_medium(changing_bound(2)),
          as_medium(refused_dispatch()),
          as_medium(other_rows(true)),
          as_medium(missing_rank()),
          as_medium(late_rank()),
          mixed(false),
          mixed(true),
          as_small(other_rows(true)),
          as_small(other_bound(true)),
          as_small(changing_bound(2)),
          as_small(one_launch(false)),
          as_small(one_launch(true)),
          with_row_sums(as_small(one_launch(false))),
          with_row_sums(as_small(one_launch(true))),
          as_small(one_rank()),
          as_small(empty_pairs()),
          as_small(changing_routing()),
          as_small(three_ranks()),
          as_small(two_open(1)),
          as_small(released()),
          as_small(refused_dispatch()),
          as_small(refused_combine()),
          as_small(abandoned_combine()),
          as_small(parting()),
          as_small(missing_rank()),
          as_small(late_rank())};
}

}  // namespace moe_a2a
