"""Loses a rank at every point of constructing an object and of a call, killed or frozen, for several numbers of ranks, kinds of
batches and kinds of groups. One command prints one table:

    .venv/bin/python tests/python/fault_cells.py [--every 10] [--first 3] [--json cells.json]

A cell passes if every other rank names the lost one within the deadline plus a second, closes within a second, and leaves no
name in /dev/shm. It is late if only the times are longer, which a busy machine may cause; otherwise it is wrong, and the
command fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import lost_ranks
import ranks
from lost_ranks import TIMEOUT

import moe_a2a

IN_CONSTRUCTION = ["before", "allocated", "said", "mapped"]
LATE_FROM = TIMEOUT + 1.0  # seconds


@dataclasses.dataclass(frozen=True)
class Cell:
    group: str  # "torch": a group of torch.distributed; "carried": a HandleExchange
    point: str  # where the rank is lost
    how: str  # a signal
    num_ranks: int
    victim: int
    num_max_ll_tokens: int = 0

    @property
    def phase(self) -> str:
        return "construction" if self.point in IN_CONSTRUCTION else "calls"


def all_cells() -> list[Cell]:
    hows, worlds = ["SIGKILL", "SIGSTOP"], [(2, 1), (3, 0), (4, 3)]
    calls = [
        Cell(group, point, how, num_ranks, victim, num_max_ll_tokens)
        for group in ("torch", "carried")
        for point in ("nothing", "dispatch_send", "dispatch_recv", "combine_send", "combine_recv", "any time")
        for how in hows
        for num_ranks, victim in worlds
        for num_max_ll_tokens in (0, 16)
    ]
    construction = [
        Cell("torch", point, how, num_ranks, victim)
        for point in IN_CONSTRUCTION
        for how in hows
        for num_ranks, victim in [*worlds, (2, 0), (4, 1), (8, 5)]
    ]
    carried = [Cell("carried", "said", how, *world) for how in hows for world in worlds[:2]]
    return calls + construction + carried


# ---- in a rank


def make(group, cell):
    config = {**lost_ranks.CONFIG, "num_experts": 24, "num_max_ll_tokens": cell.num_max_ll_tokens}  # for 8 ranks too
    if cell.group == "torch":
        return moe_a2a.ExpertParallel(group, **config)
    group = moe_a2a.as_group(group)
    ep = moe_a2a.ExpertParallel(moe_a2a.HandleExchange(group.rank, group.num_ranks), **config)
    ep.set_comm_handles(group.all_gather(ep.get_comm_handle()))
    return ep


def lose_in_a_call(group, cell):
    pids = lost_ranks.gather_pids(group)
    ep = make(group, cell)
    for _ in range(3):
        lost_ranks.one_call(ep)
    if ep.rank == cell.victim:
        number = getattr(signal, cell.how)
        if cell.point == "any time":
            threading.Timer(0.001 * (os.getpid() % 40), os.kill, (os.getpid(), number)).start()
        while True:
            lost_ranks.one_call(ep, cell.point, number)
    report = lost_ranks.error_of_survivor(ep, calls=100_000)
    start = time.monotonic()
    ep.close()
    report["close"] = time.monotonic() - start
    return end_the_frozen(cell, ep.rank, pids, report)


def lose_in_construction(group, cell):
    pids = lost_ranks.gather_pids(group)
    rank = pids.index(os.getpid())
    if rank == cell.victim:
        lost_ranks.stop_at(cell.point, getattr(signal, cell.how))
        make(group, cell)
    start = time.monotonic()
    try:
        make(group, cell)
    except RuntimeError as error:  # carried handles of a dead rank cannot be mapped: not a PeerTimeoutError
        report = {"rank": getattr(error, "rank", rank), "peer": getattr(error, "peer", cell.victim), "text": str(error)}
    report |= {"elapsed": time.monotonic() - start, "close": 0.0}
    return end_the_frozen(cell, rank, pids, report)


def end_the_frozen(cell, rank, pids, report):
    report["left over"] = lost_ranks.shared_memory_of(pids)
    if cell.how == "SIGSTOP" and rank == (cell.victim + 1) % len(pids):
        time.sleep(1)  # the other ranks have raised by now
        os.kill(pids[cell.victim], signal.SIGKILL)
    return report


# ---- the table


def run(cell: Cell) -> tuple[str, float]:
    """Returns what is wrong with the cell, or "", and the longest time to an error."""
    program = lose_in_construction if cell.phase == "construction" else lose_in_a_call
    mortal = frozenset({cell.victim})
    try:
        reports = ranks.run_processes(cell.num_ranks, program, cell, timeout=ranks.slack(30), mortal=mortal)
    except AssertionError as error:
        return str(error), 0.0
    seconds = 0.0
    for rank, report in enumerate(reports):
        if rank == cell.victim:
            continue
        named = (report["rank"], report["peer"]) == (rank, cell.victim) and f"rank {cell.victim}" in report["text"]
        if not named or report["left over"]:
            return f"rank {rank}: {report}", 0.0
        seconds = max(seconds, report["elapsed"], report["close"] + TIMEOUT)
    return "", seconds


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="run every n-th cell (default: 1)")
    parser.add_argument("--first", type=int, default=0, help="begin with this cell (default: 0)")
    parser.add_argument("--json", type=Path, help="write each cell's result here")
    options = parser.parse_args(arguments)
    os.environ["MOE_A2A_DEVICE"] = "cpu"  # also on a machine with GPUs, which would be too few
    rows, found = defaultdict(list), []
    for cell in all_cells()[options.first :: options.every]:
        wrong, seconds = run(cell)
        verdict = "wrong" if wrong else "as promised" if seconds < LATE_FROM else "late"
        rows[cell.phase, cell.group, cell.how].append((verdict, seconds))
        found.append(dataclasses.asdict(cell) | {"verdict": verdict, "seconds": seconds, "wrong": wrong})
        if wrong:
            print(f"WRONG {cell}: {wrong}", flush=True)
    print(
        "| phase | group | signal | cells | as promised | late | wrong | slowest s |\n|---|---|---|---|---|---|---|---|"
    )
    for key, cells in rows.items():
        counts = [sum(verdict == name for verdict, _ in cells) for name in ("as promised", "late", "wrong")]
        print("| " + " | ".join([*key, str(len(cells)), *map(str, counts), f"{max(s for _, s in cells):.2f}"]) + " |")
    print(f"{len(found)} cells, deadline {TIMEOUT} s, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(cell["verdict"] == "wrong" for cell in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
