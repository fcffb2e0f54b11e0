"""`python -m moe_a2a tune [dispatch_combine | collectives]`: measures the best choices on this machine and writes their table, or
prints the table in effect."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from moe_a2a.bench import machine
from moe_a2a.bench.clock import Clock, Measuring
from moe_a2a.bench.options import DTYPES, add_how, add_sizes
from moe_a2a.bench.start import num_ranks_of, start_ranks, this_ranks_device
from moe_a2a.commands.command_line import UsageError, integers, output_file
from moe_a2a.commands.rank_options import device_type_of
from moe_a2a.tables import collective_tables, launch_tables, tuned_files
from moe_a2a.tune import collectives, dispatch_combine

HELP = "measure the best number of blocks per call, or print the table in effect"
# (what measures a table, what reads and writes it)
TABLES = {"dispatch_combine": (dispatch_combine, launch_tables), "collectives": (collectives, collective_tables)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=tuple(TABLES), default="dispatch_combine",
                        help="which table (default: dispatch_combine)")  # fmt: skip
    parser.add_argument("--print", action="store_true", dest="only_print", help="show the table in effect here")
    parser.add_argument("--tokens", type=integers(1), default=dispatch_combine.TOKENS, metavar="1,2,...",
                        help="dispatch_combine: tokens per rank (default: powers of two from 1 to 8192)")  # fmt: skip
    parser.add_argument("--sizes", type=integers(1), default=collectives.SIZES, metavar="8192,...",
                        help="collectives: bytes of the whole tensor (default: 1 KiB to 128 MiB)")  # fmt: skip
    parser.add_argument("--blocks", type=integers(1), metavar="8,16,...",
                        help="numbers of blocks to try (default: up to all multiprocessors)")  # fmt: skip
    add_sizes(parser)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="where to write the table (default: the user's cache directory, where it is found automatically)")  # fmt: skip
    add_how(parser)


def run(options: argparse.Namespace) -> int:
    tuning, files = TABLES[options.what]
    tuning.check(options)
    try:
        if options.only_print:
            device, num_ranks = torch.device(device_type_of(options)), num_ranks_of(options)
            print(f"{num_ranks} ranks on {device.type}{tuning.in_effect(options, device, num_ranks)}")
            return 0
        output_file(options.output or tuned_files.OWN / "table.json")
        if options.output and options.output.exists():  # what is measured is merged into it
            files.read(options.output)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{error}; pass --output with a file that can be written") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    return start_ranks(options, rank_main, "tune")


def rank_main(options: argparse.Namespace) -> int:
    device, num_ranks = this_ranks_device(options), dist.get_world_size()
    tuning, files = TABLES[options.what]
    measured = tuning.measure(options, device, Clock(device, Measuring.of(options)))
    code = 0
    if dist.get_rank() == 0:
        path, lines = options.output or files.own_file(device, num_ranks), [tuning.text(measured)]
        try:
            files.write(path, machine.about(device) | tuning.about(options), measured)
            lines.append(f"tune: {path}")
        except OSError as error:  # a full disk
            print(f"tune: {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            code = 1
        print("\n".join(lines), flush=True)
    dist.barrier()
    return code
