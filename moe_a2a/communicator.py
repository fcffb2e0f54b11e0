"""Communicator: the ranks of a group, their device, their deadline; what its clients share."""

from __future__ import annotations

from typing import Any

import torch

from moe_a2a import _core, arguments, devices, set_up
from moe_a2a.groups import HandleExchange, as_group


class Communicator:
    """The ranks of a group as ExpertParallel and Collectives use them: several of these may share one.

        comm = moe_a2a.Communicator(group)
        ep = moe_a2a.ExpertParallel(comm, num_experts=64, ...)
        coll = moe_a2a.Collectives(comm)

    Args:
        group: the ranks. A torch.distributed group (None: the default group), a one-dimensional DeviceMesh, an mpi4py
            communicator, an element of thread_group(n), or HandleExchange(rank, num_ranks) to carry the handles yourself.
        device: where tensors live; default: what the environment variable MOE_A2A_DEVICE names, else this process's GPU
            if this build has its target, else the CPU.
        timeout: seconds after which a wait for another rank raises PeerTimeoutError.

    Every rank makes the same clients in the same order, and closes them before the communicator. A rank that is missing
    is missing for all clients: once one of them has given up waiting for it, waits of the others end as well.
    """

    def __init__(self, group: Any = None, *, device: torch.device | str | None = None, timeout: float = 30.0):
        self._prepare(group, device, timeout)
        if isinstance(self._group, HandleExchange):
            self._allocate()
        else:
            set_up.make_together(self, self._allocate)

    @classmethod
    def of_client(cls, group: Any, device: torch.device | str | None, timeout: float) -> tuple[Communicator, bool]:
        """The communicator of a client that was given `group`, and whether it is the client's own; then it is
        allocated and connected together with the client."""
        if not isinstance(group, cls):
            own = cls.__new__(cls)
            own._prepare(group, device, timeout)
            return own, True
        if device is not None and devices.checked_device(group.rank, device) != group.device:
            raise ValueError(
                f"device={str(device)!r} on rank {group.rank}, but the Communicator is on {group.device}; pass device=None"
            )
        return group, False

    def _prepare(self, group: Any, device: torch.device | str | None, timeout: float) -> None:
        self._group = as_group(group)
        self.rank: int = self._group.rank
        self.num_ranks: int = self._group.num_ranks
        self.timeout = timeout
        self._device = device
        self._core: Any = None

    def _allocate(self) -> None:
        self.timeout = arguments.checked_timeout(self.rank, self.timeout)
        self.device = devices.checked_device(self.rank, self._device)
        self._core = _core.Communicator(
            self.rank, self.num_ranks, devices.target_of(self.device), self.device, self.timeout
        )

    def _drop_core(self) -> None:
        """Of an object that could not be made."""
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def get_comm_handle(self) -> bytes:
        """What the other ranks need to map this rank's memory. Only needed with HandleExchange."""
        return self._open_core().comm_handle()

    def set_comm_handles(self, handles: list[bytes]) -> None:
        """Maps the memory of all ranks. `handles`: get_comm_handle() of every rank, in rank order."""
        self._open_core().connect(handles)

    def check(self) -> None:
        """Waits for the device and raises what kernels have reported."""
        self._open_core().check()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the communicator itself holds on this rank; its clients hold their own."""
        return self._open_core().nbytes

    @property
    def is_closed(self) -> bool:
        return self._core is None or self._core.is_closed

    def close(self) -> None:
        """Ends the communicator. Its clients can no longer be used."""
        if self._core is not None:
            self._core.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else str(self.device)
        return f"Communicator(rank {self.rank} of {self.num_ranks}, {state})"

    def _open_core(self) -> Any:
        if self.is_closed:
            raise RuntimeError("this Communicator is closed; make a new one")
        return self._core
