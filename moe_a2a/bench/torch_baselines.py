"""The baselines over torch.distributed (moe_a2a/commands/baselines.py), as contenders."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_a2a.bench.cases import Case, Inputs
from moe_a2a.bench.clock import Step
from moe_a2a.bench.contenders import Contender, chain
from moe_a2a.bench.expected import factor_of
from moe_a2a.commands import baselines


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


class BareCollectives(AllGatherReduceScatter):
    """The two collectives alone, on tensors of the right size: their speed without PyTorch's glue around them. The
    checked layer is that of AllGatherReduceScatter; the timed steps neither sort nor add rows."""

    name = "bare all_gather + reduce_scatter"

    def __init__(self, case: Case, inputs: Inputs):
        super().__init__(case, inputs)
        num_tokens, hidden = case.num_tokens, case.hidden
        self._x = self._empty(num_tokens, hidden)
        self._gathered = self._empty(inputs.num_ranks * num_tokens, hidden)
        self._sums = self._empty(num_tokens, hidden)

    def _empty(self, rows: int, hidden: int) -> Tensor:
        return torch.zeros(rows, hidden, dtype=self.inputs.x.dtype, device=self.inputs.x.device)

    def steps(self) -> list[Step]:
        return [Step("dispatch", self._gather, self._x), Step("combine", self._scatter, self._gathered)]

    def _gather(self) -> None:
        baselines.all_gather_single(self._gathered, self._x)

    def _scatter(self) -> None:
        baselines.reduce_scatter_single(self._sums, self._gathered)


class RegisteredCollectives(BareCollectives):
    """The same on memory that NCCL has registered as symmetric (NCCL 2.27, PyTorch 2.9): its kernels access the other
    ranks' tensors directly."""

    name = "registered all_gather + reduce_scatter"

    def __init__(self, case: Case, inputs: Inputs):
        group: Any = dist.group.WORLD
        self._backend = group._get_backend(inputs.x.device)
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        super().__init__(case, inputs)
        self._gather()  # creates the communicator, with which the memory is registered
        self._backend.register_mem_pool(self._pool, symm=True)

    @staticmethod
    def why_not(case: Case, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "NCCL registers memory of GPUs"

    def _empty(self, rows: int, hidden: int) -> Tensor:
        with torch.cuda.use_mem_pool(self._pool):
            return super()._empty(rows, hidden)

    def close(self) -> None:
        super().close()
        self._backend.deregister_mem_pool(self._pool)


class BareCollectivesInChains(BareCollectives):
    launch = "chain"

    def steps(self) -> list[Step]:
        return [chain(self._gather, self._scatter, self._x)]


class RegisteredCollectivesInChains(BareCollectivesInChains, RegisteredCollectives):
    pass
