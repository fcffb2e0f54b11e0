"""The results of a ranking as stored in <problem>.json; report.py and plot.py show them."""

from __future__ import annotations

import datetime
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe_a2a import installation
from moe_a2a.commands import checkout
from moe_a2a.commands.command_line import UsageError
from moe_a2a.files import replaced_files
from moe_a2a.leaderboard import problems
from moe_a2a.leaderboard.cases import Case
from moe_a2a.leaderboard.contest import Contest, ModeResult
from moe_a2a.leaderboard.device import machine_name
from moe_a2a.leaderboard.modes import CaseResult
from moe_a2a.leaderboard.verdicts import PASS

VERSION = 2
DRAWS_OF_FLOOR = 8


@dataclass
class Timing:
    """The times of one benchmark, in microseconds."""

    label: str
    mean_us: float
    err_us: float
    best_us: float
    worst_us: float
    runs: int

    @classmethod
    def of(cls, result: CaseResult) -> Timing:
        stats = result.stats
        mean, err, best, worst = (value / 1e3 for value in (stats.mean, stats.err, stats.best, stats.worst))
        return cls(result.case.label, mean, err, best, worst, stats.runs)


@dataclass
class Traffic:
    """The traffic of one test, summed over ranks; -1: not counted."""

    label: str
    collective_bytes: int
    shared_bytes: int


@dataclass
class Entry:
    """A submission. failed_mode, failed_case, message: of the first failure. score_us: 0 without a score."""

    name: str
    verdict: str = PASS
    failed_mode: str = ""
    failed_case: str = ""
    message: str = ""
    score_us: float = 0.0
    timings: list[Timing] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    profiled_case: str = ""
    summary: str = ""
    trace_file: str = ""

    def take(self, result: ModeResult) -> None:
        """The first failure decides; measurements made so far stay visible."""
        failed = next((case for case in result.cases if not case.passed), None)
        if failed is not None and self.verdict == PASS:
            self.verdict, self.failed_mode = failed.verdict, result.mode
            self.failed_case, self.message = failed.case.label, failed.message
        if result.mode == "test":
            counted = [case for case in result.cases if case.passed]
            self.traffic = [Traffic(case.case.label, case.collective_bytes, case.shared_bytes) for case in counted]
        if result.mode == "leaderboard" and result.passed:
            self.score_us = result.score_ns / 1e3
            self.timings = [Timing.of(case) for case in result.cases]


@dataclass
class Board:
    """The ranking of one problem on one machine."""

    problem: str
    summary: str
    ranks: int
    device: str
    machine: str
    date: str
    secret: int
    versions: dict[str, str | None]
    shortened: float | None
    shrunk: int | None
    speed_of_light_us: list[float]
    link_gbps: float  # of a rank, in each direction, while all ranks send; 0: a single rank has no link
    floor_us: list[float]  # per benchmark: the bytes to move over the link's rate; empty: see no_floor
    null: list[Timing]
    entries: list[Entry] = field(default_factory=list)
    no_floor: str = ""  # why there is none
    version: int = VERSION

    @classmethod
    def of(cls, contest: Contest, nulls: list[CaseResult], link_rate: float) -> Board:
        """link_rate: from Contest.measure_link()."""
        benchmarks = contest.cases_of("benchmark")
        return cls(
            problem=contest.problem.name,
            summary=contest.problem.summary,
            ranks=contest.num_ranks,
            device=contest.device_type,
            machine=machine_name(contest.device_type),
            date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            secret=contest.secret,
            versions={
                "moe_a2a": installation.version("moe_a2a") or "not installed",
                "commit": checkout.commit(),
                "torch": torch.__version__,
            },
            shortened=contest.shortened,
            shrunk=contest.shrunk,
            speed_of_light_us=[] if contest.shrunk else contest.problem.speed_of_light_us,
            link_gbps=link_rate / 1e9,
            floor_us=[1e6 * bytes_to_move(contest, case) / link_rate for case in benchmarks] if link_rate else [],
            null=[Timing.of(result) for result in nulls],
            no_floor="" if link_rate else "a single rank has no link",
        )

    def ranked(self) -> list[Entry]:
        """Fastest first, entries without a score last."""
        return sorted(self.entries, key=lambda entry: (entry.verdict != PASS, entry.score_us))

    def write(self, path: Path) -> None:
        replaced_files.write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Board:
        try:
            fields: dict[str, Any] = json.loads(path.read_text())
            if fields.get("version") != VERSION:
                raise ValueError(f"version is {fields.get('version')}, not {VERSION}")
            null = [Timing(**timing) for timing in fields.pop("null")]
            entries = [_entry(entry) for entry in fields.pop("entries")]
            return cls(null=null, entries=entries, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is not a ranking of `leaderboard rank`: {error}") from None


def bytes_to_move(contest: Contest, case: Case) -> float:
    """Bytes of the busiest rank, averaged over a few draws since the number of tokens differs from call to call."""
    problem, ranks = problems.make(contest.problem.name), range(case["world_size"])
    of_draws = []
    for draw in range(DRAWS_OF_FLOOR):
        generators = [torch.Generator().manual_seed(case["seed"] + 1000 * draw + rank) for rank in ranks]
        of_draws.append(problem.bytes_to_move(case, [problem.make_inputs(case, r, generators[r]) for r in ranks]))
    return statistics.fmean(of_draws)


def _entry(fields: dict[str, Any]) -> Entry:
    timings = [Timing(**timing) for timing in fields.pop("timings")]
    return Entry(timings=timings, traffic=[Traffic(**one) for one in fields.pop("traffic")], **fields)
