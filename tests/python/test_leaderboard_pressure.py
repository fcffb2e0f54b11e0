"""Calls without a barrier in between expose a submission that resets flags and holds no writer back."""

from pathlib import Path

import pytest
from contest_cases import SPARSE, contest, verdicts

from moe_a2a.leaderboard import loading, modes

pytestmark = pytest.mark.cpu

SPARSE3 = SPARSE.with_values(num_experts=9)
RACY = Path(__file__).with_name("racy_submission.py")


@pytest.fixture
def brief(monkeypatch):
    """Pressure for a single batch of calls."""
    monkeypatch.setattr(modes, "PRESSURE_SECONDS", 0.0)


def test_a_reset_without_a_barrier_is_right_in_a_ranked_run_and_found_under_pressure(session_seed, monkeypatch):
    monkeypatch.setattr(modes, "PRESSURE_SECONDS", 60.0)  # it ends with the first batch that shows the race
    result = contest(seed=session_seed).run("leaderboard", RACY)
    assert result.passed, result.cases
    result = contest(seed=session_seed, tests=(SPARSE,), limit=2.0).run("pressure", RACY)
    assert verdicts(result) == {"not_back_to_back"}, result.cases


def test_with_a_barrier_of_its_own_it_stands_the_pressure(tmp_path, session_seed, brief):
    """So the failure was the missing barrier, not the pressure itself."""
    safe = tmp_path / "submission.py"
    safe.write_text(
        RACY.read_text()
        + "\nracy = custom_kernel\n\ndef custom_kernel(data):\n    dist.barrier()\n    return racy(data)\n"
    )
    result = contest(seed=session_seed, tests=(SPARSE,)).run("pressure", safe)
    assert result.passed, result.cases


@pytest.mark.parametrize("entry", ["torch_sort", "expert_parallel"])
def test_entries_of_the_tree_stand_the_pressure(entry, session_seed, brief):
    entry_path = loading.FOLDER / "all2all" / f"{entry}.py"
    result = contest(num_ranks=3, seed=session_seed, tests=(SPARSE3,)).run("pressure", entry_path)
    assert result.passed, result.cases
