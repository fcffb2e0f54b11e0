#include "moe/expert_parallel.h"

#include <algorithm>
#include <utility>

#include "moe/moe_kernels.h"
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
    case Stage::kCombined:
    case Stage::kClosed:
      break;
  }
  return "closed";
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
                           (!handle.is_open() ? "; a handle serves one combine, pass that of the newest "
                                                "dispatch"
                                              : "; call the halves in their order"));
}

bool ExpertParallel::owns(const void* address) const {
  const auto* byte = static_cast<const std::byte*>(address);
  const auto lies_in = [&](const std::byte* memory, size_t size) { return byte >= memory && byte < memory + size; };
  return lies_in(own_heap_, size_.symmetric_bytes) || lies_in(local_, size_.local_bytes);
}

// The next free buffer in turn. All ranks make the same calls, so all take the same one. A buffer whose handle the
// caller has dropped without combine or release is taken back only when no other is free.
int ExpertParallel::next_buffer() {
  const int n = config().num_buffers;
  for (const bool reclaim : {false, true}) {
    for (int i = 1; i <= n; ++i) {
      const int buffer = (last_buffer_ + i) % n;
      if (reclaim && open_[buffer] && open_[buffer].use_count() == 1) release(*open_[buffer], {});
      if (!open_[buffer]) return buffer;
    }
  }
  throw std::runtime_error("dispatch: " + std::to_string(n) + " handles are open on rank " +
                           std::to_string(config().rank) + " and num_buffers=" + std::to_string(n) +
                           "; combine() or release() one first, or pass a larger num_buffers");
}

// After the launch: one that fails leaves everything as it was.
void ExpertParallel::take(int buffer, const std::shared_ptr<DispatchHandle>& handle) {
  if (const auto before = newest_[buffer].lock()) before->stage = Stage::kClosed;
  open_[buffer] = handle;
  newest_[buffer] = handle;
  last_buffer_ = buffer;
  ++num_dispatches_;
}

int64_t ExpertParallel::max_quantized_row_bytes() const {
  return moe_a2a::max_quantized_row_bytes(device_->name(), device_->max_shared_bytes());
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

std::shared_ptr<DispatchHandle> ExpertParallel::make_handle(const DispatchInput& input, int buffer) const {
  auto handle = std::make_shared<DispatchHandle>();
  handle->owner = this;
  handle->buffer = buffer;
  handle->num_tokens = input.num_tokens;
  handle->row_dtype = input.row_dtype();
  return handle;
}

std::shared_ptr<DispatchHandle> ExpertParallel::dispatch_send(const DispatchInput& input, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require_open();
  raise_waits();
  const int buffer = next_buffer(), num_blocks = dispatch_blocks(input.num_tokens, place);
  auto handle = make_handle(input, buffer);
  device_->launch(send_args(input, buffer), num_blocks, place.stream);
  take(buffer, handle);
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
  } catch (const BadRouting& error) {
    release(handle, place, error.what());  // the caller has no handle to go on with
    throw;
  }
}

std::shared_ptr<DispatchHandle> ExpertParallel::dispatch(const DispatchInput& input, Layout layout,
                                                         int expert_alignment, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  if (launches_halves()) {
    auto handle = dispatch_send(input, place);
    try {
      dispatch_recv(*handle, layout, expert_alignment, place);
    } catch (const BadRouting&) {
      release(*handle, place);  // the caller gets no handle, and without a credit the peers would wait for this buffer
      throw;
    }
    return handle;
  }
  require_open();
  raise_waits();
  const int buffer = next_buffer(), num_blocks = std::max(2, dispatch_blocks(input.num_tokens, place));
  auto handle = make_handle(input, buffer);
  handle->layout = layout;
  handle->expert_alignment = expert_alignment;
  handle->stage = Stage::kReceived;
  device_->launch(DispatchArgs{.send = send_args(input, buffer),
                               .recv = {.context = context(),
                                        .buffer = buffer,
                                        .layout = layout,
                                        .expert_alignment = expert_alignment,
                                        .row_dtype = input.row_dtype()},
                               .num_send_blocks = dispatch_senders(num_blocks)},
                  num_blocks, place.stream);
  take(buffer, handle);
  return handle;
}

int64_t ExpertParallel::num_positions(const DispatchHandle& handle) const {
  return handle.layout == Layout::kMasked ? config().num_local_experts() * config().row_capacity()
                                          : route_list_capacity(config(), handle.expert_alignment);
}

void ExpertParallel::gather_rows(const DispatchHandle& handle, void* expert_x, float* expert_x_scales,
                                 const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, Stage::kReceived, Stage::kReceived, "the expert layout");
  device_->launch(GatherRowsArgs{.context = context(),
                                 .buffer = handle.buffer,
                                 .layout = handle.layout,
                                 .row_dtype = handle.row_dtype,
                                 .num_positions = num_positions(handle),
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
  handle.stage = device_->is_synchronous() ? Stage::kClosed : Stage::kCombined;
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
  if (handle.keeps_own_sums) {
    throw std::runtime_error("combine_recv got a handle whose combine was refused on rank " +
                             std::to_string(config().rank) + "; call combine() again, with the same y");
  }
  const int num_blocks = combine_blocks(handle.num_tokens, place);
  handle.is_refusal_raised = false;
  device_->launch(recv_args(handle, combined_x), num_blocks, place.stream);
  try {
    after_launch();
  } catch (const PeerRefused& refused) {
    if (refused.is_final) {
      finish_combine(handle);
    } else {
      ++handle.attempt;  // what this rank has sent stands; the call may be made again
    }
    throw;
  }
  finish_combine(handle);
}

void ExpertParallel::combine(DispatchHandle& handle, const Rows& y, int64_t num_y_rows, bool presummed,
                             void* combined_x, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, Stage::kReceived, Stage::kCombineSent, "combine");
  if (launches_halves()) {
    if (handle.stage == Stage::kReceived) combine_send(handle, y, num_y_rows, presummed, place);
    return combine_recv(handle, combined_x, place);
  }
  raise_waits();
  const int num_blocks = std::max(2, combine_blocks(handle.num_tokens, place));
  CombineSendArgs send = send_args(handle, y, num_y_rows, presummed);
  send.is_sent = handle.stage == Stage::kCombineSent;
  handle.keeps_own_sums = presummed;
  handle.is_refusal_raised = false;
  device_->launch(CombineArgs{.send = send,
                              .recv = recv_args(handle, combined_x),
                              .num_send_blocks = combine_senders(num_blocks, presummed, config().num_ranks)},
                  num_blocks, place.stream);
  finish_combine(handle);
}

// ---- the end

void ExpertParallel::check() {
  const CallGate::Turn turn = gate_.enter();
  require_open();
  device_->synchronize();
  raise_reported();
}

}  // namespace moe_a2a
