// Line codecs: values in blocks of 32 that share one scale, smaller on the wire than 16 bits each.
//
//   codec  payload per block                                                scale                            bytes
//   fp8    32 e4m3                                                          max |x| / largest e4m3           34
//   q8     32 bytes                                                         -(x of largest magnitude) / 128  34
//   q6     16 bytes: low 4 bits of two values each; 8 bytes: high 2 of four     "                   / 32     26
//   q4     16 bytes of two values each                                          "                   / 8      18
//
// A line is the payload of all its blocks (q6: all low bits, then all high bits), then their scales, two bytes each.
// Integers are stored with 2^(bits - 1) added. The value of largest magnitude becomes -2^(bits - 1), so the whole range
// is used; a value of opposite sign above 2^(bits - 1) - 1/2 steps is clipped.
//
// The scale is a bfloat16, rounded away from zero, so it covers the range of float32. A value is q * scale, exact in
// fp32. Its error is at most half a step (|scale|), one step if clipped; fp8: 1/16 of its magnitude, or 2^-10 scales. A
// block whose largest magnitude is below 2^-116 becomes zeros; a block with an infinity or a NaN becomes 32 NaNs.
#pragma once

#include <bit>
#include <cstring>
#include <limits>

#include "rows/row_layout.h"

namespace moe_a2a {

enum class LineCodec : uint8_t { kNone, kFp8, kQ8, kQ6, kQ4 };

// Values per scale.
inline constexpr int kLineBlock = 32;

// Where the parts of a line of `num_values` are.
struct LineLayout {
  LineCodec codec = LineCodec::kNone;
  int64_t num_values = 0;

  MOE_A2A_HOST_DEVICE constexpr int bits() const {
    return codec == LineCodec::kQ6 ? 6 : codec == LineCodec::kQ4 ? 4 : 8;
  }
  MOE_A2A_HOST_DEVICE constexpr int64_t num_blocks() const { return (num_values + kLineBlock - 1) / kLineBlock; }
  // Of q6's high bits.
  MOE_A2A_HOST_DEVICE constexpr int64_t high_offset() const { return num_blocks() * kLineBlock / 2; }
  MOE_A2A_HOST_DEVICE constexpr int64_t scales_offset() const { return num_blocks() * kLineBlock * bits() / 8; }
  MOE_A2A_HOST_DEVICE constexpr int64_t num_bytes() const { return scales_offset() + num_blocks() * 2; }
  // The distance between lines.
  MOE_A2A_HOST_DEVICE constexpr int64_t stride() const { return (num_bytes() + 127) / 128 * 128; }
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// Threads that share a block, and the values that each of them holds.
inline constexpr int kLineLanes = kWarpSize == 1 ? 1 : 4;
inline constexpr int kLineValues = kLineBlock / kLineLanes;
using LineValues = float[kLineValues];

// Calls f(CodecIs<codec>{}); not for kNone.
template <LineCodec kCodec>
struct CodecIs {
  static constexpr LineCodec value = kCodec;
};
template <class F>
MOE_A2A_DEVICE void with_line_codec(LineCodec codec, F f) {
  switch (codec) {
    case LineCodec::kFp8:
      return f(CodecIs<LineCodec::kFp8>{});
    case LineCodec::kQ8:
      return f(CodecIs<LineCodec::kQ8>{});
    case LineCodec::kQ6:
      return f(CodecIs<LineCodec::kQ6>{});
    case LineCodec::kQ4:
      return f(CodecIs<LineCodec::kQ4>{});
    case LineCodec::kNone:
      return;
  }
}

struct LineScale {
  Bfloat16 step;
  float inverse;  // 0 for blocks that become zeros or NaNs
};

// Minus the lowest integer of a codec; for fp8, its largest value.
template <LineCodec kCodec>
MOE_A2A_DEVICE constexpr float line_range() {
  return kCodec == LineCodec::kFp8  ? kFloat8Max
         : kCodec == LineCodec::kQ8 ? 128.0f
         : kCodec == LineCodec::kQ6 ? 32.0f
                                    : 8.0f;
}

// The scale of the block that this thread and its neighbours hold.
template <LineCodec kCodec>
MOE_A2A_DEVICE LineScale line_scale(const Warp& warp, const LineValues& values) {
  constexpr float kInfinity = std::bit_cast<float>(0x7f800000u);
  // The bits of positive floats are ordered like the floats, with the NaNs above infinity.
  int32_t most = 0, least = 0;
  MOE_A2A_UNROLL
  for (int i = 0; i < kLineValues; ++i) {
    const auto bits = std::bit_cast<int32_t>(values[i]);
    const int32_t negated = bits ^ std::numeric_limits<int32_t>::min();
    most = bits > most ? bits : most;
    least = negated > least ? negated : least;
  }
  const bool is_odd = (most > least ? most : least) >= std::bit_cast<int32_t>(kInfinity);
  const float above = warp.template max_of_neighbours<kLineLanes>(is_odd ? kInfinity : std::bit_cast<float>(most));
  const float below = warp.template max_of_neighbours<kLineLanes>(is_odd ? 0.0f : std::bit_cast<float>(least));
  const float magnitude = larger(above, below);
  if (magnitude == kInfinity) return {{0x7fc0}, 0.0f};
  if (magnitude < 0x1p-116f) return {{0}, 0.0f};
  const uint32_t step = (std::bit_cast<uint32_t>(magnitude * (1.0f / line_range<kCodec>())) + 0xffffu) >> 16;
  const bool is_negative = kCodec != LineCodec::kFp8 && above >= below;
  const Bfloat16 scale{static_cast<uint16_t>(step | (is_negative ? 0x8000u : 0u))};
  return {scale, 1.0f / to_float(scale)};
}

// Rounds to the nearest integer, ties to even; |value| < 2^22.
MOE_A2A_DEVICE int nearest_int(float value) {
  return static_cast<int>(std::bit_cast<uint32_t>(value + 0x1.8p23f) - 0x4b400000u);
}

// The code of a value that has been multiplied by the inverse scale. Clips values out of range, and NaNs.
template <LineCodec kCodec>
MOE_A2A_DEVICE uint8_t line_code(float scaled) {
  constexpr float kRange = line_range<kCodec>();
  constexpr float kMost = kCodec == LineCodec::kFp8 ? kRange : kRange - 1;
  const float raised = scaled > -kRange ? scaled : -kRange;
  const float clamped = raised < kMost ? raised : kMost;
  if constexpr (kCodec == LineCodec::kFp8) {
    return from_float<Float8>(clamped).bits;
  } else {
    return static_cast<uint8_t>(nearest_int(clamped) + static_cast<int>(kRange));
  }
}
template <LineCodec kCodec>
MOE_A2A_DEVICE float line_value(uint32_t code) {
  if constexpr (kCodec == LineCodec::kFp8) {
    return to_float(Float8{static_cast<uint8_t>(code)});
  } else {
    return std::bit_cast<float>(0x4b000000u | code) - (0x1p23f + line_range<kCodec>());  // faster than a conversion
  }
}

// Encodes this thread's values of a line, from value `first` on, a multiple of kLineValues. All threads that share the
// block call it. On return `values` are what values_of() will give. `is_stored`: false past the end.
template <LineCodec kCodec>
MOE_A2A_DEVICE void encode_line(const Warp& warp, const LineLayout& layout, std::byte* line, int64_t first,
                                bool is_stored, LineValues& values) {
  const LineScale scale = line_scale<kCodec>(warp, values);
  const float step = to_float(scale.step);
  uint8_t code[kLineValues];
  MOE_A2A_UNROLL
  for (int i = 0; i < kLineValues; ++i) code[i] = line_code<kCodec>(values[i] * scale.inverse);
  MOE_A2A_UNROLL
  for (int i = 0; i < kLineValues; ++i) values[i] = line_value<kCodec>(code[i]) * step;
  if (!is_stored) return;
  auto* payload = reinterpret_cast<uint8_t*>(line);
  if constexpr (kCodec == LineCodec::kFp8 || kCodec == LineCodec::kQ8) {
    store_values(payload + first, code);
  } else {
    uint8_t pairs[kLineValues / 2];
    MOE_A2A_UNROLL
    for (int i = 0; i < kLineValues / 2; ++i) {
      pairs[i] = static_cast<uint8_t>((code[2 * i] & 15) | code[2 * i + 1] << 4);
    }
    store_values(payload + first / 2, pairs);
    if constexpr (kCodec == LineCodec::kQ6) {
      uint8_t high[kLineValues / 4];
      MOE_A2A_UNROLL
      for (int i = 0; i < kLineValues / 4; ++i) {
        high[i] = static_cast<uint8_t>(code[4 * i] >> 4 | code[4 * i + 1] >> 4 << 2 | code[4 * i + 2] >> 4 << 4 |
                                       code[4 * i + 3] >> 4 << 6);
      }
      store_values(payload + layout.high_offset() + first / 4, high);
    }
  }
  if (first % kLineBlock == 0) {
    reinterpret_cast<Bfloat16*>(line + layout.scales_offset())[first / kLineBlock] = scale.step;
  }
}

// A thread's values of a line as they lie in memory, so that several can be in flight at once.
template <LineCodec kCodec>
struct LoadedLine {
  static constexpr bool kHasBytes = kCodec == LineCodec::kFp8 || kCodec == LineCodec::kQ8;
  uint32_t low[kHasBytes ? kLineValues / 4 : kLineValues / 8];
  uint16_t high[kLineValues / 8];  // q6
  Bfloat16 step;
};

template <LineCodec kCodec>
MOE_A2A_DEVICE void load_line(const LineLayout& layout, const std::byte* line, int64_t first,
                              LoadedLine<kCodec>& loaded) {
  const std::byte* low = line + (LoadedLine<kCodec>::kHasBytes ? first : first / 2);
  load_values(loaded.low, reinterpret_cast<const uint32_t*>(low));
  if constexpr (kCodec == LineCodec::kQ6) {
    load_values(loaded.high, reinterpret_cast<const uint16_t*>(line + layout.high_offset() + first / 4));
  }
  loaded.step = reinterpret_cast<const Bfloat16*>(line + layout.scales_offset())[first / kLineBlock];
}

template <LineCodec kCodec>
MOE_A2A_DEVICE void values_of(const LoadedLine<kCodec>& loaded, LineValues& values) {
  const float step = to_float(loaded.step);
  uint8_t low[sizeof(loaded.low)], high[sizeof(loaded.high)];
  memcpy(low, loaded.low, sizeof(low));
  if constexpr (kCodec == LineCodec::kQ6) memcpy(high, loaded.high, sizeof(high));
  MOE_A2A_UNROLL
  for (int i = 0; i < kLineValues; ++i) {
    uint32_t code = low[LoadedLine<kCodec>::kHasBytes ? i : i / 2];
    if constexpr (!LoadedLine<kCodec>::kHasBytes) code = i % 2 == 0 ? code & 15u : code >> 4;
    if constexpr (kCodec == LineCodec::kQ6) code |= (high[i / 4] >> i % 4 * 2 & 3u) << 4;
    values[i] = line_value<kCodec>(code) * step;
  }
}

// A thread's values of a row of elements, in whole vectors.
template <class T>
struct LoadedFloats {
  static constexpr int kVector = kLineValues < kLaneElements<T> ? kLineValues : kLaneElements<T>;
  LoadedLane<T> lane[kLineValues / kVector];
};

template <class T>
MOE_A2A_DEVICE void load_whole(const T* source, LoadedFloats<T>& loaded) {
  MOE_A2A_UNROLL
  for (int v = 0; v < kLineValues; v += loaded.kVector) load_lane(loaded.lane[v / loaded.kVector], source + v);
}
template <class T>
MOE_A2A_DEVICE void values_of(const LoadedFloats<T>& loaded, LineValues& values) {
  MOE_A2A_UNROLL
  for (int i = 0; i < kLineValues; ++i) values[i] = value_of(loaded.lane[i / loaded.kVector], i % loaded.kVector);
}

// Between a thread's values and a row of elements, `rest` of which remain from there on; values past the end are 0.
template <class T>
MOE_A2A_DEVICE void load_floats(const T* source, int64_t rest, bool vectors, LineValues& values) {
  if (vectors && rest >= kLineValues) {
    LoadedFloats<T> loaded;
    load_whole(source, loaded);
    values_of(loaded, values);
  } else {
    MOE_A2A_UNROLL
    for (int i = 0; i < kLineValues; ++i) values[i] = i < rest ? to_float(source[i]) : 0.0f;
  }
}
template <class T>
MOE_A2A_DEVICE void store_floats(T* target, int64_t rest, bool vectors, const LineValues& values) {
  constexpr int kVector = kLineValues < kLaneElements<T> ? kLineValues : kLaneElements<T>;
  if (vectors && rest >= kLineValues) {
    MOE_A2A_UNROLL
    for (int v = 0; v < kLineValues; v += kVector) {
      T elements[kVector];
      MOE_A2A_UNROLL
      for (int i = 0; i < kVector; ++i) elements[i] = from_float<T>(values[v + i]);
      store_values(target + v, elements);
    }
  } else {
    MOE_A2A_UNROLL
    for (int i = 0; i < kLineValues; ++i) {
      if (i < rest) target[i] = from_float<T>(values[i]);
    }
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
