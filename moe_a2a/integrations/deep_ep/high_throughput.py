"""Buffer.dispatch() and Buffer.combine(): packed rows, one for each token that chose an expert of this rank.

Buffer takes no bound on the tokens of a rank. So its dispatch() along no handle first exchanges how many tokens each rank has,
unless num_worst_tokens says the most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_a2a import arguments, calls, devices
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.handle import DispatchHandle
from moe_a2a.integrations.deep_ep.exchange import (
    Exchange,
    Routing,
    begin_combine,
    check_device,
    check_row_dtype,
    check_table,
)
from moe_a2a.integrations.deep_ep.kinds import Call, Kind
from moe_a2a.row_routes import packed_topk


@dataclass(eq=False)
class Handle(Routing):
    """A routing of packed rows."""

    row_index: Tensor  # int64 [num_rows]: the row of recv_x that each packed row was; R * T where there is none
    is_exact: bool  # there is one for each
    ids: Tensor  # int64 [num_rows, K]: as recv_topk_idx, which the caller may change
    sum_index: Tensor  # int32 [R * T]: the packed row of each row of recv_x; undefined where there is none
    numbers: Tensor  # int32 [R + E_local]: rows that arrived from the ranks up to each; routes of each local expert

    @property
    def is_mine(self) -> Tensor:
        """bool [num_rows, K]: which choices of a row's token are experts of this rank."""
        devices.keep_for_current_stream(self.ids)
        return self.ids >= 0

    def packed(self, rows: Tensor) -> Tensor:
        """rows: [R * T, ...]. Packed rows beyond those that arrived are unspecified."""
        devices.keep_for_current_stream(self.row_index)
        index = self.row_index if self.is_exact else self.row_index.clamp(max=len(rows) - 1)
        return rows.index_select(0, index)

    def check_packed(self, name: str, rows: Any, width: int, dtypes: tuple[torch.dtype, ...]) -> None:
        check_table(self.ep.rank, name, rows, [len(self.row_index), width], "one row per row of recv_x", dtypes)

    def received(self, has_scales: bool) -> Received:
        scales = self.packed(self.open.recv_x_scales) if has_scales else None
        return Received(self.packed(self.open.recv_x), scales)

    def recv_topk_weights(self) -> Tensor:
        """float32 [num_rows, K], as the open dispatch carries them: in the columns of the choices, zeros elsewhere."""
        return packed_topk(self.open, len(self.row_index))[2]


@dataclass
class Received:
    x: Tensor
    x_scales: Tensor | None
    topk_idx: Tensor | None = None
    topk_weights: Tensor | None = None
    num_tokens_per_expert: list[int] | None = None
    handle: Handle | None = None


def begin_dispatch(
    exchange: Exchange,
    kind: Kind,
    bound: int | None,
    x: Tensor,
    x_scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    *,
    expert_alignment: int,
    num_worst_tokens: int,
    deferred: bool = False,
    num_blocks: int,
) -> Callable[[], Received]:
    """Sends; returns a function that receives. kind, bound and the arguments that they come from: see checked()."""
    call = Call(kind, bound or 0, x_scales is not None, topk_weights is not None)
    if bound is None:
        ep = exchange.agreed_expert_parallel(kind, len(x), call)
    else:
        ep = exchange.bounded_expert_parallel(kind, bound, len(x), call)
    with exchange.dispatch_refused_if_failed(ep):
        weights = None if topk_weights is None else topk_weights.float().contiguous()
    receive = exchange.begin_dispatch(ep, x, topk_idx, weights, x_scales, deferred=deferred, num_blocks=num_blocks)

    def finish() -> Received:
        opened = receive()
        with calls.combine_refused_if_failed(opened):
            handle, recv_weights, counts = _received(ep, topk_idx, opened, num_worst_tokens)
            received = handle.received(x_scales is not None)
            received.handle, received.topk_idx = handle, handle.ids.clone()
            received.topk_weights = None if weights is None else recv_weights
            received.num_tokens_per_expert = [-(-count // expert_alignment) * expert_alignment for count in counts]
        return received

    return finish


def _received(
    ep: ExpertParallel, topk_idx: Tensor, opened: DispatchHandle, num_worst_tokens: int
) -> tuple[Handle, Tensor, list[int]]:
    """The handle, the weights, and the routes of each local expert, read by the host. num_worst_tokens: how many rows to return,
    with no counts; 0: as many as there are."""
    most = ep.num_ranks * ep.num_max_tokens_per_rank
    row_index, ids, weights, sum_index, numbers = packed_topk(opened, num_worst_tokens or most)
    if num_worst_tokens:
        return Handle(ep, topk_idx, opened, row_index, False, ids, sum_index, numbers), weights, []
    read = numbers.tolist()
    opened._core.raise_reported()
    num_rows = read[ep.num_ranks - 1]
    handle = Handle(ep, topk_idx, opened, row_index[:num_rows], True, ids[:num_rows], sum_index, numbers)
    return handle, weights[:num_rows], read[ep.num_ranks :]


def begin_dispatch_again(
    exchange: Exchange,
    x: Tensor,
    x_scales: Tensor | None,
    handle: Handle,
    *,
    topk_weights: Tensor | None = None,
    deferred: bool = False,
    num_blocks: int,
    name: str = "x",
) -> Callable[[], Received]:
    """The rows of `x` along the routing of an earlier dispatch, and topk_weights if given. name: of x, in errors."""
    weights = None
    with exchange.dispatch_again_refused_if_failed(handle):
        handle.check_rows(x, x_scales, name)
        if topk_weights is not None:
            shape = list(handle.topk_idx.shape)
            check_table(exchange.rank, "topk_weights", topk_weights, shape, "one row per token of the handle")
            weights = topk_weights.float().contiguous()
    receive = exchange.begin_dispatch(
        handle.ep, x, handle.topk_idx, weights, x_scales, deferred=deferred, num_blocks=num_blocks
    )

    def finish() -> Received:
        handle.latest = receive()
        with calls.combine_refused_if_failed(handle.open):
            received = handle.received(x_scales is not None)
            received.topk_weights = None if weights is None else handle.recv_topk_weights()
        return received

    return finish


Combined = tuple[Tensor, Tensor | None]


def begin_combine_of(
    exchange: Exchange,
    x: Tensor,
    handle: Handle,
    topk_weights: Tensor | None,
    *,
    deferred: bool = False,
    num_blocks: int,
    name: str = "x",
) -> Callable[[], Combined]:
    """Returns a function that receives the sums over ranks of the packed rows `x`, and of `topk_weights` by choice. name: of x, in
    errors."""
    ep = handle.ep
    if not handle.is_open:
        with exchange.dispatch_again_refused_if_failed(handle):
            rows = handle.no_rows()
        routing = handle.topk_idx, None, None
        handle.latest = exchange.begin_dispatch(ep, rows, *routing, deferred=False, num_blocks=num_blocks)()
    opened = handle.open
    with exchange.combine_refused_if_failed(handle):
        handle.check_packed(name, x, ep.hidden, (ep.dtype,))
        check_device(ep, name, x)
        opened._sum_index = handle.sum_index
    sums = begin_combine(x, handle, presummed=True, deferred=deferred, num_blocks=num_blocks)

    def finish() -> Combined:
        combined_x = sums()
        if topk_weights is None:
            return combined_x, None
        with calls.refused_if_failed(exchange.collectives):
            handle.check_packed("topk_weights", topk_weights, ep.num_topk, arguments.ROW_DTYPES)
            devices.keep_for_current_stream(handle.row_index)
            num_rows = ep.num_ranks * ep.num_max_tokens_per_rank
            by_choice = topk_weights.new_zeros(num_rows + 1, ep.num_topk)
            by_choice.index_copy_(0, handle.row_index, topk_weights)
        return combined_x, exchange.collectives.reduce_scatter(by_choice[:-1])[: len(handle.topk_idx)]

    return finish


def checked(
    exchange: Exchange,
    x: Tensor,
    x_scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    num_worst_tokens: int,
) -> tuple[Kind, int | None]:
    """The kind, and the most tokens of a rank if all ranks know it."""
    rank = exchange.rank
    arguments.check_per_token(rank, x=x, topk_idx=topk_idx)
    arguments.check_optional_tensor(rank, "topk_weights", topk_weights)
    shape = [len(x), topk_idx.shape[-1]]
    for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if tensor is not None:
            check_table(rank, name, tensor, shape, "one row per row of x")
    check_row_dtype(rank, "x", x, x_scales)
    dtype = x.dtype if x_scales is None else torch.bfloat16
    kind = Kind(num_experts, topk_idx.shape[1], x.shape[1], dtype, is_low_latency=False)
    if not arguments.checked_int(rank, "num_worst_tokens", num_worst_tokens, 0):
        return kind, None
    bound = num_worst_tokens // exchange.num_ranks
    if len(x) > bound:
        raise ValueError(
            f"x has {len(x)} rows on rank {rank}, but num_worst_tokens={num_worst_tokens} allows {bound} on each of "
            f"{exchange.num_ranks} ranks; pass a larger num_worst_tokens"
        )
    return kind, bound
