"""Options of the torch.distributed backend, and how its ranks are placed on nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from itertools import groupby

from moe_a2a import arguments

LARGEST = 1 << 40


@dataclass
class Options:
    """`pg_options` of init_process_group() and new_group(); the same on every rank. A value of None comes from an environment
    variable, else the default; both are named below.

    Args:
        max_nbytes: bytes per slice; larger tensors are sent in slices; MOE_A2A_BACKEND_NBYTES, 64 MiB.
        num_blocks: see Collectives; MOE_A2A_BACKEND_BLOCKS, 0.
        ranks_per_node: ranks of the default group on each machine, if there are several machines: rank r is on machine
            r // ranks_per_node, and collectives run in two levels; MOE_A2A_BACKEND_RANKS_PER_NODE, 0: one machine.
        parallel_slices, staging_nbytes: see TwoLevelCollectives; MOE_A2A_BACKEND_PARALLEL_SLICES, 2, and
            MOE_A2A_BACKEND_STAGING_NBYTES, 0.
        nccl_nbytes: GPU calls within one machine go to NCCL if their tensors have at least this many bytes, inputs and outputs
            together; MOE_A2A_BACKEND_NCCL_NBYTES, 8 MiB.
    """

    max_nbytes: int | None = None
    num_blocks: int | None = None
    ranks_per_node: int | None = None
    parallel_slices: int | None = None
    staging_nbytes: int | None = None
    nccl_nbytes: int | None = None

    _timeout = None  # not a field: DeviceMesh reads it. None: the default of torch.distributed

    def settled(self, rank: int) -> Settled:
        """The options with None replaced, checked."""
        return Settled(**{field.name: self._settled(rank, field.name) for field in fields(self)})

    def _settled(self, rank: int, name: str) -> int:
        variable, default, least = _KNOBS[name]
        value = getattr(self, name)
        if value is not None:
            return arguments.checked_int(rank, name, value, least, LARGEST)
        text = os.environ.get(variable) or str(default)
        is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(LARGEST))
        if not is_number or not least <= int(text) <= LARGEST:
            raise ValueError(
                f"the environment variable {variable} is {arguments.shown(text)} on rank {rank}; set it to a number from "
                f"{least} to {LARGEST}"
            )
        return int(text)


@dataclass(frozen=True)
class Settled:
    max_nbytes: int
    num_blocks: int
    ranks_per_node: int
    parallel_slices: int
    staging_nbytes: int
    nccl_nbytes: int


# Environment variable, default, least value.
_KNOBS = {
    "max_nbytes": ("MOE_A2A_BACKEND_NBYTES", 64 << 20, 1),
    "num_blocks": ("MOE_A2A_BACKEND_BLOCKS", 0, 0),
    "ranks_per_node": ("MOE_A2A_BACKEND_RANKS_PER_NODE", 0, 0),
    "parallel_slices": ("MOE_A2A_BACKEND_PARALLEL_SLICES", 2, 1),
    "staging_nbytes": ("MOE_A2A_BACKEND_STAGING_NBYTES", 0, 0),
    # Alone, Collectives are as fast up to 64 MiB. Beside other kernels, as in DDP and FSDP2, NCCL is faster from less on, since
    # it fills the links with fewer SMs.
    "nccl_nbytes": ("MOE_A2A_BACKEND_NCCL_NBYTES", 8 << 20, 1),
}


@dataclass(frozen=True)
class Place:
    """A rank's place on the nodes."""

    node: int
    num_nodes: int
    rank: int  # within the node
    num_ranks: int

    @classmethod
    def of(cls, rank: int, global_ranks: list[int], ranks_per_node: int) -> Place:
        """The place of `rank` in a group with these members. ranks_per_node = 0: there is one node."""
        on_nodes = [
            list(members)
            for _, members in groupby(global_ranks, lambda member: ranks_per_node and member // ranks_per_node)
        ]
        num_ranks = len(on_nodes[0])
        if any(len(members) != num_ranks for members in on_nodes):
            raise ValueError(
                f"ranks {global_ranks} are placed on nodes of {ranks_per_node} ranks as {on_nodes}; pass a group with "
                'the same number of ranks on each node, node by node, another ranks_per_node, or backend="gloo" or "nccl"'
            )
        return cls(rank // num_ranks, len(on_nodes), rank % num_ranks, num_ranks)
