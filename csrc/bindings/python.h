// Tensors and Python, in PyTorch's own headers: only those that are needed (all of torch/extension.h takes a compiler
// twice as long), and precompiled.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>
