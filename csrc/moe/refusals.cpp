// Tells peers that this rank does not take part as expected: refusals, and releases without a combine.
#include "comm/refusal_text.h"
#include "moe/expert_parallel.h"

namespace moe_a2a {

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

}  // namespace moe_a2a
