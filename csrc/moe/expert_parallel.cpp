#include "moe/expert_parallel.h"

#include <algorithm>
#include <utility>

#include "comm/comm_kernels.h"
#include "comm/goodbye.h"
#include "comm/symmetric_heap.h"
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

// Of the communicator's region and ours, one behind the other.
RegionSize size_of(const MoeConfig& config) {
  RegionSize comm;
  make_comm_region(config.num_ranks, nullptr, nullptr, &comm);
  Context context;
  context.config = config;
  const RegionSize own = place_region(context, nullptr, nullptr);
  return {comm.symmetric_bytes + own.symmetric_bytes, comm.local_bytes + own.local_bytes + sizeof(HeapView),
          comm.layout_digest ^ own.layout_digest};
}

}  // namespace

size_t ExpertParallel::nbytes_for(const MoeConfig& config) {
  const RegionSize size = size_of(config);
  return size.symmetric_bytes + size.local_bytes;
}

ExpertParallel::ExpertParallel(const MoeConfig& config, const std::string& target, int device, double timeout_seconds)
    : device_(make_device(target, device)),
      open_(config.num_buffers),
      newest_(config.num_buffers),
      last_buffer_(config.num_buffers - 1) {
  device_->add(comm_kernels(target));
  device_->add(dispatch_kernels(target));
  device_->add(combine_kernels(target));
  device_->add(link_floor_kernels(target));
  context_.config = config;
  size_ = size_of(config);
  MemoryHandle memory;
  own_heap_ = device_->allocate_symmetric(size_.symmetric_bytes, config.num_ranks, &memory);
  local_ = device_->allocate_local(size_.local_bytes);
  report_ = new (device_->allocate_host_visible(sizeof(Report))) Report;
  RegionSize comm;
  comm_.region = make_comm_region(config.num_ranks, own_heap_, local_, &comm);
  device_heap_ = reinterpret_cast<HeapView*>(local_ + size_.local_bytes - sizeof(HeapView));
  const double ticks = device_->clock_ticks_per_second();
  comm_.wait = {.timeout_ticks = static_cast<uint64_t>(timeout_seconds * ticks),
                .ticks_per_second = ticks,
                .report = report_,
                .num_reports = comm_.region.num_reports.data,
                .poison = comm_.region.poison.data,
                .comm_heap = device_heap_};
  comm_.max_shared_bytes = static_cast<int>(device_->max_shared_bytes());
  static_cast<ClientContext&>(context_) = comm_;
  place_region(context_, own_heap_ + comm.symmetric_bytes, local_ + comm.local_bytes);
  comm_handle_ = make_comm_handle(config, target, memory, size_.layout_digest);
}

ExpertParallel::~ExpertParallel() {
  closed_ = true;
  // Without a close(), or with a peer that never came to its own, a peer may still write here: then the memory of a
  // device stays until the process ends. A mapping of the CPU can always go, every process has its own.
  if (device_->is_synchronous() || parted_) device_->close();
}

void ExpertParallel::connect(const std::vector<CommHandle>& handles) {
  if (static_cast<int>(handles.size()) != config().num_ranks) {
    throw std::invalid_argument("got " + std::to_string(handles.size()) + " handles for num_ranks=" +
                                std::to_string(config().num_ranks) + "; pass one per rank, in rank order");
  }
  if (const std::string why = disagreement(handles); !why.empty()) throw std::invalid_argument(why);
  if (connected_) throw std::runtime_error("the handles are already set");
  std::vector<MemoryHandle> memory;
  for (const CommHandle& handle : handles) memory.push_back(handle.memory);
  comm_.heap = context_.heap = connect_heap(*device_, own_heap_, config().rank, memory);
  device_->copy_to_device(device_heap_, &comm_.heap, sizeof(HeapView));
  connected_ = true;
}

// ---- buffers and handles

void ExpertParallel::require_open() const {
  if (closed_) throw std::runtime_error("this ExpertParallel is closed");
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

int ExpertParallel::blocks(const LaunchPlace& place, int by_table) const {
  const int asked = place.num_blocks > 0 ? place.num_blocks : by_table;
  return asked > 0 ? std::min(asked, device_->max_blocks()) : device_->default_blocks();
}

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
  if (device_->is_synchronous()) {
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
  require(handle, Stage::kReceived, Stage::kReceived, "combine_send");
  raise_waits();
  const int num_blocks = combine_blocks(handle.num_tokens, place);
  device_->launch(send_args(handle, y, num_y_rows, presummed), num_blocks, place.stream);
  handle.stage = Stage::kCombineSent;
  after_launch();
}

void ExpertParallel::combine_recv(DispatchHandle& handle, void* combined_x, const LaunchPlace& place) {
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
  require(handle, Stage::kReceived, Stage::kCombineSent, "combine");
  if (device_->is_synchronous()) {
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
  require_open();
  device_->synchronize();
  raise_reported();
}

void ExpertParallel::close() {
  if (closed_) return;
  if (connected_ && !device_->is_synchronous()) part();
  closed_ = true;
  for (auto& handle : open_) {
    if (handle) handle->stage = Stage::kClosed;
    handle = nullptr;
  }
  raise_bad_routing();
}

void ExpertParallel::part() {
  if (__atomic_load_n(&report_->is_complete, __ATOMIC_ACQUIRE) != 0) return;  // somebody is missing already
  GoodbyeArgs args{.context = context()};                                     // the part that every client has
  const auto limit = static_cast<uint64_t>(kPartingSeconds * context_.wait.ticks_per_second);
  args.context.wait.timeout_ticks = std::min(args.context.wait.timeout_ticks, limit);
  args.context.wait.poison = nullptr;  // who leaves gives nobody up: others may wait longer for whoever is late
  device_->synchronize();
  device_->launch(args, 1, nullptr);
  device_->synchronize();
  parted_ = __atomic_load_n(&report_->is_complete, __ATOMIC_ACQUIRE) == 0;
}

}  // namespace moe_a2a
