"""ElasticBuffer: DeepEP's second interface, rows packed by token or expanded by route."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_a2a.integrations.deep_ep.buffer import Rows
from moe_a2a.integrations.deep_ep.ep_handle import EPHandle
from moe_a2a.integrations.deep_ep.events import EventOverlap, event_if, wait_for
from moe_a2a.integrations.deep_ep.routed import First, RoutedBuffer, result_of


class ElasticBuffer(RoutedBuffer):
    """dispatch() and combine() of DeepEP 2. Arguments that are not named below concern its network; they are not used.

    Args:
        group: as for Buffer.
        num_max_tokens_per_rank: the default of dispatch().
        num_gpu_timeout_secs: the timeout of the Communicator.
        num_buffers: as for Buffer.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        num_buffers: int = 2,
    ):
        if num_cpu_bytes:
            raise ValueError("ElasticBuffer of moe_a2a has no num_cpu_bytes; pass num_cpu_bytes=0")
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
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Sends each token's row to the ranks of its experts.

        Args:
            x: [num_tokens, H] bfloat16 (or float16, float32), or (float8, scales [num_tokens, H / 128] float32).
            topk_idx, topk_weights: [num_tokens, K] int64 (-1: no expert) and float32 or None.
            cumulative_local_expert_recv_stats: int32 [E_local], to which a first dispatch adds the numbers of rows.
            num_max_tokens_per_rank: the most tokens of a rank, the same on all; None: the constructor's.
            expert_alignment: the numbers of rows per expert are rounded up to it. None: 1.
            num_sms: blocks; 0, or get_theoretical_num_sms(): as moe_a2a's launch table says.
            handle: of an earlier dispatch, whose routing and layout are used again. topk_weights then only if it is expanded.
            do_handle_copy: keep a copy of topk_idx; else the caller must not change it.
            do_cpu_sync: False: the host reads nothing, and there are as many rows as could arrive.
            do_expand: one row per choice of an expert here, expert by expert, with zeros up to expert_alignment.
            use_tma_aligned_col_major_sf: scales column-major, their columns at multiples of 16 bytes.

        Returns: (recv_x; recv_topk_idx [n, K], local, -1 for experts elsewhere, None if expanded; recv_topk_weights [n, K], or
        [n] if expanded; handle; event).
        """
        check = partial(self._wait_for_each, previous_event, previous_event_before_epilogue)
        if handle is not None:
            finish = self._begin_again(
                handle, x, topk_idx, topk_weights, num_sms, do_expand=do_expand, takes_weights=False, check=check
            )
        else:
            finish = self._begin_first(
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
                    copies_topk_idx=do_handle_copy,
                    stats=cumulative_local_expert_recv_stats,
                ),
                check,
            )
        return *result_of(finish(), use_tma_aligned_col_major_sf), event_if(async_with_compute_stream, self._device)

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
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The unweighted sum of a token's rows.

        Args: x: rows as recv_x; topk_weights: as recv_topk_weights; bias: None.
        Returns: (combined_x [num_tokens, H]; topk_weights by token and choice [num_tokens, K], or None; event).
        """
        check = partial(self._wait_for_each, previous_event, previous_event_before_epilogue)
        combined = self._begin_combine(x, handle, topk_weights, bias, num_sms, check=check)()
        return *combined, event_if(async_with_compute_stream, self._device)

    def _wait_for_each(self, *events: Any) -> None:
        for event in events:
            wait_for(event, self._device)
