"""Data whose sums are exact in every order, so that a device can check a whole step against a formula without the host.

Rows are small integers, weights are 1, and expert e multiplies its rows by 1 + e % 3. So a token's sum is
x * (the sum of its experts' factors), exact in bfloat16, and its own rank knows it without communication. A lost,
misplaced or stale row, a route to another expert, or a wrong list each changes some sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import moe_a2a

NUM_FACTORS = 3
LARGEST = 4  # of a row's values: 8 choices * 3 * 4 = 96, and bfloat16 represents all integers up to 256


@dataclass
class Tokens:
    """One rank's tokens, on its device."""

    x: Tensor  # [num_tokens, hidden]
    topk_idx: Tensor  # [num_tokens, num_topk]
    expected: Tensor  # [num_tokens, hidden]: combine's result

    def copy_(self, other: Tokens) -> None:
        for name in ("x", "topk_idx", "expected"):
            getattr(self, name).copy_(getattr(other, name))


def make_tokens(
    ep: moe_a2a.ExpertParallel, num_tokens: int, generator: torch.Generator, idx_dtype: torch.dtype = torch.int64
) -> Tokens:
    """`generator` is on ep's device; a tenth of the choices is dropped, and some tokens have none left."""
    options = {"generator": generator, "device": ep.device}
    x = torch.randint(-LARGEST, LARGEST + 1, (num_tokens, ep.hidden), **options).to(ep.dtype)
    shape = (num_tokens, ep.num_topk)
    topk_idx = torch.randint(0, ep.num_experts, shape, **options)
    topk_idx = topk_idx.masked_fill(torch.rand(shape, **options) < 0.1, -1)
    topk_idx[::7] = -1
    return Tokens(x, topk_idx.to(idx_dtype), expected_of(x, topk_idx))


def expected_of(x: Tensor, topk_idx: Tensor) -> Tensor:
    """Negative choices add nothing."""
    factors = (1 + topk_idx % NUM_FACTORS).masked_fill(topk_idx < 0, 0)
    return (x.float() * factors.sum(dim=1, keepdim=True).float()).to(x.dtype)


def run_experts(ep: moe_a2a.ExpertParallel, handle: moe_a2a.DispatchHandle, positions: Tensor) -> Tensor:
    """y [capacity, hidden], without synchronising; `positions` is arange(capacity). Past the last route: noise."""
    local_expert = torch.bucketize(positions, handle.expert_offsets[1:], right=True, out_int32=True)
    factor = 1 + (local_expert + ep.rank * ep.num_local_experts) % NUM_FACTORS
    rows = handle.recv_x.index_select(0, handle.expert_row_index.clamp(0, len(handle.recv_x) - 1))
    return rows * factor[:, None].to(rows.dtype)


def positions_of(ep: moe_a2a.ExpertParallel) -> Tensor:
    """arange(capacity) for the layout "rows"."""
    return torch.arange(ep.num_ranks * ep.num_max_tokens_per_rank * ep.num_topk, device=ep.device, dtype=torch.int32)


def step(ep: moe_a2a.ExpertParallel, tokens: Tokens, positions: Tensor) -> Tensor:
    handle = ep.dispatch(tokens.x, tokens.topk_idx)
    return ep.combine(run_experts(ep, handle, positions), handle)


def count_wrong(wrong: Tensor, combined: Tensor, tokens: Tokens) -> None:
    """Adds the wrong values to a counter on the device."""
    wrong += (combined != tokens.expected).sum()
