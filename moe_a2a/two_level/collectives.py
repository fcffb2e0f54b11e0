"""Collectives over several nodes: ours within each node, the caller's process group between the nodes.

all_reduce() reduces within the node, so that each of its ranks holds a share. Ranks with the same place on all nodes
exchange their shares over the caller's group; then the node gathers the results. Tensors are cut into slices: while one
slice travels between the nodes, the next is reduced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch

from moe_a2a import arguments, calls, devices, set_up
from moe_a2a.arguments import ROW_DTYPE_NAMES, ROW_DTYPES
from moe_a2a.client import OnePerRank
from moe_a2a.collectives import MAX_NBYTES, OPS, SHARE_UNIT, Collectives, even_shares
from moe_a2a.communicator import Communicator
from moe_a2a.errors import PeerTimeoutError
from moe_a2a.groups import as_group
from moe_a2a.tables import collective_tables
from moe_a2a.two_level.rail import Rail, constructor_refuses_wrong_arguments
from moe_a2a.untraced import untraced

# Multiprocessors that our kernels leave to the kernels of `between`. Both wait for other ranks, so neither may keep the
# other's blocks from running.
MULTIPROCESSORS_LEFT = 32
MOST_PARALLEL_SLICES = 64
LARGEST_ELEMENT = 4  # bytes

KINDS = (*collective_tables.KINDS, "barrier")

Finish = Callable[[], Any]

_refuses_wrong_arguments = calls.refuses_wrong_arguments(methodcaller("refused_if_failed"))


@dataclass
class Call:
    """A call, encoded for comparison between nodes."""

    kind: int
    count: int
    dtype: int
    op: int

    @classmethod
    def of(cls, kind: str, x: torch.Tensor, op: str) -> Call:
        dtype = ROW_DTYPES.index(x.dtype) if x.dtype in ROW_DTYPES else -1
        return cls(KINDS.index(kind), x.numel(), dtype, OPS.index(op))

    def __str__(self) -> str:
        if KINDS[self.kind] == "barrier":
            return "barrier()"
        dtype = ROW_DTYPE_NAMES[self.dtype] if self.dtype >= 0 else "another dtype"
        return f"{KINDS[self.kind]}({self.count} elements, {dtype}, {OPS[self.op]})"


NO_CALL = Call(0, 0, -1, 0)  # from a rank with bad arguments


class TwoLevelCollectives(OnePerRank):
    """Reductions and gathers over the ranks of several nodes.

        node = dist.new_group(ranks of this machine)
        rail = dist.new_group(the ranks with this rank's place on their machines)
        coll = moe_a2a.TwoLevelCollectives(node, rail)

    Args:
        local: the ranks of this node: what a Communicator takes, or a Communicator.
        between: a torch.distributed group of the ranks with the same place on all nodes, in node order: gloo for CPU
            tensors, NCCL for GPU tensors. Every node has the same number of ranks.
        slice_nbytes: bytes of a tensor that all_reduce() reduces and exchanges at once; the same on every rank.
        parallel_slices: slices in flight at the same time; 1: no overlap; the same on every rank.
        staging_nbytes: memory for the shares of these slices, which limits `parallel_slices`; 0: as much as they need,
            parallel_slices * slice_nbytes / ranks of a node.
        num_blocks: see Collectives; 0 on a GPU: all but 32 multiprocessors, which are left to `between`.
        device, timeout: for the Communicator that is made if `local` is not one.

    Rank r is rank r % L of node r // L, with L ranks per node. Every rank makes the same calls in the same order.
    Collectives merges values within each node and rounds them to the dtype; `between` merges them across nodes; "avg"
    divides the sum. If all sums are exact, the bits equal those of a single level.

    Errors are those of Collectives. On CPU tensors the nodes compare their calls before they exchange anything, and wait
    for each other until `timeout`; on GPU tensors until the timeout of `between`. After a failed wait the object
    is unusable on every rank.
    """

    @constructor_refuses_wrong_arguments("Collectives")
    def __init__(
        self,
        local: Any,
        between: Any,
        *,
        slice_nbytes: int = 25 << 20,
        parallel_slices: int = 2,
        staging_nbytes: int = 0,
        num_blocks: int = 0,
        device: torch.device | str | None = None,
        timeout: float = 30.0,
    ):
        with set_up.refused_if_failed(local, "Collectives"):
            self._rail = Rail(between)
        given: dict[str, Any] = {"device": device, "timeout": timeout}

        def make() -> Collectives:
            with set_up.refused_if_failed(local, "Collectives"):
                max_nbytes = arguments.checked_int(None, "slice_nbytes", slice_nbytes, 1, MAX_NBYTES)
                blocks = num_blocks or _default_blocks(local, device)
            return Collectives(local, max_nbytes, blocks, **given)

        self._local = self._rail.on_every_node(make, local=local, **given)
        try:
            self._plan(parallel_slices, staging_nbytes)
        except BaseException:
            self._local.close()
            raise

    def _plan(self, parallel_slices: int, staging_nbytes: int) -> None:
        coll, rail = self._local, self._rail
        self.node, self.num_nodes = rail.node, rail.num_nodes
        self.rank, self.num_ranks = rail.rank_on(rail.node), rail.num_nodes * coll.num_ranks
        self.device, self.timeout, self.max_nbytes = coll.device, coll.timeout, coll.max_nbytes
        unit = SHARE_UNIT * LARGEST_ELEMENT
        self._share_nbytes = -(-self.max_nbytes // (unit * coll.num_ranks)) * unit
        self.parallel_slices, problem = 0, ""
        try:
            self.parallel_slices = self._checked_parallel_slices(parallel_slices, staging_nbytes)
        except (ValueError, TypeError) as error:
            problem = str(error)  # reported when the ranks meet
        rail.meet(coll, ["slice_nbytes", "parallel_slices"], [coll.max_nbytes, self.parallel_slices], problem)
        self._staging = torch.empty(self.parallel_slices, self._share_nbytes, dtype=torch.uint8, device=self.device)

    def _checked_parallel_slices(self, parallel_slices: int, staging_nbytes: int) -> int:
        most = arguments.checked_int(self.rank, "parallel_slices", parallel_slices, 1, MOST_PARALLEL_SLICES)
        limit = arguments.checked_int(self.rank, "staging_nbytes", staging_nbytes, 0, MAX_NBYTES)
        if limit == 0:
            return most
        if limit < self._share_nbytes:
            raise ValueError(
                f"staging_nbytes={limit} on rank {self.rank} is less than a share of a slice, {self._share_nbytes} bytes; pass "
                "more, or a smaller slice_nbytes"
            )
        return min(most, limit // self._share_nbytes)

    # ---- the collectives

    @untraced
    @_refuses_wrong_arguments
    def all_reduce(self, x: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None) -> torch.Tensor:
        """See Collectives.all_reduce()."""
        out, flat, target = self._prepared("all_reduce", x, op, out)
        coll, length = self._local, self._share_nbytes * self._local.num_ranks // x.element_size()
        firsts = range(0, max(1, flat.numel()), length)

        def begin(index: int) -> tuple[torch.Tensor, Finish]:
            slice_ = slice(firsts[index], firsts[index] + length)
            counts = even_shares(len(flat[slice_]), coll.num_ranks)
            staged = self._staging[index % self.parallel_slices].view(x.dtype)[: counts[coll.rank]]
            share = coll.reduce_scatter(flat[slice_], _op_of_sums(op), counts, out=staged)

            def finish() -> None:
                if op == "avg":
                    share.div_(self.num_ranks)
                coll.all_gather(share, counts, out=target[slice_])

            return share, finish

        self._in_slices(
            Call.of("all_reduce", x, op),
            len(firsts),
            begin,
            lambda index, share: self._rail.all_reduce(share, _op_of_sums(op)),
        )
        return out

    @untraced
    @_refuses_wrong_arguments
    def reduce_scatter(self, x: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None) -> torch.Tensor:
        """See Collectives.reduce_scatter(); every rank gets equally many rows. A slice is one node's part."""
        out, flat, target = self._prepared("reduce_scatter", x, op, out)
        parts = flat.view(self.num_nodes, -1)

        def begin(node: int) -> tuple[torch.Tensor, Finish]:
            share = target if node == self.node else torch.empty_like(target)
            return self._local.reduce_scatter(parts[node], _op_of_sums(op), out=share), lambda: None

        self._in_slices(
            Call.of("reduce_scatter", x, op),
            self.num_nodes,
            begin,
            lambda node, share: self._rail.reduce(share, _op_of_sums(op), node),
        )
        if op == "avg":
            with torch.inference_mode():  # out may be a tensor of that mode
                target.div_(self.num_ranks)
        return out

    @untraced
    @_refuses_wrong_arguments
    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """See Collectives.all_gather(); every rank contributes equally many rows. A slice is one node's part."""
        out, flat, target = self._prepared("all_gather", x, "sum", out)
        coll, parts = self._local, target.view(self.num_nodes, -1)

        def begin(node: int) -> tuple[torch.Tensor, Finish]:
            if node == 0:  # a step of the whole node first, so that a failure on one of its ranks fails all
                coll.all_gather(flat, out=parts[self.node])
            if node == self.node:
                return flat, lambda: None
            share = torch.empty_like(flat)
            return share, lambda: coll.all_gather(share, out=parts[node])

        self._in_slices(
            Call.of("all_gather", x, "sum"),
            self.num_nodes,
            begin,
            lambda node, share: self._rail.broadcast(share, node),
        )
        return out

    @untraced
    @_refuses_wrong_arguments
    def barrier(self) -> None:
        """See Collectives.barrier(). The ranks of a node meet, then the nodes, then the ranks of a node again."""
        self._require_open()
        token = torch.zeros(1, dtype=torch.float32, device=self.device)

        def begin(_: int) -> tuple[torch.Tensor, Finish]:
            self._local.barrier()
            return token, self._local.barrier

        self._in_slices(
            Call.of("barrier", token, "min"), 1, begin, lambda _, share: self._rail.all_reduce(share, "min")
        )

    def _in_slices(
        self,
        call: Call,
        num_slices: int,
        begin: Callable[[int], tuple[torch.Tensor, Finish]],
        exchange: Callable[[int, torch.Tensor], Any],
    ) -> None:
        """begin(i), a step within the node, returns a share and a function that finishes its slice; exchange(i, share) queues
        the exchange between the nodes. At most `parallel_slices` slices are between the two."""
        on_their_way: deque[tuple[Any, Finish]] = deque()

        def end_the_oldest() -> None:
            work, finish = on_their_way.popleft()
            with calls.refused_if_failed(self._local):
                if work is not None:
                    self._rail.wait(work)
            with self._rail.within_node():
                finish()

        def began(index: int) -> tuple[torch.Tensor, Finish]:
            with self._rail.within_node():
                return begin(index)

        try:
            for index in range(num_slices):
                if len(on_their_way) == self.parallel_slices:
                    end_the_oldest()
                share, finish = began(index) if index else self._first(call, began)
                is_needed = self.num_nodes > 1 and share.numel() > 0  # the peers' shares have the same length
                with calls.refused_if_failed(self._local):
                    on_their_way.append((exchange(index, share) if is_needed else None, finish))
            while on_their_way:
                end_the_oldest()
        except PeerTimeoutError as error:
            self._rail.lost = self._rail.lost or str(error)
            raise

    def _first(self, call: Call, begin: Callable[[int], tuple[torch.Tensor, Finish]]) -> tuple[torch.Tensor, Finish]:
        """begin(0). The nodes compare their calls before any exchange. A failure on one rank of a node fails all of its
        ranks, so each tells its peers."""
        failure = begun = None
        try:
            begun = begin(0)
        except BaseException as error:
            failure = error
        if self._rail.compares_calls:
            self._rail.compare(call, failure)
        if begun is None:
            assert failure is not None
            raise failure
        return begun

    # ---- arguments

    @contextmanager
    def refused_if_failed(self) -> Iterator[None]:
        """See Collectives.refused_if_failed()."""
        try:
            with calls.refused_if_failed(self._local):
                yield
        except BaseException as error:
            if self._rail.compares_calls and not self.is_closed:
                self._rail.compare(NO_CALL, error)
            raise

    def _require_open(self) -> None:
        self._local._open_core()
        if self._rail.lost:
            raise RuntimeError(f"these TwoLevelCollectives have lost a rank: {self._rail.lost}; make new groups")

    def _prepared(
        self, kind: str, x: torch.Tensor, op: str, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """out, then x and out as one-dimensional tensors."""
        self._require_open()
        with self.refused_if_failed():
            arguments.check_tensor(self.rank, "x", x)
            arguments.check_optional_tensor(self.rank, "out", out)
            arguments.checked_choice(self.rank, "op", op, OPS)
            out = self._checked_out(kind, x, out)
            for name, tensor in (("x", x), ("out", out)):
                if tensor.layout != torch.strided or not tensor.is_contiguous():
                    raise ValueError(f"{name} is not contiguous on rank {self.rank}; pass {name}.contiguous()")
            self._check_overlap(kind, x, out)
            return out, x.view(-1), out.view(-1)

    def _checked_out(self, kind: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        shape = list(x.shape)
        if kind != "all_reduce":
            if x.dim() == 0:
                raise ValueError(f"x has no dimension to split over the ranks on rank {self.rank}; pass x.reshape(1)")
            if kind == "reduce_scatter" and shape[0] % self.num_ranks:
                raise ValueError(
                    f"x has {shape[0]} rows on rank {self.rank}, which {self.num_ranks} ranks cannot split evenly; pass a multiple"
                )
            shape[0] = shape[0] // self.num_ranks if kind == "reduce_scatter" else shape[0] * self.num_ranks
        if out is None:
            return torch.empty(shape, dtype=x.dtype, device=x.device)
        arguments.check_out(self.rank, out, shape, x.dtype, x.device)
        return out

    def _check_overlap(self, kind: str, x: torch.Tensor, out: torch.Tensor) -> None:
        (begin, end), (out_begin, out_end) = ((t.data_ptr(), t.data_ptr() + t.nbytes) for t in (x, out))
        own = {"all_reduce": 0, "reduce_scatter": self.rank * out.nbytes, "all_gather": -self.rank * x.nbytes}[kind]
        if begin < out_end and out_begin < end and out_begin != begin + own:
            raise ValueError(
                f"out overlaps x on rank {self.rank}; pass this rank's own part of the longer tensor, or separate memory"
            )

    # ---- the object

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that this object holds on this rank, excluding that of `between`."""
        return self._local.nbytes + self._staging.numel()

    @property
    def is_closed(self) -> bool:
        return self._local.is_closed

    def check(self) -> None:
        """See Collectives.check()."""
        self._local.check()

    def close(self) -> None:
        """Closes the object, but not `between`, which is the caller's."""
        self._local.close()

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.num_ranks}, node {self.node} of {self.num_nodes}"
        return f"TwoLevelCollectives({where}, {self._local!r})"


def _op_of_sums(op: str) -> str:
    return "sum" if op == "avg" else op


def _default_blocks(local: Any, device: torch.device | str | None) -> int:
    place = local.device if isinstance(local, Communicator) else devices.checked_device(as_group(local).rank, device)
    if place.type != "cuda":
        return 0
    return max(1, torch.cuda.get_device_properties(place).multi_processor_count - MULTIPROCESSORS_LEFT)
