"""`python -m moe_a2a bench plot FILE...`: pictures of results."""

from __future__ import annotations

import argparse

HELP = "draw results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    return 0
