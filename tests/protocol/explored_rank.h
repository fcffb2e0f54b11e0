// A rank under exploration, whatever its kernels: its memory and launches, and what its reports say.
#pragma once

#include <functional>
#include <string>

#include "comm/context.h"
#include "explorer.h"

namespace moe_a2a {

[[noreturn]] inline void fail(const std::string& why) { Explorer::running()->fail(why); }

class ExploredRank {
 public:
  int rank() const { return comm_.heap.rank; }
  const ClientServices& services() const { return client_.services; }
  const CommRegion& comm_region() const { return comm_.region; }
  const Reports* reports() const { return reports_; }

  Launch be_late();  // until another rank has given up

 protected:
  // `client` belongs to the derived class. `size`: of a rank's regions, the communicator's first.
  ExploredRank(ClientContext& client, const RegionSize& size, std::byte* local, Reports* reports)
      : client_(client), size_(size), local_(local), reports_(reports) {}

  // Places the communicator's region and returns its size. `symmetric` holds the heaps of all ranks, one after another.
  RegionSize connect(int rank, int num_ranks, std::byte* symmetric);
  void clear();  // memory and reports
  Launch launch(const std::string& name, int call, int num_blocks, std::function<void(int)> body) const;

  static RefusalText refusal_text(int rank);
  // Fail unless the report says that `peer` refused its call, or that a wait gave up because of `culprit`.
  void compare_refusal(int peer, bool check_text) const;
  void compare_left(int culprit) const;
  void take_refusal_report();  // as the host does

  ClientContext& client_;
  CommContext comm_;
  RegionSize size_;
  std::byte *own_heap_, *local_;
  Reports* reports_;
};

}  // namespace moe_a2a
