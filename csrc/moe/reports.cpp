// Turns what this rank's kernels have reported into exceptions.
#include <algorithm>
#include <utility>

#include "moe/expert_parallel.h"
#include "moe/vocabulary.h"

namespace moe_a2a {

void ExpertParallel::after_launch() {
  if (device_->is_synchronous()) raise_reported();
}

void ExpertParallel::raise_reported() {
  const CallGate::Turn turn = gate_.enter();
  raise_waits();
  raise_bad_routing();
}

void ExpertParallel::raise_in_own_words(const Report& report) {
  if (report.awaited != moe_kind::kOtherRows) return;
  const std::string formats[] = {std::string(name_of(config().dtype)) + " rows", "float8 rows",
                                 "float8 rows with scales of bytes"};
  using Kind = BatchHeader::Kind;
  const Kind own = Kind::unpacked(report.token >> 8), theirs = Kind::unpacked(report.token & 0xff);  // refuse_rows()
  const bool same_format = own.format == theirs.format;
  const auto text_of = [&](const Kind& kind) {
    if (!same_format) return formats[static_cast<int>(kind.format)];
    const int bound = std::min(1 << kind.exponent, config().num_max_tokens_per_rank);
    return "with num_max_tokens_per_rank=" + std::to_string(bound);
  };
  throw CallMismatch(report, "ranks disagree: rank " + std::to_string(report.rank) + " dispatched " + text_of(own) +
                                 ", rank " + std::to_string(report.peer) + " " + text_of(theirs) + "; pass " +
                                 (same_format ? "the same num_max_tokens_per_rank to dispatch()"
                                              : "x and x_scales of the same dtypes, and the same quantize,") +
                                 " on every rank");
}

// Throws errors that the kernels have counted since the last call, all in one.
void ExpertParallel::raise_bad_routing() {
  ErrorCounters now;
  device_->copy_to_host(&now, context_.region.errors.data, sizeof(now));
  const ErrorCounters before = std::exchange(raised_, now);
  const std::string rank = " on rank " + std::to_string(config().rank);
  std::string what;
  const auto add = [&](const std::string& error) { what += (what.empty() ? "" : "; and ") + error; };
  if (const uint32_t count = now.num_bad_choices - before.num_bad_choices; count > 0) {
    const uint32_t last = (now.num_bad_choices - 1) % ErrorCounters::kShown;
    add("topk_idx held " + std::to_string(count) + " ids out of range, treated as dropped; the last: topk_idx[" +
        std::to_string(now.bad_token[last]) + "] has " + std::to_string(now.bad_expert[last]) +
        ", not in [-1, num_experts=" + std::to_string(config().num_experts) + ")" + rank);
  }
  if (const uint32_t count = now.num_short_y_routes - before.num_short_y_routes; count > 0) {
    add("y of a combine was too short for " + std::to_string(count) + " routes" + rank +
        "; pass at least expert_offsets[-1] rows");
  }
  if (const uint32_t count = now.num_lost_routes - before.num_lost_routes; count > 0) {
    add(std::to_string(count) + " routes found no room in the masked layout" + rank +
        ": tokens name an expert more than once; pass layout=\"rows\" or \"expert_major\"");
  }
  if (!what.empty()) throw BadRouting(what);
}

}  // namespace moe_a2a
