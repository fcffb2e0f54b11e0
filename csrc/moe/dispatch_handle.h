// One dispatch as the host sees it, from its send to the end of its combine.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "moe/args.h"

namespace moe_a2a {

class ExpertParallel;

struct DispatchHandle {
  // kCombined: closed, unless a queued combine turns out to have been refused. kRefused: a peer refused the dispatch,
  // as a report said after the launch; closed, but its buffer is given back by the dispatch that takes it next.
  enum class Stage { kSent, kReceived, kCombineSent, kCombined, kRefused, kClosed };

  const ExpertParallel* owner = nullptr;
  int buffer = 0;
  DispatchNumber number;  // as the hosts count, in captured graphs too
  int num_tokens = 0;
  int num_max_tokens_per_rank = 0;  // of this dispatch
  Layout layout = Layout::kRows;
  int expert_alignment = 1;
  RowFormat format = RowFormat::kPlain;
  std::atomic<Stage> stage = Stage::kSent;
  // For the combine, which may be retried after a refusal; see RefusalCount.
  uint32_t attempt = 1;
  uint32_t failed_attempt = 0;  // the latest that failed on this rank
  uint32_t num_strays = 0;
  SeenStrays seen;
  bool keeps_own_sums = false;  // the combine left this rank's own sums in y

  bool is_open() const { return stage < Stage::kCombined; }

  // `peer` has refused the combine; `count`: its RefusalCount. The retry is a later attempt than that one.
  void note_refusal(int peer, uint32_t count) {
    attempt = std::max(attempt, RefusalCount::attempt_of(count) + 1);
    seen.of_rank[peer] = static_cast<uint16_t>(RefusalCount::strays_of(count));
  }
};

}  // namespace moe_a2a
