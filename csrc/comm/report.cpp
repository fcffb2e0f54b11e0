#include "comm/report.h"

namespace moe_a2a {

const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::kCredit:
      return "credit";
    case Phase::kRoutingTable:
      return "routing table";
    case Phase::kRow:
      return "row";
    case Phase::kPartialSum:
      return "partial sum";
    case Phase::kPeer:
      return "peer";
    case Phase::kClock:
      return "clock";
    case Phase::kNone:
      break;
  }
  return "none";
}

}  // namespace moe_a2a
