// The CPU as a Device: memory that processes share, and launches.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "arch/block_pool.h"
#include "arch/device.h"

namespace moe_a2a {

class SharedHeap;

class CpuMachine : public Device {
 public:
  explicit CpuMachine(int /*device*/) { site_ = {.block_pool = &pool_, .max_shared_bytes = int64_t{1} << 30}; }
  ~CpuMachine() override;

  int default_blocks() const override { return 1; }  // ranks usually outnumber cores
  int max_blocks() const override { return 1024; }
  int warps_per_block() const override { return 1; }
  bool is_synchronous() const override { return true; }
  bool needs_aligned_vectors() const override { return false; }
  double clock_ticks_per_second() const override { return 1e9; }

  // A nameless file, see arch/shared_file.h. An owner whose peers have all confirmed closes its file.
  std::byte* allocate_symmetric(size_t nbytes, int num_ranks, MemoryHandle* handle) override;
  std::byte* open_peer(const MemoryHandle& handle, double timeout_seconds) override;
  void close_peer(std::byte* memory) override;
  void confirm_peer(std::byte* memory, int own_rank) override;
  std::byte* allocate_local(size_t nbytes) override;  // untouched pages take no memory
  std::byte* allocate_host_visible(size_t nbytes) override { return allocate_local(nbytes); }
  void clear(void* memory, size_t nbytes) override { std::memset(memory, 0, nbytes); }
  void clear_in_order(void* memory, size_t nbytes, void* /*stream*/) override { std::memset(memory, 0, nbytes); }
  void copy_to_host(void* target, const void* source, size_t nbytes) override { std::memcpy(target, source, nbytes); }
  void copy_to_device(void* target, const void* source, size_t nbytes) override { std::memcpy(target, source, nbytes); }
  void synchronize() override {}
  void order_streams(void* /*earlier*/, void* /*later*/) override {}  // the calling thread orders its work
  bool is_capturing(void* /*stream*/) const override { return false; }
  void* own_stream() override { return nullptr; }
  void interrupt() override { pool_.interrupt(); }
  bool is_interrupted() const override { return pool_.is_interrupted(); }
  void close() override;

 private:
  void name_own_files();

  BlockPool pool_;
  // Threads of one process share a mapping; it stays until the last of them releases it.
  std::vector<std::shared_ptr<SharedHeap>> own_, peers_;
  std::vector<std::shared_ptr<void>> local_;
};

}  // namespace moe_a2a
