"""`python -m moe_a2a bench`: what dispatch and combine cost here, and pictures of it. See docs/tuning.md."""

from __future__ import annotations

import argparse
from importlib import import_module

HELP = "measure dispatch and combine on this machine; draw results"
BENCHES = {
    "dispatch_combine": "time dispatch and combine beside the floor and the baselines",
    "plot": "draw results",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(required=True, metavar="what")
    for name, text in BENCHES.items():
        bench = import_module(f"moe_a2a.bench.{name}")
        subparser = benches.add_parser(name, help=text, description=text)
        bench.add_arguments(subparser)
        subparser.set_defaults(run_bench=bench.run)


def run(options: argparse.Namespace) -> int:
    return options.run_bench(options)
