"""`python -m moe_a2a leaderboard`: entries of the tree, cases, times, and output for other tools."""

import os
import re
import subprocess
import sys

import contest_cases
import pytest
import torch
from contest_cases import SMALL, SPARSE, contest

from moe_a2a.__main__ import main
from moe_a2a.commands.command_line import UsageError
from moe_a2a.leaderboard import cases, loading, problems
from moe_a2a.leaderboard.cases import CaseFileError
from moe_a2a.leaderboard.problems.all2all import All2All
from moe_a2a.leaderboard.ranks import SubmissionRanks
from moe_a2a.leaderboard.statistics import Stats, enough, geometric_mean

pytestmark = pytest.mark.cpu

TINY = "num_experts: 8; experts_per_token: 2; hidden_dim: 64; max_num_tokens: 8; seed: 3"


@pytest.fixture
def leaderboard(monkeypatch, capfd, tmp_path):
    return contest_cases.command(monkeypatch, capfd, tmp_path)


# ---- the published problem


def test_the_published_shapes_are_there():
    problem = problems.file_of("all2all")
    assert (len(problem.tests), len(problem.benchmarks), problem.ranking_by) == (9, 5, "geom")
    assert [case["seed"] for case in problem.tests] == [1236, 1234, 542, 347, 51, 175, 534, 897, 4]
    assert problem.benchmarks[-1].spec == (
        "num_experts: 256; experts_per_token: 8; hidden_dim: 7168; max_num_tokens: 256; seed: 4"
    )


def test_inputs_are_those_of_the_contract():
    problem, case = problems.make("all2all"), SMALL.with_values(world_size=4)
    for seed in range(20):
        inputs = problem.make_inputs(case, 0, torch.Generator().manual_seed(seed))
        cfg, data, rank, world_size = problem.as_data(case, inputs, 3)
        assert (rank, world_size, cfg.in_dtype, cfg.out_dtype) == (3, 4, torch.float16, torch.float16)
        assert 1 <= data.num_tokens < case["max_num_tokens"] and type(data.num_tokens) is int
        assert (data.x.dtype, data.indices.dtype, data.weights.dtype) == (torch.float16, torch.int32, torch.float32)
        assert all(len(set(row)) == case["experts_per_token"] for row in data.indices.tolist())


def test_a_wrong_value_is_described():
    problem = problems.make("all2all")
    right = torch.ones(2, 3, dtype=torch.float16)
    wrong = right.clone()
    wrong[1, 2] = 2
    assert problem.mismatch(right * 1.001, right) == ""
    assert "1 of 6 values are wrong; at [1, 2] it is 2, expected 1" in problem.mismatch(wrong, right)
    assert "torch.float32" in problem.mismatch(right.float(), right)


@pytest.mark.parametrize("name", ["reference", "torch_sort", "expert_parallel"])
@pytest.mark.parametrize("problem, num_ranks", [("all2all", 2), ("all2all_experts", 4)])
def test_the_entries_of_the_tree_are_right(problem, name, num_ranks, session_seed):
    entry = loading.entry_path("all2all", name)
    result = contest(problem, num_ranks, session_seed, tests=(SPARSE, SMALL)).run("test", entry)
    assert result.passed, result.cases
    shares_memory = name == "expert_parallel"
    assert all((case.shared_bytes > 0) == shares_memory for case in result.cases)
    assert all((case.collective_bytes > 0) == (not shares_memory) for case in result.cases)


def test_the_null_submission_runs_beside_a_timed_one(session_seed):
    result = contest(seed=session_seed).run("leaderboard", loading.entry_path("all2all", "expert_parallel"))
    assert result.passed and len(result.nulls) == len(result.cases) == 1
    assert result.cases[0].stats.runs >= 3 and result.nulls[0].stats.runs >= 3
    assert 0 < result.nulls[0].stats.best < result.score_ns


def test_a_limit_that_is_too_small_for_the_harness_is_named(session_seed):
    made = contest(seed=session_seed, limit=1e-7)
    with made.null_ranks() as ranks, pytest.raises(UsageError, match="--limit 1e-07: the null submission"):
        made.run_null(ranks, "leaderboard")


@pytest.mark.parametrize("mode, brings_new_data", [("benchmark", False), ("leaderboard", True)])
def test_the_null_submission_is_called_as_the_others_are(mode, brings_new_data, monkeypatch, session_seed):
    """A rank that has just received new data runs the harness's own steps with colder caches."""
    inputs = []
    call = SubmissionRanks.call

    def recorded(ranks, data, *rest):
        inputs.append(data)
        return call(ranks, data, *rest)

    monkeypatch.setattr(SubmissionRanks, "call", recorded)
    made = contest(seed=session_seed)
    with made.null_ranks() as ranks:
        (result,) = made.run_null(ranks, mode)
    assert result.passed and len(inputs) == 1 + result.stats.runs
    assert all((data is not None) == brings_new_data for data in inputs[1:])


# ---- times


def test_statistics_are_those_of_the_contract():
    stats = Stats.of([100, 200, 300])
    assert (stats.runs, stats.mean, stats.std, stats.best, stats.worst) == (3, 200, 100, 100, 300)
    assert stats.err == pytest.approx(100 / 3**0.5)
    assert geometric_mean([1, 100]) == pytest.approx(10)


def test_when_there_are_enough_runs():
    assert not enough([10] * 2, cap_seconds=0, wall_seconds=1000)  # at least 3
    assert enough([10] * 3, cap_seconds=30, wall_seconds=0)  # no deviation at all
    assert not enough([10, 20, 30], cap_seconds=30, wall_seconds=119)
    assert enough([10, 20, 30], cap_seconds=30, wall_seconds=121)
    assert enough([10**9, 2 * 10**9, 3 * 10**9], cap_seconds=5, wall_seconds=0)
    assert enough([10, 20] * 50, cap_seconds=30, wall_seconds=0)  # at most 100


# ---- cases


def test_a_line_of_a_case_file_is_a_case(tmp_path):
    (tmp_path / "cases.txt").write_text(f"{TINY}; world_size: 4\n{TINY}; has_bias: False\n")
    first, second = cases.read_case_lines(tmp_path / "cases.txt")
    assert first["world_size"] == 4 and second["has_bias"] == "False"
    assert first.spec == TINY + "; world_size: 4" and first.label == "8 2 64 8"


@pytest.mark.parametrize(
    "text", ["", f"{TINY}\n\n{TINY}", "a: 1.5; seed: 3", "a=1; seed: 3", "a: 1", "a: 1; seed: x", "a: \xff; seed: 3"]
)
def test_bad_lines_are_refused(tmp_path, text):
    (tmp_path / "cases.txt").write_text(text, encoding="latin-1")
    with pytest.raises(CaseFileError, match="cases.txt"):
        cases.read_case_lines(tmp_path / "cases.txt")


@pytest.mark.parametrize("text", ["[", "1", "name: x", "{name: x, summary: y, tests: [{a: 1}], benchmarks: []}",
                                  "{name: x, summary: y, tests: [], benchmarks: [], ranking_by: last}", "name: \xff"])  # fmt: skip
def test_bad_problem_files_are_refused(tmp_path, text):
    (tmp_path / "x.yml").write_text(text, encoding="latin-1")
    with pytest.raises(CaseFileError, match="x.yml"):
        cases.read_problem(tmp_path / "x.yml")


def test_seeds_are_combined_into_new_ones():
    combined = {cases.combined_seed(a, b) for a in range(30) for b in range(30)}
    assert len(combined) == 900


# ---- for other tools


def test_popcorn_lines_of_a_test(leaderboard, tmp_path):
    (tmp_path / "cases.txt").write_text(f"{TINY}\n{TINY}; world_size: 2")
    code, text, lines = leaderboard("run", "all2all", "torch_sort", "--ranks", 2, "--cases", tmp_path / "cases.txt")
    assert code == 0, text
    assert lines == {
        "test-count": "2",
        "test.0.spec": f"{TINY}; world_size: 2",
        "test.0.status": "pass",
        "test.1.spec": f"{TINY}; world_size: 2",
        "test.1.status": "pass",
        "check": "pass",
    }


def test_popcorn_lines_of_a_leaderboard_run(leaderboard, tmp_path):
    (tmp_path / "cases.txt").write_text(TINY)
    how = ("--cases", tmp_path / "cases.txt", "--mode", "leaderboard", "--shortened", 0.05)
    code, text, lines = leaderboard("run", "all2all", "torch_sort", *how, POPCORN_GPUS="2", POPCORN_SEED="9")
    assert code == 0, text
    assert lines["benchmark-count"] == "1" and lines["check"] == "pass"
    assert lines["benchmark.0.spec"].endswith(f"seed: {cases.combined_seed(3, 9)}; world_size: 2")
    times = {name: float(lines[f"benchmark.0.{name}"]) for name in ("mean", "std", "err", "best", "worst")}
    assert 0 < times["best"] <= times["mean"] <= times["worst"] and int(lines["benchmark.0.runs"]) >= 3
    assert re.search(r"^score .* us, the null submission .* us, shortened to 0.05 s per case$", text, re.MULTILINE)


def test_text_that_stdout_cannot_encode(tmp_path):
    """Regression: UnicodeEncodeError in the harness, and in a submission that printed."""
    submission = contest_cases.changed(
        tmp_path, "def custom_kernel(data):\n    print('caf\u00e9')\n    raise ValueError('na\u00efve \\udcff')\n"
    )
    (tmp_path / "cases.txt").write_text(TINY)
    command = [sys.executable, "-m", "moe_a2a", "leaderboard", "run", "all2all", submission]
    with open(tmp_path / "lines.txt", "wb") as lines:
        ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "POPCORN_FD": str(lines.fileno())}
        done = subprocess.run(
            [*command, "--ranks", "2", "--cases", tmp_path / "cases.txt"],
            env={**os.environ, **ascii_only}, pass_fds=[lines.fileno()], capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    assert done.returncode == 112 and "Traceback" not in done.stderr, done.stderr
    assert "caf\\xe9\n" in done.stdout and "raised ValueError: na\\xefve \\udcff\n" in done.stdout, done.stdout
    assert "ValueError: na\u00efve \\udcff\n" in (tmp_path / "lines.txt").read_text("utf-8")


def test_exit_codes(leaderboard, tmp_path):
    (tmp_path / "cases.txt").write_text(TINY)
    (tmp_path / "submission.py").write_text("def custom_kernel(data):\n    return data[1].x\n")
    ours = (tmp_path / "submission.py", "--ranks", 2, "--cases", tmp_path / "cases.txt")
    code, text, lines = leaderboard("run", "all2all", *ours)
    assert code == 112 and lines["check"] == "fail" and lines["test.0.error"].startswith("wrong: rank 0: ")
    # Like the public evaluator: the tool that reads the lines finds the failure there.
    code, text, lines = leaderboard("run", "all2all", *ours, "--mode", "leaderboard")
    assert code == 0 and lines["check"] == "fail" and lines["benchmark.0.status"] == "fail"
    (tmp_path / "cases.txt").write_text(TINY + "\n\n")
    code, text, lines = leaderboard("run", "all2all", *ours)
    assert code == 113 and "is not `name: value`" in text and lines == {}


@pytest.mark.parametrize(
    "was, now, words",
    [
        ("num_experts: 8", "num_experts: 9", "num_experts=9 is not divisible by world_size=2"),
        ("num_experts: 8", "num_experts: many", "num_experts=many; pass an integer from 1"),
        ("experts_per_token: 2", "experts_per_token: 20", "experts_per_token=20 > num_experts=8"),
        ("hidden_dim", "hidden", "no hidden_dim; pass an integer from 1"),
        ("hidden_dim: ", "hidden_dim: -", "; pass an integer from 1"),
        ("max_num_tokens: ", "extra: 3; max_num_tokens: ", "extra=3: unknown; a case has num_experts"),
        ("seed: 3", "seed: 3; seed: 4", ":1: seed is given twice"),
        ("seed: 3", "seed: 99999999999", "seed=99999999999 is not in [0, 2147483647]"),
        ("seed: 3", f"seed: {'9' * 5000}", ":1: seed has 5000 characters, 20 at most"),
    ],
)
def test_cases_that_cannot_be_used(leaderboard, tmp_path, was, now, words):
    assert was in TINY
    (tmp_path / "cases.txt").write_text(TINY.replace(was, now))
    code, text, lines = leaderboard("run", "all2all", "null", "--ranks", 2, "--cases", tmp_path / "cases.txt")
    assert code == 113 and words in text and lines == {}, text


def test_a_case_that_does_not_fit_into_memory(leaderboard, monkeypatch, tmp_path):
    """Regression: a traceback, which did not name the case."""
    monkeypatch.setattr(All2All, "make_inputs", lambda *arguments: {"x": torch.empty(1 << 60)})
    (tmp_path / "cases.txt").write_text(TINY)
    code, text, _ = leaderboard("run", "all2all", "null", "--ranks", 1, "--cases", tmp_path / "cases.txt")
    assert code == 2 and f"{TINY}; world_size: 1: its tensors do not fit into this machine's memory" in text, text


def test_a_descriptor_that_can_only_be_read(monkeypatch, capsys, tmp_path):
    (tmp_path / "empty").touch()
    with open(tmp_path / "empty") as file:
        monkeypatch.setenv("POPCORN_FD", str(file.fileno()))
        assert main(["leaderboard", "run", "all2all", "null"]) == 111
    assert "it can only be read" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "x", "-1", "1000", "9" * 30])
def test_what_is_no_descriptor(monkeypatch, capsys, text):
    """Regression: a traceback, for a number that no C integer holds."""
    monkeypatch.setenv("POPCORN_FD", text)
    assert main(["leaderboard", "run", "all2all", "null"]) == 111
    assert "POPCORN_FD is no open descriptor" in capsys.readouterr().err


def test_stdout_as_the_descriptor(tmp_path):
    """Regression: it was closed before it was flushed: no last line, and "Bad file descriptor" instead of success."""
    (tmp_path / "cases.txt").write_text(TINY)
    command = [sys.executable, "-m", "moe_a2a", "leaderboard", "run", "all2all", "torch_sort", "--ranks", "2"]
    environment = {**os.environ, "POPCORN_FD": "1", "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        [*command, "--cases", tmp_path / "cases.txt"], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and "Bad file" not in done.stderr, done.stderr
    assert "\ncheck: pass\n" in done.stdout and done.stdout.endswith(": passed\n"), done.stdout


def test_a_folder_with_other_files(leaderboard, tmp_path):
    """Refused before anything is measured, and only for a file that the report would replace."""
    (tmp_path / "package.json").write_text("{}")
    (tmp_path / "all2all.json").write_text("{}")
    code, text, _ = leaderboard("rank", "all2all", "torch_sort", "--out", tmp_path)
    assert code == 2 and "all2all.json is not a ranking" in text and "package" not in text and "--" not in text


def test_bad_options_are_refused_before_anything_starts(leaderboard, tmp_path):
    for arguments, words in [
        (("run", "all2all", "nobody"), "no such file or entry of all2all; the entries are expert_parallel"),
        (("run", "all3all", "null"), "invalid choice"),
        (("run", "all2all", "null", "--cases", tmp_path / "none.txt"), "No such file"),
        (("run", "all2all", "null", "--ranks", "0"), "not an integer from 1 to 64"),
        (("rank", "all2all", "null", "null", "--out", tmp_path), "null.py is given twice; pass it once"),
        (("run", "all2all", "a" * 300), "File name too long"),
        (("run", "all2all", "/etc/passwd"), "not a Python file; pass a submission.py"),
        (("run", "all_reduce", "../all2all/torch_sort"), "no such file or entry of all_reduce"),
    ]:
        code, text, _ = leaderboard(*arguments)
        assert code == 2 and words in text, text


def test_a_trace_in_a_folder_that_cannot_be_written(leaderboard, monkeypatch):
    """Regression: the verdict "raised", as if it were the submission's fault."""
    monkeypatch.chdir("/proc")
    code, text, _ = leaderboard("run", "all2all", "torch_sort", "--mode", "profile", "--ranks", 2)
    assert code == 2 and "--out: '.' cannot be written" in text, text


def test_a_submission_may_import_files_beside_it(tmp_path):
    """Regression: only if the command ran in the submission's own folder."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kernels_of_mine.py").write_text(contest_cases.TORCH_SORT.read_text())
    (tmp_path / "mine" / "submission.py").write_text("from kernels_of_mine import custom_kernel\n")
    result = contest().run("test", tmp_path / "mine" / "submission.py")
    assert result.passed, result.cases[0].message


def test_a_file_that_is_no_submission_says_why_once(leaderboard, tmp_path):
    (tmp_path / "submission.py").write_text("kernel = None\n")
    (tmp_path / "cases.txt").write_text(f"{TINY}\n{TINY}\n")
    code, text, _ = leaderboard(
        "run", "all2all", tmp_path / "submission.py", "--ranks", 2, "--cases", tmp_path / "cases.txt"
    )
    why = r"raised: rank \d raised SubmissionError: submission\.py has no function custom_kernel\(data\)"
    assert code == 112 and len(re.findall(why, text)) == 2, text
    assert text.count("Traceback") == 2, "each rank's, of the first case"
