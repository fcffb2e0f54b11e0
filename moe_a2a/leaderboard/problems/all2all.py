"""Dispatch, simulated experts, combine: the published problem, and a variant whose factors only the expert's rank knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_a2a.leaderboard.cases import Case, CaseFileError
from moe_a2a.leaderboard.problems.base import CloseTo, Tensors


@dataclass
class MoEConfig:
    num_experts: int
    experts_per_token: int
    hidden_dim: int
    max_num_tokens: int
    in_dtype: torch.dtype = torch.float16
    out_dtype: torch.dtype = torch.float16


@dataclass
class RankData:
    """x [num_tokens, H] fp16, indices [num_tokens, K] int32 of distinct experts, weights [num_tokens, K] fp32 that do not
    sum to 1. Only all2all_experts has expert_scales [E_local, H] fp16: the factors of this rank's experts."""

    num_tokens: int
    indices: Tensor
    weights: Tensor
    x: Tensor
    expert_scales: Tensor | None = None


def config_of(case: Case, dtype: torch.dtype) -> MoEConfig:
    names = ("num_experts", "experts_per_token", "hidden_dim", "max_num_tokens")
    num_experts, experts_per_token, hidden_dim, max_num_tokens = (case[name] for name in names)
    return MoEConfig(num_experts, experts_per_token, hidden_dim, max_num_tokens, dtype, dtype)


SIZES = {"num_experts": 1, "experts_per_token": 1, "hidden_dim": 1, "max_num_tokens": 2}


def check_topk(case: Case) -> None:
    if case["experts_per_token"] > case["num_experts"]:
        raise CaseFileError(f"experts_per_token={case['experts_per_token']} > num_experts={case['num_experts']}")


def draw_tokens(case: Case, generator: torch.Generator, dtype: torch.dtype = torch.float16) -> Tensors:
    """1 to max_num_tokens - 1 tokens with distinct, uniformly drawn experts."""
    num_tokens = int(torch.randint(1, case["max_num_tokens"], (1,), generator=generator))
    scores = torch.rand(num_tokens, case["num_experts"], generator=generator)
    return {
        "indices": scores.topk(case["experts_per_token"]).indices.int(),
        "weights": torch.rand(num_tokens, case["experts_per_token"], generator=generator),
        "x": torch.randn(num_tokens, case["hidden_dim"], generator=generator).to(dtype),
    }


class All2All(CloseTo):
    rtol, atol = 1e-2, 5e-3
    sizes, shared = SIZES, ("num_experts",)

    def check_case(self, case: Case) -> None:
        super().check_case(case)
        check_topk(case)

    def make_inputs(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        return draw_tokens(case, generator)

    def as_data(self, case: Case, tensors: Tensors, rank: int) -> tuple[MoEConfig, RankData, int, int]:
        rank_data = RankData(num_tokens=tensors["x"].shape[0], **tensors)
        return config_of(case, torch.float16), rank_data, rank, case["world_size"]

    def bytes_to_move(self, case: Case, tensors: list[Tensors]) -> float:
        return there_and_back(case, tensors)

    def expected(self, case: Case, tensors: list[Tensors]) -> list[Tensor]:
        per_rank = case["num_experts"] // case["world_size"]
        scales = (1.0 + torch.arange(case["num_experts"]) // per_rank)[:, None]
        return [weighted_sums(of_rank, scales) for of_rank in tensors]


class All2AllExperts(All2All):
    """Each call draws new factors, one row per expert, which only the expert's rank has."""

    def make_inputs(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        num_local_experts = case["num_experts"] // case["world_size"]
        scales = 0.5 + torch.rand(num_local_experts, case["hidden_dim"], generator=generator)
        return {**draw_tokens(case, generator), "expert_scales": scales.half()}

    def expected(self, case: Case, tensors: list[Tensors]) -> list[Tensor]:
        scales = torch.cat([of_rank["expert_scales"] for of_rank in tensors]).float()
        return [weighted_sums(of_rank, scales) for of_rank in tensors]


def there_and_back(case: Case, tensors: list[Tensors]) -> float:
    """Bytes of the busiest rank: a token's row once to each other rank that owns one of its experts, and a sum back."""
    world_size = len(tensors)
    per_rank = case["num_experts"] // world_size
    rows = torch.zeros(world_size, world_size)
    for source, of_rank in enumerate(tensors):
        owner = of_rank["indices"] // per_rank
        for target in range(world_size):
            rows[source, target] = (owner == target).any(dim=1).sum() if target != source else 0
    busiest = float(torch.maximum(rows.sum(0), rows.sum(1)).max())
    return 2 * busiest * tensors[0]["x"].element_size() * case["hidden_dim"]


def weighted_sums(tensors: Tensors, scales: Tensor) -> Tensor:
    """The sum over k of weight * fp16(x * scales of the expert), added in fp32 and rounded once. scales: [E, 1 or H]."""
    x = tensors["x"].float()
    total = torch.zeros_like(x)
    for k in range(tensors["indices"].shape[1]):
        y = (x * scales[tensors["indices"][:, k].long()]).half().float()
        total += tensors["weights"][:, k, None] * y
    return total.half()
