"""Options that the subcommands share, and their evaluation."""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path

import torch

from moe_a2a.arguments import MAX_RANKS
from moe_a2a.commands.command_line import UsageError, integer, seconds
from moe_a2a.commands.rank_options import device_type_of, num_processes
from moe_a2a.leaderboard import cases, loading, problems
from moe_a2a.leaderboard.contest import Contest


def add_problem(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", choices=cases.problem_names(), metavar="PROBLEM", help="see `leaderboard list`")


def add_how(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how it is run")
    how.add_argument(
        "--ranks",
        type=integer(1, MAX_RANKS),
        help="world size: processes to start (default: POPCORN_GPUS, else one per GPU, or 4 on the CPU)",
    )
    how.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU per rank if there is one")
    how.add_argument("--seed", type=integer(0), help="repeat the run that printed this seed")
    how.add_argument("--limit", type=seconds, help="seconds that a call may take (default: the problem's, 60 or 180)")
    how.add_argument(
        "--shrunk",
        type=integer(1),
        metavar="DIVISOR",
        help="divide the sizes of matrix products, for machines that are too slow for the published shapes; the report says so",
    )
    how.add_argument(
        "--shortened",
        type=seconds,
        metavar="SECONDS",
        help="stop timing a case after this many seconds of calls, not the contract's 10 (benchmark) or 30 (leaderboard); "
        "shapes stay as they are, and the report says so",
    )


def contest_of(options: argparse.Namespace) -> Contest:
    """Raises CaseFileError if cases are unusable, UsageError for everything else."""
    torch.set_num_threads(1)  # this process checks outputs; the cores belong to the ranks
    device_type = device_type_of(options)
    problem = problems.file_of(options.problem)
    if getattr(options, "cases", None) is not None:
        lines = cases.read_case_lines(options.cases)
        problem = dataclasses.replace(problem, tests=lines, benchmarks=lines)
    if options.shrunk and not problem.shrinkable:
        raise UsageError(f"--shrunk: the shapes of {problem.name} are small enough for any machine")
    problem = _with_all_cases(problem, lambda case: cases.shrunk(case, problem.shrinkable, options.shrunk or 1))
    other = os.environ.get("POPCORN_SEED")
    if other:
        number = _popcorn_seed(other)
        problem = _with_all_cases(
            problem, lambda case: case.with_values(seed=cases.combined_seed(case["seed"], number))
        )
    secret = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    num_ranks = _num_ranks(options, device_type)
    return Contest(problem, num_ranks, device_type, secret, options.shortened, options.limit, options.shrunk)


def submission_path(problem: cases.ProblemFile, text: str) -> Path:
    """A file, or the name of an entry in the tree."""
    try:
        path = Path(text) if Path(text).is_file() else loading.entry_path(problem.entries or problem.name, text)
    except OSError as error:
        raise UsageError(f"{text}: {error.strerror}") from None
    if path is not None and path.suffix != ".py":
        raise UsageError(f"{text}: not a Python file; pass a submission.py")
    if path is None:
        names = ", ".join(loading.entry_names(problem.entries or problem.name))
        raise UsageError(f"{text}: no such file or entry of {problem.name}; the entries are {names}, null")
    return path.parent.resolve() / path.name  # a link keeps its own name


def _num_ranks(options: argparse.Namespace, device_type: str) -> int:
    wanted = options.ranks
    if wanted is None and "POPCORN_GPUS" in os.environ:
        try:
            wanted = integer(1, MAX_RANKS)(os.environ["POPCORN_GPUS"])
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"POPCORN_GPUS: {error}") from None
    return num_processes(wanted, device_type)


def _with_all_cases(problem: cases.ProblemFile, change: Callable[[cases.Case], cases.Case]) -> cases.ProblemFile:
    tests, benchmarks = ([change(case) for case in of_kind] for of_kind in (problem.tests, problem.benchmarks))
    return dataclasses.replace(problem, tests=tests, benchmarks=benchmarks)


def _popcorn_seed(text: str) -> int:
    try:
        return integer(0, cases.MOST_SEED)(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"POPCORN_SEED: {error}") from None
