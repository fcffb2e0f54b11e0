"""Collectives: all-reduce, reduce-scatter and all-gather over the same communicator, signals and waits as dispatch() and
combine()."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from moe_a2a import _core, arguments, calls, capabilities, codecs, operators, set_up
from moe_a2a.codecs import CODECS
from moe_a2a.communicator import CommunicatorClient
from moe_a2a.graph_tracing import is_tracing
from moe_a2a.tables import collective_tables

# In the order of csrc/collectives/announcement.h.
OPS = ("sum", "max", "min", "avg")
ALGORITHMS = ("auto", *collective_tables.ALGORITHMS, "direct")

_NAMES = dict(zip(arguments.ROW_DTYPES, arguments.ROW_DTYPE_NAMES, strict=True))  # in tables

MAX_NBYTES = 1 << 40
MAX_SYMMETRIC_NBYTES = 1 << 38  # a kernel counts the elements of a chunk in 32 bits
SHARE_UNIT = 64  # elements: kShareUnit in csrc/collectives/collective_region.h


class Collectives(CommunicatorClient):
    """Reductions and gathers over the ranks of a communicator, or of a group.

    Args:
        group: a Communicator, or what a Communicator takes.
        max_nbytes: bytes of a tensor that fit into the workspace, on the CPU at most 256 KiB; larger tensors are sent in
            slices. The object takes 2 + 2 / num_ranks times as much memory, plus about 150 KiB per rank (see `nbytes`). The
            same on every rank.
        symmetric_nbytes: memory for tensors made by empty(), which every rank can read and write. The same on every rank.
        num_blocks: limit on the blocks (CPU: threads) of a kernel; the rest of the device is free for other work, and for the
            other objects of this process. 0: what the table says, or for large tensors as many as can run at once.
        table: the file of a measured table, instead of the one that fits this GPU; see docs/tuning.md. The same on every rank.
        device, timeout: for the Communicator that is made if `group` is not one.

    Every rank makes the same calls in the same order, with the same arguments. If any call differs, all ranks raise
    CallMismatchError. If a call fails on one rank before it begins, the others raise PeerRefusedError. Either way the call
    is over on every rank, and the object stays usable.

    Values are merged in fp32 and rounded once to the dtype, in an order that the algorithm and the number of ranks
    determine ("one_shot", "two_shot" and reduce_scatter(): rank order). So all ranks get the same bits, and equal inputs
    give equal bits. A NaN on any rank gives NaN, for "max" and "min" too. Tensors are contiguous, of float32,
    float16 or bfloat16, with any number of elements at any address. Work is queued on PyTorch's current stream of the
    device. On a GPU a kernel's error is raised by check() or by a later call, which still runs. The constructor raises as
    that of a Communicator.
    """

    @set_up.refuses_wrong_arguments
    def __init__(
        self,
        group: Any = None,
        max_nbytes: int = 128 << 20,
        num_blocks: int = 0,
        *,
        symmetric_nbytes: int = 0,
        table: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
        timeout: float = 30.0,
    ):
        self._join(group, device, timeout)
        self.max_nbytes, self.symmetric_nbytes, self.num_blocks = max_nbytes, symmetric_nbytes, num_blocks
        self._table_file = table
        self._number = operators.numbered(self)
        self._make()

    def _allocate(self) -> None:
        self.max_nbytes = arguments.checked_int(self.rank, "max_nbytes", self.max_nbytes, 1, MAX_NBYTES)
        self.symmetric_nbytes = arguments.checked_int(
            self.rank, "symmetric_nbytes", self.symmetric_nbytes, 0, MAX_SYMMETRIC_NBYTES
        )
        self.num_blocks = arguments.checked_int(self.rank, "num_blocks", self.num_blocks, 0)
        arguments.check_optional_path(self.rank, "table", self._table_file)
        comm = self._allocated_comm()
        self.tables = collective_tables.in_effect(self.device, self.num_ranks, self._table_file)
        self._core = _core.Collectives(
            comm, self._owns_comm, self.device, self.max_nbytes, self.symmetric_nbytes, self.num_blocks
        )

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor in symmetric memory. A call on such tensors, or on views of them, needs no workspace and takes
        less time: all_reduce() if both x and out are such tensors, reduce_scatter() if x is, all_gather() if out is.

        Each rank makes the same tensors in the same order: kernels find a tensor on another rank at its place on this one. A
        call whose tensors lie elsewhere on another rank raises CallMismatchError.

        Args:
            size: as in torch.empty().
            dtype: default: PyTorch's default dtype.

        The tensor and its views stay valid after close(). Their memory is reused only when the object and all of them
        are gone.

        Raises:
            ValueError, TypeError: an argument is wrong, or symmetric_nbytes is used up.
        """
        core = self._open_core()
        try:
            meta = torch.empty(*size, dtype=dtype, device="meta")  # type: ignore[arg-type]
        except (TypeError, RuntimeError) as error:
            what = f"size={size!r}, dtype={dtype!r} on rank {self.rank}: {str(error).splitlines()[0]}"
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{what}; pass them as to torch.empty()") from None
        return core.take_tensor(meta.nbytes).view(meta.dtype).view(meta.shape)

    @calls.refuses_wrong_arguments(calls.refused_if_failed)
    def all_reduce(
        self,
        x: torch.Tensor,
        op: str = "sum",
        algorithm: str = "auto",
        codec: str | None = None,
        *,
        max_error: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Merges the `x` of all ranks element by element, on every rank.

        Args:
            x: the same number of elements and dtype on every rank.
            op: "sum", "max", "min" or "avg".
            algorithm: "one_shot": every rank writes its x to every other; one trip, for small tensors. The smallest go as
                LL words, which need no signal: the table says up to which size, the bits are the same. "two_shot": each
                rank reduces its share of the elements, and reads the others' shares. "ring": shares travel around the
                ring, each rank writes only to the next. "recursive_doubling": log2(num_ranks) pairwise exchanges.
                "direct": as two-shot, with its bits, but in one pass, and without the workspace; x and out must be made by
                empty(). "auto": by size, from the table (`tables`), else one of the first two, or "direct" if x and out
                allow it.
            codec: None: values travel as they are. "fp8", "q8", "q6" or "q4": by two-shot, in blocks of 32 values that share
                a scale, with 8, 8, 6 or 4 bits per value. The other ranks' contributions are rounded once, the result once
                more; all ranks still get the same bits. Each rounding is off by at most one step: the block's
                largest magnitude / 128, / 32 or / 8 (fp8: 1/16 of the value, or a 458,752th of that magnitude).
                A NaN or infinity turns its whole block into NaNs. "auto": by size, the codec with the fewest bits, or none.
            max_error: largest error that the caller allows, as defined by moe_a2a.codecs.max_error(). "auto" respects it; a
                codec that may exceed it is refused. With codec=None it implies codec="auto".
            out: the tensor to write to, with the shape of x; may be x. Default: a new tensor.

        Raises:
            ValueError, TypeError: an argument is wrong.
            CallMismatchError: another rank makes a different call.
            PeerRefusedError: another rank's call failed.
            PeerTimeoutError: a rank did not arrive.
        """
        if is_tracing():
            operator = operators.that_returns(x.numel(), "all_reduce")
            result = operator(x, op, algorithm, codec, max_error, self._number.value)
            return _stored(self.rank, result, out)
        core = self._open_core()
        with calls.refused_if_failed(self):
            self._check_tensors(x, out)
            op_index = arguments.checked_choice(self.rank, "op", op, OPS)
            arguments.checked_choice(self.rank, "algorithm", algorithm, ALGORITHMS)
            table = self._table_of("all_reduce", x)
            codec_index = self._checked_codec(codec, algorithm, max_error, x, table)
            step = self._step_of(table, x, out)
            if algorithm == "auto":
                algorithm = step.algorithm if codec_index == 0 else "two_shot"
            num_blocks = step.num_blocks if codec_index == 0 and algorithm == step.algorithm else 0
            as_words = algorithm == "one_shot" and nbytes_of(x) <= table.most_in_words
        return core.all_reduce(x, op_index, ALGORITHMS.index(algorithm), codec_index, as_words, num_blocks, out)

    @calls.refuses_wrong_arguments(calls.refused_if_failed)
    def reduce_scatter(
        self,
        x: torch.Tensor,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Merges the `x` of all ranks element by element; returns this rank's rows.

        Args:
            x: [n, ...], the rows of rank 0, then those of rank 1, and so on; the same shape and dtype on every rank.
            op: "sum", "max", "min" or "avg".
            counts: rows of each rank, which sum to n, the same on every rank; None: n / num_ranks each.
            out: the tensor to write to, [counts[rank], ...]; may be this rank's rows of x. Default: a new tensor.

        Raises: as all_reduce().
        """
        if is_tracing():
            _check_has_rows(self.rank, x)
            rows = operators.num_own_rows(x, counts, self.rank, self.num_ranks)
            operator = operators.that_returns(rows * math.prod(x.shape[1:]), "reduce_scatter")
            result = operator(x, op, counts, self.rank, self.num_ranks, self._number.value)
            return _stored(self.rank, result, out)
        core = self._open_core()
        with calls.refused_if_failed(self):
            self._check_tensors(x, out)
            op_index = arguments.checked_choice(self.rank, "op", op, OPS)
            counts = arguments.checked_counts(self.rank, counts)
            num_blocks = self._table_of("reduce_scatter", x).step(nbytes_of(x)).num_blocks
        return core.reduce_scatter(x, op_index, counts, num_blocks, out)

    @calls.refuses_wrong_arguments(calls.refused_if_failed)
    def all_gather(
        self, x: torch.Tensor, counts: Sequence[int] | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Gathers the rows of all ranks, in rank order.

        Args:
            x: [n, ...], this rank's rows; the same dtype and row shape on every rank.
            counts: rows of each rank, the same on every rank; None: n each.
            out: the tensor to write to, [sum of counts, ...]; x may be this rank's rows of it. Default: a new tensor.

        Raises: as all_reduce().
        """
        if is_tracing():
            _check_has_rows(self.rank, x)
            rows = operators.num_all_rows(x, counts, self.num_ranks)
            operator = operators.that_returns(rows * math.prod(x.shape[1:]), "all_gather")
            return _stored(self.rank, operator(x, counts, self.num_ranks, self._number.value), out)
        core = self._open_core()
        with calls.refused_if_failed(self):
            self._check_tensors(x, out)
            counts = arguments.checked_counts(self.rank, counts)
            num_blocks = self._table_of("all_gather", x).step(nbytes_of(x) * self.num_ranks).num_blocks
        return core.all_gather(x, counts, num_blocks, out)

    @calls.refuses_wrong_arguments(calls.refused_if_failed)
    def barrier(self) -> None:
        """Waits until all ranks call it: on the CPU in the call, on a GPU in the current stream, whose later work follows what
        the ranks have queued before. Raises: as all_reduce()."""
        self._open_core().barrier()

    def refused_if_failed(self) -> AbstractContextManager[None]:
        """Wraps work that precedes a call, for which the peers may already wait: if that work fails, the call is refused."""
        return calls.refused_if_failed(self)

    def capabilities(self) -> capabilities.Capabilities:
        """What this machine offers: collectives, operators, dtypes, codecs with their error bounds, and whether NVSwitch
        or a network could reduce (queried, never used)."""
        self._open_core()
        return capabilities.Capabilities(
            device=str(self.device),
            num_ranks=self.num_ranks,
            collectives={
                "all_reduce": ("op", "algorithm", "codec"),
                "reduce_scatter": ("op", "counts"),
                "all_gather": ("counts",),
                "barrier": (),
            },
            operators=OPS,
            dtypes=arguments.ROW_DTYPE_NAMES,
            algorithms=ALGORITHMS[1:],
            max_errors={codec: codecs.max_error(codec) for codec in CODECS},
            multicast=capabilities.multicast(self.device),
            sharp=capabilities.sharp(),
        )

    def _table_of(self, kind: str, x: torch.Tensor) -> collective_tables.CollectiveTable:
        return self.tables.of(kind, _NAMES.get(x.dtype, "float32"))  # other dtypes are refused later

    def _step_of(
        self, table: collective_tables.CollectiveTable, x: torch.Tensor, out: torch.Tensor | None
    ) -> collective_tables.CollectiveStep:
        """The table's, but two-shot or direct where one-shot would need slices: that never pays."""
        symmetric = self._are_symmetric(x, out)
        step = table.step(nbytes_of(x), symmetric)
        if step.algorithm == "one_shot" and not self._fits_one_shot(nbytes_of(x)):
            return step._replace(algorithm="direct" if symmetric else "two_shot", num_blocks=0)
        return step

    def _are_symmetric(self, x: torch.Tensor, out: torch.Tensor | None) -> bool:
        core = self._open_core()
        return self.symmetric_nbytes > 0 and out is not None and core.holds(x) and (out is x or core.holds(out))

    def _fits_one_shot(self, nbytes: int) -> bool:
        """Whether one-shot sends a tensor of `nbytes` in one slice."""
        return nbytes <= self._core.share_nbytes

    def _checked_codec(
        self, codec: Any, algorithm: str, max_error: Any, x: torch.Tensor, table: collective_tables.CollectiveTable
    ) -> int:
        limit = None if max_error is None else arguments.checked_float(self.rank, "max_error", max_error, 0.0)
        if codec is not None:
            arguments.checked_choice(self.rank, "codec", codec, (*CODECS, "auto"))
        if codec == "auto" or (codec is None and limit is not None):
            nbytes = nbytes_of(x) if algorithm in ("auto", "two_shot") else 0
            codec = codecs.choose(nbytes, self.num_ranks, limit, table.codecs)
        if codec is None:
            return 0
        if algorithm not in ("auto", "two_shot"):
            raise ValueError(
                f'codec="{codec}" with algorithm="{algorithm}" on rank {self.rank}: only two_shot supports codecs, '
                'since another algorithm could exceed their error bounds; pass algorithm="two_shot", or codec=None'
            )
        if limit is not None and codecs.max_error(codec) > limit:
            raise ValueError(
                f'codec="{codec}" may be off by {codecs.max_error(codec):.3g} > max_error={limit:g} on rank {self.rank}; pass '
                'codec="auto", or a larger max_error'
            )
        return 1 + CODECS.index(codec)

    def _check_tensors(self, x: Any, out: Any) -> None:
        arguments.check_tensor(self.rank, "x", x)
        arguments.check_optional_tensor(self.rank, "out", out)


def check_open_collectives(collectives: Any) -> None:
    """Raises unless the argument `collectives` is an open Collectives."""
    if not isinstance(collectives, Collectives):
        raise TypeError(f"collectives is a {type(collectives).__name__}; pass a moe_a2a.Collectives")
    if collectives.is_closed:
        raise ValueError(f"collectives is closed on rank {collectives.rank}; pass an open one")


def check_collectives_of(ep: CommunicatorClient, collectives: Any) -> None:
    """Raises unless the arguments `ep` and `collectives` have the same ranks and device."""
    check_open_collectives(collectives)
    for name in ("num_ranks", "rank", "device"):
        its, expected = getattr(collectives, name), getattr(ep, name)
        if its != expected:
            raise ValueError(
                f"collectives has {name} {its}, but ep has {name} {expected} on rank {ep.rank}; pass one over the same ranks, on "
                "the same device"
            )


def even_shares(count: int, num_ranks: int) -> list[int]:
    """How many of a tensor's elements each rank reduces, as even as whole units allow: Shares::even() in
    csrc/collectives/shares.h."""
    each = -(-count // (num_ranks * SHARE_UNIT)) * SHARE_UNIT
    return [max(0, min(each, count - rank * each)) for rank in range(num_ranks)]


def nbytes_of(x: torch.Tensor) -> int:
    """x.nbytes for any layout: a sparse tensor, which is refused later, has no such attribute."""
    return x.numel() * x.element_size()


def _check_has_rows(rank: int, x: torch.Tensor) -> None:
    if x.dim() == 0:
        raise ValueError(f"x has no dimension to split over the ranks on rank {rank}; pass x.reshape(1)")


def _stored(rank: int, result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return result
    arguments.check_out(rank, out, list(result.shape), result.dtype, result.device)
    return out.copy_(result)
