"""`python -m moe_a2a bench experts`: the experts' two products, each beside its baselines and the device's limits.

Each rank multiplies the rows of a real dispatch, so expert_row_index and recv_x are those of a layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import moe_a2a
from moe_a2a.bench import expert_cases, limits
from moe_a2a.bench.cases import Case, make_inputs
from moe_a2a.bench.clock import Clock, Step
from moe_a2a.bench.products import ALL, Ours, OursFloat8, Products, make_weights
from moe_a2a.bench.report import Report, compare
from moe_a2a.bench.statistics import of_all_ranks, slowest_rank_median
from moe_a2a.bench.together import FailedSomewhereError, together
from moe_a2a.experts import combine_stays_apart

HEADER = (
    f"{'tokens':>6} {'product':<13} {'system':<18} {'rows':>7} {'columns':>7} {'depth':>6} {'us':>9} {'TFLOP/s':>8} {'TB/s':>6} "
    f"{'of limit':>8} {'MHz':>5} {'W':>4}  kernel"
)


@dataclass(frozen=True)
class Line:
    """One product of one system; `us`: median of the slowest rank. Bytes: weights of experts with rows, rows once, results."""

    tokens: int
    product: str
    system: str
    rows: int  # of the busiest rank, like all figures
    columns: int
    depth: int
    experts: int  # per rank
    dtype: str
    us: float
    tflops: float
    tbps: float
    share_of_limit: float
    sm_mhz: float | None
    watts: float | None
    kernel: str | None

    def __str__(self) -> str:
        mhz, watts = (f"{value:.0f}" if value else "-" for value in (self.sm_mhz, self.watts))
        return (
            f"{self.tokens:>6} {self.product:<13} {self.system:<18} {self.rows:>7} {self.columns:>7} {self.depth:>6} "
            f"{self.us:9.1f} {self.tflops:8.1f} {self.tbps:6.2f} {self.share_of_limit:8.0%} {mhz:>5} {watts:>4}  "
            f"{(self.kernel or '-')[:60]}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    expert_cases.add_arguments(parser, "experts")


def run(options: argparse.Namespace) -> int:
    return expert_cases.run(options, HEADER, _run_case)


def _run_case(case: Case, intermediate: int, device: torch.device, clock: Clock, report: Report) -> None:
    report.limit(case, limits.measure(device, case.dtype, clock))
    inputs = make_inputs(case, device)
    weights = make_weights(inputs.num_local_experts, case.hidden, intermediate, inputs.x, case.seed + inputs.rank)
    with moe_a2a.ExpertParallel(dist.group.WORLD, **case.config, device=device) as ep:
        for contender in ALL:
            if why := contender.why_not(device, case.dtype):
                report.leave_out(contender.system, "", why)
                continue
            products = contender(*weights)
            tokens = inputs.x, inputs.topk_idx, inputs.topk_weights
            handle = products.dispatch(ep, *tokens)
            try:
                _run_system(case, products, handle, clock, report, partial(products.dispatch, ep, *tokens))
            except FailedSomewhereError as error:
                report.leave_out(products.system, str(case), str(error))
            handle.release()


class Combining:
    """The second product and the combine of its rows, sequential and fused. Each combine needs a new dispatch."""

    def __init__(self, products: Ours, inner: Any, dispatch: Callable[[], moe_a2a.DispatchHandle]):
        self.products, self.inner, self.dispatch = products, inner, dispatch
        self.w_down: tuple[Tensor, Tensor | None] = products.w_down, None
        if isinstance(products, OursFloat8):
            self.w_down = products.down, products.down_scales

    def begin(self) -> None:
        _rewrite(self.inner)
        self.handle = self.dispatch()

    def apart(self) -> Tensor:
        return self.handle.ep.combine(self.products.second(self.inner), self.handle)

    def fused(self) -> Tensor:
        values, scales = self.inner if isinstance(self.inner, tuple) else (self.inner, None)
        second = values, scales, self.handle.expert_offsets, *self.w_down
        return self.handle.ep._core.product_combine(*second, self.handle._handle, None, 0)

    def again(self, run: Callable[[], Tensor]) -> Tensor:
        self.begin()
        return run()

    def steps(self, case: Case, report: Report) -> list[Step]:
        steps = [Step("down, combine", self.apart, self.begin)]
        self.begin()
        if why := combine_stays_apart(self.handle):
            report.leave_out("combine fused with the second product", str(case), why)
        else:
            steps.append(Step("down+combine", self.fused, self.begin))
        self.handle.release()
        return steps


def _run_system(
    case: Case,
    products: Products,
    handle: moe_a2a.DispatchHandle,
    clock: Clock,
    report: Report,
    dispatch: Callable[[], moe_a2a.DispatchHandle],
) -> None:
    rows, inner = together(lambda: _check(products, handle))
    counts = handle.expert_counts
    device = counts.device
    num_routes, num_landed, used = int(counts.sum()), handle.recv_rows.numel(), int((counts > 0).sum())
    steps = [
        Step("gate_up", lambda: products.first(rows), lambda: _rewrite(rows)),
        Step("down", lambda: products.second(inner), lambda: _rewrite(inner)),
    ]
    again = [step.run for step in steps]  # alone
    if isinstance(products, Ours):
        combining = Combining(products, inner, dispatch)
        more = combining.steps(case, report)
        steps += more
        again += [partial(combining.again, step.run) for step in more]
    times = clock.time(steps, lead_in=steps[:1])
    item = 1 if products.is_float8 else case.dtype.itemsize
    limit = report.limits[-1]
    for step, run, seconds in zip(steps, again, times.T, strict=True):
        is_first = step.name == "gate_up"
        w, num_inputs = (products.w_gate_up, num_landed) if is_first else (products.w_down, num_routes)
        columns, depth = w.shape[1:]
        num_results = columns // 2 if products.gathers and is_first else columns
        item_of_result = item if products.gathers and is_first else case.dtype.itemsize
        moved = item * (used * columns * depth + num_inputs * depth) + item_of_result * num_routes * num_results
        median = slowest_rank_median(seconds)
        flops = _most(2.0 * num_routes * columns * depth, device)
        num_bytes = _most(moved, device)
        read = limits.gauge(device, clock, run, median)
        report.add(Line(
            tokens=case.num_tokens, product=step.name, system=products.system, rows=int(_most(num_routes, device)),
            columns=columns, depth=depth, experts=w.shape[0], dtype="float8" if products.is_float8 else case.dtype_name,
            us=1e6 * median, tflops=1e-12 * flops / median, tbps=1e-12 * num_bytes / median,
            share_of_limit=limit.seconds(flops, num_bytes, products.is_float8) / median,
            sm_mhz=read.sm_mhz, watts=read.watts, kernel=limits.kernel_of(device, run),
        ))  # fmt: skip


def _most(value: float, device: torch.device) -> float:
    return of_all_ranks(torch.tensor([value], dtype=torch.float64, device=device)).max().item()


def _rewrite(operand: Any) -> None:
    """Writes it again, like the kernel before it in a layer; float8 has no arithmetic."""
    tensor = operand[0] if isinstance(operand, tuple) else operand
    tensor.view(torch.uint8).bitwise_or_(0) if tensor.dtype.itemsize == 1 else tensor.mul_(1)


def _check(products: Products, handle: moe_a2a.DispatchHandle) -> tuple[Any, Any]:
    """The operands of both products, after comparing the first, the last and the largest expert with fp32."""
    rows = products.take(handle)
    inner = products.first(rows)
    y = products.second(activated := products.activate(inner))
    offsets, counts = handle.expert_offsets.tolist(), handle.expert_counts
    used = counts.nonzero().flatten().tolist()
    for expert in {*used[:1], *used[-1:], *([int(counts.argmax())] if used else [])}:
        at = slice(offsets[expert], offsets[expert] + int(counts[expert]))
        exact = products.rows_of(handle, at) @ products.w_gate_up[expert].float().T
        if products.gathers:
            gate, up = exact.chunk(2, dim=-1)
            exact = F.silu(gate) * up
        compare(f"gate_up of expert {expert}", products.values(inner, at), exact, products.tolerance)
        exact = products.values(activated, at) @ products.w_down[expert].float().T
        compare(f"down of expert {expert}", products.values(y, at), exact, products.tolerance)
    return rows, activated
