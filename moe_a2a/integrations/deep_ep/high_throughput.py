"""Buffer.dispatch() and Buffer.combine(): packed rows, one for each token that chose an expert of this rank.

DeepEP reports a row's experts in the columns of its token's choices, and takes no bound on the tokens of a rank. So a dispatch
that is not repeated also exchanges the largest number of tokens and the choices of all tokens, 8 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_a2a import arguments, calls
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.handle import DispatchHandle
from moe_a2a.integrations.deep_ep.exchange import Exchange, Routing, begin_combine, check_row_dtype, check_table, padded
from moe_a2a.integrations.deep_ep.kinds import Call, Kind
from moe_a2a.row_routes import landed_rows


@dataclass(eq=False)
class Handle(Routing):
    """A routing of packed rows."""

    row_index: Tensor  # int64 [num_rows]: the row of recv_x that each packed row was; R * T where there is none
    is_mine: Tensor  # bool [num_rows, K]: which choices of a row's token are experts of this rank

    def packed(self, rows: Tensor) -> Tensor:
        return _packed(rows, self.row_index)

    def check_packed(self, name: str, rows: Any, width: int, dtypes: tuple[torch.dtype, ...]) -> None:
        check_table(self.ep.rank, name, rows, [len(self.row_index), width], "one row per row of recv_x", dtypes)

    def unpacked(self, packed: Tensor) -> Tensor:
        """[R * T, ...]; rows without a packed row are not initialised."""
        num_rows = self.ep.num_ranks * self.ep.num_max_tokens_per_rank
        rows = packed.new_empty(num_rows + 1, packed.shape[1])
        return rows.index_copy_(0, self.row_index, packed)[:-1]

    def received(self, has_scales: bool) -> Received:
        scales = self.packed(self.open.recv_x_scales) if has_scales else None
        return Received(self.packed(self.open.recv_x), scales)

    def recv_topk_weights(self) -> Tensor:
        """float32 [num_rows, K], as the open dispatch carries them: in the columns of the choices, zeros elsewhere."""
        terms = self.packed(self.open._core.term_weights(self.open._handle))  # a row's first ones, without gaps
        return torch.where(self.is_mine, terms.gather(1, (self.is_mine.cumsum(1) - 1).clamp_(min=0)), 0.0)


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
    most = None
    if bound is None or not exchange.find(kind, bound):
        most, _ = exchange.agree(len(x), Call(kind, bound or 0, x_scales is not None, topk_weights is not None))
        bound = most if bound is None else bound
    ep = exchange.expert_parallel(kind, bound)
    with calls.refused_if_failed(exchange.collectives):
        table = _choices(topk_idx, topk_weights, ep)
    choices = exchange.gathered(table, waits=most is None and not num_worst_tokens)
    receive = exchange.begin_dispatch(ep, x, topk_idx, None, x_scales, deferred=deferred, num_blocks=num_blocks)

    def finish() -> Received:
        opened = receive()
        with calls.combine_refused_if_failed(opened):
            row_index = _row_index(opened, num_worst_tokens)
            ids, weights, is_mine = _received_choices(ep, row_index, choices)
            handle = Handle(ep, topk_idx, opened, row_index, is_mine)
            received = handle.received(x_scales is not None)
            received.handle, received.topk_idx = handle, ids
            received.topk_weights = None if topk_weights is None else weights
            counts = [] if num_worst_tokens else opened.expert_counts.tolist()
            received.num_tokens_per_expert = [-(-count // expert_alignment) * expert_alignment for count in counts]
        return received

    return finish


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
    with calls.attempt_refused_if_failed(ep, opened):  # released here alone, it would not be open on the other ranks
        handle.check_packed(name, x, ep.hidden, (ep.dtype,))
        rows = handle.unpacked(x)
    sums = begin_combine(rows, handle, presummed=True, deferred=deferred, num_blocks=num_blocks)

    def finish() -> Combined:
        combined_x = sums()
        if topk_weights is None:
            return combined_x, None
        with calls.refused_if_failed(exchange.collectives):
            handle.check_packed("topk_weights", topk_weights, ep.num_topk, arguments.ROW_DTYPES)
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
    exchange.check_per_token(x=x, topk_idx=topk_idx)
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


def _choices(topk_idx: Tensor, topk_weights: Tensor | None, ep: ExpertParallel) -> Tensor:
    """[T, 2 * K] float32: the ids as bits, then the weights."""
    ids = topk_idx.to(torch.int32)
    weights = torch.zeros_like(ids) if topk_weights is None else topk_weights.float().view(torch.int32)
    return padded(torch.cat([ids, weights], 1), ep.num_max_tokens_per_rank, -1).view(torch.float32)


def _received_choices(ep: ExpertParallel, row_index: Tensor, choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(local ids, -1 for experts elsewhere; weights, then 0; which are here), all [num_rows, K]."""
    there = (row_index < len(choices))[:, None]
    ids, weights = _packed(choices, row_index).split(ep.num_topk, 1)
    local = ids.contiguous().view(torch.int32).long() - ep.rank * ep.num_local_experts
    is_mine = there & (local >= 0) & (local < ep.num_local_experts)
    return torch.where(is_mine, local, -1), torch.where(is_mine, weights, 0.0), is_mine


def _row_index(opened: DispatchHandle, num_worst_tokens: int) -> Tensor:
    if not num_worst_tokens:
        return opened.recv_rows.long()
    return landed_rows(opened._core, opened._handle)[:num_worst_tokens].long()


def _packed(rows: Tensor, row_index: Tensor) -> Tensor:
    return rows.index_select(0, row_index.clamp(max=len(rows) - 1))
