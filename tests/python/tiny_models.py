"""A tiny, random model of every MoE family of transformers whose experts other libraries may implement.

Sizes come from one table of field names, which covers most families; EXCEPTIONS holds further
requirements of single families. Weights are drawn large enough that every layer matters: with the
libraries' own small initialisation the norms after the experts would amplify rounding a hundredfold.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 256

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 32,
    "moe_hidden_size": 48,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Multi-head latent attention: heads are built from low-rank parts and do not share keys.
LATENT_ATTENTION_SIZES = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
}

_LINEAR_AND_FULL = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_ONE_DENSE_LAYER = ["dense", "sparse", "sparse", "sparse"]
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": _LINEAR_AND_FULL},
    "deepseek_ocr2": {"mlp_layer_types": _ONE_DENSE_LAYER},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [32, 16],
        "rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]},
    },
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "glm5_next": {"index_kpool": 4, "qk_rope_head_dim": 0, "qk_head_dim": 16, "head_dim": 0},
    "granitemoehybrid": {"layer_types": _LINEAR_AND_FULL, "mamba_n_heads": 8},
    "hy_v4_vl": {"rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _LINEAR_AND_FULL},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def families() -> list[str]:
    """The folders of transformers.models whose modeling file lets other libraries implement its experts."""
    models = Path(transformers.__file__).parent / "models"
    decorated = re.compile(r"^@use_experts_implementation", re.MULTILINE)
    return sorted(
        file.parent.name
        for file in models.glob("*/modeling_*.py")
        if file.name == f"modeling_{file.parent.name}.py" and decorated.search(file.read_text())
    )


def tiny_model(family: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """The family's language model; equal seeds give equal weights."""
    model_class = _language_model_class(family)
    config = _tiny_config(family, model_class.config_class, overrides)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.5 / parameter.shape[-1] ** 0.5)
    return model


def _tiny_config(family: str, config_class: Any, overrides: dict) -> PreTrainedConfig:
    known = {k for k, v in config_class().to_dict().items() if not isinstance(v, dict)}
    sizes = SIZES | (LATENT_ATTENTION_SIZES if "kv_lora_rank" in known else {})
    wanted = {name: value for name, value in sizes.items() if name in known}
    return config_class(**(wanted | EXCEPTIONS.get(family, {}) | overrides))


def _language_model_class(family: str) -> type[PreTrainedModel]:
    """The class that returns logits; for a multi-modal family without one, its text model."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module.__name__
        and not value.__name__.endswith("PreTrainedModel")
    ]
    for ending in ("ForCausalLM", "ForTokenClassification", "TextModel", "Model"):
        for candidate in classes:
            if candidate.__name__.endswith(ending):
                return candidate
    raise LookupError(f"transformers.models.{family} has no language model")
