"""The interface of a problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from moe_a2a.leaderboard.cases import Case, CaseFileError

Tensors = dict[str, Tensor]
MOST = 2**31 - 1  # the largest size


class Problem(Protocol):
    """Instantiated in the harness's own process, which runs no submission, and in each rank's process."""

    def check_case(self, case: Case) -> None:
        """Raises CaseFileError if a size is missing, unknown or out of range, or does not suit the number of ranks."""

    def make_weights(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        """A rank's inputs that stay the same throughout a case."""
        ...

    def make_inputs(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        """A rank's inputs that are new in each call."""
        ...

    def as_data(self, case: Case, tensors: Tensors, rank: int) -> Any:
        """The argument of custom_kernel(): the weights and inputs in the contract's form."""
        ...

    def expected(self, case: Case, tensors: list[Tensors]) -> list[Tensor]:
        """The output of each rank, computed from the weights and inputs of all."""
        ...

    def bytes_to_move(self, case: Case, tensors: list[Tensors]) -> float:
        """Bytes that the busiest rank must send to, or receive from, the others in any submission."""
        ...

    def mismatch(self, output: Tensor, expected: Tensor) -> str:
        """How a rank's output differs from the expected one; "" if it is right."""
        ...

    def disagreement(self, outputs: list[Tensor]) -> str:
        """What is wrong with all ranks' outputs together although each is right; "" if nothing is."""
        ...


class CloseTo:
    """The checks of most problems: every value within a tolerance, and nothing for ranks to agree on.

    sizes: the names of a case's sizes, with the least value of each. shared: those that the ranks divide among them.
    ignored: further names that published cases have.
    """

    rtol: float
    atol: float
    sizes: ClassVar[Mapping[str, int]]
    shared: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()

    def check_case(self, case: Case) -> None:
        _check_sizes(case, self.sizes, self.ignored)
        for name in self.shared:
            if case[name] % case["world_size"]:
                raise CaseFileError(
                    f"{name}={case[name]} is not divisible by world_size={case['world_size']}; pass another --ranks"
                )

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
    """The norm of the error over the norm of the expected output."""
    norm = float(expected.float().norm())
    return float((output.float() - expected.float()).norm()) / norm if norm else 0.0


def _check_sizes(case: Case, sizes: Mapping[str, int], ignored: tuple[str, ...]) -> None:
    for name, least in sizes.items():
        value = case.values.get(name)
        if type(value) is not int or not least <= value <= MOST:
            shown = f"{name}={value}" if name in case else f"no {name}"
            raise CaseFileError(f"{shown}; pass an integer from {least} to {MOST}")
    for name in case.values:
        if name not in (*sizes, *ignored, "seed", "world_size"):
            raise CaseFileError(f"{name}={case[name]}: unknown; a case has {', '.join(sizes)}, seed")
