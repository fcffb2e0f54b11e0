"""What vLLM calls around the experts of a layer: prepare() dispatches, finalize() combines."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.platforms import current_platform

from moe_a2a import calls, environment, row_routes
from moe_a2a.block_scales import FP8_BLOCK
from moe_a2a.communicator import Communicator
from moe_a2a.devices import float8_dtype
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.handle import DispatchHandle

# Ranks may compile for minutes before their first call.
TIMEOUT_SECONDS = environment.seconds("MOE_A2A_VLLM_TIMEOUT", 300)


class Batch(NamedTuple):
    x: Tensor
    x_scales: Tensor | None  # of quantised rows
    ids: Tensor
    weights: Tensor
    most_tokens: int  # of any rank
    num_tokens: int  # of all ranks, at most


# For the experts: rows and their scales, ids [num_rows, n], weights [num_rows, n].
Received = tuple[Tensor, Tensor | None, Tensor, Tensor]

# The kernels around the experts' products take all R * T rows, including those that hold nothing, so T is as small as it can be.
# Below this it makes no difference.
LEAST_TOKENS = 64
# If some rank has at least this many tokens, and a fourth of the R * T rows or more would hold nothing, the rest are packed.
LEAST_TOKENS_PACKED = 1024


def make(num_dispatchers: int, num_max_tokens: int, ranks_differ: bool, is_eager: bool) -> PrepareAndFinalize:
    """For the experts of this machine; vLLM's for the CPU take only local ids. ranks_differ: whether ranks may have different
    numbers of tokens. is_eager: without torch.compile, which on a GPU does not look into the layers of experts."""
    if not current_platform.is_cpu():
        return PrepareRows(num_dispatchers, num_max_tokens, ranks_differ)
    if not is_eager:
        raise ValueError(
            "MOE_A2A_VLLM: on a CPU vLLM compiles the calls of moe_a2a too, which fails; pass --enforce-eager"
        )
    return PrepareRoutes(num_dispatchers, num_max_tokens, ranks_differ)


@functools.cache
def communicator(group: Any, device: torch.device) -> Communicator:
    return Communicator(group, device=device, timeout=TIMEOUT_SECONDS, ordered=True)


@functools.cache
def expert_parallel(
    group: Any,
    num_experts: int,
    num_topk: int,
    hidden: int,
    num_max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertParallel:
    """For all layers of a shape and group, which run one after the other. A process may serve several groups in turn."""
    how: dict[str, Any] = {"num_experts": num_experts, "num_topk": num_topk, "hidden": hidden, "dtype": dtype}
    return ExpertParallel(communicator(group, device), num_max_tokens_per_rank=num_max_tokens, **how)


class PrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """One layer's dispatch and combine. Rows that the experts want quantised are quantised before they are sent, if dispatch()
    takes such scales, else on arrival."""

    def __init__(self, num_dispatchers: int, num_max_tokens: int, ranks_differ: bool):
        super().__init__()
        self._num_dispatchers, self._num_max_tokens = num_dispatchers, num_max_tokens
        self._ranks_differ = ranks_differ
        self._handle: DispatchHandle | None = None  # between prepare() and finalize()

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def num_dispatchers(self) -> int:
        return self._num_dispatchers

    def output_is_reduced(self) -> bool:
        """A token's sum holds the experts of all ranks. Else vLLM would add it once more for each tensor-parallel rank."""
        return True

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> mk.PrepareResultType:
        sizes = num_experts, topk_ids.shape[1], a1.shape[1], self._num_max_tokens
        ep = expert_parallel(get_ep_group().cpu_group, *sizes, a1.dtype, a1.device)
        with calls.dispatch_refused_if_failed(ep):
            if apply_router_weight_on_input:
                if topk_ids.shape[1] != 1:
                    raise ValueError(f"apply_router_weight_on_input needs top-1, not top-{topk_ids.shape[1]}")
                a1 = a1 * topk_weights.to(a1.dtype)
            ids = topk_ids if topk_ids.dtype in (torch.int32, torch.int64) else topk_ids.to(torch.int32)
            sent = (a1, None) if defer_input_quant else self._to_send(a1, quant_config)
            batch = Batch(*sent, ids, topk_weights.float(), *self._sizes(ep, len(a1)))
            handle = self._dispatch(ep, batch)
        with calls.combine_refused_if_failed(handle):
            rows, scales, local_ids, weights = self._received(handle, batch)
            if scales is None and not defer_input_quant:
                rows, scales = _quantized(rows, quant_config)
            counts = mk.ExpertTokensMetadata(expert_num_tokens=handle.expert_counts, expert_num_tokens_cpu=None)
            prepared = rows, scales, counts, local_ids.to(topk_ids.dtype), weights.to(topk_weights.dtype)
        self._handle = handle
        return prepared

    def _to_send(self, x: Tensor, quant_config: Any) -> tuple[Tensor, Tensor | None]:
        """x, or what the experts ask for in its place, with scales."""
        return x, None

    def _sizes(self, ep: ExpertParallel, num_tokens: int) -> tuple[int, int]:
        """The most tokens of any rank, at least LEAST_TOKENS, and the most of all together, the same on all ranks. num_tokens: of
        this rank."""
        of_ranks = [num_tokens]
        if self._ranks_differ:
            data_parallel = get_forward_context().dp_metadata if is_forward_context_available() else None
            if data_parallel is None:
                return self._num_max_tokens, ep.num_ranks * self._num_max_tokens
            # Of each rank, or of each tensor-parallel group, whose ranks send the same tokens.
            of_ranks = data_parallel.local_sizes or data_parallel.num_tokens_across_dp_cpu.tolist()
        most = min(max(LEAST_TOKENS, *of_ranks), self._num_max_tokens)
        return most, sum(of_ranks) * (ep.num_ranks // len(of_ranks))

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            raise RuntimeError("finalize() was called without a prepare() of this layer")
        with calls.combine_refused_if_failed(handle):
            if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
                weight_and_reduce_impl = TopKWeightAndReduceContiguous()
            y = weight_and_reduce_impl.apply(
                output=None,
                fused_expert_output=fused_expert_output,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        # vLLM may have the experts write into the memory of `output`.
        is_apart = y.untyped_storage().data_ptr() != output.untyped_storage().data_ptr()
        with calls.released_if_failed(handle):
            combined = self._combine(handle, y, output if is_apart else None)
        if not is_apart:
            output.copy_(combined)

    @abstractmethod
    def _dispatch(self, ep: ExpertParallel, batch: Batch) -> DispatchHandle: ...

    @abstractmethod
    def _received(self, handle: DispatchHandle, batch: Batch) -> Received: ...

    @abstractmethod
    def _combine(self, handle: DispatchHandle, y: Tensor, out: Tensor | None) -> Tensor:
        """y: a row for each row that the experts were given."""


class PrepareRows(PrepareAndFinalize):
    """For experts that take global ids and skip those of other ranks. The host reads nothing. They get all R * T rows, where they
    landed or, if quantised, as copies, since vLLM's experts want rows without gaps. If many of them hold nothing, they get copies
    of the rest."""

    def _to_send(self, x: Tensor, quant_config: Any) -> tuple[Tensor, Tensor | None]:
        if quant_config.quant_dtype != float8_dtype(x.device) or quant_config.block_shape is None:
            return x, None
        rows, scales = _quantized(x, quant_config)
        # As dispatch() takes them. Scales may also be packed bytes.
        is_sent = scales is not None and scales.dtype == torch.float32 and scales.shape[1] * FP8_BLOCK == x.shape[1]
        return (rows, scales) if is_sent else (x, None)

    def _dispatch(self, ep: ExpertParallel, batch: Batch) -> DispatchHandle:
        most, scales = batch.most_tokens, batch.x_scales
        return ep.dispatch(batch.x, batch.ids, batch.weights, x_scales=scales, num_max_tokens_per_rank=most)

    def _received(self, handle: DispatchHandle, batch: Batch) -> Received:
        ep = handle.ep
        first, num_rows = ep.rank * ep.num_local_experts, ep.num_ranks * handle.num_max_tokens_per_rank
        # Experts index tables with the ids, so none may be -1. They also count each id: one id for all others would be slow.
        if batch.most_tokens >= LEAST_TOKENS_PACKED and 4 * batch.num_tokens <= 3 * num_rows:
            return _packed(handle, batch.num_tokens, first, batch.ids.dtype)
        global_ids, weights = handle.recv_topk(first_expert=first, no_expert=None, dtype=batch.ids.dtype)
        return *handle.contiguous_rows(), global_ids, weights

    def _combine(self, handle: DispatchHandle, y: Tensor, out: Tensor | None) -> Tensor:
        return handle.ep.combine(y, handle, presummed=True, out=out)


class PrepareRoutes(PrepareAndFinalize):
    """For experts that take local ids only: one row per route, with its one expert. Copies the rows, and the host reads how
    many there are."""

    def _dispatch(self, ep: ExpertParallel, batch: Batch) -> DispatchHandle:
        most = batch.most_tokens
        return ep.dispatch(batch.x, batch.ids, batch.weights, layout="expert_major", num_max_tokens_per_rank=most)

    def _received(self, handle: DispatchHandle, batch: Batch) -> Received:
        num_routes = handle.num_routes
        positions = torch.arange(num_routes, device=batch.x.device)
        local_ids = torch.searchsorted(handle.expert_offsets[1:].contiguous(), positions, right=True)
        weights = handle.route_weights[:num_routes, None].clone()
        row_routes.make_unweighted(handle)  # the experts apply them
        return handle.expert_x[:num_routes], None, local_ids[:, None], weights

    def _combine(self, handle: DispatchHandle, y: Tensor, out: Tensor | None) -> Tensor:
        return handle.ep.combine(y, handle, out=out)


def _packed(handle: DispatchHandle, num_rows: int, first_expert: int, dtype: torch.dtype) -> Received:
    """Copies of the rows that hold a token and of their scales, with the experts of each; num_rows is at least their number. The
    combine then takes its sums from the same places."""
    topk = row_routes.packed_topk(handle, num_rows, dtype, first_expert, None)
    row_index, ids, weights, handle._sum_index, _ = topk
    rows = handle.recv_x
    index = row_index.clamp(max=len(rows) - 1)
    if rows.dtype == handle.ep.dtype:
        return rows.index_select(0, index), None, ids, weights
    values = rows.view(torch.uint8).index_select(0, index).view(rows.dtype)
    return values, handle.recv_x_scales.index_select(0, index), ids, weights


def _quantized(rows: Tensor, config: Any) -> tuple[Tensor, Tensor | None]:
    if config.quant_dtype is None:
        return rows, None
    scale = config.a1_gscale if config.use_nvfp4_w4a4 else config.a1_scale
    if scale is None and not config.per_act_token_quant and config.block_shape is None:
        raise ValueError(
            "the experts need one scale for all rows that arrive, but some of these are empty; use a model with static, "
            "per-token or block scales"
        )
    quantized: tuple[Tensor, Tensor | None] = moe_kernel_quantize_input(
        rows,
        scale,
        quant_dtype=config.quant_dtype,
        per_act_token_quant=config.per_act_token_quant,
        block_shape=config.block_shape,
        is_scale_swizzled=config.is_scale_swizzled,
        mx_alignment=config.mx_alignment,
    )
    return quantized
