"""Small shapes, written submissions and the command itself, for the tests of the leaderboard."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

from moe_a2a.__main__ import main
from moe_a2a.leaderboard import loading, modes, problems
from moe_a2a.leaderboard.cases import Case
from moe_a2a.leaderboard.contest import Contest, ModeResult

TORCH_SORT = loading.FOLDER / "all2all" / "torch_sort.py"
# One expert per token, so often some rank gets no token.
SPARSE = Case({"num_experts": 8, "experts_per_token": 1, "hidden_dim": 32, "max_num_tokens": 3, "seed": 7})
LAYER = Case(
    {
        "num_experts": 8,
        "experts_per_token": 2,
        "hidden_dim": 64,
        "intermediate_dim": 32,
        "max_num_tokens": 12,
        "seed": 5,
    }
)
SMALL = Case({"num_experts": 8, "experts_per_token": 2, "hidden_dim": 96, "max_num_tokens": 16, "seed": 11})


def contest(
    problem: str = "all2all",
    num_ranks: int = 2,
    seed: int = 1,
    limit: float = 30.0,
    tests: tuple[Case, ...] = (SMALL,),
    benchmarks: tuple[Case, ...] = (SMALL,),
) -> Contest:
    """With small shapes instead of the published ones, and 0.05 s of calls per timed case."""
    file = dataclasses.replace(problems.file_of(problem), tests=list(tests), benchmarks=list(benchmarks))
    return Contest(file, num_ranks, "cpu", seed, shortened=0.05, limit=limit)


def changed(folder: Path, snippet: str) -> Path:
    """The correct sort submission followed by `snippet`, in which `right` is its custom_kernel."""
    path = folder / "submission.py"
    path.write_text(TORCH_SORT.read_text() + "\nright = custom_kernel\n\n" + snippet)
    return path


def verdicts(result: ModeResult) -> set[str]:
    return {case.verdict for case in result.cases}


def command(monkeypatch, capfd, tmp_path):
    """Runs the command with POPCORN_FD; returns its exit code, its output, and its lines as a dictionary."""

    def run(*arguments, **environment):
        lines = tmp_path / "popcorn.txt"
        descriptor = os.open(lines, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for name, value in {"POPCORN_FD": str(descriptor), **environment}.items():
            monkeypatch.setenv(name, value)
        try:
            code = main(["leaderboard", *map(str, arguments)])
        except SystemExit as end:  # from argparse
            code = end.code
        finally:
            os.close(descriptor)
        popcorn = dict(line.split(": ", 1) for line in lines.read_text().splitlines())
        return code, "".join(capfd.readouterr()), popcorn

    return run


def make_small(monkeypatch) -> None:
    """Makes the published all2all small and its guards brief, for whole rankings."""
    file = problems.file_of("all2all")
    monkeypatch.setattr(problems, "file_of", lambda name: dataclasses.replace(file, tests=[SPARSE], benchmarks=[SMALL]))
    monkeypatch.setattr(modes, "PRESSURE_SECONDS", 0.0)
    monkeypatch.setattr(modes, "LONE_SECONDS", 0.5)


def left_running(pids: list[int], seconds: float = 20.0) -> list[int]:
    """The processes that have not ended after this time: a killed process may take a moment."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if _is_running(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _is_running(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def state(pid: int) -> str:
    """As in /proc: T is stopped, Z has ended. "": there is no such process."""
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""
