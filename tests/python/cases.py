"""Random configurations of dispatch and combine, the data for them, and bitwise comparison.

A Case is determined by its seed alone, its data by the Case alone, so every rank, thread or
process, makes the same inputs and expectations without communication. A row's content is a formula of
(source rank, token, column), so a misplaced row reveals its origin.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import line_codecs
import torch
from torch import Tensor

from moe_a2a import reference

MAX_LL_SUM_BYTES = 3 << 20  # MoeConfig::kMaxLlSumBytes
ROUTE_LISTS = ("expert_row_index", "route_weights", "route_src_rank", "route_src_token_idx")
HIDDENS = (1, 2, 7, 8, 16, 33, 64, 100, 127, 128, 129, 257, 384, 512, 1000, 2048, 2880, 7168)
ROUTINGS = (
    "random", "random", "distinct", "distinct",
    "skewed", "one_expert", "one_rank", "dropped", "same",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One dispatch and combine."""

    seed: int
    num_tokens: tuple[int, ...]  # per rank
    num_max_tokens_per_rank: int
    routing: str
    idx_dtype: torch.dtype
    with_weights: bool
    row_type: str  # "plain", "fp8" (rows and scales from the caller) or "quantized"
    layout: str
    expert_alignment: int
    presummed: bool
    wires: tuple[str | None, ...]  # of the combine, per rank
    halves: bool  # dispatch_send ... combine_recv instead of dispatch, combine
    again: bool  # a second dispatch, of other rows, with the first one's handle
    release: bool  # release the handle instead of combining
    strided: bool  # rows of x and y have gaps between them, filled with NaN
    scale: float  # of the values, so that subnormal and overflowing sums round too


@dataclass(frozen=True)
class Case:
    seed: int
    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    num_max_tokens_per_rank: int
    dtype: torch.dtype
    num_blocks: int
    num_buffers: int
    num_max_ll_tokens: int
    calls: tuple[Call, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ExpertParallel."""
        names = "num_experts num_topk hidden num_max_tokens_per_rank dtype num_buffers num_max_ll_tokens".split()
        return {name: getattr(self, name) for name in names}


def make_case(
    seed: int,
    num_ranks: int | None = None,
    num_calls: int | None = None,
    num_max_tokens: int | None = None,
    most_ranks: int = 8,
) -> Case:
    """Arguments that are None are drawn."""
    rng = random.Random(seed)
    num_ranks = num_ranks or rng.randint(1, most_ranks)
    hidden = rng.choice(HIDDENS) if rng.random() < 0.7 else rng.randint(1, 600)
    if num_max_tokens is None:
        # Bytes dominate the cost, so large rows come with few tokens.
        limit = max(1, 120_000 // (hidden * num_ranks))
        num_max_tokens = min(limit, rng.choice((1, 2, 3, 5, 8, 17, 40, 64, 130, 300, 1200)))
    num_topk = rng.choice((1, 2, 3, 4, 6, 8, 16))
    num_calls = num_calls or rng.randint(1, 3)
    num_experts = num_ranks * rng.choice((1, 2, 3, 4, 5, 8, 16, 32))
    most_ll_tokens = min(num_max_tokens, 256, 4096 // (num_ranks * num_topk))
    return Case(
        seed=seed,
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=num_topk,
        hidden=hidden,
        num_max_tokens_per_rank=num_max_tokens,
        dtype=rng.choice((torch.float32, torch.float16, torch.bfloat16)),
        num_blocks=rng.choice((0, 1, 2, 3, 4, 20)),  # 0: as many as users get
        num_buffers=rng.randint(1, 3),
        num_max_ll_tokens=rng.choice((0, most_ll_tokens, rng.randint(0, most_ll_tokens))),
        calls=tuple(_make_call(rng, num_ranks, num_max_tokens) for _ in range(num_calls)),
    )


def _make_call(rng: random.Random, num_ranks: int, num_max_tokens: int) -> Call:
    if num_max_tokens > 1 and rng.random() < 0.4:
        num_max_tokens = 1 << rng.randrange((num_max_tokens - 1).bit_length())
    tokens_style = rng.random()
    if tokens_style < 0.6:
        num_tokens = [rng.randint(0, num_max_tokens) for _ in range(num_ranks)]
    elif tokens_style < 0.75:
        num_tokens = [num_max_tokens] * num_ranks
    elif tokens_style < 0.95:
        num_tokens = [rng.choice((0, 0, 1, num_max_tokens)) for _ in range(num_ranks)]
    else:
        num_tokens = [0] * num_ranks
    routing = rng.choice(ROUTINGS)
    layouts = ["rows", "rows", "expert_major"]
    if routing == "distinct":  # other routings may give an expert more routes than "masked" holds
        layouts += ["masked", "masked"]
    return Call(
        seed=rng.randrange(1 << 30),
        num_tokens=tuple(num_tokens),
        num_max_tokens_per_rank=num_max_tokens,
        routing=routing,
        idx_dtype=rng.choice((torch.int32, torch.int64)),
        with_weights=rng.random() < 0.75,
        row_type=rng.choice(("plain", "plain", "plain", "fp8", "quantized")),
        layout=rng.choice(layouts),
        expert_alignment=rng.choice((1, 2, 3, 8, 16, 64, 128)),
        presummed=rng.random() < 0.2,
        wires=line_codecs.draw_wires(rng, num_ranks),
        halves=rng.random() < 0.4,
        again=rng.random() < 0.15,
        release=rng.random() < 0.1,
        strided=rng.random() < 0.25,
        scale=2.0 ** rng.choice((0, 0, 0, -17, 12, -130, 124)),
    )


# -------------------------------------------------------------------------------------------- data


def formula(seed: int, src_rank: int, rows: Tensor | int, hidden: int) -> Tensor:
    """fp32 [rows, hidden] in [-4, 4): a hash of (seed, src_rank, row, column)."""
    row = torch.arange(rows) if isinstance(rows, int) else rows
    mixed = (seed + 1) * 0x9E3779B1 + src_rank * 0x85EBCA77 + row.long()[:, None] * 0xC2B2AE3D
    mixed = (mixed + torch.arange(hidden)[None, :] * 0x27D4EB2F) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    return (mixed ^ (mixed >> 13)).remainder(1 << 20).float() / (1 << 17) - 4


def make_topk_idx(case: Case, call: Call, generator: torch.Generator) -> list[Tensor]:
    def random_ids(shape: tuple[int, int], low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    num_local_experts = case.num_experts // case.num_ranks
    favourite = int(random_ids((1, 1), 0, case.num_experts))
    topk_idx = []
    for tokens in call.num_tokens:
        shape = (tokens, case.num_topk)
        if call.routing == "distinct":
            idx = torch.rand(tokens, case.num_experts, generator=generator).argsort(dim=1)
            idx = idx[:, : case.num_topk]
            missing = case.num_topk - idx.shape[1]
            idx = torch.cat([idx, torch.full((tokens, missing), -1)], dim=1)
        elif call.routing == "skewed":
            idx = (random_ids(shape, 0, case.num_experts) * torch.rand(shape, generator=generator)).long()
        elif call.routing == "one_expert":
            idx = torch.full(shape, favourite)
        elif call.routing == "one_rank":
            first = favourite // num_local_experts * num_local_experts
            idx = random_ids(shape, first, first + num_local_experts)
        elif call.routing == "dropped":
            idx = torch.full(shape, -1)
        elif call.routing == "same":
            idx = random_ids((tokens, 1), 0, case.num_experts).expand(shape).contiguous()
        else:
            idx = random_ids(shape, -1, case.num_experts)
        if call.seed % 3 == 0:
            idx = idx.masked_fill(torch.rand(shape, generator=generator) < 0.3, -1)
        topk_idx.append(idx.to(call.idx_dtype))
    return topk_idx


@dataclass
class Data:
    """Inputs and expectations of one call, all ranks."""

    case: Case
    call: Call
    x: list[Tensor]  # as passed to dispatch
    x_scales: list[Tensor] | None
    topk_idx: list[Tensor]
    topk_weights: list[Tensor] | None
    handles: list[reference.Dispatched]
    y: list[Tensor]  # NaN wherever nothing may read
    combined: list[Tensor]
    layout: dict[str, Any]  # arguments of every dispatch of this call
    quantize: str | None
    _placed: dict[Any, OnRank] = field(default_factory=dict)

    def on(self, rank: int, device: torch.device) -> OnRank:
        """The tensors of one rank, on its device."""
        if (rank, device) not in self._placed:

            def place(values: list[Tensor] | None, rows: bool = False) -> Tensor | None:
                if values is None or device.type == "cpu":
                    return None if values is None else values[rank]
                moved = values[rank].contiguous().to(device)  # `to` closes the gaps between rows
                return apart(moved) if rows and self.call.strided else moved

            self._placed[rank, device] = OnRank(
                place(self.x, rows=True), place(self.x_scales, rows=True), place(self.topk_idx),
                place(self.topk_weights), place(self.y, rows=True),
            )  # fmt: skip
        return self._placed[rank, device]


@dataclass
class OnRank:
    """One rank's arguments to dispatch and combine."""

    x: Tensor
    x_scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    y: Tensor


def make_data(case: Case, call: Call, rows_seed: int | None = None) -> Data:
    """`rows_seed` draws other rows for the same routing."""
    generator = torch.Generator().manual_seed(call.seed)
    rows_seed = call.seed if rows_seed is None else rows_seed
    topk_idx = make_topk_idx(case, call, generator)
    topk_weights = None
    if call.with_weights:
        topk_weights = [torch.randn(idx.shape, generator=generator) for idx in topk_idx]
    x = [make_rows(case, call, rows_seed, rank, tokens) for rank, tokens in enumerate(call.num_tokens)]
    x_scales, quantize = None, None
    if call.row_type == "fp8":
        pairs = [reference.quantize_fp8(rows) for rows in x]
        x, x_scales = [q for q, _ in pairs], [scales for _, scales in pairs]
    elif call.row_type == "quantized":
        quantize = torch.float8_e4m3fn
    layout: dict[str, Any] = {"layout": call.layout}
    if call.layout == "expert_major":
        layout["expert_alignment"] = call.expert_alignment
    handles = reference.dispatch(
        x, topk_idx, topk_weights,
        num_experts=case.num_experts, num_max_tokens_per_rank=call.num_max_tokens_per_rank,
        x_scales=x_scales, quantize=quantize, **layout,
    )  # fmt: skip
    y = [make_y(case, call, rank, handle) for rank, handle in enumerate(handles)]
    combined = reference.combine(y, handles, presummed=call.presummed, wires=make_wires(case, call))
    if call.strided:
        x, y = [apart(rows) for rows in x], [apart(rows) for rows in y]
        x_scales = None if x_scales is None else [apart(scales) for scales in x_scales]
    return Data(
        case, call, x, x_scales, topk_idx, topk_weights, handles, y, combined,
        layout=layout, quantize=None if quantize is None else "fp8",
    )  # fmt: skip


def make_wires(case: Case, call: Call) -> list[Callable[[Tensor], Tensor]]:
    """What others receive of each rank's sums; those that return as LL words are not coded."""
    most_tokens = max(call.num_tokens)
    sum_bytes = most_tokens * (case.num_ranks - 1) * case.hidden * case.dtype.itemsize
    is_ll = 0 < case.num_max_ll_tokens >= most_tokens and sum_bytes <= MAX_LL_SUM_BYTES
    return [line_codecs.wire(None if is_ll else codec) for codec in call.wires]


def make_rows(case: Case, call: Call, seed: int, rank: int, rows: Tensor | int) -> Tensor:
    values = formula(seed, rank, rows, case.hidden) * call.scale
    limit = torch.finfo(case.dtype).max
    return values.clamp(-limit, limit).to(case.dtype)


def make_y(case: Case, call: Call, rank: int, handle: reference.Dispatched) -> Tensor:
    used = handle.landed if call.presummed else handle.expert_row_index >= 0
    y = torch.full((len(used), case.hidden), torch.nan, dtype=case.dtype)
    y[used] = make_rows(case, call, call.seed ^ 0x55, rank, used.nonzero().squeeze(1))
    if call.layout == "masked" and not call.presummed:
        y = y.unflatten(0, (case.num_experts // case.num_ranks, -1))
    return y


def apart(rows: Tensor) -> Tensor:
    """The same rows with three elements of 0xff bytes (NaN in every format) after each; 3-d tensors are unchanged."""
    if rows.ndim != 2:
        return rows
    wide = torch.empty(rows.shape[0], rows.shape[1] + 3, dtype=rows.dtype, device=rows.device)
    wide.view(torch.uint8).fill_(0xFF)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


# -------------------------------------------------------------------------------------- comparison


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(values: Tensor) -> Tensor:
    values = values.detach().contiguous()
    return values.view(torch.uint8) if values.ndim else values


def assert_same(name: str, got: Tensor, expected: Tensor, any_nan: bool = False) -> None:
    """Bit for bit; with `any_nan` all NaN are equal (the bits of inf - inf are undefined)."""
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, f"{name}: {got.dtype}, expected {expected.dtype}"
    if any_nan:
        got, expected = (v.masked_fill(v.isnan(), torch.nan) for v in (got, expected))
    if not same_bits(got, expected):
        different = (_bytes(got) != _bytes(expected)).nonzero()
        first = tuple(different[0].tolist())
        at = (*first[:-1], first[-1] // got.element_size())
        raise AssertionError(
            f"{name}: {len(different)} bytes differ, first at {at}: {got[at].item()}, expected {expected[at].item()}"
        )


def assert_rows_from(data: Data, got: Tensor, expected: Tensor, landed: Tensor) -> None:
    """Landed rows of recv_x; the error for a wrong row names the token that it holds."""
    for row in landed.nonzero().squeeze(1).tolist():
        if same_bits(got[row], expected[row]):
            continue
        limit, is_quantized = data.call.num_max_tokens_per_rank, data.call.row_type == "quantized"
        origins = [
            (src_rank, token)
            for src_rank, x in enumerate(data.x)
            for token, sent in enumerate(reference.quantize_fp8(x)[0] if is_quantized else x)
            if same_bits(sent, got[row])
        ]
        wrong = int((got[row].float() != expected[row].float()).sum())
        raise AssertionError(
            f"row {row} should hold (rank {row // limit}, token {row % limit}); "
            + (f"it holds (rank, token) {origins[:4]}" if origins else f"{wrong} wrong columns")
        )


def check_dispatch(handle: Any, data: Data, rank: int) -> None:
    expected, layout = data.handles[rank], data.call.layout
    handle = on_cpu(handle, expected)
    holds_route = expected.expert_row_index >= 0
    num_places = int(expected.expert_offsets[-1])
    assert_same("expert_offsets", handle.expert_offsets, expected.expert_offsets)
    assert_same("expert_counts", handle.expert_counts, expected.expert_counts)
    for name in ROUTE_LISTS:
        got, want = getattr(handle, name), getattr(expected, name)
        assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
        assert_same(name, got[holds_route], want[holds_route])
    assert handle.recv_x.shape == expected.recv_x.shape
    if not same_bits(handle.recv_x[expected.landed], expected.recv_x[expected.landed]):
        assert_rows_from(data, handle.recv_x, expected.recv_x, expected.landed)
    if expected.recv_x_scales is not None:
        landed = expected.landed
        assert_same("recv_x_scales", handle.recv_x_scales[landed], expected.recv_x_scales[landed])
    if layout == "expert_major":
        padding = expected.expert_row_index[:num_places] < 0
        assert (handle.expert_row_index[:num_places][padding] == -1).all(), "padding's row index"
        assert_same("expert_x", handle.expert_x[:num_places], expected.expert_x[:num_places])
    elif layout == "masked":
        shape = expected.expert_x.shape
        assert handle.expert_x.shape == shape
        in_use = holds_route.view(shape[:2])
        assert_same("expert_x", handle.expert_x[in_use], expected.expert_x[in_use])
    if layout != "rows" and expected.expert_x_scales is not None:
        used = holds_route.view(expected.expert_x.shape[:-1])
        assert_same("expert_x_scales", handle.expert_x_scales[used], expected.expert_x_scales[used])


def on_cpu(handle: Any, expected: reference.Dispatched) -> Any:
    """The handle's comparable contents; those that the reference also has are copied from a GPU."""
    if handle.expert_offsets.device.type == "cpu":
        return handle
    names = ["expert_offsets", "expert_counts", "recv_x", *ROUTE_LISTS]
    names += [name for name in ("recv_x_scales", "expert_x", "expert_x_scales") if getattr(expected, name) is not None]
    return SimpleNamespace(**{name: getattr(handle, name).cpu() for name in names})


def poison_past_the_end(handle: Any, expected: reference.Dispatched) -> None:
    """Positions past expert_offsets[-1] must never be read: fill them with values that would be noticed."""
    end = int(expected.expert_offsets[-1])
    handle.expert_row_index[end:] = 0x7FFFFFFF
    handle.route_weights[end:] = torch.nan
    handle.route_src_rank[end:] = 0x7FFFFFFF
    handle.route_src_token_idx[end:] = 0x7FFFFFFF
