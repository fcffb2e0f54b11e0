"""Checks the machine code that nvcc makes of the kernels: check_sass.py dispatch_kernels.o..., with cuobjdump in PATH

An LL word is stored and loaded whole (comm/ll_word.h). PTX promises one access, but ptxas turns a relaxed load of 16 bytes
into one per part that is used, so a new stamp may come with old data. In these kernels only loads of LL words are
system-scope loads from addresses that are known to be global (signals are polled through generic ones).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

FUNCTION = re.compile(r"^\s*Function : (\S+)")
LOAD = re.compile(r"\b(LDG\.E\S*\.SYS)\b")
WHOLE = "LDG.E.128.STRONG.SYS"


def loads(listing: str) -> dict[str, Counter[str]]:
    """Per function, how many system-scope loads of each kind."""
    found: dict[str, Counter[str]] = {}
    name = ""
    for line in listing.splitlines():
        if match := FUNCTION.match(line):
            name = match[1]
        elif match := LOAD.search(line):
            found.setdefault(name, Counter())[match[1]] += 1
    return found


def problems(of_function: dict[str, Counter[str]]) -> list[str]:
    return [
        f"{name}: {count} x {load}, part of an LL word; {WHOLE} expected"
        for name, kinds in of_function.items()
        for load, count in kinds.items()
        if load != WHOLE
    ]


def loads_of_file(path: str) -> dict[str, Counter[str]]:
    return loads(subprocess.run(["cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout)


def main(arguments: list[str]) -> int:
    num_words, found = 0, []
    with ProcessPoolExecutor() as pool:
        for path, of_function in zip(arguments, pool.map(loads_of_file, arguments), strict=True):
            num_words += sum(kinds[WHOLE] for kinds in of_function.values())
            found += [f"{path}: {problem}" for problem in problems(of_function)]
    if num_words == 0:
        found.append(f"no load of an LL word in {len(arguments)} files")
    print("\n".join(found) if found else f"{num_words} loads of LL words in {len(arguments)} files, each one access")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
