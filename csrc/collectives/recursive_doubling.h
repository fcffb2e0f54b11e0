// All-reduce by recursive doubling: in step k each rank exchanges its partial result with the rank whose number differs
// in bit k. log2(R) trips, each with the whole vector. If R is not a power of two, let P be the largest one below R:
// rank P + i first gives its values to rank i, and gets the result from it. Both ranks of a pair merge in the same
// order, so all get the same bits.
#pragma once

#include "collectives/one_shot.h"
#include "collectives/partial_sums.h"

namespace moe_a2a {

struct RecursiveDoublingArgs : OneShotArgs {};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// landing[0]: transfers between a rank and the rank beyond the power of two that it stands for; landing[1 + k]: what
// arrives in step k. `result` holds the rank's own partial result.
class DoublingSteps {
 public:
  MOE_A2A_DEVICE DoublingSteps(const RecursiveDoublingArgs& args, const Part& part, const Grid& grid,
                               const Block& block)
      : args_(args), part_(part), region_(args.context.region), grid_(grid), block_(block) {
    while (2 * power_ <= part.num_ranks()) power_ *= 2;
  }

  MOE_A2A_DEVICE void send_first() const {
    if (is_beyond()) {
      for_chunks([&](int i) { return merge_on(i, kX, kNowhere, part_.rank() - power_, 0); });
    } else if (!stands_for_another() && power_ > 1) {
      for_chunks([&](int i) { return merge_on(i, kX, kNowhere, partner(0), 1); });
    }
  }

  MOE_A2A_DEVICE bool receive() const {
    if (is_beyond()) {
      const int stand_in = part_.rank() - power_;
      return for_chunks([&](int i) { return wait(0, stand_in, i) && finish(i, 0, kNowhere, kNobody); });
    }
    if (stands_for_another() && !fold()) return false;
    return exchange();
  }

 private:
  // Where values are: in x, in `result`, or in the landing place of that number.
  static constexpr int kX = -1, kOwn = -2, kNowhere = -3;
  static constexpr int kNobody = -1;

  MOE_A2A_DEVICE bool is_beyond() const { return part_.rank() >= power_; }
  MOE_A2A_DEVICE bool stands_for_another() const { return part_.rank() + power_ < part_.num_ranks(); }
  MOE_A2A_DEVICE int partner(int step) const { return part_.rank() ^ 1 << step; }

  template <class Visit>
  MOE_A2A_DEVICE bool for_chunks(const Visit& visit) const {
    const int num_chunks = args_.num_chunks;
    for (int i = grid_.rank(); i < num_chunks; i += grid_.size()) {
      if (!visit(i)) return false;
    }
    return true;
  }

  // Merges the values of the rank that this one stands for, and begins the exchange with the result.
  MOE_A2A_DEVICE bool fold() const {
    const int other = part_.rank() + power_;
    return for_chunks([&](int i) { return wait(0, other, i) && merge_on(i, kX, 0, partner(0), 1); });
  }

  MOE_A2A_DEVICE bool exchange() const {
    if (power_ == 1) {
      return for_chunks([&](int i) { return finish(i, kX, kNowhere, kNobody); });
    }
    for (int step = 0; 1 << step < power_; ++step) {
      const int own = step == 0 && !stands_for_another() ? kX : kOwn, place = 1 + step;
      const bool is_lower = part_.rank() < partner(step), is_last = 2 << step == power_;
      const bool good = for_chunks([&](int i) {
        if (!wait(place, partner(step), i)) return false;
        const int first = is_lower ? own : place, second = is_lower ? place : own;
        if (!is_last) return merge_on(i, first, second, partner(step + 1), place + 1);
        return finish(i, first, second, stands_for_another() ? part_.rank() + power_ : kNobody);
      });
      if (!good) return false;
    }
    return true;
  }

  // Merges chunk i of two places (or takes the first), keeps the result, and writes it to a place of `peer`.
  MOE_A2A_DEVICE bool merge_on(int i, int first, int second, int peer, int place) const {
    const uint64_t start = trace_now();
    const Merging own = merging(i);
    float* kept = partial(kOwn, i);
    float* target = args_.context.heap.peer(peer, partial(place, i));
    for_lane_values(block_, own.count, [&](int64_t at) {
      LineValues merged;
      load_merged(own, i, first, second, at, merged);
      own.store(merged, at, kept);
      own.store(merged, at, target);
    });
    signal_place(part_, block_, region_.chunk_signal, place, peer, i);
    record_chunk(part_, block_, collective_kind::kPush, start, i);
    return true;
  }

  // The last step: writes out, and the merged values to the rank that this one stands for.
  MOE_A2A_DEVICE bool finish(int i, int first, int second, int peer) const {
    const uint64_t start = trace_now();
    const Merging own = merging(i);
    std::byte* out = args_.out + i * args_.chunk * size_of(args_.dtype);
    float* target = peer == kNobody ? nullptr : args_.context.heap.peer(peer, partial(0, i));
    for_lane_values(block_, own.count, [&](int64_t at) {
      LineValues merged;
      load_merged(own, i, first, second, at, merged);
      if (target != nullptr) own.store(merged, at, target);
      own.finish(merged, at, out, nullptr);
    });
    if (peer != kNobody) signal_place(part_, block_, region_.chunk_signal, 0, peer, i);
    record_chunk(part_, block_, TraceKind::kReduce, start, i);
    return true;
  }

  MOE_A2A_DEVICE void load_merged(const Merging& own, int i, int first, int second, int64_t at,
                                  LineValues& merged) const {
    load_from(own, i, first, at, merged);
    if (second == kNowhere) return;
    LineValues values;
    load_from(own, i, second, at, values);
    merge(args_.op, merged, values);
  }
  MOE_A2A_DEVICE void load_from(const Merging& own, int i, int place, int64_t at, LineValues& values) const {
    if (place == kX) {
      own.load_x(at, values);
    } else {
      own.load(partial(place, i), at, values);
    }
  }

  MOE_A2A_DEVICE Merging merging(int i) const {
    return {args_.dtype, args_.op, args_.x + i * args_.chunk * size_of(args_.dtype), args_.size_of_chunk(i),
            part_.num_ranks()};
  }
  MOE_A2A_DEVICE float* partial(int place, int i) const {
    const int64_t offset = i * args_.chunk * int64_t{sizeof(float)};
    return reinterpret_cast<float*>(place == kOwn ? region_.result.at(part_.half(), offset)
                                                  : region_.landing.at(part_.half(), place, offset));
  }
  MOE_A2A_DEVICE bool wait(int place, int peer, int i) const {
    return wait_for_place(part_, block_, region_.chunk_signal, place, peer, i);
  }

  const RecursiveDoublingArgs& args_;
  const Part& part_;
  const CollectiveRegion& region_;
  const Grid& grid_;
  const Block& block_;
  int power_ = 1;  // the largest power of two up to the number of ranks
};

struct RecursiveDoubling {
  using Args = RecursiveDoublingArgs;
  static constexpr const char* kName = "recursive_doubling_all_reduce";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const auto steps = [&](const Part& part) { return DoublingSteps(args, part, grid, block); };
    take_part(
        args, collective_op::kRecursiveDoubling, grid, block, [&](const Part& part) { steps(part).send_first(); },
        [&](const Part& part) { return meet(part, grid, block) && steps(part).receive(); });
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
