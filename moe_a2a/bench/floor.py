"""The floor: the same rows pushed to the same ranks by a bare kernel, in the same run. Nothing faster is possible
without sending fewer bytes.

All ranks push at once: with the target's row sender, and with plain stores by warps and by blocks, each with several
numbers of blocks. The best counts, including its launch; a push of no rows shows the time of a launch alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

import moe_a2a
from moe_a2a.bench.cases import Inputs, Traffic
from moe_a2a.bench.clock import Clock, Step
from moe_a2a.bench.statistics import medians_us
from moe_a2a.commands import bare_push


@dataclass
class Push:
    """One measured way to move the rows of a step."""

    step: str  # "dispatch" or "combine"
    row_bytes: int
    by: str
    blocks: int
    microseconds: float


@dataclass
class Floor:
    pushes: list[Push]
    launch_us: float  # a push of no rows

    def of(self, step: str, row_bytes: int) -> float:
        """Microseconds of the best push of this step's rows."""
        return min(push.microseconds for push in self.pushes if (push.step, push.row_bytes) == (step, row_bytes))


def measure(
    ep: moe_a2a.ExpertParallel, inputs: Inputs, traffic: Traffic, row_bytes: dict[str, set[int]], clock: Clock
) -> Floor:
    """`row_bytes`: the sizes of rows to push for "dispatch" and for "combine"."""
    core = ep._open_core()
    device = inputs.x.device
    ways = bare_push.ways(device)
    pushes, steps = [], []
    routes = {"dispatch": traffic.dispatch, "combine": traffic.combine}
    for step, sizes in row_bytes.items():
        for num_bytes in sorted(sizes):
            rows = torch.zeros(len(routes[step]), num_bytes, dtype=torch.uint8, device=device)
            for by, blocks in ways:
                pushes.append(Push(step, num_bytes, by, blocks, 0.0))
                steps.append(Step(step, partial(core.push_rows, rows, routes[step], by, blocks)))
    nothing = (torch.zeros(0, 16, dtype=torch.uint8, device=device), routes["dispatch"][:0])
    steps.append(Step("launch", partial(core.push_rows, *nothing, *ways[0])))
    medians = medians_us(clock.time(steps))
    for push, median in zip(pushes, medians, strict=False):
        push.microseconds = median
    return Floor(pushes, launch_us=medians[-1])
