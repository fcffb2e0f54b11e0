"""Common base of Communicator and its clients: memory that the ranks of a group allocate and map together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from moe_a2a import arguments, set_up
from moe_a2a.errors import CallMismatchError, PeerRefusedError, PeerTimeoutError, RoutingError
from moe_a2a.groups import Group, HandleExchange

C = TypeVar("C", bound="OnePerRank")


class OnePerRank(ABC):
    """An object with one instance on every rank of a group. It cannot be copied: it owns, or uses, memory that other ranks
    write into. A `with` block closes it."""

    rank: int

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, exception_type: object, *rest: object) -> None:
        try:
            self.close()
        except (PeerTimeoutError, PeerRefusedError, RoutingError, CallMismatchError):  # what kernels have reported
            if exception_type is None:  # an exception in flight takes precedence
                raise

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"an object of type {type(self).__name__} cannot be copied or pickled (rank {self.rank}): it owns memory that "
            "its peers write into; make one per rank"
        )


class Client(OnePerRank):
    _group: Group
    _core: Any = None  # of the extension; None: closed, or construction failed
    _trace: Any = None  # the running moe_a2a.Trace
    num_ranks: int
    timeout: float
    device: torch.device

    @abstractmethod
    def _allocate(self) -> None:
        """Checks the arguments and allocates this rank's memory: `_core`."""

    def _make(self) -> None:
        if isinstance(self._group, HandleExchange):
            self._allocate_here()  # the caller carries the handles
        else:
            set_up.make_together(self, self._allocate_here)

    def _allocate_here(self) -> None:
        try:
            self._allocate()
        except RuntimeError as error:
            raise RuntimeError(f"{type(self).__name__} on rank {self.rank}: {error}") from None

    def _drop_core(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def _open_core(self) -> Any:
        if self._core is None:
            raise RuntimeError(f"this {type(self).__name__} object is closed; make a new one")
        return self._core

    def get_comm_handle(self) -> bytes:
        """What the other ranks need to map this rank's memory. Carry it to every rank; see set_comm_handles()."""
        return self._open_core().comm_handle()

    def set_comm_handles(self, handles: list[bytes]) -> None:
        """Maps the memory of all ranks. `handles`: get_comm_handle() of every rank, in rank order. Only needed with
        HandleExchange, on all ranks at the same time; returns when every rank has mapped these objects. Raises ValueError
        if the ranks disagree on the configuration or were given handles of different objects, and PeerTimeoutError if a rank
        does not set the handles within `timeout`."""
        core = self._open_core()
        core.connect(arguments.checked_handles(handles), isinstance(self._group, HandleExchange))

    def traced_clients(self) -> Sequence[Client]:
        """The clients whose launches a trace of this object records."""
        return [self]

    def check(self) -> None:
        """Waits for the device and raises what kernels have reported since the last call: a rank that did not arrive, a
        refusal, bad values that only the kernels could see."""
        self._open_core().check()

    @property
    def group(self) -> Any:
        """The ranks, as as_group() gives them; a SurvivorGroup after shrink()."""
        return self._group

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that this object holds on this rank, fixed when it is made."""
        return self._open_core().nbytes

    @property
    def is_closed(self) -> bool:
        return self._core is None

    def close(self) -> None:
        """Ends the object; raises what kernels have reported, as check() does, except for a missing rank if an object of the
        same communicator has raised it already. Other ranks that still wait for this one time out."""
        self._drop_core()

    def _state(self) -> str:
        """For a repr(), which a forked child may print: nothing that asks the core."""
        return "closed" if self.is_closed else str(self.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.num_ranks}, {self._state()})"
