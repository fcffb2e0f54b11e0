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

inline void check_load(MOE_A2A_GPU(Error_t) error, const char* kernel, int device) {
  if (error == MOE_A2A_GPU(Success)) return;
  std::string what = std::string("loading the kernel ") + kernel;
  if (error == kNoCodeForDevice || error == MOE_A2A_GPU(ErrorInvalidDeviceFunction)) {
    const std::string architecture = architecture_of(device);
    what += ": this build of moe_a2a has no code for device " + std::to_string(device) + " (architecture " +
            architecture + "); build it on this machine, or with " + kArchitecturesVariable + "=" + architecture;
  }
  check(error, what.c_str());
}

// Loads the kernel before any other runs: loading it later may wait for a running kernel, which may wait for a rank
// whose kernel is being loaded. Also raises the limit of shared memory per block.
template <class Kernel>
void prepare(const LaunchSite& site) {
  const DeviceGuard guard(site.device);
  check_load(MOE_A2A_GPU(FuncSetAttribute)(reinterpret_cast<const void*>(kernel_entry<Kernel>),
                                           MOE_A2A_GPU(FuncAttributeMaxDynamicSharedMemorySize),
                                           static_cast<int>(site.max_shared_bytes)),
             Kernel::kName, site.device);
}

inline void check_launch(MOE_A2A_GPU(Error_t) error, const char* kernel, const LaunchSite& site, size_t shared_bytes) {
  if (error == MOE_A2A_GPU(Success)) return;
  check(error, ("launching " + std::string(kernel) + " in " + std::to_string(site.num_blocks) + " blocks of " +
                std::to_string(shared_bytes) + " bytes of shared memory (device " + std::to_string(site.device) +
                " has " + std::to_string(site.max_shared_bytes) + " per block)")
                   .c_str());
}

// Queues the kernel on the stream. Checks the launch's own status, not the thread's last error, which may belong to
// someone else's earlier launch.
template <class Kernel>
void launch(const LaunchSite& site, const typename Kernel::Args& args) {
  const DeviceGuard guard(site.device);
  void* arguments[] = {const_cast<typename Kernel::Args*>(&args)};
  const size_t shared_bytes = Kernel::shared_bytes(args);
  const auto error = MOE_A2A_GPU(LaunchKernel)(reinterpret_cast<const void*>(kernel_entry<Kernel>),
                                               dim3(site.num_blocks), dim3(kBlockThreads), arguments, shared_bytes,
                                               static_cast<MOE_A2A_GPU(Stream_t)>(site.stream));
  check_launch(error, Kernel::kName, site, shared_bytes);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
