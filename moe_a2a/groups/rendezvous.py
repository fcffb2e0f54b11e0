"""How the ranks of a group meet to make an object: each posts a value and gets the others' values, or learns within the
deadline which ranks did not arrive. After a failed meeting the group is as usable as before.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from moe_a2a.errors import PeerTimeoutError
from moe_a2a.groups.boards import Board


class Meetings:
    """One rank's count of a group's meetings. Every rank takes part in the same meetings in the same order. Meetings are
    numbered, so that a late rank's posts are not taken for those of another meeting."""

    def __init__(self, rank: int, num_ranks: int, board: Board):
        self.rank = rank
        self.num_ranks = num_ranks
        self.board = board
        self.agreeing = threading.Lock()  # one thread of this rank at a time agrees on who is left
        self.successor: Any = None  # the SurvivorGroup that this rank is in since then
        self.process = os.getpid()
        self._one_at_a_time = threading.RLock()
        self._number = 0
        self._posted: list[str] = []  # in the latest meeting

    @contextlib.contextmanager
    def begin(self, what: str) -> Iterator[Meeting]:
        """`what` the ranks do together, for error texts: "make the ExpertParallel".

        Meetings of this rank's threads take place one after the other: a rank in a meeting has left the one before, whose posts
        are then removed. Removed too early, a post would leave a reader waiting forever."""
        with self._one_at_a_time:
            self._number += 1
            before, self._posted = self._posted, []
            yield Meeting(self, f"{self._number}", what, before)

    def all_gather(self, what: str, value: Any, timeout: float) -> list[Any]:
        """A meeting of one exchange."""
        with self.begin(what) as meeting:
            return meeting.all_gather(value, timeout)


class Meeting:
    """A sequence of exchanges. When a rank leaves one of them, all ranks leave."""

    def __init__(self, meetings: Meetings, name: str, what: str, stale: list[str]):
        self._meetings = meetings
        self._name = name
        self._what = what
        self._stale = stale  # what this rank posted in the previous meeting
        self._left = f"{name}/left"
        self._step = 0

    def all_gather(self, value: Any, timeout: float) -> list[Any]:
        """The value of every rank. Raises PeerTimeoutError that names the ranks that have not arrived after `timeout`
        seconds, or, sooner, those that another rank has given up on; and on every rank ValueError if the ranks have come for
        different things."""
        meetings, board = self._meetings, self._meetings.board
        start = time.monotonic()
        self._step += 1
        keys = [f"{self._name}/{self._step}/{rank}" for rank in range(meetings.num_ranks)]
        values: dict[str, Any] = {}
        try:
            self._post(keys[meetings.rank], (self._what, value))
            while True:
                values |= board.look([key for key in keys if key not in values])
                missing = [rank for rank, key in enumerate(keys) if key not in values]
                elapsed = time.monotonic() - start
                # Checked after the values, so that this rank does not continue without a rank that has left.
                if given_up := board.look([self._left]):
                    raise self._error(*given_up[self._left], elapsed)  # type: ignore[call-arg]
                if not missing:
                    break
                if elapsed >= timeout:
                    self._leave(missing)
                    raise self._error(meetings.rank, missing, elapsed)
                board.wait(min(timeout - elapsed, 1.0))
        except PeerTimeoutError:
            raise
        except Exception as error:
            raise self._lost(error, time.monotonic() - start) from error
        except BaseException:  # Ctrl-C
            self.leave()
            raise
        self._forget()  # all ranks are here: nobody reads posts of an earlier meeting
        said = [values[key] for key in keys]
        self._check_same([what for what, _ in said])
        return [value for _, value in said]

    def post(self, value: Any) -> None:
        """This rank's value of the next exchange, for the others: it does not wait for theirs."""
        self._step += 1
        self._quietly(lambda: self._post(f"{self._name}/{self._step}/{self._meetings.rank}", (self._what, value)))

    def leave(self) -> None:
        """Ends this rank's part: the others do not wait for it."""
        self._leave([self._meetings.rank])

    def is_certainly_missed(self) -> bool:
        """After a PeerTimeoutError: whether no rank has, or ever will have, all values of the exchange. A rank continues only
        if it sees all values and then that nobody has left."""
        keys = [f"{self._name}/{self._step}/{rank}" for rank in range(self._meetings.num_ranks)]
        try:
            board = self._meetings.board
            return len(board.look([self._left])) == 1 and len(board.look(keys)) < len(keys)
        except Exception:
            return False

    def _post(self, key: str, value: Any) -> None:
        self._meetings._posted.append(key)
        self._meetings.board.post(key, value)

    def _check_same(self, whats: list[str]) -> None:
        for rank, what in enumerate(whats):
            if what != whats[0]:
                raise ValueError(
                    f"ranks disagree: rank 0 is about to {whats[0]}, rank {rank} to {what} (seen by rank "
                    f"{self._meetings.rank}); make the same objects and traces, in the same order, on every rank"
                )

    def _forget(self) -> None:
        stale, self._stale = self._stale, []
        self._quietly(lambda: self._meetings.board.forget(stale))

    def _leave(self, missing: list[int]) -> None:
        self._quietly(lambda: self._post(self._left, (self._meetings.rank, missing)))

    def _quietly(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # the board died with a rank: the error already in flight matters more
            pass

    def _error(self, reporter: int, missing: list[int], elapsed: float) -> PeerTimeoutError:
        rank = self._meetings.rank
        names = ", ".join("this rank" if peer == rank else f"rank {peer}" for peer in missing)
        text = f"rank {rank} waited {elapsed:.3f} s for {names} to {self._what}"
        if missing == [reporter]:
            text += f"; it left because rank {reporter} was interrupted"
        elif reporter != rank:
            text += f"; it left because rank {reporter} gave up waiting"
        text += "; that rank is dead, late, or makes different calls; pass a larger timeout if it is only late"
        return self._timeout(text, missing[0], elapsed)

    def _lost(self, error: Exception, elapsed: float) -> PeerTimeoutError:
        text = (
            f"rank {self._meetings.rank} lost the store of the group while it waited for the other ranks to {self._what}: "
            f"the process that hosts it, rank 0 unless a launcher does, has ended ({error})"
        )
        return self._timeout(text, 0, elapsed)

    def _timeout(self, text: str, peer: int, elapsed: float) -> PeerTimeoutError:
        return PeerTimeoutError(
            text,
            operation="construct",
            phase="peer",
            rank=self._meetings.rank,
            peer=peer,
            elapsed_seconds=elapsed,
        )


class PlainMeeting:
    """For a group that offers only a collective all_gather: waits as long as the group does."""

    def __init__(self, group: Any):
        self._group = group

    def all_gather(self, value: Any, timeout: float) -> list[Any]:
        return self._group.all_gather(value)

    def post(self, value: Any) -> None:
        self._group.all_gather(value)

    def leave(self) -> None:
        pass

    def is_certainly_missed(self) -> bool:
        return False


def begin(group: Any, what: str) -> contextlib.AbstractContextManager[Meeting | PlainMeeting]:
    has_meetings = getattr(group, "meetings", None) is not None
    return group.meetings.begin(what) if has_meetings else contextlib.nullcontext(PlainMeeting(group))
