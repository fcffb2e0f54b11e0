// The family of the product fused with combine_send: one entry, which selects the kernel by type and device.
#include "comm/define_family.h"
#include "moe/experts/pipelined_combine_send.h"
#include "moe/vocabulary.h"

namespace moe_a2a {
inline namespace MOE_A2A_TARGET {

template <class Use>
void for_each_type(Use use) {
  use.template operator()<Bfloat16>(DType::kBfloat16);
  use.template operator()<Half>(DType::kFloat16);
  use.template operator()<Float8>(DType::kFloat8);
}

template <class T>
using TracedProduct = Traced<ProductCombineSend<T>, kMoeVocabulary>;

void prepare_product(const LaunchSite& site) {
  for_each_type([&]<class T>(DType) {
    prepare<TracedProduct<T>>(site);
    prepare_pipelined_combine_send<T>(site);
  });
}

void launch_product(const LaunchSite& site, const void* erased) {
  const auto& args = *static_cast<const ProductCombineSendArgs*>(erased);
  for_each_type([&]<class T>(DType dtype) {
    if (args.product.dtype != dtype) return;
    if (!launch_pipelined_combine_send<T>(site, args)) launch<TracedProduct<T>>(site, args);
  });
}

}  // namespace MOE_A2A_TARGET

std::span<const KernelEntry> MOE_A2A_JOIN(product_combine_kernels_, MOE_A2A_TARGET)();
std::span<const KernelEntry> MOE_A2A_JOIN(product_combine_kernels_, MOE_A2A_TARGET)() {
  static const KernelEntry entry = {
      .args = id_of_args<ProductCombineSendArgs>(), .prepare = prepare_product, .launch = launch_product};
  return {&entry, 1};
}

}  // namespace moe_a2a
