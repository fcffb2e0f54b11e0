"""What other libraries need to know about routes: their order by a token's choices, and the most rows there can be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_a2a.handle import DispatchHandle, Owner


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


def packed_topk(
    handle: DispatchHandle,
    num_rows: int,
    dtype: torch.dtype = torch.int64,
    first_expert: int = 0,
    no_expert: int | None = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(row_index, ids, weights, sum_index, numbers) of num_rows packed rows, at least as many as have landed.

    row_index: int64 [num_rows], the row of recv_x of each; R * T where there is none. ids, weights: [num_rows, K], each in the
    column of its choice. sum_index: for the combine. numbers: int32 [R + E_local], the rows that landed from the ranks up to each,
    then the routes of each local expert. dtype, first_expert, no_expert: of the ids, as in handle.recv_topk()."""
    topk: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    topk = handle._core.packed_topk(handle._handle, num_rows, dtype, first_expert, no_expert)
    return topk


def make_unweighted(handle: DispatchHandle) -> None:
    """Lets combine() add the rows as they are: it reads the weights of a row's terms, not route_weights."""
    handle._core.term_weights(handle._handle).fill_(1.0)


def worst_num_rows(ep: Owner, num_max_tokens: int, alignment: int, capacity_factor: float = 1.0) -> int:
    """The most rows that can arrive here from batches of num_max_tokens, times capacity_factor, padding included."""
    num_routes = math.ceil(ep.num_ranks * num_max_tokens * min(ep.num_topk, ep.num_local_experts) * capacity_factor)
    rows = num_routes + (alignment - 1) * ep.num_local_experts
    return -(-rows // alignment) * alignment
