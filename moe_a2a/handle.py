"""What this rank received in a dispatch, and the key to its combine."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from moe_a2a import arguments, block_scales, devices


class AnyExpertParallel(Protocol):
    """An ExpertParallel or a TwoLevelExpertParallel: what the weights of its experts must fit."""

    rank: int
    num_local_experts: int
    hidden: int
    dtype: torch.dtype
    device: torch.device


class Owner(AnyExpertParallel, Protocol):
    """The ExpertParallel that made a handle, as the modules below it see it."""

    num_ranks: int
    num_experts: int
    num_topk: int
    _core: Any
    _num_dispatches: int
    _trace: Any
    _training: Any

    @property
    def is_closed(self) -> bool: ...
    def combine(
        self, y: torch.Tensor, handle: DispatchHandle, *, presummed: bool = ..., out: torch.Tensor | None = ...
    ) -> torch.Tensor: ...
    def _open_core(self) -> Any: ...
    def _core_to_dispatch(self) -> Any: ...


class DispatchHandle:
    """One dispatch between its send and its combine.

    Tensors are views of the ExpertParallel's own memory, on its device. Writing to them changes what this rank's experts
    read, never where a kernel reads or writes. They are valid until combine() returns or release() is called; afterwards
    their properties raise RuntimeError. expert_x, expert_x_scales, recv_rows and recv_topk() are copies, which stay
    valid; contiguous_rows() copies only if it must.

    Sizes: R ranks, T = num_max_tokens_per_rank of the dispatch, K = num_topk, E_local experts here, H hidden. Rows are of
    row_dtype: the dtype of the ExpertParallel, or float8. A *route* is one choice of one token whose expert is on this rank.
    *Positions* number the routes, grouped by local expert and ordered within an expert by (source rank, token, choice)::

        layout="rows"          capacity = R * T * K positions, the experts' routes without gaps
        layout="expert_major"  each expert's positions start at a multiple of expert_alignment, with padding between
        layout="masked"        expert e has the positions e * R * T ... e * R * T + expert_counts[e] - 1
    """

    # Made by every dispatch: without a __dict__ it is cheaper.
    __slots__ = (
        "ep",
        "row_dtype",
        "_core",
        "_handle",
        "_expert_x",
        "_routing",
        "_versions",
        "_num_blocks",
        "_scales_dtype",
        "_sum_index",
        "__weakref__",
    )

    def __init__(
        self,
        ep: Owner,
        core_handle: Any,
        row_dtype: torch.dtype,
        routing: tuple[torch.Tensor, torch.Tensor | None],
        scales_dtype: torch.dtype | None,
        num_blocks: int,
    ):
        self.ep = ep
        self.row_dtype = row_dtype
        self._core = ep._open_core()
        self._handle = core_handle
        self._expert_x: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._routing, self._versions = routing, _versions_of(*routing)
        self._num_blocks = num_blocks  # of a kernel that copies rows
        self._scales_dtype = scales_dtype  # None: float32
        # int32 [R * T]: the row of a presummed y that holds each row's sum; None: y is as long as recv_x.
        self._sum_index: torch.Tensor | None = None

    @property
    def layout(self) -> str:
        """ "rows", "expert_major" or "masked"; "rows" until the dispatch is received."""
        return arguments.LAYOUTS[self._handle.layout]

    @property
    def expert_alignment(self) -> int:
        """Each expert's positions start at a multiple of this number; it is 1 except for layout="expert_major"."""
        return self._handle.expert_alignment

    @property
    def num_max_tokens_per_rank(self) -> int:
        """T of this dispatch."""
        return self._handle.num_max_tokens_per_rank

    @property
    def recv_x(self) -> torch.Tensor:
        """[R * T, H] of row_dtype, rows where they landed: token t of rank s is row s * T + t. The contents of rows whose
        tokens were not sent here are unspecified."""
        return self._core.recv_x(self._handle, self.row_dtype)

    @property
    def recv_x_scales(self) -> torch.Tensor:
        """[R * T, ceil(H / 128)] float32, one scale per 128 values of a float8 row; if x_scales were bytes, [R * T, ceil(H / 32)]
        of their dtype."""
        return block_scales.unpacked(self._core.recv_x_scales(self._handle), self._scales_dtype, self.ep.hidden)

    @property
    def expert_row_index(self) -> torch.Tensor:
        """int32 [capacity]: the row of recv_x of each position; -1 in padding; unspecified past expert_offsets[-1]."""
        return self._core.expert_row_index(self._handle)

    @property
    def expert_offsets(self) -> torch.Tensor:
        """int32 [E_local + 1]: first position of each expert; the last value is the end of the positions."""
        return self._core.expert_offsets(self._handle)

    @property
    def expert_counts(self) -> torch.Tensor:
        """int32 [E_local]: routes of each expert, padding not counted."""
        return self._core.expert_counts(self._handle)

    num_recv_tokens_per_expert = expert_counts

    @property
    def route_weights(self) -> torch.Tensor:
        """float32 [capacity]: the weight of each position's route."""
        return self._core.route_weights(self._handle)

    @property
    def route_src_rank(self) -> torch.Tensor:
        """int32 [capacity]: the rank that each position's token comes from."""
        return self._core.route_src_rank(self._handle)

    @property
    def route_src_token_idx(self) -> torch.Tensor:
        """int32 [capacity]: the token's index on its own rank."""
        return self._core.route_src_token_idx(self._handle)

    @property
    def num_recv_tokens_per_rank(self) -> torch.Tensor:
        """int32 [R]: how many tokens each rank dispatched (to any rank)."""
        return self._core.num_recv_tokens_per_rank(self._handle)

    @property
    def num_routes(self) -> int:
        """expert_offsets[-1], read by the host: synchronises with the device, and raises RoutingError as ep.check()
        does."""
        return self._read(self.expert_offsets[-1])

    @property
    def recv_rows(self) -> torch.Tensor:
        """int32 [n]: the rows of recv_x that hold a token, in (source rank, token) order. A copy; combine() reads the
        original. Read by the host: synchronises with the device, and raises RoutingError as ep.check() does."""
        num_rows = self._read(self._core.landed_offsets(self._handle)[-1])
        return self._core.landed_rows(self._handle)[:num_rows].clone()

    def recv_topk(
        self, *, first_expert: int = 0, no_expert: int | None = -1, dtype: torch.dtype = torch.int64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(recv_topk_idx, recv_topk_weights) of each row of recv_x: the local experts (0 ... E_local - 1) that its token chose, in
        the order of its choices, then -1 with weight 0; -1 throughout in rows whose tokens were not sent here. New tensors
        [R * T, K], the second float32, made by one kernel and without the host.

        first_expert: added to the ids; pass rank * E_local to get global ids. no_expert: the id to use instead of -1. None: the
        ids of other ranks' experts in turn (on a single rank first_expert), for kernels that take global ids, skip those of other
        ranks, but first count the rows of every id. dtype: of the ids, torch.int32 or torch.int64.

        A kernel that weights and sums a row's experts itself (the fused MoE of another library) takes recv_x with these two;
        its result goes to combine(..., presummed=True)."""
        first_expert = arguments.checked_int(self.ep.rank, "first_expert", first_expert)
        if no_expert is not None:
            no_expert = arguments.checked_int(self.ep.rank, "no_expert", no_expert)
        if dtype not in (torch.int32, torch.int64):
            raise TypeError(f"dtype={dtype} on rank {self.ep.rank}; pass torch.int32 or torch.int64")
        topk: tuple[torch.Tensor, torch.Tensor] = self._core.recv_topk(self._handle, dtype, first_expert, no_expert)
        return topk

    def contiguous_rows(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(recv_x, recv_x_scales or None) without gaps between rows, for kernels that accept no row stride. recv_x itself if it has
        no gaps, as for rows of the object's dtype that are a multiple of 128 bytes long. Otherwise copies, in which rows whose
        tokens were not sent here are uninitialised; one kernel makes them, without the host. Only for layout="rows"."""
        if self.layout != "rows":
            raise RuntimeError(
                f'contiguous_rows() exists only for layout="rows", this handle has layout="{self.layout}"; read expert_x'
            )
        if self.row_dtype == self.ep.dtype and (recv_x := self.recv_x).is_contiguous():
            return recv_x, None
        rows, scales = self._core.gather_rows(self._handle, self.row_dtype, self._num_blocks)
        return rows, None if scales is None else block_scales.unpacked(scales, self._scales_dtype, self.ep.hidden)

    def _routing_as_sent(self, rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The routing, for a dispatch along it. Raises ValueError if the caller has changed it in place since."""
        if name := self._changed_in_place():
            raise ValueError(
                f"{name} of handle has been changed in place since its dispatch on rank {rank}; pass {name}.clone() to that "
                "dispatch, or the new routing instead of handle"
            )
        return self._routing

    def _changed_in_place(self) -> str:
        """Which of "topk_idx" and "topk_weights" the caller has changed in place since the dispatch; "" if neither."""
        now = _versions_of(*self._routing)
        if now == self._versions:
            return ""
        return "topk_weights" if now and self._versions and now[0] == self._versions[0] else "topk_idx"

    def _read(self, value: torch.Tensor) -> int:
        read = int(value)
        self._core.raise_reported()  # the kernels of this handle have finished
        return read

    @property
    def capacity(self) -> int:
        """Positions of the layout: the most rows that `y` may have."""
        return self._core.capacity(self._handle)

    @property
    def expert_x(self) -> torch.Tensor:
        """[capacity, H] of row_dtype, or [E_local, R * T, H] for layout="masked": one row per position, copied from recv_x;
        padding of layout="expert_major" is zero. Not for layout="rows". Costs one copy of the received rows."""
        return self._gathered()[0]

    @property
    def expert_x_scales(self) -> torch.Tensor:
        """The scales of float8 expert_x: [..., ceil(H / 128)] float32; if x_scales were bytes, [..., ceil(H / 32)] of their
        dtype."""
        scales = self._gathered()[1]
        if scales is None:
            raise RuntimeError('expert_x_scales exists only for float8 rows; dispatch with x_scales= or quantize="fp8"')
        return block_scales.unpacked(scales, self._scales_dtype, self.ep.hidden)

    def _gathered(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.layout == "rows":
            raise RuntimeError(
                'expert_x exists only for layout="expert_major" and layout="masked"; read recv_x through expert_row_index, or '
                "dispatch with one of these layouts"
            )
        if self._expert_x is None:
            self._expert_x = self._core.gather_rows(self._handle, self.row_dtype, self._num_blocks)
        else:
            devices.keep_for_current_stream(*(x for x in self._expert_x if x is not None))
        return self._expert_x

    @property
    def is_open(self) -> bool:
        """Whether combine() may still be called with this handle."""
        return self._handle.is_open and not self.ep.is_closed

    def release(self) -> None:
        """Ends the handle without a combine and frees its buffer. Every rank must do the same: one that combines
        instead raises PeerRefusedError, which also closes its handle."""
        self._core.release(self._handle)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a DispatchHandle cannot be copied or pickled: it is the key to one buffer of its ExpertParallel"
        )


def _versions_of(topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> tuple[int, int] | None:
    """Grow with each change in place. None: made in inference mode, which counts none."""
    try:
        return topk_idx._version, 0 if topk_weights is None else topk_weights._version
    except RuntimeError:
        return None
