"""Few blocks leave the other SMs to other kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping

GOOD_ENOUGH = 1.02


def fewest_blocks(costs: Mapping[int, float]) -> int:
    """The fewest blocks within GOOD_ENOUGH of the least cost. 0 means all blocks, the most."""
    least = min(costs.values())
    return min((n for n, cost in costs.items() if cost <= GOOD_ENOUGH * least), key=lambda n: n or math.inf)
