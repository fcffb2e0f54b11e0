// The bytes of one line per codec, compared with the NumPy model of tests/python/line_codecs.py, and the sizes of
// lines.
#include "rows/line_codec.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace moe_a2a {
namespace {

constexpr int kNumValues = 56;  // the second block is not full

std::vector<float> golden_values() {
  std::vector<float> x(kNumValues);
  for (int i = 0; i < 32; ++i) x[i] = static_cast<float>(i - 20) * 0.75f;
  for (int i = 0; i < 24; ++i) x[32 + i] = static_cast<float>(i * i % 37) * 0.03125f - 0.5f;
  return x;
}

std::string to_hex(const std::vector<std::byte>& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    text += kDigits[std::to_integer<int>(byte) >> 4];
    text += kDigits[std::to_integer<int>(byte) & 15];
  }
  return text;
}

template <LineCodec kCodec>
void check_golden(const std::string& expected) {
  static_assert(kLineValues == kLineBlock);  // one thread has a whole block
  const std::vector<float> x = golden_values();
  const LineLayout layout{kCodec, kNumValues};
  std::vector<std::byte> line(layout.num_bytes());
  for (int first = 0; first < kNumValues; first += kLineValues) {
    LineValues values, encoded, decoded;
    load_floats(x.data() + first, kNumValues - first, true, values);
    const CodedValues<kCodec> coded = encode<kCodec>(Warp{}, values);
    store_line(layout, line.data(), first, coded);
    CodedValues<kCodec> loaded;
    load_line(layout, line.data(), first, loaded);
    values_of(coded, encoded);
    values_of(loaded, decoded);
    for (int i = 0; i < kLineValues; ++i) ASSERT_EQ(encoded[i], decoded[i]) << "value " << first + i;
  }
  EXPECT_EQ(to_hex(line), expected);
}

TEST(LineCodec, WritesTheGoldenBytes) {
  check_golden<LineCodec::kFp8>(
      "fefdfdfcfbfafaf9f8f7f6f5f3f2f0eeebe8e3db005b63686b6e707273757677"
      "fbfaf8f200757eeb77f576f07c6eeef97d7a78787a7df9ee0000000000000000"
      "0a3db73a");
  check_golden<LineCodec::kQ8>(
      "00060d131a20262d333a40464d535a60666d737a80868d939aa0a6adb3bac0c6"
      "e6e0cdad8046009a3aba40a61360a0d30d263333260dd3a08080808080808080"
      "f03da0bb");
  check_golden<LineCodec::kQ6>(
      "205386baed205386baed205386baed208ab32060eea08558a3dd3a8500000000"
      "0000505555aaaafabf8698e400b0aaaaf03ea0bc");
  check_golden<LineCodec::kQ4>(
      "001122324344556676878899aabacbcceebd48a0c4a461da213312ad88888888"
      "f03fa0bd");
}

TEST(LineCodec, LinesHaveTheSizesOfQuickReduce) {
  EXPECT_EQ((LineLayout{LineCodec::kFp8, 2048}.num_bytes()), 2176);
  EXPECT_EQ((LineLayout{LineCodec::kQ8, 2048}.num_bytes()), 2176);
  EXPECT_EQ((LineLayout{LineCodec::kQ6, 2048}.num_bytes()), 1664);
  EXPECT_EQ((LineLayout{LineCodec::kQ4, 2048}.num_bytes()), 1152);
  EXPECT_EQ((LineLayout{LineCodec::kQ4, 0}.num_bytes()), 0);
  EXPECT_EQ((LineLayout{LineCodec::kQ6, 33}.num_bytes()), 52);
}

}  // namespace
}  // namespace moe_a2a
