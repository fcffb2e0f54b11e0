"""Data parallelism replicates every parameter of a model. A MoELayer's experts differ from rank to rank of its ExpertParallel:
these checks refuse to replicate or shard them over those ranks. Over other ranks they may be replicas."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch import nn

from moe_a2a.groups import TorchGroup

# For each layer, the DistributedDataParallel modules that were found to leave its weights alone.
_apart: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


def check_not_replicated(ep: Any, layer: nn.Module) -> None:
    """Raises RuntimeError if a DistributedDataParallel that is running has overwritten the layer's weights."""
    if not dist.is_available():
        return
    ddp: Any = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if ddp is None or ddp in (apart := _apart.setdefault(layer, weakref.WeakSet())):
        return
    replicated = {id(tensor) for tensor in (*ddp._module_parameters, *ddp.modules_buffers)}
    own = (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
    names = [name for name, tensor in own if id(tensor) in replicated]
    if names and _owners_of_other_experts(ep) & _ranks_of(ddp.process_group):
        raise RuntimeError(
            f"DistributedDataParallel takes {', '.join(names)} of a MoELayer for replicas on rank {ep.rank}, and has "
            "overwritten them on all ranks but one; load them again, and before DistributedDataParallel(model) call "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names) with their names in the model"
        )
    apart.add(ddp)


def why_not_sharded(ep: Any, layer: nn.Module, name: str, weight: Any) -> str:
    """Why `weight`, a DTensor, a view of a FlatParameter or neither, cannot be the layer's weight `name`; "" if it can."""
    owners, mesh = _owners_of_other_experts(ep), getattr(weight, "device_mesh", None)
    if mesh is not None and owners & set(mesh.mesh.flatten().tolist()):
        return (
            f"{name} would be sharded over ranks that own different experts than rank {ep.rank}; pass "
            "fully_shard(model, ignored_params=set(layer.parameters()))"
        )
    # A view does not reveal which ranks it is sharded over.
    is_flattened = getattr(layer, "_is_fsdp_managed_module", False) and not isinstance(weight, nn.Parameter)
    if owners and is_flattened:
        return (
            f"FullyShardedDataParallel would make one parameter of {name} and those of other ranks, which own different "
            f"experts than rank {ep.rank}; pass ignored_states=set(layer.parameters()), or use fully_shard()"
        )
    return ""


def _owners_of_other_experts(ep: Any) -> set[int]:
    """Ranks as torch.distributed numbers them; with two levels, those of this node and this rail."""
    local = getattr(ep, "local", ep)._group
    groups = [local._process_group or dist.group.WORLD] if isinstance(local, TorchGroup) else []
    if ep is not getattr(ep, "local", ep):
        groups.append(ep._rail._group)
    ranks = set().union(*map(_ranks_of, groups))
    return ranks - {dist.get_rank()} if ranks else ranks


def _ranks_of(group: Any) -> set[int]:
    """Empty if torch.distributed does not know the group."""
    try:
        return set(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return set()
