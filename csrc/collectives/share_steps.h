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
  MOE_A2A_DEVICE int most_chunks() const { return args_.extent.most_chunks; }

  // Calls visit(i) for this block's chunks; false as soon as a visit returns false.
  template <class Visit>
  MOE_A2A_DEVICE bool for_chunks(int num_chunks, const Visit& visit) const {
    for (int i = grid_.rank(); i < num_chunks; i += grid_.size()) {
      if (!visit(i)) return false;
    }
    return true;
  }

  // The other ranks that have a chunk i.
  MOE_A2A_DEVICE RankSet owners_of(int i) const {
    return for_other_owners(i, [](int) {});
  }
  // The other ranks, if this one has a chunk i.
  MOE_A2A_DEVICE RankSet others_with_own(int i) const { return has_own(i) ? part_.others() : RankSet{}; }

 protected:
  // Calls visit(r) for all other ranks. Each chunk begins with another rank, so that all links are equally busy at any
  // time.
  template <class Visit>
  MOE_A2A_DEVICE void for_other_ranks(int i, const Visit& visit) const {
    const int rank = part_.rank(), num_ranks = part_.num_ranks(), num_others = num_ranks - 1;
    int distance = num_others > 0 ? 1 + i % num_others : 0;
    for (int n = 0; n < num_others; ++n) {
      visit(rank + distance < num_ranks ? rank + distance : rank + distance - num_ranks);
      distance = distance < num_others ? distance + 1 : 1;
    }
  }

  // The same for those that have a chunk i in their share. Returns these ranks.
  template <class Visit>
  MOE_A2A_DEVICE RankSet for_other_owners(int i, const Visit& visit) const {
    RankSet owners;
    for_other_ranks(i, [&](int owner) {
      if (chunk(owner, i).count == 0) return;
      owners.insert(owner);
      visit(owner);
    });
    return owners;
  }

  // Writes this rank's elements of chunk i of all other shares to their owners by write(span, target). `place`: the
  // chunk's offset in a landing place.
  template <class Write>
  MOE_A2A_DEVICE void push_chunks(int i, int64_t place, const Write& write) const {
    const uint64_t start = trace_now();
    std::byte* landing = region_.landing.at(part_.half(), part_.rank(), place);
    for_other_owners(i, [&](int owner) { write(chunk(owner, i), args_.context.heap.peer(owner, landing)); });
    record_chunk(part_, block_, collective_kind::kPush, start, i);
  }

  // Reduces chunk i of this rank's share by reduce(element), where `element` is of the dtype.
  template <class Reduce>
  MOE_A2A_DEVICE void reduce_own(int i, const Reduce& reduce) const {
    if (!has_own(i)) return;
    const uint64_t start = trace_now();
    with_element_type(args_.dtype, reduce);
    record_chunk(part_, block_, TraceKind::kReduce, start, i);
  }

  // Calls copy(owner, span) for chunk i of the shares of all other ranks.
  template <class Copy>
  MOE_A2A_DEVICE void take_chunks(int i, const Copy& copy) const {
    const uint64_t start = trace_now();
    for_other_owners(i, [&](int owner) { copy(owner, chunk(owner, i)); });
    record_chunk(part_, block_, collective_kind::kPull, start, i);
  }

  MOE_A2A_DEVICE bool has_own(int i) const { return chunk(part_.rank(), i).count > 0; }
  MOE_A2A_DEVICE Span chunk(int owner, int i) const { return args_.extent.chunk_of(args_.shares, owner, i); }

  MOE_A2A_DEVICE int64_t element_size() const { return size_of(args_.dtype); }
  MOE_A2A_DEVICE const std::byte* x_at(int64_t element) const {
    return args_.x + (element - args_.x_begin) * element_size();
  }
  MOE_A2A_DEVICE std::byte* out_at(int64_t element) const {
    return args_.out + (element - args_.out_begin) * element_size();
  }

  // Where the elements of chunk i lie in a landing place and in `result`.
  MOE_A2A_DEVICE int64_t place_of(int i) const { return i * args_.extent.chunk * element_size(); }

  // `count` elements, by the whole block.
  MOE_A2A_DEVICE void copy(std::byte* target, const std::byte* source, int64_t count) const {
    multicast_bytes(block_, RankSet::only(0), 0, [&](int) { return target; }, source, count * element_size());
  }

  const ShareArgs& args_;
  const Part& part_;
  const CollectiveRegion& region_;
  const Grid& grid_;
  const Block& block_;
};

// The first shot of a call that reduces: every rank sends each other rank its elements of that rank's share.
class ScatterChunks : public ShareChunks {
 public:
  using ShareChunks::ShareChunks;

  MOE_A2A_DEVICE RankSet senders_of(int i) const { return others_with_own(i); }
  MOE_A2A_DEVICE RankSet receivers_of(int i) const { return owners_of(i); }
};

// Elements travel as they are.
class ShareSteps : public ScatterChunks {
 public:
  using ScatterChunks::ScatterChunks;

  MOE_A2A_DEVICE void push(int i) const {
    push_chunks(i, place_of(i),
                [&](const Span& span, std::byte* target) { copy(target, x_at(span.begin), span.count); });
  }

  // Reduces chunk i of this rank's share into out; reduce_for_all() also into `result`, for the others.
  MOE_A2A_DEVICE void reduce(int i) const { reduce_into_out(i, false); }
  MOE_A2A_DEVICE void reduce_for_all(int i) const { reduce_into_out(i, true); }

  // Reads chunk i of the other shares where they were reduced.
  MOE_A2A_DEVICE void pull(int i) const {
    take_chunks(i, [&](int owner, const Span& span) {
      copy(out_at(span.begin), args_.context.heap.peer(owner, result_at(i)), span.count);
    });
  }

 private:
  MOE_A2A_DEVICE void reduce_into_out(int i, bool shows_result) const {
    reduce_own(i, [&](auto element) { reduce_chunk<decltype(element)>(i, shows_result); });
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

  MOE_A2A_DEVICE std::byte* result_at(int i) const { return region_.result.at(part_.half(), place_of(i)); }
};

// The steps of a call that gathers: every rank sends its share, which is x, to all other ranks.
class GatherSteps : public ShareChunks {
 public:
  using ShareChunks::ShareChunks;

  MOE_A2A_DEVICE RankSet senders_of(int i) const { return owners_of(i); }
  MOE_A2A_DEVICE RankSet receivers_of(int i) const { return others_with_own(i); }

  MOE_A2A_DEVICE void give(int i) const {
    if (!has_own(i)) return;
    const uint64_t start = trace_now();
    const Span span = chunk(part_.rank(), i);
    const std::byte* x = x_at(span.begin);
    if (const RankSet others = part_.others(); !others.empty()) {
      std::byte* landing = region_.landing.at(part_.half(), part_.rank(), place_of(i));
      multicast_bytes(
          block_, others, part_.rank(), [&](int r) { return args_.context.heap.peer(r, landing); }, x,
          span.count * element_size());
    }
    if (x != out_at(span.begin)) copy(out_at(span.begin), x, span.count);
    record_chunk(part_, block_, collective_kind::kPush, start, i);
  }
  // Copies chunk i of the other shares into out.
  MOE_A2A_DEVICE void take(int i) const {
    take_chunks(i, [&](int owner, const Span& span) {
      copy(out_at(span.begin), region_.landing.at(part_.half(), owner, place_of(i)), span.count);
    });
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
