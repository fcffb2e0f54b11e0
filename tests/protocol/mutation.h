// What the explorer can break, one thing at a time, without test code in csrc. An atomic operation is identified by the
// field that it touches.
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
  kStoredTiles,
  kHasGivenUp,
  // of the collectives
  kCallSignal,
  kChunkSignal,
  kResultSignal,
  kProgress,
  kFailedCall,
  kAnnouncement,
  kWords,
};

inline bool is_ll(Field field) {
  return field == Field::kLlChoices || field == Field::kLlRow || field == Field::kLlCombineRow ||
         field == Field::kAnnouncement || field == Field::kWords;
}

struct Mutation {
  enum class Kind {
    kNone,
    kRelaxedRelease,  // stores and adds lose their release
    kRelaxedAcquire,  // loads and adds lose their acquire
    kWaitSkipped,     // the word always seems to have arrived; an LL word, once any of its field has
    kOneEpochEarly,   // a wait accepts the previous epoch
    kOneUseEarly,     // the same for words that are used in every second epoch
    kStoreLost,       // the word is not written
    kPayloadLost,     // the signal carries its epoch only
    kLostWhenUnused,  // the word is not written to ranks that sent nothing
    kEveryoneIsLast,  // every block acts as the last one
    kAddLost,         // what is added is lost
    kAddedTwice,      // what is added counts twice
    kFenceLost,       // no fence before the signals
    kRaisedEarly,     // the signal is raised before what it guards is written
    kStampFirst,      // an LL word is written in two halves, stamp first
    kOneHalf,         // every epoch uses the same half of a field
    kForgotten,       // the next launch assumes that the previous one observed more of its peers than it did
  };
  Kind kind = Kind::kNone;
  Field field = Field::kOther;
  // As on the GPUs: one fence, then relaxed stores of the signals.
  bool signals_by_fence = false;

  // Only in launches of this name; empty: in all.
  std::string launch = {};
};

}  // namespace moe_a2a
