"""The link between the nodes of TwoLevelCollectives: a rail is a torch.distributed group with one rank of every node."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_a2a.collectives import DTYPES, OPS
from moe_a2a.errors import CallMismatchError, PeerRefusedError

_c10d: Any = dist  # the stubs lack its options
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
KINDS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass
class Call:
    """A call, encoded for comparison between nodes."""

    kind: int
    count: int
    dtype: int
    op: int

    @classmethod
    def of(cls, kind: str, x: torch.Tensor, op: str) -> Call:
        name = str(x.dtype).removeprefix("torch.")
        return cls(KINDS.index(kind), x.numel(), DTYPES.index(name) if name in DTYPES else -1, OPS.index(op))

    def __str__(self) -> str:
        dtype = DTYPES[self.dtype] if self.dtype >= 0 else "another dtype"
        return f"{KINDS[self.kind]}({self.count} elements, {dtype}, {OPS[self.op]})"


NO_CALL = Call(0, 0, -1, 0)  # from a rank with bad arguments


class Rail:
    """One rank's view of the rail. Exchanges are queued first and waited for later."""

    def __init__(self, group: Any):
        if hasattr(group, "get_group"):  # DeviceMesh
            group = group.get_group()
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this process is not a member of between; pass the group that contains it")
        if not all(hasattr(group, name) for name in ("rank", "size", "allreduce", "reduce", "broadcast", "allgather")):
            raise TypeError(
                f"between is a {type(group).__name__}; pass a torch.distributed group of one rank of every node"
            )
        self._group = group
        self.node: int = group.rank()
        self.num_nodes: int = group.size()
        self.lost = ""  # why no further exchange is possible

    def take(self, local: Any) -> None:
        """`local`: the Collectives of this node, which define the tensors' device and the timeout."""
        self._device, self._timeout = local.device, local.timeout
        self._place, self._ranks_per_node = local.rank, local.num_ranks

    def rank_on(self, node: int) -> int:
        return node * self._ranks_per_node + self._place

    @property
    def compares_calls(self) -> bool:
        """False for NCCL, where its own timeout applies: a comparison would have to wait for the GPU."""
        return self._device.type == "cpu" and self.num_nodes > 1

    def all_reduce(self, x: torch.Tensor, op: str) -> Any:
        options = _c10d.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[op]
        return self._group.allreduce([x], options)

    def reduce(self, x: torch.Tensor, op: str, node: int) -> Any:
        options = _c10d.ReduceOptions()
        options.reduceOp, options.rootRank = _REDUCE_OPS[op], node
        return self._group.reduce([x], options)

    def broadcast(self, x: torch.Tensor, node: int) -> Any:
        options = _c10d.BroadcastOptions()
        options.rootRank = node
        return self._group.broadcast([x], options)

    def wait(self, work: Any) -> None:
        """On a GPU the current stream waits, and the group's own timeout is the deadline."""
        try:
            if self._device.type == "cpu":
                work.wait(timedelta(seconds=self._timeout))
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

    def words(self, words: list[int]) -> list[list[int]]:
        """The `words` of every rank of the rail, in node order."""
        if self.num_nodes == 1:
            return [words]
        own = torch.tensor(words, device=self._device)
        everyone = [torch.empty_like(own) for _ in range(self.num_nodes)]
        self.wait(self._group.allgather([everyone], [own]))
        return [each.tolist() for each in everyone]

    def compare(self, call: Call, failure: BaseException | None) -> None:
        """Raises `failure` if there is one, or an error if another node's call failed or differs from this one."""
        mine = [int(failure is not None), *astuple(call)]
        try:
            everyone = self.words(mine)
        except RuntimeError as error:
            raise failure or error from None
        if failure is not None:
            raise failure
        for node, theirs in enumerate(everyone):
            rank, peer = self.rank_on(self.node), self.rank_on(node)
            if theirs[0]:
                raise PeerRefusedError(
                    f"rank {rank} called {call}; the call of rank {peer} failed on its node, {node}: see that node's errors",
                    peer=peer,
                )
            if theirs != mine:
                raise CallMismatchError(
                    f"rank {rank} called {call}, rank {peer} of node {node} {Call(*theirs[1:])}; make the same calls in the same "
                    "order on every rank",
                    peer=peer,
                )
