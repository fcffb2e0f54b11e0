"""The routes of a handle, row by row, for libraries that compute a row's experts and their weighted sum themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def row_routes(core: Any, handle: Any, expert_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(local experts int64, -1 past a row's last; weights float32, then 0), both [R * T, K]. Reads nothing on the host."""
    positions, weights = core.term_positions(handle), core.term_weights(handle)
    landed = landed_rows(core, handle)
    num_rows = len(landed)
    # The last one takes the rest of the list.
    has_landed = torch.zeros(num_rows + 1, dtype=torch.bool, device=landed.device)
    has_landed.scatter_(0, landed.long(), True)
    # Past the first -1, and in rows that did not land, the memory holds what earlier dispatches left.
    is_route = has_landed[:-1, None] & (positions >= 0).cumprod(1).bool()
    experts = experts_of(positions.contiguous(), expert_offsets)
    return torch.where(is_route, experts, -1), torch.where(is_route, weights, 0.0)


def landed_rows(core: Any, handle: Any) -> Tensor:
    """int32 [R * T]: the rows of recv_x that hold a token, in (source rank, token) order, then R * T. Reads nothing on the
    host."""
    landed = core.landed_rows(handle)
    is_listed = torch.arange(len(landed), device=landed.device) < core.num_landed_rows(handle)
    return torch.where(is_listed, landed, len(landed))


def experts_of(positions: Tensor, expert_offsets: Tensor) -> Tensor:
    """int64, like positions: the local expert of each."""
    return torch.searchsorted(expert_offsets[1:].contiguous(), positions, right=True)


def choice_numbers(num_tokens: int, num_topk: int, device: torch.device) -> Tensor:
    """float32 [num_tokens, num_topk]: the index of each choice, which a dispatch carries in place of its weight for by_choice()."""
    return torch.arange(num_topk, dtype=torch.float32, device=device).repeat(num_tokens, 1)


def by_choice(values: Tensor, row_index: Tensor, numbers: Tensor, num_rows: int, num_topk: int) -> Tensor:
    """[num_rows, num_topk]: the value of each route at its row and choice, zeros elsewhere. Below 0 in row_index: no route."""
    nowhere = num_rows * num_topk
    place = torch.where(row_index >= 0, row_index.long() * num_topk + numbers.long(), nowhere)
    table = values.new_zeros(nowhere + 1)
    table[place] = values
    return table[:-1].view(num_rows, num_topk)


def make_unweighted(core: Any, handle: Any) -> None:
    """Lets combine() add the rows as they are: it reads the weights of a row's terms, not route_weights."""
    core.term_weights(handle).fill_(1.0)
