// A block's shared memory, carved into named parts. The host takes the size from the plan, the kernel the pointers.
#pragma once

#include <cstddef>

#include "arch/attributes.h"

namespace moe_a2a {

// An array of T at an offset in a block's shared memory.
template <class T>
struct SharedPart {
  int offset = 0;

  MOE_A2A_HOST_DEVICE T* in(std::byte* shared) const { return reinterpret_cast<T*>(shared + offset); }
};

// Hands out parts one after another. 32-bit arithmetic and powers of two: kernels compute their plans, on the critical
// path of a small batch.
class SharedCarver {
 public:
  static constexpr int kLine = 128;  // TMA copies start on whole lines

  MOE_A2A_HOST_DEVICE explicit constexpr SharedCarver(int offset = 0) : offset_(offset) {}

  template <class T>
  MOE_A2A_HOST_DEVICE constexpr SharedPart<T> take(int count, int alignment = alignof(T)) {
    const int begin = round_up(offset_, alignment);
    offset_ = begin + count * static_cast<int>(sizeof(T));
    return {begin};
  }
  MOE_A2A_HOST_DEVICE constexpr SharedPart<std::byte> take_lines(int num_bytes) {
    return take<std::byte>(round_up(num_bytes, kLine), kLine);
  }
  MOE_A2A_HOST_DEVICE constexpr int bytes() const { return offset_; }

  MOE_A2A_HOST_DEVICE static constexpr int round_up(int bytes, int alignment) {
    return (bytes + alignment - 1) & ~(alignment - 1);
  }

 private:
  int offset_;
};

}  // namespace moe_a2a
