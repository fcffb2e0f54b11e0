"""Communicator: the ranks of a group, their device and their deadline, shared by its clients."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from moe_a2a import _core, arguments, devices, set_up
from moe_a2a.client import Client
from moe_a2a.groups import as_group


class Communicator(Client):
    """The ranks of a group, which several ExpertParallel and Collectives objects may share.

        comm = moe_a2a.Communicator(group)
        ep = moe_a2a.ExpertParallel(comm, num_experts=64, ...)
        coll = moe_a2a.Collectives(comm)

    Args:
        group: the ranks. A torch.distributed group (None: the default group), a one-dimensional DeviceMesh, an mpi4py
            communicator, an element of thread_group(n), or HandleExchange(rank, num_ranks) to carry the handles yourself.
        device: where tensors live; default: the device in the environment variable MOE_A2A_DEVICE, else this process's
            GPU if this build has kernels for it, else the CPU.
        timeout: seconds after which a wait for another rank raises PeerTimeoutError.
        ordered: all ranks make the calls of all clients in the same order. On a GPU they then run one after another, whatever
            their streams, and each may use every SM; else clients share the SMs, since their kernels may wait for peers at
            the same time.

    Every rank makes the same clients in the same order, and closes them before the communicator. A missing rank is
    missing for all clients: once one of them gives up waiting for it, the others' waits end too.

    Raises, as its clients' constructors do:
        ValueError, TypeError: an argument is wrong, or differs between the ranks.
        RuntimeError: there is not enough memory, or another rank could not make its object.
        PeerTimeoutError: a rank did not make its object within `timeout`.
    """

    @set_up.refuses_wrong_arguments
    def __init__(
        self,
        group: Any = None,
        *,
        device: torch.device | str | None = None,
        timeout: float = 30.0,
        ordered: bool = False,
    ):
        self._prepare(group, device, timeout, ordered)
        self._make()

    def traced_clients(self) -> Sequence[Client]:
        """The open clients, in the order in which they were made."""
        clients = [client() for client in self._clients]
        return [client for client in clients if client is not None and not client.is_closed]

    def _prepare(self, group: Any, device: torch.device | str | None, timeout: float, ordered: bool) -> None:
        self._clients: list[weakref.ref[CommunicatorClient]] = []
        self._group = as_group(group)
        self.rank: int = self._group.rank
        self.num_ranks: int = self._group.num_ranks
        self.timeout = timeout
        self.ordered = ordered
        self._device = device

    def _allocate(self) -> None:
        self.timeout = arguments.checked_timeout(self.rank, self.timeout)
        self.ordered = arguments.checked_bool(self.rank, "ordered", self.ordered)
        self.device = devices.checked_device(self.rank, self._device)
        self._core = _core.Communicator(
            self.rank, self.num_ranks, devices.target_of(self.device), self.device, self.timeout, self.ordered
        )


class CommunicatorClient(Client):
    """A client of the caller's communicator, or of one that is made and closed with it."""

    _comm: Communicator
    _owns_comm: bool
    _closed_with_it: list[CommunicatorClient]  # made for this object's use

    def _join(self, group: Any, device: torch.device | str | None, timeout: float) -> None:
        self._closed_with_it = []
        self._owns_comm = not isinstance(group, Communicator)
        if self._owns_comm:
            self._comm = Communicator.__new__(Communicator)
            self._comm._prepare(group, device, timeout, ordered=True)  # its clients serve this object
        else:
            self._comm = group
        self._wanted_device = device
        self._comm._clients = [client for client in self._comm._clients if client() is not None] + [weakref.ref(self)]
        self._group, self.timeout = self._comm._group, self._comm.timeout
        self.rank, self.num_ranks = self._comm.rank, self._comm.num_ranks

    def _allocated_comm(self) -> Any:
        """The communicator's core."""
        wanted, comm = self._wanted_device, self._comm
        if self._owns_comm:
            comm._allocate()
        elif wanted is not None and devices.checked_device(comm.rank, wanted) != comm.device:
            raise ValueError(
                f"device={str(wanted)!r} on rank {comm.rank}, but the Communicator is on {comm.device}; pass device=None"
            )
        self.device, self.timeout = self._comm.device, self._comm.timeout
        return self._comm._open_core()

    def _drop_core(self) -> None:
        with contextlib.ExitStack() as closed:  # the last first, each even if another raises
            if self._owns_comm:
                closed.callback(self._comm._drop_core)
            closed.callback(super()._drop_core)
            for client in self._closed_with_it:
                closed.callback(client._drop_core)
