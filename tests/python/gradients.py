"""Gradients of an MoE layer on N ranks beside those of one process that has all tokens and all experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import moe_a2a
from moe_a2a import as_group, reference

HIDDEN, INTERMEDIATE, MAX_TOKENS = 24, 16, 12
NAMES = ("x", "topk_weights", "w_gate_up", "w_down")


def make_ep(group: Any, dtype: torch.dtype = torch.float32, **config: Any) -> moe_a2a.ExpertParallel:
    config = {"num_topk": 3, "timeout": 20, **config}
    if "num_experts" not in config:
        config["num_experts"] = 4 * as_group(group).num_ranks
    return moe_a2a.ExpertParallel(group, hidden=HIDDEN, num_max_tokens_per_rank=MAX_TOKENS, dtype=dtype, **config)


@dataclass
class Batch:
    """The tokens of one rank, and the gradient of its output."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    grad_out: Tensor


def make_batch(ep: moe_a2a.ExpertParallel, rank: int, seed: int, routing: str = "random") -> Batch:
    """Of any rank, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    num_tokens = MAX_TOKENS if routing == "full" else int(torch.randint(1, MAX_TOKENS + 1, (), generator=generator))
    if routing == "nothing" or (routing == "zero_tokens" and rank == 0):
        num_tokens = 0
    x, grad_out = torch.randn(2, num_tokens, HIDDEN, generator=generator).to(ep.dtype)
    topk_idx = torch.randint(-1, ep.num_experts, (num_tokens, ep.num_topk), generator=generator)
    if routing == "zero_routes":  # on rank 0
        topk_idx = torch.where(topk_idx < ep.num_local_experts, ep.num_experts - 1, topk_idx)
    weights = None if routing == "no_weights" else torch.rand(num_tokens, ep.num_topk, generator=generator)
    return Batch(x, topk_idx, weights, grad_out)


def make_weights(ep: moe_a2a.ExpertParallel, seed: int) -> tuple[Tensor, Tensor]:
    """Of all experts."""
    generator = torch.Generator().manual_seed(seed)
    w_gate_up = torch.randn(ep.num_experts, 2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
    w_down = torch.randn(ep.num_experts, HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
    return w_gate_up.to(ep.dtype), w_down.to(ep.dtype)


def own_part(ep: moe_a2a.ExpertParallel, weights: Any) -> list[Tensor]:
    mine = slice(ep.rank * ep.num_local_experts, (ep.rank + 1) * ep.num_local_experts)
    return [w[mine].to(ep.device, copy=True) for w in weights]


def leaf(tensor: Tensor | None, ep: moe_a2a.ExpertParallel, requires_grad: bool = True) -> Tensor | None:
    return None if tensor is None else tensor.to(ep.device, copy=True).requires_grad_(requires_grad)


def expected(
    ep: moe_a2a.ExpertParallel, batches: list[Batch], weights: Any, dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """The gradients that belong to this rank, and its output "out", computed in `dtype`. batches: of each rank."""
    all_weights = [w.to(dtype, copy=True).requires_grad_() for w in weights]
    mine: dict[str, Tensor | None] = {}
    for rank, batch in enumerate(batches):
        x = batch.x.to(dtype, copy=True).requires_grad_()
        topk_weights = None if batch.topk_weights is None else batch.topk_weights.clone().requires_grad_()
        out = reference.moe_layer(x, batch.topk_idx, topk_weights, *all_weights)
        (out * batch.grad_out.to(dtype)).sum().backward()
        if rank == ep.rank:
            mine = {
                "x": x.grad,
                "topk_weights": None if topk_weights is None else topk_weights.grad,
                "out": out.detach(),
            }
    mine["w_gate_up"], mine["w_down"] = own_part(ep, [w.grad for w in all_weights])
    return mine


def rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item() if values.numel() else 0.0


def assert_close(
    ep: moe_a2a.ExpertParallel, got: dict[str, Tensor | None], batches: list[Batch], weights: Any, names: Any = NAMES
) -> None:
    """At most three times the error of one process in PyTorch at this dtype, both against fp64, and some roundings: a rank's
    gradients may have few values, whose errors vary."""
    exact, torchs = (expected(ep, batches, weights, dtype) for dtype in (torch.float64, ep.dtype))
    for name in names:
        if exact[name] is None:
            assert got[name] is None, name
            continue
        ours, theirs, right = got[name].cpu().double(), torchs[name].cpu().double(), exact[name].cpu().double()
        assert ours.shape == right.shape, name
        rounding = max(4 * torch.finfo(ep.dtype).eps, 64 * torch.finfo(torch.float32).eps)
        allowed = 3 * rms(theirs - right) + rounding * rms(right)
        assert rms(ours - right) <= allowed, f"{name}: error {rms(ours - right)} > {allowed}, size {rms(right)}"


def make_layer(ep, seed, **options):
    weights = make_weights(ep, seed)
    return moe_a2a.MoELayer(ep, *(nn.Parameter(w) for w in own_part(ep, weights)), **options), weights


def leaves_of(ep, batch):
    return leaf(batch.x, ep), batch.topk_idx.to(ep.device), leaf(batch.topk_weights, ep)


def grads_of(layer, x, topk_weights):
    weights_grad = None if topk_weights is None else topk_weights.grad
    return {"x": x.grad, "topk_weights": weights_grad, "w_gate_up": layer.w_gate_up.grad, "w_down": layer.w_down.grad}
