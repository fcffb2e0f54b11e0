"""The structure of an experts module of transformers, and the part of it that one rank owns.

A class decorated with `use_experts_implementation` keeps the weights of all its experts in stacked
parameters and describes their use by flags. Activation, gate and norm are the module's own code,
so clamped, soft-capped and interleaved gates need no handling here.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_a2a.arguments import ROW_DTYPES

# An nn.Module with these flags, num_experts and its own act_fn, which nn.Module does not declare.
ExpertsModule: TypeAlias = Any

FLAGS = ("has_gate", "has_bias", "is_transposed")  # transformers 5.23 adds has_post_expert_norm and _is_expert_parallel
KNOWN_FLAGS = (*FLAGS, "is_concatenated", "has_post_expert_norm")  # _apply_gate() knows what is concatenated
STACKED_PARAMETERS = (
    "gate_up_proj",
    "gate_up_proj_bias",
    "up_proj",
    "up_proj_bias",
    "down_proj",
    "down_proj_bias",
)


def is_experts_module(module: nn.Module) -> bool:
    return all(hasattr(module, flag) for flag in (*FLAGS, "_apply_gate", "num_experts"))


def require_supported(module: ExpertsModule) -> None:
    name = type(module).__name__
    if unknown := [flag for flag, value in vars(module).items() if value is True and _is_unknown(flag)]:
        raise ValueError(
            f"{name} sets {', '.join(unknown)}, which this version of moe_a2a does not know: it would be ignored"
        )
    weights = (first_weight(module), "down_proj")
    needed = [*weights, *(f"{weight}_bias" for weight in weights if module.has_bias)]
    if missing := [parameter for parameter in needed if getattr(module, parameter, None) is None]:
        raise ValueError(
            f"{name} has no {', '.join(missing)}: experts with stacked weights of these names are supported"
        )
    if getattr(module, "_is_expert_parallel", False) or isinstance(module.down_proj, DTensor):
        raise ValueError(
            f"{name} is already split by transformers' own expert parallelism: load the model "
            "without enable_expert_parallel"
        )
    if module.down_proj.dtype not in ROW_DTYPES:
        raise ValueError(
            f"{name} has {module.down_proj.dtype} weights: experts in "
            "float32, float16 and bfloat16 are supported (for FP8 checkpoints: dequantize=True)"
        )


def _is_unknown(flag: str) -> bool:
    return flag.startswith(("has_", "is_")) and flag not in KNOWN_FLAGS


def first_weight(module: ExpertsModule) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def num_experts_per_rank(num_experts: int, num_ranks: int) -> int:
    """Rounded up: if num_ranks does not divide, the last ranks own fewer experts, or none."""
    return -(-num_experts // num_ranks)


def owned_experts(num_experts: int, rank: int, num_ranks: int) -> range:
    per_rank = num_experts_per_rank(num_experts, num_ranks)
    return range(num_experts)[rank * per_rank : (rank + 1) * per_rank]


def keep_only(module: ExpertsModule, owned: range) -> None:
    """Replace the stacked parameters by copies of the owned part, so that the rest is freed."""
    for name in STACKED_PARAMETERS:
        parameter = getattr(module, name, None)
        if parameter is not None:
            part = own_part(module, parameter, owned).detach()
            if module.is_transposed and part.dim() == 3:
                # In memory as [E, out, in], which the kernels need; values and shape look the same to all other code.
                part = part.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
            else:
                part = part.clone()
            setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def run_owned_experts(module: ExpertsModule, owned: range, expert_x: Tensor, expert_offsets: Tensor) -> Tensor:
    """expert_x [n, H], grouped by owned expert; expert_offsets [len(owned) + 1] -> y [n, H]."""
    hidden = _grouped_linear(module, first_weight(module), owned, expert_x, expert_offsets)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    y = _grouped_linear(module, "down_proj", owned, hidden, expert_offsets)
    return normed(module, y)


def normed(module: ExpertsModule, y: Tensor) -> Tensor:
    """The results of experts, through the module's norm if it has one."""
    return module.post_expert_norm(y) if getattr(module, "has_post_expert_norm", False) else y


def own_part(module: ExpertsModule, parameter: Tensor, owned: range) -> Tensor:
    if len(parameter) == module.num_experts:
        return parameter[owned.start : owned.stop]
    if len(parameter) == len(owned):
        return parameter  # already reduced by shard_experts()
    raise ValueError(
        f"{type(module).__name__} holds {len(parameter)} experts, expected all "
        f"{module.num_experts} or this rank's {len(owned)}: was it split by something else?"
    )


def _grouped_linear(module: ExpertsModule, name: str, owned: range, x: Tensor, offsets: Tensor) -> Tensor:
    """Applies to each row of x the projection of its expert."""
    weight = own_part(module, getattr(module, name), owned)  # [E, out, in], transposed [E, in, out]
    if not module.is_transposed:
        weight = weight.transpose(1, 2)
    out = _grouped_mm(x.to(weight.dtype), weight, offsets)
    if module.has_bias:
        bias = own_part(module, getattr(module, f"{name}_bias"), owned)
        out += bias.repeat_interleave(offsets.diff(), dim=0, output_size=len(x))
    return out


def _grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [n, in] and weight [E, in, out] -> [n, out]."""
    if _torch_can_group(weight):
        return nn.functional.grouped_mm(x, weight, offs=offsets[1:])
    out = x.new_empty(len(x), weight.shape[2])
    bounds = offsets.tolist()
    for expert, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        torch.mm(x[start:end], weight[expert], out=out[start:end])
    return out


def _torch_can_group(weight: Tensor) -> bool:
    """Whether grouped_mm takes this weight: if there is an expert, and its address and all strides are multiples of 16 bytes."""
    num_experts, *sizes = weight.shape
    aligned = weight.data_ptr() % 16 == 0 and all(size * weight.element_size() % 16 == 0 for size in sizes)
    return num_experts > 0 and aligned
