// Wraps the trace around any kernel: opens the segment of each warp that keeps a record, and records the whole launch
// once in each.
#pragma once

#include "comm/context.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Where a launch with these arguments leaves its records. Both halves of a fused one have the same buffer.
template <class Args>
MOE_A2A_HOST_DEVICE const TraceBuffer& trace_of(const Args& args) {
  if constexpr (requires { args.context; }) {
    return args.context.trace();
  } else if constexpr (requires { args.send.context; }) {
    return args.send.context.trace();
  } else {
    return args.trace;
  }
}

// 0 for a kernel without shared_bytes().
template <class Kernel>
size_t shared_bytes_of(const typename Kernel::Args& args) {
  if constexpr (requires { Kernel::shared_bytes(args); }) {
    return Kernel::shared_bytes(args);
  } else {
    return 0;
  }
}

template <class Kernel, const Vocabulary& kVocabulary>
struct Traced {
  using Args = typename Kernel::Args;
  static constexpr const char* kName = Kernel::kName;
  static constexpr Operation kOperation = kVocabulary.operation_named(Kernel::kName);
  static_assert(kOperation != Operation::kNone);

  static size_t shared_bytes(const Args& args) { return shared_bytes_of<Kernel>(args); }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const TraceBuffer& trace = trace_of(args);
    const bool keeps_record = warp_keeps_record(args, grid, block);
    if (keeps_record) open_segment(trace, grid, block);
    Kernel::run(args, grid, block, shared);
    if (keeps_record) close_segment(trace, block, static_cast<int>(kOperation));
  }

 private:
  // Every warp keeps a record, unless the kernel says that one warp records for its block.
  MOE_A2A_DEVICE static bool warp_keeps_record(const Args& args, const Grid& grid, const Block& block) {
    if constexpr (requires { Kernel::warp_keeps_record(args, grid, block); }) {
      return Kernel::warp_keeps_record(args, grid, block);
    } else {
      return true;
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
