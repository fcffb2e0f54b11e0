// What each rank tells all others about its call at the start of every launch, and the error if two calls differ.
#pragma once

#include <cstdint>
#include <string>

#include "arch/number.h"
#include "comm/report.h"
#include "rows/line_codec.h"

namespace moe_a2a {

enum class CollectiveKind : uint8_t { kAllReduce, kReduceScatter, kAllGather, kBarrier, kRefused };
enum class ReduceOp : uint8_t { kSum, kMax, kMin, kAvg };
enum class Algorithm : uint8_t { kNone, kOneShot, kTwoShot, kRing, kRecursiveDoubling, kDirect };
enum class CollectiveWire : uint8_t { kRows, kWords };  // rows and signals, or LL words (comm/ll_word.h)

// Largest vector that travels as LL words.
inline constexpr int64_t kMaxWordsBytes = 32 << 10;

// Must be equal on all ranks, or the call is not made. As many bits as one LL word of 16 bytes carries.
struct Announcement {
  static constexpr int kWords = 3;

  enum Term { kKind, kDType, kOp, kAlgorithm, kCodec, kWire };

  // 4 bits for each Term, and the upper 8 of the number of elements; its lower 32; a digest: how they are divided into
  // rows and shares, and for kDirect where the tensors lie
  uint32_t word[kWords] = {};

  // Common to all calls: which collective, of what, how merged.
  struct Terms {
    CollectiveKind kind;
    DType dtype;
    ReduceOp op = ReduceOp::kSum;
    Algorithm algorithm = Algorithm::kNone;
    LineCodec codec = LineCodec::kNone;
    CollectiveWire wire = CollectiveWire::kRows;
  };
  static Announcement of(const Terms& terms, int64_t count, uint64_t digest = 0);
  static Announcement of_refusal() { return {{static_cast<uint32_t>(CollectiveKind::kRefused)}}; }

  MOE_A2A_HOST_DEVICE bool is_refusal() const { return term(kKind) == static_cast<uint32_t>(CollectiveKind::kRefused); }
  bool is_direct() const { return term(kAlgorithm) == static_cast<uint32_t>(Algorithm::kDirect); }

  MOE_A2A_HOST_DEVICE uint32_t term(Term i) const { return word[0] >> 4 * i & 0xf; }
  int64_t count() const { return int64_t{word[0] >> 24} << 32 | word[1]; }
};

// "all_reduce of 100 float32, sum, two_shot, q8"
std::string describe(const Announcement& announcement);

// For a report whose text holds the announcements of the peer and of the reporting rank, one after the other.
[[noreturn]] void raise_mismatch(const Report& report);

}  // namespace moe_a2a
