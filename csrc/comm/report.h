// What a wait that gave up leaves behind for the host: who waited where, for whom, for what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace moe_a2a {

// What a rank does: the steps that wait, as a report names them, then the launches that only a trace names.
enum class Operation : int32_t {
  kNone,
  kDispatchSend,
  kDispatchRecv,
  kCombineSend,
  kCombineRecv,
  kClose,
  kAlignClocks,
  kDispatch,
  kCombine,
  kGatherRows,
  kRefuseDispatch,
  kRefuseCombine,
  kRelease,
  kGoodbye,
  kNumOperations,
};
inline constexpr const char* kOperationNames[] = {
    "none",     "dispatch_send", "dispatch_recv", "combine_send",    "combine_recv",   "close",   "align_clocks",
    "dispatch", "combine",       "gather_rows",   "refuse_dispatch", "refuse_combine", "release", "goodbye"};
static_assert(sizeof(kOperationNames) / sizeof(*kOperationNames) == static_cast<size_t>(Operation::kNumOperations));

constexpr const char* name_of(Operation operation) { return kOperationNames[static_cast<int>(operation)]; }

// The operation of that name; kNone: there is none.
constexpr Operation operation_named(std::string_view name) {
  int i = static_cast<int>(Operation::kNumOperations);
  while (--i > 0 && name != kOperationNames[i]) {
  }
  return static_cast<Operation>(i);
}

enum class Phase : int32_t { kNone, kCredit, kRoutingTable, kRow, kPartialSum, kPeer, kClock };
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

// Counters of the kernels, in this rank's own memory: a device may not be able to count in the host's. Routing that the
// kernels found wrong was treated as dropped; the host reads of it when it looks (ExpertParallel::check).
struct Tally {
  uint32_t num_reports = 0;  // claimed so far: who raises it by one writes the report
  uint32_t num_bad_choices = 0;
  uint32_t num_lost_routes = 0;     // found no room in the masked layout
  uint32_t num_short_y_routes = 0;  // stand behind the last row of the `y` given to combine
  // The last ones that were counted, each in a place of its own.
  static constexpr uint32_t kShown = 16;
  int64_t bad_expert[kShown] = {};
  int32_t bad_token[kShown] = {};
};

// In host-visible memory; written by one thread, the one that has claimed it in the Tally.
struct Report {
  uint32_t is_complete = 0;
  uint32_t num_noticed = 0;  // reports that the host has taken note of; it alone writes this
  Reason reason = Reason::kNone;
  Operation operation = Operation::kNone;
  Phase phase = Phase::kNone;
  int32_t rank = -1;      // who waited
  int32_t peer = -1;      // for whom
  int32_t token = -1;     // for which token (of the sender of the row), -1 where a wait is not for a token
  int32_t reporter = -1;  // kPoisoned: the rank that gave up first
  int32_t culprit = -1;   // kPoisoned: the rank that it waited for
  uint64_t expected_epoch = 0;
  uint64_t seen_epoch = 0;
  double elapsed_seconds = 0;
  RefusalText refusal;  // kRefused: what the peer said
};

const char* name_of(Phase phase);

}  // namespace moe_a2a
