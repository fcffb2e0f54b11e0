"""moe_a2a: expert parallelism for Mixture-of-Experts models. dispatch(), combine() and collectives over a symmetric heap."""

from __future__ import annotations

from moe_a2a import installation

installation.check()  # loads PyTorch, whose libraries the extension uses, then the extension

# ruff: noqa: E402
import torch

from moe_a2a import reference
from moe_a2a.collectives import Collectives
from moe_a2a.communicator import Communicator
from moe_a2a.default_collectives import all_reduce
from moe_a2a.errors import (
    CallMismatchError,
    LeftOutError,
    PeerRefusedError,
    PeerTimeoutError,
    RoutingError,
    TraceFileError,
)
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.group_objects import of_group
from moe_a2a.grouped_gemm import grouped_gemm
from moe_a2a.groups import HandleExchange, ThreadGroup, as_group, thread_group
from moe_a2a.groups.survivor_group import SurvivorGroup, expert_map, survivors
from moe_a2a.handle import DispatchHandle
from moe_a2a.moe_layer import MoELayer
from moe_a2a.shrinking import shrink
from moe_a2a.token_dispatcher import TokenDispatcher
from moe_a2a.tracing import trace
from moe_a2a.two_level import TwoLevelCollectives, TwoLevelExpertParallel, TwoLevelHandle, TwoLevelTokenDispatcher

if torch.distributed.is_available():
    from moe_a2a import torch_backend

    torch_backend.register()  # init_process_group("moe_a2a")

__version__ = installation.version("moe_a2a") or "0.0.0"  # a checkout that is not installed

__all__ = [
    "CallMismatchError",
    "Collectives",
    "Communicator",
    "DispatchHandle",
    "ExpertParallel",
    "HandleExchange",
    "LeftOutError",
    "MoELayer",
    "PeerRefusedError",
    "PeerTimeoutError",
    "RoutingError",
    "SurvivorGroup",
    "ThreadGroup",
    "TokenDispatcher",
    "TraceFileError",
    "TwoLevelCollectives",
    "TwoLevelExpertParallel",
    "TwoLevelHandle",
    "TwoLevelTokenDispatcher",
    "__version__",
    "all_reduce",
    "as_group",
    "expert_map",
    "grouped_gemm",
    "of_group",
    "reference",
    "shrink",
    "survivors",
    "thread_group",
    "trace",
]
