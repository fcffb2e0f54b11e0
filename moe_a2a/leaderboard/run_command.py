"""`python -m moe_a2a leaderboard run PROBLEM SUBMISSION`: one mode of one submission."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from pathlib import Path

from moe_a2a.commands.command_line import UsageError, output_folder
from moe_a2a.leaderboard import options as shared
from moe_a2a.leaderboard import popcorn
from moe_a2a.leaderboard.cases import CaseFileError
from moe_a2a.leaderboard.contest import CHECKED, TIMED, Contest, ModeResult
from moe_a2a.leaderboard.modes import CaseResult
from moe_a2a.leaderboard.problems import make
from moe_a2a.leaderboard.verdicts import MEANINGS

HELP = "run one mode of one submission"
LINES_OF_RANK = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_problem(parser)
    parser.add_argument("submission", metavar="SUBMISSION", help="a submission.py, or the name of an entry in the tree")
    parser.add_argument(
        "--mode",
        choices=[*CHECKED, *TIMED, "profile"],
        default="test",
        help="test: one call per test. benchmark: many calls on the same data. leaderboard: new data from a secret seed in "
        "each call. pressure: no barrier between calls. lone_call: rank 0 alone. profile: a trace of each benchmark. Default: test",
    )
    parser.add_argument(
        "--out", type=output_folder, default=Path("."), metavar="DIR", help="where traces go (default: .)"
    )
    parser.add_argument("--cases", type=Path, metavar="FILE", help="cases instead of the problem's, one per line")
    shared.add_how(parser)


def run(options: argparse.Namespace) -> int:
    try:
        out = popcorn.Popcorn.of_environment()
    except (OSError, ValueError, OverflowError) as error:
        print(f"leaderboard: POPCORN_FD is no open descriptor: {error}", file=sys.stderr)
        return popcorn.NO_DESCRIPTOR
    with contextlib.closing(out):
        return _run(options, out)


def _run(options: argparse.Namespace, out: popcorn.Popcorn) -> int:
    try:
        contest = shared.contest_of(options)
        check_cases(contest, options.mode)
    except CaseFileError as error:
        print(f"leaderboard: {error}", file=sys.stderr)
        return popcorn.BAD_CASES
    except OSError as error:
        raise UsageError(f"{options.cases}: {error.strerror}") from None
    submission = shared.submission_path(contest.problem, options.submission)
    if options.mode == "profile":  # the default is no string, so argparse has not checked it, and no other mode writes
        _check_folder(options.out)
    out.count(options.mode, len(contest.cases_of(options.mode)))

    printed = set[str]()  # details: a file that cannot be imported fails alike in every case

    def on_case(number: int, result: CaseResult) -> None:
        out.case(options.mode, number, result)
        print(f"{result.case.label:<32} {line_of(result, result.details not in printed)}", flush=True)
        printed.add(result.details)

    if options.mode == "profile":
        with contest.ranks_of(submission) as ranks:
            result = contest.profile(ranks, contest.cases_of("profile"), options.out, submission.stem, on_case)
    else:
        result = contest.run(options.mode, submission, on_case)
    out.check(result.passed)
    print_end(contest, result)
    return popcorn.exit_code(options.mode, result.passed, out)


def _check_folder(path: Path) -> None:
    try:
        output_folder(path)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--out: {error}") from None


def check_cases(contest: Contest, mode: str) -> None:
    """Called before any process starts."""
    for case in contest.cases_of(mode):
        if case["world_size"] != contest.num_ranks:
            raise CaseFileError(
                f"{case.spec}: world_size={case['world_size']}, but there are {contest.num_ranks} ranks; pass --ranks "
                f"{case['world_size']} or leave world_size out"
            )
        try:
            make(contest.problem.name).check_case(case)
        except CaseFileError as error:
            raise CaseFileError(f"{case.spec}: {error}") from None


def line_of(result: CaseResult, with_details: bool = True) -> str:
    """A case's line in the terminal."""
    if not result.passed:
        details = _shown(result.details) if with_details else []
        return "\n".join([f"{result.verdict}: {result.message}", *details])
    if result.summary:
        return f"{result.trace_file}\n{result.summary}"
    if result.nanoseconds:
        stats = result.stats
        return f"{stats.mean / 1e3:12.1f} us +- {stats.err / 1e3:.1f}, best {stats.best / 1e3:.1f}, {stats.runs} runs"
    if result.shared_bytes >= 0:
        return (
            f"pass   {result.collective_bytes} bytes through torch.distributed, {result.shared_bytes} of shared pages"
        )
    return "pass"


def _shown(details: str) -> list[str]:
    """For each rank, the end of its traceback, or the innermost calls of its stack, which come first."""
    shown: list[str] = []
    for of_rank in re.split(r"(?m)^(?=--- rank \d+ ---$)", details):
        stack = of_rank.find("Current thread")
        if stack < 0:
            shown += of_rank.splitlines()[-LINES_OF_RANK:]
        else:
            shown += [*of_rank.splitlines()[:1], *of_rank[stack:].splitlines()[:LINES_OF_RANK]]
    return shown


def print_end(contest: Contest, result: ModeResult) -> None:
    if not result.passed:
        failed = {case.verdict for case in result.cases if not case.passed}
        print("\n".join(f"{verdict}: {MEANINGS[verdict]}" for verdict in sorted(failed)))
    elif result.nulls:
        print(f"score {result.score_ns / 1e3:.1f} us, the null submission {result.null_score_ns / 1e3:.1f} us", end="")
        print(f", shortened to {contest.shortened:g} s per case" if contest.shortened else "")
    print(f"leaderboard: {contest.problem.name}, {result.mode}, {contest.num_ranks} ranks on {contest.device_type}, "
          f"seed {contest.secret}: {'passed' if result.passed else 'FAILED'}")  # fmt: skip
