// The gate that every tensor of a call passes before its address is taken: plain strided memory on the object's device,
// all of it allocated, no lazy view.
#pragma once

#include <string>

#include "bindings/python.h"

namespace moe_a2a::bindings {

inline constexpr int kNoRank = -1;  // for a call that belongs to no group

// The object whose call it is: where its tensors must be, and the rank to name in errors.
struct Place {
  int rank = 0;
  at::Device device;
  const char* owner = "this ExpertParallel";  // of the device, as errors name it
};

// " on rank 3"; empty for kNoRank.
std::string on_rank(int rank);

// Raise ValueError, or TypeError, "<what> on rank <r>; <remedy>".
[[noreturn]] void raise_value(int rank, const std::string& what, const std::string& remedy);
[[noreturn]] void raise_type(int rank, const std::string& what, const std::string& remedy);

// Raises TypeError for tensors without memory of their own (subclasses such as FakeTensor and DTensor, functorch and
// functional wrappers, sparse and nested tensors), and ValueError for another device, freed storage and lazy views.
void check_plain(const Place& place, const at::Tensor& tensor, const char* name);

// Raises TypeError for another dtype; `why` follows the expected one in its text.
void check_dtype(int rank, const at::Tensor& tensor, const char* name, at::ScalarType expected, const char* why = "");

// Raise ValueError for a tensor with gaps, and for one whose gradient would be lost. `trained_by`: what would record
// the call, as a remedy.
void check_contiguous(int rank, const at::Tensor& tensor, const char* name);
void check_no_grad(int rank, const at::Tensor& tensor, const char* name, const char* trained_by = nullptr);

// "[2, 3]"
std::string text_of(at::IntArrayRef sizes);
// As Python writes it: "torch.float32".
std::string text_of(at::ScalarType type);

// Whether the bytes from the first to the last element of two plain tensors overlap.
bool overlap(const at::Tensor& a, const at::Tensor& b);

// Raises the version of a tensor that a call overwrites: a backward pass that has saved it then raises.
void count_write(const at::Tensor& tensor);

// A new tensor. Raises where a mode such as FakeTensorMode (torch.export) returns tensors without memory.
at::Tensor make_tensor(const Place& place, at::IntArrayRef shape, at::ScalarType type);

}  // namespace moe_a2a::bindings
