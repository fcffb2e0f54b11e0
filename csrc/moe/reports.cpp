// Tells peers that this rank does not take part as expected, and turns its own kernels' reports into exceptions.
#include <algorithm>
#include <utility>

#include "comm/refusal_text.h"
#include "moe/expert_parallel.h"
#include "moe/vocabulary.h"

namespace moe_a2a {

// ---- to the peers

void ExpertParallel::refuse_dispatch(const std::string& why, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  if (nobody_waits()) return;
  const int buffer = find_buffer(place);
  if (buffer < 0) return refuse_any_buffer(why, place);
  launch(RefuseDispatchArgs{.context = context_,
                            .buffer = buffer,
                            .number = for_kernels(buffers_.number_of_next(buffer), place),
                            .text = to_refusal_text(why)},
         1, place.stream);
  if (device_->is_synchronous()) {
    try {
      raise_waits();
    } catch (const PeerRefused&) {  // a peer has no buffer: this call has failed there too
      return buffers_.pass();
    }
  }
  buffers_.take(buffer, nullptr);
  leave_if_interrupted();
}

void ExpertParallel::refuse_combine(DispatchHandle* handle, const std::string& why, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  if (nobody_waits()) return;
  const bool is_own = handle != nullptr && handle->owner == this;
  if (is_own && handle->stage == Stage::kRefused) return;  // no peer waits for its combine
  if (!is_own || !handle->is_open()) return refuse_combines(why, place);
  if (handle->stage == Stage::kCombineSent) return;
  handle->failed_attempt = handle->attempt++;
  send_refusal(*handle, why, place);
}

void ExpertParallel::refuse_combines(const std::string& why, const LaunchPlace& place) {
  buffers_.for_open([&](DispatchHandle& handle) {
    if (handle.stage != Stage::kReceived) return;
    ++handle.num_strays;
    send_refusal(handle, why, place);
  });
}

void ExpertParallel::send_refusal(const DispatchHandle& handle, const std::string& why, const LaunchPlace& place) {
  launch(RefuseCombineArgs{.context = context_,
                           .buffer = handle.buffer,
                           .count = RefusalCount::pack(handle.failed_attempt, handle.num_strays),
                           .text = to_refusal_text(why)},
         1, place.stream);
}

void ExpertParallel::give_up_newest(const std::string& why, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  if (nobody_waits()) return;
  if (const auto handle = buffers_.newest()) release(*handle, place, why);
}

// Peers see the refusal while they wait for the credit of a buffer that is open here.
void ExpertParallel::refuse_any_buffer(const std::string& why, const LaunchPlace& place) {
  launch(
      RefuseAnyBufferArgs{.context = context_, .number = buffers_.num_dispatches() + 1, .text = to_refusal_text(why)},
      1, place.stream);
  buffers_.refuse();
}

void ExpertParallel::release(DispatchHandle& handle, const LaunchPlace& place, const std::string& why) {
  const CallGate::Turn turn = gate_.enter();
  if (handle.stage == Stage::kCombined) handle.stage = Stage::kClosed;
  const bool was_refused = handle.stage == Stage::kRefused;
  if ((!handle.is_open() && !was_refused) || is_closed()) return;
  require_own(handle, "release");
  if (handle.stage != Stage::kCombineSent) {  // combine_send has returned the credit already
    const bool refused_before = why.empty() && (was_refused || handle.failed_attempt + handle.num_strays > 0);
    launch(ReleaseArgs{.context = context_,
                       .buffer = handle.buffer,
                       .note = buffers_.credit_note(handle),
                       .text = refused_before ? RefusalText{}
                               : why.empty()  ? to_refusal_text("it released the handle without a combine")
                                              : to_refusal_text(why)},
           1, place.stream);
  }
  finish_combine(handle);
  handle.stage = Stage::kClosed;
}

// ---- from the kernels

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
