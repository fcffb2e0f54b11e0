"""Raw trace records of ranks that never ran: a small event simulation of two calls of dispatch and combine, with deliberately
wrong clocks. It plants what the analysis must find.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moe_a2a.tracing.records import ClockSample, RankRecords

KINDS = [
    "kernel", "route", "credit_wait", "table_wait", "row_wait", "partial_wait", "peer_wait", "clock_wait", "gave_up",
    "lists", "send", "signal", "sum", "reduce", "gather",
]  # fmt: skip
OPERATIONS = ["none", "dispatch_send", "dispatch_recv", "combine_send", "combine_recv"]
CONFIGURATION = {"num_experts": 16, "num_topk": 2, "hidden": 64, "num_max_tokens_per_rank": 64, "num_buffers": 2}
NO_TOKEN = 0xFFFFF

# Nanoseconds.
SEND, FLIGHT, REDUCE, LISTS, ROUTE, POLL = 2_000, 700, 900, 3_000, 1_500, 40


@dataclass
class Plan:
    """late_ns: [R] how much later each rank begins a call. slow_send: [R] factor on a row's time in dispatch.
    late_combine_ns: [R] delay of its experts. clock_offset_ns, clock_drift: [R] of the rank's clock against true time."""

    num_ranks: int = 4
    num_tokens: int = 24
    num_warps: int = 2
    num_calls: int = 2
    late_ns: list[int] = field(default_factory=list)
    slow_send: list[float] = field(default_factory=list)
    late_combine_ns: list[int] = field(default_factory=list)
    clock_offset_ns: list[int] = field(default_factory=list)
    clock_drift: list[float] = field(default_factory=list)
    ticks_per_second: float = 1e9
    hot_expert: int = -1
    capacity: int = 1 << 30
    seed: int = 0

    def of(self, name: str, rank: int, otherwise: float = 0):
        values = getattr(self, name)
        return values[rank] if values else otherwise


class _Rank:
    """One rank's segments: (true begin ns, true end ns, kind, peer, token, polls), in order of their ends."""

    def __init__(self, plan: Plan):
        self.segments = [[] for _ in range(plan.num_warps)]

    def add(self, warp, begin, end, kind, peer=-1, token=-1, polls=0):
        self.segments[warp].append((begin, end, KINDS.index(kind), peer, token, polls))

    def wait(self, warp, begin, until, kind, peer, token=-1):
        """Ends no earlier than `until`; leaves a record only if it had to wait. Returns its end."""
        if until <= begin:
            return begin + POLL
        end = until + POLL
        self.add(warp, begin, end, kind, peer, token, min(65535, 1 + (end - begin) // POLL))
        return end

    def kernel(self, warp, begin, end, operation):
        self.add(warp, begin, end, "kernel", token=OPERATIONS.index(operation))


def make_routing(plan: Plan) -> list[np.ndarray]:
    """[T, K] for each rank."""
    rng = np.random.default_rng(plan.seed)
    num_experts = CONFIGURATION["num_experts"]
    routing = [rng.integers(0, num_experts, (plan.num_tokens, 2)) for _ in range(plan.num_ranks)]
    if plan.hot_expert >= 0:
        for idx in routing:
            idx[rng.random(len(idx)) < 0.9] = plan.hot_expert
    return routing


def simulate(plan: Plan) -> list[RankRecords]:
    routing = make_routing(plan)
    per_rank = CONFIGURATION["num_experts"] // plan.num_ranks
    goes_to = [[sorted(set(row // per_rank)) for row in idx] for idx in routing]
    ranks = [_Rank(plan) for _ in range(plan.num_ranks)]
    now = [0] * plan.num_ranks
    for _ in range(plan.num_calls):
        now = _call(plan, ranks, goes_to, now)
    num_experts = CONFIGURATION["num_experts"]
    counts = [plan.num_calls * np.bincount(idx.reshape(-1), minlength=num_experts) for idx in routing]
    end = max(now) + 10_000
    return [_records(plan, r, rank, counts[r], end) for r, rank in enumerate(ranks)]


def _call(plan, ranks, goes_to, now):
    R, W, T = plan.num_ranks, plan.num_warps, plan.num_tokens
    begin = [now[r] + 5_000 + int(plan.of("late_ns", r)) for r in range(R)]
    row_at, sum_at = {}, {}  # (source, token, rank) -> true time of its signal
    after = [0] * R
    for r, rank in enumerate(ranks):
        for w in range(W):
            t = begin[r]
            rank.add(w, t, t + ROUTE, "route", token=0)
            t += ROUTE
            for token in range(w, T, W):
                stop = t + int(SEND * plan.of("slow_send", r, 1.0))
                for peer in goes_to[r][token]:
                    rank.add(w, stop - 10, stop - 10, "signal", peer, token)
                    row_at[r, token, peer] = stop - 10 + FLIGHT
                rank.add(w, t, stop, "send", token=token)
                t = stop + 20
            rank.kernel(w, begin[r], t, "dispatch_send")
            after[r] = max(after[r], t)
    table_at = [begin[r] + ROUTE + FLIGHT for r in range(R)]
    for r, rank in enumerate(ranks):
        begin[r] = after[r] + 2_000
        for w in range(W):
            t = begin[r]
            for peer in range(R):
                t = rank.wait(w, t, table_at[peer], "table_wait", peer)
            rank.add(w, t, t + LISTS, "lists")
            t += LISTS
            landing = sorted(key for key in row_at if key[2] == r)
            for source, token, _ in landing[w::W]:
                t = rank.wait(w, t, row_at[source, token, r], "row_wait", source, token)
            rank.kernel(w, begin[r], t + 10, "dispatch_recv")
            after[r] = max(after[r], t + 10)
    for r, rank in enumerate(ranks):
        landing = sorted(key for key in row_at if key[2] == r)
        begin[r] = after[r] + 1_000 * len(landing) + int(plan.of("late_combine_ns", r))
        for w in range(W):
            t = begin[r]
            for source, token, _ in landing[w::W]:
                rank.add(w, t, t + SEND - 20, "sum", source, token)
                rank.add(w, t + SEND - 10, t + SEND - 10, "signal", source, token)
                sum_at[source, token, r] = t + SEND - 10 + FLIGHT
                t += SEND
            rank.kernel(w, begin[r], t + 10, "combine_send")
            after[r] = max(after[r], t + 10)
    for r, rank in enumerate(ranks):
        begin[r] = after[r] + 2_000
        for w in range(W):
            t = begin[r]
            for token in range(w, T, W):
                for peer in goes_to[r][token]:
                    t = rank.wait(w, t, sum_at[r, token, peer], "partial_wait", peer, token)
                rank.add(w, t, t + REDUCE, "reduce", token=token)
                t += REDUCE
            rank.kernel(w, begin[r], t + 10, "combine_recv")
            after[r] = max(after[r], t + 10)
    return after


def _records(plan, r, rank, counts, end) -> RankRecords:
    ticks_per_ns = plan.ticks_per_second / 1e9

    def ticks_of(reader, ns):
        shifted = plan.of("clock_offset_ns", reader) + ns * (1 + plan.of("clock_drift", reader))
        return int(shifted * ticks_per_ns) + (1 << 47)  # so that the 48 bits wrap during the trace

    def meeting(ns):
        offsets = [ticks_of(peer, ns) - ticks_of(r, ns) for peer in range(plan.num_ranks)]
        # The true offset is somewhere within the round trip.
        rng = np.random.default_rng([plan.seed, r, abs(ns)])
        trips = rng.integers(600, 1400, plan.num_ranks) * ticks_per_ns
        noise = (rng.random(plan.num_ranks) - 0.5) * trips * 0.9
        offsets = np.where(np.arange(plan.num_ranks) == r, 0, offsets + noise.astype(np.int64))
        return ClockSample(offsets.astype(np.int64), trips.astype(np.int64), ticks_of(r, ns))

    words, written, dropped = [], [], []
    for segment in rank.segments:
        for begin, stop, kind, peer, token, polls in segment[: plan.capacity]:
            first = ticks_of(r, begin)
            duration = ticks_of(r, stop) - first
            peer, token = int(peer), NO_TOKEN if token < 0 else int(token)
            peer_bits = 0 if peer < 0 else 1 << 63 | peer << 37
            words.append((first & ((1 << 48) - 1) | polls << 48, duration | kind << 32 | peer_bits | token << 43))
        written.append(min(len(segment), plan.capacity))
        dropped.append(max(0, len(segment) - plan.capacity))
    return RankRecords(
        rank=r,
        records=np.array(words, dtype=np.uint64).reshape(-1, 2).view(np.int64),
        segment_written=np.array(written),
        segment_dropped=np.array(dropped),
        warps_per_block=1,
        ticks_per_second=plan.ticks_per_second,
        clock_step_ticks=1.0,
        kinds=KINDS,
        operations=OPERATIONS,
        clocks=[meeting(-20_000), meeting(end)],
        tokens_per_expert=counts,
        dispatch_row_bytes=2 * CONFIGURATION["hidden"],
    )


def configuration(plan: Plan) -> dict:
    return {"num_ranks": plan.num_ranks, **CONFIGURATION, "dtype": "bfloat16", "device": "none", "device_name": "none"}
