"""How ranks find each other when a Communicator or one of its clients is made; calls do not use this module."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from moe_a2a.arguments import checked_int
from moe_a2a.groups.boards import MpiBoard, StoreBoard, ThreadBoard
from moe_a2a.groups.rendezvous import Meetings


class Group(Protocol):
    """A rank's view of the ranks of a group. A group with `meetings` (see rendezvous.py) can name, within a deadline, a rank
    that does not arrive; all groups of this module have them except torch groups without a store."""

    rank: int
    num_ranks: int

    def all_gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order. Every rank calls it."""
        ...


class MeetingGroup:
    """A group whose all_gather() is a meeting."""

    KIND = "group"  # in error texts

    def __init__(self, meetings: Meetings, timeout: float = 60.0):
        self.rank, self.num_ranks = meetings.rank, meetings.num_ranks
        self.meetings, self._timeout = meetings, timeout

    def all_gather(self, value: Any) -> list[Any]:
        return self.meetings.all_gather(f"call all_gather() of its {self.KIND}", value, self._timeout)


class ThreadGroup(MeetingGroup):
    """One of several ranks that are threads of this process; see thread_group()."""

    KIND = "thread_group"


def thread_group(num_ranks: int) -> list[ThreadGroup]:
    """Groups for `num_ranks` threads of this process: element r is for the thread that runs rank r.

    For notebooks, tests, and one process that drives several GPUs.
    """
    num_ranks = checked_int(None, "num_ranks", num_ranks, 1)
    board = ThreadBoard()
    return [ThreadGroup(Meetings(rank, num_ranks, board)) for rank in range(num_ranks)]


class HandleExchange:
    """For ranks that have no means to exchange data, such as Ray actors: the caller passes what ep.get_comm_handle() returns on
    each rank to ep.set_comm_handles() on every rank."""

    def __init__(self, rank: int, num_ranks: int):
        self.num_ranks = checked_int(None, "num_ranks", num_ranks, 1)
        self.rank = checked_int(None, "rank", rank, 0, self.num_ranks - 1)

    def all_gather(self, value: Any) -> list[Any]:
        raise RuntimeError("a HandleExchange has no channel; call ep.set_comm_handles() with every rank's handle")


# Keyed by store, so that a group recreated under an old name starts afresh on every rank.
_meetings_of: weakref.WeakKeyDictionary[Any, Meetings] = weakref.WeakKeyDictionary()


class TorchGroup:
    """A torch.distributed process group of any backend with a store (all but MPI)."""

    def __init__(self, process_group: Any):
        import torch.distributed as dist

        self._dist = dist
        self._process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.num_ranks = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group; pass a group that contains it")
        store = dist.distributed_c10d._get_process_group_store(process_group or dist.group.WORLD)  # type: ignore[arg-type]
        self.meetings: Meetings | None = None
        if store is not None:
            made = Meetings(self.rank, self.num_ranks, StoreBoard(store))
            self.meetings = _meetings_of.setdefault(store, made)  # atomic: another thread may make one, too
            if self.meetings.process != os.getpid():  # a forked child would post in its parent's name
                raise RuntimeError(
                    f"the process group of rank {self.rank} belongs to process {self.meetings.process} and this is process "
                    f"{os.getpid()}, forked from it; call torch.distributed.init_process_group() in each process"
                )

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
        self.meetings = _mpi_meetings.setdefault(
            id(communicator), Meetings(self.rank, self.num_ranks, MpiBoard(communicator))
        )

    def all_gather(self, value: Any) -> list[Any]:
        return self._communicator.allgather(value)


# Keyed by id(): a weak dictionary cannot hold an mpi4py communicator. The board keeps it alive, so the id stays unique.
_mpi_meetings: dict[int, Meetings] = {}


def as_group(group: Any) -> Group:
    """Wraps what users pass: a torch.distributed group (None: the default one) or DeviceMesh, an mpi4py communicator,
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
        if group.ndim != 1:
            names = group.mesh_dim_names or ("a dimension",)
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions {names}; pass one of them, as in mesh[{names[-1]!r}]"
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this process is not a member of the group (new_group() returned NON_GROUP_MEMBER here); "
            "make the ExpertParallel only on the ranks of the group"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is a {type(group).__name__}; pass a torch.distributed group, a DeviceMesh of one dimension, an mpi4py "
            "communicator, or an element of moe_a2a.thread_group(n)"
        )
    return TorchGroup(group)
