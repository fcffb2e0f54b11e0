// Ranks that come too late, and what the reports say of them. Include it after the explored kernels.
#pragma once

#include <string>

#include "comm/wait.h"

namespace moe_a2a {

// Until another rank has given up.
inline void be_late(const WaitPolicy& policy) {
  while (poison_of(policy) == 0) pause();
}

// What is wrong with the report of a wait that gave up because of `culprit`; empty: nothing.
inline std::string wrong_in(const Report& report, int culprit) {
  if (atomic_load<Order::kAcquire, Scope::kSystem>(&report.is_complete) != 1u) return "no report of the missing rank";
  if (report.reason != Reason::kTimeout && report.reason != Reason::kPoisoned) return "the reason is wrong";
  return report.culprit == culprit ? "" : "the report blames rank " + std::to_string(report.culprit);
}

}  // namespace moe_a2a
