"""Decodes the trace buffer of one rank, as packed by csrc/comm/trace_buffer.h."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TIME_BITS = 48
NO_TOKEN = (1 << 20) - 1
KERNEL = "kernel"  # the kind of a launch, whose token is the number of its operation
SEND_LL = "send_ll"  # a send that is its own signal; see _with_signals()
RANKS_OF_RECORD = 64 - TIME_BITS  # ranks that a SEND_LL can signal: the bits of its polls


@dataclass
class ClockSample:
    """One comparison of the ranks' clocks, as measured by this rank.

    offsets: [R] clock of each rank minus this rank's, ticks; accurate to half the round trip.
    round_trips: [R] of the fastest exchange with each rank, ticks.
    at: time by this rank's clock, ticks.
    """

    offsets: np.ndarray
    round_trips: np.ndarray
    at: int


@dataclass
class RankRecords:
    """What a rank contributes to the merged trace.

    records: int64 [n, 2], segment by segment, each in the order in which its records ended.
    segment_written, segment_dropped: int64 [segments]. Segment s is of block s // warps_per_block, warp
        s % warps_per_block.
    kinds, operations: the names of the numbers in the records.
    clocks: at the beginning and at the end of the trace.
    tokens_per_expert: int64 [E], choices of this rank's tokens, without those of replayed graphs.
    dispatch_row_bytes: size of a dispatched row; -1: several sizes, or unknown.
    sum_bytes: the same of the sums that this rank sent to others; None: rows of the dtype.
    """

    rank: int
    records: np.ndarray
    segment_written: np.ndarray
    segment_dropped: np.ndarray
    warps_per_block: int
    ticks_per_second: float
    clock_step_ticks: float
    kinds: list[str]
    operations: list[str]
    clocks: list[ClockSample]
    tokens_per_expert: np.ndarray
    dispatch_row_bytes: int
    sum_bytes: int | None = None


@dataclass
class Columns:
    """The decoded records of a rank: one value per record, and one per signal that a record implies."""

    begin: np.ndarray  # ticks since `RankRecords.records[0]` began; its own low bits are `first_tick`
    duration: np.ndarray  # ticks
    kind: np.ndarray
    peer: np.ndarray  # -1: none
    token: np.ndarray  # -1: none
    polls: np.ndarray
    segment: np.ndarray
    first_tick: int
    num_implied: int  # values without a record of their own


def decode(rank_records: RankRecords) -> Columns:
    words = np.ascontiguousarray(rank_records.records).view(np.uint64).reshape(-1, 2)
    first, second = words[:, 0], words[:, 1]
    ticks = (first & np.uint64((1 << TIME_BITS) - 1)).astype(np.int64)
    first_tick = int(ticks[0]) if len(ticks) else 0
    token = _bits(second, 43, 20)
    peer = _bits(second, 37, 6)
    columns = Columns(
        begin=wrapped(ticks - first_tick),
        duration=_bits(second, 0, 32),
        kind=_bits(second, 32, 5),
        peer=np.where(_bits(second, 63, 1) == 1, peer, -1),
        token=np.where(token == NO_TOKEN, -1, token),
        polls=_bits(first, TIME_BITS, 64 - TIME_BITS),
        segment=np.repeat(np.arange(len(rank_records.segment_written)), rank_records.segment_written),
        first_tick=first_tick,
        num_implied=0,
    )
    return _with_signals(columns, rank_records.kinds) if SEND_LL in rank_records.kinds else columns


def _with_signals(columns: Columns, kinds: list[str]) -> Columns:
    """Expands a SEND_LL to a send preceded by signals at its begin, one to each rank that it names: rank `peer` + i for
    each bit i of `polls`."""
    sends = np.flatnonzero(columns.kind == kinds.index(SEND_LL))
    is_told = (columns.polls[sends, None] >> np.arange(RANKS_OF_RECORD)) & 1 == 1
    told = columns.peer[sends, None] + np.arange(RANKS_OF_RECORD)
    columns.kind[sends], columns.peer[sends], columns.polls[sends] = kinds.index("send"), -1, 0
    num_signals = np.zeros(len(columns.kind), np.int64)
    num_signals[sends] = is_told.sum(axis=1)
    ends = np.cumsum(num_signals + 1) - 1  # positions of the records, after their signals
    source = np.repeat(np.arange(len(num_signals)), num_signals + 1)
    names = ("begin", "duration", "kind", "peer", "token", "polls", "segment")
    wide = Columns(
        **{name: getattr(columns, name)[source] for name in names},
        first_tick=columns.first_tick,
        num_implied=int(num_signals.sum()),
    )
    is_signal = np.ones(len(source), bool)
    is_signal[ends] = False
    wide.kind[is_signal], wide.duration[is_signal], wide.peer[is_signal] = kinds.index("signal"), 0, told[is_told]
    return wide


def wrapped(ticks):
    """The difference of two clocks from their low 48 bits: of all that fit, the one nearest to zero."""
    half = 1 << (TIME_BITS - 1)
    return (ticks + half) % (1 << TIME_BITS) - half


def _bits(words: np.ndarray, at: int, width: int) -> np.ndarray:
    return ((words >> np.uint64(at)) & np.uint64((1 << width) - 1)).astype(np.int64)
