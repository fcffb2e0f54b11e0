// A row in memory: its values and, for float8, four bytes of scales per 128 values after them: one fp32 scale, or four
// scales of a byte. For host and kernels.
#pragma once

#include <cstdint>

#include "arch/arch.h"

namespace moe_a2a {

// Values per four bytes of scales in a float8 row.
inline constexpr int kScaleBlock = 128;
// Scale blocks in a piece, which one warp sends or receives as LL words: with whole rows, a small batch would leave
// most warps idle.
inline constexpr int kPieceBlocks = 4;

// A range of a row's values.
struct Piece {
  int first, end;

  MOE_A2A_HOST_DEVICE int size() const { return end - first; }
};

struct RowLayout {
  int num_values = 0;
  DType dtype = DType::kBfloat16;

  MOE_A2A_HOST_DEVICE constexpr int num_scales() const { return (num_values + kScaleBlock - 1) / kScaleBlock; }
  // Where the scales of a float8 row begin.
  MOE_A2A_HOST_DEVICE constexpr int64_t scales_offset() const { return (num_values + 15) / 16 * 16; }
  // The bytes that travel.
  MOE_A2A_HOST_DEVICE constexpr int64_t num_bytes() const {
    return dtype == DType::kFloat8 ? scales_offset() + int64_t{4} * num_scales()
                                   : static_cast<int64_t>(num_values) * size_of(dtype);
  }
  // The distance between rows of the heap: rows start on 128-byte lines (8 % of the link, measured on H200).
  MOE_A2A_HOST_DEVICE constexpr int64_t stride() const { return (num_bytes() + 127) / 128 * 128; }

  // Pieces are whole scale blocks, so no two share a scale; the last piece of a row may be shorter.
  MOE_A2A_HOST_DEVICE static constexpr int piece_length() { return kPieceBlocks * kScaleBlock; }
  MOE_A2A_HOST_DEVICE constexpr int num_pieces() const { return (num_values + piece_length() - 1) / piece_length(); }
  MOE_A2A_HOST_DEVICE Piece whole() const { return {0, num_values}; }
  // The i-th piece of `length` values.
  MOE_A2A_HOST_DEVICE Piece piece(int i, int length = piece_length()) const {
    const int end = (i + 1) * length;
    return {i * length, end < num_values ? end : num_values};
  }

  // A piece's sizes and offsets; no source addresses.
  MOE_A2A_HOST_DEVICE RowSource part(const Piece& piece) const {
    const int64_t element = size_of(dtype);
    RowSource row{.num_value_bytes = piece.size() * element, .values_offset = piece.first * element};
    if (dtype == DType::kFloat8) {
      row.num_scale_bytes = (piece.size() + kScaleBlock - 1) / kScaleBlock * int64_t{sizeof(float)};
      row.scales_offset = scales_offset() + piece.first / kScaleBlock * int64_t{sizeof(float)};
    }
    return row;
  }
};

// The rows of a tensor whose last dimension is contiguous.
struct Rows {
  const std::byte* data = nullptr;
  int64_t stride = 0;  // bytes between rows

  MOE_A2A_HOST_DEVICE const std::byte* operator[](int64_t row) const { return data + row * stride; }
  MOE_A2A_HOST_DEVICE int64_t address() const { return static_cast<int64_t>(reinterpret_cast<uint64_t>(data)); }
};

// How rows are sent as they are: by bulk copies if their addresses and sizes are multiples of 16 bytes. `scales`: of
// float8 rows.
MOE_A2A_HOST_DEVICE StagedFor staged_for_sending(const RowLayout& layout, const Rows& values, const Rows& scales = {}) {
  const RowSource row = layout.part(layout.whole());
  const int64_t parts =
      values.address() | values.stride | row.num_value_bytes | scales.address() | scales.stride | row.num_scale_bytes;
  return parts % 16 == 0 ? StagedFor::kSending : StagedFor::kStoring;
}

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// Calls f(T{}) with the element type of `dtype`.
template <class F>
MOE_A2A_DEVICE void with_element_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat16:
      return f(Half{});
    case DType::kBfloat16:
      return f(Bfloat16{});
    case DType::kFloat8:
      return;  // float8 rows are moved, never added
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
