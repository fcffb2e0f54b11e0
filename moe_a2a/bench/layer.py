"""`python -m moe_a2a bench layer`: a whole MoE layer, ours with kernels and step by step, beside compositions with the baselines'
products."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import moe_a2a
from moe_a2a.bench import expert_cases, limits
from moe_a2a.bench.cases import Case, make_inputs
from moe_a2a.bench.clock import Clock, Step
from moe_a2a.bench.contenders import captured
from moe_a2a.bench.expert_cases import CaseColumns, case_columns
from moe_a2a.bench.products import ALL, Ours, OursFloat8, make_weights, quantized
from moe_a2a.bench.report import Report, compare
from moe_a2a.bench.statistics import p99, slowest_rank_median
from moe_a2a.bench.together import FailedSomewhereError, together
from moe_a2a.expert_weights import Weight
from moe_a2a.experts import combine_stays_apart

TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-2, "float8": 1e-1}  # relative to the norm of the layer step by step
HEADER = f"{'tokens':>6} {'system':<28} {'launch':<6} {'us':>9} {'p99':>9} {'TFLOP/s':>8} {'of best peer':>12} {'MHz':>5} {'W':>4}"
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Line(CaseColumns):
    """One system at one size. `us`: median of the slowest rank; `tflops`: of the products, per rank."""

    system: str
    launch: str  # "eager" or "graph"
    us: float
    p99_us: float
    tflops: float
    of_best_peer: float | None  # us / that of the fastest system of the same dtype that is not ours
    sm_mhz: float | None
    watts: float | None

    def __str__(self) -> str:
        mhz, watts = (f"{value:.0f}" if value else "-" for value in (self.sm_mhz, self.watts))
        of_peer = f"{self.of_best_peer:.2f}" if self.of_best_peer else "-"
        return (
            f"{self.tokens:>6} {self.system:<28} {self.launch:<6} {self.us:9.1f} {self.p99_us:9.1f} {self.tflops:8.1f} "
            f"{of_peer:>12} {mhz:>5} {watts:>4}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    expert_cases.add_arguments(parser, "layer")


def run(options: argparse.Namespace) -> int:
    return expert_cases.run(options, HEADER, _run_case)


@torch.no_grad()
def _run_case(case: Case, intermediate: int, device: torch.device, clock: Clock, report: Report) -> None:
    inputs = make_inputs(case, device)
    weights = make_weights(inputs.num_local_experts, case.hidden, intermediate, inputs.x, case.seed + inputs.rank)
    with moe_a2a.ExpertParallel(dist.group.WORLD, **case.config, device=device) as ep:
        tokens = (inputs.x, inputs.topk_idx, inputs.topk_weights)
        expected = moe_a2a.MoELayer(ep, *weights, fused=False)(*tokens)
        systems = []

        def check(call: Call, tolerance: float) -> None:
            compare("beside the layer step by step", call(), expected, tolerance)

        for system, launch, make in _contenders(case, ep, weights, tokens, report):
            try:
                call = together(make)
                together(partial(check, call, TOLERANCE[_dtype_of(system, case)]))
            except FailedSomewhereError as error:
                report.leave_out(f"{system}, {launch}", str(case), str(error))
            else:
                systems.append((system, launch, call))
        if not systems:
            return
        steps = [Step(system, call, inputs.x) for system, _, call in systems]
        times = clock.time(steps, lead_in=steps[:1]).T
        medians = [slowest_rank_median(seconds) for seconds in times]
        peers: dict[str, float] = {}  # the fastest of each dtype
        for us, (system, _, _) in zip(medians, systems, strict=True):
            if "+" in system:
                dtype = _dtype_of(system, case)
                peers[dtype] = min(us, peers.get(dtype, us))
        flops = 6.0 * int((inputs.all_topk_idx >= 0).sum()) * case.hidden * intermediate / inputs.num_ranks
        for (system, launch, call), median, seconds in zip(systems, medians, times, strict=True):
            read, dtype = limits.gauge(device, clock, call, median), _dtype_of(system, case)
            report.add(Line(
                **case_columns(case, intermediate, dtype), system=system, launch=launch,
                us=1e6 * median, p99_us=1e6 * p99(seconds), tflops=1e-12 * flops / median,
                of_best_peer=median / peers[dtype] if dtype in peers else None, sm_mhz=read.sm_mhz, watts=read.watts,
            ))  # fmt: skip


def _contenders(
    case: Case, ep: moe_a2a.ExpertParallel, weights: tuple[Tensor, Tensor], tokens: tuple[Tensor, ...], report: Report
) -> Iterator[tuple[str, str, Callable[[], Call]]]:
    """(system, launch, factory of its call)"""

    def ours(fused: bool, *weights: Weight, fused_combine: bool = False) -> Call:
        layer = moe_a2a.MoELayer(ep, *weights, fused=fused, fused_combine=fused_combine)
        return lambda: layer(*tokens)

    def launches(system: str, make: Callable[[], Call]) -> Iterator[tuple[str, str, Callable[[], Call]]]:
        yield system, "eager", make
        if ep.device.type == "cuda":
            yield system, "graph", lambda: _in_a_graph(make())

    float8 = [quantized(w, halves) for w, halves in zip(weights, (2, 1), strict=True)]
    for system, own in (("moe_a2a", weights), ("moe_a2a fp8", float8)):
        yield from launches(system, partial(ours, True, *own))
        if why := _combine_stays_apart(ep, tokens):
            report.leave_out("combine fused with the second product", str(case), why)
            continue
        yield from launches(system + ", combine fused", partial(ours, True, *own, fused_combine=True))
    yield "moe_a2a, step by step", "eager", lambda: ours(False, *weights)
    for contender in ALL:
        system = f"moe_a2a + {contender.system}"
        if contender in (Ours, OursFloat8):
            continue
        if why := contender.why_not(ep.device, case.dtype):
            report.leave_out(system, "", why)
            continue
        products = contender(*weights)
        yield system, "eager", partial(partial, products.layer, ep, *tokens)


def _combine_stays_apart(ep: moe_a2a.ExpertParallel, tokens: tuple[Tensor, ...]) -> str | None:
    handle = ep.dispatch(*tokens)
    why = combine_stays_apart(handle)
    handle.release()
    return why


def _in_a_graph(call: Call) -> Call:
    call()  # loads the kernels
    outs: list[Tensor] = []
    graph = captured(lambda: outs.append(call()))

    def replay() -> Tensor:
        graph.replay()
        return outs[0]

    return replay


def _dtype_of(system: str, case: Case) -> str:
    return "float8" if "fp8" in system else case.dtype_name
