"""One matrix product per expert over the rows that a dispatch brought, without a copy of the rows."""

from __future__ import annotations

import torch

from moe_a2a import _core
from moe_a2a.devices import target_of


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
) -> torch.Tensor:
    """out[i] = activation(x[row_index[i]] @ w[e].T + bias[e]) for the positions i of expert e, expert_offsets[e] <= i <
    expert_offsets[e + 1].

    Rows are gathered inside of the kernel, an expert's rows are not padded, and nothing is read on the host: the call
    can be captured in a CUDA graph and replayed with other lists. Sums are fp32, and activation and bias are computed on
    them; same inputs, same bits. Sizes that are multiples of 128 (hidden: of 64) are fastest.

    Args:
        x: [rows, hidden], bfloat16 or float16, `hidden` a multiple of 16; a handle's recv_x as it is. Rows may have any
            stride that is a multiple of 16 bytes.
        row_index: int32 [num_routes]: the row of x of each position, -1 for a row of zeros; a handle's
            expert_row_index. None: position i is row i of x.
        expert_offsets: int32 [num_experts + 1], never decreasing, at most num_routes.
        w: [num_experts, columns, hidden] of the dtype of x, contiguous. columns is a multiple of 16; if gated it is
            2 * intermediate, the gate's rows before the up projection's, as in MoELayer.
        activation: f, one of None, "silu", "gelu", "gelu_tanh", "relu2"; "swiglu" is "silu" with gated=True.
        gated: the result is f(gate) * (up + up_shift).
        interleaved: gate and up take turns in the rows of w, as in GPT-OSS.
        alpha: "silu" is x * sigmoid(alpha * x): 1.702 for "quick_gelu" and for GPT-OSS, whose up_shift is 1.
        limit: before f, gate is clamped from above and up on both sides, to limit and -limit.
        bias: float32 [num_experts, columns], in the order of the rows of w.

    Returns: [num_routes, columns] (if gated [num_routes, intermediate]). Rows of positions that belong to no expert hold
    nothing meaningful.

    Raises ValueError or TypeError, naming value, limit and argument, before anything is launched. What the lists hold is
    checked where the host can see it, on the CPU; on a GPU, rows out of range count as zeros and offsets out of range
    are cut off. There is no backward.
    """
    return _core.grouped_gemm(
        x,
        row_index,
        expert_offsets,
        w,
        activation,
        gated,
        interleaved,
        alpha,
        limit,
        up_shift,
        bias,
        target_of(x.device),
    )
