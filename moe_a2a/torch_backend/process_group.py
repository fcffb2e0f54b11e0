"""The process group of the backend "moe_a2a", and its registration."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moe_a2a import arguments
from moe_a2a.collectives import Collectives, nbytes_of
from moe_a2a.groups import MeetingGroup
from moe_a2a.groups.boards import StoreBoard, since_restart
from moe_a2a.groups.rendezvous import Meetings
from moe_a2a.torch_backend.call_options import op_of, reduce_options, with_timeout
from moe_a2a.torch_backend.delegates import LargeCalls, add_delegates, make_delegate, one_by_one, reduce_scatter_by
from moe_a2a.torch_backend.methods import tracked
from moe_a2a.torch_backend.options import LARGEST, Options, Place
from moe_a2a.torch_backend.p2p import Batches
from moe_a2a.torch_backend.tensors import (
    fill,
    flattened,
    gather,
    gather_to_list,
    has_gaps,
    has_kernels,
    only_nccl_takes,
    reduce_scatter,
    reduce_scatter_list,
    takes,
)
from moe_a2a.torch_backend.work import BarrierWork, CallThread, RecentWorks, StreamWork, Work
from moe_a2a.two_level.collectives import TwoLevelCollectives
from moe_a2a.untraced import untraced

NAME = "moe_a2a"
_c10d: Any = torch._C._distributed_c10d  # torch.distributed lacks some options before 2.12


class _StoreGroup(MeetingGroup):
    """The ranks of a process group under construction: only its store exists yet."""

    KIND = "process group"


_ProcessGroup: Any = dist.ProcessGroup  # its overloads describe calls, not overrides


class MoeA2aProcessGroup(_ProcessGroup):
    """The group made by init_process_group("moe_a2a").

    The delegates are registered as its backends by device, so calls that are not overridden here reach them as in
    PyTorch's own groups. All ranks make the Collectives of a device in their first call on it.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        num_ranks: int,
        timeout: Any,
        options: Options,
        global_ranks: list[int] | None = None,
    ):
        super().__init__(rank, num_ranks)
        self._rank, self._num_ranks = rank, num_ranks
        self._seconds = min(timeout.total_seconds(), arguments.MAX_TIMEOUT)
        self._options = options.settled(rank)
        self._place = Place.of(rank, global_ranks or list(range(num_ranks)), self._options.ranks_per_node)
        self._group_store, self._timeout = store, timeout
        self._store = dist.PrefixStore("collectives", store)
        self._made: dict[torch.device, Collectives | TwoLevelCollectives] = {}
        self._is_shut_down = False
        self._streams: dict[torch.device, Any] = {}
        self._nccl_device: torch.device | None = None  # of the last large call
        self._lock = threading.Lock()
        self._thread = CallThread(f"moe_a2a rank {rank}")
        self._recent = RecentWorks()
        self._batches = Batches()
        self.delegates = add_delegates(self, store, rank, num_ranks, timeout)

    # Called from C++ and Python.

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def shutdown(self) -> None:
        self._thread.close()
        self._is_shut_down = True
        made, self._made = self._made, {}
        for coll in made.values():
            coll.close()
        super().shutdown()
        # Gloo's threads need the GIL to drop the tensors of its last calls. Without this they may still wait for it when a DDP
        # model that outlives the group destroys gloo, which holds the GIL while it joins them.
        time.sleep(0.02)

    def get_group_store(self) -> Any:
        return self._group_store

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's own would split the delegates, and needs a store that a group made in Python lacks."""
        raise RuntimeError(f"rank {self._rank}: a moe_a2a group cannot be split; use torch.distributed.new_group()")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self._rank} of {self._num_ranks}, else {self.delegates})"

    # The collectives. `opts` carries the operator, and whether the caller waits at once. As in PyTorch's own groups, those
    # that users call by another name also take a single tensor, an operator and a timeout, as DDP's join() passes them.
    # The deadline of Collectives stays the group's.

    @tracked
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Any:
        opts = reduce_options(_c10d.AllreduceOptions, opts, op, timeout)
        tensors, op = [tensors] if isinstance(tensors, torch.Tensor) else tensors, op_of(opts)
        if not self._keeps(op, tensors):
            return self._delegate(*tensors).allreduce(tensors, opts)

        return self._all_reduce(tensors, op, opts)

    @tracked
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = _c10d.AllreduceCoalescedOptions() if opts is None else opts
        op = op_of(opts)
        if not takes(op, tensors):
            return self._delegate(*tensors).allreduce_coalesced(tensors, opts)
        return self._all_reduce(tensors, op, opts)

    def _all_reduce(self, tensors: list[torch.Tensor], op: str, opts: Any) -> Any:
        def call(coll: Collectives) -> None:
            for x in tensors:
                fill(coll, x, lambda out: coll.all_reduce(out, op, out=out))

        return self._run(opts, tensors, call)

    @tracked
    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Any:
        opts = _c10d.AllgatherOptions() if opts is None else opts
        if not self._keeps("gather", [x], [output]):
            return self._delegate(x, output)._allgather_base(output, x, opts)
        return self._run(opts, [x, output], lambda coll: gather(coll, output, x), [output])

    @tracked
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = _c10d.AllgatherOptions() if opts is None else opts
        if not takes("gather", inputs):
            return one_by_one(self._delegate(*inputs, *outputs)._allgather_base, outputs, inputs, opts)

        def call(coll: Collectives) -> None:
            for output, x in zip(outputs, inputs, strict=True):
                gather(coll, output, x)

        return self._run(opts, [*inputs, *outputs], call, outputs)

    @tracked
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs, opts = [outputs], [inputs], with_timeout(_c10d.AllgatherOptions(), opts)
        opts = _c10d.AllgatherOptions() if opts is None else opts
        x, parts = inputs[0], outputs[0]
        if only_nccl_takes(parts) or not self._keeps("gather", [x], parts):
            return self._delegate(x, *parts).allgather(outputs, inputs, opts)

        return self._run(opts, [x, *parts], lambda coll: gather_to_list(coll, parts, x), parts)

    @tracked
    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Any:
        opts = _c10d.ReduceScatterOptions() if opts is None else opts
        op = op_of(opts)
        if not self._keeps(op, [x], [output]):
            return reduce_scatter_by(self._delegate(x, output), output, x, opts)
        return self._run(opts, [x, output], lambda coll: reduce_scatter(coll, output, flattened(coll, x), op), [output])

    @tracked
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = _c10d.ReduceScatterOptions() if opts is None else opts
        op = op_of(opts)
        if not takes(op, inputs):
            call_one = partial(reduce_scatter_by, self._delegate(*inputs, *outputs))
            return one_by_one(call_one, outputs, inputs, opts)

        def call(coll: Collectives) -> None:
            for output, x in zip(outputs, inputs, strict=True):
                reduce_scatter(coll, output, flattened(coll, x), op)

        return self._run(opts, [*inputs, *outputs], call, outputs)

    @tracked
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Any:
        opts = reduce_options(_c10d.ReduceScatterOptions, opts, op, timeout)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        op, output, parts = op_of(opts), outputs[0], inputs[0]
        if only_nccl_takes(parts) or not self._keeps(op, parts or [output], [output]):
            return self._delegate(output, *parts).reduce_scatter(outputs, inputs, opts)

        return self._run(opts, [*parts, output], lambda coll: reduce_scatter_list(coll, output, parts, op), [output])

    @untraced
    def barrier(self, opts: Any = None, *, timeout: Any = None) -> Any:
        """Synchronises the GPUs if the group has used them, else the processes."""
        gpu = next((device for device in self._made if device.type == "cuda"), None)
        if gpu is None and self._nccl_device is not None:
            return self._backend_for(self._nccl_device).barrier(_c10d.BarrierOptions() if opts is None else opts)
        token = torch.empty(0, dtype=torch.uint8, device=gpu or "cpu")
        if not has_kernels(token.device):
            return self._delegate(token).barrier(_c10d.BarrierOptions() if opts is None else opts)
        work = self._run(opts, [token], lambda coll: coll.barrier(), [])
        return BarrierWork(work, gpu) if gpu else work

    # What Collectives lacks. PyTorch would find the delegates itself, but it holds the GIL until the call is queued. A gloo
    # thread may hold the queue's lock and wait for the GIL (to free a tensor): a deadlock.

    @tracked
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int = 0) -> Any:
        if isinstance(tensors, torch.Tensor):
            root = root if opts is None else opts
            tensors, opts = [tensors], with_timeout(_c10d.BroadcastOptions(), timeout)
            opts.rootRank = root
        return self._delegate(*tensors).broadcast(tensors, _c10d.BroadcastOptions() if opts is None else opts)

    @tracked
    def all_to_all_single(
        self, output: torch.Tensor, x: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        opts = _c10d.AllToAllOptions() if opts is None else opts
        return self._delegate(x, output).alltoall_base(output, x, output_sizes, input_sizes, opts)

    @tracked
    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self._delegate(*tensors).reduce(tensors, opts)

    @tracked
    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        return self._delegate(*inputs, *sum(outputs, [])).gather(outputs, inputs, opts)

    @tracked
    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Any:
        return self._delegate(*outputs, *sum(inputs, [])).scatter(outputs, inputs, opts)

    @untraced
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        return self._batches.call(self, self._delegate(*tensors), "send", tensors, dst, tag)

    @untraced
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        return self._batches.call(self, self._delegate(*tensors), "recv", tensors, src, tag)

    @untraced
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        return self._delegate(*tensors).recv_anysource(tensors, tag)

    # The names before PyTorch 2.12 or so. PyTorch's C++ and Python code call one or the other.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _delegate(self, *tensors: torch.Tensor) -> Any:
        """Raises ValueError for tensors that the delegate would misread."""
        for x in tensors:
            if x.is_neg():
                raise ValueError(
                    f"a tensor of shape {list(x.shape)} is a negative view on rank {self._rank}: its memory, which the "
                    "delegate reads, holds the values with the opposite sign; pass .resolve_neg()"
                )
            if x.is_cpu and has_gaps(x):
                raise ValueError(
                    f"a tensor of shape {list(x.shape)} has strides {list(x.stride())} on rank {self._rank}; gloo, which "
                    "makes this call, would read its elements as adjacent; pass .contiguous()"
                )
        return self._backend_for(tensors[0].device)

    def _backend_for(self, device: torch.device) -> Any:
        self._require_alive()
        return self._get_backend(device)

    def _require_alive(self) -> None:
        if self._is_shut_down:
            raise RuntimeError(f"rank {self._rank}: this process group has been destroyed; make a new one")

    def _run(
        self,
        opts: Any,
        tensors: list[torch.Tensor],
        call: Callable[[Collectives], Any],
        results: list[torch.Tensor] | None = None,
    ) -> Any:
        """Runs call(collectives of the device): now if the caller waits at once, else after the queued calls. As in
        PyTorch's own groups, tensors may require grad, and no call is recorded."""
        device = tensors[0].device
        results = tensors if results is None else results
        waits_at_once = not getattr(opts, "asyncOp", True)
        find: Callable[[torch.device], Any] = self._nccl if self._is_large(tensors) else self._collectives

        def run() -> None:
            with torch.no_grad() if any(x.requires_grad for x in tensors) else nullcontext():
                call(find(device))

        if device.type == "cpu":
            work = self._thread.run(run, results, waits_at_once)
            return work if waits_at_once else self._recent.keep(work)
        find(device)  # Collectives are made on the current stream
        if waits_at_once:  # on the caller's stream, like any kernel of its own
            run()
            return Work(results)
        with self._lock:
            stream = self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream(device))
        return self._recent.keep(StreamWork.begin(stream, run, tensors, results))

    def _nccl_nbytes(self, device: torch.device) -> int:
        """From how many bytes on NCCL makes the calls that Collectives could make too."""
        is_there = device.type == "cuda" and "cuda" in self.delegates and self._place.num_nodes == 1
        return self._options.nccl_nbytes if is_there else LARGEST

    def _keeps(self, op: str, inputs: list[torch.Tensor], outputs: Sequence[torch.Tensor] = ()) -> bool:
        """Whether the delegate does not get these tensors as they are. If the call is large, it gets this rank's copies of them,
        from _run()."""
        if not takes(op, inputs):
            return False
        tensors = [*inputs, *outputs]
        if not self._is_large(tensors) or not all(x.is_contiguous() for x in tensors):
            return True
        self._nccl_device = tensors[0].device
        return False

    def _is_large(self, tensors: list[torch.Tensor]) -> bool:
        return sum(map(nbytes_of, tensors)) >= self._nccl_nbytes(tensors[0].device)

    def _nccl(self, device: torch.device) -> LargeCalls:
        self._nccl_device = device
        return LargeCalls(self._backend_for(device), self._rank, self._num_ranks)

    def _collectives(self, device: torch.device) -> Any:
        made = self._made.get(device)
        if made is None:
            with self._lock:
                self._require_alive()  # the store still has what the ranks posted for those that are closed
                made = self._made.get(device) or self._made.setdefault(device, self._make(device))
        return made

    def _make(self, device: torch.device) -> Collectives | TwoLevelCollectives:
        options, place = self._options, self._place
        store = dist.PrefixStore(f"node {place.node} {device.type}", self._store)
        node = _StoreGroup(Meetings(place.rank, place.num_ranks, StoreBoard(store)), self._seconds)
        how: dict[str, Any] = {"num_blocks": options.num_blocks, "device": device, "timeout": self._seconds}
        if place.num_nodes == 1:
            return Collectives(node, min(options.max_nbytes, self._nccl_nbytes(device)), **how)
        return TwoLevelCollectives(
            node,
            make_delegate(
                device.type,
                dist.PrefixStore(f"between {place.rank} {device.type}", self._store),
                place.node,
                place.num_nodes,
                self._timeout,
            ),
            slice_nbytes=options.max_nbytes,
            parallel_slices=options.parallel_slices,
            staging_nbytes=options.staging_nbytes,
            **how,
        )


def _create(given: Any, options: Any) -> MoeA2aProcessGroup:
    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"pg_options is a {type(options).__name__} on rank {given.group_rank}; pass a moe_a2a.torch_backend.Options"
        )
    # After destroy_process_group() a group of the same name gets the same store, which still has the keys of the first.
    store = since_restart(given.store)
    times_made = store.add(f"made by {given.group_rank}", 1)
    return MoeA2aProcessGroup(
        dist.PrefixStore(str(times_made), store),
        given.group_rank,
        given.group_size,
        given.timeout,
        options or Options(),
        given.global_ranks_in_group,
    )


def register() -> None:
    """Registers the name with torch.distributed; makes no process group and touches no GPU."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
