// Tensors and Python. Includes only the PyTorch headers that are needed, and is precompiled: all of torch/extension.h
// takes a compiler twice as long.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>
