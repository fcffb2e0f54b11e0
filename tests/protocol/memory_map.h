// Maps the memory that the explorer watches: the name and the Field of every word.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "mutation.h"

namespace moe_a2a {

class MemoryMap {
 public:
  MemoryMap() = default;
  MemoryMap(const std::byte* memory, size_t nbytes) : memory_(memory), nbytes_(nbytes) {}

  // The first 128-byte line of a storage that is one line larger than needed.
  static std::byte* first_line(void* storage) {
    return reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(storage) + 127) / 128 * 128);
  }

  // A region ends where the next one begins.
  void add(const void* begin, const std::string& name, Field field = Field::kOther) {
    regions_.push_back({offset_of(begin), name, field});
  }
  // Call once all regions have been added.
  void complete() {
    std::sort(regions_.begin(), regions_.end(), [](const Region& a, const Region& b) { return a.begin < b.begin; });
    fields_.resize(nbytes_ / kWord);
    for (size_t i = 0; i < regions_.size(); ++i) {
      const size_t end = i + 1 < regions_.size() ? regions_[i + 1].begin : nbytes_;
      std::fill(fields_.begin() + regions_[i].begin / kWord, fields_.begin() + end / kWord, regions_[i].field);
    }
  }
  // A single word.
  void mark(const void* word, Field field) { fields_[offset_of(word) / kWord] = field; }

  Field field_of(const void* address) const { return fields_[offset_of(address) / kWord]; }
  std::string name_of(const void* address) const {
    const auto after = std::upper_bound(regions_.begin(), regions_.end(), offset_of(address),
                                        [](size_t offset, const Region& region) { return offset < region.begin; });
    const Region& region = *std::prev(after);
    return region.name + " + " + std::to_string(offset_of(address) - region.begin);
  }

 private:
  static constexpr size_t kWord = 4;

  struct Region {
    size_t begin;
    std::string name;
    Field field;
  };
  size_t offset_of(const void* address) const {
    return static_cast<size_t>(static_cast<const std::byte*>(address) - memory_);
  }

  const std::byte* memory_ = nullptr;
  size_t nbytes_ = 0;
  std::vector<Field> fields_;    // per word
  std::vector<Region> regions_;  // by begin
};

}  // namespace moe_a2a
