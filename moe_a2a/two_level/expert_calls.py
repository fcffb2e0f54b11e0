"""How the nodes agree on the calls of a TwoLevelExpertParallel before rows cross between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from moe_a2a.two_level.passage import Passage
from moe_a2a.two_level.rail import Rail

KINDS = (
    "a call with bad arguments",
    "dispatch",
    "the end of a dispatch",
    "combine",
    "the backward pass of dispatch",
    "the backward pass of combine",
)


ROW_FORMATS = ("", " of float8 rows", " of float8 rows with scales of bytes")


@dataclass(frozen=True)
class Call:
    """A call, encoded for comparison between nodes."""

    kind: int
    row_format: int = 0  # an index of ROW_FORMATS
    number: int = -1  # of the dispatch that it belongs to

    @classmethod
    def of(cls, kind: str, **how: int) -> Call:
        return cls(KINDS.index(kind), **how)

    def __str__(self) -> str:
        of_what = f" of dispatch {self.number}" if self.number >= 0 else ROW_FORMATS[self.row_format]
        return KINDS[self.kind] + of_what


BAD_CALL = Call.of("a call with bad arguments")


class Releasable(Protocol):
    def release(self) -> None: ...


Dispatched = TypeVar("Dispatched", bound=Releasable)


class ExpertCalls:
    """Each method raises `failure` if there is one, or an error if another node's call failed or differs."""

    def __init__(self, rail: Rail):
        self._rail = rail
        self.num_dispatches = 0  # whose rows have crossed

    def begin_dispatch(
        self, row_format: int, num_sent: Sequence[int], failure: BaseException | None
    ) -> list[list[int]]:
        """Returns num_sent of every node: how many rows it sends to each."""
        call = Call.of("dispatch", row_format=row_format) if failure is None else BAD_CALL
        counts = self._rail.compare(call, failure, num_sent)
        self.num_dispatches += 1
        return counts

    def on_every_node(self, passage: Passage, dispatch: Callable[[], Dispatched]) -> Dispatched:
        """This node's part of a dispatch. On the CPU, if it fails on one node it fails on all."""
        dispatched = failure = None
        try:
            with self._rail.within_node():
                dispatched = dispatch()
        except BaseException as error:
            failure = error
        try:
            self.compare("the end of a dispatch", passage, failure)
        except BaseException:
            if dispatched is not None:
                dispatched.release()
            raise
        assert dispatched is not None
        return dispatched

    def compare(self, kind: str, passage: Passage | None, failure: BaseException | None = None) -> None:
        """`passage`: None if the call does not say which. Only on the CPU; elsewhere it would have to wait for the device."""
        if self._rail.compares_calls:
            call = BAD_CALL if failure or passage is None else Call.of(kind, number=passage.number)
            self._rail.compare(call, failure)
        elif failure is not None:
            raise failure
