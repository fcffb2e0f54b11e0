// The steps of a two-shot all-reduce whose elements travel in a line codec. Contributions are encoded on the way to the
// owner of a share. The owner encodes the reduced share once for all ranks, itself included, so all get the same bits.
// A rank's contribution to its own share does not travel and stays exact.
#pragma once

#include "collectives/share_steps.h"
#include "rows/line_codec.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

template <LineCodec kCodec>
class CodedSteps : public ShareChunks {
 public:
  using ShareChunks::ShareChunks;

  MOE_A2A_DEVICE bool push(int i) const {
    return push_chunks(i, place_of(i), [&](const Span& span, std::byte* line) {
      with_element_type(args_.dtype, [&](auto element) { encode_chunk<decltype(element)>(span, line); });
    });
  }
  MOE_A2A_DEVICE bool reduce(int i) const {
    return reduce_own(i, true, [&](auto element) { reduce_chunk<decltype(element)>(i); });
  }
  MOE_A2A_DEVICE bool pull(int i) const {
    return pull_chunks(i, place_of(i), [&](const Span& span, const std::byte* line) {
      with_element_type(args_.dtype, [&](auto element) { decode_chunk<decltype(element)>(span, line); });
    });
  }

 private:
  // Sets of values that a thread loads before it uses the first; with fewer, calls are bound by load latency. A
  // reduction has fewer registers to spare.
  static constexpr int kAhead = kBlockThreads > 1 ? 4 : 1, kReducedAhead = kBlockThreads > 1 ? 2 : 1;

  // Calls load(first, u) for kSets sets of this thread's values of a chunk, then use(first, u) for the same sets, while
  // whole ones remain; then rest(first) for the remainder, in whole blocks: `first` may be past the end.
  template <int kSets, class Load, class Use, class Rest>
  MOE_A2A_DEVICE void for_values(int64_t count, bool vectors, const Load& load, const Use& use,
                                 const Rest& rest) const {
    const int64_t padded = LineLayout{kCodec, count}.num_blocks() * kLineBlock, stride = block_.size() * kLineValues;
    int64_t first = block_.rank() * kLineValues;
    const int64_t end = count - block_.size() * kLineValues + first;  // all threads of the block leave together
    for (; vectors && first + (kSets - 1) * stride <= end; first += kSets * stride) {
      MOE_A2A_UNROLL
      for (int u = 0; u < kSets; ++u) load(first + u * stride, u);
      MOE_A2A_UNROLL
      for (int u = 0; u < kSets; ++u) use(first + u * stride, u);
    }
    for (; first - block_.rank() * kLineValues < padded; first += stride) rest(first);
  }

  template <class T>
  MOE_A2A_DEVICE void encode_chunk(const Span& span, std::byte* line) const {
    const LineLayout layout{kCodec, span.count};
    const T* x = reinterpret_cast<const T*>(x_at(span.begin));
    const bool vectors = are_vectors(x, x);
    LoadedFloats<T> loaded[kAhead];
    const auto encode = [&](int64_t first, LineValues& values) {
      encode_line<kCodec>(block_.warp(), layout, line, first, is_inside(span, first), values);
    };
    for_values<kAhead>(
        span.count, vectors, [&](int64_t first, int u) { load_whole(x + first, loaded[u]); },
        [&](int64_t first, int u) {
          LineValues values;
          values_of(loaded[u], values);
          encode(first, values);
        },
        [&](int64_t first) {
          LineValues values;
          load_floats(x + first, span.count - first, vectors, values);
          encode(first, values);
        });
  }

  template <class T>
  MOE_A2A_DEVICE void reduce_chunk(int i) const {
    const Span span = chunk(part_.rank(), i);
    const LineLayout layout{kCodec, span.count};
    const T* x = reinterpret_cast<const T*>(x_at(span.begin));
    T* out = reinterpret_cast<T*>(out_at(span.begin));
    const bool vectors = are_vectors(x, out);
    const auto landed = [&](int r) { return region_.landing.at(part_.half(), r, place_of(i)); };
    const auto finish = [&](int64_t first, LineValues& merged) {
      divide(merged, divisor_of(args_.op, part_.num_ranks()));
      encode_line<kCodec>(block_.warp(), layout, result_at(i), first, is_inside(span, first), merged);
      store_floats(out + first, span.count - first, vectors, merged);
    };
    const auto add = [&](int r, LineValues& merged, const LineValues& values) {
      if (r > 0) return merge(args_.op, merged, values);
      MOE_A2A_UNROLL
      for (int v = 0; v < kLineValues; ++v) merged[v] = values[v];
    };
    LoadedFloats<T> own[kReducedAhead];
    LoadedLine<kCodec> next[kReducedAhead];  // of the first other rank
    const int first_other = part_.rank() == 0 ? 1 : 0;
    const auto load = [&](int64_t first, int u) {
      load_whole(x + first, own[u]);
      if (part_.num_ranks() > 1) load_line(layout, landed(first_other), first, next[u]);
    };
    const auto use = [&](int64_t first, int u) {
      LineValues merged, values;
      for (int r = 0; r < part_.num_ranks(); ++r) {
        if (r == part_.rank()) {
          values_of(own[u], values);
        } else {
          if (r != first_other) load_line(layout, landed(r), first, next[u]);
          values_of(next[u], values);
        }
        add(r, merged, values);
      }
      finish(first, merged);
    };
    for_values<kReducedAhead>(span.count, vectors, load, use, [&](int64_t first) {
      LineValues merged = {}, values;
      for (int r = 0; is_inside(span, first) && r < part_.num_ranks(); ++r) {
        if (r == part_.rank()) {
          load_floats(x + first, span.count - first, vectors, values);
        } else {
          load_line(layout, landed(r), first, next[0]);
          values_of(next[0], values);
        }
        add(r, merged, values);
      }
      finish(first, merged);
    });
  }

  template <class T>
  MOE_A2A_DEVICE void decode_chunk(const Span& span, const std::byte* line) const {
    const LineLayout layout{kCodec, span.count};
    T* out = reinterpret_cast<T*>(out_at(span.begin));
    const bool vectors = are_vectors(out, out);
    LoadedLine<kCodec> loaded[kAhead];
    const auto load = [&](int64_t first, int u) { load_line(layout, line, first, loaded[u]); };
    const auto use = [&](int64_t first, int u) {
      LineValues values;
      values_of(loaded[u], values);
      store_floats(out + first, span.count - first, vectors, values);
    };
    for_values<kAhead>(span.count, vectors, load, use, [&](int64_t first) {
      if (!is_inside(span, first)) return;
      load(first, 0);
      use(first, 0);
    });
  }

  // Whether the line has these values; those after the last element, up to the end of its block, are zeros.
  MOE_A2A_DEVICE static bool is_inside(const Span& span, int64_t first) {
    return first < LineLayout{kCodec, span.count}.num_blocks() * kLineBlock;
  }

  // Where the line of chunk i lies in a landing place and in `result`.
  MOE_A2A_DEVICE int64_t place_of(int i) const { return i * LineLayout{kCodec, args_.extent.chunk}.stride(); }
  MOE_A2A_DEVICE std::byte* result_at(int i) const { return region_.result.at(part_.half(), place_of(i)); }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
