"""One matrix product per expert over the rows of a dispatch, without copying the rows."""

from __future__ import annotations

from typing import Any

import torch

from moe_a2a import _core, arguments
from moe_a2a.devices import float8_dtype, target_of
from moe_a2a.graph_tracing import is_tracing

# Those whose trace is on. A product whose expert_offsets are a handle's is recorded in the trace of the handle's owner.
TRACED: list[_core.TracedExperts] = []


def grouped_gemm(
    x: torch.Tensor,
    row_index: torch.Tensor | None,
    expert_offsets: torch.Tensor,
    w: torch.Tensor,
    activation: str | None = None,
    *,
    gated: bool = False,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
    bias: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
    w_scales: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    quantize_output: bool = False,
    num_blocks: int = 0,
) -> Any:  # a tensor, or two with quantize_output
    """out[i] = activation(x[row_index[i]] @ w[e].T + bias[e]) for the positions i of expert e, expert_offsets[e] <= i <
    expert_offsets[e + 1].

    The kernel gathers the rows, pads no expert's rows and needs nothing from the host: a CUDA graph can capture the call
    and replay it with other lists. Sums are fp32; activation and bias are applied to them. The same inputs give the same
    bits. Sizes that are multiples of 128 (hidden: of 64) are fastest.

    Args:
        x: [rows, hidden], bfloat16, float16 or float8, `hidden` a multiple of 16; a handle's recv_x as it is. Rows may have any
            stride that is a multiple of 16 bytes.
        row_index: int32 [num_routes]: the row of x of each position, -1 for a row of zeros; a handle's
            expert_row_index. None: position i is row i of x.
        expert_offsets: int32 [num_experts + 1], never decreasing, at most num_routes. moe_a2a.trace() records the product
            only if this is a handle's own tensor, not a copy.
        w: [num_experts, columns, hidden] of the dtype of x, contiguous. columns is a multiple of 16; if gated it is
            2 * intermediate, the gate's rows before the up projection's, as in MoELayer.
        activation: f, one of None, "silu", "gelu", "gelu_tanh", "relu2"; "swiglu" is "silu" with gated=True.
        gated: the result is f(gate) * (up + up_shift).
        interleaved: rows of gate and up alternate in w, as in GPT-OSS.
        alpha: "silu" is x * sigmoid(alpha * x): 1.702 for "quick_gelu" and for GPT-OSS, whose up_shift is 1.
        limit: before f, gate is clamped to at most limit, and up to [-limit, limit].
        bias: float32 [num_experts, columns], in the order of the rows of w.
        x_scales: with float8 x and w, as in DeepSeek-V3: float32 [rows, ceil(hidden / 128)], one per 128 values of a
            row; a handle's recv_x_scales. Sums of 128 products are scaled, then added in fp32.
        w_scales: float32 [num_experts, ceil(columns / 128), ceil(hidden / 128)], one per 128 x 128 of w; if gated, the
            ceil(intermediate / 128) of the gate's rows before those of up's.
        out_dtype: with float8 x: bfloat16 (the default) or float16.
        quantize_output: with float8 x and SwiGLU: the result is float8 with scales, usable as x of the next product.
        num_blocks: limit on the blocks of the launch (CPU: threads, at most 1024). 0: one per multiprocessor, which is the
            maximum. Fewer blocks leave multiprocessors to concurrent kernels.

    Returns: [num_routes, columns] (if gated [num_routes, intermediate]); with quantize_output (y, y_scales), y_scales
    [num_routes, ceil(intermediate / 128)]. The contents of rows whose positions belong to no expert are unspecified.

    Raises ValueError or TypeError, naming value, limit and argument, before anything is launched. The values of the lists
    are checked only on the CPU, where the host can read them; on a GPU, rows out of range count as zeros and offsets out of
    range are clamped. There is no backward.
    """
    if is_tracing():
        tensors = (x, row_index, expert_offsets, w, bias, x_scales, w_scales)
        options: dict[str, Any] = {"activation": activation, "gated": gated, "interleaved": interleaved}
        options |= {"alpha": alpha, "limit": limit, "up_shift": up_shift, "num_blocks": num_blocks}
        if quantize_output:
            return torch.ops.moe_a2a.grouped_gemm_quantized(*tensors, **options)
        return torch.ops.moe_a2a.grouped_gemm(*tensors, **options, out_dtype=out_dtype)
    for name, tensor in (("x", x), ("expert_offsets", expert_offsets), ("w", w)):
        arguments.check_tensor(None, name, tensor)
    for name, optional in (("row_index", row_index), ("bias", bias), ("x_scales", x_scales), ("w_scales", w_scales)):
        arguments.check_optional_tensor(None, name, optional)
    is_float8 = x.dtype.itemsize == 1 and x.dtype.is_floating_point
    if is_float8 and x.dtype != float8_dtype(x.device):
        raise TypeError(f"x has dtype {x.dtype}, expected {float8_dtype(x.device)}, the float8 type of {x.device}")
    if quantize_output and out_dtype is not None:
        raise ValueError(f"out_dtype={out_dtype} with quantize_output=True, whose result is float8; omit out_dtype")
    if quantize_output and not is_float8:
        raise TypeError(f"quantize_output=True with x of {x.dtype}: it takes float8 x with x_scales and w_scales")
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"activation={activation!r} is a {type(activation).__name__}; pass a name or None")
    alpha = arguments.checked_number(None, "alpha", alpha)
    up_shift = arguments.checked_number(None, "up_shift", up_shift)
    limit = None if limit is None else arguments.checked_number(None, "limit", limit)
    num_blocks = arguments.checked_int(None, "num_blocks", num_blocks, 0)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if is_float8 and not quantize_output else x.dtype
    y, y_scales = _core.grouped_gemm(
        x, row_index, expert_offsets, w, activation, gated, interleaved, alpha, limit, up_shift, bias, x_scales, w_scales,
        out_dtype, target_of(x.device), num_blocks, TRACED,
    )  # fmt: skip
    return y if y_scales is None else (y, y_scales)
