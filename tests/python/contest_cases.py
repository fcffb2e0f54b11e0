"""Small shapes and written submissions for the tests of the leaderboard."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from moe_a2a.leaderboard import loading, problems
from moe_a2a.leaderboard.cases import Case
from moe_a2a.leaderboard.contest import Contest, ModeResult

TORCH_SORT = loading.FOLDER / "all2all" / "torch_sort.py"
# One expert per token: often no token goes to some rank.
SPARSE = Case({"num_experts": 8, "experts_per_token": 1, "hidden_dim": 32, "max_num_tokens": 3, "seed": 7})
SMALL = Case({"num_experts": 8, "experts_per_token": 2, "hidden_dim": 96, "max_num_tokens": 16, "seed": 11})


def contest(
    problem: str = "all2all", num_ranks: int = 2, seed: int = 1, limit: float = 30.0, tests: tuple[Case, ...] = (SMALL,)
) -> Contest:
    """With small shapes in the place of the published ones, 0.05 s of calls per timed case."""
    file = dataclasses.replace(problems.file_of(problem), tests=list(tests), benchmarks=[SMALL])
    return Contest(file, num_ranks, "cpu", seed, shortened=0.05, limit=limit)


def changed(folder: Path, snippet: str) -> Path:
    """The sort submission, which is right, with `snippet` after it; there `right` is its custom_kernel."""
    path = folder / "submission.py"
    path.write_text(TORCH_SORT.read_text() + "\nright = custom_kernel\n\n" + snippet)
    return path


def verdicts(result: ModeResult) -> set[str]:
    return {case.verdict for case in result.cases}
