"""The benchmarks' baselines compute the same result: comparing with a wrong baseline is worthless."""

import pytest
import ranks
import torch
import torch.distributed as dist

from moe_a2a import reference
from moe_a2a.commands import baselines

HIDDEN = 24


def make_inputs(num_ranks, num_experts, num_topk, num_tokens, dtype, idx_dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x, topk_idx, topk_weights = [], [], []
    for rank in range(num_ranks):
        tokens = num_tokens[rank]
        x.append(torch.randn(tokens, HIDDEN, generator=generator).to(dtype))
        idx = torch.randint(-1, num_experts, (tokens, num_topk), generator=generator)
        topk_idx.append(idx.to(idx_dtype))
        topk_weights.append(torch.rand(tokens, num_topk, generator=generator))
    return x, topk_idx, topk_weights


def run_baseline(group, baseline_name, dtype, idx_dtype, with_weights, seed):
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    num_experts, num_topk, num_max_tokens = 4 * num_ranks, 3, 9
    baseline = getattr(baselines, baseline_name)(group, num_experts, num_topk, HIDDEN, num_max_tokens, dtype)
    for call in range(4):
        # Uneven numbers, one rank without tokens, and one call without any.
        num_tokens = [0 if call == 3 else (5 * r + 4 * call) % 10 for r in range(num_ranks)]
        x, topk_idx, topk_weights = make_inputs(
            num_ranks, num_experts, num_topk, num_tokens, dtype, idx_dtype, seed + call
        )
        weights = topk_weights if with_weights else None
        expected = reference.dispatch(
            x, topk_idx, weights,
            num_experts=num_experts, num_max_tokens_per_rank=num_max_tokens, layout="expert_major",
        )  # fmt: skip
        handle = baseline.dispatch(x[rank], topk_idx[rank], weights[rank] if weights else None)
        num_routes = int(expected[rank].expert_offsets[-1])
        assert handle.expert_offsets.tolist() == expected[rank].expert_offsets.tolist()
        assert torch.equal(handle.expert_x, expected[rank].expert_x[:num_routes])

        y = [3 * h.expert_x.float().square().to(dtype) for h in expected]
        out = baseline.combine(y[rank][:num_routes], handle)
        assert out.dtype == dtype
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(out, reference.combine(y, expected)[rank], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("baseline_name", ["SortAllToAll", "AllGatherReduceScatter"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_baseline_matches_reference(baseline_name, num_ranks, session_seed):
    for dtype, idx_dtype, with_weights in (
        (torch.float32, torch.int64, True),
        (torch.bfloat16, torch.int32, False),
    ):
        args = (baseline_name, dtype, idx_dtype, with_weights, session_seed)
        ranks.run_processes(num_ranks, run_baseline, *args)


def construct_with_five_experts(group):
    with pytest.raises(ValueError, match="num_experts=5 is not divisible by num_ranks=2"):
        baselines.SortAllToAll(group, 5, 2, HIDDEN, 4)


def test_baseline_refuses_experts_that_do_not_divide():
    ranks.run_processes(2, construct_with_five_experts)
