"""Follows docs/leaderboard.md as a newcomer would: its submissions and its commands, in order, on small shapes."""

import re
import shlex
from pathlib import Path

import contest_cases
import pytest

from moe_a2a.leaderboard.record import Board
from moe_a2a.leaderboard.verdicts import MEANINGS

pytestmark = pytest.mark.cpu

PAGE = Path(__file__).parents[2] / "docs" / "leaderboard.md"
BLOCK = re.compile(r"^```(python)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(200)
def test_from_an_empty_submission_to_a_ranked_and_traced_entry(monkeypatch, capfd, tmp_path):
    contest_cases.make_small(monkeypatch)
    monkeypatch.chdir(tmp_path)
    leaderboard, codes = contest_cases.command(monkeypatch, capfd, tmp_path), []
    for language, text in BLOCK.findall(PAGE.read_text()):
        if language:
            Path("submission.py").write_text(text)
            continue
        for command in text.splitlines():
            words = shlex.split(command)
            if words[:4] == ["python", "-m", "moe_a2a", "leaderboard"]:
                code, said, _ = leaderboard(*words[4:])
                codes.append((words[4], code))
                print(said)
    assert codes == [("list", 0), ("run", 112), ("run", 0), ("rank", 0)]
    board = Board.read(Path("board/all2all.json"))
    assert {entry.name for entry in board.entries} == {f"{tmp_path.name}-submission", "torch_sort"}
    assert "us in each operation" in board.entries[0].summary
    assert (tmp_path / "board" / board.entries[0].trace_file).exists()
    assert Path("board/leaderboard.html").exists()


def test_every_verdict_is_explained():
    explained = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert set(MEANINGS) - {"pass"} <= explained
