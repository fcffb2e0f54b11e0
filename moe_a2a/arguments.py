"""Checks of a call's arguments that need no tensor's data. Shapes and types are checked in the bindings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from moe_a2a.handle import DispatchHandle

LAYOUTS = ("rows", "expert_major", "masked")
MAX_EXPERT_ALIGNMENT = 256


def check_tensor(rank: int, name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__} on rank {rank}; pass a torch.Tensor")


def checked_quantize(rank: int, quantize: str | None) -> bool:
    if quantize not in (None, "fp8"):
        raise ValueError(f'quantize={quantize!r} is unknown on rank {rank}; pass "fp8" or None')
    return quantize is not None


def checked_layout(
    rank: int, handle: DispatchHandle | None, layout: str | None, expert_alignment: int | None
) -> tuple[str, int]:
    """What is not given is that of `handle`, or the default."""
    if layout is None:
        layout = handle.layout if handle is not None else "rows"
        if expert_alignment is None and handle is not None:
            expert_alignment = handle.expert_alignment
    if expert_alignment is None:
        expert_alignment = 1
    if layout not in LAYOUTS:
        raise ValueError(f'layout={layout!r} is unknown on rank {rank}; pass "rows", "expert_major" or "masked"')
    if not 1 <= expert_alignment <= MAX_EXPERT_ALIGNMENT:
        raise ValueError(
            f"expert_alignment={expert_alignment} is not in [1, {MAX_EXPERT_ALIGNMENT}] on rank {rank}; "
            "pass one of these"
        )
    if expert_alignment != 1 and layout != "expert_major":
        raise ValueError(
            f'expert_alignment={expert_alignment} with layout="{layout}" on rank {rank}; pass layout="expert_major"'
        )
    return layout, expert_alignment
