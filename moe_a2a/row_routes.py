"""The routes of a handle row by row: what libraries take that compute a row's experts and their weighted sum themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def row_routes(core: Any, handle: Any, expert_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(local experts int64, -1 past a row's last; weights float32, then 0), both [R * T, K]. Reads nothing on the host."""
    positions, weights = core.term_positions(handle), core.term_weights(handle)
    landed, num_landed = core.landed_rows(handle), core.num_landed_rows(handle)
    num_rows = len(landed)

    listed = torch.arange(num_rows, device=landed.device) < num_landed
    has_landed = torch.zeros(
        num_rows + 1, dtype=torch.bool, device=landed.device
    )  # the last one takes the rest of the list
    has_landed.scatter_(0, torch.where(listed, landed, num_rows).long(), True)
    # Past the first -1, and in rows that did not land, the memory holds what earlier dispatches left.
    is_route = has_landed[:-1, None] & (positions >= 0).cumprod(1).bool()
    experts = torch.searchsorted(expert_offsets[1:].contiguous(), positions.contiguous(), right=True)
    return torch.where(is_route, experts, -1), torch.where(is_route, weights, 0.0)


def make_unweighted(core: Any, handle: Any) -> None:
    """Lets combine() add the rows as they are: it reads the weights of a row's terms, not route_weights."""
    core.term_weights(handle).fill_(1.0)
