// Rows that travel in a line codec: written by their sender, added up by their receiver. Rows of both kinds may meet in
// one sum, so kNone, a row of elements, is a codec here like the others.
//
// The codec and the element type are chosen where a thread's values are stored or loaded, not around the loops: every
// combination of the two as a loop of its own doubled the size of the kernels.
#pragma once

#include "rows/line_codec.h"
#include "rows/row_sum.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// A row to be written, or one that has arrived.
struct CodedRow {
  std::byte* data = nullptr;
  LineCodec codec = LineCodec::kNone;
  DType dtype = DType::kBfloat16;  // of kNone, and to which values are rounded before they are encoded
  int num_values = 0;
};

struct LineVector {
  LineValues value;
};

// Writes kLineValues values of a row from `first` on, a multiple of kLineValues. All threads that share a block of the
// codec call it, those past the end of the row too; what they pass does not matter.
MOE_A2A_RARE void write_values(const Warp& warp, CodedRow row, int first, LineVector values) {
  with_element_type(row.dtype, [&](auto type) {
    using T = decltype(type);
    if (row.codec == LineCodec::kNone) {
      return store_floats(reinterpret_cast<T*>(row.data) + first, row.num_values - first, true, values.value);
    }
    MOE_A2A_UNROLL
    for (int i = 0; i < kLineValues; ++i) {
      values.value[i] = first + i < row.num_values ? to_float(from_float<T>(values.value[i])) : 0.0f;
    }
  });
  with_line_codec(row.codec, [&](auto is) {
    constexpr LineCodec kCodec = decltype(is)::value;
    const LineLayout layout{kCodec, row.num_values};
    const CodedValues<kCodec> coded = encode<kCodec>(warp, values.value);
    if (first < layout.num_blocks() * kLineBlock) store_line(layout, row.data, first, coded);
  });
}

// Writes a step of streamed sums, which begins at value `first`, by one choice of the codec. The row ends with a whole
// vector, as streamed rows do.
template <class T>
MOE_A2A_DEVICE void write_streamed(const Warp& warp, const CodedRow& row, int first, const StreamedSums<T>& sums) {
  const auto for_vectors = [&](int end, const auto& write) {
    MOE_A2A_UNROLL
    for (int v = 0; v < kStreamVectors<T>; ++v) {
      const int begin = first + v * warp.size() * kLineValues;
      if (begin < end) write(begin + warp.rank() * kLineValues, sums[v]);
    }
  };
  if (row.codec == LineCodec::kNone) {
    return for_vectors(row.num_values, [&](int at, const LineValues& values) {
      if (at < row.num_values) store_whole(reinterpret_cast<T*>(row.data) + at, values);
    });
  }
  with_line_codec(row.codec, [&](auto is) {
    constexpr LineCodec kCodec = decltype(is)::value;
    const LineLayout layout{kCodec, row.num_values};
    const int end = static_cast<int>(layout.num_blocks()) * kLineBlock;
    for_vectors(end, [&](int at, const LineValues& values) {
      LineValues rounded;
      MOE_A2A_UNROLL
      for (int i = 0; i < kLineValues; ++i) {
        rounded[i] = at < row.num_values ? to_float(from_float<T>(values[i])) : 0.0f;
      }
      const CodedValues<kCodec> coded = encode<kCodec>(warp, rounded);
      if (at < end) store_line(layout, row.data, at, coded);
    });
  });
}

// Writes the weighted sum of a list of rows; same sum as add_rows().
template <class T, class List>
MOE_A2A_DEVICE void write_sum(const Warp& warp, bool vector_rows, const List& list, const CodedRow& row) {
  const Terms<T, List> terms(list, 0);
  for (int base = 0; base < row.num_values; base += warp.size() * kLineValues) {  // the warp stays together
    const int first = base + warp.rank() * kLineValues, num_left = row.num_values - first;
    LineVector sum = {};
    const auto add = [&](float weight, const LineValues& values) {
      MOE_A2A_UNROLL
      for (int i = 0; i < kLineValues; ++i) sum.value[i] += weight * values[i];
    };
    const bool vectors = vector_rows && num_left >= kLineValues;
    LineValues values;
    LoadedFloats<T> loaded[kRowsInFlight];  // all loads before the first use
    MOE_A2A_UNROLL
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (vectors && terms.held[i].row != nullptr) load_whole(terms.held[i].row + first, loaded[i]);
    }
    MOE_A2A_UNROLL
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (terms.held[i].row == nullptr) continue;
      vectors ? values_of(loaded[i], values) : load_floats(terms.held[i].row + first, num_left, false, values);
      add(terms.held[i].weight, values);
    }
    if (terms.has_rest()) {
      List rest = terms.rest;
      for (Term<T> term = terms.next(rest); term.row != nullptr; term = terms.next(rest)) {
        load_floats(term.row + first, num_left, vectors, values);
        add(term.weight, values);
      }
    }
    write_values(warp, row, first, sum);
  }
}

// ---- received

// Sets of values that a thread loads before it uses the first: 1024 values per warp.
inline constexpr int kCodedSets = kWarpSize == 1 ? 1 : 1024 / kLineValues / kWarpSize;
using CodedSums = LineValues[kCodedSets];

// Calls load(u) for the sets that lie below `end`, then use(u) for the same.
template <class Load, class Use>
MOE_A2A_DEVICE void for_sets(int first, int stride, int end, const Load& load, const Use& use) {
  MOE_A2A_UNROLL
  for (int u = 0; u < kCodedSets; ++u) {
    if (first + u * stride < end) load(u);
  }
  MOE_A2A_UNROLL
  for (int u = 0; u < kCodedSets; ++u) {
    if (first + u * stride < end) use(u);
  }
}

// Adds a row's values, kLineValues per set, the first set from `first` on.
MOE_A2A_DEVICE void add_values(const CodedRow& row, int first, int stride, int end, CodedSums& sums) {
  LineValues values;
  const auto add = [&](int u) {
    MOE_A2A_UNROLL
    for (int i = 0; i < kLineValues; ++i) sums[u][i] += values[i];
  };
  if (row.codec == LineCodec::kNone) {
    return with_element_type(row.dtype, [&](auto type) {
      using T = decltype(type);
      const T* elements = reinterpret_cast<const T*>(row.data);
      if (sizeof(T) == 2 && end % kLineValues == 0) {  // all loads before the first use
        LoadedFloats<T> loaded[kCodedSets];
        return for_sets(
            first, stride, end, [&](int u) { load_whole(elements + first + u * stride, loaded[u]); },
            [&](int u) {
              values_of(loaded[u], values);
              add(u);
            });
      }
      for_sets(
          first, stride, end, [](int) {},
          [&](int u) {
            load_floats(elements + first + u * stride, end - first - u * stride, true, values);
            add(u);
          });
    });
  }
  with_line_codec(row.codec, [&](auto is) {
    constexpr LineCodec kCodec = decltype(is)::value;
    const LineLayout layout{kCodec, row.num_values};
    CodedValues<kCodec> loaded[kCodedSets];
    for_sets(
        first, stride, end, [&](int u) { load_line(layout, row.data, first + u * stride, loaded[u]); },
        [&](int u) {
          values_of(loaded[u], values);
          add(u);
        });
  });
}

// target[i] = sum of the rows' values piece.first + i, for all i of the piece, which is whole blocks of the codec.
// Added in fp32 in the order of the list, whose next() returns a CodedRow, without data past the last. The target has
// elements of `dtype`.
template <class List>
MOE_A2A_DEVICE void add_coded_rows(const Warp& warp, const Piece& piece, bool vector_rows, const List& list,
                                   DType dtype, std::byte* target) {
  const int stride = warp.size() * kLineValues;
  for (int first = piece.first + warp.rank() * kLineValues; first < piece.end; first += kCodedSets * stride) {
    CodedSums sums = {};
    List rest = list;
    for (CodedRow row = rest.next(); row.data != nullptr; row = rest.next()) {
      add_values(row, first, stride, piece.end, sums);
    }
    with_element_type(dtype, [&](auto type) {
      auto* elements = reinterpret_cast<decltype(type)*>(target);
      for_sets(
          first, stride, piece.end, [](int) {},
          [&](int u) {
            const int at = first + u * stride;
            store_floats(elements + (at - piece.first), piece.end - at, vector_rows, sums[u]);
          });
    });
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
