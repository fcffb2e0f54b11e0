"""Guards around a call in the rank's process: inputs between fences, old outputs poisoned, traffic counted."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_a2a.leaderboard.problems.base import Tensors

FENCE_BYTES = 4096  # a multiple of every alignment that a kernel may need
FENCE = 0xA5


class GuardedInputs:
    """Copies of the inputs on the device, each with a fence of known bytes before and after it."""

    def __init__(self, tensors: Tensors, device: torch.device):
        self._buffers: dict[str, Tensor] = {}
        self._originals: Tensors = {}
        self.tensors: Tensors = {}
        for name, value in tensors.items():
            nbytes = value.numel() * value.element_size()
            padded = -(-nbytes // FENCE_BYTES) * FENCE_BYTES
            buffer = torch.full((padded + 2 * FENCE_BYTES,), FENCE, dtype=torch.uint8, device=device)
            inside = buffer[FENCE_BYTES : FENCE_BYTES + nbytes].view(value.dtype).view(value.shape)
            inside.copy_(value)
            self._buffers[name], self.tensors[name] = buffer, inside
            self._originals[name] = inside.clone()

    def mutated(self) -> list[str]:
        """The inputs whose bits have changed."""
        return [name for name, was in self._originals.items() if not torch.equal(_bits(self.tensors[name]), _bits(was))]

    def holds(self, output: Tensor) -> bool:
        """Whether the output lies in an input's memory."""
        inside = {buffer.untyped_storage().data_ptr() for buffer in self._buffers.values()}
        return output.untyped_storage().data_ptr() in inside

    def overrun(self) -> list[str]:
        """The inputs with writes before or after them."""
        return [name for name, buffer in self._buffers.items() if not self._fences_stand(name, buffer)]

    def _fences_stand(self, name: str, buffer: Tensor) -> bool:
        value = self.tensors[name]
        end = FENCE_BYTES + value.numel() * value.element_size()
        return bool((buffer[:FENCE_BYTES] == FENCE).all()) and bool((buffer[end:] == FENCE).all())


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


def poison(output: Tensor) -> None:
    """Overwrites what a submission returned, so that neither it nor the allocator can hand out old results."""
    with torch.inference_mode() if output.is_inference() else torch.no_grad():
        output.fill_(float("nan") if output.is_floating_point() else -1)


# The share of a collective's tensor that any algorithm must send from a rank, given W ranks.
_SHARES = {
    "allreduce_": lambda world: 2 * (world - 1) / world,
    "_reduce_scatter_base_": lambda world: (world - 1) / world,
    "reduce_scatter_": lambda world: (world - 1) / world,
    "allgather_": lambda world: world - 1,
    "_allgather_base_": lambda world: world - 1,
    "alltoall_base_": lambda world: (world - 1) / world,
    "alltoall_": lambda world: (world - 1) / world,
    "broadcast_": lambda world: (world - 1) / world,
    "send": lambda world: 1,
}
# The operator's argument that the rank sends.
_SOURCES = {"_reduce_scatter_base_": 1, "reduce_scatter_": 1, "allgather_": 1, "_allgather_base_": 1, "alltoall_base_": 1,
            "alltoall_": 1}  # fmt: skip


class CollectiveBytes(TorchDispatchMode):
    """Bytes that this thread's torch.distributed calls must send to other ranks, counted at PyTorch's dispatcher, below
    the Python functions that a submission could replace.

    Counts collectives and sends of any process group, made in Python on this thread. Does not count memory shared between
    ranks, a submission's own sockets and libraries, or moe_a2a's own heap. An all-to-all counts as if evenly split.
    """

    def __init__(self, world_size: int):
        super().__init__()
        self._world_size = world_size
        self.nbytes = 0.0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "c10d":
            name = operator._opname
            if name in _SHARES:
                self.nbytes += _SHARES[name](self._world_size) * _nbytes(args[_SOURCES.get(name, 0)])
        return operator(*args, **(kwargs or {}))


def _nbytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(one) for one in value)
    return 0
