"""Scales that are bytes, one per 32 values (MXFP8): they arrive bit for bit, in their dtype, on every path."""

import on_device
import pytest
import ranks
import torch

import moe_a2a
from moe_a2a.devices import float8_dtype
from moe_a2a.experts import swiglu_experts

pytestmark = on_device.TESTS

SEED = 20261125
EXPERTS_PER_RANK, TOPK, MOST_TOKENS = 3, 2, 11
BYTE_DTYPES = [torch.uint8, torch.float8_e8m0fnu]
# What a move of floats could change: quiet and signalling NaNs, infinities, negative zero, subnormals.
AWKWARD = [0x7F800001, 0xFFBFFFFF, 0x7FC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0x807FFFFF]


def make(group, hidden, **options):
    group = moe_a2a.as_group(group)
    sizes = {"num_experts": group.num_ranks * EXPERTS_PER_RANK, "num_topk": TOPK, "hidden": hidden}
    return moe_a2a.ExpertParallel(
        group, **sizes, num_max_tokens_per_rank=MOST_TOKENS, device=on_device.NAME, timeout=ranks.slack(10), **options
    )


def random_bytes(shape, generator):
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


def batches(num_ranks, hidden, width):
    """(x, scales, topk_idx) of every rank, x and scales as bytes; the last rank has no tokens."""
    generator = torch.Generator().manual_seed(SEED)
    made = []
    for rank in range(num_ranks):
        num_tokens = 0 if rank == num_ranks - 1 else MOST_TOKENS - rank
        scales = random_bytes((num_tokens, width), generator)
        if num_tokens and width >= 4 * len(AWKWARD):
            scales[0, : 4 * len(AWKWARD)] = torch.tensor(AWKWARD).to(torch.uint32).view(torch.uint8)
        routed = [torch.randperm(num_ranks * EXPERTS_PER_RANK, generator=generator)[:TOPK] for _ in range(num_tokens)]
        topk_idx = torch.stack(routed) if routed else torch.empty(0, TOPK, dtype=torch.int64)
        made.append((random_bytes((num_tokens, hidden), generator), scales, topk_idx))
    return made


def check(handle, batches, hidden, dtype, layout):
    """Each position's row and scales are those of its token."""
    assert handle.recv_x_scales.dtype == dtype and handle.recv_x_scales.shape[1] == -(-hidden // 32)
    for expert in range(EXPERTS_PER_RANK):
        begin, count = int(handle.expert_offsets[expert]), int(handle.expert_counts[expert])
        if layout == "masked":
            begin = expert * len(batches) * MOST_TOKENS
        for position in range(begin, begin + count):
            source, token = int(handle.route_src_rank[position]), int(handle.route_src_token_idx[position])
            x, scales, _ = batches[source]
            row = source * MOST_TOKENS + token
            assert torch.equal(handle.recv_x[row].view(torch.uint8).cpu(), x[token])
            assert torch.equal(handle.recv_x_scales[row].view(torch.uint8).cpu(), scales[token])
            if layout != "rows":
                assert handle.expert_x_scales.dtype == dtype
                gathered = handle.expert_x.view(-1, hidden), handle.expert_x_scales.flatten(0, -2)
                assert torch.equal(gathered[0][position].view(torch.uint8).cpu(), x[token])
                assert torch.equal(gathered[1][position].view(torch.uint8).cpu(), scales[token])


@pytest.mark.parametrize("num_max_ll_tokens", [0, MOST_TOKENS], ids=["rows", "LL words"])
@pytest.mark.parametrize("dtype", BYTE_DTYPES)
# whole float32s; 90 bytes padded to 92 (GPT-OSS); short; odd; more than one piece of a row
@pytest.mark.parametrize("hidden", [1152, 2880, 64, 33, 1100])
@pytest.mark.parametrize("layout", ["rows", "expert_major", "masked"])
def test_they_arrive_bit_for_bit(hidden, dtype, num_max_ll_tokens, layout):
    print(f"seed {SEED}")
    every = batches(3, hidden, -(-hidden // 32))

    def program(group):
        with make(group, hidden, num_max_ll_tokens=num_max_ll_tokens) as ep:
            x, scales, topk_idx = (tensor.to(ep.device) for tensor in every[ep.rank])
            rows = x.view(float8_dtype(ep.device))
            how = {"layout": layout, "expert_alignment": 4 if layout == "expert_major" else None}
            for call in range(3):
                if call == 0:
                    handle = ep.dispatch(rows, topk_idx, x_scales=scales.view(dtype), **how)
                elif call == 1:
                    handle = ep.dispatch_recv(ep.dispatch_send(rows, topk_idx, x_scales=scales.view(dtype)), **how)
                else:  # a view whose rows begin between two float32s
                    apart = torch.empty(len(x), scales.shape[1] + 5, dtype=torch.uint8, device=ep.device)
                    apart[:, 3:-2] = scales
                    handle = ep.dispatch(rows, handle=handle, x_scales=apart[:, 3:-2].view(dtype), **how)
                check(handle, every, hidden, dtype, layout)
                handle.release()

    on_device.run(3, program)


@pytest.mark.parametrize("num_max_ll_tokens", [0, MOST_TOKENS], ids=["rows", "LL words"])
def test_float32_scales_arrive_bit_for_bit(num_max_ll_tokens):
    print(f"seed {SEED}")
    hidden = 1152  # one float32 for each of AWKWARD
    every = batches(2, hidden, hidden // 32)

    def program(group):
        with make(group, hidden, num_max_ll_tokens=num_max_ll_tokens) as ep:
            x, scales, topk_idx = (tensor.to(ep.device) for tensor in every[ep.rank])
            rows = x.view(float8_dtype(ep.device))
            for layout in ("rows", "expert_major", "masked"):
                handle = ep.dispatch(rows, topk_idx, x_scales=scales.view(torch.float32), layout=layout)
                assert handle.recv_x_scales.dtype == torch.float32
                landed = handle.recv_rows.long()
                sent = torch.cat([torch.nn.functional.pad(s, (0, 0, 0, MOST_TOKENS - len(s))) for _, s, _ in every])
                assert torch.equal(handle.recv_x_scales[landed].view(torch.uint8).cpu(), sent[landed.cpu()])
                handle.release()

    on_device.run(2, program)


@pytest.mark.parametrize("num_max_ll_tokens", [0, MOST_TOKENS], ids=["rows", "LL words"])
@pytest.mark.parametrize("num_tokens", [0, MOST_TOKENS])
@pytest.mark.parametrize("one", ["bytes", "quantize"])
def test_another_kind_of_scales_on_one_rank_is_refused_on_all(one, num_tokens, num_max_ll_tokens):
    """Each rank took the scales that it received for scales like its own: [127, 127, 127, 127] arrived as 3.4e38."""

    def program(group):
        with make(group, 128, num_max_ll_tokens=num_max_ll_tokens) as ep:
            differs = ep.rank == 1
            x = torch.ones(num_tokens if differs else 3, 128, dtype=torch.bfloat16, device=ep.device)
            rows, idx = x.to(float8_dtype(ep.device)), torch.arange(len(x), device=ep.device)[:, None].expand(-1, TOPK)
            idx = (idx % ep.num_experts).contiguous()
            scales = {"bytes": torch.ones(len(x), 4, dtype=torch.uint8), "float32": torch.ones(len(x), 1)}
            kind = ("bytes" if one == "bytes" else "float32") if differs else "float32" if one == "bytes" else "bytes"
            own, other = ("float8 rows", "float8 rows with scales of bytes")[:: -1 if kind == "bytes" else 1]
            words = rf"rank {ep.rank} dispatched {own}, rank \d {other}; pass x and x_scales of the same dtypes"
            with pytest.raises(moe_a2a.CallMismatchError, match=words) as raised:
                if differs and one == "quantize":
                    ep.dispatch(x, idx, quantize="fp8")
                else:
                    ep.dispatch(rows, idx, x_scales=scales[kind].to(ep.device))
                on_device.settle(ep)
            assert (raised.value.peer == 1) != differs
            ep.combine(x, ep.dispatch(x, torch.full_like(idx, -1)))  # the object stays usable

    on_device.run(3, program)


def test_a_layer_of_mxfp8_rows():
    """Experts of one's own between dispatch and combine: each scales its rows."""
    print(f"seed {SEED}")
    hidden = 96

    def program(group):
        with make(group, hidden, dtype=torch.float32) as ep:
            generator = torch.Generator().manual_seed(SEED + ep.rank)
            x = torch.randn(7, hidden, generator=generator)
            exponents = x.view(7, -1, 32).abs().amax(2).log2().ceil().sub(8)
            rows = (x.view(7, -1, 32) / exponents.exp2()[:, :, None]).view_as(x).to(float8_dtype(ep.device))
            scales = (exponents + 127).to(torch.uint8)
            idx = torch.stack([torch.randperm(ep.num_experts, generator=generator)[:TOPK] for _ in x])
            h = ep.dispatch(rows.to(ep.device), idx.to(ep.device), x_scales=scales.to(ep.device), layout="expert_major")
            factors = (h.expert_x_scales.float() - 127).exp2().repeat_interleave(32, dim=1)[:, :hidden]
            out = ep.combine(h.expert_x.float() * factors, h).cpu()
        torch.testing.assert_close(out, TOPK * x, rtol=0.07, atol=0.01)

    on_device.run(2, program)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "words"),
    [
        ((5, 3), torch.uint8, ValueError, ["x_scales of torch.uint8", "[5, 3]", "expected [5, 7]", "rank 0"]),
        ((4, 7), torch.uint8, ValueError, ["[4, 7]", "expected [5, 7]", "one byte per 32 values"]),
        ((7,), torch.uint8, ValueError, ["[7]", "expected [5, 7]"]),
        ((5, 7), torch.int8, TypeError, ["x_scales", "torch.int8", "float32", "rank 0"]),
    ],
)
def test_scales_of_another_shape_or_type_are_refused(shape, dtype, error, words):
    with make(moe_a2a.thread_group(1)[0], 200) as ep:
        x = torch.zeros(5, 200, device=ep.device).to(float8_dtype(ep.device))
        idx = torch.zeros(5, TOPK, dtype=torch.int64, device=ep.device)
        with pytest.raises(error) as raised:
            ep.dispatch(x, idx, x_scales=torch.zeros(shape, dtype=dtype, device=ep.device))
        assert all(word in str(raised.value) for word in words), raised.value
        with pytest.raises(ValueError, match="x that is not float8"):
            ep.dispatch(x.bfloat16(), idx, x_scales=torch.zeros(5, 7, dtype=torch.uint8, device=ep.device))
        ep.combine(x.bfloat16()[:0], ep.dispatch(x.bfloat16()[:0], idx[:0]))  # the object stays usable


def test_experts_of_block_128_refuse_them():
    """Regression: step by step, a scale per 32 values would have been applied to 128."""
    with make(moe_a2a.thread_group(1)[0], 64) as ep:
        x = torch.zeros(5, 64, device=ep.device).to(float8_dtype(ep.device))
        idx = torch.arange(5 * TOPK, device=ep.device).view(5, TOPK) % EXPERTS_PER_RANK
        options = {"dtype": torch.bfloat16, "device": ep.device}
        up, down = torch.zeros(EXPERTS_PER_RANK, 64, 64, **options), torch.zeros(EXPERTS_PER_RANK, 64, 32, **options)
        handle = ep.dispatch(x, idx, x_scales=torch.zeros(5, 2, dtype=torch.uint8, device=ep.device))
        with pytest.raises(ValueError, match=r"x_scales of torch.uint8 on rank 0; .* one float32 scale per 128 values"):
            ep.experts(handle, up, down)
        with pytest.raises(ValueError, match=r"x_scales of torch.uint8 on rank 0; .* one float32 scale per 128 values"):
            swiglu_experts(handle, up, down)
        assert handle.is_open
        handle.release()
