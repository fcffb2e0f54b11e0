"""DeepEP as a baseline if it is installed: V1 normal and low-latency (deep_ep.Buffer), V2 (deep_ep.ElasticBuffer).

Each is called as in its own tests, with the configuration that it selects for 24 multiprocessors. Its combine adds rows
without weights (low-latency: with weights), so the rows are weighted and summed before the clock starts, as in our mode
"presummed". Normal mode and V2 take float8 rows that the caller has quantised; quantising is not timed. V1's normal dispatch
waits on the host for the number of received rows; that wait is part of its time.
"""

from __future__ import annotations

import functools
import importlib
from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_a2a import reference
from moe_a2a.bench.cases import Case, Inputs
from moe_a2a.bench.clock import Step
from moe_a2a.bench.contenders import Contender
from moe_a2a.bench.expected import factor_of, local_sums

NUM_SMS = 24
NVLINK_BUFFER_BYTES = 2_000_000_000
LOW_LATENCY_TOKENS = 128
ELASTIC_CAPACITIES = (128, 1024, 4096, 8192, 16384)  # V2 compiles its kernels for each at first use


@functools.cache
def _module() -> Any:
    """deep_ep, or the reason why it cannot be imported."""
    try:
        return importlib.import_module("deep_ep")
    except Exception as error:  # importing it searches for its libraries
        return f"deep_ep is not importable here ({type(error).__name__}: {str(error).partition(chr(10))[0]})"


@functools.cache
def _nccl_group() -> Any:
    """One group for all of its buffers, all its collectives on the GPU."""
    group = dist.new_group(backend="nccl")
    # V2 needs the communicator, which the first call creates.
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return group


@functools.cache
def _low_latency_buffer(hidden: int, num_experts: int) -> Any:
    """Lives as long as the process: it starts NVSHMEM, which must not start twice."""
    group, buffer_class = _nccl_group(), _module().Buffer
    return buffer_class(
        group,
        num_rdma_bytes=buffer_class.get_low_latency_rdma_size_hint(
            LOW_LATENCY_TOKENS, hidden, group.size(), num_experts
        ),
        low_latency_mode=True,
        num_qps_per_rank=num_experts // group.size(),
        explicitly_destroy=True,
    )


class _DeepEP(Contender):
    class_name = "Buffer"

    def __init__(self, case: Case, inputs: Inputs):
        super().__init__(inputs)
        self._case = case
        self._buffer = self._make_buffer()

    @classmethod
    def why_not(cls, case: Case, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "deep_ep runs on GPUs"
        if isinstance(_module(), str):
            return _module()
        if not hasattr(_module(), cls.class_name):
            return f"this deep_ep has no {cls.class_name}"
        if case.dtype != torch.bfloat16:
            return "deep_ep moves bfloat16"
        if case.routing == "idle_rank":
            return "deep_ep is not run with a rank without tokens"
        return None

    @abstractmethod
    def _make_buffer(self) -> Any: ...

    def close(self) -> None:
        super().close()
        self._buffer.destroy()


class _Flat(_DeepEP):
    """Rows arrive once per rank, with the choices of local experts; handle: (key, recv_x, choices, weights)."""

    mode = "presummed"
    blocks = (NUM_SMS, NUM_SMS)

    def __init__(self, case: Case, inputs: Inputs):
        super().__init__(case, inputs)
        self._x = reference.quantize_fp8(inputs.x) if self.is_fp8 else inputs.x

    def arrived(self, x: Tensor) -> Tensor:
        return _as_bfloat16(self._x)

    def experts(self, handle: Any) -> Tensor:
        _, rows, choices, weights = handle
        rank, num_local_experts = self.inputs.rank, self.inputs.num_local_experts
        # DeepEP numbers a rank's experts from 0.
        expert = torch.where(choices >= 0, choices + rank * num_local_experts, -1)
        return local_sums(_as_bfloat16(rows), expert, weights, rank, num_local_experts)

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        return self._buffer.combine(y, handle[0])[0]


def _as_bfloat16(rows: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """rows: [n, H], or float8 rows and their scales."""
    return reference.dequantize_fp8(*rows).bfloat16() if isinstance(rows, tuple) else rows


class Normal(_Flat):
    system = "DeepEP V1 normal"

    def _make_buffer(self) -> Any:
        _module().Buffer.set_num_sms(NUM_SMS)
        return _module().Buffer(_nccl_group(), NVLINK_BUFFER_BYTES, 0, explicitly_destroy=True)

    def dispatch(self) -> Any:
        idx, weights = self.inputs.topk_idx, self.inputs.topk_weights
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(idx, self._case.num_experts)
        recv_x, choices, recv_weights, _, key, _ = self._buffer.dispatch(
            self._x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=idx,
            topk_weights=weights,
        )
        return key, recv_x, choices, recv_weights


class Elastic(_Flat):
    system = "DeepEP V2"
    class_name = "ElasticBuffer"

    @property
    def _capacity(self) -> int:
        num_tokens = self._case.num_tokens
        return next((capacity for capacity in ELASTIC_CAPACITIES if capacity >= num_tokens), num_tokens)

    def _make_buffer(self) -> Any:
        case = self._case
        return _module().ElasticBuffer(
            _nccl_group(),
            num_max_tokens_per_rank=self._capacity,
            hidden=case.hidden,
            num_topk=case.num_topk,
            use_fp8_dispatch=self.is_fp8,
            allow_hybrid_mode=False,  # for several nodes only
            explicitly_destroy=True,
        )

    def dispatch(self) -> Any:
        recv_x, choices, recv_weights, key, _ = self._buffer.dispatch(
            self._x,
            topk_idx=self.inputs.topk_idx,
            topk_weights=self.inputs.topk_weights,
            num_experts=self._case.num_experts,
            num_max_tokens_per_rank=self._capacity,
            num_sms=NUM_SMS,
            do_cpu_sync=False,
        )
        return key, recv_x, choices, recv_weights


class NormalFp8(Normal):
    is_fp8, mode = True, "fp8+presummed"


class ElasticFp8(Elastic):
    is_fp8, mode = True, "fp8+presummed"


class LowLatency(_DeepEP):
    """float8 rows, one per (token, expert); combine weights them."""

    system = "DeepEP V1 low-latency"
    mode = "fp8"
    is_fp8 = True

    @classmethod
    def why_not(cls, case: Case, device: torch.device) -> str | None:
        is_large = case.num_tokens > LOW_LATENCY_TOKENS
        too_large = f"the low-latency mode is for at most {LOW_LATENCY_TOKENS} tokens" if is_large else None
        return super().why_not(case, device) or too_large

    def _make_buffer(self) -> Any:
        return _low_latency_buffer(self._case.hidden, self._case.num_experts)

    def close(self) -> None:
        Contender.close(self)  # keeps the buffer

    def dispatch(self) -> Any:
        (rows, scales), counts, key, _, _ = self._buffer.low_latency_dispatch(
            self.inputs.x, self.inputs.topk_idx, LOW_LATENCY_TOKENS, self._case.num_experts, use_fp8=True
        )
        return key, rows, scales, counts

    def steps(self) -> list[Step]:
        dispatch, combine = super().steps()
        # The experts write only the rows of y that hold data: all of y would not fit in the cache.
        is_row = torch.arange(self.y.shape[1], device=self.y.device) < self._counts[:, None]
        place = is_row.flatten().nonzero().squeeze(1)
        places, rows = self.y.flatten(0, 1), self.y.flatten(0, 1)[place]
        combine.reads = lambda: places.index_copy_(0, place, rows)
        return [dispatch, combine]

    def arrived(self, x: Tensor) -> Tensor:
        return reference.dequantize_fp8(*reference.quantize_fp8(x)).to(x.dtype)

    def experts(self, handle: Any) -> Tensor:
        _, rows, scales, self._counts = handle  # [E_local, R * T, H], [E_local, R * T, H / 128], [E_local]
        values = reference.dequantize_fp8(rows.flatten(0, 1), scales.contiguous().flatten(0, 1))
        local_expert = torch.arange(len(rows), device=rows.device)
        factor = factor_of(local_expert + self.inputs.rank * self.inputs.num_local_experts)
        return (values.unflatten(0, rows.shape[:2]) * factor[:, None, None]).bfloat16()

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        return self._buffer.low_latency_combine(y, self.inputs.topk_idx, self.inputs.topk_weights, handle[0])[0]
