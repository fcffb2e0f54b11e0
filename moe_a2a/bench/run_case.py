"""Runs one case, from inputs to records. Called by every rank; all get the same records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

import moe_a2a
from moe_a2a import codecs
from moe_a2a.bench import deep_ep, floor, gate, overlap, routings, torch_baselines
from moe_a2a.bench.cases import Case, Inputs, Traffic, make_inputs
from moe_a2a.bench.clock import Clock, Measuring
from moe_a2a.bench.contenders import Contender, Ours, OursInChains, OursInGraphs, OursInHalves
from moe_a2a.bench.left_out import leave_out
from moe_a2a.bench.records import Record, Results
from moe_a2a.bench.statistics import p99, slowest_rank_median
from moe_a2a.bench.together import FailedSomewhereError, together

HOST_ITERATIONS = 10

BASELINES: dict[str, Any] = {
    "sort": torch_baselines.SortAllToAll,
    "all_gather": torch_baselines.AllGatherReduceScatter,
    "collectives": torch_baselines.BareCollectives,
    "registered": torch_baselines.RegisteredCollectives,
    "deep_ep_v1": deep_ep.Normal,
    "deep_ep_v1_fp8": deep_ep.NormalFp8,
    "deep_ep_v1_ll": deep_ep.LowLatency,
    "deep_ep_v2": deep_ep.Elastic,
    "deep_ep_v2_fp8": deep_ep.ElasticFp8,
}
CHAINS: dict[str, Any] = {
    "collectives": torch_baselines.BareCollectivesInChains,
    "registered": torch_baselines.RegisteredCollectivesInChains,
}


@dataclass(frozen=True)
class Plan:
    """What to do with each case of a part of the suite."""

    part: str
    cases: tuple[Case, ...]
    modes: tuple[str, ...]
    blocks: tuple[int, ...] = (0,)  # 0: the launch table's
    halves: bool = False
    graph: bool = False
    chain: bool = False
    overlap: bool = False
    baselines: tuple[str, ...] = ()


def run(case: Case, plan: Plan, how: Measuring, device: torch.device, results: Results) -> None:
    """Adds its records to `results`."""
    inputs = make_inputs(case, device)
    traffic = Traffic.of(inputs)
    clock = Clock(device, how)
    _note(case, inputs, results)
    with ExitStack() as stack:
        ep = stack.enter_context(moe_a2a.ExpertParallel(None, **case.config, device=device))
        contenders = []
        for contender in _contenders(case, plan, inputs, ep, results):
            stack.callback(contender.close)
            wrong = gate.check(contender, inputs)
            if wrong is None:
                contenders.append(contender)
            else:
                leave_out(
                    results.left_out, f"{contender.system}, {contender.mode}, {contender.launch}", str(case), wrong
                )

        lengths = {
            "dispatch": {_row_bytes(case, c.is_fp8) for c in contenders},
            "combine": {_sum_bytes(case, c.wire) for c in contenders},
        }
        bare = floor.measure(ep, inputs, traffic, lengths, clock)
        results.floors += [
            {"part": plan.part, "tokens": case.num_tokens, "routing": case.routing, "launch_us": bare.launch_us}
            | asdict(push)
            | {"gbps": _gbps(push.row_bytes * traffic.busiest_rows, push.microseconds)}
            for push in bare.pushes
        ]
        steps = [contender.steps() for contender in contenders]
        times = clock.time(list(chain(*steps)), lead_in=list(chain(*steps[:1])))
        for contender, some in zip(contenders, steps, strict=True):
            own, times = times[:, : len(some)], times[:, len(some) :]
            named = {step.name: own[:, i] for i, step in enumerate(some)}
            host: list[Any] = clock.host_time(some, HOST_ITERATIONS) if inputs.x.is_cuda else [None] * len(some)
            scribe = _Scribe(case, plan.part, contender, inputs.num_ranks, traffic.busiest_rows, bare, how)
            results.records += scribe.records(named, host)
        if plan.overlap:
            results.overlaps += overlap.measure(case, inputs, ep, plan.blocks, clock)


def _contenders(
    case: Case, plan: Plan, inputs: Inputs, ep: moe_a2a.ExpertParallel, results: Results
) -> Iterator[Contender]:
    for mode in plan.modes:
        for blocks in plan.blocks:
            yield Ours(ep, inputs, mode, blocks)
            if plan.halves:
                yield OursInHalves(ep, inputs, mode, blocks)
            if plan.graph and inputs.x.is_cuda:
                yield OursInGraphs(ep, inputs, mode, blocks)
            if plan.chain and inputs.x.is_cuda:
                yield OursInChains(ep, inputs, mode, blocks)
    for name in plan.baselines:
        if why := BASELINES[name].why_not(case, inputs.x.device):
            leave_out(results.left_out, name, "", why)
            continue
        try:
            if plan.chain and name in CHAINS and inputs.x.is_cuda:
                yield together(partial(CHAINS[name], case, inputs))
            yield together(partial(BASELINES[name], case, inputs))
        except FailedSomewhereError as error:
            leave_out(results.left_out, name, str(case), str(error))


def _row_bytes(case: Case, is_fp8: bool) -> int:
    """Bytes on the wire: float8 rows carry a float32 scale per 128 values behind the row's last 16 bytes."""
    if not is_fp8:
        return case.hidden * case.dtype.itemsize
    return -(-case.hidden // 16) * 16 + 4 * -(-case.hidden // 128)


def _sum_bytes(case: Case, wire: str | None) -> int:
    return _row_bytes(case, False) if wire is None else codecs.line_bytes(wire, case.hidden)


def _gbps(num_bytes: int, microseconds: float) -> float:
    return num_bytes / microseconds / 1e3


@dataclass
class _Scribe:
    """Makes the records of one contender."""

    case: Case
    part: str
    contender: Contender
    num_ranks: int
    busiest_rows: int
    bare: floor.Floor
    how: Measuring

    def records(self, times: dict[str, Tensor], host: list[float | None]) -> list[Record]:
        """`times`: seconds of each step, [iterations] on this rank; `host`: seconds of each step's call."""
        records = [
            self._record(name, seconds, host_seconds)
            for (name, seconds), host_seconds in zip(times.items(), host, strict=True)
        ]
        if len(records) == 2:
            both_host = None if None in host else sum(host)  # type: ignore[arg-type]
            dispatch, combine = times.values()
            records.append(self._record("total", dispatch + combine, both_host))
        return records

    def _record(self, step: str, seconds: Tensor, host_seconds: float | None) -> Record:
        case, contender = self.case, self.contender
        median_us = 1e6 * slowest_rank_median(seconds)
        dispatched = _row_bytes(case, contender.is_fp8), self.bare.of("dispatch", _row_bytes(case, contender.is_fp8))
        combined = _sum_bytes(case, contender.wire), self.bare.of("combine", _sum_bytes(case, contender.wire))
        both = dispatched[0] + combined[0], dispatched[1] + combined[1]
        # A half alone has no traffic of its own.
        volumes = {"dispatch": dispatched, "combine": combined, "total": both, "pair": both}
        row_bytes, floor_us = volumes.get(step, (None, None))
        num_bytes = None if row_bytes is None else row_bytes * self.busiest_rows
        return Record(
            part=self.part,
            system=contender.system,
            mode=contender.mode,
            launch=contender.launch,
            step=step,
            tokens=case.num_tokens,
            hidden=case.hidden,
            topk=case.num_topk,
            experts=case.num_experts,
            ranks=self.num_ranks,
            dtype=case.dtype_name,
            routing=case.routing,
            blocks=self._blocks(step),
            median_us=median_us,
            p99_us=1e6 * p99(seconds),
            host_us=None if host_seconds is None else 1e6 * host_seconds,
            remote_bytes=num_bytes,
            gbps=None if num_bytes is None else _gbps(num_bytes, median_us),
            floor_us=floor_us,
            share_of_floor=None if floor_us is None else floor_us / median_us,
            cache="flushed" if self.how.flush else "warm",
            iterations=self.how.iterations,
        )

    def _blocks(self, step: str) -> int | None:
        if self.contender.blocks is None or step in ("total", "pair"):
            return None
        return self.contender.blocks[0 if step.startswith("dispatch") else 1]


def _note(case: Case, inputs: Inputs, results: Results) -> None:
    note = routings.note(case.routing, case.sizes(inputs.num_ranks))
    if note and f"{case.routing}: {note}" not in results.notes:
        results.notes.append(f"{case.routing}: {note}")
