#include "moe/route/run_topk_layout.h"

#include <algorithm>

#include "comm/thread_device.h"
#include "moe/moe_kernels.h"

namespace moe_a2a {

void run_topk_layout(const std::string& target, int index, const TopkLayoutArgs& args, void* stream) {
  Device& device = device_of_thread(target, index, local_kernels);
  device.clear_in_order(args.counts, (args.num_ranks + args.num_experts) * sizeof(int32_t), stream);
  constexpr int kTokensPerBlock = 128;
  const int blocks = (args.num_tokens + kTokensPerBlock - 1) / kTokensPerBlock;
  if (blocks > 0) device.launch(args, false, std::min(blocks, device.max_blocks()), stream);
}

}  // namespace moe_a2a
