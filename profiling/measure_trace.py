"""Is a trace accurate on this machine, and what does it cost?

    torchrun --nproc-per-node 4 profiling/measure_trace.py --output traces            # one GPU per rank
    MOE_A2A_DEVICE=cpu torchrun --nproc-per-node 2 profiling/measure_trace.py --tokens 64,512 --hidden 2048 --experts 32

For each number of tokens it prints, and with --output writes the files of:
  - slices against timing: each dispatch and combine according to the trace, beside the device's own events (CPU: the
    wall clock) for the same calls. Events cover more: how a launch begins and ends, and the copy of topk_idx that
    a trace makes. That part, measured on calls without tokens and on an empty kernel with that copy, is
    added. Then both must agree to 2 % or to 1 us (on the CPU, where Python is part of it: 2 % of calls that take at least
    5 ms). The same for the whole block, from its first launch to the end of its last, on both clocks.
  - arrows: those in the file, read back from both formats, against those that were drawn; none lost, none backwards.
  - cost: the same calls with the trace off and on, alternating; per record of the busiest warp.
Exits with 1 if a trace was inaccurate. The cost is only printed: a busy machine has other times.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import moe_a2a
from moe_a2a.bench.clock import Clock, Measuring
from moe_a2a.bench.options import add_sizes
from moe_a2a.tracing.check import check_file
from moe_a2a.tracing.reading import read
from moe_a2a.tracing.timeline import Timeline, merged

STEPS = ("dispatch", "combine")
AGREE = 0.02
LONG_US = {"cuda": 50.0, "cpu": 5000.0}  # calls whose unmeasured part is less than that
LAUNCH_CYCLES = 2_000_000  # keeps a GPU busy for about 1 ms, so that its next launch is queued when it begins
LAUNCHES = 20
WARM_UP = 4


class Calls:
    """A dispatch and a combine of rows that are already summed, each begun by all ranks together."""

    def __init__(self, options: argparse.Namespace, num_tokens: int):
        self.ep = moe_a2a.ExpertParallel(
            None,
            num_experts=options.experts,
            num_topk=options.topk,
            hidden=options.hidden,
            num_max_tokens_per_rank=num_tokens,
            num_blocks=options.blocks,
        )
        device, dtype = self.ep.device, self.ep.dtype
        self._on_gpu = device.type == "cuda"
        self._clock = Clock(device, Measuring())
        random = torch.Generator(device).manual_seed(self.ep.rank)
        self._x = torch.randn(num_tokens, options.hidden, generator=random, device=device).to(dtype)
        scores = torch.rand(num_tokens, options.experts, generator=random, device=device)
        self._weights, self._idx = scores.topk(options.topk)
        self._y = torch.randn(self.ep.num_ranks * num_tokens, options.hidden, generator=random, device=device).to(dtype)
        self._together = torch.zeros(1, device=device)

    def times_us(self, num_calls: int, num_tokens: int | None = None) -> np.ndarray:
        """[calls, step, begin and end] since the first, by the device's events or by the wall clock."""
        x, idx, weights = (tensor[:num_tokens] for tensor in (self._x, self._idx, self._weights))
        marks = []
        for _ in range(num_calls):
            self._meet()
            marks.append(self._clock.mark())
            handle = self.ep.dispatch(x, idx, weights)
            marks.append(self._clock.mark())
            self._meet()
            marks.append(self._clock.mark())
            self.ep.combine(self._y, handle, presummed=True)
            marks.append(self._clock.mark())
        return self._us([(marks[0], mark) for mark in marks]).reshape(num_calls, len(STEPS), 2)

    def beside_us(self) -> np.ndarray:
        """[step] What events cover beside the slices: calls without tokens, and in a dispatch the copy of topk_idx."""
        if not self._on_gpu:
            return np.zeros(len(STEPS))
        with moe_a2a.trace(self.ep) as trace:
            times = self.times_us(LAUNCHES, num_tokens=0)
        sums, _ = slice_sums_us(trace.timeline, self.ep.rank)
        beside = np.median(times[..., 1] - times[..., 0] - sums, axis=0)
        return beside + [self._copy_us(), 0]

    def _copy_us(self) -> float:
        """The time of copying topk_idx before an empty kernel, beyond that of the kernel alone."""
        marks = []
        for _ in range(LAUNCHES):
            for copies in (False, True):
                self._meet()
                begin = self._clock.mark()
                if copies:
                    self._idx.clone()
                torch.cuda._sleep(1)
                marks.append((begin, self._clock.mark()))
        without, with_copy = np.median(self._us(marks).reshape(LAUNCHES, 2), axis=0)
        return float(with_copy - without)

    def _us(self, pairs: list[tuple[Any, Any]]) -> np.ndarray:
        self._clock.synchronize()
        return 1e6 * np.array([self._clock.seconds(*pair) for pair in pairs])

    def _meet(self) -> None:
        dist.all_reduce(self._together)
        if self._on_gpu:
            torch.cuda._sleep(LAUNCH_CYCLES)


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def median_us(times: np.ndarray) -> np.ndarray:
    """[step] The slowest rank's median."""
    return np.max(gathered(np.median(times[..., 1] - times[..., 0], axis=0)), axis=0)


# ---- slices against timing


def slice_sums_us(timeline: Timeline, rank: int) -> tuple[np.ndarray, float]:
    """[calls, step] Time that the rank spent in launches of the step, and from its first launch to its last's end."""
    slices = timeline.slices[timeline.kernels() & (timeline.slices["rank"] == rank)]
    is_combine = np.array([name.startswith("combine") for name in timeline.names])[slices["name"]]
    step, begins, ends = merged(is_combine, slices["begin_ns"], slices["end_ns"])
    order = np.argsort(begins)
    turn = np.cumsum(np.diff(step[order].astype(int), prepend=0) != 0)  # dispatch, combine, dispatch ...
    sums = np.bincount(turn, (ends - begins)[order]) / 1e3
    return sums.reshape(-1, len(STEPS)), (ends.max() - begins.min()) / 1e3


def compare(calls: Calls, options: argparse.Namespace) -> tuple[Any, list[str], bool]:
    with moe_a2a.trace(calls.ep, options.records) as trace:
        times = calls.times_us(options.traced_calls)
    if any(rank["records_dropped"] for rank in trace.timeline.about["ranks"]):
        return trace, ["  records were dropped: pass more --records or fewer --traced-calls"], False
    long_us = LONG_US[calls.ep.device.type]
    sums, span = slice_sums_us(trace.timeline, calls.ep.rank)
    beside = calls.beside_us()
    sums += beside
    measured = times[..., 1] - times[..., 0]
    away = np.median(sums / measured - 1, axis=0), np.median(measured - sums, axis=0)
    of_span = span / (times[-1, -1, 1] - times[0, 0, 0]) - 1
    lines, good = [], True
    for rank, (slices, timing, (share, us), whole, more) in enumerate(
        gathered((np.median(sums, axis=0), np.median(measured, axis=0), away, of_span, beside))
    ):
        true = [
            abs(s) <= AGREE or t < long_us and (more[i] == 0 or abs(us[i]) <= 1)
            for i, (s, t) in enumerate(zip(share, timing, strict=True))
        ]
        true.append(abs(whole) <= AGREE or span < 2 * long_us)
        good &= all(true)
        lines.append(
            f"  rank {rank}: "
            + ", ".join(
                f"{step} {slices[i]:.1f} us, {more[i]:.1f} of it beside the slices, of {timing[i]:.1f} "
                f"({100 * share[i]:+.2f} %, {-us[i]:+.1f} us)"
                for i, step in enumerate(STEPS)
            )
            + f", the whole block {100 * whole:+.3f} %"
            + ("" if all(true) else "   NOT WITHIN 2 %")
        )
    return trace, lines, good


# ---- the file


def check_files(trace: Any, folder: Path, num_tokens: int) -> tuple[list[str], bool]:
    lines, good = [], True
    for ending in (".pftrace", ".json.gz"):
        path = folder / f"trace_{num_tokens}{ending}"
        trace.save(path)
        file = read(path)
        problems = check_file(file)
        drawn = len(trace.timeline.arrows)
        waits = int(trace.timeline.named("row_wait", "partial_wait").sum())
        resolved = sum(len(file.sources[f]) == len(file.sinks.get(f, [])) == 1 for f in file.sources)
        good &= not problems and resolved == drawn == len(file.sources)
        lines.append(
            f"  {path.name}: {len(file.slices)} slices, {drawn} arrows drawn, {resolved} resolved, for {waits} waits of a "
            f"row or sum; backwards {file.about['arrows_backwards_beyond_clock_error']}"
        )
        lines += [f"    {problem}" for problem in problems]
    return lines, good


# ---- cost


def cost(calls: Calls, options: argparse.Namespace) -> list[str]:
    core = calls.ep._open_core()
    medians = np.zeros((options.rounds, 2, len(STEPS)))  # off, on
    for turn in range(options.rounds):
        for on in range(2):
            if on:
                core.trace_start(options.records)
            medians[turn, on] = median_us(calls.times_us(options.calls))
            core.trace_stop()
    written, dropped = (core.trace_read()[f"segment_{what}"].numpy() for what in ("written", "dropped"))
    off, on = np.median(medians, axis=0)
    more = np.median(medians[:, 1] / medians[:, 0] - 1, axis=0)
    busiest, total = written.max() / options.calls, written.sum() / options.calls
    lines = [
        f"  {step}: off {off[i]:.1f} us, on {on[i]:.1f} us ({100 * more[i]:+.1f} %)" for i, step in enumerate(STEPS)
    ]
    per_record = 1e3 * (on - off).sum() / max(busiest, 1)
    lines.append(
        f"  records per dispatch and combine: {total:.0f}, {busiest:.0f} of the busiest warp: {per_record:.0f} ns for each "
        f"of those; {dropped.sum()} dropped"
    )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, help="folder for the traces (default: a temporary one, removed at the end)"
    )
    parser.add_argument("--tokens", default="128,4096", help="tokens per rank, separated by commas (default: 128,4096)")
    add_sizes(parser)
    parser.add_argument("--blocks", type=int, default=0, help="blocks per call; 0: the library chooses (default)")
    parser.add_argument(
        "--calls", type=int, default=20, help="calls per measured cost, which is their median (default: 20)"
    )
    parser.add_argument(
        "--traced-calls", type=int, default=3, help="calls in the trace that is written and checked (default: 3)"
    )
    parser.add_argument(
        "--rounds", type=int, default=6, help="rounds of calls with the trace off, then on (default: 6)"
    )
    parser.add_argument(
        "--records", type=int, help="records per warp's segment (default: 4096 on a GPU, 1048576 on the CPU)"
    )
    options = parser.parse_args()
    if not os.environ.get("MOE_A2A_DEVICE") and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    options.records = options.records or (4096 if torch.cuda.is_available() else 1 << 20)
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group()
    good = True
    for num_tokens in map(int, options.tokens.split(",")):
        good &= measure(options, num_tokens)
    dist.destroy_process_group()
    return 0 if good else 1


def measure(options: argparse.Namespace, num_tokens: int) -> bool:
    calls = Calls(options, num_tokens)
    calls.times_us(WARM_UP)
    costs = cost(calls, options)
    trace, compared, good = compare(calls, options)
    if calls.ep.rank == 0:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.output or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            files, true = check_files(trace, folder, num_tokens)
        good &= true
        print(f"{num_tokens} tokens, {calls.ep.num_ranks} ranks, hidden {options.hidden}")
        for title, lines in (("slices against timing", compared), ("files", files), ("cost", costs)):
            print("\n".join([title, *lines]), flush=True)
    calls.ep.close()
    return all(gathered(good))


if __name__ == "__main__":
    sys.exit(main())
