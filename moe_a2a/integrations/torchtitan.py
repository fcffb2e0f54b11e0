"""torchtitan's expert parallelism over moe_a2a: a token dispatcher, taken by an override::

    torchrun ... -m torchtitan.train ... --override.imports moe_a2a.integrations.torchtitan.moe_a2a_override

It takes the place of AllToAllTokenDispatcher and its subclasses, in every layer, with gradients of the rows and the scores.
Interface: torchtitan 0.3, `models/common/token_dispatcher.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from torchtitan.config import override
    from torchtitan.models.common.token_dispatcher import (
        AllToAllTokenDispatcher,
        BaseEPTokenDispatcher,
        LocalTokenDispatcher,
    )
except ImportError as error:
    raise ImportError(
        "moe_a2a.integrations.torchtitan needs torchtitan 0.3 or newer: pip install torchtitan"
    ) from error

from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.token_dispatcher import TokenDispatcher


class MoeA2ATokenDispatcher(BaseEPTokenDispatcher):  # type: ignore[misc]
    """dispatch() and combine() of one layer. Without expert parallelism, what torchtitan does on one rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):  # type: ignore[misc]
        """expert_alignment: each expert's rows are padded to a multiple of it, with zeros, as quantised products want.
        timeout: seconds that a rank waits for another. Ranks may compile for minutes before their first call."""

        expert_alignment: int = 1
        timeout: float = 300.0

    def __init__(self, config: Config):
        super().__init__(config)
        self.expert_alignment, self.timeout = config.expert_alignment, config.timeout

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """Returns (rows by local expert; how many of each, padding included; what combine() needs)."""
        if self.ep_mesh is None:
            return LocalTokenDispatcher.dispatch(  # type: ignore[no-any-return]
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        dispatcher = _token_dispatcher(self, x_TD)
        rows, routes = dispatcher.dispatch(
            x_TD, topk_expert_ids_TK, topk_scores_TK.float(), expert_alignment=self.expert_alignment
        )
        return rows, routes.expert_offsets.diff(), (dispatcher, routes)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """[T, D]: the sum of the experts' rows, weighted by the scores."""
        if self.ep_mesh is None:
            return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        dispatcher, routes = metadata
        return dispatcher.combine(routed_output_RD, routes)


@override(target=AllToAllTokenDispatcher.Config, description="Dispatch and combine by moe_a2a.")
def moe_a2a_override(cfg: AllToAllTokenDispatcher.Config, **options: Any) -> MoeA2ATokenDispatcher.Config:
    """options: of MoeA2ATokenDispatcher.Config. A dispatcher that pads its experts' rows keeps doing so."""
    options.setdefault("expert_alignment", getattr(cfg, "pad_multiple", 1))
    return MoeA2ATokenDispatcher.Config(num_experts=cfg.num_experts, top_k=cfg.top_k, **options)


class _Kind(NamedTuple):
    """The layers that share an ExpertParallel: one of them runs at a time."""

    group: Any
    num_experts: int
    num_topk: int
    hidden: int
    dtype: torch.dtype
    device: torch.device


_made: dict[_Kind, TokenDispatcher] = {}


def _token_dispatcher(layer: MoeA2ATokenDispatcher, x: Tensor) -> TokenDispatcher:
    """torchtitan pads batches, so that all ranks have equally many tokens: they make and replace one together. The one before
    stays while a backward pass needs it."""
    kind = _Kind(layer.ep_mesh.get_group(), layer.num_experts, layer.top_k, x.shape[1], x.dtype, x.device)
    made = _made.get(kind)
    if made is None or made.ep.num_max_tokens_per_rank < len(x):
        made = _made[kind] = TokenDispatcher(
            ExpertParallel(
                kind.group,
                num_experts=kind.num_experts,
                num_topk=kind.num_topk,
                hidden=kind.hidden,
                num_max_tokens_per_rank=len(x),
                dtype=kind.dtype,
                device=kind.device,
                timeout=layer.timeout,
            )
        )
    return made
