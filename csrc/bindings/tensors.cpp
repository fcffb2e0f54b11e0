#include "bindings/tensors.h"

#include <algorithm>
#include <bit>

namespace moe_a2a::bindings {
namespace {

void check_shape(const MoeConfig& config, const at::Tensor& tensor, const char* name, at::IntArrayRef shape,
                 const char* remedy) {
  if (tensor.sizes() != shape) {
    raise_value(config.rank,
                std::string(name) + " has shape " + text_of(tensor.sizes()) + ", expected " + text_of(shape), remedy);
  }
}

// `other`: a type that is accepted too.
void check_type(const MoeConfig& config, const at::Tensor& tensor, const char* name, at::ScalarType wanted,
                std::optional<at::ScalarType> other = {}) {
  const at::ScalarType type = tensor.scalar_type();
  if (type == wanted || type == other) return;
  check_dtype(config.rank, tensor, name, wanted, other ? (" or " + text_of(*other)).c_str() : "");
}

constexpr const char* kTrainedBy = "moe_a2a.TokenDispatcher";

// Rows with any stride whose elements are contiguous. No rows have any strides: contiguous() leaves those of an
// expanded gradient at 0.
Rows checked_rows(const MoeConfig& config, const at::Tensor& tensor, const char* name) {
  if (tensor.numel() > 0 && tensor.size(-1) > 1 && tensor.stride(-1) != 1) {
    raise_value(
        config.rank,
        std::string(name) + " has stride " + std::to_string(tensor.stride(-1)) + " in its last dimension, expected 1",
        std::string("pass ") + name + ".contiguous()");
  }
  return {static_cast<const std::byte*>(tensor.const_data_ptr()),
          static_cast<int64_t>(tensor.stride(-2) * tensor.element_size())};
}

template <class Index>
void check_range(const MoeConfig& config, const at::Tensor& topk_idx) {
  const Index* ids = static_cast<const Index*>(topk_idx.const_data_ptr());
  for (int64_t i = 0; i < topk_idx.numel(); ++i) {
    if (ids[i] >= -1 && ids[i] < config.num_experts) continue;
    raise_value(config.rank,
                "topk_idx[" + std::to_string(i / config.num_topk) + ", " + std::to_string(i % config.num_topk) + "]=" +
                    std::to_string(ids[i]) + " is not in [-1, num_experts=" + std::to_string(config.num_experts) + ")",
                "pass ids below num_experts, or -1 to drop a choice");
  }
}

void check_x(const MoeConfig& config, const DispatchTensors& t) {
  if (t.x.dim() != 2 || t.x.size(1) != config.hidden) {
    raise_value(
        config.rank,
        "x has shape " + text_of(t.x.sizes()) + ", expected [num_tokens, hidden=" + std::to_string(config.hidden) + "]",
        "pass x of that shape or construct with hidden=" +
            std::to_string(t.x.dim() == 2 ? t.x.size(1) : config.hidden));
  }
  const DType dtype = to_dtype(t.x.scalar_type(), "x", config.rank);
  if (dtype != config.dtype && dtype != DType::kFloat8) {
    throw py::type_error("x has dtype " + text_of(t.x.scalar_type()) + on_rank(config.rank) +
                         ", which is neither the dtype that this ExpertParallel was made with nor "
                         "float8; pass x.to(ep.dtype), or construct with dtype=x.dtype");
  }
  const bool has_own_bound = t.num_max_tokens_per_rank > 0;
  const int64_t most = has_own_bound ? t.num_max_tokens_per_rank : config.num_max_tokens_per_rank;
  if (t.x.size(0) > most) {
    raise_value(config.rank,
                "num_tokens=" + std::to_string(t.x.size(0)) + " > num_max_tokens_per_rank=" + std::to_string(most),
                "pass num_max_tokens_per_rank=" + std::to_string(t.x.size(0)) + " or more to " +
                    (has_own_bound ? "dispatch() on every rank" : "the constructor"));
  }
  check_no_grad(config.rank, t.x, "x", kTrainedBy);
}

// Of one dispatch; 0: it has none of its own.
void check_bound(const MoeConfig& config, int64_t bound) {
  const int64_t most = config.num_max_tokens_per_rank;
  if (bound == 0 || (bound >= 1 && bound <= most)) return;
  raise_value(config.rank,
              "dispatch() got num_max_tokens_per_rank=" + std::to_string(bound) + ", which is not in [1, " +
                  std::to_string(most) + "]",
              "pass at most the num_max_tokens_per_rank of the constructor");
}

void check_routing(const MoeConfig& config, at::Device device, const DispatchTensors& t) {
  const int64_t shape[] = {t.x.size(0), config.num_topk};
  check_type(config, t.topk_idx, "topk_idx", at::kLong, at::kInt);
  check_shape(config, t.topk_idx, "topk_idx", shape, "pass one row of num_topk ids per token");
  check_contiguous(config.rank, t.topk_idx, "topk_idx");
  if (device.is_cpu()) {  // elsewhere the kernel checks: a host read would cost more than the dispatch
    t.topk_idx.scalar_type() == at::kLong ? check_range<int64_t>(config, t.topk_idx)
                                          : check_range<int32_t>(config, t.topk_idx);
  }
  if (!t.topk_weights) return;
  check_type(config, *t.topk_weights, "topk_weights", at::kFloat);
  check_shape(config, *t.topk_weights, "topk_weights", shape, "pass one weight per id, or None for weights of 1");
  check_contiguous(config.rank, *t.topk_weights, "topk_weights");
  check_no_grad(config.rank, *t.topk_weights, "topk_weights", kTrainedBy);
}

void check_scales(const MoeConfig& config, const DispatchTensors& t) {
  const bool is_float8 = to_dtype(t.x.scalar_type(), "x", config.rank) == DType::kFloat8;
  if (is_float8 && t.quantize)
    raise_value(config.rank, "quantize=\"fp8\" with x that is float8 already", "pass quantize=None");
  if (is_float8 != t.x_scales.has_value()) {
    raise_value(config.rank,
                is_float8 ? "x is float8 but x_scales is None" : "x_scales given with x that is not float8",
                is_float8 ? "pass x_scales=[num_tokens, ceil(hidden / 128)] float32" : "pass x_scales=None");
  }
  if (!t.x_scales) return;
  const int64_t shape[] = {t.x.size(0), config.num_scales()};
  check_type(config, *t.x_scales, "x_scales", at::kFloat);
  check_shape(config, *t.x_scales, "x_scales", shape, "pass one scale per 128 values of a row");
  check_no_grad(config.rank, *t.x_scales, "x_scales", kTrainedBy);
}

void check_all_plain(const Place& place, const DispatchTensors& t) {
  check_plain(place, t.x, "x");
  check_plain(place, t.topk_idx, "topk_idx");
  if (t.topk_weights) check_plain(place, *t.topk_weights, "topk_weights");
  if (t.x_scales) check_plain(place, *t.x_scales, "x_scales");
}

void check_quantized_row(const MoeConfig& config, int64_t limit) {
  const int64_t num_bytes = config.row_bytes(DType::kFloat8);
  if (num_bytes <= limit) return;
  raise_value(config.rank,
              "quantize=\"fp8\" with hidden=" + std::to_string(config.hidden) + ": a row of " +
                  std::to_string(num_bytes) + " bytes > " + std::to_string(limit),
              "pass float8 rows with x_scales, or quantize=None");
}

}  // namespace

DType to_dtype(at::ScalarType type, const char* whose, int rank) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBfloat16;
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e4m3fnuz:
      return DType::kFloat8;
    default:
      throw py::type_error(
          whose + on_rank(rank) + " has dtype " + text_of(type) +
          ", expected one of float32, float16, bfloat16, float8_e4m3fn, float8_e4m3fnuz; pass one of these");
  }
}

void check_dispatch(const MoeConfig& config, at::Device device, const DispatchTensors& t) {
  check_all_plain({config.rank, device}, t);
  check_bound(config, t.num_max_tokens_per_rank);
  check_x(config, t);
  check_routing(config, device, t);
  check_scales(config, t);
}

DispatchInput checked_input(const ExpertParallel& ep, at::Device device, const DispatchTensors& t) {
  const MoeConfig& config = ep.config();
  check_dispatch(config, device, t);
  if (t.quantize) check_quantized_row(config, ep.max_quantized_row_bytes());
  DispatchInput input;
  input.num_tokens = static_cast<int>(t.x.size(0));
  if (t.num_max_tokens_per_rank > 0) {  // see MoeConfig::with_bound()
    const auto bound = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(t.num_max_tokens_per_rank)));
    input.num_max_tokens_per_rank = std::min(bound, config.num_max_tokens_per_rank);
  }
  input.topk_idx = {t.topk_idx.const_data_ptr(), t.topk_idx.scalar_type() == at::kLong};
  if (t.topk_weights) input.topk_weights = static_cast<const float*>(t.topk_weights->const_data_ptr());
  input.x = checked_rows(config, t.x, "x");
  if (t.x_scales) input.x_scales = checked_rows(config, *t.x_scales, "x_scales");
  if (t.x_scales || t.quantize) input.format = t.mx_scales ? RowFormat::kMxFloat8 : RowFormat::kFloat8;
  input.quantize = t.quantize;
  return input;
}

Rows checked_y(const ExpertParallel& ep, at::Device device, const DispatchHandle& handle, const at::Tensor& y,
               bool presummed, bool is_packed) {
  const MoeConfig& config = ep.config();
  check_plain({config.rank, device}, y, "y");
  if (to_dtype(y.scalar_type(), "y", config.rank) != config.dtype) {
    throw py::type_error("y has dtype " + text_of(y.scalar_type()) + on_rank(config.rank) +
                         ", which is not the dtype that this ExpertParallel was made with; pass y.to(ep.dtype)");
  }
  check_no_grad(config.rank, y, "y", kTrainedBy);
  const int64_t rows = ep.config_of(handle).row_capacity();
  if (presummed) {
    const int64_t shape[] = {is_packed && y.dim() > 0 ? y.size(0) : rows, config.hidden};
    check_shape(config, y, "y", shape, "with presummed=True pass one row per row of recv_x");
  } else if (handle.layout == Layout::kMasked) {
    const int64_t shape[] = {config.num_local_experts, rows, config.hidden};
    check_shape(config, y, "y", shape, "pass y of the shape of expert_x");
    check_contiguous(config.rank, y, "y");
    // Not by the stride of its rows: with one row per expert, a contiguous tensor may have any.
    return {static_cast<const std::byte*>(y.const_data_ptr()), config.row_bytes(config.dtype)};
  } else {
    if (y.dim() != 2 || y.size(1) != config.hidden) {
      raise_value(
          config.rank,
          "y has shape " + text_of(y.sizes()) + ", expected [rows, hidden=" + std::to_string(config.hidden) + "]",
          "pass one row per route");
    }
    if (ep.device().is_synchronous()) {
      const int64_t needed = ep.region().expert_offsets(handle.buffer, config.num_local_experts);
      if (y.size(0) < needed) {
        raise_value(config.rank,
                    "y has " + std::to_string(y.size(0)) + " rows < expert_offsets[-1]=" + std::to_string(needed),
                    "pass one row per route");
      }
    }
  }
  return checked_rows(config, y, "y");
}

at::Tensor checked_out(const ExpertParallel& ep, at::Device device, int num_tokens, at::ScalarType type,
                       const std::optional<at::Tensor>& out, const at::Tensor* y) {
  const MoeConfig& config = ep.config();
  const int64_t shape[] = {num_tokens, config.hidden};
  if (!out) return make_tensor({config.rank, device}, shape, type);
  check_plain({config.rank, device}, *out, "out");
  check_type(config, *out, "out", type);
  check_shape(config, *out, "out", shape, "pass out of the shape of x");
  check_contiguous(config.rank, *out, "out");
  check_no_grad(config.rank, *out, "out", kTrainedBy);
  if (ep.owns(out->const_data_ptr())) {
    raise_value(config.rank, "out is a view of a handle, whose memory peers write into after the combine",
                "pass memory of your own");
  }
  if (y != nullptr && overlap(*out, *y)) {
    raise_value(config.rank, "out overlaps y, which is read while out is written",
                "pass an out that does not overlap y");
  }
  count_write(*out);
  return *out;
}

ExpertScales checked_scales(const MoeConfig& config, at::Device device, const std::optional<at::Tensor>& scales,
                            double factor) {
  if (!scales) return {.factor = static_cast<float>(factor)};
  check_plain({config.rank, device}, *scales, "scales");
  if (to_dtype(scales->scalar_type(), "scales", config.rank) != config.dtype) {
    raise_type(config.rank,
               "scales has dtype " + text_of(scales->scalar_type()) + ", expected " + name_of(config.dtype),
               "pass scales.to(ep.dtype)");
  }
  const int64_t shape[] = {config.num_local_experts, config.hidden};
  const bool per_column = scales->dim() == 2;
  check_shape(config, *scales, "scales", at::IntArrayRef(shape, per_column ? 2 : 1),
              "pass one factor, or one row of factors, per local expert");
  check_contiguous(config.rank, *scales, "scales");
  check_no_grad(config.rank, *scales, "scales", kTrainedBy);
  return {.data = static_cast<const std::byte*>(scales->const_data_ptr()),
          .stride = static_cast<int64_t>(scales->element_size()) * (per_column ? config.hidden : 1),
          .per_column = per_column};
}

PushedRows checked_push(const MoeConfig& config, at::Device device, const at::Tensor& x, const at::Tensor& pushes) {
  check_plain({config.rank, device}, x, "x");
  check_plain({config.rank, device}, pushes, "pushes");
  if (x.dim() != 2 || x.size(0) > config.row_capacity()) {
    raise_value(config.rank, "x has shape " + text_of(x.sizes()) + ", expected [at most num_ranks * tokens, row]",
                "pass fewer rows");
  }
  const int64_t row_bytes = x.size(1) * x.element_size();
  if (row_bytes > config.max_row_stride()) {
    raise_value(config.rank,
                "x has rows of " + std::to_string(row_bytes) + " bytes > " + std::to_string(config.max_row_stride()),
                "pass rows that fit into the heap");
  }
  const int64_t shape[] = {x.size(0), 2};
  check_type(config, pushes, "pushes", at::kLong);
  check_shape(config, pushes, "pushes", shape, "pass ranks and token of each row");
  check_contiguous(config.rank, pushes, "pushes");
  return {.x = checked_rows(config, x, "x"),
          .num_rows = static_cast<int>(x.size(0)),
          .row_bytes = row_bytes,
          .pushes = static_cast<const Push*>(pushes.const_data_ptr())};
}

}  // namespace moe_a2a::bindings
