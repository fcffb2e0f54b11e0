"""What the harness needs to know of a problem."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from moe_a2a.leaderboard.cases import Case, CaseFileError

Tensors = dict[str, Tensor]


class Problem(Protocol):
    """Made in the harness's own process, where no submission runs, and once more in each rank's process.

    rtol, atol: of the check against expected().
    """

    rtol: float
    atol: float

    def check_case(self, case: Case) -> None:
        """Raises CaseFileError if the shape and the number of ranks do not go together."""

    def make_weights(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        """The inputs of a rank that stay the same over a case."""
        ...

    def make_inputs(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        """The inputs of a rank that are new in each call."""
        ...

    def as_data(self, case: Case, tensors: Tensors, rank: int) -> Any:
        """What custom_kernel() gets: the weights and inputs in the form of the contract."""
        ...

    def expected(self, case: Case, tensors: list[Tensors]) -> list[Tensor]:
        """The output of each rank, from the weights and inputs of all."""
        ...

    def rank_sizes(self, case: Case, tensors: Tensors) -> str:
        """A few words for a person who looks at this case: "212 tokens"."""
        ...


def mismatch(problem: Problem, output: Tensor, expected: Tensor) -> str:
    """Why `output` is not the expected tensor; "" if it is."""
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return f"returned {list(output.shape)} of {output.dtype}, expected {list(expected.shape)} of {expected.dtype}"
    close = torch.isclose(output, expected, rtol=problem.rtol, atol=problem.atol)
    if bool(close.all()):
        return ""
    where = tuple((~close).nonzero()[0].tolist())
    num_wrong = int((~close).sum())
    return (
        f"{num_wrong} of {close.numel()} values are wrong; at {list(where)} it is {output[where].item():g}, expected "
        f"{expected[where].item():g} (rtol {problem.rtol:g}, atol {problem.atol:g})"
    )


def check_divides(case: Case, name: str) -> None:
    if case[name] % case["world_size"]:
        raise CaseFileError(
            f"{name}={case[name]} is not divisible by world_size={case['world_size']}; pass another --ranks"
        )
