"""`python -m moe_a2a bench dispatch_combine`: dispatch and combine beside the floor and the baselines, in one run.

Starts a process per rank; under torchrun it is a rank itself.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.distributed as dist

from moe_a2a.bench import machine, routings, run_case, suites, table
from moe_a2a.bench.clock import Measuring
from moe_a2a.bench.contenders import MODES
from moe_a2a.bench.options import DTYPES, add_how, add_outputs, add_sizes, dtypes, routing_names, some_of, write_outputs
from moe_a2a.bench.records import Results
from moe_a2a.bench.start import check_cases, check_graphs, start_ranks, this_ranks_device
from moe_a2a.commands.command_line import integers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured")
    what.add_argument("--suite", choices=("full", "cpu"), help="a fixed set of cases instead of the options below")
    what.add_argument(
        "--tokens", type=integers(1), default=[128], metavar="1,2,4,...,64", help="tokens per rank (default: 128)"
    )
    add_sizes(what)
    what.add_argument("--dtype", type=dtypes, default=[torch.bfloat16], metavar="TYPE,...",
                      help=f"{', '.join(DTYPES)} (default: bfloat16)")  # fmt: skip
    what.add_argument("--modes", type=some_of(MODES), default=["rows", "fp8+presummed"], metavar="MODE,...",
                      help=f"{', '.join(MODES)} (default: rows,fp8+presummed)")  # fmt: skip
    what.add_argument("--routing", type=routing_names, default=["uniform"], metavar="NAME,...",
                      help=f"{', '.join(routings.NAMES)} (default: uniform)")  # fmt: skip
    what.add_argument("--blocks", type=integers(0), default=[0], metavar="8,16,24,...,96",
                      help="blocks per call (default: 0, as the launch table says)")  # fmt: skip
    what.add_argument(
        "--halves",
        action="store_true",
        help="also time dispatch_send, dispatch_recv, combine_send and combine_recv, each alone",
    )
    what.add_argument("--graph", action="store_true", help="also replay dispatch and combine as captured graphs (GPU)")
    what.add_argument(
        "--chain", action="store_true", help="also time ten pairs of dispatch and combine in one captured graph (GPU)"
    )
    what.add_argument("--overlap", action="store_true", help="also run a matrix product between the halves of a call")
    what.add_argument("--baselines", type=some_of(run_case.BASELINES, or_none=True), default=list(run_case.BASELINES),
                      metavar="NAME,...", help=f"{', '.join(run_case.BASELINES)}, or none (default: all)")  # fmt: skip
    add_how(parser)
    add_outputs(parser, "dispatch_combine")


def run(options: argparse.Namespace) -> int:
    if options.suite == "cpu":
        options.device = "cpu"
    check_graphs(options, "graph", "chain")
    check_cases([case for plan in suites.plans(options) for case in plan.cases], options)
    return start_ranks(options, rank_main, "bench")


def rank_main(options: argparse.Namespace) -> int:
    device = this_ranks_device(options)
    how = Measuring.of(options)
    about = machine.about(device)
    about |= {"seed": options.seed, "cache": "flushed" if how.flush else "warm", "iterations": how.iterations}
    results = Results(about)
    is_first, is_written = dist.get_rank() == 0, True
    start = time.monotonic()
    for plan in suites.plans(options):
        for case in plan.cases:
            run_case.run(case, plan, how, device, results)
            if is_first:
                print(f"{time.monotonic() - start:6.1f} s  [{plan.part}] {case}", file=sys.stderr, flush=True)
                # After each case, so that an interrupted run keeps its results.
                is_written = write_outputs(options, about["name"], results.as_json())
    if is_first:
        print(table.text(results), flush=True)
    dist.barrier()
    return 1 if not is_written or any(line["what"].startswith("moe_a2a") for line in results.left_out) else 0
