"""TokenDispatcher: dispatch() and combine() with gradients, for layers whose experts are ordinary PyTorch.

Both are linear in the rows, and each is the transpose of the other, so a backward pass is the same two exchanges:

    forward                                             backward
    dispatch: a token's row to its routes               combine: the sum of the gradients of a token's routes
    combine: the weighted sum of a token's routes       dispatch: the gradient of a token's sum to its routes

The gradient of topk_weights is a scalar per route. It is written to its place in a table of all ranks' choices, and a
reduce-scatter returns each rank's part. To find the place, a dispatch in backward carries the index of each choice in place
of its weight.

The calls of a backward pass must not depend on one rank's data. So dispatch() is recorded even if neither x nor topk_weights
requires grad, and combine() depends on it through routes.weights even if y does not, as on a rank without routes. The
autograd engine runs recorded nodes in reverse order of their creation, which is the same on every rank.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_a2a import arguments, calls
from moe_a2a.collectives import Collectives, check_collectives_of
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.groups import HandleExchange
from moe_a2a.handle import DispatchHandle
from moe_a2a.row_routes import by_choice, choice_numbers, make_unweighted
from moe_a2a.untraced import untraced

COLLECTIVES_NBYTES = 1 << 20  # larger tables of gradients go in slices


@dataclass(eq=False, frozen=True)
class Routes:
    """The routes behind the rows of TokenDispatcher.dispatch(), and the key to their combine().

    weights is float32 [num_rows]: the weight of each row's route, 0 for rows without a route. Differentiable. Do not change it:
    a weighted combine() takes the weights that dispatch() got.
    expert_offsets is int32 [E_local + 1] on the device: the rows of local expert e are expert_offsets[e] to
    expert_offsets[e + 1] - 1, and expert_offsets[1:] is what torch._grouped_mm takes as `offs`.
    split_sizes holds the rows of each local expert as ints, for rows.split(). It is None if num_max_routes was given,
    since the host has read nothing then.
    """

    weights: Tensor
    expert_offsets: Tensor
    split_sizes: list[int] | None
    _topk_idx: Tensor
    _exchange: _Exchange

    def release(self) -> None:
        """Ends the routes without a combine. Every rank must do the same."""
        self._exchange.handle.release()

    @contextlib.contextmanager
    def refused_if_failed(self) -> Iterator[None]:
        """Wraps the experts: if they fail here, the other ranks' combine() raises PeerRefusedError instead of waiting."""
        with calls.combine_refused_if_failed(self._exchange.handle):
            yield


class TokenDispatcher:
    """dispatch() and combine() of an ExpertParallel, with gradients of x, y and topk_weights.

        dispatcher = moe_a2a.TokenDispatcher(ep)
        rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
        out = dispatcher.combine(experts(rows, routes), routes)

    Args:
        ep: the ranks and their memory. Dispatchers of the same `ep` share a Collectives, which all ranks make together with
            the first of them and which is closed with `ep`.
        collectives: a Collectives of the same ranks to use instead. Required with HandleExchange.

    In grad mode a backward pass through both calls runs a dispatch, a reduce-scatter and a combine, on every rank and
    whatever requires grad there. So all ranks run the same calls, in the same mode, and pass backward through the same
    outputs; their numbers of tokens may differ, and may be zero. docs/training.md says what this costs.
    """

    def __init__(self, ep: ExpertParallel, *, collectives: Collectives | None = None):
        if not isinstance(ep, ExpertParallel):
            raise TypeError(
                f"ep is a {type(ep).__name__}; pass an ExpertParallel, or for several nodes make a TwoLevelTokenDispatcher"
            )
        self.ep = ep
        self._training = _training_of(ep, collectives)
        # Requires grad, so that dispatch() is always recorded.
        self._anchor = torch.empty(0, dtype=torch.float32, device=ep.device, requires_grad=True)
        self._newest: weakref.ref[DispatchHandle] | None = None

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
    ) -> tuple[Tensor, Routes]:
        """Sends each token's row to the ranks of its experts. Returns (rows, routes): a new tensor [num_rows, H] with one row
        per route, local expert by local expert, in the order of the positions of a DispatchHandle; and the routes behind it.

        Args:
            x, topk_idx, topk_weights: as for ExpertParallel.dispatch(); x of the dtype of `ep`.
            expert_alignment: each expert's rows begin at a multiple of it, with rows of zeros between.
            num_max_routes: number of rows to return, enough for any batch; the rows behind the last route are zeros. None:
                one per route; to learn how many, the host synchronises with the device. More routes raise ValueError on
                the CPU; on a GPU they are left out of rows and offsets, and check() raises RoutingError.

        Raises: as ExpertParallel.dispatch().
        """
        if num_max_routes is not None:
            num_max_routes = arguments.checked_int(self.ep.rank, "num_max_routes", num_max_routes, 1)
        arguments.check_not_transformed(self.ep.rank, "TokenDispatcher")
        exchange = _Exchange(self.ep, self._training, expert_alignment, num_max_routes)
        with exchange.combine_refused_if_failed():
            rows, weights = _Dispatch.apply(self._anchor, x, topk_weights, topk_idx, exchange)
        self._newest = weakref.ref(exchange.handle)
        return rows, Routes(weights, exchange.expert_offsets, exchange.split_sizes, topk_idx, exchange)

    @untraced
    @calls.refuses_wrong_arguments(lambda dispatcher: dispatcher._newest_refused_if_failed())
    def combine(self, y: Tensor, routes: Routes, *, weighted: bool = True, wire: str | None = None) -> Tensor:
        """Returns [num_tokens, H]: for each of this rank's tokens the weighted sum of its routes' rows of y.

        Args:
            y: one row per row of dispatch(), of the dtype of `ep`.
            routes: of that dispatch(); valid for one combine.
            weighted: False: the sum of the rows as they are, because the experts have applied routes.weights. Then y is not
                kept for the backward pass.
            wire: see ExpertParallel.combine(); for the forward pass.

        Raises: as ExpertParallel.combine(). A combine that fails ends the routes on every rank.
        """
        if not isinstance(routes, Routes):
            with self._newest_refused_if_failed():
                name = type(routes).__name__
                raise TypeError(f"routes is a {name} on rank {self.ep.rank}; pass the routes that dispatch() returned")
        exchange = routes._exchange
        with exchange.combine_refused_if_failed():
            arguments.check_not_transformed(self.ep.rank, "TokenDispatcher")
            combined: Tensor = _Combine.apply(routes.weights, y, routes._topk_idx, exchange, weighted, wire)
        return combined

    def _newest_refused_if_failed(self) -> contextlib.AbstractContextManager[None]:
        """Wraps a combine() without routes: refuses and ends the newest dispatch, most likely the one that the others combine."""
        newest = self._newest() if self._newest is not None else None
        if newest is not None and newest.is_open:
            return calls.combine_refused_if_failed(newest)
        return calls.attempt_refused_if_failed(self.ep)


def _training_of(ep: ExpertParallel, collectives: Collectives | None) -> _Training:
    if collectives is not None:
        check_collectives_of(ep, collectives)
        return _Training(collectives)
    if ep._training is None:
        if isinstance(ep._group, HandleExchange):
            raise ValueError(
                f"the ExpertParallel of rank {ep.rank} was made with HandleExchange, so a TokenDispatcher cannot make its "
                "Collectives; pass collectives="
            )
        table_nbytes = 4 * ep.num_ranks * ep.num_max_tokens_per_rank * ep.num_topk
        made = Collectives(ep._comm, min(table_nbytes, COLLECTIVES_NBYTES))
        ep._closed_with_it.append(made)
        ep._training = _Training(made)
    training: _Training = ep._training
    return training


class _Training:
    """What the dispatchers of an ExpertParallel share."""

    def __init__(self, collectives: Collectives):
        self.collectives = collectives
        self._kept: tuple[_Exchange, DispatchHandle] | None = None

    def keep(self, exchange: _Exchange, handle: DispatchHandle) -> None:
        self._kept = exchange, handle

    def take_kept(self, exchange: _Exchange) -> DispatchHandle | None:
        """The handle that combine's backward has left open, if it is this exchange's and no dispatch came between."""
        if self._kept is None or self._kept[0] is not exchange:
            return None
        handle, self._kept = self._kept[1], None
        return handle if handle.is_open else None

    def release_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None and kept[1].is_open:
            kept[1].release()


class _Exchange:
    """One dispatch and its combine, forward and backward. Holds no tensor that a checkpoint would want to free."""

    handle: DispatchHandle  # from dispatch() on
    expert_offsets: Tensor
    split_sizes: list[int] | None = None

    def __init__(self, ep: ExpertParallel, training: _Training, expert_alignment: int, num_max_routes: int | None):
        self.ep, self.training = ep, training
        self.expert_alignment, self.num_max_routes = expert_alignment, num_max_routes
        self.num_rows = 0
        self.has_gaps = expert_alignment != 1 or num_max_routes is not None

    @contextlib.contextmanager
    def combine_refused_if_failed(self) -> Iterator[None]:
        """Wraps a dispatch() and what follows it: if that fails and the handle is open, its combine is refused. Autograd itself
        may fail outside forward(), on a dual tensor for example."""
        try:
            yield
        except BaseException:
            if not hasattr(self, "handle") or not self.handle.is_open:
                raise
            with calls.combine_refused_if_failed(self.handle):
                raise

    # ---- forward

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """One row per route, and its weight."""
        self.handle = self._opened(x, topk_idx, topk_weights)
        with calls.combine_refused_if_failed(self.handle):
            self.expert_offsets = self.handle.expert_offsets.clone()
            self.num_rows = self._count_rows()
            if self.num_max_routes is not None:
                self.expert_offsets.clamp_(max=self.num_rows)  # no product may read rows that were left out
            row_index = self._row_index(self.handle)
            weights = torch.where(row_index >= 0, self.handle.route_weights[: self.num_rows], 0.0)
            return self._gathered(self.handle, row_index), weights

    def combine(self, y: Tensor, weights: Tensor, weighted: bool, wire: str | None) -> Tensor:
        handle = self.handle
        with calls.released_if_failed(handle):
            if handle.is_open:  # else combine() says so, to the peers too
                with calls.combine_refused_if_failed(handle):
                    self._check_y(y)
                    if weights.requires_grad and handle._changed_in_place() == "topk_idx":  # backward sends along it
                        self._refuse_change("topk_idx", "pass topk_idx.clone() to dispatch()")
                    if not arguments.checked_bool(self.ep.rank, "weighted", weighted):
                        make_unweighted(handle)
                    elif not weights.is_inference() and weights._version > 0:
                        self._refuse_change(
                            "routes.weights", "scale y instead, or apply the weights to y and pass weighted=False"
                        )
            return self.ep.combine(y, handle, wire=wire)

    def _count_rows(self) -> int:
        can_look = self.num_max_routes is None or self.ep.device.type == "cpu"
        offsets = self.expert_offsets.tolist() if can_look else None
        if offsets is not None:
            self.ep._core.raise_reported()
        if self.num_max_routes is None:
            assert offsets is not None
            self.split_sizes = [end - begin for begin, end in zip(offsets, offsets[1:], strict=False)]
            return offsets[-1]
        if offsets is not None:
            arguments.check_num_routes(self.ep.rank, offsets[-1], self.num_max_routes)
        return min(self.num_max_routes, self.handle.capacity)

    def _check_y(self, y: Any) -> None:
        arguments.check_tensor(self.ep.rank, "y", y)
        if y.shape[:1] != (self.num_rows,):
            raise ValueError(
                f"y has shape {list(y.shape)}, but dispatch() returned {self.num_rows} rows on rank {self.ep.rank}; pass one "
                "row for each"
            )

    def _refuse_change(self, name: str, advice: str) -> NoReturn:
        """A change would affect the gradients but not the sums."""
        raise ValueError(f"{name} has been changed in place since dispatch() on rank {self.ep.rank}; {advice}")

    # ---- backward: the gradient of out, then those of rows and weights

    def saved_tensors(self, ctx: Any) -> tuple[Any, ...]:
        """Raises if they have been freed, or changed since; then the peers' dispatch of this backward pass is refused."""
        with calls.dispatch_refused_if_failed(self.ep):
            self._check_no_second_derivative()
            return ctx.saved_tensors

    def backward_of_combine(
        self, grad_out: Tensor, topk_idx: Tensor, y: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of y and, if y is given, of weights."""
        handle = self._reopened(grad_out, topk_idx)
        with calls.released_if_failed(handle), calls.refused_if_failed(self.training.collectives):
            if y is None or weights is None:
                grad_y, grad_weights = self._gathered(handle, self._row_index(handle)), None
            else:
                grad_y, grad_weights = self._weighted_grads(handle, y, weights)
        self.training.keep(self, handle)
        return grad_y, grad_weights

    def backward_of_dispatch(self, grad_rows: Tensor, grad_weights: Tensor, topk_idx: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and topk_weights."""
        handle = self.training.take_kept(self)
        if handle is None:  # another layer's calls came between, or combine's backward did not run
            # For the routes alone: nobody reads the rows that arrive.
            handle = self._reopened(grad_rows.new_empty(len(topk_idx), self.ep.hidden), topk_idx)
        collectives = self.training.collectives
        with calls.released_if_failed(handle):
            with calls.refused_if_failed(collectives):
                table = self._by_choice(handle, grad_weights)
                grad_rows = grad_rows.contiguous()
                make_unweighted(handle)
            grad_topk_weights = collectives.reduce_scatter(table)[: len(topk_idx)]
            return self.ep.combine(grad_rows, handle), grad_topk_weights

    def _weighted_grads(self, handle: DispatchHandle, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """One kernel: each row of the gradient times its weight, and its dot product with y."""
        return handle._core.weighted_grads(y, weights, handle._handle)

    def _by_choice(self, handle: DispatchHandle, grad_weights: Tensor) -> Tensor:
        """[R * T, K]: the gradient of each choice that has a route here, zeros elsewhere."""
        shape = self.ep.num_ranks * self.ep.num_max_tokens_per_rank, self.ep.num_topk
        return by_choice(grad_weights, self._row_index(handle), handle.route_weights[: self.num_rows], *shape)

    def _check_no_second_derivative(self) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True on rank {self.ep.rank}, but dispatch and combine have no second derivative; pass "
                "create_graph=False"
            )

    # ---- handles and their rows

    def _opened(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None) -> DispatchHandle:
        return self.ep.dispatch(
            x, topk_idx, topk_weights, layout="expert_major", expert_alignment=self.expert_alignment
        )

    def _reopened(self, x: Tensor, topk_idx: Tensor) -> DispatchHandle:
        """Sends x along the same routes, with the index of its choice as the weight of each."""
        with calls.dispatch_refused_if_failed(self.ep):
            choices, x = choice_numbers(len(topk_idx), self.ep.num_topk, topk_idx.device), x.contiguous()
        return self._opened(x, topk_idx, choices)

    def _row_index(self, handle: DispatchHandle) -> Tensor:
        """int32 [num_rows]: the row of recv_x of each position, -1 for those without a route."""
        index = handle.expert_row_index[: self.num_rows]
        if not self.has_gaps:
            return index
        positions = torch.arange(self.num_rows, device=index.device)
        return torch.where(positions < handle.expert_offsets[-1], index, -1)

    def _gathered(self, handle: DispatchHandle, row_index: Tensor) -> Tensor:
        if not self.has_gaps:
            return handle.recv_x.index_select(0, row_index)
        rows = handle.recv_x.index_select(0, row_index.clamp(min=0))
        return rows.masked_fill_((row_index < 0)[:, None], 0)


# Both save the same tensors on every rank, whatever requires grad: a checkpoint recomputes up to the last saved tensor, so
# otherwise it could repeat a call on some ranks only.


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, exchange: _Exchange
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.has_weights = exchange, topk_weights is not None
        ctx.save_for_backward(topk_idx)
        return exchange.dispatch(x, topk_idx, topk_weights)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        grad_x, grad_topk_weights = exchange.backward_of_dispatch(grad_rows, grad_weights, *exchange.saved_tensors(ctx))
        return None, grad_x, grad_topk_weights if ctx.has_weights else None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, y: Tensor, topk_idx: Tensor, exchange: _Exchange, weighted: bool, wire: str | None
    ) -> Tensor:
        ctx.exchange = exchange
        combined = exchange.combine(y, weights, weighted, wire)
        ctx.save_for_backward(topk_idx, *((y, weights) if weighted else (None, None)))
        return combined

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        grad_y, grad_weights = exchange.backward_of_combine(grad_out, *exchange.saved_tensors(ctx))
        return grad_weights, grad_y, None, None, None, None
