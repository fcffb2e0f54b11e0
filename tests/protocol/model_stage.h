// The ranks of a model and their memory: what the stages of the MoE kernels and of the collectives share.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "comm/region.h"
#include "comm/report.h"
#include "explorer.h"
#include "memory_map.h"

namespace moe_a2a {

template <class Rank>
class ModelStage : public Stage {
 public:
  void reset() override {
    for (const auto& rank : ranks_) rank->reset();
  }
  std::byte* memory() const override { return memory_; }
  size_t nbytes() const override { return nbytes_; }
  Field field_of(const void* address) const override { return map_.field_of(address); }
  std::string name_of(const void* address) const override { return map_.name_of(address); }

 protected:
  // `shape`: what the model's ranks are made from; `size`: the memory of one. The symmetric parts of all ranks lie
  // behind each other, then the local ones, then the reports.
  template <class Shape>
  ModelStage(const Shape& shape, int num_ranks, const RegionSize& size) {
    constexpr size_t kReportsBytes = (sizeof(Reports) + 127) / 128 * 128;
    nbytes_ = num_ranks * (size.symmetric_bytes + size.local_bytes + kReportsBytes);
    storage_.resize((nbytes_ + 128) / sizeof(std::max_align_t));
    memory_ = MemoryMap::first_line(storage_.data());
    map_ = MemoryMap(memory_, nbytes_);
    std::byte* local = memory_ + num_ranks * size.symmetric_bytes;
    std::byte* reports = local + num_ranks * size.local_bytes;
    for (int r = 0; r < num_ranks; ++r) {
      auto* own = reinterpret_cast<Reports*>(reports + r * kReportsBytes);
      ranks_.push_back(std::make_unique<Rank>(shape, r, memory_, local + r * size.local_bytes, own));
    }
  }

  std::vector<std::max_align_t> storage_;
  std::byte* memory_;
  size_t nbytes_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  MemoryMap map_;
};

}  // namespace moe_a2a
