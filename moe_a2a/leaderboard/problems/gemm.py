"""A matrix product before a reduce-scatter, and one after an all-gather: the other two published problems."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from moe_a2a.leaderboard.cases import Case
from moe_a2a.leaderboard.problems.base import CloseTo, Tensors, error_share

MOST_ERROR = 0.01  # relative to the expected output's norm; sums rounded to bf16 after each of 8 ranks stay below 0.005


class _Gemm(CloseTo):
    """data = (input, weight, bias), bf16, U(-0.01, 0.01). The weight and the bias stay the same throughout a case.

    The published tolerance is as large as the values: an output without the product passes it. So we also limit the norm
    of the error.
    """

    rtol = atol = 1e-2
    sizes: ClassVar = {"m": 1, "n": 1, "k": 1}
    ignored = ("has_bias",)  # the public evaluator takes any word in a case file for true

    def as_data(self, case: Case, tensors: Tensors, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        return tensors["input"], tensors["weight"], tensors["bias"]

    def mismatch(self, output: Tensor, expected: Tensor) -> str:
        wrong = super().mismatch(output, expected)
        share = 0.0 if wrong else error_share(output, expected)
        return wrong or (
            f"the error's norm is {share:.3g} of the output's, {MOST_ERROR:g} at most" * (share > MOST_ERROR)
        )


class GemmReduceScatter(_Gemm):
    """input [M, K/W], weight [N, K/W], bias [N]; returns [M/W, N], this rank's rows of the sum over ranks of
    input @ weight.T + bias: the bias counts W times."""

    shared = ("m", "k")

    def make_weights(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        weight = _uniform(case["n"], case["k"] // case["world_size"], generator=generator)
        return {"weight": weight, "bias": _uniform(case["n"], generator=generator)}

    def make_inputs(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        return {"input": _uniform(case["m"], case["k"] // case["world_size"], generator=generator)}

    def bytes_to_move(self, case: Case, tensors: list[Tensors]) -> float:
        """Each rank's rows of this rank's partial sums, in bf16."""
        return (len(tensors) - 1) / len(tensors) * case["m"] * case["n"] * 2

    def expected(self, case: Case, tensors: list[Tensors]) -> list[Tensor]:
        total = torch.zeros(case["m"], case["n"])
        for of_rank in tensors:
            total += of_rank["input"].float() @ of_rank["weight"].float().T + of_rank["bias"].float()
        return list(total.bfloat16().chunk(len(tensors)))


class AllGatherGemm(_Gemm):
    """input [M/W, K], weight [N/W, K], bias [N/W]; returns [M, N/W], all ranks' input @ weight.T + bias."""

    shared = ("m", "n")

    def make_weights(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        columns = case["n"] // case["world_size"]
        weight = _uniform(columns, case["k"], generator=generator)
        return {"weight": weight, "bias": _uniform(columns, generator=generator)}

    def make_inputs(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        return {"input": _uniform(case["m"] // case["world_size"], case["k"], generator=generator)}

    def bytes_to_move(self, case: Case, tensors: list[Tensors]) -> float:
        return (len(tensors) - 1) / len(tensors) * case["m"] * case["k"] * 2

    def expected(self, case: Case, tensors: list[Tensors]) -> list[Tensor]:
        x = torch.cat([of_rank["input"] for of_rank in tensors]).float()
        return [(x @ own["weight"].float().T + own["bias"].float()).bfloat16() for own in tensors]


def _uniform(*shape: int, generator: torch.Generator) -> Tensor:
    return ((torch.rand(*shape, generator=generator) * 2 - 1) * 0.01).bfloat16()
