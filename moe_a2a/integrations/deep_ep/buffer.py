"""Buffer: checks the arguments of a call as DeepEP has them, and returns what DeepEP would."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_a2a import _core, arguments, devices
from moe_a2a.errors import PeerTimeoutError
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.integrations.deep_ep import high_throughput, low_latency
from moe_a2a.integrations.deep_ep.config import Config
from moe_a2a.integrations.deep_ep.events import EventHandle, EventOverlap, event_if, wait_for
from moe_a2a.integrations.deep_ep.exchange import Exchange, OfExchange, rows_and_scales

topk_idx_t = torch.int64
Rows = Tensor | tuple[Tensor, Tensor]


class Buffer(OfExchange):
    """dispatch() and combine() of packed rows, low_latency_dispatch() and low_latency_combine() of rows by expert.

    Args:
        group: the ranks: a torch.distributed group, or anything else that a moe_a2a.Communicator takes.
        num_nvl_bytes, num_rdma_bytes, low_latency_mode: kept as attributes. Memory is taken by the first dispatch of a kind.
        explicitly_destroy: only destroy() releases the memory. Else the object's end does so, too; as destroy(), it should come
            at about the same time on all ranks.
        comm: an mpi4py communicator, in place of `group`.
        num_buffers: dispatches of a kind that may be open at once. A further one ends the oldest, whose combine() then has
            to send its routing again; a low-latency handle is lost.
        timeout: see moe_a2a.Communicator.
        others: of DeepEP's network; accepted and not used.

    All ranks make the same calls in the same order. Errors are those of moe_a2a.ExpertParallel. Every call runs on the
    current stream: events order nothing more, and allocate_on_comm_stream changes nothing.
    """

    num_sms: int = 20
    _num_blocks: int = 0  # 0: as many as moe_a2a's launch table says

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        num_buffers: int = 2,
        timeout: float = 30.0,
    ):
        self.group = group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        super().__init__(group if comm is None else comm, timeout, num_buffers, explicitly_destroy)
        self.rank, self.group_size = self._rank, self._num_ranks

    # ---- what concerns the class

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether float8 rows can be sent: always."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """The blocks of the kernels of all Buffers. Before the first call, moe_a2a's launch table decides."""
        Buffer.num_sms = Buffer._num_blocks = arguments.checked_int(None, "new_num_sms", new_num_sms, 1)

    @staticmethod
    def capture() -> EventOverlap:
        """An event of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Roughly the bytes that low_latency_dispatch() of bfloat16 rows takes with two buffers: rows there and sums back."""
        return 2 * 2 * 2 * num_max_dispatch_tokens_per_rank * hidden * num_ranks

    # ---- packed rows

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """(num_tokens_per_rank int32 [R], None, num_tokens_per_expert int32 [E], is_token_in_rank bool [T, R], event).

        Ids out of range count as dropped: the dispatch reports them, on every rank."""
        wait_for(previous_event, self._device)
        arguments.check_per_token(self._open().rank, topk_idx=topk_idx)
        if topk_idx.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"topk_idx is {topk_idx.dtype} on rank {self.rank}; pass int32 or int64")
        num_experts = arguments.checked_int(self.rank, "num_experts", num_experts, 1)
        self._open().check_num_experts("num_experts", num_experts)
        sizes = num_experts, self.group_size, self.rank
        per_rank, per_expert, in_rank = _core.topk_layout(topk_idx, *sizes, devices.target_of(topk_idx.device))
        return per_rank, None, per_expert, in_rank, event_if(async_finish, self._device)

    @torch.no_grad()
    def dispatch(
        self,
        x: Rows,
        handle: high_throughput.Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, list[int] | None, high_throughput.Handle | None, EventOverlap]:
        """Sends each token's row once to every rank that owns one of its experts.

        Args:
            x: [num_tokens, H] bfloat16 (or float16, float32), or (float8, scales [num_tokens, H / 128] float32).
            handle: of an earlier dispatch, whose routing is used again; then only x and the event are returned.
            num_tokens_per_expert: [E]; its length says how many experts there are. The other results of
                get_dispatch_layout() are accepted and not used.
            topk_idx, topk_weights: [num_tokens, K] int64 (-1: no expert) and float32 or None.
            expert_alignment: the numbers of rows per expert are rounded up to it.
            num_worst_tokens: rows to return, at least R times the most tokens of a rank; the host then reads nothing. Past
                the last row all of recv_topk_idx is -1. 0: as many as there are.

        Returns: (recv_x [n, H] or (float8, scales), by source rank and token; recv_topk_idx int64 [n, K], local, -1 for
        experts elsewhere; recv_topk_weights float32 [n, K], then 0; rows per local expert, empty with num_worst_tokens;
        handle; event).
        """
        exchange = self._open()
        if handle is not None:
            exchange.check_handle(handle, high_throughput.Handle, opens=True)
            with exchange.dispatch_again_refused_if_failed(handle):
                if topk_idx is not None or topk_weights is not None:
                    raise ValueError(
                        f"both handle= and topk_idx or topk_weights given on rank {self.rank}; pass one or the other"
                    )
                wait_for(previous_event, self._device)
                rows, scales = rows_and_scales(self.rank, x)
                num_blocks = self._blocks(config)
            received = high_throughput.begin_dispatch_again(exchange, rows, scales, handle, num_blocks=num_blocks)()
        else:
            likely = self._likely(x, topk_idx, num_tokens_per_expert, num_worst_tokens)
            with exchange.dispatch_refused_if_failed(likely):
                wait_for(previous_event, self._device)
                rows, scales = rows_and_scales(self.rank, x)
                num_blocks = self._blocks(config)
                if topk_idx is None or num_tokens_per_expert is None:
                    raise ValueError(
                        f"dispatch on rank {self.rank} got neither a handle nor a routing; pass topk_idx and num_tokens_per_expert"
                    )
                arguments.check_tensor(self.rank, "num_tokens_per_expert", num_tokens_per_expert)
                num_experts = num_tokens_per_expert.numel()
                exchange.check_num_experts("num_tokens_per_expert.numel()", num_experts)
                expert_alignment = arguments.checked_int(self.rank, "expert_alignment", expert_alignment, 1)
                kind, bound = high_throughput.checked(
                    exchange, rows, scales, topk_idx, topk_weights, num_experts, num_worst_tokens
                )
                topk_idx = topk_idx.clone()  # DeepEP's callers may change theirs: its handle does not refer to it
            received = high_throughput.begin_dispatch(
                exchange,
                kind,
                bound,
                rows,
                scales,
                topk_idx,
                topk_weights,
                expert_alignment=expert_alignment,
                num_worst_tokens=num_worst_tokens,
                num_blocks=num_blocks,
            )()
        return (
            received.x if received.x_scales is None else (received.x, received.x_scales),
            received.topk_idx,
            received.topk_weights,
            received.num_tokens_per_expert,
            received.handle,
            event_if(async_finish, self._device),
        )

    @torch.no_grad()
    def combine(
        self,
        x: Tensor,
        handle: high_throughput.Handle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The unweighted sum of a token's rows over the ranks.

        Args: x: [n, H] as recv_x; topk_weights: float32 [n, K], summed by choice; bias: None.
        Returns: (combined_x [num_tokens, H]; combined_topk_weights [num_tokens, K] or None; event).
        """
        exchange = self._open()
        exchange.check_handle(handle, high_throughput.Handle)
        with exchange.combine_refused_if_failed(handle):
            self._refuse("combine", bias=(bias, None))
            wait_for(previous_event, self._device)
            num_blocks = self._blocks(config)
        finish = high_throughput.begin_combine_of(exchange, x, handle, topk_weights, num_blocks=num_blocks)
        return *finish(), event_if(async_finish, self._device)

    # ---- rows by expert

    @torch.no_grad()
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: Tensor | None = None,
    ) -> tuple[Rows, Tensor, low_latency.LowLatencyHandle, EventOverlap, Any]:
        """Sends each token's row; returns one row per choice, by local expert.

        Args:
            x, topk_idx: [num_tokens, H] bfloat16, [num_tokens, K] int64.
            num_max_dispatch_tokens_per_rank: T, the same on every rank.
            cumulative_local_expert_recv_stats: [E_local], to which the numbers of rows are added.
            use_fp8: rows are quantised on the way, with a scale per 128 values.
            return_recv_hook: the rows have arrived once the hook has been called.
            topk_weights: float32 [num_tokens, K]. Not in DeepEP; spares the combine an all-gather of the weights.

        Returns: (recv_x [E_local, R * T, H], or (float8, scales [E_local, R * T, H / 128], column-major in the last two
        dimensions), each expert's rows first; int32 [E_local] numbers of rows; handle; event; hook). recv_x is valid until the
        combine.
        """
        exchange = self._open()

        def check() -> None:
            self._refuse(
                "low_latency_dispatch",
                dispatch_wait_recv_cost_stats=(dispatch_wait_recv_cost_stats, None),
                round_scale=(round_scale, False),
                use_ue8m0=(use_ue8m0, False),
            )

        try:
            received = low_latency.dispatch(
                exchange,
                x,
                topk_idx,
                topk_weights,
                num_max_dispatch_tokens_per_rank,
                num_experts,
                use_fp8=use_fp8,
                return_recv_hook=return_recv_hook,
                check=check,
            )
        except PeerTimeoutError as error:
            low_latency.add_advice(error, self.rank, num_max_dispatch_tokens_per_rank)
            raise
        hook = received.hook
        if cumulative_local_expert_recv_stats is not None:
            hook = _then(hook, lambda: _add(exchange, cumulative_local_expert_recv_stats, received))
        rows = received.x if received.x_scales is None else (received.x, received.x_scales)
        return rows, received.counts, received.handle, event_if(async_finish, self._device), hook

    @torch.no_grad()
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: low_latency.LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Any]:
        """The weighted sum of a token's rows: (combined_x [num_tokens, H], event, hook).

        Args:
            x: [E_local, R * T, H], the experts' rows where recv_x has theirs.
            topk_idx, topk_weights: of the dispatch. If it was given the weights, they are not read.
            return_recv_hook: the result is there once the hook has been called.
            out: the tensor to write to, [num_tokens, H].
        """
        exchange = self._open()
        exchange.check_handle(handle, low_latency.LowLatencyHandle)
        low_latency.check_kept(handle)
        refused = low_latency.combine_refused_if_failed(exchange, handle)
        with exchange.repeated_if_failed(handle.opened), refused:
            self._refuse(
                "low_latency_combine",
                use_logfmt=(use_logfmt, False),
                combine_wait_recv_cost_stats=(combine_wait_recv_cost_stats, None),
            )
            if not handle.is_received:
                raise RuntimeError(
                    f"low_latency_combine on rank {self.rank} before its rows were received; call the hook of low_latency_dispatch "
                    "first"
                )
        combined, hook = low_latency.combine(
            exchange, x, topk_weights, handle, out=out, return_recv_hook=return_recv_hook
        )
        return combined, event_if(async_finish, self._device), hook

    def get_next_low_latency_combine_buffer(self, handle: low_latency.LowLatencyHandle) -> Tensor:
        """A new tensor [E_local, R * T, H] for the experts' rows: low_latency_combine() reads them where they are."""
        ep = handle.ep
        num_rows = ep.num_ranks * ep.num_max_tokens_per_rank
        return torch.empty(ep.num_local_experts, num_rows, ep.hidden, dtype=ep.dtype, device=ep.device)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing: epochs replace cleaning."""

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 0 for every rank: all take part. A rank that does not arrive raises PeerTimeoutError."""
        mask_status.zero_()

    def low_latency_clean_mask_buffer(self) -> None:
        """Does nothing: no rank is ever masked."""

    # ---- the rest

    def get_comm_stream(self) -> Any:
        """The current stream of this object's GPU."""
        return torch.cuda.current_stream(self._device)

    def _likely(
        self, x: Any, topk_idx: Any, num_tokens_per_expert: Any, num_worst_tokens: Any
    ) -> ExpertParallel | None:
        """See Exchange.likely(). Also None without a bound: the dispatch then exchanges sizes first."""
        if not isinstance(num_worst_tokens, int) or num_worst_tokens < 1:
            return None
        num_experts = num_tokens_per_expert.numel() if isinstance(num_tokens_per_expert, Tensor) else None
        return self._open().likely(x, topk_idx, num_experts, num_worst_tokens // self.group_size)

    def _blocks(self, config: Config | None) -> int:
        """A Config chooses the blocks only if its num_sms differs from the default."""
        if config is None or config.num_sms == Buffer.num_sms:
            return self._num_blocks
        return arguments.checked_int(self.rank, "config.num_sms", config.num_sms, 0)

    def _refuse(self, call: str, **values: tuple[Any, Any]) -> None:
        for name, (value, supported) in values.items():
            if value is not supported:
                raise ValueError(f"{call} of moe_a2a has no {name} (rank {self.rank}); pass {name}={supported}")


def _add(exchange: Exchange, stats: Tensor, received: low_latency.LowLatencyReceived) -> None:
    with low_latency.combine_refused_if_failed(exchange, received.handle):
        stats.add_(received.counts)


def _then(hook: Any, work: Any) -> Any:
    """Does the work after the hook, or now if there is none."""
    if hook is None:
        work()
        return None

    def both() -> None:
        hook()
        work()

    return both
