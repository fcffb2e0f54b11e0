"""How ranks find each other. Used when an ExpertParallel is made; a dispatch or combine never comes here."""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Group(Protocol):
    """A rank's view of the ranks that belong together."""

    rank: int
    num_ranks: int

    def all_gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order. Every rank calls it."""
        ...


class ThreadGroup:
    """One rank among threads of this process; see thread_group()."""

    def __init__(self, rank: int, meeting: _Meeting):
        self.rank = rank
        self.num_ranks = meeting.num_ranks
        self._meeting = meeting

    def all_gather(self, value: Any) -> list[Any]:
        return self._meeting.all_gather(self.rank, value)


class _Meeting:
    """Where the threads of a group lay down their values and pick up everybody's."""

    TIMEOUT_SECONDS = 60.0

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._values: list[Any] = [None] * num_ranks
        self._arrived = threading.Barrier(num_ranks)
        self._left = threading.Barrier(num_ranks)

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._wait(self._arrived, rank)
        values = list(self._values)
        self._wait(self._left, rank)  # nobody lays down the next value before all have read this one
        return values

    def _wait(self, barrier: threading.Barrier, rank: int) -> None:
        try:
            barrier.wait(self.TIMEOUT_SECONDS)
        except threading.BrokenBarrierError:
            raise RuntimeError(
                f"rank {rank} waited {self.TIMEOUT_SECONDS:.0f} s for the other {self.num_ranks - 1} threads of its "
                "thread_group; call from one thread per rank"
            ) from None


def thread_group(num_ranks: int) -> list[ThreadGroup]:
    """Groups for `num_ranks` threads of this process: element r is for the thread that plays rank r.

    For notebooks, tests and one process that drives several GPUs.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} < 1; pass num_ranks=1 or more")
    meeting = _Meeting(num_ranks)
    return [ThreadGroup(rank, meeting) for rank in range(num_ranks)]


class HandleExchange:
    """No channel at all: the caller carries ep.get_comm_handle() to ep.set_comm_handles(), as between Ray actors."""

    def __init__(self, rank: int, num_ranks: int):
        self.rank = rank
        self.num_ranks = num_ranks

    def all_gather(self, value: Any) -> list[Any]:
        raise RuntimeError("a HandleExchange has no channel; call ep.set_comm_handles() with every rank's handle")


class TorchGroup:
    """A torch.distributed process group, of any backend."""

    def __init__(self, process_group: Any):
        import torch.distributed as dist

        self._dist = dist
        self._process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.num_ranks = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group; pass a group that contains it")

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        self._dist.all_gather_object(values, value, group=self._process_group)
        return values


class MpiGroup:
    """An mpi4py communicator."""

    def __init__(self, communicator: Any):
        self._communicator = communicator
        self.rank = communicator.Get_rank()
        self.num_ranks = communicator.Get_size()

    def all_gather(self, value: Any) -> list[Any]:
        return self._communicator.allgather(value)


def as_group(group: Any) -> Group:
    """Wraps what users have: a torch.distributed group (None: the default one) or DeviceMesh, an mpi4py communicator,
    an element of thread_group(), a HandleExchange."""
    if all(hasattr(group, name) for name in ("rank", "num_ranks", "all_gather")):
        return group
    if hasattr(group, "Get_rank") and hasattr(group, "allgather"):
        return MpiGroup(group)
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"group={group!r}, but torch.distributed is not initialised; call torch.distributed.init_process_group(), or "
            "pass an element of moe_a2a.thread_group(n)"
        )
    if hasattr(group, "get_group"):  # DeviceMesh
        group = group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is a {type(group).__name__}; pass a torch.distributed group, a DeviceMesh of one dimension, an mpi4py "
            "communicator, or an element of moe_a2a.thread_group(n)"
        )
    return TorchGroup(group)
