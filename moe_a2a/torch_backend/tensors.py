"""The tensors of the torch.distributed backend's calls: which of them Collectives takes, and as it takes them: contiguous,
without shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from moe_a2a import _core, arguments, devices


def takes(op: str, inputs: list[torch.Tensor]) -> bool:
    """Whether Collectives can do it; every rank gets the same answer."""
    dtype, device = inputs[0].dtype, inputs[0].device
    if op == "" or dtype not in arguments.ROW_DTYPES or not has_kernels(device):
        return False
    return all(x.dtype == dtype and x.device == device and x.layout == torch.strided for x in inputs)


def only_nccl_takes(parts: list[torch.Tensor]) -> bool:
    """Whether it is a list of several shapes for GPUs. For the CPU, Collectives' own check refuses it."""
    return any(part.is_cuda for part in parts) and not are_alike(parts)


@cache
def has_kernels(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda") and devices.target_of(device) in _core.built_targets()


def are_alike(parts: list[torch.Tensor]) -> bool:
    return all(part.shape == parts[0].shape for part in parts)


def has_gaps(x: torch.Tensor) -> bool:
    """Whether its elements do not fill the memory that they span, or share some of it."""
    if x.layout != torch.strided or x.numel() == 0:
        return False
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) != x.numel()


def flat(x: torch.Tensor) -> torch.Tensor:
    """The elements of x in one dimension; a copy if x is not contiguous. A sparse output stays: Collectives refuses it."""
    if x.layout != torch.strided or (x.dim() == 1 and x.is_contiguous()):
        return x
    return x.contiguous().view(-1)


def flattened(coll: Any, x: torch.Tensor) -> torch.Tensor:
    """flat(x) for a call of `coll`, which is refused if there is no memory for the copy."""
    with coll.refused_if_failed():
        return flat(x)


def fill(coll: Any, out: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> None:
    """call(flat(out)), whose results end up in `out`."""
    elements = flattened(coll, out)
    call(elements)
    if not out.is_contiguous():
        with torch.inference_mode():  # out may be a tensor of that mode
            out.copy_(elements.view(out.shape))


def gather(coll: Any, output: torch.Tensor, x: torch.Tensor) -> None:
    fill(coll, output, lambda out: coll.all_gather(flattened(coll, x), out=out))


def gather_to_list(coll: Any, parts: list[torch.Tensor], x: torch.Tensor) -> None:
    with coll.refused_if_failed():
        _check_list(coll, "tensor_list", parts, "tensor", x)
        row, rows = flat(x).view(1, -1), parts[0].new_empty(len(parts), x.numel())
    gathered = coll.all_gather(row, out=rows)
    with torch.inference_mode():  # so may parts
        torch._foreach_copy_(parts, [values.view(part.shape) for part, values in zip(parts, gathered, strict=True)])


def reduce_scatter_list(coll: Any, output: torch.Tensor, parts: list[torch.Tensor], op: str) -> None:
    with coll.refused_if_failed():
        _check_list(coll, "input_list", parts, "output", output)
        x = torch.stack([flat(part) for part in parts])
    reduce_scatter(coll, output, x, op)


def _check_list(coll: Any, name: str, parts: list[torch.Tensor], name_of_own: str, own: torch.Tensor) -> None:
    """The list of a call: a tensor per rank, all alike, each with as many elements as this rank's own tensor."""
    if len(parts) != coll.num_ranks:
        raise ValueError(f"{name} has {len(parts)} tensors on rank {coll.rank}; pass {coll.num_ranks}, one per rank")
    if not are_alike(parts):
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise ValueError(f"{name} has tensors of the shapes {shapes} on rank {coll.rank}; pass tensors of one shape")
    if parts[0].numel() != own.numel():
        raise ValueError(
            f"{name} has tensors of shape {list(parts[0].shape)} on rank {coll.rank}, and {name_of_own} has "
            f"{list(own.shape)}; pass the same number of elements"
        )


def reduce_scatter(coll: Any, output: torch.Tensor, x: torch.Tensor, op: str) -> None:
    """x: the elements for all ranks in one dimension, or a row for each rank."""

    def call(out: torch.Tensor) -> None:
        with coll.refused_if_failed():
            out = out if x.dim() == 1 else out.view(1, -1)
            expected = [coll.num_ranks * out.shape[0], *out.shape[1:]]
            if list(x.shape) != expected:
                raise ValueError(
                    f"the input of reduce_scatter has shape {list(x.shape)} on rank {coll.rank}, the output "
                    f"{list(out.shape)}; pass an input of {expected}, an equal part for each of {coll.num_ranks} ranks"
                )
        coll.reduce_scatter(x, op, out=out)

    fill(coll, output, call)
