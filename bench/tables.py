#!/usr/bin/env python3
"""Writes the tables of measurements in README.md and docs from the JSON files in bench/results.

    python bench/tables.py             # rewrites the text between <!-- table NAME --> and <!-- end of table -->
    python bench/tables.py --check     # exit code 1, and the differences, if a table does not match its file

Times are microseconds. `python -m moe_a2a bench` writes the files; each names the commit that it was run on.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from layer_tables import (
    data_parallel_calls,
    data_parallel_steps,
    experts,
    fused_combine,
    layer,
    layer_alone,
    layer_of_models,
    training,
)
from table_text import ROOT, results, table, us

PAGES = ["README.md", *(f"docs/{page}.md" for page in ("benchmarks", "collectives", "experts", "torch_distributed"))]
BLOCK = re.compile(r"(<!-- table (?P<name>[\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def times_by_size(name: str) -> dict[int, dict[str, float]]:
    times: dict[int, dict[str, float]] = {}
    for line in results(name)["lines"]:
        times.setdefault(line["size"], {})[line["system"]] = line["time_us"]
    return times


def measured_in(times: dict[int, dict[Any, Any]]) -> set[Any]:
    """The systems of all rows, which are those of the first."""
    return set(next(iter(times.values())))


def all_reduce(name: str) -> str:
    times = times_by_size(name)
    systems = {
        "`all_reduce`": ["moe_a2a auto"],
        '`algorithm="direct"`': ["moe_a2a direct"],
        "NCCL": ["nccl"],
        "`symm_mem`": ["symm_mem one_shot", "symm_mem two_shot"],
        '`codec="q8"`': ["moe_a2a two_shot q8"],
        '`codec="q4"`': ["moe_a2a two_shot q4"],
    }
    measured = measured_in(times)
    rows = [
        [title] + [us(min(of[s] for s in names)) for of in times.values()]
        for title, names in systems.items()
        if measured.issuperset(names)
    ]
    return table(["KiB", *(str(size >> 10) for size in times)], rows)


def against_gloo(name: str) -> str:
    """us of all_reduce / gloo, and their ratio, by size; of direct calls too."""
    rows, sizes = [], []
    for dtype in ("float32", "bfloat16"):
        lines = [line for line in results(name)["lines"] if line["dtype"] == dtype]
        sizes = sorted({line["size"] for line in lines})
        times: dict[str, list[float]] = {}
        for line in lines:
            times.setdefault(line["system"], []).append(line["time_us"])
        systems = {dtype: "moe_a2a auto"}
        if "moe_a2a direct" in times:
            systems[f"{dtype}, direct"] = "moe_a2a direct"
        for title, system in systems.items():
            pairs = list(zip(times[system], times["gloo"], strict=True))
            rows.append([title, *(f"{us(a)} / {us(b)}" for a, b in pairs)])
            rows.append(["times as fast", *(f"{b / a:.1f}" if b < 10 * a else f"{b / a:.0f}" for a, b in pairs)])
    return table(["KiB", *(str(size >> 10) for size in sizes)], rows)


def halves(file: str) -> str:
    folder = file.split("/")[0]
    kinds = {kind: times_by_size(f"{folder}/{kind}") for kind in ("reduce_scatter", "all_gather")}
    titles = {"moe_a2a": "", "moe_a2a direct": " / direct", "nccl": " / NCCL"}
    measured = measured_in(kinds["all_gather"])
    systems = [system for system in titles if system in measured]
    rows = [
        [f"`{kind}`" + "".join(titles[system] for system in systems)]
        + [" / ".join(us(of[system]) for system in systems) for of in times.values()]
        for kind, times in kinds.items()
    ]
    return table(["KiB of all ranks", *(str(size >> 10) for size in kinds["all_gather"])], rows)


# ---- dispatch and combine

OURS = "moe_a2a"
Find = Callable[..., str]


def first_measured(
    records: list[dict[str, Any]], system: str, step: str, modes: Iterable[str]
) -> dict[str, Any] | None:
    """The record of the first measured mode, captured rather than eager."""
    for mode in modes:
        found = [r for r in records if (r["system"], r["step"], r["mode"]) == (system, step, mode)]
        if found:
            return max(found, key=lambda r: r["launch"] == "graph")
    return None


def dispatch_combine(name: str, columns: Callable[[Find], list[str]]) -> list[list[str]]:
    """A row per number of tokens. columns(find): find(system, step, *modes) is the time of the first measured mode, captured
    rather than eager; "" if none was measured."""
    of_row: dict[int, list[dict[str, Any]]] = {}
    for record in results(name)["records"]:
        if record["part"] == "tokens" and record["launch"] in ("graph", "eager"):
            of_row.setdefault(record["tokens"], []).append(record)

    def row(records: list[dict[str, Any]]) -> list[str]:
        def find(system: str, step: str, *modes: str, what: str = "median_us") -> str:
            record = first_measured(records, system, step, modes)
            return us(record[what]) if record else ""

        return columns(find)

    return [[str(key), *row(of_row[key])] for key in sorted(of_row)]


def joined(*cells: str) -> str:
    return " / ".join(cell or "-" for cell in cells) if any(cells) else ""


OURS_COLUMNS = ["dispatch bf16 / fp8", "combine: sums in `combine()` / presummed"]


def of_ours(find: Find) -> list[str]:
    return [
        joined(find(OURS, "dispatch", "rows", "presummed"), find(OURS, "dispatch", "fp8+presummed")),
        joined(find(OURS, "combine", "rows"), find(OURS, "combine", "presummed", "fp8+presummed")),
    ]


# The programs of gloo that by_tokens() shows: system and title.
PROGRAMS = {"sort + all_to_all": "sort + all_to_all", "all_gather + reduce_scatter": "all-gather / reduce-scatter"}


def by_tokens(name: str) -> str:
    def columns(find: Find) -> list[str]:
        floor = [find(OURS, "dispatch", mode, what="floor_us") for mode in ("rows", "fp8+presummed")]
        times = [[find(f"{system}, gloo", step, "rows") for step in ("dispatch", "combine")] for system in PROGRAMS]
        return [
            *of_ours(find),
            joined(*floor, find(OURS, "combine", "rows", what="floor_us")),
            *(joined(*of) for of in times),
        ]

    header = ["tokens per rank", *OURS_COLUMNS, "floor: dispatch bf16 / fp8 / combine"]
    header += [f"{title}, gloo" for title in PROGRAMS.values()]
    return table(header, dispatch_combine(name, columns))


BARE_NCCL = "bare all_gather + reduce_scatter, NCCL"
REGISTERED_NCCL = "registered all_gather + reduce_scatter, NCCL"


def with_deep_ep(name: str) -> str:
    def columns(find: Find) -> list[str]:
        def of_rows(system: str, what: str = "median_us") -> tuple[str, str]:
            """Dispatch and combine of rows in bf16; whether the caller has summed matters to the combine only."""
            return (
                find(system, "dispatch", "presummed", "rows", what=what),
                find(system, "combine", "presummed", "fp8+presummed", what=what),
            )

        of = []
        for system in (OURS, "DeepEP V2", "DeepEP V1 normal"):
            dispatch, combine = of_rows(system)
            of.append(joined(dispatch, find(system, "dispatch", "fp8+presummed"), combine))
        for system, mode in others.values():
            of.append(joined(*(find(system, step, mode) for step in ("dispatch", "combine"))))
        return [*of, joined(*of_rows(OURS, "floor_us"))]

    measured = {record["system"] for record in results(name)["records"]}
    others = {
        "DeepEP V1 low-latency, fp8": ("DeepEP V1 low-latency", "fp8"),
        "NCCL all-gather / reduce-scatter": (BARE_NCCL, "rows"),
        "on registered memory": (REGISTERED_NCCL, "rows"),
    }
    others = {title: of for title, of in others.items() if of[0] in measured}
    systems = [f"{name}: dispatch bf16 / fp8 / combine" for name in ("moe_a2a", "DeepEP V2", "DeepEP V1 normal")]
    return table(["tokens per rank", *systems, *others, "floor bf16"], dispatch_combine(name, columns))


def summary(name: str) -> str:
    """README's table: dispatch and combine of 4096 tokens, by system."""
    systems = {
        "moe_a2a": OURS,
        "DeepEP V2": "DeepEP V2",
        "DeepEP V1, normal mode": "DeepEP V1 normal",
        "NCCL, all-gather / reduce-scatter": BARE_NCCL,
    }
    records = [r for r in results(name)["records"] if (r["tokens"], r["part"]) == (4096, "tokens")]

    def cell(record: dict[str, Any] | None, what: str = "median_us") -> str:
        return us(record[what]) if record else ""

    columns = [
        ("dispatch", ("presummed", "rows")),
        ("dispatch", ("fp8+presummed",)),
        ("combine", ("presummed", "fp8+presummed", "rows")),
    ]
    rows = []
    for title, system in systems.items():
        of = [first_measured(records, system, step, modes) for step, modes in columns]
        blocks = joined(*(str(record and record["blocks"] or "") for record in (of[0], of[2])))
        rows.append([title, blocks or "its own choice", *map(cell, of)])
    floors = [first_measured(records, OURS, step, modes) for step, modes in columns]
    rows.append(["floor: a bare push of the same rows", "132", *(cell(record, "floor_us") for record in floors)])
    return table(["", "SMs, dispatch / combine", "dispatch bf16", "dispatch fp8", "combine bf16"], rows)


def chains(name: str) -> str:
    """us per pair of dispatch and combine, ten pairs in a captured graph."""
    systems = {
        "bf16, sums in `combine()`": (OURS, "rows"),
        "bf16, presummed": (OURS, "presummed"),
        "fp8, presummed": (OURS, "fp8+presummed"),
        "NCCL all-gather + reduce-scatter": (BARE_NCCL, "rows"),
        "NCCL, registered memory": (REGISTERED_NCCL, "rows"),
    }
    times: dict[int, dict[tuple[str, str], float]] = {}
    for record in results(name)["records"]:
        if record["launch"] == "chain":
            times.setdefault(record["tokens"], {})[record["system"], record["mode"]] = record["median_us"]
    measured = measured_in(times)
    rows = [
        [title, *(us(of[system]) for of in times.values())] for title, system in systems.items() if system in measured
    ]
    return table(["tokens per rank", *map(str, times)], rows)


def micro_batches(name: str) -> str:
    rows = [
        [line["product"], str(line["blocks"]), *(us(line[f"{name}_us"]) for name in ("product", "limited", "in_turn", "transfer", "turn")),
         *(f"{line[name]:.0%}" for name in ("slower", "beyond", "hidden_share"))]
        for line in results(name)["lines"]
    ]  # fmt: skip
    header = ["product", "blocks", "all SMs", "limited", "in turn", "transfer", "turn", "slower", "beyond", "hidden"]
    return table(header, rows)


# Each table's function, and the file that supplies its commit and date.
TABLES: dict[str, tuple[Callable[[str], str], str]] = {
    "summary": (summary, "h200_4/with_deep_ep"),
    "all_reduce": (all_reduce, "h200_2/all_reduce"),
    "all_reduce of H100": (all_reduce, "h100_2/all_reduce"),
    "all_reduce of 4": (all_reduce, "h200_4/all_reduce"),
    "halves": (halves, "h200_2/reduce_scatter"),
    "halves of 4": (halves, "h200_4/reduce_scatter"),
    "against gloo": (against_gloo, "cpu/all_reduce"),
    "layer": (layer, "h200_2/layer"),
    "layer of 4": (layer, "h200_4/layer"),
    "layer of 4 H100": (layer, "h100_4/layer"),
    "fused combine": (fused_combine, "h200_4/layer"),
    "layer of models": (layer_of_models, "h100_4/layer_of_models"),
    "training": (training, "h100_4/training"),
    "data parallel calls": (data_parallel_calls, "h100_4/data_parallel"),
    "data parallel steps": (data_parallel_steps, "h100_4/data_parallel"),
    "experts": (partial(experts, ours="moe_a2a", peers=("torch._grouped_mm", "DeepGEMM")), "h200_1/experts"),
    "experts float8": (partial(experts, ours="moe_a2a fp8", peers=("DeepGEMM fp8",)), "h200_1/experts"),
    "layer alone": (layer_alone, "h200_1/layer"),
    "tokens on the CPU": (by_tokens, "cpu/dispatch_combine"),
    "micro batches": (micro_batches, "h100_4/micro_batches"),
    "with DeepEP": (with_deep_ep, "h200_2/with_deep_ep"),
    "with DeepEP of 4": (with_deep_ep, "h200_4/with_deep_ep"),
    "with DeepEP of 4 H100": (with_deep_ep, "h100_4/with_deep_ep"),
    "chains": (chains, "h200_2/with_deep_ep"),
    "chains of 4": (chains, "h200_4/with_deep_ep"),
    "chains of 4 H100": (chains, "h100_4/with_deep_ep"),
}


def block(name: str) -> str:
    make, file = TABLES[name]
    about = results(file)["about"]
    when = about["date"].split()[0]
    commit = about["versions"]["commit"]
    of = f"commit {commit}" if commit else "commit not recorded"
    return f"{make(file)}\n{about['ranks']} x {about['machine']}, {of}, {when}.\n"


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
