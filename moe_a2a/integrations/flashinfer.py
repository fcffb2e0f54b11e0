"""The communication backend "moe_a2a" of flashinfer.moe_ep: FlashInfer's experts between dispatch() and combine()::

    import moe_a2a.integrations.flashinfer  # registers it
    from flashinfer.moe_ep.core.comm import create_communication

    comm = create_communication(bootstrap, params, "moe_a2a")  # or SplitConfig(comm="moe_a2a", kernel=...)
    received = comm.dispatch(x, topk_ids, topk_weights)
    out = comm.combine(fused_moe(received.hidden_states, received.topk_ids, received.topk_weights))
    comm.destroy()

bootstrap, params: FlashInfer's BootstrapConfig and MoEEpCommParams. The ranks are those of bootstrap.process_group (None: the
default group), the device is that of bootstrap.device (None: as ExpertParallel chooses it). Further arguments of
create_communication() go to ExpertParallel: timeout, num_blocks, num_max_ll_tokens, launch_table, device.

A received row lists the experts of this rank that its token chose; other choices are invalid_expert_id. Rows are in bfloat16 or
float16 (dispatch_format None, BF16, FP16), or float8 with a float32 per 128 values (DeepSeekFp8) or a byte per 32 (MXFP8: scales
[num_tokens, ceil(hidden / 32)], not swizzled).
Contract: `flashinfer/moe_ep/core/comm/communication.py` of FlashInfer 0.7.2 and 0.7.4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    from flashinfer.moe_ep.core.comm.communication import (
        MoEEpCommParams,
        MoEEpCommunication,
        MoEEpDispatchResult,
        register_communication,
    )
except ImportError as error:
    raise ImportError(
        "moe_a2a.integrations.flashinfer needs flashinfer 0.7.2 or newer: pip install 'flashinfer-python>=0.7.2'"
    ) from error

from moe_a2a import arguments, calls, groups, set_up
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.handle import DispatchHandle

ROW_FORMATS = ("BF16", "FP16", "DeepSeekFp8", "MXFP8")  # besides None


@register_communication("moe_a2a")
class MoeA2ACommunication(MoEEpCommunication):
    """One ExpertParallel; made and destroyed on all ranks together."""

    def __init__(self, bootstrap: Any, params: MoEEpCommParams, **options: Any):
        with set_up.refused_if_failed(bootstrap.process_group, "ExpertParallel"):
            super().__init__(bootstrap, params)
            row_format = getattr(params.dispatch_format, "name", None)
            if row_format is not None and row_format not in ROW_FORMATS:
                raise ValueError(
                    f"dispatch_format={row_format} on rank {self.ep_rank}; moe_a2a sends rows as None (params.dtype), "
                    f"{', '.join(ROW_FORMATS)}"
                )
            group = bootstrap.process_group
            group = groups.as_group(getattr(group, "_group", group))  # of a Communicator
            if (group.rank, group.num_ranks) != (self.ep_rank, self.ep_size):
                raise ValueError(
                    f"bootstrap says rank {self.ep_rank} of {self.ep_size}, its process_group rank {group.rank} of "
                    f"{group.num_ranks}; pass the group of the expert-parallel ranks"
                )
            if bootstrap.device is not None:
                options.setdefault("device", torch.device("cuda", bootstrap.device))
            how = dict(
                num_experts=params.num_experts,
                num_topk=params.top_k,
                hidden=params.hidden_size,
                num_max_tokens_per_rank=params.max_tokens_per_rank,
                dtype=params.token_dtype,
                **options,
            )
        self._handle: DispatchHandle | None = None  # between dispatch() and combine()
        self._ep = ExpertParallel(bootstrap.process_group, **how)

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Wherever this package could be imported: GPUs with peer access, and CPUs."""
        return True

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        hidden_states_scale: Tensor | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
        max_tokens_per_rank: int | None = None,  # its name in FlashInfer 0.7.2
    ) -> MoEEpDispatchResult:
        """Returns views that are valid until combine(), or copies where rows would have gaps between them. tokens_per_rank of the
        result is runtime_max_tokens_per_rank rounded up to a power of two, if that is below params.max_tokens_per_rank."""
        bound = max_tokens_per_rank if runtime_max_tokens_per_rank is None else runtime_max_tokens_per_rank
        with calls.dispatch_refused_if_failed(self._ep):
            if self._handle is not None and self._handle.is_open:
                raise RuntimeError(f"dispatch() on rank {self.ep_rank} follows a dispatch(); call combine() first")
            if eplb_local_stats is not None:
                raise ValueError(
                    f"eplb_local_stats on rank {self.ep_rank}: moe_a2a gathers no statistics; pass None and gather them yourself"
                )
            handle = self._ep.dispatch(
                hidden_states,
                topk_ids,
                topk_weights,
                x_scales=hidden_states_scale,
                num_max_tokens_per_rank=bound,
            )
        self._handle = handle
        with calls.combine_refused_if_failed(handle):
            ids, recv_weights = handle.recv_topk(
                first_expert=self.ep_rank * self.num_local_experts,
                no_expert=self.params.invalid_expert_id,
                dtype=torch.int32,
            )
            rows, scales = handle.contiguous_rows()
            return MoEEpDispatchResult(
                hidden_states=rows,
                topk_ids=ids,
                topk_weights=None if topk_weights is None else recv_weights,
                tokens_per_rank=handle.num_max_tokens_per_rank,
                hidden_states_scale=scales,
            )

    def combine(self, expert_output: Tensor, *, output: Tensor | None = None) -> Tensor:
        """expert_output: [ep_size * tokens_per_rank, hidden] or [ep_size, tokens_per_rank, hidden], weighted and summed over
        this rank's experts. Returns the sums over ranks, [num_tokens, hidden]."""
        if self._handle is None:
            raise RuntimeError(
                f"combine() on rank {self.ep_rank} was called without a dispatch(); call dispatch() first"
            )
        with calls.attempt_refused_if_failed(self._ep, self._handle):
            arguments.check_tensor(self.ep_rank, "expert_output", expert_output)
            y = expert_output.flatten(0, -2) if expert_output.dim() > 2 else expert_output
        combined = self._ep.combine(y, self._handle, presummed=True, out=output)
        self._handle = None
        return combined

    def destroy(self) -> None:
        """Releases the memory, on every rank; a second call does nothing."""
        self._handle = None
        self._ep.close()
