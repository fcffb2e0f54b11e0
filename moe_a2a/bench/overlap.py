"""How much a matrix product slows down beside a transfer, and how much of the transfer it hides.

For dispatch and for combine, with each number of blocks:
    same stream   send, product, recv: the product has the whole GPU once the rows are posted
    side stream   send and recv on a second, higher-priority stream: they share the GPU with the product, so the number of
                  blocks matters
The product is square, in bf16 (CPU: fp32), and takes at least as long as the two halves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import moe_a2a
from moe_a2a.bench.beside import TimedProduct
from moe_a2a.bench.cases import Case, Inputs
from moe_a2a.bench.clock import Clock, Step
from moe_a2a.bench.contenders import OursInHalves
from moe_a2a.bench.statistics import medians_us

GPU_SIZES = (1024, 2048, 4096, 6144, 8192, 12288, 16384)
CPU_SIZES = (64, 128, 256, 512)


def measure(
    case: Case, inputs: Inputs, ep: moe_a2a.ExpertParallel, blocks: tuple[int, ...], clock: Clock
) -> list[dict[str, Any]]:
    found = []
    for num_blocks in blocks:
        layer = _Layer(OursInHalves(ep, inputs, "rows", num_blocks), clock)
        for name in ("dispatch", "combine"):
            for stream in ("same", "side") if inputs.x.is_cuda else ("same",):
                used = num_blocks or ep.blocks_for(len(inputs.x))[name == "combine"]
                about = {"tokens": case.num_tokens, "routing": case.routing, "step": name, "stream": stream}
                found.append(about | {"blocks": used} | layer.figures(name, stream))
    return found


class _Layer:
    """A layer in which one transfer is timed and the other just runs."""

    def __init__(self, halves: OursInHalves, clock: Clock):
        self._clock = clock
        self._device = halves.inputs.x.device
        halves.rehearse()
        self._halves = {step.name: step.run for step in halves.steps()}
        self._product: Callable[[], Any] = lambda: None
        self._timed = TimedProduct(self._device, clock)

    def figures(self, name: str, stream: str) -> dict[str, Any]:
        """Microseconds, slowest rank's median."""
        self._product = lambda: None
        halves_us, _ = self._time(name, stream)
        alone_us, size = self._choose_product(halves_us)
        all_us, between_us = self._time(name, stream)
        return {
            "gemm_size": size,
            "gemm_alone_us": alone_us,
            "gemm_between_us": between_us,
            "gemm_loss": between_us / alone_us - 1,
            "halves_us": halves_us,
            "all_us": all_us,
            "hidden_share": (alone_us + halves_us - all_us) / min(alone_us, halves_us),
        }

    def _choose_product(self, at_least_us: float) -> tuple[float, int]:
        on_gpu = self._device.type == "cuda"
        for size in GPU_SIZES if on_gpu else CPU_SIZES:
            a, b = (torch.randn(size, size, device=self._device) for _ in range(2))
            if on_gpu:
                a, b = a.bfloat16(), b.bfloat16()
            out = torch.empty_like(a)
            self._product = partial(torch.matmul, a, b, out=out)
            (alone_us,) = medians_us(self._clock.time([Step("product", self._product)]))
            if alone_us >= at_least_us:
                break
        return alone_us, size

    def _time(self, name: str, stream: str) -> tuple[float, float]:
        """(send, product and recv of `name`, the product in it)."""
        send, recv = self._halves[f"{name}_send"], self._halves[f"{name}_recv"]

        def on_one_stream() -> None:
            send()
            self._timed.run(self._product)
            recv()

        def on_two_streams() -> None:
            self._timed.run_beside(lambda: (send(), recv()), self._product)

        this = Step(name, on_one_stream if stream == "same" else on_two_streams)
        other = "combine" if name == "dispatch" else "dispatch"
        that = Step(other, lambda: (self._halves[f"{other}_send"](), self._halves[f"{other}_recv"]()))
        in_order = [this, that] if name == "dispatch" else [that, this]
        return medians_us(self._clock.time(in_order))[in_order.index(this)], self._timed.median_us()
