"""EPBuffer: ElasticBuffer's successor in DeepEP 2.5. A call may be begun now and ended by waiting for its event."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_a2a.integrations.deep_ep.buffer import Rows
from moe_a2a.integrations.deep_ep.ep_handle import EPHandle
from moe_a2a.integrations.deep_ep.events import EventOverlap, event_before, event_if, wait_for
from moe_a2a.integrations.deep_ep.routed import Combined, First, Result, RoutedBuffer, result_of


class EPBuffer(RoutedBuffer):
    """dispatch() and combine() of DeepEP 2.5. Arguments that are not named below concern its network; they are not used.

    Args:
        group: as for Buffer.
        num_max_tokens_per_rank: the default of dispatch().
        lb_allocation_plan_or_num_bytes: 0: there are no redundant experts.
        deterministic: results are the same in any case.
        num_gpu_timeout_secs: the timeout of the Communicator.
        num_buffers: as for Buffer. A deferred call is lost if num_buffers dispatches follow before its event is waited for.

    All ranks defer the same calls, and wait for their events at the same points in the sequence of calls.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        num_buffers: int = 2,
    ):
        if lb_allocation_plan_or_num_bytes != 0:
            raise ValueError(
                "EPBuffer of moe_a2a has no lb_allocation_plan_or_num_bytes; pass lb_allocation_plan_or_num_bytes=0"
            )
        self.deterministic = deterministic
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        super().__init__(
            group,
            num_bytes,
            num_max_tokens_per_rank,
            (hidden, num_topk, use_fp8_dispatch),
            num_allocated_qps,
            num_gpu_timeout_secs,
            explicitly_destroy,
            num_buffers,
        )
        self.num_lb_bytes = 0
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(1, R): one node."""
        return 1, self.num_ranks

    def get_logical_domain_size(self, allow_hybrid_mode: bool | None = None) -> tuple[int, int]:
        """(1, R): one node."""
        return 1, self.num_ranks

    def get_comm_stream(self) -> Any:
        """The current stream of this object's GPU."""
        return torch.cuda.current_stream(self._device)

    @torch.no_grad()
    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap] | EventOverlap:
        """Sends each token's row to the ranks of its experts. As ElasticBuffer.dispatch(), except for:

        Args:
            topk_idx: kept, not copied; a handle whose topk_idx has been changed raises.
            topk_weights: also with a handle of packed rows.
            num_experts, num_max_tokens_per_rank, expert_alignment: with a handle None, or as at its dispatch.
            do_handle_copy: False.
            do_cpu_sync: not True with a handle.
            defer_epilogue: with async_with_compute_stream. Returns an event once the rows are sent; current_stream_wait()
                receives the rows and returns all but the event.
        """
        reads_again = bool(do_cpu_sync) and handle is not None
        check = partial(
            self._check, previous_event, defer_epilogue, async_with_compute_stream, do_handle_copy, reads_again
        )
        if handle is not None:
            begun = self._begin_again(
                handle,
                x,
                topk_idx,
                topk_weights,
                num_sms,
                do_expand=do_expand,
                takes_weights=True,
                is_deferred=defer_epilogue,
                check=check,
                num_experts=num_experts,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                expert_alignment=expert_alignment,
            )
        else:
            begun = self._begin_first(
                First(
                    x,
                    topk_idx,
                    topk_weights,
                    num_experts,
                    num_max_tokens_per_rank,
                    1 if expert_alignment is None else expert_alignment,
                    num_sms,
                    is_exact=do_cpu_sync is not False,
                    do_expand=do_expand,
                    do_zero_padding=do_zero_padding,
                    copies_topk_idx=False,
                    stats=cumulative_local_expert_recv_stats,
                    is_deferred=defer_epilogue,
                ),
                check,
            )

        @torch.no_grad()
        def finish() -> Result:
            return result_of(begun(), use_tma_aligned_col_major_sf)

        return self._end(finish, defer_epilogue, async_with_compute_stream)

    @torch.no_grad()
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap] | EventOverlap:
        """The unweighted sum of a token's rows. As ElasticBuffer.combine(), except for:

        Args: defer_epilogue: as of dispatch(); current_stream_wait() returns (combined_x, topk_weights or None). x and
        topk_weights must not be changed before.
        """
        check = partial(self._check, previous_event, defer_epilogue, async_with_compute_stream)
        begun = self._begin_combine(x, handle, topk_weights, bias, num_sms, defer_epilogue, check)

        @torch.no_grad()
        def finish() -> Combined:
            return begun()

        return self._end(finish, defer_epilogue, async_with_compute_stream)

    # ---- redundant experts

    def lb_get_theoretical_num_sms(self) -> int:
        raise self._is_missing("lb_get_theoretical_num_sms")

    def lb_prefetch_weights(self, *arguments: Any, **options: Any) -> EventOverlap:
        raise self._is_missing("lb_prefetch_weights")

    def lb_reduce_grads(self, *arguments: Any, **options: Any) -> EventOverlap:
        raise self._is_missing("lb_reduce_grads")

    def _is_missing(self, name: str) -> RuntimeError:
        return RuntimeError(
            f"EPBuffer of moe_a2a has no {name}() (rank {self.rank_idx}): it keeps no redundant experts"
        )

    def _end(self, finish: Callable[[], Any], is_deferred: bool, is_async: bool) -> Any:
        """What the call returns."""
        if is_deferred:
            return event_before(finish, self._device)
        return *finish(), event_if(is_async, self._device)

    def _check(
        self, event: Any, is_deferred: bool, is_async: bool, copies: bool = False, reads_again: bool = False
    ) -> None:
        wait_for(event, self._device)
        if copies:
            raise ValueError(f"do_handle_copy=True on rank {self.rank_idx}; pass False, and a topk_idx that stays")
        if reads_again:
            raise ValueError(f"do_cpu_sync=True with handle= on rank {self.rank_idx}; pass one or the other")
        if is_deferred and not is_async:
            raise ValueError(
                f"defer_epilogue=True without async_with_compute_stream on rank {self.rank_idx}; pass one with the other"
            )
