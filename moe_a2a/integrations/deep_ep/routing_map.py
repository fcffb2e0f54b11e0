"""Routings as HybridEPBuffer has them, a column for each expert, and as ids of the chosen experts."""

from __future__ import annotations

import torch
from torch import Tensor


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """(routing_map bool [T, E], probs float32 [T, E] or None); -1 in topk_idx: no expert."""
    routing_map = torch.zeros(num_of_tokens, num_of_experts + 1, dtype=torch.bool, device=topk_idx.device)
    routing_map.scatter_(1, _with_nowhere(topk_idx, num_of_experts), True)
    probs = None if topk_weights is None else by_expert(topk_weights, topk_idx, num_of_experts)
    return routing_map[:, :-1].contiguous(), probs


def map_to_indices(routing_map: Tensor, num_topk: int) -> Tensor:
    """int64 [T, num_topk]: a token's experts in ascending order, then -1. The host reads nothing, so a token with more experts
    loses the last ones."""
    num_tokens, num_experts = routing_map.shape
    place = torch.where(routing_map, routing_map.cumsum(1) - 1, num_topk).clamp_(max=num_topk)
    ids = torch.full((num_tokens, num_topk + 1), -1, dtype=torch.int64, device=routing_map.device)
    experts = torch.arange(num_experts, device=routing_map.device)
    return ids.scatter_(1, place, experts.expand(num_tokens, -1))[:, :-1].contiguous()


def by_choice_of(probs: Tensor, topk_idx: Tensor) -> Tensor:
    """float32 [T, K]: the columns of the chosen experts, 0 where there is none."""
    chosen = probs.float().gather(1, topk_idx.clamp(min=0).long())
    return torch.where(topk_idx >= 0, chosen, 0.0)


def by_expert(values: Tensor, topk_idx: Tensor, num_experts: int) -> Tensor:
    """float32 [T, num_experts]: the value of each choice in the column of its expert, zeros elsewhere."""
    table = torch.zeros(len(values), num_experts + 1, dtype=torch.float32, device=values.device)
    return table.scatter(1, _with_nowhere(topk_idx, num_experts), values.float())[:, :-1].contiguous()


def _with_nowhere(topk_idx: Tensor, num_experts: int) -> Tensor:
    return torch.where(topk_idx < 0, num_experts, topk_idx).long()
