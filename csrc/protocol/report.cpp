#include "protocol/report.h"

namespace moe_a2a {

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::kDispatchSend:
      return "dispatch_send";
    case Operation::kDispatchRecv:
      return "dispatch_recv";
    case Operation::kCombineSend:
      return "combine_send";
    case Operation::kCombineRecv:
      return "combine_recv";
    case Operation::kClose:
      return "close";
    case Operation::kNone:
      break;
  }
  return "none";
}

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
    case Phase::kNone:
      break;
  }
  return "none";
}

}  // namespace moe_a2a
