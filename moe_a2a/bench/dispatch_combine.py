"""`python -m moe_a2a bench dispatch_combine`: dispatch and combine beside the floor and the peers, in one run.

By itself it starts a process per rank; under torchrun it is the rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_a2a import devices
from moe_a2a.bench import machine, routings, run_case, suites, table
from moe_a2a.bench.clock import Measuring
from moe_a2a.bench.contenders import MODES
from moe_a2a.bench.records import Results
from moe_a2a.rank_processes import RankError, run_on_ranks

HELP = "time dispatch and combine beside the floor and the peers"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured")
    what.add_argument("--suite", choices=("full", "cpu"), help="a fixed set of cases instead of the options below")
    what.add_argument("--tokens", type=integers, default=[128], metavar="1,2,...", help="of each rank (default: 128)")
    what.add_argument("--hidden", type=int, default=7168)
    what.add_argument("--topk", type=int, default=8)
    what.add_argument("--experts", type=int, default=256)
    what.add_argument("--dtype", type=_dtypes, default=[torch.bfloat16], metavar="TYPE,...", help=", ".join(DTYPES))
    what.add_argument("--modes", type=_one_of(MODES), default=["rows", "fp8+presummed"], metavar="MODE,...",
                      help=", ".join(MODES))  # fmt: skip
    what.add_argument("--routing", type=_routings, default=["uniform"], metavar="NAME,...",
                      help=", ".join(routings.NAMES))  # fmt: skip
    what.add_argument("--blocks", type=integers, default=[0], metavar="8,16,...", help="of each call (0: as tuned)")
    what.add_argument("--halves", action="store_true", help="also dispatch_send ... combine_recv, each by itself")
    what.add_argument("--graph", action="store_true", help="also captured graphs")
    what.add_argument("--overlap", action="store_true", help="also a matrix product between the halves")
    what.add_argument("--peers", type=_one_of(run_case.PEERS, none=True), default=list(run_case.PEERS),
                      metavar="NAME,...", help=f"{', '.join(run_case.PEERS)}, or none (default: all)")  # fmt: skip
    add_how(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--results", type=Path, metavar="DIR", help="write DIR/<gpu>_<ranks>/dispatch_combine.json")


def add_how(parser: argparse.ArgumentParser) -> None:
    """Options of every command that measures."""
    how = parser.add_argument_group("how it is measured")
    how.add_argument("--ranks", type=int, help="processes to start (default: one per GPU, or 4 on the CPU)")
    how.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU per rank if there is one")
    how.add_argument("--iterations", type=int, default=30, help="default: 30")
    how.add_argument("--warm-up", type=int, default=5, help="iterations before (default: 5)")
    how.add_argument(
        "--flush", action="store_true", help="write 256 MiB before each step: nothing is left in the cache"
    )
    how.add_argument("--seed", type=int, default=1, help="of routing and data (default: 1)")
    how.add_argument("--timeout", type=float, default=1200, help="seconds that the ranks may take (default: 1200)")


def run(options: argparse.Namespace) -> int:
    if options.suite == "cpu":
        options.device = "cpu"
    return start_ranks(options, rank_main, "bench")


def start_ranks(options: argparse.Namespace, main: Any, name: str) -> int:
    """main(report, options) on every rank; the exit code of rank 0."""
    device_type = options.device = options.device or devices.default_device_type()
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # torchrun has started us
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend)
        code = main(lambda text: None, options)
        dist.destroy_process_group()
        return code
    num_ranks = options.ranks or (torch.cuda.device_count() if device_type == "cuda" else 4)
    try:
        return run_on_ranks(num_ranks, main, options, timeout=options.timeout, backend=backend)[0]
    except RankError as error:
        print(error.traceback, file=sys.stderr)
        print(f"{name}: FAILED {error}")
        return 1


def this_ranks_device(options: argparse.Namespace) -> torch.device:
    if options.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    torch.cuda.set_device(device)
    return device


def rank_main(report: Any, options: argparse.Namespace) -> int:
    device = this_ranks_device(options)
    how = Measuring(options.iterations, options.warm_up, options.flush)
    about = machine.about(device, dist.get_world_size())
    about |= {"seed": options.seed, "cache": "flushed" if how.flush else "warm", "iterations": how.iterations}
    results = Results(about)
    is_first = dist.get_rank() == 0
    start = time.monotonic()
    for plan in suites.plans(options):
        for case in plan.cases:
            run_case.run(case, plan, how, device, results)
            if is_first:
                print(f"{time.monotonic() - start:6.1f} s  [{plan.part}] {case}", file=sys.stderr, flush=True)
                _write(results, options)  # after each case: what is measured is not lost
    if is_first:
        print(table.text(results), flush=True)
    dist.barrier()
    return 1 if any(line["what"].startswith("moe_a2a") for line in results.left_out) else 0


def _write(results: Results, options: argparse.Namespace) -> None:
    paths = [options.json] if options.json else []
    if options.results:
        paths.append(options.results / results.about["name"] / "dispatch_combine.json")
    for path in paths:
        results.write(path)


# ---- options


def integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _dtypes(text: str) -> list[torch.dtype]:
    return [DTYPES[name] for name in _one_of(DTYPES)(text)]


def _routings(text: str) -> list[str]:
    try:
        return [routings.checked(name) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _one_of(names: Any, none: bool = False) -> Any:
    def parse(text: str) -> list[str]:
        if none and text == "none":
            return []
        unknown = [name for name in text.split(",") if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: unknown; pass some of {', '.join(names)}")
        return text.split(",")

    return parse
