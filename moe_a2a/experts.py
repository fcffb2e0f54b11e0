"""SwiGLU experts over the rows of a dispatch: by kernels that gather their rows, or step by step in PyTorch."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from moe_a2a import arguments, calls, codecs
from moe_a2a.expert_weights import ExpertWeights, Weight, dequantize
from moe_a2a.handle import AnyExpertParallel, DispatchHandle, Owner


def run_and_combine(
    handle: DispatchHandle,
    weights: ExpertWeights,
    codec: int,
    out: torch.Tensor | None,
    num_blocks: int,
    *,
    fused: bool | None,
    fused_combine: bool | None,
    num_max_routes: int | None,
) -> torch.Tensor:
    """Implements ExpertParallel.experts(), with its arguments, checked. codec: the number of its wire."""
    _check_scales(handle)
    core, key = handle.ep._core, handle._handle
    by_kernels = runs_kernels(handle.ep, weights, handle.row_dtype, fused)
    if num_max_routes is not None:
        _check_bound(handle, num_max_routes, can_look=not by_kernels or handle.ep.device.type == "cpu")
    fuses = _fuses_combine(handle, by_kernels, fused_combine)
    if not by_kernels:
        with torch.no_grad():
            y = _step_by_step(handle, weights)
        return core.combine(y, key, False, codec, out, num_blocks)
    return core.experts(key, *weights, num_max_routes or arguments.MAX_COUNT, fuses, codec, out, num_blocks)


def _check_scales(handle: DispatchHandle) -> None:
    if handle._scales_dtype is not None:
        raise ValueError(
            f"handle is of a dispatch with x_scales of {handle._scales_dtype} on rank {handle.ep.rank}; these experts take "
            "one float32 scale per 128 values: dispatch with such x_scales, or run experts of your own"
        )


def _check_bound(handle: DispatchHandle, num_max_routes: int, can_look: bool) -> None:
    rank = handle.ep.rank
    if handle.layout == "masked":
        raise ValueError(f'num_max_routes={num_max_routes} with layout="masked" on rank {rank}; pass another layout')
    # On a GPU reading it would synchronise. There combine() counts the routes without a row of y.
    if can_look:
        arguments.check_num_routes(rank, int(handle.expert_offsets[-1]), num_max_routes)


def swiglu_experts(handle: DispatchHandle, w_gate_up: Weight, w_down: Weight) -> torch.Tensor:
    """Runs each local expert on its rows: y = (silu(x @ gate.T) * (x @ up.T)) @ down.T. Step by step, the easiest form to
    read: it computes what the kernels compute, rounded between the steps (float8 weights: in fp32, unrounded).

    Args:
        handle: of a dispatch, any layout; float8 rows are dequantised first.
        w_gate_up: [E_local, 2 * I, H], the gate's rows before the up projection's; float8 as (values, scales).
        w_down: [E_local, H, I], likewise.

    Returns: `y` as combine() takes it: [rows, H], or [E_local, R * T, H] for layout="masked". The contents of rows that
    are no route are unspecified. Reads the offsets on the host, which synchronises with the device.
    """
    _check_scales(handle)
    return _step_by_step(handle, ExpertWeights.checked(handle.ep, w_gate_up, w_down))


def _no_autocast(device: torch.device) -> torch.autocast:
    """Products are in the dtype of the rows and weights, which is the layer's."""
    return torch.autocast(device.type, enabled=False)


def _step_by_step(handle: DispatchHandle, weights: ExpertWeights) -> torch.Tensor:
    offsets = handle.expert_offsets.tolist()
    counts = handle.expert_counts.tolist()
    rows = _rows(handle, offsets[-1])
    y = rows.new_empty(rows.shape[0], handle.ep.hidden, dtype=handle.ep.dtype)
    with _no_autocast(rows.device):
        for expert, (start, count) in enumerate(zip(offsets, counts, strict=False)):
            if count == 0:
                continue
            w_gate_up, w_down = weights.of_expert(expert)
            x = rows[start : start + count].to(w_gate_up.dtype)
            gate, up = F.linear(x, w_gate_up).chunk(2, dim=-1)
            y[start : start + count] = F.linear(F.silu(gate) * up, w_down)
    return _in_layout(handle, y)


def has_group_products(*weights: torch.Tensor) -> bool:
    """Whether PyTorch multiplies the rows of all experts at once, by offsets that the host need not know."""
    if weights[0].is_cuda and (
        weights[0].dtype != torch.bfloat16 or torch.cuda.get_device_capability(weights[0].device) < (9, 0)
    ):
        return False  # PyTorch would read the offsets and multiply expert by expert
    return all(weight.stride(-2) * weight.itemsize % 16 == weight.data_ptr() % 16 == 0 for weight in weights)


def swiglu_by_groups(
    rows: torch.Tensor, expert_offsets: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor
) -> torch.Tensor:
    """The outputs of all experts, one per row, recorded for a backward pass. Those past the last expert's rows are
    unspecified."""
    ends = expert_offsets[1:]
    with _no_autocast(rows.device):
        gate, up = F.grouped_mm(rows, w_gate_up.mT, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, w_down.mT, offs=ends)


def swiglu_of_each(
    rows: torch.Tensor, split_sizes: list[int], w_gate_up: torch.Tensor, w_down: torch.Tensor
) -> torch.Tensor:
    """The same, expert by expert. Those without rows take part too, so that every weight has a gradient."""
    outputs = []
    with _no_autocast(rows.device):
        for x, gate_up, down in zip(rows.split(split_sizes), w_gate_up.unbind(), w_down.unbind(), strict=True):
            gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(outputs)


def _in_layout(handle: DispatchHandle, y: torch.Tensor) -> torch.Tensor:
    return y.view(handle.ep.num_local_experts, -1, y.shape[-1]) if handle.layout == "masked" else y


def _rows(handle: DispatchHandle, num_positions: int) -> torch.Tensor:
    """One row per position, [num_positions, H]."""
    is_float8 = handle.row_dtype.itemsize == 1
    if handle.layout != "rows":
        rows = handle.expert_x.view(-1, handle.ep.hidden)
        return dequantize(rows, handle.expert_x_scales.view(rows.shape[0], -1), 1) if is_float8 else rows
    index = handle.expert_row_index[:num_positions]
    if is_float8:
        scales = handle.recv_x_scales.index_select(0, index)
        rows = handle.recv_x.view(torch.uint8).index_select(0, index).view(handle.row_dtype)
        return dequantize(rows, scales, 1)
    return handle.recv_x.index_select(0, index)


def simulated_experts(handle: DispatchHandle, scales: torch.Tensor | float) -> torch.Tensor:
    """Experts that only scale their rows, as leaderboard problems simulate them: y = scales[expert] * x. Returns their
    weighted sums, [R * T, H], for combine(..., presummed=True). One kernel; the host reads nothing.

    Args:
        handle: of a dispatch of rows of the ExpertParallel's dtype; any layout.
        scales: one for all experts, or [E_local], or [E_local, H] of that dtype.
    """
    return handle.ep._open_core().simulated_experts(handle._handle, *_scales_and_factor(handle.ep.rank, scales))


def simulated_layer(
    ep: Owner,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    scales: torch.Tensor | float,
) -> torch.Tensor:
    """dispatch(x, topk_idx, topk_weights), simulated_experts(handle, scales) and combine(sums, handle, presummed=True) in two
    launches: the combine forms the sums as it sends them. The same bits. Returns [num_tokens, H].

    All ranks make this call; a peer may make the three calls instead. Raises: as dispatch(). A call that fails leaves no
    handle: all ranks may repeat it.

    It reaches the extension without calling another Python function: each would cost some 4 us when the CPU's caches are
    cold, as they are in a leaderboard.
    """
    try:
        core = ep._core if ep._training is None else ep._core_to_dispatch()
        per_expert, factor = (None, scales) if type(scales) is float else _scales_and_factor(ep.rank, scales)
        out = core.simulated_layer(x, topk_idx, topk_weights, per_expert, factor)
    except BaseException as error:
        _raise_from_layer(ep, error, x, topk_idx, topk_weights)
    ep._num_dispatches += 1
    if ep._trace is not None:
        ep._trace.dispatched(topk_idx, x.dtype)
        ep._trace.combined(None)
    return out


@calls.opens_a_handle
def _raise_from_layer(
    ep: Owner, error: BaseException, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
) -> NoReturn:
    """Raises what made simulated_layer() fail, and tells the peers."""
    ep._open_core()
    if isinstance(error, TypeError):
        arguments.check_dispatched(ep.rank, x, None, topk_idx, topk_weights)
    raise error


def _scales_and_factor(rank: int, scales: torch.Tensor | float) -> tuple[torch.Tensor | None, float]:
    if isinstance(scales, torch.Tensor):
        return scales, 1.0
    return None, arguments.checked_number(rank, "scales", scales, "a number or a tensor")


# ---- kernels or PyTorch, fused or apart


def runs_kernels(ep: AnyExpertParallel, weights: ExpertWeights, row_dtype: torch.dtype, fused: bool | None) -> bool:
    """Whether the kernels run the experts. fused=None: on a GPU, if they can. On the CPU PyTorch's products are faster (bfloat16
    with AVX-512: up to 10 times), and reading the offsets on the host costs nothing."""
    why_not = weights.kernels_refuse(ep, row_dtype)
    if fused is None:
        return why_not is None and ep.device.type != "cpu"
    if fused and why_not is not None:
        raise ValueError(f"fused=True, but {why_not} on rank {ep.rank}; pass fused=None to run step by step in PyTorch")
    return fused


def _fuses_combine(handle: DispatchHandle, by_kernels: bool, fused_combine: bool | None) -> bool:
    """fused_combine=None means False: on 4 H200 it gains 3 % at best and loses 4 % at worst (docs/benchmarks.md)."""
    if fused_combine and (why_not := combine_stays_apart(handle, by_kernels)) is not None:
        raise ValueError(f"fused_combine=True, but {why_not} on rank {handle.ep.rank}; pass fused_combine=None")
    return bool(fused_combine)


def combine_stays_apart(handle: DispatchHandle, by_kernels: bool = True) -> str | None:
    """Why the second product cannot send its rows itself; None if it can."""
    if not by_kernels:
        return "the experts run step by step in PyTorch (for kernels pass fused=True)"
    if handle.layout == "masked":
        return 'the layout is "masked"'
    core = handle.ep._core
    if not core.can_send_with_product(handle._handle):
        num_tokens, most = handle._handle.num_tokens, core.num_max_ll_tokens
        return (
            f"num_tokens={num_tokens} <= num_max_ll_tokens={most} is a small batch, whose sums may return as LL words"
        )
    return None


def check_options(ep: AnyExpertParallel, fused: Any, fused_combine: Any, wire: Any, num_max_routes: Any) -> None:
    for name, flag in (("fused", fused), ("fused_combine", fused_combine)):
        if flag is not None:
            arguments.checked_bool(ep.rank, name, flag)
    codecs.checked_index(ep.rank, "wire", wire)
    if wire is not None and fused_combine:
        raise ValueError(
            f'wire="{wire}" with fused_combine=True on rank {ep.rank}: the fused kernel sends its sums without a codec; pass '
            "fused_combine=None"
        )
    if num_max_routes is not None:
        arguments.checked_int(ep.rank, "num_max_routes", num_max_routes, 1)
