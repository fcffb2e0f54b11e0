// The host's entry to topk_layout, which needs no communicator.
#pragma once

#include <string>

#include "comm/trace_buffer.h"
#include "moe/args.h"

namespace moe_a2a {

struct TopkLayoutArgs {
  TopkIdx topk_idx;  // [num_tokens, num_topk]; ids out of range count as dropped
  int num_tokens = 0;
  int num_topk = 0;
  int num_experts = 0;               // a multiple of num_ranks
  int num_ranks = 1;                 // at most kMaxRanks
  int32_t* counts = nullptr;         // [num_ranks + num_experts]: tokens of each rank, choices of each expert
  bool* is_token_in_rank = nullptr;  // [num_tokens, num_ranks]
  TraceBuffer trace;                 // off
};

// Clears the counts first.
void run_topk_layout(const std::string& target, int index, const TopkLayoutArgs& args, void* stream);

}  // namespace moe_a2a
