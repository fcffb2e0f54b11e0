"""Expert parallelism over several nodes: dispatch() and combine() of ours within each node, the caller's process group between
the nodes.

    dispatch  a token's row travels along the rail once to each node that owns one of its experts;
              there ExpertParallel sends it to the ranks that do
    combine   ExpertParallel sums a token's outputs within each node; the sums return along the rail, and
              the token's own rank adds those of its nodes
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from moe_a2a import _core, arguments, block_scales, calls, reference, set_up
from moe_a2a.client import OnePerRank
from moe_a2a.collectives import Collectives
from moe_a2a.communicator import Communicator
from moe_a2a.devices import float8_dtype
from moe_a2a.errors import RoutingError
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.expert_weights import Weight
from moe_a2a.two_level.expert_calls import ExpertCalls
from moe_a2a.two_level.handle import TwoLevelHandle
from moe_a2a.two_level.passage import Passage, RailFormat, Sent
from moe_a2a.two_level.rail import Rail, constructor_refuses_wrong_arguments
from moe_a2a.untraced import untraced

OPTIONS_OF_NODE = ("num_buffers", "num_blocks", "num_max_ll_tokens", "launch_table")
MEETING_NBYTES = 1 << 12  # workspace of the collectives by which a node's ranks agree on the arguments

_refuses_wrong_arguments = calls.refuses_wrong_arguments(
    lambda two_level: two_level._combine_refused_if_failed(calls.attempt_refused_if_failed(two_level.local))
)


class TwoLevelExpertParallel(OnePerRank):
    """dispatch() and combine() over the ranks of several nodes.

        node = dist.new_group(ranks of this machine)
        rail = dist.new_group(the ranks with this rank's place on their machines)
        ep = moe_a2a.TwoLevelExpertParallel(node, rail, num_experts=256, num_topk=8, hidden=7168, num_max_tokens_per_rank=4096)

    Args:
        local: the ranks of this node: what a Communicator takes, or a Communicator.
        between: a torch.distributed group of the ranks with the same place on all nodes, in node order: gloo for CPU
            tensors, NCCL for GPU tensors. Every node has the same number of ranks.
        num_experts: experts of all ranks of all nodes; divisible by their number. Rank r owns the experts
            r * E_local ... (r + 1) * E_local - 1.
        num_topk, hidden, num_max_tokens_per_rank, dtype: see ExpertParallel.
        num_buffers, num_blocks, num_max_ll_tokens, launch_table: see ExpertParallel; for the exchange within a node, whose
            batches are the rows that a rank receives along its rail.
        device, timeout: for the Communicator that is made if `local` is not one.

    Rank r is rank r % L of node r // L, with L ranks per node. Every rank makes the same calls in the same order. The memory
    is that of an ExpertParallel of one node whose ranks dispatch num_nodes * num_max_tokens_per_rank tokens (see `nbytes`).

    dispatch() and, on the CPU, combine() compare the calls of the nodes first: an error on one rank raises PeerRefusedError on
    the others that wait for it, or CallMismatchError if the calls differ. dispatch() reads counts on the host, so it
    synchronises with a GPU and cannot be captured in a CUDA graph. Waits between the nodes end after `timeout`, on
    GPU tensors after the timeout of `between`; the object is then unusable on every rank. For gradients see
    TwoLevelTokenDispatcher.
    """

    @constructor_refuses_wrong_arguments("Communicator")
    def __init__(
        self,
        local: Any,
        between: Any,
        *,
        num_experts: int,
        num_topk: int,
        hidden: int,
        num_max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        timeout: float = 30.0,
        **of_node: Any,
    ):
        self._comm, self._owns_comm = local, not isinstance(local, Communicator)
        with set_up.refused_if_failed(local, "Communicator" if self._owns_comm else "Collectives"):
            self._rail = Rail(between)
        how: dict[str, Any] = {"local": local, "device": device, "timeout": timeout}
        if self._owns_comm:
            self._comm = self._rail.on_every_node(lambda: Communicator(local, device=device, timeout=timeout), **how)
        try:
            with self._rail.on_every_node(lambda: Collectives(self._comm, MEETING_NBYTES), **how) as collectives:
                self._take_places()
                sizes = {"num_experts": num_experts, "num_topk": num_topk, "hidden": hidden}
                sizes |= {"num_max_tokens_per_rank": num_max_tokens_per_rank}
                self._agree(collectives, sizes, dtype, of_node)
            self._make_local(of_node)
        except BaseException:
            if self._owns_comm:
                self._comm.close()
            raise

    def _take_places(self) -> None:
        comm, rail = self._comm, self._rail
        self.node, self.num_nodes = rail.node, rail.num_nodes
        self.rank, self.num_ranks = rail.rank_on(rail.node), rail.num_nodes * comm.num_ranks
        self.device, self.timeout = comm.device, comm.timeout

    def _agree(self, collectives: Collectives, sizes: dict[str, Any], dtype: Any, of_node: dict[str, Any]) -> None:
        """Raises ValueError on every rank if an argument is wrong or differs on any."""
        values, problem = [0] * 5, ""
        try:
            if unknown := of_node.keys() - OPTIONS_OF_NODE:
                raise TypeError(f"unexpected keyword argument {min(unknown)!r} on rank {self.rank}; leave it out")
            values[:4] = [arguments.checked_int(self.rank, name, value, 1) for name, value in sizes.items()]
            values[4] = arguments.ROW_DTYPES.index(arguments.checked_row_dtype(self.rank, dtype))
            if values[0] % self.num_ranks:
                raise ValueError(
                    f"num_experts={values[0]} is not divisible by num_ranks={self.num_ranks} ({self.num_nodes} nodes of "
                    f"{self._comm.num_ranks}) on rank {self.rank}; pass a multiple"
                )
        except (TypeError, ValueError) as error:
            problem = str(error)
        self._rail.meet(collectives, [*sizes, "dtype (index)"], values, problem)
        self.num_experts, self.num_topk, self.hidden, self.num_max_tokens_per_rank, _ = values
        self.dtype, self.num_local_experts = dtype, self.num_experts // self.num_ranks
        self._format = RailFormat(self.num_nodes, self.num_experts // self.num_nodes, self.num_topk, self.hidden)
        self._num_dispatches = 0  # calls that have returned a handle or raised
        self._calls = ExpertCalls(self._rail)

    def _make_local(self, of_node: dict[str, Any]) -> None:
        local = failure = None
        try:
            with self._rail.within_node():
                local = ExpertParallel(
                    self._comm,
                    num_experts=self._format.num_node_experts,
                    num_topk=self.num_topk,
                    hidden=self.hidden,
                    num_max_tokens_per_rank=self.num_nodes * self.num_max_tokens_per_rank,
                    dtype=self.dtype,
                    **of_node,
                )
        except Exception as error:
            failure = error
        try:
            self._rail.compare_constructors(failure)
        except BaseException:
            if local is not None:
                local.close()
            raise
        assert local is not None
        self.local = local
        self.num_buffers = local.num_buffers

    # ---- the calls of a layer

    @untraced
    @calls.refuses_wrong_arguments(calls.dispatch_refused_if_failed)
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        handle: TwoLevelHandle | None = None,
        layout: str | None = None,
        expert_alignment: int | None = None,
        x_scales: torch.Tensor | None = None,
        quantize: str | None = None,
        num_blocks: int = 0,
    ) -> TwoLevelHandle:
        """See ExpertParallel.dispatch(). quantize="fp8" quantises the rows before they leave the node."""
        with self._dispatching():
            failure = sent = None
            try:
                routed_by = self._routed_by(x, handle, topk_idx, topk_weights)
                layout, expert_alignment = arguments.checked_layout(self.rank, handle, layout, expert_alignment)
                num_blocks = arguments.checked_int(self.rank, "num_blocks", num_blocks, 0)
                quantized = arguments.checked_quantize(self.rank, quantize)
                scales = self._checked_batch(x, *routed_by, x_scales, quantized)
                sent = self._packed(x, *routed_by, *scales, quantized)
            except BaseException as error:
                failure = error
            passage, batch = self._pass_on(sent, failure)
            how: dict[str, Any] = {"layout": layout, "expert_alignment": expert_alignment, "num_blocks": num_blocks}
            about = passage, routed_by, block_scales.byte_dtype(x_scales)
            return self._calls.on_every_node(
                passage, lambda: TwoLevelHandle(self, self.local.dispatch(**batch, **how), *about)
            )

    @untraced
    @_refuses_wrong_arguments
    def combine(
        self,
        y: torch.Tensor,
        handle: TwoLevelHandle,
        *,
        presummed: bool = False,
        wire: str | None = None,
        out: torch.Tensor | None = None,
        num_blocks: int = 0,
    ) -> torch.Tensor:
        """See ExpertParallel.combine(). A node's sum of a token is rounded to `dtype` before it travels; a token's rank adds
        those of its nodes in fp32, in ascending order, and rounds once more. `wire`: of the exchange within a node.

        A combine that fails ends the handle on every rank that it fails on: it cannot be retried. A rank that passed another
        handle by mistake releases the right one itself."""
        how: dict[str, Any] = {"presummed": presummed, "wire": wire, "num_blocks": num_blocks}
        return self._combined(handle, out, lambda: self.local.combine(y, handle, **how))

    @untraced
    @_refuses_wrong_arguments
    def experts(
        self,
        handle: TwoLevelHandle,
        w_gate_up: Weight,
        w_down: Weight,
        *,
        out: torch.Tensor | None = None,
        **how: Any,
    ) -> torch.Tensor:
        """See ExpertParallel.experts() and combine()."""
        return self._combined(handle, out, lambda: self.local.experts(handle, w_gate_up, w_down, **how))

    @contextlib.contextmanager
    def _dispatching(self) -> Iterator[None]:
        """Wraps a dispatch, which the nodes compare first: tells this node's ranks of a failure inside."""
        self._check_open()
        try:
            with calls.dispatch_refused_if_failed(self.local):
                self._check_rail()
                yield
        finally:
            self._num_dispatches += 1

    @contextlib.contextmanager
    def _combine_refused_if_failed(self, on_node: AbstractContextManager[None]) -> Iterator[None]:
        """Wraps a combine() without a handle, for which the other ranks may already wait. on_node: refuses it on this node."""
        try:
            with on_node:
                yield
        except BaseException as error:
            if not self.is_closed:
                self._calls.compare("combine", None, error)
            raise

    def _refuse_dispatch(self, error: BaseException) -> None:
        """For a caller that fails before its dispatch(), for which the other ranks may already wait."""
        with contextlib.suppress(BaseException):
            if not self.is_closed:
                self._calls.begin_dispatch(0, [0] * self.num_nodes, error)
        self.local._refuse_dispatch(error)
        self._num_dispatches += 1

    # ---- dispatch: along the rail, then within the node

    def _routed_by(self, x: Any, handle: Any, topk_idx: Any, topk_weights: Any) -> arguments.Routing:
        if handle is None:
            return arguments.checked_routing(self.rank, topk_idx, topk_weights)
        arguments.check_tensor(self.rank, "x", x)
        routing = self._own(handle)._routing_as_sent(self.rank)
        return arguments.checked_routing_of(self.rank, x, topk_idx, topk_weights, routing)

    def _checked_batch(
        self, x: Any, topk_idx: Any, topk_weights: Any, x_scales: Any, quantized: bool
    ) -> tuple[torch.Tensor | None, bool]:
        """x_scales as they travel, and whether they are bytes. Raises what ExpertParallel.dispatch() would."""
        arguments.check_tensor(self.rank, "x", x)
        arguments.check_optional_tensor(self.rank, "x_scales", x_scales)
        scales, mx_scales = block_scales.packed(self.rank, self.device, x, x_scales, self.hidden)
        sizes = self.num_experts, self.num_topk, self.hidden, self.num_max_tokens_per_rank
        tensors = x, topk_idx, topk_weights, scales
        _core.check_dispatch(self.rank, *sizes, self.dtype, self.device, *tensors, quantized)
        if self.device.type != "cpu":
            self._check_range(topk_idx)
        return scales, mx_scales

    @torch.no_grad()
    def _packed(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        x_scales: torch.Tensor | None = None,
        mx_scales: bool = False,
        quantized: bool = False,
    ) -> Sent:
        if quantized:
            x, x_scales = reference.quantize_fp8(x, float8_dtype(self.device))
        return self._format.pack(x, topk_idx, topk_weights, x_scales, mx_scales)

    def _pass_on(self, sent: Sent | None, failure: BaseException | None) -> tuple[Passage, dict[str, Any]]:
        """(what combine() needs, the arguments of this node's dispatch). Raises `failure` or that of another node."""
        num_sent = [0] * self.num_nodes if sent is None else sent.num_sent
        counts = self._calls.begin_dispatch(0 if sent is None else sent.row_format, num_sent, failure)
        assert sent is not None  # else `failure` was raised
        num_received = [of_node[self.node] for of_node in counts]
        received = self._rail.all_to_all(sent.rows, num_sent, num_received)
        passage = Passage(self._calls.num_dispatches, sent.tokens, sent.num_tokens, num_sent, num_received)
        return passage, self._format.unpack(received, sent)

    def _check_range(self, topk_idx: torch.Tensor) -> None:
        """The kernels of a node do not see these ids."""
        is_bad = (topk_idx < -1) | (topk_idx >= self.num_experts)
        if count := int(is_bad.sum()):
            raise RoutingError(
                f"topk_idx holds {count} ids that are not in [-1, num_experts={self.num_experts}) on rank {self.rank}; pass ids "
                "below num_experts, or -1 to drop a choice"
            )

    # ---- combine: within the node, then along the rail

    def _combined(
        self, handle: TwoLevelHandle, out: torch.Tensor | None, combine: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        self._check_open()
        failure = sums = None
        try:
            with calls.attempt_refused_if_failed(self.local, handle if isinstance(handle, TwoLevelHandle) else None):
                self._check_rail()
                self._check_out(out, self._own(handle)._passage.num_tokens)
            with self._rail.within_node():
                sums = combine()
        except BaseException as error:
            failure = error
        try:
            self._calls.compare("combine", handle._passage if failure is None else None, failure)
        except BaseException:
            if isinstance(handle, TwoLevelHandle) and handle._two_level is self and handle.is_open:
                handle.release()
            raise
        assert sums is not None
        with torch.no_grad():
            combined = self._returned(handle._passage, sums)
        if out is None:
            return combined
        with torch.inference_mode():  # out may be a tensor of that mode
            return out.copy_(combined)

    def _returned(self, passage: Passage, sums: torch.Tensor) -> torch.Tensor:
        """The sums of this rank's tokens over all nodes; `sums`: one for each row that a dispatch received along the rail."""
        return passage.add_up(self._rail.all_to_all(sums, passage.num_received, passage.num_sent))

    def _own(self, handle: Any) -> TwoLevelHandle:
        if not isinstance(handle, TwoLevelHandle):
            raise TypeError(f"handle is a {type(handle).__name__} on rank {self.rank}; pass what dispatch() returned")
        if handle._two_level is not self:
            raise RuntimeError(f"the handle on rank {self.rank} is another object's; pass one of this object's")
        return handle

    def _check_out(self, out: Any, num_tokens: int) -> None:
        arguments.check_optional_tensor(self.rank, "out", out)
        if out is None:
            return
        arguments.check_out(self.rank, out, [num_tokens, self.hidden], self.dtype, self.device)
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"out requires grad on rank {self.rank}; pass out.detach()")

    # ---- the object

    @property
    def _training(self) -> Any:
        """Not None once a layer has been recorded for a backward pass; see MoELayer."""
        return self.local._training

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("this TwoLevelExpertParallel object is closed; make a new one")

    def _check_rail(self) -> None:
        if self._rail.lost:
            raise RuntimeError(f"this TwoLevelExpertParallel has lost a rank: {self._rail.lost}; make new groups")

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that this object holds on this rank, excluding that of `between`."""
        return self.local.nbytes + (self._comm.nbytes if self._owns_comm else 0)

    @property
    def is_closed(self) -> bool:
        return self.local.is_closed

    def check(self) -> None:
        """See ExpertParallel.check()."""
        self.local.check()

    def close(self) -> None:
        """Closes the object, but not `between`, which is the caller's."""
        with contextlib.ExitStack() as closed:  # the communicator even if the first raises
            if self._owns_comm:
                closed.callback(self._comm.close)
            closed.callback(self.local.close)

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.num_ranks}, node {self.node} of {self.num_nodes}"
        return f"TwoLevelExpertParallel({where}, {self.local!r})"
