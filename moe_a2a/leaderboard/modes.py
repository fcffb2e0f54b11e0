"""The modes of a run: what is called how often, on which inputs, and which question it answers."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moe_a2a.commands.command_line import UsageError
from moe_a2a.leaderboard.cases import Case, ProblemFile
from moe_a2a.leaderboard.problems.base import Tensors
from moe_a2a.leaderboard.ranks import SubmissionRanks
from moe_a2a.leaderboard.statistics import MOST_RUNS, Stats, enough
from moe_a2a.leaderboard.trial import Call, Trial
from moe_a2a.leaderboard.verdicts import PASS, SubmissionFailedError

BENCHMARK_SECONDS, LEADERBOARD_SECONDS = 10.0, 30.0  # of calls per case, from the contract
PRESSURE_CALLS, PRESSURE_SECONDS = 100, 3.0
PRESSURE_CASES = 3  # the first tests: with fewer tokens, more pairs of ranks exchange none
LONE_SECONDS = 3.0
FEW_CALLS = 20
PROFILE_WARM_UP, PROFILE_CALLS = 2, 3
NUM_REPLAYS = 2


@dataclass
class CaseResult:
    """collective_bytes, shared_bytes: see trial.Call; only for tests. overhead_ns: the harness's time minus the rank's, per
    call."""

    case: Case
    verdict: str = PASS
    message: str = ""
    details: str = ""
    nanoseconds: list[int] = field(default_factory=list)
    overhead_ns: list[int] = field(default_factory=list)
    collective_bytes: int = -1
    shared_bytes: int = -1
    summary: str = ""  # of a trace
    trace_file: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict == PASS

    @property
    def stats(self) -> Stats:
        return Stats.of(self.nanoseconds)

    def add(self, call: Call) -> None:
        self.nanoseconds.append(call.nanoseconds)
        self.overhead_ns.append(call.observed_ns - call.nanoseconds)


@dataclass(frozen=True)
class Rules:
    """The rules of one run. secret: the source of seeds that no submission can know. shortened: seconds of calls per case;
    None: the contract's. most_runs: timed calls per case."""

    problem: ProblemFile
    secret: int
    shortened: float | None = None
    checked: bool = True
    most_runs: int = MOST_RUNS

    def trial(self, ranks: SubmissionRanks, case: Case, published: bool = False) -> Trial:
        return Trial(ranks, self.problem.name, case, self.secret, published, self.checked)


@contextmanager
def _failures_into(result: CaseResult) -> Iterator[None]:
    try:
        yield
    except SubmissionFailedError as failure:
        result.verdict, result.message, result.details = failure.verdict, failure.message, failure.details
    except RuntimeError as error:  # the harness's own; PyTorch has no class for it
        if "can't allocate memory" not in str(error):
            raise
        raise UsageError(
            f"{result.case.spec}: its tensors do not fit into this machine's memory; pass smaller sizes"
        ) from None


def test(rules: Rules, ranks: SubmissionRanks, case: Case) -> CaseResult:
    """One call on the published seed."""
    result = CaseResult(case)
    with _failures_into(result), rules.trial(ranks, case, published=True) as trial:
        call = trial.counted_call(trial.published_inputs(), rules.problem.test_timeout)
        result.collective_bytes, result.shared_bytes = call.collective_bytes, call.shared_bytes
    return result


def benchmark(rules: Rules, ranks: SubmissionRanks, case: Case) -> CaseResult:
    """Many calls on the same data, made from the published seed."""
    result = CaseResult(case)
    with _failures_into(result), rules.trial(ranks, case, published=True) as trial:
        _time_calls(rules, trial, result, BENCHMARK_SECONDS, lambda: None)
    return result


def leaderboard(rules: Rules, ranks: SubmissionRanks, case: Case) -> CaseResult:
    """Many calls, each on new data from a secret seed. The first call uses the published data and is not timed."""
    result = CaseResult(case)
    with _failures_into(result), rules.trial(ranks, case) as trial:
        _time_calls(rules, trial, result, LEADERBOARD_SECONDS, trial.secret_inputs)
    if result.verdict == "wrong" and _replays(rules, ranks, case, rules.problem.benchmark_timeout):
        result.verdict = "replayed_seed"
    return result


def _time_calls(
    rules: Rules, trial: Trial, result: CaseResult, seconds: float, next_inputs: Callable[[], list[Tensors] | None]
) -> None:
    """Times calls until there are enough of them; before the first, one on the published data is not timed. next_inputs: of
    each call; None: those of the call before."""
    limit, cap = rules.problem.benchmark_timeout, rules.shortened or seconds
    trial.call(trial.published_inputs(), limit)
    begin = time.monotonic()
    while not enough(result.nanoseconds, cap, time.monotonic() - begin, rules.most_runs):
        result.add(trial.call(next_inputs(), limit))


def _replays(rules: Rules, ranks: SubmissionRanks, case: Case, limit: float) -> bool:
    """Whether it is right each time on the published inputs and wrong each time on secret ones, in alternating cases."""

    def is_right(published: bool) -> bool:
        try:
            with rules.trial(ranks, case, published) as trial:
                trial.call(trial.published_inputs() if published else trial.secret_inputs(), limit)
        except SubmissionFailedError:
            return False
        return True

    return all(is_right(True) and not is_right(False) for _ in range(NUM_REPLAYS))


def pressure(rules: Rules, ranks: SubmissionRanks, case: Case) -> CaseResult:
    """Calls back to back without a barrier, while ranks are stopped at random instants: the others are then in the next
    call while one still has to read the data of the previous one."""
    result = CaseResult(case)
    source = random.Random(f"{rules.secret} {case.spec}")
    limit = rules.problem.test_timeout
    with _failures_into(result), rules.trial(ranks, case) as trial:
        call = trial.call(trial.secret_inputs(), limit)  # with barriers: this alone must be right
        limit += 2e-9 * call.nanoseconds * PRESSURE_CALLS
        end = time.monotonic() + PRESSURE_SECONDS
        try:
            while time.monotonic() < end:
                trial.calls_in_a_row(PRESSURE_CALLS, limit, source)
        except SubmissionFailedError as failure:
            is_race = failure.verdict in ("wrong", "hang", "raised", "crash")
            verdict = "not_back_to_back" if is_race else failure.verdict
            raise SubmissionFailedError(verdict, failure.message, failure.details) from None
    return result


def lone_call(rules: Rules, ranks: SubmissionRanks, case: Case) -> CaseResult:
    """Rank 0 calls, the others do not. A submission that communicates cannot have the right output."""
    result = CaseResult(case)
    with _failures_into(result), rules.trial(ranks, case) as trial:
        call = trial.call(trial.secret_inputs(), rules.problem.test_timeout)
        if trial.is_right_alone(0, max(LONE_SECONDS, 20e-9 * call.nanoseconds)):
            raise SubmissionFailedError("no_communication", "rank 0 had the right output without any other rank")
    return result


def profile(rules: Rules, ranks: SubmissionRanks, case: Case, path: Path) -> CaseResult:
    """Traces a few calls; checks and times nothing."""
    result = CaseResult(case)
    with _failures_into(result), rules.trial(ranks, case) as trial:
        result.summary = trial.profile(PROFILE_WARM_UP, PROFILE_CALLS, path, rules.problem.benchmark_timeout)
        result.trace_file = str(path)
    return result


def check_clock(result: CaseResult, null: CaseResult) -> None:
    """Detects a submission that manipulates its process's clock. The harness's process has timed the same calls: apart from
    the overhead of calls that do nothing, the two must agree. A busy machine may delay most of a few calls, but hardly all."""
    if not result.passed or not null.overhead_ns:
        return
    typical = statistics.median if len(result.overhead_ns) > FEW_CALLS else min
    overhead = typical(result.overhead_ns)
    reported = statistics.median(result.nanoseconds)
    if overhead > 3 * max(null.overhead_ns) and overhead > reported:
        result.verdict = "clock"
        result.message = (
            f"the rank reports {reported / 1e3:.1f} us per call, the harness saw {(overhead + reported) / 1e3:.1f} us"
        )
