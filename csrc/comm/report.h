// What a wait that gave up leaves behind for the host: who waited where, for whom, for what.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/signal.h"
#include "comm/vocabulary.h"

namespace moe_a2a {

enum class Reason : int32_t {
  kNone,
  kTimeout,   // the deadline passed
  kPoisoned,  // another rank gave up and said so
  kRefused,   // the awaited rank refused its call; the object stays usable
};

// A text that a rank leaves with its peers to say why it refused a call. It travels as words that are read and written
// atomically: a newer refusal may be written while an older one is read, and then the text is a mixture, no more.
inline constexpr int kRefusalWords = 64;
struct RefusalText {
  uint64_t word[kRefusalWords] = {};
};

// The payload of a refusal counts a rank's failed calls, of two kinds. Those that named what they refuse are numbered
// alike on all ranks, which make the same calls: an attempt that is behind the caller's own is an old one. A stray did
// not (its handle was wrong); each rank has a count of its own, and one that is higher than the caller knows is new.
struct RefusalCount {
  static constexpr uint32_t kBits = Signal::kPayloadBits / 2, kMost = (1u << kBits) - 2;  // all ones: kFinalRefusal

  MOE_A2A_HOST_DEVICE static constexpr uint32_t pack(uint32_t attempt, uint32_t num_strays) {
    return (num_strays < kMost ? num_strays : kMost) << kBits | (attempt < kMost ? attempt : kMost);
  }
  MOE_A2A_HOST_DEVICE static constexpr uint32_t attempt_of(uint32_t payload) { return payload & ((1u << kBits) - 1); }
  MOE_A2A_HOST_DEVICE static constexpr uint32_t strays_of(uint32_t payload) { return payload >> kBits; }
};
// Of this and every further attempt.
inline constexpr uint32_t kFinalRefusal = Signal::kPayloadMask;

// In host-visible memory; written by one thread, the one that claimed it in ClientServices::num_reports.
struct Report {
  uint32_t is_complete = 0;
  uint32_t num_noticed = 0;  // reports that the host has taken note of; written by the host alone
  Reason reason = Reason::kNone;
  Operation operation = Operation::kNone;
  TraceKind awaited = TraceKind::kKernel;  // the wait, as the trace calls it
  int32_t rank = -1;                       // who waited
  int32_t peer = -1;                       // for whom
  int32_t token = -1;                      // of the sender of the row; -1 where a wait is not for a token
  int32_t reporter = -1;                   // kPoisoned: the rank that gave up first
  int32_t culprit = -1;                    // kPoisoned: the rank that it waited for
  int32_t buffer = -1;                     // kRefused: whose call was refused
  uint32_t refusal_count = 0;              // kRefused: the payload
  uint64_t expected_epoch = 0;
  uint64_t seen_epoch = 0;
  double elapsed_seconds = 0;
  RefusalText refusal;  // kRefused: what the peer said
};

}  // namespace moe_a2a
