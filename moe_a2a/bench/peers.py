"""The peers of the same run: what people use today (moe_a2a/peers.py), as contenders."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_a2a import peers
from moe_a2a.bench.cases import Case, Inputs
from moe_a2a.bench.contenders import Contender
from moe_a2a.bench.expected import factor_of


class _CollectivePeer(Contender):
    mode = "rows"
    peer_class: type
    name: str

    def __init__(self, case: Case, inputs: Inputs):
        super().__init__(inputs)
        backend = "NCCL" if inputs.x.is_cuda else "gloo"
        self.system = f"{self.name}, {backend}"
        self._peer = self.peer_class(dist.group.WORLD, **case.config)

    @staticmethod
    def why_not(case: Case, device: torch.device) -> str | None:
        """Why it cannot take part."""
        return None

    def dispatch(self) -> Any:
        return self._peer.dispatch(self.inputs.x, self.inputs.topk_idx, self.inputs.topk_weights)

    def experts(self, handle: Any) -> Tensor:
        place = torch.arange(len(handle.expert_x), device=handle.expert_x.device)
        local_expert = torch.bucketize(place, handle.expert_offsets[1:], right=True)
        factor = factor_of(local_expert + self.inputs.rank * self.inputs.num_local_experts)
        return (factor[:, None] * handle.expert_x.float()).to(handle.expert_x.dtype)

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        return self._peer.combine(y, handle)


class SortAllToAll(_CollectivePeer):
    name = "sort + all_to_all"
    peer_class = peers.SortAllToAll


class AllGatherReduceScatter(_CollectivePeer):
    name = "all_gather + reduce_scatter"
    peer_class = peers.AllGatherReduceScatter
