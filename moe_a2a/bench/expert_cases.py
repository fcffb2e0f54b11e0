"""What `bench experts`, `bench layer` and `bench training` share: options, and the loop over their cases."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moe_a2a.bench import machine, routings
from moe_a2a.bench.cases import Case, cases_of
from moe_a2a.bench.clock import Clock, Measuring
from moe_a2a.bench.options import add_how, add_outputs, add_sizes, dtypes, routing_names
from moe_a2a.bench.report import Report
from moe_a2a.bench.start import check_cases, start_ranks, this_ranks_device
from moe_a2a.commands.command_line import UsageError, integer, integers
from moe_a2a.commands.rank_options import device_type_of


def add_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    what = parser.add_argument_group("what is measured")
    what.add_argument("--tokens", type=integers(1), default=[128, 512, 4096, 8192], metavar="128,512,...",
                      help="tokens per rank (default: 128,512,4096,8192)")  # fmt: skip
    add_sizes(what)
    what.add_argument("--intermediate", type=_multiple_of_16, default=2048,
                      help="intermediate size of an expert (default: 2048)")  # fmt: skip
    what.add_argument("--dtype", type=_dtypes, default=[torch.bfloat16], metavar="TYPE,...",
                      help="bfloat16, float16 (default: bfloat16)")  # fmt: skip
    what.add_argument("--routing", type=routing_names, default=["uniform"], metavar="NAME,...",
                      help=f"{', '.join(routings.NAMES)} (default: uniform)")  # fmt: skip
    add_how(parser)
    add_outputs(parser, kind)


def _multiple_of_16(text: str) -> int:
    number = integer(16)(text)
    if number % 16:
        raise argparse.ArgumentTypeError(f"{number} is not a multiple of 16")
    return number


def _dtypes(text: str) -> list[torch.dtype]:
    chosen = dtypes(text)
    if torch.float32 in chosen:
        raise argparse.ArgumentTypeError("float32: the kernels take bfloat16 and float16")
    return chosen


@dataclass(frozen=True)
class CaseColumns:
    """The columns of a line of `bench layer` or `bench training` that say what was measured."""

    tokens: int
    hidden: int
    topk: int
    experts: int
    intermediate: int
    ranks: int
    dtype: str  # of rows and weights


def case_columns(case: Case, intermediate: int, dtype: str) -> dict[str, Any]:
    sizes = {"tokens": case.num_tokens, "hidden": case.hidden, "topk": case.num_topk, "experts": case.num_experts}
    return sizes | {"intermediate": intermediate, "ranks": dist.get_world_size(), "dtype": dtype}


RunCase = Callable[[Case, int, torch.device, Clock, Report], None]  # the int: intermediate


def run(options: argparse.Namespace, header: str, run_case: RunCase, *, copies_of_weights: int = 1) -> int:
    """copies_of_weights: the tensors of their shape that a rank has at the same time, at least."""
    if options.hidden % 16:
        raise UsageError(f"--hidden {options.hidden} is not a multiple of 16, which the kernels need")
    check_cases(cases_of(options), options)
    if device_type_of(options) == "cpu":
        _check_memory(cases_of(options), options.intermediate, copies_of_weights)
    return start_ranks(options, partial(_rank_main, header=header, run_case=run_case), "bench")


def _check_memory(cases: list[Case], intermediate: int, copies: int) -> None:
    for case in cases:
        nbytes = copies * 3 * case.num_experts * intermediate * case.hidden * case.dtype.itemsize
        machine.check_memory("the experts of all ranks", nbytes, "pass smaller --experts, --intermediate or --hidden")


def _rank_main(options: argparse.Namespace, *, header: str, run_case: RunCase) -> int:
    device = this_ranks_device(options)
    clock = Clock(device, Measuring.of(options))
    report = Report(device, options, header)
    for case in cases_of(options):
        run_case(case, options.intermediate, device, clock, report)
        report.write()
    report.print_left_out()
    dist.barrier()
    return 1 if report.failed else 0
