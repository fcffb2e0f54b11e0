"""Times steps that all ranks start together: events on a GPU, perf_counter on the CPU.

On a GPU, a short sleep lets the host run ahead, so that no step waits for its own launch; then a one-value all-reduce on the
stream aligns the ranks. A kernel has just written a step's input, as in a layer ("warm"), or a buffer larger than the L2
cache is written in between ("flushed").
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WAKE_UP_SECONDS = 0.05  # of work before the first timed step: GPU and link clocks ramp up
SLEEP_CYCLES = 300_000  # about 150 us: more than the host needs to queue most steps
FLUSH_BYTES = 256 << 20


@dataclass
class Step:
    """One timed step. Before it, its input is rewritten: the tensor `reads`, or whatever the callable `reads` writes (or
    opens: a handle)."""

    name: str
    run: Callable[[], Any]
    reads: Tensor | Callable[[], Any] | None = None
    repeats: int = 1  # how often `run` repeats its work; the reported time is that of one repetition


@dataclass(frozen=True)
class Measuring:
    """How to measure."""

    iterations: int = 30
    warm_up: int = 5
    flush: bool = False

    @staticmethod
    def of(options: argparse.Namespace) -> Measuring:
        """From the options that options.add_how() has added."""
        return Measuring(options.iterations, options.warm_up, options.flush)


class Clock:
    """Times steps in turn. Every rank makes the same calls and gets its own results."""

    def __init__(self, device: torch.device, how: Measuring, sleep_cycles: int = SLEEP_CYCLES):
        """sleep_cycles: more than the host needs to queue a step."""
        self.how, self._sleep_cycles = how, sleep_cycles
        self._on_gpu = device.type == "cuda"
        self._word = torch.zeros(1, device=device)
        self._flush_buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if how.flush else None

    def time(self, steps: Sequence[Step], lead_in: Sequence[Step] = ()) -> Tensor:
        """Seconds, float64 [iterations, len(steps)]. Each iteration runs all steps in order.

        lead_in: run before them in each iteration, and not reported. The first step of an iteration is slower than the
        others: it follows a pause of the host."""
        every = [*lead_in, *steps]
        times = torch.zeros(self.how.iterations, len(every), dtype=torch.float64)
        if self._on_gpu:
            self._wake_up(every)
        repeats = torch.tensor([step.repeats for step in every])
        for iteration in range(-self.how.warm_up, self.how.iterations):
            marks = [self._run(step) for step in every]
            self.synchronize()
            if iteration >= 0:
                times[iteration] = torch.tensor([self.seconds(*pair) for pair in marks]) / repeats
        return times[:, len(lead_in) :]

    def _wake_up(self, steps: Sequence[Step]) -> None:
        """Untimed rounds until the slowest rank has warmed up, so that the first step does not pay for it."""
        start = time.monotonic()
        longest = torch.zeros(1, device=self._word.device)
        while longest.item() < WAKE_UP_SECONDS:
            for step in steps:
                self._run(step)
            self.synchronize()
            longest.fill_(time.monotonic() - start)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)  # all ranks run the same number of rounds

    def _run(self, step: Step) -> tuple[Any, Any]:
        self._freshen(step.reads)
        self._align()
        begin = self.mark()
        step.run()
        return begin, self.mark()

    def host_time(self, steps: Sequence[Step], iterations: int) -> list[float]:
        """Median seconds until each step's call returns when the device is idle; on the CPU it is the step itself."""
        times = torch.zeros(iterations, len(steps), dtype=torch.float64)
        for iteration in range(iterations):
            for i, step in enumerate(steps):
                self.synchronize()
                start = time.perf_counter()
                step.run()
                times[iteration, i] = (time.perf_counter() - start) / step.repeats
        self.synchronize()
        return times.median(dim=0).values.tolist()

    def synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _align(self) -> None:
        """Aligns the ranks: what they queue next starts at about the same time."""
        if self._on_gpu:
            torch.cuda._sleep(self._sleep_cycles)
            dist.all_reduce(self._word)  # last: GPUs may sleep for different times
        else:
            dist.barrier()

    def _freshen(self, reads: Tensor | Callable[[], Any] | None) -> None:
        """Rewrites the input of the next step, or flushes the cache."""
        if callable(reads):
            reads()
        elif self._on_gpu and reads is not None:
            reads.mul_(1)
        if self._flush_buffer is not None:
            self._flush_buffer.zero_()

    def mark(self) -> Any:
        """A point in time on the current stream."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two marks; call it after synchronize()."""
        return 1e-3 * begin.elapsed_time(end) if self._on_gpu else end - begin
