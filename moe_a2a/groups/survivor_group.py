"""After a fault: who is left, and which experts. See docs/faults.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from moe_a2a import arguments
from moe_a2a.errors import LeftOutError
from moe_a2a.groups import HandleExchange, MeetingGroup, MpiGroup, as_group
from moe_a2a.groups.agreement import agree
from moe_a2a.groups.boards import PartOfBoard
from moe_a2a.groups.rendezvous import Meetings

DEFAULT_TIMEOUT = 30.0  # seconds; for a group, which has none of its own


class SurvivorGroup(MeetingGroup):
    """The ranks that are left of a group, renumbered in their old order; what a Communicator, an ExpertParallel or a
    Collectives takes as its group. Made by survivors().

    Attributes:
        rank, num_ranks: this rank's number among those that are left, and their number.
        ranks: for each of them, its rank in the original group, also after several faults.
        lost: the ranks of the original group that are gone.
    """

    KIND = "SurvivorGroup"

    def __init__(self, meetings: Meetings, ranks: tuple[int, ...], lost: tuple[int, ...]):
        super().__init__(meetings)
        self.ranks, self.lost = ranks, lost

    def __repr__(self) -> str:
        return f"SurvivorGroup(rank {self.rank} of {self.num_ranks}, original ranks {self.ranks}, lost {self.lost})"


def survivors(of: Any = None, *, lost: Iterable[int] = (), timeout: float | None = None) -> SurvivorGroup:
    """Agrees with the other ranks on who is left, and returns the group of those.

    Every rank that is alive calls it, after a PeerTimeoutError or to continue with fewer ranks. A rank counts as alive if its
    call begins before the others have decided: when all are there, or `timeout` seconds after the first of them began to
    wait. All calls that return have the same list. A list may contain a rank that died after its call had begun; then the
    next object made on the group names it in a PeerTimeoutError, and survivors() of that group leaves it out.

    Args:
        of: a group of torch.distributed (None: the default group) or of threads, a SurvivorGroup, or an object made on
            one. Its ranks agree once: later calls return the same ranks, or, after later faults that this rank knows of,
            those that were left then. So after the next fault, pass what this call returned, or an object made on it.
        lost: ranks of `of` that are probably dead, such as the `peer` of a PeerTimeoutError: they get two seconds instead of
            `timeout`.
        timeout: seconds; None: that of the object, or 30 for a group. The same on every rank, and longer than a rank may
            compute between two calls.

    Objects made on the old group are not closed; close them. The old group cannot be used any more.

    Raises:
        LeftOutError: the others have decided without this rank.
        PeerTimeoutError: the group's store is gone.
        RuntimeError: a group in which the ranks cannot agree: an MPI communicator, a HandleExchange.
        ValueError, TypeError: an argument is wrong. Nothing has been agreed.
    """
    group: Any = as_group(getattr(of, "_group", of))
    check_can_agree(group)
    dead = checked_lost(group, lost)
    if timeout is None:
        timeout = of.timeout if hasattr(of, "_group") else DEFAULT_TIMEOUT
    seconds = arguments.checked_timeout(group.rank, timeout)
    with group.meetings.agreeing:
        if group.meetings.successor is None:
            group.meetings.successor = _successor(group, dead, seconds)
    newest = group.meetings.successor
    while newest.meetings.successor is not None:
        newest = newest.meetings.successor
    return newest


def _successor(group: Any, lost: frozenset[int], timeout: float) -> SurvivorGroup:
    meetings = group.meetings
    before = group.ranks if isinstance(group, SurvivorGroup) else tuple(range(group.num_ranks))
    gone_before = group.lost if isinstance(group, SurvivorGroup) else ()
    decision = agree(meetings, lost, timeout)
    ranks = tuple(before[rank] for rank in decision)
    if group.rank not in decision:
        me = before[group.rank]
        raise LeftOutError(
            f"rank {me} was left out: ranks {_listed(ranks)} had already agreed to go on without it; end this process",
            rank=me,
            survivors=ranks,
        )
    gone = tuple(rank for rank in before if rank not in ranks)
    board = PartOfBoard(meetings.board, "next/")
    return SurvivorGroup(
        Meetings(decision.index(group.rank), len(decision), board), ranks, tuple(sorted(gone_before + gone))
    )


def check_can_agree(group: Any) -> None:
    who = f"the ranks cannot agree on who is left (rank {group.rank})"
    if isinstance(group, HandleExchange):
        raise RuntimeError(
            f"a HandleExchange has no channel, so {who}; decide it where you exchange the handles, and make objects with "
            "HandleExchange(new rank, number of ranks left) and moe_a2a.expert_map()"
        )
    if isinstance(group, MpiGroup):
        raise RuntimeError(
            f"an MPI communicator has no store, so {who}; if your MPI survives a dead rank (ULFM), pass communicator.Shrink() "
            "as the group of new objects, else use a torch.distributed group"
        )
    if getattr(group, "meetings", None) is None:
        raise RuntimeError(
            f"a {type(group).__name__} without a store: {who}; use a torch.distributed group with a store"
        )


def checked_lost(group: Any, lost: Any) -> frozenset[int]:
    return frozenset(arguments.checked_ranks(group.rank, "lost", lost, group.num_ranks))


def expert_map(
    ranks: Sequence[int], *, num_ranks: int, num_experts: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """The new id of each expert if only `ranks` of `num_ranks` are left and each keeps its experts: [num_experts + 1] int64.

        topk_idx = expert_map[topk_idx]

    A lost expert maps to -1, which drops a choice. The last entry is -1, too: an index of -1 reads it, so a choice that was
    dropped before stays dropped.
    """
    num_ranks = arguments.checked_int(None, "num_ranks", num_ranks, 1)
    num_experts = arguments.checked_int(None, "num_experts", num_experts, 1)
    kept = arguments.checked_ranks(None, "ranks", ranks, num_ranks)
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts={num_experts} is not a multiple of num_ranks={num_ranks}; pass those of the old object"
        )
    if len(set(kept)) != len(kept):
        raise ValueError(f"ranks={kept} has a rank twice; pass those that are left")
    num_local_experts = num_experts // num_ranks
    table = torch.full((num_experts + 1,), -1, dtype=torch.int64, device="cpu")
    for new_rank, rank in enumerate(kept):
        first, new_first = rank * num_local_experts, new_rank * num_local_experts
        new_ids = torch.arange(new_first, new_first + num_local_experts, device="cpu")
        table[first : first + num_local_experts] = new_ids
    return table.to(device)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
