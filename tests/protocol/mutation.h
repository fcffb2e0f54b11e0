// What the explorer can break, one thing at a time, without a word of test code in csrc/. An atomic operation is known
// by the field of the MoeRegion that it touches.
#pragma once

#include <cstdint>
#include <string>

namespace moe_a2a {

enum class Field : uint8_t {
  kOther,
  kTableSignal,
  kRowSignal,
  kCombineSignal,
  kLlChoices,
  kLlRow,
  kLlCombineRow,
  kDispatchCredit,
  kCombineRefusal,
  kRefusalText,
  kGoodbye,
  kClockMeeting,
  kClockMessage,
  kPoison,
  kSendArrivals,
  kCombineArrivals,
  kReportState,
  // of the collectives; an announcement is a text
  kCallSignal,
  kChunkSignal,
  kResultSignal,
  kLaunchArrivals,
};

inline bool is_ll(Field field) {
  return field == Field::kLlChoices || field == Field::kLlRow || field == Field::kLlCombineRow;
}

struct Mutation {
  enum class Kind {
    kNone,
    kRelaxedRelease,  // the release part of stores, adds is lost
    kRelaxedAcquire,  // the acquire part of loads, adds is lost
    kWaitSkipped,     // the word is always found to have arrived; an LL word, when any of its field has
    kOneEpochEarly,   // a wait is content with the epoch before
    kOneUseEarly,     // the same for words that are used in every second epoch
    kStoreLost,       // the word is not written
    kLostWhenUnused,  // the word is not written to ranks that sent nothing
    kEveryoneIsLast,  // each block believes that it is the last one
    kFenceLost,       // where signals are ordered by a fence: there is none
    kRaisedEarly,     // the signal is raised before what it guards is written
  };
  Kind kind = Kind::kNone;
  Field field = Field::kOther;
  // The GPUs' way: one fence, then relaxed stores of the signals.
  bool signals_by_fence = false;

  // Only in launches of this name; empty: everywhere.
  std::string launch = {};
};

}  // namespace moe_a2a
