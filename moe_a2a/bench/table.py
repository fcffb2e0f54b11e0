"""The results as text: one line per contender, the same columns for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from moe_a2a.bench.left_out import left_out_lines
from moe_a2a.bench.records import Record, Results

LEGEND = """\
us: median of the slowest rank; p99: over all ranks and iterations; host: us until dispatch() + combine() return while
the device is idle; GB/s: 1e9 remote bytes per second of the busiest rank, each row once per rank, the same bytes for
every system (coded sums: as coded); floor: time of a bare push of the same rows in the same run / time"""

STEP_COLUMNS = f"{'us':>8} {'p99':>8} {'GB/s':>6} {'floor':>5}"
HEADER = (
    f"{'tokens':>6}  {'system':<39} {'mode':<13} {'launch':<6} {'blocks':>8} | {STEP_COLUMNS} | {STEP_COLUMNS} |"
    f" {'us':>8} {'host':>6}"
)
ABOVE_HEADER = f"{'':>77} | {'dispatch':^30} | {'combine':^30} | {'both':^15}"


def text(results: Results) -> str:
    return "\n".join(_lines(results))


def _lines(results: Results) -> Iterator[str]:
    about = results.about
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    yield f"# {about['ranks']} ranks on {about['machine']}" + (f", driver {about['driver']}" if about["driver"] else "")
    yield f"# {versions}; {about['date']}; seed {about['seed']}; {about['cache']} cache"
    for key, group in groupby(results.records, key=_heading):
        records = list(group)
        yield ""
        yield key
        calls = [r for r in records if r.step in ("dispatch", "combine", "total")]
        if calls:
            yield ABOVE_HEADER
            yield HEADER
            yield from _call_lines(calls)
        yield from _pair_lines([r for r in records if r.step == "pair"])
        yield from _half_lines([r for r in records if r.step not in ("dispatch", "combine", "total", "pair")])
    yield from _overlap_lines(results)
    if results.notes or results.left_out:
        yield ""
    yield from (f"note: {note}" for note in results.notes)
    yield from left_out_lines(results.left_out)
    yield ""
    yield LEGEND


def _heading(record: Record) -> str:
    return (
        f"[{record.part}] hidden {record.hidden}, top-{record.topk} of {record.experts}, {record.dtype}, "
        f"{record.ranks} ranks, {record.routing}"
    )


def _call_lines(records: Iterable[Record]) -> Iterator[str]:
    for dispatch, combine, total in zip(*[iter(records)] * 3, strict=True):
        blocks = f"{dispatch.blocks}/{combine.blocks}" if dispatch.blocks else "-"
        host = f"{total.host_us:6.1f}" if total.host_us is not None else f"{'-':>6}"
        yield (
            f"{dispatch.tokens:>6}  {dispatch.system:<39} {dispatch.mode:<13} {dispatch.launch:<6} {blocks:>8} |"
            f" {_columns(dispatch)} | {_columns(combine)} | {total.median_us:8.1f} {host}"
        )


def _columns(record: Record) -> str:
    return f"{record.median_us:8.1f} {record.p99_us:8.1f} {record.gbps:6.1f} {record.share_of_floor:5.0%}"


def _pair_lines(records: list[Record]) -> Iterator[str]:
    if not records:
        return
    yield f"{'chains':>6}  {'system':<39} {'mode':<13} | us per pair (p99)"
    for r in records:
        yield f"{r.tokens:>6}  {r.system:<39} {r.mode:<13} | {r.median_us:8.1f} ({r.p99_us:.1f})"


def _half_lines(records: list[Record]) -> Iterator[str]:
    if not records:
        return
    yield f"{'halves':>6}  {'mode':<13} {'blocks':>8} | us (p99) of each, host us"
    for i in range(0, len(records), 4):
        halves = records[i : i + 4]
        each = "   ".join(
            f"{h.step} {h.median_us:.1f} ({h.p99_us:.1f})" + (f", {h.host_us:.1f}" if h.host_us is not None else "")
            for h in halves
        )
        yield f"{halves[0].tokens:>6}  {halves[0].mode:<13} {halves[0].blocks}/{halves[2].blocks} | {each}"


def _overlap_lines(results: Results) -> Iterator[str]:
    if not results.overlaps:
        return
    yield ""
    yield "[overlap] a matrix product between the halves, while rows are in flight"
    yield (
        f"{'tokens':>6}  {'step':<9} {'stream':<6} {'blocks':>6} | {'alone us':>9} {'between us':>10} {'loss':>6} |"
        + (f" {'halves us':>9} {'all us':>9} {'hidden':>6}")
    )
    for o in results.overlaps:
        yield (
            f"{o['tokens']:>6}  {o['step']:<9} {o['stream']:<6} {o['blocks']:>6} | {o['gemm_alone_us']:9.1f}"
            f" {o['gemm_between_us']:10.1f} {o['gemm_loss']:6.1%} | {o['halves_us']:9.1f} {o['all_us']:9.1f}"
            f" {o['hidden_share']:6.0%}"
        )
