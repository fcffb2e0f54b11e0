// An ExpertParallel's products: fused with the combine of their rows, or alone and traced beside its launches.
#include <algorithm>

#include "moe/expert_parallel.h"
#include "moe/experts/product_combine_args.h"

namespace moe_a2a {

bool ExpertParallel::can_send_with_product(const DispatchHandle& handle) const {
  return handle.layout != Layout::kMasked && !config().returns_ll(handle.num_tokens) && device_->max_blocks() >= 2;
}

void ExpertParallel::product_combine_send(DispatchHandle& handle, const GroupedGemmArgs& product,
                                          const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, {Stage::kReceived}, "experts");
  if (!can_send_with_product(handle)) throw std::logic_error("product_combine_send: see can_send_with_product()");
  raise_waits();
  const Rows y = {static_cast<const std::byte*>(product.out), config().row_bytes(config().dtype)};
  GroupedGemmArgs traced = product;
  traced.trace = context_.trace();
  const int num_blocks = std::max(2, blocks(place, share_of_device()));  // senders wait for products: all are resident
  launch(ProductCombineSendArgs{.product = traced,
                                .send = send_args(handle, {.y = y, .num_y_rows = product.num_rows}),
                                .num_send_blocks = product_senders(num_blocks)},
         num_blocks, place.stream);
  handle.stage = Stage::kCombineSent;
  after_launch();
}

void ExpertParallel::run_product(const GroupedGemmPlace& place, const GroupedGemmArgs& args) {
  const CallGate::Turn turn = gate_.enter();
  product_trace_.run(place, args);
}

}  // namespace moe_a2a
