"""MoELayer on N ranks against the whole layer in one process, in every dtype."""

import pytest
import ranks
import torch

import moe_a2a
from moe_a2a import reference

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


def assert_as_good_as_torch(out, x, topk_idx, weights, w_gate_up, w_down):
    """At most twice the error of the same layer in PyTorch at this dtype, both against fp64."""
    exact = reference.moe_layer(x.double(), topk_idx, weights, w_gate_up.double(), w_down.double())
    in_torch = reference.moe_layer(x, topk_idx, weights, w_gate_up, w_down)
    error = (out.double() - exact).abs().max() if len(out) else torch.tensor(0.0)
    limit = (in_torch.double() - exact).abs().max() if len(out) else torch.tensor(0.0)
    smallest = torch.finfo(x.dtype).eps
    assert error <= 2 * limit + smallest, f"error {error}, PyTorch's own {limit}"


def run_layer(group, dtype, seed):
    rank, num_ranks = group.rank, group.num_ranks
    num_experts = 2 * num_ranks
    w_gate_up, w_down = make_weights(num_experts, dtype, seed)
    mine = slice(2 * rank, 2 * rank + 2)
    with moe_a2a.ExpertParallel(
        group, num_experts=num_experts, num_topk=NUM_TOPK, hidden=HIDDEN,
        num_max_tokens_per_rank=20, dtype=dtype, timeout=20,
    ) as ep:  # fmt: skip
        layer = moe_a2a.MoELayer(ep, w_gate_up[mine], w_down[mine])
        for call in range(4):
            num_tokens = (7 * rank + 11 * call) % 21
            x, topk_idx, weights = make_tokens(
                num_tokens, num_experts, dtype, seed + call * 8 + rank
            )
            out = layer(x, topk_idx, weights)
            assert out.shape == x.shape and out.dtype == dtype
            assert_as_good_as_torch(out, x, topk_idx, weights, w_gate_up, w_down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_layer_matches_one_process(num_ranks, dtype, session_seed):
    ranks.run_threads(num_ranks, run_layer, dtype, session_seed)
