"""dispatch() and combine() over several nodes with gradients: a TokenDispatcher within each node, and the rail between them.

Crossing the rail is linear too, and each way is the transpose of the other: the gradients of a token's rows return and are
added like its sums, those of its sums travel like its row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_a2a import arguments, calls
from moe_a2a.token_dispatcher import Routes, TokenDispatcher
from moe_a2a.two_level.expert_parallel import TwoLevelExpertParallel
from moe_a2a.two_level.passage import Passage, Sent
from moe_a2a.untraced import untraced


class _Crossing:
    """One dispatch and its combine on the rail, forward and backward."""

    passage: Passage  # from cross() on
    topk_idx: Tensor  # of the rows that have arrived

    def __init__(self, ep: TwoLevelExpertParallel, sent: Sent):
        self.ep, self._sent = ep, sent

    def cross(self) -> tuple[Tensor, Tensor]:
        """(rows, weights) that have arrived from all nodes."""
        self.passage, batch = self.ep._pass_on(self._sent, None)
        del self._sent
        self.topk_idx = batch["topk_idx"]
        return batch["x"], batch["topk_weights"]

    def cross_again(self, values: Tensor) -> Tensor:
        """values [num_tokens, H]: crosses as the tokens' rows did."""
        passage = self.passage
        self.ep._calls.compare("the backward pass of combine", passage)
        return self.ep._rail.all_to_all(values[passage.tokens], passage.num_sent, passage.num_received)

    def return_sums(self, *values: Tensor) -> list[Tensor]:
        """values [arrived rows, n] cross back; for each token the sum of what returns."""
        self.ep._calls.compare("the backward pass of dispatch", self.passage)
        return [self.ep._returned(self.passage, each.contiguous()) for each in values]


@dataclass(eq=False, frozen=True)
class TwoLevelRoutes(Routes):
    """Routes of this node's TokenDispatcher, whose tokens may come from other nodes."""

    _crossing: _Crossing

    @contextlib.contextmanager
    def refused_if_failed(self) -> Iterator[None]:
        """See Routes."""
        try:
            with super().refused_if_failed():
                yield
        except BaseException as error:
            self._crossing.ep._calls.compare("combine", None, error)
            raise


class TwoLevelTokenDispatcher:
    """TokenDispatcher over the ranks of several nodes.

    Args:
        ep: the ranks of all nodes. The dispatchers of an `ep` share a Collectives of each node's ranks, which all ranks make
            together with the first of them and which is closed with `ep`.

    What holds for TokenDispatcher holds here. dispatch() reads counts on the host even with num_max_routes. On the CPU the nodes
    compare their calls in the backward pass too. If a rank fails there, the other nodes wait until their timeout.
    """

    def __init__(self, ep: TwoLevelExpertParallel):
        if not isinstance(ep, TwoLevelExpertParallel):
            raise TypeError(f"ep is a {type(ep).__name__}; pass a TwoLevelExpertParallel")
        self.ep = ep
        self._within = TokenDispatcher(ep.local)
        # Requires grad, so that dispatch() is always recorded.
        self._anchor = torch.empty(0, dtype=torch.float32, device=ep.device, requires_grad=True)

    @untraced
    @calls.makes_a_dispatch
    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        expert_alignment: int = 1,
        num_max_routes: int | None = None,
    ) -> tuple[Tensor, TwoLevelRoutes]:
        """See TokenDispatcher.dispatch()."""
        ep = self.ep
        with ep._dispatching():
            try:
                arguments.check_not_transformed(ep.rank, "TwoLevelTokenDispatcher")
                topk_idx, topk_weights = arguments.checked_routing(ep.rank, topk_idx, topk_weights)
                with torch.no_grad():
                    ep._checked_batch(x, topk_idx, topk_weights, None, False)
                crossing = _Crossing(ep, ep._packed(x, topk_idx, topk_weights))
            except BaseException as error:
                ep._pass_on(None, error)
                raise
            here, weights = _Cross.apply(self._anchor, x, topk_weights, crossing)
            how: dict[str, Any] = {"expert_alignment": expert_alignment, "num_max_routes": num_max_routes}
            arrived: list[Tensor] = []

            def within() -> TwoLevelRoutes:
                rows, routes = self._within.dispatch(here, crossing.topk_idx, weights, **how)
                arrived.append(rows)
                return TwoLevelRoutes(**vars(routes), _crossing=crossing)

            routes = ep._calls.on_every_node(crossing.passage, within)
            return arrived[0], routes

    @untraced
    @calls.refuses_wrong_arguments(
        lambda dispatcher: dispatcher.ep._combine_refused_if_failed(dispatcher._within._newest_refused_if_failed())
    )
    def combine(self, y: Tensor, routes: Routes, *, weighted: bool = True, wire: str | None = None) -> Tensor:
        """See TokenDispatcher.combine() and, for the order of addition, TwoLevelExpertParallel.combine()."""
        failure = sums = None
        passage = routes._crossing.passage if isinstance(routes, TwoLevelRoutes) else None
        try:
            with self.ep._rail.within_node():
                sums = self._within.combine(y, routes, weighted=weighted, wire=wire)
            if passage is None:
                raise TypeError(f"routes on rank {self.ep.rank} are of another TokenDispatcher; pass those of this one")
        except BaseException as error:
            failure = error
        self.ep._calls.compare("combine", passage if failure is None else None, failure)
        assert isinstance(routes, TwoLevelRoutes)
        combined: Tensor = _ReturnSums.apply(sums, routes._crossing)
        return combined


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, topk_weights: Tensor | None, crossing: _Crossing
    ) -> tuple[Tensor, Tensor]:
        ctx.crossing, ctx.has_weights = crossing, topk_weights is not None
        return crossing.cross()

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_topk_weights = ctx.crossing.return_sums(grad_rows, grad_weights)
        return None, grad_x, grad_topk_weights if ctx.has_weights else None, None


class _ReturnSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, crossing: _Crossing) -> Tensor:
        ctx.crossing = crossing
        return crossing.ep._returned(crossing.passage, sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.crossing.cross_again(grad), None
