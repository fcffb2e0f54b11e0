"""The sizes of a HybridEPBuffer, and the arguments of a first dispatch: checked, and turned into the ids that moe_a2a sends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_a2a import arguments
from moe_a2a.devices import float8_dtype
from moe_a2a.integrations.deep_ep.exchange import Exchange, Routing, check_row_dtype, check_table
from moe_a2a.integrations.deep_ep.kinds import Kind
from moe_a2a.integrations.deep_ep.routing_map import by_choice_of, map_to_indices


@dataclass
class BufferConfig:
    """The sizes of a HybridEPBuffer. max_num_of_tokens_per_rank grows with the batches."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int = 1


@dataclass
class First:
    """The arguments of a first dispatch, checked."""

    hidden: Tensor
    scales: Tensor | None
    routing_map: Tensor | None  # None: topk_idx is given
    topk_idx: Tensor | None
    probs: Tensor | None  # like routing_map, or like topk_idx if that is given
    num_experts: int
    pad_multiple: int
    num_rows: int | None
    is_blocking: bool

    def num_choices(self) -> int:
        """The most experts of a token, read by the host from a routing map."""
        if self.topk_idx is not None:
            return self.topk_idx.shape[1]
        assert self.routing_map is not None
        return int(self.routing_map.sum(1).max()) if len(self.routing_map) else 0

    def routed(self, num_topk: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(topk_idx [T, num_topk]; their probs or None; whether a token had more experts, None if it cannot have)."""
        if self.topk_idx is not None:
            probs = None if self.probs is None else _widened(self.probs.float(), num_topk, 0)
            return _widened(self.topk_idx, num_topk, -1), probs, None
        assert self.routing_map is not None
        topk_idx = map_to_indices(self.routing_map, num_topk)
        probs = None if self.probs is None else by_choice_of(self.probs, topk_idx)
        return topk_idx, probs, None if self.is_blocking else (self.routing_map.sum(1) > num_topk).any()

    def kind(self, num_topk: int) -> Kind:
        dtype = self.hidden.dtype if self.scales is None else torch.bfloat16  # of the rows that combine() returns
        return Kind(self.num_experts, num_topk, self.hidden.shape[1], dtype, is_low_latency=False)


def checked_routing(
    exchange: Exchange,
    hidden: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    routing_map: Tensor | None,
    probs: Tensor | None,
    num_experts: int,
    num_of_experts: int | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(routing_map, None, probs) or (None, topk_idx, topk_weights)."""
    rank = exchange.rank
    arguments.check_per_token(rank, hidden=hidden)
    if routing_map is not None:
        check_table(rank, "routing_map", routing_map, [len(hidden), num_experts])
        if routing_map.dtype != torch.bool:
            raise TypeError(f"routing_map has dtype {routing_map.dtype} on rank {rank}; pass torch.bool")
        if probs is not None:
            check_table(rank, "probs", probs, [len(hidden), num_experts])
        return routing_map, None, probs
    if topk_idx is None:
        raise ValueError(f"dispatch on rank {rank} got neither a handle nor a routing; pass routing_map or topk_idx")
    if num_of_experts != num_experts:
        raise ValueError(f"num_of_experts={num_of_experts} on rank {rank}; with topk_idx pass {num_experts}")
    arguments.check_per_token(rank, topk_idx=topk_idx)
    check_table(rank, "topk_idx", topk_idx, [len(hidden), topk_idx.shape[1]])
    if topk_weights is not None:
        check_table(rank, "topk_weights", topk_weights, list(topk_idx.shape))
    return None, topk_idx, topk_weights


def checked_num_rows(
    rank: int, num_permuted_tokens: int | Tensor | None, pad_multiple: int, non_blocking: bool
) -> int | None:
    arguments.checked_int(rank, "pad_multiple", pad_multiple, 1, arguments.MAX_EXPERT_ALIGNMENT)
    num_rows = None if num_permuted_tokens is None else int(num_permuted_tokens)
    if non_blocking and (num_rows is None or num_rows < 0 or num_rows % pad_multiple):
        raise ValueError(
            f"num_permuted_tokens={num_rows} on rank {rank}; with non_blocking=True pass a multiple of "
            f"pad_multiple={pad_multiple}"
        )
    return num_rows


def weights_again(routing: Routing, probs: Tensor | None, topk_weights: Tensor | None) -> Tensor | None:
    """float32 [T, K] by choice of the handle's routing, which may have more choices than the caller's topk_idx had; or None."""
    rank, (num_tokens, num_topk) = routing.ep.rank, routing.topk_idx.shape
    if probs is not None:
        check_table(rank, "probs", probs, [num_tokens, routing.ep.num_experts])
        return by_choice_of(probs, routing.topk_idx)
    if topk_weights is None:
        return None
    arguments.check_tensor(rank, "topk_weights", topk_weights)
    if topk_weights.dim() != 2 or len(topk_weights) != num_tokens or topk_weights.shape[1] > num_topk:
        raise ValueError(
            f"topk_weights has shape {list(topk_weights.shape)} on rank {rank}; pass that of the topk_idx of the handle's "
            f"dispatch, {num_tokens} rows of at most {num_topk}"
        )
    return _widened(topk_weights.float(), num_topk, 0)


def _widened(by_choice: Tensor, num_topk: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(by_choice, (0, num_topk - by_choice.shape[1]), value=fill)


def rows_of(rank: int, hidden: Tensor, scaling_factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows and scales; bytes count as float8, and scales of other rows are not used."""
    arguments.check_tensor(rank, "hidden", hidden)
    if hidden.dtype.itemsize != 1:
        check_row_dtype(rank, "hidden", hidden, None)
        return hidden.contiguous(), None
    if scaling_factor is None:
        raise ValueError(f"hidden is {hidden.dtype} without scaling_factor on rank {rank}; pass its scales")
    shape = [*hidden.shape[:-1], -(-hidden.shape[-1] // 128)] if hidden.dim() else []
    check_table(rank, "scaling_factor", scaling_factor, shape, "a scale per 128 values of hidden", (torch.float32,))
    return hidden.contiguous().view(float8_dtype(hidden.device)), scaling_factor
