#include "bindings/grouped_gemm_arguments.h"

#include <limits>

namespace moe_a2a::bindings {
namespace {

constexpr int kGranularity = 16;   // of hidden and intermediate_hidden
constexpr int kRowAlignment = 16;  // bytes

// Called with texts that only an error needs: every product passes these checks.
[[noreturn]] void refuse(const std::string& what, const std::string& remedy) { raise_value(kNoRank, what, remedy); }

Activation::Function to_function(const std::optional<std::string>& name) {
  using Function = Activation::Function;
  if (!name) return Function::kNone;
  if (*name == "silu" || *name == "swiglu") return Function::kSilu;
  if (*name == "gelu") return Function::kGelu;
  if (*name == "gelu_tanh") return Function::kGeluTanh;
  if (*name == "relu2") return Function::kRelu2;
  raise_value(kNoRank, "activation=\"" + *name + "\" is unknown",
              "pass None, \"swiglu\", \"silu\", \"gelu\", \"gelu_tanh\" or \"relu2\"");
}

bool is_float8(const at::Tensor& x) { return x.element_size() == 1 && x.is_floating_point(); }

void check_x(const at::Tensor& x) {
  if (x.scalar_type() != at::kBFloat16 && x.scalar_type() != at::kHalf && !is_float8(x)) {
    raise_type(kNoRank,
               "x has dtype " + text_of(x.scalar_type()) + ", expected bfloat16, float16 or float8 with x_scales",
               "pass x.to(torch.bfloat16)");
  }
  if (x.dim() != 2) refuse("x has shape " + text_of(x.sizes()) + ", expected [rows, hidden]", "pass two dimensions");
  check_no_grad(kNoRank, x, "x");
  if (x.size(1) == 0 || x.size(1) % kGranularity != 0) {
    refuse(
        "hidden=" + std::to_string(x.size(1)) + " (of x) is not a positive multiple of " + std::to_string(kGranularity),
        "pad x and w with zeros");
  }
  const bool is_dense = x.size(0) == 0 || (x.stride(1) == 1 && (x.size(0) == 1 || x.stride(0) >= x.size(1)));
  const bool is_aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kRowAlignment == 0 &&
                          (x.size(0) <= 1 || x.stride(0) * x.element_size() % kRowAlignment == 0);
  if (!is_dense || !is_aligned) {
    refuse("x has strides " + text_of(x.strides()) + ", expected rows of dense elements that begin at multiples of " +
               std::to_string(kRowAlignment) + " bytes",
           is_dense ? "pass x.clone()" : "pass x.contiguous()");
  }
}

void check_w(const at::Tensor& w, const at::Tensor& x, bool is_gated) {
  check_dtype(kNoRank, w, "w", x.scalar_type(), ", the dtype of x");
  if (w.dim() != 3 || w.size(2) != x.size(1)) {
    refuse("w has shape " + text_of(w.sizes()) +
               ", expected [num_experts, columns, hidden=" + std::to_string(x.size(1)) + "]",
           "pass the weights of nn.Linear, stacked");
  }
  if (w.size(0) == 0) refuse("w has no experts", "pass at least one");
  const int halves = is_gated ? 2 : 1;
  if (w.size(1) == 0 || w.size(1) % (halves * kGranularity) != 0) {
    refuse("w.shape[1]=" + std::to_string(w.size(1)) + " is not a positive multiple of " +
               std::to_string(halves * kGranularity),
           halves == 2 ? "pad gate and up with zeros to a multiple of 16 each" : "pad w with zeros");
  }
  check_no_grad(kNoRank, w, "w");
  check_contiguous(kNoRank, w, "w");
  if (reinterpret_cast<uintptr_t>(w.const_data_ptr()) % kRowAlignment != 0) {
    refuse("w does not begin at a multiple of 16 bytes", "pass w.clone()");
  }
}

void check_bias(const at::Tensor& bias, const at::Tensor& w) {
  check_dtype(kNoRank, bias, "bias", at::kFloat, ": it is added to the fp32 sums");
  if (bias.sizes() != w.sizes().slice(0, 2)) {
    refuse("bias has shape " + text_of(bias.sizes()) +
               ", expected [num_experts, columns] = " + text_of(w.sizes().slice(0, 2)),
           "pass one value per row of w");
  }
  check_no_grad(kNoRank, bias, "bias");
  check_contiguous(kNoRank, bias, "bias");
}

void check_scales(const at::Tensor& scales, const char* name, at::IntArrayRef shape, const char* meaning) {
  check_dtype(kNoRank, scales, name, at::kFloat);
  if (scales.sizes() != shape) {
    refuse(
        std::string(name) + " has shape " + text_of(scales.sizes()) + ", expected " + text_of(shape) + ": " + meaning,
        "pass the scales that the values were quantised with");
  }
  check_no_grad(kNoRank, scales, name);
}

void check_float8(const GroupedGemmTensors& t, const Activation& activation, at::ScalarType out_type) {
  const bool has_scales = t.x_scales && t.w_scales;
  if (!is_float8(t.x)) {
    if (t.x_scales || t.w_scales) refuse("x_scales or w_scales given with x that is not float8", "leave them out");
    if (out_type != t.x.scalar_type()) {
      raise_type(kNoRank, "out_dtype=" + text_of(out_type) + " differs from x and x is not float8",
                 "leave it out; quantize_output takes float8 x");
    }
    return;
  }
  if (!has_scales) refuse("x is float8 and x_scales or w_scales is None", "pass both");
  const int64_t num_scales = (t.x.size(1) + 127) / 128, halves = activation.is_gated ? 2 : 1;
  check_scales(*t.x_scales, "x_scales", {t.x.size(0), num_scales}, "one per 128 values of a row of x");
  if (t.x_scales->size(0) > 0 && t.x_scales->stride(1) != 1 && num_scales > 1) {
    refuse("x_scales has strides " + text_of(t.x_scales->strides()) + ", expected rows of dense elements",
           "pass x_scales.contiguous()");
  }
  check_scales(*t.w_scales, "w_scales", {t.w.size(0), halves * ((t.w.size(1) / halves + 127) / 128), num_scales},
               "one per 128 rows and 128 columns of an expert's w, gate and up separate");
  check_contiguous(kNoRank, *t.w_scales, "w_scales");
  if (activation.is_interleaved) {
    refuse("interleaved rows of float8 w would share scales between gate and up",
           "pass the gate's rows before the up projection's");
  }
  if (out_type == t.x.scalar_type()) {
    if (!activation.is_gated || activation.function != Activation::Function::kSilu || t.bias) {
      refuse("quantize_output supports only SwiGLU without bias, and this is another activation",
             "pass activation=\"swiglu\", or quantize the result");
    }
  } else if (out_type != at::kBFloat16 && out_type != at::kHalf) {
    raise_type(kNoRank, "out_dtype is " + text_of(out_type) + ", expected bfloat16 or float16",
               "pass out_dtype=torch.bfloat16");
  }
}

void check_lists(const std::optional<at::Tensor>& row_index, const at::Tensor& expert_offsets, const at::Tensor& w) {
  check_dtype(kNoRank, expert_offsets, "expert_offsets", at::kInt);
  if (expert_offsets.dim() != 1 || expert_offsets.size(0) != w.size(0) + 1) {
    refuse("expert_offsets has shape " + text_of(expert_offsets.sizes()) +
               ", expected [num_experts + 1 = " + std::to_string(w.size(0) + 1) + "]",
           "pass the first position of each expert and their end");
  }
  check_contiguous(kNoRank, expert_offsets, "expert_offsets");
  if (!row_index) return;
  check_dtype(kNoRank, *row_index, "row_index", at::kInt);
  if (row_index->dim() != 1) {
    refuse("row_index has shape " + text_of(row_index->sizes()) + ", expected [num_routes]",
           "pass one row of x per position");
  }
  check_contiguous(kNoRank, *row_index, "row_index");
}

// Only on the CPU, where the host can read the values. Elsewhere the kernel clamps to its tensors and reads zeros for
// rows out of range.
void check_values(const at::Tensor& x, const std::optional<at::Tensor>& row_index, const at::Tensor& expert_offsets,
                  int64_t num_rows) {
  const int32_t* offsets = expert_offsets.const_data_ptr<int32_t>();
  int64_t before = 0;
  for (int64_t e = 0; e < expert_offsets.size(0); ++e) {
    if (offsets[e] < before || offsets[e] > num_rows) {
      refuse("expert_offsets[" + std::to_string(e) + "]=" + std::to_string(offsets[e]) + " is not in [" +
                 std::to_string(before) + ", num_routes=" + std::to_string(num_rows) + "]",
             "pass offsets that never decrease and end within row_index (or x)");
    }
    before = offsets[e];
  }
  if (!row_index) return;
  const int32_t* rows = row_index->const_data_ptr<int32_t>();
  for (int64_t i = offsets[0]; i < before; ++i) {
    if (rows[i] < -1 || rows[i] >= x.size(0)) {
      refuse("row_index[" + std::to_string(i) + "]=" + std::to_string(rows[i]) +
                 " is not in [-1, rows of x=" + std::to_string(x.size(0)) + ")",
             "pass rows of x, or -1 for zeros");
    }
  }
}

void check_sizes(const GroupedGemmTensors& t) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 256;  // the last tile may extend past the last row
  for (int64_t size : {t.num_rows(), t.x.size(0), t.w.size(0), t.w.size(1), t.w.size(2)}) {
    if (size > kMost) {
      refuse("x " + text_of(t.x.sizes()) + ", w " + text_of(t.w.sizes()) + " or num_routes=" +
                 std::to_string(t.num_rows()) + " has more than " + std::to_string(kMost) + " in one dimension",
             "split the call");
    }
  }
}

}  // namespace

Activation to_activation(const Epilogue& epilogue) {
  Activation activation;
  activation.function = to_function(epilogue.activation);
  activation.is_gated = epilogue.gated || epilogue.activation == "swiglu";
  if (epilogue.alpha != 1 && activation.function != Activation::Function::kSilu) {
    refuse("alpha=" + std::to_string(epilogue.alpha) + " applies only to SiLU, and activation is another function",
           "leave it out");
  }
  if (!activation.is_gated && (epilogue.limit || epilogue.up_shift != 0 || epilogue.interleaved)) {
    refuse("limit, up_shift and interleaved apply to gate and up, and w has only one projection",
           "pass gated=True or leave them out");
  }
  if (epilogue.limit && !(*epilogue.limit > 0)) {
    refuse("limit=" + std::to_string(epilogue.limit.value_or(0)) + " is not positive", "pass None for no limit");
  }
  activation.is_interleaved = epilogue.interleaved;
  activation.alpha = static_cast<float>(epilogue.alpha);
  if (epilogue.limit) activation.limit = static_cast<float>(*epilogue.limit);
  activation.up_shift = static_cast<float>(epilogue.up_shift);
  return activation;
}

void check_arguments(const Place& place, const GroupedGemmTensors& t, const Activation& activation,
                     at::ScalarType out_type) {
  check_plain(place, t.x, "x");
  check_plain(place, t.w, "w");
  check_plain(place, t.expert_offsets, "expert_offsets");
  if (t.row_index) check_plain(place, *t.row_index, "row_index");
  if (t.bias) check_plain(place, *t.bias, "bias");
  if (t.x_scales) check_plain(place, *t.x_scales, "x_scales");
  if (t.w_scales) check_plain(place, *t.w_scales, "w_scales");
  check_x(t.x);
  check_w(t.w, t.x, activation.is_gated);
  if (t.bias) check_bias(*t.bias, t.w);
  check_float8(t, activation, out_type);
  check_lists(t.row_index, t.expert_offsets, t.w);
  check_sizes(t);
  if (t.x.is_cpu()) check_values(t.x, t.row_index, t.expert_offsets, t.num_rows());
}

}  // namespace moe_a2a::bindings
