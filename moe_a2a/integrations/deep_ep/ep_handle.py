"""EPHandle: what a dispatch of an ElasticBuffer or EPBuffer returns beside its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.integrations.deep_ep import expanded, high_throughput
from moe_a2a.row_routes import worst_num_rows


@dataclass(eq=False)
class EPHandle:
    """A routing, for any number of dispatches and combines.

    num_recv_tokens_per_expert_list holds the rows of each local expert, rounded up to expert_alignment; it is empty without
    do_cpu_sync. On the device: psum_num_recv_tokens_per_scaleup_rank, int32 [R], the tokens received from the ranks up to each;
    psum_num_recv_tokens_per_expert, int32 [E_local], the end of each expert's rows, if they are expanded without the padding
    behind them; num_unaligned_recv_tokens_per_expert, int32 [E_local].
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    _routing: high_throughput.Handle | expanded.ExpandedHandle
    _topk_idx: Tensor
    _version: int | None  # None: made in inference mode, which counts no changes

    @property
    def ep(self) -> ExpertParallel:
        return self._routing.ep

    @property
    def topk_idx(self) -> Tensor:
        """The topk_idx of the dispatch. Raises if it has been changed since."""
        if self._version is not None and self._topk_idx._version != self._version:
            raise RuntimeError(
                f"topk_idx of a handle of rank {self.ep.rank} has been changed since its dispatch; pass a copy"
            )
        return self._topk_idx

    @property
    def num_recv_tokens(self) -> int:
        """Tokens received, which the host reads; without do_cpu_sync the most that could be."""
        if self._has_counts:
            return int(self.psum_num_recv_tokens_per_scaleup_rank[-1])
        return self.ep.num_ranks * self.num_max_tokens_per_rank

    @property
    def num_expanded_tokens(self) -> int:
        """Rows by route, padding included; without do_cpu_sync the most that could be."""
        if self._has_counts:
            return sum(self.num_recv_tokens_per_expert_list)
        return worst_num_rows(self.ep, self.num_max_tokens_per_rank, self.expert_alignment)

    @property
    def _has_counts(self) -> bool:
        return bool(self.num_recv_tokens_per_expert_list)


def handle_of(
    routing: high_throughput.Handle | expanded.ExpandedHandle,
    topk_idx: Tensor,
    version: int | None,
    counts: list[int],
    *,
    expert_alignment: int,
    num_max_tokens: int,
    num_sms: int,
) -> EPHandle:
    """version: version_of() topk_idx before the dispatch. counts: of num_recv_tokens_per_expert_list."""
    do_expand = isinstance(routing, expanded.ExpandedHandle)
    by_rank, by_expert, unaligned = _prefix_sums(routing, expert_alignment, do_expand)
    return EPHandle(
        do_expand=do_expand,
        num_experts=routing.ep.num_experts,
        expert_alignment=expert_alignment,
        num_max_tokens_per_rank=num_max_tokens,
        num_sms=num_sms,
        num_recv_tokens_per_expert_list=counts,
        psum_num_recv_tokens_per_scaleup_rank=by_rank,
        psum_num_recv_tokens_per_expert=by_expert,
        num_unaligned_recv_tokens_per_expert=unaligned,
        _routing=routing,
        _topk_idx=topk_idx,
        _version=version,
    )


def version_of(topk_idx: Tensor) -> int | None:
    """Grows with each change in place."""
    return None if topk_idx.is_inference() else topk_idx._version


def _prefix_sums(routing: Any, alignment: int, do_expand: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The prefix sums of tokens by rank and of rows by expert, and each expert's number of rows without padding."""
    opened, num_ranks = routing.open, routing.ep.num_ranks
    if do_expand:
        counts = opened.expert_counts.clone()
        return opened._core.landed_offsets(opened._handle)[1:].clone(), opened.expert_offsets[:-1] + counts, counts
    by_rank, counts = routing.numbers[:num_ranks], routing.numbers[num_ranks:]
    aligned = counts if alignment == 1 else (counts + alignment - 1) // alignment * alignment
    return by_rank, aligned.cumsum(0, dtype=torch.int32), counts
