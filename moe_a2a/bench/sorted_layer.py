"""A layer with a backward pass as training frameworks compose it: sort, all_to_all_single, PyTorch's products by experts.

Rows are gathered with index_select in both directions: PyTorch's own backward of a gather would add rows with atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from moe_a2a import experts
from moe_a2a.commands.baselines import SortAllToAll, SortPlan


def sorted_layer(
    baseline: SortAllToAll, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor
) -> Tensor:
    """x [T, H], topk_idx and topk_weights [T, K], weights as MoELayer takes them -> [T, H]. Differentiable."""
    with torch.no_grad():
        plan = baseline.plan(topk_idx)
    to_wire_order = torch.argsort(plan.to_expert_order)
    sent = _Spread.apply(x, plan, topk_idx.shape[1])
    received = _AllToAll.apply(sent, baseline, plan.recv_splits, plan.send_splits)
    rows = _Permute.apply(received, plan.to_expert_order, to_wire_order)
    y = _products(rows, plan, w_gate_up, w_down)
    in_wire_order = _Permute.apply(y, to_wire_order, plan.to_expert_order)
    returned = _AllToAll.apply(in_wire_order, baseline, plan.send_splits, plan.recv_splits)
    by_route = _ToRoutes.apply(returned, plan.src_route, topk_idx.numel()).view(*topk_idx.shape, x.shape[1])
    return torch.bmm(topk_weights.to(y.dtype)[:, None], by_route)[:, 0]


def _products(rows: Tensor, plan: SortPlan, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    if experts.has_group_products(w_gate_up, w_down):
        return experts.swiglu_by_groups(rows, plan.expert_offsets.int(), w_gate_up, w_down)
    return experts.swiglu_of_each(rows, plan.expert_offsets.diff().tolist(), w_gate_up, w_down)


def _by_routes(rows: Tensor, src_route: Tensor, num_routes: int) -> Tensor:
    """[num_routes, H]: the row of each route; zeros for dropped ones."""
    return rows.new_zeros(num_routes, rows.shape[1]).index_copy_(0, src_route, rows)


class _Spread(Function):
    """A token's row to each of its routes, in the order of sending."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: SortPlan, num_topk: int) -> Tensor:
        ctx.plan, ctx.shape = plan, (len(x), num_topk, x.shape[1])
        return x.index_select(0, plan.src_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        num_tokens, num_topk, _ = ctx.shape
        by_route = _by_routes(grads[0], ctx.plan.src_route, num_tokens * num_topk)
        return by_route.view(ctx.shape).sum(1), None, None


class _ToRoutes(Function):
    """Rows in the order of sending to [num_routes, H]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, src_route: Tensor, num_routes: int) -> Tensor:
        ctx.src_route = src_route
        return _by_routes(rows, src_route, num_routes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].index_select(0, ctx.src_route), None, None


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].index_select(0, ctx.inverse), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, baseline: SortAllToAll, recv_splits: list[int], send_splits: list[int]
    ) -> Tensor:
        ctx.baseline, ctx.recv_splits, ctx.send_splits = baseline, recv_splits, send_splits
        return baseline.exchange(rows, recv_splits, send_splits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.baseline.exchange(grads[0], ctx.send_splits, ctx.recv_splits), None, None, None
