"""What ElasticBuffer and EPBuffer have in common: dispatch and combine of packed rows and of rows by route."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_a2a import arguments, calls
from moe_a2a.groups import as_group
from moe_a2a.integrations.deep_ep import expanded, high_throughput
from moe_a2a.integrations.deep_ep.buffer import Rows
from moe_a2a.integrations.deep_ep.ep_handle import EPHandle, handle_of, version_of
from moe_a2a.integrations.deep_ep.events import EventHandle
from moe_a2a.integrations.deep_ep.exchange import OfExchange, rows_and_scales
from moe_a2a.integrations.deep_ep.kinds import Kind

SIZE_ALIGNMENT = 2 << 20


@dataclass
class First:
    """The arguments of a first dispatch."""

    x: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_experts: int | None
    num_max_tokens: int | None
    expert_alignment: int
    num_sms: int
    is_exact: bool
    do_expand: bool
    do_zero_padding: bool
    copies_topk_idx: bool
    stats: Tensor | None
    is_deferred: bool = False


@dataclass
class _Received:
    x: Tensor
    x_scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    handle: EPHandle


Result = tuple[Rows, Tensor | None, Tensor | None, EPHandle]
Combined = tuple[Tensor, Tensor | None]


def _nothing() -> None:
    pass


class RoutedBuffer(OfExchange):
    """Each method begins a call and returns a function that ends it: called at once, or later if the caller defers it.

    check: raises if an argument is wrong that this class does not know, so that the peers learn of it.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_bytes: int | None,
        num_max_tokens_per_rank: int,
        sizes: tuple[int, int, bool],
        num_allocated_qps: int,
        timeout: float,
        explicitly_destroy: bool,
        num_buffers: int,
    ):
        self.group = group
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        hint = self.get_buffer_size_hint(group, num_max_tokens_per_rank, *sizes)
        self.num_bytes = hint if num_bytes is None else num_bytes
        self.num_allocated_qps = num_allocated_qps
        self.explicitly_destroy = explicitly_destroy
        super().__init__(group, timeout, num_buffers, explicitly_destroy)
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
        return self.num_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        return self.num_allocated_qps

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Returns once all ranks have called it."""
        self._open().barrier()

    # ---- a first dispatch

    def _begin_first(self, first: First, check: Callable[[], None] = _nothing) -> Callable[[], _Received]:
        exchange = self._open()
        most = self.num_max_tokens_per_rank if first.num_max_tokens is None else first.num_max_tokens
        likely = exchange.likely(first.x, first.topk_idx, first.num_experts, most)
        with exchange.dispatch_refused_if_failed(likely):
            check()
            rows, scales = rows_and_scales(self.rank_idx, first.x)
            kind, bound, topk_idx = self._checked(first, rows, scales)
            blocks = self._blocks(first.num_sms)
        begin = self._begin_expanded if first.do_expand else self._begin_packed
        finish = begin(first, kind, bound, rows, scales, topk_idx, blocks)
        return finish if first.stats is None else lambda: _counted(finish(), first.stats)

    def _checked(self, first: First, x: Tensor, x_scales: Tensor | None) -> tuple[Kind, int, Tensor]:
        rank, topk_idx = self.rank_idx, first.topk_idx
        if topk_idx is None or first.num_experts is None:
            raise ValueError(
                f"dispatch on rank {rank} got neither a handle nor a routing; pass topk_idx and num_experts"
            )
        bound = self.num_max_tokens_per_rank if first.num_max_tokens is None else first.num_max_tokens
        bound = arguments.checked_int(rank, "num_max_tokens_per_rank", bound, 1)
        num_experts = arguments.checked_int(rank, "num_experts", first.num_experts, 1)
        self._open().check_num_experts("num_experts", num_experts)
        if first.do_zero_padding and not first.do_expand:
            raise ValueError(f"do_zero_padding=True without do_expand on rank {rank}; pass one with the other")
        arguments.checked_int(rank, "expert_alignment", first.expert_alignment, 1)
        routing = topk_idx, first.topk_weights, num_experts
        kind, _ = high_throughput.checked(self._open(), x, x_scales, *routing, 0)
        if len(x) > bound:
            raise ValueError(f"x has {len(x)} rows > num_max_tokens_per_rank={bound} on rank {rank}; pass a larger one")
        return kind, bound, topk_idx.clone() if first.copies_topk_idx else topk_idx

    def _begin_expanded(
        self, first: First, kind: Kind, bound: int, x: Tensor, scales: Tensor | None, topk_idx: Tensor, blocks: int
    ) -> Callable[[], _Received]:
        version = version_of(topk_idx)
        receive = expanded.begin_dispatch(
            self._open(),
            kind,
            x,
            scales,
            topk_idx,
            first.topk_weights,
            bound,
            expert_alignment=first.expert_alignment,
            is_exact=first.is_exact,
            deferred=first.is_deferred,
            num_blocks=blocks,
        )

        def finish() -> _Received:
            routing, counts = receive()
            with calls.combine_refused_if_failed(routing.open):
                index = routing.row_index()
                weights = None if first.topk_weights is None else routing.weights(index)
                handle = self._handle_of(first, bound, routing, topk_idx, version, counts)
                return _Received(*expanded.rows(routing, index, blocks), None, weights, handle)

        return finish

    def _begin_packed(
        self, first: First, kind: Kind, bound: int, x: Tensor, scales: Tensor | None, topk_idx: Tensor, blocks: int
    ) -> Callable[[], _Received]:
        version = version_of(topk_idx)
        receive = high_throughput.begin_dispatch(
            self._open(),
            kind,
            bound,
            x,
            scales,
            topk_idx,
            first.topk_weights,
            expert_alignment=first.expert_alignment,
            num_worst_tokens=0 if first.is_exact else self.num_ranks * bound,
            deferred=first.is_deferred,
            num_blocks=blocks,
        )

        def finish() -> _Received:
            received = receive()
            routing, counts = received.handle, received.num_tokens_per_expert or []
            assert routing is not None
            with calls.combine_refused_if_failed(routing.open):
                handle = self._handle_of(first, bound, routing, topk_idx, version, counts)
                return _Received(received.x, received.x_scales, received.topk_idx, received.topk_weights, handle)

        return finish

    def _handle_of(
        self,
        first: First,
        bound: int,
        routing: high_throughput.Handle | expanded.ExpandedHandle,
        topk_idx: Tensor,
        version: int | None,
        counts: list[int],
    ) -> EPHandle:
        return handle_of(
            routing,
            topk_idx,
            version,
            counts,
            expert_alignment=first.expert_alignment,
            num_max_tokens=bound,
            num_sms=first.num_sms or self.num_sms,
        )

    # ---- along a handle

    def _begin_again(
        self,
        handle: EPHandle,
        x: Rows,
        topk_idx: Any,
        topk_weights: Tensor | None,
        num_sms: int,
        *,
        do_expand: bool,
        takes_weights: bool,
        is_deferred: bool = False,
        check: Callable[[], None] = _nothing,
        **expected: int | None,
    ) -> Callable[[], _Received]:
        """takes_weights: also with packed rows. expected: attributes that the handle must have, None: any."""
        exchange, rank = self._open(), self.rank_idx
        exchange.check_handle(handle, EPHandle, opens=True)
        with exchange.dispatch_again_refused_if_failed(handle._routing):
            check()
            if topk_idx is not None:
                raise ValueError(f"both handle= and topk_idx given on rank {rank}; pass one or the other")
            if do_expand and not handle.do_expand:
                raise ValueError(f"do_expand=True with a handle of packed rows on rank {rank}; dispatch without handle")
            if topk_weights is not None and not (handle.do_expand or takes_weights):
                raise ValueError(f"topk_weights with a handle of packed rows on rank {rank}; pass topk_weights=None")
            for name, value in expected.items():
                if value is not None and value != getattr(handle, name):
                    raise ValueError(
                        f"{name}={value} on rank {rank}, but the handle has {getattr(handle, name)}; pass the same, or None"
                    )
            handle.topk_idx  # noqa: B018  raises if it has been changed
            rows, scales = rows_and_scales(rank, x)
            blocks, routing = self._blocks(num_sms), handle._routing
        how: dict[str, Any] = {"deferred": is_deferred, "num_blocks": blocks}
        if isinstance(routing, high_throughput.Handle):
            how["topk_weights"] = topk_weights
            receive = high_throughput.begin_dispatch_again(exchange, rows, scales, routing, **how)
            return lambda: _with_ids(receive(), routing.ids, handle)
        receive_rows = expanded.begin_dispatch_again(exchange, routing, rows, scales, topk_weights, **how)

        def finish() -> _Received:
            receive_rows()
            with calls.combine_refused_if_failed(routing.open):
                index = routing.row_index()
                weights = None if topk_weights is None else routing.weights(index)
                return _Received(*expanded.rows(routing, index, blocks), None, weights, handle)

        return finish

    def _begin_combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None,
        bias: Any,
        num_sms: int,
        is_deferred: bool = False,
        check: Callable[[], None] = _nothing,
    ) -> Callable[[], Combined]:
        exchange = self._open()
        exchange.check_handle(handle, EPHandle)
        with exchange.combine_refused_if_failed(handle._routing):
            check()
            if bias is not None:
                raise ValueError(f"combine of moe_a2a has no bias (rank {self.rank_idx}); pass bias=None")
            handle.topk_idx  # noqa: B018  raises if it has been changed
            blocks, routing = self._blocks(num_sms or handle.num_sms), handle._routing
        how: dict[str, Any] = {"deferred": is_deferred, "num_blocks": blocks}
        if isinstance(routing, expanded.ExpandedHandle):
            return expanded.begin_combine_of(exchange, x, routing, topk_weights, **how)
        if isinstance(topk_weights, Tensor) and topk_weights.shape == routing.is_mine.shape:
            topk_weights = torch.where(routing.is_mine, topk_weights, 0.0)  # other ranks return theirs
        return high_throughput.begin_combine_of(exchange, x, routing, topk_weights, **how)

    def _blocks(self, num_sms: int) -> int:
        return 0 if num_sms == self.num_sms else arguments.checked_int(self.rank_idx, "num_sms", num_sms, 0)


def result_of(received: _Received, col_major_scales: bool) -> Result:
    scales = received.x_scales
    if scales is not None and col_major_scales:
        scales = _column_major(scales)
    rows = received.x if scales is None else (received.x, scales)
    return rows, received.topk_idx, received.topk_weights, received.handle


def _counted(received: _Received, stats: Tensor | None) -> _Received:
    if stats is not None:
        with calls.combine_refused_if_failed(received.handle._routing.open):
            stats.add_(received.handle.num_unaligned_recv_tokens_per_expert)
    return received


def _with_ids(received: high_throughput.Received, ids: Tensor, handle: EPHandle) -> _Received:
    return _Received(received.x, received.x_scales, ids.clone(), received.topk_weights, handle)


def _column_major(scales: Tensor) -> Tensor:
    columns = scales.new_empty(scales.shape[1], -(-len(scales) // 4) * 4)
    columns[:, : len(scales)] = scales.t()
    return columns.t()[: len(scales)]
