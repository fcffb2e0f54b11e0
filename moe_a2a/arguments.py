"""Checks of arguments that need no tensor data: types, and values other than sizes. Each error names argument, value, rank
and what to pass. The bindings check the shapes, types and memory of tensors."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from typing import Any

import torch

LAYOUTS = ("rows", "expert_major", "masked")  # in the extension's order
MAX_EXPERT_ALIGNMENT = 256
ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROW_DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in ROW_DTYPES)
MAX_INT = 2**31 - 1
MAX_RANKS = 64  # of a communicator
MAX_COUNT = 2**40  # rows of a tensor that is split over ranks
MAX_TIMEOUT = 1e9  # seconds; the clocks of the targets count nanoseconds in 64 bits

Routing = tuple[torch.Tensor, torch.Tensor | None]  # topk_idx, topk_weights


def _refuse(rank: int | None, name: str, value: Any, expected: str) -> TypeError:
    return TypeError(f"{name}={shown(value)} is a {type(value).__name__}{_on(rank)}; pass {expected}")


def shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        return "..."
    return text if len(text) <= 100 else text[:97] + "..."


def check_tensor(rank: int | None, name: str, value: Any) -> None:
    """rank: None for a call that belongs to no group."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}{_on(rank)}; pass a torch.Tensor")


def check_optional_tensor(rank: int | None, name: str, value: Any) -> None:
    if value is not None and not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}{_on(rank)}; pass a torch.Tensor or None")


def check_per_token(rank: int, **tensors: Any) -> None:
    """Each is a tensor [num_tokens, n]."""
    for name, tensor in tensors.items():
        check_tensor(rank, name, tensor)
        if tensor.dim() != 2:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} on rank {rank}; pass a row per token, [num_tokens, ...]"
            )


def check_optional_path(rank: int, name: str, value: Any) -> None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise _refuse(rank, name, value, "the path of a file or None")


def _on(rank: int | None) -> str:
    return "" if rank is None else f" on rank {rank}"


def check_out(rank: int, out: torch.Tensor, shape: list[int], dtype: torch.dtype, device: torch.device) -> None:
    if list(out.shape) != shape or out.dtype != dtype or out.device != device:
        raise ValueError(
            f"out is {list(out.shape)} of {out.dtype} on {out.device} on rank {rank}, expected {shape} of {dtype} on "
            f"{device}; pass such a tensor"
        )


def check_not_transformed(rank: int, what: str) -> None:
    if torch._C._are_functorch_transforms_active():  # type: ignore[attr-defined]
        raise RuntimeError(
            f"{what} was called within a transform of torch.func (grad, vmap, jvp, ...) on rank {rank}; call backward() or "
            "torch.autograd.grad() instead"
        )


def check_dispatched(rank: int, x: Any, x_scales: Any, topk_idx: Any, topk_weights: Any) -> None:
    """For a call that the extension has refused: its own text would not say which argument has the wrong type."""
    check_tensor(rank, "x", x)
    check_optional_tensor(rank, "x_scales", x_scales)
    checked_routing(rank, topk_idx, topk_weights)


def checked_routing(rank: int, topk_idx: Any, topk_weights: Any) -> Routing:
    if topk_idx is None:
        raise ValueError(f"topk_idx is None on rank {rank}; pass topk_idx or handle=")
    check_tensor(rank, "topk_idx", topk_idx)
    check_optional_tensor(rank, "topk_weights", topk_weights)
    return topk_idx, topk_weights


def checked_routing_of(rank: int, x: torch.Tensor, topk_idx: Any, topk_weights: Any, routing: Routing) -> Routing:
    """`routing`, that of handle=, unless the call passes another one too, or x of another length."""
    if topk_idx is not None or topk_weights is not None:
        raise ValueError(f"both handle= and topk_idx or topk_weights given on rank {rank}; pass one or the other")
    if x.dim() and len(x) != len(routing[0]):
        raise ValueError(
            f"x has {len(x)} rows on rank {rank}, but the dispatch of handle had {len(routing[0])}; pass that many, or topk_idx"
        )
    return routing


def checked_int(rank: int | None, name: str, value: Any, least: int = -MAX_INT, most: int = MAX_INT) -> int:
    """rank: as for check_tensor()."""
    if type(value) is not int:
        if isinstance(value, (bool, torch.Tensor)):
            raise _refuse(rank, name, value, "an int")
        try:
            value = operator.index(value)
        except TypeError:
            raise _refuse(rank, name, value, "an int") from None
    if not least <= value <= most:
        raise ValueError(f"{name}={shown(value)} is not in [{least}, {most}]{_on(rank)}; pass a number in this range")
    return value


def checked_ranks(rank: int | None, name: str, ranks: Any, num_ranks: int) -> list[int]:
    """rank: as for check_tensor()."""
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise _refuse(rank, name, ranks, "a list of ranks")
    return [checked_int(rank, name, each, 0, num_ranks - 1) for each in ranks]


def checked_number(rank: int | None, name: str, value: Any, expected: str = "a number") -> float:
    """rank: as for check_tensor()."""
    if isinstance(value, (bool, str, torch.Tensor)):
        raise _refuse(rank, name, value, expected)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _refuse(rank, name, value, expected) from None


def checked_float(rank: int, name: str, value: Any, least: float) -> float:
    """A finite number of at least `least`."""
    number = checked_number(rank, name, value)
    if not (math.isfinite(number) and number >= least):
        raise ValueError(
            f"{name}={shown(value)} is not a finite number >= {least:g} on rank {rank}; pass such a number"
        )
    return number


def checked_row_dtype(rank: int, dtype: Any) -> torch.dtype:
    """The dtype of the rows of an object."""
    if dtype not in ROW_DTYPES:
        raise TypeError(f"dtype={dtype!r} on rank {rank}; pass torch.float32, torch.float16 or torch.bfloat16")
    return dtype


def checked_bound(rank: int, handle: Any, num_max_tokens_per_rank: Any) -> int:
    """None: the bound of `handle`, a DispatchHandle, if one is given, else 0: the object's. If no rank has a token: 1."""
    if num_max_tokens_per_rank is None:
        return 0 if handle is None else handle.num_max_tokens_per_rank
    return checked_int(rank, "num_max_tokens_per_rank", num_max_tokens_per_rank, 0) or 1


def checked_blocks(rank: int, num_blocks: Any, default: int) -> int:
    """`default` for 0."""
    if type(num_blocks) is int and num_blocks == 0:
        return default
    return checked_int(rank, "num_blocks", num_blocks, 0) or default


def checked_bool(rank: int, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(rank, name, value, "True or False")
    return value


def check_num_routes(rank: int, num_routes: int, num_max_routes: int | None) -> None:
    """Raises if num_max_routes, the bound on a call's rows, is too small; None: no bound."""
    if num_max_routes is not None and num_routes > num_max_routes:
        raise ValueError(
            f"expert_offsets[-1]={num_routes} > num_max_routes={num_max_routes} on rank {rank}; pass a larger num_max_routes"
        )


def checked_handles(handles: Any) -> list[bytes]:
    if not isinstance(handles, (list, tuple)) or not all(isinstance(handle, bytes) for handle in handles):
        raise TypeError(f"handles={shown(handles)}; pass the list of get_comm_handle() of every rank, in rank order")
    return list(handles)


def checked_timeout(rank: int, timeout: Any) -> float:
    seconds = checked_number(rank, "timeout", timeout, "a number of seconds")
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_TIMEOUT):
        raise ValueError(
            f"timeout={shown(timeout)} is not in (0, {MAX_TIMEOUT:.0f}] seconds on rank {rank}; pass a number in this range"
        )
    return seconds


def checked_choice(rank: int, name: str, value: Any, choices: tuple[str, ...]) -> int:
    """The index of the choice."""
    if isinstance(value, str) and value in choices:
        return choices.index(value)
    expected = "one of " + ", ".join(f'"{choice}"' for choice in choices)
    if not isinstance(value, str):
        raise _refuse(rank, name, value, expected)
    raise ValueError(f"{name}={shown(value)} is unknown on rank {rank}; pass {expected}")


def checked_counts(rank: int, counts: Any) -> list[int] | None:
    if counts is None:
        return None
    if isinstance(counts, (str, bytes)):
        raise _refuse(rank, "counts", counts, "a list of ints or None")
    try:
        return [checked_int(rank, f"counts[{i}]", count, 0, MAX_COUNT) for i, count in enumerate(counts)]
    except TypeError:
        raise _refuse(rank, "counts", counts, "a list of ints or None") from None


def checked_quantize(rank: int, quantize: Any) -> bool:
    if quantize is None:
        return False
    if not isinstance(quantize, str):
        raise _refuse(rank, "quantize", quantize, '"fp8" or None')
    if quantize != "fp8":
        raise ValueError(f'quantize={shown(quantize)} is unknown on rank {rank}; pass "fp8" or None')
    return True


def checked_layout(rank: int, handle: Any, layout: Any, expert_alignment: Any) -> tuple[str, int]:
    """Replaces None by the value of `handle`, a DispatchHandle, if one is given, or by the default."""
    if layout is expert_alignment is handle is None:
        return "rows", 1
    if layout is None:
        layout = handle.layout if handle is not None else "rows"
        if expert_alignment is None and handle is not None:
            expert_alignment = handle.expert_alignment
    checked_choice(rank, "layout", layout, LAYOUTS)
    if expert_alignment is None:
        return layout, 1
    expert_alignment = checked_int(rank, "expert_alignment", expert_alignment, 1, MAX_EXPERT_ALIGNMENT)
    if expert_alignment != 1 and layout != "expert_major":
        raise ValueError(
            f'expert_alignment={expert_alignment} with layout="{layout}" on rank {rank}; pass layout="expert_major"'
        )
    return layout, expert_alignment
