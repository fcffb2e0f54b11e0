"""grouped_gemm() of float8 against fp64 of the dequantised operands: any routing, any sizes, float8 results."""

import on_device
import pytest
import torch
import torch.nn.functional as F
from gemm_cases import FEW_AND_MANY, ROUTINGS, gathered

import moe_a2a
from moe_a2a.devices import float8_dtype
from moe_a2a.reference import FP8_MAX, quantize_fp8

pytestmark = [on_device.TESTS, pytest.mark.usefixtures("fresh_memory_is_poisoned")]

DEVICE = torch.device(on_device.NAME)
# [hidden, columns of both halves together]: the least, tails of every kind, whole blocks of 128, more than a tile
SIZES = [(16, 32), (48, 160), (128, 256), (208, 288), (384, 544), (1040, 1056)]


class Case:
    """Random operands, on the CPU; `call()` runs them on the device."""

    def __init__(self, counts, hidden, columns, gated, seed, gather=True):
        torch.manual_seed(seed)
        self.type = float8_dtype(DEVICE)
        num_routes, experts, halves = sum(counts), len(counts), 2 if gated else 1
        num_rows = max(num_routes // 2, 3) if gather else num_routes
        self.x, self.x_scales = quantize_fp8(torch.randn(num_rows, hidden), self.type)
        self.w = (10 * torch.randn(experts, columns, hidden)).to(self.type)
        blocks = halves * -(-columns // halves // 128)
        self.w_scales = (torch.rand(experts, blocks, -(-hidden // 128)) + 0.5) / (5 * hidden**0.5)
        self.offsets = torch.tensor([0, *counts]).cumsum(0).int()
        self.row_index = torch.randint(-1, num_rows, (num_routes,)).int() if gather else None
        self.gated = gated

    def call(self, **epilogue):
        tensors = (self.x, self.row_index, self.offsets, self.w)
        on = [None if t is None else t.to(DEVICE) for t in tensors]
        activation = {"activation": "swiglu"} if self.gated else {}
        scales = {"x_scales": self.x_scales.to(DEVICE), "w_scales": self.w_scales.to(DEVICE)}
        return moe_a2a.grouped_gemm(*on, **{**activation, **scales, **epilogue})

    def exact(self):
        hidden = self.x.shape[1]
        x = self.x.double() * self.x_scales.double().repeat_interleave(128, dim=1)[:, :hidden]
        rows = gathered(x, self.row_index)
        halves = 2 if self.gated else 1
        per_half = self.w.shape[1] // halves
        scales = self.w_scales.double().repeat_interleave(128, dim=2)[..., :hidden].chunk(halves, dim=1)
        scales = torch.cat([s.repeat_interleave(128, dim=1)[:, :per_half] for s in scales], dim=1)
        w = self.w.double() * scales
        bounds = self.offsets.tolist()
        y = torch.cat([rows[a:b] @ w[e].t() for e, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))])
        if not self.gated:
            return y
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up


def assert_rounded(out, exact):
    """At most twice the rounding error of the exact values."""
    error, rounding = (out.cpu().double() - exact).norm(), (exact.to(out.dtype).double() - exact).norm()
    assert error <= 2 * rounding, f"error {error}, of rounding {rounding}"


def assert_quantized(y, scales, exact):
    """As exact as quantising the exact values, with some tolerance: a sum between two float8 values may round either way."""
    columns = exact.shape[1]
    assert y.dtype == float8_dtype(DEVICE) and list(y.shape) == list(exact.shape)
    assert list(scales.shape) == [exact.shape[0], -(-columns // 128)]
    q, q_scales = quantize_fp8(exact.float(), y.dtype)

    def error(values, factors):
        return (values.double() * factors.double().repeat_interleave(128, dim=1)[:, :columns] - exact).norm()

    # A scale is one value, the largest of its block. sm_90 sums products of float8 with 13 bits, and terms may cancel.
    torch.testing.assert_close(scales.cpu(), q_scales, rtol=1e-2 if on_device.IS_GPU else 2e-3, atol=0)
    assert error(y.cpu(), scales.cpu()) <= 1.01 * error(q, q_scales) + 1e-4 * exact.norm()


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "swiglu"])
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "in_place"])
@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
def test_any_routing(counts, gather, gated, session_seed):
    case = Case(counts, 208, 288, gated, session_seed, gather)
    out = case.call()
    assert out.dtype == torch.bfloat16
    assert_rounded(out, case.exact())


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "swiglu"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_size(size, gated, out_dtype, session_seed):
    case = Case(ROUTINGS["random"], *size, gated, session_seed)
    # fp16 resolves more than sm_90's sums of float8 products, which keep about 13 bits of the largest product.
    exact = case.exact()
    out = case.call(out_dtype=out_dtype)
    assert out.dtype == out_dtype
    if out_dtype == torch.bfloat16:
        assert_rounded(out, exact)
    else:
        assert (out.cpu().double() - exact).norm() <= 2e-3 * exact.norm()


@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
def test_quantized_output_of_any_routing(counts, session_seed):
    case = Case(counts, 208, 288, True, session_seed)
    assert_quantized(*case.call(quantize_output=True), case.exact())


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_quantized_output_of_any_size(size, session_seed):
    case = Case(ROUTINGS["random"], *size, True, session_seed)
    assert_quantized(*case.call(quantize_output=True), case.exact())


def test_clamped_and_shifted_swiglu_is_quantized_too(session_seed):
    case = Case(ROUTINGS["random"], 384, 512, True, session_seed)
    epilogue = {"limit": 1.5, "alpha": 1.702, "up_shift": 1.0}
    y, scales = case.call(**epilogue, quantize_output=True)
    plain = case.call(**epilogue, out_dtype=torch.float16).cpu().double()
    error = (y.cpu().double() * scales.cpu().double().repeat_interleave(128, dim=1) - plain).abs()
    assert (error <= plain.abs() / 15 + scales.cpu().double().repeat_interleave(128, dim=1)).all()


def test_a_product_of_a_quantized_product(session_seed):
    """GEMM1 with SwiGLU, then GEMM2 on its float8 result, as in a layer."""
    first = Case(ROUTINGS["random"], 384, 512, True, session_seed)
    y, y_scales = first.call(quantize_output=True)
    second = Case(ROUTINGS["random"], 256, 384, False, session_seed + 1, gather=False)
    second.x, second.x_scales = y.cpu(), y_scales.cpu()
    assert_rounded(second.call(), second.exact())


def test_scales_of_missing_rows_are_not_read_into_the_sums(session_seed):
    """Rows of x that nobody names, and their scales, hold arbitrary data; -1 is a row of zeros."""
    case = Case(ROUTINGS["random"], 208, 288, False, session_seed)
    used = torch.zeros(len(case.x), dtype=torch.bool)
    used[case.row_index[case.row_index >= 0].long()] = True
    used[0] = False
    case.row_index[case.row_index == 0] = -1
    exact = case.exact()
    case.x_scales[~used] = float("nan")
    case.x.view(torch.uint8)[~used] = 0x7F
    assert_rounded(case.call(), exact)


def test_rows_and_scales_may_lie_apart(session_seed):
    """As in recv_x and recv_x_scales."""
    case = Case(ROUTINGS["random"], 208, 288, True, session_seed)
    expected = case.call()
    wide = torch.full((len(case.x), 256), 0x7F, dtype=torch.uint8)
    wide[:, :208] = case.x.view(torch.uint8)
    scales = torch.full((len(case.x), 7), float("nan"))
    scales[:, :2] = case.x_scales
    out = moe_a2a.grouped_gemm(
        wide.to(DEVICE).view(case.type)[:, :208],
        case.row_index.to(DEVICE),
        case.offsets.to(DEVICE),
        case.w.to(DEVICE),
        "swiglu",
        x_scales=scales.to(DEVICE)[:, :2],
        w_scales=case.w_scales.to(DEVICE),
    )
    assert torch.equal(out, expected)


@on_device.cpu_only
def test_scales_may_lie_2_to_the_32_apart(tmp_path):
    """Regression: they were refused, for offsets of 32 bits that the kernels no longer have. In a sparse file."""
    distance, type_ = 2**32, float8_dtype(DEVICE)
    memory = torch.from_file(str(tmp_path / "scales"), shared=True, size=distance + 1, dtype=torch.float32)
    memory[0], memory[distance] = 1, 2
    out = moe_a2a.grouped_gemm(
        torch.ones(2, 128).to(type_),
        None,
        torch.tensor([0, 2], dtype=torch.int32),
        torch.ones(1, 16, 128).to(type_),
        x_scales=memory.as_strided((2, 1), (distance, 1)),
        w_scales=torch.ones(1, 1, 1),
    )
    assert out.tolist() == [[128] * 16, [256] * 16]


def test_same_inputs_same_bits(session_seed):
    case = Case(ROUTINGS["random"], 384, 544, True, session_seed)
    first, scales = case.call(quantize_output=True)
    for _ in range(3):
        again = case.call(quantize_output=True)
        assert torch.equal(again[0].view(torch.uint8), first.view(torch.uint8)) and torch.equal(again[1], scales)


@pytest.mark.parametrize("epilogue", [{}, {"quantize_output": True}], ids=["sums", "quantized"])
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "in_place"])
def test_a_row_does_not_depend_on_the_others(gather, epilogue, session_seed):
    """The same bits, whether its expert has few rows or many."""
    case = Case(FEW_AND_MANY, 384, 544, bool(epilogue), session_seed, gather)
    case.w, case.w_scales = (t[:1].expand(len(t), -1, -1).contiguous() for t in (case.w, case.w_scales))
    apart = case.call(**epilogue)
    case.w, case.w_scales, case.offsets = case.w[:1], case.w_scales[:1], case.offsets[[0, -1]]
    together = case.call(**epilogue)
    for a, b in zip(apart, together, strict=True) if epilogue else [(apart, together)]:
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_every_value_of_float8_is_exact():
    """Including subnormals and NaN: conversion changes none."""
    values = torch.arange(256, dtype=torch.uint8).view(float8_dtype(DEVICE))
    finite = values.double().isfinite()
    x = torch.zeros(256, 16, dtype=torch.uint8)
    x[:, 0] = values.view(torch.uint8)
    w = torch.zeros(1, 16, 16).to(values.dtype)
    w[0, :, 0] = 1
    out = moe_a2a.grouped_gemm(
        x.view(values.dtype).to(DEVICE),
        None,
        torch.tensor([0, 256], dtype=torch.int32, device=DEVICE),
        w.to(DEVICE),
        x_scales=torch.ones(256, 1, device=DEVICE),
        w_scales=torch.ones(1, 1, 1, device=DEVICE),
    ).cpu()
    assert torch.equal(out[finite, 3].double(), values[finite].double())
    assert out[~finite].isnan().all() and values.double()[finite].abs().max() == FP8_MAX[values.dtype]


def dispatched(group, seed):
    hidden, intermediate, experts = 208, 144, 3
    with moe_a2a.ExpertParallel(
        group, num_experts=experts, num_topk=2, hidden=hidden, num_max_tokens_per_rank=20, timeout=20
    ) as ep:
        x = torch.randn(11, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16().to(ep.device)
        topk_idx = torch.tensor([[0, 1], [2, 0], [1, 2]] * 4)[:11].to(ep.device)
        handle = ep.dispatch(x, topk_idx, torch.ones(11, 2, device=ep.device), quantize="fp8")
        case = Case([handle.num_routes, 0, 0], hidden, 2 * intermediate, True, seed)
        rows = handle.expert_row_index[: handle.num_routes].contiguous()
        out = moe_a2a.grouped_gemm(
            handle.recv_x,
            rows,
            handle.expert_offsets,
            case.w.to(ep.device),
            "swiglu",
            x_scales=handle.recv_x_scales,
            w_scales=case.w_scales.to(ep.device),
        )
        case.x, case.x_scales = handle.recv_x.cpu(), handle.recv_x_scales.cpu()
        case.row_index, case.offsets = rows.cpu(), handle.expert_offsets.cpu()
        unused = torch.ones(len(case.x), dtype=torch.bool)
        unused[case.row_index.long()] = False
        case.x_scales = torch.where(unused[:, None], 0.0, case.x_scales)
        case.x = case.x.contiguous()
        case.x.view(torch.uint8)[unused] = 0
        assert_rounded(out, case.exact())
        handle.release()


def test_takes_what_a_float8_dispatch_brought(session_seed):
    on_device.run(1, dispatched, session_seed)


# ---- what is refused


def refused(error, message, **change):
    case = Case([3, 0, 5], 48, 64, True, 0)
    given = {
        "x": case.x,
        "w": case.w,
        "x_scales": case.x_scales,
        "w_scales": case.w_scales,
        "activation": "swiglu",
        **change,
    }
    on = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    with pytest.raises(error, match=message):
        moe_a2a.grouped_gemm(on.pop("x"), case.row_index.to(DEVICE), case.offsets.to(DEVICE), on.pop("w"), **on)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "x is float8 and x_scales or w_scales is None; pass both", {"x_scales": None}),
        (ValueError, "x is float8 and x_scales or w_scales is None", {"w_scales": None}),
        (ValueError, r"x_scales has shape \[4, 2\], expected \[4, 1\]", {"x_scales": torch.zeros(4, 2)}),
        (TypeError, "x_scales has dtype torch.float64", {"x_scales": torch.zeros(4, 1).double()}),
        (ValueError, r"w_scales has shape \[3, 1, 1\], expected \[3, 2, 1\]", {"w_scales": torch.zeros(3, 1, 1)}),
        (TypeError, "w has dtype torch.bfloat16, expected torch.float8", {"w": torch.zeros(3, 64, 48).bfloat16()}),
        (TypeError, "x has dtype .*float8_e5m2, expected", {"x": torch.zeros(4, 48).to(torch.float8_e5m2)}),
        (TypeError, "out_dtype is torch.float32, expected bfloat16 or float16", {"out_dtype": torch.float32}),
        (ValueError, "interleaved rows of float8 w", {"interleaved": True}),
        (
            ValueError,
            "out_dtype=torch.float16 with quantize_output=True",
            {"out_dtype": torch.float16, "quantize_output": True},
        ),
        (
            ValueError,
            "quantize_output supports only SwiGLU without bias",
            {"activation": "gelu", "gated": True, "quantize_output": True},
        ),
        (
            ValueError,
            "quantize_output supports only SwiGLU without bias",
            {"bias": torch.zeros(3, 64), "quantize_output": True},
        ),
    ],
)
def test_bad_arguments(error, message, change):
    refused(error, message, **change)


def test_scales_without_float8():
    x, w = torch.zeros(4, 48).bfloat16().to(DEVICE), torch.zeros(1, 64, 48).bfloat16().to(DEVICE)
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="x_scales or w_scales given with x that is not float8"):
        moe_a2a.grouped_gemm(x, None, offsets, w, x_scales=torch.zeros(4, 1, device=DEVICE))
    with pytest.raises(TypeError, match="out_dtype=torch.float16 differs from x"):
        moe_a2a.grouped_gemm(x, None, offsets, w, out_dtype=torch.float16)
    with pytest.raises(TypeError, match="quantize_output=True with x of torch.bfloat16"):
        moe_a2a.grouped_gemm(x, None, offsets, w, "swiglu", quantize_output=True)
