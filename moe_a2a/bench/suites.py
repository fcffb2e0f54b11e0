"""The cases of a run: a named suite, or the cases that the options select."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from moe_a2a.bench import routings
from moe_a2a.bench.cases import Case, cases_of
from moe_a2a.bench.run_case import Plan

# The shape of DeepSeek-V3, which published figures use.
DEEPSEEK = {"hidden": 7168, "num_topk": 8, "num_experts": 256}
MOONLIGHT: dict[str, Any] = {"hidden": 2048, "num_topk": 6, "num_experts": 64}
BLOCKS = (8, 16, 24, 32, 48, 64, 96, 132)


def plans(options: argparse.Namespace) -> list[Plan]:
    if options.suite is None:
        return [_asked_for(options)]
    return {"full": _full, "cpu": _cpu}[options.suite](options)


def _asked_for(options: argparse.Namespace) -> Plan:
    return Plan(
        part="tokens" if len(options.blocks) == 1 else "blocks",
        cases=tuple(cases_of(options)),
        modes=tuple(options.modes),
        blocks=tuple(options.blocks),
        halves=options.halves,
        graph=options.graph,
        chain=options.chain,
        overlap=options.overlap,
        baselines=tuple(options.baselines),
    )


def _cases(tokens: tuple[int, ...], seed: int, routing: str = "uniform", **shape: int) -> tuple[Case, ...]:
    return tuple(Case(n, **(shape or DEEPSEEK), dtype=torch.bfloat16, routing=routing, seed=seed) for n in tokens)


def _full(options: argparse.Namespace) -> list[Plan]:
    """The suite of the committed results; one GPU per rank."""
    seed, baselines = options.seed, tuple(options.baselines)
    both = ("rows", "fp8+presummed")
    others = [routing for routing in routings.NAMES if routing != "uniform"]
    return [
        Plan("tokens", _cases((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), seed), both, graph=True,
             chain=True, baselines=baselines),
        Plan("blocks", _cases((8, 128, 4096), seed), both, blocks=BLOCKS),
        *(Plan("routings", _cases((128, 4096), seed, routing), both) for routing in others),
        Plan("halves", _cases((8, 128, 4096), seed), both, halves=True),
        Plan("overlap", _cases((4096,), seed), ("rows",), blocks=(16, 32, 64), overlap=True),
    ]  # fmt: skip


def _cpu(options: argparse.Namespace) -> list[Plan]:
    """The cases of docs/benchmarks.md's CPU table."""
    cases = _cases((1, 16, 128, 1024), options.seed, **MOONLIGHT)
    return [Plan("tokens", cases, ("rows", "fp8+presummed"), baselines=("sort", "all_gather"))]
