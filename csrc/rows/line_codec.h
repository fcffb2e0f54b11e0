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
  // Where q6's high bits begin.
  MOE_A2A_HOST_DEVICE constexpr int64_t high_offset() const { return num_blocks() * kLineBlock / 2; }
  MOE_A2A_HOST_DEVICE constexpr int64_t scales_offset() const { return num_blocks() * kLineBlock * bits() / 8; }
  MOE_A2A_HOST_DEVICE constexpr int64_t num_bytes() const { return scales_offset() + num_blocks() * 2; }
  // The distance between lines.
  MOE_A2A_HOST_DEVICE constexpr int64_t stride() const { return (num_bytes() + 127) / 128 * 128; }
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// The values that a thread holds: of a block that it shares with its neighbours, or on the CPU a whole one. Functions
// below also take twice as many.
inline constexpr int kLineValues = kWarpSize == 1 ? kLineBlock : kLineBlock / 4;
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

// A thread's values of a line as they lie in memory: several can be in flight at once, and one can go to several ranks.
template <LineCodec kCodec, int kValues = kLineValues>
struct CodedValues {
  static constexpr int kBits = LineLayout{kCodec}.bits(), kLowBits = kBits == 8 ? 8 : 4;
  uint32_t low[kValues * kLowBits / 32];
  uint16_t high[kValues / 8];  // q6
  Bfloat16 step;
};

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
template <LineCodec kCodec, int kValues>
MOE_A2A_DEVICE LineScale line_scale(const Warp& warp, const float (&values)[kValues]) {
  // As integers, bits order positive floats by value; as unsigned integers, negative floats by magnitude.
  int32_t most = 0;
  uint32_t least = 0;
  MOE_A2A_UNROLL
  for (int i = 0; i < kValues; ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]);
    most = static_cast<int32_t>(bits) > most ? static_cast<int32_t>(bits) : most;
    least = bits > least ? bits : least;
  }
  // The bits of the magnitude, then 1 if the value is positive. NaNs are above infinity.
  const uint32_t positive = static_cast<uint32_t>(most) << 1 | 1, negative = least << 1;
  const uint32_t key = warp.template max_of_neighbours<kLineBlock / kValues>(positive > negative ? positive : negative);
  const float magnitude = std::bit_cast<float>(key >> 1);
  const bool is_odd = key >= 0x7f800000u << 1, is_zero = magnitude < 0x1p-116f;
  const uint32_t step = (std::bit_cast<uint32_t>(magnitude * (1.0f / line_range<kCodec>())) + 0xffffu) >> 16;
  const uint32_t sign = kCodec == LineCodec::kFp8 ? 0 : (key & 1) << 15;
  const Bfloat16 scale{static_cast<uint16_t>(is_odd ? 0x7fc0u : is_zero ? 0u : step | sign)};
  return {scale, is_odd || is_zero ? 0.0f : 1.0f / to_float(scale)};
}

// The integer of a value that has been multiplied by the inverse scale, plus kLineBias: rounded to nearest, ties to
// even, since integers are the steps between floats of this size. Clips values that are too large, and NaNs.
inline constexpr uint32_t kLineBias = 0x4b400000u;
template <LineCodec kCodec>
MOE_A2A_DEVICE uint32_t line_integer(float scaled) {
  constexpr float kRange = line_range<kCodec>();
  const float clipped = scaled < kRange - 1 ? scaled : kRange - 1;
  return std::bit_cast<uint32_t>(clipped + (0x1.8p23f + kRange));
}

// Words of kBits per code, the first one lowest. `bias`: what each code has in excess.
template <int kBits, int kCodes, int kWords>
MOE_A2A_DEVICE void pack(const uint32_t (&codes)[kCodes], uint32_t bias, uint32_t (&words)[kWords]) {
  constexpr int kPerWord = kCodes / kWords;
  MOE_A2A_UNROLL
  for (int w = 0; w < kWords; ++w) {
    uint32_t word = 0, excess = 0;
    MOE_A2A_UNROLL
    for (int i = kPerWord - 1; i >= 0; --i) {
      word = (word << kBits) + codes[w * kPerWord + i];
      excess = (excess << kBits) + bias;
    }
    words[w] = word - excess;
  }
}

// Packs the codes that line_integer() returned.
template <LineCodec kCodec, int kValues>
MOE_A2A_DEVICE void pack_integers(const uint32_t (&codes)[kValues], CodedValues<kCodec, kValues>& coded) {
  if constexpr (kCodec == LineCodec::kQ6) {
    uint32_t low[kValues], high[kValues], words[kValues / 8];
    MOE_A2A_UNROLL
    for (int i = 0; i < kValues; ++i) {
      low[i] = codes[i] & 15;
      high[i] = codes[i] >> 4 & 3;
    }
    pack<4>(low, 0, coded.low);
    pack<2>(high, 0, words);
    MOE_A2A_UNROLL
    for (int w = 0; w < kValues / 8; ++w) coded.high[w] = static_cast<uint16_t>(words[w]);
  } else {
    pack<CodedValues<kCodec, kValues>::kBits>(codes, kLineBias, coded.low);
  }
}

// Encodes this thread's values. All threads that share the block call it.
template <LineCodec kCodec, int kValues>
MOE_A2A_DEVICE CodedValues<kCodec, kValues> encode(const Warp& warp, const float (&values)[kValues]) {
  const LineScale scale = line_scale<kCodec>(warp, values);
  CodedValues<kCodec, kValues> coded;
  coded.step = scale.step;
  if constexpr (kCodec == LineCodec::kFp8) {
    // One at a time: where nvcc 13.0 packs pairs into a word and values_of() unpacks it, it takes byte 0 for byte 2.
    uint32_t codes[kValues];
    MOE_A2A_UNROLL
    for (int i = 0; i < kValues; ++i) codes[i] = from_float<Float8>(values[i] * scale.inverse).bits;
    pack<8>(codes, 0, coded.low);
  } else {
    uint32_t codes[kValues];
    MOE_A2A_UNROLL
    for (int i = 0; i < kValues; ++i) codes[i] = line_integer<kCodec>(values[i] * scale.inverse);
    pack_integers(codes, coded);
  }
  return coded;
}

// The integer of a code, which is byte `b` of a word, by way of the float 2^15 + code: faster than a conversion.
template <LineCodec kCodec>
MOE_A2A_DEVICE float line_value(uint32_t word, int b) {
  return std::bit_cast<float>((word >> (8 * b) & 0xffu) << 8 | 0x47000000u) - (0x1p15f + line_range<kCodec>());
}

template <LineCodec kCodec, int kValues>
MOE_A2A_DEVICE void values_of(const CodedValues<kCodec, kValues>& coded, float (&values)[kValues]) {
  const float step = to_float(coded.step);
  MOE_A2A_UNROLL
  for (int i = 0; coded.kBits == 8 && i < kValues; ++i) {
    const uint32_t word = coded.low[i / 4];
    const float value = kCodec == LineCodec::kFp8 ? to_float(Float8{static_cast<uint8_t>(word >> (i % 4 * 8))})
                                                  : line_value<kCodec>(word, i % 4);
    values[i] = value * step;
  }
  MOE_A2A_UNROLL
  for (int w = 0; coded.kBits < 8 && w < kValues / 8; ++w) {
    uint32_t even = coded.low[w] & 0x0f0f0f0fu, odd = coded.low[w] >> 4 & 0x0f0f0f0fu;
    if constexpr (kCodec == LineCodec::kQ6) {
      const uint32_t apart = (coded.high[w] | uint32_t{coded.high[w]} << 8) & 0x00ff00ffu;
      const uint32_t pairs = (apart | apart << 4) & 0x0f0f0f0fu;  // two bits of an even value, two of an odd one
      even |= (pairs & 0x03030303u) << 4;
      odd |= (pairs & 0x0c0c0c0cu) << 2;
    }
    MOE_A2A_UNROLL
    for (int b = 0; b < 4; ++b) {
      values[8 * w + 2 * b] = line_value<kCodec>(even, b) * step;
      values[8 * w + 2 * b + 1] = line_value<kCodec>(odd, b) * step;
    }
  }
}

// Between a thread's values and a line, from value `first` on, a multiple of kValues.
template <LineCodec kCodec, int kValues>
MOE_A2A_DEVICE void store_line(const LineLayout& layout, std::byte* line, int64_t first,
                               const CodedValues<kCodec, kValues>& coded) {
  store_values(reinterpret_cast<uint32_t*>(line + first * coded.kLowBits / 8), coded.low);
  if constexpr (kCodec == LineCodec::kQ6) {
    store_values(reinterpret_cast<uint16_t*>(line + layout.high_offset() + first / 4), coded.high);
  }
  if (first % kLineBlock == 0) {
    reinterpret_cast<Bfloat16*>(line + layout.scales_offset())[first / kLineBlock] = coded.step;
  }
}
template <LineCodec kCodec, int kValues>
MOE_A2A_DEVICE void load_line(const LineLayout& layout, const std::byte* line, int64_t first,
                              CodedValues<kCodec, kValues>& coded) {
  load_values(coded.low, reinterpret_cast<const uint32_t*>(line + first * coded.kLowBits / 8));
  if constexpr (kCodec == LineCodec::kQ6) {
    load_values(coded.high, reinterpret_cast<const uint16_t*>(line + layout.high_offset() + first / 4));
  }
  coded.step = reinterpret_cast<const Bfloat16*>(line + layout.scales_offset())[first / kLineBlock];
}

// A thread's values of a row of elements, in whole vectors.
template <class T, int kValues = kLineValues>
struct LoadedFloats {
  static constexpr int kVector = kValues < kLaneElements<T> ? kValues : kLaneElements<T>;
  LoadedLane<T> lane[kValues / kVector];
};

template <class T, int kValues>
MOE_A2A_DEVICE void load_whole(const T* source, LoadedFloats<T, kValues>& loaded) {
  MOE_A2A_UNROLL
  for (int v = 0; v < kValues; v += loaded.kVector) load_lane(loaded.lane[v / loaded.kVector], source + v);
}
template <class T, int kValues>
MOE_A2A_DEVICE void values_of(const LoadedFloats<T, kValues>& loaded, float (&values)[kValues]) {
  MOE_A2A_UNROLL
  for (int i = 0; i < kValues; ++i) values[i] = value_of(loaded.lane[i / loaded.kVector], i % loaded.kVector);
}

// Between a thread's values and a row of elements, `rest` of which remain from there on; values past the end are 0.
template <class T, int kValues>
MOE_A2A_DEVICE void load_floats(const T* source, int64_t rest, bool vectors, float (&values)[kValues]) {
  if (vectors && rest >= kValues) {
    LoadedFloats<T, kValues> loaded;
    load_whole(source, loaded);
    values_of(loaded, values);
  } else {
    MOE_A2A_UNROLL
    for (int i = 0; i < kValues; ++i) values[i] = i < rest ? to_float(source[i]) : 0.0f;
  }
}
template <class T, int kValues>
MOE_A2A_DEVICE void store_whole(T* target, const float (&values)[kValues]) {
  constexpr int kVector = LoadedFloats<T, kValues>::kVector;
  MOE_A2A_UNROLL
  for (int v = 0; v < kValues; v += kVector) {
    T elements[kVector];
    MOE_A2A_UNROLL
    for (int i = 0; i < kVector; ++i) elements[i] = from_float<T>(values[v + i]);
    store_values(target + v, elements);
  }
}
template <class T, int kValues>
MOE_A2A_DEVICE void store_floats(T* target, int64_t rest, bool vectors, const float (&values)[kValues]) {
  if (vectors && rest >= kValues) return store_whole(target, values);
  MOE_A2A_UNROLL
  for (int i = 0; i < kValues; ++i) {
    if (i < rest) target[i] = from_float<T>(values[i]);
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
