#!/usr/bin/env python3
"""Writes the tables of measurements in README.md and docs from the JSON files in bench/results.

    python bench/tables.py             # rewrites what stands between <!-- table NAME --> and <!-- end of table -->
    python bench/tables.py --check     # exit code 1, and the differences, if a table is not what its file says

Times are microseconds. The files are written by `python -m moe_a2a bench`; each names the commit that it was run on.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "docs/benchmarks.md", "docs/collectives.md"]
BLOCK = re.compile(r"(<!-- table (?P<name>[\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench/results" / f"{name}.json").read_text())


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def us(time: float) -> str:
    return f"{time:.1f}" if time < 100 else f"{time:.0f}"


def times_by_size(name: str) -> dict[int, dict[str, float]]:
    times: dict[int, dict[str, float]] = {}
    for line in results(name)["lines"]:
        times.setdefault(line["size"], {})[line["system"]] = line["time_us"]
    return times


def all_reduce() -> str:
    times = times_by_size("h200_2/all_reduce")
    systems = {
        "`all_reduce`": ["moe_a2a auto"],
        "NCCL": ["nccl"],
        "`symm_mem`": ["symm_mem one_shot", "symm_mem two_shot"],
        '`codec="q8"`': ["moe_a2a two_shot q8"],
        '`codec="q4"`': ["moe_a2a two_shot q4"],
    }
    rows = [[title] + [us(min(of[s] for s in names)) for of in times.values()] for title, names in systems.items()]
    return table(["KiB", *(str(size >> 10) for size in times)], rows)


def halves() -> str:
    kinds = {kind: times_by_size(f"h200_2/{kind}") for kind in ("reduce_scatter", "all_gather")}
    rows = [
        [f"`{kind}` / NCCL"] + [f"{us(of['moe_a2a'])} / {us(of['nccl'])}" for of in times.values()]
        for kind, times in kinds.items()
    ]
    return table(["KiB of all ranks", *(str(size >> 10) for size in kinds["all_gather"])], rows)


def layer() -> str:
    times: dict[int, dict[str, dict[str, Any]]] = {}
    for line in results("h200_2/layer")["lines"]:
        if line["launch"] == "eager":
            times.setdefault(line["tokens"], {})[line["system"]] = line
    rows = []
    for tokens, of in times.items():
        ours, by_torch = of["moe_a2a"], of["moe_a2a + torch._grouped_mm"]
        best = min(line["us"] for system, line in of.items() if system != "moe_a2a")
        rows.append(
            [
                str(tokens),
                us(ours["us"]),
                us(of["moe_a2a, step by step"]["us"]),
                us(by_torch["us"]),
                f"{ours['us'] / best:.2f}",
                f"{ours['sm_mhz']:.0f}, {ours['watts']:.0f}",
            ]
        )
    peers = ["step by step in PyTorch", "with `torch._grouped_mm`"]
    return table(["tokens per rank", "`MoELayer`", *peers, "`MoELayer` / best", "SM MHz, W"], rows)


def experts() -> str:
    times: dict[int, dict[tuple[str, str], dict[str, Any]]] = {}
    for line in results("h200_1/experts")["lines"]:
        times.setdefault(line["rows"], {})[line["product"], line["system"]] = line
    rows = []
    for num_rows, of in times.items():
        cells = [str(num_rows // 64)]
        for product in ("gate_up", "down"):
            ours = of[product, "moe_a2a"]
            cells += [us(ours["us"]), us(of[product, "torch._grouped_mm"]["us"]), f"{ours['share_of_limit']:.0%}"]
        rows.append(cells)
    of_product = ["ours {0}", "`torch._grouped_mm` {0}", "of the limit {0}"]
    return table(["rows per expert", *(cell.format(i) for i in (1, 2) for cell in of_product)], rows)


# What a table's name stands for, and the file whose commit and date stand below it.
TABLES = {
    "all_reduce": (all_reduce, "h200_2/all_reduce"),
    "halves": (halves, "h200_2/reduce_scatter"),
    "layer": (layer, "h200_2/layer"),
    "experts": (experts, "h200_1/experts"),
}


def block(name: str) -> str:
    make, file = TABLES[name]
    about = results(file)["about"]
    when = about["date"].split()[0]
    return f"{make()}\n{about['ranks']} x {about['machine']}, commit {about['versions']['commit']}, {when}.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table differs")
    options = parser.parse_args()
    num_different = 0
    for page in PAGES:
        path = ROOT / page
        before = path.read_text()
        after = BLOCK.sub(lambda match: match[1] + block(match["name"]) + match[3], before)
        if after == before:
            continue
        num_different += 1
        if options.check:
            sys.stdout.writelines(
                difflib.unified_diff(before.splitlines(True), after.splitlines(True), page, "results")
            )
        else:
            path.write_text(after)
            print(f"{page}: rewritten")
    return 1 if options.check and num_different else 0


if __name__ == "__main__":
    sys.exit(main())
