"""The sample models with their experts sharded over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from moe_a2a.demo.runs import RankRun, WholeRun
from moe_a2a.integrations.experts_module import is_experts_module
from moe_a2a.integrations.transformers import register, shard_experts
from moe_a2a.samples.models import build


@torch.no_grad()
def run_in_one_process(name: str, seed: int, batch: Tensor) -> WholeRun:
    """The untouched model with transformers' own eager experts."""
    model = build(name, seed)
    model.set_experts_implementation("eager")
    return WholeRun(logits=model(input_ids=batch).logits.numpy(), expert_bytes=_expert_bytes(model))


@torch.no_grad()
def run_on_this_rank(name: str, seed: int, batch: Tensor) -> RankRun:
    """The same model on this rank's part of the batch, with only this rank's experts."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    parts = batch.tensor_split(num_ranks)  # the first part is the largest
    model = build(name, seed)
    with register(dist.group.WORLD, num_max_tokens_per_rank=parts[0].numel()) as experts:
        shard_experts(model, dist.group.WORLD)
        model.set_experts_implementation(experts.name)
        counter = _count_routes(model)
        logits = model(input_ids=parts[rank]).logits
    return RankRun(
        logits=logits.numpy(),
        tokens_per_expert=counter.numpy(),
        expert_bytes=_expert_bytes(model),
    )


def _expert_bytes(model: PreTrainedModel) -> int:
    return sum(
        parameter.nbytes for module in model.modules() if is_experts_module(module) for parameter in module.parameters()
    )


def _count_routes(model: PreTrainedModel) -> Tensor:
    """A tensor [num_experts] that counts the routes of each forward pass."""
    experts_modules = [module for module in model.modules() if is_experts_module(module)]
    counter = torch.zeros(experts_modules[0].num_experts, dtype=torch.int64)  # type: ignore[call-overload]

    def count(module, arguments) -> None:
        _, top_k_index, _ = arguments
        counter.add_(top_k_index.flatten().bincount(minlength=len(counter)))

    for module in experts_modules:
        module.register_forward_pre_hook(count)
    return counter
