"""`python -m moe_a2a leaderboard`: run, check, rank and explain submissions to distributed kernel problems.

It follows the contract of the public amd_distributed problems: a submission.py with custom_kernel(data), a process per rank, a
process group per case. See docs/leaderboard.md.

contest.py runs the cases of a mode; modes.py defines what a mode calls; trial.py holds the inputs and checks of a case; ranks.py
starts the processes, which run rank_program.py. problems/ and submissions/ hold what is run.
"""

from __future__ import annotations

import argparse
from importlib import import_module

HELP = "run, check and rank submissions to distributed kernel problems"
COMMANDS = ("list", "run", "rank")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="what")
    for name in COMMANDS:
        command = import_module(f"moe_a2a.leaderboard.{name}_command")
        subparser = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        subparser.set_defaults(run_leaderboard=command.run)


def run(options: argparse.Namespace) -> int:
    try:
        import yaml  # noqa: F401
    except ImportError:
        print("leaderboard: PyYAML is not installed (pip install 'moe_a2a[leaderboard]')")
        return 1
    return options.run_leaderboard(options)
