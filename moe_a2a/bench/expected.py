"""The check's experts, and what combine() must return for them.

An expert multiplies a row by a power of two that identifies it: the product is exact, and a row at the wrong expert shows.
The expected result is computed from a rank's own inputs, in the order and with the roundings that combine() promises
(moe_a2a/reference.py specifies all modes).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_a2a.bench.cases import Inputs


def factor_of(expert: Tensor) -> Tensor:
    """float32: the factor of an expert, given its global index."""
    return torch.exp2((expert % 4).float())


def local_sums(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, rank: int, num_local_experts: int) -> Tensor:
    """The sums of one rank's experts over rows x [n, H]: float32, k ascending, products rounded, then x's dtype."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    values = x.float()
    for k in range(topk_idx.shape[1]):
        expert = topk_idx[:, k]
        is_here = (expert >= 0) & (expert.div(num_local_experts, rounding_mode="floor") == rank)
        weight = torch.where(is_here, topk_weights[:, k], 0)
        total += weight[:, None] * (factor_of(expert)[:, None] * values)
    return total.to(x.dtype)


def expected_output(arrived: Tensor, inputs: Inputs) -> Tensor:
    """[n, H]: float32 over ranks ascending, then x's dtype. `arrived`: this rank's rows as the experts see them."""
    out = torch.zeros(arrived.shape, dtype=torch.float32, device=arrived.device)
    for rank in range(inputs.num_ranks):
        out += local_sums(arrived, inputs.topk_idx, inputs.topk_weights, rank, inputs.num_local_experts).float()
    return out.to(arrived.dtype)
