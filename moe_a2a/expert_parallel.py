"""ExpertParallel: dispatch() sends tokens to the ranks that own their experts, combine() returns the weighted results."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from moe_a2a import _core, arguments, block_scales, calls, codecs, experts, set_up
from moe_a2a.communicator import CommunicatorClient
from moe_a2a.devices import float8_dtype, target_of
from moe_a2a.expert_weights import ExpertWeights, Weight
from moe_a2a.handle import DispatchHandle
from moe_a2a.tables import launch_tables

log = logging.getLogger("moe_a2a")


class ExpertParallel(CommunicatorClient):
    """Moves tokens between the ranks of a group: R ranks, each with its own tokens and E / R of the experts.

    Args:
        group: the ranks. A Communicator, which may have other clients too; or what a Communicator takes: a
            torch.distributed group (None: the default group), a one-dimensional DeviceMesh, an mpi4py communicator, an
            element of thread_group(n), or HandleExchange(rank, num_ranks) to carry the handles yourself.
        num_experts: experts of all ranks; divisible by the number of ranks. Rank r owns the experts
            r * E_local ... (r + 1) * E_local - 1.
        num_topk: choices per token.
        hidden: length of a row.
        num_max_tokens_per_rank: the most tokens that a rank dispatches in one call (T).
        dtype: of x, y and the result: float32, float16 or bfloat16.
        device: where tensors live; default: the device in the environment variable MOE_A2A_DEVICE, else the current GPU
            if this build has kernels for it, else the CPU. Under torchrun, a process whose current GPU is still GPU 0 takes
            the GPU of its LOCAL_RANK and makes it the current one. Two ranks on one GPU are refused.
        num_buffers: dispatches that may be open at once.
        timeout: seconds after which a wait for another rank, here or in a call, raises PeerTimeoutError. Ignored if
            `group` is a Communicator, which has its own.
        num_blocks: blocks (CPU: threads) of every kernel unless a call says otherwise; 0: from the launch table. On a GPU
            at most what the device has, shared evenly with this process's other objects on it.
        num_max_ll_tokens: a batch of at most this many tokens sends its routing as LL words, each with data and its epoch:
            fewer steps, more bytes. Rows of up to 1 MiB for the other ranks together (float8: 1.5 MiB), and up to 3 MiB of
            sums that come back, travel the same way. None: the device's default; 0: never. The same on every rank; takes
            memory for that many rows of every rank.
        launch_table: the file of a tuned table, instead of the one that fits this GPU; see docs/tuning.md.

    Every rank makes the same calls in the same order; numbers of tokens may differ, and may be zero. Work is queued on
    PyTorch's current stream of the device. Memory: see `nbytes`. The constructor raises what that of Communicator raises.

    Threads: any thread may make a rank's calls. Calls are serialised: each waits, without the GIL, until the previous
    one has ended; their order must be the other ranks' order. close() is the exception: it ends the wait of a call in
    another thread, which then raises RuntimeError; the peers raise PeerTimeoutError that names this rank.

    Processes: in a forked child every call raises RuntimeError; dropping or closing the object there is harmless.

    Signals: on the CPU a wait in the main thread runs Python's signal handlers. If one raises, as for Ctrl-C, the call
    ends, the peers raise PeerTimeoutError that names this rank, and the object is unusable from then on: close it. On
    a GPU the kernels wait, and only `timeout` ends a wait.
    """

    @set_up.refuses_wrong_arguments
    def __init__(
        self,
        group: Any = None,
        *,
        num_experts: int,
        num_topk: int,
        hidden: int,
        num_max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        num_buffers: int = 2,
        timeout: float = 30.0,
        num_blocks: int = 0,
        num_max_ll_tokens: int | None = None,
        launch_table: str | os.PathLike[str] | None = None,
    ):
        self._join(group, device, timeout)
        self.num_experts = num_experts
        self.num_topk = num_topk
        self.hidden = hidden
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.dtype = dtype
        self.num_buffers = num_buffers
        self.num_blocks = num_blocks
        self.num_max_ll_tokens = num_max_ll_tokens
        self._launch_table = launch_table
        self.expert_map: torch.Tensor | None = None  # after shrink(): the new id of each expert, -1 for a lost one
        self._num_dispatches = 0  # calls that have returned a handle or raised
        self._training: Any = None  # what its TokenDispatchers share
        self._make()
        self.num_local_experts = self.num_experts // self.num_ranks

    # ---- set-up

    def _allocate(self) -> None:
        self._check_numbers()
        arguments.checked_row_dtype(self.rank, self.dtype)
        comm = self._allocated_comm()
        of_batch = (self.num_topk, self.hidden, self.num_max_tokens_per_rank)
        sizes = (self.num_experts, *of_batch, self.num_buffers, self.dtype, self.num_max_ll_tokens)
        log.info(
            "rank %d takes %d bytes on %s",
            self.rank,
            _core.nbytes_for(self.rank, self.num_ranks, *sizes, target_of(self.device)),
            self.device,
        )
        self._core = _core.ExpertParallel(comm, self._owns_comm, *sizes, self.device)
        self.num_max_ll_tokens = self._core.num_max_ll_tokens
        # Set once, so that a call looks its blocks up without Python.
        of_table = (self.device, self.num_ranks, self.hidden, self.dtype, self.num_topk, self._launch_table)
        steps, _ = launch_tables.in_effect(*of_table)
        self._core.set_launch_table(steps)

    def _check_numbers(self) -> None:
        for name in ("num_experts", "num_topk", "hidden", "num_max_tokens_per_rank", "num_buffers"):
            setattr(self, name, arguments.checked_int(self.rank, name, getattr(self, name)))
        if self.num_max_ll_tokens is not None:
            self.num_max_ll_tokens = arguments.checked_int(self.rank, "num_max_ll_tokens", self.num_max_ll_tokens)
        self.num_blocks = arguments.checked_int(self.rank, "num_blocks", self.num_blocks, 0)
        arguments.check_optional_path(self.rank, "launch_table", self._launch_table)

    # ---- the two calls of a layer

    @calls.opens_a_handle
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        handle: DispatchHandle | None = None,
        layout: str | None = None,
        expert_alignment: int | None = None,
        x_scales: torch.Tensor | None = None,
        quantize: str | None = None,
        num_max_tokens_per_rank: int | None = None,
        num_blocks: int = 0,
    ) -> DispatchHandle:
        """Sends each token's row to every rank that owns one of its experts, once per rank, and receives the others'.

        Args:
            x: [num_tokens, H] of `dtype`, or float8 with x_scales. Rows may be strided.
            topk_idx: [num_tokens, K] int32 or int64, ids of experts; -1 drops a choice.
            topk_weights: [num_tokens, K] float32; None: all weights are 1.
            handle: instead of topk_idx and topk_weights, an earlier handle, whose routing (kept, not copied) is used again.
            layout, expert_alignment: see DispatchHandle; default: "rows" and 1, or those of `handle`. Only
                layout="expert_major" takes an alignment (1 to 256).
            x_scales: with float8 x: [num_tokens, ceil(H / 128)] float32, or [num_tokens, ceil(H / 32)] uint8 or
                float8_e8m0fnu (MXFP8). They travel bit for bit. All ranks pass float32, or all ranks pass bytes.
            quantize: "fp8": quantises rows on the way, with a scale per 128 values (amax / 448; gfx942: / 240). All ranks or none.
            num_max_tokens_per_rank: an upper bound on every rank's tokens in this call. T is then the next power of two, at
                most the object's T, and experts that take all R * T rows get fewer rows. None: T of the object or of `handle`.
                Must give the same T on every rank.
            num_blocks: blocks (CPU: threads) that the kernels use; 0: the object's num_blocks, or the launch table's.

        Raises:
            ValueError, TypeError: an argument is wrong.
            RuntimeError: num_buffers handles are open, or the object is closed.
            PeerRefusedError: another rank's call failed.
            CallMismatchError: another rank dispatched with another T, rows of another dtype, or x_scales of another kind.
            PeerTimeoutError: a rank did not arrive.

        If this rank raises anything before its launch (even MemoryError or KeyboardInterrupt), the other ranks raise
        PeerRefusedError with its text, the dispatch counts as refused on every rank, and the object stays usable. Only
        a rank whose object is closed cannot tell the others. On a GPU the others learn of the refusal at check() or at
        their next call, which then does not run; the handle that they got is closed from then on.
        """
        core = self._core_to_dispatch()
        routing = (topk_idx, topk_weights) if handle is None else self._routing_of(handle, x, topk_idx, topk_weights)
        layout, expert_alignment = arguments.checked_layout(self.rank, handle, layout, expert_alignment)
        num_blocks = arguments.checked_blocks(self.rank, num_blocks, self.num_blocks)
        bound = arguments.checked_bound(self.rank, handle, num_max_tokens_per_rank)
        received = arguments.LAYOUTS.index(layout), expert_alignment
        return self._sent_by(core.dispatch, x, routing, x_scales, quantize, num_blocks, bound, *received)

    @calls.serves_a_handle(position=1)
    def combine(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        *,
        presummed: bool = False,
        wire: str | None = None,
        out: torch.Tensor | None = None,
        num_blocks: int = 0,
    ) -> torch.Tensor:
        """Returns [num_tokens, H]: for each of this rank's tokens the sum over its choices of weight * expert output.

        The order of addition is fixed: each rank adds its share of a token's choices in fp32 and rounds to `dtype`, then
        the ranks' sums are added in fp32 in ascending order. The same inputs give the same bits.

        Args:
            y: one row per position of the handle's layout ([n, H], n >= expert_offsets[-1]; [E_local, R * T, H] for
                "masked"), of `dtype`. Rows past the last position are never read.
            handle: of the dispatch; valid for one combine.
            presummed: y is [R * T, H] like recv_x, each row already weighted and summed over this rank's experts.
            wire: how this rank's sums travel. None: as `dtype`. "fp8", "q8", "q6" or "q4": in blocks of 32 values that share
                a scale, 8.5, 8.5, 6.5 or 4.5 bits per value. Each sum that another rank has sent is off by at most
                codecs.ONE_ROUNDING[wire] times the largest magnitude in its block, and a NaN or an infinity turns its block
                into NaNs. A rank's own sums stay exact, and so do those of batches that return as LL words (up to
                num_max_ll_tokens tokens and 3 MiB of sums), which are latency-bound. The ranks need not agree.
            out: the tensor to write to, [num_tokens, H] contiguous, of `dtype`; must not overlap y or the handle's views.
            num_blocks: as in dispatch().

        Raises: as dispatch(). After an error of its own, or PeerRefusedError, all ranks may retry the combine with the
        same handle and the same y while handle.is_open. The handle is closed if the other rank has released its own, or
        has none because its dispatch() raised RoutingError, and on a GPU once this rank has dispatched into the same
        buffer. If a rank retries at once, its sums may reach a peer in time; that peer then raises nothing.
        A rank that needs no sum from the failed one ends its combine normally.
        """
        core, key = self._open_core(), self._key_of(handle)
        arguments.checked_bool(self.rank, "presummed", presummed)
        codec = self._codec_of_combine(wire)
        blocks = arguments.checked_blocks(self.rank, num_blocks, self.num_blocks)
        try:
            return core.combine(y, key, presummed, codec, out, blocks, handle._sum_index)
        except TypeError:
            arguments.check_tensor(self.rank, "y", y)
            arguments.check_optional_tensor(self.rank, "out", out)
            raise

    @calls.serves_a_handle(position=0)
    def experts(
        self,
        handle: DispatchHandle,
        w_gate_up: Weight,
        w_down: Weight,
        *,
        fused: bool | None = None,
        fused_combine: bool | None = None,
        wire: str | None = None,
        num_max_routes: int | None = None,
        out: torch.Tensor | None = None,
        num_blocks: int = 0,
    ) -> torch.Tensor:
        """Runs SwiGLU experts over the received rows and combines their outputs: [num_tokens, H].

        Args:
            handle: of the dispatch, any layout; valid for one combine. For layout="masked" the
                kernels multiply all R * T rows of each expert.
            w_gate_up, w_down: [E_local, 2 * I, H] and [E_local, H, I] of `dtype`, or each (float8 values, scales); see
                MoELayer. For float8 weights dispatch with quantize="fp8".
            fused: True: use kernels that gather their rows and never synchronise with the host; False: step by step in
                PyTorch; None: kernels on a GPU if they can run: bfloat16 or float16 rows, sizes that are multiples of 16.
            fused_combine: True: the kernel of the second product also sends the sums, each as soon as its terms are complete;
                an error for layout="masked" and for batches whose sums may return as LL words (at most num_max_ll_tokens
                tokens and 3 MiB of sums). False: first the product, then the combine. None: the same as False, since
                a fused layer took between 3 % less and 4 % more time on 4 H200 (docs/benchmarks.md). The bits are the same.
            wire: as in combine(); not with fused_combine=True.
            num_max_routes: rows of the intermediate results, [num_max_routes, I] and [num_max_routes, H]; None:
                handle.capacity, which holds any routing. More routes raise ValueError if the host can see them (on the
                CPU, and step by step). On a GPU, routes past the bound are dropped, here and in the peers' sums, and check()
                raises RoutingError. Not for layout="masked".
            out, num_blocks: as in combine().

        Raises: as combine(), and ValueError or TypeError for weights that do not fit. All ranks may retry the call.
        """
        self._open_core()
        self._check_own(handle, "experts")
        weights = ExpertWeights.checked(self, w_gate_up, w_down)
        weights.check_no_grad(self)
        experts.check_options(self, fused, fused_combine, wire, num_max_routes)
        codec = self._codec_of_combine(wire)
        arguments.check_optional_tensor(self.rank, "out", out)
        num_blocks = arguments.checked_blocks(self.rank, num_blocks, self.num_blocks)
        options: dict[str, Any] = {"fused": fused, "fused_combine": fused_combine, "num_max_routes": num_max_routes}
        return experts.run_and_combine(handle, weights, codec, out, num_blocks, **options)

    # ---- the two halves of each call: between them the device is free

    @calls.opens_a_handle
    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        handle: DispatchHandle | None = None,
        x_scales: torch.Tensor | None = None,
        quantize: str | None = None,
        num_max_tokens_per_rank: int | None = None,
        num_blocks: int = 0,
    ) -> DispatchHandle:
        """The first half of dispatch(): returns when the rows are posted. The handle is not readable yet."""
        core = self._core_to_dispatch()
        routing = (topk_idx, topk_weights) if handle is None else self._routing_of(handle, x, topk_idx, topk_weights)
        num_blocks = arguments.checked_blocks(self.rank, num_blocks, self.num_blocks)
        bound = arguments.checked_bound(self.rank, handle, num_max_tokens_per_rank)
        return self._sent_by(core.dispatch_send, x, routing, x_scales, quantize, num_blocks, bound)

    @calls.serves_a_handle(position=0)
    def dispatch_recv(
        self,
        handle: DispatchHandle,
        *,
        layout: str | None = None,
        expert_alignment: int | None = None,
        num_blocks: int = 0,
    ) -> DispatchHandle:
        """The second half of dispatch(): waits for the rows of all ranks; returns the same handle, now readable."""
        core, key = self._open_core(), self._key_of(handle)
        layout, expert_alignment = arguments.checked_layout(self.rank, None, layout, expert_alignment)
        num_blocks = arguments.checked_blocks(self.rank, num_blocks, self.num_blocks)
        core.dispatch_recv(key, arguments.LAYOUTS.index(layout), expert_alignment, num_blocks)
        handle._num_blocks = num_blocks
        return handle

    @calls.serves_a_handle(position=1)
    def combine_send(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        *,
        presummed: bool = False,
        wire: str | None = None,
        num_blocks: int = 0,
    ) -> None:
        """The first half of combine(): returns when the sums are posted."""
        core, key = self._open_core(), self._key_of(handle)
        arguments.check_tensor(self.rank, "y", y)
        arguments.checked_bool(self.rank, "presummed", presummed)
        codec = self._codec_of_combine(wire)
        blocks = arguments.checked_blocks(self.rank, num_blocks, self.num_blocks)
        core.combine_send(y, key, presummed, codec, blocks, handle._sum_index)

    @calls.serves_a_handle(position=0)
    def combine_recv(
        self, handle: DispatchHandle, *, out: torch.Tensor | None = None, num_blocks: int = 0
    ) -> torch.Tensor:
        """The second half of combine(): waits for the sums of all ranks, returns [num_tokens, H]."""
        core, key = self._open_core(), self._key_of(handle)
        arguments.check_optional_tensor(self.rank, "out", out)
        return core.combine_recv(key, out, arguments.checked_blocks(self.rank, num_blocks, self.num_blocks))

    def blocks_for(self, num_tokens: int) -> tuple[int, int]:
        """Blocks of a dispatch and of a combine of `num_tokens` tokens, if neither the call nor the object sets them."""
        return self._open_core().blocks_for(arguments.checked_int(self.rank, "num_tokens", num_tokens, 0))

    def close(self) -> None:
        """Ends the object; raises RoutingError as check() does. Other ranks that still wait for this one time out. Views of
        handles stay readable while they are held; their contents are unspecified."""
        super().close()

    def __repr__(self) -> str:
        return (
            f"ExpertParallel(rank {self.rank} of {self.num_ranks}, {self.num_experts} experts, top-{self.num_topk}, "
            f"hidden {self.hidden}, {self.num_max_tokens_per_rank} tokens, {self.dtype}, {self._state()})"
        )

    _refuse_dispatch = calls.refuse_dispatch

    def _core_to_dispatch(self) -> Any:
        """First releases the buffer that a backward pass has kept for its second half: this dispatch may need it."""
        if self._training is not None:
            self._training.release_kept()
        return self._open_core()

    def _sent_by(
        self, send: Any, x: Any, routing: tuple[Any, Any], x_scales: Any, quantize: Any, num_blocks: int, *rest: int
    ) -> DispatchHandle:
        """send: the extension's dispatch or dispatch_send; rest: its arguments before num_blocks, the last."""
        quantized = quantize is not None and arguments.checked_quantize(self.rank, quantize)
        try:
            scales = block_scales.packed(self.rank, self.device, x, x_scales, self.hidden)
            sent = send(x, *routing, *scales, quantized, *rest, num_blocks)
        except (TypeError, AttributeError):
            arguments.check_dispatched(self.rank, x, x_scales, *routing)
            raise
        row_dtype = float8_dtype(self.device) if quantized else x.dtype
        if self._trace is not None:
            self._trace.dispatched(routing[0], row_dtype)
        return DispatchHandle(self, sent, row_dtype, routing, block_scales.byte_dtype(x_scales), num_blocks)

    def _codec_of_combine(self, wire: Any) -> int:
        """The codec's number, noted in a running trace."""
        codec = codecs.checked_index(self.rank, "wire", wire)
        if self._trace is not None:
            self._trace.combined(wire)
        return codec

    def _key_of(self, handle: DispatchHandle) -> Any:
        if not isinstance(handle, DispatchHandle):
            raise TypeError(f"handle is a {type(handle).__name__} on rank {self.rank}; pass what dispatch() returned")
        return handle._handle

    def _check_own(self, handle: DispatchHandle, call: str) -> None:
        self._key_of(handle)
        if handle.ep is not self:
            raise RuntimeError(
                f"{call} got a handle of another ExpertParallel on rank {self.rank}; pass one of this object's"
            )

    def _routing_of(self, handle: DispatchHandle, x: Any, topk_idx: Any, topk_weights: Any) -> arguments.Routing:
        """The routing of `handle`, for another dispatch along it."""
        arguments.check_tensor(self.rank, "x", x)
        self._check_own(handle, "dispatch")
        return arguments.checked_routing_of(self.rank, x, topk_idx, topk_weights, handle._routing_as_sent(self.rank))
