"""The baselines that benchmarks run beside `ExpertParallel`: today's common approaches, implemented with care.

Both work over any `torch.distributed` group (gloo, nccl, ...) and have one interface:

    handle = baseline.dispatch(x, topk_idx, topk_weights)
    handle.expert_x, handle.expert_offsets         # [n, H] expert by expert; [E_local + 1]
    out = baseline.combine(y, handle)              # y [n, H], one row per row of expert_x; out [T, H]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Baseline:
    """The configuration that both baselines share."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_experts: int,
        num_topk: int,
        hidden: int,
        num_max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        if num_experts % self.num_ranks != 0:
            raise ValueError(f"num_experts={num_experts} is not divisible by num_ranks={self.num_ranks}")
        self.num_experts = num_experts
        self.num_local_experts = num_experts // self.num_ranks
        self.num_topk = num_topk
        self.hidden = hidden
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.dtype = dtype

    def _weights_or_ones(self, topk_idx: Tensor, topk_weights: Tensor | None) -> Tensor:
        if topk_weights is None:
            return torch.ones(topk_idx.shape, dtype=torch.float32, device=topk_idx.device)
        return topk_weights


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


# ----------------------------------------------------------------------- sort + all_to_all_single


@dataclass
class SortPlan:
    """Where the rows of a batch go."""

    src_route: Tensor  # token * K + choice of each row sent, in the order of sending
    src_token: Tensor  # its token
    to_expert_order: Tensor  # row of expert_x i came as row to_expert_order[i] off the wire
    expert_offsets: Tensor  # int64 [E_local + 1]
    send_splits: list[int]  # rows to each rank
    recv_splits: list[int]  # rows from each rank


@dataclass
class SortHandle(SortPlan):
    expert_x: Tensor  # [n, H], expert by expert
    num_tokens: int
    src_weight: Tensor  # fp32 weight of each row sent


class SortAllToAll(_Baseline):
    """Sort by expert, exchange counts, exchange rows, sort again; combine reverses these steps.

    Every route is sent as its own row (no dedup). `all_to_all_single` needs the split sizes on the host.
    """

    def plan(self, topk_idx: Tensor) -> SortPlan:
        flat_expert = topk_idx.reshape(-1)
        order = torch.argsort(flat_expert, stable=True)  # dropped routes (-1) come first
        counts = torch.bincount(flat_expert + 1, minlength=self.num_experts + 1)
        send_counts = counts[1:].view(self.num_ranks, self.num_local_experts)
        recv_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(recv_counts, send_counts.contiguous(), group=self.group)

        # The only synchronisation with the host.
        num_dropped, *splits = torch.cat([counts[:1], send_counts.sum(1), recv_counts.sum(1)]).tolist()
        order = order[num_dropped:]

        # Rows arrive in (source rank, expert) order; the grouped GEMM wants (expert, source rank).
        local_expert = torch.arange(self.num_local_experts, device=topk_idx.device).repeat(self.num_ranks)
        return SortPlan(
            src_route=order,
            src_token=order // self.num_topk,
            to_expert_order=torch.argsort(local_expert.repeat_interleave(recv_counts.view(-1)), stable=True),
            expert_offsets=_offsets(recv_counts.sum(0)),
            send_splits=splits[: self.num_ranks],
            recv_splits=splits[self.num_ranks :],
        )

    def exchange(self, rows: Tensor, recv_splits: list[int], send_splits: list[int]) -> Tensor:
        """The rows that the other ranks send here, source rank by source rank."""
        received = rows.new_empty(sum(recv_splits), self.hidden)
        dist.all_to_all_single(received, rows.contiguous(), recv_splits, send_splits, group=self.group)
        return received

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None = None) -> SortHandle:
        plan = self.plan(topk_idx)
        recv_x = self.exchange(x[plan.src_token], plan.recv_splits, plan.send_splits)
        return SortHandle(
            **vars(plan),
            expert_x=recv_x[plan.to_expert_order],
            num_tokens=x.shape[0],
            src_weight=self._weights_or_ones(topk_idx, topk_weights).reshape(-1)[plan.src_route],
        )

    def combine(self, y: Tensor, handle: SortHandle) -> Tensor:
        wire = torch.empty_like(y)
        wire[handle.to_expert_order] = y
        returned = self.exchange(wire, handle.send_splits, handle.recv_splits)
        out = torch.zeros(handle.num_tokens, self.hidden, dtype=torch.float32, device=y.device)
        out.index_add_(0, handle.src_token, returned.float() * handle.src_weight[:, None])
        return out.to(y.dtype)


# --------------------------------------------------------------------- all-gather + reduce-scatter


@dataclass
class AllGatherHandle:
    expert_x: Tensor  # [n, H], expert by expert
    expert_offsets: Tensor  # int64 [E_local + 1]
    num_tokens: int
    row: Tensor  # row of the gathered batch of each row of expert_x
    weight: Tensor  # fp32 weight of each row of expert_x


class AllGatherReduceScatter(_Baseline):
    """All-gathers every row, padded to num_max_tokens_per_rank, and reduce-scatters the sums.

    The host reads no sizes, so the baseline can be captured. It moves num_ranks - 1 rows per token in each direction, and adds
    the ranks' sums in the rows' dtype.
    """

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None = None) -> AllGatherHandle:
        gathered_x = self._all_gather(x, fill=0)
        gathered_idx = self._all_gather(topk_idx.long(), fill=-1)
        gathered_weights = self._all_gather(self._weights_or_ones(topk_idx, topk_weights), fill=0)

        local_idx = gathered_idx.reshape(-1) - self.rank * self.num_local_experts
        route = ((local_idx >= 0) & (local_idx < self.num_local_experts)).nonzero().squeeze(1)
        route = route[torch.argsort(local_idx[route], stable=True)]
        row = route // self.num_topk
        return AllGatherHandle(
            expert_x=gathered_x[row],
            expert_offsets=_offsets(torch.bincount(local_idx[route], minlength=self.num_local_experts)),
            num_tokens=x.shape[0],
            row=row,
            weight=gathered_weights.reshape(-1)[route],
        )

    def combine(self, y: Tensor, handle: AllGatherHandle) -> Tensor:
        num_rows = self.num_ranks * self.num_max_tokens_per_rank
        partial = torch.zeros(num_rows, self.hidden, dtype=torch.float32, device=y.device)
        partial.index_add_(0, handle.row, y.float() * handle.weight[:, None])
        out = y.new_empty(self.num_max_tokens_per_rank, self.hidden)
        reduce_scatter_single(out, partial.to(y.dtype), group=self.group)
        return out[: handle.num_tokens]

    def _all_gather(self, values: Tensor, fill: float) -> Tensor:
        """[T, n] of this rank -> [num_ranks * num_max_tokens_per_rank, n] of all ranks."""
        padded = values.new_full((self.num_max_tokens_per_rank, values.shape[1]), fill)
        padded[: values.shape[0]] = values
        gathered = values.new_empty(self.num_ranks * self.num_max_tokens_per_rank, values.shape[1])
        all_gather_single(gathered, padded, group=self.group)
        return gathered
