"""ExpertParallel: dispatch() tokens to the ranks that own their experts, combine() what the experts made of them."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from moe_a2a import _core, arguments, devices, launch_tables, set_up
from moe_a2a.devices import float8_dtype, target_of
from moe_a2a.errors import RoutingError
from moe_a2a.groups import HandleExchange, as_group
from moe_a2a.handle import DispatchHandle

if TYPE_CHECKING:
    from moe_a2a.tracing import Trace

log = logging.getLogger("moe_a2a")


class ExpertParallel:
    """Moves tokens between the ranks of a group: R ranks, each with its own tokens and E / R of the experts.

    Args:
        group: the ranks. A torch.distributed group (None: the default group), a one-dimensional DeviceMesh, an mpi4py
            communicator, an element of thread_group(n), or HandleExchange(rank, num_ranks) to carry the handles yourself.
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
        timeout: seconds after which a wait for another rank raises PeerTimeoutError: of a call, and of the ranks' meeting
            here (of torch groups of MPI's backend, and of groups of your own, as long as the group waits).
        num_blocks: blocks (CPU: threads) of every kernel unless a call says otherwise; 0: as the launch table says.
        num_max_ll_tokens: a rank's batch of up to so many tokens travels as LL words, which carry their epoch beside
            their data: fewer steps, more bytes. None: what is best on the device; 0: never. The same on every rank;
            takes memory for so many rows of every rank.
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
        self._group = as_group(group)
        self.rank = self._group.rank
        self.num_ranks = self._group.num_ranks
        self.num_experts = num_experts
        self.num_topk = num_topk
        self.hidden = hidden
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.dtype = dtype
        self.num_buffers = num_buffers
        self.timeout = timeout
        self.num_blocks = num_blocks
        self.num_max_ll_tokens = num_max_ll_tokens
        self._launch_table = launch_table
        self._core: Any = None
        self._trace: Trace | None = None  # the one that is running
        if isinstance(self._group, HandleExchange):
            self._allocate(device)
        else:
            set_up.make_together(self, lambda: self._allocate(device))
        self.num_local_experts = num_experts // self.num_ranks

    # ---- set-up

    def _allocate(self, device: torch.device | str | None) -> None:
        if not set_up.is_timeout(self.timeout):
            raise ValueError(f"timeout={self.timeout} is not a positive number of seconds on rank {self.rank}")
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(
                f"dtype={self.dtype!r} on rank {self.rank}; pass torch.float32, torch.float16 or torch.bfloat16"
            )
        self.device = torch.device(device) if device is not None else devices.default_device()
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device={str(self.device)!r} on rank {self.rank}; pass a cpu or cuda device")
        self.device = devices.with_index(self.device)
        sizes = (
            self.num_experts,
            self.num_topk,
            self.hidden,
            self.num_max_tokens_per_rank,
            self.num_buffers,
            self.dtype,
            self.num_max_ll_tokens,
            target_of(self.device),
        )
        log.info(
            "rank %d takes %d bytes on %s",
            self.rank,
            _core.nbytes_for(self.rank, self.num_ranks, *sizes),
            self.device,
        )
        try:
            self._core = _core.ExpertParallel(self.rank, self.num_ranks, *sizes, self.device, float(self.timeout))
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.rank}: {error}") from None
        self.num_max_ll_tokens = self._core.num_max_ll_tokens
        # Once: a call looks its blocks up without Python.
        self._core.set_launch_table(launch_tables.steps_for(self, self._launch_table))

    def _drop_core(self) -> None:
        """Of an object that could not be made."""
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def get_comm_handle(self) -> bytes:
        """What the other ranks need to map this rank's memory. Carry it to every rank; see set_comm_handles()."""
        return self._open_core().comm_handle()

    def set_comm_handles(self, handles: list[bytes]) -> None:
        """Maps the memory of all ranks. `handles`: get_comm_handle() of every rank, in rank order. Only needed with
        HandleExchange; raises ValueError when the ranks disagree on the configuration."""
        self._open_core().connect(handles)

    # ---- the two calls of a layer

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
            ValueError, TypeError: an argument is wrong; the other ranks raise PeerRefusedError. All stay usable.
            RuntimeError: num_buffers handles are open, or the object is closed.
            PeerTimeoutError: a rank did not come.
        """
        core = self._open_core()
        try:
            layout, expert_alignment = arguments.checked_layout(self.rank, handle, layout, expert_alignment)
            arguments.check_tensor(self.rank, "x", x)
            routing = self._routing(handle, topk_idx, topk_weights)
            quantized = arguments.checked_quantize(self.rank, quantize)
            num_blocks = num_blocks or self.num_blocks
            sent = core.dispatch(x, *routing, x_scales, quantized, layout, expert_alignment, num_blocks)
        except RoutingError:
            raise
        except (ValueError, TypeError) as error:
            core.refuse_dispatch(str(error))  # nobody waits for a rank that raised
            raise
        return self._dispatched(sent, float8_dtype(self.device) if quantized else x.dtype, routing)._received(
            layout, expert_alignment, num_blocks
        )

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
            out: where to write, [num_tokens, H] contiguous.

        Raises: as dispatch(). After PeerRefusedError the combine may be tried again with the same handle.
        """
        core, key = self._open_core(), self._key_of(handle)
        try:
            arguments.check_tensor(self.rank, "y", y)
            return core.combine(y, key, presummed, out, num_blocks or self.num_blocks)
        except RoutingError:
            raise
        except (ValueError, TypeError) as error:
            core.refuse_combine(key, str(error))
            raise

    # ---- their halves: between them the device is free

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
        try:
            arguments.check_tensor(self.rank, "x", x)
            routing = self._routing(handle, topk_idx, topk_weights)
            quantized = arguments.checked_quantize(self.rank, quantize)
            sent = core.dispatch_send(x, *routing, x_scales, quantized, num_blocks or self.num_blocks)
        except (ValueError, TypeError) as error:
            core.refuse_dispatch(str(error))
            raise
        return self._dispatched(sent, float8_dtype(self.device) if quantized else x.dtype, routing)

    def dispatch_recv(
        self,
        handle: DispatchHandle,
        *,
        layout: str | None = None,
        expert_alignment: int | None = None,
        num_blocks: int = 0,
    ) -> DispatchHandle:
        """The second half of dispatch(): waits for the rows of all ranks; returns the same handle, now readable."""
        layout, expert_alignment = arguments.checked_layout(self.rank, None, layout, expert_alignment)
        num_blocks = num_blocks or self.num_blocks
        self._open_core().dispatch_recv(self._key_of(handle), layout, expert_alignment, num_blocks)
        return handle._received(layout, expert_alignment, num_blocks)

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
        try:
            arguments.check_tensor(self.rank, "y", y)
            core.combine_send(y, key, presummed, num_blocks or self.num_blocks)
        except RoutingError:
            raise
        except (ValueError, TypeError) as error:
            core.refuse_combine(key, str(error))
            raise

    def combine_recv(
        self, handle: DispatchHandle, *, out: torch.Tensor | None = None, num_blocks: int = 0
    ) -> torch.Tensor:
        """The second half of combine(): waits for the sums of all ranks, returns [num_tokens, H]."""
        return self._open_core().combine_recv(self._key_of(handle), out, num_blocks or self.num_blocks)

    # ---- the rest

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that this object holds on this rank; about
        2 * num_buffers * R * T * row, and fixed from the start."""
        return self._open_core().nbytes

    def blocks_for(self, num_tokens: int) -> tuple[int, int]:
        """Blocks of a dispatch and of a combine of so many tokens, when neither the call nor the object says."""
        return self._open_core().blocks_for(num_tokens)

    def check(self) -> None:
        """Waits for the device and raises what kernels have reported since the last call: a rank that did not come, a
        refusal, ids out of range in a topk_idx that the host could not see."""
        self._open_core().check()

    @property
    def is_closed(self) -> bool:
        return self._core is None

    def close(self) -> None:
        """Ends the object; raises RoutingError as check() does. Other ranks that still wait for this one run into their
        deadline. Views of handles stay readable as long as they are held, with whatever the memory holds."""
        if self._core is not None:
            core, self._core = self._core, None
            core.close()

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(self, exception_type: object, *rest: object) -> None:
        try:
            self.close()
        except RoutingError:
            if exception_type is None:  # an error on its way is the one to see
                raise

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{self.device}, {self.nbytes} bytes"
        return (
            f"ExpertParallel(rank {self.rank} of {self.num_ranks}, {self.num_experts} experts, top-{self.num_topk}, "
            f"hidden {self.hidden}, {self.num_max_tokens_per_rank} tokens, {self.dtype}, {state})"
        )

    def _open_core(self) -> Any:
        if self._core is None:
            raise RuntimeError("this ExpertParallel is closed; make a new one")
        return self._core

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

    def _routing(
        self,
        handle: DispatchHandle | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if handle is None:
            if topk_idx is None:
                raise ValueError(f"topk_idx is None on rank {self.rank}; pass topk_idx or handle=")
            arguments.check_tensor(self.rank, "topk_idx", topk_idx)
            if topk_weights is not None:
                arguments.check_tensor(self.rank, "topk_weights", topk_weights)
            return topk_idx, topk_weights
        if topk_idx is not None or topk_weights is not None:
            raise ValueError(f"handle= and topk_idx or topk_weights on rank {self.rank}; pass one or the other")
        if handle.ep is not self:
            raise RuntimeError(
                f"dispatch got a handle of another ExpertParallel on rank {self.rank}; pass one of this object's"
            )
        return handle._routing
