"""The problems: how each makes its inputs, passes them to a submission, and checks the output.

A problem is a YAML file of shapes and a class here of the same name; see moe_a2a/leaderboard/problems/base.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moe_a2a.leaderboard import cases
from moe_a2a.leaderboard.problems.all2all import All2All, All2AllExperts
from moe_a2a.leaderboard.problems.all_reduce import AllReduce, AllReduceQuantised
from moe_a2a.leaderboard.problems.base import Problem
from moe_a2a.leaderboard.problems.gemm import AllGatherGemm, GemmReduceScatter
from moe_a2a.leaderboard.problems.moe_layer import MoELayer

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "all2all": All2All,
    "all2all_experts": All2AllExperts,
    "all_gather_gemm": AllGatherGemm,
    "all_reduce": AllReduce,
    "all_reduce_quantised": AllReduceQuantised,
    "gemm_reduce_scatter": GemmReduceScatter,
    "moe_layer": MoELayer,
}


def make(name: str) -> Problem:
    return PROBLEMS[name]()


def file_of(name: str) -> cases.ProblemFile:
    return cases.read_problem(Path(__file__).parent / f"{name}.yml")
