"""What bounds an experts' product on this device, measured in the same run: a large square product and a device copy. Also the
clock and the power while a step runs back to back."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_a2a.bench.clock import Clock, Step
from moe_a2a.bench.statistics import slowest_rank_median
from moe_a2a.bench.together import FailedSomewhereError, together
from moe_a2a.devices import float8_dtype

SQUARE = {"cuda": 8192, "cpu": 512}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 16 << 20}
ROUND_SECONDS = 0.1  # of back-to-back calls
STEADY_SECONDS = 1.0  # nvidia-smi shows the power of the last second


@dataclass(frozen=True)
class Limits:
    tflops: float  # of a square product in the dtype
    tbps: float  # of a copy: bytes read and written
    float8_tflops: float | None = None  # the same in float8 by torch._scaled_mm; None: not available here

    def seconds(self, flops: float, num_bytes: float, in_float8: bool = False) -> float:
        """The least time of such work; without a float8 rate, float8 work uses the dtype's."""
        rate = self.float8_tflops if in_float8 and self.float8_tflops is not None else self.tflops
        return max(flops / (1e12 * rate), num_bytes / (1e12 * self.tbps))


def measure(device: torch.device, dtype: torch.dtype, clock: Clock) -> Limits:
    n, num_bytes = SQUARE[device.type], COPY_BYTES[device.type]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    c, source = torch.empty_like(a), torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    steps = [Step("square", lambda: torch.mm(a, b, out=c)), Step("copy", lambda: target.copy_(source))]
    if device.type != "cpu":  # there _scaled_mm takes seconds, and is no limit: our products are 40 times faster
        with contextlib.suppress(FailedSomewhereError):
            steps.append(Step("float8", together(lambda: _float8_square(a, b))))
    square, copy, *float8 = (slowest_rank_median(times) for times in clock.time(steps).T)
    flops = 2e-12 * n**3
    return Limits(flops / square, 2e-12 * num_bytes / copy, flops / float8[0] if float8 else None)


def _float8_square(a: Tensor, b: Tensor) -> Callable[[], Any]:
    """The product of a and b in float8, after a rehearsal."""
    x, w = (t.to(float8_dtype(t.device)) for t in (a, b.t().contiguous()))
    one = torch.ones((), device=a.device)

    def run() -> Tensor:
        return torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    run()
    return run


@dataclass
class Gauge:
    sm_mhz: float | None = None
    watts: float | None = None


def gauge(device: torch.device, clock: Clock, run: Callable[[], Any], seconds: float) -> Gauge:
    """Called by every rank; `seconds`: the time of one run, equal on every rank. Empty without nvidia-smi."""
    read = Gauge()
    if device.type != "cuda" or torch.version.hip or shutil.which("nvidia-smi") is None:
        return read
    reader = threading.Thread(target=_read, args=(device, read))
    reader.start()
    is_reading = torch.ones(1, device=device)
    while is_reading.item():  # on any rank, so that all run the same number of rounds
        for _ in range(max(1, int(ROUND_SECONDS / seconds))):
            run()
        clock.synchronize()
        is_reading.fill_(float(reader.is_alive()))
        dist.all_reduce(is_reading, op=dist.ReduceOp.MAX)
    reader.join()
    return read


def _read(device: torch.device, into: Gauge) -> None:
    time.sleep(STEADY_SECONDS)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", "-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", *query]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        into.sm_mhz, into.watts = (float(value) for value in done.stdout.split(","))
    except ValueError:  # a driver that does not report it
        return


def kernel_of(device: torch.device, run: Callable[[], Any]) -> str | None:
    """The kernel that takes most of a step according to PyTorch's profiler; None on the CPU."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kernels = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    return max(kernels, key=lambda event: event.self_device_time_total).key if kernels else None
