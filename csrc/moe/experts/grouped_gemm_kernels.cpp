// The grouped GEMM's family: one entry, which selects the kernel by type, gate and device.
#include "comm/define_family.h"
#include "moe/experts/grouped_gemm.h"
#include "moe/experts/pipelined_gemm.h"

namespace moe_a2a {
inline namespace MOE_A2A_TARGET {

template <class T, bool kGated>
using TracedGemm = Traced<GroupedGemm<T, kGated>, kMoeVocabulary>;

template <class Use>
void for_each_variant(Use use) {
  use.template operator()<Bfloat16, false>(DType::kBfloat16);
  use.template operator()<Bfloat16, true>(DType::kBfloat16);
  use.template operator()<Half, false>(DType::kFloat16);
  use.template operator()<Half, true>(DType::kFloat16);
  use.template operator()<Float8, false>(DType::kFloat8);
  use.template operator()<Float8, true>(DType::kFloat8);
}

void prepare_grouped_gemm(const LaunchSite& site) {
  for_each_variant([&]<class T, bool kGated>(DType) {
    prepare<TracedGemm<T, kGated>>(site);
    prepare_pipelined_gemm<T, kGated>(site);
  });
}

void launch_grouped_gemm(const LaunchSite& site, const void* erased) {
  const auto& args = *static_cast<const GroupedGemmArgs*>(erased);
  for_each_variant([&]<class T, bool kGated>(DType dtype) {
    if (args.dtype != dtype || args.activation.is_gated != kGated) return;
    if (!launch_pipelined_gemm<T, kGated>(site, args)) launch<TracedGemm<T, kGated>>(site, args);
  });
}

}  // namespace MOE_A2A_TARGET

std::span<const KernelEntry> MOE_A2A_JOIN(grouped_gemm_kernels_, MOE_A2A_TARGET)();
std::span<const KernelEntry> MOE_A2A_JOIN(grouped_gemm_kernels_, MOE_A2A_TARGET)() {
  static const KernelEntry entry = {
      .args = id_of_args<GroupedGemmArgs>(), .prepare = prepare_grouped_gemm, .launch = launch_grouped_gemm};
  return {&entry, 1};
}

}  // namespace moe_a2a
