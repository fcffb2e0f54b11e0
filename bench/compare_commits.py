#!/usr/bin/env python3
"""Measures two checkouts of this project alternately on one machine and prints the ratio of their times.

    git worktree add ../before <commit>
    python bench/compare_commits.py ../before . --build -- --tokens 8,128,4096 --modes rows,fp8+presummed --baselines none

Arguments after `--` go to `python -m moe_a2a bench dispatch_combine`, the same for both. Each checkout runs once per round,
and the order changes from round to round, so that drift of the machine's speed affects both. `us` is the median over the
rounds, the range that of the rounds' ratios: a difference smaller than the range is noise. `blocks` are those of before and
after: each checkout chooses its own unless --blocks names them.

--build compiles both for the running interpreter's PyTorch, at the same time, and puts each extension into its
checkout's package folder; without it they must have been built there. Needs cmake and ninja, no installation: editable
installations of either are bypassed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

KEY = ("tokens", "hidden", "topk", "experts", "dtype", "routing", "system", "mode", "launch", "step")
Run = list[dict[str, Any]]  # the records of one run of the benchmark
# An editable installation's finder comes before PYTHONPATH.
BYPASS = 'import sys\nsys.meta_path[:] = [f for f in sys.meta_path if "moe_a2a" not in type(f).__module__]\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the checkout to compare with")
    parser.add_argument("after", type=Path, help="the changed checkout")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each checkout (default: 3)")
    parser.add_argument("--build", action="store_true", help="compile both checkouts first")
    parser.add_argument(
        "--cmake", action="append", default=[], metavar="OPTION", help="for the build, e.g. -DNAME=VALUE"
    )
    parser.add_argument(
        "--limit", type=float, metavar="PERCENT", help="exit with 1 if any row is slower by more than this"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep the runs' JSON files here")
    own, bench_options = split_at_dashes(sys.argv[1:])
    options = parser.parse_args(own)
    checkouts = [options.before.resolve(), options.after.resolve()]
    if options.build:
        build(checkouts, options.cmake)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "sitecustomize.py").write_text(BYPASS)
        for checkout in checkouts:
            require_own_package(checkout, scratch)
        results = options.results or Path(scratch)
        results.mkdir(parents=True, exist_ok=True)
        runs: list[list[Run]] = [[], []]
        for number in range(options.rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                path = results / f"round_{number}_{('before', 'after')[which]}.json"
                measure(checkouts[which], scratch, path, bench_options)
                runs[which].append(json.loads(path.read_text())["records"])
    return print_table(*runs, options.limit)


def split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def build(checkouts: list[Path], cmake_options: list[str]) -> None:
    jobs = max(1, (os.cpu_count() or 2) // 2)
    script = (
        'set -e; cmake -S "$0" -B "$1" -G Ninja -DPython_EXECUTABLE="$2" "${@:4}" >"$1.log" 2>&1; '
        'cmake --build "$1" --target _core -j"$3" >>"$1.log" 2>&1'
    )
    started = []
    for checkout in checkouts:
        folder = checkout / "build" / "compare"
        folder.parent.mkdir(exist_ok=True)
        command = ["bash", "-c", script, checkout, folder, sys.executable, str(jobs), *cmake_options]
        started.append((checkout, folder, subprocess.Popen(list(map(str, command)))))
    for checkout, folder, process in started:
        if process.wait() != 0:
            log = Path(f"{folder}.log").read_text().splitlines()
            sys.exit("\n".join([*log[-30:], f"{checkout} does not build; the whole log: {folder}.log"]))
        for built in [*folder.glob("_core*.so"), *folder.glob("_build_info.py")]:
            shutil.copy(built, checkout / "moe_a2a")


def environment(checkout: Path, scratch: str) -> dict[str, str]:
    paths = filter(None, [scratch, str(checkout), os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def require_own_package(checkout: Path, scratch: str) -> None:
    query = [sys.executable, "-c", "import torch, moe_a2a._core; print(moe_a2a._core.__file__)"]
    done = subprocess.run(query, cwd=checkout, env=environment(checkout, scratch), capture_output=True, text=True)
    if done.returncode != 0 or not Path(done.stdout.strip()).is_relative_to(checkout):
        sys.exit(f"{checkout} has no extension of its own; pass --build\n{done.stdout}{done.stderr}")


def measure(checkout: Path, scratch: str, path: Path, bench_options: list[str]) -> None:
    bench = ("-m", "moe_a2a", "bench", "dispatch_combine", "--json", str(path.resolve()), *bench_options)
    command = [sys.executable, *bench]
    done = subprocess.run(command, cwd=checkout, env=environment(checkout, scratch), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}\nthe benchmark of {checkout} failed")


def by_case(runs: list[Run], names: tuple[str, ...]) -> dict[tuple, Run]:
    """The records of all rounds that have the same values under these names."""
    found: dict[tuple, Run] = {}
    for record in (record for run in runs for record in run):
        found.setdefault(tuple(record[name] for name in names), []).append(record)
    return found


def print_table(before_runs: list[Run], after_runs: list[Run], limit: float | None) -> int:
    # With several numbers of blocks, a run has several records of a case.
    is_unique = all(len(by_case([run], KEY)) == len(run) for run in before_runs + after_runs)
    names = KEY if is_unique else (*KEY, "blocks")
    before, after = by_case(before_runs, names), by_case(after_runs, names)
    print(f"{'tokens':>6} {'shape':>14} {'dtype':>9} {'routing':>9} {'mode':>15} {'launch':>14} {'step':>13} {'blocks':>9}"
          f" {'before us':>10} {'after us':>10} {'ratio':>6}  range")  # fmt: skip
    slower = []
    for key in before:
        row = dict(zip(names, key, strict=True))
        if row["system"] != "moe_a2a" or key not in after:
            continue
        ratios = [b["median_us"] / a["median_us"] for a, b in zip(before[key], after[key], strict=True)]
        a, b = (statistics.median(r["median_us"] for r in records[key]) for records in (before, after))
        blocks = " / ".join(str(records[key][0]["blocks"] or "") for records in (before, after))
        mark = ""
        if limit is not None and b > a * (1 + limit / 100):
            slower.append(key)
            mark = "  slower"
        shape = f"{row['hidden']}/{row['topk']}/{row['experts']}"
        print(f"{row['tokens']:>6} {shape:>14} {row['dtype']:>9} {row['routing']:>9} {row['mode']:>15} {row['launch']:>14}"
              f" {row['step']:>13} {blocks:>9} {a:>10.1f} {b:>10.1f} {b / a:>6.3f}"
              f"  {min(ratios):.3f} to {max(ratios):.3f}{mark}")  # fmt: skip
    for key in before.keys() ^ after.keys():
        print("in one of the two only:", *key)
    if limit is not None:
        print(f"{len(slower)} of {len(before)} rows slower by more than {limit:g} %")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
