// How a GPU starts a kernel. Included by cuda.h and hip.h after simt.h and simt_machine.h.
#pragma once

namespace moe_a2a::inline MOE_A2A_TARGET {

// At most one block per compute unit is launched. Without this bound the compiler saves registers for a second one: a
// kernel that grew by a few instructions went from 92 registers to 64, with spills.
template <class Kernel>
__global__ void __launch_bounds__(kBlockThreads, 1) kernel_entry(MOE_A2A_KERNEL_ARGUMENT typename Kernel::Args args) {
  __shared__ typename Block::Scratch scratch;
  extern __shared__ __align__(128) unsigned char shared[];  // TMA needs whole lines
  Kernel::run(arguments_in_memory(args), Grid{block_in_grid(), blocks_in_grid()}, Block(scratch),
              reinterpret_cast<std::byte*>(shared));
}

// Loads the kernel before any other runs: loading it later may wait for a running kernel, which may wait for a rank
// whose kernel is being loaded. Also raises the limit of shared memory per block.
template <class Kernel>
void prepare(const LaunchSite& site) {
  const DeviceGuard guard(site.device);
  check(MOE_A2A_GPU(FuncSetAttribute)(reinterpret_cast<const void*>(kernel_entry<Kernel>),
                                      MOE_A2A_GPU(FuncAttributeMaxDynamicSharedMemorySize),
                                      static_cast<int>(site.max_shared_bytes)),
        Kernel::kName);
}

// Queues the kernel on the stream. Checks the launch's own status, not the thread's last error, which may belong to
// someone else's earlier launch.
template <class Kernel>
void launch(const LaunchSite& site, const typename Kernel::Args& args) {
  const DeviceGuard guard(site.device);
  void* arguments[] = {const_cast<typename Kernel::Args*>(&args)};
  check(MOE_A2A_GPU(LaunchKernel)(reinterpret_cast<const void*>(kernel_entry<Kernel>), dim3(site.num_blocks),
                                  dim3(kBlockThreads), arguments, Kernel::shared_bytes(args),
                                  static_cast<MOE_A2A_GPU(Stream_t)>(site.stream)),
        Kernel::kName);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
