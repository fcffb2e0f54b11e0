#include "comm/client.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "arch/interrupt.h"
#include "arch/out_of_memory.h"
#include "comm/comm_kernels.h"
#include "comm/goodbye.h"
#include "comm/symmetric_heap.h"

namespace moe_a2a {
namespace {

// Pairs with the release in write_report().
bool is_complete(const Report& report) { return __atomic_load_n(&report.is_complete, __ATOMIC_ACQUIRE) != 0; }

}  // namespace

// ---- memory and peers

Client::Client(const Member& member, const Vocabulary& vocabulary, ClientContext& context,
               std::shared_ptr<OrderedLaunches> ordered, int most_blocks)
    : member_(member),
      vocabulary_(vocabulary),
      device_(make_device(member.target, member.device)),
      gate_(vocabulary.client),
      context_(context),
      ordered_(std::move(ordered)),
      // A communicator launches nothing concurrently with other clients.
      share_(member.device, !ordered_ && &vocabulary != &kCommVocabulary && member.shares_a_gpu(), most_blocks),
      tracer_(*device_, context.wait.trace) {
  device_->add(comm_kernels(member.target));
  require_share();
}

int Client::share_of_device() const {
  const int most = device_->num_resident_blocks();
  if (device_->is_synchronous()) return most;
  return (ordered_ ? ordered_->share() : share_).of(most, device_->num_dies());
}

void Client::require_share() const {
  const int most = device_->num_resident_blocks(), num_clients = share_.num_clients();
  const int can_share = most_clients(most, device_->num_dies());
  if (device_->is_synchronous() || num_clients <= can_share || num_clients < 2) return;
  throw std::runtime_error(
      "rank " + std::to_string(member_.rank) + ": " + std::to_string(num_clients) + " objects would share the " +
      std::to_string(most) +
      " compute units of this device, whose kernels wait for other ranks at the same time; at most " +
      std::to_string(can_share) + " can: close() one first");
}

void Client::allocate(const std::vector<AgreedField>& fields, const Place& place) {
  try {
    size_ = place(nullptr, nullptr);
    allocate_symmetric(fields);
    local_ = device_->allocate_local(size_.local_bytes);
    place(own_heap_, local_);
    allocate_report();
  } catch (const OutOfMemory& error) {
    device_->close();
    throw std::runtime_error(error.what() +
                             (vocabulary_.memory_advice ? std::string("; ") + vocabulary_.memory_advice : ""));
  } catch (...) {
    device_->close();  // no peer knows of this memory yet
    throw;
  }
}

void Client::allocate_symmetric(const std::vector<AgreedField>& fields) {
  own_heap_ = device_->allocate_symmetric(size_.symmetric_bytes, member_.num_ranks, &handle_.memory);
  handle_.layout_digest = size_.layout_digest;
  handle_.rank = member_.rank;
  handle_.num_ranks = member_.num_ranks;
  handle_.num_fields = static_cast<int32_t>(fields.size());
  std::copy(fields.begin(), fields.end(), handle_.field);
  std::strncpy(handle_.client, name(), sizeof(handle_.client) - 1);
  std::strncpy(handle_.target, member_.target.c_str(), sizeof(handle_.target) - 1);
  handle_.seal();
}

void Client::allocate_report() {
  reports_ = new (device_->allocate_host_visible(sizeof(Reports))) Reports;
  const double ticks = device_->clock_ticks_per_second();
  context_.wait.timeout_ticks = static_cast<uint64_t>(member_.timeout_seconds * ticks);
  context_.wait.ticks_per_second = ticks;
  context_.wait.reports = reports_;
  context_.max_shared_bytes = static_cast<int>(device_->max_shared_bytes());
}

void Client::link(const PoisonLink& poison) {
  poison_ = poison;
  context_.wait.poison = poison.word;
  context_.wait.comm_heap = poison.device_heap;
}

// A peer may still write here if close() was not called or a peer never closed; device memory then stays until the
// process ends. CPU mappings can always go: each process has its own.
Client::~Client() {
  closed_ = true;
  if (!device_->is_synchronous() && (may_be_mapped_ || !gate_.is_own_process())) return;
  try {
    device_->close();
  } catch (const std::exception&) {  // a device that has failed cannot be selected: its memory goes with the process
  }
}

RegionHandle Client::handle() {
  may_be_mapped_ = true;
  return handle_;
}

void Client::connect(const std::vector<RegionHandle>& handles) {
  const CallGate::Turn turn = gate_.enter();
  if (is_closed()) throw std::runtime_error(std::string("this ") + name() + " is closed");
  if (static_cast<int>(handles.size()) != member_.num_ranks) {
    throw std::invalid_argument("got " + std::to_string(handles.size()) + " handles for num_ranks=" +
                                std::to_string(member_.num_ranks) + "; pass one per rank, in rank order");
  }
  for (const std::string& why : {disagreement(handles), not_own(handles, handle_)}) {
    if (!why.empty()) throw std::invalid_argument(why + " (seen by rank " + std::to_string(member_.rank) + ")");
  }
  if (connected_) throw std::runtime_error("the handles are already set");
  std::vector<MemoryHandle> memory;
  for (const RegionHandle& handle : handles) memory.push_back(handle.memory);
  context_.heap = connect_heap(*device_, own_heap_, member_.rank, memory, member_.timeout_seconds);
  handles_digest_ = digest_of(handles);
  connected_ = true;
  try {
    after_connect(context_.heap);
  } catch (...) {
    disconnect();
    throw;
  }
}

// Each rank writes the digest of its handles into the memory of every rank that it has mapped. If it has mapped another
// object of a rank, that rank's own object gets no digest, and its wait ends at the deadline. A wrong digest is an
// error only at the deadline too, since a rank may connect again with better handles.
void Client::confirm_handles() {
  const CallGate::Turn turn = gate_.enter();
  require_open();
  uint64_t* place = context_.services.handles_digest.at(member_.rank);
  for (int r = 0; r < member_.num_ranks; ++r) {
    uint64_t* there = context_.heap.peer(r, place);
    if (device_->is_synchronous()) {
      __atomic_store_n(there, handles_digest_, __ATOMIC_RELEASE);
    } else {
      device_->copy_to_device(there, &handles_digest_, sizeof(handles_digest_));
    }
  }
  const auto start = std::chrono::steady_clock::now();
  for (int r = 0; r < member_.num_ranks; ++r) await_mapping(r, start);
}

void Client::await_mapping(int peer, std::chrono::steady_clock::time_point start) const {
  const std::string who = "rank " + std::to_string(member_.rank), other = "rank " + std::to_string(peer);
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  uint64_t seen = 0;
  while ((seen = mapped_by(peer)) != handles_digest_ && seconds() < member_.timeout_seconds) {
    if (closing_) throw std::runtime_error(who + " left set_comm_handles() because close() was called during it");
    if (is_host_interrupted()) throw Interrupted(who + " was interrupted while it waited for " + other + " to connect");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (seen == handles_digest_) return;
  const std::string ask = "; pass the handles of the same objects, in rank order, to set_comm_handles() on every rank";
  if (seen != 0) {
    throw std::invalid_argument(other + " was given different handles from " + who +
                                ": they do not all belong to one set of objects" + ask);
  }
  const double waited = seconds();
  throw PeerTimeout({.reason = Reason::kTimeout, .rank = member_.rank, .peer = peer, .elapsed_seconds = waited},
                    "set_comm_handles", "memory",
                    who + " waited " + std::to_string(waited) + " s for " + other + " to map this " + name() +
                        ": it has set no handles, or those of another object of " + who + ask);
}

// The digest of the handles with which that rank has mapped this one's memory; 0 if it has not.
uint64_t Client::mapped_by(int peer) const {
  const uint64_t* place = context_.services.handles_digest.at(peer);
  if (device_->is_synchronous()) return __atomic_load_n(place, __ATOMIC_ACQUIRE);
  uint64_t digest = 0;
  device_->copy_to_host(&digest, place, sizeof(digest));
  return digest;
}

void Client::disconnect() {
  const CallGate::Turn turn = gate_.enter();
  if (!connected_.exchange(false)) return;
  for (int r = 0; r < member_.num_ranks; ++r) {
    if (r != member_.rank) device_->close_peer(context_.heap.base[r]);
  }
  context_.heap = {};
}

bool Client::owns(const void* address) const {
  const auto* byte = static_cast<const std::byte*>(address);
  const auto lies_in = [&](const std::byte* memory, size_t size) { return byte >= memory && byte < memory + size; };
  return lies_in(own_heap_, size_.symmetric_bytes) || lies_in(local_, size_.local_bytes);
}

void Client::require_open() const {
  gate_.require_own_process();
  if (is_closed()) throw std::runtime_error(std::string("this ") + name() + " is closed");
  if (!connected_) throw std::runtime_error("no peers yet; call set_comm_handles() with the handles of all ranks");
}

// ---- reports

void Client::raise_waits() {
  raise_timeouts();
  raise_refusal();
}

void Client::raise_timeouts() {
  leave_if_interrupted();
  raise_failure();
}

void Client::raise_failure() {
  if (!is_complete(reports_->failure)) return;
  *poison_.has_raised = true;
  raise_report(reports_->failure, vocabulary_);
}

// The object stays usable: a later launch may report again.
void Client::raise_refusal() {
  if (!is_complete(reports_->refusal)) return;
  const Report report = reports_->refusal;
  reports_->refusal.is_complete = 0;
  __atomic_store_n(&reports_->refusal.num_noticed, report.num_noticed + 1, __ATOMIC_RELEASE);
  if (!device_->is_synchronous() && is_known_refusal(report)) return;
  raise_in_own_words(report);
  raise_report(report, vocabulary_);
}

void Client::raise_reported() {
  const CallGate::Turn turn = gate_.enter();
  raise_waits();
}

void Client::check() {
  const CallGate::Turn turn = gate_.enter();
  require_open();
  device_->synchronize();
  raise_reported();
}

// ---- leaving in the middle of a call

// Other ranks must not wait for a rank that has left: they leave too, and name it.
void Client::poison_peers() {
  if (!device_->is_synchronous()) return;  // the host can neither write device memory nor end waits there
  const uint32_t word = Poison::pack(member_.rank, member_.rank);
  for (int r = 0; r < member_.num_ranks; ++r) {
    __atomic_store_n(poison_.heap->peer(r, poison_.word), word, __ATOMIC_RELAXED);
  }
}

void Client::leave_if_interrupted() {
  if (!device_->is_interrupted()) return;
  const std::string who = "rank " + std::to_string(member_.rank);
  if (closing_) {
    poison_peers();
    throw std::runtime_error(who + " left a call because close() was called during it");
  }
  if (interrupted_)
    throw std::runtime_error(who + ": an earlier call was interrupted; close this object, make a new one");
  interrupted_ = true;
  poison_peers();
  throw Interrupted(who + " was interrupted while it waited for other ranks; close this object, make a new one");
}

void Client::close() {
  if (closed_ || !gate_.is_own_process()) return;
  closing_ = true;
  device_->interrupt();
  if (is_inside_host_hook() && gate_.is_inside()) return;  // the interrupted call leaves on its own
  const CallGate::Turn turn = gate_.enter();
  if (closed_) return;
  const std::exception_ptr reported = connected_ && !device_->is_synchronous() ? leave_peers() : nullptr;
  closed_ = true;
  share_.leave();
  try {
    after_close();
  } catch (...) {
    if (!reported) throw;
  }
  if (reported) std::rethrow_exception(reported);
}

// Waits for what is queued, then for the other ranks to close. Returns what the kernels have reported, unless this rank
// already knows that a wait gave up: closing the other clients is then part of continuing without the missing rank.
std::exception_ptr Client::leave_peers() {
  device_->synchronize();
  std::exception_ptr reported;
  if (!*poison_.has_raised) {
    try {
      raise_failure();
      raise_refusal();
    } catch (...) {
      reported = std::current_exception();
    }
  }
  if (!is_complete(reports_->failure)) say_goodbye();  // else a peer is missing already
  return reported;
}

void Client::say_goodbye() {
  GoodbyeArgs args{.context = context_};
  const double seconds = *poison_.has_raised ? kGoodbyeSecondsIfOneIsMissing : kGoodbyeSeconds;
  const auto limit = static_cast<uint64_t>(seconds * context_.wait.ticks_per_second);
  args.context.wait.timeout_ticks = std::min(args.context.wait.timeout_ticks, limit);
  args.context.wait.poison = nullptr;  // a closing rank tells nobody that it gave up: others may wait longer
  launch(args, 1, device_->own_stream());
  device_->synchronize();
  if (ordered_) ordered_->forget(device_->own_stream());
  may_be_mapped_ = is_complete(reports_->failure);
}

}  // namespace moe_a2a
