// One-shot all-reduce: every rank writes its vector to every rank, and each reduces all of them in rank order. One trip
// over the link, R times the bytes: for small tensors. All ranks get the same bits.
#pragma once

#include "collectives/pipeline.h"
#include "collectives/reduction.h"

namespace moe_a2a {

struct OneShotArgs {
  CollectiveContext context;
  Announcement announcement;
  int slice = 0;  // its index in the call
  const std::byte* x = nullptr;
  std::byte* out = nullptr;  // may be x
  int64_t count = 0;         // elements of this slice
  int64_t chunk = 0;         // elements behind one signal
  int num_chunks = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;

  MOE_A2A_HOST_DEVICE int size_of_chunk(int i) const {
    const int64_t rest = count - i * chunk;
    return static_cast<int>(rest < chunk ? rest : chunk);
  }
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

class OneShotSteps {
 public:
  MOE_A2A_DEVICE OneShotSteps(const OneShotArgs& args, const Part& part, const Grid& /*grid*/, const Block& block)
      : args_(args), part_(part), block_(block) {}

  MOE_A2A_DEVICE int most_chunks() const { return args_.num_chunks; }

  MOE_A2A_DEVICE RankSet senders_of(int) const { return part_.others(); }
  MOE_A2A_DEVICE RankSet receivers_of(int) const { return part_.others(); }

  // Writes chunk i of this rank's vector to all other ranks.
  MOE_A2A_DEVICE void push(int i) const {
    const CollectiveContext& c = args_.context;
    const RankSet others = part_.others();
    if (others.empty()) return;
    const uint64_t start = trace_now();
    const int64_t first = i * args_.chunk * size_of(args_.dtype);
    std::byte* local = c.region.landing.at(part_.half(), part_.rank(), first);
    multicast_bytes(
        block_, others, part_.rank(), [&](int rank) { return c.heap.peer(rank, local); }, args_.x + first,
        args_.size_of_chunk(i) * size_of(args_.dtype));
    record_chunk(part_, block_, collective_kind::kPush, start, i);
  }

  // Reduces chunk i of all ranks into out.
  MOE_A2A_DEVICE void reduce(int i) const {
    const uint64_t start = trace_now();
    with_element_type(args_.dtype, [&](auto element) { reduce_chunk<decltype(element)>(i); });
    record_chunk(part_, block_, TraceKind::kReduce, start, i);
  }

 private:
  template <class T>
  MOE_A2A_DEVICE void reduce_chunk(int i) const {
    const int64_t first = i * args_.chunk;
    const T* x = reinterpret_cast<const T*>(args_.x) + first;
    T* out = reinterpret_cast<T*>(args_.out) + first;
    const auto& landing = args_.context.region.landing;
    const MergedRows<T> row{x, landing.at(part_.half(), 0, first * int64_t{sizeof(T)}), landing.stride[1],
                            part_.rank()};
    with_operator(args_.op, [&](auto op) {
      reduce_rows<T, decltype(op)>(block_, part_.num_ranks(), divisor_of(args_.op, part_.num_ranks()),
                                   args_.size_of_chunk(i), are_vectors(x, out), row, Targets<T>{out});
    });
  }

  const OneShotArgs& args_;
  const Part& part_;
  const Block& block_;
};

struct OneShot {
  using Args = OneShotArgs;
  static constexpr const char* kName = "one_shot_all_reduce";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    run_pipeline<OneShotSteps, &OneShotSteps::push, &OneShotSteps::reduce>(args, collective_op::kOneShot, grid, block);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
