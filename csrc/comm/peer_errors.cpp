#include "comm/peer_errors.h"

namespace moe_a2a {
namespace {

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

// The client's name of an operation or a wait, else the communicator's.
template <class Code>
const auto* name_of(Code code, const Vocabulary& client) {
  const auto* name = client.name_of(code);
  return name != nullptr ? name : kCommVocabulary.name_of(code);
}

}  // namespace

void raise_report(const Report& report, const Vocabulary& client) {
  const char* operation = name_of(report.operation, client);
  std::string what = rank_text(report.rank) + " in " + operation;
  if (report.reason == Reason::kRefused) {
    throw PeerRefused(report, what + ": " + rank_text(report.peer) +
                                  " refused its call: " + reinterpret_cast<const char*>(report.refusal.word));
  }
  const SliceName& wait = *name_of(report.awaited, client);
  const bool has_waited = report.peer != report.rank;
  if (has_waited) {
    what += " waited " + std::to_string(report.elapsed_seconds) + " s for the " + wait.awaited;
    if (wait.of_a_token && report.token >= 0) what += " of token " + std::to_string(report.token);
    what += " from " + rank_text(report.peer) + " (expected epoch " + std::to_string(report.expected_epoch) +
            ", seen " + std::to_string(report.seen_epoch) + ")";
  }
  std::string advice = "; that rank is dead, late, or makes different calls; pass a larger timeout if it is only late";
  if (report.reason == Reason::kPoisoned) {
    what += (has_waited ? "; it left because " : " did nothing because ") + rank_text(report.reporter);
    if (report.culprit == report.reporter) {
      what += " left a call: it was interrupted, or its object closed";
      advice.clear();
    } else {
      what += " gave up waiting for " + (report.culprit == report.rank ? "this rank" : rank_text(report.culprit));
    }
  }
  throw PeerTimeout(report, operation, wait.awaited, what + advice);
}

}  // namespace moe_a2a
