// How the host reaches kernels. A kernel is a struct K with Args, kName, run(args, grid, block, shared) and, if it uses
// shared memory, shared_bytes(args). Related kernels form a family: one source file that lists them, compiled per
// target, for GPUs with and without the trace recorder:
//
//   MOE_A2A_KERNEL_FAMILY(combine_kernels, kMoeVocabulary, Combine, CombineSend, CombineRecv)
//
// The argument type selects the kernel: launch(CombineSendArgs{...}, num_blocks, stream) of a Client.
#pragma once

#include <span>
#include <stdexcept>
#include <string>

#include "arch/cpu_level.h"
#include "arch/device.h"

// Declares family `name` and its host function name(target). The family's source defines the parts.
#define MOE_A2A_DECLARE_FAMILY(name)                                                                    \
  namespace moe_a2a {                                                                                   \
  std::span<const KernelEntry> name##_cpu(), name##_cpu_v2(), name##_cpu_v3(), name##_cpu_v4();         \
  std::span<const KernelEntry> name##_cuda(), name##_cuda_bare(), name##_hip(), name##_hip_bare();      \
  inline KernelFamily name(const std::string& target) {                                                 \
    MOE_A2A_IF_CPU(if (target == "cpu") return {MOE_A2A_OF_THIS_CPU(name), MOE_A2A_OF_THIS_CPU(name)};) \
    MOE_A2A_IF_CUDA(if (target == "cuda") return {name##_cuda(), name##_cuda_bare()};)                  \
    MOE_A2A_IF_HIP(if (target == "hip") return {name##_hip(), name##_hip_bare()};)                      \
    throw std::logic_error("this build has no kernels for target \"" + target + "\"");                  \
  }                                                                                                     \
  }

// The build of a family that suits this machine's CPU; a wheel has one per x86-64 level.
#if defined(MOE_A2A_CPU_LEVELS)
#define MOE_A2A_OF_THIS_CPU(name) \
  (cpu_level() == 4 ? name##_cpu_v4() : cpu_level() == 3 ? name##_cpu_v3() : name##_cpu_v2())
#else
#define MOE_A2A_OF_THIS_CPU(name) name##_cpu()
#endif
