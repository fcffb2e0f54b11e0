"""How the ranks that are left of a group agree on who they are.

Each of them posts that it is here. Once all are here, or nobody waits for the others any more, each proposes the ranks that
it sees. The first proposal is the decision, on every rank: the board takes one value for the key, in one step
(Board.settle()). A rank that comes later finds the decision, without itself in it. See docs/faults.md.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Set

from moe_a2a.errors import PeerTimeoutError
from moe_a2a.groups.rendezvous import Meetings

# How long to wait for a rank in `lost`, which may be alive: a PeerTimeoutError also names a rank that itself waited for the dead
# one until a third rank gave up on it. Such a rank raises too, on a busy machine about a second later.
SECONDS_FOR_THE_LOST = 2.0
# For the board to answer, beyond the deadline. A store whose host is frozen never does.
SECONDS_TO_ANSWER = 5.0
SECONDS_BETWEEN_LOOKS = 0.1

DECISION = "survivors/decision"


def agree(meetings: Meetings, lost: Set[int], timeout: float) -> tuple[int, ...]:
    """The ranks of the group that go on: the same on every rank that returns, and without this rank if it came too late.

    Waits `timeout` seconds for ranks that are not here, but only SECONDS_FOR_THE_LOST for those in `lost`. Raises
    PeerTimeoutError if the board does not answer.
    """
    return _Attempt(meetings, lost, timeout).made()


class _Attempt:
    """One rank's part. It runs in a thread of its own, since a call of a store whose host is frozen cannot be interrupted."""

    def __init__(self, meetings: Meetings, lost: Set[int], timeout: float):
        self._rank, self._board = meetings.rank, meetings.board
        self._here = [f"survivors/here/{rank}" for rank in range(meetings.num_ranks)]
        self._lost = lost
        self._timeout = timeout
        self._start = time.monotonic()
        self._is_given_up = threading.Event()  # the caller has left: propose nothing
        self._answers: queue.SimpleQueue[tuple[tuple[int, ...], Exception | None]] = queue.SimpleQueue()

    def made(self) -> tuple[int, ...]:
        threading.Thread(target=self._answer, name="moe_a2a survivors", daemon=True).start()
        try:
            decision, error = self._answers.get(timeout=self._timeout + SECONDS_TO_ANSWER)
        except queue.Empty:
            raise self._no_answer(f"has not answered for {SECONDS_TO_ANSWER:.0f} s") from None
        finally:
            self._is_given_up.set()
        if error is not None:
            raise self._no_answer(f"has ended ({error})") from error
        return decision

    def _answer(self) -> None:
        try:
            self._answers.put((self._decision(), None))
        except Exception as error:
            self._answers.put(((), error))

    def _decision(self) -> tuple[int, ...]:
        mine = self._here[self._rank]
        self._board.post(mine, True)
        while not self._is_given_up.is_set():
            found = self._board.look([DECISION, *self._here])
            if DECISION in found:
                return found[DECISION]
            here = tuple(rank for rank, key in enumerate(self._here) if found.get(key))
            if self._waits_for_nobody(here):
                return self._board.settle(DECISION, here)
            self._board.wait(SECONDS_BETWEEN_LOOKS)
        # Not forgotten: a store waits for a key that is removed between its check and its read.
        self._board.post(mine, False)
        return ()

    def _waits_for_nobody(self, here: tuple[int, ...]) -> bool:
        elapsed = time.monotonic() - self._start
        missing = set(range(len(self._here))).difference(here)
        if elapsed >= SECONDS_FOR_THE_LOST:
            missing -= self._lost
        return not missing or elapsed >= self._timeout

    def _no_answer(self, what: str) -> PeerTimeoutError:
        return PeerTimeoutError(
            f"rank {self._rank} lost the store of the group while the ranks agreed on who is left: the process that hosts it, "
            f"rank 0 unless a launcher does, {what}; let a process host it that outlives the ranks",
            operation="survivors",
            phase="store",
            rank=self._rank,
            elapsed_seconds=time.monotonic() - self._start,
        )
