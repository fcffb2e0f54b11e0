#include "arch/cpu_machine.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>

namespace moe_a2a {
namespace {

constexpr size_t kHeader = 4096;  // one page before the heap: how many ranks have mapped it
constexpr const char* kDirectory = "/dev/shm";
constexpr const char* kPrefix = "moe_a2a.";

uint64_t pid_namespace() {
  struct stat status{};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

// moe_a2a.<pid namespace>.<pid>.<random>
std::string new_name() {
  return kPrefix + std::to_string(pid_namespace()) + "." + std::to_string(getpid()) + "." +
         std::to_string(std::random_device{}());
}

// A process that was killed between creating its object and the last mapping leaves a name; its successors remove it.
void unlink_names_of_dead_processes() {
  DIR* directory = opendir(kDirectory);
  if (directory == nullptr) return;
  const std::string ours = kPrefix + std::to_string(pid_namespace()) + ".";
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name.compare(0, ours.size(), ours) != 0) continue;
    const int pid = std::atoi(name.c_str() + ours.size());
    if (pid > 0 && kill(pid, 0) != 0 && errno == ESRCH) shm_unlink(("/" + name).c_str());
  }
  closedir(directory);
}

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

[[noreturn]] void fail_for_space(size_t nbytes) {
  struct statvfs status{};
  std::string available = "unknown";
  if (statvfs(kDirectory, &status) == 0) {
    available = std::to_string(static_cast<unsigned long long>(status.f_bavail) * status.f_frsize);
  }
  throw std::runtime_error("the symmetric heap needs " + std::to_string(nbytes) + " bytes of " + kDirectory +
                           ", which has " + available +
                           " left; pass a smaller num_max_tokens_per_rank or num_buffers, or enlarge " + kDirectory +
                           " (in a container: --shm-size)");
}

std::shared_ptr<void> map(int flags, int fd, size_t nbytes, const char* what) {
  void* start = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (start == MAP_FAILED) fail("mmap of " + std::to_string(nbytes) + " bytes of " + what, errno);
  return {start, [nbytes](void* mapped) { munmap(mapped, nbytes); }};
}

// This process's own heaps by address, for ranks that are its threads.
class OwnHeaps {
 public:
  static OwnHeaps& instance() {
    static OwnHeaps heaps;
    return heaps;
  }
  void add(const std::shared_ptr<void>& mapping) {
    std::lock_guard lock(mutex_);
    std::erase_if(heaps_, [](const auto& entry) { return entry.second.expired(); });
    heaps_[mapping.get()] = mapping;
  }
  std::shared_ptr<void> find(void* start) {
    std::lock_guard lock(mutex_);
    const auto found = heaps_.find(start);
    return found == heaps_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<void*, std::weak_ptr<void>> heaps_;
};

std::atomic<int>* mapped_count(void* start) { return static_cast<std::atomic<int>*>(start); }

}  // namespace

CpuMachine::~CpuMachine() { close_all(); }

std::byte* CpuMachine::allocate_symmetric(size_t nbytes, int num_ranks, MemoryHandle* handle) {
  unlink_names_of_dead_processes();
  const size_t total = nbytes + kHeader;
  name_ = new_name();
  const int fd = shm_open(("/" + name_).c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  if (fd < 0) fail("shm_open of the symmetric heap", errno);
  const int error = posix_fallocate(fd, 0, static_cast<off_t>(total));  // reserves: a full disk must not kill us later
  if (error != 0) {
    close(fd);
    shm_unlink(("/" + name_).c_str());
    if (error == ENOSPC || error == EFBIG || error == ENOMEM) fail_for_space(total);
    fail("posix_fallocate of the symmetric heap", error);
  }
  mappings_.push_back(map(MAP_SHARED, fd, total, "the symmetric heap"));
  close(fd);
  void* start = mappings_.back().get();
  OwnHeaps::instance().add(mappings_.back());
  if (num_ranks == 1) shm_unlink(("/" + name_).c_str());
  *handle = {.nbytes = nbytes,
             .address = reinterpret_cast<uint64_t>(start) + kHeader,
             .machine_id = this_machine_id(),
             .pid = getpid()};
  std::strncpy(handle->opaque, name_.c_str(), sizeof(handle->opaque) - 1);
  return static_cast<std::byte*>(start) + kHeader;
}

std::byte* CpuMachine::open_peer(const MemoryHandle& handle, int num_ranks) {
  if (handle.machine_id != this_machine_id()) {
    throw std::runtime_error("a rank of the group is on another machine; pass a group whose ranks share this one");
  }
  const std::string name = std::string("/") + handle.opaque;
  if (handle.pid == getpid()) {
    mappings_.push_back(OwnHeaps::instance().find(reinterpret_cast<void*>(handle.address - kHeader)));
    if (mappings_.back() == nullptr) throw std::runtime_error("a rank of this process has closed its heap already");
  } else {
    const int fd = shm_open(name.c_str(), O_RDWR, 0);
    if (fd < 0) fail("shm_open of the heap of process " + std::to_string(handle.pid), errno);
    mappings_.push_back(map(MAP_SHARED, fd, handle.nbytes + kHeader, "the symmetric heap"));
    close(fd);
  }
  void* start = mappings_.back().get();
  // The owner maps at creation; whoever completes the set of the others takes the name away.
  if (mapped_count(start)->fetch_add(1) + 1 == num_ranks - 1) shm_unlink(name.c_str());
  return static_cast<std::byte*>(start) + kHeader;
}

void CpuMachine::close_all() {
  mappings_.clear();
  if (!name_.empty()) shm_unlink(("/" + name_).c_str());  // gone already, unless a peer never came
  name_.clear();
}

std::byte* CpuMachine::allocate_local(size_t nbytes) {
  mappings_.push_back(map(MAP_PRIVATE | MAP_ANONYMOUS, -1, nbytes, "local memory"));
  return static_cast<std::byte*>(mappings_.back().get());
}

std::byte* CpuMachine::allocate_host_visible(size_t nbytes) { return allocate_local(nbytes); }

double CpuMachine::clock_ticks_per_second() const { return 1e9; }

}  // namespace moe_a2a
