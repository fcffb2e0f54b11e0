"""MoELayer on N ranks against the whole layer in one process, in every dtype."""

import on_device
import pytest
import torch

import moe_a2a
from moe_a2a import reference

pytestmark = on_device.TESTS

HIDDEN, INTERMEDIATE, NUM_TOPK = 48, 40, 3


def make_weights(num_experts, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    w_gate_up = torch.randn(num_experts, 2 * INTERMEDIATE, HIDDEN, generator=generator)
    w_down = torch.randn(num_experts, HIDDEN, INTERMEDIATE, generator=generator)
    return (w_gate_up / HIDDEN**0.5).to(dtype), (w_down / INTERMEDIATE**0.5).to(dtype)


def make_tokens(num_tokens, num_experts, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    topk_idx = torch.randint(-1, num_experts, (num_tokens, NUM_TOPK), generator=generator)
    return x, topk_idx, torch.rand(num_tokens, NUM_TOPK, generator=generator)


def rms(values):
    return torch.cat([v.double().flatten() for v in values]).square().mean().sqrt().item()


def run_layer(group, dtype, seed):
    rank, num_ranks = group.rank, group.num_ranks
    num_experts = 2 * num_ranks
    weights = make_weights(num_experts, dtype, seed)
    mine = slice(2 * rank, 2 * rank + 2)
    ours, torchs = [], []  # errors
    with moe_a2a.ExpertParallel(
        group, num_experts=num_experts, num_topk=NUM_TOPK, hidden=HIDDEN,
        num_max_tokens_per_rank=20, dtype=dtype, timeout=20,
    ) as ep:  # fmt: skip
        layer = moe_a2a.MoELayer(ep, *(w[mine].to(ep.device) for w in weights))
        for call in range(6):
            num_tokens = (7 * rank + 11 * call) % 21
            tokens = make_tokens(num_tokens, num_experts, dtype, seed + call * 8 + rank)
            out = layer(*(tensor.to(ep.device) for tensor in tokens)).cpu()
            assert out.shape == tokens[0].shape and out.dtype == dtype
            exact = reference.moe_layer(tokens[0].double(), *tokens[1:], *(w.double() for w in weights))
            ours.append(out - exact)
            torchs.append(reference.moe_layer(*tokens, *weights) - exact)
    # At most twice the error of the same layer in PyTorch at this dtype, both against fp64.
    assert rms(ours) <= 2 * rms(torchs), f"error {rms(ours)}, PyTorch's own {rms(torchs)}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_layer_matches_one_process(num_ranks, dtype, session_seed):
    on_device.run(num_ranks, run_layer, dtype, session_seed)
