// Ring all-reduce: each rank writes only to the next rank and reads only from the previous one. The partial result of
// share s starts at rank s + 1 and is complete at rank s after R - 1 steps; a second trip distributes it. Sends as many
// bytes as two-shot, over one link per rank: for machines whose links form a ring. One rank completes each share,
// merged in ring order, so all ranks get the same bits.
#pragma once

#include "collectives/partial_sums.h"
#include "collectives/share_steps.h"

namespace moe_a2a {

struct RingArgs : ShareArgs {};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// landing[s] holds the partial result of share s on the way to its owner, and on the second trip the share itself.
class RingSteps : public ShareChunks {
 public:
  using ShareChunks::ShareChunks;

  MOE_A2A_DEVICE void send_first() const {
    if (part_.num_ranks() > 1) pass_on(0);
  }

  // Adds this rank's values to passing partial results, its own share last.
  MOE_A2A_DEVICE bool reduce() const {
    for (int step = 1; step + 1 < part_.num_ranks(); ++step) {
      if (!pass_on(step)) return false;
    }
    return for_chunks(args_.extent.num_chunks(args_.shares, part_.rank()), [&](int i) {
      const uint64_t start = trace_now();
      if (part_.num_ranks() > 1 && !wait_for_partial(part_.rank(), i)) return false;
      complete(i);
      if (part_.num_ranks() > 1) signal_share(part_.rank(), i);
      record_chunk(part_, block_, TraceKind::kReduce, start, i);
      return true;
    });
  }

  // The shares of the others, the previous rank's first.
  MOE_A2A_DEVICE bool gather() const {
    for (int step = 0; step + 1 < part_.num_ranks(); ++step) {
      const int share = share_at(step);
      const bool goes_on = next() != share;
      const bool good = for_chunks(args_.extent.num_chunks(args_.shares, share), [&](int i) {
        if (!wait_for_place(part_, block_, region_.result_signal, share, previous(), i)) return false;
        const uint64_t start = trace_now();
        std::byte* own = share_place(share, i);
        const std::byte* source = args_.context.heap.peer(previous(), share == previous() ? result_place(i) : own);
        const Span span = chunk(share, i);
        copy(out_at(span.begin), source, span.count);
        if (goes_on) {
          copy(own, source, span.count);
          signal_share(share, i);
        }
        record_chunk(part_, block_, collective_kind::kPull, start, i);
        return true;
      });
      if (!good) return false;
    }
    return true;
  }

 private:
  MOE_A2A_DEVICE int next() const { return (part_.rank() + 1) % part_.num_ranks(); }
  MOE_A2A_DEVICE int previous() const { return (part_.rank() + part_.num_ranks() - 1) % part_.num_ranks(); }
  // The share that this rank handles in a step.
  MOE_A2A_DEVICE int share_at(int step) const {
    return (part_.rank() + 2 * part_.num_ranks() - 1 - step) % part_.num_ranks();
  }

  // Adds this rank's values to the partial result of a step's share and passes it on; in step 0 starts it.
  MOE_A2A_DEVICE bool pass_on(int step) const {
    const int share = share_at(step);
    return for_chunks(args_.extent.num_chunks(args_.shares, share), [&](int i) {
      if (step > 0 && !wait_for_partial(share, i)) return false;
      const uint64_t start = trace_now();
      merge_on(share, i, step > 0);
      signal_place(part_, block_, region_.chunk_signal, share, next(), i);
      record_chunk(part_, block_, collective_kind::kPush, start, i);
      return true;
    });
  }

  MOE_A2A_DEVICE Merging merging(const Span& span) const {
    return {args_.dtype, args_.op, x_at(span.begin), span.count, part_.num_ranks()};
  }

  MOE_A2A_DEVICE void merge_on(int share, int i, bool has_partial) const {
    const Merging own = merging(chunk(share, i));
    float* partial = partial_place(share, i);
    float* target = args_.context.heap.peer(next(), partial);
    for_lane_values(block_, own.count, [&](int64_t first) {
      LineValues merged;
      own.load_merged(has_partial ? partial : nullptr, first, merged);
      own.store(merged, first, target);
    });
  }

  MOE_A2A_DEVICE void complete(int i) const {
    const Span span = chunk(part_.rank(), i);
    const Merging own = merging(span);
    const float* partial = part_.num_ranks() > 1 ? partial_place(part_.rank(), i) : nullptr;
    for_lane_values(block_, own.count, [&](int64_t first) {
      LineValues merged;
      own.load_merged(partial, first, merged);
      own.finish(merged, first, out_at(span.begin), result_place(i));
    });
  }

  MOE_A2A_DEVICE bool wait_for_partial(int share, int i) const {
    return wait_for_place(part_, block_, region_.chunk_signal, share, previous(), i);
  }
  MOE_A2A_DEVICE void signal_share(int share, int i) const {
    signal_place(part_, block_, region_.result_signal, share, next(), i);
  }
  MOE_A2A_DEVICE float* partial_place(int share, int i) const {
    return reinterpret_cast<float*>(share_place(share, i));
  }
  MOE_A2A_DEVICE std::byte* share_place(int share, int i) const {
    return region_.landing.at(part_.half(), share, i * args_.extent.chunk * int64_t{sizeof(float)});
  }
  MOE_A2A_DEVICE std::byte* result_place(int i) const {
    return region_.result.at(part_.half(), i * args_.extent.chunk * int64_t{sizeof(float)});
  }
};

struct Ring {
  using Args = RingArgs;
  static constexpr const char* kName = "ring_all_reduce";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const auto steps = [&](const Part& part) { return RingSteps(args, part, grid, block); };
    take_part(
        args, collective_op::kRing, grid, block, [&](const Part& part) { steps(part).send_first(); },
        [&](const Part& part) { return meet(part, grid, block) && steps(part).reduce() && steps(part).gather(); });
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
