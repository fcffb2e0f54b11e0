"""A product that runs beside transfers, and its time there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_a2a.bench.clock import Clock
from moe_a2a.bench.statistics import medians_us


class TimedProduct:
    def __init__(self, device: torch.device, clock: Clock):
        self._clock = clock
        self._side = torch.cuda.Stream(priority=-1) if device.type == "cuda" else None
        self._marks: list[tuple[Any, Any]] = []

    def run(self, product: Callable[[], Any]) -> None:
        begin = self._clock.mark()
        product()
        self._marks.append((begin, self._clock.mark()))

    def run_beside(self, transfer: Callable[[], Any], product: Callable[[], Any]) -> None:
        """The transfer on a second, higher-priority stream; on the CPU before the product."""
        if self._side is None:
            transfer()
            self.run(product)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            transfer()
        self.run(product)
        torch.cuda.current_stream().wait_stream(self._side)

    def median_us(self) -> float:
        """The product's median over the runs of the last Clock.time()."""
        marks = self._marks[-self._clock.how.iterations :]
        seconds = [self._clock.seconds(*pair) for pair in marks]
        return medians_us(torch.tensor(seconds, dtype=torch.float64)[:, None])[0]
