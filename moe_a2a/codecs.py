"""The line codecs as Collectives.all_reduce() and ExpertParallel.combine() offer them: their error bounds, and the choice of
codec="auto".

docs/collectives.md derives the bounds; csrc/rows/line_codec.h implements the codecs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_a2a import arguments

CODECS = ("fp8", "q8", "q6", "q4")  # in the order of csrc/rows/line_codec.h; None comes before them
BLOCK = 32  # values that share a scale
BITS = {"fp8": 8.5, "q8": 8.5, "q6": 6.5, "q4": 4.5}  # per value on the wire, including its share of the scale

# Largest error of one rounding, relative to the largest magnitude of its block. A scale is rounded up by at most 2^-7, and
# the step of the integer codecs with it; fp8 rounds a value to 4 significant bits, whatever the scale.
_SCALE = 1 + 2**-7
ONE_ROUNDING = {"fp8": 2**-4, "q8": 2**-7 * _SCALE, "q6": 2**-5 * _SCALE, "q4": 2**-3 * _SCALE}


def checked_index(rank: int, name: str, codec: Any) -> int:
    """The codec's number in csrc/rows/line_codec.h; 0 for None."""
    return 0 if codec is None else 1 + arguments.checked_choice(rank, name, codec, CODECS)


def line_bytes(codec: str, num_values: int) -> int:
    """Bytes on the wire of a row of values."""
    return int(-(-num_values // BLOCK) * BLOCK * BITS[codec]) // 8


def max_error(codec: str | None) -> float:
    """Largest error of an element of an all-reduce, relative to what the operator yields for the largest magnitudes of the
    element's block of 32 on all ranks: their sum, their average, or their maximum (also for "min").

    Contributions are rounded once. The result, which that error may have made larger, is rounded once more. The dtype's own
    rounding comes on top, as without a codec. 0 for None.
    """
    if codec is None:
        return 0.0
    once = ONE_ROUNDING[codec]
    return once + once * (1 + once)


def choose(nbytes: int, num_ranks: int, limit: float | None, least: Mapping[str, int]) -> str | None:
    """The codec with the fewest bits whose error is at most `limit` (None: any) and that pays at this size; None if none
    does. least: for each codec that can pay, the bytes from which it does. Ranks with equal arguments get equal answers."""
    if num_ranks == 1:
        return None
    fit = [c for c in CODECS if c in least and nbytes >= least[c] and (limit is None or max_error(c) <= limit)]
    return min(fit, key=lambda codec: (BITS[codec], max_error(codec)), default=None)
