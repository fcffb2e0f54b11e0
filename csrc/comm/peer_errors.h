// Kernel reports as host exceptions that name the rank waited for.
#pragma once

#include <stdexcept>
#include <string>

#include "comm/report.h"

namespace moe_a2a {

// A rank did not arrive within the deadline, or left a call.
struct PeerTimeout : std::runtime_error {
  PeerTimeout(const Report& report, const char* operation, const char* awaited, const std::string& what)
      : std::runtime_error(what), report(report), operation(operation), awaited(awaited) {}
  Report report;
  const char* operation;  // as the launching client names it
  const char* awaited;
};

// A rank refused its part of a call. The object stays usable on every rank.
struct PeerRefused : std::runtime_error {
  PeerRefused(const Report& report, const std::string& what)
      : std::runtime_error(what),
        peer(report.peer),
        count(report.refusal_count),
        is_final(count == RefusalCount::kFinal) {}
  int peer;
  uint32_t count;  // a RefusalCount
  bool is_final;   // the call cannot be retried
};

// Two ranks made different calls. The call is over on all ranks; the object stays usable.
struct CallMismatch : PeerRefused {
  using PeerRefused::PeerRefused;
};

// Throws one of the first two. `client`: the vocabulary of the client that reports.
[[noreturn]] void raise_report(const Report& report, const Vocabulary& client);

}  // namespace moe_a2a
