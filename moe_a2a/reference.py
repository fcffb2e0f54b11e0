"""The specification: what dispatch, combine and an MoE layer compute, in plain PyTorch in one process.

The functions take lists with one entry per rank and return such lists. Names, shapes and layouts
are those of `ExpertParallel` and `DispatchHandle`. The results are equal bit for bit, because every
order of addition and every rounding is written down here::

    T, H, K      tokens of a rank, hidden, num_topk
    R, E_local   num_ranks, num_experts / num_ranks
    rows         R * num_max_tokens_per_rank; token t of rank s lands in row
                 s * num_max_tokens_per_rank + t of every rank that owns one of its experts
    route        one (token, k) with topk_idx[token, k] >= 0; a token that names an expert twice
                 has two routes to it
    position     index of a route in its rank's lists; the number of positions is the capacity
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FP8_BLOCK = 128  # columns that share one scale
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
LAYOUTS = ("rows", "expert_major", "masked")


@dataclass
class Dispatched:
    """What one rank holds after dispatch.

    Here the rows that did not land, and positions without a route, are zero (expert_row_index: -1);
    in the runtime they are undefined, except for the padding of "expert_major".
    """

    num_tokens: int  # tokens that this rank sent: combine returns this many rows to it
    recv_x: Tensor  # [rows, H]
    recv_x_scales: Tensor | None  # fp32 [rows, ceil(H / 128)], only with fp8 rows
    landed: Tensor  # bool [rows]
    expert_row_index: Tensor  # int32 [capacity]: the route's row of recv_x
    expert_offsets: Tensor  # int32 [E_local + 1]: first position of each expert
    expert_counts: Tensor  # int32 [E_local]: routes of each expert, padding not counted
    route_weights: Tensor  # fp32 [capacity]
    route_src_rank: Tensor  # int32 [capacity]
    route_src_token_idx: Tensor  # int32 [capacity]
    route_k: Tensor  # int32 [capacity]: the route's column of topk_idx
    expert_x: Tensor | None  # "expert_major": [capacity, H]; "masked": [E_local, rows, H]
    expert_x_scales: Tensor | None  # the scales of these rows


# ---------------------------------------------------------------------------------------- dispatch


def dispatch(
    x: list[Tensor],
    topk_idx: list[Tensor],
    topk_weights: list[Tensor] | None = None,
    *,
    num_experts: int,
    num_max_tokens_per_rank: int,
    layout: str = "rows",
    expert_alignment: int = 1,
    x_scales: list[Tensor] | None = None,
    quantize: torch.dtype | None = None,
) -> list[Dispatched]:
    """x [T, H], topk_idx [T, K] (-1 = dropped) and topk_weights [T, K] (None = 1) of each rank.

    fp8 rows come with their x_scales, or are quantised here from x if `quantize` names an fp8 type.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {LAYOUTS}")
    if topk_weights is None:
        topk_weights = [torch.ones(idx.shape, dtype=torch.float32, device=idx.device) for idx in topk_idx]
    if quantize is not None:
        x, x_scales = map(list, zip(*(quantize_fp8(rows, quantize) for rows in x), strict=True))
    num_local_experts = num_experts // len(x)
    num_rows = len(x) * num_max_tokens_per_rank

    def receive(rank: int) -> Dispatched:
        routes = _routes_to(rank, num_local_experts, topk_idx, topk_weights)
        counts = torch.bincount(routes.expert, minlength=num_local_experts)
        reserved, capacity = _space(layout, counts, num_rows, topk_idx[0].shape[1], expert_alignment)
        index_in_expert = torch.arange(len(routes.expert), device=counts.device) - _exclusive_sum(counts)[routes.expert]
        place = _exclusive_sum(reserved)[routes.expert] + index_in_expert

        row = routes.src_rank * num_max_tokens_per_rank + routes.src_token_idx
        landed = torch.zeros(num_rows, dtype=torch.bool, device=row.device)
        landed[row] = True
        recv_x = _land(x, landed)
        recv_x_scales = None if x_scales is None else _land(x_scales, landed)
        row_index = _put(row, place, capacity, empty=-1)
        return Dispatched(
            num_tokens=len(x[rank]),
            recv_x=recv_x,
            recv_x_scales=recv_x_scales,
            landed=landed,
            expert_row_index=row_index,
            expert_offsets=_exclusive_sum(reserved).int(),
            expert_counts=counts.int(),
            route_weights=_put(routes.weight, place, capacity),
            route_src_rank=_put(routes.src_rank, place, capacity),
            route_src_token_idx=_put(routes.src_token_idx, place, capacity),
            route_k=_put(routes.k, place, capacity),
            expert_x=_expert_rows(recv_x, row_index, layout, num_local_experts),
            expert_x_scales=_expert_rows(recv_x_scales, row_index, layout, num_local_experts),
        )

    return [receive(rank) for rank in range(len(x))]


@dataclass
class _Routes:
    """The routes to one rank's experts, ordered by (expert, source rank, token, k)."""

    expert: Tensor  # local index
    src_rank: Tensor
    src_token_idx: Tensor
    k: Tensor
    weight: Tensor


def _routes_to(rank: int, num_local_experts: int, topk_idx: list[Tensor], topk_weights: list[Tensor]) -> _Routes:
    first_expert = rank * num_local_experts
    per_source = []
    for src_rank, (idx, weights) in enumerate(zip(topk_idx, topk_weights, strict=True)):
        expert = idx.long() - first_expert
        token, k = ((expert >= 0) & (expert < num_local_experts)).nonzero(as_tuple=True)
        source = torch.full_like(token, src_rank)
        per_source.append((expert[token, k], source, token, k, weights[token, k]))
    expert, *others = (torch.cat(values) for values in zip(*per_source, strict=True))
    order = torch.argsort(expert, stable=True)
    return _Routes(expert[order], *(values[order] for values in others))


def _space(layout: str, counts: Tensor, num_rows: int, num_topk: int, expert_alignment: int) -> tuple[Tensor, int]:
    """How many positions each local expert takes, [E_local], and how many there are."""
    if layout == "masked":
        if counts.max() > num_rows:
            raise ValueError(f"an expert has {counts.max()} routes, 'masked' holds {num_rows}")
        return torch.full_like(counts, num_rows), len(counts) * num_rows
    if layout == "expert_major":
        reserved = (counts + expert_alignment - 1) // expert_alignment * expert_alignment
        return reserved, num_rows * num_topk + len(counts) * (expert_alignment - 1)
    return counts, num_rows * num_topk


def _exclusive_sum(counts: Tensor) -> Tensor:
    """[n] -> [n + 1]: 0, c0, c0 + c1, ..., total."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _land(x: list[Tensor], landed: Tensor) -> Tensor:
    recv_x = x[0].new_zeros(len(x), len(landed) // len(x), x[0].shape[1])
    for src_rank, rows in enumerate(x):
        recv_x[src_rank, : len(rows)] = rows
    recv_x = recv_x.flatten(0, 1)
    recv_x.view(torch.uint8)[~landed] = 0  # as bytes: torch cannot mask fp8
    return recv_x


def _put(values: Tensor, place: Tensor, capacity: int, empty: int = 0) -> Tensor:
    dtype = values.dtype if values.is_floating_point() else torch.int32
    out = torch.full((capacity,), empty, dtype=dtype, device=values.device)
    out[place] = values.to(dtype)
    return out


def _expert_rows(rows: Tensor | None, row_index: Tensor, layout: str, num_local_experts: int) -> Tensor | None:
    """Copies of `rows` in the order of `row_index`, zero where it is -1; "rows" copies nothing."""
    if rows is None or layout == "rows":
        return None
    copies = rows.view(torch.uint8)[row_index.clamp(min=0).long()]
    copies[row_index < 0] = 0
    copies = copies.view(rows.dtype)
    return copies.unflatten(0, (num_local_experts, -1)) if layout == "masked" else copies


# --------------------------------------------------------------------------------------------- fp8


def quantize_fp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x [T, H] -> fp8 [T, H] and fp32 scales [T, ceil(H / 128)]; x is about fp8 * scale.

    One scale per 128 columns; the last block of a row may be shorter.
    """
    num_tokens, hidden = x.shape
    num_blocks = -(-hidden // FP8_BLOCK)
    limit = torch.tensor(FP8_MAX[dtype], dtype=torch.float32, device=x.device)
    blocks = torch.zeros(num_tokens, num_blocks * FP8_BLOCK, dtype=torch.float32, device=x.device)
    blocks[:, :hidden] = x
    blocks = blocks.unflatten(1, (num_blocks, FP8_BLOCK))
    amax = blocks.abs().amax(dim=2, keepdim=True).clamp(min=1e-12)
    scaled = (blocks * (limit / amax)).clamp(-limit, limit)
    return scaled.flatten(1)[:, :hidden].contiguous().to(dtype), (amax / limit).squeeze(2)


def quantize_fp8_weights(w: Tensor, halves: int = 1, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """w [E, N, H] -> fp8 [E, N, H] and fp32 scales [E, halves * ceil(N / halves / 128), ceil(H / 128)], one per 128 x 128.

    halves=2: gate and up, whose rows do not share scales.
    """
    limit = FP8_MAX[dtype]
    values, scales = [], []
    for half in w.float().chunk(halves, dim=1):
        _, rows, columns = half.shape
        padded = torch.nn.functional.pad(half, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
        blocks = padded.unflatten(2, (-1, FP8_BLOCK)).unflatten(1, (-1, FP8_BLOCK))
        scale = blocks.abs().amax(dim=(2, 4), keepdim=True).clamp(min=1e-12) / limit
        values.append((blocks / scale).clamp(-limit, limit).flatten(3, 4).flatten(1, 2)[:, :rows, :columns])
        scales.append(scale[:, :, 0, :, 0])
    return torch.cat(values, dim=1).to(dtype), torch.cat(scales, dim=1).contiguous()


def dequantize_fp8(x: Tensor, x_scales: Tensor) -> Tensor:
    """fp8 rows and their scales back to fp32."""
    return x.float() * x_scales.repeat_interleave(FP8_BLOCK, dim=1)[:, : x.shape[1]]


# ----------------------------------------------------------------------------------------- combine


def combine(
    y: list[Tensor],
    handles: list[Dispatched],
    presummed: bool = False,
    wires: Sequence[Callable[[Tensor], Tensor]] | None = None,
) -> list[Tensor]:
    """y of each rank, one row per position -> out [T, H] of each rank, the sum of weight * y.

    - The rank that owns the experts sums weight * y of a token in fp32, from zero, k ascending
      (each product is rounded to fp32 first), and rounds the sum to y's dtype: the row it sends.
    - The token's rank sums the rows of all owners in fp32, from zero, ranks ascending, and rounds
      once more.

    With `presummed` the caller has done the first step: y has the same rows as recv_x. wires: for each rank what other ranks
    receive, float32, of the rows that it sends; None: the rows themselves.
    """
    sent = y if presummed else [_sum_routes(*pair) for pair in zip(y, handles, strict=True)]
    combined = []
    for rank, mine in enumerate(handles):
        out = torch.zeros(mine.num_tokens, y[0].shape[-1], dtype=torch.float32, device=y[0].device)
        for src_rank, (rows, owner) in enumerate(zip(sent, handles, strict=True)):
            first = rank * (len(owner.landed) // len(handles))
            my_rows = slice(first, first + mine.num_tokens)
            has_row = owner.landed[my_rows]
            arrived = rows[my_rows][has_row].float()
            out[has_row] += arrived if wires is None or src_rank == rank else wires[src_rank](arrived)
        combined.append(out.to(y[0].dtype))
    return combined


def _sum_routes(y: Tensor, handle: Dispatched) -> Tensor:
    """y [capacity, H] or [E_local, rows, H] -> one weighted sum per row of recv_x, in y's dtype."""
    y = y.reshape(-1, y.shape[-1])
    out = torch.zeros(len(handle.landed), y.shape[1], dtype=torch.float32, device=y.device)
    holds_route = handle.expert_row_index >= 0
    for k in handle.route_k[holds_route].unique():  # ascending
        # No row occurs twice below: a token has one route per k.
        place = (holds_route & (handle.route_k == k)).nonzero().squeeze(1)
        row = handle.expert_row_index[place].long()
        out[row] += handle.route_weights[place, None] * y[place].float()
    return out.to(y.dtype)


# --------------------------------------------------------------------------------------- MoE layer


def moe_layer(x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """The layer with all its experts, for tokens x [T, H] of any rank.

    w_gate_up [E, 2 * I, H]: the gate's rows, then the up projection's; w_down [E, H, I].
    Matrix products in x's dtype, the weighted sum in fp32 (fp64 when x is fp64).
    """
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for expert in range(len(w_down)):
        token, k = (topk_idx == expert).nonzero(as_tuple=True)
        y = swiglu(x[token], w_gate_up[expert], w_down[expert]).to(out.dtype)
        if topk_weights is not None:
            y = y * topk_weights[token, k, None].to(out.dtype)
        out.index_add_(0, token, y)
    return out.to(x.dtype)


def swiglu(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """One expert: x [n, H] -> (silu(x @ gate.T) * (x @ up.T)) @ down.T."""
    gate, up = (x @ w_gate_up.T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ w_down.T
