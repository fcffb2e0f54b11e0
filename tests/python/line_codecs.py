"""The line codecs and two-shot all-reduce over them in NumPy: the bits that csrc/rows/line_codec.h must produce."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

BLOCK = 32
BITS = {"fp8": 8, "q8": 8, "q6": 6, "q4": 4}
RANGE = {"fp8": 448.0, "q8": 128.0, "q6": 32.0, "q4": 8.0}
# Largest error of a value, relative to the largest magnitude of its block.
STEP = {"q8": 1 / 128, "q6": 1 / 32, "q4": 1 / 8}
SHARE_UNIT = 64


def to_bfloat16_away_from_zero(magnitude: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 that is not smaller."""
    return ((magnitude.view(np.uint32).astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint32)


def nearest_e4m3(values: np.ndarray) -> np.ndarray:
    exponent = np.maximum(np.frexp(values)[1] - 1, -6)
    quantum = np.ldexp(np.float32(1), exponent - 3)
    return (np.rint(values / quantum) * quantum).astype(np.float32)


def e4m3_code(values: np.ndarray) -> np.ndarray:
    """For values that e4m3 represents exactly."""
    magnitude = np.abs(values)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, -6)
    mantissa = np.ldexp(magnitude, 3 - exponent).astype(np.int64)  # 8 ... 15, or less for subnormals
    code = np.where(mantissa < 8, mantissa, (exponent + 7) * 8 + mantissa - 8)
    return (code | np.signbit(values).astype(np.int64) << 7).astype(np.uint8)


def encode(x: np.ndarray, codec: str) -> tuple[bytes, np.ndarray]:
    """The line of float32 values, and the values it decodes to."""
    blocks = np.zeros((-(-len(x) // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: len(x)] = x
    with np.errstate(all="ignore"):
        finite = np.isfinite(blocks).all(axis=1)
        most, least = np.nanmax(blocks, axis=1, initial=0), np.nanmin(blocks, axis=1, initial=0)
        magnitude = np.maximum(most, -least).astype(np.float32)
        is_large = finite & (magnitude >= np.float32(2.0**-116))
        step = to_bfloat16_away_from_zero(magnitude * (np.float32(1) / np.float32(RANGE[codec])))
        if codec != "fp8":
            step |= np.where(most >= -least, 0x8000, 0).astype(np.uint32)
        step = np.where(finite, np.where(is_large, step, 0), 0x7FC0).astype(np.uint32)
        scale = (step << 16).view(np.float32)
        inverse = np.where(is_large, np.float32(1) / scale, np.float32(0)).astype(np.float32)
        limit = np.float32(RANGE[codec])
        scaled = blocks * inverse[:, None]
        if codec == "fp8":
            values = nearest_e4m3(np.fmin(np.fmax(scaled, -limit), limit))
            code = e4m3_code(values)
        else:
            values = np.rint(np.fmin(scaled, limit - 1)).astype(np.float32)  # also replaces NaN
            code = (values + limit).astype(np.uint8)
        decoded = values * scale[:, None]
    return pack(code.reshape(-1), codec) + step.astype("<u2").tobytes(), decoded.reshape(-1)[: len(x)]


def decoded_rows(rows: torch.Tensor, codec: str) -> torch.Tensor:
    """What a receiver reads of float32 rows, each a line of its own."""
    padded = np.zeros((len(rows), -(-rows.shape[1] // BLOCK) * BLOCK), np.float32)
    padded[:, : rows.shape[1]] = rows.numpy()
    return torch.from_numpy(encode(padded.reshape(-1), codec)[1].reshape(padded.shape)[:, : rows.shape[1]])


def wire(codec: str | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """For reference.combine(): what becomes of rows that travel."""
    return (lambda rows: rows) if codec is None else (lambda rows: decoded_rows(rows, codec))


def draw_wires(rng: random.Random, num_ranks: int) -> tuple[str | None, ...]:
    """Most often none; else the same on all ranks, or any mixture."""
    style = rng.random()
    if style < 0.6:
        return (None,) * num_ranks
    if style < 0.85:
        return (rng.choice(list(BITS)),) * num_ranks
    return tuple(rng.choice((None, *BITS)) for _ in range(num_ranks))


def pack(code: np.ndarray, codec: str) -> bytes:
    if BITS[codec] == 8:
        return code.tobytes()
    line = (code[0::2] & 15 | code[1::2] << 4).astype(np.uint8).tobytes()
    if codec == "q6":
        high = code >> 4
        line += (high[0::4] | high[1::4] << 2 | high[2::4] << 4 | high[3::4] << 6).astype(np.uint8).tobytes()
    return line


def merge(rows: list[np.ndarray], op: str) -> np.ndarray:
    """In rank order, in fp32."""
    merged = rows[0].copy()
    with np.errstate(all="ignore"):
        for row in rows[1:]:
            if op == "max":
                merged = np.where((row > merged) | np.isnan(row), row, merged)
            elif op == "min":
                merged = np.where((row < merged) | np.isnan(row), row, merged)
            else:
                merged = merged + row
        return merged / np.float32(len(rows)) if op == "avg" else merged


def two_shot(xs: list[torch.Tensor], codec: str, op: str = "sum") -> torch.Tensor:
    rows = [x.float().numpy() for x in xs]
    count, share = len(rows[0]), -(-len(rows[0]) // len(rows))
    share = -(-share // SHARE_UNIT) * SHARE_UNIT
    result = np.empty(count, np.float32)
    for owner in range(len(rows)):
        part = slice(min(owner * share, count), min((owner + 1) * share, count))
        sent = [row[part] if r == owner else encode(row[part], codec)[1] for r, row in enumerate(rows)]
        result[part] = encode(merge(sent, op), codec)[1]
    return torch.from_numpy(result).to(xs[0].dtype)
