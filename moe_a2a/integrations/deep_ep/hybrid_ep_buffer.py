"""HybridEPBuffer, of DeepEP's branch hybrid-ep: a routing is a map of tokens and experts, and dispatch returns rows by route.

moe_a2a sends ids of experts, as many for each token. Their number is the most that a token of any rank has chosen, which a
first dispatch exchanges together with the largest number of tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_a2a import arguments, calls
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.integrations.deep_ep import expanded, high_throughput
from moe_a2a.integrations.deep_ep.exchange import OfExchange, check_table
from moe_a2a.integrations.deep_ep.hybrid_arguments import (
    BufferConfig,
    First,
    checked_num_rows,
    checked_routing,
    rows_of,
    weights_again,
)
from moe_a2a.integrations.deep_ep.hybrid_packed import PackedHandle, handle_of
from moe_a2a.integrations.deep_ep.kinds import Call
from moe_a2a.integrations.deep_ep.routing_map import by_expert, indices_to_map

__all__ = ["BufferConfig", "HybridEPBuffer", "HybridEPHandle", "indices_to_map"]


class HybridEPHandle(NamedTuple):
    """A routing, for any number of dispatches and combines.

    overflow_flag: int32 [1] on the device, 1 if a non-blocking dispatch left out routes of this rank's tokens or experts.
    """

    routing: expanded.ExpandedHandle
    overflow_flag: Tensor  # DeepEP's callers read handle[-1]

    @property
    def ep(self) -> ExpertParallel:
        return self.routing.ep


class _Received(NamedTuple):
    hidden: Tensor
    probs: Tensor | None
    scaling_factor: Tensor | None
    tokens_per_expert: Tensor | None
    handle: HybridEPHandle


class HybridEPBuffer(OfExchange):
    """dispatch_with_permute() and combine_with_unpermute(): rows by route, expert by expert. dispatch() and combine(): a row per
    token and rank.

    Args:
        group: the ranks: a torch.distributed group, or anything else that a moe_a2a.Communicator takes.
        hidden_dim, use_fp8: kept as attributes; a dispatch has the row length and type of its rows.
        max_num_of_tokens_per_rank: the most tokens of a rank; a blocking dispatch raises it if need be.
        num_local_experts: the default of dispatch_with_permute().
        num_sms_dispatch_api, num_sms_combine_api: blocks of the kernels; None: as moe_a2a's launch table says.
        num_topk: the most experts of a token. None: non-blocking dispatches take the most of the dispatches before, and the
            first of them looks.
        num_buffers, timeout: as for Buffer.
        others: of HybridEP's kernels and network; accepted and not used.

    All ranks make the same calls in the same order, with or without probs on all of them.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
        *,
        num_topk: int | None = None,
        num_buffers: int = 2,
        timeout: float = 30.0,
    ):
        super().__init__(group, timeout, num_buffers)
        self.group, self.use_fp8 = group, use_fp8
        self.rank, self.group_size = self._rank, self._num_ranks
        self.local_rank, self.node_rank, self.num_of_nodes = self.rank, 0, 1
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = self.group_size
        self.config = BufferConfig(hidden_dim, max_num_of_tokens_per_rank, num_local_experts, self.group_size)
        self.configurer = SimpleNamespace(buffer_config=self.config)  # where the branch's later versions have it
        self._dispatch_blocks, self._combine_blocks = num_sms_dispatch_api or 0, num_sms_combine_api or 0
        self._num_topk = num_topk or 0

    def empty_jit_cache(self) -> None:
        """Nothing: no kernel is compiled at run time."""

    @torch.no_grad()
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | Tensor | None = None,
        pad_multiple: int | None = None,
        handle: HybridEPHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, HybridEPHandle]:
        """Sends each token's row to the ranks of its experts; returns one row per route.

        Args:
            hidden: [num_tokens, H] bfloat16 (or float16, float32), or float8, also as uint8, with scaling_factor.
            routing_map, probs: [num_tokens, E] bool, and float32 or None.
            topk_idx, topk_weights: in their place, [num_tokens, K] int64 (-1: no expert) and float32 or None.
            scaling_factor: [num_tokens, H / 128] float32; not used if the rows are not float8.
            num_permuted_tokens: rows to return; None: as many as there are.
            pad_multiple: the rows of an expert are padded to it, with zeros.
            handle: of an earlier dispatch, whose routing, padding and number of rows are used again.
            non_blocking: the host reads nothing. Routes past num_permuted_tokens are left out, and handle[-1] says so.
            use_host_meta: False: non_blocking, by its former name.
            others: accepted and not used.

        Returns: (rows [n, H]; probs [n], 0 in padding, or None; scales [n, H / 128] or None; int64 [E_local] padded rows of
        each expert, on the host unless non_blocking, None with a handle; handle). Rows past the last are zeros.
        """
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        if handle is not None:
            return self._dispatch_again(handle, hidden, scaling_factor, probs, topk_weights, num_permuted_tokens)
        with self._first_refused(non_blocking):
            num_experts = (num_of_experts_per_rank or self.config.num_of_experts_per_rank) * self.group_size
            given = hidden, topk_idx, topk_weights, routing_map, probs
            routing = checked_routing(self._open(), *given, num_experts, num_of_experts)
            num_rows = checked_num_rows(self.rank, num_permuted_tokens, pad_multiple or 1, non_blocking)
            if non_blocking:
                self._check_bound(len(hidden))
            rows = rows_of(self.rank, hidden, scaling_factor)
            first = First(*rows, *routing, num_experts, pad_multiple or 1, num_rows, not non_blocking)
        received = self._dispatch(first)
        return received._replace(hidden=received.hidden.view(hidden.dtype))

    @torch.no_grad()
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: HybridEPHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The unweighted sum of a token's rows.

        Args: hidden, probs: as dispatch_with_permute() returned them; others: accepted and not used.
        Returns: (combined [num_tokens, H]; probs by token and expert, float32 [num_tokens, E] with zeros elsewhere, or None).
        """
        exchange = self._open()
        exchange.check_handle(handle, HybridEPHandle)
        assert handle is not None
        routing = handle.routing
        with exchange.combine_refused_if_failed(routing):
            arguments.check_tensor(self.rank, "hidden", hidden)
            arguments.check_optional_tensor(self.rank, "probs", probs)
            hidden, probs = hidden.contiguous(), None if probs is None else probs.float()
        how: dict[str, Any] = {"num_blocks": self._combine_blocks, "names": ("hidden", "probs")}
        finish = expanded.begin_combine_of(exchange, hidden, routing, probs, **how)
        combined, by_choice = finish()
        if by_choice is None:
            return combined, None
        return combined, by_expert(by_choice, routing.topk_idx, routing.ep.num_experts)

    # ---- without permutation: a row per token and rank

    @torch.no_grad()
    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: PackedHandle | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, PackedHandle]:
        """Sends each token's row once to every rank that owns one of its experts. Arguments: as of dispatch_with_permute().

        Returns: (rows [n, H], by source rank and token; probs [n, E], zeros for other ranks' experts, or None; scales
        [n, H / 128] or None; handle, whose local_expert_routing_map says which experts a row has here).
        """
        exchange = self._open()
        if handle is not None:
            received = self._packed_again(handle, hidden, scaling_factor, probs, topk_weights)
        else:
            with self._first_refused(non_blocking=False):
                num_experts = self.config.num_of_experts_per_rank * self.group_size
                given = hidden, topk_idx, topk_weights, routing_map, probs
                routing = checked_routing(exchange, *given, num_experts, num_of_experts)
                rows = rows_of(self.rank, hidden, scaling_factor)
                first = First(*rows, *routing, num_experts, pad_multiple=1, num_rows=None, is_blocking=True)
            received = self._packed(first)
            assert received.handle is not None
            with calls.combine_refused_if_failed(received.handle.open):
                handle = handle_of(received)
        weights = received.topk_weights
        with calls.combine_refused_if_failed(handle.packed.routing.open):
            recv_probs = None if weights is None else handle.packed.probs(weights)
            return received.x.view(hidden.dtype), recv_probs, received.x_scales, handle

    @torch.no_grad()
    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: PackedHandle | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The sum of a token's rows over the ranks: (combined [num_tokens, H]; probs [num_tokens, E] or None). probs:
        [n, E]; only the columns of this rank's experts are read."""
        exchange = self._open()
        exchange.check_handle(handle, PackedHandle)
        assert handle is not None
        packed, ep = handle.packed, handle.ep
        with exchange.combine_refused_if_failed(packed.routing):
            arguments.check_tensor(self.rank, "hidden", hidden)
            if probs is not None:
                check_table(self.rank, "probs", probs, [len(packed.recv_topk_idx), ep.num_experts])
            rows, weights = hidden.contiguous(), None if probs is None else packed.weights(probs)
        how: dict[str, Any] = {"num_blocks": self._combine_blocks, "name": "hidden"}
        finish = high_throughput.begin_combine_of(exchange, rows, packed.routing, weights, **how)
        combined, by_choice = finish()
        if by_choice is None:
            return combined, None
        return combined, by_expert(by_choice, packed.routing.topk_idx, ep.num_experts)

    def _packed(self, first: First) -> high_throughput.Received:
        num_topk = self._agree(first, by_route=False)
        topk_idx, topk_weights, _ = first.routed(num_topk)
        finish = high_throughput.begin_dispatch(
            self._open(),
            first.kind(num_topk),
            self.config.max_num_of_tokens_per_rank,
            first.hidden,
            first.scales,
            topk_idx,
            topk_weights,
            expert_alignment=1,
            num_worst_tokens=0,
            num_blocks=self._dispatch_blocks,
        )
        return finish()

    def _packed_again(
        self,
        handle: PackedHandle,
        hidden: Tensor,
        scaling_factor: Tensor | None,
        probs: Tensor | None,
        topk_weights: Tensor | None,
    ) -> high_throughput.Received:
        exchange = self._open()
        exchange.check_handle(handle, PackedHandle, opens=True)
        routing = handle.packed.routing
        with exchange.dispatch_again_refused_if_failed(routing):
            rows, scales = rows_of(self.rank, hidden, scaling_factor)
            weights = weights_again(routing, probs, topk_weights)
        how: dict[str, Any] = {"num_blocks": self._dispatch_blocks, "name": "hidden"}
        return high_throughput.begin_dispatch_again(exchange, rows, scales, routing, topk_weights=weights, **how)()

    # ---- a first dispatch

    def _first_refused(self, non_blocking: bool) -> AbstractContextManager[None]:
        """Around the checks: the peers are in the exchange of sizes, or in a dispatch if there is none."""
        exchange = self._open()
        if non_blocking and self._num_topk and exchange.newest is not None:
            return exchange.dispatch_refused_if_failed(exchange.newest)
        return calls.refused_if_failed(exchange.host_collectives)

    def _dispatch(self, first: First) -> _Received:
        exchange = self._open()
        num_topk = self._agree(first, by_route=True)
        topk_idx, topk_weights, lost_choices = first.routed(num_topk)
        routing, counts = expanded.begin_dispatch(
            exchange,
            first.kind(num_topk),
            first.hidden,
            first.scales,
            topk_idx,
            topk_weights,
            self.config.max_num_of_tokens_per_rank,
            expert_alignment=first.pad_multiple,
            is_exact=first.is_blocking,
            num_rows=first.num_rows,
            num_blocks=self._dispatch_blocks,
        )()
        with calls.combine_refused_if_failed(routing.open):
            if first.is_blocking:
                tokens_per_expert = torch.tensor(counts, dtype=torch.int64, device="cpu")
                overflow_flag = torch.zeros(1, dtype=torch.int32, device=routing.ep.device)
            else:
                tokens_per_expert, has_dropped = _kept(routing)
                expanded.drop_routes(routing)
                if lost_choices is not None:
                    has_dropped = has_dropped | lost_choices
                overflow_flag = has_dropped.to(torch.int32).view(1)
            handle = HybridEPHandle(routing, overflow_flag)
            return self._received(handle, topk_weights is not None, tokens_per_expert)

    def _agree(self, first: First, by_route: bool) -> int:
        """The number of choices of a token, the same on all ranks. Where they exchange it, they also compare their calls."""
        if first.is_blocking or not self._num_topk:
            bound = max(self.config.max_num_of_tokens_per_rank, len(first.hidden))
            call = Call(first.kind(0), 0, first.scales is not None, first.probs is not None, by_route)
            tokens, choices = self._open().agree(bound, call, first.num_choices())
            self._num_topk = max(self._num_topk, choices, 1)
            self.config.max_num_of_tokens_per_rank = tokens
        elif first.topk_idx is not None:
            self._num_topk = max(self._num_topk, first.topk_idx.shape[1])
        return self._num_topk

    def _received(self, handle: HybridEPHandle, has_probs: bool, tokens_per_expert: Tensor | None) -> _Received:
        routing = handle.routing
        index = routing.row_index()
        probs = routing.weights(index) if has_probs else None
        rows, scales = expanded.rows(routing, index, self._dispatch_blocks)
        return _Received(rows, probs, scales, tokens_per_expert, handle)

    def _check_bound(self, num_tokens: int) -> None:
        """Raises if a call that cannot raise the bound has more tokens."""
        bound = self.config.max_num_of_tokens_per_rank
        if self._num_topk and num_tokens > bound:
            raise ValueError(
                f"hidden has {num_tokens} rows > max_num_of_tokens_per_rank={bound} on rank {self.rank}; pass a larger one "
                "to HybridEPBuffer"
            )

    # ---- a dispatch along a handle

    def _dispatch_again(
        self,
        handle: HybridEPHandle,
        hidden: Tensor,
        scaling_factor: Tensor | None,
        probs: Tensor | None,
        topk_weights: Tensor | None,
        num_permuted_tokens: int | Tensor | None,
    ) -> _Received:
        exchange = self._open()
        exchange.check_handle(handle, HybridEPHandle, opens=True)
        routing = handle.routing
        with exchange.dispatch_again_refused_if_failed(routing):
            if num_permuted_tokens is not None and int(num_permuted_tokens) != routing.num_rows:
                raise ValueError(
                    f"num_permuted_tokens={int(num_permuted_tokens)} on rank {self.rank}, but the handle's dispatch returned "
                    f"{routing.num_rows} rows; pass that number, or None"
                )
            rows, scales = rows_of(self.rank, hidden, scaling_factor)
            weights = weights_again(routing, probs, topk_weights)
        how: dict[str, Any] = {"num_blocks": self._dispatch_blocks, "name": "hidden"}
        expanded.begin_dispatch_again(exchange, routing, rows, scales, weights, **how)()
        with calls.combine_refused_if_failed(routing.open):
            received = self._received(handle, weights is not None, None)
            return received._replace(hidden=received.hidden.view(hidden.dtype))


def _kept(routing: expanded.ExpandedHandle) -> tuple[Tensor, Tensor]:
    """(int64 [E_local]: the rows of each expert within num_rows, padded; whether there are more). Before drop_routes()."""
    opened, limit, alignment = routing.open, routing.num_rows, routing.expert_alignment
    starts = opened.expert_offsets[:-1].clamp(max=limit)
    kept = (starts + opened.expert_counts).clamp(max=limit) - starts
    padded = (kept.long() + alignment - 1) // alignment * alignment
    return padded, opened.expert_offsets[-1] > limit
