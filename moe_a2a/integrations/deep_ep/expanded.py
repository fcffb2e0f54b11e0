"""Rows by route, of ElasticBuffer and HybridEPBuffer: one for each choice of an expert of this rank, grouped by expert.

A dispatch carries the weights that its caller gave, or else the index of each choice. A combine that returns topk_weights
needs these to find the place of each: if its dispatch does not have them, another one follows the sums. Not before them: a
rank whose call has failed since the dispatch refuses the combine, and a dispatch would wait for it until the deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_a2a import block_scales, calls
from moe_a2a.arguments import ROW_DTYPES
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.handle import DispatchHandle
from moe_a2a.integrations.deep_ep.exchange import Exchange, Routing, begin_combine, check_device, check_table
from moe_a2a.integrations.deep_ep.kinds import Call, Kind
from moe_a2a.row_routes import by_choice, make_unweighted, worst_num_rows


@dataclass(eq=False)
class ExpandedHandle(Routing):
    """A routing of rows by route."""

    expert_alignment: int
    num_rows: int
    is_exact: bool  # num_rows holds what arrived; else it is a bound
    drops: bool  # routes past num_rows are left out
    carries_choices: bool  # the open dispatch

    def row_index(self) -> Tensor:
        """int64 [num_rows]: the row of recv_x of each row by route, -1 where there is none."""
        index = self.open.expert_row_index[: self.num_rows]
        positions = torch.arange(len(index), device=index.device)
        index = torch.where(positions < self.open.expert_offsets[-1], index, -1).long()
        return torch.nn.functional.pad(index, (0, self.num_rows - len(index)), value=-1)

    def weights(self, row_index: Tensor) -> Tensor:
        weights = self.open.route_weights[: self.num_rows]
        weights = torch.nn.functional.pad(weights, (0, self.num_rows - len(weights)))
        return torch.where(row_index >= 0, weights, 0.0)

    def by_choice(self, topk_weights: Tensor) -> Tensor:
        """float32 [R * T, K]: the weights of the rows, by token of all ranks and choice. The open dispatch carries choices."""
        index, shape = self.row_index(), (self.ep.num_ranks * self.ep.num_max_tokens_per_rank, self.ep.num_topk)
        return by_choice(topk_weights, index, self.weights(index), *shape)


def begin_dispatch(
    exchange: Exchange,
    kind: Kind,
    x: Tensor,
    x_scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_max_tokens: int,
    *,
    expert_alignment: int,
    is_exact: bool,
    num_rows: int | None = None,
    deferred: bool = False,
    num_blocks: int,
) -> Callable[[], tuple[ExpandedHandle, list[int]]]:
    """Sends; returns a function that receives, and returns the handle and, if is_exact, each expert's number of rows, read by
    the host.

    num_rows: how many rows to return; None: as many as arrive if is_exact, else as many as could. If more arrive, that is an
    error if is_exact; else the caller must drop_routes()."""
    call = Call(kind, num_max_tokens, x_scales is not None, topk_weights is not None, by_route=True)
    ep = exchange.bounded_expert_parallel(kind, num_max_tokens, len(x), call)
    receive = _begin(
        exchange, ep, x, x_scales, topk_idx, topk_weights, expert_alignment, deferred=deferred, num_blocks=num_blocks
    )

    def finish() -> tuple[ExpandedHandle, list[int]]:
        opened = receive()
        with calls.combine_refused_if_failed(opened):
            bound, counts = num_rows, []
            if is_exact:
                counts = [-(-n // expert_alignment) * expert_alignment for n in opened.expert_counts.tolist()]
                opened._core.raise_reported()
                bound = _checked_num_rows(ep.rank, num_rows, sum(counts))
            elif bound is None:
                bound = worst_num_rows(ep, num_max_tokens, expert_alignment)
            handle = ExpandedHandle(
                ep,
                topk_idx,
                opened,
                expert_alignment=expert_alignment,
                num_rows=bound,
                is_exact=is_exact,
                drops=num_rows is not None and not is_exact,
                carries_choices=topk_weights is None,
            )
            return handle, counts

    return finish


def begin_dispatch_again(
    exchange: Exchange,
    handle: ExpandedHandle,
    x: Tensor | None,
    x_scales: Tensor | None,
    topk_weights: Tensor | None,
    *,
    deferred: bool = False,
    num_blocks: int,
    name: str = "x",
) -> Callable[[], None]:
    """x: None: only the routing is sent. name: of x, in errors."""
    with exchange.dispatch_again_refused_if_failed(handle):
        x = handle.no_rows() if x is None else x
        handle.check_rows(x, x_scales, name)
    routing = handle.topk_idx, topk_weights, handle.expert_alignment
    receive = _begin(exchange, handle.ep, x, x_scales, *routing, deferred=deferred, num_blocks=num_blocks)

    def finish() -> None:
        handle.latest = receive()
        handle.carries_choices = topk_weights is None
        if handle.drops:
            with calls.combine_refused_if_failed(handle.open):
                drop_routes(handle)

    return finish


def drop_routes(handle: ExpandedHandle) -> None:
    """Leaves out the routes from num_rows on, so that combine() neither reads nor adds them. The host reads nothing."""
    opened = handle.open
    opened.expert_offsets.clamp_(max=handle.num_rows)
    positions = opened._core.term_positions(opened._handle)  # the terms' weights will all be 1
    is_kept = (positions >= 0).cumprod(1).bool() & (positions < handle.num_rows)
    order = is_kept.logical_not().to(torch.uint8).argsort(dim=1, stable=True)  # a row's terms end at its first -1
    positions.copy_(torch.where(is_kept, positions, -1).gather(1, order))


def rows(handle: ExpandedHandle, row_index: Tensor, num_blocks: int) -> tuple[Tensor, Tensor | None]:
    """Rows and scales; zeros between the experts' rows."""
    opened, has_scales = handle.open, handle.open.row_dtype.itemsize == 1
    if not handle.is_exact and not handle.drops:  # the kernel copies what arrived, and not up to the bound
        x, scales = opened._core.gather_rows(opened._handle, opened.row_dtype, num_blocks)
        if scales is not None:
            scales = _resized(block_scales.unpacked(scales, opened._scales_dtype, handle.ep.hidden), handle.num_rows)
        return _resized(x, handle.num_rows), scales
    index, is_gap = row_index.clamp(min=0), (row_index < 0)[:, None]
    x = opened.recv_x.index_select(0, index)
    scales = opened.recv_x_scales.index_select(0, index) if has_scales else None
    for each in (x, scales):
        if each is not None:
            each.view(torch.uint8).masked_fill_(is_gap, 0)  # PyTorch fills no float8
    return x, scales


Combined = tuple[Tensor, Tensor | None]


def begin_combine_of(
    exchange: Exchange,
    x: Tensor,
    handle: ExpandedHandle,
    topk_weights: Tensor | None,
    *,
    deferred: bool = False,
    num_blocks: int,
    names: tuple[str, str] = ("x", "topk_weights"),
) -> Callable[[], Combined]:
    """Returns a function that receives the sums over all routes of the rows `x`, and `topk_weights` by token and choice. names: of
    these two, in errors."""
    ep = handle.ep
    if not handle.is_open:
        begin_dispatch_again(exchange, handle, None, None, None, num_blocks=num_blocks)()
    opened, table = handle.open, None
    with exchange.combine_refused_if_failed(handle):
        check_table(ep.rank, names[0], x, [handle.num_rows, ep.hidden], "as dispatch() returned", (ep.dtype,))
        check_device(ep, names[0], x)
        if topk_weights is not None:
            check_table(ep.rank, names[1], topk_weights, [handle.num_rows], "as dispatch() returned", ROW_DTYPES)
            table = handle.by_choice(topk_weights) if handle.carries_choices else None
        make_unweighted(opened)
    sums = begin_combine(x, handle, deferred=deferred, num_blocks=num_blocks)

    def finish() -> Combined:
        combined_x = sums()
        if topk_weights is None:
            return combined_x, None
        placed = _placed(exchange, handle, topk_weights, num_blocks) if table is None else table
        return combined_x, exchange.collectives.reduce_scatter(placed)[: len(handle.topk_idx)]

    return finish


def _placed(exchange: Exchange, handle: ExpandedHandle, topk_weights: Tensor, num_blocks: int) -> Tensor:
    """by_choice() along a dispatch of its own."""
    begin_dispatch_again(exchange, handle, None, None, None, num_blocks=num_blocks)()
    opened = handle.open
    with calls.refused_if_failed(exchange.collectives):
        try:
            return handle.by_choice(topk_weights)
        finally:
            opened.release()


def _begin(
    exchange: Exchange,
    ep: ExpertParallel,
    x: Tensor,
    x_scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    expert_alignment: int,
    *,
    deferred: bool,
    num_blocks: int,
) -> Callable[[], DispatchHandle]:
    if topk_weights is None:
        topk_weights = exchange.choice_numbers[ep][: len(topk_idx)]
    how: dict[str, Any] = {"expert_alignment": expert_alignment, "deferred": deferred, "num_blocks": num_blocks}
    return exchange.begin_dispatch(ep, x, topk_idx, topk_weights, x_scales, **how)


def _checked_num_rows(rank: int, num_rows: int | None, num_arrived: int) -> int:
    if num_rows is not None and num_rows < num_arrived:
        raise ValueError(
            f"num_permuted_tokens={num_rows} < {num_arrived} rows on rank {rank}; pass a larger one, or None"
        )
    return num_arrived if num_rows is None else num_rows


def _resized(rows: Tensor, num_rows: int) -> Tensor:
    if len(rows) >= num_rows:
        return rows[:num_rows]
    result = rows.new_empty(num_rows, rows.shape[1])
    result[: len(rows)] = rows
    return result
