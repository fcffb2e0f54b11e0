// What a report of the kernels becomes on the host: an exception that names the rank that was waited for.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "comm/report.h"

namespace moe_a2a {

// A rank did not come within the deadline.
struct PeerTimeout : std::runtime_error {
  PeerTimeout(const Report& report, const char* operation, const char* awaited, const std::string& what)
      : std::runtime_error(what), report(report), operation(operation), awaited(awaited) {}
  Report report;
  const char* operation;  // in the words of the client whose launch it was
  const char* awaited;
};

// A rank's call failed before it had done its part. The object stays usable on every rank.
struct PeerRefused : std::runtime_error {
  PeerRefused(const Report& report, const std::string& what)
      : std::runtime_error(what), peer(report.peer), count(report.refusal_count), is_final(count == kFinalRefusal) {}
  int peer;
  uint32_t count;  // a RefusalCount
  bool is_final;   // the call cannot be tried again
};

// Throws one of the two. `vocabularies`: those of all clients and the communicator's own.
[[noreturn]] void raise_report(const Report& report, const std::vector<const Vocabulary*>& vocabularies);

}  // namespace moe_a2a
