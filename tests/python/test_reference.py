"""The specification itself, on cases small enough to check by hand."""

import pytest
import torch

from moe_a2a import reference

# Two ranks, four experts (0, 1 on rank 0; 2, 3 on rank 1), top-2, at most three tokens per rank.
# A row is [source rank, token] + 1/2, so that it names its origin and none is zero.
X = [
    torch.tensor([[0.5, 0.5], [0.5, 1.5], [0.5, 2.5]]),
    torch.tensor([[1.5, 0.5], [1.5, 1.5]]),
]
TOPK_IDX = [
    torch.tensor([[0, 3], [1, 0], [-1, 2]]),
    torch.tensor([[3, 3], [-1, -1]]),
]
TOPK_WEIGHTS = [
    torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
    torch.tensor([[7.0, 8.0], [9.0, 10.0]]),
]
CONFIG = {"num_experts": 4, "num_max_tokens_per_rank": 3}


def dispatch(**options):
    return reference.dispatch(X, TOPK_IDX, TOPK_WEIGHTS, **CONFIG, **options)


def test_rows_land_at_source_rank_times_max_plus_token():
    rank0, rank1 = dispatch()
    zero = [0.0, 0.0]
    assert rank0.recv_x.tolist() == [[0.5, 0.5], [0.5, 1.5], zero, zero, zero, zero]
    assert rank0.landed.tolist() == [True, True, False, False, False, False]
    assert rank1.recv_x.tolist() == [[0.5, 0.5], zero, [0.5, 2.5], [1.5, 0.5], zero, zero]
    assert rank1.landed.tolist() == [True, False, True, True, False, False]
    assert rank0.recv_x_scales is None and rank0.expert_x is None
    assert (rank0.num_tokens, rank1.num_tokens) == (3, 2)


def test_routes_are_grouped_by_expert_in_source_token_k_order():
    rank0, rank1 = dispatch()
    empty = [-1] * 9  # the capacity is 2 ranks * 3 tokens * 2 choices
    assert rank0.expert_offsets.tolist() == [0, 2, 3]
    assert rank0.expert_counts.tolist() == [2, 1]
    assert rank0.expert_row_index.tolist() == [0, 1, 1] + empty
    assert rank0.route_weights[:3].tolist() == [1.0, 4.0, 3.0]
    assert rank0.route_src_token_idx[:3].tolist() == [0, 1, 1]
    assert rank0.route_k[:3].tolist() == [0, 1, 0]
    # Expert 2: token 2 of rank 0. Expert 3: token 0 of rank 0, then token 0 of rank 1 twice.
    assert rank1.expert_offsets.tolist() == [0, 1, 4]
    assert rank1.expert_row_index.tolist() == [2, 0, 3, 3] + empty[1:]
    assert rank1.route_weights[:4].tolist() == [6.0, 2.0, 7.0, 8.0]
    assert rank1.route_src_rank[:4].tolist() == [0, 0, 1, 1]
    assert rank1.route_src_token_idx[:4].tolist() == [2, 0, 0, 0]
    assert rank1.route_k[:4].tolist() == [1, 1, 0, 1]


def test_the_lists_have_the_dtypes_of_the_runtime():
    handle = dispatch()[0]
    for name in ("expert_row_index", "expert_offsets", "expert_counts"):
        assert getattr(handle, name).dtype == torch.int32
    for name in ("route_src_rank", "route_src_token_idx"):
        assert getattr(handle, name).dtype == torch.int32
    assert handle.route_weights.dtype == torch.float32


def test_expert_major_aligns_the_first_place_of_each_expert_and_pads_with_zeros():
    rank0, rank1 = dispatch(layout="expert_major", expert_alignment=4)
    assert rank0.expert_offsets.tolist() == [0, 4, 8]
    assert rank0.expert_counts.tolist() == [2, 1]
    assert len(rank0.expert_row_index) == 12 + 2 * 3
    assert rank0.expert_row_index[:8].tolist() == [0, 1, -1, -1, 1, -1, -1, -1]
    assert rank0.expert_x.shape == (18, 2)
    assert rank0.expert_x[:6].tolist() == [
        [0.5, 0.5],
        [0.5, 1.5],
        [0, 0],
        [0, 0],
        [0.5, 1.5],
        [0, 0],
    ]
    assert rank1.expert_row_index[:8].tolist() == [2, -1, -1, -1, 0, 3, 3, -1]
    assert rank1.expert_x[4:7].tolist() == [[0.5, 0.5], [1.5, 0.5], [1.5, 0.5]]


def test_expert_major_without_alignment_has_the_places_of_rows():
    for rows, major in zip(dispatch(), dispatch(layout="expert_major"), strict=True):
        assert torch.equal(rows.expert_offsets, major.expert_offsets)
        assert torch.equal(rows.expert_row_index, major.expert_row_index)


def test_masked_gives_every_expert_all_places():
    rank0, rank1 = dispatch(layout="masked")
    assert rank0.expert_x.shape == (2, 6, 2)
    assert rank0.expert_counts.tolist() == [2, 1]
    assert rank0.expert_offsets.tolist() == [0, 6, 12]
    assert rank0.expert_row_index.tolist() == [0, 1, -1, -1, -1, -1, 1, -1, -1, -1, -1, -1]
    assert rank0.expert_x[1, 0].tolist() == [0.5, 1.5]
    assert rank1.expert_counts.tolist() == [1, 3]
    assert rank1.expert_x[1, :3].tolist() == [[0.5, 0.5], [1.5, 0.5], [1.5, 0.5]]
    assert rank1.route_weights[6:9].tolist() == [2.0, 7.0, 8.0]


def test_masked_refuses_more_routes_than_places():
    x, idx = [torch.zeros(2, 1)], [torch.zeros(2, 2, dtype=torch.int32)]
    with pytest.raises(ValueError, match="4 routes, 'masked' holds 2"):
        reference.dispatch(x, idx, num_experts=1, num_max_tokens_per_rank=2, layout="masked")


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="layout='sorted'"):
        dispatch(layout="sorted")


@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64])
def test_weights_default_to_one(idx_dtype):
    idx = [i.to(idx_dtype) for i in TOPK_IDX]
    rank0, _ = reference.dispatch(X, idx, **CONFIG)
    assert rank0.route_weights[:3].tolist() == [1.0, 1.0, 1.0]


def test_no_tokens_anywhere():
    x = [torch.zeros(0, 2), torch.zeros(0, 2)]
    idx = [torch.zeros(0, 2, dtype=torch.int64)] * 2
    handles = reference.dispatch(x, idx, **CONFIG)
    assert handles[1].expert_offsets.tolist() == [0, 0, 0]
    y = [torch.full((12, 2), torch.nan)] * 2
    assert [tuple(out.shape) for out in reference.combine(y, handles)] == [(0, 2), (0, 2)]


# ----------------------------------------------------------------------------------------- combine


def places(handle, values):
    """y [capacity, 1] with `values` first; the rest is NaN, as it must not be read."""
    y = torch.full((len(handle.expert_row_index), 1), torch.nan)
    y[: len(values), 0] = torch.tensor(values)
    return y


def test_combine_sums_weight_times_y():
    handles = dispatch()
    y = [places(handles[0], [10.0, 20.0, 30.0]), places(handles[1], [40.0, 50.0, 60.0, 70.0])]
    out0, out1 = reference.combine(y, handles)
    assert out0.tolist() == [[1 * 10 + 2 * 50.0], [3 * 30 + 4 * 20.0], [6 * 40.0]]
    assert out1.tolist() == [[7 * 60 + 8 * 70.0], [0.0]]  # token 1 of rank 1 is dropped: zero


def test_combine_takes_padded_and_masked_rows():
    for layout, shape in (("expert_major", (-1, 1)), ("masked", (2, 6, 1))):
        handles = dispatch(layout=layout, expert_alignment=4)
        y = []
        for handle in handles:
            rows = torch.full((len(handle.expert_row_index), 1), torch.nan)
            used = handle.expert_row_index >= 0
            rows[used, 0] = torch.arange(1.0, int(used.sum()) + 1)
            y.append(rows.reshape(shape))
        out0, out1 = reference.combine(y, handles)
        assert out0.tolist() == [[1 * 1 + 2 * 2.0], [3 * 3 + 4 * 2.0], [6 * 1.0]]
        assert out1.tolist() == [[7 * 3 + 8 * 4.0], [0.0]]


def test_combine_presummed_adds_landed_rows_without_weights():
    handles = dispatch()
    y = [torch.full((6, 1), torch.nan), torch.full((6, 1), torch.nan)]
    y[0][[0, 1], 0] = torch.tensor([1.0, 2.0])
    y[1][[0, 2, 3], 0] = torch.tensor([30.0, 40.0, 50.0])
    out0, out1 = reference.combine(y, handles, presummed=True)
    assert out0.tolist() == [[31.0], [2.0], [40.0]]
    assert out1.tolist() == [[50.0], [0.0]]


def one_token(num_ranks, dtype, weights):
    """One token of rank 0 with one route to each expert, in expert order."""
    num_experts = weights.shape[1]
    x = [torch.zeros(int(rank == 0), 1, dtype=dtype) for rank in range(num_ranks)]
    idx = [torch.arange(num_experts)[None, :]] + [torch.zeros(0, num_experts, dtype=torch.int64)] * (num_ranks - 1)
    w = [weights] + [torch.zeros(0, num_experts)] * (num_ranks - 1)
    return reference.dispatch(x, idx, w, num_experts=num_experts, num_max_tokens_per_rank=1)


def test_combine_adds_in_fp32_with_k_ascending():
    # 1e8 + 1 is 1e8 in fp32: (1e8 + 1) - 1e8 = 0, while another order gives 1.
    handles = one_token(1, torch.float32, torch.ones(1, 3))
    y = torch.tensor([[1e8], [1.0], [-1e8]])
    assert reference.combine([y], handles)[0].item() == 0.0
    y = torch.tensor([[1e8], [-1e8], [1.0]])
    assert reference.combine([y], handles)[0].item() == 1.0


def test_combine_rounds_each_product_before_it_is_added():
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, a tie in fp32 that rounds to 1 + 2^-11; a fused
    # multiply-add would keep the 2^-24 that remains after the subtraction.
    a = 1 + 2.0**-12
    handles = one_token(1, torch.float32, torch.tensor([[1.0, a]]))
    y = torch.tensor([[-(1 + 2.0**-11)], [a]])
    assert reference.combine([y], handles)[0].item() == 0.0


def test_combine_rounds_each_rank_to_the_wire_then_adds_ranks_ascending():
    # bf16 has 8 bits: 256 + 1 = 257 rounds to 256 on the wire of rank 0, so 1 is lost there,
    # and 256 + 3 (two ranks) rounds to 260 only at the end.
    handles = one_token(2, torch.bfloat16, torch.ones(1, 4))
    y = [
        torch.tensor([[256.0], [1.0], [torch.nan], [torch.nan]], dtype=torch.bfloat16),
        torch.tensor([[1.0], [1.0], [torch.nan], [torch.nan]], dtype=torch.bfloat16),
    ]
    out = reference.combine(y, handles)[0]
    assert out.dtype == torch.bfloat16
    assert out.item() == 258.0  # bf16(256 + 2); without the wire's rounding bf16(259) = 260


# --------------------------------------------------------------------------------------------- fp8


def test_quantize_fp8_has_one_scale_per_128_columns_and_one_for_the_rest():
    x = torch.zeros(2, 130)
    x[0, 0], x[0, 1], x[0, 129] = 896.0, -2.0, 4.0
    q, scales = reference.quantize_fp8(x)
    assert q.dtype == torch.float8_e4m3fn and q.shape == (2, 130)
    assert scales.shape == (2, 2)
    assert scales[0].tolist() == [2.0, torch.tensor(4.0).div(448).item()]
    assert q[0, :2].float().tolist() == [448.0, -1.0]
    assert q[0, 129].float().item() == 448.0
    # A row of zeros has the smallest scale, not a division by zero.
    assert q[1].float().abs().max() == 0
    assert scales[1, 0] == torch.tensor(1e-12) / 448


def test_quantize_fp8_fnuz_uses_its_own_largest_number():
    q, scales = reference.quantize_fp8(torch.tensor([[480.0, 3.0]]), torch.float8_e4m3fnuz)
    assert scales.tolist() == [[2.0]]
    assert q.float().tolist() == [[240.0, 1.5]]


def test_quantize_fp8_rounds_to_nearest_even():
    # With 448 in the block the factor is 1. Between 16 and 32 fp8 has steps of 2.
    q, _ = reference.quantize_fp8(torch.tensor([[448.0, 17.0, 19.0, 17.1]]))
    assert q.float().tolist() == [[448.0, 16.0, 20.0, 18.0]]


def test_dequantize_fp8_is_within_half_a_step():
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    back = reference.dequantize_fp8(*reference.quantize_fp8(x))
    assert ((back - x).abs() <= x.abs() * 2.0**-4 + 1e-3).all()


def test_quantize_fp8_weights_has_one_scale_per_128_by_128_of_each_half():
    w = torch.zeros(1, 2 * 130, 129)  # of each half, the second block of rows has two
    w[0, 0, 0], w[0, 127, 127], w[0, 129, 0], w[0, 0, 128] = 448.0, -1.0, 896.0, 1792.0
    w[0, 130, 0], w[0, 259, 128] = 3584.0, -448.0
    q, scales = reference.quantize_fp8_weights(w, halves=2)
    least = (torch.tensor(1e-12) / 448).item()
    assert q.dtype == torch.float8_e4m3fn and q.shape == w.shape
    assert scales.tolist() == [[[1.0, 4.0], [2.0, least], [8.0, least], [least, 1.0]]]
    expected = torch.zeros_like(w)
    expected[0, 0, 0], expected[0, 127, 127], expected[0, 129, 0], expected[0, 0, 128] = 448.0, -1.0, 448.0, 448.0
    expected[0, 130, 0], expected[0, 259, 128] = 448.0, -448.0
    assert torch.equal(q.float(), expected)


def test_dispatch_quantises_like_given_scales():
    q0, s0 = reference.quantize_fp8(X[0])
    q1, s1 = reference.quantize_fp8(X[1])
    options = {**CONFIG, "layout": "expert_major", "expert_alignment": 2}
    given = reference.dispatch([q0, q1], TOPK_IDX, x_scales=[s0, s1], **options)
    made = reference.dispatch(X, TOPK_IDX, quantize=torch.float8_e4m3fn, **options)
    for a, b in zip(given, made, strict=True):
        assert a.recv_x.dtype == torch.float8_e4m3fn
        assert a.recv_x.view(torch.uint8).tolist() == b.recv_x.view(torch.uint8).tolist()
        assert torch.equal(a.recv_x_scales, b.recv_x_scales)
        assert torch.equal(a.expert_x_scales, b.expert_x_scales)
    assert given[0].recv_x_scales.tolist() == [s0[0].tolist(), s0[1].tolist()] + [[0.0]] * 4
    assert given[0].expert_x_scales[:4].tolist() == [
        s0[0].tolist(),
        s0[1].tolist(),
        s0[1].tolist(),
        [0.0],
    ]


# --------------------------------------------------------------------------------------- MoE layer


def test_moe_layer_by_hand():
    # hidden = intermediate = 1: an expert is silu(gate * x) * (up * x) * down.
    w_gate_up = torch.tensor([[[0.0], [1.0]], [[1.0], [2.0]]])
    w_down = torch.tensor([[[5.0]], [[10.0]]])
    x = torch.tensor([[1.0], [2.0], [3.0]])
    topk_idx = torch.tensor([[1, 0], [1, 1], [-1, -1]])
    weights = torch.tensor([[0.5, 1.0], [1.0, 2.0], [1.0, 1.0]])
    out = reference.moe_layer(x, topk_idx, weights, w_gate_up, w_down)
    sigmoid = [1 / (1 + 2.718281828459045**-v) for v in (1.0, 2.0)]
    expected = torch.tensor([[0.5 * sigmoid[0] * 20], [3.0 * 2 * sigmoid[1] * 40], [0.0]])
    torch.testing.assert_close(out, expected)


def test_moe_layer_is_dispatch_experts_combine():
    torch.manual_seed(2)
    num_experts, hidden, intermediate = 4, 6, 5
    w_gate_up = torch.randn(num_experts, 2 * intermediate, hidden)
    w_down = torch.randn(num_experts, hidden, intermediate)
    x = [torch.randn(3, hidden), torch.randn(2, hidden)]
    handles = reference.dispatch(x, TOPK_IDX, TOPK_WEIGHTS, **CONFIG)
    y = []
    for rank, handle in enumerate(handles):
        rows = torch.full((12, hidden), torch.nan)
        offsets = handle.expert_offsets.tolist()
        for local, (first, last) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            expert_x = handle.recv_x[handle.expert_row_index[first:last].long()]
            rows[first:last] = reference.swiglu(expert_x, w_gate_up[2 * rank + local], w_down[2 * rank + local])
        y.append(rows)
    for rank, out in enumerate(reference.combine(y, handles)):
        whole = reference.moe_layer(x[rank], TOPK_IDX[rank], TOPK_WEIGHTS[rank], w_gate_up, w_down)
        torch.testing.assert_close(out, whole)
