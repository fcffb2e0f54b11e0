"""`python -m moe_a2a leaderboard list`: the problems and their entries."""

from __future__ import annotations

import argparse
import textwrap

from moe_a2a.leaderboard import cases, loading, problems

HELP = "list the problems, their shapes and the entries in the tree"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", action="store_true", help="also print the shapes of tests and benchmarks")


def run(options: argparse.Namespace) -> int:
    for name in cases.problem_names():
        problem = problems.file_of(name)
        entries = ", ".join(loading.entry_names(problem.entries or name))
        print(f"{name}: {len(problem.tests)} tests, {len(problem.benchmarks)} benchmarks; entries: {entries}")
        print(textwrap.fill(problem.summary, 110, initial_indent="    ", subsequent_indent="    "))
        if options.shapes:
            for kind, shapes in (("test", problem.tests), ("benchmark", problem.benchmarks)):
                print("\n".join(f"    {kind} {shape.spec}" for shape in shapes))
    return 0
