// What a wait that gave up leaves behind for the host: who waited where, for whom, for what.
#pragma once

#include <cstddef>
#include <cstdint>

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
  uint32_t is_final = 0;                   // kRefused: every further attempt will be refused as well
  uint64_t expected_epoch = 0;
  uint64_t seen_epoch = 0;
  double elapsed_seconds = 0;
  RefusalText refusal;  // kRefused: what the peer said
};

}  // namespace moe_a2a
