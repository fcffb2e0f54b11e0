"""The unit of measurement: a case, its inputs on each rank, and its minimum traffic."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_a2a.bench import routings


@dataclass(frozen=True)
class Case:
    num_tokens: int  # of each rank
    hidden: int
    num_topk: int
    num_experts: int
    dtype: torch.dtype
    routing: str
    seed: int

    def sizes(self, num_ranks: int) -> routings.Sizes:
        return routings.Sizes(num_ranks, self.num_tokens, self.num_experts, self.num_topk)

    @property
    def config(self) -> dict[str, Any]:
        """Arguments that ExpertParallel and the baselines share."""
        return {
            "num_experts": self.num_experts,
            "num_topk": self.num_topk,
            "hidden": self.hidden,
            "num_max_tokens_per_rank": self.num_tokens,
            "dtype": self.dtype,
        }

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return (
            f"{self.num_tokens} tokens, hidden {self.hidden}, top-{self.num_topk} of {self.num_experts}, {self.dtype_name}, "
            f"{self.routing}"
        )


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Those that the options of a command name."""
    return [
        Case(tokens, options.hidden, options.topk, options.experts, dtype, routing, options.seed)
        for dtype in options.dtype
        for routing in options.routing
        for tokens in options.tokens
    ]


@dataclass
class Inputs:
    """One rank's inputs, and the routing of all ranks, which only checks and byte counts read."""

    x: Tensor  # [n, H]
    topk_idx: Tensor  # int64 [n, K]
    topk_weights: Tensor  # float32 [n, K]
    rank: int
    num_ranks: int
    num_local_experts: int
    all_topk_idx: Tensor  # int64 [R * T, K]; -1 past a rank's last token
    all_topk_weights: Tensor  # float32 [R * T, K]


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Called by every rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    idx = routings.topk_idx(case.routing, case.sizes(num_ranks), rank, case.seed)
    generator = torch.Generator().manual_seed(case.seed * 1000 + 500 + rank)
    x = torch.randn(len(idx), case.hidden, generator=generator).to(case.dtype)
    weights = torch.rand(len(idx), case.num_topk, generator=generator)
    weights /= weights.sum(dim=1, keepdim=True)
    return Inputs(
        x=x.to(device),
        topk_idx=idx.to(device),
        topk_weights=weights.to(device),
        rank=rank,
        num_ranks=num_ranks,
        num_local_experts=case.num_experts // num_ranks,
        all_topk_idx=_of_all_ranks(idx, case.num_tokens, -1).to(device),
        all_topk_weights=_of_all_ranks(weights, case.num_tokens, 0).to(device),
    )


def _of_all_ranks(own: Tensor, num_tokens: int, fill: int) -> Tensor:
    """[n, K] of this rank -> [R * T, K]."""
    padded = own.new_full((num_tokens, own.shape[1]), fill)
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    return torch.cat(parts)


@dataclass
class Traffic:
    """The rows that must cross a link: a token's row once per other rank that owns one of its experts.

    For this rank, int64 [rows, 2]: the destination ranks of a row as a bit mask, and the index of its token. Rows of combine
    are ordered by token, so that all ranks always have something to receive.
    """

    dispatch: Tensor
    combine: Tensor
    busiest_rows: int  # sent or received by the busiest rank; the same in dispatch and combine

    @staticmethod
    def of(inputs: Inputs) -> Traffic:
        owner = inputs.all_topk_idx.div(inputs.num_local_experts, rounding_mode="floor")  # -1 stays -1
        ranks = range(inputs.num_ranks)
        lands = torch.stack([(owner == rank).any(dim=1) for rank in ranks]).unflatten(1, (inputs.num_ranks, -1))
        lands = lands.permute(1, 2, 0).contiguous()  # [source, T, destination]
        for rank in ranks:
            lands[rank, :, rank] = False
        bits = 1 << torch.arange(inputs.num_ranks, device=lands.device)
        rows = lands.sum(dim=1)
        return Traffic(
            dispatch=_pushes((lands[inputs.rank] * bits).sum(dim=1, keepdim=True)),
            combine=_pushes(lands[:, :, inputs.rank].T * bits),
            busiest_rows=int(torch.maximum(rows.sum(dim=1), rows.sum(dim=0)).max()),
        )


def _pushes(members: Tensor) -> Tensor:
    """int64 [T, n], 0 if nothing is sent -> [rows, 2]."""
    token, column = members.nonzero(as_tuple=True)
    return torch.stack([members[token, column], token], dim=1)
