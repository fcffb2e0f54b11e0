"""Three real MoE architectures, small and with random weights. Needs transformers."""

from __future__ import annotations

import torch
import transformers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_a2a.samples.text import VOCAB_SIZE

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


def build(name: str, seed: int) -> PreTrainedModel:
    """The same model in every process: fp32, random weights from the seed."""
    model_class, config_class, sizes = MODELS[name]
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    return model_class(config_class(**(_COMMON | sizes))).eval()
