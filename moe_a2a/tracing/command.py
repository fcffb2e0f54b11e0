"""`python -m moe_a2a trace FILE`: summarises, checks or plots a trace file without a browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_a2a.commands.command_line import UsageError, output_file
from moe_a2a.errors import TraceFileError
from moe_a2a.tracing.check import check_file
from moe_a2a.tracing.file_timeline import to_timeline
from moe_a2a.tracing.plot import ENDINGS, save_plot
from moe_a2a.tracing.reading import read
from moe_a2a.tracing.summary import summarize
from moe_a2a.tracing.trace_file import TraceFile

HELP = "summarise, check or plot a trace file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="what Trace.save() wrote, in either format")
    parser.add_argument("--summary", action="store_true", help="print the trace in numbers (the default)")
    parser.add_argument("--check", action="store_true", help="verify that the file is consistent")
    parser.add_argument(
        "--plot",
        type=_picture,
        nargs="?",
        const="trace.png",
        metavar="PICTURE",
        help=f"draw the wait matrix and each rank's time, as {', '.join(ENDINGS)} (default: trace.png)",
    )


def _picture(text: str) -> Path:
    if Path(text).suffix.lower() not in ENDINGS:
        raise argparse.ArgumentTypeError(f"{text!r}: pass a path that ends in one of {', '.join(ENDINGS)}")
    return output_file(text)


def run(options: argparse.Namespace) -> int:
    try:
        return _run(options, _read(options.file))
    except TraceFileError as error:
        raise UsageError(str(error)) from None


def _read(path: Path) -> TraceFile:
    try:
        return read(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def _run(options: argparse.Namespace, file: TraceFile) -> int:
    failed = False
    if options.check:
        problems = check_file(file)
        failed = bool(problems)
        print("\n".join(problems) or f"{options.file}: {len(file.slices)} slices, {len(file.sources)} arrows, all good")
    if options.plot:
        reason = save_plot(options.plot, to_timeline(file))
        failed |= reason is not None
        print(reason or f"wrote {options.plot}")
    if options.summary or not (options.check or options.plot):
        print(summarize(to_timeline(file)))
    return int(failed)
