"""What a Buffer consists of: an ExpertParallel for each kind of row, and Collectives."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_a2a import _core, arguments, block_scales, calls, devices
from moe_a2a.collectives import Collectives
from moe_a2a.communicator import Communicator
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.handle import DispatchHandle
from moe_a2a.integrations.deep_ep.kinds import Call, Kind, difference
from moe_a2a.row_routes import choice_numbers

TABLE_NBYTES = 4 << 20  # larger tables of weights go in slices
NUMBERS_NBYTES = 4 << 10


@dataclass(eq=False)
class Routing:
    """A routing that has been dispatched once; any number of dispatches and combines may use it again."""

    ep: ExpertParallel
    topk_idx: Tensor
    latest: DispatchHandle | None  # None: a dispatch along it has begun and not been received, or has failed
    # Whose sums a deferred combine has sent and not yet received.
    sent: DispatchHandle | None = field(default=None, kw_only=True)

    @property
    def open(self) -> DispatchHandle:
        """The latest dispatch; ended by a combine."""
        assert self.latest is not None
        return self.latest

    @property
    def is_open(self) -> bool:
        """Whether a combine needs no other dispatch before it: the same on all ranks."""
        return self.latest is not None and self.latest.is_open and self.latest is not self.sent

    def check_rows(self, x: Any, x_scales: Any, name: str) -> None:
        """Raises unless x has a row for each token. name: of x, in errors."""
        check_table(self.ep.rank, name, x, [len(self.topk_idx), self.ep.hidden], "one row per token of the handle")
        check_row_dtype(self.ep.rank, name, x, x_scales)

    def no_rows(self) -> Tensor:
        """Uninitialised rows, for a dispatch that only sends the routing."""
        return torch.empty(len(self.topk_idx), self.ep.hidden, dtype=self.ep.dtype, device=self.ep.device)


class Exchange:
    """Made by all ranks together; an ExpertParallel is made by the first dispatch that needs it, likewise by all ranks.

    `group`, `timeout`: as for a Communicator. `num_buffers`: dispatches of a kind that may be open at once."""

    def __init__(self, group: Any, timeout: float, num_buffers: int):
        self.comm = Communicator(group, timeout=timeout, ordered=True)
        self.collectives = Collectives(self.comm, TABLE_NBYTES)
        # A call on the CPU waits for no stream.
        self.host_collectives = self.collectives
        if "cpu" in _core.built_targets():
            self.host_collectives = Collectives(group, NUMBERS_NBYTES, device="cpu", timeout=timeout)
        self.num_buffers = num_buffers
        self._made: list[tuple[Kind, ExpertParallel]] = []
        self._open: dict[ExpertParallel, deque[DispatchHandle]] = {}
        self._failed: set[DispatchHandle] = set()  # whose low-latency combine has failed here; see make_room()
        # float32 [T, K] of each: the index of each choice, which a dispatch may carry in place of its weight.
        self.choice_numbers: dict[ExpertParallel, Tensor] = {}

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def num_ranks(self) -> int:
        return self.comm.num_ranks

    def check_num_experts(self, name: str, num_experts: int) -> None:
        """name: where the number comes from."""
        if num_experts < 1 or num_experts % self.num_ranks:
            raise ValueError(
                f"{name}={num_experts} on rank {self.rank} is not divisible by the {self.num_ranks} ranks; pass that of the "
                "whole model"
            )

    def agree(self, num_tokens: int, call: Call, num_choices: int = 0) -> tuple[int, int]:
        """The largest number of tokens and of a token's choices on any rank. Raises on every rank if the ranks
        make different calls, which exchange equally many numbers for this."""
        mine = call.numbers()
        compared = [*mine, *(-number for number in mine)]
        most_tokens, most_choices, *largest = _largest(self.host_collectives, [num_tokens, num_choices, *compared])
        if largest != compared:
            numbers, length = [int(number) for number in largest], len(mine)
            least, most = [-number for number in numbers[length:]], numbers[:length]
            raise ValueError(difference(self.rank, mine, least, most))
        return int(most_tokens), int(most_choices)

    def barrier(self) -> None:
        """Returns once all ranks have called it and the work before it on their current streams is done."""
        _largest(self.collectives, [0])

    def bounded_expert_parallel(self, kind: Kind, bound: int, num_tokens: int, call: Call) -> ExpertParallel:
        """One for batches of at most `bound` tokens, which all ranks know; they compare their calls if it is made now."""
        if found := self.find(kind, bound):
            return found
        self.agree(num_tokens, call)
        return self._new(kind, bound)

    def agreed_expert_parallel(self, kind: Kind, num_tokens: int, call: Call) -> ExpertParallel:
        """One that is large enough for every rank's batch; this rank's has num_tokens. Raises on every rank if the ranks make
        different calls."""
        most, _ = self.agree(num_tokens, call)
        newest = self.newest_of(kind)
        if newest is not None and most <= newest.num_max_tokens_per_rank:
            return newest
        return self._new(kind, most)

    def find(self, kind: Kind, num_max_tokens: int) -> ExpertParallel | None:
        """One of that kind for batches of num_max_tokens, if there is one."""
        for made, ep in self._made:
            is_enough = ep.num_max_tokens_per_rank >= num_max_tokens
            if made == kind and (ep.num_max_tokens_per_rank == num_max_tokens if kind.is_low_latency else is_enough):
                return ep
        return None

    def newest_of(self, kind: Kind) -> ExpertParallel | None:
        """The largest of that kind, if there is one."""
        return next((ep for made, ep in reversed(self._made) if made == kind), None)

    def likely(
        self, x: Any, topk_idx: Any, num_experts: Any, num_max_tokens: Any, *, is_low_latency: bool = False
    ) -> ExpertParallel | None:
        """The one that the peers use for a dispatch with such arguments, some of which may be wrong on this rank: find()'s if
        they determine a kind that can exist, else the one that matches most of them, the newest first. None: not made yet."""
        rows, dtype = (x[0], torch.bfloat16) if isinstance(x, tuple) and x else (x, getattr(x, "dtype", None))
        wanted: tuple[Any, ...] = num_experts, _row_size(topk_idx), _row_size(rows), dtype
        if self._is_possible(num_experts, num_max_tokens, dtype) and None not in wanted:
            return self.find(Kind._make((*wanted, is_low_latency)), num_max_tokens)
        agreeing = [
            (sum(a == b for a, b in zip(made, wanted, strict=False)), number)
            for number, (made, _) in enumerate(self._made)
            if made.is_low_latency == is_low_latency
        ]
        return self._made[max(agreeing)[1]][1] if agreeing else None

    def _is_possible(self, num_experts: Any, num_max_tokens: Any, dtype: Any) -> bool:
        are_counts = all(isinstance(n, int) and n > 0 for n in (num_experts, num_max_tokens))
        return are_counts and num_experts % self.num_ranks == 0 and dtype in arguments.ROW_DTYPES

    def _new(self, kind: Kind, num_max_tokens: int) -> ExpertParallel:
        """num_max_tokens is the same on all ranks. Smaller ones stay: handles may refer to them."""
        ep = ExpertParallel(
            self.comm,
            num_experts=kind.num_experts,
            num_topk=kind.num_topk,
            hidden=kind.hidden,
            num_max_tokens_per_rank=kind.num_max_tokens_per_rank(num_max_tokens),
            dtype=kind.dtype,
            num_buffers=self.num_buffers,
        )
        self._made.append((kind, ep))
        self._open[ep] = deque()
        self.choice_numbers[ep] = choice_numbers(ep.num_max_tokens_per_rank, ep.num_topk, ep.device)
        return ep

    def make_room(self, ep: ExpertParallel) -> None:
        """Before a dispatch: if no buffer is free, ends the oldest open one, whose combine then opens another. Decided by the
        order of calls alone, so that all ranks end the same: also those whose combine has failed, since a rank that needed no
        sum of the failed one has ended its own."""
        with calls.dispatch_refused_if_failed(ep):
            for handle in [handle for handle in self._failed if handle.ep is ep]:
                self._failed.remove(handle)
                if handle.is_open:
                    handle.release()
            self._open[ep] = deque(handle for handle in self._open[ep] if handle.is_open)
            while len(self._open[ep]) >= ep.num_buffers:
                self._open[ep].popleft().release()

    def repeated_if_failed(self, handle: DispatchHandle) -> AbstractContextManager[None]:
        """Around a combine that all ranks may repeat until their next dispatch, which ends the handle."""
        return calls.Guard(lambda error: self._failed.add(handle))

    def opened(self, ep: ExpertParallel, handle: DispatchHandle) -> DispatchHandle:
        self._open[ep].append(handle)
        return handle

    def begin_dispatch(
        self,
        ep: ExpertParallel,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        x_scales: Tensor | None,
        *,
        expert_alignment: int | None = None,
        deferred: bool,
        num_blocks: int,
    ) -> Callable[[], DispatchHandle]:
        """Sends the rows and, unless `deferred`, receives them; returns a function that gives the received handle.
        expert_alignment: None: layout="rows", else "expert_major"."""
        self.make_room(ep)
        devices.keep_for_current_stream(topk_idx)
        order: dict[str, Any] = {} if expert_alignment is None else {"layout": "expert_major"}
        order["expert_alignment"] = expert_alignment
        sent: dict[str, Any] = {"x_scales": x_scales, "num_blocks": num_blocks}
        if not deferred:
            opened = self.opened(ep, ep.dispatch(x, topk_idx, topk_weights, **sent, **order))
            return lambda: opened
        opened = self.opened(ep, ep.dispatch_send(x, topk_idx, topk_weights, **sent))

        def receive() -> DispatchHandle:
            if not opened.is_open and not ep.is_closed:  # on every rank: make_room() goes by the order of calls alone
                raise _lost("dispatch", ep)
            return ep.dispatch_recv(opened, **order, num_blocks=num_blocks)

        return receive

    def check_handle(self, handle: Any, kind: type, opens: bool = False) -> None:
        """Raises unless it is one of that kind, of this exchange. On the peers the dispatch is refused if the call `opens`
        one, else the combine. This rank does not know along which handle they dispatch, so its own stays open: all dispatch
        along that one again before they combine."""
        with self.dispatch_refused_if_failed(self.newest) if opens else self.combines_refused_if_failed():
            if not isinstance(handle, kind):
                name = type(handle).__name__
                raise TypeError(f"handle is a {name} on rank {self.rank}; pass what dispatch() returned")
            if handle.ep not in self._open:  # type: ignore[attr-defined]
                raise ValueError(f"handle is one of another Buffer on rank {self.rank}; pass one of this Buffer's")

    def dispatch_again_refused_if_failed(self, handle: Routing) -> AbstractContextManager[None]:
        """Around the checks of a dispatch along a handle, which is not open from now until the rows are received, whether
        this rank fails or a peer: all ranks then send the routing again before a combine. The dispatch before stays in
        make_room()'s list: released on one rank only, it would make the ranks take different buffers."""
        handle.latest = None
        return self.dispatch_refused_if_failed(handle.ep)

    def combine_refused_if_failed(self, handle: Routing) -> AbstractContextManager[None]:
        """Around the checks of a combine, before which the peers dispatch again if the handle is not open. If it is open, it ends
        on every rank: those that need no sum of this one end their combine, and do not learn that they should keep it."""
        if handle.is_open:
            return calls.combine_refused_if_failed(handle.open)
        return self.dispatch_refused_if_failed(handle.ep)

    def dispatch_refused_if_failed(self, ep: ExpertParallel | None) -> AbstractContextManager[None]:
        """Around the checks of a dispatch. A rank that fails makes room as its peers do, so that all end the same dispatches.
        ep: that of the peers; None: not made yet, so they are in agree()."""
        if ep is None:
            return calls.refused_if_failed(self.host_collectives)

        def failed(error: BaseException) -> None:
            self.make_room(ep)
            calls.refuse_dispatch(ep, error)

        return calls.Guard(failed)

    def combines_refused_if_failed(self) -> AbstractContextManager[None]:
        """Like dispatch_refused_if_failed(), for a combine of an unknown handle: refuses the combines of all open handles."""

        def failed(error: BaseException) -> None:
            for _, ep in self._made:
                calls.refuse_combine(ep, error)

        return calls.Guard(failed)

    @property
    def newest(self) -> ExpertParallel | None:
        """The best guess if the arguments do not show which one the peers are in; None: there is none yet."""
        return self._made[-1][1] if self._made else None

    def close(self) -> None:
        for _, ep in self._made:
            ep.close()
        self.collectives.close()
        self.host_collectives.close()
        self.comm.close()


def _largest(collectives: Collectives, numbers: Sequence[int]) -> list[float]:
    """The largest value of each number on any rank, read by the host."""
    mine = torch.from_numpy(np.array(numbers, np.float32)).to(collectives.device)  # torch.tensor() takes twice as long
    largest: list[float] = collectives.all_reduce(mine, "max", out=mine).tolist()
    collectives._core.raise_reported()  # on a GPU a refused all-reduce returns, too
    return largest


def _lost(call: str, ep: ExpertParallel) -> RuntimeError:
    return RuntimeError(
        f"a deferred {call} of rank {ep.rank} was lost, since num_buffers={ep.num_buffers} other dispatches followed; wait for its "
        "event first, or pass a larger num_buffers"
    )


def begin_combine(
    y: Tensor, routing: Routing, *, presummed: bool = False, deferred: bool, num_blocks: int
) -> Callable[[], Tensor]:
    """Returns a function that receives the sums. It also sends the rows, unless `deferred`: then they are sent now."""
    ep: Any = routing.ep
    opened = routing.open
    if not deferred:
        return lambda: ep.combine(y, opened, presummed=presummed, num_blocks=num_blocks)
    ep.combine_send(y, opened, presummed=presummed, num_blocks=num_blocks)
    routing.sent = opened

    def receive() -> Tensor:
        if routing.sent is opened:
            routing.sent = None
        if not opened.is_open and not ep.is_closed:  # on every rank, as in begin_dispatch()
            raise _lost("combine", ep)
        return ep.combine_recv(opened, num_blocks=num_blocks)

    return receive


class OfExchange:
    """Base of all buffers: holds an Exchange until destroy() or, unless `explicitly_destroy`, until it is collected as garbage.
    The end of the process frees the memory by itself."""

    def __init__(self, group: Any, timeout: float, num_buffers: int, explicitly_destroy: bool = False):
        self._exchange: Exchange | None = Exchange(group, timeout, num_buffers)
        self._rank, self._num_ranks = self._exchange.rank, self._exchange.num_ranks
        self._device = self._exchange.comm.device
        self._at_end = weakref.finalize(self, self._exchange.close)
        self._at_end.atexit = False
        if explicitly_destroy:
            self._at_end.detach()

    def destroy(self) -> None:
        """Releases the memory, on every rank."""
        if self._exchange is not None:
            self._at_end.detach()
            self._exchange.close()
            self._exchange = None

    def _open(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError(f"the {type(self).__name__} of rank {self._rank} has been destroyed; make another")
        return self._exchange


def check_table(
    rank: int, name: str, table: Any, shape: list[int], what: str = "", dtypes: tuple[torch.dtype, ...] = ()
) -> None:
    """what: the shape in words. dtypes: those allowed; none: any."""
    arguments.check_tensor(rank, name, table)
    if list(table.shape) != shape:
        raise ValueError(f"{name} has shape {list(table.shape)} on rank {rank}; pass {shape}{what and ', ' + what}")
    if dtypes and table.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {table.dtype} on rank {rank}; pass {' or '.join(map(str, dtypes))}")


def check_device(ep: ExpertParallel, name: str, tensor: Tensor) -> None:
    if tensor.device != ep.device:
        raise ValueError(
            f"{name} is on {tensor.device} on rank {ep.rank}, this buffer on {ep.device}; pass {name} of that device"
        )


def check_row_dtype(rank: int, name: str, rows: Tensor, scales: Any) -> None:
    """Raises for rows that cannot be sent; the dispatch checks scales."""
    if scales is None and rows.dtype not in arguments.ROW_DTYPES:
        raise TypeError(
            f"{name} has dtype {rows.dtype} on rank {rank}; pass torch.bfloat16, torch.float16 or torch.float32, or scales "
            "to float8"
        )


def rows_and_scales(rank: int, x: Any) -> tuple[Any, Any]:
    """x, or (values, scales); what the values are is checked later. Scales may have any strides, as DeepGEMM's columns."""
    if not isinstance(x, tuple):
        return x, None
    if len(x) != 2:
        raise ValueError(f"x is a tuple of {len(x)} on rank {rank}; pass a tensor, or (float8 values, scales)")
    values, scales = x
    if scales is None:
        return x
    arguments.check_tensor(rank, "x[0]", values)
    arguments.check_tensor(rank, "x[1]", scales)
    if values.dtype.itemsize != 1:
        raise TypeError(
            f"x[0] has dtype {values.dtype} on rank {rank}, but x[1] holds scales; pass float8 values, or only x[0]"
        )
    block = 128 if block_scales.byte_dtype(scales) is None else block_scales.BLOCK
    shape = [*values.shape[:1], *(-(-length // block) for length in values.shape[1:])]
    check_table(rank, "x[1]", scales, shape, f"a scale per {block} values", (torch.float32, *block_scales.BYTES))
    if scales.device != values.device:
        raise ValueError(f"x[1] is on {scales.device}, x[0] on {values.device} on rank {rank}; pass both on one device")
    return values, scales if scales.stride(-1) == 1 else scales.contiguous()


def _row_size(rows: Any) -> int | None:
    return rows.shape[1] if isinstance(rows, Tensor) and rows.dim() == 2 else None
