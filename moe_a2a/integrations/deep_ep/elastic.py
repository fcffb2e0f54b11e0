"""ElasticBuffer and EPHandle: DeepEP's second interface, rows packed by token or expanded by route."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_a2a import arguments, calls
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.groups import as_group
from moe_a2a.integrations.deep_ep import expanded, high_throughput
from moe_a2a.integrations.deep_ep.buffer import Rows
from moe_a2a.integrations.deep_ep.events import EventHandle, EventOverlap, event_if, wait_for
from moe_a2a.integrations.deep_ep.exchange import Kind, OfExchange, rows_and_scales
from moe_a2a.row_routes import landed_rows

SIZE_ALIGNMENT = 2 << 20


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
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    _routing: high_throughput.Handle | expanded.ExpandedHandle
    _recv_topk_idx: Tensor | None

    @property
    def ep(self) -> ExpertParallel:
        return self._routing.ep


@dataclass
class _First:
    """The arguments of a first dispatch, checked."""

    x: Tensor
    x_scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    kind: Kind
    num_max_tokens: int
    expert_alignment: int


@dataclass
class _Received:
    x: Tensor
    x_scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    handle: EPHandle


class ElasticBuffer(OfExchange):
    """dispatch() and combine() of DeepEP 2. Arguments that are not named below concern its network; they are not used.

    Args:
        group: as for Buffer.
        num_max_tokens_per_rank: the default of dispatch().
        num_gpu_timeout_secs: the timeout of the Communicator.
        num_buffers: as for Buffer.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        num_buffers: int = 2,
    ):
        if num_cpu_bytes:
            raise ValueError("ElasticBuffer of moe_a2a has no num_cpu_bytes; pass num_cpu_bytes=0")
        self.group = group
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        sizes = num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
        self.num_bytes = self.get_buffer_size_hint(group, *sizes) if num_bytes is None else num_bytes
        self.num_allocated_qps = num_allocated_qps
        self.explicitly_destroy = explicitly_destroy
        super().__init__(group, num_gpu_timeout_secs, num_buffers)
        self.rank_idx, self.num_ranks = self._rank, self._num_ranks

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """About the bytes that two buffers take: rows there and sums back."""
        nbytes = 2 * 2 * 2 * as_group(group).num_ranks * num_max_tokens_per_rank * hidden
        return -(-nbytes // SIZE_ALIGNMENT) * SIZE_ALIGNMENT

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, **network: Any) -> int:
        """A number that, like 0, leaves the blocks to moe_a2a's launch table."""
        return ElasticBuffer.num_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        return self.num_allocated_qps

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Returns once all ranks have called it."""
        self._open().most_tokens(0)

    @torch.no_grad()
    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Sends each token's row to the ranks of its experts.

        Args:
            x: [num_tokens, H] bfloat16 (or float16, float32), or (float8, scales [num_tokens, H / 128] float32).
            topk_idx, topk_weights: [num_tokens, K] int64 (-1: no expert) and float32 or None.
            cumulative_local_expert_recv_stats: int32 [E_local], to which a first dispatch adds the numbers of rows.
            num_max_tokens_per_rank: the most tokens of a rank, the same on all; None: the constructor's.
            expert_alignment: the numbers of rows per expert are rounded up to it. None: 1.
            num_sms: blocks; 0, or get_theoretical_num_sms(): as moe_a2a's launch table says.
            handle: of an earlier dispatch, whose routing and layout are used again. topk_weights then only if it is expanded.
            do_handle_copy: keep a copy of topk_idx; else the caller must not change it.
            do_cpu_sync: False: the host reads nothing, and there are as many rows as could arrive.
            do_expand: one row per choice of an expert here, expert by expert, with zeros up to expert_alignment.
            use_tma_aligned_col_major_sf: scales column-major, their columns at multiples of 16 bytes.

        Returns: (recv_x; recv_topk_idx [n, K], local, -1 for experts elsewhere, None if expanded; recv_topk_weights [n, K], or
        [n] if expanded; handle; event).
        """
        exchange = self._open()
        if handle is not None:
            exchange.check_handle(handle, EPHandle, opens=True)
            with calls.dispatch_refused_if_failed(handle.ep):
                rows, scales, blocks = self._begun(x, num_sms, previous_event, previous_event_before_epilogue)
                self._check_again(handle, topk_idx, topk_weights, do_expand)
            received = self._dispatch_again(handle, rows, scales, topk_weights, blocks)
        else:
            with exchange.dispatch_refused_if_failed() if do_expand and exchange.has_made else self._gather_refused():
                rows, scales, blocks = self._begun(x, num_sms, previous_event, previous_event_before_epilogue)
                sizes = num_experts, num_max_tokens_per_rank, expert_alignment
                first = self._checked(rows, scales, topk_idx, topk_weights, *sizes, do_zero_padding and not do_expand)
                first.topk_idx = first.topk_idx.clone() if do_handle_copy else first.topk_idx
            way = self._dispatch_expanded if do_expand else self._dispatch_packed
            received = way(first, do_cpu_sync is not False, num_sms or self.num_sms, blocks)
            if cumulative_local_expert_recv_stats is not None:
                with calls.combine_refused_if_failed(received.handle._routing.open):
                    cumulative_local_expert_recv_stats.add_(received.handle.num_unaligned_recv_tokens_per_expert)
        if received.x_scales is not None and use_tma_aligned_col_major_sf:
            received.x_scales = _column_major(received.x_scales)
        return (
            received.x if received.x_scales is None else (received.x, received.x_scales),
            received.topk_idx,
            received.topk_weights,
            received.handle,
            event_if(async_with_compute_stream),
        )

    def _begun(self, x: Rows, num_sms: int, *events: Any) -> tuple[Any, Any, int]:
        """The rows, their scales, and the number of blocks."""
        for event in events:
            wait_for(event)
        return *rows_and_scales(self.rank_idx, x), self._blocks(num_sms)

    def _gather_refused(self) -> AbstractContextManager[None]:
        return calls.refused_if_failed(self._open().collectives)

    def _checked(
        self,
        x: Tensor,
        x_scales: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int | None,
        num_max_tokens: int | None,
        alignment: int | None,
        pads_packed_rows: bool,
    ) -> _First:
        rank = self.rank_idx
        if topk_idx is None or num_experts is None:
            raise ValueError(
                f"dispatch on rank {rank} got neither a handle nor a routing; pass topk_idx and num_experts"
            )
        bound = self.num_max_tokens_per_rank if num_max_tokens is None else num_max_tokens
        if bound < 1:
            raise ValueError(f"num_max_tokens_per_rank={bound} < 1 on rank {rank}; pass the most tokens of a rank")
        if pads_packed_rows:
            raise ValueError(f"do_zero_padding=True without do_expand on rank {rank}; pass one with the other")
        kind, _ = high_throughput.checked(self._open(), x, x_scales, topk_idx, topk_weights, num_experts, 0)
        if len(x) > bound:
            raise ValueError(f"x has {len(x)} rows > num_max_tokens_per_rank={bound} on rank {rank}; pass a larger one")
        alignment = 1 if alignment is None else arguments.checked_int(rank, "expert_alignment", alignment, 1)
        return _First(x, x_scales, topk_idx, topk_weights, kind, bound, alignment)

    def _dispatch_expanded(self, first: _First, is_exact: bool, num_sms: int, blocks: int) -> _Received:
        routing, counts = expanded.dispatch(
            self._open(),
            first.kind,
            first.x,
            first.x_scales,
            first.topk_idx,
            first.topk_weights,
            first.num_max_tokens,
            expert_alignment=first.expert_alignment,
            is_exact=is_exact,
            num_blocks=blocks,
        )
        with calls.combine_refused_if_failed(routing.open):
            index = routing.row_index()
            weights = None if first.topk_weights is None else routing.weights(index)
            handle = _handle_of(first, routing, counts, num_sms, None)
            return _Received(*expanded.rows(routing, index, blocks), None, weights, handle)

    def _dispatch_packed(self, first: _First, is_exact: bool, num_sms: int, blocks: int) -> _Received:
        received = high_throughput.dispatch(
            self._open(),
            first.kind,
            first.num_max_tokens,
            first.x,
            first.x_scales,
            first.topk_idx,
            first.topk_weights,
            expert_alignment=first.expert_alignment,
            num_worst_tokens=0 if is_exact else self.num_ranks * first.num_max_tokens,
            num_blocks=blocks,
        )
        routing, ids = received.handle, received.topk_idx
        assert routing is not None and ids is not None
        with calls.combine_refused_if_failed(routing.open):
            handle = _handle_of(first, routing, received.num_tokens_per_expert or [], num_sms, ids.clone())
            return _Received(received.x, received.x_scales, ids, received.topk_weights, handle)

    def _check_again(self, handle: EPHandle, topk_idx: Any, topk_weights: Any, do_expand: bool) -> None:
        if topk_idx is not None:
            raise ValueError(f"both handle= and topk_idx given on rank {self.rank_idx}; pass one or the other")
        if do_expand and not handle.do_expand:
            raise ValueError(
                f"do_expand=True with a handle of packed rows on rank {self.rank_idx}; dispatch without handle"
            )
        if topk_weights is not None and not handle.do_expand:
            raise ValueError(
                f"topk_weights with a handle of packed rows on rank {self.rank_idx}; pass topk_weights=None"
            )

    def _dispatch_again(
        self, handle: EPHandle, x: Tensor, scales: Tensor | None, topk_weights: Tensor | None, blocks: int
    ) -> _Received:
        routing = handle._routing
        if isinstance(routing, expanded.ExpandedHandle):
            expanded.dispatch_again(self._open(), routing, x, scales, topk_weights, num_blocks=blocks)
            with calls.combine_refused_if_failed(routing.open):
                index = routing.row_index()
                weights = None if topk_weights is None else routing.weights(index)
                return _Received(*expanded.rows(routing, index, blocks), None, weights, handle)
        received = high_throughput.dispatch_again(self._open(), x, scales, routing, num_blocks=blocks)
        assert handle._recv_topk_idx is not None
        return _Received(received.x, received.x_scales, handle._recv_topk_idx.clone(), None, handle)

    @torch.no_grad()
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The unweighted sum of a token's rows.

        Args: x: rows as recv_x; topk_weights: as recv_topk_weights; bias: None.
        Returns: (combined_x [num_tokens, H]; topk_weights by token and choice [num_tokens, K], or None; event).
        """
        exchange = self._open()
        exchange.check_handle(handle, EPHandle)
        with exchange.combine_refused_if_failed(handle.ep, handle._routing.open):
            wait_for(previous_event)
            wait_for(previous_event_before_epilogue)
            if bias is not None:
                raise ValueError(f"combine of moe_a2a has no bias (rank {self.rank_idx}); pass bias=None")
            blocks, routing = self._blocks(num_sms or handle.num_sms), handle._routing
        if isinstance(routing, expanded.ExpandedHandle):
            combined = expanded.combine(exchange, x, routing, topk_weights, num_blocks=blocks)
        else:
            mine = handle._recv_topk_idx
            if isinstance(topk_weights, Tensor) and mine is not None and topk_weights.shape == mine.shape:
                topk_weights = torch.where(mine >= 0, topk_weights, 0.0)  # other ranks return theirs
            combined = high_throughput.combine(exchange, x, routing, topk_weights, num_blocks=blocks)
        return *combined, event_if(async_with_compute_stream)

    def _blocks(self, num_sms: int) -> int:
        return 0 if num_sms == ElasticBuffer.num_sms else arguments.checked_int(self.rank_idx, "num_sms", num_sms, 0)


def _handle_of(
    first: _First,
    routing: high_throughput.Handle | expanded.ExpandedHandle,
    counts: list[int],
    num_sms: int,
    recv_topk_idx: Tensor | None,
) -> EPHandle:
    do_expand = isinstance(routing, expanded.ExpandedHandle)
    sums = _prefix_sums(routing, first.expert_alignment, do_expand)
    sizes = do_expand, first.kind.num_experts, first.expert_alignment, first.num_max_tokens, num_sms
    return EPHandle(*sizes, first.topk_idx, counts, *sums, routing, recv_topk_idx)


def _column_major(scales: Tensor) -> Tensor:
    columns = scales.new_empty(scales.shape[1], -(-len(scales) // 4) * 4)
    columns[:, : len(scales)] = scales.t()
    return columns.t()[: len(scales)]


def _prefix_sums(routing: Any, alignment: int, do_expand: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of tokens by rank and of rows by expert, and the rows of each expert without padding."""
    ep, opened = routing.ep, routing.open
    rows = landed_rows(opened._core, opened._handle)
    ends = torch.arange(1, ep.num_ranks + 1, device=rows.device, dtype=rows.dtype) * ep.num_max_tokens_per_rank
    counts = opened.expert_counts.clone()
    aligned = (counts + alignment - 1) // alignment * alignment
    ends_of_experts = aligned.cumsum(0) + (counts - aligned if do_expand else 0)
    return torch.searchsorted(rows, ends, out_int32=True), ends_of_experts.to(torch.int32), counts
