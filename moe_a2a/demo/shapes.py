"""The five shapes of the GPU MODE all-to-all contest, beside a baseline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import moe_a2a
from moe_a2a.commands.baselines import SortAllToAll

WARM_UP_STEPS = 2
TIMED_STEPS = 10
DTYPE = torch.float16  # the contest's


@dataclass(frozen=True)
class Shape:
    num_experts: int
    num_topk: int
    hidden: int
    max_tokens: int
    seed: int

    def __str__(self) -> str:
        return f"{self.num_experts}/{self.num_topk}/{self.hidden}/{self.max_tokens}"


SHAPES = (
    Shape(8, 2, 6144, 16, 6635),
    Shape(64, 6, 2048, 32, 1234),
    Shape(128, 4, 2880, 128, 51),
    Shape(128, 8, 4096, 256, 175),
    Shape(256, 8, 7168, 256, 4),
)


@dataclass
class Traffic:
    """Rows that leave a rank in dispatch; combine returns as many."""

    rows: int  # one per token and remote rank
    rows_without_dedup: int  # one per token and remote expert
    row_bytes: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.rows + other.rows,
            self.rows_without_dedup + other.rows_without_dedup,
            self.row_bytes,
        )

    @property
    def megabytes(self) -> float:
        return 2 * self.rows * self.row_bytes / 1e6

    @property
    def megabytes_without_dedup(self) -> float:
        return 2 * self.rows_without_dedup * self.row_bytes / 1e6


@dataclass
class RankTimes:
    """One rank, one shape. Seconds are [TIMED_STEPS, 3]: dispatch, experts, combine."""

    seconds: np.ndarray
    baseline_seconds: np.ndarray
    traffic: Traffic
    equal: bool  # our result, bit for bit
    baseline_close: bool  # the baseline's, within the contest's tolerance


def run_on_this_rank(shape: Shape, seed: int) -> RankTimes:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    # Every rank has at least one expert of each shape, even if num_ranks does not divide.
    num_experts = -(-shape.num_experts // num_ranks) * num_ranks
    x, topk_idx, topk_weights = _generate(shape, seed, rank)
    owner = topk_idx // (num_experts // num_ranks)
    sizes: dict[str, Any] = {
        "num_experts": num_experts,
        "num_topk": shape.num_topk,
        "hidden": shape.hidden,
        "num_max_tokens_per_rank": shape.max_tokens,
        "dtype": DTYPE,
    }
    baseline = SortAllToAll(dist.group.WORLD, **sizes)
    inputs = (x, topk_idx, topk_weights)
    with moe_a2a.ExpertParallel(dist.group.WORLD, **sizes, device="cpu") as ep:
        seconds, out = _time_steps(ep, _gathered_rows, *inputs)
    baseline_seconds, baseline_out = _time_steps(baseline, lambda handle: handle.expert_x, *inputs)

    expected = _expected(x, owner, topk_weights, num_ranks)
    return RankTimes(
        seconds=seconds,
        baseline_seconds=baseline_seconds,
        traffic=_traffic(owner, rank, num_ranks, x[:1].nbytes),
        equal=torch.equal(out, expected),
        baseline_close=torch.allclose(baseline_out, expected, rtol=1e-2, atol=5e-3),
    )


def _generate(shape: Shape, seed: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """As in the contest: distinct experts, and weights that do not sum to one."""
    generator = torch.Generator().manual_seed(shape.seed + 1000 * seed + rank)
    num_tokens = int(torch.randint(1, shape.max_tokens, (1,), generator=generator))
    scores = torch.rand(num_tokens, shape.num_experts, generator=generator)
    x = torch.randn(num_tokens, shape.hidden, generator=generator).to(DTYPE)
    weights = torch.rand(num_tokens, shape.num_topk, generator=generator)
    return x, scores.topk(shape.num_topk).indices, weights


def _gathered_rows(handle: moe_a2a.DispatchHandle) -> Tensor:
    """One row per route, gathered as the experts' first GEMM would."""
    return handle.recv_x.index_select(0, handle.expert_row_index[: handle.num_routes])


def _experts(rows: Tensor, rank: int) -> Tensor:
    """The contest's experts: all experts of a rank multiply by 1 + rank."""
    return rows * (1 + rank)


def _time_steps(
    layer: Any,
    rows_of: Callable,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
) -> tuple[np.ndarray, Tensor]:
    seconds = np.empty((WARM_UP_STEPS + TIMED_STEPS, 3))
    for step in seconds:
        dist.barrier()
        start = time.perf_counter()
        handle = layer.dispatch(x, topk_idx, topk_weights)
        dispatched = time.perf_counter()
        y = _experts(rows_of(handle), layer.rank)
        computed = time.perf_counter()
        out = layer.combine(y, handle)
        combined = time.perf_counter()
        step[:] = dispatched - start, computed - dispatched, combined - computed
    return seconds[WARM_UP_STEPS:], out


def _expected(x: Tensor, owner: Tensor, topk_weights: Tensor, num_ranks: int) -> Tensor:
    """The bits that combine() promises: fp32, owners and k ascending, rounded per owner."""
    out = torch.zeros(x.shape)
    for rank in range(num_ranks):
        y = _experts(x, rank).float()
        sent = torch.zeros(x.shape)
        for k in range(owner.shape[1]):
            tokens = owner[:, k] == rank
            sent[tokens] += topk_weights[tokens, k, None] * y[tokens]
        out += sent.to(x.dtype).float()
    return out.to(x.dtype)


def _traffic(owner: Tensor, rank: int, num_ranks: int, row_bytes: int) -> Traffic:
    goes_to = torch.stack([(owner == other).any(dim=1) for other in range(num_ranks)])
    goes_to[rank] = False
    return Traffic(int(goes_to.sum()), int((owner != rank).sum()), row_bytes)
