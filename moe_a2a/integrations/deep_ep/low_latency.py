"""Buffer.low_latency_dispatch() and low_latency_combine(): rows grouped by local expert, in a fixed amount of memory.

DeepEP learns the weights only at the combine, moe_a2a at the dispatch. So the dispatch carries the index of each choice in
place of its weight, and the combine first gathers the weights of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_a2a import arguments, calls
from moe_a2a.errors import PeerTimeoutError
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.handle import DispatchHandle
from moe_a2a.integrations.deep_ep.exchange import Exchange, check_device, check_row_dtype, check_table
from moe_a2a.integrations.deep_ep.kinds import Call, Kind

Hook = Callable[[], None]


@dataclass(eq=False)
class LowLatencyHandle:
    """A dispatch, for one combine."""

    ep: ExpertParallel
    opened: DispatchHandle
    num_tokens: int
    has_weights: bool
    is_received: bool  # else its hook is still to be called
    is_sent: bool = False  # by a combine whose hook is still to be called
    has_combine: bool = False  # one has been called

    @property
    def needs_weights(self) -> bool:
        """Whether its combine begins with an all-gather of the weights."""
        return self.opened.is_open and not self.has_weights


def check_kept(handle: LowLatencyHandle) -> None:
    """Raises if make_room() has ended it, on every rank. No peer is told: it would refuse the combine of another handle."""
    ep = handle.ep
    if not handle.opened.is_open and not handle.has_combine and not ep.is_closed:
        raise RuntimeError(
            f"a low_latency_dispatch of rank {ep.rank} was lost, since num_buffers={ep.num_buffers} others followed; combine "
            "first, or pass a larger num_buffers"
        )


def add_advice(error: PeerTimeoutError, rank: int, num_max_tokens: int) -> None:
    """A dispatch with known sizes compares nothing: ranks that pass different ones wait for each other in different calls."""
    error.args = (
        f"{error}; if all are alive, pass the same num_max_dispatch_tokens_per_rank ({num_max_tokens} on rank {rank}), "
        "num_experts, row lengths and dtypes on every rank",
    )


@dataclass
class LowLatencyReceived:
    x: Tensor  # [E_local, R * T, H]
    x_scales: Tensor | None  # [E_local, R * T, H / 128], column-major in the last two dimensions
    counts: Tensor  # int32 [E_local]
    handle: LowLatencyHandle
    hook: Hook | None


def dispatch(
    exchange: Exchange,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_max_tokens: int,
    num_experts: int,
    *,
    use_fp8: bool,
    return_recv_hook: bool,
    check: Callable[[], None],
) -> LowLatencyReceived:
    """check: raises if another argument of the caller's is wrong; the dispatch is then refused."""
    likely = exchange.likely(x, topk_idx, num_experts, num_max_tokens, is_low_latency=True)
    with exchange.dispatch_refused_if_failed(likely):
        check()
        arguments.check_per_token(exchange.rank, x=x, topk_idx=topk_idx)
        _check(exchange, x, num_max_tokens, num_experts)
    kind = Kind(num_experts, topk_idx.shape[1], x.shape[1], x.dtype, is_low_latency=True)
    call = Call(kind, num_max_tokens, bool(use_fp8), topk_weights is not None)
    ep = exchange.bounded_expert_parallel(kind, num_max_tokens, len(x), call)
    exchange.make_room(ep)
    has_weights = topk_weights is not None
    with calls.dispatch_refused_if_failed(ep):
        if topk_weights is None:
            topk_weights = exchange.choice_numbers[ep][: len(x)]
    quantize = "fp8" if use_fp8 else None
    if not return_recv_hook:
        opened = exchange.opened(ep, ep.dispatch(x, topk_idx, topk_weights, layout="masked", quantize=quantize))
        handle = LowLatencyHandle(ep, opened, len(x), has_weights, is_received=True)
        with calls.combine_refused_if_failed(opened):
            return LowLatencyReceived(*_received(opened), opened.expert_counts.clone(), handle, None)
    opened = exchange.opened(ep, ep.dispatch_send(x, topk_idx, topk_weights, quantize=quantize))
    handle = LowLatencyHandle(ep, opened, len(x), has_weights, is_received=False)
    with calls.combine_refused_if_failed(opened):
        received = LowLatencyReceived(*_empty(ep, opened.row_dtype, use_fp8), handle, None)
    received.hook = lambda: _fill(received)
    return received


def _check(exchange: Exchange, x: Tensor, num_max_tokens: int, num_experts: int) -> None:
    rank = exchange.rank
    check_row_dtype(rank, "x", x, None)
    arguments.checked_int(rank, "num_max_dispatch_tokens_per_rank", num_max_tokens, 1)
    if len(x) > num_max_tokens:
        raise ValueError(
            f"x has {len(x)} rows > num_max_dispatch_tokens_per_rank={num_max_tokens} on rank {rank}; pass a larger one"
        )
    exchange.check_num_experts("num_experts", arguments.checked_int(rank, "num_experts", num_experts, 1))


def combine(
    exchange: Exchange,
    x: Tensor,
    topk_weights: Tensor,
    handle: LowLatencyHandle,
    *,
    out: Tensor | None,
    return_recv_hook: bool,
) -> tuple[Tensor, Hook | None]:
    ep, opened = handle.ep, handle.opened
    if handle.is_sent:
        raise RuntimeError(
            f"low_latency_combine on rank {ep.rank} got a handle whose combine is already under way; call the hook of that "
            "combine, and pass the handle of another low_latency_dispatch"
        )
    handle.has_combine = True
    with exchange.repeated_if_failed(opened):
        if handle.needs_weights:
            _set_weights(exchange, handle, topk_weights)
        with calls.attempt_refused_if_failed(ep, opened):
            shape = [ep.num_local_experts, ep.num_ranks * ep.num_max_tokens_per_rank, ep.hidden]
            check_table(ep.rank, "x", x, shape, "rows where recv_x has theirs", (ep.dtype,))
            check_device(ep, "x", x)
            # Before anything is sent: a hook that fails would leave the sums behind, on this rank only.
            if out is not None:
                _check_out(handle, out)
        if not return_recv_hook:
            return ep.combine(x, opened, out=out), None
        with calls.combine_refused_if_failed(opened):
            combined = x.new_empty(handle.num_tokens, ep.hidden) if out is None else out
        ep.combine_send(x, opened)
        handle.is_sent = True

    @torch.no_grad()
    def receive() -> None:
        handle.is_sent = False
        with exchange.repeated_if_failed(opened):
            ep.combine_recv(opened, out=combined)

    return combined, receive


def _check_out(handle: LowLatencyHandle, out: Tensor) -> None:
    ep = handle.ep
    check_table(ep.rank, "out", out, [handle.num_tokens, ep.hidden], "a row per token", (ep.dtype,))
    check_device(ep, "out", out)
    if not out.is_contiguous():
        raise ValueError(
            f"out is not contiguous (strides {list(out.stride())}) on rank {ep.rank}; pass a contiguous one"
        )


def combine_refused_if_failed(exchange: Exchange, handle: LowLatencyHandle) -> AbstractContextManager[None]:
    """Around what precedes a combine: its peers are in an exchange of weights first, if it has none."""
    if handle.needs_weights:
        return calls.refused_if_failed(exchange.collectives)
    return calls.attempt_refused_if_failed(handle.ep, handle.opened)


def _received(
    opened: DispatchHandle, given: tuple[Tensor, Tensor | None] | None = None
) -> tuple[Tensor, Tensor | None]:
    """(rows by expert, their scales), in the `given` tensors, if any."""
    return opened._core.gather_rows(opened._handle, opened.row_dtype, opened._num_blocks, True, given)


def _empty(ep: ExpertParallel, dtype: torch.dtype, use_fp8: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """What _fill() fills."""
    num_rows = ep.num_ranks * ep.num_max_tokens_per_rank
    x = torch.empty(ep.num_local_experts, num_rows, ep.hidden, dtype=dtype, device=ep.device)
    counts = torch.empty(ep.num_local_experts, dtype=torch.int32, device=ep.device)
    if not use_fp8:
        return x, None, counts
    scales = x.new_empty(ep.num_local_experts, -(-ep.hidden // 128), num_rows, dtype=torch.float32)
    return x, scales.transpose(1, 2), counts


def _fill(received: LowLatencyReceived) -> None:
    check_kept(received.handle)
    ep, opened = received.handle.ep, received.handle.opened
    try:
        ep.dispatch_recv(opened, layout="masked")
    except PeerTimeoutError as error:
        add_advice(error, ep.rank, ep.num_max_tokens_per_rank)
        raise
    received.handle.is_received = True
    with calls.combine_refused_if_failed(opened):
        _received(opened, (received.x, received.x_scales))
        received.counts.copy_(opened.expert_counts)


def _set_weights(exchange: Exchange, handle: LowLatencyHandle, topk_weights: Tensor) -> None:
    """Replaces the index of each choice by its weight."""
    ep, opened = handle.ep, handle.opened
    with calls.refused_if_failed(exchange.collectives):
        check_table(ep.rank, "topk_weights", topk_weights, [handle.num_tokens, ep.num_topk])
        if handle.num_tokens == ep.num_max_tokens_per_rank:
            table = topk_weights.float()
        else:  # nobody reads the rows beyond
            table = topk_weights.new_empty(ep.num_max_tokens_per_rank, ep.num_topk, dtype=torch.float32)
            table[: handle.num_tokens] = topk_weights
    weights = exchange.collectives.all_gather(table)
    with calls.combine_refused_if_failed(opened):
        opened._core.set_term_weights(opened._handle, weights)
        handle.has_weights = True
