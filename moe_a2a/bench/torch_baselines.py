"""The baselines over torch.distributed (moe_a2a/baselines.py), as contenders."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_a2a import baselines
from moe_a2a.bench.cases import Case, Inputs
from moe_a2a.bench.contenders import Contender
from moe_a2a.bench.expected import factor_of


class _TorchBaseline(Contender):
    mode = "rows"
    baseline_class: type
    name: str

    def __init__(self, case: Case, inputs: Inputs):
        super().__init__(inputs)
        backend = "NCCL" if inputs.x.is_cuda else "gloo"
        self.system = f"{self.name}, {backend}"
        self._baseline = self.baseline_class(dist.group.WORLD, **case.config)

    @staticmethod
    def why_not(case: Case, device: torch.device) -> str | None:
        """Why it cannot take part."""
        return None

    def dispatch(self) -> Any:
        return self._baseline.dispatch(self.inputs.x, self.inputs.topk_idx, self.inputs.topk_weights)

    def experts(self, handle: Any) -> Tensor:
        place = torch.arange(len(handle.expert_x), device=handle.expert_x.device)
        local_expert = torch.bucketize(place, handle.expert_offsets[1:], right=True)
        factor = factor_of(local_expert + self.inputs.rank * self.inputs.num_local_experts)
        return (factor[:, None] * handle.expert_x.float()).to(handle.expert_x.dtype)

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        return self._baseline.combine(y, handle)


class SortAllToAll(_TorchBaseline):
    name = "sort + all_to_all"
    baseline_class = baselines.SortAllToAll


class AllGatherReduceScatter(_TorchBaseline):
    name = "all_gather + reduce_scatter"
    baseline_class = baselines.AllGatherReduceScatter
