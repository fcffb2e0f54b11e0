"""torchtitan's expert parallelism over moe_a2a: a token dispatcher, taken by an override::

    torchrun ... -m torchtitan.train ... --override.imports moe_a2a.integrations.torchtitan.moe_a2a_override

It takes the place of AllToAllTokenDispatcher and its subclasses, in every layer, with gradients of the rows and the scores;
moe_a2a_hybridep_override that of HybridEPTokenDispatcher. Interface: torchtitan 0.3, `models/common/token_dispatcher.py`.
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
        HybridEPTokenDispatcher,
        LocalTokenDispatcher,
    )
except ImportError as error:
    raise ImportError(
        "moe_a2a.integrations.torchtitan needs torchtitan 0.3 or newer: pip install torchtitan"
    ) from error

from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.row_routes import worst_num_rows
from moe_a2a.token_dispatcher import TokenDispatcher


class MoeA2ATokenDispatcher(BaseEPTokenDispatcher):  # type: ignore[misc]
    """dispatch() and combine() of one layer. Without expert parallelism, what torchtitan does on one rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):  # type: ignore[misc]
        """Derives from HybridEP's, so that torchtitan's check for CUDA graphs accepts it. Two of its fields are used:

        pad_multiple: each expert's rows are padded to a multiple of it, with zeros, as quantised products want.
        non_blocking_capacity_factor: the number of rows, as a fraction in (0, 1] of the worst case. Rows that do not fit are
            left out, and a later call raises RoutingError. The host is never synchronised, so the step can be captured. None:
            as many rows as arrive.

        timeout: seconds that a rank waits for another. Ranks may compile for minutes before their first call."""

        timeout: float = 300.0

    def __init__(self, config: Config):
        super().__init__(config)
        self.expert_alignment, self.timeout = config.pad_multiple or 1, config.timeout
        self.capacity_factor = factor = config.non_blocking_capacity_factor
        if factor is not None and not 0 < factor <= 1:
            raise ValueError(
                f"non_blocking_capacity_factor={factor} is not in (0, 1]; pass None for as many rows as arrive"
            )

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
            x_TD,
            topk_expert_ids_TK,
            topk_scores_TK.float(),
            expert_alignment=self.expert_alignment,
            num_max_routes=self._num_max_routes(dispatcher.ep, len(x_TD)),
        )
        return rows, routes.expert_offsets.diff(), (dispatcher, routes)

    def _num_max_routes(self, ep: ExpertParallel, num_tokens: int) -> int | None:
        if self.capacity_factor is None:
            return None
        return max(1, worst_num_rows(ep, num_tokens, self.expert_alignment, self.capacity_factor))

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """[T, D]: the sum of the experts' rows, weighted by the scores."""
        if self.ep_mesh is None:
            return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        dispatcher, routes = metadata
        return dispatcher.combine(routed_output_RD, routes)


@override(target=AllToAllTokenDispatcher.Config, description="Dispatch and combine by moe_a2a.")
def moe_a2a_override(cfg: AllToAllTokenDispatcher.Config, **options: Any) -> MoeA2ATokenDispatcher.Config:
    """options: of MoeA2ATokenDispatcher.Config. A dispatcher that pads its experts' rows keeps doing so."""
    options.setdefault("pad_multiple", getattr(cfg, "pad_multiple", None))
    return MoeA2ATokenDispatcher.Config(num_experts=cfg.num_experts, top_k=cfg.top_k, **options)


@override(target=HybridEPTokenDispatcher.Config, description="Dispatch and combine by moe_a2a.")
def moe_a2a_hybridep_override(cfg: HybridEPTokenDispatcher.Config, **options: Any) -> MoeA2ATokenDispatcher.Config:
    """The same for the backend "hybridep". With a capacity factor, steps run in torchtitan's CUDA graphs."""
    options.setdefault("non_blocking_capacity_factor", cfg.non_blocking_capacity_factor)
    return moe_a2a_override(cfg, **options)


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
