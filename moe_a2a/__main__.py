"""The command line: `python -m moe_a2a <command>`.

A command is a module with HELP, add_arguments(parser) and run(options) -> exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import moe_a2a
from moe_a2a import bench, demo, doctor, leaderboard, tune
from moe_a2a.commands import command_line
from moe_a2a.tracing import command as trace

COMMANDS = {
    "demo": demo,
    "doctor": doctor,
    "bench": bench,
    "leaderboard": leaderboard,
    "tune": tune,
    "trace": trace,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.Parser(
        prog="python -m moe_a2a", description="Expert parallelism for Mixture-of-Experts models."
    )
    parser.add_argument("--version", action="version", version=f"moe_a2a {moe_a2a.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    return command_line.run("moe_a2a", options.run, options)


if __name__ == "__main__":
    sys.exit(main())
