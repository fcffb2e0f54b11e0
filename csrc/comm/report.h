// What a wait that gave up leaves for the host: who waited, for whom, for what.
#pragma once

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

// Why a rank refused a call, as written to its peers. Words are accessed atomically: if a newer refusal is written
// while an older one is read, the text is a mixture, but never a race.
inline constexpr int kRefusalWords = 64;
struct RefusalText {
  uint64_t word[kRefusalWords] = {};
};

// The payload of a refusal counts a rank's failed calls of two kinds. An attempt is a refused combine that named its
// handle. All ranks make the same calls, so attempts have the same numbers everywhere, and one below the caller's is
// stale. A stray had a wrong handle and names no combine. Each rank counts its own strays, and a count above the one
// that the caller knows is news.
struct RefusalCount {
  static constexpr uint32_t kBits = Signal::kPayloadBits / 2, kMost = (1u << kBits) - 2;
  static constexpr uint32_t kFinal = Signal::kPayloadMask;  // all ones: refuses this and every further attempt

  MOE_A2A_HOST_DEVICE static constexpr uint32_t pack(uint32_t attempt, uint32_t num_strays) {
    return (num_strays < kMost ? num_strays : kMost) << kBits | (attempt < kMost ? attempt : kMost);
  }
  MOE_A2A_HOST_DEVICE static constexpr uint32_t attempt_of(uint32_t payload) { return payload & ((1u << kBits) - 1); }
  MOE_A2A_HOST_DEVICE static constexpr uint32_t strays_of(uint32_t payload) { return payload >> kBits; }
};

// The word that tells all ranks that a rank has given up, and for whom it waited. 0: none has.
struct Poison {
  MOE_A2A_HOST_DEVICE static constexpr uint32_t pack(int reporter, int culprit) {
    return static_cast<uint32_t>(reporter + 1) << 8 | static_cast<uint32_t>(culprit + 1);
  }
  MOE_A2A_HOST_DEVICE static constexpr int reporter_of(uint32_t word) { return static_cast<int>(word >> 8) - 1; }
  MOE_A2A_HOST_DEVICE static constexpr int culprit_of(uint32_t word) { return static_cast<int>(word & 0xff) - 1; }
};

// In host-visible memory; written by the one thread that claimed it in ClientServices::num_reports.
struct Report {
  uint32_t is_complete = 0;
  uint32_t num_noticed = 0;  // reports that the host has handled; written by the host only
  Reason reason = Reason::kNone;
  Operation operation = Operation::kNone;
  TraceKind awaited = TraceKind::kKernel;  // the kind of wait
  int32_t rank = -1;                       // who waited
  int32_t peer = -1;                       // for whom
  int32_t token = -1;                      // index at the row's sender; -1: the wait is not for a token
  int32_t reporter = -1;                   // kPoisoned: the rank that gave up first
  int32_t culprit = -1;                    // kPoisoned: the rank that the reporter waited for
  int32_t buffer = -1;                     // kRefused: the buffer of the refused call
  uint32_t refusal_count = 0;              // kRefused: the payload, or what the client wants to know about the call
  uint64_t expected_epoch = 0;
  uint64_t seen_epoch = 0;  // kRefused, of a wait with a Refusal: its `call`
  double elapsed_seconds = 0;
  RefusalText refusal;  // kRefused: what the peer said
};

// A rank's reports. Failures and refusals have a place each: a refusal that the host has not handled yet must not hide
// that a wait has given up.
struct Reports {
  static constexpr int kNum = 2;

  Report failure;  // of the first wait that gave up; stays
  Report refusal;  // of the first one since the host handled the latest

  MOE_A2A_HOST_DEVICE static int index_of(Reason reason) { return reason == Reason::kRefused ? 1 : 0; }
  MOE_A2A_HOST_DEVICE Report& of(Reason reason) { return reason == Reason::kRefused ? refusal : failure; }
};

}  // namespace moe_a2a
