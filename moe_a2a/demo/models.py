"""The sample models with their experts sharded over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from moe_a2a.integrations.experts_module import is_experts_module
from moe_a2a.integrations.transformers import register, shard_experts
from moe_a2a.samples.models import build

TOLERANCE = 1e-5


@dataclass
class RankRun:
    """The results of one rank for one model."""

    logits: np.ndarray  # fp32 [sequences, length, vocabulary], for this rank's part of the batch
    tokens_per_expert: np.ndarray  # int64 [num_experts]: this rank's routes, over all layers
    expert_bytes: int  # weights of the experts on this rank


@torch.no_grad()
def run_in_one_process(name: str, seed: int, batch: Tensor) -> np.ndarray:
    """The logits of the untouched model with transformers' own eager experts."""
    model = build(name, seed)
    model.set_experts_implementation("eager")
    return model(input_ids=batch).logits.numpy()


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
        expert_bytes=expert_bytes(model),
    )


def expert_bytes(model: PreTrainedModel) -> int:
    return sum(
        parameter.nbytes for module in model.modules() if is_experts_module(module) for parameter in module.parameters()
    )


def max_difference(runs: list[RankRun], expected: np.ndarray) -> float:
    """Over every logit of every rank; NaN if a logit is NaN."""
    return float(np.abs(np.concatenate([run.logits for run in runs]) - expected).max())


def _count_routes(model: PreTrainedModel) -> Tensor:
    """A tensor [num_experts] that counts the routes of each forward pass."""
    experts_modules = [module for module in model.modules() if is_experts_module(module)]
    counter = torch.zeros(experts_modules[0].num_experts, dtype=torch.int64)

    def count(module, arguments) -> None:
        _, top_k_index, _ = arguments
        counter.add_(top_k_index.flatten().bincount(minlength=len(counter)))

    for module in experts_modules:
        module.register_forward_pre_hook(count)
    return counter
