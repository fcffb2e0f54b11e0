"""What the dispatches of an ExpertParallel have in common on all ranks, and in which words the ranks learn that theirs differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moe_a2a.arguments import ROW_DTYPES


class Kind(NamedTuple):
    """What all dispatches of an ExpertParallel have in common, on all ranks."""

    num_experts: int
    num_topk: int
    hidden: int
    dtype: torch.dtype
    is_low_latency: bool

    def num_max_tokens_per_rank(self, num_max_tokens: int) -> int:
        """The size of an ExpertParallel for batches of num_max_tokens: a power of two, so that few are made as batches grow."""
        return num_max_tokens if self.is_low_latency else 1 << max(num_max_tokens - 1, 127).bit_length()


class Call(NamedTuple):
    """A dispatch, as the ranks compare it."""

    kind: Kind
    num_max_tokens: int  # 0: what the largest batch has
    is_float8: bool
    has_weights: bool
    by_route: bool = False  # else packed, or for low-latency calls by expert

    def numbers(self) -> list[int]:
        kind = self.kind
        arrangement = 2 if kind.is_low_latency else int(self.by_route)
        dtype = ROW_DTYPES.index(kind.dtype) if kind.dtype in ROW_DTYPES else len(ROW_DTYPES)
        most = self.num_max_tokens and kind.num_max_tokens_per_rank(self.num_max_tokens)
        sizes = kind.num_experts, kind.num_topk, kind.hidden, dtype, most
        return [arrangement, *sizes, self.is_float8, self.has_weights]


def difference(rank: int, mine: Sequence[int], least: Sequence[int], most: Sequence[int]) -> str:
    """The first of Call.numbers() in which the ranks differ, in words."""
    numbers = zip(_COMPARED, mine, least, most, strict=True)
    (what, words), own, low, high = next(number for number in numbers if number[2] != number[3])
    other = low if own == high else high
    return (
        f"ranks disagree on {what}: {words(own)} on rank {rank}, {words(other)} on another; pass the same on every rank"
    )


_is_or_not: Callable[[int], Any] = ("no", "yes").__getitem__
# For each of Call.numbers(): the arguments of DeepEP that it comes from, and its value in words.
_COMPARED: tuple[tuple[str, Callable[[int], Any]], ...] = (
    (
        "the rows of the call (do_expand, or which dispatch it is)",
        ("packed", "by route", "by expert (low latency)").__getitem__,
    ),
    ("the number of experts (num_experts, or the length of num_tokens_per_expert)", int),
    ("the columns of topk_idx", int),
    ("the row length of x or hidden", int),
    ("the dtype of x or hidden", (*ROW_DTYPES, "another dtype").__getitem__),
    ("the most tokens of a rank (num_max_..., num_worst_tokens), rounded up", int),
    ("whether rows are float8 (x, hidden or use_fp8)", _is_or_not),
    ("whether there are topk_weights or probs", _is_or_not),
)
