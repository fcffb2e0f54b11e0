"""ExpertParallel: dispatch() tokens to the ranks that own their experts, combine() what the experts made of them."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from moe_a2a import _core, arguments, calls, experts, launch_tables
from moe_a2a.communicator import CommunicatorClient
from moe_a2a.devices import float8_dtype, target_of
from moe_a2a.errors import RoutingError
from moe_a2a.expert_weights import ExpertWeights, Weight
from moe_a2a.handle import DispatchHandle

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
        num_max_tokens_per_rank: most tokens that a rank dispatches at once (T).
        dtype: of x, y and the result: float32, float16 or bfloat16.
        device: where tensors live; default: what the environment variable MOE_A2A_DEVICE names, else the current GPU
            if this build has its target, else the CPU. Under torchrun, a process whose current GPU is still GPU 0 takes
            the GPU of its LOCAL_RANK and makes it the current one. Two ranks on one GPU are refused.
        num_buffers: dispatches that may be open at once.
        timeout: seconds after which a wait for another rank, here or in a call, raises PeerTimeoutError. With a
            Communicator, its timeout counts.
        num_blocks: blocks (CPU: threads) of every kernel unless a call says otherwise; 0: as the launch table says. On a GPU
            at most what the device has, shared evenly with this process's other objects on it.
        num_max_ll_tokens: a rank's batch of at most this many tokens sends its routing as LL words, which carry their epoch
            beside their data: fewer steps, more bytes. Its rows, up to 1 MiB, and its sums, up to 3 MiB, travel the same
            way. None: the device's default; 0: never. The same on every rank; takes memory for as many rows of every rank.
        launch_table: the file of a tuned table, instead of the one that fits this GPU; see docs/tuning.md.

    Every rank makes the same calls in the same order; tokens may differ in number, also be zero. Work is queued on
    PyTorch's current stream of the device. Memory: see `nbytes`.

    Threads: a rank's calls may come from any of them. They are serialised: a call waits, without the GIL, until the one
    before has ended. close() is the exception: it ends the wait of a call that another thread is in, which then raises
    RuntimeError; the peers raise PeerTimeoutError that names this rank.

    Processes: in a forked child every call raises RuntimeError; to drop or close the object there harms nothing.

    Signals: on the CPU a wait of the main thread runs Python's signal handlers as they come. One that raises, as Ctrl-C
    does, ends the call; the peers raise PeerTimeoutError that names this rank, and the object is out of use: close it. On
    a GPU waits are the kernels', and end by `timeout`.
    """

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
        self._num_dispatches = 0  # that have returned a handle or raised
        self._make()
        self.num_local_experts = self.num_experts // self.num_ranks

    # ---- set-up

    def _allocate(self) -> None:
        self._check_numbers()
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(
                f"dtype={self.dtype!r} on rank {self.rank}; pass torch.float32, torch.float16 or torch.bfloat16"
            )
        comm = self._allocated_comm()
        sizes = (
            self.num_experts,
            self.num_topk,
            self.hidden,
            self.num_max_tokens_per_rank,
            self.num_buffers,
            self.dtype,
            self.num_max_ll_tokens,
        )
        log.info(
            "rank %d takes %d bytes on %s",
            self.rank,
            _core.nbytes_for(self.rank, self.num_ranks, *sizes, target_of(self.device)),
            self.device,
        )
        self._core = _core.ExpertParallel(comm, self._owns_comm, *sizes, self.device)
        self.num_max_ll_tokens = self._core.num_max_ll_tokens
        # Once: a call looks its blocks up without Python.
        self._core.set_launch_table(self._launch_steps())

    def _launch_steps(self) -> list[launch_tables.LaunchStep]:
        file = self._launch_table
        return launch_tables.in_effect(self.device, self.num_ranks, self.hidden, self.dtype, self.num_topk, file)[0]

    def _check_numbers(self) -> None:
        for name in ("num_experts", "num_topk", "hidden", "num_max_tokens_per_rank", "num_buffers"):
            setattr(self, name, arguments.checked_int(self.rank, name, getattr(self, name)))
        if self.num_max_ll_tokens is not None:
            self.num_max_ll_tokens = arguments.checked_int(self.rank, "num_max_ll_tokens", self.num_max_ll_tokens)
        self.num_blocks = arguments.checked_int(self.rank, "num_blocks", self.num_blocks, 0)

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
        num_blocks: int = 0,
    ) -> DispatchHandle:
        """Sends each token's row to every rank that owns one of its experts, once per rank, and receives the others'.

        Args:
            x: [num_tokens, H] of `dtype`, or float8 with x_scales. Rows may be strided.
            topk_idx: [num_tokens, K] int32 or int64, ids of experts; -1 drops a choice.
            topk_weights: [num_tokens, K] float32; None: 1.
            handle: instead of topk_idx and topk_weights, an earlier handle whose routing is used again.
            layout, expert_alignment: see DispatchHandle; default: "rows" and 1, or those of `handle`. The alignment (1 to
                256) is for layout="expert_major".
            x_scales: [num_tokens, ceil(H / 128)] float32, with float8 x.
            quantize: "fp8": rows are quantised on the way, one scale per 128 values (amax / 448).
            num_blocks: blocks (CPU: threads) that the kernels use; 0: the object's num_blocks, or the launch table's.

        Raises:
            ValueError, TypeError: an argument is wrong.
            RuntimeError: num_buffers handles are open, or the object is closed.
            PeerRefusedError: another rank's call failed.
            PeerTimeoutError: a rank did not come.

        Whatever this rank raises before its launch, MemoryError and KeyboardInterrupt too, the other ranks raise
        PeerRefusedError with its text, and the object stays usable on all: the refused dispatch has passed on every rank.
        Only a rank whose object is closed cannot tell. On a GPU the others learn of it at their next call, which then is
        not made, or at check().
        """
        core = self._open_core()
        routing = self._checked_routing(x, x_scales, handle, topk_idx, topk_weights)
        layout, expert_alignment = arguments.checked_layout(self.rank, handle, layout, expert_alignment)
        quantized = arguments.checked_quantize(self.rank, quantize)
        num_blocks = arguments.checked_blocks(self.rank, num_blocks, self.num_blocks)
        row_dtype = float8_dtype(self.device) if quantized else x.dtype
        sent = core.dispatch(
            x, *routing, x_scales, quantized, arguments.layout_index(layout), expert_alignment, num_blocks
        )
        return self._dispatched(sent, row_dtype, routing)._received(layout, expert_alignment, num_blocks)

    @calls.serves_a_handle(position=1)
    def combine(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        *,
        presummed: bool = False,
        out: torch.Tensor | None = None,
        num_blocks: int = 0,
    ) -> torch.Tensor:
        """Returns [num_tokens, H]: for each own token the sum over its choices of weight * expert output.

        The order of addition is fixed, in fp32: on each rank over the token's choices there, rounded to `dtype`, then
        over the ranks in ascending order. The same inputs give the same bits.

        Args:
            y: one row per position of the handle's layout ([n, H], n >= expert_offsets[-1]; [E_local, R * T, H] for
                "masked"), of `dtype`. Rows past the last position are never read.
            handle: of the dispatch; serves once.
            presummed: y is [R * T, H] like recv_x, each row already weighted and summed over the experts here.
            out: where to write, [num_tokens, H] contiguous, of `dtype`, apart from y and from the handle's views.

        Raises: as dispatch(). After an error of this rank's own, or PeerRefusedError, the combine may be tried again by
        all with the same handle and the same y, as long as handle.is_open. It is not when the other rank has released
        its handle, or has none because its dispatch() raised RoutingError, and on a GPU once this rank has dispatched
        onto the same buffer. A rank that tries again at once may be in time for a peer, which then sees no refusal.
        A rank that needs nothing from the one that failed ends its combine.
        """
        core, key = self._open_core(), self._key_of(handle)
        arguments.check_tensor(self.rank, "y", y)
        arguments.check_optional_tensor(self.rank, "out", out)
        arguments.checked_bool(self.rank, "presummed", presummed)
        return core.combine(y, key, presummed, out, arguments.checked_blocks(self.rank, num_blocks, self.num_blocks))

    @calls.serves_a_handle(position=0)
    @torch.no_grad()
    def experts(
        self,
        handle: DispatchHandle,
        w_gate_up: Weight,
        w_down: Weight,
        *,
        fused: bool | None = None,
        fused_combine: bool | None = None,
        num_max_routes: int | None = None,
        out: torch.Tensor | None = None,
        num_blocks: int = 0,
    ) -> torch.Tensor:
        """SwiGLU experts over the rows that came, and their combine: [num_tokens, H].

        Args:
            handle: of the dispatch, any layout; serves once. The kernels multiply whole blocks of layout="masked".
            w_gate_up, w_down: [E_local, 2 * I, H] and [E_local, H, I] of `dtype`, or each (float8 values, scales); see
                MoELayer. For float8 dispatch with quantize="fp8".
            fused: True: by kernels that gather their rows and read nothing on the host; False: step by step in PyTorch;
                None: by kernels on a GPU where they can: bfloat16 or float16 rows, sizes that are multiples of 16.
            fused_combine: True: the kernel of the second product sends the sums too, each as soon as its terms are there;
                an error for layout="masked" and for batches of at most num_max_ll_tokens tokens, whose sums may return as LL
                words. False: first the product, then the combine. None: as False, which was faster wherever both were
                measured (docs/experts.md). Same bits.
            num_max_routes: rows of the intermediate results, [num_max_routes, I] and [num_max_routes, H]; None:
                handle.capacity, which any routing fits in. More routes raise ValueError where the host sees them (on the
                CPU, step by step); on a GPU those past the bound are left out, here and in the peers' sums, and check()
                raises RoutingError. Not for layout="masked".
            out, num_blocks: as in combine().

        Raises: as combine(), and ValueError or TypeError for weights that do not fit. The call may be tried again by all.
        """
        self._open_core()
        self._key_of(handle)
        if handle.ep is not self:
            raise RuntimeError(
                f"experts got a handle of another ExpertParallel on rank {self.rank}; pass one of this object's"
            )
        weights = ExpertWeights.checked(self, w_gate_up, w_down)
        experts.check_way(self, fused, fused_combine, num_max_routes)
        arguments.check_optional_tensor(self.rank, "out", out)
        num_blocks = arguments.checked_blocks(self.rank, num_blocks, self.num_blocks)
        ways: dict[str, Any] = {"fused": fused, "fused_combine": fused_combine, "num_max_routes": num_max_routes}
        return experts.run_and_combine(handle, weights, out, num_blocks, **ways)

    # ---- their halves: between them the device is free

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
        num_blocks: int = 0,
    ) -> DispatchHandle:
        """The first half of dispatch(): returns when the rows are posted. The handle shows nothing yet."""
        core = self._open_core()
        routing = self._checked_routing(x, x_scales, handle, topk_idx, topk_weights)
        quantized = arguments.checked_quantize(self.rank, quantize)
        num_blocks = arguments.checked_blocks(self.rank, num_blocks, self.num_blocks)
        row_dtype = float8_dtype(self.device) if quantized else x.dtype
        sent = core.dispatch_send(x, *routing, x_scales, quantized, num_blocks)
        return self._dispatched(sent, row_dtype, routing)

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
        core.dispatch_recv(key, arguments.layout_index(layout), expert_alignment, num_blocks)
        return handle._received(layout, expert_alignment, num_blocks)

    @calls.serves_a_handle(position=1)
    def combine_send(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        *,
        presummed: bool = False,
        num_blocks: int = 0,
    ) -> None:
        """The first half of combine(): returns when the sums are posted."""
        core, key = self._open_core(), self._key_of(handle)
        arguments.check_tensor(self.rank, "y", y)
        arguments.checked_bool(self.rank, "presummed", presummed)
        core.combine_send(y, key, presummed, arguments.checked_blocks(self.rank, num_blocks, self.num_blocks))

    @calls.serves_a_handle(position=0)
    def combine_recv(
        self, handle: DispatchHandle, *, out: torch.Tensor | None = None, num_blocks: int = 0
    ) -> torch.Tensor:
        """The second half of combine(): waits for the sums of all ranks, returns [num_tokens, H]."""
        core, key = self._open_core(), self._key_of(handle)
        arguments.check_optional_tensor(self.rank, "out", out)
        return core.combine_recv(key, out, arguments.checked_blocks(self.rank, num_blocks, self.num_blocks))

    # ---- the rest

    def blocks_for(self, num_tokens: int) -> tuple[int, int]:
        """Blocks of a dispatch and of a combine of so many tokens, when neither the call nor the object says."""
        return self._open_core().blocks_for(arguments.checked_int(self.rank, "num_tokens", num_tokens, 0))

    def close(self) -> None:
        """Ends the object; raises RoutingError as check() does. Other ranks that still wait for this one run into their
        deadline. Views of handles stay readable as long as they are held, with whatever the memory holds."""
        super().close()

    def __exit__(self, exception_type: object, *rest: object) -> None:
        try:
            self.close()
        except RoutingError:
            if exception_type is None:  # an error on its way is the one to see
                raise

    def __repr__(self) -> str:
        return (
            f"ExpertParallel(rank {self.rank} of {self.num_ranks}, {self.num_experts} experts, top-{self.num_topk}, "
            f"hidden {self.hidden}, {self.num_max_tokens_per_rank} tokens, {self.dtype}, {self._state()})"
        )

    def _dispatched(
        self, sent: Any, row_dtype: torch.dtype, routing: tuple[torch.Tensor, torch.Tensor | None]
    ) -> DispatchHandle:
        if self._trace is not None:
            self._trace.dispatched(routing[0], row_dtype)
        return DispatchHandle(self, sent, row_dtype, routing)

    def _key_of(self, handle: DispatchHandle) -> Any:
        if not isinstance(handle, DispatchHandle):
            raise TypeError(f"handle is a {type(handle).__name__} on rank {self.rank}; pass what dispatch() returned")
        return handle._handle

    def _checked_routing(
        self, x: Any, x_scales: Any, handle: DispatchHandle | None, topk_idx: Any, topk_weights: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """That of the earlier handle, where one is given."""
        arguments.check_tensor(self.rank, "x", x)
        arguments.check_optional_tensor(self.rank, "x_scales", x_scales)
        if handle is None:
            return arguments.checked_routing(self.rank, topk_idx, topk_weights)
        self._key_of(handle)
        if topk_idx is not None or topk_weights is not None:
            raise ValueError(f"handle= and topk_idx or topk_weights on rank {self.rank}; pass one or the other")
        if handle.ep is not self:
            raise RuntimeError(
                f"dispatch got a handle of another ExpertParallel on rank {self.rank}; pass one of this object's"
            )
        return handle._routing
