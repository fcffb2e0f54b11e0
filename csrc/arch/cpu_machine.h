// The CPU as the host sees it: memory that processes share, and launches.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "arch/block_pool.h"
#include "arch/launch_site.h"
#include "arch/memory_handle.h"

namespace moe_a2a {

class SharedHeap;

class CpuMachine {
 public:
  explicit CpuMachine(int /*device*/) {}
  CpuMachine(const CpuMachine&) = delete;
  CpuMachine& operator=(const CpuMachine&) = delete;
  ~CpuMachine();

  static constexpr const char* kName = "cpu";
  // Ranks usually outnumber cores, so one block each.
  static constexpr int kDefaultBlocks = 1;
  static bool is_synchronous() { return true; }

  // Zeroed memory that every rank can map: a nameless file, see arch/shared_file.h.
  std::byte* allocate_symmetric(size_t nbytes, int num_ranks, MemoryHandle* handle);
  // Throws unless the memory is what the handle says. `timeout_seconds`: how long to wait for an owner in another pid
  // namespace. Follow with close_peer(), or with confirm_peer() once all peers are open: an owner whose peers have all
  // confirmed closes its file.
  std::byte* open_peer(const MemoryHandle& handle, double timeout_seconds);
  void close_peer(std::byte* memory);
  void confirm_peer(std::byte* memory, int own_rank);
  void close_all();

  std::byte* allocate_local(size_t nbytes);         // zeroed; untouched pages take no memory
  std::byte* allocate_host_visible(size_t nbytes);  // zeroed, read by the host while kernels run
  void clear(void* memory, size_t nbytes) { std::memset(memory, 0, nbytes); }
  void copy_to_host(void* target, const void* source, size_t nbytes) { std::memcpy(target, source, nbytes); }
  void copy_to_device(void* target, const void* source, size_t nbytes) { std::memcpy(target, source, nbytes); }
  void synchronize() {}
  void order_streams(void* /*earlier*/, void* /*later*/) {}  // the calling thread orders its work
  static bool is_capturing(void* /*stream*/) { return false; }
  void* own_stream() { return nullptr; }
  // Ends the waits of the running launch and of all later ones. Callable from any thread.
  void interrupt() { pool_.interrupt(); }
  bool is_interrupted() const { return pool_.is_interrupted(); }

  double clock_ticks_per_second() const;
  int max_blocks() const { return 1024; }

  LaunchSite launch_site() { return {.block_pool = &pool_, .max_shared_bytes = int64_t{1} << 30}; }

 private:
  void name_own_files();

  BlockPool pool_;
  // Threads of one process share a mapping; it stays until the last of them releases it.
  std::vector<std::shared_ptr<SharedHeap>> own_, peers_;
  std::vector<std::shared_ptr<void>> local_;
};

}  // namespace moe_a2a
