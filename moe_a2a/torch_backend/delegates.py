"""The backends of PyTorch that do what Collectives lacks, for the torch.distributed backend: gloo for CPU tensors, NCCL for
CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_a2a.torch_backend.work import JointWork


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


def one_by_one(
    call: Callable[..., Any], outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
) -> JointWork:
    """A coalesced call, which delegates have in C++ alone, as a delegate's calls of single tensors."""
    return JointWork(outputs, [call(output, x, opts) for output, x in zip(outputs, inputs, strict=True)])
