"""The line codecs as a caller of Collectives.all_reduce() sees them: how far they may be off, and which one "auto" takes.

Bounds are derived in docs/collectives.md; csrc/rows/line_codec.h does the work.
"""

from __future__ import annotations

CODECS = ("fp8", "q8", "q6", "q4")  # in the order of csrc/rows/line_codec.h; None comes before them
BITS = {"fp8": 8.5, "q8": 8.5, "q6": 6.5, "q4": 4.5}  # of a value on the wire, its part of the scale included

# The most by which one rounding is off, as a part of the largest magnitude of its block. A scale is rounded up by 2^-7 at
# most, and with it the step of the integer codecs; fp8 rounds a value to 4 significant bits, whatever the scale.
_SCALE = 1 + 2**-7
ONE_ROUNDING = {"fp8": 2**-4, "q8": 2**-7 * _SCALE, "q6": 2**-5 * _SCALE, "q4": 2**-3 * _SCALE}

# Tensors of fewer bytes are not worth a codec, by device type.
MIN_NBYTES: dict[str, dict[str, int]] = {
    "cpu": {},  # never: 2 ranks, 16 MiB of bfloat16: 5 ms without a codec, 62 with q8, 80 with q4
    # 2 H200, bfloat16, beside no codec: q4 19.7 and 20.4 us at 4 MiB, q8 32.4 and 36.5 us at 8 MiB, q6 31.4.
    "cuda": {"fp8": 8 << 20, "q8": 8 << 20, "q6": 8 << 20, "q4": 4 << 20},
}


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


def choose(device_type: str, nbytes: int, num_ranks: int, limit: float | None) -> str | None:
    """The codec of fewest bits that is off by `limit` at most (None: any) and worth it at this size; None: none is.
    All ranks that agree on the arguments agree on the answer."""
    if num_ranks == 1:
        return None
    least = MIN_NBYTES[device_type]
    fit = [c for c in CODECS if c in least and nbytes >= least[c] and (limit is None or max_error(c) <= limit)]
    return min(fit, key=lambda codec: (BITS[codec], max_error(codec)), default=None)
