"""Summarises a timeline: who took how long, who waited for whom, and who is to blame."""

from __future__ import annotations

import numpy as np

from moe_a2a.tracing.arrows import causes
from moe_a2a.tracing.blame import culprit
from moe_a2a.tracing.critical_path import critical_path
from moe_a2a.tracing.hot_expert import ExpertsWork
from moe_a2a.tracing.report import Summary
from moe_a2a.tracing.timeline import (
    DISPATCH_SENDERS,
    SIGNAL,
    WAITS,
    Timeline,
    blocks_of_warps,
    last_before,
    merged,
    ranks_of_blocks,
    ranks_of_warps,
)


def summarize(timeline: Timeline) -> Summary:
    slices = timeline.slices
    cause = causes(timeline)
    wait_sum, wait_max = _wait_matrices(timeline)
    kind_share, wait_share = _kind_shares(timeline)
    tokens = _tokens(timeline)
    tokens_per_expert = np.array(timeline.about.get("tokens_per_expert", []), dtype=np.int64)
    work = ExpertsWork.of(timeline, tokens, tokens_per_expert)
    return Summary(
        about=timeline.about,
        span_ns=int(slices["end_ns"].max() - slices["begin_ns"].min()),
        operation_ns=_operation_times(timeline),
        kind_share=kind_share,
        wait_share=wait_share,
        wait_sum=wait_sum,
        wait_max=wait_max,
        tokens=tokens,
        tokens_per_expert=tokens_per_expert,
        tile_ns=work.tile_ns,
        block_imbalance=_block_imbalance(timeline),
        path=critical_path(timeline, cause),
        culprit=culprit(timeline, cause, work),
    )


def _operation_times(timeline: Timeline) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Per operation, [R] time in which a block is in it, and [R] launches of the warp with the most."""
    names, is_kernel = timeline.slices["name"], timeline.kernels()
    times = {}
    for number in np.unique(names[is_kernel]):
        which = is_kernel & (names == number)
        # Counted per warp: blocks of a product wait for nobody, so on a busy CPU they may run one after the other.
        of_warps, counts = np.unique(timeline.warps()[which], return_counts=True)
        launches = np.zeros(timeline.num_ranks, np.int64)
        np.maximum.at(launches, ranks_of_warps(of_warps), counts)
        times[timeline.names[number]] = (timeline.phase_times(which), launches)
    return times


def _kind_shares(timeline: Timeline) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The shares of each kind, and of all waits together."""
    slices, is_kernel = timeline.slices, timeline.kernels()
    in_launches = np.maximum(timeline.covered(is_kernel), 1)
    in_a_launch = ~is_kernel & (slices["instant"] == 0) & (timeline.enclosing_kernels() >= 0)
    shares = {
        timeline.names[number]: timeline.covered(in_a_launch & (slices["name"] == number)) / in_launches
        for number in np.unique(slices["name"][in_a_launch])
    }
    waits = timeline.covered(in_a_launch & timeline.named(*WAITS)) / in_launches
    return dict(sorted(shares.items(), key=lambda item: -item[1].max())), waits


def _wait_matrices(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    waits = timeline.named(*WAITS) & (timeline.slices["peer"] >= 0)
    where = (timeline.slices["rank"][waits], timeline.slices["peer"][waits])
    total = np.zeros((timeline.num_ranks, timeline.num_ranks), np.int64)
    longest = total.copy()
    np.add.at(total, where, timeline.durations()[waits])
    np.maximum.at(longest, where, timeline.durations()[waits])
    return total, longest


def _tokens(timeline: Timeline) -> np.ndarray:
    """A row sent in pieces has one signal per piece, from several warps; it counts once per call."""
    slices, kernel = timeline.slices, timeline.enclosing_kernels()
    senders = timeline.kernels() & timeline.named(*DISPATCH_SENDERS)
    sent = timeline.named(SIGNAL) & (kernel >= 0) & senders[kernel] & (slices["peer"] >= 0)
    ranks, begins, _ = merged(slices["rank"][senders], slices["begin_ns"][senders], slices["end_ns"][senders])
    call = last_before(ranks, begins, slices["rank"][sent], slices["begin_ns"][sent])
    rows = np.stack([slices["rank"][sent], slices["peer"][sent], slices["token"][sent], call], axis=1)
    tokens = np.zeros((timeline.num_ranks, timeline.num_ranks), np.int64)
    source, destination, *_ = np.unique(rows, axis=0).T
    np.add.at(tokens, (source, destination), 1)
    return tokens


def _block_imbalance(timeline: Timeline) -> np.ndarray:
    """Excludes blocks of products, whose work differs from that of dispatch and combine."""
    slices, is_kernel = timeline.slices, timeline.kernels() & ~timeline.named("grouped_gemm")
    is_wait = timeline.named(*WAITS) & (timeline.enclosing_kernels() >= 0)
    names = np.unique(timeline.blocks()[is_kernel])
    work = np.zeros(len(names))
    for which, sign in ((is_kernel, 1), (is_wait, -1)):
        warps, begins, ends = merged(timeline.warps()[which], slices["begin_ns"][which], slices["end_ns"][which])
        block = np.searchsorted(names, blocks_of_warps(warps))
        work += sign * np.bincount(block, ends - begins, minlength=len(names))
    imbalance = np.ones(timeline.num_ranks)
    for rank in range(timeline.num_ranks):
        own = work[ranks_of_blocks(names) == rank]
        if len(own):
            imbalance[rank] = own.max() / max(own.mean(), 1.0)
    return imbalance
