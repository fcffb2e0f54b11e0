"""Three real MoE architectures, small and random, with their experts shared out over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_a2a.demo.text import VOCAB_SIZE
from moe_a2a.integrations.experts_module import is_experts_module
from moe_a2a.integrations.transformers import register, shard_experts

TOLERANCE = 1e-5

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,  # large enough that routing and logits are not near ties
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

MODELS = {
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig,
        {"num_key_value_heads": 2, "intermediate_size": 448, "num_local_experts": 8},
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "moe_intermediate_size": 96,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            "num_key_value_heads": 8,
            "intermediate_size": 448,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 96,
            "n_routed_experts": 32,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
    ),
}


@dataclass
class RankRun:
    """What one rank has to show after one model."""

    logits: np.ndarray  # fp32 [sequences, length, vocabulary], of this rank's part of the batch
    tokens_per_expert: np.ndarray  # int64 [num_experts]: this rank's routes, over all layers
    expert_bytes: int  # weights of the experts that it holds


def build(name: str, seed: int) -> PreTrainedModel:
    """The same model in every process: fp32, random weights from the seed."""
    model_class, config_class, sizes = MODELS[name]
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    return model_class(config_class(**(_COMMON | sizes))).eval()


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
    parts = batch.tensor_split(num_ranks)  # the first one is the largest
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
    """Over every logit of every rank; not a number when a logit is not one."""
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
