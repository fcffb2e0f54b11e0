"""SwiGLU experts over what a dispatch brought: a correct grouped GEMM on every layout, leaning on PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_a2a.handle import DispatchHandle


def swiglu_experts(handle: DispatchHandle, w_gate_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
    """Runs each local expert on its rows: y = (silu(x @ gate.T) * (x @ up.T)) @ down.T.

    Args:
        handle: of a dispatch, any layout; float8 rows are dequantised first.
        w_gate_up: [E_local, 2 * I, H], the gate's rows before the up projection's.
        w_down: [E_local, H, I].

    Returns: `y` as combine() takes it: [rows, H], or [E_local, R * T, H] for layout="masked". Rows that are no route hold
    nothing meaningful. Reads the offsets on the host, which synchronises with the device.
    """
    offsets = handle.expert_offsets.tolist()
    counts = handle.expert_counts.tolist()
    rows = _rows(handle, offsets[-1])
    y = rows.new_empty(rows.shape[0], w_down.shape[1], dtype=w_down.dtype)
    for expert, (start, count) in enumerate(zip(offsets, counts, strict=False)):
        if count == 0:
            continue
        x = rows[start : start + count].to(w_gate_up.dtype)
        gate, up = F.linear(x, w_gate_up[expert]).chunk(2, dim=-1)
        torch.mm(F.silu(gate) * up, w_down[expert].t(), out=y[start : start + count])
    return y.view(*handle.expert_x.shape[:-1], -1) if handle.layout == "masked" else y


def _rows(handle: DispatchHandle, num_positions: int) -> torch.Tensor:
    """One row per position, [num_positions, H]."""
    is_float8 = handle.row_dtype.itemsize == 1
    if handle.layout != "rows":
        rows = handle.expert_x.view(-1, handle.ep.hidden)
        return _dequantize(rows, handle.expert_x_scales.view(rows.shape[0], -1)) if is_float8 else rows
    index = handle.expert_row_index[:num_positions]
    if is_float8:
        scales = handle.recv_x_scales.index_select(0, index)
        return _dequantize(handle.recv_x.view(torch.uint8).index_select(0, index).view(handle.row_dtype), scales)
    return handle.recv_x.index_select(0, index)


def _dequantize(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 values of float8 rows with one scale per 128 values."""
    return rows.float() * scales.repeat_interleave(128, dim=-1)[:, : rows.shape[-1]]
