"""Collectives: reductions over the same communicator, signals and waits as dispatch() and combine()."""

from __future__ import annotations

from typing import Any

import torch

from moe_a2a import _core, set_up
from moe_a2a.communicator import Communicator
from moe_a2a.groups import HandleExchange


class Collectives:
    """all_reduce() of the ranks of a communicator, or of a group.

    Args:
        group: a Communicator, or what a Communicator takes.
        device, timeout: of a Communicator of its own, where `group` is none.

    Every rank makes the same calls in the same order. Work is queued on PyTorch's current stream of the device.
    """

    def __init__(self, group: Any = None, *, device: torch.device | str | None = None, timeout: float = 30.0):
        self._comm, self._owns_comm = Communicator.of_client(group, device, timeout)
        self._group, self.timeout = self._comm._group, self._comm.timeout
        self.rank, self.num_ranks = self._comm.rank, self._comm.num_ranks
        self._core: Any = None
        if isinstance(self._group, HandleExchange):
            self._allocate()
        else:
            set_up.make_together(self, self._allocate)

    def _allocate(self) -> None:
        if self._owns_comm:
            self._comm._allocate()
        self.device, self.timeout = self._comm.device, self._comm.timeout
        self._core = _core.Collectives(self._comm._open_core(), self._owns_comm, self.device)

    def _drop_core(self) -> None:
        """Lets go of the memory, and of a communicator of its own."""
        core, self._core = self._core, None
        if core is not None:
            core.close()
        if self._owns_comm:
            self._comm._drop_core()

    def get_comm_handle(self) -> bytes:
        """What the other ranks need to map this rank's memory. Only needed with HandleExchange."""
        return self._open_core().comm_handle()

    def set_comm_handles(self, handles: list[bytes]) -> None:
        """Maps the memory of all ranks. `handles`: get_comm_handle() of every rank, in rank order."""
        self._open_core().connect(handles)

    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of `x` over all ranks, on every rank.

        Added up in rank order in fp32 and rounded once, so all ranks get the same bits, and the same inputs give them
        again. One-shot: every rank writes its `x` to every other, which is fast for small tensors.

        Args:
            x: contiguous, float32 or bfloat16, at most 1 MiB; of the same size and dtype on every rank.
            out: where to write; may be `x`. Default: a new tensor.

        Raises:
            ValueError, TypeError: an argument is wrong.
            PeerTimeoutError: a rank did not come.
        """
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__} on rank {self.rank}; pass a torch.Tensor")
        return self._open_core().all_reduce(x, out)

    def check(self) -> None:
        """Waits for the device and raises what kernels have reported: a rank that did not come."""
        self._open_core().check()

    @property
    def is_closed(self) -> bool:
        return self._core is None or self._core.is_closed

    def close(self) -> None:
        """Ends the object, and a communicator of its own."""
        self._drop_core()

    def __enter__(self) -> Collectives:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open_core(self) -> Any:
        if self.is_closed:
            raise RuntimeError("these Collectives are closed; make new ones")
        return self._core
