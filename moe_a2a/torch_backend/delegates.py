"""The backends of PyTorch that do what Collectives lacks, for the torch.distributed backend: gloo for CPU tensors, NCCL for
CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from moe_a2a.torch_backend.work import JointWork

_c10d: Any = torch._C._distributed_c10d


def add_delegates(group: Any, store: Any, rank: int, num_ranks: int, timeout: Any) -> dict[str, str]:
    """Registers the delegates with the group; their names by device type."""
    delegates = {}
    kind = dist.ProcessGroup.BackendType
    if dist.is_gloo_available():
        gloo = make_delegate("cpu", dist.PrefixStore("gloo", store), rank, num_ranks, timeout)
        group._register_backend(torch.device("cpu"), kind.GLOO, gloo)
        group._set_default_backend(kind.GLOO)
        delegates["cpu"] = "gloo"
    if dist.is_nccl_available() and torch.cuda.is_available():
        nccl = make_delegate("cuda", dist.PrefixStore("nccl", store), rank, num_ranks, timeout)
        group._register_backend(torch.device("cuda"), kind.NCCL, nccl)
        delegates["cuda"] = "nccl"
    return delegates


def make_delegate(device_type: str, store: Any, rank: int, num_ranks: int, timeout: Any) -> Any:
    if device_type == "cpu":
        made: Any = dist.ProcessGroupGloo(store, rank, num_ranks, timeout)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        made = dist.ProcessGroupNCCL(store, rank, num_ranks, options)
    made._set_sequence_number_for_group()
    return made


class LargeCalls:
    """The calls of Collectives that a process group makes, by a delegate on the current stream: for tensors so large that it is
    faster. A failure on one rank is not told to the others."""

    def __init__(self, delegate: Any, rank: int, num_ranks: int):
        self._delegate, self.rank, self.num_ranks = delegate, rank, num_ranks

    def all_reduce(self, x: torch.Tensor, op: str, *, out: torch.Tensor) -> None:
        """out: x."""
        _end(self._delegate.allreduce([x], _at_once(_c10d.AllreduceOptions(), op)))

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        _end(self._delegate._allgather_base(out, x, _at_once(_c10d.AllgatherOptions())))
        return out

    def reduce_scatter(self, x: torch.Tensor, op: str, *, out: torch.Tensor) -> None:
        _end(self._delegate._reduce_scatter_base(out, x, _at_once(_c10d.ReduceScatterOptions(), op)))

    def refused_if_failed(self) -> AbstractContextManager[None]:
        return nullcontext()


def _end(work: Any) -> None:
    if work is not None:  # NCCL's call is then queued on the current stream
        work.wait()


def _at_once(opts: Any, op: str | None = None) -> Any:
    opts.asyncOp = False
    if op is not None:
        opts.reduceOp = getattr(dist.ReduceOp, op.upper())
    return opts


def one_by_one(
    call: Callable[..., Any], outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
) -> JointWork:
    """A coalesced call, which delegates have in C++ alone, as a delegate's calls of single tensors."""
    return JointWork(outputs, [call(output, x, opts) for output, x in zip(outputs, inputs, strict=True)])


def reduce_scatter_by(delegate: Any, output: torch.Tensor, x: torch.Tensor, opts: Any) -> Any:
    """Gloo reads the first size of the tensors, which scalars lack."""
    return delegate._reduce_scatter_base(torch.atleast_1d(output), torch.atleast_1d(x), opts)
