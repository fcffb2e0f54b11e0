// What each rank tells all others about its call at the start of every launch, and the error if two calls differ.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "arch/number.h"
#include "comm/report.h"
#include "rows/line_codec.h"

namespace moe_a2a {

enum class CollectiveKind : uint8_t { kAllReduce, kReduceScatter, kAllGather, kRefused };
enum class ReduceOp : uint8_t { kSum, kMax, kMin, kAvg };
enum class Algorithm : uint8_t { kNone, kOneShot, kTwoShot, kRing, kRecursiveDoubling, kDirect };
enum class CollectiveWire : uint8_t { kRows, kWords };  // rows and signals, or LL words (comm/ll_word.h)

// Largest vector that travels as LL words.
inline constexpr int64_t kMaxWordsBytes = 32 << 10;

// Must be equal on all ranks, or the call is not made.
struct Announcement {
  static constexpr int kWords = 3;

  // kind, dtype, operator, algorithm, codec, wire; number of elements; a digest: how they are divided into shares, and
  // for kDirect where the tensors lie
  uint64_t word[kWords] = {};

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
  static Announcement of_refusal() { return {{static_cast<uint64_t>(CollectiveKind::kRefused)}}; }

  bool is_direct() const { return static_cast<Algorithm>(word[0] >> 24 & 0xff) == Algorithm::kDirect; }

  MOE_A2A_HOST_DEVICE static CollectiveKind kind_of(uint64_t first_word) {
    return static_cast<CollectiveKind>(first_word & 0xff);
  }

  // For a call whose values travel as LL words: everything that ranks may disagree about, packed into one LL word, so
  // that no rank waits for the announcements. 0 for every other call.
  MOE_A2A_HOST_DEVICE uint32_t terms_of_words() const {
    static_assert(kMaxWordsBytes / 2 < 1 << kCountBits);
    if (word[0] >> 40 != static_cast<uint64_t>(CollectiveWire::kWords)) return 0;
    const auto dtype = static_cast<uint32_t>(word[0] >> 8 & 0xff), op = static_cast<uint32_t>(word[0] >> 16 & 0xff);
    return 1u << 31 | dtype << (kCountBits + 4) | op << kCountBits | static_cast<uint32_t>(word[1]);
  }
  static constexpr int kCountBits = 20;
};

// "all_reduce of 100 float32, sum, two_shot, q8"
std::string describe(const Announcement& announcement);

// Two ranks made different calls. Nothing was reduced on any rank; the object stays usable.
struct CallMismatch : std::runtime_error {
  CallMismatch(const std::string& what, int peer) : std::runtime_error(what), peer(peer) {}
  int peer;
};
// For a report whose text holds the announcements of the peer and of the reporting rank, one after the other.
[[noreturn]] void raise_mismatch(const Report& report);

}  // namespace moe_a2a
