"""Options that the measuring commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from moe_a2a.arguments import MAX_RANKS
from moe_a2a.bench import routings
from moe_a2a.commands.command_line import integer, output_file, output_folder, seconds
from moe_a2a.files import replaced_files

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_ITERATIONS = 1_000_000  # the time of each is kept


def add_sizes(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=integer(1), default=7168, help="values per row (default: 7168)")
    parser.add_argument("--topk", type=integer(1), default=8, help="experts per token (default: 8)")
    parser.add_argument("--experts", type=integer(1), default=256, help="experts of all ranks (default: 256)")


def add_how(parser: argparse.ArgumentParser) -> None:
    """Options of every command that measures."""
    how = parser.add_argument_group("how it is measured")
    how.add_argument(
        "--ranks", type=integer(1, MAX_RANKS), help="processes to start (default: one per GPU, or 4 on the CPU)"
    )
    how.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU per rank if there is one")
    how.add_argument("--iterations", type=integer(1, MAX_ITERATIONS), default=30, help="timed iterations (default: 30)")
    how.add_argument("--warm-up", type=integer(0, MAX_ITERATIONS), default=5, help="warm-up iterations (default: 5)")
    how.add_argument("--flush", action="store_true", help="flush the cache before each step by writing 256 MiB")
    how.add_argument("--seed", type=integer(0), default=1, help="seed of the inputs (default: 1)")
    how.add_argument("--timeout", type=seconds, default=1200, help="seconds that the ranks may take (default: 1200)")


def add_outputs(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results here")
    parser.add_argument("--results", type=output_folder, metavar="DIR", help=f"write DIR/<gpu>_<ranks>/{kind}.json")


def write_outputs(options: argparse.Namespace, machine: str, text: str) -> bool:
    """Writes the files that add_outputs() named. machine: the name of GPU and number of ranks. False: see is_written()."""
    paths = [options.json] if options.json else []
    if options.results:
        paths.append(options.results / machine / f"{options.kind}.json")
    return all([is_written(path, text) for path in paths])


def is_written(path: Path, text: str) -> bool:
    """Whether the file could be written. Else stderr says why, and the run goes on: its other ranks wait for this one, and
    its figures are printed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replaced_files.write_text(path, text)
    except OSError as error:
        print(f"bench: {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return False
    return True


def dtypes(text: str) -> list[torch.dtype]:
    return [DTYPES[name] for name in some_of(DTYPES)(text)]


def routing_names(text: str) -> list[str]:
    try:
        return [routings.checked(name) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def some_of(names: Iterable[str], or_none: bool = False) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        if or_none and text == "none":
            return []
        unknown = [name for name in text.split(",") if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: unknown; pass one or more of {', '.join(names)}")
        return text.split(",")

    return parse
