"""Sums over all ranks: exact up to rounding, and with a codec chosen by the submission."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from moe_a2a.leaderboard.cases import Case
from moe_a2a.leaderboard.problems.base import CloseTo, Tensors, error_share, shape_mismatch


class AllReduce(CloseTo):
    """data = (x, rank, world_size), x [num_elements] bf16, N(0, 1); returns the sum of all x, a new tensor.

    The tolerance admits sums that are rounded to bf16 after each rank's addition.
    """

    rtol, atol = 1.6e-2, 0.1
    sizes: ClassVar = {"num_elements": 1}

    def make_inputs(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        return {"x": torch.randn(case["num_elements"], generator=generator).bfloat16()}

    def as_data(self, case: Case, tensors: Tensors, rank: int) -> tuple[Tensor, int, int]:
        return tensors["x"], rank, case["world_size"]

    def bytes_to_move(self, case: Case, tensors: list[Tensors]) -> float:
        return 2 * (len(tensors) - 1) / len(tensors) * tensors[0]["x"].numel() * self.least_bits() / 8

    def least_bits(self) -> float:
        """Bits of a value on the wire."""
        return 16

    def expected(self, case: Case, tensors: list[Tensors]) -> list[Tensor]:
        total = torch.stack([of_rank["x"] for of_rank in tensors]).float().sum(0)
        return [total.bfloat16()] * len(tensors)


class AllReduceQuantised(AllReduce):
    """The same sum, with noise at least LEAST_DB below it. All ranks must get the same bits, since replicas that differ
    drift apart."""

    LEAST_DB = 28.0  # signal to noise: 6 bits per value reach it on N(0, 1), 4 bits do not

    def least_bits(self) -> float:
        """The bound of rate-distortion theory: with fewer bits no code of normally distributed values has so little noise."""
        return self.LEAST_DB / (20 * math.log10(2))

    def mismatch(self, output: Tensor, expected: Tensor) -> str:
        wrong = shape_mismatch(output, expected)
        if wrong:
            return wrong
        share = error_share(output, expected)
        if not share < 10 ** (-self.LEAST_DB / 20):  # NaN is wrong too
            level = -20 * math.log10(share) if share == share and share > 0 else math.nan
            return f"{level:.1f} dB of signal over quantisation noise, {self.LEAST_DB:g} at least"
        return ""

    def disagreement(self, outputs: list[Tensor]) -> str:
        for rank, output in enumerate(outputs):
            if not torch.equal(output, outputs[0]):
                return f"rank {rank}: other bits than rank 0's"
        return ""
