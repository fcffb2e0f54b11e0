"""The routings of a benchmark, each a function of (sizes, rank, seed).

uniform      every expert is as likely as any other
zipf:S       the expert of popularity i is chosen in proportion to 1 / i ** S; the seed selects the popular experts
one_rank     every token of every rank goes to experts of rank 0
idle_rank    uniform, but the last rank has no token
text         a small router with random weights reads real text: the Qwen3-MoE of moe_a2a/samples
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

TEXT_CHOICES = 8  # per token, of the text's router
NAMES = ("uniform", "zipf:1.0", "one_rank", "idle_rank", "text")


@dataclass(frozen=True)
class Sizes:
    """The sizes of one rank's routing."""

    num_ranks: int
    num_tokens: int
    num_experts: int
    num_topk: int


def checked(routing: str) -> str:
    """The routing's name as records spell it."""
    name, _, exponent = routing.partition(":")
    if name == "zipf" and _is_exponent(exponent or "1"):
        return f"zipf:{float(exponent or 1.0)}"
    if routing not in NAMES:
        raise ValueError(f"routing {routing!r} is unknown; pass one of {', '.join(NAMES)}, or zipf:<0 to 100>")
    return routing


def _is_exponent(text: str) -> bool:
    try:
        return 0 <= float(text) <= 100
    except ValueError:
        return False


def topk_idx(routing: str, sizes: Sizes, rank: int, seed: int) -> Tensor:
    """int64 [tokens of this rank, K]; -1 if a token has no further choice."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    name, _, argument = routing.partition(":")
    if name == "text":
        return _text(sizes, rank)
    num_tokens = 0 if name == "idle_rank" and rank == sizes.num_ranks - 1 else sizes.num_tokens
    scores = _gumbel(num_tokens, sizes.num_experts, generator)
    if name == "zipf":
        scores += _zipf_logits(sizes.num_experts, float(argument), seed)
    if name != "one_rank":
        return scores.topk(sizes.num_topk, dim=1).indices
    num_local_experts = sizes.num_experts // sizes.num_ranks
    num_choices = min(sizes.num_topk, num_local_experts)
    chosen = torch.full((num_tokens, sizes.num_topk), -1)
    chosen[:, :num_choices] = scores[:, :num_local_experts].topk(num_choices, dim=1).indices
    return chosen


def note(routing: str, sizes: Sizes) -> str:
    """How the routing was made, if readers of the figures must know; often empty."""
    if routing != "text":
        return ""
    num_own, num_choices = _text_choices().amax() + 1, _text_choices().shape[1]
    return (
        f"router with {num_own} experts, top-{num_choices}: expert e of the router stands for the experts "
        f"e * {sizes.num_experts}/{num_own} and following, which its tokens take in turn; first {sizes.num_topk} choices"
    )


def _gumbel(num_tokens: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Gumbel noise: with it, the K largest logits are a draw without replacement."""
    uniform = torch.rand(num_tokens, num_experts, generator=generator).clamp_(1e-20, 1 - 1e-7)
    return -torch.log(-torch.log(uniform))


def _zipf_logits(num_experts: int, exponent: float, seed: int) -> Tensor:
    """The logits of a Zipf distribution over the experts in random order, the same on every rank."""
    popularity = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))
    return -exponent * torch.log(popularity + 1.0)


# ---- the text's router


def _text(sizes: Sizes, rank: int) -> Tensor:
    """Rank r continues where rank r - 1 stops, wrapping around at the end."""
    choices = _text_choices()
    place = (torch.arange(sizes.num_tokens) + rank * sizes.num_tokens) % len(choices)
    num_own = int(choices.amax()) + 1
    first = choices[place, : sizes.num_topk] * sizes.num_experts // num_own
    spread = max(1, sizes.num_experts // num_own)
    return (first + (torch.arange(sizes.num_tokens) % spread)[:, None]).clamp(max=sizes.num_experts - 1)


@functools.cache
def _text_choices() -> Tensor:
    """int64 [layers * tokens of the text, choices], layer by layer: the choices of the model's routers."""
    from moe_a2a.samples import models, text

    model = models.build("qwen3_moe", seed=0)
    chosen: list[Tensor] = []
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            module.register_forward_pre_hook(lambda _, arguments: chosen.append(arguments[1]))
    with torch.no_grad():
        model(input_ids=text.batch())
    if not chosen:
        raise RuntimeError('routing "text" needs transformers 5.x, whose experts are separate modules')
    return torch.cat(chosen)
