// Collectives on tensors in symmetric memory: each rank reads its share of x on every rank, and writes its share of out
// on every rank. As many bytes cross each link as in share_steps.h, but in one pass: no landing, no signal in between,
// no slices. All ranks get the same bits, those of two-shot.
#pragma once

#include "collectives/share_steps.h"

namespace moe_a2a {

// x (all but all-gather) and out (all but reduce-scatter) lie in CollectiveRegion::tensors, at the same place on every
// rank.
struct DirectAllReduceArgs : ShareArgs {};
struct DirectReduceScatterArgs : ShareArgs {};
struct DirectAllGatherArgs : ShareArgs {};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// The rows at this rank's `own` and at its place on the other ranks.
template <class T>
struct SymmetricRows {
  const HeapView& heap;
  T* own;

  MOE_A2A_DEVICE T* operator()(int r) const { return heap.peer(r, own); }

  // This rank first, then the next: ranks that all began with the same one would wait for its link.
  template <class Visit>
  MOE_A2A_DEVICE void visit(const Visit& visit) const {
    for (int n = 0, r = heap.rank; n < heap.num_ranks; ++n, r = r + 1 < heap.num_ranks ? r + 1 : 0) visit((*this)(r));
  }
};

class DirectSteps : public ShareChunks {
 public:
  using ShareChunks::ShareChunks;

  // Calls the member kStep for the chunks of this rank's share. All ranks must make this call: then their x is
  // complete, and no rank uses their out.
  template <auto kStep>
  MOE_A2A_DEVICE void run_own_chunks(TraceKind kind) const {
    for_chunks(most_chunks(), [&](int i) {
      if (!has_own(i)) return true;
      const uint64_t start = trace_now();
      (this->*kStep)(i);
      signal_chunks(part_, block_, kNoChunk, {}, i, part_.others());
      record_chunk(part_, block_, kind, start, i);
      return true;
    });
  }
  // Afterwards out is complete, and no rank reads x any more. False if a rank did not arrive.
  MOE_A2A_DEVICE bool wait_for_other_shares() const {
    return for_chunks(most_chunks(),
                      [&](int i) { return wait_for_chunks(part_, grid_, block_, kNoChunk, {}, i, owners_of(i)); });
  }

  MOE_A2A_DEVICE void reduce(int i) const {
    reduce_into(i, [](auto* out) { return Targets{out}; });
  }
  MOE_A2A_DEVICE void reduce_for_all(int i) const {
    reduce_into(i, [&](auto* out) { return SymmetricRows{args_.context.heap, out}; });
  }
  MOE_A2A_DEVICE void give_to_all(int i) const {
    const Span span = chunk(part_.rank(), i);
    const std::byte* x = x_at(span.begin);
    std::byte* out = out_at(span.begin);
    const RankSet ranks = x == out ? part_.others() : RankSet::all(part_.num_ranks());
    multicast_bytes(
        block_, ranks, part_.rank(), [&](int r) { return args_.context.heap.peer(r, out); }, x,
        span.count * element_size());
  }

 private:
  // targets_of(out): where the elements of out go.
  template <class TargetsOf>
  MOE_A2A_DEVICE void reduce_into(int i, const TargetsOf& targets_of) const {
    with_element_type(args_.dtype, [&](auto element) {
      using T = decltype(element);
      const Span span = chunk(part_.rank(), i);
      const SymmetricRows x{args_.context.heap, reinterpret_cast<const T*>(x_at(span.begin))};
      T* out = reinterpret_cast<T*>(out_at(span.begin));
      with_operator(args_.op, [&](auto op) {
        reduce_rows<T, decltype(op)>(block_, part_.num_ranks(), divisor_of(args_.op, part_.num_ranks()),
                                     static_cast<int>(span.count), are_vectors(x.own, out), x, targets_of(out));
      });
    });
  }
};

template <auto kStep, class Args>
MOE_A2A_DEVICE void run_direct(const Args& args, Operation operation, TraceKind kind, const Grid& grid,
                               const Block& block) {
  const auto receive = [&](const Part& part) {
    if (!meet(part, grid, block)) return false;
    const DirectSteps steps(args, part, grid, block);
    steps.template run_own_chunks<kStep>(kind);
    return steps.wait_for_other_shares();
  };
  take_part(args, operation, grid, block, [](const Part&) {}, receive);
}

struct DirectAllReduce {
  using Args = DirectAllReduceArgs;
  static constexpr const char* kName = "direct_all_reduce";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    run_direct<&DirectSteps::reduce_for_all>(args, collective_op::kDirectAllReduce, TraceKind::kReduce, grid, block);
  }
};

struct DirectReduceScatter {
  using Args = DirectReduceScatterArgs;
  static constexpr const char* kName = "direct_reduce_scatter";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    run_direct<&DirectSteps::reduce>(args, collective_op::kDirectReduceScatter, TraceKind::kReduce, grid, block);
  }
};

struct DirectAllGather {
  using Args = DirectAllGatherArgs;
  static constexpr const char* kName = "direct_all_gather";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    run_direct<&DirectSteps::give_to_all>(args, collective_op::kDirectAllGather, collective_kind::kPush, grid, block);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
