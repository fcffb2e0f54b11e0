#include "moe/expert_parallel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "moe/vocabulary.h"

namespace moe_a2a {
namespace {

using Stage = DispatchHandle::Stage;

const char* name_of(Stage stage) {
  switch (stage) {
    case Stage::kSent:
      return "sent, not yet received";
    case Stage::kReceived:
      return "received";
    case Stage::kCombineSent:
      return "combine sent";
    case Stage::kClosed:
      break;
  }
  return "closed";
}

RefusalText to_text(const std::string& why) {
  RefusalText text;  // ends with a zero: the last character is never written
  std::memcpy(text.word, why.data(), std::min(why.size(), sizeof(text.word) - 1));
  return text;
}

}  // namespace

// ---- buffers and handles

void ExpertParallel::require_open() const {
  gate_.require_own_process();
  if (closed_ || closing_) throw std::runtime_error("this ExpertParallel is closed");
  if (!connected_) throw std::runtime_error("no peers yet; call set_comm_handles() with the handles of all ranks");
}

void ExpertParallel::require(const DispatchHandle& handle, Stage stage, Stage or_stage, const char* call) const {
  require_open();
  if (handle.owner != this) {
    throw std::runtime_error(std::string(call) +
                             " got a handle of another ExpertParallel; pass the one that this "
                             "object's dispatch returned");
  }
  if (handle.stage == stage || handle.stage == or_stage) return;
  throw std::runtime_error(std::string(call) + " got a handle that is " + name_of(handle.stage) + " on rank " +
                           std::to_string(config().rank) +
                           (handle.stage == Stage::kClosed ? "; a handle serves one combine, pass that of the newest "
                                                             "dispatch"
                                                           : "; call the halves in their order"));
}

// The next free buffer in turn. All ranks make the same calls, so all take the same one. A buffer whose handle the
// caller has dropped without combine or release is taken back only when no other is free.
int ExpertParallel::take_buffer() {
  const int n = config().num_buffers;
  for (const bool reclaim : {false, true}) {
    for (int i = 1; i <= n; ++i) {
      const int buffer = (last_buffer_ + i) % n;
      if (reclaim && open_[buffer] && open_[buffer].use_count() == 1) release(*open_[buffer], {});
      if (!open_[buffer]) return last_buffer_ = buffer;
    }
  }
  throw std::runtime_error("dispatch: " + std::to_string(n) + " handles are open on rank " +
                           std::to_string(config().rank) + " and num_buffers=" + std::to_string(n) +
                           "; combine() or release() one first, or pass a larger num_buffers");
}

int ExpertParallel::blocks(const LaunchPlace& place, int by_table) const {
  const int asked = place.num_blocks > 0 ? place.num_blocks : by_table;
  return resident_blocks(asked > 0 ? asked : device_->default_blocks(), device_->max_blocks());
}

bool ExpertParallel::launches_halves() const { return device_->is_synchronous() || device_->max_blocks() < 2; }

// ---- the steps

DispatchSendArgs ExpertParallel::send_args(const DispatchInput& input, int buffer) const {
  const bool aligned = (reinterpret_cast<uint64_t>(input.x.data) | static_cast<uint64_t>(input.x.stride)) % 16 == 0;
  return {.context = context(),
          .buffer = buffer,
          .num_tokens = input.num_tokens,
          .topk_idx = input.topk_idx,
          .topk_weights = input.topk_weights,
          .x = input.x,
          .x_dtype = input.x_dtype,
          .x_scales = input.x_scales,
          .quantize = input.quantize,
          .vector_rows = aligned || !device_->needs_aligned_vectors()};
}

std::shared_ptr<DispatchHandle> ExpertParallel::open_handle(const DispatchInput& input, int buffer) {
  auto handle = std::make_shared<DispatchHandle>();
  handle->owner = this;
  handle->buffer = buffer;
  handle->num_tokens = input.num_tokens;
  handle->row_dtype = input.row_dtype();
  open_[buffer] = handle;
  return handle;
}

std::shared_ptr<DispatchHandle> ExpertParallel::dispatch_send(const DispatchInput& input, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require_open();
  raise_waits();
  const int buffer = take_buffer(), num_blocks = dispatch_blocks(input.num_tokens, place);
  device_->launch(send_args(input, buffer), num_blocks, place.stream);
  auto handle = open_handle(input, buffer);
  after_launch();
  return handle;
}

void ExpertParallel::dispatch_recv(DispatchHandle& handle, Layout layout, int expert_alignment,
                                   const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, Stage::kSent, Stage::kSent, "dispatch_recv");
  handle.layout = layout;
  handle.expert_alignment = expert_alignment;
  device_->launch(DispatchRecvArgs{.context = context(),
                                   .buffer = handle.buffer,
                                   .layout = layout,
                                   .expert_alignment = expert_alignment,
                                   .row_dtype = handle.row_dtype},
                  dispatch_blocks(handle.num_tokens, place), place.stream);
  handle.stage = Stage::kReceived;
  try {
    after_launch();
  } catch (const PeerRefused&) {
    release(handle, place);  // the epoch has passed on every rank; the next dispatch is a new one
    throw;
  }
}

std::shared_ptr<DispatchHandle> ExpertParallel::dispatch(const DispatchInput& input, Layout layout,
                                                         int expert_alignment, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  if (launches_halves()) {
    auto handle = dispatch_send(input, place);
    dispatch_recv(*handle, layout, expert_alignment, place);
    return handle;
  }
  require_open();
  raise_waits();
  const int buffer = take_buffer(), num_blocks = std::max(2, dispatch_blocks(input.num_tokens, place));
  device_->launch(DispatchArgs{.send = send_args(input, buffer),
                               .recv = {.context = context(),
                                        .buffer = buffer,
                                        .layout = layout,
                                        .expert_alignment = expert_alignment,
                                        .row_dtype = input.row_dtype()},
                               .num_send_blocks = dispatch_senders(num_blocks)},
                  num_blocks, place.stream);
  auto handle = open_handle(input, buffer);
  handle->layout = layout;
  handle->expert_alignment = expert_alignment;
  handle->stage = Stage::kReceived;
  return handle;
}

void ExpertParallel::gather_rows(const DispatchHandle& handle, void* expert_x, float* expert_x_scales,
                                 const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, Stage::kReceived, Stage::kReceived, "the expert layout");
  device_->launch(GatherRowsArgs{.context = context(),
                                 .buffer = handle.buffer,
                                 .layout = handle.layout,
                                 .row_dtype = handle.row_dtype,
                                 .expert_x = static_cast<std::byte*>(expert_x),
                                 .expert_x_scales = expert_x_scales},
                  dispatch_blocks(handle.num_tokens, place), place.stream);
}

CombineSendArgs ExpertParallel::send_args(const DispatchHandle& handle, const Rows& y, int64_t num_y_rows,
                                          bool presummed) const {
  const bool aligned = (reinterpret_cast<uint64_t>(y.data) | static_cast<uint64_t>(y.stride)) % 16 == 0;
  return {.context = context(),
          .buffer = handle.buffer,
          .y = y,
          .num_y_rows = num_y_rows,
          .presummed = presummed,
          .vector_rows = aligned || !device_->needs_aligned_vectors()};
}

CombineRecvArgs ExpertParallel::recv_args(const DispatchHandle& handle, void* combined_x) const {
  const uint64_t row_bytes = static_cast<uint64_t>(config().row_bytes(config().dtype));
  const bool aligned = (reinterpret_cast<uint64_t>(combined_x) | row_bytes) % 16 == 0;
  return {.context = context(),
          .buffer = handle.buffer,
          .num_tokens = handle.num_tokens,
          .attempt = handle.attempt,
          .combined_x = static_cast<std::byte*>(combined_x),
          .vector_rows = aligned || !device_->needs_aligned_vectors()};
}

void ExpertParallel::finish_combine(DispatchHandle& handle) {
  handle.stage = Stage::kClosed;
  open_[handle.buffer] = nullptr;
}

void ExpertParallel::combine_send(DispatchHandle& handle, const Rows& y, int64_t num_y_rows, bool presummed,
                                  const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, Stage::kReceived, Stage::kReceived, "combine_send");
  raise_waits();
  const int num_blocks = combine_blocks(handle.num_tokens, place);
  device_->launch(send_args(handle, y, num_y_rows, presummed), num_blocks, place.stream);
  handle.stage = Stage::kCombineSent;
  after_launch();
}

void ExpertParallel::combine_recv(DispatchHandle& handle, void* combined_x, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, Stage::kCombineSent, Stage::kCombineSent, "combine_recv");
  const int num_blocks = combine_blocks(handle.num_tokens, place);
  device_->launch(recv_args(handle, combined_x), num_blocks, place.stream);
  try {
    after_launch();
  } catch (const PeerRefused&) {
    ++handle.attempt;  // what this rank has sent stands; combine_recv may be called again
    throw;
  }
  finish_combine(handle);
}

void ExpertParallel::combine(DispatchHandle& handle, const Rows& y, int64_t num_y_rows, bool presummed,
                             void* combined_x, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  if (launches_halves()) {
    combine_send(handle, y, num_y_rows, presummed, place);
    return combine_recv(handle, combined_x, place);
  }
  require(handle, Stage::kReceived, Stage::kReceived, "combine");
  raise_waits();
  const int num_blocks = std::max(2, combine_blocks(handle.num_tokens, place));
  device_->launch(CombineArgs{.send = send_args(handle, y, num_y_rows, presummed),
                              .recv = recv_args(handle, combined_x),
                              .num_send_blocks = combine_senders(num_blocks, presummed, config().num_ranks)},
                  num_blocks, place.stream);
  finish_combine(handle);
}

void ExpertParallel::release(DispatchHandle& handle, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  if (handle.stage == Stage::kClosed || closed_) return;
  require(handle, handle.stage, handle.stage, "release");
  if (handle.stage != Stage::kCombineSent) {  // combine_send has given the credit back already
    device_->launch(ReleaseArgs{.context = context(), .buffer = handle.buffer}, 1, place.stream);
  }
  finish_combine(handle);
}

// ---- refusals and reports

void ExpertParallel::refuse_dispatch(const std::string& why, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  if (closed_ || closing_ || !connected_) return;  // nobody waits for this call
  device_->launch(RefuseDispatchArgs{.context = context(), .buffer = take_buffer(), .text = to_text(why)}, 1,
                  place.stream);
  leave_if_interrupted();
}

void ExpertParallel::refuse_combine(DispatchHandle& handle, const std::string& why, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  if (closed_ || closing_ || !connected_) return;  // nobody waits for this call
  device_->launch(
      RefuseCombineArgs{.context = context(), .buffer = handle.buffer, .attempt = handle.attempt, .text = to_text(why)},
      1, place.stream);
  ++handle.attempt;
}

void ExpertParallel::after_launch() {
  if (device_->is_synchronous()) raise_reported();
}

void ExpertParallel::raise_reported() {
  const CallGate::Turn turn = gate_.enter();
  raise_waits();
  raise_bad_routing();
}

void ExpertParallel::raise_waits() {
  leave_if_interrupted();
  // Pairs with the release in write_report().
  if (__atomic_load_n(&report_->is_complete, __ATOMIC_ACQUIRE) == 0) return;
  const Report report = *report_;
  if (report.reason == Reason::kRefused) {  // the object stays usable: a later launch may report again
    report_->is_complete = 0;
    __atomic_store_n(&report_->num_noticed, report.num_noticed + 1, __ATOMIC_RELEASE);
  }
  raise_report(report, {&kMoeVocabulary, &kCommVocabulary});
}

// What the kernels have found wrong since the last look.
void ExpertParallel::raise_bad_routing() {
  ErrorCounters now;
  device_->copy_to_host(&now, context_.ws.errors.data, sizeof(now));
  const ErrorCounters before = std::exchange(raised_, now);
  const std::string rank = " on rank " + std::to_string(config().rank);
  if (const uint32_t count = now.num_bad_choices - before.num_bad_choices; count > 0) {
    const uint32_t last = (now.num_bad_choices - 1) % ErrorCounters::kShown;
    throw BadRouting("topk_idx held " + std::to_string(count) +
                     " ids out of range, treated as dropped; the last: topk_idx[" +
                     std::to_string(now.bad_token[last]) + "] has " + std::to_string(now.bad_expert[last]) +
                     ", not in [-1, num_experts=" + std::to_string(config().num_experts) + ")" + rank);
  }
  if (const uint32_t count = now.num_short_y_routes - before.num_short_y_routes; count > 0) {
    throw BadRouting("y of a combine was too short for " + std::to_string(count) + " routes" + rank +
                     "; pass at least expert_offsets[-1] rows");
  }
  if (const uint32_t count = now.num_lost_routes - before.num_lost_routes; count > 0) {
    throw BadRouting(std::to_string(count) + " routes found no room in the masked layout" + rank +
                     ": tokens name an expert more than once; pass layout=\"rows\" or \"expert_major\"");
  }
}

void ExpertParallel::check() {
  const CallGate::Turn turn = gate_.enter();
  require_open();
  device_->synchronize();
  raise_reported();
}

}  // namespace moe_a2a
