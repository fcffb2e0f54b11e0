// Wraps the trace around any kernel: opens each warp's segment, and records the whole launch once per warp.
#pragma once

#include "comm/context.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Of a fused launch: its sending half's; both halves have the same.
template <class Args>
MOE_A2A_HOST_DEVICE const ClientContext& context_of(const Args& args) {
  if constexpr (requires { args.context; }) {
    return args.context;
  } else {
    return args.send.context;
  }
}

// Whether a launch with these arguments leaves records. A kernel without a context belongs to no communicator.
template <class Args>
bool is_traced(const Args& args) {
  if constexpr (requires { args.context; } || requires { args.send.context; }) {
    return context_of(args).trace().is_on();
  } else {
    return false;
  }
}

template <class Kernel, const Vocabulary& kVocabulary>
struct Traced {
  using Args = typename Kernel::Args;
  static constexpr const char* kName = Kernel::kName;
  static constexpr Operation kOperation = kVocabulary.operation_named(Kernel::kName);
  static_assert(kOperation != Operation::kNone);

  static size_t shared_bytes(const Args& args) { return Kernel::shared_bytes(args); }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const TraceBuffer& trace = context_of(args).trace();
    open_segment(trace, grid, block);
    Kernel::run(args, grid, block, shared);
    close_segment(trace, block, static_cast<int>(kOperation));
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
