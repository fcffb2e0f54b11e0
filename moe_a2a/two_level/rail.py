"""The link between the nodes of two-level objects: a rail is a torch.distributed group with one rank of every node."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from moe_a2a import arguments, calls, devices, set_up
from moe_a2a.communicator import Communicator
from moe_a2a.errors import CallMismatchError, PeerRefusedError

_c10d: Any = dist  # the stubs lack its options
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Node(Protocol):
    """What the ranks of a node share: a Communicator, or a client of one."""

    rank: int
    num_ranks: int
    device: torch.device
    timeout: float

    def close(self) -> None: ...


MadeOfNode = TypeVar("MadeOfNode", bound=Node)


@dataclass
class Constructor:
    """A call, for comparison between nodes."""

    def __str__(self) -> str:
        return "the constructor"


class Rail:
    """One rank's view of the rail. Exchanges are queued first and waited for later."""

    def __init__(self, group: Any):
        if hasattr(group, "get_group"):  # DeviceMesh
            group = group.get_group()
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this process is not a member of between; pass the group that contains it")
        needed = ("rank", "size", "allreduce", "reduce", "broadcast", "allgather", "alltoall_base")
        if not all(hasattr(group, name) for name in needed):
            raise TypeError(
                f"between is a {type(group).__name__}; pass a torch.distributed group of one rank of every node"
            )
        self._group = group
        self.node: int = group.rank()
        self.num_nodes: int = group.size()
        self.lost = ""  # why no further exchange is possible
        self._place, self._ranks_per_node = 0, 1

    def on_every_node(self, make: Callable[[], MadeOfNode], *, local: Any, device: Any, timeout: Any) -> MadeOfNode:
        """Calls make(), which builds this node's object; the object defines the tensors' device and the timeout. If it fails on one
        node, it fails on all. local, device, timeout: the caller's arguments; make() may return `local`, which stays open."""
        made = failure = None
        try:
            made = make()
            self._device, self._timeout = made.device, made.timeout
            self._place, self._ranks_per_node = made.rank, made.num_ranks
        except BaseException as error:
            failure = error
            self._device, self._timeout = _device_of(local, device), _timeout_of(local, timeout)
        try:
            self.compare_constructors(failure)
        except BaseException:
            if made is not None and made is not local:
                made.close()
            raise
        assert made is not None
        return made

    def rank_on(self, node: int) -> int:
        return node * self._ranks_per_node + self._place

    @contextmanager
    def within_node(self) -> Iterator[None]:
        """Wraps calls of this node's ranks, whose errors number ranks within the node: names the node in their text, and
        renumbers the ranks in their attributes over all nodes."""
        first = self.node * self._ranks_per_node
        try:
            yield
        except Exception as error:
            if error.args and isinstance(error.args[0], str):
                where = f"node {self.node}, whose rank 0 is rank {first}"
                error.args = (f"{where}: {error.args[0]}", *error.args[1:])
            for name in ("rank", "peer"):
                if getattr(error, name, -1) >= 0:
                    setattr(error, name, first + getattr(error, name))
            raise

    @property
    def compares_calls(self) -> bool:
        """False for NCCL, where its own timeout applies: a comparison would have to wait for the GPU."""
        return self._device.type == "cpu" and self.num_nodes > 1

    # ---- exchanges

    def all_reduce(self, x: torch.Tensor, op: str) -> Any:
        def queue(x: torch.Tensor, op: str) -> Any:
            options = _c10d.AllreduceOptions()
            options.reduceOp = _REDUCE_OPS[op]
            return self._group.allreduce([x], options)

        return _queued_with_nans(queue, x, op)

    def reduce(self, x: torch.Tensor, op: str, node: int) -> Any:
        def queue(x: torch.Tensor, op: str) -> Any:
            options = _c10d.ReduceOptions()
            options.reduceOp, options.rootRank = _REDUCE_OPS[op], node
            return self._group.reduce([x], options)

        return _queued_with_nans(queue, x, op)

    def broadcast(self, x: torch.Tensor, node: int) -> Any:
        options = _c10d.BroadcastOptions()
        options.rootRank = node
        return self._group.broadcast([x], options)

    def all_to_all(self, rows: torch.Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> torch.Tensor:
        """Sends the first num_sent[0] rows to node 0, the next num_sent[1] to node 1, and so on; returns what the nodes sent
        here, in the same order."""
        if self.num_nodes == 1:
            return rows
        received = rows.new_empty(sum(num_received), *rows.shape[1:])
        work = self._group.alltoall_base(received, rows, list(num_received), list(num_sent), _c10d.AllToAllOptions())
        self.wait(work)
        return received

    def wait(self, work: Any) -> None:
        """On a GPU the current stream waits, and the group's own timeout is the deadline."""
        try:
            if self._device.type == "cpu":
                work.wait(timedelta(seconds=self._timeout))
                # Until the next one: if a thread of gloo holds the last reference to it while the interpreter ends, its
                # tensors' destructors ask for the GIL there and the process aborts.
                self._waited_for = work
            else:
                work.wait()
        except RuntimeError as error:
            words = (str(error).splitlines() or ["no reason given"])[0]
            self.lost = (
                f"the exchange between the nodes failed on rank {self.rank_on(self.node)}, node {self.node}: {words}"
            )
            raise RuntimeError(
                f"{self.lost}; a rank of another node is dead, late, or makes different calls"
            ) from error

    def gather_words(self, words: list[int]) -> list[list[int]]:
        """The `words` of every rank of the rail, in node order; at most 8 and one for each node."""
        if self.num_nodes == 1:
            return [words]
        if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():  # type: ignore[attr-defined]
            # A tensor made in this thread may have no memory, as under FakeTensorMode: the exchange would fail, or not take place,
            # and leave the nodes out of step.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(self._gathered_words, words).result()
        return self._gathered_words(words)

    def _gathered_words(self, words: list[int]) -> list[list[int]]:
        # The same length in every call: gloo ends a process that receives more bytes than it expects.
        own = torch.zeros(8 + self.num_nodes, dtype=torch.int64, device="cpu")
        own[: len(words)] = torch.tensor(words, device="cpu")
        own = own.to(self._device)
        everyone = [torch.empty_like(own) for _ in range(self.num_nodes)]
        self.wait(self._group.allgather([everyone], [own]))
        return [each[: len(words)].tolist() for each in everyone]

    # ---- agreement

    def compare(self, call: Any, failure: BaseException | None, extra: Sequence[int] = ()) -> list[list[int]]:
        """Returns the `extra` words of every node. Raises `failure` if there is one, or an error if another node's call
        failed or differs from this one. `call`: a dataclass of ints whose str() describes the call; `extra` is as long on
        every node."""
        if self.lost:
            raise failure or RuntimeError(self.lost)
        its_words = astuple(call)
        try:
            everyone = self.gather_words([int(failure is not None), *its_words, *extra])
        except RuntimeError as error:
            raise failure or error from None
        if failure is not None:
            raise failure
        end = 1 + len(its_words)
        for node, (failed, *theirs) in enumerate(words[:end] for words in everyone):
            rank, peer = self.rank_on(self.node), self.rank_on(node)
            if failed:
                raise PeerRefusedError(
                    f"rank {rank} called {call}; the call of rank {peer} failed on its node, {node}: see that node's errors",
                    peer=peer,
                )
            if tuple(theirs) != its_words:
                raise CallMismatchError(
                    f"rank {rank} called {call}, rank {peer} of node {node} {type(call)(*theirs)}; make the same calls in the same "
                    "order on every rank",
                    peer=peer,
                )
        return [words[end:] for words in everyone]

    def compare_constructors(self, failure: BaseException | None) -> None:
        """Follows a step of a constructor that may have failed on this node only; see compare()."""
        self.compare(Constructor(), failure)

    def meet(self, collectives: Any, names: Sequence[str], values: Sequence[int], problem: str) -> None:
        """Raises ValueError on every rank of every node if the groups or the `values` differ, or if there is a `problem`
        with the arguments on any rank. `collectives`: of this node's ranks."""
        place, is_known = collectives.rank, int(problem == "")  # the values of a rank with a problem say nothing
        of_rail = ("ranks of its node", "place in its node", *names)
        mine = [collectives.num_ranks, place, *values]
        for node, (are_known, *theirs) in enumerate(self.gather_words([is_known, *mine])):
            for name, own, other in zip(of_rail if are_known else of_rail[:2], mine, theirs, strict=False):
                if own != other:
                    problem = problem or (
                        f"the nodes differ: {name} on rank {place} of node {self.node}: {own}, on its peer of node {node}: "
                        f"{other}; pass groups of equal sizes and orders, and equal arguments"
                    )
        of_node = self._gather_words_of_node(collectives, [is_known, self.node, self.num_nodes, *values])
        views = [words[1:3] for words in of_node]
        if views != [views[0]] * len(views):
            problem = problem or (
                f"the ranks of a node, seen from rank {place} of it, have these places in between: "
                f"{', '.join(f'rank {node} of {size}' for node, size in views)}; pass groups with one rank of every node, "
                "all in the same order of nodes"
            )
        for name, *others in zip(names, *(words[3:] for words in of_node if words[0]), strict=False):
            if others != [others[0]] * len(others):
                problem = problem or (
                    f"the ranks of node {self.node} differ: {name} on them, seen from rank {place}: {others}; pass equal arguments"
                )
        found = any(flag for (flag,) in self._gather_words_of_node(collectives, [int(problem != "")]))
        found = any(flag for (flag,) in self.gather_words([int(found)]))
        if any(flag for (flag,) in self._gather_words_of_node(collectives, [int(found)])):
            rank = self.rank_on(self.node)
            raise ValueError(problem or f"a rank other than rank {rank} has refused the arguments: see its error")

    def _gather_words_of_node(self, collectives: Any, words: list[int]) -> list[list[int]]:
        """The `words` of every rank of this node, as float32 rounds them: only numbers above 2**24."""
        own = torch.tensor(words, dtype=torch.float32, device=collectives.device)
        with self.within_node():
            everyone = collectives.all_gather(own).view(collectives.num_ranks, -1)
        return [[int(word) for word in each] for each in everyone.tolist()]


class _WorkWithNans:
    """Two reductions: of x, and of the flags that say where a rank's x is NaN."""

    def __init__(self, x: torch.Tensor, flags: torch.Tensor, works: Sequence[Any]):
        self._x, self._flags, self._works = x, flags, works

    def wait(self, *timeout: timedelta) -> None:
        for work in self._works:
            work.wait(*timeout)
        with torch.inference_mode():  # x may be a tensor of that mode, or require grad
            self._x.masked_fill_(self._flags.view(torch.bool), float("nan"))


def _queued_with_nans(queue: Callable[[torch.Tensor, str], Any], x: torch.Tensor, op: str) -> Any:
    """queue(x, op) queues a reduction. The max and min of gloo and NCCL drop a NaN, depending on the order of the operands, so the
    flags of NaNs are reduced beside x; whatever the data, since the nodes queue the same exchanges."""
    if op == "sum":
        return queue(x, op)
    flags = x.isnan().view(torch.uint8)
    return _WorkWithNans(x, flags, [queue(x, op), queue(flags, "max")])


def constructor_refuses_wrong_arguments(first: str) -> Callable[[calls.Call], calls.Call]:
    """Decorates a constructor that takes `local` and `between`: arguments that do not match its signature are refused on every
    rank. first: what the constructor makes first, unless `local` is a Communicator."""

    @contextmanager
    def refused(made: Any, /, *args: Any, **kwargs: Any) -> Iterator[None]:
        try:
            yield
        except TypeError as error:
            _refuse(error, first, **(kwargs | dict(zip(("local", "between"), args, strict=False))))
            raise

    return calls.refuses_arguments_by(refused)


def _refuse(
    error: TypeError,
    first: str,
    *,
    local: Any = None,
    between: Any = None,
    device: Any = None,
    timeout: Any = set_up.DEFAULT_TIMEOUT,
    **others: Any,
) -> None:
    """Tells this rank's node and its rail, as far as the arguments name them."""

    def fail() -> Any:
        with set_up.refused_if_failed(local, "Collectives" if isinstance(local, Communicator) else first):
            raise error

    with contextlib.suppress(Exception):
        Rail(between).on_every_node(fail, local=local, device=device, timeout=timeout)


def _device_of(local: Any, device: Any) -> torch.device:
    """The device of a node whose ranks could not make their objects."""
    if isinstance(local, Communicator):
        return local.device
    try:
        return devices.checked_device(0, device)
    except (TypeError, ValueError):
        return devices.default_device()


def _timeout_of(local: Any, timeout: Any) -> float:
    """The timeout of such a node."""
    try:
        return arguments.checked_timeout(0, local.timeout if isinstance(local, Communicator) else timeout)
    except (TypeError, ValueError):
        return set_up.DEFAULT_TIMEOUT
