"""Scales of float8 rows that are bytes, one per 32 values, as MXFP8 has them (E8M0).

The kernels copy one float32 per 128 values along with a row and never interpret it, so four such bytes travel in its place.
"""

from __future__ import annotations

import torch

from moe_a2a import _core

BYTES = (torch.uint8, torch.float8_e8m0fnu)
BLOCK = 32
FP8_BLOCK = 128  # values of a row that share a float32 scale


def byte_dtype(x_scales: torch.Tensor | None) -> torch.dtype | None:
    """The dtype of scales that are bytes; otherwise None."""
    return x_scales.dtype if x_scales is not None and x_scales.dtype in BYTES else None


def packed(
    rank: int, device: torch.device, x: torch.Tensor, x_scales: torch.Tensor | None, hidden: int
) -> tuple[torch.Tensor | None, bool]:
    """(x_scales as the kernels take them, whether they are bytes). Copies only bytes that cannot be viewed in fours."""
    if x_scales is None or byte_dtype(x_scales) is None:
        return x_scales, False
    _core.check_plain(rank, device, x_scales, "x_scales")
    width = -(-hidden // BLOCK)
    if tuple(x_scales.shape) != (*x.shape[:1], width):
        raise ValueError(
            f"x_scales of {x_scales.dtype} has shape {list(x_scales.shape)}, expected {[*x.shape[:1], width]} on rank {rank}; "
            f"pass one byte per {BLOCK} values of a row, or a float32 per 128"
        )
    bits = x_scales.view(torch.uint8)
    if width % 4 or bits.stride(1) != 1 or bits.stride(0) % 4 or bits.storage_offset() % 4:
        whole = bits.new_zeros(len(bits), -(-width // 4) * 4)
        whole[:, :width] = bits
        bits = whole
    return bits.view(torch.float32), True


def unpacked(scales: torch.Tensor, dtype: torch.dtype | None, hidden: int) -> torch.Tensor:
    """A view of received scales: bytes in their `dtype`."""
    return scales if dtype is None else scales.view(dtype)[..., : -(-hidden // BLOCK)]
