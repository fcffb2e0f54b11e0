"""Rows, products, sums and collectives of more than 2^31 elements, on a GPU with room for them."""

import on_device
import pytest
import torch
import torch.nn.functional as F

import moe_a2a
from moe_a2a import experts

pytestmark = [on_device.TESTS, on_device.gpu_only]

TOKENS, HIDDEN, TOPK, EXPERTS, INTERMEDIATE = 131072, 7168, 8, 64, 512  # 2^20 routes, so 7.5e9 elements of y
NUM_BYTES = 70 << 30


@pytest.fixture(autouse=True)
def room():
    free = torch.cuda.mem_get_info()[0]
    if free < NUM_BYTES:
        pytest.skip(f"needs {NUM_BYTES >> 30} GiB of GPU memory, {free >> 30} are free")
    yield
    torch.cuda.empty_cache()


def make_tokens(device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.bfloat16, device=device)
    weights, topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator, device=device).topk(TOPK)
    return x, topk_idx, weights / weights.sum(1, keepdim=True)


def make_weights(device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    shapes = (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    return [
        torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device) / shape[-1] ** 0.5
        for shape in shapes
    ]


def expected_rows(tokens, chosen, w_gate_up, w_down):
    x, topk_idx, topk_weights = (t[chosen] for t in tokens)
    out = torch.zeros(len(chosen), HIDDEN, device=x.device)
    for i in range(len(chosen)):
        for expert, weight in zip(topk_idx[i].tolist(), topk_weights[i], strict=True):
            gate, up = F.linear(x[i].float(), w_gate_up[expert].float()).chunk(2)
            out[i] += weight * F.linear(F.silu(gate) * up, w_down[expert].float())
    return out


def layer_program(group, seed):
    config = {"num_experts": EXPERTS, "num_topk": TOPK, "hidden": HIDDEN, "num_max_tokens_per_rank": TOKENS}
    with moe_a2a.ExpertParallel(group, **config) as ep:
        tokens, weights = make_tokens(ep.device, seed), make_weights(ep.device, seed + 1)
        x = tokens[0]
        for how in ({}, {"layout": "expert_major", "expert_alignment": 128}):  # experts that return their rows
            handle = ep.dispatch(*tokens, **how)
            y = handle.expert_x if how else handle.recv_x[handle.expert_row_index[: handle.num_routes]]
            assert y.numel() > 7e9
            torch.testing.assert_close(ep.combine(y, handle), x, rtol=0.02, atol=0.02)
            del y
        handle = ep.dispatch(*tokens)
        assert torch.equal(ep.combine(handle.recv_x, handle, presummed=True), x)

        chosen = torch.tensor([0, 1, TOKENS // 2, TOKENS - 1], device=ep.device)
        expected, outs = expected_rows(tokens, chosen, *weights), []
        for fused_combine in (False, True):
            handle = ep.dispatch(*tokens)
            outs.append(ep.experts(handle, *weights, fused=True, fused_combine=fused_combine))
        handle = ep.dispatch(*tokens)
        hidden = moe_a2a.grouped_gemm(
            handle.recv_x, handle.expert_row_index, handle.expert_offsets, weights[0], activation="swiglu"
        )
        outs.append(ep.combine(moe_a2a.grouped_gemm(hidden, None, handle.expert_offsets, weights[1]), handle))
        ep.check()
        for out in outs:
            assert torch.equal(out, outs[0])
            error = (out[chosen].float() - expected).norm() / expected.norm()
            assert error < 0.02, error
        handle = ep.dispatch(*tokens)
        torch.testing.assert_close(
            ep.combine(experts.simulated_experts(handle, 2.0), handle, presummed=True), 2 * x, rtol=0.02, atol=0.04
        )


def test_a_layer(session_seed):
    on_device.run(1, layer_program, session_seed, timeout=120)


def collective_program(group, seed):
    with moe_a2a.Collectives(group) as coll:
        generator = torch.Generator(coll.device).manual_seed(seed + coll.rank)
        count = 2**31 + 2 * 12345
        x = torch.randint(-8, 8, (count,), generator=generator, dtype=torch.int8, device=coll.device).bfloat16()
        places = [slice(0, 1000), slice(2**31 - 500, 2**31 + 500), slice(count - 1000, count)]
        parts = group.all_gather([x[place].cpu() for place in places])
        for algorithm in ("auto", "two_shot", "ring"):
            out = coll.all_reduce(x, algorithm=algorithm)
            for place, *of_ranks in zip(places, *parts, strict=True):
                assert torch.equal(out[place].cpu(), sum(of_ranks))
            del out
        share = coll.reduce_scatter(x)
        assert torch.equal(coll.all_gather(share).flatten(), coll.all_reduce(x))


def test_collectives(session_seed):
    on_device.run(2, collective_program, session_seed, timeout=120)
