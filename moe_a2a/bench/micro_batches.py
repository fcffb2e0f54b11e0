"""`python -m moe_a2a bench micro_batches`: two alternating micro-batches. While a product works on one of them on all but a
few SMs, combine() ends the other's layer and dispatch() begins its next, on a second stream with as many blocks as SMs are left.

Products: `torch.nn.functional.linear` under PyTorch's SM carve-out, and `grouped_gemm` with num_blocks, each sized to last
about as long as the transfers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import moe_a2a
from moe_a2a.bench.beside import TimedProduct
from moe_a2a.bench.cases import Case, Inputs, make_inputs
from moe_a2a.bench.clock import Clock, Measuring, Step
from moe_a2a.bench.contenders import Ours
from moe_a2a.bench.options import add_how, add_outputs, add_sizes
from moe_a2a.bench.report import Report
from moe_a2a.bench.start import check_cases, start_ranks, this_ranks_device
from moe_a2a.bench.statistics import medians_us
from moe_a2a.commands.command_line import integers, output_file
from moe_a2a.commands.rank_options import device_type_of

COLUMNS = {"cuda": (128, 256, 512, 1024, 2048, 4096, 7168, 10240, 14336), "cpu": (16, 64)}
NUM_TRACED = 3
HEADER = (
    f"{'tokens':>6} {'product':<12} {'blocks':>6} | {'all SMs':>8} {'limited':>8} {'in turn':>8} {'slower':>7} {'beyond':>7} | "
    f"{'transfer':>8} {'turn':>8} {'hidden':>6}"
)


@dataclass(frozen=True)
class Line:
    """Times are us, the slowest rank's medians. beyond: the product's slowdown in excess of the share of SMs left to the
    transfers. hidden: the share of the transfer time that does not lengthen the turn."""

    tokens: int
    hidden: int
    topk: int
    experts: int
    ranks: int
    product: str
    columns: int
    blocks: int
    product_us: float  # on all SMs, alone
    limited_us: float  # on the SMs that the transfers leave, alone
    in_turn_us: float  # the same, beside the transfers
    transfer_us: float  # a combine and a dispatch, alone
    turn_us: float
    slower: float
    beyond: float
    hidden_share: float

    def __str__(self) -> str:
        return (
            f"{self.tokens:>6} {self.product:<12} {self.blocks:>6} | {self.product_us:8.1f} {self.limited_us:8.1f} "
            f"{self.in_turn_us:8.1f} {self.slower:7.1%} {self.beyond:7.1%} | {self.transfer_us:8.1f} {self.turn_us:8.1f} "
            f"{self.hidden_share:6.0%}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--tokens",
        type=integers(1),
        metavar="4096,...",
        help="tokens per micro-batch and rank (default: 4096, on the CPU 64)",
    )
    add_sizes(what)
    what.add_argument("--blocks", type=integers(1), default=[16, 24, 32], metavar="16,...",
                      help="blocks of dispatch and of combine (default: 16,24,32)")  # fmt: skip
    add_how(parser)
    add_outputs(parser, "micro_batches")
    parser.add_argument(
        "--trace", type=output_file, metavar="FILE", help="write rank 0's last turns as PyTorch's profiler records them"
    )


def run(options: argparse.Namespace) -> int:
    options.tokens = options.tokens or [64 if device_type_of(options) == "cpu" else 4096]
    check_cases(_cases(options), options)
    return start_ranks(options, rank_main, "bench")


def _cases(options: argparse.Namespace) -> list[Case]:
    sizes = (options.hidden, options.topk, options.experts)
    return [Case(tokens, *sizes, torch.bfloat16, "uniform", options.seed) for tokens in options.tokens]


@torch.no_grad()
def rank_main(options: argparse.Namespace) -> int:
    device = this_ranks_device(options)
    clock = Clock(device, Measuring.of(options))
    if device.type == "cpu" and dist.get_rank() == 0:
        print("on the CPU nothing overlaps: the transfers run before the product, and the last columns mean nothing")
    report = Report(device, options, HEADER)
    for case in _cases(options):
        inputs = make_inputs(case, device)
        with moe_a2a.ExpertParallel(dist.group.WORLD, **case.config, device=device) as ep:
            for blocks in options.blocks:
                transfers = Ours(ep, inputs, "rows", blocks)
                transfers.rehearse()
                for product in (Linear, Grouped):
                    turns = Turns(transfers, product(ep, inputs), clock)
                    report.add(turns.measured(case))
                    report.write()
            if options.trace:
                turns.trace(options.trace)
            transfers.release(transfers.handle)
    dist.barrier()
    return 1 if report.failed else 0


# ---- products


class Linear:
    name = "linear"

    def __init__(self, ep: moe_a2a.ExpertParallel, inputs: Inputs):
        self._x = inputs.x

    def resize(self, columns: int) -> None:
        self._w = torch.randn(columns, self._x.shape[1], device=self._x.device).to(self._x.dtype)
        self._bias = torch.zeros(columns, device=self._x.device, dtype=self._x.dtype)  # with a bias, cuBLASLt runs it

    def __call__(self, num_left: int) -> Tensor:
        """num_left: SMs that it leaves free."""
        if not num_left or not self._x.is_cuda:
            return F.linear(self._x, self._w, self._bias)
        torch._C._set_sm_carveout_experimental(num_left)
        try:
            return F.linear(self._x, self._w, self._bias)
        finally:
            torch._C._set_sm_carveout_experimental(None)


class Grouped:
    """grouped_gemm() over the rows of a dispatch."""

    name = "grouped_gemm"

    def __init__(self, ep: moe_a2a.ExpertParallel, inputs: Inputs):
        handle = ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
        self._x, self._offsets = handle.recv_x.clone(), handle.expert_offsets.clone()
        self._index = handle.expert_row_index[: handle.num_routes].clone()
        handle.release()

    def resize(self, columns: int) -> None:
        num_experts, (_, hidden) = len(self._offsets) - 1, self._x.shape
        self._w = torch.randn(num_experts, columns, hidden, device=self._x.device).to(self._x.dtype)

    def __call__(self, num_left: int) -> Tensor:
        num_blocks = _num_processors(self._x.device) - num_left if num_left and self._x.is_cuda else 0
        return moe_a2a.grouped_gemm(self._x, self._index, self._offsets, self._w, num_blocks=num_blocks)


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# ---- turns


class Turns:
    def __init__(self, transfers: Ours, product: Any, clock: Clock):
        self._transfers, self._product, self._clock = transfers, product, clock
        self._device = transfers.inputs.x.device
        self._blocks = transfers.num_blocks
        self._timed = TimedProduct(self._device, clock)
        if transfers.handle is None or not transfers.handle.is_open:
            transfers.handle = transfers.dispatch()

    def measured(self, case: Case) -> Line:
        (transfer_us,) = self._medians(self._transfer)
        columns = self._resize(transfer_us)
        product_us, limited_us, turn_us = self._medians(lambda: self._product(0), self._limited, self._turn)
        in_turn_us = self._timed.median_us()
        share = 1 - self._blocks / max(_num_processors(self._device), self._blocks + 1)
        return Line(
            tokens=case.num_tokens, hidden=case.hidden, topk=case.num_topk, experts=case.num_experts,
            ranks=dist.get_world_size(), product=self._product.name, columns=columns, blocks=self._blocks,
            product_us=product_us, limited_us=limited_us, in_turn_us=in_turn_us, transfer_us=transfer_us, turn_us=turn_us,
            slower=in_turn_us / product_us - 1, beyond=share * in_turn_us / product_us - 1,
            hidden_share=1 - (turn_us - limited_us) / transfer_us,
        )  # fmt: skip

    def trace(self, file: Path) -> None:
        """Traces a few turns."""
        is_first = dist.get_rank() == 0
        with torch.profiler.profile() if is_first else nullcontext() as profiler:
            for _ in range(NUM_TRACED):
                self._turn()
            self._clock.synchronize()
        if profiler is not None:
            profiler.export_chrome_trace(str(file))

    def _transfer(self) -> None:
        """Ends the other micro-batch's layer and begins its next."""
        self._transfers.combine(self._transfers.y, self._transfers.handle)
        self._transfers.handle = self._transfers.dispatch()

    def _limited(self) -> None:
        self._product(self._blocks)

    def _turn(self) -> None:
        self._timed.run_beside(self._transfer, self._limited)

    def _resize(self, at_least_us: float) -> int:
        for columns in COLUMNS[self._device.type]:
            self._product.resize(columns)
            (limited_us,) = self._medians(self._limited)
            if limited_us >= at_least_us:
                break
        return columns

    def _medians(self, *steps: Callable[[], Any]) -> list[float]:
        return medians_us(self._clock.time([Step("", run, self._transfers.y) for run in steps]))
