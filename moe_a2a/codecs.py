"""The line codecs as a caller of Collectives.all_reduce() sees them: how far they may be off, and which one "auto" takes.

Bounds are derived in docs/collectives.md; csrc/rows/line_codec.h does the work.
"""

from __future__ import annotations

from collections.abc import Mapping

CODECS = ("fp8", "q8", "q6", "q4")  # in the order of csrc/rows/line_codec.h; None comes before them
BITS = {"fp8": 8.5, "q8": 8.5, "q6": 6.5, "q4": 4.5}  # of a value on the wire, its part of the scale included

# The most by which one rounding is off, as a part of the largest magnitude of its block. A scale is rounded up by 2^-7 at
# most, and with it the step of the integer codecs; fp8 rounds a value to 4 significant bits, whatever the scale.
_SCALE = 1 + 2**-7
ONE_ROUNDING = {"fp8": 2**-4, "q8": 2**-7 * _SCALE, "q6": 2**-5 * _SCALE, "q4": 2**-3 * _SCALE}


def max_error(codec: str | None) -> float:
    """The most by which an element of an all-reduce is off. It is a part of what the operator makes of the largest
    magnitudes of the element's block of 32 on all ranks: their sum, their average, or their maximum (for "min" too).

    Contributions are rounded once; the result, which by then may be larger by what that was off, once more. What the dtype
    rounds comes on top, as without a codec. 0 for None.
    """
    if codec is None:
        return 0.0
    once = ONE_ROUNDING[codec]
    return once + once * (1 + once)


def choose(nbytes: int, num_ranks: int, limit: float | None, least: Mapping[str, int]) -> str | None:
    """The codec of fewest bits that is off by `limit` at most (None: any) and worth it at this size; None: none is.
    least: of each codec that can be worth it, the bytes from which it is. All ranks that agree on the arguments agree on the
    answer."""
    if num_ranks == 1:
        return None
    fit = [c for c in CODECS if c in least and nbytes >= least[c] and (limit is None or max_error(c) <= limit)]
    return min(fit, key=lambda codec: (BITS[codec], max_error(codec)), default=None)
