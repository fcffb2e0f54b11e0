// The Device of one target; compiled once per target by that target's compiler. Nothing here names a vendor.
#include "arch/arch.h"
#include "comm/device.h"

namespace moe_a2a {
inline namespace MOE_A2A_TARGET {

class TargetDevice final : public Device {
 public:
  explicit TargetDevice(int index) : Device({}), machine_(index), max_blocks_(machine_.max_blocks()) {
    site_ = machine_.launch_site();
  }

  const char* name() const override { return Machine::kName; }
  int default_blocks() const override { return Machine::kDefaultBlocks; }
  int max_blocks() const override { return max_blocks_; }
  int warps_per_block() const override { return kBlockThreads / kWarpSize; }
  bool is_synchronous() const override { return Machine::is_synchronous(); }
  bool needs_aligned_vectors() const override { return kAlignedVectors; }
  double clock_ticks_per_second() const override { return machine_.clock_ticks_per_second(); }

  std::byte* allocate_symmetric(size_t nbytes, int num_ranks, MemoryHandle* handle) override {
    return machine_.allocate_symmetric(nbytes, num_ranks, handle);
  }
  std::byte* open_peer(const MemoryHandle& handle, double timeout_seconds) override {
    return machine_.open_peer(handle, timeout_seconds);
  }
  void close_peer(std::byte* memory) override { machine_.close_peer(memory); }
  void confirm_peer(std::byte* memory, int own_rank) override { machine_.confirm_peer(memory, own_rank); }
  std::byte* allocate_local(size_t nbytes) override { return machine_.allocate_local(nbytes); }
  std::byte* allocate_host_visible(size_t nbytes) override { return machine_.allocate_host_visible(nbytes); }
  void clear(void* memory, size_t nbytes) override { machine_.clear(memory, nbytes); }
  void copy_to_host(void* target, const void* source, size_t nbytes) override {
    machine_.copy_to_host(target, source, nbytes);
  }
  void copy_to_device(void* target, const void* source, size_t nbytes) override {
    machine_.copy_to_device(target, source, nbytes);
  }
  void synchronize() override { machine_.synchronize(); }
  void order_streams(void* earlier, void* later) override { machine_.order_streams(earlier, later); }
  bool is_capturing(void* stream) const override { return machine_.is_capturing(stream); }
  void* own_stream() override { return machine_.own_stream(); }
  void interrupt() override { machine_.interrupt(); }
  bool is_interrupted() const override { return machine_.is_interrupted(); }
  void close() override { machine_.close_all(); }

 private:
  Machine machine_;
  const int max_blocks_;  // asked once: every call reads it
};

}  // namespace MOE_A2A_TARGET

std::unique_ptr<Device> MOE_A2A_JOIN(make_device_, MOE_A2A_TARGET)(int index) {
  return std::make_unique<TargetDevice>(index);
}

}  // namespace moe_a2a
