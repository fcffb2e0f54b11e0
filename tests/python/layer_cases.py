"""Random tokens and weights of an MoE layer on N ranks, and its outputs beside those of one process."""

import torch

import moe_a2a
from moe_a2a import reference

HIDDEN, INTERMEDIATE, MAX_TOKENS = 48, 80, 20


def make_weights(num_experts, dtype, seed, intermediate=INTERMEDIATE):
    generator = torch.Generator().manual_seed(seed)
    w_gate_up = torch.randn(num_experts, 2 * intermediate, HIDDEN, generator=generator)
    w_down = torch.randn(num_experts, HIDDEN, intermediate, generator=generator)
    return (w_gate_up / HIDDEN**0.5).to(dtype), (w_down / intermediate**0.5).to(dtype)


def make_tokens(ep, routing, seed, num_tokens=MAX_TOKENS):
    generator = torch.Generator().manual_seed(seed)
    num_tokens = {"one_token": 1 if ep.rank == 0 else 0, "nothing": 0}.get(routing, num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(ep.dtype)
    topk_idx = torch.randint(-1, ep.num_experts, (num_tokens, ep.num_topk), generator=generator)
    if routing == "empty_experts":
        topk_idx[topk_idx % 3 > 0] = 0
    if routing == "distinct":  # a masked block has room for one route of each token
        topk_idx = torch.rand(num_tokens, ep.num_experts, generator=generator).topk(ep.num_topk).indices
    if routing == "all_on_one":
        topk_idx = torch.full_like(topk_idx, -1)
        topk_idx[:, -1] = ep.num_experts - 1
    return x, topk_idx, torch.rand(num_tokens, ep.num_topk, generator=generator)


def make_ep(group, dtype=torch.bfloat16, **config):
    config = {"num_topk": 3, "num_experts": 4 * group.num_ranks, "timeout": 20, **config}
    return moe_a2a.ExpertParallel(group, hidden=HIDDEN, num_max_tokens_per_rank=MAX_TOKENS, dtype=dtype, **config)


def rms(values):
    return torch.cat([v.double().flatten() for v in values]).square().mean().sqrt().item()


def assert_as_exact_as_torch(outs, calls, weights):
    """At most twice the error of the same layer in PyTorch at this dtype, both against fp64."""
    ours, torchs = [], []
    for out, tokens in zip(outs, calls, strict=True):
        assert out.shape == tokens[0].shape and out.dtype == tokens[0].dtype
        exact = reference.moe_layer(tokens[0].double(), *tokens[1:], *(w.double() for w in weights))
        ours.append(out.cpu() - exact)
        torchs.append(reference.moe_layer(*tokens, *weights) - exact)
    if sum(error.numel() for error in ours):
        assert rms(ours) <= 2 * rms(torchs), f"error {rms(ours)}, PyTorch's own {rms(torchs)}"


def on(ep, tokens):
    return [tensor.to(ep.device) for tensor in tokens]
