// The gate that every tensor of a call passes before anything looks at it: plain strided memory, on the device of the
// object, all of it there, its values as they lie in memory. What does not pass never reaches an address.
#pragma once

#include <string>

#include "bindings/python.h"

namespace moe_a2a::bindings {

inline constexpr int kNoRank = -1;  // of a call that belongs to no group

// The object whose call it is: where its tensors live, and the rank that an error names.
struct Place {
  int rank = 0;
  at::Device device;
  const char* owner = "this ExpertParallel";  // of the device, in the words of an error
};

// Raises ValueError, or TypeError, "<what> on rank <r>; <remedy>".
[[noreturn]] void raise_value(int rank, const std::string& what, const std::string& remedy);
[[noreturn]] void raise_type(int rank, const std::string& what, const std::string& remedy);

// Raises TypeError for tensors without memory of their own (subclasses such as FakeTensor and DTensor, functorch and
// functional wrappers, sparse and nested tensors), and ValueError for another device, freed storage and lazy views.
void check_plain(const Place& place, const at::Tensor& tensor, const char* name);

// Whether the bytes from first to last element of two plain tensors overlap.
bool overlap(const at::Tensor& a, const at::Tensor& b);

// A new tensor. Raises where a mode such as FakeTensorMode (torch.export) hands out tensors without memory.
at::Tensor make_tensor(const Place& place, at::IntArrayRef shape, at::ScalarType type);

}  // namespace moe_a2a::bindings
