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
) -> torch.Tensor:
    """out[i] = activation(x[row_index[i]] @ w[e].T) for the positions i of expert e, expert_offsets[e] <= i <
    expert_offsets[e + 1].

    Rows are gathered inside of the kernel, an expert's rows are not padded, and nothing is read on the host: the call
    can be captured in a CUDA graph and replayed with other lists. Sums are fp32; same inputs, same bits. Sizes that are
    multiples of 128 (hidden: of 64) are fastest.

    Args:
        x: [rows, hidden], bfloat16 or float16, `hidden` a multiple of 16; a handle's recv_x as it is. Rows may have any
            stride that is a multiple of 16 bytes.
        row_index: int32 [num_routes]: the row of x of each position, -1 for a row of zeros; a handle's
            expert_row_index. None: position i is row i of x.
        expert_offsets: int32 [num_experts + 1], never decreasing, at most num_routes.
        w: [num_experts, columns, hidden] of the dtype of x, contiguous. columns is a multiple of 16; for "swiglu" it is
            2 * intermediate, the gate's rows before the up projection's, as in MoELayer.
        activation: None, or "swiglu": silu(gate) * up, computed on the fp32 sums.

    Returns: [num_routes, columns] (for "swiglu" [num_routes, intermediate]). Rows of positions that belong to no expert
    hold nothing meaningful.

    Raises ValueError or TypeError, naming value, limit and argument, before anything is launched. What the lists hold is
    checked where the host can see it, on the CPU; on a GPU, rows out of range count as zeros and offsets out of range
    are cut off. There is no backward.
    """
    return _core.grouped_gemm(x, row_index, expert_offsets, w, activation, target_of(x.device))
