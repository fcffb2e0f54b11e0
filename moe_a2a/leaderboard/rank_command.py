"""`python -m moe_a2a leaderboard rank PROBLEM SUBMISSION...`: every mode of several submissions, and a report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_a2a.commands.command_line import UsageError, output_folder
from moe_a2a.leaderboard import loading, popcorn, report
from moe_a2a.leaderboard import options as shared
from moe_a2a.leaderboard.cases import CaseFileError
from moe_a2a.leaderboard.contest import Contest
from moe_a2a.leaderboard.modes import CaseResult
from moe_a2a.leaderboard.ranks import SubmissionRanks
from moe_a2a.leaderboard.record import Board, Entry
from moe_a2a.leaderboard.run_command import check_cases, line_of
from moe_a2a.leaderboard.verdicts import PASS

HELP = "run every mode of several submissions, rank them and write a report"
MODES = ("test", "leaderboard", "pressure", "lone_call")  # the first failure ends an entry's run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_problem(parser)
    parser.add_argument(
        "submissions",
        nargs="*",
        metavar="SUBMISSION",
        help="a submission.py, or the name of an entry in the tree (default: all of them)",
    )
    parser.add_argument(
        "--out",
        type=output_folder,
        default="moe_a2a_leaderboard",
        metavar="DIR",
        help="folder of the report and the traces; a page shows all problems in it, and a problem has one ranking, the newest "
        "(default: moe_a2a_leaderboard)",
    )
    shared.add_how(parser)


def run(options: argparse.Namespace) -> int:
    try:
        contest = shared.contest_of(options)
        for mode in MODES:
            check_cases(contest, mode)
    except CaseFileError as error:
        print(f"leaderboard: {error}", file=sys.stderr)
        return popcorn.BAD_CASES
    path = options.out / f"{contest.problem.name}.json"
    if before := report.boards_in(options.out).get(path):  # raises before anything is measured
        print(f"{path}: replaces the ranking of {before.date}; for one beside it, pass another --out", flush=True)
    names = options.submissions or loading.entry_names(contest.problem.entries or contest.problem.name)
    paths = _by_entry_name([shared.submission_path(contest.problem, name) for name in names])

    with contest.null_ranks() as ranks:
        nulls = contest.run_null(ranks, "leaderboard")
        board = Board.of(contest, nulls, contest.measure_link(ranks))
    for name, submission in paths.items():
        with contest.ranks_of(submission) as ranks:
            board.entries.append(_run_entry(contest, name, ranks, nulls, options.out))
        board.write(path)  # after each entry: an interrupted run keeps the rest
        written = report.write_all(options.out)

    for row in report.table(board):
        print("  ".join([f"{row[0]:<20}", *(f"{cell:>22}" for cell in row[1:])]))
    print("\n".join(f"report: {file}" for file in written))
    return popcorn.OK if all(entry.verdict == PASS for entry in board.entries) else popcorn.FAILED


def _by_entry_name(paths: list[Path]) -> dict[str, Path]:
    """The paths by file name, prefixed by the folder's if the file is called submission.py, as most are. A name is one line, for the
    report's tables and headings."""
    named: dict[str, Path] = {}
    for path in paths:
        name = f"{path.parent.name}-{path.stem}" if path.stem == "submission" else path.stem
        name = " ".join(name.split())
        if named.get(name) == path:
            raise UsageError(f"{path} is given twice; pass it once")
        if name in named:
            raise UsageError(f"{path} and {named[name]}: two entries named {name}; rename one")
        named[name] = path
    return named


def _print_case(number: int, result: CaseResult) -> None:
    print(f"{result.case.label:<32} {line_of(result)}", flush=True)


def _run_entry(contest: Contest, name: str, ranks: SubmissionRanks, nulls: list[CaseResult], out: Path) -> Entry:
    entry = Entry(name)
    for mode in MODES:
        print(f"-- {name}: {mode}", flush=True)
        entry.take(contest.run_on(ranks, mode, nulls, _print_case))
        if entry.verdict != PASS:
            return entry
    print(f"-- {name}: profile", flush=True)
    profiled = contest.profile(ranks, contest.cases_of("profile")[-1:], out, name)
    entry.take(profiled)
    of_case = profiled.cases[0]
    entry.profiled_case, entry.summary = of_case.case.label, of_case.summary
    entry.trace_file = Path(of_case.trace_file).name
    return entry
