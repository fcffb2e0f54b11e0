"""The handles and probs of HybridEPBuffer.dispatch() and combine(), which do not permute: a row per token and rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.integrations.deep_ep import high_throughput
from moe_a2a.integrations.deep_ep.routing_map import by_choice_of, by_expert, indices_to_map


@dataclass(eq=False)
class PackedRouting:
    """A routing, and the chosen experts of this rank in the columns of each row's choices, else -1: int64 [n, K], ids of all
    experts."""

    routing: high_throughput.Handle
    recv_topk_idx: Tensor

    def probs(self, recv_topk_weights: Tensor) -> Tensor:
        """float32 [n, E]: zeros where the row's token has not chosen the expert, or the expert is another rank's."""
        return by_expert(recv_topk_weights, self.recv_topk_idx, self.routing.ep.num_experts)

    def weights(self, probs: Tensor) -> Tensor:
        return by_choice_of(probs, self.recv_topk_idx)


class PackedHandle(NamedTuple):
    """A routing, for any number of dispatches and combines. DeepEP's callers read the places 3 and 4: int32 [1], the rows
    received, and bool [n, E_local], the experts of each."""

    sparse_to_dense_map: None
    rdma_to_attn_map: None
    attn_to_rdma_map: None
    num_dispatched_tokens_tensor: Tensor
    local_expert_routing_map: Tensor
    num_of_tokens_per_rank: int
    packed: PackedRouting

    @property
    def ep(self) -> ExpertParallel:
        return self.packed.routing.ep


def handle_of(received: high_throughput.Received) -> PackedHandle:
    routing, local = received.handle, received.topk_idx
    assert routing is not None and local is not None
    ep = routing.ep
    routing_map, _ = indices_to_map(local, None, len(local), ep.num_local_experts)
    num_rows = torch.tensor([len(local)], dtype=torch.int32, device="cpu")
    packed = PackedRouting(routing, torch.where(local >= 0, local + ep.rank * ep.num_local_experts, -1))
    return PackedHandle(None, None, None, num_rows, routing_map, len(routing.topk_idx), packed)
