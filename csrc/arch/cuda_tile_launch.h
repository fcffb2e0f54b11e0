// Host side of kernels that use the pipeline of cuda_tile_pipeline.h: tensor maps for TMA, cluster launches.
#pragma once

#include <cudaTypedefs.h>

#include <initializer_list>

namespace moe_a2a::inline MOE_A2A_TARGET {

// A tensor of 8- or 16-bit values as TMA sees it, innermost dimension contiguous. TMA loads boxes of it in the 128-byte
// swizzle, with zeros for what is out of bounds.
struct TensorShape {
  struct Dimension {
    int64_t size;
    int64_t stride;  // in elements; 1 for the innermost
    uint32_t box;
  };
  const void* data;
  DType dtype;
  std::initializer_list<Dimension> dimensions;
};

inline CUtensorMapDataType type_of(DType dtype) {
  return dtype == DType::kFloat8    ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                    : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

inline TensorMap make_tensor_map(const TensorShape& shape) {
  static const auto encode = [] {
    cudaDriverEntryPointQueryResult found = {};
    void* function = nullptr;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          "finding cuTensorMapEncodeTiled");
    if (function == nullptr) throw std::runtime_error("this driver has no cuTensorMapEncodeTiled; update it");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  constexpr int kMaxRank = 5;
  cuuint64_t sizes[kMaxRank], strides[kMaxRank];
  cuuint32_t box[kMaxRank], steps[kMaxRank];
  cuuint32_t rank = 0;
  for (const TensorShape::Dimension& dimension : shape.dimensions) {
    sizes[rank] = static_cast<cuuint64_t>(dimension.size);
    strides[rank] = static_cast<cuuint64_t>(dimension.stride) * size_of(shape.dtype);
    box[rank] = dimension.box;
    steps[rank++] = 1;
  }
  TensorMap map;
  const CUresult result = encode(&map, type_of(shape.dtype), rank, const_cast<void*>(shape.data), sizes, strides + 1,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::string sizes_text;
    for (const TensorShape::Dimension& dimension : shape.dimensions) {
      sizes_text += (sizes_text.empty() ? "" : " x ") + std::to_string(dimension.size);
    }
    throw std::runtime_error("cuTensorMapEncodeTiled failed with error " + std::to_string(result) +
                             " for a tensor of " + sizes_text + " (innermost dimension first)");
  }
  return map;
}

// Kernel: Args, kThreads, kBlocks per cluster, kSharedBytes, run(args, shared).
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    pipeline_entry(const __grid_constant__ typename Kernel::Args args) {
  if constexpr (kHasTilePipeline) {
    extern __shared__ __align__(1024) unsigned char stages[];
    Kernel::run(args, reinterpret_cast<std::byte*>(stages));
  }
}

template <class Kernel>
void prepare_pipeline(const LaunchSite& site) {
  const DeviceGuard guard(site.device);
  check(cudaFuncSetAttribute(pipeline_entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes),
        Kernel::kName);
}

// Whether the device runs native sm_90a code, not older code that the driver has JIT-compiled.
template <class Kernel>
bool query_pipeline(const LaunchSite& site) {
  const DeviceGuard guard(site.device);
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, site.device), Kernel::kName);
  if (major != 9) return false;
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, pipeline_entry<Kernel>), Kernel::kName);
  return attributes.binaryVersion == 90 && attributes.ptxVersion == 90;
}

// The same, asked once per thread and device: the runtime takes 5 us to answer.
template <class Kernel>
bool has_pipeline(const LaunchSite& site) {
  struct Answer {
    int device = -1;
    bool has = false;
  };
  thread_local Answer answer;
  if (answer.device != site.device) answer = {site.device, query_pipeline<Kernel>(site)};
  return answer.has;
}

// begins_early: while the launch before on the stream ends, if that one calls let_next_launch_begin(). What the kernel
// does before wait_for_last_launch() needs nothing of that launch.
template <class Kernel>
void launch_pipeline(const LaunchSite& site, const typename Kernel::Args& args, bool begins_early) {
  const DeviceGuard guard(site.device);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(site.num_blocks / Kernel::kBlocks * Kernel::kBlocks));
  config.blockDim = dim3(Kernel::kThreads);
  config.dynamicSmemBytes = Kernel::kSharedBytes;
  config.stream = static_cast<cudaStream_t>(site.stream);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {Kernel::kBlocks, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = begins_early ? 2 : 1;
  check_launch(cudaLaunchKernelEx(&config, pipeline_entry<Kernel>, args), Kernel::kName, site, Kernel::kSharedBytes);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
