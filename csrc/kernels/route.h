// Where a token goes: pure functions of its choices, the same for the sender and the receiver. Nothing is sorted and no
// slot is handed out: a token lands at its own index, so both sides know every address from the choices alone.
#pragma once

#include "kernels/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The expert's index on `rank`, or -1 when it lives elsewhere or the choice is dropped (-1).
MOE_A2A_DEVICE int local_expert(const MoeConfig& config, int32_t expert, int rank) {
  const int local = expert - rank * config.num_local_experts();
  return expert >= 0 && local >= 0 && local < config.num_local_experts() ? local : -1;
}

// The distinct ranks that own a token's experts: its row crosses to each of them once.
MOE_A2A_DEVICE RankSet destinations(const MoeConfig& config, const int32_t* choices) {
  RankSet ranks;
  for (int k = 0; k < config.num_topk; ++k) {
    if (choices[k] >= 0) ranks.insert(choices[k] / config.num_local_experts());
  }
  return ranks;
}

// Calls visit(k, expert) for the choices of a token in k order, four at a time where their number allows it.
template <class Visit>
MOE_A2A_DEVICE void visit_choices(const MoeConfig& config, const int32_t* choices, Visit visit) {
  constexpr int kVector = 4;
  if (config.num_topk % kVector != 0) {
    for (int k = 0; k < config.num_topk; ++k) visit(k, choices[k]);
    return;
  }
  for (int k = 0; k < config.num_topk; k += kVector) {
    int32_t some[kVector];
    load_values(some, choices + k);
    for (int i = 0; i < kVector; ++i) visit(k + i, some[i]);
  }
}

// Whether one of a token's experts lives on `rank`.
MOE_A2A_DEVICE bool lands_on(const MoeConfig& config, const int32_t* choices, int rank) {
  bool lands = false;
  visit_choices(config, choices, [&](int, int32_t expert) { lands |= local_expert(config, expert, rank) >= 0; });
  return lands;
}

// A choice as the table carries it: out of range is dropped. The host refuses such ids where it can see them; a changed
// tensor in a captured graph is counted here and raised at the next call that looks (ExpertParallel::check).
MOE_A2A_DEVICE int32_t checked_choice(const DispatchSendArgs& args, int token, int k) {
  const int64_t expert = args.topk_idx[static_cast<int64_t>(token) * args.context.config.num_topk + k];
  if (expert >= -1 && expert < args.context.config.num_experts) return static_cast<int32_t>(expert);
  const WaitPolicy& wait = args.context.wait;
  Report* report = wait.report;
  count_fault(&wait.tally->num_bad_choices, &report->num_bad_choices);
  atomic_store<Order::kRelaxed, Scope::kSystem>(&report->bad_token, token);
  atomic_store<Order::kRelaxed, Scope::kSystem>(&report->bad_expert, static_cast<int32_t>(expert));
  return -1;
}

// The distinct ranks of a token as its own rank reads them, before any table exists.
MOE_A2A_DEVICE RankSet destinations(const DispatchSendArgs& args, int token) {
  const MoeConfig& config = args.context.config;
  RankSet ranks;
  for (int k = 0; k < config.num_topk; ++k) {
    const int64_t expert = args.topk_idx[static_cast<int64_t>(token) * config.num_topk + k];
    if (expert >= 0 && expert < config.num_experts) {
      ranks.insert(static_cast<int32_t>(expert) / config.num_local_experts());
    }
  }
  return ranks;
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
