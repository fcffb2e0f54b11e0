"""Ranks as processes of this machine. They never outlive the caller, and leave nothing behind."""

from __future__ import annotations

from moe_a2a.rank_processes.inherited import OpenFile
from moe_a2a.rank_processes.processes import (
    DIED,
    FORK_SERVER,
    CoresShared,
    RankError,
    RankProcesses,
    preload,
    run_on_ranks,
    start_method,
)

__all__ = [
    "DIED",
    "FORK_SERVER",
    "CoresShared",
    "OpenFile",
    "RankError",
    "RankProcesses",
    "preload",
    "run_on_ranks",
    "start_method",
]
