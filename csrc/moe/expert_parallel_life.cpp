// How a host object begins and ends: its memory, its peers, closing, and leaving in the middle of a call.
#include <algorithm>

#include "arch/interrupt.h"
#include "comm/comm_kernels.h"
#include "comm/goodbye.h"
#include "comm/symmetric_heap.h"
#include "moe/expert_parallel.h"
#include "moe/moe_kernels.h"

namespace moe_a2a {
namespace {

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
      last_buffer_(config.num_buffers - 1),
      timeout_seconds_(timeout_seconds) {
  context_.config = config;
  device_->add(comm_kernels(target));
  device_->add(dispatch_kernels(target));
  device_->add(combine_kernels(target));
  device_->add(link_floor_kernels(target));
  try {
    allocate(target, timeout_seconds);
  } catch (...) {
    device_->close();  // nobody else knows of this memory yet
    throw;
  }
}

void ExpertParallel::allocate(const std::string& target, double timeout_seconds) {
  const MoeConfig& config = context_.config;
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

// Without a close(), or with a peer that never came to its own, a peer may still write here: then the memory of a
// device stays until the process ends. A mapping of the CPU can always go, every process has its own.
ExpertParallel::~ExpertParallel() {
  closed_ = true;
  if (device_->is_synchronous() || (!may_be_mapped_ && gate_.is_own_process())) device_->close();
}

void ExpertParallel::disconnect() {
  const CallGate::Turn turn = gate_.enter();
  if (!connected_.exchange(false)) return;
  for (int r = 0; r < config().num_ranks; ++r) {
    if (r != config().rank) device_->close_peer(comm_.heap.base[r]);
  }
  comm_.heap = context_.heap = {};
}

void ExpertParallel::connect(const std::vector<CommHandle>& handles) {
  const CallGate::Turn turn = gate_.enter();
  if (closed_ || closing_) throw std::runtime_error("this ExpertParallel is closed");
  if (static_cast<int>(handles.size()) != config().num_ranks) {
    throw std::invalid_argument("got " + std::to_string(handles.size()) + " handles for num_ranks=" +
                                std::to_string(config().num_ranks) + "; pass one per rank, in rank order");
  }
  for (const std::string& why : {disagreement(handles), not_own(handles, comm_handle_)}) {
    if (!why.empty()) throw std::invalid_argument(why + " (seen by rank " + std::to_string(config().rank) + ")");
  }
  if (connected_) throw std::runtime_error("the handles are already set");
  std::vector<MemoryHandle> memory;
  for (const CommHandle& handle : handles) memory.push_back(handle.memory);
  comm_.heap = context_.heap = connect_heap(*device_, own_heap_, config().rank, memory, timeout_seconds_);
  device_->copy_to_device(device_heap_, &comm_.heap, sizeof(HeapView));
  connected_ = true;
}

// ---- leaving in the middle of a call

// Other ranks must not wait for a rank that has left: they leave as well, and name it.
void ExpertParallel::poison_peers() {
  if (!device_->is_synchronous()) return;  // a device's memory is not written from here, its waits are not interrupted
  const int rank = config().rank;
  const auto word = static_cast<uint32_t>(rank + 1) << 8 | static_cast<uint32_t>(rank + 1);
  for (int r = 0; r < config().num_ranks; ++r) {
    __atomic_store_n(comm_.heap.peer(r, comm_.wait.poison), word, __ATOMIC_RELAXED);
  }
}

void ExpertParallel::leave_if_interrupted() {
  if (!device_->is_interrupted()) return;
  const std::string who = "rank " + std::to_string(config().rank);
  if (closing_) {
    poison_peers();
    throw std::runtime_error(who + " left a call because close() was called meanwhile");
  }
  if (interrupted_)
    throw std::runtime_error(who + ": an earlier call was interrupted; close this object, make a new one");
  interrupted_ = true;
  poison_peers();
  throw Interrupted(who + " was interrupted while it waited for other ranks; close this object, make a new one");
}

void ExpertParallel::close() {
  if (closed_ || !gate_.is_own_process()) return;
  closing_ = true;
  device_->interrupt();
  if (is_inside_host_hook() && gate_.is_inside()) return;  // the call that the signal came in leaves by itself
  const CallGate::Turn turn = gate_.enter();
  if (closed_) return;
  if (connected_ && !device_->is_synchronous()) part();
  closed_ = true;
  for (auto& handle : open_) {
    if (handle) handle->stage = DispatchHandle::Stage::kClosed;
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
  may_be_mapped_ = __atomic_load_n(&report_->is_complete, __ATOMIC_ACQUIRE) != 0;
}

}  // namespace moe_a2a
