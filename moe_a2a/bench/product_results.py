"""What `bench experts`, `bench layer` and `bench training` share: options, the loop over cases, and results: lines as they are
measured, then JSON with the commit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_a2a.bench import machine, routings
from moe_a2a.bench.cases import Case, cases_of
from moe_a2a.bench.clock import Clock, Measuring
from moe_a2a.bench.limits import Limits
from moe_a2a.bench.options import add_how, add_outputs, add_sizes, dtypes, routing_names, write_outputs
from moe_a2a.bench.start import check_cases, start_ranks, this_ranks_device
from moe_a2a.bench.table import left_out_lines
from moe_a2a.command_line import UsageError, integer, integers


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
class OfALayer:
    """The case of a line of `bench layer` or `bench training`."""

    tokens: int
    hidden: int
    topk: int
    experts: int
    intermediate: int
    ranks: int
    dtype: str  # of rows and weights


def of_a_layer(case: Case, intermediate: int, dtype: str) -> dict[str, Any]:
    sizes = {"tokens": case.num_tokens, "hidden": case.hidden, "topk": case.num_topk, "experts": case.num_experts}
    return sizes | {"intermediate": intermediate, "ranks": dist.get_world_size(), "dtype": dtype}


class Results:
    """Kept by every rank; rank 0 prints and writes."""

    def __init__(self, about: dict[str, Any], header: str):
        self.about = about
        self.lines: list[Any] = []
        self.limits: list[Limits] = []  # one per case
        self.left_out: list[dict[str, str]] = []
        self._is_first = dist.get_rank() == 0
        self._is_written = True
        self._print(f"# {about['ranks']} ranks on {about['machine']}; torch {about['versions']['torch']}, ", end="")
        self._print(f"commit {about['versions']['commit']}, {about['date']}, seed {about['seed']}\n{header}")

    @property
    def failed(self) -> bool:
        """Whether one of ours has no figure, or the files are not written."""
        return not self._is_written or any(
            line["what"].startswith("moe_a2a") and "+" not in line["what"] for line in self.left_out
        )

    def limit(self, case: Case, limit: Limits) -> None:
        self.limits.append(limit)
        float8 = f", {limit.float8_tflops:.1f} (float8)" if limit.float8_tflops else ""
        self._print(
            f"# limits: {limit.tflops:.1f} TFLOP/s (square product, {case.dtype_name}){float8}, {limit.tbps:.2f} TB/s (copy)"
        )

    def add(self, line: Any) -> None:
        self.lines.append(line)
        self._print(line)

    def leave_out(self, what: str, case: str, why: str) -> None:
        line = {"what": what, "case": case, "why": why}
        if line not in self.left_out:
            self.left_out.append(line)

    def print_rest(self) -> None:
        for line in left_out_lines(self.left_out):
            self._print(line)

    def write(self, options: argparse.Namespace) -> None:
        """Called after each case, so that an interrupted run keeps its results."""
        if not self._is_first:
            return
        content = {
            "about": self.about,
            "limits": [asdict(limit) for limit in self.limits],
            "lines": [asdict(line) for line in self.lines],
            "left_out": self.left_out,
        }
        self._is_written = write_outputs(options, self.about["name"], json.dumps(content, indent=1) + "\n")

    def _print(self, text: Any, end: str = "\n") -> None:
        if self._is_first:
            print(text, end=end, flush=True)


RunCase = Callable[[Case, int, torch.device, Clock, Results], None]  # the int: intermediate


def run(options: argparse.Namespace, header: str, run_case: RunCase) -> int:
    if options.hidden % 16:
        raise UsageError(f"--hidden {options.hidden} is not a multiple of 16, which the kernels need")
    check_cases(cases_of(options), options)
    return start_ranks(options, partial(_rank_main, header=header, run_case=run_case), "bench")


def _rank_main(options: argparse.Namespace, *, header: str, run_case: RunCase) -> int:
    device = this_ranks_device(options)
    clock = Clock(device, Measuring.of(options))
    results = Results(machine.about(device, dist.get_world_size()) | {"seed": options.seed}, header)
    for case in cases_of(options):
        run_case(case, options.intermediate, device, clock, results)
        results.write(options)
    results.print_rest()
    dist.barrier()
    return 1 if results.failed else 0


def compare(what: str, out: Tensor, expected: Tensor, tolerance: float) -> None:
    error, norm = (out.float() - expected.float()).norm().item(), expected.float().norm().item()
    if not error <= tolerance * norm:
        raise ArithmeticError(f"{what}: error {error:.3g}, of {norm:.3g}")
