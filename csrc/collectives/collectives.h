// Collectives over the same communicator, signals and waits as the MoE kernels, and without any MoE object.
#pragma once

#include <memory>

#include "collectives/collective_region.h"
#include "comm/communicator.h"

namespace moe_a2a {

class Collectives : public Client {
 public:
  explicit Collectives(std::shared_ptr<Communicator> comm);

  static constexpr int64_t max_nbytes() { return kMaxOneShotBytes; }

  // out[i] = sum over the ranks of x[i], in rank order in fp32; the same bits on every rank. `out` may be `x`. Every
  // rank passes the same count and dtype (float32 or bfloat16), at most max_nbytes().
  void all_reduce(const std::byte* x, std::byte* out, int64_t count, DType dtype, void* stream);

 private:
  std::shared_ptr<Communicator> comm_;
  CollectiveContext context_;
};

}  // namespace moe_a2a
