#include "bindings/product_combine.h"

#include <ATen/Parallel.h>

#include "bindings/grouped_gemm.h"
#include "bindings/tensors.h"

namespace moe_a2a::bindings {

at::Tensor multiply_and_combine(ExpertParallel& ep, DispatchHandle& handle, const GroupedGemmTensors& second,
                                at::ScalarType type, const std::optional<at::Tensor>& out, const LaunchPlace& place) {
  using Stage = DispatchHandle::Stage;
  ep.require(handle, Stage::kReceived, Stage::kCombineSent, "experts");
  const at::Tensor combined_x = checked_out(ep, second.x.device(), handle.num_tokens, type, out, &second.x);
  const PreparedProduct product = prepare_product(second, {}, type, true);
  const LaunchPlace all_blocks = {.num_blocks = second.x.is_cpu() ? at::get_num_threads() + 1 : 0,
                                  .stream = place.stream};
  py::gil_scoped_release unlocked;
  if (handle.stage == Stage::kReceived) ep.product_combine_send(handle, product.args, all_blocks);
  ep.combine_recv(handle, combined_x.mutable_data_ptr(), place);  // else a retry: the sums have been sent
  return combined_x;
}

}  // namespace moe_a2a::bindings
