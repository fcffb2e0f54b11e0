"""Runs every Mixture-of-Experts model of transformers through dispatch(), its own experts, combine()::

    from moe_a2a.integrations.transformers import register, shard_experts

    experts = register(group)       # a torch.distributed group, or moe_a2a.thread_group(n)[rank]
    shard_experts(model, group)     # optional: frees the experts that other ranks own
    model.set_experts_implementation("moe_a2a")
    with torch.no_grad():
        logits = model(my_part_of_the_batch).logits
    experts.close()

Each rank runs the whole model on its own part of the batch; only the experts are sharded: rank r
owns experts r * n to (r + 1) * n - 1, n = num_experts / num_ranks rounded up. If num_ranks does
not divide num_experts, the last ranks own fewer experts, or none.

All ranks run the same MoE layers in the same order. A rank without work runs one token of
padding, since transformers' models cannot run an empty batch. `model.generate()` ends early on some
ranks unless called with `synced_gpus=True`.
Inference only: this experts function has no backward pass. For layers that train see docs/training.md.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError(
        "moe_a2a.integrations.transformers needs transformers 5.17 or newer: pip install 'transformers>=5.17'"
    ) from error

import moe_a2a
from moe_a2a import arguments, calls, operators, set_up
from moe_a2a.errors import PeerRefusedError
from moe_a2a.graph_tracing import is_tracing
from moe_a2a.groups import rendezvous
from moe_a2a.integrations import kernel_experts
from moe_a2a.integrations.experts_module import (
    ExpertsModule,
    is_experts_module,
    keep_only,
    num_experts_per_rank,
    owned_experts,
    require_supported,
    run_owned_experts,
)

AGREEMENT = "agree on the size of a layer's buffers"  # what the ranks meet for without num_max_tokens_per_rank


def register(
    group,
    *,
    num_max_tokens_per_rank: int | None = None,
    timeout: float = 30.0,
    name: str = "moe_a2a",
    fused: bool | None = None,
) -> RegisteredExperts:
    """Make `name` known to `model.set_experts_implementation()`; every rank of the group calls it.

    num_max_tokens_per_rank: tokens (batch * sequence) of the largest forward pass of any rank. If omitted,
        the ranks exchange their token counts before each layer and buffers grow as needed. That
        takes about a millisecond per layer, so pass the number for speed.
    name: with several names, one process may serve several groups, or be several ranks (threads).
        Registering a name again replaces its previous meaning.
    fused: None: on a GPU, moe_a2a's kernels run a module's experts if they can compute what it does
        (docs/transformers.md lists the families), else PyTorch's products do; True: the kernels, or an error that says why
        not; False: PyTorch's products. With the kernels and num_max_tokens_per_rank, nothing synchronises with the host.
    """
    experts = RegisteredExperts(group, num_max_tokens_per_rank, timeout, name, fused)
    ALL_EXPERTS_FUNCTIONS[name] = experts
    return experts


def shard_experts(model: nn.Module, group) -> nn.Module:
    """Free the experts that this rank of the group does not own, in place; returns the model.

    Afterwards the model runs only through the group that it was split for, load_state_dict() refuses what another rank has
    saved, and save_pretrained() refuses to save what would be a part of the model.
    """
    group = moe_a2a.as_group(group)
    experts_modules = [(n, m) for n, m in model.named_modules() if is_experts_module(m)]
    if not experts_modules:
        raise ValueError(
            f"{type(model).__name__} has no experts that transformers lets other libraries implement "
            "(model.set_experts_implementation)"
        )
    for name, module in experts_modules:
        require_supported(module)
        keep_only(module, _owned_experts(module, group))
        module.moe_a2a_layer, module.moe_a2a_split_for = name, (group.rank, group.num_ranks)
        module.moe_a2a_number = operators.numbered(module)
        module.register_state_dict_post_hook(_note_rank)
        module.register_load_state_dict_pre_hook(_refuse_experts_of_another_rank)
    if group.num_ranks > 1 and hasattr(model, "save_pretrained"):
        saved: Any = functools.partial(_save_pretrained, model, group.rank)
        model.save_pretrained = saved
    return model


def _save_pretrained(model: Any, rank: int, *args: Any, **kwargs: Any) -> Any:
    """The method of a sharded model. The folder would look like a whole checkpoint, which no process can load."""
    state_dict = args[2] if len(args) > 2 else kwargs.get("state_dict")
    if state_dict is None:
        raise RuntimeError(
            f"after shard_experts() the {type(model).__name__} of rank {rank} holds this rank's experts only; call "
            "save_pretrained() before, or pass it the whole state_dict=; torch.save(model.state_dict(), file) saves what this "
            "rank has"
        )
    return type(model).save_pretrained(model, *args, **kwargs)


def _note_rank(module: ExpertsModule, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    metadata["experts_of_rank"] = module.moe_a2a_split_for


def _refuse_experts_of_another_rank(
    module: ExpertsModule, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """load_state_dict() itself would take them: their shapes are the same."""
    here = module.moe_a2a_split_for
    there = metadata.get("experts_of_rank", here)
    if there != here:
        raise ValueError(
            "{} holds the experts of rank {} of {}, and this is rank {} of {}; load the state_dict() that this rank has "
            "saved".format(module.moe_a2a_layer, *there, *here)
        )


class RegisteredExperts:
    """The experts function; all layers of the same shape share one `ExpertParallel`."""

    def __init__(
        self, group, num_max_tokens_per_rank: int | None, timeout: float, name: str, fused: bool | None = None
    ) -> None:
        self.group = moe_a2a.as_group(group)
        if num_max_tokens_per_rank is not None:
            num_max_tokens_per_rank = arguments.checked_int(
                self.group.rank, "num_max_tokens_per_rank", num_max_tokens_per_rank, 1
            )
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.timeout = arguments.checked_timeout(self.group.rank, timeout)
        self.name = name
        self.fused = None if fused is None else arguments.checked_bool(self.group.rank, "fused", fused)
        self._by_shape: dict[tuple, moe_a2a.ExpertParallel] = {}
        self._newest_shape: tuple | None = None  # where the peers wait, should a call's arguments have none
        self._number = operators.numbered(self)

    def __call__(
        self, module: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """hidden_states [T, H], top_k_index and top_k_weights [T, K] -> [T, H]."""
        if is_tracing() and hasattr(module, "moe_a2a_number") and module.moe_a2a_number.value:
            numbers = module.moe_a2a_number.value, self._number.value
            operator = operators.that_returns(hidden_states.numel(), "transformers_experts")
            return operator(hidden_states, top_k_index, top_k_weights, *numbers)
        return self._run(module, hidden_states, top_k_index, top_k_weights)

    @torch.compiler.disable  # a module that shard_experts() has not seen has no number: its graph breaks here
    def _run(self, module: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        with self._refused_if_failed():
            arguments.check_per_token(
                self.group.rank, hidden_states=hidden_states, top_k_index=top_k_index, top_k_weights=top_k_weights
            )
            shape = self._newest_shape = _shape_of(module, hidden_states, top_k_index)
            require_supported(module)
            _require_inference(module, hidden_states)
            owned = _owned_experts(module, self.group)
            by_kernels = self._runs_kernels(module, hidden_states, owned)
        ep = self._expert_parallel(module, len(hidden_states), shape)

        with calls.dispatch_refused_if_failed(ep):
            handle = ep.dispatch(
                hidden_states.contiguous(),
                _drop_masked(top_k_index, module.num_experts),
                top_k_weights.float().contiguous(),
            )
        with calls.combine_refused_if_failed(handle):
            y = (kernel_experts.run_by_kernels if by_kernels else _run_by_torch)(module, owned, handle).to(ep.dtype)
        with calls.released_if_failed(handle):  # nobody can try the combine again
            return ep.combine(y, handle)

    def close(self) -> None:
        """Free the buffers and unregister the name; every rank of the group calls it."""
        for ep in self._by_shape.values():
            ep.close()
        self._by_shape.clear()
        if ALL_EXPERTS_FUNCTIONS.get(self.name) is self:
            del ALL_EXPERTS_FUNCTIONS[self.name]

    @property
    def expert_parallels(self) -> list[moe_a2a.ExpertParallel]:
        return list(self._by_shape.values())

    def __enter__(self) -> RegisteredExperts:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    @contextlib.contextmanager
    def _refused_if_failed(self) -> Iterator[None]:
        """Wraps the checks of a call. If one fails, the peers learn of it where they wait for this rank: with
        num_max_tokens_per_rank in the dispatch, or where they make its buffers; without, where they agree on the buffers'
        size."""
        try:
            yield
        except BaseException as error:
            if self.num_max_tokens_per_rank is None:
                with rendezvous.begin(self.group, AGREEMENT) as meeting:
                    meeting.post((None, 0, calls.words_of(error)))
                raise
            if self._newest_shape in self._by_shape:
                refused = calls.dispatch_refused_if_failed(self._by_shape[self._newest_shape])
            else:
                refused = set_up.refused_if_failed(self.group, "ExpertParallel")
            with refused:
                raise

    def _runs_kernels(self, module: ExpertsModule, hidden_states: Tensor, owned: range) -> bool:
        if self.fused is False or (self.fused is None and hidden_states.device.type == "cpu"):
            return False
        why_not = kernel_experts.why_not(module, hidden_states, owned)
        if self.fused and why_not is not None:
            raise ValueError(f"fused=True, but {type(module).__name__} on rank {self.group.rank}: {why_not}")
        return why_not is None

    def _expert_parallel(self, module: ExpertsModule, num_tokens: int, shape: tuple) -> moe_a2a.ExpertParallel:
        hidden, _, num_topk, dtype, device = shape
        ep = self._by_shape.get(shape)
        capacity = self.num_max_tokens_per_rank
        if capacity is None:
            capacity = self._agree_on_capacity(module, num_tokens, shape)
        if ep is not None and capacity <= ep.num_max_tokens_per_rank:
            return ep
        if ep is not None:
            self._by_shape.pop(shape).close()  # if the larger one cannot be made, the next call makes another
        num_ranks = self.group.num_ranks
        ep = self._by_shape[shape] = moe_a2a.ExpertParallel(
            self.group,
            num_experts=num_ranks * num_experts_per_rank(module.num_experts, num_ranks),
            num_topk=num_topk,
            hidden=hidden,
            num_max_tokens_per_rank=capacity,
            dtype=dtype,
            device=device,
            timeout=self.timeout,
        )
        return ep

    def _agree_on_capacity(self, module: ExpertsModule, num_tokens: int, shape: tuple) -> int:
        """The most tokens of any rank, rounded up to a power of two so that buffers seldom grow.

        Ranks in different layers would mix up their rows; this detects them.
        """
        layer = getattr(module, "moe_a2a_layer", type(module).__name__)
        here = (layer, *shape[:4])
        with rendezvous.begin(self.group, AGREEMENT) as meeting:
            everywhere = meeting.all_gather((here, num_tokens, None), self.timeout)
        for rank, (there, _, error) in enumerate(everywhere):
            if error is not None:
                raise PeerRefusedError(
                    f"rank {self.group.rank} in layer {here}: rank {rank} refused its call: {error}", peer=rank
                )
            if there != here:
                raise RuntimeError(
                    f"rank {self.group.rank} is in layer {here} while rank {rank} is in {there}: "
                    "all ranks must run the same MoE layers in the same order"
                )
        most = max(num_tokens for _, num_tokens, _ in everywhere)
        return max(16, 1 << (most - 1).bit_length())


def _shape_of(module: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor) -> tuple:
    """What the layers that share an ExpertParallel have in common."""
    sizes = hidden_states.shape[1], module.num_experts, top_k_index.shape[1]
    return *sizes, hidden_states.dtype, hidden_states.device


def _run_by_torch(module: ExpertsModule, owned: range, handle: moe_a2a.DispatchHandle) -> Tensor:
    # The only number that the host reads: it limits the rows below to the routes.
    rows = handle.expert_row_index[: handle.num_routes]
    offsets = handle.expert_offsets[: len(owned) + 1]
    return run_owned_experts(module, owned, handle.recv_x.index_select(0, rows), offsets)


def _owned_experts(module: ExpertsModule, group) -> range:
    here = (group.rank, group.num_ranks)
    split_for = getattr(module, "moe_a2a_split_for", here)
    if split_for != here:
        raise ValueError("the experts were split for rank {} of {}, this is rank {} of {}".format(*split_for, *here))
    return owned_experts(module.num_experts, *here)


def _drop_masked(top_k_index: Tensor, num_experts: int) -> Tensor:
    """Models mark a dropped route by -1 or by num_experts; dispatch() expects -1."""
    exists = (top_k_index >= 0) & (top_k_index < num_experts)
    return torch.where(exists, top_k_index, -1).contiguous()


def _require_inference(module: ExpertsModule, hidden_states: Tensor) -> None:
    if torch.is_grad_enabled() and (hidden_states.requires_grad or any(p.requires_grad for p in module.parameters())):
        raise RuntimeError(
            "the experts function of moe_a2a has no backward pass: call the model under torch.no_grad() or torch.inference_mode()"
        )
