"""The Python interface of MK1's QuickReduce, implemented with Collectives:

    import moe_a2a.quickreduce as qr

    qr.init(world_size, rank)
    qr.set_comm_handles(handles)        # get_comm_handle() of every rank, in rank order
    result = qr.allreduce(qr.Profile.Q6, tensor)

One instance per process, any number of ranks, float16, bfloat16 and float32 tensors of up to 512 MiB; the result is a new
tensor. Work is queued on the current stream, not on that of init().
"""

from __future__ import annotations

import enum

import torch

from moe_a2a import arguments, calls
from moe_a2a.collectives import Collectives
from moe_a2a.groups import HandleExchange

__all__ = [
    "MAX_NBYTES",
    "Profile",
    "allreduce",
    "close",
    "get_comm_handle",
    "get_rank",
    "get_world_size",
    "init",
    "set_comm_handles",
]

MAX_NBYTES = 512 << 20


class Profile(enum.IntEnum):
    """How values travel. FP16: unchanged, whatever their dtype."""

    FP16 = 1
    FP8 = 2
    Q8 = 3
    Q6 = 4
    Q4 = 5


_CODECS = (None, "fp8", "q8", "q6", "q4")  # in the order of Profile

_instance: Collectives | None = None


def init(world_size: int, rank: int) -> None:
    """Allocates this rank's memory, on the current GPU or on the CPU. Closes an earlier instance."""
    global _instance
    world_size = arguments.checked_int(None, "world_size", world_size, 1, arguments.MAX_RANKS)
    rank = arguments.checked_int(None, "rank", rank, 0, world_size - 1)
    close()
    _instance = Collectives(HandleExchange(rank, world_size))


def close() -> None:
    global _instance
    if _instance is not None:
        _instance.close()
    _instance = None


def get_world_size() -> int:
    return _open().num_ranks


def get_rank() -> int:
    return _open().rank


def get_comm_handle() -> bytes:
    return _open().get_comm_handle()


def set_comm_handles(handles: list[bytes]) -> None:
    _open().set_comm_handles(handles)


def allreduce(profile: int, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of `tensor` over all ranks, with values travelling as `profile` says.

    Raises:
        ValueError, TypeError: an unknown profile (QuickReduce takes any for FP16), or a tensor that is not contiguous, has
            another dtype or more than 512 MiB.
    """
    coll = _open()
    with calls.refused_if_failed(coll):
        _check_tensor(coll.rank, tensor)
        # Not left to checked_int(): Dynamo fails in operator.index(Profile.Q8).
        number = profile.value if isinstance(profile, Profile) else profile
        number = arguments.checked_int(coll.rank, "profile", number, 1, len(_CODECS))
    return coll.all_reduce(tensor, "sum", "two_shot", _CODECS[number - 1])


def _check_tensor(rank: int, tensor: torch.Tensor) -> None:
    arguments.check_tensor(rank, "tensor", tensor)
    if tensor.dtype not in arguments.ROW_DTYPES:
        raise TypeError(
            f"tensor has dtype {tensor.dtype} on rank {rank}; pass torch.float16, torch.bfloat16 or torch.float32"
        )
    if tensor.layout == torch.strided and not tensor.is_contiguous():
        raise ValueError(f"tensor is not contiguous on rank {rank}; pass tensor.contiguous()")
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > MAX_NBYTES:
        raise ValueError(
            f"tensor has {nbytes} bytes > {MAX_NBYTES} on rank {rank}; pass it in slices, or use moe_a2a.Collectives, which has "
            "no limit"
        )


def _open() -> Collectives:
    if _instance is None:
        raise RuntimeError("quickreduce is not set up; call init(world_size, rank) first")
    return _instance
