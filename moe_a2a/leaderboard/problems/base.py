"""What the harness needs to know of a problem."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from moe_a2a.leaderboard.cases import Case, CaseFileError

Tensors = dict[str, Tensor]


class Problem(Protocol):
    """Made in the harness's own process, where no submission runs, and once more in each rank's process."""

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

    def bytes_to_move(self, case: Case, tensors: list[Tensors]) -> float:
        """What the busiest rank has to send, or to receive, to or from the others, whatever the submission does."""
        ...

    def mismatch(self, output: Tensor, expected: Tensor) -> str:
        """Why a rank's output is not what was expected; "" if it is."""
        ...

    def disagreement(self, outputs: list[Tensor]) -> str:
        """What is wrong with the outputs of all ranks together, though each is right; "" if nothing is."""
        ...


class CloseTo:
    """The checks of most problems: every value within a tolerance, and nothing that ranks have to agree on."""

    rtol: float
    atol: float

    def check_case(self, case: Case) -> None:
        pass

    def make_weights(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        return {}

    def mismatch(self, output: Tensor, expected: Tensor) -> str:
        return shape_mismatch(output, expected) or value_mismatch(output, expected, self.rtol, self.atol)

    def disagreement(self, outputs: list[Tensor]) -> str:
        return ""


def shape_mismatch(output: Tensor, expected: Tensor) -> str:
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return f"returned {list(output.shape)} of {output.dtype}, expected {list(expected.shape)} of {expected.dtype}"
    return ""


def value_mismatch(output: Tensor, expected: Tensor, rtol: float, atol: float) -> str:
    close = torch.isclose(output, expected, rtol=rtol, atol=atol)
    if bool(close.all()):
        return ""
    where = tuple((~close).nonzero()[0].tolist())
    num_wrong = int((~close).sum())
    return (
        f"{num_wrong} of {close.numel()} values are wrong; at {list(where)} it is {output[where].item():g}, expected "
        f"{expected[where].item():g} (rtol {rtol:g}, atol {atol:g})"
    )


def error_share(output: Tensor, expected: Tensor) -> float:
    """The norm of the error over the norm of what was expected."""
    norm = float(expected.float().norm())
    return float((output.float() - expected.float()).norm()) / norm if norm else 0.0


def check_divides(case: Case, name: str) -> None:
    if case[name] % case["world_size"]:
        raise CaseFileError(
            f"{name}={case[name]} is not divisible by world_size={case['world_size']}; pass another --ranks"
        )
