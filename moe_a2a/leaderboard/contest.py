"""Runs the cases of a mode for one submission, and the null submission beside the timed ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moe_a2a.commands.command_line import UsageError
from moe_a2a.leaderboard import loading, modes, rank_program
from moe_a2a.leaderboard.cases import Case, ProblemFile
from moe_a2a.leaderboard.modes import CaseResult, Rules
from moe_a2a.leaderboard.ranks import SubmissionRanks
from moe_a2a.leaderboard.statistics import geometric_mean

TIMED = {"benchmark": modes.benchmark, "leaderboard": modes.leaderboard}
CHECKED = {"test": modes.test, "pressure": modes.pressure, "lone_call": modes.lone_call}
NULL_RUNS = 20
SECONDS_OF_LINK = 60.0
OnCase = Callable[[int, CaseResult], None]


@dataclass
class ModeResult:
    """nulls: results of the null submission on the same cases, for a timed mode; otherwise empty."""

    mode: str
    cases: list[CaseResult] = field(default_factory=list)
    nulls: list[CaseResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.cases)

    @property
    def score_ns(self) -> float:
        """The geometric mean over cases of the mean time of a call. Only for a timed run that has passed."""
        return geometric_mean([result.stats.mean for result in self.cases])

    @property
    def null_score_ns(self) -> float:
        return geometric_mean([result.stats.mean for result in self.nulls])


@dataclass(frozen=True)
class Contest:
    """A problem with its number of ranks, device and rules.

    limit: seconds that a call may take; None: the problem's. shortened, shrunk: as the options; None: not applied.
    """

    problem: ProblemFile
    num_ranks: int
    device_type: str
    secret: int
    shortened: float | None = None
    limit: float | None = None
    shrunk: int | None = None

    @property
    def rules(self) -> Rules:
        problem = self.problem
        if self.limit is not None:
            problem = dataclasses.replace(problem, test_timeout=self.limit, benchmark_timeout=self.limit)
        return Rules(problem, self.secret, self.shortened)

    def cases_of(self, mode: str) -> list[Case]:
        """Adds world_size, unless the case has its own."""
        if mode in TIMED or mode == "profile":
            cases = self.problem.benchmarks
        elif mode == "pressure":
            cases = self.problem.tests[: modes.PRESSURE_CASES]
        elif mode == "lone_call":
            cases = self.problem.tests[-1:] if self.num_ranks > 1 else []
        else:
            cases = self.problem.tests
        return [case if "world_size" in case else case.with_values(world_size=self.num_ranks) for case in cases]

    def ranks_of(self, submission: Path) -> SubmissionRanks:
        """The processes for run_on() and profile(); one set serves all modes of a submission."""
        return SubmissionRanks(self.problem.name, submission, self.num_ranks, self.device_type)

    def null_ranks(self) -> SubmissionRanks:
        """The processes for run_null() and measure_link()."""
        path = loading.entry_path("", "null")
        assert path is not None
        return self.ranks_of(path)

    def run(self, mode: str, submission: Path, on_case: OnCase = lambda number, result: None) -> ModeResult:
        """A mode by itself: run_on() in processes of its own, after the null submission if the mode is timed."""
        nulls = []
        if mode in TIMED:
            with self.null_ranks() as ranks:
                nulls = self.run_null(ranks, mode)
        with self.ranks_of(submission) as ranks:
            return self.run_on(ranks, mode, nulls, on_case)

    def run_on(
        self, ranks: SubmissionRanks, mode: str, nulls: list[CaseResult], on_case: OnCase = lambda number, result: None
    ) -> ModeResult:
        """Runs every case of the mode, even after a failure. nulls: from run_null(), for a timed mode."""
        result = ModeResult(mode, nulls=nulls if mode in TIMED else [])
        for number, case in enumerate(self.cases_of(mode)):
            of_case = {**TIMED, **CHECKED}[mode](self.rules, ranks, case)
            if mode in TIMED:
                modes.check_clock(of_case, nulls[number])
            result.cases.append(of_case)
            on_case(number, of_case)
        return result

    def run_null(self, ranks: SubmissionRanks, mode: str) -> list[CaseResult]:
        """Runs the null submission in a timed mode: what happens between two calls decides how long the harness's own steps
        take. Raises UsageError if the harness itself does not run."""
        rules = dataclasses.replace(self.rules, checked=False, most_runs=NULL_RUNS)
        results = [TIMED[mode](rules, ranks, case) for case in self.cases_of(mode)]
        failed = next((result for result in results if not result.passed), None)
        if failed is not None and self.limit is not None and failed.verdict in ("slow", "hang"):
            raise UsageError(
                f"--limit {self.limit:g}: the null submission, which does nothing, needs longer on this machine ({failed.message}); "
                "pass more seconds"
            )
        if failed is not None:
            raise UsageError(
                f"the harness does not work on this machine: the null submission failed: {failed.verdict}: {failed.message}"
            )
        return results

    def measure_link(self, ranks: SubmissionRanks) -> float:
        """Bytes per second that a rank sends while all send to all others; 0 for a single rank, which has no link."""
        if self.num_ranks == 1:
            return 0.0
        ranks.begin_case(self.cases_of("benchmark")[0], [{} for _ in range(self.num_ranks)])
        rates = ranks.run(rank_program.link_rate, limit=SECONDS_OF_LINK)
        ranks.end_case()
        return rates[0]

    def profile(
        self,
        ranks: SubmissionRanks,
        cases: list[Case],
        folder: Path,
        name: str,
        on_case: OnCase = lambda number, result: None,
    ) -> ModeResult:
        """Writes a trace per case, <problem>.<name>.<number>.json.gz in `folder`."""
        result = ModeResult("profile")
        for number, case in enumerate(cases):
            path = folder.resolve() / f"{self.problem.name}.{name}.{number}.json.gz"
            result.cases.append(modes.profile(self.rules, ranks, case, path))
            on_case(number, result.cases[-1])
        return result
