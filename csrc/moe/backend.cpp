// The kernels, compiled for each target: by the C++ compiler, by CUDA's and by HIP's. Nothing here names a vendor. And
// again without the recorder of the trace, in backend_bare.cpp.
#include "moe/backend.h"

#include "arch/arch.h"
#include "comm/align_clocks.h"
#include "comm/traced.h"
#include "moe/both_halves.h"
#include "moe/gather_rows.h"
#include "moe/link_floor.h"
#include "moe/notices.h"

#define MOE_A2A_JOIN(a, b) MOE_A2A_JOIN_EXPANDED(a, b)
#define MOE_A2A_JOIN_EXPANDED(a, b) a##b

namespace moe_a2a {

#if MOE_A2A_RECORDING
// Defined by backend_bare.cpp.
std::unique_ptr<Backend> MOE_A2A_JOIN(MOE_A2A_JOIN(make_backend_, MOE_A2A_TARGET), _bare)(int device);
#endif

inline namespace MOE_A2A_TARGET {

class TargetBackend final : public Backend {
 public:
  explicit TargetBackend(int device) : machine_(device) {
    prepare_all<Dispatch, Combine, DispatchSend, DispatchRecv, GatherRows, CombineSend, CombineRecv, RefuseDispatch,
                RefuseCombine, Goodbye, Release, AlignClocks>();
    prepare<PushRows>(machine_);
#if MOE_A2A_RECORDING
    bare_ = MOE_A2A_JOIN(MOE_A2A_JOIN(make_backend_, MOE_A2A_TARGET), _bare)(device);
#endif
  }

  const char* name() const override { return Machine::kName; }
  int default_blocks() const override { return Machine::kDefaultBlocks; }
  int max_blocks() const override { return machine_.max_blocks(); }
  int warps_per_block() const override { return kBlockThreads / kWarpSize; }
  bool is_synchronous() const override { return Machine::is_synchronous(); }
  bool needs_aligned_vectors() const override { return kAlignedVectors; }
  int64_t max_shared_bytes() const override { return machine_.max_shared_bytes(); }
  int64_t max_quantized_row_bytes() const override { return max_shared_bytes() / 2 - 256; }
  double clock_ticks_per_second() const override { return machine_.clock_ticks_per_second(); }

  std::byte* allocate_symmetric(size_t nbytes, int num_ranks, MemoryHandle* handle) override {
    return machine_.allocate_symmetric(nbytes, num_ranks, handle);
  }
  std::byte* open_peer(const MemoryHandle& handle, int num_ranks) override {
    return machine_.open_peer(handle, num_ranks);
  }
  std::byte* allocate_local(size_t nbytes) override { return machine_.allocate_local(nbytes); }
  std::byte* allocate_host_visible(size_t nbytes) override { return machine_.allocate_host_visible(nbytes); }
  void clear(void* memory, size_t nbytes) override { machine_.clear(memory, nbytes); }
  void copy_to_host(void* target, const void* source, size_t nbytes) override {
    machine_.copy_to_host(target, source, nbytes);
  }
  void synchronize() override { machine_.synchronize(); }
  void close() override { machine_.close_all(); }

  void launch(const DispatchArgs& a, int blocks, void* stream) override { run<Dispatch>(a, blocks, stream); }
  void launch(const CombineArgs& a, int blocks, void* stream) override { run<Combine>(a, blocks, stream); }
  void launch(const DispatchSendArgs& a, int blocks, void* stream) override { run<DispatchSend>(a, blocks, stream); }
  void launch(const DispatchRecvArgs& a, int blocks, void* stream) override { run<DispatchRecv>(a, blocks, stream); }
  void launch(const GatherRowsArgs& a, int blocks, void* stream) override { run<GatherRows>(a, blocks, stream); }
  void launch(const CombineSendArgs& a, int blocks, void* stream) override { run<CombineSend>(a, blocks, stream); }
  void launch(const CombineRecvArgs& a, int blocks, void* stream) override { run<CombineRecv>(a, blocks, stream); }
  void launch(const RefuseDispatchArgs& a, int blocks, void* stream) override {
    run<RefuseDispatch>(a, blocks, stream);
  }
  void launch(const RefuseCombineArgs& a, int blocks, void* stream) override { run<RefuseCombine>(a, blocks, stream); }
  void launch(const GoodbyeArgs& a, int blocks, void* stream) override { run<Goodbye>(a, blocks, stream); }
  void launch(const ReleaseArgs& a, int blocks, void* stream) override { run<Release>(a, blocks, stream); }
  void launch(const PushRowsArgs& a, int blocks, void* stream) override {
    MOE_A2A_TARGET::launch<PushRows>(machine_, a, blocks, stream);  // a bare measurement: never traced
  }
  void launch(const AlignClocksArgs& a, int blocks, void* stream) override { run<AlignClocks>(a, blocks, stream); }

 private:
  template <class... Kernel>
  void prepare_all() {
    prepare<Traced<Kernel>...>(machine_);
  }
  template <class Kernel>
  void run(const typename Kernel::Args& args, int num_blocks, void* stream) {
    if (bare_ != nullptr && !context_of(args).trace().is_on()) return bare_->launch(args, num_blocks, stream);
    MOE_A2A_TARGET::launch<Traced<Kernel>>(machine_, args, num_blocks, stream);
  }

  Machine machine_;
  std::unique_ptr<Backend> bare_;  // the same kernels without the recorder; of its memory nothing is used
};

}  // namespace MOE_A2A_TARGET

std::unique_ptr<Backend> MOE_A2A_JOIN(make_backend_, MOE_A2A_TARGET)(int device) {
  return std::make_unique<TargetBackend>(device);
}

}  // namespace moe_a2a
