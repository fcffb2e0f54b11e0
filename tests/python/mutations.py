"""Damages files: the mutations that fuzzers apply to bytes and to JSON documents."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

# Each has a type, size or sign that a reader may not expect.
STRANGE = [
    None, True, False, 0, 1, -1, 2, 7, 63, 64, 65, 10**6, 2**31 - 1, 2**31, -(2**31) - 1, 2**53, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400,
    0.5, -0.5, 1e18, 1e300, float("inf"), float("-inf"), float("nan"), "", "64", "rank 0", "rank 99999999999999999999",
    "block 0 warp 70000", "kernel", "é\ud800", "x" * 5000, [], [[]], [0], {}, {"": 0}, {"num_ranks": 10**9},
]  # fmt: skip


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Applies one or more of: truncate, flip bits, set bytes, remove, repeat or swap pieces."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 30))):
        if not data:
            break
        at, size = rng.randrange(len(data)), min(len(data), rng.choice((1, 2, 8, 64, 1024)))
        kind = rng.randrange(7)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 3:
            del data[at : at + size]
        elif kind == 4:
            data[at:at] = data[at : at + size] * rng.choice((1, 2, 50))
        elif kind == 5:
            data[at : at + size] = rng.randbytes(size)
        else:
            other = rng.randrange(len(data))
            one, two = bytes(data[at : at + size]), bytes(data[other : other + size])
            data[at : at + len(two)], data[other : other + len(one)] = two, one
    return bytes(data)


def damaged_json(text: str, rng: random.Random) -> bytes:
    """Replaces, removes, duplicates or swaps values anywhere in the document."""
    document = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 30))):
        parent, key = _place(document, rng)
        if parent is None:
            return _as_json(rng.choice(STRANGE))
        kind = rng.randrange(6)
        if kind <= 2:
            parent[key] = copy.deepcopy(rng.choice(STRANGE))
        elif kind == 3:
            del parent[key]
        elif kind == 4 and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            other, other_key = _place(document, rng)
            if other is not None:
                parent[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(parent[key])
    return _as_json(document)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def _place(document: Any, rng: random.Random) -> tuple[Any, Any]:
    """A container of the document and one of its keys; each level is as likely as everything below it."""
    parent, key, value = None, None, document
    while isinstance(value, (dict, list)) and value and (parent is None or rng.random() < 0.75):
        parent = value
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value = parent[key]
    return parent, key


def _as_json(value: Any) -> bytes:
    # Surrogates cannot be encoded; escaped, they still reach the reader.
    return json.dumps(value).encode()
