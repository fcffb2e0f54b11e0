"""`python -m moe_a2a bench training`: forward and backward of an MoE layer, beside the composition that frameworks train with."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import moe_a2a
from moe_a2a.bench import expert_cases
from moe_a2a.bench.cases import Case, make_inputs
from moe_a2a.bench.clock import Clock, Step
from moe_a2a.bench.expert_cases import CaseColumns, case_columns
from moe_a2a.bench.products import make_weights
from moe_a2a.bench.report import Report, compare
from moe_a2a.bench.sorted_layer import sorted_layer
from moe_a2a.bench.statistics import p99, slowest_rank_median
from moe_a2a.bench.together import FailedSomewhereError, together
from moe_a2a.commands.baselines import SortAllToAll

PEER = "sort + all_to_all"
TOLERANCE = 2e-2  # relative to the norm of the peer's output or gradient
HEADER = f"{'tokens':>6} {'system':<28} {'forward':>9} {'+ backward':>10} {'p99':>9} {'TFLOP/s':>8} {'of the peer':>11}"
Layer = Callable[[], Tensor]


@dataclass(frozen=True)
class Line(CaseColumns):
    """One system at one size. Medians of the slowest rank: of a recorded forward pass, and of a forward and a backward pass.
    `tflops`: of all products of both passes, per rank."""

    system: str
    forward_us: float
    us: float
    p99_us: float
    tflops: float
    of_peer: float | None  # us / the peer's

    def __str__(self) -> str:
        of_peer = f"{self.of_peer:.2f}" if self.of_peer else "-"
        return (
            f"{self.tokens:>6} {self.system:<28} {self.forward_us:9.1f} {self.us:10.1f} {self.p99_us:9.1f} {self.tflops:8.1f} "
            f"{of_peer:>11}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    expert_cases.add_arguments(parser, "training")


def run(options: argparse.Namespace) -> int:
    # Besides the weights, the peer's gradients, with which ours are compared, and ours.
    return expert_cases.run(options, HEADER, _run_case, copies_of_weights=3)


class _Passes:
    """A layer's passes over the same leaves: x, topk_weights, and the weights of the experts."""

    def __init__(self, layer: Layer, leaves: dict[str, Tensor], grad: Tensor):
        self._layer, self._leaves, self._grad = layer, leaves, grad

    def forward(self) -> Tensor:
        return self._layer()

    def both(self) -> Tensor:
        """Gradients replace those of the call before, as after zero_grad()."""
        for leaf in self._leaves.values():
            leaf.grad = None
        out = self._layer()
        out.backward(self._grad)
        return out

    def results(self) -> dict[str, Tensor]:
        out = self.both().detach()
        grads = {f"the gradient of {name}": leaf.grad for name, leaf in self._leaves.items()}
        return {"the output": out} | {name: grad for name, grad in grads.items() if grad is not None}


def _run_case(case: Case, intermediate: int, device: torch.device, clock: Clock, report: Report) -> None:
    inputs = make_inputs(case, device)
    weights = make_weights(inputs.num_local_experts, case.hidden, intermediate, inputs.x, case.seed + inputs.rank)
    leaves = {"x": inputs.x, "topk_weights": inputs.topk_weights, "w_gate_up": weights[0], "w_down": weights[1]}
    leaves = {name: torch.nn.Parameter(leaf) for name, leaf in leaves.items()}
    routes = inputs.all_topk_idx[inputs.all_topk_idx >= 0]
    busiest = int((routes // inputs.num_local_experts).bincount().max())
    with moe_a2a.ExpertParallel(dist.group.WORLD, **case.config, device=device) as ep:
        systems = dict(_systems(case, ep, leaves, inputs.topk_idx, busiest, report))
        if not systems:
            return
        steps = [Step(name, run) for name, passes in systems.items() for run in (passes.forward, passes.both)]
        times = clock.time(steps, lead_in=steps[:1]).T
        medians = [slowest_rank_median(seconds) for seconds in times]
        both = dict(zip(systems, medians[1::2], strict=True))
        flops = 18.0 * len(routes) * case.hidden * intermediate / inputs.num_ranks
        for i, system in enumerate(systems):
            report.add(Line(
                **case_columns(case, intermediate, case.dtype_name), system=system,
                forward_us=1e6 * medians[2 * i], us=1e6 * both[system], p99_us=1e6 * p99(times[2 * i + 1]),
                tflops=1e-12 * flops / both[system], of_peer=both[system] / both[PEER] if PEER in both else None,
            ))  # fmt: skip


def _systems(
    case: Case,
    ep: moe_a2a.ExpertParallel,
    leaves: dict[str, Tensor],
    topk_idx: Tensor,
    busiest: int,
    report: Report,
) -> Iterator[tuple[str, _Passes]]:
    """Those whose output and gradients are the peer's. busiest: routes to the rank with the most."""
    grad = torch.randn_like(leaves["x"])
    expected: dict[str, Tensor] = {}
    for system, layer in _layers(case, ep, leaves, topk_idx, busiest):
        passes = _Passes(layer, leaves, grad)
        try:
            found = together(passes.results)
            if system == PEER:
                expected = found
            together(partial(_check, found, expected))
        except FailedSomewhereError as error:
            report.leave_out(system, str(case), str(error))
        else:
            yield system, passes


def _check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if not expected:
        raise ValueError("the peer has failed, so there is nothing to compare with")
    for name, tensor in expected.items():
        compare(f"{name} beside the peer's", found[name], tensor, TOLERANCE)


def _layers(
    case: Case, ep: moe_a2a.ExpertParallel, leaves: dict[str, Tensor], topk_idx: Tensor, busiest: int
) -> Iterator[tuple[str, Layer]]:
    x, topk_weights, *weights = leaves.values()
    baseline = SortAllToAll(dist.group.WORLD, **case.config)
    yield PEER, lambda: sorted_layer(baseline, x, topk_idx, topk_weights, *weights)
    bound = busiest + busiest // 4 + 1  # with room, as a user would give it
    for system, num_max_routes in (("moe_a2a", None), ("moe_a2a, num_max_routes", bound)):
        layer = moe_a2a.MoELayer(ep, *weights, num_max_routes=num_max_routes)
        yield system, partial(layer, x, topk_idx, topk_weights)
