"""The processes that run a submission, seen from the harness: cases, calls, and named failures."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from moe_a2a.leaderboard import barrier, rank_program, traffic
from moe_a2a.leaderboard.cases import Case
from moe_a2a.leaderboard.freezing import frozen_now_and_then
from moe_a2a.leaderboard.problems.base import Tensors
from moe_a2a.leaderboard.rank_program import CallResult, is_dense
from moe_a2a.leaderboard.verdicts import SubmissionFailedError
from moe_a2a.rank_processes import FORK_SERVER, CoresShared, OpenFile, RankError, RankProcesses, preload, start_method

PRELOADED = "moe_a2a.leaderboard.preloaded"  # by name: an import here would slow every command down
SECONDS_TO_START = 120.0
SECONDS_TO_BEGIN = 60.0  # a case: its process group
LONGEST_NS = 10**18  # that a clock may show for a call: 30 years
GRACE = 1.0  # seconds that the other ranks get to end once one has failed
VERDICTS = {"raised": "raised", "died": "crash", "timeout": "hang"}  # by RankError's kind


@dataclass
class _Prepared(CoresShared):
    """Also gives each rank the barrier's page, and makes it the leader of a process group, so that what its submission starts
    can be ended with it."""

    page: OpenFile  # in the rank's process: its path

    def __call__(self, rank: int) -> None:
        os.setpgid(0, 0)
        barrier.map_page(str(self.page))
        super().__call__(rank)


class SubmissionRanks:
    """`num_ranks` processes that hold one submission. A failure ends them all; the next case starts new ones.

    seconds_observed: duration of the last call by this process's clock, from the last rank's start to the first rank's end.
    """

    def __init__(self, problem_name: str, submission: Path, num_ranks: int, device_type: str):
        self._problem_name = problem_name
        self._submission = submission
        self.num_ranks = num_ranks
        self.device_type = device_type
        self._processes: RankProcesses | None = None
        self._page: IO[bytes] | None = None  # the barrier's
        self._groups: list[int] = []  # process groups of the ranks, with whatever the submission has started
        self._num_cases = 0
        self._marks: dict[str, list[float]] = {}
        self.seconds_observed = 0.0

    # ---- cases

    def begin_case(self, case: Case, weights: list[Tensors]) -> None:
        """Each case moves every rank to the next process, as the public evaluator's pool may: state that a submission keeps
        in a process may end up on another rank."""
        if self._processes is None or self._processes.is_closed:
            self._start()
        assert self._processes is not None
        self._processes.rotate()
        self._num_cases += 1
        own = [(rank, weights[rank]) for rank in range(self.num_ranks)]
        arguments = (f"case {self._num_cases}", case.without_seed(), self.device_type, SECONDS_TO_BEGIN)
        self.run(rank_program.begin_case, *arguments, limit=SECONDS_TO_BEGIN, own=own)

    def end_case(self) -> None:
        """Also called after a failure, when there is nothing left to end."""
        if self._processes is not None and not self._processes.is_closed:
            self.run(rank_program.end_case, limit=SECONDS_TO_BEGIN)

    def _start(self) -> None:
        preload(FORK_SERVER, rank_program.__name__, PRELOADED)
        self._page = barrier.make_page(self.num_ranks)
        self._processes = RankProcesses(
            self.num_ranks,
            timeout=SECONDS_TO_START,
            method=start_method(self.device_type),
            backend=None,
            prepare=_Prepared(self.num_ranks, OpenFile(self._page)),
        )
        self._groups = self._processes.pids
        self.run(rank_program.load, self._problem_name, self._submission, limit=SECONDS_TO_START)

    # ---- calls

    def call(self, inputs: list[Tensors] | None, limit: float, counted: bool = False) -> list[CallResult]:
        """A call on every rank. inputs: None: the previous ones. Raises SubmissionFailedError: "slow" after `limit` seconds,
        "hang" after twice as many."""
        per_rank = [(None,)] * self.num_ranks if inputs is None else [(of_rank,) for of_rank in inputs]
        self._marks = {"start": [], "end": []}
        results = self.run(rank_program.call, counted, limit=limit, own=per_rank)
        results = [_with_time(rank, _checked(rank, result)) for rank, result in enumerate(results)]
        self.seconds_observed = min(self._marks["end"]) - max(self._marks["start"])
        if self.seconds_observed > limit:
            raise SubmissionFailedError("slow", f"a call took {self.seconds_observed:.3g} s, {limit:g} s at most")
        return results

    def call_in_a_row(self, inputs: list[list[Tensors]], limit: float, source: random.Random) -> list[list[CallResult]]:
        """inputs: per rank, one per call. The ranks are stopped and resumed at instants drawn from `source`."""
        own = [(of_rank,) for of_rank in inputs]
        with frozen_now_and_then(self.pids, source):
            results = self.run(rank_program.call_in_a_row, limit=limit, own=own)
        return [[_checked(rank, result) for result in of_rank] for rank, of_rank in enumerate(results)]

    def call_alone(self, rank: int, inputs: Tensors, limit: float) -> CallResult:
        """Raises SubmissionFailedError if the submission waits for its peers, as it should."""
        own = [(other == rank, inputs if other == rank else {}) for other in range(self.num_ranks)]
        return _checked(rank, self.run(rank_program.call_alone, limit=limit / 2, own=own)[rank])

    def profile(self, num_calls: int, path: Path, inputs: list[list[Tensors]], limit: float) -> str:
        """inputs: per rank, one per call; those before the last `num_calls` warm up. Returns rank 0's summary."""
        return self.run(rank_program.profile, num_calls, path, limit=limit, own=[(of_rank,) for of_rank in inputs])[0]

    def run(self, program: Callable[..., Any], *arguments: Any, limit: float, own: Any = None) -> list[Any]:
        """Runs program(report, *arguments, *own[rank]) on every rank. Raises SubmissionFailedError, and ends all ranks, if one
        fails or takes twice `limit` seconds."""
        assert self._processes is not None
        try:
            return self._processes.run(
                program, *arguments, own=own, timeout=2 * limit, grace=GRACE, on_progress=self._mark
            )
        except RankError as error:
            self.close()
            raise SubmissionFailedError(VERDICTS[error.kind], str(error), error.details) from None

    @property
    def pids(self) -> list[int]:
        return self._processes.pids if self._processes is not None else []

    def shared_bytes_touched(self) -> int:
        """Since traffic.forget_touched_pages(), the barrier's page apart."""
        assert self._page is not None
        return traffic.shared_bytes_touched(self.pids, without=os.fstat(self._page.fileno()))

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
        if self._page is not None:
            self._page.close()
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):  # nothing is left
                os.killpg(group, signal.SIGKILL)
        self._groups = []

    def __enter__(self) -> SubmissionRanks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _mark(self, what: str) -> None:
        self._marks.setdefault(what, []).append(time.monotonic())


def _checked(rank: int, result: CallResult) -> CallResult:
    """What a rank has sent. Its submission may have replaced the clock, or anything else that made the result."""
    output, names = result.output, (result.mutated, result.overrun)
    is_whole = (
        (output is None or (type(output) is torch.Tensor and is_dense(output) and output.is_cpu))
        and isinstance(result.returned, str)
        and all(isinstance(each, list) and all(isinstance(name, str) for name in each) for each in names)
        and isinstance(result.remote_bytes, (int, float))
        and math.isfinite(result.remote_bytes)
    )
    if not is_whole:
        raise SubmissionFailedError("wrong", f"rank {rank} sent a result that the harness's own code does not make")
    return result


def _with_time(rank: int, result: CallResult) -> CallResult:
    if not (isinstance(result.nanoseconds, int) and 1 <= result.nanoseconds <= LONGEST_NS):
        raise SubmissionFailedError(
            "clock", f"the clock of rank {rank} shows {str(result.nanoseconds)[:40]} ns for a call"
        )
    return result
