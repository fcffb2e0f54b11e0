// The steps of a two-shot all-reduce whose elements travel in a line codec. Contributions are encoded on the way to the
// owner of a share. The owner encodes the reduced share once and sends it to all ranks, which decode it, as it does
// itself: all get the same bits. A rank's contribution to its own share does not travel and stays exact.
#pragma once

#include "collectives/share_steps.h"
#include "rows/line_codec.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

template <LineCodec kCodec>
class CodedSteps : public ScatterChunks {
 public:
  using ScatterChunks::ScatterChunks;

  MOE_A2A_DEVICE void push(int i) const {
    push_chunks(i, line_of(i), [&](const Span& span, std::byte* line) {
      with_element_type(args_.dtype, [&](auto element) { encode_chunk<decltype(element)>(span, line); });
    });
  }
  MOE_A2A_DEVICE void reduce(int i) const {
    reduce_own(i, [&](auto element) { reduce_chunk<decltype(element)>(i); });
  }
  MOE_A2A_DEVICE void take(int i) const {
    take_chunks(i, [&](int owner, const Span& span) {
      with_element_type(args_.dtype, [&](auto element) { decode_chunk<decltype(element)>(span, result_of(owner, i)); });
    });
  }

 private:
  // Values per thread and step: with 16, the stores of a warp fill whole lines.
  static constexpr int kValues = kBlockThreads > 1 ? 16 : kLineValues;
  // Steps that a thread loads before it uses the first.
  static constexpr int kAhead = kBlockThreads > 1 ? 2 : 1;
  using Values = float[kValues];
  using Coded = CodedValues<kCodec, kValues>;

  // Calls load(first, u) for kSets sets of this thread's values of a chunk, then use(first, u) for the same sets, while
  // whole ones remain; then rest(first) for the remainder, in whole blocks: `first` may be past the end.
  template <int kSets, class Load, class Use, class Rest>
  MOE_A2A_DEVICE void for_values(int64_t count, bool vectors, const Load& load, const Use& use,
                                 const Rest& rest) const {
    const int64_t padded = LineLayout{kCodec, count}.num_blocks() * kLineBlock, stride = block_.size() * kValues;
    int64_t first = block_.rank() * kValues;
    const int64_t end = count - block_.size() * kValues + first;  // all threads of the block leave together
    for (; vectors && first + (kSets - 1) * stride <= end; first += kSets * stride) {
      MOE_A2A_UNROLL
      for (int u = 0; u < kSets; ++u) load(first + u * stride, u);
      MOE_A2A_UNROLL
      for (int u = 0; u < kSets; ++u) use(first + u * stride, u);
    }
    for (; first - block_.rank() * kValues < padded; first += stride) rest(first);
  }

  template <class T>
  MOE_A2A_DEVICE void encode_chunk(const Span& span, std::byte* line) const {
    const LineLayout layout{kCodec, span.count};
    const T* x = reinterpret_cast<const T*>(x_at(span.begin));
    const bool vectors = are_vectors(x, x);
    LoadedFloats<T, kValues> loaded[kAhead];
    const auto send = [&](int64_t first, const Values& values) {
      const Coded coded = encode<kCodec>(block_.warp(), values);
      if (is_inside(span, first)) store_line(layout, line, first, coded);
    };
    for_values<kAhead>(
        span.count, vectors, [&](int64_t first, int u) { load_whole(x + first, loaded[u]); },
        [&](int64_t first, int u) {
          Values values;
          values_of(loaded[u], values);
          send(first, values);
        },
        [&](int64_t first) {
          Values values;
          load_floats(x + first, span.count - first, vectors, values);
          send(first, values);
        });
  }

  template <class T>
  MOE_A2A_DEVICE void reduce_chunk(int i) const {
    const Span span = chunk(part_.rank(), i);
    const T* x = reinterpret_cast<const T*>(x_at(span.begin));
    const bool vectors = are_vectors(x, out_at(span.begin));
    LoadedFloats<T, kValues> own;
    Coded landed[kRowsInFlight];  // of the first ranks: all loads before the first use
    const auto load = [&](int64_t first, int) {
      load_whole(x + first, own);
      MOE_A2A_UNROLL
      for (int r = 0; r < kRowsInFlight; ++r) {
        if (r < part_.num_ranks() && r != part_.rank()) load_landed(span, i, r, first, landed[r]);
      }
    };
    const auto use = [&](int64_t first, int) {
      Values merged, values;
      MOE_A2A_UNROLL
      for (int r = 0; r < kRowsInFlight; ++r) {
        if (r >= part_.num_ranks()) break;
        r == part_.rank() ? values_of(own, values) : values_of(landed[r], values);
        add(r, merged, values);
      }
      MOE_A2A_ROLLED
      for (int r = kRowsInFlight; r < part_.num_ranks(); ++r) {
        if (r != part_.rank()) load_landed(span, i, r, first, landed[0]);
        r == part_.rank() ? values_of(own, values) : values_of(landed[0], values);
        add(r, merged, values);
      }
      finish<T>(span, i, first, vectors, merged);
    };
    for_values<1>(span.count, vectors, load, use, [&](int64_t first) {
      Values merged = {}, values;
      for (int r = 0; is_inside(span, first) && r < part_.num_ranks(); ++r) {
        if (r == part_.rank()) {
          load_floats(x + first, span.count - first, vectors, values);
        } else {
          load_landed(span, i, r, first, landed[0]);
          values_of(landed[0], values);
        }
        add(r, merged, values);
      }
      finish<T>(span, i, first, vectors, merged);
    });
  }

  MOE_A2A_DEVICE void load_landed(const Span& span, int i, int r, int64_t first, Coded& coded) const {
    load_line({kCodec, span.count}, region_.landing.at(part_.half(), r, line_of(i)), first, coded);
  }
  MOE_A2A_DEVICE void add(int r, Values& merged, const Values& values) const {
    if (r > 0) return merge(args_.op, merged, values);
    MOE_A2A_UNROLL
    for (int v = 0; v < kValues; ++v) merged[v] = values[v];
  }
  // Sends the merged values to all ranks, and decodes them into out.
  template <class T>
  MOE_A2A_DEVICE void finish(const Span& span, int i, int64_t first, bool vectors, Values& merged) const {
    divide(merged, divisor_of(args_.op, part_.num_ranks()));
    const Coded coded = encode<kCodec>(block_.warp(), merged);
    if (is_inside(span, first)) {
      std::byte* result = result_of(part_.rank(), i);
      for_other_ranks(
          i, [&](int r) { store_line({kCodec, span.count}, args_.context.heap.peer(r, result), first, coded); });
    }
    values_of(coded, merged);
    store_floats(reinterpret_cast<T*>(out_at(span.begin)) + first, span.count - first, vectors, merged);
  }

  template <class T>
  MOE_A2A_DEVICE void decode_chunk(const Span& span, const std::byte* line) const {
    const LineLayout layout{kCodec, span.count};
    T* out = reinterpret_cast<T*>(out_at(span.begin));
    const bool vectors = are_vectors(out, out);
    Coded coded[kAhead];
    const auto load = [&](int64_t first, int u) { load_line(layout, line, first, coded[u]); };
    const auto use = [&](int64_t first, int u) {
      Values values;
      values_of(coded[u], values);
      store_whole(out + first, values);
    };
    for_values<kAhead>(span.count, vectors, load, use, [&](int64_t first) {
      if (!is_inside(span, first)) return;
      load(first, 0);
      Values values;
      values_of(coded[0], values);
      store_floats(out + first, span.count - first, vectors, values);
    });
  }

  // Whether the line has these values; those after the last element, up to the end of its block, are zeros.
  MOE_A2A_DEVICE static bool is_inside(const Span& span, int64_t first) {
    return first < LineLayout{kCodec, span.count}.num_blocks() * kLineBlock;
  }

  // Where the line of chunk i lies in a landing place.
  MOE_A2A_DEVICE int64_t line_of(int i) const { return i * LineLayout{kCodec, args_.extent.chunk}.stride(); }
  // The reduced shares arrive in the second half of their owners' landing places.
  MOE_A2A_DEVICE std::byte* result_of(int owner, int i) const {
    return region_.landing.at(part_.half(), owner, region_.landing.stride[1] / 2 + line_of(i));
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
