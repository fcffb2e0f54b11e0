"""Only correct results are timed."""

from __future__ import annotations

import torch

from moe_a2a import codecs
from moe_a2a.bench.cases import Inputs
from moe_a2a.bench.contenders import Contender
from moe_a2a.bench.expected import expected_output
from moe_a2a.bench.together import FailedSomewhereError, together

PEER_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative to the largest value


class WrongResultError(ArithmeticError):
    pass


def check(contender: Contender, inputs: Inputs) -> str | None:
    """Rehearses the contender. Returns the reason if it may not be timed, the same on every rank."""
    try:
        together(lambda: _compare(contender, inputs))
    except FailedSomewhereError as error:
        return str(error)
    return None


def _compare(contender: Contender, inputs: Inputs) -> None:
    out = contender.rehearse()
    expected = expected_output(contender.arrived(inputs.x), inputs)
    if out.shape != expected.shape:
        raise WrongResultError(f"shape {list(out.shape)}, expected {list(expected.shape)}")
    if contender.is_exact:
        wrong = out != expected
    else:
        largest = expected.abs().max() if expected.numel() else 1
        # The check's experts keep the sign of x, so the ranks' sums do not cancel, and neither do their bounds.
        of_wire = 0.0 if contender.wire is None else codecs.ONE_ROUNDING[contender.wire]
        wrong = ~((out.float() - expected.float()).abs() <= (PEER_TOLERANCE[out.dtype] + of_wire) * largest)
    if wrong.any():
        token, column = (int(i) for i in wrong.nonzero()[0])
        raise WrongResultError(
            f"{int(wrong.sum())} of {wrong.numel()} values, first at token {token}, column {column}: "
            f"{out[token, column].item()}, expected {expected[token, column].item()}"
        )
