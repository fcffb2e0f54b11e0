// Breaks the parts of the protocol in turn: every release, acquire, wait, credit and signal.
#include "scenarios.h"

namespace moe_a2a {
namespace {

std::string name_of(Field field) {
  switch (field) {
    case Field::kTableSignal:
      return "table signal";
    case Field::kRowSignal:
      return "row signal";
    case Field::kCombineSignal:
      return "combine signal";
    case Field::kLlChoices:
      return "LL choices";
    case Field::kLlRow:
      return "LL row";
    case Field::kLlCombineRow:
      return "LL partial sum";
    case Field::kDispatchCredit:
      return "dispatch credit";
    case Field::kCombineRefusal:
      return "combine refusal";
    case Field::kGoodbye:
      return "goodbye";
    case Field::kClockMeeting:
      return "clock meeting";
    case Field::kClockMessage:
      return "clock message";
    case Field::kPoison:
      return "poison";
    case Field::kSendArrivals:
      return "block count of dispatch_send";
    case Field::kCombineArrivals:
      return "block count of combine_send";
    case Field::kReportState:
      return "report";
    case Field::kStoredTiles:
      return "stored tiles";
    case Field::kHasGivenUp:
      return "has_given_up";
    case Field::kCallSignal:  // see collective_explorer_test.cpp
    case Field::kChunkSignal:
    case Field::kResultSignal:
    case Field::kAnnouncement:
    case Field::kWords:
    case Field::kProgress:
    case Field::kFailedCall:
    case Field::kRefusalText:
    case Field::kOther:
      break;
  }
  return "?";
}

}  // namespace

std::vector<Mutant> all_mutants() {
  using Kind = Mutation::Kind;
  struct Broken {
    Kind kind;
    const char* how;
    std::vector<Field> fields;
    const char* launch = "";
  };
  constexpr Field kTable = Field::kTableSignal, kRow = Field::kRowSignal, kSum = Field::kCombineSignal,
                  kCredit = Field::kDispatchCredit, kRefusal = Field::kCombineRefusal, kGoodbye = Field::kGoodbye,
                  kPoison = Field::kPoison, kSends = Field::kSendArrivals, kCombines = Field::kCombineArrivals,
                  kLlChoices = Field::kLlChoices, kLlRow = Field::kLlRow, kLlSum = Field::kLlCombineRow,
                  kReport = Field::kReportState, kStored = Field::kStoredTiles, kMeeting = Field::kClockMeeting,
                  kMessage = Field::kClockMessage;
  const std::vector<Field> all_signals = {kTable,   kRow,    kSum,   kCredit,   kRefusal, kGoodbye,
                                          kMeeting, kReport, kSends, kCombines, kStored};
  const std::vector<Broken> all = {
      {Kind::kRelaxedRelease, "no release", all_signals},
      {Kind::kRelaxedRelease, "no release", {kTable}, "refuse_dispatch"},
      {Kind::kRelaxedRelease, "no release", {kCredit}, "combine_send"},
      {Kind::kRelaxedRelease, "no release", {kCredit}, "release"},
      {Kind::kRelaxedRelease, "no release", {kCredit}, "refuse_dispatch"},
      {Kind::kRelaxedRelease, "no release", {kTable, kSends}, kSmallSend},
      {Kind::kRelaxedRelease, "no release", {kRow}, kMediumSend},
      {Kind::kRelaxedAcquire, "no acquire", all_signals},
      {Kind::kRelaxedAcquire, "no acquire", {kTable}, kSmallRecv},
      {Kind::kRelaxedAcquire, "no acquire", {kTable, kRow}, kMediumRecv},
      {Kind::kRelaxedAcquire, "no acquire", {kSends}, kSmallSend},
      {Kind::kStoreLost, "not zeroed", {kStored}, "zero the counts"},
      {Kind::kStoreLost, "not noted", {Field::kHasGivenUp}},
      {Kind::kWaitSkipped, "no wait", {kTable, kRow, kSum, kCredit, kGoodbye, kMeeting, kMessage}},
      {Kind::kWaitSkipped, "no wait", {kCredit}, "refuse_dispatch"},
      {Kind::kWaitSkipped, "no wait", {kRow, kLlChoices}, kMediumRecv},
      {Kind::kOneEpochEarly, "waits for the epoch before", {kTable, kRow, kSum, kCredit, kMeeting, kMessage}},
      {Kind::kWaitSkipped, "no wait for each word", {kLlChoices, kLlRow, kLlSum}},
      {Kind::kOneEpochEarly, "content with the epoch before", {kLlChoices, kLlRow, kLlSum}},
      {Kind::kRaisedEarly, "raised before the work", {kTable, kRow, kSum, kCredit, kRefusal}},
      {Kind::kStoreLost,
       "not raised",
       {kTable, kRow, kSum, kCredit, kRefusal, kGoodbye, kMeeting, kMessage, kPoison, kReport}},
      {Kind::kStoreLost, "not raised", {kTable}, "refuse_dispatch"},
      {Kind::kStoreLost, "not raised", {kCredit}, "refuse_dispatch"},
      {Kind::kStoreLost, "not raised", {kCredit}, "release"},
      {Kind::kStoreLost, "not raised", {kRefusal}, "dispatch_recv"},
      {Kind::kStoreLost, "not raised", {kTable}, kSmallSend},
      {Kind::kStoreLost, "not raised", {kRow, kLlChoices}, kMediumSend},
      {Kind::kStoreLost, "not sent", {kLlChoices, kLlRow, kLlSum}},
      {Kind::kPayloadLost, "says nothing but its epoch", {kTable, kSum}},
      {Kind::kLostWhenUnused, "not raised for ranks that sent nothing", {kCredit}},
      {Kind::kStoreLost, "not reset", {kSends, kCombines}},
      {Kind::kStoreLost, "not reset", {kSends}, kSmallSend},
      {Kind::kEveryoneIsLast, "every block is the last", {kSends, kCombines}},
      {Kind::kEveryoneIsLast, "every block is the last", {kSends}, kSmallSend},
  };
  std::vector<Mutant> mutants;
  for (const Broken& broken : all) {
    for (const Field field : broken.fields) {
      const std::string where = *broken.launch == 0 ? "" : std::string(" in ") + broken.launch;
      mutants.push_back(
          {name_of(field) + where + ": " + broken.how, {.kind = broken.kind, .field = field, .launch = broken.launch}});
    }
  }
  mutants.push_back({"fence before signals: none", {.kind = Kind::kFenceLost, .signals_by_fence = true}});
  return mutants;
}

}  // namespace moe_a2a
