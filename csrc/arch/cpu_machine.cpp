#include "arch/cpu_machine.h"

#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "arch/process.h"
#include "arch/shared_file.h"

namespace moe_a2a {
namespace {

// One page before the heap: its owner, and which of its peers have mapped it.
struct HeapHeader {
  uint64_t owner[2];
  uint64_t inode;
  int32_t num_peers;
  std::atomic<uint64_t> confirmed;  // a bit per rank: one that maps it twice counts once

  bool is_confirmed() const { return std::popcount(confirmed.load()) >= num_peers; }
};
constexpr size_t kHeaderBytes = 4096;

std::shared_ptr<void> map(int flags, int fd, size_t nbytes, const char* what) {
  void* start = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (start == MAP_FAILED) {
    throw std::runtime_error("mmap of " + std::to_string(nbytes) + " bytes of " + what + ": " + std::strerror(errno));
  }
  return {start, [nbytes](void* mapped) { munmap(mapped, nbytes); }};
}

}  // namespace

// A mapping of a heap and, as long as a peer may still need it, its file.
class SharedHeap {
 public:
  // This rank's heap.
  SharedHeap(size_t nbytes, int num_ranks) : owner_(this_process()), total_(nbytes + kHeaderBytes) {
    file_ = make_shared_file(total_, &location_);
    mapping_ = map(MAP_SHARED, file_.get(), total_, "the symmetric heap");
    auto* header = new (mapping_.get()) HeapHeader{{owner_.word[0], owner_.word[1]}, location_.inode, num_ranks - 1, 0};
    header->confirmed.store(0, std::memory_order_release);
    close_file_if_confirmed();
  }
  // The heap of a peer in another process.
  SharedHeap(const MemoryHandle& handle, FileDescriptor file)
      : owner_(handle.process), total_(handle.nbytes + kHeaderBytes) {
    std::memcpy(&location_, handle.opaque, sizeof(location_));
    mapping_ = map(MAP_SHARED, file.get(), total_, "the symmetric heap of another rank");
    const HeapHeader& seen = header();
    if (seen.owner[0] != owner_.word[0] || seen.owner[1] != owner_.word[1] || seen.inode != location_.inode) {
      throw std::runtime_error("the heap of process " + std::to_string(owner_.pid) +
                               " now belongs to another process; pass the handle of a live object");
    }
  }
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;
  ~SharedHeap() {
    if (file_.is_open() && owner_ == this_process()) remove_name(location_, owner_);
  }

  std::byte* memory() const { return static_cast<std::byte*>(mapping_.get()) + kHeaderBytes; }
  size_t nbytes() const { return total_ - kHeaderBytes; }
  const FileLocation& location() const { return location_; }

  void name_file() {
    const std::lock_guard lock(mutex_);
    if (file_.is_open()) give_name(file_, location_, owner_);
  }
  void confirm(int rank) {
    header().confirmed.fetch_or(uint64_t{1} << rank);
    if (header().is_confirmed()) remove_name(location_, owner_);
  }
  void close_file_if_confirmed() {
    const std::lock_guard lock(mutex_);
    if (!file_.is_open() || !header().is_confirmed()) return;
    remove_name(location_, owner_);
    file_.reset();
  }

 private:
  HeapHeader& header() const { return *static_cast<HeapHeader*>(mapping_.get()); }

  ProcessIdentity owner_;
  size_t total_;
  FileLocation location_;
  std::mutex mutex_;
  FileDescriptor file_;  // open only in the owner
  std::shared_ptr<void> mapping_;
};

namespace {

// This process's heaps by address, for ranks that are threads of it.
class OwnHeaps {
 public:
  static OwnHeaps& instance() { return *current; }

  void add(const std::shared_ptr<SharedHeap>& heap) {
    const std::lock_guard lock(mutex_);
    std::erase_if(heaps_, [](const auto& entry) { return entry.second.expired(); });
    for (const auto& entry : heaps_) {  // so that a process with many objects does not run out of file descriptors
      if (const auto live = entry.second.lock()) live->close_file_if_confirmed();
    }
    heaps_[reinterpret_cast<uint64_t>(heap->memory())] = heap;
  }
  std::shared_ptr<SharedHeap> find(uint64_t address) {
    const std::lock_guard lock(mutex_);
    const auto found = heaps_.find(address);
    return found == heaps_.end() ? nullptr : found->second.lock();
  }

 private:
  // Replaced in a forked child: it owns no heaps, and a thread that does not exist there may hold the lock.
  static OwnHeaps* current;
  [[maybe_unused]] static const int registered;

  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<SharedHeap>> heaps_;
};
OwnHeaps* OwnHeaps::current = new OwnHeaps;
const int OwnHeaps::registered = pthread_atfork(nullptr, nullptr, [] { current = new OwnHeaps; });

}  // namespace

CpuMachine::~CpuMachine() { CpuMachine::close(); }

std::byte* CpuMachine::allocate_symmetric(size_t nbytes, int num_ranks, MemoryHandle* handle) {
  own_.push_back(std::make_shared<SharedHeap>(nbytes, num_ranks));
  const SharedHeap& heap = *own_.back();
  OwnHeaps::instance().add(own_.back());
  *handle = {.nbytes = nbytes,
             .address = reinterpret_cast<uint64_t>(heap.memory()),
             .machine_id = this_machine_id(),
             .process = this_process()};
  static_assert(sizeof(FileLocation) <= sizeof(handle->opaque));
  std::memcpy(handle->opaque, &heap.location(), sizeof(FileLocation));
  return heap.memory();
}

std::byte* CpuMachine::open_peer(const MemoryHandle& handle, double timeout_seconds) {
  require_this_machine(handle);
  if (handle.process == this_process()) {
    auto heap = OwnHeaps::instance().find(handle.address);
    require_live(handle, heap == nullptr ? 0 : heap->nbytes());
    peers_.push_back(std::move(heap));
  } else {
    FileLocation location;
    std::memcpy(&location, handle.opaque, sizeof(location));
    FileDescriptor file = open_shared_file(location, handle.process, handle.nbytes + kHeaderBytes, timeout_seconds,
                                           [this] { name_own_files(); });
    peers_.push_back(std::make_shared<SharedHeap>(handle, std::move(file)));
  }
  return peers_.back()->memory();
}

void CpuMachine::close_peer(std::byte* memory) {
  std::erase_if(peers_, [memory](const auto& peer) { return peer->memory() == memory; });
}

void CpuMachine::confirm_peer(std::byte* memory, int own_rank) {
  for (const auto& peer : peers_) {
    if (peer->memory() == memory) peer->confirm(own_rank);
  }
}

void CpuMachine::name_own_files() {
  for (const auto& heap : own_) heap->name_file();
}

void CpuMachine::close() {
  own_.clear();
  peers_.clear();
  local_.clear();
}

std::byte* CpuMachine::allocate_local(size_t nbytes) {
  local_.push_back(map(MAP_PRIVATE | MAP_ANONYMOUS, -1, nbytes, "local memory"));
  return static_cast<std::byte*>(local_.back().get());
}

}  // namespace moe_a2a
