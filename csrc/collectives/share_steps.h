// The steps of the collectives that work on shares: each rank sends every other its elements of that rank's share,
// reduces its own share, and reads the reduced shares of the others where they were reduced. To gather, it sends its
// own share to every other rank.
#pragma once

#include "collectives/pipeline.h"
#include "collectives/reduction.h"
#include "collectives/shares.h"

namespace moe_a2a {

struct ShareArgs {
  static constexpr int kLargeChunk = kLargeChunkBytes;  // see slices_of()

  CollectiveContext context;
  Announcement announcement;
  int slice = 0;  // its index in the call
  const std::byte* x = nullptr;
  std::byte* out = nullptr;
  int64_t x_begin = 0, out_begin = 0;  // the element of the whole tensor at which x and out begin
  Shares shares;
  Slice extent;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// The chunks of one block in one launch. Chunk i of every share is handled by block i % num_blocks.
class ShareChunks {
 public:
  MOE_A2A_DEVICE ShareChunks(const ShareArgs& args, const Part& part, const Grid& grid, const Block& block)
      : args_(args), part_(part), region_(args.context.region), grid_(grid), block_(block) {}

  // The number of chunks of the largest share.
  MOE_A2A_DEVICE int most_chunks() const {
    int most = 0;
    for (int r = 0; r < part_.num_ranks(); ++r) {
      const int num_chunks = args_.extent.num_chunks(args_.shares, r);
      most = num_chunks > most ? num_chunks : most;
    }
    return most;
  }

 protected:
  // Calls visit(i) for this block's chunks; false as soon as a visit returns false.
  template <class Visit>
  MOE_A2A_DEVICE bool for_chunks(int num_chunks, const Visit& visit) const {
    for (int i = grid_.rank(); i < num_chunks; i += grid_.size()) {
      if (!visit(i)) return false;
    }
    return true;
  }

  // Calls visit(owner) for all other ranks that have a chunk i in their share. Each chunk begins with another rank, so
  // that all links are equally busy at any time. Returns these ranks.
  template <class Visit>
  MOE_A2A_DEVICE RankSet for_other_owners(int i, const Visit& visit) const {
    const int rank = part_.rank(), num_ranks = part_.num_ranks(), num_others = num_ranks - 1;
    RankSet owners;
    int distance = num_others > 0 ? 1 + i % num_others : 0;
    for (int n = 0; n < num_others; ++n) {
      const int owner = rank + distance < num_ranks ? rank + distance : rank + distance - num_ranks;
      distance = distance < num_others ? distance + 1 : 1;
      if (chunk(owner, i).count == 0) continue;
      owners.insert(owner);
      visit(owner);
    }
    return owners;
  }

  // The other ranks that have a chunk i.
  MOE_A2A_DEVICE RankSet owners_of(int i) const {
    return for_other_owners(i, [](int) {});
  }

  // ---- the stages; callers define how a chunk is copied. `place`: its offset in a landing place and in `result`.

  // Sends this rank's elements of chunk i of all other shares to their owners by write(span, target), with one fence
  // for all.
  template <class Write>
  MOE_A2A_DEVICE bool push_chunks(int i, int64_t place, const Write& write) const {
    const uint64_t start = trace_now();
    std::byte* landing = region_.landing.at(part_.half(), part_.rank(), place);
    const RankSet owners =
        for_other_owners(i, [&](int owner) { write(chunk(owner, i), args_.context.heap.peer(owner, landing)); });
    signal_landed(owners, i);
    record_chunk(collective_kind::kPush, start, i);
    return true;
  }

  // Once chunk i of this rank's share has landed from all ranks, reduces it by reduce(element), where `element` is of
  // the dtype.
  template <class Reduce>
  MOE_A2A_DEVICE bool reduce_own(int i, bool shows_result, const Reduce& reduce) const {
    const bool is_own = i < num_own_chunks();
    // Without a chunk of its own, a rank still meets the others here.
    if (!wait_for_landed(i, is_own ? part_.others() : RankSet{})) return false;
    if (!is_own) return true;
    const uint64_t start = trace_now();
    with_element_type(args_.dtype, reduce);
    if (shows_result) signal_result(i);
    record_chunk(TraceKind::kReduce, start, i);
    return true;
  }

  // Reads chunk i of the shares of all other ranks by read(span, source).
  template <class Read>
  MOE_A2A_DEVICE bool pull_chunks(int i, int64_t place, const Read& read) const {
    if (!wait_for_results(i)) return false;
    const uint64_t start = trace_now();
    std::byte* result = region_.result.at(part_.half(), place);
    for_other_owners(i, [&](int owner) { read(chunk(owner, i), args_.context.heap.peer(owner, result)); });
    record_chunk(collective_kind::kPull, start, i);
    return true;
  }

  MOE_A2A_DEVICE int num_own_chunks() const { return args_.extent.num_chunks(args_.shares, part_.rank()); }
  MOE_A2A_DEVICE Span chunk(int owner, int i) const { return args_.extent.chunk_of(args_.shares, owner, i); }

  // Chunk i of each owner's share, from this rank, has landed: pairs with the acquire in wait_for_landed().
  MOE_A2A_DEVICE void signal_landed(const RankSet& owners, int i) const {
    signal(owners, region_.chunk_signal.at(part_.half(), part_.rank(), i));
  }
  // Chunk i of `result` is complete: pairs with the acquire in wait_for_results().
  MOE_A2A_DEVICE void signal_result(int i) const {
    signal(part_.others(), region_.result_signal.at(part_.half(), part_.rank(), i));
  }
  // False if a rank did not arrive.
  MOE_A2A_DEVICE bool wait_for_landed(int i, const RankSet& ranks) const {
    return meet_and_wait_for_chunk(part_, grid_, block_, region_.chunk_signal, ranks, i);
  }
  MOE_A2A_DEVICE bool wait_for_results(int i) const {
    return wait_for_chunk(part_, block_, region_.result_signal, owners_of(i), i);
  }

  MOE_A2A_DEVICE void record_chunk(TraceKind kind, uint64_t start, int i) const {
    record(args_.context.trace(), block_, {.kind = kind, .begin = start, .token = i});
  }

  MOE_A2A_DEVICE int64_t element_size() const { return size_of(args_.dtype); }
  MOE_A2A_DEVICE const std::byte* x_at(int64_t element) const {
    return args_.x + (element - args_.x_begin) * element_size();
  }
  MOE_A2A_DEVICE std::byte* out_at(int64_t element) const {
    return args_.out + (element - args_.out_begin) * element_size();
  }

  // `count` elements, by the whole block.
  MOE_A2A_DEVICE void copy(std::byte* target, const std::byte* source, int64_t count) const {
    multicast_bytes(block_, RankSet::only(0), 0, [&](int) { return target; }, source, count * element_size());
  }

  const ShareArgs& args_;
  const Part& part_;
  const CollectiveRegion& region_;
  const Grid& grid_;
  const Block& block_;

 private:
  MOE_A2A_DEVICE void signal(const RankSet& ranks, Signal* local) const {
    block_.release_sync();
    if (block_.rank() == 0) signal_many(args_.context.heap, ranks, local, part_.epoch);
  }
};

// Elements travel as they are.
class ShareSteps : public ShareChunks {
 public:
  using ShareChunks::ShareChunks;

  MOE_A2A_DEVICE bool push(int i) const {
    return push_chunks(i, place_of(i),
                       [&](const Span& span, std::byte* target) { copy(target, x_at(span.begin), span.count); });
  }

  // Reduces chunk i of this rank's share into out; reduce_for_all() also into `result`, for the others.
  MOE_A2A_DEVICE bool reduce(int i) const { return reduce_into_out(i, false); }
  MOE_A2A_DEVICE bool reduce_for_all(int i) const { return reduce_into_out(i, true); }

  MOE_A2A_DEVICE bool pull(int i) const {
    return pull_chunks(i, place_of(i), [&](const Span& span, const std::byte* source) {
      copy(out_at(span.begin), source, span.count);
    });
  }

  // Sends chunk i of this rank's share, which is x, to all other ranks.
  MOE_A2A_DEVICE bool give(int i) const {
    if (i >= num_own_chunks()) return true;
    const uint64_t start = trace_now();
    const Span span = chunk(part_.rank(), i);
    const std::byte* x = x_at(span.begin);
    if (const RankSet others = part_.others(); !others.empty()) {
      std::byte* landing = region_.landing.at(part_.half(), part_.rank(), place_of(i));
      multicast_bytes(
          block_, others, part_.rank(), [&](int r) { return args_.context.heap.peer(r, landing); }, x,
          span.count * element_size());
      signal_landed(others, i);
    }
    if (x != out_at(span.begin)) copy(out_at(span.begin), x, span.count);
    record_chunk(collective_kind::kPush, start, i);
    return true;
  }
  // Copies chunk i of the other shares, once they have landed, into out.
  MOE_A2A_DEVICE bool take(int i) const {
    if (!wait_for_landed(i, owners_of(i))) return false;
    const uint64_t start = trace_now();
    for_other_owners(i, [&](int owner) {
      const Span span = chunk(owner, i);
      copy(out_at(span.begin), region_.landing.at(part_.half(), owner, place_of(i)), span.count);
    });
    record_chunk(collective_kind::kPull, start, i);
    return true;
  }

 private:
  MOE_A2A_DEVICE bool reduce_into_out(int i, bool shows_result) const {
    return reduce_own(i, shows_result, [&](auto element) { reduce_chunk<decltype(element)>(i, shows_result); });
  }

  template <class T>
  MOE_A2A_DEVICE void reduce_chunk(int i, bool shows_result) const {
    const Span span = chunk(part_.rank(), i);
    const T* x = reinterpret_cast<const T*>(x_at(span.begin));
    T* out = reinterpret_cast<T*>(out_at(span.begin));
    T* result = shows_result ? reinterpret_cast<T*>(result_at(i)) : nullptr;
    const MergedRows<T> row{x, region_.landing.at(part_.half(), 0, place_of(i)), region_.landing.stride[1],
                            part_.rank()};
    with_operator(args_.op, [&](auto op) {
      reduce_rows<T, decltype(op)>(block_, part_.num_ranks(), divisor_of(args_.op, part_.num_ranks()),
                                   static_cast<int>(span.count), are_vectors(x, out), row, Targets<T>{out, result});
    });
  }

  // Where chunk i lies in a landing place and in `result`.
  MOE_A2A_DEVICE int64_t place_of(int i) const { return i * args_.extent.chunk * element_size(); }
  MOE_A2A_DEVICE std::byte* result_at(int i) const { return region_.result.at(part_.half(), place_of(i)); }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
