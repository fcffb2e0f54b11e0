"""An MoE layer from dispatch to combine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from moe_a2a import arguments, calls, experts, operators, replicas
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.expert_weights import ExpertWeights, Weight
from moe_a2a.graph_tracing import is_tracing
from moe_a2a.token_dispatcher import TokenDispatcher
from moe_a2a.two_level.expert_parallel import TwoLevelExpertParallel
from moe_a2a.two_level.token_dispatcher import TwoLevelTokenDispatcher

log = logging.getLogger("moe_a2a")


class MoELayer(nn.Module):
    """dispatch -> SwiGLU experts -> combine, for a rank's own experts and tokens.

    On a GPU the experts are kernels that need nothing from the host, so a CUDA graph can capture the whole layer. If the
    kernels cannot run (float32, sizes that are not multiples of 16), and on the CPU, where PyTorch's products are faster,
    the experts run step by step in PyTorch. Printing the layer shows which of the two runs, and why.

    The weights are parameters of this rank, scales are buffers; state_dict() holds nothing else. They stay on the device of
    `ep` and in their dtype: `.to()` of another device or dtype raises, and so does load_state_dict(assign=True). load_state_dict()
    refuses what another rank has saved.

    In grad mode, if an input or a weight requires grad, the layer is recorded for a backward pass: its experts are products
    of PyTorch between the calls of a TokenDispatcher. From then on every call on this `ep` in grad mode is recorded, so
    that a rank whose tensors happen not to require grad still takes part in the others' backward. See docs/training.md.

    Args:
        ep: the ranks and their memory.
        w_gate_up: this rank's experts, [E_local, 2 * I, H] of the dtype of `ep`, the gate's rows before the up projection's.
            Or (float8 values, scales), with a float32 scale per 128 x 128 values, [E_local, 2 * ceil(I / 128),
            ceil(H / 128)], the gate's first; the rows then travel as float8 too.
        w_down: [E_local, H, I], or (float8 values, scales [E_local, ceil(H / 128), ceil(I / 128)]).
        fused: True: use kernels, or raise an error that says why not; False: step by step; None: see above.
        fused_combine, wire, num_max_routes: see ExpertParallel.experts().
    """

    w_gate_up_scales: torch.Tensor | None
    w_down_scales: torch.Tensor | None

    def __init__(
        self,
        ep: ExpertParallel | TwoLevelExpertParallel,
        w_gate_up: Weight,
        w_down: Weight,
        *,
        fused: bool | None = None,
        fused_combine: bool | None = None,
        wire: str | None = None,
        num_max_routes: int | None = None,
    ):
        super().__init__()
        if not isinstance(ep, (ExpertParallel, TwoLevelExpertParallel)):
            raise TypeError(f"ep is a {type(ep).__name__}; pass an ExpertParallel or a TwoLevelExpertParallel")
        weights = ExpertWeights.checked(ep, w_gate_up, w_down)
        experts.check_options(ep, fused, fused_combine, wire, num_max_routes)
        self.ep, self.fused, self.fused_combine = ep, fused, fused_combine
        self.wire, self.num_max_routes = wire, num_max_routes
        self._number = operators.numbered(self)
        self.w_gate_up = _as_parameter("w_gate_up", weights.gate_up)
        self.w_down = _as_parameter("w_down", weights.down)
        self.register_buffer("w_gate_up_scales", weights.gate_up_scales)
        self.register_buffer("w_down_scales", weights.down_scales)
        if not self._runs_kernels() and fused is None and ep.device.type != "cpu":
            log.warning("rank %d: %s", ep.rank, self)

    @calls.makes_a_dispatch
    def forward(
        self, hidden_states: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """hidden_states [num_tokens, H] of the dtype of `ep`, topk_idx [num_tokens, K] int32 or int64, topk_weights
        [num_tokens, K] float32, or None for weights of 1 -> [num_tokens, H] of the dtype of `ep`.

        Raises as ExpertParallel.dispatch() and combine(). If one rank raises anything before its combine, the others raise
        PeerRefusedError, and the layer stays usable on all."""
        if self._needs_grad(hidden_states, topk_weights) and not torch.compiler.is_exporting():
            if torch.compiler.is_dynamo_compiling():
                torch._dynamo.graph_break(
                    msg="a MoELayer that is recorded for a backward pass breaks a graph (docs/compile.md); compile without "
                    "fullgraph=True, or call it under torch.no_grad()"
                )
            recorded = torch.compiler.disable(self._recorded) if is_tracing() else self._recorded
            return recorded(hidden_states, topk_idx, topk_weights)
        if is_tracing():
            operator = operators.that_returns(hidden_states.numel(), "moe_layer")
            return operator(hidden_states, topk_idx, topk_weights, *self._tensors(), self._number.value)
        return self._run(hidden_states, topk_idx, topk_weights, *self._tensors())

    @calls.makes_a_dispatch
    def _run_in_graph(self, *inputs_and_weights: Any) -> torch.Tensor:
        """_run() for the operator of a graph: with the weights that the graph has, and without the module's hooks, which are in
        the graph too."""
        with torch.no_grad():
            return self._run(*inputs_and_weights)

    def _run(
        self, hidden_states: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, *weights: Any
    ) -> torch.Tensor:
        """forward() without a backward pass. weights: as _tensors()."""
        replicas.check_not_replicated(self.ep, self)
        ep, given = self.ep, _as_given(*weights)
        quantize = "fp8" if ExpertWeights.checked(ep, *given).is_float8 else None
        handle: Any = ep.dispatch(hidden_states, topk_idx, topk_weights, quantize=quantize)
        with calls.released_if_failed(handle):
            return ep.experts(handle, *given, **self._options())

    @calls.makes_a_dispatch  # forward() may be part of a graph, which this breaks
    def _recorded(
        self, hidden_states: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """forward() for a backward pass."""
        replicas.check_not_replicated(self.ep, self)
        # Before anything that may fail on this rank only: all ranks make the first together.
        dispatcher = _dispatcher_of(self.ep)
        arguments.check_not_transformed(self.ep.rank, "MoELayer")
        self._check_can_record()
        by_groups = experts.has_group_products(self.w_gate_up, self.w_down)
        bound = self.num_max_routes if by_groups else None
        rows, routes = dispatcher.dispatch(hidden_states, topk_idx, topk_weights, num_max_routes=bound)
        with routes.refused_if_failed():
            if by_groups:
                y = experts.swiglu_by_groups(rows, routes.expert_offsets, self.w_gate_up, self.w_down)
            else:
                arguments.check_num_routes(self.ep.rank, len(rows), self.num_max_routes)
                assert routes.split_sizes is not None  # without num_max_routes the host has read them
                y = experts.swiglu_of_each(rows, routes.split_sizes, self.w_gate_up, self.w_down)
        return dispatcher.combine(y, routes, wire=self.wire)

    def extra_repr(self) -> str:
        if self._runs_kernels():
            return f"{self.ep!r}, by kernels"
        why = self._weights().kernels_refuse(self.ep, self._row_dtype())
        why = "fused=False" if self.fused is False else why or "PyTorch's products are faster on the CPU"
        return f"{self.ep!r}, step by step in PyTorch: {why}"

    def _options(self) -> dict[str, Any]:
        return {
            "fused": self.fused,
            "fused_combine": self.fused_combine,
            "wire": self.wire,
            "num_max_routes": self.num_max_routes,
        }

    def _runs_kernels(self) -> bool:
        return experts.runs_kernels(self.ep, self._weights(), self._row_dtype(), self.fused)

    def _row_dtype(self) -> torch.dtype:
        return self.ep.dtype if self.w_gate_up_scales is None else self.w_gate_up.dtype

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        return self.w_gate_up, self.w_down, self.w_gate_up_scales, self.w_down_scales

    def _weights(self) -> ExpertWeights:
        return ExpertWeights.checked(self.ep, *_as_given(*self._tensors()))

    def _needs_grad(self, *inputs: Any) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = [t for t in (*inputs, self.w_gate_up, self.w_down) if isinstance(t, torch.Tensor)]
        return self.ep._training is not None or any(t.requires_grad for t in tensors)

    def _check_can_record(self) -> None:
        if self._weights().is_float8 or self.fused or self.fused_combine:
            what = "fused=True" if self.fused else "fused_combine=True" if self.fused_combine else "float8 weights"
            raise RuntimeError(
                f"MoELayer was called in grad mode on rank {self.ep.rank}, but with {what} it has no backward; call it under "
                f"torch.no_grad(), or make a layer without {what}"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MoELayer:
        """Called by .to(), .half(), .cuda() and so on, to change the weights, or what a parametrization makes them from."""
        for name in ("w_gate_up", "w_down", "w_gate_up_scales", "w_down_scales"):
            tensor = getattr(self, name)
            if tensor is not None and (problem := self._misfit(name, tensor, fn(tensor.detach().new_empty(0)))):
                raise ValueError(problem)
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        """Called by fully_shard() and FullyShardedDataParallel, which replace the weights."""
        if name in ("w_gate_up", "w_down") and (problem := replicas.why_not_sharded(self.ep, self, name, value)):
            raise ValueError(problem)
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Called by state_dict(), whose metadata then says whose experts they are."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1], {})
        metadata["experts_of_rank"] = self.ep.rank, self.ep.num_ranks

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        """Called by load_state_dict(), which with assign=True replaces the weights; else it copies into them."""
        rank, num_ranks = local_metadata.get("experts_of_rank", (self.ep.rank, self.ep.num_ranks))
        if rank != self.ep.rank and num_ranks == self.ep.num_ranks:  # after a shrink() a rank has another number
            *_, error_messages = others
            error_messages.append(
                f"{prefix}w_gate_up, {prefix}w_down: the experts of rank {rank} of {num_ranks}, and this is rank "
                f"{self.ep.rank}; load the state_dict() that this rank has saved"
            )
            return
        if local_metadata.get("assign_to_params_buffers"):
            own = dict((*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)))
            given = {name: state_dict[prefix + name] for name in own if prefix + name in state_dict}
            problems = [self._misfit(prefix + name, own[name], tensor) for name, tensor in given.items()]
            if any(problems):
                *_, error_messages = others
                error_messages += filter(None, problems)
                return  # the layer keeps its weights
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"a MoELayer cannot be copied or pickled (rank {self.ep.rank}): its ExpertParallel owns memory that the peers "
            "write into; save its state_dict(), or load that into another layer on the same ExpertParallel"
        )

    def _misfit(self, name: str, weight: torch.Tensor, new: torch.Tensor) -> str:
        """Why `new` cannot replace `weight`; "" if it can."""
        if (new.device, new.dtype) == (self.ep.device, weight.dtype):
            return ""
        return (
            f"{name} would become {new.dtype} on {new.device}, but the ExpertParallel of rank {self.ep.rank} needs "
            f"{weight.dtype} on {self.ep.device}; make another ExpertParallel, and a layer that uses it"
        )


def _dispatcher_of(ep: ExpertParallel | TwoLevelExpertParallel) -> Any:
    return TokenDispatcher(ep) if isinstance(ep, ExpertParallel) else TwoLevelTokenDispatcher(ep)


def _as_given(
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate_up_scales: torch.Tensor | None,
    w_down_scales: torch.Tensor | None,
) -> tuple[Weight, Weight]:
    """The weights as the caller of MoELayer() gives them."""
    if w_gate_up_scales is None or w_down_scales is None:
        return w_gate_up, w_down
    return (w_gate_up, w_gate_up_scales), (w_down, w_down_scales)


def _as_parameter(name: str, weight: torch.Tensor) -> nn.Parameter:
    if weight.requires_grad and not weight.is_leaf:
        raise ValueError(
            f"{name} is computed from a tensor that requires grad, and the layer would cut it off from that tensor; pass a leaf, "
            f"such as {name}.detach().clone()"
        )
    return weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=weight.requires_grad)
